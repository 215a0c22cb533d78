//! Metrics of the labels of nodes. The names are those of NVSentinel's labeler.

use std::time::Duration;

use labels::{Board, Learned, Skip};
use model::node::NodeView;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{Labels, Metrics};

runtime::metrics! {
    #[derive(Clone)]
    pub(super) struct LabelMetrics {
        /// Nodes whose labels were brought up to date: `success`, `failed`.
        events: Family<Labels<1>, Counter> = "labeler_events_processed" {status},
        /// Patches of a node's labels that failed.
        failures: Counter = "labeler_node_update_failures",
        /// Time to bring the labels of a node up to date.
        time: Histogram = "labeler_event_handling_duration_seconds"(DEFAULT_BUCKETS),
        /// Devices that a node has.
        current: Family<Labels<2, String>, Gauge> = "labeler_device_count_current" {node, class},
        /// Devices that each node of a group should have, from its labels or learned.
        expected: Family<Labels<2, String>, Gauge> =
            "labeler_device_count_expected" {class, partition},
        /// Nodes whose number of devices was not known: `evaluation_error`, `missing_source`.
        skipped: Family<Labels<2, String>, Counter> =
            "labeler_device_count_skipped_updates" {class, reason},
    }
}

/// Buckets of histograms in Prometheus' library for Go (seconds).
const DEFAULT_BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

fn current_of(node: &str, class: &str) -> Labels<2, String> {
    [("node", node.to_owned()), ("class", class.to_owned())]
}

// === impl LabelMetrics ===

impl LabelMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // Created at the start, so that an alert on the first failure sees an increase from 0.
        for status in ["success", "failed"] {
            drop(own.events.get_or_create(&[("status", status)]));
        }
        own
    }

    /// Counts a node that was handled, and the time that it took.
    pub(super) fn handled(&self, success: bool, took: Duration) {
        let status = if success { "success" } else { "failed" };
        self.events.get_or_create(&[("status", status)]).inc();
        if !success {
            self.failures.inc();
        }
        self.time.observe(took.as_secs_f64());
    }

    /// Counts the classes whose number is not known for a node.
    pub(super) fn learned(&self, learned: &Learned) {
        for (class, skip) in &learned.skipped {
            let reason = match skip {
                Skip::Evaluation(_) => "evaluation_error",
                Skip::MissingSource => "missing_source",
            };
            let labels = [("class", class.clone()), ("reason", reason.to_owned())];
            self.skipped.get_or_create(&labels).inc();
        }
    }

    /// Shows the numbers of a node and its groups.
    pub(super) fn counted(&self, board: &Board, node: &NodeView) {
        for counted in board.counted(node) {
            let class = &counted.class.name;
            let current = self
                .current
                .get_or_create_owned(&current_of(&node.name, class));
            current.set(i64::from(counted.current));
            let group = [
                ("class", class.clone()),
                ("partition", counted.group.to_owned()),
            ];
            let expected = self.expected.get_or_create_owned(&group);
            expected.set(i64::from(counted.expected));
        }
    }

    /// Forgets a node that is gone.
    pub(super) fn gone(&self, board: &Board, node: &str) {
        for class in board.classes() {
            self.current.remove(&current_of(node, &class.name));
        }
    }
}
