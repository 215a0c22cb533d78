//! Eviction statuses in the records.

use std::sync::Arc;

use contract::BehaviourOverrides;
use jiff::SignedDuration;

use super::*;
use crate::drain::{DrainConfig, PodView};
use crate::world::settings;
use crate::{PodUpdate, Settings};

const LEFT: &str = "Succeeded: all pods that were to leave have left";
const BACK: &str = "Succeeded: the node is given back";
const ENDED: &str = "Cancelled: the session has ended before the drain";
const SKIPPED: &str = "AlreadyDrained: skipped by override: the sender asks that pods stay";

fn drains() -> Settings {
    Settings {
        drain: Some(Arc::new(DrainConfig::default())),
        ..settings()
    }
}

/// Returns a story of a node with a pod that is waited for.
fn story(settings: Settings) -> Story {
    let mut world = World::with(settings, &Policy::builtin(), [NodeView::unknown("n1")]);
    let pod = PodView {
        namespace: "jobs".to_owned(),
        name: "a".to_owned(),
        uid: "u".to_owned(),
        ..PodView::default()
    };
    world.pods.insert(pod.title(), pod);
    world.restart(Restart::Nothing);
    Story::of(world)
}

fn pod_ends(story: &mut Story) {
    story.world.pods.clear();
    story
        .world
        .deliver_pod_update(PodUpdate::Gone("jobs/a".to_owned()));
    story.settle();
}

fn report(story: &mut Story, gpu: &str, skip: bool) {
    story.world.tick();
    let mut event = event("c", &[("GPU", gpu)], true, false);
    let force = false;
    event.drain_overrides = Some(BehaviourOverrides { force, skip });
    let now = story.world.now;
    let id = story.world.store(event, now);
    story.events.push(id);
}

#[test]
fn a_record_says_how_far_the_drain_is() {
    let mut story = story(drains());
    story.event(0, true, false);
    story.look(Fate::Made);
    story.look(Fate::Made);
    assert_eq!(story.evictions(), ["NotStarted"]);
    story.settle();
    assert_eq!(story.evictions(), ["InProgress"]);
    // Events that come meanwhile belong to it, and a partial recovery drains nothing.
    story.event(1, true, false);
    story.settle();
    story.event(1, false, true);
    story.event(0, true, false);
    story.settle();
    let part = "AlreadyDrained: a recovery drains nothing";
    assert_eq!(story.evictions()[2..], [part, "InProgress"]);
    pod_ends(&mut story);
    story.event(2, true, false);
    story.settle();
    let expected = [
        LEFT,
        part,
        LEFT,
        "AlreadyDrained: the node was drained before",
    ];
    let found = [0, 2, 3, 4].map(|index| story.evictions()[index].clone());
    assert_eq!(found, expected);
    story.event(0, false, true);
    story.event(2, false, true);
    story.settle();
    assert_eq!(story.evictions().last().unwrap(), BACK);
    assert_eq!(story.evictions()[0], LEFT);
}

#[test]
fn a_drain_that_does_not_get_on_has_failed_until_it_does() {
    let mut story = story(drains());
    story.event(0, true, false);
    story.settle();
    story.world.now += SignedDuration::from_hours(25);
    story.settle();
    let failed = "Failed: jobs/a: it has not ended by itself";
    assert_eq!(story.evictions(), [failed]);
    pod_ends(&mut story);
    assert_eq!(story.evictions(), [LEFT]);
}

#[test]
fn who_ends_the_session_before_cancels_the_drain() {
    for by in ["uncordon", "recovery", "gone"] {
        let mut story = story(drains());
        story.event(0, true, false);
        story.settle();
        match by {
            "uncordon" => story.world["n1"].unschedulable = false,
            "recovery" => story.event(0, false, true),
            _ => {
                story.world.handle(FleetInput::NodeGone("n1".to_owned()));
                for status in story.world.look_without_watch(Fate::Made).statuses {
                    story.write(&status);
                }
            }
        }
        if by != "gone" {
            story.settle();
        }
        assert_eq!(story.evictions()[0], ENDED, "{by}");
        assert_eq!(
            story.evictions().get(1).map(String::as_str),
            (by == "recovery").then_some(BACK)
        );
    }
}

#[test]
fn what_is_skipped_says_by_whom() {
    let mut story = story(drains());
    report(&mut story, "0", true);
    story.settle();
    assert_eq!(story.evictions(), [SKIPPED]);
    let shown = story.world.fleet.status("n1").unwrap().session.unwrap();
    assert_eq!(shown.drain.unwrap().to_string(), SKIPPED);
    // Another sender does not ask for it.
    report(&mut story, "1", false);
    report(&mut story, "2", true);
    story.settle();
    pod_ends(&mut story);
    assert_eq!(story.evictions(), [SKIPPED, LEFT, SKIPPED]);
    // Without drains.
    let mut story = super::drained::story(settings());
    report(&mut story, "0", false);
    story.settle();
    let off = "NotStarted: pods stay: gpuwarden runs without --drain";
    assert_eq!(story.evictions(), [off]);
}

#[test]
fn a_restart_makes_up_for_what_was_not_written_of_a_drain() {
    for with in [Restart::All, Restart::Events, Restart::Nothing] {
        let mut story = story(drains());
        story.event(0, true, false);
        story.settle();
        let before = story.records.clone();
        pod_ends(&mut story);
        story.records = before;
        story.world.restart(with);
        story.settle();
        assert_eq!(story.evictions(), [LEFT], "{with:?}");
    }
    // The end of an earlier session does not affect the drain under way.
    let mut story = story(drains());
    story.event(0, true, false);
    story.settle();
    let kept = story.world.saved_state();
    story.event(0, false, true);
    story.settle();
    story.event(1, true, false);
    story.settle();
    story.world.restart_from(Some(kept));
    story.settle();
    assert_eq!(story.evictions(), [ENDED, BACK, "InProgress"]);
}
