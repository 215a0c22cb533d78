use contract::{HealthEvent, keys};
use model::event::normalise;
use serde_json::json;

use super::*;

fn event(node: &str, second: i64, gpu: &str, healthy: bool) -> EventRecord {
    let mut event = HealthEvent {
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        node_name: node.into(),
        is_fatal: !healthy,
        is_healthy: healthy,
        entities_impacted: vec![contract::Entity {
            entity_type: "GPU".into(),
            entity_value: gpu.into(),
        }],
        ..HealthEvent::default()
    };
    let created_at = Timestamp::from_second(second).unwrap();
    normalise(&mut event, created_at);
    EventRecord {
        seq: Position::START,
        id: event.id.clone(),
        created_at,
        event,
    }
}

fn run(replay: &mut Replay, events: &[EventRecord]) -> Vec<String> {
    let decisions = events.iter().flat_map(|event| replay.take(event));
    decisions
        .map(|decision| {
            let (at, node) = (decision.at.as_second(), &decision.node);
            let (name, change) = (decision.decision.name(), decision.change());
            format!(
                "{at} {node} {name}: {change} ({})",
                decision.because.join("; ")
            )
        })
        .collect()
}

#[test]
fn nodes_are_taken_out_and_given_back_by_the_clock_of_the_events() {
    let mut replay = Replay::new(Policy::builtin(), None);
    let said = run(
        &mut replay,
        &[
            event("a", 10, "0", false),
            event("b", 20, "0", false),
            event("a", 30, "1", false),
            event("a", 40, "0", true),
            // The clock goes back, so the time stays at second 40.
            event("b", 35, "0", true),
            event("a", 100, "1", true),
            event("c", 110, "0", false),
            event("c", 170, "0", false),
        ],
    );
    assert_eq!(
        said,
        [
            "10 a quarantine: cordon (GpuMemWatch on GPU 0)",
            "20 b quarantine: cordon (GpuMemWatch on GPU 0)",
            "40 b release: uncordon (GpuMemWatch on GPU 0 recovered)",
            "100 a release: uncordon (GpuMemWatch on GPU 1 recovered)",
            "110 c quarantine: cordon (GpuMemWatch on GPU 0)",
        ]
    );
    let expected = Summary {
        events: 8,
        taken_out: 3,
        quarantines: 3,
        releases: 2,
        most_at_once: 2,
        still_out: 1,
        seconds_out: 90 + 20 + 60,
        unlisted: 0,
        held: 0,
        still_held: 0,
        tripped_at: None,
    };
    assert_eq!(replay.summary(), expected);
    assert!(replay.desired("c").cordon && !replay.desired("a").wanted());
}

#[test]
fn listed_nodes_are_what_the_rules_see_without_what_is_ours_on_them() {
    let node = |metadata: serde_json::Value, spec: serde_json::Value| {
        NodeView::from_object(json!({"metadata": metadata, "spec": spec})).unwrap()
    };
    let opted_out = json!({"name": "opted-out", "labels": {keys::MANAGED_LABEL: "false"}});
    let ours = json!({"name": "ours", "annotations": {
        keys::QUARANTINE_HEALTH_EVENT: r#"[{"agent":"x"}]"#,
        keys::QUARANTINE_IS_CORDONED: keys::TRUE,
        keys::RELEASED_AT: "2100-01-01T00:00:00Z",
    }});
    let nodes = vec![
        node(opted_out, json!({})),
        node(ours, json!({"unschedulable": true})),
        node(json!({"name": "cordoned"}), json!({"unschedulable": true})),
    ];
    let mut replay = Replay::new(Policy::builtin(), Some(nodes));
    let names = ["opted-out", "ours", "cordoned", "elsewhere"];
    let events: Vec<EventRecord> = names
        .iter()
        .map(|name| event(name, 10, "0", false))
        .collect();
    assert_eq!(
        run(&mut replay, &events),
        [
            "10 ours quarantine: cordon (GpuMemWatch on GPU 0)",
            "10 cordoned quarantine: nothing that schedulers see (GpuMemWatch on GPU 0)",
        ]
    );
    assert_eq!(replay.summary().unlisted, 1);
}

#[test]
fn a_rule_sees_the_node_as_the_decision_before_has_left_it() {
    let policy = "[[rule-sets]]\nname = \"second\"\n\
        taint = { key = \"k\", value = \"v\", effect = \"NoSchedule\" }\n\
        [[rule-sets.match.all]]\nkind = \"Node\"\n\
        expression = \"has(node.spec.unschedulable) && node.spec.unschedulable\"\n\
        [[rule-sets]]\nname = \"first\"\ncordon = { shouldCordon = true }\n\
        [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n";
    let mut replay = Replay::new(Policy::parse(policy, "p").unwrap(), None);
    let said = run(&mut replay, &[event("a", 10, "0", false)]);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[1].contains("update: add taint k=v:NoSchedule"),
        "{said:?}"
    );
}

fn policy(brake: &str) -> Policy {
    let text = format!(
        "{brake}\n[[rule-sets]]\nname = \"fatal\"\ncordon = {{ shouldCordon = true }}\n\
         [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n"
    );
    Policy::parse(&text, "p").unwrap()
}

/// Returns nodes `n0`, `n1`, ..., each in a rack of its own.
fn cluster(count: usize) -> Vec<NodeView> {
    let node = |n: usize| {
        let metadata = json!({"name": format!("n{n}"), "labels": {"rack": format!("r{n}")}});
        NodeView::from_object(json!({"metadata": metadata})).unwrap()
    };
    (0..count).map(node).collect()
}

fn failures(nodes: std::ops::Range<i64>, second: i64) -> Vec<EventRecord> {
    let one = |n| event(&format!("n{n}"), second + n, "0", false);
    nodes.map(one).collect()
}

#[test]
fn the_brake_of_the_policy_holds_nodes_back_and_lets_them_go() {
    let mut replay = Replay::new(Policy::builtin(), Some(cluster(10))).braked();
    let mut events = failures(0..4, 10);
    // No further decisions: a node that is held back is reported once.
    events.push(event("n2", 20, "0", false));
    events.push(event("n3", 30, "0", true));
    events.push(event("n0", 40, "0", true));
    events.push(event("n1", 50, "0", true));
    assert_eq!(
        run(&mut replay, &events),
        [
            "10 n0 quarantine: cordon (GpuMemWatch on GPU 0)",
            "11 n1 quarantine: cordon (GpuMemWatch on GPU 0)",
            "12 n2 held: held back: 2 of 10 nodes are out of service (n0, n1), and 2 (20%) may be at the \
             same time (GpuMemWatch on GPU 0)",
            "13 n3 held: held back: 2 of 10 nodes are out of service (n0, n1), and 2 (20%) may be at the \
             same time (GpuMemWatch on GPU 0)",
            "30 n3 dropped: no longer held back: nothing asks for it (GpuMemWatch on GPU 0 recovered)",
            "40 n0 release: uncordon (GpuMemWatch on GPU 0 recovered)",
            "40 n2 quarantine: cordon (GpuMemWatch on GPU 0; let go after 28s)",
            "50 n1 release: uncordon (GpuMemWatch on GPU 0 recovered)",
        ]
    );
    let summary = replay.summary();
    let counts = (summary.taken_out, summary.most_at_once, summary.still_out);
    assert_eq!(counts, (3, 2, 1));
    assert_eq!((summary.held, summary.still_held), (2, 0));
    assert!(replay.left_out().is_empty());
}

#[test]
fn a_circuit_breaker_that_trips_stays_tripped_and_holds_all_but_what_is_forced() {
    let window = "circuitBreaker = { percentage = 20, duration = \"5m\" }";
    let mut replay = Replay::new(policy(window), Some(cluster(10))).braked();
    let mut events = failures(0..2, 0);
    // A returned node still counts in the window until its time is over.
    events.push(event("n0", 10, "0", true));
    events.push(event("n2", 290, "0", false));
    events.push(event("n3", 9_000, "0", false));
    let mut forced = event("n4", 9_001, "0", false);
    forced.event.quarantine_overrides = Some(contract::BehaviourOverrides {
        force: true,
        skip: false,
    });
    events.push(forced);
    assert_eq!(
        run(&mut replay, &events)[3..],
        [
            "290 n2 held: held back: the circuit breaker is tripped (GpuMemWatch on GPU 0)",
            "9000 n3 held: held back: the circuit breaker is tripped (GpuMemWatch on GPU 0)",
            "9001 n4 quarantine: cordon (GpuMemWatch on GPU 0)",
        ]
    );
    let summary = replay.summary();
    assert_eq!(
        summary.tripped_at,
        Some(Timestamp::from_second(290).unwrap())
    );
    assert_eq!((summary.held, summary.still_held), (2, 2));

    let mut slow = Replay::new(policy(window), Some(cluster(10))).braked();
    let mut events = failures(0..2, 0);
    events.push(event("n2", 300, "0", false));
    assert_eq!(run(&mut slow, &events).len(), 3);
    assert_eq!(slow.summary().tripped_at, None);
}

#[test]
fn without_a_list_of_nodes_only_numbers_of_nodes_are_limits() {
    let brake = "circuitBreaker = { percentage = 50, duration = \"5m\" }\n[brake]\n\
        budgets = [{ max = 2 }, { max = \"10%\" }, { max = 1, per = \"rack\" }, { keep = 1 }]\n";
    let mut replay = Replay::new(policy(brake), None).braked();
    assert_eq!(
        replay.left_out(),
        ["10%", "1 per rack", "keep 1", "50% in 5m"]
    );
    let said = run(&mut replay, &failures(0..3, 10));
    assert!(
        said[2].starts_with(
            "12 n2 held: held back: 2 of 3 nodes are out of service (n0, n1), and 2 may"
        ),
        "{said:?}"
    );
    // With the list, all limits apply; without the brake, none does.
    let mut listed = Replay::new(policy(brake), Some(cluster(40))).braked();
    assert!(listed.left_out().is_empty());
    run(&mut listed, &failures(0..3, 10));
    assert_eq!(listed.summary().held, 1);
    let mut bare = Replay::new(policy(brake), None);
    run(&mut bare, &failures(0..3, 10));
    assert_eq!((bare.summary().taken_out, bare.summary().held), (3, 0));
}

/// Returns the event of a fatal XID of GPU 0 of a node.
fn xid(node: &str, second: i64, code: &str) -> EventRecord {
    let mut record = event(node, second, "0", false);
    record.event.check_name = "SysLogsXIDError".into();
    record.event.error_code = vec![code.into()];
    record.event.id = String::new();
    normalise(&mut record.event, record.created_at);
    record.id.clone_from(&record.event.id);
    record
}

#[test]
fn what_waits_for_its_primary_is_decided_in_its_time_with_its_reason() {
    let because = |at: i64, node: &str, code: &str| {
        format!("{at} {node} quarantine: cordon (SysLogsXIDError {code} on GPU 0)")
    };
    let mut replay = Replay::new(Policy::builtin(), None);
    let events = [xid("a", 1, "95"), xid("b", 10, "95"), xid("b", 11, "48")];
    let said = run(&mut replay, &events);
    assert_eq!(said, [because(3, "a", "95"), because(11, "b", "48")]);
    assert_eq!(replay.finish(), []);
    run(&mut replay, &[xid("c", 20, "95")]);
    let last = replay.finish();
    assert_eq!((last[0].at.as_second(), last[0].node.as_str()), (22, "c"));
    assert_eq!(last[0].because, ["SysLogsXIDError 95 on GPU 0"]);
    assert_eq!(last.len(), 1);
}

#[test]
fn a_node_whose_fault_is_explained_by_another_node_returns_with_that_reason() {
    let nodes = ["a", "b"].map(|name| {
        let mut node = NodeView::unknown(name);
        node.labels = [("nvidia.com/gpu.clique".to_owned(), "d".to_owned())].into();
        node
    });
    let mut replay = Replay::new(Policy::builtin(), Some(nodes.to_vec()));
    let said = run(&mut replay, &[xid("a", 1, "145"), xid("b", 5, "149")]);
    assert_eq!(
        said,
        [
            "3 a quarantine: cordon (SysLogsXIDError 145 on GPU 0)",
            "5 a release: uncordon (b: SysLogsXIDError 149 on GPU 0)",
            "5 b quarantine: cordon (SysLogsXIDError 149 on GPU 0)",
        ]
    );
}
