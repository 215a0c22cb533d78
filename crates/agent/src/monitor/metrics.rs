//! Metrics that each monitor has, by its name.

use prometheus_client::metrics::counter::Counter;
use runtime::metrics::{LegacyCounter, Metrics};

use super::Monitor;

pub(super) struct MonitorMetrics {
    /// Records read: the whole of which the others are shares.
    pub(super) records: Counter,
    /// Reports that were counted into a later event.
    pub(super) repeats: Counter,
    /// Records lost before they could be read.
    pub(super) lost: Counter,
    /// Records that could not be read.
    pub(super) malformed: Counter,
    /// Events that the connector refused for what they say.
    pub(super) refused: LegacyCounter,
}

impl MonitorMetrics {
    pub(super) fn new(metrics: &Metrics, monitor: &Monitor) -> Self {
        let own = Self {
            records: Counter::default(),
            repeats: Counter::default(),
            lost: Counter::default(),
            malformed: Counter::default(),
            refused: LegacyCounter::default(),
        };
        let begin = format!("gpuwarden_{}", monitor.name.replace('-', "_"));
        metrics.register(|registry| {
            for (name, help, counter) in [
                ("records", "read", &own.records),
                (
                    "repeats",
                    "about a fault that were counted into a later event",
                    &own.repeats,
                ),
                (
                    "lost_records",
                    "that were overwritten before they could be read",
                    &own.lost,
                ),
                (
                    "malformed_records",
                    "that could not be read",
                    &own.malformed,
                ),
            ] {
                let help = format!("{} {help}", monitor.records);
                registry.register(format!("{begin}_{name}"), help, counter.clone());
            }
        });
        own
    }
}
