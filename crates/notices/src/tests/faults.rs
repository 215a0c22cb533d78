//! The faults of NVSentinel's monitor, each of which a book must not have.

use super::*;

#[test]
fn a_start_that_is_past_or_not_told_takes_the_node_out() {
    for start in [Some(50), Some(-10_000), None] {
        let mut world = World::new();
        world.notices = vec![notice(Phase::Scheduled, start)];
        assert_eq!(world.look(60), ["n fatal"], "{start:?}");
    }
}

#[test]
fn a_notice_that_is_read_again_never_goes_back() {
    let mut world = World::new();
    let told = |phase, updated| Notice {
        updated: Some(at(updated)),
        ..notice(phase, Some(100))
    };
    let scheduled = told(Phase::Scheduled, 0);
    world.notices = vec![scheduled.clone()];
    assert_eq!(world.look(75), ["n fatal"]);
    // Nothing new: no second trigger, also after a restart.
    for minute in 76..80 {
        world.restart();
        assert!(world.look(minute).is_empty());
        assert_eq!(world.state(), State::QuarantineTriggered);
    }
    // An earlier statement of the provider arrives late.
    let steps = [
        (told(Phase::Ongoing, 100), State::MaintenanceOngoing),
        (told(Phase::Completed, 110), State::MaintenanceComplete),
    ];
    for (now, state) in steps {
        for notices in [
            vec![now.clone()],
            vec![now, scheduled.clone()],
            vec![scheduled.clone()],
        ] {
            world.notices = notices;
            assert!(world.look(111).is_empty());
            assert_eq!(world.state(), state);
        }
    }
    assert_eq!(world.look(126), ["n healthy"]);
    assert!(world.look(127).is_empty());
    assert_eq!(world.book.records().len(), 1);
}

#[test]
fn a_node_that_is_not_ready_in_time_is_still_watched() {
    let mut world = World::new();
    world.notices = vec![notice(Phase::Ongoing, Some(0))];
    assert_eq!(world.look(0), ["n fatal"]);
    world.notices = vec![notice(Phase::Completed, Some(0))];
    world.nodes.get_mut("n").unwrap().ready = false;
    world.look(10);
    assert!(world.look(84).is_empty());
    assert_eq!(world.state(), State::MaintenanceComplete);
    assert!(world.look(85).is_empty());
    assert_eq!(world.state(), State::NodeReadinessTimeout);
    assert!(world.state().asks_a_person());
    world.restart();
    assert!(world.look(10_000).is_empty());
    world.nodes.get_mut("n").unwrap().ready = true;
    assert_eq!(world.look(10_001), ["n healthy"]);
    // A person may return it before that.
    let mut world = World::new();
    world.notices = vec![notice(Phase::Ongoing, Some(0))];
    world.look(0);
    world.notices = vec![notice(Phase::Completed, Some(0))];
    world.nodes.get_mut("n").unwrap().ready = false;
    world.look(10);
    world.look(85);
    world.nodes.get_mut("n").unwrap().is_out = false;
    assert_eq!(world.look(86), ["n healthy"]);
    assert_eq!(world.book.records()[0].settled, Some(Settled::Person));
}

#[test]
fn the_error_state_is_reached_and_left() {
    let mut world = World::new();
    world.notices = vec![notice(Phase::Ongoing, None)];
    world.look(0);
    world.notices.clear();
    world.look(1);
    world.look(61);
    assert_eq!(world.state(), State::Error);
    world.nodes.get_mut("n").unwrap().boot_id = "b2".to_owned();
    world.look(62);
    assert_eq!(world.state(), State::MaintenanceComplete);
}

#[test]
fn the_times_of_begin_and_end_are_kept() {
    let mut world = World::new();
    world.notices = vec![notice(Phase::Ongoing, Some(0))];
    world.look(5);
    world.notices = vec![notice(Phase::Completed, Some(0))];
    world.look(30);
    world.look(40);
    world.look(50);
    let record = &world.book.records()[0];
    assert_eq!((record.began, record.ended), (Some(at(5)), Some(at(30))));
}
