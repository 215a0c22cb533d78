//! Views of the nodes, and the entries kept for them.

use super::*;
use crate::view::{NodeState, NodeStatus};
use crate::world::{Fate, Restart};

const NODES: u32 = 10;

/// A step: its name, its inputs, the nodes reported and whether they are well; then the numbers
/// of nodes in the cluster, shown, and held.
type Step<'a> = (&'a str, Vec<FleetInput>, &'a [&'a str], bool, [usize; 3]);

/// Creates a world of [`NODES`] nodes in a dry run, so that nothing has to be answered.
fn world() -> World {
    let settings = Settings {
        mode: Mode::DryRun,
        brake: true,
        ..settings()
    };
    let mut world = World::with(settings, &Policy::builtin(), []);
    world.handle(FleetInput::CaughtUp);
    let nodes = (0..NODES).map(|number| object(&format!("n{number}"), 1));
    list(&mut world, &nodes.collect::<Vec<_>>());
    world
}

fn node(name: &str, version: u32) -> FleetInput {
    seen(&object(name, version))
}

/// Decides, and returns the views after it.
fn turn(world: &mut World, before: &[NodeStatus]) -> Vec<NodeStatus> {
    // Changes that a dry run pretends cause another look.
    while !world.fleet.agenda.dirty.is_empty() {
        all_effects(world);
    }
    world.fleet.show(before, world.now)
}

fn states(shown: &[NodeStatus]) -> Vec<(&str, NodeState)> {
    shown
        .iter()
        .map(|node| (node.name.as_str(), node.state))
        .collect()
}

#[test]
fn what_is_shown_is_as_if_all_nodes_were_gone_over() {
    let mut world = world();
    let labelled = |label: &str, value: &str, version: u32| {
        let labels = json!({label: value});
        seen(&json!({"metadata": {
            "name": "n1", "uid": "n1", "resourceVersion": version.to_string(), "labels": labels,
        }}))
    };
    let deleted = |name: &str| FleetInput::NodeGone(name.to_owned());
    let listed = |names: &[&str]| -> Vec<FleetInput> {
        let nodes = names.iter().map(|name| node(name, 9));
        let begun = [FleetInput::ListBegun].into_iter();
        begun.chain(nodes).chain([FleetInput::Listed]).collect()
    };
    let steps: [Step<'_>; 10] = [
        ("nothing", vec![], &[], false, [10, 0, 0]),
        (
            "two may go, of four",
            vec![],
            &["n1", "n2", "n3", "n4"],
            false,
            [10, 4, 2],
        ),
        (
            "heartbeats",
            vec![node("n5", 2), node("n1", 2)],
            &[],
            false,
            [10, 4, 2],
        ),
        (
            "a label",
            vec![labelled("zone", "a", 3)],
            &[],
            false,
            [10, 4, 2],
        ),
        ("one recovers", vec![], &["n1"], true, [10, 3, 1]),
        (
            "one opts out",
            vec![labelled(keys::MANAGED_LABEL, "false", 4)],
            &["n1"],
            false,
            [10, 4, 1],
        ),
        (
            "who was healthy is gone",
            vec![deleted("n5")],
            &[],
            false,
            [9, 4, 1],
        ),
        (
            "who was not is gone",
            vec![deleted("n2")],
            &[],
            false,
            [8, 4, 0],
        ),
        ("who is gone recovers", vec![], &["n2"], true, [8, 3, 0]),
        (
            "a list",
            listed(&["n1", "n3", "n6", "n7", "n8", "n9"]),
            &[],
            false,
            [6, 3, 0],
        ),
    ];
    let mut shown = Vec::new();
    for (what, inputs, nodes, is_healthy, expected) in steps {
        for input in inputs {
            world.handle(input);
        }
        for node in nodes {
            world.report_of(node, is_healthy);
        }
        shown = turn(&mut world, &shown);
        let all: Vec<String> = world.fleet.nodes.keys().cloned().collect();
        let all = all.iter().filter_map(|name| world.fleet.status(name));
        let all: Vec<NodeStatus> = all.collect();
        assert_eq!(shown, all, "{what}");
        let entries = || world.fleet.nodes.values();
        let in_cluster = entries().filter(|entry| entry.view.is_some()).count();
        let held = entries().filter(|entry| entry.hold.is_some()).count();
        let found = [in_cluster, shown.len(), held];
        assert_eq!(found, expected, "{what}: {:?}", states(&shown));
        let counted = world.fleet.nodes_in_cluster();
        let brake = world.fleet.show_brake(world.now).unwrap();
        assert_eq!([counted, brake.held], [in_cluster, held], "{what}");
    }
    // A node that is neither in the cluster nor faulty has no entry.
    let kept: Vec<&str> = world.fleet.nodes.keys().map(String::as_str).collect();
    assert_eq!(kept, ["n1", "n3", "n4", "n6", "n7", "n8", "n9"]);
}

#[test]
fn only_nodes_that_something_happened_to_are_shown_anew() {
    let mut world = world();
    world.report_of("n1", false);
    world.report_of("n2", false);
    let before = turn(&mut world, &[]);
    assert_eq!(before.len(), 2);
    assert!(world.fleet.agenda.unshown.is_empty());
    world.handle(node("n3", 2));
    assert!(world.fleet.agenda.unshown.is_empty(), "a heartbeat");

    // The changes bypass the inputs, and would show only if all nodes were visited.
    for name in ["n1", "n2"] {
        world.fleet.nodes.get_mut(name).unwrap().session.failures = 7;
    }
    world.fleet.nodes.get_mut("n3").unwrap().view = None;
    world.report_of("n4", false);
    let shown = world.fleet.show(&before, world.now);
    assert_eq!(shown.get(..2), Some(before.as_slice()));
    assert_eq!(states(&shown).last(), Some(&("n4", NodeState::Unhealthy)));
    assert!(world.fleet.knows("n3"));

    for name in ["n2", "n3"] {
        world.fleet.look_again_at(name);
    }
    world.fleet.agenda.dirty.remove("n2");
    let shown = turn(&mut world, &shown);
    let failures = |name: &str| {
        let node = shown.iter().find(|node| node.name == name);
        node.and_then(|node| node.session.as_ref())
            .map(|session| session.failures)
    };
    assert_eq!((failures("n1"), failures("n2")), (Some(0), Some(7)));
    assert!(!world.fleet.knows("n3"));
}

/// Returns the view of `n1`, which has a fatal fault, after a look; without `metadata` the
/// cluster does not have it.
fn shown(mode: Mode, metadata: Option<Value>) -> NodeStatus {
    let settings = Settings { mode, ..settings() };
    let mut world = World::with(settings, &Policy::builtin(), []);
    world.report_of("n1", false);
    world.handle(FleetInput::CaughtUp);
    let object = metadata.map(|mut metadata| {
        metadata["name"] = "n1".into();
        json!({ "metadata": metadata })
    });
    list(&mut world, object.as_slice());
    world.decide();
    world.fleet.status("n1").unwrap()
}

#[test]
fn why_a_faulty_node_is_in_service_is_noted() {
    let released = |second| {
        let at = start() - SignedDuration::from_secs(second);
        json!({"annotations": {keys::RELEASED_AT: at.to_string()}})
    };
    let opted_out = json!({"labels": {keys::MANAGED_LABEL: "false"}});
    for (metadata, mode, note) in [
        (
            Some(released(0)),
            Mode::Act,
            "released by hand at 2027-01-15T08:00:00Z",
        ),
        (Some(opted_out), Mode::Act, "opted out by label"),
        (Some(released(1)), Mode::Act, ""),
        (Some(json!({})), Mode::DryRun, "dry run"),
        (None, Mode::Act, "the cluster has no node of this name"),
    ] {
        let status = shown(mode, metadata);
        let notes = status.notes.join("\n");
        assert!(
            notes.contains(note) && notes.is_empty() == note.is_empty(),
            "{note}: {notes}"
        );
        assert_eq!(status.faults[0].dismissed, note.starts_with("released"));
    }
}

#[test]
fn a_session_shows_what_it_awaits() {
    let awaits = |status: NodeStatus| (status.session.unwrap().awaits, status.in_cluster);
    let missing = shown(Mode::Act, None);
    assert_eq!(missing.state, NodeState::Unhealthy);
    let appears = "the node to appear in the cluster".to_owned();
    assert_eq!(awaits(missing), (appears, Some(false)));
    let answer = "the API server's answer to the quarantine".to_owned();
    let begun = shown(Mode::Act, Some(json!({})));
    assert_eq!(awaits(begun), (answer, Some(true)));
    // A restarted process knows nothing of the cluster at first, then not all events, then no
    // policy.
    let mut world = World::new(&Policy::builtin());
    world.fault(0);
    world.settle();
    let mut kept = Fleet::new(world.settings.clone(), None, world.now);
    kept.restore(world.saved_state(), world.now);
    let read = kept.status("n1").unwrap();
    assert!(read.notes.concat().contains("is not known"), "{read:?}");
    let nodes = "the cluster's nodes to be read".to_owned();
    assert_eq!(awaits(read), (nodes, None));
    kept.handle(FleetInput::ListBegun, world.now);
    kept.handle(FleetInput::NodeObserved(world.view("n1")), world.now);
    kept.handle(FleetInput::Listed, world.now);
    let events = "the stored events to be read".to_owned();
    assert_eq!(awaits(kept.status("n1").unwrap()), (events, Some(true)));
    kept.handle(FleetInput::CaughtUp, world.now);
    let policy = "a policy to be loaded: nothing is decided before".to_owned();
    assert_eq!(awaits(kept.status("n1").unwrap()), (policy, Some(true)));
}

#[test]
fn a_node_that_another_gpuwarden_has_taken_out_is_shown_with_what_ends_that() {
    let session = json!({"id": "s", "since": "2027-01-15T08:00:00Z", "by": "node"});
    let annotations = json!({keys::SESSION: session.to_string()});
    // The node counts against the limits even without a fault that is known here.
    for faulty in [false, true] {
        let mut world = acting(Owns::All);
        if faulty {
            world.report_of("n1", false);
        }
        world.handle(FleetInput::CaughtUp);
        let metadata = json!({"name": "n1", "annotations": annotations});
        list(&mut world, &[json!({ "metadata": metadata })]);
        world.decide();
        let status = world.fleet.status("n1").unwrap();
        assert_eq!(status.state, NodeState::Session(Phase::Quarantined));
        let session = status.session.unwrap();
        assert_eq!(session.since.to_string(), "2027-01-15T08:00:00Z");
        assert_eq!(
            session.awaits,
            "the gpuwarden on n1 itself, to give it back"
        );
        let end = session.another.unwrap().end;
        assert!(end.starts_with("kubectl annotate node n1 "), "{end}");
        assert!(status.notes[0].contains("counts as out of service"));
    }
}

#[test]
fn a_node_that_is_gone_is_held_back_by_nothing() {
    let mut world = faulty();
    world.fleet.nodes.get_mut("n1").unwrap().hold = Some(Hold::Tripped);
    world
        .fleet
        .nodes
        .get_mut("n1")
        .unwrap()
        .remove_from_cluster();
    let notes = world.fleet.status("n1").unwrap().notes;
    assert_eq!(notes, ["the cluster has no node of this name"]);
}

#[test]
fn what_may_be_out_of_service_counts_until_it_is_known() {
    let (now, later) = (start(), start() + DOUBT);
    let mut entry = NodeEntry::new(now);
    let with = |text: &str, version: u32| {
        let mut object = object("n1", version);
        object["metadata"]["annotations"] = json!({keys::QUARANTINE_HEALTH_EVENT: text});
        Arc::new(NodeView::from_object(object).unwrap())
    };
    entry.set_view(with("", 1));
    assert_eq!(entry.out(now), None);
    entry.patch.in_doubt = Some(later);
    let on_the_way = entry.out(now).unwrap();
    assert_eq!((on_the_way.since, on_the_way.forced), (Some(now), false));
    assert_eq!(entry.out(later), None, "it was not made");
    // Once observed, the node's marks count, and when it is back it is back.
    entry.set_view(with("[{}]", 2));
    assert!(entry.out(now).is_some() && !entry.in_service());
    entry.set_view(with("", 3));
    assert_eq!(entry.out(now), None);
    entry.patch.taking_out = true;
    assert!(entry.out(now).is_some(), "a patch that is under way");
}

#[test]
fn a_notice_is_shown_for_a_day_and_is_no_open_fault_unless_the_policy_wants_it() {
    let all = "[[rule-sets]]\nname = \"a\"\ncordon.shouldCordon = true\n\
               [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"true\"\n";
    let all = Policy::parse(all, "p").unwrap();
    for (policy, shown) in [
        (&Policy::builtin(), Some((NodeState::Healthy, 0, 1))),
        (&all, Some((NodeState::Session(Phase::Quarantined), 1, 0))),
    ] {
        let mut world = World::new(policy);
        world.event("c", 0, false, false);
        let until = world.now + DAY;
        world.settle();
        let status = |world: &World| {
            let status = world.fleet.status("n1")?;
            Some((status.state, status.faults.len(), status.notices.len()))
        };
        world.now = until - SignedDuration::from_secs(2);
        world.look(Fate::Made);
        assert_eq!(status(&world), shown);
        world.look(Fate::Made);
        assert_eq!(status(&world), shown.filter(|(_, open, _)| *open > 0));
    }
}

#[test]
fn a_node_that_was_cordoned_before_its_session_is_told_to_stay_so() {
    let mut world = World::new(&Policy::builtin());
    world["n1"].unschedulable = true;
    world.fault(0);
    world.settle();
    let status = world.fleet.status("n1").unwrap();
    let is_note = |text: &String| text.ends_with("was cordoned before the session, and stays so");
    assert!(status.notes.iter().any(is_note), "{status:?}");
    world.recovery(0);
    let notes = world.look(Fate::Made).notes;
    assert!(notes.iter().any(|note| is_note(&note.text)), "{notes:?}");
}

#[test]
fn once_the_store_is_read_nothing_is_said_of_its_silence() {
    let awaits = |world: &World| world.fleet.status("n1").unwrap().session.unwrap().awaits;
    let mut world = World::new(&Policy::builtin());
    world.fault(0);
    world.settle();
    let record = world.stored[0].clone();
    world.restart(Restart::Nothing);
    let effects = world.fleet.decide(world.now);
    let asks = |effect: &Effect| matches!(effect, Effect::LookUp { .. });
    assert!(effects.iter().any(asks));
    let node = "n1".to_owned();
    world.handle(FleetInput::EventsFound { node, found: None });
    assert!(world.fleet.nodes["n1"].claim.unanswered);
    // The events are read before the store is asked again.
    world.store(record.event, record.created_at);
    world.now += SignedDuration::from_mins(1);
    world.settle();
    assert_eq!(
        awaits(&world),
        "the recovery of its faults, or a release by hand"
    );
}

#[test]
fn another_program_that_is_at_work_on_the_node_is_told() {
    let mut world = World::new(&Policy::builtin());
    let upgrading = (
        "nvidia.com/gpu-driver-upgrade-state",
        "pod-restart-required",
    );
    world["n1"]
        .labels
        .insert(upgrading.0.to_owned(), upgrading.1.to_owned());
    world.fault(0);
    world.settle();
    let status = world.fleet.status("n1").unwrap();
    let is_note = |text: &String| text.starts_with("the GPU operator's upgrade controller is at");
    assert!(status.notes.iter().any(is_note), "{status:?}");
}
