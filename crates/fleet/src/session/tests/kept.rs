//! State that a session keeps over a restart: the node's returns, the end of its wait, the begin
//! of a failing change, and times in the future.

use policy::assess::Desired;

use super::*;
use crate::Owns;

/// Creates a node that was out of service and recovered this many times.
fn flapped(times: u8) -> World {
    let mut world = World::new(&PARSED);
    for gpu in 0..times {
        world.fault(gpu);
        world.settle();
        world.recovery(gpu);
        world.settle();
    }
    assert_eq!(world.session().returns.len(), usize::from(times));
    world
}

fn intent(world: &mut World) -> Option<Intent> {
    world.look(Fate::Made).patch().map(|patch| patch.intent)
}

fn session_annotation(world: &World) -> Value {
    serde_json::from_str(&world["n1"].annotations[keys::SESSION]).unwrap()
}

#[test]
fn a_node_comes_back_at_once_and_then_ever_later() {
    let mut world = World::new(&PARSED);
    for (gpu, wait) in (0..7).zip([0, 30, 60, 120, 240, 480, 600]) {
        world.fault(gpu);
        assert_eq!(world.settle(), [Intent::Quarantine]);
        world.recovery(gpu);
        let from = world.now + SignedDuration::from_secs(1);
        let first = world.look(Fate::Made);
        let done = first.patch().map(|patch| patch.intent);
        if wait == 0 {
            assert_eq!(done, Some(Intent::Return));
            continue;
        }
        let back_at = from + SignedDuration::from_secs(wait);
        // The wait is recorded on the node.
        assert_eq!(done, Some(Intent::Update));
        assert_eq!(session_annotation(&world)["backAt"], json!(back_at));
        let text = format!("given back at {back_at:.0}, for it has");
        let is_noted = first.notes.iter().any(|note| note.text.starts_with(&text));
        assert!(is_noted, "{:?}", first.notes);
        // Nobody is asked meanwhile, and a restart forgets nothing.
        for with in [Restart::All, Restart::Events, Restart::Nothing] {
            world.restart(with);
            assert_eq!(world.settle_now(), []);
            assert_eq!(
                world.session().wake_at(world.now),
                Some(back_at),
                "{with:?}"
            );
            assert!(world.session().awaits(true).contains("within the hour"));
        }
        world.now = back_at - SignedDuration::from_secs(2);
        let looked = world.look(Fate::Made);
        assert!(looked.patch().is_none() && looked.notes.is_empty());
        assert_eq!(world.settle(), [Intent::Return]);
        assert!(world["n1"].annotations.is_empty() && world.phase() == Phase::Idle);
    }
    // After an hour of service it comes back at once.
    world.now += returns::WITHIN;
    world.fault(0);
    world.settle();
    world.recovery(0);
    assert_eq!(intent(&mut world), Some(Intent::Return));
}

#[test]
fn a_new_fault_during_the_wait_keeps_the_node_out_in_the_same_session() {
    let mut world = flapped(2);
    world.fault(0);
    world.settle();
    let session = world.session().id.clone();
    world.recovery(0);
    assert_eq!(intent(&mut world), Some(Intent::Update));
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(
        (world.phase(), &world.session().id),
        (Phase::Quarantined, &session)
    );
    assert_eq!(world.session().returns.len(), 2, "it did not come back");
    assert_eq!(session_annotation(&world)["backAt"], Value::Null);
    // The next recovery waits as long again.
    world.recovery(1);
    let back_at = world.now + SignedDuration::from_secs(1) + returns::wait(2);
    world.settle_now();
    assert_eq!(world.session().waits_until(), Some(back_at));
}

#[test]
fn what_a_person_does_waits_for_nothing() {
    type Hand = fn(&mut World);
    let hands: [(Hand, Intent); 2] = [
        (|world| world["n1"].unschedulable = false, Intent::Return),
        (
            |world| world.annotate(keys::RELEASE, "now"),
            Intent::StandDown,
        ),
    ];
    for (hand, expected) in hands {
        let mut world = flapped(5);
        world.fault(0);
        world.settle();
        world.recovery(0);
        assert_eq!(world.settle_now(), [Intent::Update]);
        hand(&mut world);
        assert_eq!(intent(&mut world), Some(expected));
    }
}

/// The input is untrusted: anyone who may annotate the node may have written it.
#[test]
fn what_a_node_says_of_its_wait_holds_within_bounds() {
    let mut world = flapped(1);
    world.fault(0);
    world.settle();
    world.recovery(0);
    world.settle_now();
    let mut session = session_annotation(&world);
    session["backAt"] = json!("9998-01-01T00:00:00Z");
    let many = (0..100).map(|minute| world.now + SignedDuration::from_mins(minute - 50));
    session["returns"] = many.map(|at| json!(at)).collect();
    world.annotate(keys::SESSION, session.to_string());
    world.restart(Restart::Nothing);
    world.look(Fate::Made);
    let latest = world.now + returns::LONGEST_WAIT;
    assert_eq!(world.session().back_at, Some(latest));
    assert!(world.session().returns.len() <= returns::MAX_RETURNS);
    assert!(world.session().returns.iter().all(|at| *at <= world.now));
    assert_eq!(world.settle(), [Intent::Return]);
    assert!(world.now <= latest + SignedDuration::from_secs(2));
}

#[test]
fn a_person_is_asked_also_where_it_restarts_all_the_time() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    let asked = (0..20).find(|_| {
        let looked = world.look(Fate::Refused);
        world.now += SignedDuration::from_secs(9);
        world.restart(Restart::All);
        let mut notes = looked.notes.iter();
        notes.any(|note| note.kind == EntryKind::Attention)
    });
    assert_eq!(asked, Some(6), "after a minute");
    assert_eq!(world.session().failures, 7);
    // The note appears once.
    let notes = world.look(Fate::Refused).notes;
    assert!(notes.iter().all(|note| note.kind != EntryKind::Attention));
}

#[test]
fn a_release_in_the_future_dismisses_what_was_before_it_was_seen() {
    let mut world = World::new(&PARSED);
    world.annotate(keys::RELEASED_AT, "9998-01-01T00:00:00Z");
    world.fault(0);
    let seen = world.now + SignedDuration::from_secs(1);
    assert_eq!(world.settle(), []);
    let notes = world.fleet.status("n1").unwrap().notes;
    assert!(
        notes.iter().any(|note| note.contains("9998-01-01")),
        "{notes:?}"
    );
    world.restart(Restart::All);
    world.now += SignedDuration::from_hours(1);
    assert_eq!(world.settle(), [], "it does not move with the clock");
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    // The patch has written the time as it counts, for a process with another store.
    assert_eq!(world["n1"].annotations[keys::RELEASED_AT], seen.to_string());
    assert_eq!(world["n1"].annotations.get(keys::RELEASE), None);
    world.restart(Restart::Events);
    assert_eq!(world.settle(), []);
    assert_eq!(world.phase(), Phase::Quarantined);
}

#[test]
fn a_session_that_begins_in_the_future_began_when_it_was_first_seen() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    let mut session = session_annotation(&world);
    session["since"] = json!("9998-01-01T00:00:00Z");
    world.annotate(keys::SESSION, session.to_string());
    let seen = world.now + SignedDuration::from_secs(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(Ownership::read(&world["n1"]).unwrap().since, Some(seen));
    assert!(world.session().times.is_empty());
}

#[test]
fn a_release_that_was_asked_for_in_the_future_is_one_of_now() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    let request = json!({"by": "alice", "reason": "r", "at": "9998-01-01T00:00:00Z"});
    world.annotate(keys::RELEASE, request.to_string());
    let looked = world.look(Fate::Made);
    let mut notes = looked.notes.iter();
    assert!(
        notes.any(|note| note.text.contains("lies in the future")),
        "{:?}",
        looked.notes
    );
    let until = &world["n1"].annotations[keys::RELEASED_AT];
    assert_eq!(*until, world.now.to_string());
}

#[test]
fn a_session_that_is_taken_over_is_signed_anew_once() {
    let mut world = World::new(&PARSED);
    world.settings.owns = Owns::Node("n1".to_owned());
    let mut look = |store: &str, fault: bool| {
        if world.settings.store != store {
            world.tick();
            store.clone_into(&mut world.settings.store);
            world.restart(Restart::Nothing);
        }
        if fault {
            world.fault(0);
        }
        let patched = !world.settle().is_empty();
        let own = Ownership::read(&world["n1"]).unwrap();
        let taken_over = own.mark.taken_over.map(|at| at <= world.now);
        (patched, own.mark.store.unwrap(), taken_over, own.since)
    };
    let (patched, store, taken_over, since) = look("a", true);
    assert_eq!((patched, store.as_str(), taken_over), (true, "a", None));
    assert_eq!(look("a", false), (false, "a".to_owned(), None, since));
    let signed = look("b", false);
    assert_eq!(signed, (true, "b".to_owned(), Some(true), since));
    assert_eq!(look("b", false), (false, signed.1, Some(true), since));
}

/// Otherwise an uncordon by hand would be undone at each look until the clock has reached that
/// time.
#[test]
fn what_a_person_did_holds_where_our_own_clock_was_ahead() {
    let mut world = World::new(&PARSED);
    let right = world.now;
    world.now += SignedDuration::from_hours(6);
    world.fault(0);
    world.settle();
    world.now = right;
    world["n1"].unschedulable = false;
    assert_eq!(world.settle(), [Intent::StandDown]);
    assert_eq!(world.settle(), []);
    assert!(!world["n1"].unschedulable && world.session().times.notes().next().is_none());
    world.restart(Restart::All);
    assert_eq!(world.settle(), []);
}

#[test]
fn a_session_that_is_newer_than_what_was_kept_is_read_off_the_node() {
    let now = Timestamp::from_second(1_800_000_000).unwrap();
    let mut kept = Session::idle(now);
    (kept.phase, kept.back_at) = (Phase::Returning, Some(now));
    kept.id = Some("old".to_owned());
    let back_at = now + SignedDuration::from_mins(5);
    let says =
        json!({"id": "new", "since": now, "backAt": back_at, "returns": [now], "labels": {}});
    let mut node = NodeView::unknown("n1");
    let key = keys::SESSION.to_owned();
    node.annotations.insert(key, says.to_string());
    let observed = ObservedNode::of(Arc::new(node));
    let marks = Marks::default();
    let step = step(
        &kept,
        &Desired::default(),
        Some(&observed),
        &marks,
        None,
        None,
        now,
    );
    let Session {
        returns,
        back_at: waits,
        ..
    } = step.session;
    assert_eq!((returns.len(), waits), (1, Some(back_at)));
}

#[test]
fn an_uncordon_that_nobody_saw_is_of_any_time_however_often_it_is_tried() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world.restart(Restart::All);
    world["n1"].unschedulable = false;
    let patch = world.look(Fate::Refused).patch().unwrap();
    assert_eq!(patch.intent, Intent::StandDown);
    assert!(!world.session().watched);
}
