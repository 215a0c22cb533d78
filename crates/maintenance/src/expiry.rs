//! When a resource that has ended is deleted: a time to live after its end.
//!
//! Annotations of the resource say otherwise: `ttl` (a duration as Go writes it; zero, or what is none,
//! keeps it), `expiry` (when it is deleted, which is also written at its end) and `preserve`.

use jiff::{SignedDuration, Timestamp};

use super::Resource;

const TTL: &str = "nvsentinel.nvidia.com/ttl";
const PRESERVE: &str = "nvsentinel.nvidia.com/preserve";
/// The annotation that says when a resource is deleted.
pub const EXPIRY: &str = "nvsentinel.nvidia.com/expiry";

/// The annotations about how long a resource is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Keep {
    ttl: Option<String>,
    expiry: Option<String>,
    preserve: bool,
}

/// What is done about a resource that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// [`EXPIRY`] becomes this.
    Say(String),
    /// It is deleted, if it has this uid.
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

// === impl Resource ===

impl Resource {
    /// Returns when it is to be deleted; `None`: it has not ended, or is kept.
    ///
    /// An `expiry` before its end counts as none: NVSentinel counts from when it first sees a resource.
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

    /// Returns what is done about it now where it is due then.
    pub(crate) fn expiry(&self, due: Timestamp, now: Timestamp) -> Option<Expiry> {
        if due <= now {
            return Some(Expiry::Delete(self.uid.clone()));
        }
        let text = due.to_string();
        (self.keep.expiry.as_ref() != Some(&text)).then_some(Expiry::Say(text))
    }
}
