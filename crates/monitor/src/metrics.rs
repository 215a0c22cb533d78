//! Metrics that each monitor has under its own name.

use prometheus_client::metrics::counter::Counter;
use runtime::metrics::{LegacyCounter, Metrics};

use super::Monitor;

pub(super) struct MonitorMetrics {
    /// Records read, the total for the other counters.
    pub(super) records: Counter,
    /// Reports that were counted into a later event.
    pub(super) repeats: Counter,
    /// Records lost before they could be read.
    pub(super) lost: Counter,
    /// Records that could not be parsed.
    pub(super) malformed: Counter,
    /// Failed attempts to write the state that must survive a restart.
    pub(super) unsaved: Counter,
    /// Events that the connector refused because of their content.
    pub(super) refused: LegacyCounter,
}

impl MonitorMetrics {
    pub(super) fn new(metrics: &Metrics, monitor: &Monitor) -> Self {
        let metrics = metrics.with_prefix(&format!("gpuwarden_{}", monitor.name.replace('-', "_")));
        let help = |end: &str| format!("{} {end}", monitor.records);
        Self {
            records: metrics.counter("records", help("read")),
            repeats: metrics.counter(
                "repeats",
                help("about a fault that were counted into a later event"),
            ),
            lost: metrics.counter(
                "lost_records",
                help("that were overwritten before they could be read"),
            ),
            malformed: metrics.counter("malformed_records", help("that could not be read")),
            unsaved: metrics.counter(
                "failed_saves",
                "Failed attempts to write what the monitor has to remember over a restart",
            ),
            refused: LegacyCounter::default(),
        }
    }
}
