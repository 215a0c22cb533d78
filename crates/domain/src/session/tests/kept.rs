//! What a session keeps that the node does not tell: how often it has come back, how long a
//! change has failed, and times of the future.

use super::*;

/// The session after a restart with its store.
pub(super) fn restarted(session: &Session, now: Timestamp) -> Session {
    let saved = serde_json::to_string(session).unwrap();
    let session: Session = serde_json::from_str(&saved).unwrap();
    session.restored(now)
}

impl World {
    /// Steps once, and makes what follows.
    fn look(&mut self) -> Option<Intent> {
        let patch = self.step().patch?;
        self.node = self.node.after(&patch.change);
        Some(patch.intent)
    }

    /// Out of service and well again, as often.
    fn flapped(times: u8) -> Self {
        let mut world = Self::new();
        for gpu in 0..times {
            world.fault(gpu);
            world.settle();
            world.recovery(gpu);
            world.settle();
        }
        assert_eq!(world.session.returns.len(), usize::from(times));
        world
    }
}

#[test]
fn a_node_comes_back_at_once_and_then_ever_later() {
    let mut world = World::new();
    for (gpu, wait) in (0..7).zip([0, 30, 60, 120, 240, 480, 600]) {
        world.fault(gpu);
        assert_eq!(world.settle(), [Intent::Quarantine]);
        world.recovery(gpu);
        let from = world.now + SignedDuration::from_secs(1);
        let first = world.step();
        if wait == 0 {
            assert_eq!(first.patch.map(|patch| patch.intent), Some(Intent::Release));
        } else {
            let back_at = from + SignedDuration::from_secs(wait);
            assert_eq!(first.patch, None);
            let said = &first.notes[1].text;
            assert!(
                said.starts_with(&format!("given back at {back_at:.0}, for it has")),
                "{said}"
            );
            assert_eq!(world.session.wake_at(), Some(back_at));
            assert!(world.session.awaits(true).contains("within the hour"));
            // A restart forgets nothing, and nobody is asked meanwhile.
            world.session = restarted(&world.session, world.now);
            world.now = back_at - SignedDuration::from_secs(2);
            let step = world.step();
            assert_eq!((step.patch, step.notes), (None, Vec::new()));
        }
        assert_eq!(world.settle(), [Intent::Release]);
        assert!(world.node.annotations.is_empty() && world.session.phase == Phase::Idle);
    }
    // After an hour of service it comes back at once.
    world.now += returns::WITHIN;
    world.fault(0);
    world.settle();
    world.recovery(0);
    assert_eq!(world.look(), Some(Intent::Release));
}

#[test]
fn a_new_fault_during_the_wait_keeps_the_node_out_in_the_same_session() {
    let mut world = World::flapped(2);
    world.fault(0);
    world.settle();
    let session = world.session.id.clone();
    world.recovery(0);
    assert_eq!(world.look(), None);
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(
        (world.session.phase, &world.session.id),
        (Phase::Quarantined, &session)
    );
    assert_eq!(world.session.returns.len(), 2, "it did not come back");
    // Its recovery waits as long again.
    world.recovery(1);
    world.step();
    let back_at = world.now + returns::wait(2);
    assert_eq!(world.session.waits_until(), Some(back_at));
}

#[test]
fn what_a_person_does_waits_for_nothing() {
    type Hand = fn(&mut World);
    let hands: [(Hand, Intent); 2] = [
        (|world| world.node.unschedulable = false, Intent::Release),
        (
            |world| {
                let request = (keys::RELEASE.to_owned(), "now".to_owned());
                world.node.annotations.extend([request]);
            },
            Intent::StandDown,
        ),
    ];
    for (hand, intent) in hands {
        let mut world = World::flapped(5);
        world.fault(0);
        world.settle();
        world.recovery(0);
        assert_eq!(world.look(), None);
        hand(&mut world);
        assert_eq!(world.look(), Some(intent));
    }
}

#[test]
fn a_person_is_asked_also_where_it_restarts_all_the_time() {
    let mut world = World::new();
    world.fault(0);
    let asked = (0..20).find(|_| {
        let step = world.step();
        world
            .session
            .failed(Failure::Error { retry_after: None }, world.now);
        world.now += SignedDuration::from_secs(9);
        world.session = restarted(&world.session, world.now);
        step.notes
            .iter()
            .any(|note| note.kind == EntryKind::Attention)
    });
    assert_eq!(asked, Some(6), "after a minute");
    assert_eq!(world.session.failures, 7);
    // Once.
    assert!(world.step().notes.is_empty());
}

#[test]
fn a_release_in_the_future_dismisses_what_was_before_it_was_seen() {
    let mut world = World::new();
    let future = "9998-01-01T00:00:00Z".to_owned();
    world
        .node
        .annotations
        .insert(keys::RELEASED_AT.into(), future);
    world.fault(0);
    let seen = world.now;
    world.session.take_in_times(&world.node, seen);
    assert_eq!(world.settle(), []);
    world.session = restarted(&world.session, world.now);
    world.now += SignedDuration::from_hours(1);
    assert_eq!(world.settle(), [], "it does not move with the clock");
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    // The patch has written it as it counts, for whoever looks next with another store.
    assert_eq!(world.node.annotations[keys::RELEASED_AT], seen.to_string());
    assert_eq!(world.node.annotations.get(keys::RELEASE), None);
    world.session = Session::idle(world.now);
    assert_eq!(world.settle(), []);
    assert_eq!(world.session.phase, Phase::Quarantined);
}

#[test]
fn a_session_that_begins_in_the_future_began_when_it_was_first_seen() {
    let mut world = World::new();
    world.fault(0);
    world.settle();
    let text = &world.node.annotations[keys::SESSION];
    let mut session: Value = serde_json::from_str(text).unwrap();
    session["since"] = json!("9998-01-01T00:00:00Z");
    let text = session.to_string();
    world.node.annotations.insert(keys::SESSION.into(), text);
    let seen = world.now + SignedDuration::from_secs(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(Ownership::read(&world.node).unwrap().since, Some(seen));
    assert!(world.session.times.is_empty());
}

#[test]
fn a_release_that_was_asked_for_in_the_future_is_one_of_now() {
    let mut world = World::new();
    world.fault(0);
    world.settle();
    let request = json!({"by": "alice", "reason": "r", "at": "9998-01-01T00:00:00Z"});
    world
        .node
        .annotations
        .insert(keys::RELEASE.into(), request.to_string());
    let step = world.step();
    assert!(
        step.notes[0].text.contains("lies in the future"),
        "{:?}",
        step.notes
    );
    let change = step.patch.unwrap().change;
    let until = change.annotations[keys::RELEASED_AT].as_deref();
    assert_eq!(until, Some(world.now.to_string().as_str()));
}

#[test]
fn a_session_that_is_taken_over_is_signed_anew_once() {
    let mut world = World::new();
    world.fault(0);
    let look = |world: &mut World, store: &str| {
        world.tick();
        let marks = Marks {
            maker: Some(Maker::Node),
            store: Some(store.to_owned()),
            ..Marks::of(&world.policy)
        };
        let (desired, node) = (world.desired(), world.node.clone());
        let patch = step(
            &world.session,
            &desired,
            Some(&node),
            &marks,
            None,
            world.now,
        )
        .patch;
        if let Some(patch) = &patch {
            world.node = node.after(&patch.change);
        }
        let own = Ownership::read(&world.node).unwrap();
        (patch.is_some(), own.store.unwrap(), own.taken_over)
    };
    assert_eq!(look(&mut world, "a"), (true, "a".to_owned(), None));
    let since = Ownership::read(&world.node).unwrap().since;
    assert_eq!(look(&mut world, "a"), (false, "a".to_owned(), None));
    let (patched, store, taken_over) = look(&mut world, "b");
    assert_eq!(
        (patched, store.as_str(), taken_over),
        (true, "b", Some(world.now))
    );
    assert_eq!(look(&mut world, "b"), (false, store, taken_over));
    assert_eq!(Ownership::read(&world.node).unwrap().since, since);
}

/// Otherwise an uncordon by hand is undone at each look until the clock has come so far.
#[test]
fn what_a_person_did_holds_where_our_own_clock_was_ahead() {
    let mut world = World::new();
    let right = world.now;
    world.now += SignedDuration::from_hours(6);
    world.fault(0);
    world.settle();
    world.now = right;
    world.session.clock_put_back(right);
    world.node.unschedulable = false;
    assert_eq!(world.settle(), [Intent::StandDown]);
    assert_eq!(world.settle(), []);
    assert!(!world.node.unschedulable && world.session.times.notes().next().is_none());
    world.session = restarted(&world.session, world.now);
    assert_eq!(world.settle(), []);
}
