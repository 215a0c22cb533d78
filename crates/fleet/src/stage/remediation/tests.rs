use std::sync::Arc;

use contract::keys;
use jiff::SignedDuration;
use model::attempt::RemediationProgress;
use model::status::SessionChange;
use policy::Policy;
use serde_json::{Value, json};

use super::*;
use crate::drain::DrainConfig;
use crate::remediation::RemediationConfig;
use crate::session::Phase;
use crate::status::StatusUpdate;
use crate::view::NodeState;
use crate::world::{Fate, LookEffects, Restart, World, event, settings};
use crate::{FleetInput, PlannedResource, Settings};

mod analysis;
mod changes;
mod diagnostics;
mod simulator;
mod ways_out;

#[test]
fn the_records_say_that_a_repair_was_tried_and_how_it_ended() {
    let mut world = world();
    fault(&mut world, 0, 24);
    let planned = until_made(&mut world);
    make(&mut world, &planned);
    let until_said = |world: &mut World| {
        let mut looks = (0..5).map(|_| recorded(&world.look(Fate::Made)));
        looks.find_map(|found| found)
    };
    assert_eq!(until_said(&mut world).unwrap().remediated, None);
    set(&mut world, &planned.name, failed("PermanentFailure"));
    assert_eq!(until_said(&mut world).unwrap().remediated, Some(false));
    world.restart(Restart::Nothing);
    let again = until_said(&mut world).unwrap();
    assert_eq!(again.remediated, Some(false), "it is said again");

    let mut world = self::world();
    fault(&mut world, 0, 24);
    let planned = until_made(&mut world);
    make(&mut world, &planned);
    assert_eq!(until_said(&mut world).unwrap().remediated, None);
    set(&mut world, &planned.name, done());
    assert_eq!(until_said(&mut world).unwrap().remediated, Some(true));
    assert_eq!(until_said(&mut world), None, "it is said once");
}

/// Returns the settings of a controller that remediates.
fn remediates() -> Settings {
    Settings {
        drain: Some(Arc::new(DrainConfig::default())),
        remediation: Some(Arc::new(RemediationConfig::builtin())),
        ..settings()
    }
}

fn world_with(settings: Settings) -> World {
    let mut world = World::with(settings, &Policy::builtin(), [NodeView::unknown("n1")]);
    world.restart(Restart::Nothing);
    world
}

fn world() -> World {
    world_with(remediates())
}

/// Reports a fault of a GPU with this recommended action. Returns the event's id.
fn fault(world: &mut World, gpu: u8, action: i32) -> String {
    world.tick();
    let mut event = event("GpuMemWatch", &[("GPU", &gpu.to_string())], true, false);
    event.recommended_action = action;
    world.store(event, world.now)
}

fn state(world: &World) -> Option<&str> {
    let labels = &world["n1"].labels;
    labels.get(keys::STATE_LABEL).map(String::as_str)
}

fn awaits(world: &World) -> String {
    world.fleet.status("n1").unwrap().session.unwrap().awaits
}

fn attempts(world: &World) -> Vec<Attempt> {
    let own = Ownership::read(&world["n1"]);
    let mark = own.and_then(|own| own.mark.remediation);
    mark.map(|mark| mark.attempts).unwrap_or_default()
}

/// Looks until a custom resource is to be created.
fn until_made(world: &mut World) -> PlannedResource {
    for _ in 0..10 {
        if let Some(planned) = world.look(Fate::Made).creations.pop() {
            return planned;
        }
    }
    panic!("{:?} {}", world.phase(), awaits(world));
}

/// Creates a custom resource, as the API server would, and answers.
fn make(world: &mut World, planned: &PlannedResource) {
    let made = world.resources.entry(planned.name.clone());
    let mut object = planned.object.clone();
    object["metadata"]["uid"] = json!(format!("uid-{}", planned.key));
    let object = made.or_insert(object).clone();
    let (node, key) = ("n1".to_owned(), planned.key.clone());
    let answer = CreateAnswer::There(Box::new(object));
    world.handle(FleetInput::ResourceCreated { node, key, answer });
}

/// Returns the last progress of the remediation in the records of the events.
fn recorded(looked: &LookEffects) -> Option<RemediationProgress> {
    let mut repairs = looked.statuses.iter().filter_map(|status| match status {
        StatusUpdate::Session {
            change: SessionChange::Remediation(repair),
            ..
        } => Some(repair.clone()),
        _ => None,
    });
    repairs.next_back()
}

/// Sets the status of a custom resource, as its operator would.
fn set(world: &mut World, name: &str, status: Value) {
    let object = world.resources.get_mut(name).unwrap();
    object["status"] = status;
    world.deliver_resources();
}

fn done() -> Value {
    json!({"completionTime": "2026-11-24T00:00:00Z", "conditions": [
        {"type": "SignalSent", "status": "True", "reason": "Succeeded", "message": "boot-1"},
        {"type": "NodeReady", "status": "True", "reason": "Succeeded", "message": "it is back"},
    ]})
}

fn failed(reason: &str) -> Value {
    json!({"completionTime": "2026-11-24T00:00:00Z", "conditions": [
        {"type": "NodeReady", "status": "False", "reason": "Failed", "message": "it is not back"},
        {"type": "AttemptComplete", "status": "True", "reason": reason, "message": "the provider"},
    ]})
}

/// Begins a remediation: returns the name of its custom resource, which exists.
fn begin(world: &mut World, gpu: u8, action: i32) -> String {
    fault(world, gpu, action);
    let planned = until_made(world);
    make(world, &planned);
    world.settle_now();
    planned.name
}

fn texts(looked: &LookEffects, kind: EntryKind) -> Vec<String> {
    let notes = looked.notes.iter().filter(|note| note.kind == kind);
    notes.map(|note| note.text.clone()).collect()
}

#[test]
fn a_drained_node_is_rebooted_once_and_given_back_as_it_was() {
    let mut world = world();
    let before = world["n1"].clone();
    let id = fault(&mut world, 0, 24);
    let planned = until_made(&mut world);
    // The node's mark comes first.
    assert_eq!(state(&world), Some("remediating"));
    assert_eq!(planned.name, format!("maintenance-n1-{id}"));
    assert_eq!(planned.kind.kind, "RebootNode");
    assert_eq!(planned.object["spec"]["nodeName"], "n1");
    let owner = &planned.object["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["name"]),
        (&json!("Node"), &json!("n1"))
    );
    // The creation is requested once.
    assert!(world.look(Fate::Made).creations.is_empty());
    make(&mut world, &planned);
    world.settle_now();
    assert_eq!(world.phase(), Phase::Remediating);
    let state_of = &world["n1"].annotations[keys::REMEDIATION_STATE];
    let state_of: Value = serde_json::from_str(state_of).unwrap();
    assert_eq!(
        state_of["equivalenceGroups"]["restart"]["maintenanceCR"],
        json!(planned.name)
    );
    assert_eq!(
        state_of["equivalenceGroups"]["restart"]["actionName"],
        "RESTART_BM"
    );
    assert_eq!(
        awaits(&world),
        format!("the end of RebootNode {}", planned.name)
    );
    // Success is recorded only after success.
    assert_eq!(state(&world), Some("remediating"));
    set(&mut world, &planned.name, done());
    world.settle_now();
    assert_eq!(state(&world), Some("remediation-succeeded"));
    assert_eq!(
        world.fleet.status("n1").unwrap().state,
        NodeState::Session(Phase::Remediated)
    );
    assert!(awaits(&world).starts_with("the recovery of its faults after RebootNode"));
    world.recovery(0);
    world.settle();
    assert_eq!(
        (&world["n1"].labels, &world["n1"].annotations, world.phase()),
        (&before.labels, &before.annotations, Phase::Idle)
    );
}

#[test]
fn whoever_starts_anew_makes_no_second_one() {
    for with in [Restart::All, Restart::Events, Restart::Nothing] {
        // Before the creation, after it without the answer, and after the answer.
        for moment in 0..3 {
            let mut world = world();
            fault(&mut world, 0, 24);
            let planned = until_made(&mut world);
            if moment > 0 {
                let mut object = planned.object.clone();
                object["metadata"]["uid"] = json!("u");
                world.resources.insert(planned.name.clone(), object);
            }
            if moment > 1 {
                make(&mut world, &planned);
                world.settle_now();
            }
            world.restart(with);
            for _ in 0..5 {
                for again in world.look(Fate::Made).creations {
                    assert!(moment < 2, "{with:?}");
                    assert_eq!((&again.name, &again.key), (&planned.name, &planned.key));
                    make(&mut world, &again);
                }
            }
            assert_eq!(attempts(&world).len(), 1, "{with:?} {moment}");
            set(&mut world, &planned.name, done());
            world.settle_now();
            assert_eq!(world.phase(), Phase::Remediated, "{with:?} {moment}");
        }
    }
}

#[test]
fn what_is_not_drained_is_not_repaired_but_where_all_pods_are_to_stay() {
    let mut world = world();
    let pod = crate::drain::PodView {
        namespace: "jobs".into(),
        name: "a".into(),
        uid: "u".into(),
        ..Default::default()
    };
    world.pods.insert("jobs/a".into(), pod);
    fault(&mut world, 0, 24);
    for _ in 0..20 {
        assert!(world.look(Fate::Made).creations.is_empty());
    }
    assert!(attempts(&world).is_empty());
    assert!(awaits(&world).starts_with("a pod to leave"));
    world.pods.clear();
    world.deliver_pod_update(crate::PodUpdate::Gone("jobs/a".into()));
    until_made(&mut world);

    let mut world = self::world();
    world.tick();
    let mut stay = event("GpuMemWatch", &[("GPU", "0")], true, false);
    stay.recommended_action = 24;
    stay.drain_overrides = Some(contract::BehaviourOverrides {
        force: false,
        skip: true,
    });
    world.store(stay, world.now);
    until_made(&mut world);
}

#[test]
fn a_second_fault_is_taken_in_and_a_graver_action_covers_it() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    // A fault of the same group needs no further resource.
    fault(&mut world, 1, 15);
    assert!(world.settle_now().len() < 3);
    assert_eq!(attempts(&world).len(), 1);
    set(&mut world, &name, done());
    world.settle_now();
    assert_eq!(world.phase(), Phase::Remediated);
    world.recovery(0);
    world.settle_now();
    assert_eq!(world.phase(), Phase::Remediated);
    // A fault that came after the attempt asks for another.
    let id = fault(&mut world, 2, 24);
    let planned = until_made(&mut world);
    assert!(planned.name.ends_with(&id), "{}", planned.name);
    make(&mut world, &planned);
    world.settle_now();
    set(&mut world, &planned.name, done());
    world.settle_now();
    // A replacement is requested by an event only, and covers the rest.
    fault(&mut world, 3, 25);
    assert_eq!(until_made(&mut world).kind.kind, "TerminateNode");
}

#[test]
fn what_failed_for_now_is_tried_again_and_what_failed_for_good_is_not() {
    let mut world = world();
    let first = begin(&mut world, 0, 24);
    let mut names = vec![first.clone()];
    set(&mut world, &first, failed("TransientFailure"));
    world.settle_now();
    assert!(
        awaits(&world).starts_with("another try of RESTART_BM"),
        "{}",
        awaits(&world)
    );
    while names.len() < 3 {
        world.now += SignedDuration::from_mins(2);
        let planned = until_made(&mut world);
        make(&mut world, &planned);
        world.settle_now();
        set(&mut world, &planned.name, failed("TransientFailure"));
        world.settle_now();
        names.push(planned.name);
    }
    assert_eq!(names[1..], [format!("{first}-2"), format!("{first}-3")]);
    // There is nothing stronger: a person is asked.
    assert_eq!(
        (world.phase(), state(&world)),
        (Phase::RemediationFailed, Some("remediation-failed"))
    );
    assert!(awaits(&world).starts_with("a person: no repair is left to be tried: RebootNode"));
    for _ in 0..20 {
        world.now += SignedDuration::from_hours(1);
        assert!(world.look(Fate::Made).creations.is_empty());
    }
    for reason in ["PermanentFailure", "Cancelled", "Superseded"] {
        let mut world = self::world();
        let name = begin(&mut world, 0, 24);
        set(&mut world, &name, failed(reason));
        let asked: Vec<String> = (0..5)
            .flat_map(|_| texts(&world.look(Fate::Made), EntryKind::Attention))
            .collect();
        assert_eq!(asked.len(), 1, "{asked:?}");
        assert!(
            asked[0].starts_with("the repair makes no progress: "),
            "{asked:?}"
        );
        world.now += SignedDuration::from_hours(1);
        assert!(world.look(Fate::Made).creations.is_empty(), "{reason}");
        // The recovery of the fault, or a person, ends the session.
        world.recovery(0);
        world.settle();
        assert_eq!(world.phase(), Phase::Idle);
    }
}

#[test]
fn what_does_not_help_asks_a_person_and_too_many_attempts_do() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    set(&mut world, &name, done());
    world.settle_now();
    world.now += SignedDuration::from_mins(16);
    world.settle_now();
    assert_eq!(world.phase(), Phase::RemediationFailed);
    assert!(
        awaits(&world).contains("has succeeded"),
        "{}",
        awaits(&world)
    );

    // A node that fails again and again, each time remediated, in sessions of its own.
    let mut world = self::world();
    for index in 0..5 {
        let name = begin(&mut world, 0, 24);
        set(&mut world, &name, done());
        world.settle_now();
        world.recovery(0);
        world.settle();
        world.now += SignedDuration::from_hours(2);
        assert_eq!(world.session().remediations.len(), index + 1);
    }
    fault(&mut world, 0, 24);
    world.restart(Restart::All);
    world.settle_now();
    world.settle_now();
    assert_eq!(world.phase(), Phase::RemediationFailed);
    assert_eq!(
        awaits(&world),
        "a person: 5 repairs were tried within 168 hours, the most allowed"
    );
    assert!(attempts(&world).is_empty());
    // A week later there is room again.
    world.now += SignedDuration::from_hours(160);
    until_made(&mut world);
}

#[test]
fn what_nobody_carries_out_asks_a_person_once_its_pods_have_left() {
    let mut world = world();
    fault(&mut world, 0, 5);
    world.settle_now();
    world.settle_now();
    assert_eq!(
        (world.phase(), state(&world)),
        (Phase::RemediationFailed, Some("remediation-failed"))
    );
    assert_eq!(
        awaits(&world),
        "a person: no repair is configured for CONTACT_SUPPORT"
    );
    // Another fault, with a configured action, is remediated; then a person takes over.
    let name = {
        fault(&mut world, 1, 24);
        let planned = until_made(&mut world);
        make(&mut world, &planned);
        world.settle_now();
        planned.name
    };
    assert_eq!(state(&world), Some("remediating"));
    set(&mut world, &name, done());
    world.settle_now();
    world.recovery(1);
    world.settle_now();
    assert_eq!(state(&world), Some("remediation-failed"));
    // Without a recommended action nothing is remediated, and nobody is asked.
    let mut world = self::world();
    fault(&mut world, 0, 0);
    world.settle_now();
    world.settle_now();
    assert_eq!(
        (world.phase(), state(&world)),
        (Phase::Drained, Some("drain-succeeded"))
    );
}

#[test]
fn a_resource_that_hangs_vanishes_or_cannot_be_read_has_its_end() {
    // The resource hangs: a person is asked, and it may still end.
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    world.now += SignedDuration::from_mins(61);
    world.settle_now();
    assert_eq!(world.phase(), Phase::RemediationFailed);
    assert!(awaits(&world).contains("does not end"));
    set(&mut world, &name, done());
    world.settle_now();
    assert_eq!(world.phase(), Phase::Remediated);
    // A person deletes the resource: it is not created again.
    let mut world = self::world();
    let name = begin(&mut world, 0, 24);
    world.resources.remove(&name);
    world.deliver_resources();
    world.settle_now();
    assert_eq!(world.phase(), Phase::RemediationFailed);
    assert!(awaits(&world).contains("it was deleted before it had ended"));
    // A resource that cannot be read may exist.
    let mut world = self::world();
    let name = begin(&mut world, 0, 24);
    world.restart(Restart::All);
    let update = ResourceUpdate::Failing("403".into());
    let node = "n1".to_owned();
    world.look(Fate::Made);
    world.handle(FleetInput::Resource {
        node,
        name: name.clone(),
        update,
    });
    for _ in 0..5 {
        assert!(world.look(Fate::Made).creations.is_empty());
    }
    assert_eq!(world.phase(), Phase::Remediating);
    assert!(awaits(&world).ends_with("(403)"), "{}", awaits(&world));
}

#[test]
fn one_that_is_wanted_again_while_it_is_made_stays() {
    let mut world = world();
    fault(&mut world, 0, 24);
    let planned = until_made(&mut world);
    world.recovery(0);
    assert_eq!(world.look(Fate::Conflict).withdrawn.len(), 1);
    // The node is not given back yet, and the fault is there again.
    fault(&mut world, 0, 24);
    assert!(world.look(Fate::Made).withdrawn.is_empty());
    make(&mut world, &planned);
    for _ in 0..4 {
        assert!(world.look(Fate::Made).withdrawn.is_empty());
    }
    assert_eq!(state(&world), Some("remediating"));
    let attempts = attempts(&world);
    assert!(attempts.len() == 1 && attempts[0].key() == planned.key);
    assert!(attempts[0].made.is_some() && attempts[0].end.is_none());
}

#[test]
fn one_that_cannot_be_made_is_tried_again_or_given_up() {
    let mut world = world();
    fault(&mut world, 0, 24);
    let planned = until_made(&mut world);
    let answer = |answer| {
        let (node, key) = ("n1".to_owned(), planned.key.clone());
        FleetInput::ResourceCreated { node, key, answer }
    };
    let why = "the cluster has no kind RebootNode".to_owned();
    let fails = || CreateAnswer::Failed {
        why: why.clone(),
        retry_after: None,
    };
    world.handle(answer(fails()));
    let mut tries = 1;
    for _ in 0..120 {
        let looked = world.look(Fate::Made);
        for one in looked.creations {
            assert_eq!(one.key, planned.key);
            tries += 1;
            world.handle(answer(fails()));
        }
    }
    assert!((5..30).contains(&tries), "{tries}");
    assert_eq!(state(&world), Some("remediation-failed"));
    assert!(
        awaits(&world).ends_with(&format!("cannot be made ({why})")),
        "{}",
        awaits(&world)
    );
    // Once the creation succeeds, the remediation continues.
    world.now += SignedDuration::from_mins(1);
    let again = until_made(&mut world);
    make(&mut world, &again);
    world.settle_now();
    assert_eq!(state(&world), Some("remediating"));
    // A creation that the API server refuses for good is not tried again.
    let mut world = self::world();
    fault(&mut world, 0, 24);
    let planned = until_made(&mut world);
    let (node, key) = ("n1".to_owned(), planned.key);
    let answer = CreateAnswer::Refused("spec is wrong".into());
    world.handle(FleetInput::ResourceCreated { node, key, answer });
    world.settle_now();
    assert!(
        awaits(&world).contains("has failed: spec is wrong"),
        "{}",
        awaits(&world)
    );
    // A foreign resource of this name is left alone.
    let mut world = self::world();
    let id = fault(&mut world, 0, 24);
    let theirs = json!({"metadata": {"name": "x", "uid": "theirs"}});
    world
        .resources
        .insert(format!("maintenance-n1-{id}"), theirs);
    let planned = until_made(&mut world);
    make(&mut world, &planned);
    world.settle_now();
    assert!(
        awaits(&world).contains("is there, and not ours"),
        "{}",
        awaits(&world)
    );
    // The resource of another attempt of ours is left alone, too: that is no failed try, and the
    // next attempt has another name.
    let mut world = self::world();
    let id = fault(&mut world, 0, 24);
    let name = format!("maintenance-n1-{id}");
    for taken in [name.clone(), format!("{name}-2")] {
        let before = json!({"metadata": {
            "name": taken, "uid": "before", "annotations": {keys::ATTEMPT: "e/before"},
        }});
        world.resources.insert(taken, before);
    }
    for wanted in [name.clone(), format!("{name}-2"), format!("{name}-3")] {
        let planned = until_made(&mut world);
        assert_eq!(planned.name, wanted);
        make(&mut world, &planned);
    }
    world.settle_now();
    let [one] = attempts(&world).try_into().unwrap();
    assert_eq!((one.name, one.end), (format!("{name}-3"), None));
    assert_eq!(world.session().remediations.len(), 1);
}

#[test]
fn who_ends_the_session_withdraws_the_repair() {
    // An uncordon before it is known whether the resource was created may be a machine's.
    for (by, making) in [
        ("uncordon", &[true][..]),
        ("release", &[false, true]),
        ("recovery", &[false, true]),
    ] {
        for &made in making {
            let mut world = world();
            fault(&mut world, 0, 24);
            let planned = until_made(&mut world);
            if made {
                make(&mut world, &planned);
                world.settle_now();
            }
            match by {
                "uncordon" => world["n1"].unschedulable = false,
                "release" => world.annotate(keys::RELEASE, "{}"),
                _ => world.recovery(0),
            }
            let mut withdrawn: Vec<Attempt> = Vec::new();
            for _ in 0..4 {
                let looked = world.look(Fate::Made);
                assert!(looked.creations.is_empty());
                withdrawn.extend(looked.withdrawn);
            }
            assert_eq!(withdrawn.len(), 1, "{by} {made}");
            assert_eq!(withdrawn[0].name, planned.name);
            if !made {
                // The creation was in flight: the resource is withdrawn once it exists.
                make(&mut world, &planned);
                assert_eq!(world.look(Fate::Made).withdrawn.len(), 1);
            }
            world.settle();
            assert_eq!((state(&world), world.phase()), (None, Phase::Idle), "{by}");
        }
    }
}

#[test]
fn a_dry_run_makes_nothing_and_says_what_it_would_make() {
    let mut world = world_with(Settings {
        mode: Mode::DryRun,
        ..remediates()
    });
    let before = world["n1"].clone();
    let id = fault(&mut world, 0, 24);
    let mut entries = Vec::new();
    for _ in 0..8 {
        let looked = world.look(Fate::Made);
        assert!(looked.creations.is_empty() && looked.patch().is_none());
        entries.extend(texts(&looked, EntryKind::DryRun));
    }
    let wanted = format!("dry run: RebootNode maintenance-n1-{id} is made (RESTART_BM)");
    assert!(entries.contains(&wanted), "{entries:?}");
    assert_eq!(world.phase(), Phase::Remediated);
    assert_eq!(world["n1"].annotations, before.annotations);
}

#[test]
fn the_switch_can_be_taken_back_and_what_is_under_way_comes_to_its_end() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    world.settings = Settings {
        remediation: None,
        ..remediates()
    };
    world.restart(Restart::All);
    world.settle_now();
    assert_eq!(world.phase(), Phase::Remediating);
    set(&mut world, &name, failed("TransientFailure"));
    world.settle_now();
    world.now += SignedDuration::from_hours(1);
    // Nothing new begins.
    assert!(world.look(Fate::Made).creations.is_empty());
    world.settings = remediates();
    world.restart(Restart::All);
    until_made(&mut world);
    // An attempt without a resource is dropped.
    world.settings = settings();
    world.restart(Restart::All);
    world.settle_now();
    assert_eq!(attempts(&world).len(), 1);
}

#[test]
fn a_node_that_is_handed_over_is_left_to_others() {
    let mut world = world();
    fault(&mut world, 0, 5);
    world.settle_now();
    let label = (keys::HANDED_OVER_LABEL.to_owned(), "false".to_owned());
    world["n1"].labels.extend([label]);
    fault(&mut world, 1, 24);
    for _ in 0..10 {
        assert!(world.look(Fate::Made).creations.is_empty());
    }
    assert!(awaits(&world).contains("handed over"), "{}", awaits(&world));
    world["n1"].labels.remove(keys::HANDED_OVER_LABEL);
    until_made(&mut world);
}
