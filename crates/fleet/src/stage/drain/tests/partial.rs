//! Drains of single GPUs.

use contract::RecommendedAction;

use super::*;

const POLICY: &str = r#"
    [device-taints]
    [[rule-sets]]
    name = "fatal"
    taint-devices = 2
    cordon = { shouldCordon = true }
    [[rule-sets.match.all]]
    kind = "HealthEvent"
    expression = "event.isFatal"
"#;

fn partial() -> Settings {
    let config = DrainConfig::parse(&format!("partialDrainEnabled = true\n{CONFIG}"), "d").unwrap();
    Settings {
        drain: Some(Arc::new(config)),
        ..settings()
    }
}

/// Adds a pod that has these GPUs; with none it has unknown ones.
fn with_gpus(world: &mut World, title: &str, gpus: &[&str]) {
    add(world, title);
    let pod = world.pods.get_mut(title).unwrap();
    (pod.gpus, pod.has_gpus) = (gpus.iter().map(|gpu| (*gpu).to_owned()).collect(), true);
}

fn reset(world: &mut World, gpu: &str) {
    report(world, gpu, RecommendedAction::ComponentReset);
}

fn report(world: &mut World, gpu: &str, action: RecommendedAction) {
    world.tick();
    let mut event = event("GpuMemWatch", &[("GPU_UUID", gpu)], true, false);
    event.recommended_action = action.into();
    let now = world.now;
    world.store(event, now);
}

/// Looks until nothing more is done. Returns the removals.
fn settle(world: &mut World) -> Vec<String> {
    (0..8)
        .flat_map(|_| removed(&world.look(PatchFate::Made)))
        .collect()
}

fn leave(world: &mut World, name: &str) {
    answer(world, name, RemovalAnswer::Taken);
    gone(world, &format!("now/{name}"));
}

#[test]
fn the_pods_of_a_tainted_gpu_leave_and_the_others_work_on() {
    let mut world = World::with(
        partial(),
        &Policy::parse(POLICY, "p").unwrap(),
        [NodeView::unknown("n1")],
    );
    for (title, gpu) in [("now/a", "GPU-0"), ("now/b", "GPU-1"), ("now/c", "GPU-2")] {
        with_gpus(&mut world, title, &[gpu]);
    }
    add(&mut world, "now/no-gpu");
    world.restart(Restart::Nothing);
    world.deliver_devices(4);
    let before = world["n1"].clone();
    report(&mut world, "GPU-0", RecommendedAction::RestartBm);
    assert_eq!(settle(&mut world), ["evict now/a"]);
    assert_eq!(
        world.fleet.status("n1").unwrap().state,
        NodeState::PartlyQuarantined
    );
    assert!(!world["n1"].unschedulable && state(&world).is_none());
    leave(&mut world, "a");
    assert!(settle(&mut world).is_empty());
    assert_eq!(world.phase(), Phase::Drained);
    // Another GPU: its pods leave, and no others.
    report(&mut world, "GPU-1", RecommendedAction::RestartBm);
    assert_eq!(settle(&mut world), ["evict now/b"]);
    // After a restart without a store the drain resumes.
    world.restart(Restart::Events);
    world.deliver_devices(4);
    assert_eq!(settle(&mut world), ["evict now/b"]);
    leave(&mut world, "b");
    settle(&mut world);
    assert_eq!(world.phase(), Phase::Drained);
    // A fault of the node itself: all pods leave.
    world.report("Node", &[], true, false);
    let mut all = settle(&mut world);
    all.sort();
    assert_eq!(all, ["evict now/c", "evict now/no-gpu"]);
    assert_eq!(state(&world), Some("draining"));
    for (check, gpu) in [("GpuMemWatch", "GPU-0"), ("GpuMemWatch", "GPU-1")] {
        world.report(check, &[("GPU_UUID", gpu)], false, true);
    }
    world.report("Node", &[], false, true);
    world.settle();
    assert_eq!(world["n1"].annotations, before.annotations);
}

#[test]
fn of_a_node_that_is_out_for_the_reset_of_a_gpu_only_its_pods_leave() {
    let mut world = world_with(partial(), &[]);
    with_gpus(&mut world, "now/a", &["GPU-0"]);
    with_gpus(&mut world, "now/b", &["GPU-1"]);
    with_gpus(&mut world, "now/unsaid", &[]);
    reset(&mut world, "GPU-0");
    assert_eq!(settle(&mut world), ["evict now/a"]);
    assert_eq!(state(&world), Some("draining"));
    leave(&mut world, "a");
    // A person is asked about a pod that may hold the GPU; the pod stays until that is known.
    assert!(settle(&mut world).is_empty());
    assert!(
        awaits(&world).contains("now/unsaid is left alone until it is known which GPUs it has")
    );
    world.now += SignedDuration::from_mins(5);
    let looked = world.look(PatchFate::Made);
    let asked = looked
        .notes
        .iter()
        .find(|note| note.kind == EntryKind::Attention)
        .unwrap();
    assert!(
        asked
            .text
            .contains("now/unsaid: which GPUs it has is not written on it")
    );
    with_gpus(&mut world, "now/unsaid", &["GPU-1"]);
    world.deliver_pods();
    settle(&mut world);
    assert_eq!(
        (state(&world), world.phase()),
        (Some("drain-succeeded"), Phase::Drained)
    );
    // A fault that a reset does not fix makes all pods leave.
    report(&mut world, "GPU-3", RecommendedAction::RestartBm);
    assert_eq!(settle(&mut world), ["evict now/b", "evict now/unsaid"]);
    assert_eq!(state(&world), Some("draining"));
}

/// The fault of one of two GPUs ends before its pods have left, and comes again after the drain.
#[test]
fn a_gpu_whose_fault_ended_meanwhile_was_not_drained() {
    let mut world = world_with(partial(), &[]);
    with_gpus(&mut world, "now/a", &["GPU-0"]);
    with_gpus(&mut world, "now/b", &["GPU-1"]);
    reset(&mut world, "GPU-0");
    reset(&mut world, "GPU-1");
    assert_eq!(settle(&mut world), ["evict now/a", "evict now/b"]);
    world.report("GpuMemWatch", &[("GPU_UUID", "GPU-1")], false, true);
    leave(&mut world, "a");
    settle(&mut world);
    assert_eq!(world.phase(), Phase::Drained);
    world.now += SignedDuration::from_mins(1);
    reset(&mut world, "GPU-1");
    settle(&mut world);
    assert_eq!(world.phase(), Phase::Draining);
}

#[test]
fn where_nobody_knows_the_gpu_or_the_switch_is_off_all_pods_leave() {
    let mut nameless = world_with(partial(), &[]);
    let mut off = world_with(drains(), &[]);
    for world in [&mut nameless, &mut off] {
        with_gpus(world, "now/a", &["GPU-0"]);
        with_gpus(world, "now/b", &["GPU-1"]);
    }
    nameless.tick();
    let mut event = event("GpuMemWatch", &[("GPU", "0")], true, false);
    event.recommended_action = RecommendedAction::ComponentReset.into();
    let now = nameless.now;
    nameless.store(event, now);
    reset(&mut off, "GPU-0");
    for world in [&mut nameless, &mut off] {
        assert_eq!(settle(world), ["evict now/a", "evict now/b"]);
    }
}
