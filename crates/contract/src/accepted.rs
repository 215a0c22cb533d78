//! Time of acceptance of an event, passed between gpuwarden's own processes.

use jiff::Timestamp;

use crate::{HealthEvent, keys};

/// Records the time of acceptance on an event, for the connector that receives it next.
pub fn mark_accepted(event: &mut HealthEvent, at: Timestamp) {
    event
        .metadata
        .insert(keys::META_ACCEPTED_AT.to_owned(), at.to_string());
}

/// Returns the time recorded by [`mark_accepted`].
pub fn accepted(event: &HealthEvent) -> Option<Timestamp> {
    event.metadata.get(keys::META_ACCEPTED_AT)?.parse().ok()
}
