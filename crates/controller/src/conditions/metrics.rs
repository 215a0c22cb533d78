//! Metrics of conditions and Events of nodes. The names are NVSentinel's. Its label `node_name`
//! of Event operations is left out, since it grows with the cluster.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::{Labels, Metrics};

runtime::metrics! {
    #[derive(Clone)]
    pub(super) struct ConditionMetrics {
        /// Patches of a node's conditions: `success`, `failed`.
        conditions: Family<Labels<1>, Counter> =
            "k8s_platform_connector_node_condition_update" {status},
        /// Time of a patch of a node's conditions.
        condition_time: Histogram =
            "k8s_platform_connector_node_condition_update_duration_milliseconds"(buckets()),
        /// Kubernetes Events of nodes that were created or whose count was raised: `success`,
        /// `failed`.
        events: Family<Labels<2>, Counter> =
            "k8s_platform_connector_node_event_operations" {operation, status},
        /// Time to create a Kubernetes Event, or to raise its count.
        event_time: Histogram =
            "k8s_platform_connector_node_event_update_create_duration_milliseconds"(buckets()),
    }
}

impl ConditionMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // Created at the start, so that an alert on the first failure sees an increase from 0.
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

fn buckets() -> impl Iterator<Item = f64> {
    exponential_buckets(10.0, 2.0, 12)
}

fn status(done: bool) -> (&'static str, &'static str) {
    ("status", if done { "success" } else { "failed" })
}
