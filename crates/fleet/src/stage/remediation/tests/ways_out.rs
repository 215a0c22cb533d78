//! Former faults: a node waited for something that nobody worked on, or a person was not asked.

use super::*;

const SUPPORT: &str = "no repair is configured for CONTACT_SUPPORT";

/// Looks some times. Returns the journal entries of this kind.
fn entries(world: &mut World, kind: EntryKind) -> Vec<String> {
    (0..6)
        .flat_map(|_| texts(&world.look(Fate::Made), kind))
        .collect()
}

#[test]
fn a_repair_that_nothing_asks_for_any_more_is_not_waited_for() {
    for reason in ["TransientFailure", "PermanentFailure", "Cancelled"] {
        for recovers in [true, false] {
            let mut world = world();
            fault(&mut world, 1, 0);
            let name = begin(&mut world, 0, 2);
            set(&mut world, &name, failed(reason));
            world.settle_now();
            if recovers {
                world.recovery(0);
            } else {
                fault(&mut world, 0, 0);
            }
            let entries = entries(&mut world, EntryKind::Session);
            let text = "no repair is under way: no open fault asks for one";
            assert!(
                entries.iter().any(|one| one == text),
                "{reason}: {entries:?}"
            );
            // The rest waits like a node whose faults never asked for remediation.
            let is = (world.phase(), state(&world));
            let wanted = (Phase::Drained, Some("drain-succeeded"));
            assert_eq!(is, wanted, "{reason} {recovers}");
            assert_eq!(
                awaits(&world),
                "the recovery of its faults, or a release by hand"
            );
            world.restart(Restart::Nothing);
            world.now += SignedDuration::from_hours(400);
            assert!(world.look(Fate::Made).creations.is_empty());
            assert_eq!(world.phase(), Phase::Drained, "{reason} {recovers}");
            // The next fault that asks for remediation gets it, unless that was tried in vain.
            fault(&mut world, 2, 24);
            if reason == "TransientFailure" {
                until_made(&mut world);
            } else {
                world.settle_now();
                assert_eq!(world.phase(), Phase::RemediationFailed);
            }
        }
    }
}

/// The fault that was remediated is over, and another is open that has no action.
#[test]
fn days_after_a_repair_an_uncordon_is_a_persons_again() {
    let mut world = world();
    let reboot = begin(&mut world, 0, 24);
    set(&mut world, &reboot, done());
    world.settle_now();
    assert_eq!(world.phase(), Phase::Remediated);
    fault(&mut world, 1, 0);
    world.recovery(0);
    world.settle_now();
    world.now += SignedDuration::from_hours(48);
    world.settle_now();
    assert!(world.phase().is_out() && world["n1"].unschedulable);
    world["n1"].unschedulable = false;
    world.settle_now();
    assert_eq!(world.phase(), Phase::Idle);
    assert!(
        world["n1"]
            .annotations
            .contains_key(keys::UNCORDONED_MANUALLY)
    );
}

/// A transient failure waits, and a hold begins before its next try.
#[test]
fn a_repair_that_is_held_back_is_not_called_one_that_nothing_asks_for() {
    let mut world = world();
    let reboot = begin(&mut world, 0, 24);
    set(&mut world, &reboot, failed("TransientFailure"));
    world.settle_now();
    let label = keys::HANDED_OVER_LABEL.to_owned();
    world["n1"].labels.insert(label, "false".to_owned());
    world.now += SignedDuration::from_hours(2);
    let entries = entries(&mut world, EntryKind::Session).concat();
    assert!(
        entries.contains("no repair is under way; awaited:"),
        "{entries}"
    );
}

#[test]
fn with_the_switch_taken_back_a_repair_that_failed_is_not_waited_for() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    world.settings.remediation = None;
    world.restart(Restart::All);
    world.settle_now();
    set(&mut world, &name, failed("TransientFailure"));
    world.settle_now();
    assert_eq!(world.phase(), Phase::Drained, "{}", awaits(&world));
    // A person who was asked stays asked.
    let mut world = self::world();
    let name = begin(&mut world, 0, 24);
    set(&mut world, &name, failed("PermanentFailure"));
    world.settle_now();
    world.settings.remediation = None;
    world.restart(Restart::All);
    world.settle_now();
    assert_eq!(world.phase(), Phase::RemediationFailed);
}

#[test]
fn a_person_is_asked_beside_what_is_waited_for() {
    // The recovery after an attempt, and another try of one.
    for (status, waits) in [
        (done(), "the recovery of its faults after RebootNode"),
        (failed("TransientFailure"), "another try of RESTART_BM"),
    ] {
        let mut world = world();
        let name = begin(&mut world, 0, 24);
        set(&mut world, &name, status);
        world.settle_now();
        assert!(awaits(&world).starts_with(waits), "{}", awaits(&world));
        fault(&mut world, 1, 5);
        assert_eq!(
            entries(&mut world, EntryKind::Attention),
            [format!(
                "the repair makes no progress: {SUPPORT}; repair the node by hand, and release it"
            )]
        );
        let is = (world.phase(), state(&world));
        assert_eq!(
            is,
            (Phase::RemediationFailed, Some("remediation-failed")),
            "{waits}"
        );
        let both = format!("a person: {SUPPORT}; beside that, {waits}");
        assert!(awaits(&world).starts_with(&both), "{}", awaits(&world));
        // The wait continues all the same, and its end also ends the person's task.
        world.recovery(1);
        world.settle_now();
        assert!(awaits(&world).starts_with(waits), "{}", awaits(&world));
    }
}

#[test]
fn what_a_person_is_asked_beside_goes_on() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    set(&mut world, &name, failed("TransientFailure"));
    world.settle_now();
    fault(&mut world, 1, 5);
    world.settle_now();
    assert_eq!(world.phase(), Phase::RemediationFailed);
    // The decision is due by time even if nothing happens.
    let wake = world.fleet.wake_at().unwrap();
    assert!(wake <= world.now + SignedDuration::from_mins(1), "{wake}");
    world.now = wake;
    let planned = until_made(&mut world);
    assert_eq!(state(&world), Some("remediating"));
    make(&mut world, &planned);
    world.settle_now();
    set(&mut world, &planned.name, done());
    world.settle_now();
    assert_eq!(world.phase(), Phase::RemediationFailed);
    // If the attempt does not help, a person is asked about both.
    world.now += SignedDuration::from_mins(16);
    let asked = entries(&mut world, EntryKind::Attention);
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert!(
        asked[0].contains("no repair is left to be tried"),
        "{asked:?}"
    );
    assert!(asked[0].contains(SUPPORT), "{asked:?}");
    (0..2).for_each(|gpu| world.recovery(gpu));
    world.settle();
    assert_eq!(world.phase(), Phase::Idle);
}

#[test]
fn a_later_session_makes_no_custom_resource_of_an_earlier_name() {
    for deleted in [true, false] {
        let mut world = world();
        let name = begin(&mut world, 0, 24);
        set(
            &mut world,
            &name,
            json!({"conditions": [{"type": "SignalSent", "status": "True"}]}),
        );
        if deleted {
            world.resources.remove(&name);
            world.deliver_resources();
        }
        world.annotate(keys::RELEASE, "{}");
        world.settle();
        assert_eq!(world.phase(), Phase::Idle);
        world.restart(Restart::All);
        // A fault that is dismissed and reported anew keeps the event that stands for it.
        fault(&mut world, 0, 24);
        let again = until_made(&mut world);
        assert_eq!(again.name, format!("{name}-2"), "deleted: {deleted}");
        make(&mut world, &again);
        world.settle_now();
        set(&mut world, &again.name, failed("TransientFailure"));
        world.settle_now();
        world.now += SignedDuration::from_mins(1);
        assert_eq!(until_made(&mut world).name, format!("{name}-3"));
    }
}

#[test]
fn a_pause_without_an_end_and_a_hand_over_are_in_somebodys_hands() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    set(&mut world, &name, failed("TransientFailure"));
    world.settle_now();
    assert_eq!(state(&world), Some("remediating"));
    let label = (keys::HANDED_OVER_LABEL.to_owned(), "false".to_owned());
    world["n1"].labels.extend([label]);
    world.now += SignedDuration::from_mins(1);
    world.settle_now();
    // Nothing of ours is under way, and no mark says so.
    assert_eq!(state(&world), Some("drain-succeeded"));
    assert!(awaits(&world).contains("handed over"), "{}", awaits(&world));
    world["n1"].labels.remove(keys::HANDED_OVER_LABEL);
    until_made(&mut world);
}
