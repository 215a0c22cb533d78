use contract::keys;
use model::device::Claim;
use model::node::NodeView;
use policy::Policy;

use super::*;
use crate::session::{Intent, Phase};
use crate::view::NodeState;
use crate::world::{Fate, Restart, World, settings};
use crate::{DeviceInput, DeviceWatch, FleetInput, Settings};

mod simulator;

const POLICY: &str = r#"
    [device-taints]
    [[rule-sets]]
    name = "fatal"
    taint-devices = 1
    cordon = { shouldCordon = true }
    [[rule-sets.match.all]]
    kind = "HealthEvent"
    expression = "event.isFatal"
"#;
const TAINTED: &str = "gpu-0 gpu.nvidia.com/memory=retired:NoSchedule";

fn policy() -> Policy {
    Policy::parse(POLICY, "p").unwrap()
}

/// Creates a controller that has listed two GPUs of `n1`.
fn world() -> World {
    let mut world = World::new(&policy());
    world.deliver_devices(2);
    world
}

fn fault(world: &mut World, gpu: u8) {
    let uuid = format!("GPU-{gpu}");
    world.report("GpuMemWatch", &[("GPU_UUID", &uuid)], true, false);
}

fn recovery(world: &mut World, gpu: u8) {
    let uuid = format!("GPU-{gpu}");
    world.report("GpuMemWatch", &[("GPU_UUID", &uuid)], false, true);
}

#[test]
fn one_gpu_is_tainted_two_take_the_node_out_and_all_comes_back() {
    let mut world = world();
    let before = world["n1"].clone();
    fault(&mut world, 0);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    assert_eq!(world.tainted(), [TAINTED]);
    assert!(!world["n1"].unschedulable && !world["n1"].labels.contains_key(keys::STATE_LABEL));
    let status = world.fleet.status("n1").unwrap();
    assert_eq!(status.state, NodeState::PartlyQuarantined);
    assert_eq!(status.devices[0].gpu, "GPU-0");
    fault(&mut world, 1);
    world.settle();
    assert!(world["n1"].unschedulable);
    assert_eq!(world["n1"].labels[keys::STATE_LABEL], "quarantined");
    assert_eq!(
        world.fleet.status("n1").unwrap().state,
        NodeState::Session(Phase::Quarantined)
    );
    // The node itself is well enough again, and the other GPU is not.
    recovery(&mut world, 1);
    world.settle();
    assert!(!world["n1"].unschedulable && !world["n1"].labels.contains_key(keys::STATE_LABEL));
    assert_eq!(world.tainted(), [TAINTED]);
    recovery(&mut world, 0);
    world.settle();
    assert!(world.tainted().is_empty());
    assert_eq!(world["n1"].annotations, before.annotations);
    assert_eq!(world["n1"].labels, before.labels);
}

#[test]
fn a_rule_waits_for_the_session_to_stand_on_the_node_and_for_no_later_patch_of_it() {
    let mut world = world();
    let look = |world: &mut World, gpu| {
        fault(world, gpu);
        let looked = world.look(Fate::Made);
        let made = looked
            .rules
            .iter()
            .map(|change| change.device().name.clone());
        (looked.patch().unwrap().intent, made.collect::<Vec<_>>())
    };
    assert_eq!(look(&mut world, 0), (Intent::Quarantine, vec![]));
    assert_eq!(world.look(Fate::Made).rules.len(), 1);
    let second = vec!["gpu-1".to_owned()];
    assert_eq!(look(&mut world, 1), (Intent::Update, second));
}

#[test]
fn a_rule_that_was_left_behind_or_changed_is_set_right() {
    let mut world = world();
    fault(&mut world, 0);
    world.settle();
    // Deleting the rule by hand changes nothing: only a release ends a session.
    let name = world.rules.keys().next().unwrap().clone();
    let rule = world.rules.remove(&name).unwrap();
    world.handle(FleetInput::Devices(DeviceInput::Rule(name.clone(), None)));
    world.settle();
    assert_eq!(world.tainted(), [TAINTED]);
    // A person weakens the rule.
    let mut weak = rule.clone();
    weak.spec.taint.effect = TaintEffect::None;
    world.rules.insert(name.clone(), weak.clone());
    world.handle(FleetInput::Devices(DeviceInput::Rule(
        name,
        Some(Box::new(weak)),
    )));
    world.settle();
    assert_eq!(world.tainted(), [TAINTED]);
    // The GPU recovers while no process runs: the next one takes the rule back, with a store or
    // without.
    for restart in [Restart::All, Restart::Events] {
        world.rules.insert(rule.name.clone(), rule.clone());
        recovery(&mut world, 0);
        world.restart(restart);
        world.deliver_devices(2);
        world.settle();
        assert!(world.tainted().is_empty(), "{restart:?}");
    }
}

#[test]
fn an_answer_that_the_watch_has_overtaken_changes_nothing() {
    let mut world = world();
    fault(&mut world, 0);
    world.settle();
    // The cluster wrote its status, which was observed before the answer to our last change.
    let (name, answered) = world.rules.pop_first().unwrap();
    let mut newer = answered.clone();
    newer.resource_version = "7".into();
    world.rules.insert(name.clone(), newer);
    world.deliver_devices(2);
    let (node, result) = ("n1".to_owned(), Ok(Some(Box::new(answered))));
    world.handle(FleetInput::RuleChanged {
        node,
        rule: name,
        result,
    });
    recovery(&mut world, 0);
    world.settle();
    assert!(world.tainted().is_empty());
}

#[test]
fn a_person_who_releases_the_node_releases_its_devices() {
    let mut world = world();
    fault(&mut world, 0);
    world.settle();
    world.annotate(keys::RELEASE, "it is well");
    assert_eq!(world.settle(), [Intent::StandDown]);
    // A dismissed fault does not even inform.
    assert!(world.tainted().is_empty());
    world.settle();
    fault(&mut world, 0);
    world.settle();
    assert_eq!(world.tainted(), [TAINTED]);
}

#[test]
fn a_node_that_flaps_keeps_its_taints_while_it_waits() {
    let mut world = world();
    for _ in 0..2 {
        fault(&mut world, 0);
        world.settle_now();
        recovery(&mut world, 0);
        world.settle_now();
    }
    assert_eq!(world.phase(), Phase::Returning);
    assert_eq!(world.tainted(), [TAINTED]);
    world.settle();
    assert!(world.tainted().is_empty());
}

#[test]
fn what_is_held_back_only_informs() {
    let budget = format!("{POLICY}\n[[brake.budgets]]\nmax = 0\n");
    let with_brake = Settings {
        brake: true,
        ..settings()
    };
    let policy = Policy::parse(&budget, "p").unwrap();
    let mut world = World::with(with_brake, &policy, [NodeView::unknown("n1")]);
    world.restart(Restart::Nothing);
    world.deliver_devices(2);
    fault(&mut world, 0);
    world.settle_now();
    assert_eq!(world.phase(), Phase::Held);
    assert_eq!(
        world.tainted(),
        ["gpu-0 gpu.nvidia.com/memory=retired:None"]
    );
}

#[test]
fn a_dry_run_writes_no_rule_and_names_the_pods() {
    let dry = Settings {
        mode: Mode::DryRun,
        ..settings()
    };
    let mut world = World::with(dry, &policy(), [NodeView::unknown("n1")]);
    world.restart(Restart::Nothing);
    world.deliver_devices(2);
    let claim = |pods: &[&str]| Claim {
        devices: vec![DeviceId {
            driver: "gpu.nvidia.com".into(),
            pool: "n1".into(),
            name: "gpu-0".into(),
        }],
        pods: pods.iter().map(ToString::to_string).collect(),
    };
    let input = DeviceInput::Claim("a/c".into(), Some(claim(&["a/p", "a/q"])));
    world.handle(FleetInput::Devices(input));
    fault(&mut world, 0);
    let mut messages = Vec::new();
    for _ in 0..3 {
        messages.extend(
            world
                .look(Fate::Made)
                .notes
                .into_iter()
                .map(|entry| entry.text),
        );
    }
    let expected = "taint device gpu.nvidia.com/n1/gpu-0 with gpu.nvidia.com/memory=retired:NoSchedule; \
                    2 pods use it: a/p, a/q";
    assert_eq!(
        messages.iter().filter(|text| *text == expected).count(),
        1,
        "{messages:#?}"
    );
    assert!(world.rules.is_empty());
    let shown = world.fleet.status("n1").unwrap().devices;
    assert_eq!(shown[0].pods, ["a/p", "a/q"]);
    recovery(&mut world, 0);
    for _ in 0..3 {
        world.look(Fate::Made);
    }
    assert!(world.fleet.status("n1").is_none());
}

#[test]
fn nothing_is_decided_before_the_devices_are_known_and_nodes_are_where_they_cannot_be() {
    let mut world = World::new(&policy());
    let watch = |watch| FleetInput::Devices(DeviceInput::Watch(watch));
    world.handle(watch(DeviceWatch::Pending));
    fault(&mut world, 0);
    assert!(world.look(Fate::Made).patches.is_empty());
    world.handle(watch(DeviceWatch::Unserved("no".into())));
    world.settle();
    assert!(world["n1"].unschedulable && world.rules.is_empty());
    // A person switches the API on.
    world.deliver_devices(2);
    world.settle();
    assert!(!world["n1"].unschedulable);
    assert_eq!(world.tainted(), [TAINTED]);
}

#[test]
fn each_kind_of_gpuwarden_leaves_the_rules_of_others_alone() {
    let mut world = world();
    fault(&mut world, 0);
    world.settle();
    let (name, mut rule) = world.rules.pop_first().unwrap();
    recovery(&mut world, 0);
    world.settle();
    rule.spec.by = Maker::Node;
    rule.spec.store = Some("theirs".into());
    world.rules.insert(name.clone(), rule.clone());
    world.deliver_devices(2);
    world.settle();
    assert_eq!(world.rules.get(&name), Some(&rule));
}
