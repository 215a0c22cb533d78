//! Tests of the fleet as one object: inputs in, effects out.

mod causes;
mod handed_over;
mod routes;
mod shown;

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use jiff::SignedDuration;
use model::fault::MAX_OPEN_FAULTS_PER_NODE;
use model::ownership::Ownership;
use model::reporter::Reporter;
use serde_json::{Value, json};

use super::*;
use crate::session::{Intent, Phase};
use crate::world::{World, event, settings};
use crate::{EventInStore, LIST_DELAY, Owns, PatchAnswer, Purpose};

const DAY: SignedDuration = SignedDuration::from_hours(24);

/// Creates a controller that has observed nothing of its cluster.
fn acting(owns: Owns) -> World {
    let settings = Settings { owns, ..settings() };
    World::with(settings, &Policy::builtin(), [])
}

/// Creates a controller of a cluster that has `n1`, which has one fault.
fn faulty() -> World {
    let mut world = acting(Owns::All);
    world.report_of("n1", false);
    world.handle(FleetInput::CaughtUp);
    list(&mut world, &[object("n1", 1)]);
    world
}

fn start() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn list(world: &mut World, objects: &[Value]) {
    world.handle(FleetInput::ListBegun);
    for object in objects {
        world.handle(seen(object));
    }
    world.handle(FleetInput::Listed);
}

/// Decides, and returns all effects without answering any.
fn all_effects(world: &mut World) -> Vec<Effect> {
    world.fleet.decide(world.now)
}

fn object(name: &str, version: u32) -> Value {
    let metadata = json!({"name": name, "uid": name, "resourceVersion": version.to_string()});
    json!({"metadata": metadata, "spec": {}, "status": {}})
}

fn seen(object: &Value) -> FleetInput {
    FleetInput::NodeObserved(Arc::new(NodeView::from_object(object.clone()).unwrap()))
}

/// Returns the input for a node object created at `created`, of a machine.
fn of_machine(uid: &str, machine: &str, created: Timestamp) -> FleetInput {
    seen(&json!({
        "metadata": {"name": "n1", "uid": uid, "creationTimestamp": created.to_string()},
        "status": {"nodeInfo": {"systemUUID": machine, "bootID": "b"}},
    }))
}

#[test]
fn a_node_that_comes_by_the_name_of_another_has_never_come_back() {
    let mut entry = NodeEntry::new(start());
    entry.session.returns = vec![start()];
    entry.session.back_at = Some(start());
    entry.remove_from_cluster();
    assert_eq!(
        (entry.session.returns, entry.session.back_at),
        (vec![], None)
    );
}

#[test]
fn a_clock_that_is_put_back_makes_no_window_longer() {
    let mut world = faulty();
    let kept = SavedState {
        book: FaultBook::default(),
        reports: BTreeMap::new(),
        recently_out: [("n2".to_owned(), start())].into(),
        begun: start(),
        sessions: BTreeMap::new(),
        unsaved: BTreeSet::new(),
    };
    world.fleet.restore(kept, start());
    world.now = start() - DAY;
    world.handle(FleetInput::CaughtUp);
    assert_eq!(world.fleet.recently_out()["n2"], world.now);
}

#[test]
fn what_waits_for_an_answer_is_not_looked_at_again_and_again() {
    let mut world = faulty();
    assert_eq!(world.decide().patches.len(), 1);
    // The API server is silent for longer than it takes until a person is asked.
    let mut looks = 0;
    while let Some(at) = world.fleet.wake_at().filter(|_| looks < 10) {
        looks += 1;
        world.now = world.now.max(at);
        all_effects(&mut world);
    }
    assert!(looks < 10);
}

#[test]
fn a_store_that_does_not_answer_holds_up_the_nodes_that_it_was_asked_about_and_no_other() {
    let mut world = acting(Owns::All);
    world.report_of("n2", false);
    world.handle(FleetInput::CaughtUp);
    let mut quarantined = object("n1", 1);
    let listed = json!([{"id": "0123456789abcdef01234567", "agent": "a", "checkName": "c", "isFatal": true}]);
    quarantined["metadata"]["annotations"] =
        json!({keys::QUARANTINE_HEALTH_EVENT: listed.to_string()});
    list(&mut world, &[quarantined, object("n2", 1)]);
    let effects = all_effects(&mut world);
    let asked = |effects: &[Effect]| {
        let asks = |effect: &&Effect| matches!(effect, Effect::LookUp { node, .. } if node == "n1");
        effects.iter().filter(asks).count()
    };
    let patched: Vec<&str> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::PatchNode(planned) => Some(planned.node.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!((asked(&effects), patched), (1, vec!["n2"]));
    // Another look repeats no question.
    let mut labelled = object("n1", 2);
    labelled["metadata"]["annotations"] = json!({
        keys::QUARANTINE_HEALTH_EVENT: listed.to_string(), "another": "one",
    });
    world.handle(seen(&labelled));
    assert_eq!(asked(&all_effects(&mut world)), 0);
    // The question is repeated after a while without an answer.
    let (node, found) = ("n1".to_owned(), None);
    world.handle(FleetInput::EventsFound { node, found });
    assert_eq!(asked(&all_effects(&mut world)), 0);
    world.now = world.fleet.wake_at().unwrap();
    assert_eq!(asked(&all_effects(&mut world)), 1);
    // Events that the node lists and the store does not have are taken over before anything is
    // decided.
    let found = BTreeMap::from([("0123456789abcdef01234567".to_owned(), EventInStore::Missing)]);
    let (node, found) = ("n1".to_owned(), Some(found));
    world.handle(FleetInput::EventsFound { node, found });
    let patches = world.decide().patches;
    assert!(patches.iter().all(|one| one.patch.intent != Intent::Return));
    assert_eq!(world.faults(), 1);
    assert_eq!(world.fleet.session("n1").unwrap().phase, Phase::Quarantined);
}

#[test]
fn another_machine_under_the_name_does_not_inherit_the_faults() {
    let mut world = faulty();
    let later = start() + DAY * 2;
    let conflict = || FleetInput::NodePatched {
        node: "n1".to_owned(),
        answer: PatchAnswer::Conflict,
    };
    world.handle(of_machine(
        "1",
        "old",
        start() - SignedDuration::from_secs(1),
    ));
    assert_eq!(world.decide().patches.len(), 1);
    world.handle(conflict());
    world.handle(FleetInput::NodeGone("n1".to_owned()));
    assert!(world.decide().patches.is_empty());
    assert_eq!(world.faults(), 1);
    // The old machine joins again.
    world.handle(of_machine("2", "old", later));
    world.now += SignedDuration::from_secs(1);
    assert_eq!((world.decide().patches.len(), world.faults()), (1, 1));
    assert_eq!(
        world.fleet.session("n1").unwrap().phase,
        Phase::Quarantining
    );
    world.handle(conflict());
    world.handle(FleetInput::NodeGone("n1".to_owned()));
    assert!(world.decide().patches.is_empty());
    // Another machine joins.
    world.handle(of_machine("3", "new", later));
    assert!(
        world.decide().patches.is_empty(),
        "nothing is decided by faults of the old one"
    );
    assert_eq!(world.faults(), 0);
    assert_eq!(world.fleet.session("n1").unwrap().phase, Phase::Idle);
}

#[test]
fn the_old_faults_of_a_node_that_is_long_gone_are_dropped() {
    let mut world = faulty();
    // The faults are old enough, but the node is gone for a moment only.
    world.now = start() + DAY * 31;
    world.handle(FleetInput::NodeGone("n1".to_owned()));
    world.decide();
    assert_eq!(world.faults(), 1);
    assert_eq!(world.fleet.wake_at(), Some(world.now + DAY));
    world.now += DAY;
    let append = all_effects(&mut world);
    assert!(matches!(
        append[..],
        [Effect::Append {
            purpose: Purpose::Close,
            ..
        }]
    ));
    // A store that does not append is asked again.
    let (node, result) = ("n1".to_owned(), Err(()));
    world.handle(FleetInput::EventsAppended { node, result });
    let again = world.fleet.wake_at().unwrap();
    assert!(again > world.now && all_effects(&mut world).is_empty());
    world.now = again;
    world.decide();
    assert_eq!(world.faults(), 0);
}

#[test]
fn what_another_store_keeps_is_left_alone_whatever_is_known() {
    use crate::entry::Claim;

    let hour = SignedDuration::from_hours(1);
    for (owns, store, begun, expected) in [
        ("n1", "other", start() - hour, Claim::Foreign),
        ("n1", "other", start() + hour, Claim::Ours),
        ("n2", "other", start() + hour, Claim::Foreign),
        ("n1", "ours", start() - hour, Claim::Ours),
    ] {
        let mut world = acting(Owns::Node(owns.to_owned()));
        world.fleet.state.begun = begun;
        let known = world.report_of("n1", false);
        let session =
            json!({"id": "s", "since": start().to_string(), "by": "node", "store": store});
        let annotations = json!({
            keys::SESSION: session.to_string(),
            keys::QUARANTINE_HEALTH_EVENT: json!([{"id": known}]).to_string(),
        });
        let metadata = json!({"name": "n1", "annotations": annotations});
        let view = NodeView::from_object(json!({ "metadata": metadata })).unwrap();
        let own = Ownership::read(&view);
        let mut look = world.fleet.look("n1").unwrap();
        let claim = look.claim(own.as_ref());
        assert_eq!(claim, expected, "{owns} {store}");
        look.record_claim(own.as_ref(), claim);
        let entry = &world.fleet.nodes["n1"];
        assert_eq!(entry.claim.foreign.is_some(), claim == Claim::Foreign);
        assert_eq!(
            entry.claim.on_our_node,
            entry.claim.foreign.is_some() && owns == "n1"
        );
    }
}

#[test]
fn of_a_node_that_the_cluster_lacks_no_events_are_kept_for_their_status() {
    let mut world = faulty();
    assert!(world.fleet.reports("n1").is_some());
    world.handle(FleetInput::NodeGone("n1".to_owned()));
    world.decide();
    assert!(world.fleet.reports("n1").is_none());
    assert_eq!(world.faults(), 1);
}

#[test]
fn a_session_that_begins_in_the_future_counts_from_when_it_was_seen() {
    let mut world = faulty();
    let session = json!({"id": "s", "since": Timestamp::MAX.to_string()});
    let mut out = object("n1", 2);
    out["metadata"]["annotations"] = json!({keys::SESSION: session.to_string()});
    world.handle(seen(&out));
    all_effects(&mut world);
    assert_eq!(world.fleet.nodes["n1"].out_since(), Some(start()));
}

/// As after a restore of etcd from a backup.
#[test]
fn a_list_may_go_back_but_not_behind_our_own_patch() {
    let mut world = faulty();
    let known = |world: &World| {
        let view = world.fleet.view("n1").unwrap();
        view.resource_version.clone()
    };
    let applied = |version| seen(&object("n1", version));
    world.handle(applied(1_000));
    world.handle(applied(5));
    assert_eq!(known(&world), "1000", "late, and not from a list");
    world.fleet.nodes.get_mut("n1").unwrap().patch.answered_at = Some(world.now);
    for (inputs, expected) in [
        (
            [FleetInput::ListBegun, applied(6), FleetInput::Listed],
            "1000",
        ),
        ([FleetInput::ListBegun, applied(7), FleetInput::Listed], "7"),
        ([applied(6), applied(8), applied(5)], "8"),
    ] {
        for input in inputs {
            world.handle(input);
        }
        assert_eq!(known(&world), expected);
        world.now += LIST_DELAY + SignedDuration::from_secs(1);
    }
}

#[test]
fn a_clock_that_is_put_back_ends_all_waits() {
    let mut world = faulty();
    // The answer to the first try is lost.
    assert_eq!(world.decide().patches.len(), 1);
    let (node, answer) = ("n1".to_owned(), PatchAnswer::Unknown);
    world.handle(FleetInput::NodePatched { node, answer });
    assert_eq!(world.fleet.brake.doubt_ends, Some(start() + DOUBT));
    assert!(world.decide().patches.is_empty(), "it waits");

    let hour = SignedDuration::from_hours(1);
    world.now = start() - hour;
    assert_eq!(world.decide().patches.len(), 1);
    let ends = Some(start() - hour + DOUBT);
    assert_eq!(world.fleet.nodes["n1"].patch.in_doubt, ends);
    assert_eq!(world.fleet.brake.doubt_ends, ends);
}

#[test]
fn what_waits_for_the_store_is_not_let_go_by_the_brake() {
    use crate::agenda::StoreQuestion;

    let settings = Settings {
        brake: true,
        ..settings()
    };
    let mut world = World::with(settings, &Policy::builtin(), []);
    world.handle(FleetInput::CaughtUp);
    list(&mut world, &[object("n1", 1)]);
    let breaker = |breaker| {
        FleetInput::Switches(Box::new(SwitchState {
            breaker,
            ..SwitchState::default()
        }))
    };
    world.handle(breaker(Some(Hold::Tripped)));
    world.report_of("n1", false);
    all_effects(&mut world);
    assert!(world.fleet.hold("n1").is_some());
    // A question about the node, and then the breaker is closed.
    let entry = world.fleet.nodes.get_mut("n1").unwrap();
    entry.claim.question = Some(StoreQuestion::LookUp);
    world.fleet.look_again_at("n1");
    world.handle(breaker(None));
    let patches = |world: &mut World| {
        let effects = all_effects(world).into_iter();
        let is_patch = |effect: &Effect| matches!(effect, Effect::PatchNode(_));
        effects.filter(is_patch).count()
    };
    assert_eq!(patches(&mut world), 0, "what it was to be may be no more");
    let (node, found) = ("n1".to_owned(), Some(BTreeMap::new()));
    world.handle(FleetInput::EventsFound { node, found });
    assert_eq!(patches(&mut world), 1);
}

#[test]
fn who_is_told_of_a_node_hears_of_it_once() {
    let mut world = World::new(&Policy::builtin());
    world.fault(0);
    world.settle();
    let messages = |world: &mut World| {
        world.fleet.look_again_at("n1");
        let effects = all_effects(world);
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::UpdateConditions(_)))
    };
    assert!(!messages(&mut world), "nothing is new");
    world.event("GpuMemWatch", 0, true, false);
    assert!(messages(&mut world), "the same fault was reported again");
    assert!(!messages(&mut world));
    world.event("GpuOther", 0, false, true);
    assert!(messages(&mut world), "another check has spoken");
    world["n1"].labels.insert("zone".into(), "a".into());
    world.deliver_node("n1");
    assert!(messages(&mut world), "the node has changed");
    assert!(!messages(&mut world));
}

#[test]
fn nothing_is_told_on_a_node_before_its_cordon_is_answered() {
    let mut world = faulty();
    let messages = |effects: &[Effect]| {
        let tells = |effect: &&Effect| matches!(effect, Effect::UpdateConditions(_));
        effects.iter().filter(tells).count()
    };
    let effects = all_effects(&mut world);
    assert_eq!(messages(&effects), 0);
    let planned = effects.into_iter().find_map(|effect| match effect {
        Effect::PatchNode(planned) => Some(planned),
        _ => None,
    });
    let planned = planned.unwrap();
    // Another look patches nothing either: the watch delivers changes of others to the node.
    let mut labelled = object("n1", 2);
    labelled["metadata"]["labels"] = json!({"zone": "a"});
    world.handle(seen(&labelled));
    assert_eq!(messages(&all_effects(&mut world)), 0);
    let mut made = planned.view.after(&planned.patch.change);
    made.resource_version = "3".to_owned();
    let (node, answer) = (planned.node, PatchAnswer::Made(Arc::new(made)));
    world.handle(FleetInput::NodePatched { node, answer });
    assert_eq!(messages(&all_effects(&mut world)), 1);
}

#[test]
fn heartbeats_and_answers_ask_the_brake_nothing() {
    let mut world = faulty();
    let patches = world.decide().patches;
    world.fleet.show_brake(world.now);
    assert!(!world.fleet.brake.stale, "its cordon was counted before");

    let ready = json!({"type": "Ready", "status": "True", "lastHeartbeatTime": "1"});
    let made = patches[0].view.after(&patches[0].patch.change);
    let mut out = made.object();
    out["metadata"]["resourceVersion"] = "2".into();
    out["status"]["conditions"] = json!([ready]);
    let made = Arc::new(NodeView::from_object(out.clone()).unwrap());
    let (node, answer) = ("n1".to_owned(), PatchAnswer::Made(made));
    world.handle(FleetInput::NodePatched { node, answer });
    all_effects(&mut world);
    assert!(!world.fleet.brake.stale, "it counts as out, as before");
    world.fleet.show(&[], world.now);
    world.fleet.take_view_changed();

    // Nothing is to be looked at or shown either.
    out["metadata"]["resourceVersion"] = "3".into();
    out["status"]["conditions"][0]["lastHeartbeatTime"] = "2".into();
    world.handle(seen(&out));
    assert!(world.fleet.agenda.dirty.is_empty() && !world.fleet.take_view_changed());
    assert!(!world.fleet.brake.stale);
    let newest = &world.fleet.view("n1").unwrap().resource_version;
    assert_eq!(newest, "3", "the newest is kept");

    // Conditions matter to the rules only; one GPU node more counts for the brake.
    out["metadata"]["resourceVersion"] = "4".into();
    out["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
    world.handle(seen(&out));
    assert!(world.fleet.agenda.dirty.contains("n1") && !world.fleet.brake.stale);
    out["metadata"]["resourceVersion"] = "5".into();
    out["metadata"]["labels"]["gpu"] = "true".into();
    world.handle(seen(&out));
    assert!(world.fleet.brake.stale);
}

#[test]
fn a_node_is_not_given_back_while_reports_of_monitors_wait_for_room() {
    let report = |world: &mut World, gpu: usize, healthy| {
        world.tick();
        let mut event = event("Check", &[("GPU", &gpu.to_string())], true, healthy);
        Reporter::Monitor.note_in(&mut event);
        world.store(event, world.now);
    };
    for by_hand in [false, true] {
        let mut world = World::new(&Policy::builtin());
        for gpu in 0..=MAX_OPEN_FAULTS_PER_NODE {
            report(&mut world, gpu, false);
        }
        assert_eq!(world.settle(), [Intent::Quarantine]);
        for gpu in 0..MAX_OPEN_FAULTS_PER_NODE {
            report(&mut world, gpu, true);
        }
        assert_eq!((world.faults(), world.fleet.book().missed("n1")), (0, 1));
        if by_hand {
            world["n1"].unschedulable = false;
            assert_eq!(world.settle_now(), [Intent::Return]);
            continue;
        }
        assert_eq!(world.settle_now(), []);
        let session = world.fleet.status("n1").unwrap().session.unwrap();
        assert!(session.awaits.contains("read again"), "{session:?}");
        // The fault persists, which is known once it is read again.
        let mut again = world.fleet.book().read_again("").unwrap();
        let after = again.read_up_to();
        for record in world.stored.iter().filter(|record| record.seq > after) {
            again.record(record);
        }
        world.handle(FleetInput::Reread(Box::new(again)));
        assert_eq!(
            (world.faults(), world.settle_now()),
            (1, vec![Intent::Update])
        );
        assert_eq!(world.phase(), Phase::Quarantined);
        report(&mut world, MAX_OPEN_FAULTS_PER_NODE, true);
        assert_eq!(world.settle(), [Intent::Return]);
    }
}
