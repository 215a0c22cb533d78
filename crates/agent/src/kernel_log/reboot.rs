//! What a reboot has mended: one healthy event per check of this monitor.
//!
//! NVSentinel sends them whenever it finds another boot id than the one it saved, and takes
//! a lost state file for a reboot. Here a boot is another one only if the id of an earlier
//! one is known. What of the open faults a reboot heals is decided where they are kept
//! (`domain/src/fault/book.rs`).

use contract::{EVENT_VERSION, HealthEvent, ProcessingStrategy, json, keys};
use host::boot::Boot;

/// The checks, with the component class of their faults.
const CHECKS: [(&str, &str); 4] = [
    (keys::CHECK_XID, keys::COMPONENT_GPU),
    (keys::CHECK_SXID, keys::COMPONENT_GPU),
    (keys::CHECK_GPU_FALLEN_OFF, keys::COMPONENT_GPU),
    (keys::CHECK_NIC_DRIVER, keys::COMPONENT_NIC),
];

/// The text of the events, as NVSentinel has it.
const MESSAGE: &str = "No Health Failures";

/// The healthy events of a boot. They are named by it: sent again, they are stored once.
pub(super) fn healthy_events(boot: Boot, node_name: &str) -> impl Iterator<Item = HealthEvent> {
    CHECKS.into_iter().map(move |(check, class)| HealthEvent {
        version: EVENT_VERSION,
        agent: keys::SYSLOG_AGENT.to_owned(),
        component_class: class.to_owned(),
        check_name: check.to_owned(),
        is_healthy: true,
        message: MESSAGE.to_owned(),
        metadata: [
            (keys::META_BOOT_ID.to_owned(), boot.id.to_string()),
            (keys::META_REBOOT.to_owned(), "true".to_owned()),
            (keys::META_LOG_PLACE.to_owned(), "boot".to_owned()),
        ]
        .into(),
        generated_timestamp: Some(json::proto_timestamp(boot.at)),
        node_name: node_name.to_owned(),
        processing_strategy: ProcessingStrategy::ExecuteRemediation as i32,
        ..HealthEvent::default()
    })
}
