//! Routes of the policy: which stages a node gets.

use std::sync::Arc;

use contract::{BehaviourOverrides, RecommendedAction};
use model::ownership::Ownership;
use model::reporter::{Process, Reporter};
use policy::assess::Desired;

use super::*;
use crate::CreateAnswer;
use crate::drain::{DrainConfig, PodView};
use crate::remediation::RemediationConfig;
use crate::world::{Fate, LookEffects, Restart, World, event, settings};

const POLICY: &str = r#"
    [[routes]]
    name = "look first"
    drain = false
    [[routes.match.all]]
    kind = "HealthEvent"
    expression = "event.checkName == 'LookFirst'"
    [[routes]]
    name = "no repair"
    drain = "forceful"
    remediate = false
    [[routes.match.all]]
    kind = "Node"
    expression = "'pet' in node.metadata.labels"
    [[rule-sets]]
    name = "fatal"
    cordon = { shouldCordon = true }
    [[rule-sets.match.all]]
    kind = "HealthEvent"
    expression = "event.isFatal"
"#;

/// Creates a controller that drains, waits for pods, and remediates; and a node with a pod.
fn world() -> World {
    let settings = Settings {
        drain: Some(Arc::new(DrainConfig::default())),
        remediation: Some(Arc::new(RemediationConfig::builtin())),
        ..settings()
    };
    let policy = Policy::parse(POLICY, "p").unwrap();
    let mut world = World::with(settings, &policy, [NodeView::unknown("n1")]);
    let pod = PodView {
        namespace: "web".into(),
        name: "a".into(),
        uid: "uid-a".into(),
        ..PodView::default()
    };
    world.pods.insert("web/a".into(), pod);
    world.restart(Restart::Nothing);
    world
}

fn fault(world: &mut World, check: &str) {
    world.tick();
    let mut event = event(check, &[("GPU", "0")], true, false);
    event.recommended_action = 24;
    world.store(event, world.now);
}

fn look(world: &mut World) -> Vec<LookEffects> {
    (0..6).map(|_| world.look(Fate::Made)).collect()
}

fn texts(looked: &[LookEffects]) -> Vec<&str> {
    let notes = looked.iter().flat_map(|one| &one.notes);
    notes.map(|note| note.text.as_str()).collect()
}

fn session(world: &World) -> crate::view::SessionView {
    world.fleet.status("n1").unwrap().session.unwrap()
}

#[test]
fn a_node_is_quarantined_only_where_its_route_says_so_and_that_is_told() {
    let mut world = world();
    fault(&mut world, "LookFirst");
    let looked = look(&mut world);
    assert_eq!(world.phase(), Phase::Quarantined);
    let skipped = "skipped by policy route 'look first': pods stay";
    let drain = session(&world).drain.unwrap();
    assert_eq!(drain.to_string(), format!("NotStarted: {skipped}"));
    assert_eq!(
        session(&world).awaits,
        "the recovery of its faults: no repair, skipped by policy route 'look first'"
    );
    let messages = texts(&looked);
    let rules = "LookFirst on GPU 0: rule set 'fatal' matches; policy route 'look first': pods stay, no repair";
    for text in [
        skipped,
        "no repair: skipped by policy route 'look first'",
        rules,
    ] {
        assert_eq!(
            messages.iter().filter(|one| **one == text).count(),
            1,
            "{text}: {messages:?}"
        );
    }
    // A restarted process decides the same.
    world.restart(Restart::Nothing);
    look(&mut world);
    assert_eq!(world.phase(), Phase::Quarantined);
    // Another fault, which asks for more, is included; the rules are evaluated at each look.
    fault(&mut world, "GpuMemWatch");
    look(&mut world);
    assert_eq!(world.phase(), Phase::Draining);
    world.set_policy(&Policy::parse(&POLICY.replace("== 'LookFirst'", "!= ''"), "p").unwrap());
    look(&mut world);
    assert_eq!(world.phase(), Phase::Quarantined);
}

#[test]
fn the_first_route_that_fits_counts_and_the_node_has_a_say() {
    let mut world = world();
    world["n1"].labels.insert("pet".into(), String::new());
    fault(&mut world, "GpuMemWatch");
    // The drain does not wait for its pod, and then nothing is remediated.
    let looked = look(&mut world);
    assert!(looked.iter().any(|one| !one.removals.is_empty()));
    world.pods.clear();
    world.deliver_pods();
    let looked = look(&mut world);
    assert!(looked.iter().all(|one| one.creations.is_empty()));
    assert_eq!(world.phase(), Phase::Drained);
    assert!(
        session(&world)
            .awaits
            .ends_with("skipped by policy route 'no repair'")
    );
    // Without the label the next stage applies.
    world["n1"].labels.remove("pet");
    let looked = look(&mut world);
    assert!(looked.iter().any(|one| !one.creations.is_empty()));
}

#[test]
fn what_is_made_already_is_watched_whatever_its_route_says_then() {
    let mut world = world();
    world.pods.clear();
    world.restart(Restart::Nothing);
    fault(&mut world, "GpuMemWatch");
    let looked = look(&mut world);
    let planned = looked
        .into_iter()
        .flat_map(|one| one.creations)
        .next()
        .unwrap();
    let mut object = planned.object.clone();
    object["metadata"]["uid"] = "u".into();
    world.resources.insert(planned.name.clone(), object.clone());
    let (node, key) = ("n1".to_owned(), planned.key.clone());
    let answer = CreateAnswer::There(Box::new(object));
    world.handle(FleetInput::ResourceCreated { node, key, answer });
    look(&mut world);
    world["n1"].labels.insert("pet".into(), String::new());
    let looked = look(&mut world);
    assert!(looked.iter().all(|one| one.withdrawn.is_empty()));
    assert_eq!(
        session(&world).awaits,
        format!("the end of RebootNode {}", planned.name)
    );
}

/// The policy that SECURITY.md proposes where users may report.
#[test]
fn what_only_users_report_is_not_repaired_where_the_policy_says_so() {
    let page = include_str!("../../../../../SECURITY.md");
    let block = page.split("```toml\n").nth(1).unwrap();
    let route = block.split("```").next().unwrap();
    let rule_sets = POLICY.split_once("[[rule-sets]]").unwrap().1;
    let policy = Policy::parse(&format!("{route}\n[[rule-sets]]{rule_sets}"), "p").unwrap();
    let process = |uid| Process { uid, pid: Some(1) };
    for (reporter, repairs) in [
        (Reporter::Monitor, true),
        (Reporter::Operator(process(0)), true),
        (Reporter::Node, true),
        (Reporter::Central("cloud".into()), true),
        (Reporter::User(process(1000)), false),
        (Reporter::Pod("ml/train-0".into()), false),
    ] {
        let mut world = world();
        world.set_policy(&policy);
        world.pods.clear();
        world.restart(Restart::Nothing);
        world.tick();
        let mut event = event("GpuMemWatch", &[("GPU", "0")], true, false);
        event.recommended_action = RecommendedAction::ReplaceVm.into();
        reporter.note_in(&mut event);
        world.store(event, world.now);
        let looked = look(&mut world);
        let made = looked.iter().any(|one| !one.creations.is_empty());
        assert_eq!(made, repairs, "{reporter}");
        let phase = if repairs {
            Phase::Remediating
        } else {
            Phase::Drained
        };
        assert_eq!(world.phase(), phase, "{reporter}");
    }
}

#[test]
fn the_senders_word_goes_before_the_route() {
    for (force, skip, phase) in [
        (true, false, Phase::Draining),
        (false, true, Phase::Quarantined),
    ] {
        let mut world = world();
        world.tick();
        let mut event = event("LookFirst", &[("GPU", "0")], true, false);
        event.drain_overrides = Some(BehaviourOverrides { force, skip });
        world.store(event, world.now);
        look(&mut world);
        assert_eq!(world.phase(), phase);
        let drain = session(&world).drain.unwrap().to_string();
        assert_eq!(drain.contains("override"), skip, "{drain}");
    }
}

/// The node's marks suffice to know the route of its events.
#[test]
fn by_what_a_node_says_the_same_route_is_known() {
    let policy = Policy::parse(POLICY, "p").unwrap();
    let of = |world: &World, policy: Option<&Policy>| {
        let node = &world["n1"];
        let events = Ownership::read(node).unwrap().events;
        Desired::of_listed(&events, policy, node)
    };
    let mut world = world();
    fault(&mut world, "LookFirst");
    look(&mut world);
    let desired = of(&world, Some(&policy));
    assert_eq!(desired.drains(), None);
    let route = "policy route 'look first'".to_owned();
    assert_eq!(desired.skipped_by(), Some(route));
    assert_eq!(of(&world, None).drains(), Some(false));
    let mut world = self::world();
    world["n1"].labels.insert("pet".into(), "yes".into());
    fault(&mut world, "Other");
    look(&mut world);
    assert_eq!(of(&world, Some(&policy)).drains(), Some(true));
    assert_eq!(
        Desired::of_listed(&[], Some(&policy), &world["n1"]).drains(),
        None
    );
}
