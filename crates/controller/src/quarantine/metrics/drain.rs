//! Metrics of drains. The names are NVSentinel's.

use std::time::Duration;

use cluster::ApiError;
use fleet::status::StatusUpdate;
use model::status::SessionChange;
use model::status::eviction::EvictionStatus;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{Labels, LegacyCounter};

/// Upper bounds of the buckets, from half the latency of an idle API server (seconds).
const BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

runtime::metrics! {
    #[derive(Clone)]
    pub(in crate::quarantine) struct DrainMetrics {
        /// Pods that were not removed: `PDB_blocking_eviction_error` (a disruption budget keeps
        /// the pod), `immediate_eviction_error`, `pods_force_deletion_error`.
        errors: Family<Labels<2, String>, Counter> =
            "node_drainer_processing_errors" {error_type, node},
        /// Pods that were evicted.
        evicted: Family<Labels<1, String>, Counter> = "gpuwarden_drain_evictions" {node},
        /// Pods that were deleted without grace.
        deleted: Family<Labels<2, String>, LegacyCounter> =
            "node_drainer_force_delete_pods_after_timeout" {node, namespace},
        /// Drains that have ended: `drained`, `cancelled`.
        ended: Family<Labels<2, String>, Counter> =
            "node_drainer_events_processed" {drain_status, node},
        /// From the request to remove a pod to its answer.
        took: Histogram = "gpuwarden_drain_removal_duration_seconds"(BUCKETS),
    }
}

// === impl DrainMetrics ===

impl DrainMetrics {
    /// Counts a drain that has ended, by the update of its events.
    pub(in crate::quarantine) fn ended(&self, update: &StatusUpdate) {
        let (node, how) = match update {
            StatusUpdate::Session {
                node,
                change: SessionChange::Drain(eviction, _),
                ..
            } if eviction.status == EvictionStatus::Succeeded => (node, "drained"),
            StatusUpdate::Ended(end) if end.session.is_some() && !end.drained => {
                (&end.node, "cancelled")
            }
            _ => return,
        };
        let labels = [("drain_status", how.to_owned()), ("node", node.clone())];
        self.ended.get_or_create(&labels).inc();
    }

    /// Counts the answer to the eviction of a pod, or to its deletion without a grace period.
    pub(in crate::quarantine) fn removed(
        &self,
        node: &str,
        namespace: &str,
        evict: bool,
        result: &Result<(), ApiError>,
        took: Duration,
    ) {
        self.took.observe(took.as_secs_f64());
        let node = ("node", node.to_owned());
        let kind = match (result, evict) {
            (Ok(()), true) => {
                self.evicted.get_or_create(&[node]).inc();
                return;
            }
            (Ok(()), false) => {
                let labels = [node, ("namespace", namespace.to_owned())];
                self.deleted.get_or_create(&labels).inc();
                return;
            }
            (Err(ApiError::Held { .. }), _) => "PDB_blocking_eviction_error",
            (Err(_), true) => "immediate_eviction_error",
            (Err(_), false) => "pods_force_deletion_error",
        };
        let labels = [("error_type", kind.to_owned()), node];
        self.errors.get_or_create(&labels).inc();
    }
}
