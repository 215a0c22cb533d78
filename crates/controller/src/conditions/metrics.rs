//! Metrics of what is told on the nodes. The names are NVSentinel's; its label `node_name`
//! of Event operations is left out, for it grows with the cluster.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::Metrics;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabels {
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: &'static str,
    status: &'static str,
}

#[derive(Clone)]
pub(super) struct ConditionMetrics {
    conditions: Family<StatusLabels, Counter>,
    condition_time: Histogram,
    events: Family<OperationLabels, Counter>,
    event_time: Histogram,
}

impl ConditionMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self {
            conditions: Family::default(),
            condition_time: Histogram::new(exponential_buckets(10.0, 2.0, 12)),
            events: Family::default(),
            event_time: Histogram::new(exponential_buckets(10.0, 2.0, 12)),
        };
        // From the start, so that an alert on the first failure sees it grow from nought.
        for status in [status(true), status(false)] {
            drop(own.conditions.get_or_create(&StatusLabels { status }));
            for operation in ["create", "update"] {
                let labels = OperationLabels { operation, status };
                drop(own.events.get_or_create(&labels));
            }
        }
        metrics.register(|registry| {
            let registry = registry.sub_registry_with_prefix("k8s_platform_connector");
            registry.register(
                "node_condition_update",
                "Patches of a node's conditions",
                own.conditions.clone(),
            );
            registry.register(
                "node_condition_update_duration_milliseconds",
                "How long a patch of a node's conditions took",
                own.condition_time.clone(),
            );
            registry.register(
                "node_event_operations",
                "Kubernetes Events of nodes that were made or counted up",
                own.events.clone(),
            );
            registry.register(
                "node_event_update_create_duration_milliseconds",
                "How long it took to make a Kubernetes Event, or to count one up",
                own.event_time.clone(),
            );
        });
        own
    }

    pub(super) fn condition(&self, done: bool, took: Duration) {
        let labels = StatusLabels {
            status: status(done),
        };
        self.conditions.get_or_create(&labels).inc();
        self.condition_time.observe(took.as_secs_f64() * 1_000.0);
    }

    pub(super) fn event(&self, operation: &'static str, done: bool, took: Duration) {
        let labels = OperationLabels {
            operation,
            status: status(done),
        };
        self.events.get_or_create(&labels).inc();
        self.event_time.observe(took.as_secs_f64() * 1_000.0);
    }
}

fn status(done: bool) -> &'static str {
    if done { "success" } else { "failed" }
}
