//! Deletion of ended resources after a time to live.
//!
//! Annotations of the resource override the default: `ttl` (a duration in Go's format; zero or
//! an invalid one keeps the resource), `expiry` (the time of deletion, which is also written at
//! the end) and `preserve`.

use jiff::{SignedDuration, Timestamp};

use super::MaintenanceResource;

const TTL: &str = "nvsentinel.nvidia.com/ttl";
const PRESERVE: &str = "nvsentinel.nvidia.com/preserve";
/// Annotation with the time of deletion.
pub const EXPIRY: &str = "nvsentinel.nvidia.com/expiry";

/// Annotations about the lifetime of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Keep {
    ttl: Option<String>,
    expiry: Option<String>,
    preserve: bool,
}

/// Action for a resource that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// Set the annotation [`EXPIRY`] to this value.
    Announce(String),
    /// Delete the resource, if it has this uid.
    Delete(String),
}

// === impl Keep ===

impl Keep {
    pub(super) fn read(annotation: impl Fn(&str) -> Option<String>) -> Self {
        Self {
            ttl: annotation(TTL),
            expiry: annotation(EXPIRY),
            preserve: annotation(PRESERVE).as_deref() == Some("true"),
        }
    }
}

// === impl MaintenanceResource ===

impl MaintenanceResource {
    /// Returns the time of deletion. `None` if the resource has not ended, or is kept.
    ///
    /// An `expiry` before the end counts as absent: NVSentinel computes one when it first
    /// observes a resource.
    pub(crate) fn due(&self, default: Option<SignedDuration>) -> Option<Timestamp> {
        let keep = &self.keep;
        if keep.preserve || self.deleted_at.is_some() {
            return None;
        }
        let end = self.status.completion?;
        let written: Option<Timestamp> = keep.expiry.as_ref().and_then(|text| text.parse().ok());
        if let Some(written) = written.filter(|time| *time >= end) {
            return Some(written);
        }
        let ttl = match &keep.ttl {
            None => default?,
            Some(text) => text.parse::<SignedDuration>().ok()?,
        };
        let ttl = Some(ttl).filter(SignedDuration::is_positive)?;
        end.checked_add(ttl).ok()
    }

    /// Returns the action for a resource that is to be deleted at `due`.
    pub(crate) fn expiry(&self, due: Timestamp, now: Timestamp) -> Option<Expiry> {
        if due <= now {
            return Some(Expiry::Delete(self.uid.clone()));
        }
        let text = due.to_string();
        (self.keep.expiry.as_ref() != Some(&text)).then_some(Expiry::Announce(text))
    }
}
