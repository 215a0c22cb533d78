//! Gangs, and the time for a checkpoint.

use super::*;
use crate::drain::Checkpoint;

fn of_gang(world: &mut World, title: &str, checkpoint: Option<Checkpoint>) {
    add(world, title);
    let pod = world.pods.get_mut(title).unwrap();
    (pod.gang, pod.checkpoint) = (Some("volcano ml/big".to_owned()), checkpoint);
}

#[test]
fn one_namespace_that_waits_holds_up_the_gang_and_no_other_pod() {
    let mut world = world(&["now/other"]);
    for title in ["now/a", "jobs/b"] {
        of_gang(&mut world, title, None);
    }
    world.restart(Restart::Nothing);
    let looked = begin(&mut world);
    assert_eq!(removed(&looked), ["evict now/other"]);
    assert!(awaits(&world).contains("now/a is waited for until it has ended, AllowCompletion"));
    // After the last pod that was waited for the rest leaves.
    gone(&mut world, "jobs/b");
    assert_eq!(removed(&world.look(PatchFate::Made)), ["evict now/a"]);
}

#[test]
fn a_gang_writes_its_checkpoint_before_any_of_it_is_evicted_through_restarts() {
    for with in [Restart::All, Restart::Nothing] {
        let mut world = world(&[]);
        of_gang(&mut world, "now/a", None);
        of_gang(&mut world, "now/b", Some(Checkpoint::default()));
        world.restart(Restart::Nothing);
        let mut looked = begin(&mut world);
        assert!(removed(&looked).is_empty());
        let request = looked.checkpoints.remove(0);
        assert_eq!(
            (request.name.as_str(), request.uid.as_str()),
            ("b", "uid-b")
        );
        assert!(
            looked
                .notes
                .iter()
                .any(|one| one.text == "pod now/b is asked to write a checkpoint")
        );
        // The checkpoint is requested once.
        assert!(world.look(PatchFate::Made).checkpoints.is_empty());
        let says = |world: &mut World, done| {
            let pod = world.pods.get_mut("now/b").unwrap();
            let checkpoint = Checkpoint {
                takes: None,
                requested: Some(request.at),
                done,
            };
            pod.checkpoint = Some(checkpoint);
            let pod = pod.clone();
            world.deliver_pod_update(PodUpdate::Observed(Box::new(pod)));
        };
        answer(&mut world, "b", RemovalAnswer::Taken);
        says(&mut world, None);
        world.restart(with);
        for _ in 0..5 {
            let looked = world.look(PatchFate::Made);
            assert!(removed(&looked).is_empty() && looked.checkpoints.is_empty());
        }
        assert!(
            awaits(&world).contains("until its checkpoint is written"),
            "{}",
            awaits(&world)
        );
        says(&mut world, Some(request.at));
        world.now += WATCH_DELAY;
        let looked = world.look(PatchFate::Made);
        assert_eq!(removed(&looked), ["evict now/a", "evict now/b"]);
    }
}

#[test]
fn who_cannot_be_told_or_does_not_answer_is_evicted_when_its_time_is_over() {
    for is_taken in [false, true] {
        let mut world = world(&[]);
        of_gang(&mut world, "now/b", Some(Checkpoint::default()));
        world.restart(Restart::Nothing);
        let mut asked = !begin(&mut world).checkpoints.is_empty();
        let since = world.now;
        let mut evicted = None;
        for _ in 0..300 {
            let removal = if is_taken {
                RemovalAnswer::Taken
            } else {
                RemovalAnswer::Failed {
                    why: "not allowed".into(),
                    retry_after: None,
                }
            };
            if asked {
                answer(&mut world, "b", removal);
            }
            world.now += SignedDuration::from_secs(3);
            let looked = world.look(PatchFate::Made);
            asked = !looked.checkpoints.is_empty();
            if !looked.removals.is_empty() {
                evicted = Some(world.now.duration_since(since));
                break;
            }
        }
        let evicted = evicted.unwrap();
        let limit = SignedDuration::from_mins(10);
        assert!(
            evicted <= limit + SignedDuration::from_secs(40),
            "{is_taken} {evicted}"
        );
        assert!(
            evicted >= limit - SignedDuration::from_secs(10),
            "{is_taken} {evicted}"
        );
    }
}

#[test]
fn a_dry_run_tells_no_pod() {
    let settings = Settings {
        mode: Mode::DryRun,
        ..drains()
    };
    let mut world = world_with(settings, &[]);
    of_gang(&mut world, "now/b", Some(Checkpoint::default()));
    world.restart(Restart::Nothing);
    world.fault(0);
    for _ in 0..6 {
        assert!(world.look(PatchFate::Made).checkpoints.is_empty());
    }
    assert_eq!(world.phase(), Phase::Drained);
}
