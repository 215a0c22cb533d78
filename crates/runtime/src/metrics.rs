//! Metrics in the Prometheus text format.
//!
//! Names that NVSentinel has are kept, including those that do not end in `_total`:
//! [`LegacyCounter`] writes them as they are.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::Registry;

/// All metrics of a process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
}

/// A counter whose name is written without the suffix `_total`, as existing dashboards
/// know it. Its type is given as unknown; `PromQL` does not look at the type.
#[derive(Clone, Debug, Default)]
pub struct LegacyCounter(Counter);

// === impl Metrics ===

impl Metrics {
    /// Registers metrics; each component does so once, at its start.
    pub fn register(&self, register: impl FnOnce(&mut Registry)) {
        register(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// All metrics as text (`application/openmetrics-text`).
    pub fn encode(&self) -> String {
        let mut out = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        match text::encode(&mut out, &registry) {
            Ok(()) => out,
            // Writing into a String does not fail; a half-written page would mislead.
            Err(std::fmt::Error) => String::new(),
        }
    }
}

// === impl LegacyCounter ===

impl LegacyCounter {
    /// Adds one.
    pub fn inc(&self) {
        self.0.inc();
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

impl TypedMetric for LegacyCounter {
    const TYPE: MetricType = MetricType::Unknown;
}

impl EncodeMetric for LegacyCounter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        encoder.encode_gauge(&self.0.get())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legacy_counters_keep_their_name() {
        let metrics = Metrics::default();
        let (legacy, plain) = (LegacyCounter::default(), Counter::<u64>::default());
        metrics.register(|registry| {
            registry.register("xid_errors", "XIDs", legacy.clone());
            registry.register("events", "Events", plain.clone());
        });
        legacy.inc();
        plain.inc();
        let text = metrics.encode();
        assert!(text.contains("\nxid_errors 1\n"), "{text}");
        assert!(text.contains("\nevents_total 1\n"), "{text}");
    }
}
