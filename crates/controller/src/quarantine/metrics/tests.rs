use contract::keys::UNCORDONED_MANUALLY;
use fleet::session::Phase;
use fleet::view::{
    BrakeView, ClusterView, DeviceView, ForeignGpuwardenView, NodeState, NodeStatus, SessionView,
};
use jiff::Timestamp;
use model::node::Taint;
use model::proposal::{DRAIN, Proposal};
use policy::Policy;
use runtime::metrics::Metrics;

use super::*;

/// Metrics of NVSentinel that compatibility.md does not list as missing.
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

/// Returns a change that sets the node's state label, or removes it.
fn labelled(state: Option<&str>) -> NodeChange {
    let state = state.map(str::to_owned);
    NodeChange {
        labels: [(keys::STATE_LABEL.to_owned(), state)].into(),
        ..NodeChange::default()
    }
}

fn status(state: NodeState) -> NodeStatus {
    NodeStatus {
        name: "n".into(),
        state,
        session: None,
        in_cluster: Some(true),
        unschedulable: Some(true),
        faults: vec![],
        notices: vec![],
        devices: vec![],
        notes: vec![],
    }
}

#[test]
fn every_state_has_a_count_and_only_sessions_have_a_phase() {
    let metrics = Metrics::default();
    let own = NodeMetrics::registered(&metrics);
    let session = |phase, second| SessionView {
        id: "s".into(),
        phase,
        since: Timestamp::from_second(second).unwrap(),
        failures: 0,
        awaits: String::new(),
        cordoned: true,
        uncordon_releases: true,
        another: None,
        proposal: None,
        drain: None,
    };
    let show = |nodes: Vec<NodeStatus>, paused: Option<&str>| {
        let brake = BrakeView {
            enabled: true,
            state: keys::BREAKER_CLOSED.into(),
            limits: vec![],
            unknown: None,
            held: 0,
            paused: paused.map(str::to_owned),
            notes: vec![],
        };
        let cluster = ClusterView {
            server: String::new(),
            connected: true,
            error: None,
            nodes: 5,
        };
        own.show(&FleetView {
            nodes,
            brake: Some(brake),
            cluster: Some(cluster),
            ..FleetView::default()
        });
        metrics.encode()
    };
    let draining = NodeStatus {
        session: Some(session(Phase::Draining, 60)),
        ..status(NodeState::Session(Phase::Draining))
    };
    let foreign = ForeignGpuwardenView {
        who: "another".into(),
        end: String::new(),
    };
    let theirs = NodeStatus {
        name: "theirs".into(),
        session: Some(SessionView {
            another: Some(foreign),
            ..session(Phase::Quarantined, 60)
        }),
        ..status(NodeState::Session(Phase::Quarantined))
    };
    let text = show(vec![draining.clone(), theirs], Some("by a person"));
    for line in [
        "gpuwarden_nodes{state=\"healthy\"} 3",
        "gpuwarden_nodes{state=\"draining\"} 1",
        "gpuwarden_nodes{state=\"quarantined\"} 1",
        "gpuwarden_nodes{state=\"remediation-failed\"} 0",
        "gpuwarden_node_phase_timestamp_seconds{node=\"n\",phase=\"draining\"} 60.0",
        "gpuwarden_quarantine_paused 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
    assert!(!text.contains("node=\"theirs\""), "{text}");
    let proposal = Proposal {
        since: Timestamp::from_second(70).unwrap(),
        actions: [DRAIN.to_owned()].into(),
        approved: None,
    };
    let proposes = NodeStatus {
        session: Some(SessionView {
            proposal: Some(proposal),
            ..session(Phase::Quarantined, 60)
        }),
        ..draining.clone()
    };
    let text = show(vec![proposes], None);
    let proposed = "gpuwarden_oldest_proposal_timestamp_seconds";
    assert!(text.contains(&format!("{proposed} 70.0")), "{text}");
    let failed = NodeStatus {
        session: Some(session(Phase::RemediationFailed, 90)),
        state: NodeState::Session(Phase::RemediationFailed),
        ..draining
    };
    let text = show(vec![failed], None);
    assert!(text.contains(&format!("{proposed} 0.0")), "{text}");
    let phase = "{node=\"n\",phase=\"remediation-failed\"} 90.0";
    assert!(
        text.contains(phase) && !text.contains("phase=\"draining\""),
        "{text}"
    );
    assert!(
        text.contains("gpuwarden_nodes{state=\"draining\"} 0\n"),
        "{text}"
    );
    assert!(text.contains("gpuwarden_quarantine_paused 0\n"), "{text}");
    assert!(show(vec![], None).contains("gpuwarden_nodes{state=\"healthy\"} 5\n"));
}

/// Only devices go out of service and return: the node stays in service.
#[test]
fn a_node_whose_devices_alone_are_out_is_not_counted() {
    let metrics = Metrics::default();
    let own = QuarantineMetrics::registered(&metrics);
    own.applied("n", Intent::Quarantine, &NodeChange::default());
    own.applied("n", Intent::Return, &NodeChange::default());
    let text = metrics.encode();
    assert!(!text.contains("quarantined_total{node=\"n\"}"), "{text}");
}

#[test]
fn taints_of_devices_are_counted_by_key_and_effect_while_they_stand() {
    let metrics = Metrics::default();
    let own = QuarantineMetrics::registered(&metrics);
    let device = |taints: &[&str]| DeviceView {
        device: "gpu.nvidia.com/n/gpu-0".into(),
        gpu: String::new(),
        taints: taints.iter().map(ToString::to_string).collect(),
        evictions: vec![],
        pods: vec![],
    };
    let show = |devices: Vec<DeviceView>| {
        let node = NodeStatus {
            devices,
            ..status(NodeState::PartlyQuarantined)
        };
        let view = FleetView {
            nodes: vec![node],
            ..FleetView::default()
        };
        own.current(&view, 0.0);
        metrics.encode()
    };
    let line = |key: &str, effect: &str, count: u32| {
        format!(
            "gpuwarden_device_taints{{taint_key=\"gpu.nvidia.com/{key}\",\
             taint_effect=\"{effect}\"}} {count}\n"
        )
    };
    let xid = "gpu.nvidia.com/xid=48:NoSchedule";
    let both = device(&[xid, "gpu.nvidia.com/gpu-lost:NoExecute"]);
    let text = show(vec![both, device(&[xid])]);
    assert!(text.contains(&line("xid", "NoSchedule", 2)), "{text}");
    assert!(text.contains(&line("gpu-lost", "NoExecute", 1)), "{text}");
    let text = show(vec![device(&["gpu.nvidia.com/xid=48:None"])]);
    assert!(text.contains(&line("xid", "NoSchedule", 0)), "{text}");
    assert!(text.contains(&line("gpu-lost", "NoExecute", 0)), "{text}");
    assert!(text.contains(&line("xid", "None", 1)), "{text}");
}

#[test]
fn faults_that_find_no_room_are_counted_once() {
    let metrics = Metrics::default();
    let own = QuarantineMetrics::registered(&metrics);
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
    let own = QuarantineMetrics::registered(&metrics);
    for node in ["gone", "back", "there"] {
        own.applied(node, Intent::Quarantine, &labelled(Some("quarantined")));
        own.applied(node, Intent::Return, &labelled(None));
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
    let own = QuarantineMetrics::registered(&metrics);
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
    own.applied("n", Intent::Return, &labelled(None));
    own.applied("n", Intent::StandDown, &ended(UNCORDONED_MANUALLY));
    own.applied("n", Intent::StandDown, &ended(keys::UNTAINTED_MANUALLY));
    own.error("x");
    for passed in [true, false] {
        let rule_set = Policy::builtin().rule_sets[0].name.clone();
        own.evaluated(&[RuleSetOutcome { rule_set, passed }]);
    }
    let view = FleetView {
        nodes: vec![status(NodeState::Session(Phase::Quarantined))],
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
