//! Ends of a session: by recovery, by hand, by request, and combinations.

use model::journal::JournalEntry;
use model::ownership::ReleaseRequest;

use super::*;

#[test]
fn what_was_undone_while_nobody_looked_is_seen_at_the_start() {
    for uncordoned in [true, false] {
        let mut world = World::new(&PARSED);
        world.fault(0);
        world.settle();
        world.restart(Restart::Events);
        if uncordoned {
            world["n1"].unschedulable = false;
        } else {
            world["n1"].taints.clear();
        }
        assert_eq!(world.settle(), [Intent::StandDown]);
        assert_eq!(world["n1"].unschedulable, !uncordoned);
        assert!(world["n1"].taints.is_empty() && world["n1"].labels.is_empty());
        assert_eq!(world.settle(), []);
    }
}

#[test]
fn a_taint_that_is_gone_when_the_fault_recovers_does_not_leave_the_cordon() {
    // NVSentinel stops half-way there: the node stays cordoned.
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    let by_hand = NodeChange {
        remove_taints: world["n1"]
            .taints
            .iter()
            .map(|on| on.taint.clone())
            .collect(),
        ..NodeChange::default()
    };
    world["n1"] = world["n1"].after(&by_hand);
    world.recovery(0);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn a_release_that_is_asked_for_takes_back_what_is_ours_and_dismisses_what_was_seen() {
    for pre_existing in [false, true] {
        let mut world = World::new(&PARSED);
        world["n1"].unschedulable = pre_existing;
        world.foreign_taint("dedicated");
        let before = world["n1"].clone();
        world.fault(0);
        world.settle();
        world.fault(1); // reported, and not yet on the node
        let request = ReleaseRequest {
            by: "alice".into(),
            reason: "GPU 0 was swapped".into(),
            at: Some(world.now),
        };
        let text = serde_json::to_string(&request).unwrap();
        world["n1"].annotations.insert(keys::RELEASE.into(), text);
        let looked = world.look(Fate::Made);
        let is_told =
            |note: &JournalEntry| note.text.contains("released by alice: GPU 0 was swapped");
        assert!(looked.notes.iter().any(is_told), "{:?}", looked.notes);
        assert_eq!(
            looked.patch().map(|patch| patch.intent),
            Some(Intent::StandDown)
        );
        assert_eq!(world.settle(), []);
        assert_eq!(world.phase(), Phase::Idle);
        assert_eq!(world["n1"].unschedulable, pre_existing);
        assert_eq!(world["n1"].taints, before.taints);
        assert_eq!(world["n1"].labels, before.labels);
        let mut left: Vec<_> = world["n1"].annotations.keys().cloned().collect();
        left.sort();
        assert_eq!(left, [keys::RELEASED_AT, keys::UNCORDONED_MANUALLY]);
        // The session does not fight with later changes.
        world.fault(1);
        assert_eq!(world.settle(), [Intent::Quarantine]);
        assert!(world["n1"].unschedulable);
    }
}

#[test]
fn a_release_holds_for_the_session_that_it_was_asked_for() {
    let mut world = World::new(&PARSED);
    world["n1"]
        .annotations
        .insert(keys::RELEASE.into(), "left over".into());
    world.fault(0);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    assert!(world["n1"].unschedulable && !world["n1"].annotations.contains_key(keys::RELEASE));
}

#[test]
fn the_clock_of_who_asks_for_a_release_dismisses_nothing_of_the_future() {
    for (ahead, counts) in [(3_600, true), (0, true), (-3_600, true)] {
        let mut world = World::new(&PARSED);
        world.fault(0);
        world.settle();
        let at = world.now + SignedDuration::from_secs(ahead);
        let text = json!({"by": "bob", "reason": "", "at": at.to_string()}).to_string();
        world["n1"].annotations.insert(keys::RELEASE.into(), text);
        assert_eq!(world.settle(), [Intent::StandDown]);
        assert_eq!(world.settle(), [], "what the node listed is dismissed");
        world.fault(0);
        assert_eq!(world.settle() == [Intent::Quarantine], counts, "{ahead}");
    }
}

#[test]
fn unhealthy_again_while_it_is_given_back_stays_out() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world.recovery(0);
    // The release is lost, and the fault is back.
    let release = world.look(Fate::Conflict).patch().unwrap();
    assert_eq!(release.intent, Intent::Return);
    world.fault(0);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(world.phase(), Phase::Quarantined);
    assert!(world["n1"].unschedulable);
    // The release was made, and the fault is back: a new session begins.
    world.recovery(0);
    assert!(world.look(Fate::Made).patch().is_some());
    world.fault(0);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    assert_eq!(
        world["n1"]
            .annotations
            .get(keys::QUARANTINE_CORDON_PRE_EXISTING),
        None,
        "the cordon is ours"
    );
    world.recovery(0);
    world.settle();
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn a_recovery_that_does_not_get_through_is_not_half_done() {
    // NVSentinel shrinks the list in one request and uncordons in a second one.
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world.recovery(0);
    for _ in 0..3 {
        let patch = world.look(Fate::Refused).patch();
        assert_eq!(patch.map(|patch| patch.intent), Some(Intent::Return));
        world.now += LONGEST_RETRY;
        // Also after a restart.
        world.restart(Restart::Events);
    }
    assert!(world["n1"].unschedulable);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn of_a_fault_in_two_devices_the_mended_one_is_not_listed_again() {
    // NVSentinel lists whole events, so that the next reading opens both again.
    let mut world = World::new(&PARSED);
    world.report("GpuMemWatch", &[("GPU", "0"), ("GPU", "1")], true, false);
    world.settle();
    world.recovery(0);
    assert_eq!(world.settle(), [Intent::Update]);
    let listed = Ownership::read(&world["n1"]).unwrap().events;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].entities_impacted.len(), 1);
    assert_eq!(listed[0].entities_impacted[0].entity_value, "1");
    // A process that reads the list alone needs only the recovery of the second.
    world.restart(Restart::Events);
    world.recovery(1);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn a_recovery_that_comes_before_the_quarantine_is_seen_is_not_lost() {
    // NVSentinel drops it: as far as it can see, there is nothing to recover from.
    let mut world = World::new(&PARSED);
    world.fault(0);
    let before = world["n1"].clone();
    // The patch is made, and the answer is lost.
    let quarantine = world.look(Fate::Refused).patch().unwrap();
    world.recovery(0);
    // At the next look the node is still the one from before our patch.
    assert_eq!(world.look(Fate::Made).patch(), None);
    world["n1"] = before.after(&quarantine.change);
    assert!(world["n1"].unschedulable);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}
