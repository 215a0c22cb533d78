//! What is shown of the nodes, and what is remembered of it.

use super::*;
use crate::view::{NodeState, NodeStatus};

const NODES: u32 = 10;

/// What happens, to which nodes, whether they are well; and then: how many nodes the cluster
/// has, are shown, are held.
type Step<'a> = (&'a str, Vec<Input>, &'a [&'a str], bool, [usize; 3]);

/// A world of [`NODES`] nodes that only pretends, so that nobody has to answer.
fn world() -> World {
    let mut world = World::with(Settings {
        mode: Mode::DryRun,
        brake: true,
        ..settings(Owns::All)
    });
    world.take(Input::CaughtUp);
    let nodes = (0..NODES).map(|number| object(&format!("n{number}"), 1));
    world.list(&nodes.collect::<Vec<_>>());
    world
}

fn node(name: &str, version: u32) -> Input {
    seen(&object(name, version))
}

/// Decides, and returns what is shown then.
fn turn(world: &mut World, before: &[NodeStatus]) -> Vec<NodeStatus> {
    // What a dry run pretends is looked at again.
    while !world.fleet.dirty.is_empty() {
        world.decide();
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
    let deleted = |name: &str| Input::Gone(name.to_owned());
    let listed = |names: &[&str]| -> Vec<Input> {
        let nodes = names.iter().map(|name| node(name, 9));
        let begun = [Input::ListBegun].into_iter();
        begun.chain(nodes).chain([Input::Listed]).collect()
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
            world.take(input);
        }
        for node in nodes {
            world.report_that(node, is_healthy);
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
    // Who is neither there nor faulty is not kept.
    let kept: Vec<&str> = world.fleet.nodes.keys().map(String::as_str).collect();
    assert_eq!(kept, ["n1", "n3", "n4", "n6", "n7", "n8", "n9"]);
}

#[test]
fn only_nodes_that_something_happened_to_are_shown_anew() {
    let mut world = world();
    world.report("n1");
    world.report("n2");
    let before = turn(&mut world, &[]);
    assert_eq!(before.len(), 2);
    assert!(world.fleet.showing.unshown.is_empty());
    world.take(node("n3", 2));
    assert!(world.fleet.showing.unshown.is_empty(), "a heartbeat");

    // Behind everybody's back: it would show if they were gone over.
    for name in ["n1", "n2"] {
        world.fleet.entry(name).session.failures = 7;
    }
    world.fleet.entry("n3").view = None;
    world.report("n4");
    let shown = world.fleet.show(&before, world.now);
    assert_eq!(shown.get(..2), Some(before.as_slice()));
    assert_eq!(states(&shown).last(), Some(&("n4", NodeState::Unhealthy)));
    assert!(world.fleet.knows("n3"));

    for name in ["n2", "n3"] {
        world.fleet.look_again_at(name);
    }
    world.fleet.dirty.remove("n2");
    let shown = turn(&mut world, &shown);
    let failures = |name: &str| {
        let node = shown.iter().find(|node| node.name == name);
        node.and_then(|node| node.session.as_ref())
            .map(|session| session.failures)
    };
    assert_eq!((failures("n1"), failures("n2")), (Some(0), Some(7)));
    assert!(!world.fleet.knows("n3"));
}
