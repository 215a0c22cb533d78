//! Metrics that each monitor has under its own name.

use prometheus_client::metrics::counter::Counter;
use runtime::metrics::{Description, LegacyCounter, Metrics};

use super::Monitor;

runtime::metrics! {
    /// Counts the records of a monitor, with the monitor's name as prefix.
    pub(super) struct MonitorMetrics {
        /// Records read, or looks: the total for the other counters.
        pub(super) records: Counter = "records",
        /// Records about a fault that were counted into a later event.
        pub(super) repeats: Counter = "repeats",
        /// Records that were overwritten before they could be read.
        pub(super) lost: Counter = "lost_records",
        /// Records that could not be read.
        pub(super) malformed: Counter = "malformed_records",
        /// Failed writes of the state that the monitor keeps over a restart; the status of the
        /// source has the reason.
        pub(super) unsaved: Counter = "failed_saves",
        /// Events that the connector refused because of their content.
        pub(super) refused: LegacyCounter,
    }
}

impl MonitorMetrics {
    pub(super) fn new(metrics: &Metrics, monitor: &Monitor) -> Self {
        Self::registered(&metrics.with_prefix(&prefix(monitor)))
    }
}

impl Monitor {
    /// Returns the descriptions of the metrics that every monitor has.
    pub fn described_metrics(&self) -> Vec<Description> {
        let own = MonitorMetrics::described().into_iter();
        own.map(|metric| metric.with_prefix(&prefix(self)))
            .collect()
    }
}

fn prefix(monitor: &Monitor) -> String {
    format!("gpuwarden_{}", monitor.name.replace('-', "_"))
}
