//! The events of a reboot that has mended faults: one healthy event per check of a monitor.
//!
//! NVSentinel sends them whenever it finds another boot id than the one it saved, and takes
//! a lost state file for a reboot. Here a boot is another one only if the id of an earlier
//! one is known. What of the open faults a reboot heals is decided where they are kept
//! (`domain/src/fault/book.rs`).

use contract::{HealthEvent, json, keys};
use host::boot::Boot;

/// The text of the events, as NVSentinel has it.
const MESSAGE: &str = "No Health Failures";

/// Returns an event of a check as the one by which a boot closes what the check had found. It is
/// named by the boot: sent again, it is stored once.
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
