//! Events of a reboot, which remediates faults: one healthy event per check of a monitor.
//!
//! NVSentinel sends them whenever it finds a boot id other than the saved one, and takes a lost
//! state file for a reboot. Here a reboot is only detected if the earlier boot id is known. The
//! fault book decides which open faults a reboot closes (`model/fault/book.rs`).

use contract::{HealthEvent, json, keys};
use host::boot::Boot;

/// Message of the events, the same as NVSentinel's.
const MESSAGE: &str = "No Health Failures";

/// Turns an event of a check into the one that closes the check's faults after a boot. The boot
/// gives the event its name, so that it is stored once even if sent again.
pub(super) fn healed(event: HealthEvent, boot: Boot) -> HealthEvent {
    HealthEvent {
        is_healthy: true,
        message: MESSAGE.to_owned(),
        metadata: [
            (keys::META_BOOT_ID.to_owned(), boot.id.to_string()),
            (keys::META_REBOOT.to_owned(), "true".to_owned()),
            (keys::META_LOG_PLACE.to_owned(), "boot".to_owned()),
        ]
        .into(),
        generated_timestamp: Some(json::proto_timestamp(boot.at)),
        ..event
    }
}
