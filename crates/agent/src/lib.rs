//! The node's side: monitors of the machine, which report to the connector.

#![allow(
    missing_docs,
    reason = "only gpuwarden's command line and binary use this room"
)]

pub mod faults;
pub mod gpu;
pub mod kernel_log;
pub mod maintenance;
pub mod pods;
pub mod providers;

use runtime::metrics::Group;

/// Returns the descriptions of the metrics of this room.
pub fn described_metrics() -> Vec<Group> {
    vec![
        kernel_log::described_metrics(),
        gpu::described_metrics(),
        providers::described_metrics(),
    ]
}
