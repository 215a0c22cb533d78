//! Metrics of what is told on the nodes. The names are NVSentinel's; its label `node_name`
//! of Event operations is left out, for it grows with the cluster.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::{Labels, Metrics};

#[derive(Clone)]
pub(super) struct ConditionMetrics {
    conditions: Family<Labels<1>, Counter>,
    condition_time: Histogram,
    events: Family<Labels<2>, Counter>,
    event_time: Histogram,
}

impl ConditionMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let metrics = metrics.with_prefix("k8s_platform_connector");
        let buckets = || exponential_buckets(10.0, 2.0, 12);
        let own = Self {
            conditions: metrics.family("node_condition_update", "Patches of a node's conditions"),
            condition_time: metrics.histogram(
                "node_condition_update_duration_milliseconds",
                "How long a patch of a node's conditions took",
                buckets(),
            ),
            events: metrics.family(
                "node_event_operations",
                "Kubernetes Events of nodes that were made or counted up",
            ),
            event_time: metrics.histogram(
                "node_event_update_create_duration_milliseconds",
                "How long it took to make a Kubernetes Event, or to count one up",
                buckets(),
            ),
        };
        // From the start, so that an alert on the first failure sees it grow from nought.
        for status in [status(true), status(false)] {
            drop(own.conditions.get_or_create(&[status]));
            for operation in ["create", "update"] {
                let labels = [("operation", operation), status];
                drop(own.events.get_or_create(&labels));
            }
        }
        own
    }

    pub(super) fn condition(&self, done: bool, took: Duration) {
        self.conditions.get_or_create(&[status(done)]).inc();
        self.condition_time.observe(took.as_secs_f64() * 1_000.0);
    }

    pub(super) fn event(&self, operation: &'static str, done: bool, took: Duration) {
        let labels = [("operation", operation), status(done)];
        self.events.get_or_create(&labels).inc();
        self.event_time.observe(took.as_secs_f64() * 1_000.0);
    }
}

fn status(done: bool) -> (&'static str, &'static str) {
    ("status", if done { "success" } else { "failed" })
}
