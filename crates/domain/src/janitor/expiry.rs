//! When a resource that has ended is deleted: a time to live after its end.
//!
//! Annotations of the resource say otherwise: `ttl` (a duration as Go writes it; zero, or what is none,
//! keeps it), `expiry` (when it is deleted, which is also written at its end) and `preserve`.

use jiff::{SignedDuration, Timestamp};

use super::resource::Resource;

/// Returns when a resource is to be deleted; `None`: it has not ended, or is kept.
///
/// An `expiry` before its end counts as none: NVSentinel counts from when it first sees a resource.
pub(super) fn due(resource: &Resource, default: Option<SignedDuration>) -> Option<Timestamp> {
    let keep = &resource.keep;
    if keep.preserve || resource.deleting {
        return None;
    }
    let end = resource.status.completion?;
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
