//! Tests of what the remediation and the analysis of events tell each other.

use contract::HealthEvent;
use model::position::Position;
use model::reporter::Reporter;

use super::*;

/// Returns the ids of the events that record repairs.
fn repairs(world: &World) -> Vec<String> {
    let all = world.stored.iter();
    all.filter(|one| one.event.check_name == keys::CHECK_REPAIRED)
        .map(|one| one.id.clone())
        .collect()
}

/// Returns the conclusion that repairs do not help against the fault of a GPU.
fn conclusion(gpu: &str) -> HealthEvent {
    let mut event = event(keys::CHECK_REPAIR_NOT_WORKING, &[("GPU", gpu)], true, false);
    let fault = super::event("GpuMemWatch", &[], true, false);
    event.agent = keys::ANALYZER_AGENT.to_owned();
    event.recommended_action = 5;
    let check = format!("{}/{}", fault.agent, fault.check_name);
    event.metadata.extend([
        (keys::META_ANALYSED_CHECK.to_owned(), check),
        (keys::META_CONCLUSION.to_owned(), "c".to_owned()),
    ]);
    Reporter::Monitor.note_in(&mut event);
    event
}

#[test]
fn a_repair_that_has_succeeded_is_recorded_once() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    assert_eq!(repairs(&world), [""; 0]);
    set(&mut world, &name, done());
    world.settle_now();
    world.settle_now();
    let recorded = repairs(&world);
    assert_eq!(recorded.len(), 1);
    let event = &world
        .stored
        .iter()
        .find(|one| one.id == recorded[0])
        .unwrap()
        .event;
    assert_eq!(event.metadata[keys::META_REPAIR], "RESTART_BM");
    assert_eq!(world.faults(), 1, "it closes nothing");
    // A successor does not know that it is stored; the id is the same, so the store does.
    world.restart(Restart::All);
    world.settle_now();
    let again = repairs(&world);
    assert!(again.len() > 1 && again.iter().all(|id| *id == recorded[0]));
}

#[test]
fn a_repair_that_failed_is_not_recorded() {
    let mut world = world();
    let name = begin(&mut world, 0, 24);
    set(&mut world, &name, failed("PermanentFailure"));
    world.settle_now();
    assert_eq!(repairs(&world), [""; 0]);
}

#[test]
fn what_repairs_do_not_help_against_is_not_repaired_and_a_person_is_asked() {
    for (gpu, repaired) in [("0", false), ("1", true)] {
        let mut world = world();
        fault(&mut world, 0, 24);
        world.store(conclusion(gpu), world.now);
        let made = (0..10).any(|_| !world.look(Fate::Made).creations.is_empty());
        assert_eq!(made, repaired, "GPU {gpu}");
        if !repaired {
            assert_eq!(world.phase(), Phase::RemediationFailed);
            let awaits = awaits(&world);
            assert!(awaits.starts_with("a person: "), "{awaits}");
        }
    }
}

/// Lets the analysis read all that is stored.
fn analyse(world: &mut World) {
    let all = Position::from(world.stored.len() as u64);
    world.handle(FleetInput::Analysed(all));
    world.now += LOOK_FOR_ANALYSIS;
}

#[test]
fn a_repair_waits_until_the_analysis_has_read_the_reports_also_those_of_an_earlier_process() {
    for (concludes, restarts) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut world = world();
        let none = FleetInput::Analysed(Position::START);
        world.handle(none);
        fault(&mut world, 0, 24);
        let made =
            |world: &mut World| (0..10).any(|_| !world.look(Fate::Made).creations.is_empty());
        assert!(!made(&mut world));
        if restarts {
            world.restart(Restart::All);
            world.handle(FleetInput::Analysed(Position::START));
            assert!(!made(&mut world));
        }
        assert_eq!(awaits(&world), "the analysis of its reports");
        if concludes {
            world.store(conclusion("0"), world.now);
        }
        analyse(&mut world);
        assert_eq!(made(&mut world), !concludes, "after a restart: {restarts}");
    }
}

#[test]
fn a_repair_does_not_wait_for_ever_for_the_analysis() {
    let mut world = world();
    world.handle(FleetInput::Analysed(Position::START));
    fault(&mut world, 0, 24);
    world.settle_now();
    world.now += ANALYSED_WITHIN;
    until_made(&mut world);
}

#[test]
fn a_person_who_gives_the_node_back_closes_its_conclusions() {
    let mut world = world();
    fault(&mut world, 0, 24);
    world.store(conclusion("0"), world.now);
    // The ledger reports a marked GPU once, and ends that itself.
    let mut known_bad = conclusion("1");
    known_bad.check_name = keys::CHECK_KNOWN_BAD_GPU.to_owned();
    known_bad.metadata.remove(keys::META_CONCLUSION);
    world.store(known_bad, world.now);
    world.settle_now();
    assert_eq!(world.faults(), 3);
    world.annotate(keys::RELEASE, "{}");
    world.settle_now();
    world.settle_now();
    assert_eq!(world.faults(), 2, "the others stay, as dismissed");
    let last = &world.stored.last().unwrap().event;
    assert!(last.is_healthy && last.agent == keys::ANALYZER_AGENT);
    assert!(!last.metadata.contains_key(keys::META_CONCLUSION));
    assert_eq!(world.phase(), Phase::Idle);
}
