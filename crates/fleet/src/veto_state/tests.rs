use std::sync::Arc;

use contract::keys;
use jiff::SignedDuration;
use model::node::NodeView;
use model::ownership::Ownership;
use policy::Policy;

use super::*;
use crate::brake::pause::Pause;
use crate::drain::{DrainConfig, PodView};
use crate::remediation::RemediationConfig;
use crate::session::Phase;
use crate::world::{Fate, LookEffects, Restart, World, event, settings};
use crate::{CreateAnswer, FleetInput, PodUpdate, Settings, SwitchState};

/// Creates a controller that evicts pods at once and remediates, and a node with a pod.
fn world() -> World {
    let config = "[[userNamespaces]]\nname = \"*\"\nmode = \"Immediate\"\n";
    let settings = Settings {
        drain: Some(Arc::new(DrainConfig::parse(config, "d").unwrap())),
        remediation: Some(Arc::new(RemediationConfig::builtin())),
        ..settings()
    };
    let mut world = World::with(settings, &Policy::builtin(), [NodeView::unknown("n1")]);
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

fn fault(world: &mut World) {
    world.tick();
    let mut event = event("GpuMemWatch", &[("GPU", "0")], true, false);
    event.recommended_action = 24;
    world.store(event, world.now);
}

fn veto(world: &mut World, hours: i64) {
    let until = world.now + SignedDuration::from_hours(hours);
    let text = format!(r#"{{"by":"anna","reason":"the link","until":"{until}"}}"#);
    world.annotate(keys::VETO, &text);
}

fn awaits(world: &World) -> String {
    world.fleet.status("n1").unwrap().session.unwrap().awaits
}

fn is_journaled(looked: &[LookEffects], text: &str) -> bool {
    let mut notes = looked.iter().flat_map(|one| &one.notes);
    notes.any(|note| note.text.contains(text))
}

/// Looks some times. Returns the effects.
fn look(world: &mut World) -> Vec<LookEffects> {
    (0..6).map(|_| world.look(Fate::Made)).collect()
}

fn quiet(looked: &[LookEffects]) -> bool {
    let quiet = |one: &LookEffects| one.removals.is_empty() && one.creations.is_empty();
    looked.iter().all(quiet)
}

#[test]
fn a_veto_holds_the_drain_back_and_ends_by_itself() {
    let mut world = world();
    veto(&mut world, 4);
    fault(&mut world);
    let looked = look(&mut world);
    // The node is taken out all the same.
    assert!(world["n1"].unschedulable);
    assert!(quiet(&looked));
    assert!(is_journaled(&looked, "held back by the veto of anna"));
    assert_eq!(world.phase(), Phase::Quarantined);
    assert!(awaits(&world).starts_with("the end of the veto of anna until"));
    let status = world.fleet.status("n1").unwrap();
    let drain = status.session.unwrap().drain.unwrap();
    assert!(
        drain
            .to_string()
            .starts_with("NotStarted: held back by the veto of anna")
    );
    // No input is needed: the veto ends by time.
    world.now += SignedDuration::from_hours(4);
    let looked: Vec<LookEffects> = (0..6)
        .map(|_| world.look_without_watch(Fate::Made))
        .collect();
    assert!(is_journaled(&looked, "the veto has ended"));
    assert!(looked.iter().any(|one| !one.removals.is_empty()));
}

#[test]
fn a_drain_that_was_begun_stays_so_and_asks_no_further_pod_to_leave() {
    for restart in [false, true] {
        let mut world = world();
        fault(&mut world);
        look(&mut world);
        assert_eq!(world.phase(), Phase::Draining);
        let since = Ownership::read(&world["n1"])
            .unwrap()
            .mark
            .drain
            .unwrap()
            .since;
        veto(&mut world, 4);
        let pod = PodView {
            name: "b".into(),
            uid: "uid-b".into(),
            ..world.pods["web/a"].clone()
        };
        world.pods.insert("web/b".into(), pod.clone());
        world.deliver_pod_update(PodUpdate::Observed(Box::new(pod)));
        if restart {
            world.restart(Restart::Nothing);
        }
        let looked = look(&mut world);
        assert!(quiet(&looked), "{looked:?}");
        assert!(
            awaits(&world).contains("the veto of anna"),
            "{}",
            awaits(&world)
        );
        let mark = Ownership::read(&world["n1"]).unwrap().mark.drain.unwrap();
        assert_eq!((mark.since, mark.done), (since, None));
        // Pods that leave by themselves are handled, and the remediation waits.
        for title in ["web/a", "web/b"] {
            world.pods.remove(title);
            world.deliver_pod_update(PodUpdate::Gone(title.to_owned()));
        }
        let looked = look(&mut world);
        assert!(quiet(&looked));
        assert_eq!(world.phase(), Phase::Drained);
        assert!(awaits(&world).starts_with("the end of the veto of anna"));
        world["n1"].annotations.remove(keys::VETO);
        let looked = look(&mut world);
        assert!(looked.iter().any(|one| !one.creations.is_empty()));
    }
}

#[test]
fn a_repair_that_was_begun_is_watched_to_its_end() {
    let mut world = world();
    world.pods.clear();
    world.restart(Restart::Nothing);
    fault(&mut world);
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
    assert_eq!(world.phase(), Phase::Remediating);
    veto(&mut world, 4);
    let looked = look(&mut world);
    assert!(looked.iter().all(|one| one.withdrawn.is_empty()));
    assert_eq!(
        awaits(&world),
        format!("the end of RebootNode {}", planned.name)
    );
    let condition = serde_json::json!({"type": "NodeReady", "status": "True"});
    let object = world.resources.get_mut(&planned.name).unwrap();
    object["status"] = serde_json::json!({"conditions": [condition]});
    world.deliver_resources();
    look(&mut world);
    assert_eq!(world.phase(), Phase::Remediated);
}

#[test]
fn a_recovery_and_a_release_wait_for_no_veto_and_it_stays_where_it_is() {
    for release in [false, true] {
        let mut world = world();
        fault(&mut world);
        look(&mut world);
        veto(&mut world, 4);
        look(&mut world);
        if release {
            world.annotate(keys::RELEASE, "{}");
        } else {
            world.recovery(0);
        }
        world.settle_now();
        assert!(!world["n1"].unschedulable);
        assert_eq!(world.phase(), Phase::Idle);
        assert!(world["n1"].annotations.contains_key(keys::VETO));
    }
}

#[test]
fn what_is_no_veto_holds_nothing_back_and_a_person_is_told_once() {
    let mut world = world();
    world.annotate(keys::VETO, "until tomorrow");
    fault(&mut world);
    let looked = look(&mut world);
    assert!(looked.iter().any(|one| !one.removals.is_empty()));
    let messages = looked.iter().flat_map(|one| &one.notes);
    let messages = messages.filter(|note| note.kind == EntryKind::Attention);
    assert_eq!(messages.count(), 1);
    let notes = world.fleet.status("n1").unwrap().notes;
    assert!(
        notes.iter().any(|note| note.contains("does not count")),
        "{notes:?}"
    );
}

#[test]
fn a_repair_that_may_have_been_made_is_looked_for_before_it_is_let_go_of() {
    let pause = |world: &World| Pause {
        reason: "a bad release".to_owned(),
        by: "anna".to_owned(),
        since: world.now,
        until: None,
        repairs: true,
    };
    for [was_made, is_paused] in [[true, false], [true, true], [false, false], [false, true]] {
        let case = format!("made: {was_made}, paused: {is_paused}");
        let mut world = world();
        world.pods.clear();
        fault(&mut world);
        let mut looks = (0..10).map(|_| world.look(Fate::Made).creations.pop());
        let planned = looks.find_map(|one| one).unwrap();
        if was_made {
            let mut object = planned.object.clone();
            object["metadata"]["uid"] = "u".into();
            world.resources.insert(planned.name.clone(), object);
        }
        // The process is killed before the answer; the next one must begin nothing before it has
        // read the switches.
        world.restart(Restart::All);
        switch(&mut world, None, Some("nobody has answered yet"));
        let unread = look(&mut world);
        assert!(unread.iter().all(|one| one.creations.is_empty()), "{case}");
        let withdrawn = |looked: &[LookEffects]| looked.iter().any(|one| !one.withdrawn.is_empty());
        assert_eq!(withdrawn(&unread), !was_made, "{case}");
        let paused = is_paused.then(|| pause(&world));
        switch(&mut world, paused, None);
        let made: Vec<_> = look(&mut world)
            .into_iter()
            .flat_map(|one| one.creations)
            .collect();
        let own = Ownership::read(&world["n1"]).unwrap();
        let attempts = own.mark.remediation.map(|mark| mark.attempts);
        let attempts = attempts.unwrap_or_default();
        let goes_on = attempts.first().is_some_and(|one| one.made.is_some());
        // Work begun before a pause continues; other work waits for its end, and is then made.
        assert_eq!(goes_on, was_made, "{case}");
        let expected = usize::from(was_made || !is_paused);
        assert_eq!(attempts.len(), expected, "{case}");
        assert_eq!(made.len(), usize::from(!was_made && !is_paused), "{case}");
    }
}

/// The resource was looked for and absent, was created then, and the answer is lost.
#[test]
fn that_a_repair_was_not_there_says_nothing_once_it_may_have_been_made() {
    for refused in [false, true] {
        let mut world = world();
        world.pods.clear();
        fault(&mut world);
        let mut looks = (0..10).map(|_| world.look(Fate::Made).creations.pop());
        looks.find_map(|one| one).unwrap();
        world.restart(Restart::All);
        switch(&mut world, None, Some("nobody has answered yet"));
        world.look(Fate::Made);
        switch(&mut world, None, None);
        let mut looks = (0..10).map(|_| world.look(Fate::Made).creations.pop());
        let planned = looks.find_map(|one| one).unwrap();
        let mut object = planned.object.clone();
        object["metadata"]["uid"] = "u".into();
        let begun = serde_json::json!({"type": "SignalSent", "status": "True"});
        object["status"] = serde_json::json!({"conditions": [begun]});
        world.resources.insert(planned.name.clone(), object);
        let answers = |why: &str| {
            let why = why.to_owned();
            [
                CreateAnswer::Failed {
                    why: why.clone(),
                    retry_after: None,
                },
                CreateAnswer::Refused(why),
            ]
        };
        let [lost, no] = answers("lost");
        let answer = |world: &mut World, answer| {
            let (node, key) = ("n1".to_owned(), planned.key.clone());
            world.handle(FleetInput::ResourceCreated { node, key, answer });
        };
        answer(&mut world, lost);
        if refused {
            world.now += SignedDuration::from_secs(5);
            let again = world.look(Fate::Made).creations;
            assert_eq!(again.len(), 1);
            answer(&mut world, no);
        } else {
            veto(&mut world, 4);
        }
        look(&mut world);
        let own = Ownership::read(&world["n1"]).unwrap();
        let attempts = own.mark.remediation.unwrap().attempts;
        let [only] = attempts.as_slice() else {
            panic!("{attempts:?}");
        };
        assert_eq!(only.name, planned.name);
        assert!(only.made.is_some() && only.end.is_none(), "{only:?}");
    }
}

fn switch(world: &mut World, pause: Option<Pause>, unread: Option<&str>) {
    world.handle(FleetInput::Switches(Box::new(SwitchState {
        pause,
        unread: unread.map(str::to_owned),
        ..SwitchState::default()
    })));
}

/// Looks until the node is out of service, and no further.
fn until_cordoned(world: &mut World) {
    for _ in 0..6 {
        if world["n1"].unschedulable {
            return;
        }
        world.look(Fate::Made);
    }
    panic!("{}", awaits(world));
}

#[test]
fn a_pause_of_repairs_is_a_veto_on_every_node() {
    let mut world = world();
    let pause = |world: &World, repairs| Pause {
        reason: "a bad release".to_owned(),
        by: "anna".to_owned(),
        since: world.now,
        until: Some(world.now + SignedDuration::from_hours(2)),
        repairs,
    };
    fault(&mut world);
    // After a start nothing begins before the pause is read.
    switch(&mut world, None, Some("the API server is away"));
    world.annotate("a", "b");
    let all = pause(&world, true);
    let unread = look(&mut world);
    assert!(quiet(&unread) && !is_journaled(&unread, "veto"));
    switch(&mut world, None, None);
    until_cordoned(&mut world);
    switch(&mut world, Some(all), None);
    let looked = look(&mut world);
    assert!(quiet(&looked));
    assert!(is_journaled(&looked, "held back by the veto of anna until"));
    assert!(is_journaled(
        &looked,
        "all repairs are paused: a bad release"
    ));
    // A pause of quarantines alone does not count.
    let other = pause(&world, false);
    switch(&mut world, Some(other), None);
    let looked = look(&mut world);
    assert!(is_journaled(&looked, "the veto has ended"));
    assert!(looked.iter().any(|one| !one.removals.is_empty()));
}

#[test]
fn a_pause_of_repairs_holds_a_node_whose_own_veto_does_not_count() {
    let mut world = world();
    world.annotate(keys::VETO, "until tomorrow");
    let pause = Pause {
        reason: "a bad release".to_owned(),
        by: "anna".to_owned(),
        since: world.now,
        until: None,
        repairs: true,
    };
    fault(&mut world);
    until_cordoned(&mut world);
    switch(&mut world, Some(pause), None);
    assert!(quiet(&look(&mut world)));
    assert!(awaits(&world).starts_with("the end of the veto of anna: all repairs are paused"));
    switch(&mut world, None, None);
    assert!(!quiet(&look(&mut world)));
}

#[test]
fn a_pause_of_repairs_ends_by_itself() {
    let mut world = world();
    let until = world.now + SignedDuration::from_hours(2);
    fault(&mut world);
    until_cordoned(&mut world);
    let pause = Pause {
        reason: "r".to_owned(),
        by: "anna".to_owned(),
        since: world.now,
        until: Some(until),
        repairs: true,
    };
    switch(&mut world, Some(pause), None);
    assert!(quiet(&look(&mut world)));
    world.now = until;
    let looked: Vec<LookEffects> = (0..6)
        .map(|_| world.look_without_watch(Fate::Made))
        .collect();
    assert!(looked.iter().any(|one| !one.removals.is_empty()));
}
