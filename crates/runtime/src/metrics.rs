//! Metrics in the Prometheus text format.
//!
//! Names that NVSentinel has are kept, including those that do not end in `_total`:
//! [`LegacyCounter`] writes them as they are.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::Registry;

/// All metrics of a process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// A counter whose name is written without the suffix `_total`, as existing dashboards
/// know it. Its type is given as unknown; `PromQL` does not look at the type.
#[derive(Clone, Debug, Default)]
pub struct LegacyCounter(Counter);

/// Metrics by labels that somebody else chooses. Each is kept until the process ends, so
/// there are so many and no more: what comes beyond is counted as others. Cheap to clone.
#[derive(Clone, Debug)]
pub struct BoundedFamily<L, M> {
    family: Family<L, M>,
    known: Arc<Mutex<HashSet<L>>>,
    room: usize,
    others: L,
}

// === impl Metrics ===

impl Metrics {
    /// Registers metrics; each component does so once, at its start.
    pub fn register(&self, register: impl FnOnce(&mut Registry)) {
        register(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns [`Metrics::encode`]'s text when those who asked before have theirs: hundreds
    /// of readers at once do not keep the threads from what acts.
    pub async fn encode_in_turn(&self) -> String {
        let _turn = self.turn.lock().await;
        self.encode()
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

// === impl BoundedFamily ===

impl<L, M> BoundedFamily<L, M>
where
    L: Clone + Eq + Hash,
    M: Clone + Default,
{
    /// A family with room for so many labels, and `others` for what comes beyond.
    pub fn new(room: usize, others: L) -> Self {
        Self {
            family: Family::default(),
            known: Arc::default(),
            room,
            others,
        }
    }

    /// What is to be registered.
    pub fn family(&self) -> Family<L, M> {
        self.family.clone()
    }

    /// The metric with these labels, or that of the others.
    pub fn get(&self, labels: &L) -> M {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room =
            known.contains(labels) || (known.len() < self.room && known.insert(labels.clone()));
        drop(known);
        if has_room {
            self.family.get_or_create_owned(labels)
        } else {
            self.others()
        }
    }

    /// The metric of all that have none of their own.
    pub fn others(&self) -> M {
        self.family.get_or_create_owned(&self.others)
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

    #[test]
    fn who_chooses_labels_cannot_make_series_without_end() {
        let metrics = Metrics::default();
        let labels = |node: &str| [("node", node.to_owned())];
        let bounded = BoundedFamily::<_, Counter>::new(3, labels("other"));
        metrics.register(|registry| registry.register("repeats", "Repeats", bounded.family()));
        for node in 0..10 {
            bounded.get(&labels(&node.to_string())).inc();
            // What was known stays known.
            bounded.get(&labels("0")).inc();
        }
        bounded.others().inc();
        let text = metrics.encode();
        let mut series: Vec<&str> = text.lines().filter(|line| line.contains('{')).collect();
        series.sort_unstable();
        let series_of = |node: &str, count| format!("repeats_total{{node=\"{node}\"}} {count}");
        let expected = [("0", 11), ("1", 1), ("2", 1), ("other", 8)];
        let expected = expected.map(|(node, count)| series_of(node, count));
        assert_eq!(series, expected);
    }
}
