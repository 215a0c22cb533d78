//! Metrics of remediation. The names are NVSentinel's where it has the metric.

use std::time::Duration;

use cluster::ApiError;
use fleet::{PlannedResource, RemediationResult};
use model::attempt::AttemptOutcome;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::Labels;

/// Upper bounds of the buckets, from half the latency of an idle API server (seconds).
const BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

runtime::metrics! {
    #[derive(Clone)]
    pub(in crate::quarantine) struct RemediationMetrics {
        /// Faults with a custom resource that was created or existed already: `created`.
        processed: Family<Labels<2, String>, Counter> =
            "fault_remediation_events_processed" {cr_status, node_name},
        /// Custom resources that could not be created: `cr_creation_failed`.
        errors: Family<Labels<2, String>, Counter> =
            "fault_remediation_processing_errors" {error_type, node_name},
        /// Recommended actions that the configuration does not support.
        unsupported: Family<Labels<2, String>, Counter> =
            "fault_remediation_unsupported_actions" {action, node_name},
        /// Attempts that have ended: `succeeded`, `failed-for-now`, `failed`, `unclear`.
        ended: Family<Labels<3, String>, Counter> =
            "gpuwarden_remediation_attempts" {node_name, action, outcome},
        /// From the request to create a custom resource to its answer.
        took: Histogram = "fault_remediation_cr_generate_duration_seconds"(BUCKETS),
    }
}

// === impl RemediationMetrics ===

impl RemediationMetrics {
    /// Counts the answer to the creation of a custom resource.
    pub(in crate::quarantine) fn created<T>(
        &self,
        planned: &PlannedResource,
        result: &Result<T, ApiError>,
        took: Duration,
    ) {
        self.took.observe(took.as_secs_f64());
        let node = ("node_name", planned.node.clone());
        if result.is_ok() {
            let labels = [("cr_status", "created".to_owned()), node];
            self.processed.get_or_create(&labels).inc();
        } else {
            let labels = [("error_type", "cr_creation_failed".to_owned()), node];
            self.errors.get_or_create(&labels).inc();
        }
    }

    /// Counts the end of a remediation, or an action that is not supported.
    pub(in crate::quarantine) fn record(&self, news: RemediationResult) {
        match news {
            RemediationResult::Ended {
                node,
                action,
                outcome,
            } => {
                let outcome = match outcome {
                    AttemptOutcome::Succeeded => "succeeded",
                    AttemptOutcome::FailedForNow => "failed-for-now",
                    AttemptOutcome::Failed => "failed",
                    AttemptOutcome::Unclear => "unclear",
                };
                let outcome = ("outcome", outcome.to_owned());
                let labels = [("node_name", node), ("action", action), outcome];
                self.ended.get_or_create(&labels).inc();
            }
            RemediationResult::Unsupported { node, action } => {
                let labels = [("action", action), ("node_name", node)];
                self.unsupported.get_or_create(&labels).inc();
            }
        }
    }
}
