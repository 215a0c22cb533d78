//! The time when an event was accepted, as it says on its way between our own processes.

use jiff::Timestamp;

use crate::{HealthEvent, keys};

/// Notes on an event when it was accepted, for the connector that it is sent on to.
pub fn mark_accepted(event: &mut HealthEvent, at: Timestamp) {
    event
        .metadata
        .insert(keys::META_ACCEPTED_AT.to_owned(), at.to_string());
}

/// Returns the time that [`mark_accepted`] has noted.
pub fn accepted(event: &HealthEvent) -> Option<Timestamp> {
    event.metadata.get(keys::META_ACCEPTED_AT)?.parse().ok()
}
