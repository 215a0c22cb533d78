//! Metrics of fault quarantine. The names are NVSentinel's; docs/compatibility.md explains why
//! some of its metrics are missing.

mod drain;
mod nodes;
mod remediation;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::keys;
use fleet::RuleSetOutcome;
use fleet::session::Intent;
use fleet::view::FleetView;
use jiff::SignedDuration;
use model::node::NodeChange;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{Group, Labels};
use tokio::time::Instant;

pub(super) use drain::DrainMetrics;
pub(super) use nodes::NodeMetrics;
pub(super) use remediation::RemediationMetrics;

/// Default buckets of Prometheus, as in NVSentinel (seconds).
const BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Time after which the counters of a node that is gone are no longer shown: with names that
/// never return, as in an autoscaled fleet, they would grow for ever. Every scraper has the
/// values by then.
const GONE: Duration = Duration::from_secs(24 * 60 * 60);

runtime::metrics! {
    #[derive(Clone)]
    pub(super) struct QuarantineMetrics {
        /// Events taken from the feed.
        pub(super) received: Counter = "fault_quarantine_events_received",
        /// Events recorded in the fault book.
        pub(super) processed: Counter = "fault_quarantine_events_successfully_processed",
        /// Errors of processing, by kind.
        errors: Family<Labels<1>, Counter> = "fault_quarantine_processing_errors" {error_type},
        /// Nodes taken out of service.
        quarantined: Family<Labels<1, String>, Counter> =
            "fault_quarantine_nodes_quarantined" {node},
        /// Nodes returned to service.
        unquarantined: Family<Labels<1, String>, Counter> =
            "fault_quarantine_nodes_unquarantined" {node},
        /// Nodes that somebody uncordoned by hand.
        manually_uncordoned: Family<Labels<1, String>, Counter> =
            "fault_quarantine_nodes_manually_uncordoned" {node},
        /// Nodes whose quarantine taint was removed by hand.
        manually_untainted: Family<Labels<1, String>, Counter> =
            "fault_quarantine_nodes_manually_untainted" {node},
        /// Nodes with counters, and when each left the cluster.
        counted: Arc<Mutex<BTreeMap<String, Option<Instant>>>>,
        /// 1 for each node that is out of service.
        current: Family<Labels<1, String>, Gauge> =
            "fault_quarantine_current_quarantined_nodes" {node},
        shown: Arc<Mutex<BTreeSet<String>>>,
        /// Taints added to nodes.
        taints_applied: Family<Labels<2, String>, Counter> =
            "fault_quarantine_taints_applied" {taint_key, taint_effect},
        /// Taints removed from nodes.
        taints_removed: Family<Labels<2, String>, Counter> =
            "fault_quarantine_taints_removed" {taint_key, taint_effect},
        /// Cordons made on nodes.
        cordons_applied: Counter = "fault_quarantine_cordons_applied",
        /// Cordons removed from nodes.
        cordons_removed: Counter = "fault_quarantine_cordons_removed",
        /// Rule sets evaluated: `passed`, `failed`.
        evaluations: Family<Labels<2, String>, Counter> =
            "fault_quarantine_ruleset_evaluations" {ruleset, status},
        /// From reading an event from the feed to its decision.
        handling: Histogram = "fault_quarantine_event_handling_duration_seconds"(BUCKETS),
        /// From the time of the oldest fault until its node was out of service.
        quarantine: Histogram = "fault_quarantine_node_quarantine_duration_seconds"(BUCKETS),
        /// Events that are stored and not processed yet.
        backlog: Gauge = "fault_quarantine_event_backlog_count",
        /// 1 for the state of the circuit breaker: `CLOSED`, `TRIPPED`.
        breaker_state: Family<Labels<1>, Gauge> = "fault_quarantine_breaker_state" {state},
        /// Share of the fullest limit on quarantines that is used; 1 is full.
        breaker_utilization: Gauge<f64, AtomicU64> = "fault_quarantine_breaker_utilization",
        /// Nodes that the brake or a pause holds back from being taken out of service.
        held: Gauge = "gpuwarden_quarantine_held_nodes",
        /// Time since the fault book could last be saved; 0 if it is saved.
        unsaved: Gauge = "gpuwarden_quarantine_unsaved_seconds",
        /// Faults that were refused or dropped, because the fault book is full.
        overflow: Counter = "gpuwarden_fault_book_overflow",
        /// Taints that single devices have by rules of ours, by key and effect.
        device_taints: Family<Labels<2, String>, Gauge> =
            "gpuwarden_device_taints" {taint_key, taint_effect},
        /// Taints that were shown since the start.
        tainted: Arc<Mutex<BTreeSet<Labels<2, String>>>>,
        /// Changes of DeviceTaintRules: `written`, `deleted`, `conflict`, `failed`.
        rule_changes: Family<Labels<1>, Counter> = "gpuwarden_device_taint_rule_changes" {result},
    }
}

/// Returns the descriptions of the metrics of quarantines, drains and remediations.
pub(super) fn described() -> [Group; 3] {
    let quarantine = QuarantineMetrics::described().into_iter();
    [
        Group::new("quarantine", quarantine.chain(NodeMetrics::described())),
        Group::new("drain", DrainMetrics::described()),
        Group::new("remediation", RemediationMetrics::described()),
    ]
}

impl QuarantineMetrics {
    pub(super) fn error(&self, kind: &'static str) {
        self.errors.get_or_create(&[("error_type", kind)]).inc();
    }

    /// Counts events that a decision covers, `took` after they were read from the feed.
    pub(super) fn handled(&self, events: u32, took: Duration) {
        for _ in 0..events {
            self.handling.observe(took.as_secs_f64());
        }
    }

    /// Counts a node that was taken out of service, `took` after its fault.
    pub(super) fn taken_out(&self, took: SignedDuration) {
        // A fault in the future comes from a clock that is ahead.
        self.quarantine.observe(took.as_secs_f64().max(0.0));
    }

    /// Sets the time since the fault book could last be saved.
    pub(super) fn unsaved(&self, duration: Duration) {
        let seconds = duration.as_secs();
        self.unsaved.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }

    pub(super) fn backlog(&self, events: u64) {
        self.backlog.set(i64::try_from(events).unwrap_or(i64::MAX));
    }

    /// Sets the number of faults that found no room so far. Returns the number of new ones.
    pub(super) fn overflow(&self, total: u64) -> u64 {
        let new = total.saturating_sub(self.overflow.get());
        self.overflow.inc_by(new);
        new
    }

    /// Counts a change of a rule by its result.
    pub(super) fn rule_changed(&self, result: &'static str) {
        self.rule_changes.get_or_create(&[("result", result)]).inc();
    }

    /// Sets the number of devices per taint.
    fn devices(&self, view: &FleetView) {
        let devices = view.nodes.iter().flat_map(|node| &node.devices);
        let mut counts: BTreeMap<Labels<2, String>, i64> = BTreeMap::new();
        for taint in devices.flat_map(|device| &device.taints) {
            let Some((rest, effect)) = taint.rsplit_once(':') else {
                continue;
            };
            let key = rest.split_once('=').map_or(rest, |(key, _)| key);
            *counts.entry(taint_labels(key, effect)).or_default() += 1;
        }
        let mut tainted = lock(&self.tainted);
        tainted.extend(counts.keys().cloned());
        for labels in tainted.iter() {
            let count = counts.get(labels).copied().unwrap_or_default();
            self.device_taints.get_or_create(labels).set(count);
        }
    }

    pub(super) fn evaluated(&self, outcomes: &[RuleSetOutcome]) {
        for outcome in outcomes {
            let status = if outcome.passed { "passed" } else { "failed" };
            let labels = [
                ("ruleset", outcome.rule_set.clone()),
                ("status", status.to_owned()),
            ];
            self.evaluations.get_or_create(&labels).inc();
        }
    }

    pub(super) fn applied(&self, node: &str, intent: Intent, change: &NodeChange) {
        lock(&self.counted).insert(node.to_owned(), None);
        let node = labels(node);
        // A change of only devices does not touch the node's label.
        let state = change.labels.get(keys::STATE_LABEL);
        match intent {
            Intent::Quarantine | Intent::Update if matches!(state, Some(Some(_))) => {
                let _ = self.quarantined.get_or_create(&node).inc();
            }
            Intent::Return | Intent::Update if state.is_some() => {
                let _ = self.unquarantined.get_or_create(&node).inc();
            }
            Intent::StandDown if change.annotations.contains_key(keys::UNTAINTED_MANUALLY) => {
                let _ = self.manually_untainted.get_or_create(&node).inc();
            }
            Intent::StandDown => drop(self.manually_uncordoned.get_or_create(&node).inc()),
            Intent::Quarantine | Intent::Update | Intent::Return => {}
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
                let labels = taint_labels(&taint.key, &taint.effect);
                family.get_or_create(&labels).inc();
            }
        }
    }

    /// Removes the counters of nodes that have been gone for [`GONE`].
    pub(super) fn forget_gone(&self, is_there: impl Fn(&str) -> bool) {
        lock(&self.counted).retain(|name, gone_since| {
            if is_there(name) {
                *gone_since = None;
                return true;
            }
            if gone_since.get_or_insert_with(Instant::now).elapsed() < GONE {
                return true;
            }
            let node = labels(name);
            for family in [
                &self.quarantined,
                &self.unquarantined,
                &self.manually_uncordoned,
                &self.manually_untainted,
            ] {
                family.remove(&node);
            }
            false
        });
    }

    /// Sets the gauges of nodes and devices out of service, and of the brake.
    pub(super) fn current(&self, view: &FleetView, utilization: f64) {
        self.devices(view);
        if let Some(brake) = &view.brake {
            for state in [keys::BREAKER_CLOSED, keys::BREAKER_TRIPPED] {
                let current = i64::from(brake.state == state);
                let gauge = self.breaker_state.get_or_create(&[("state", state)]);
                gauge.set(current);
            }
            self.breaker_utilization.set(utilization);
            self.held.set(i64::try_from(brake.held).unwrap_or(i64::MAX));
        }
        let now: BTreeSet<String> = view
            .nodes
            .iter()
            .filter(|node| node.state.is_out())
            // Sessions of another gpuwarden are in its own metrics.
            .filter(|node| (node.session.as_ref()).is_none_or(|one| one.another.is_none()))
            .map(|node| node.name.clone())
            .collect();
        let mut shown = lock(&self.shown);
        for gone in shown.difference(&now) {
            self.current.remove(&labels(gone));
        }
        for node in now.difference(&shown) {
            self.current.get_or_create(&labels(node)).set(1);
        }
        *shown = now;
    }
}

/// Returns the labels of a node's metric.
fn labels(node: &str) -> Labels<1, String> {
    [("node", node.to_owned())]
}

fn taint_labels(key: &str, effect: &str) -> Labels<2, String> {
    [
        ("taint_key", key.to_owned()),
        ("taint_effect", effect.to_owned()),
    ]
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
