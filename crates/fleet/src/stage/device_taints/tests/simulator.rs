//! A simulator: random faults of GPUs, recoveries, people, crashes and refused patches on one
//! node, against the promises of its devices' taints.

use proptest::prelude::*;

use super::*;
use crate::world::LookEffects;

const GPUS: u8 = 3;
const CHECKS: [&str; 3] = ["GpuMemWatch", "GpuThermalWatch", "SysLogsGPUFallenOff"];

/// A step that concerns the node.
#[derive(Clone, Debug)]
enum Happening {
    Report {
        gpu: u8,
        check: usize,
        healthy: bool,
    },
    Release,
    RuleDeleted,
    Crash(Restart),
    /// The controller ends after some of its effects.
    CrashBetween {
        patch: bool,
        rules: bool,
        restart: Restart,
    },
    Look(Fate),
    Settle,
}

fn happening() -> impl Strategy<Value = Happening> {
    let fates = prop_oneof![Just(Fate::Made), Just(Fate::Conflict), Just(Fate::Refused)];
    let restarts = || prop_oneof![Just(Restart::All), Just(Restart::Events)];
    prop_oneof![
        8 => (0..GPUS, 0..CHECKS.len(), any::<bool>())
            .prop_map(|(gpu, check, healthy)| Happening::Report { gpu, check, healthy }),
        1 => Just(Happening::Release),
        1 => Just(Happening::RuleDeleted),
        1 => restarts().prop_map(Happening::Crash),
        2 => (any::<bool>(), any::<bool>(), restarts())
            .prop_map(|(patch, rules, restart)| Happening::CrashBetween { patch, rules, restart }),
        4 => fates.prop_map(Happening::Look),
        2 => Just(Happening::Settle),
    ]
}

fn report(world: &mut World, gpu: u8, check: usize, healthy: bool) {
    let entity = ("GPU_UUID", format!("GPU-{gpu}"));
    world.report(CHECKS[check], &[(entity.0, &entity.1)], !healthy, healthy);
}

/// Returns whether the node's mark says that it has a session.
fn has_session(world: &World) -> bool {
    world["n1"].annotations.contains_key(keys::SESSION)
}

/// Decides, and ends the controller when some of the effects are done. Returns them.
fn crash(world: &mut World, patch: bool, rules: bool, restart: Restart) -> LookEffects {
    world.tick();
    world.deliver_node("n1");
    world.loses_rules = !rules;
    let looked = world.decide();
    world.loses_rules = false;
    if let Some(planned) = looked.patch().filter(|_| patch) {
        world["n1"] = world["n1"].after(&planned.change);
    }
    world.restart(restart);
    world.deliver_devices(GPUS);
    looked
}

/// Returns whether any change makes a rule that does more than inform.
fn takes_out(looked: &LookEffects) -> bool {
    let after = looked.rules.iter().filter_map(RuleChange::after);
    let mut effects = after.map(|rule| rule.spec.taint.effect);
    effects.any(|effect| effect > TaintEffect::None)
}

/// Returns the GPUs that have a rule and no open fault.
fn without_fault(world: &World) -> Vec<&str> {
    let faults = world.fleet.book().faults("n1");
    let is_open = |gpu: &str| (faults.iter()).any(|one| one.subject.name("GPU_UUID") == Some(gpu));
    let rules = world.rules.values().map(|rule| rule.spec.gpu.as_str());
    rules.filter(|gpu| !is_open(gpu)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// In every simulation: a device has at most one rule of a key, none that stays without an
    /// open fault, and once nothing is broken none at all. No device is taken out before its
    /// node's mark, which the brake counts, says that it has a session.
    #[test]
    fn a_rule_stands_for_an_open_fault_of_its_device_and_for_no_other(
        happenings in prop::collection::vec(happening(), 1..40),
    ) {
        let mut world = World::new(&policy());
        world.deliver_devices(GPUS);
        for happening in happenings {
            let had_session = has_session(&world);
            match happening {
                Happening::Report { gpu, check, healthy } => report(&mut world, gpu, check, healthy),
                Happening::Release => world.annotate(keys::RELEASE, "by hand"),
                Happening::RuleDeleted => if let Some((name, _)) = world.rules.pop_first() {
                    world.handle(FleetInput::Devices(DeviceInput::Rule(name, None)));
                }
                Happening::Crash(restart) => {
                    world.restart(restart);
                    world.deliver_devices(GPUS);
                }
                Happening::CrashBetween { patch, rules, restart } => {
                    let looked = crash(&mut world, patch, rules, restart);
                    prop_assert!(had_session || !takes_out(&looked));
                }
                Happening::Look(fate) => {
                    let looked = world.look(fate);
                    prop_assert!(had_session || !takes_out(&looked));
                }
                Happening::Settle => {
                    world.settle();
                    prop_assert_eq!(without_fault(&world), [""; 0]);
                }
            }
            let of = |rule: &DeviceTaintRule| (rule.spec.device.clone(), rule.spec.taint.key.clone());
            let different: BTreeSet<_> = world.rules.values().map(of).collect();
            prop_assert_eq!(different.len(), world.rules.len(), "{:?}", world.tainted());
        }
        for (gpu, check) in (0..GPUS).flat_map(|gpu| (0..CHECKS.len()).map(move |it| (gpu, it))) {
            report(&mut world, gpu, check, true);
        }
        world.settle();
        prop_assert_eq!(world.tainted(), [""; 0]);
        prop_assert_eq!(world.phase(), Phase::Idle);
    }
}
