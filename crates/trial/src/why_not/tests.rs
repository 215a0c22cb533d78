use std::borrow::Cow;
use std::sync::Arc;

use contract::{HealthEvent, keys};
use fleet::brake::Hold;
use fleet::session::{RequestFailure, Session};
use jiff::Timestamp;
use model::device::NodeDevices;
use model::event::{EventRecord, normalise};
use model::fault::{Fault, FaultBook};
use model::node::NodeView;
use policy::Policy;
use serde_json::{Value, json};

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn faults(fatal: bool) -> Vec<Fault> {
    let mut event = HealthEvent {
        agent: keys::SYSLOG_AGENT.into(),
        component_class: "GPU".into(),
        check_name: keys::CHECK_XID.into(),
        node_name: "n1".into(),
        is_fatal: fatal,
        // An action, since a fault without one would be a notice.
        recommended_action: 2,
        error_code: vec!["79".into()],
        ..HealthEvent::default()
    };
    normalise(&mut event, at(100));
    let mut book = FaultBook::default();
    book.record(&EventRecord {
        seq: 1.into(),
        id: event.id.clone(),
        created_at: at(100),
        event,
    });
    book.faults("n1").to_vec()
}

fn node(metadata: Value) -> NodeView {
    let mut metadata = metadata;
    metadata["name"] = "n1".into();
    NodeView::from_object(json!({ "metadata": metadata })).unwrap()
}

struct World {
    source: Option<Source<'static>>,
    acting: Mode,
    connected: Option<bool>,
    listed: bool,
    node: Option<NodeView>,
    faults: Vec<Fault>,
    session: Session,
    foreign: bool,
    hold: Option<Hold>,
    store_unanswered: bool,
    missed: u64,
    policy: Policy,
}

fn world() -> World {
    World {
        source: None,
        acting: Mode::Act,
        connected: Some(true),
        listed: true,
        node: Some(node(json!({}))),
        faults: faults(true),
        session: Session::idle(at(0)),
        foreign: false,
        hold: None,
        store_unanswered: false,
        missed: 0,
        policy: Policy::builtin(),
    }
}

fn ask(world: &World) -> WhyNot {
    let cluster = world.connected.map(|connected| Connection {
        server: "https://api",
        connected,
        listed: world.listed,
        error: Some("refused"),
    });
    let observed = world.node.clone().map(Arc::new).map(ObservedNode::of);
    let situation = Situation {
        node: "n1",
        is_own: false,
        acting: world.acting,
        observed: observed.as_ref(),
        faults: &world.faults,
        missed: world.missed,
        policy: Some(&world.policy),
        session: Cow::Borrowed(&world.session),
        foreign: world.foreign,
        on_our_node: world.foreign,
        awaits: "the recovery of its faults".to_owned(),
        store_unanswered: world.store_unanswered,
        devices: NodeDevices::default(),
        hold: world.hold.as_ref(),
        dropped_at: None,
        now: Timestamp::MAX,
    };
    explain(&situation, cluster, world.source.as_slice())
}

#[test]
fn the_first_thing_that_stands_in_the_way_is_the_answer() {
    type Edit = fn(&mut World);
    let failed = |world: &mut World| {
        world.session.failed(RequestFailure::Conflict, at(1));
    };
    let table: [(Edit, &str, usize); 14] = [
        (|_| (), "n1 is being quarantined", 0),
        (
            |world| world.hold = Some(Hold::Tripped),
            "the circuit breaker is tripped",
            1,
        ),
        (|world| world.connected = None, "no cluster is given", 1),
        (
            |world| world.connected = Some(false),
            "https://api cannot be watched: refused",
            1,
        ),
        (
            |world| world.node = None,
            "the cluster has no node of the name n1",
            1,
        ),
        (|world| world.acting = Mode::Observe, "observing only", 1),
        (|world| world.acting = Mode::DryRun, "a dry run", 1),
        (
            |world| world.foreign = true,
            "the session of another gpuwarden",
            1,
        ),
        (|world| world.faults.clear(), "no fault of it is open", 1),
        (
            |world| world.faults = faults(false),
            "no rule set asks for it",
            1,
        ),
        (
            |world| {
                world.node = Some(node(
                    json!({"annotations": {keys::RELEASED_AT: "1970-01-01T00:01:40Z"}}),
                ));
            },
            "dismissed when the node was released by hand at 1970-01-01T00:01:40Z",
            1,
        ),
        (failed, "has not accepted the change: 1 attempt", 1),
        (
            |world| {
                world.session.failed(RequestFailure::Conflict, at(1));
                world.store_unanswered = true;
            },
            "the event store does not answer",
            1,
        ),
        (
            |world| {
                world.acting = Mode::Observe;
                world.faults.clear();
            },
            "observing only: nothing is decided (and one more reason below)",
            2,
        ),
    ];
    for (edit, expected, stopped) in table {
        let mut world = world();
        edit(&mut world);
        let why = ask(&world);
        assert!(why.answer.contains(expected), "{expected}: {why:#?}");
        let stops = why
            .checks
            .iter()
            .filter(|check| check.result == CheckResult::Stops);
        assert_eq!(stops.count(), stopped, "{why:#?}");
    }
}

#[test]
fn a_rule_that_cannot_be_evaluated_and_reports_without_room_are_told() {
    let mut world = world();
    let text = "[[rule-sets]]\nname = 'a'\ncordon = { shouldCordon = true }\n\
                [[rule-sets.match.all]]\nkind = 'HealthEvent'\n\
                expression = \"event.metadata['no'] == 'b'\"\n";
    world.policy = Policy::parse(text, "p").unwrap();
    world.missed = 3;
    let why = ask(&world);
    let details: Vec<&String> = why.checks.iter().flat_map(|one| &one.details).collect();
    for expected in ["cannot be evaluated: ", "3 reports exceeded the limit"] {
        let told = details.iter().any(|line| line.contains(expected));
        assert!(told, "{expected}: {details:#?}");
    }
}

#[test]
fn whose_session_a_node_carries_is_told_with_what_ends_it() {
    let mut world = world();
    let session = json!({"id": "s", "since": "2027-01-15T08:00:00Z", "by": "node"});
    let annotations = json!({
        keys::SESSION: session.to_string(),
        keys::QUARANTINE_IS_CORDONED: "True",
    });
    world.node = Some(node(json!({ "annotations": annotations })));
    world.foreign = true;
    let why = ask(&world);
    assert_eq!(
        why.answer,
        "n1 is quarantined by another gpuwarden since 2027-01-15T08:00:00Z: the gpuwarden on n1 itself"
    );
    let check = why.checks.iter().find(|check| check.name == "session");
    let check = check.unwrap();
    assert_eq!(check.result, CheckResult::Stops);
    let fix = check.fix.as_ref().unwrap();
    assert!(fix.contains("kubectl annotate node n1 "), "{fix}");
    assert!(check.details[0].contains("by another store"), "{check:?}");
    assert!(check.details[1].contains("uncordoned"), "{check:?}");
}

#[test]
fn a_quarantined_node_is_told_with_what_it_awaits() {
    let mut world = world();
    let session = json!({"id": "s", "since": "2027-01-15T08:00:00Z", "by": "node"});
    world.node = Some(node(
        json!({"annotations": {keys::SESSION: session.to_string()}}),
    ));
    for (acting, expected) in [
        (Mode::Act, "n1 is quarantined, and awaits the recovery"),
        (
            Mode::DryRun,
            "n1 counts as quarantined in this dry run, and awaits",
        ),
    ] {
        world.acting = acting;
        let why = ask(&world);
        assert!(why.answer.starts_with(expected), "{why:#?}");
    }
}

#[test]
fn a_cordon_that_a_removed_taint_left_behind_is_explained() {
    let mut world = world();
    for (annotations, expected) in [
        (json!({}), "not by gpuwarden"),
        (
            json!({keys::UNTAINTED_MANUALLY: "True"}),
            "a person removed a quarantine taint",
        ),
    ] {
        let mut cordoned = node(json!({"annotations": annotations}));
        cordoned.unschedulable = true;
        world.node = Some(cordoned);
        let why = ask(&world);
        let check = why.checks.iter().find(|check| check.name == "node");
        let check = check.unwrap();
        assert!(check.text.contains(expected), "{check:?}");
    }
}

#[test]
fn what_was_never_read_is_not_told_as_a_fact() {
    let mut world = world();
    (world.connected, world.listed, world.node) = (Some(false), false, None);
    let why = ask(&world);
    assert_eq!(
        why.answer,
        "whether n1 is quarantined is not known: https://api cannot be watched: refused"
    );
    assert_eq!((why.in_cluster, why.known), (None, true));
    assert_eq!(why.checks[1].result, CheckResult::Unknown);
    assert!(!format!("{why:?}").contains("has no node"), "{why:#?}");
    // A cluster that was listed once stays known, even if it cannot be watched now.
    world.listed = true;
    let why = ask(&world);
    assert!(
        why.answer.starts_with("n1 is not quarantined: https://api"),
        "{why:#?}"
    );
    assert_eq!(why.in_cluster, Some(false));
}

#[test]
fn who_does_not_see_is_named_first() {
    let source = |sees| {
        Some(Source {
            name: "kernel-log",
            sees,
            state: if sees { "following" } else { "failing" },
            detail: "file:/x",
        })
    };
    let mut world = world();
    world.faults.clear();
    world.source = source(true);
    let why = ask(&world);
    assert_eq!(why.answer, "n1 is not quarantined: no fault of it is open");
    assert_eq!(why.checks[0].text, "kernel-log is following: file:/x");
    world.source = source(false);
    let why = ask(&world);
    assert_eq!(
        why.answer,
        "n1 is not quarantined: kernel-log is failing: file:/x (and one more reason below)"
    );
    assert_eq!(why.checks[0].result, CheckResult::Unknown);
    assert!(!format!("{why:?}").contains("no fault of it is open"));
    // A known fault still asks for a quarantine.
    world.faults = faults(true);
    let why = ask(&world);
    assert!(
        why.answer.starts_with("n1 is being quarantined"),
        "{why:#?}"
    );
}

#[test]
fn the_routes_are_shown_up_to_the_one_that_counts() {
    let route = |name: &str, expression: &str| {
        format!(
            "[[routes]]\nname = \"{name}\"\ndrain = false\n[[routes.match.all]]\n\
             kind = \"HealthEvent\"\nexpression = \"{expression}\"\n"
        )
    };
    let mut world = world();
    let routes = [
        route("a", "!event.isFatal"),
        route("b", "true"),
        route("c", "true"),
    ];
    let text = format!("{}{}", policy::DEFAULT_POLICY, routes.concat());
    world.policy = Policy::parse(&text, "p").unwrap();
    let details = ask(&world)
        .checks
        .into_iter()
        .flat_map(|check| check.details)
        .filter(|line| line.starts_with("route"));
    let details: Vec<String> = details.collect();
    assert_eq!(
        details,
        [
            "route 'a' does not match: !event.isFatal",
            "route 'b' matches: pods stay, no repair",
        ]
    );
}

#[test]
fn a_rule_shows_what_it_has_looked_at() {
    let mut world = world();
    world.node = Some(node(
        json!({"labels": {keys::MANAGED_LABEL: "false", "zone": "a"}}),
    ));
    // Two faults with one reason give a plain headline.
    world.faults.extend(faults(true));
    let why = ask(&world);
    let label = keys::MANAGED_LABEL;
    assert_eq!(
        why.answer,
        format!("n1 is not quarantined: it is opted out by its label {label}=false")
    );
    let check = why.checks.last().unwrap();
    let fix = check.fix.as_ref().unwrap();
    assert!(
        fix.starts_with(&format!("kubectl label node n1 {label}-")),
        "{fix}"
    );
    let details = &check.details;
    assert!(
        details[1].starts_with("'default' does not match: !(has("),
        "{details:#?}"
    );
    let label = format!(
        "    node.metadata.labels['{}'] = \"false\"",
        keys::MANAGED_LABEL
    );
    assert!(details.contains(&label), "{details:#?}");
    assert!(
        details.contains(&"  any: event.isFatal -> true".to_owned()),
        "{details:#?}"
    );
    assert!(
        details.contains(&"    event.isFatal = true".to_owned()),
        "{details:#?}"
    );
}

#[test]
fn one_fault_that_is_wanted_is_enough() {
    let mut world = world();
    world.faults.extend(faults(false));
    let why = ask(&world);
    assert!(
        why.answer.starts_with("n1 is being quarantined"),
        "{why:#?}"
    );
}

#[test]
fn a_cordon_that_is_not_ours_is_told_to_stay() {
    let of_session = |before: &str| {
        json!({
            keys::QUARANTINE_HEALTH_EVENT: "[{}]",
            keys::QUARANTINE_IS_CORDONED: "True",
            keys::QUARANTINE_CORDON_PRE_EXISTING: before,
        })
    };
    for (annotations, cordoned, stays) in [
        (json!({}), false, false),
        (json!({}), true, true),
        (of_session("True"), true, true),
        (of_session(""), true, false),
    ] {
        let mut world = world();
        let object = json!({
            "metadata": {"name": "n1", "annotations": annotations},
            "spec": {"unschedulable": cordoned},
        });
        world.node = NodeView::from_object(object);
        let why = ask(&world);
        let check = why.checks.iter().find(|check| check.name == "node");
        let text = &check.unwrap().text;
        assert_eq!(text.ends_with(": it stays so"), stays, "{text}");
    }
}

#[test]
fn the_other_programs_that_are_at_work_on_the_node_are_named() {
    let others = |world: &World| {
        let checks = ask(world).checks.into_iter();
        let others: Vec<Check> = checks.filter(|check| check.name == "others").collect();
        others
    };
    let mut world = world();
    assert_eq!(others(&world), []);
    world.node = Some(node(json!({
        "labels": {"nvidia.com/gpu-driver-upgrade-state": "drain-required"},
        "annotations": {"kured.dev/kured-reboot-in-progress": "2026-01-01"},
    })));
    let others = others(&world);
    let [check] = others.as_slice() else {
        panic!("{others:?}");
    };
    assert_eq!(check.result, CheckResult::Passes);
    assert_eq!(
        check.text,
        "the GPU operator's upgrade controller is at work on the node (label \
         nvidia.com/gpu-driver-upgrade-state)"
    );
    assert!(
        check.details[0].starts_with("Kured is at work"),
        "{check:?}"
    );
    assert!(check.fix.as_deref().unwrap().contains("gpu-driver-upgrade"));
}
