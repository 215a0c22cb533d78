//! Metrics of fault quarantine. The names are NVSentinel's.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use domain::assess::Desired;
use domain::node::NodeChange;
use domain::policy::RuleSet;
use domain::session::Intent;
use domain::view::{FleetView, NodeState};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::Metrics;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    error_type: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeLabels {
    node: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TaintLabels {
    taint_key: String,
    taint_effect: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RuleSetLabels {
    ruleset: String,
    status: String,
}

#[derive(Clone, Default)]
pub(super) struct QuarantineMetrics {
    /// Events taken from the feed.
    pub(super) received: Counter,
    /// Events recorded in the fault book.
    pub(super) processed: Counter,
    errors: Family<ErrorLabels, Counter>,
    quarantined: Family<NodeLabels, Counter>,
    unquarantined: Family<NodeLabels, Counter>,
    manually_uncordoned: Family<NodeLabels, Counter>,
    current: Family<NodeLabels, Gauge>,
    shown: Arc<Mutex<BTreeSet<String>>>,
    taints_applied: Family<TaintLabels, Counter>,
    taints_removed: Family<TaintLabels, Counter>,
    cordons_applied: Counter,
    cordons_removed: Counter,
    evaluations: Family<RuleSetLabels, Counter>,
}

impl QuarantineMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::default();
        metrics.register(|registry| {
            let registry = registry.sub_registry_with_prefix("fault_quarantine");
            registry.register(
                "events_received",
                "Events taken from the feed",
                own.received.clone(),
            );
            registry.register(
                "events_successfully_processed",
                "Events recorded in the fault book",
                own.processed.clone(),
            );
            registry.register("processing_errors", "Errors by kind", own.errors.clone());
            registry.register(
                "nodes_quarantined",
                "Nodes taken out of service",
                own.quarantined.clone(),
            );
            registry.register(
                "nodes_unquarantined",
                "Nodes given back",
                own.unquarantined.clone(),
            );
            registry.register(
                "nodes_manually_uncordoned",
                "Nodes that somebody gave back by hand",
                own.manually_uncordoned.clone(),
            );
            registry.register(
                "current_quarantined_nodes",
                "1 for each node that is out of service",
                own.current.clone(),
            );
            registry.register("taints_applied", "Taints added", own.taints_applied.clone());
            registry.register(
                "taints_removed",
                "Taints removed",
                own.taints_removed.clone(),
            );
            registry.register("cordons_applied", "Cordons", own.cordons_applied.clone());
            registry.register(
                "cordons_removed",
                "Cordons taken back",
                own.cordons_removed.clone(),
            );
            registry.register(
                "ruleset_evaluations",
                "Rule sets evaluated, by result",
                own.evaluations.clone(),
            );
        });
        own
    }

    pub(super) fn error(&self, kind: &str) {
        self.errors
            .get_or_create(&ErrorLabels {
                error_type: kind.to_owned(),
            })
            .inc();
    }

    pub(super) fn evaluated(&self, rule_sets: &[RuleSet], desired: &Desired) {
        for rule_set in rule_sets {
            let passed = desired.rule_sets.contains(&rule_set.name);
            let labels = RuleSetLabels {
                ruleset: rule_set.name.clone(),
                status: if passed { "passed" } else { "failed" }.to_owned(),
            };
            self.evaluations.get_or_create(&labels).inc();
        }
    }

    pub(super) fn applied(&self, node: &str, intent: Intent, change: &NodeChange) {
        let node = NodeLabels {
            node: node.to_owned(),
        };
        match intent {
            Intent::Quarantine => drop(self.quarantined.get_or_create(&node).inc()),
            Intent::Release => drop(self.unquarantined.get_or_create(&node).inc()),
            Intent::StandDown => drop(self.manually_uncordoned.get_or_create(&node).inc()),
            Intent::Update => {}
        }
        match change.unschedulable {
            Some(true) => drop(self.cordons_applied.inc()),
            Some(false) => drop(self.cordons_removed.inc()),
            None => {}
        }
        for (taints, family) in [
            (&change.add_taints, &self.taints_applied),
            (&change.remove_taints, &self.taints_removed),
        ] {
            for taint in taints {
                let labels = TaintLabels {
                    taint_key: taint.key.clone(),
                    taint_effect: taint.effect.clone(),
                };
                family.get_or_create(&labels).inc();
            }
        }
    }

    /// Shows which nodes are out of service now.
    pub(super) fn current(&self, view: &FleetView) {
        let now: BTreeSet<String> = view
            .nodes
            .iter()
            .filter(|node| matches!(node.state, NodeState::Quarantined | NodeState::Releasing))
            .map(|node| node.name.clone())
            .collect();
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in shown.difference(&now) {
            self.current.remove(&NodeLabels { node: gone.clone() });
        }
        for node in now.difference(&shown) {
            self.current
                .get_or_create(&NodeLabels { node: node.clone() })
                .set(1);
        }
        *shown = now;
    }
}
