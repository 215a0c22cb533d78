//! Metrics of fault quarantine. The names are NVSentinel's; where it has a metric that we
//! do not, docs/compatibility.md says why.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::keys;
use domain::fleet::RuleSetOutcome;
use domain::node::NodeChange;
use domain::session::Intent;
use domain::view::{FleetView, NodeState};
use jiff::SignedDuration;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{Labels, Metrics};
use tokio::time::Instant;

/// Prometheus's own default buckets, as NVSentinel uses them (seconds).
const BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// After so long without its node, what was counted of it is no longer shown: with names that
/// never come again, of an autoscaled fleet, it would grow for ever. Who scrapes has it by then.
const GONE: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Clone)]
pub(super) struct QuarantineMetrics {
    /// Events taken from the feed.
    pub(super) received: Counter,
    /// Events recorded in the fault book.
    pub(super) processed: Counter,
    errors: Family<Labels<1>, Counter>,
    quarantined: Family<Labels<1, String>, Counter>,
    unquarantined: Family<Labels<1, String>, Counter>,
    manually_uncordoned: Family<Labels<1, String>, Counter>,
    manually_untainted: Family<Labels<1, String>, Counter>,
    /// Nodes that were counted, with the time since which they are gone.
    counted: Arc<Mutex<BTreeMap<String, Option<Instant>>>>,
    current: Family<Labels<1, String>, Gauge>,
    shown: Arc<Mutex<BTreeSet<String>>>,
    taints_applied: Family<Labels<2, String>, Counter>,
    taints_removed: Family<Labels<2, String>, Counter>,
    cordons_applied: Counter,
    cordons_removed: Counter,
    evaluations: Family<Labels<2, String>, Counter>,
    /// From taking an event from the feed until it was decided about.
    handling: Histogram,
    /// From the time of the oldest fault until its node was out of service.
    quarantine: Histogram,
    /// Events that are stored and not taken in yet.
    backlog: Gauge,
    breaker_state: Family<Labels<1>, Gauge>,
    breaker_utilization: Gauge<f64, AtomicU64>,
    held: Gauge,
    unsaved: Gauge,
    overflow: Counter,
}

impl QuarantineMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let quarantine = metrics.with_prefix("fault_quarantine");
        Self {
            received: quarantine.counter("events_received", "Events taken from the feed"),
            processed: quarantine.counter(
                "events_successfully_processed",
                "Events recorded in the fault book",
            ),
            errors: quarantine.family("processing_errors", "Errors by kind"),
            quarantined: quarantine.family("nodes_quarantined", "Nodes taken out of service"),
            unquarantined: quarantine.family("nodes_unquarantined", "Nodes given back"),
            manually_uncordoned: quarantine.family(
                "nodes_manually_uncordoned",
                "Nodes that somebody gave back by hand",
            ),
            manually_untainted: quarantine.family(
                "nodes_manually_untainted",
                "Nodes of which somebody removed a quarantine taint by hand",
            ),
            counted: Arc::default(),
            current: quarantine.family(
                "current_quarantined_nodes",
                "1 for each node that is out of service",
            ),
            shown: Arc::default(),
            taints_applied: quarantine.family("taints_applied", "Taints added"),
            taints_removed: quarantine.family("taints_removed", "Taints removed"),
            cordons_applied: quarantine.counter("cordons_applied", "Cordons"),
            cordons_removed: quarantine.counter("cordons_removed", "Cordons taken back"),
            evaluations: quarantine.family("ruleset_evaluations", "Rule sets evaluated, by result"),
            handling: quarantine.histogram(
                "event_handling_duration_seconds",
                "From taking an event from the feed until it was decided about",
                BUCKETS,
            ),
            quarantine: quarantine.histogram(
                "node_quarantine_duration_seconds",
                "From the time of the oldest fault until its node was out of service",
                BUCKETS,
            ),
            backlog: quarantine.gauge(
                "event_backlog_count",
                "Events that are stored and not taken in yet",
            ),
            breaker_state: quarantine
                .family("breaker_state", "1 for the state of the circuit breaker"),
            breaker_utilization: quarantine.float_gauge(
                "breaker_utilization",
                "How far the fullest limit on quarantines is used up; 1 is full",
            ),
            held: metrics.gauge(
                "gpuwarden_quarantine_held_nodes",
                "Nodes that the brake or a pause holds back from being taken out of service",
            ),
            unsaved: metrics.gauge(
                "gpuwarden_quarantine_unsaved_seconds",
                "For how long the fault book could not be saved; 0 where it is",
            ),
            overflow: metrics.counter(
                "gpuwarden_fault_book_overflow",
                "Faults that were not taken in or were given up, for the book of faults is full",
            ),
        }
    }

    pub(super) fn error(&self, kind: &'static str) {
        self.errors.get_or_create(&[("error_type", kind)]).inc();
    }

    /// Counts that events were decided about, so long after they were taken from the feed.
    pub(super) fn handled(&self, events: u32, took: Duration) {
        for _ in 0..events {
            self.handling.observe(took.as_secs_f64());
        }
    }

    /// Counts that a node is out of service, so long after its fault.
    pub(super) fn taken_out(&self, took: SignedDuration) {
        // A fault of the future is a clock that runs ahead.
        self.quarantine.observe(took.as_secs_f64().max(0.0));
    }

    /// Shows that the book could not be saved for so long.
    pub(super) fn unsaved(&self, duration: Duration) {
        let seconds = duration.as_secs();
        self.unsaved.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }

    pub(super) fn backlog(&self, events: u64) {
        self.backlog.set(i64::try_from(events).unwrap_or(i64::MAX));
    }

    /// Counts that so many faults have found no room by now. Returns how many of them are new.
    pub(super) fn overflow(&self, total: u64) -> u64 {
        let new = total.saturating_sub(self.overflow.get());
        self.overflow.inc_by(new);
        new
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
        // Where only devices go out, or come back, the node's label says nothing.
        let state = change.labels.get(keys::STATE_LABEL);
        match intent {
            Intent::Quarantine | Intent::Update if matches!(state, Some(Some(_))) => {
                let _ = self.quarantined.get_or_create(&node).inc();
            }
            Intent::Release | Intent::Update if state.is_some() => {
                let _ = self.unquarantined.get_or_create(&node).inc();
            }
            Intent::StandDown if change.annotations.contains_key(keys::UNTAINTED_MANUALLY) => {
                let _ = self.manually_untainted.get_or_create(&node).inc();
            }
            Intent::StandDown => drop(self.manually_uncordoned.get_or_create(&node).inc()),
            Intent::Quarantine | Intent::Update | Intent::Release => {}
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
                let labels = [
                    ("taint_key", taint.key.clone()),
                    ("taint_effect", taint.effect.clone()),
                ];
                family.get_or_create(&labels).inc();
            }
        }
    }

    /// Shows no longer what was counted of nodes that are gone for [`GONE`].
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

    /// Shows which nodes are out of service now, and how the brake is.
    pub(super) fn current(&self, view: &FleetView, utilization: f64) {
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
            .filter(|node| matches!(node.state, NodeState::Quarantined | NodeState::Releasing))
            // Another's is in the metrics of the other.
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

/// Returns the labels of a metric of a node.
fn labels(node: &str) -> Labels<1, String> {
    [("node", node.to_owned())]
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use contract::keys::UNCORDONED_MANUALLY;
    use domain::node::Taint;
    use domain::policy::Policy;
    use domain::view::{BrakeView, NodeStatus};

    use super::*;

    /// Those that compatibility.md does not name as left out.
    const NAMES: [&str; 20] = [
        "events_received_total ",
        "events_successfully_processed_total ",
        "processing_errors_total{error_type=\"x\"} ",
        "nodes_quarantined_total{node=\"n\"} ",
        "nodes_unquarantined_total{node=\"n\"} ",
        "nodes_manually_uncordoned_total{node=\"n\"} ",
        "nodes_manually_untainted_total{node=\"n\"} ",
        "current_quarantined_nodes{node=\"n\"} ",
        "taints_applied_total{taint_key=\"k\",taint_effect=\"NoSchedule\"} ",
        "taints_removed_total{taint_key=\"k\",taint_effect=\"NoSchedule\"} ",
        "cordons_applied_total ",
        "cordons_removed_total ",
        "ruleset_evaluations_total{ruleset=\"default\",status=\"passed\"} ",
        "ruleset_evaluations_total{ruleset=\"default\",status=\"failed\"} ",
        "event_handling_duration_seconds_bucket{le=\"0.005\"} ",
        "node_quarantine_duration_seconds_bucket{le=\"0.005\"} ",
        "event_backlog_count ",
        "breaker_utilization ",
        "breaker_state{state=\"CLOSED\"} 1",
        "breaker_state{state=\"TRIPPED\"} 0",
    ];

    /// A change that sets the node's label of its state, or takes it off.
    fn labelled(state: Option<&str>) -> NodeChange {
        let state = state.map(str::to_owned);
        NodeChange {
            labels: [(keys::STATE_LABEL.to_owned(), state)].into(),
            ..NodeChange::default()
        }
    }

    /// Only devices went out and came back: the node was in service all the time.
    #[test]
    fn a_node_whose_devices_alone_are_out_is_not_counted() {
        let metrics = Metrics::default();
        let own = QuarantineMetrics::new(&metrics);
        own.applied("n", Intent::Quarantine, &NodeChange::default());
        own.applied("n", Intent::Release, &NodeChange::default());
        let text = metrics.encode();
        assert!(!text.contains("quarantined_total{node=\"n\"}"), "{text}");
    }

    #[test]
    fn faults_that_find_no_room_are_counted_once() {
        let metrics = Metrics::default();
        let own = QuarantineMetrics::new(&metrics);
        assert_eq!([0, 3, 3, 5].map(|total| own.overflow(total)), [0, 3, 0, 2]);
        let text = metrics.encode();
        assert!(
            text.contains("gpuwarden_fault_book_overflow_total 5"),
            "{text}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_counted_of_a_node_goes_a_day_after_it() {
        let metrics = Metrics::default();
        let own = QuarantineMetrics::new(&metrics);
        for node in ["gone", "back", "there"] {
            own.applied(node, Intent::Quarantine, &labelled(Some("quarantined")));
            own.applied(node, Intent::Release, &labelled(None));
        }
        let shown = |node: &str| {
            let text = metrics.encode();
            let label = format!("{{node=\"{node}\"}}");
            text.lines().filter(|line| line.contains(&label)).count()
        };
        own.forget_gone(|node| node == "there");
        tokio::time::advance(GONE.saturating_sub(Duration::from_secs(1))).await;
        own.forget_gone(|node| node != "gone");
        assert_eq!(["gone", "back", "there"].map(shown), [2, 2, 2]);
        tokio::time::advance(Duration::from_secs(1)).await;
        own.forget_gone(|node| node == "there");
        assert_eq!(["gone", "back", "there"].map(shown), [0, 2, 2]);
    }

    #[test]
    fn the_metrics_of_the_reference_are_there() {
        let metrics = Metrics::default();
        let own = QuarantineMetrics::new(&metrics);
        let taint = || Taint {
            key: "k".into(),
            value: String::new(),
            effect: "NoSchedule".into(),
        };
        let change = NodeChange {
            add_taints: vec![taint()],
            remove_taints: vec![taint()],
            ..labelled(Some("quarantined"))
        };
        let ended = |how: &str| NodeChange {
            annotations: [(how.to_owned(), Some("True".to_owned()))].into(),
            ..NodeChange::default()
        };
        own.applied("n", Intent::Quarantine, &change);
        own.applied("n", Intent::Release, &labelled(None));
        own.applied("n", Intent::StandDown, &ended(UNCORDONED_MANUALLY));
        own.applied("n", Intent::StandDown, &ended(keys::UNTAINTED_MANUALLY));
        own.error("x");
        for passed in [true, false] {
            let rule_set = Policy::builtin().rule_sets[0].name.clone();
            own.evaluated(&[RuleSetOutcome { rule_set, passed }]);
        }
        let view = FleetView {
            nodes: vec![NodeStatus {
                name: "n".into(),
                state: NodeState::Quarantined,
                session: None,
                in_cluster: Some(true),
                unschedulable: Some(true),
                faults: vec![],
                notices: vec![],
                devices: vec![],
                notes: vec![],
            }],
            brake: Some(BrakeView {
                enabled: true,
                state: keys::BREAKER_CLOSED.into(),
                limits: vec![],
                unknown: None,
                held: 0,
                paused: None,
                notes: vec![],
            }),
            ..FleetView::default()
        };
        own.current(&view, 0.5);
        let text = metrics.encode();
        for name in NAMES {
            let start = format!("\nfault_quarantine_{name}");
            assert!(text.contains(&start), "{name}: {text}");
        }
    }
}
