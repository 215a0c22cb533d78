//! Metrics of the object monitor. The names with `k8s_object_monitor` are NVSentinel's.

use contract::HealthEvent;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::{BoundedFamily, Labels};

/// Most series of a metric by node.
const MAX_SERIES: usize = 10_000;
/// Label of further ones.
const OTHERS: &str = "others";

runtime::metrics! {
    pub(super) struct ObjectMetrics {
        /// Objects that were reported as faults, by policy.
        matches: BoundedFamily<Labels<3, String>, Counter> =
            "k8s_object_monitor_policy_matches" {policy_name, node, resource_kind} (
                MAX_SERIES,
                [
                    ("policy_name", OTHERS.to_owned()),
                    ("node", OTHERS.to_owned()),
                    ("resource_kind", OTHERS.to_owned()),
                ],
            ),
        /// Objects that could not be judged, by policy: an error of the expression, or an unknown
        /// status. They open and close nothing.
        errors: Family<Labels<2, String>, Counter> =
            "k8s_object_monitor_policy_evaluation_errors" {policy_name, error_type},
        /// Objects that are kept.
        objects: Gauge = "gpuwarden_objects_kept",
        /// Size of what is kept of them (bytes).
        bytes: Gauge = "gpuwarden_objects_kept_bytes",
        /// Watches that fail, so that their policies find nothing; the status of the source
        /// `objects` names them.
        blind: Gauge = "gpuwarden_objects_blind_watches",
    }
}

// === impl ObjectMetrics ===

impl ObjectMetrics {
    pub(super) fn reported(&self, event: &HealthEvent) {
        if event.is_healthy {
            return;
        }
        let kind = event.entities_impacted.first();
        let kind = kind.and_then(|entity| entity.entity_type.rsplit('/').next());
        let labels = [
            ("policy_name", event.check_name.clone()),
            ("node", event.node_name.clone()),
            ("resource_kind", kind.unwrap_or_default().to_owned()),
        ];
        self.matches.get(&labels).inc();
    }

    pub(super) fn error(&self, policy: &str) {
        let labels = [
            ("policy_name", policy.to_owned()),
            ("error_type", "cel_error".to_owned()),
        ];
        self.errors.get_or_create(&labels).inc();
    }

    pub(super) fn kept(&self, objects: usize, bytes: usize, blind: usize) {
        for (gauge, number) in [
            (&self.objects, objects),
            (&self.bytes, bytes),
            (&self.blind, blind),
        ] {
            gauge.set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }
}
