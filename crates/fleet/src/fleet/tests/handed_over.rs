//! Nodes handed over to an external system: nothing new is done to them, and they are given back
//! as usual.

use super::*;
use crate::drain::{DrainConfig, PodView};
use crate::session::Phase;
use crate::world::{Fate, Restart};

fn world() -> World {
    let drain = DrainConfig::parse(
        "[[userNamespaces]]\nname = \"*\"\nmode = \"Immediate\"",
        "d",
    );
    let settings = Settings {
        drain: Some(Arc::new(drain.unwrap())),
        ..settings()
    };
    let mut world = World::with(settings, &Policy::builtin(), [NodeView::unknown("n1")]);
    for name in ["a", "b"] {
        let pod = PodView {
            namespace: "jobs".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            ..PodView::default()
        };
        world.pods.insert(pod.title(), pod);
    }
    world.restart(Restart::Nothing);
    world
}

fn hand_over(world: &mut World) {
    let (key, value) = (keys::HANDED_OVER_LABEL.to_owned(), "false".to_owned());
    world["n1"].labels.insert(key, value);
}

fn take_back(world: &mut World) {
    world["n1"].labels.remove(keys::HANDED_OVER_LABEL);
}

fn awaits(world: &World) -> String {
    world.fleet.status("n1").unwrap().session.unwrap().awaits
}

#[test]
fn its_pods_stay_until_it_is_back() {
    let mut world = world();
    world.fault(0);
    // The node is taken out of service, and handed over before the first pod has left.
    let quarantined = world.look(Fate::Made);
    assert_eq!(quarantined.patch().unwrap().intent, Intent::Quarantine);
    hand_over(&mut world);
    for _ in 0..5 {
        assert!(world.look(Fate::Made).removals.is_empty());
    }
    assert!(
        awaits(&world).contains("external system"),
        "{}",
        awaits(&world)
    );
    take_back(&mut world);
    let mut removed = 0;
    for _ in 0..5 {
        removed += world.look(Fate::Made).removals.len();
    }
    assert_eq!(removed, 2);
    // In the middle of a drain no further pod is evicted.
    let mut world = self::world();
    world.fault(0);
    while world.phase() != Phase::Draining {
        world.look(Fate::Made);
        hand_over(&mut world);
        if world.phase() == Phase::Quarantined {
            take_back(&mut world);
        }
    }
    for _ in 0..5 {
        assert!(world.look(Fate::Made).removals.is_empty());
    }
    assert_eq!(world.phase(), Phase::Draining);
}

#[test]
fn a_recovery_gives_it_back_all_the_same() {
    let mut world = world();
    world.fault(0);
    world.settle_now();
    hand_over(&mut world);
    world.recovery(0);
    world.settle();
    assert_eq!(world.phase(), Phase::Idle);
    assert!(!world["n1"].unschedulable && world["n1"].annotations.is_empty());
    // The label of others stays.
    assert_eq!(world["n1"].labels.len(), 1);
}

#[test]
fn a_second_fault_adds_nothing_to_what_is_done() {
    let policy = r#"
        [[rule-sets]]
        name = "mild"
        [[rule-sets.match.any]]
        kind = "HealthEvent"
        expression = "event.checkName == 'Mild'"
        [rule-sets.taint]
        key = "mild"
        value = "true"
        effect = "NoSchedule"

        [[rule-sets]]
        name = "grave"
        [[rule-sets.match.any]]
        kind = "HealthEvent"
        expression = "event.checkName == 'Grave'"
        [rule-sets.cordon]
        shouldCordon = true
    "#;
    let policy = Policy::parse(policy, "p").unwrap();
    let mut world = World::with(settings(), &policy, [NodeView::unknown("n1")]);
    world.restart(Restart::Nothing);
    world.event("Mild", 0, true, false);
    world.settle_now();
    assert_eq!(world["n1"].taints.len(), 1);
    hand_over(&mut world);
    world.event("Grave", 0, true, false);
    world.settle_now();
    assert!(!world["n1"].unschedulable);
    assert_eq!(world["n1"].taints.len(), 1);
    take_back(&mut world);
    world.settle_now();
    assert!(world["n1"].unschedulable);
}
