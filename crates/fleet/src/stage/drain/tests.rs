use std::sync::Arc;

use contract::{BehaviourOverrides, keys};
use jiff::SignedDuration;
use model::mode::Mode;
use model::node::NodeView;
use policy::Policy;

use super::*;
use crate::drain::DrainConfig;
use crate::session::{Intent, Phase};
use crate::view::NodeState;
use crate::world::{Fate as PatchFate, LookEffects, Restart, World, event, settings};
use crate::{FleetInput, PlannedRemoval, Settings};

mod custom;
mod gang;
mod partial;
mod simulator;

const CONFIG: &str = r#"
    evictionTimeoutInSeconds = "60"
    deleteAfterTimeoutMinutes = 10
    [[userNamespaces]]
    name = "now"
    mode = "Immediate"
    [[userNamespaces]]
    name = "late"
    mode = "DeleteAfterTimeout"
    [[userNamespaces]]
    name = "jobs"
    mode = "AllowCompletion"
"#;

/// Returns the settings of a controller that drains.
fn drains() -> Settings {
    let config = DrainConfig::parse(CONFIG, "d").unwrap();
    Settings {
        drain: Some(Arc::new(config)),
        ..settings()
    }
}

fn world_with(settings: Settings, pods: &[&str]) -> World {
    let mut world = World::with(settings, &Policy::builtin(), [NodeView::unknown("n1")]);
    for title in pods {
        add(&mut world, title);
    }
    world.restart(Restart::Nothing);
    world
}

fn world(pods: &[&str]) -> World {
    world_with(drains(), pods)
}

fn add(world: &mut World, title: &str) {
    let (namespace, name) = title.split_once('/').unwrap();
    let pod = PodView {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        ..PodView::default()
    };
    world.pods.insert(title.to_owned(), pod);
}

/// Looks until the node's mark says that it is being drained. Returns the last look.
fn begin(world: &mut World) -> LookEffects {
    world.fault(0);
    for _ in 0..5 {
        let looked = world.look(PatchFate::Made);
        if world.phase() == Phase::Draining && looked.patch().is_none() {
            return looked;
        }
    }
    panic!("{:?}", world.phase());
}

fn removed(looked: &LookEffects) -> Vec<String> {
    let title = |one: &PlannedRemoval| {
        let how = if one.evict.is_some() {
            "evict"
        } else {
            "delete"
        };
        format!("{how} {}/{}", one.namespace, one.name)
    };
    looked.removals.iter().map(title).collect()
}

fn answer(world: &mut World, name: &str, answer: RemovalAnswer) {
    let (node, uid) = ("n1".to_owned(), format!("uid-{name}"));
    world.handle(FleetInput::PodAnswered { node, uid, answer });
}

fn gone(world: &mut World, title: &str) {
    world.pods.remove(title);
    world.deliver_pod_update(PodUpdate::Gone(title.to_owned()));
}

fn state(world: &World) -> Option<&str> {
    world["n1"]
        .labels
        .get(keys::STATE_LABEL)
        .map(String::as_str)
}

fn awaits(world: &World) -> String {
    world.fleet.status("n1").unwrap().session.unwrap().awaits
}

#[test]
fn a_pod_that_is_deleted_without_time_to_end_is_told_of_once() {
    let mut world = world(&["late/b"]);
    begin(&mut world);
    world.now += SignedDuration::from_mins(12);
    let mut count = 0;
    for _ in 0..3 {
        let looked = world.look_without_watch(PatchFate::Made);
        assert_eq!(removed(&looked), ["delete late/b"]);
        let says = "pod late/b is deleted, without time to end (DeleteAfterTimeout)";
        count += looked.notes.iter().filter(|one| one.text == says).count();
        answer(&mut world, "b", RemovalAnswer::Taken);
        world.now += SignedDuration::from_mins(1);
    }
    assert_eq!(count, 1);
}

#[test]
fn who_is_waited_for_is_told_in_the_words_of_the_reference_and_seldom() {
    let mut world = world(&["now/a", "late/b", "jobs/d", "jobs/c"]);
    let waits = begin(&mut world).waits;
    let [ends, timed] = waits.as_slice() else {
        panic!("{waits:?}")
    };
    let text = "Waiting for following pods to finish: [jobs/c jobs/d]";
    assert_eq!(*ends, ("AwaitingPodCompletion", text.to_owned()));
    let (reason, text) = timed;
    assert_eq!(*reason, "WaitingBeforeForceDelete");
    let begin = "Waiting for following pods to finish: [late/b] in namespaces: [late] or they will be \
                 force deleted on: 2027-01-15T08:1";
    assert!(text.starts_with(begin) && text.ends_with('Z'), "{text}");
    gone(&mut world, "jobs/c");
    assert_eq!(world.look(PatchFate::Made).waits, []);
    world.now += SignedDuration::from_mins(1);
    let waits = world.look_without_watch(PatchFate::Made).waits;
    let text = "Waiting for following pods to finish: [jobs/d]".to_owned();
    assert_eq!(waits, [("AwaitingPodCompletion", text)]);
}

#[test]
fn a_node_is_drained_as_its_namespaces_wish_and_given_back_as_it_was() {
    let mut world = world(&["now/a", "late/b", "jobs/c", "kube-system/d", "other/e"]);
    let before = world["n1"].clone();
    let looked = begin(&mut world);
    assert_eq!(state(&world), Some("draining"));
    // A pod that is waited for holds up no other one.
    assert_eq!(removed(&looked), ["evict now/a"]);
    assert_eq!(
        looked.removals[0].evict,
        Some(SignedDuration::from_secs(30))
    );
    let entry = looked
        .notes
        .iter()
        .find(|one| one.text.starts_with("the drain begins"));
    assert_eq!(
        entry.unwrap().text,
        "the drain begins: AllowCompletion: jobs/c; DeleteAfterTimeout: late/b; Immediate: now/a; \
         stays, its namespace is one of the system's: kube-system/d; stays, the configuration names \
         no mode for it: other/e"
    );
    assert_eq!(
        world.fleet.status("n1").unwrap().state,
        NodeState::Session(Phase::Draining)
    );
    // The eviction is requested once.
    assert!(removed(&world.look(PatchFate::Made)).is_empty());
    answer(&mut world, "a", RemovalAnswer::Taken);
    gone(&mut world, "now/a");
    gone(&mut world, "jobs/c");
    let looked = world.look(PatchFate::Made);
    assert!(removed(&looked).is_empty() && looked.patch().is_none());
    assert!(awaits(&world).starts_with("a pod to leave: late/b is waited for until"));
    world.now += SignedDuration::from_mins(10);
    assert_eq!(
        removed(&world.look_without_watch(PatchFate::Made)),
        ["evict late/b"]
    );
    answer(&mut world, "b", RemovalAnswer::Taken);
    gone(&mut world, "late/b");
    assert_eq!(
        world
            .look_without_watch(PatchFate::Made)
            .patch()
            .unwrap()
            .intent,
        Intent::Update
    );
    assert_eq!(
        (state(&world), world.phase()),
        (Some("drain-succeeded"), Phase::Draining)
    );
    world.settle_now();
    assert_eq!(world.phase(), Phase::Drained);
    assert!(!world.watches_pods, "nothing is asked of them any longer");
    world.recovery(0);
    world.settle();
    assert_eq!(
        (&world["n1"].labels, &world["n1"].annotations),
        (&before.labels, &before.annotations)
    );
    assert!(!world["n1"].unschedulable);
}

#[test]
fn a_node_without_pods_that_leave_is_drained_at_once() {
    let mut world = world(&["kube-system/a"]);
    world.fault(0);
    world.look(PatchFate::Made);
    assert_eq!(state(&world), Some("quarantined"));
    world.settle_now();
    assert_eq!(
        (state(&world), world.phase()),
        (Some("drain-succeeded"), Phase::Drained)
    );
    // A pod that comes later is not part of the drain.
    add(&mut world, "now/b");
    world.deliver_pods();
    assert!(removed(&world.look(PatchFate::Made)).is_empty());
}

#[test]
fn who_uncordons_or_releases_stops_the_drain_at_once() {
    for by in ["uncordon", "release", "recovery"] {
        let mut world = world(&["now/a", "now/b"]);
        assert_eq!(removed(&begin(&mut world)).len(), 2);
        answer(
            &mut world,
            "a",
            RemovalAnswer::Held {
                why: "budget".into(),
                retry_after: None,
            },
        );
        match by {
            "uncordon" => world["n1"].unschedulable = false,
            "release" => world.annotate(keys::RELEASE, "{}"),
            _ => world.recovery(0),
        }
        world.now += SignedDuration::from_mins(5);
        assert!(removed(&world.look(PatchFate::Made)).is_empty(), "{by}");
        world.settle();
        assert_eq!((state(&world), world.phase()), (None, Phase::Idle), "{by}");
    }
}

#[test]
fn a_budget_holds_its_pod_alone_and_a_person_is_asked_once() {
    let mut world = world(&["now/a", "now/b"]);
    begin(&mut world);
    let held = RemovalAnswer::Held {
        why: "its budget".into(),
        retry_after: None,
    };
    answer(&mut world, "a", held.clone());
    answer(&mut world, "b", RemovalAnswer::Taken);
    gone(&mut world, "now/b");
    let (mut tries, mut asked) = (0, Vec::new());
    for _ in 0..900 {
        let looked = world.look(PatchFate::Made);
        for one in removed(&looked) {
            assert_eq!(one, "evict now/a");
            tries += 1;
            answer(&mut world, "a", held.clone());
        }
        let notes = looked
            .notes
            .into_iter()
            .filter(|one| one.kind == EntryKind::Attention);
        asked.extend(notes.map(|one| one.text));
    }
    assert!((30..60).contains(&tries), "{tries}");
    assert_eq!(
        asked,
        [
            "the drain makes no progress: now/a: its budget; end the pods by hand, or release the node"
        ]
    );
    assert!(
        awaits(&world).ends_with("Immediate (its budget)"),
        "{}",
        awaits(&world)
    );
}

#[test]
fn a_refused_eviction_is_tried_again_within_thirty_seconds_whatever_the_server_wishes() {
    let mut world = world(&["now/a"]);
    begin(&mut world);
    let held = RemovalAnswer::Held {
        why: "its budget".into(),
        retry_after: Some(SignedDuration::from_mins(10)),
    };
    answer(&mut world, "a", held);
    world.now += SignedDuration::from_secs(28);
    assert!(removed(&world.look(PatchFate::Made)).is_empty());
    world.now += SignedDuration::from_secs(1);
    assert_eq!(removed(&world.look(PatchFate::Made)), ["evict now/a"]);
}

#[test]
fn pods_that_cannot_be_read_ask_a_person_also_before_the_drain_has_begun() {
    for begun in [true, false] {
        let mut world = world(&["jobs/a"]);
        if begun {
            begin(&mut world);
        } else {
            world.fault(0);
            world.look(PatchFate::Made);
        }
        world.deliver_pod_update(PodUpdate::Failing("403".into()));
        let mut asked = Vec::new();
        for _ in 0..320 {
            world.deliver_pod_update(PodUpdate::Failing("403".into()));
            let notes = world.look(PatchFate::Made).notes.into_iter();
            let notes = notes.filter(|one| one.kind == EntryKind::Attention);
            asked.extend(notes.map(|one| one.text));
        }
        let [once] = asked.as_slice() else {
            panic!("begun: {begun}: {asked:?}");
        };
        let says = "the drain makes no progress: its pods cannot be read: 403";
        assert!(once.starts_with(says), "{once}");
        // Once the pods are read the drain continues, and no person is needed.
        world.deliver_pods();
        world.look(PatchFate::Made);
        world.look(PatchFate::Made);
        assert_eq!(world.phase(), Phase::Draining);
        let state = world.fleet.status("n1").unwrap().session.unwrap().drain;
        assert_eq!(state.unwrap().status, EvictionStatus::InProgress);
    }
}

#[test]
fn each_drain_tells_anew_who_is_waited_for() {
    let mut world = world(&["jobs/a"]);
    let first = begin(&mut world).waits_since;
    world["n1"].unschedulable = false;
    world.settle();
    world.now += SignedDuration::from_mins(1);
    let second = begin(&mut world).waits_since;
    assert_eq!((first.len(), second.len()), (1, 1));
    assert!(second > first, "{first:?} {second:?}");
}

#[test]
fn a_sender_says_whether_pods_stay_or_are_not_waited_for() {
    let overrides = |force, skip| Some(BehaviourOverrides { force, skip });
    let report = |world: &mut World, gpu: &str, overrides| {
        world.tick();
        let mut event = event("GpuMemWatch", &[("GPU", gpu)], true, false);
        event.drain_overrides = overrides;
        world.store(event, world.now)
    };
    let mut world = world(&["jobs/a"]);
    report(&mut world, "0", overrides(false, true));
    world.settle_now();
    assert_eq!(
        (state(&world), world.phase()),
        (Some("quarantined"), Phase::Quarantined)
    );
    // Another fault does not ask for that.
    report(&mut world, "1", None);
    world.settle_now();
    assert_eq!(state(&world), Some("draining"));
    assert!(removed(&world.look(PatchFate::Made)).is_empty());
    report(&mut world, "2", overrides(true, false));
    let looked: Vec<String> = (0..3)
        .flat_map(|_| removed(&world.look(PatchFate::Made)))
        .collect();
    assert_eq!(looked, ["evict jobs/a"]);
}

#[test]
fn the_switch_can_be_taken_back_and_nothing_stays_half_done() {
    let mut world = world(&["now/a"]);
    begin(&mut world);
    world.settings = settings();
    world.restart(Restart::All);
    let patches = world.settle_now();
    assert_eq!(
        (patches.as_slice(), state(&world)),
        (&[Intent::Update][..], Some("quarantined"))
    );
    assert!(removed(&world.look(PatchFate::Made)).is_empty());
    world.settings = drains();
    world.restart(Restart::Nothing);
    world.settle_now();
    assert_eq!(state(&world), Some("draining"));
    // A completed drain stays so.
    gone(&mut world, "now/a");
    world.settle_now();
    world.settings = settings();
    world.restart(Restart::All);
    assert!(world.settle_now().is_empty());
    assert_eq!(state(&world), Some("drain-succeeded"));
}

#[test]
fn a_dry_run_removes_nothing_and_comes_to_its_end() {
    let settings = Settings {
        mode: Mode::DryRun,
        ..drains()
    };
    let mut world = world_with(settings, &["now/a", "kube-system/b"]);
    let before = world["n1"].clone();
    world.fault(0);
    let mut entries = Vec::new();
    for _ in 0..6 {
        let looked = world.look(PatchFate::Made);
        assert!(looked.removals.is_empty() && looked.patch().is_none());
        entries.extend(looked.notes.into_iter().map(|one| one.text));
    }
    assert!(
        entries
            .iter()
            .any(|text| text == "dry run: pod now/a is evicted, with 30 s to end (Immediate)")
    );
    // Once, and after the session has reached it.
    let at = |what: &str| {
        let found = entries.iter().enumerate();
        let found = found.filter(|(_, text)| text.contains(what));
        found.map(|(at, _)| at).collect::<Vec<_>>()
    };
    let (session, drain) = (at("-> draining"), at("the drain begins"));
    assert!(session.len() == 1 && drain.len() == 1, "{entries:#?}");
    assert!(session[0] < drain[0], "{entries:#?}");
    assert_eq!(world.phase(), Phase::Drained);
    assert_eq!(world["n1"].labels, before.labels);
}

#[test]
fn at_most_eight_pods_of_a_node_leave_at_once() {
    let titles: Vec<String> = (0..20).map(|index| format!("now/p{index:02}")).collect();
    let titles: Vec<&str> = titles.iter().map(String::as_str).collect();
    let mut world = world(&titles);
    let mut removals = begin(&mut world).removals;
    let mut seen = 0;
    for _ in 0..40 {
        assert!(removals.len() <= MAX_AT_ONCE);
        seen += removals.len();
        for one in std::mem::take(&mut removals) {
            answer(&mut world, &one.name, RemovalAnswer::Taken);
            gone(&mut world, &format!("now/{}", one.name));
        }
        removals = world.look(PatchFate::Made).removals;
    }
    assert_eq!((seen, world.phase()), (20, Phase::Drained));
}

#[test]
fn while_pods_cannot_be_read_nothing_is_drained_and_it_says_why() {
    let mut world = world(&["now/a"]);
    begin(&mut world);
    world.restart(Restart::All);
    world.deliver_pod_update(PodUpdate::Failing("403".into()));
    // The next look lists its pods; before that the state is that of the node.
    let looked = world.look(PatchFate::Made);
    assert!(looked.patch().is_none());
    assert_eq!(state(&world), Some("draining"));
    world.handle(FleetInput::Pods {
        node: "n2".into(),
        update: PodUpdate::Listed,
    });
    assert!(!world.fleet.knows("n2"));
}

#[test]
fn a_node_whose_pods_cannot_be_seen_any_more_is_not_called_drained() {
    let mut world = world(&["now/a"]);
    begin(&mut world);
    gone(&mut world, "now/a");
    world.deliver_pod_update(PodUpdate::Failing("the API server is away".into()));
    world.settle_now();
    assert_eq!(state(&world), Some("draining"));
    // Missed changes follow the recovery of the watch.
    world.deliver_pod_update(PodUpdate::Recovered);
    assert!(world.look_without_watch(PatchFate::Made).patch().is_none());
    world.settle_now();
    assert_eq!(state(&world), Some("drain-succeeded"));
}

#[test]
fn a_taint_that_the_policy_asks_for_stands_beside_the_cordon_for_the_whole_drain() {
    let text = "[[rule-sets]]\nname = \"fatal\"\ncordon = { shouldCordon = true }\n\
                taint = { key = \"gpuwarden.dev/drain\", value = \"yes\", effect = \"NoSchedule\" }\n\
                [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n";
    let policy = Policy::parse(text, "p").unwrap();
    let mut world = World::with(drains(), &policy, [NodeView::unknown("n1")]);
    add(&mut world, "jobs/a");
    world.restart(Restart::Nothing);
    let tainted = |world: &World| {
        let taints = world["n1"].taints.iter();
        taints.map(|on| on.taint.to_string()).collect::<Vec<_>>()
    };
    let ours = ["gpuwarden.dev/drain=yes:NoSchedule"];
    begin(&mut world);
    assert!(world["n1"].unschedulable);
    assert_eq!(tainted(&world), ours);
    gone(&mut world, "jobs/a");
    world.settle_now();
    assert_eq!(
        (state(&world), tainted(&world)),
        (Some("drain-succeeded"), ours.map(str::to_owned).to_vec())
    );
    world.recovery(0);
    world.settle();
    assert!(tainted(&world).is_empty() && !world["n1"].unschedulable);
}
