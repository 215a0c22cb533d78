//! Several requests, and objects that do not disappear.

use super::*;

#[test]
fn of_all_requests_together_no_more_groups_run_than_may() {
    let mut world = World::new(&["a", "b", "c"]);
    for (name, node) in [("r", "a"), ("s", "b"), ("t", "c")] {
        world.ask(name, &[node], &["diag"]);
    }
    world.run(usize::MAX);
    assert_eq!(world.made, 2);
    let waits = Some("2 groups are running".to_owned());
    assert_eq!(world.status("t").message, waits);
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.made, 3);
}

#[test]
fn a_request_that_waits_holds_its_node_whatever_becomes_of_another() {
    for passes in [true, false] {
        let mut world = World::new(&["a", "b"]);
        world.ask("r", &["a"], &["diag"]);
        world.run(usize::MAX);
        // A request for the same tests, which waits for a node that is not ready.
        world.nodes.get_mut("b").unwrap()["status"] = json!({});
        world.ask("s", &["a", "b"], &["diag"]);
        world.run(usize::MAX);
        for _ in 0..2 {
            world.end(passes);
            world.run(usize::MAX);
        }
        let phase = if passes {
            Phase::Succeeded
        } else {
            Phase::Failed
        };
        assert_eq!(world.status("r").phase, Some(phase));
        assert_eq!(world.node("a"), (true, 2, Some("validation-pending")));
    }
}

/// Groups may end at different times: the object of one does not disappear in time while the
/// other's test runs.
#[test]
fn while_a_test_runs_what_does_not_go_is_not_looked_at_again_and_again() {
    let mut world = World::new(&["a", "b"]);
    let jobs = world.config.providers.get_mut("jobs").unwrap();
    jobs.timeout = SignedDuration::from_hours(2);
    world.ask("r", &["a", "b"], &["diag"]);
    world.run(usize::MAX);
    assert_eq!(world.status("r").running(), 2);
    world.lingers = true;
    world.end_some(true, 1);
    world.run(usize::MAX);
    world.now += SignedDuration::from_mins(16);
    world.run(usize::MAX);
    assert_eq!(world.status("r").running(), 1);
    let wake = world.step("r").wake;
    assert!(wake.is_some_and(|at| at > world.now), "{wake:?}");
}

#[test]
fn what_does_not_go_once_its_test_has_ended_fails_its_request() {
    for passes in [true, false] {
        let mut world = World::new(&["a"]);
        world.ask("r", &["a"], &[]);
        world.run(usize::MAX);
        world.lingers = true;
        world.end(passes);
        world.run(usize::MAX);
        // The object's pods may still use the GPUs, so the request waits for a limited time.
        let status = world.status("r");
        assert_eq!(status.phase, Some(Phase::Running));
        let waits = status.message.unwrap();
        assert!(waits.ends_with("is not gone"), "{waits}");
        let wake = world.step("r").wake;
        assert_eq!(wake, Some(start() + SignedDuration::from_mins(15)));
        world.now = wake.unwrap();
        world.run(usize::MAX);
        assert_eq!(world.status("r").phase, Some(Phase::Failed), "{passes}");
        assert_eq!(world.status("r").message, Some(waits));
        assert_eq!(world.node("a"), (true, 2, Some("validation-failed")));
        // No other test starts there until the object is gone.
        world.ask("s", &["a"], &[]);
        world.run(usize::MAX);
        let waits = Some("a is tested for r".to_owned());
        assert_eq!(world.status("s").message, waits);
        world.objects.clear();
        world.run(usize::MAX);
        assert_eq!(world.status("s").phase, Some(Phase::Running));
    }
}
