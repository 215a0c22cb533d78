//! Invariants of the rules that taint single devices.

use std::collections::BTreeSet;

use contract::{HealthEvent, keys};
use fleet::PlannedRule;
use model::device::{DeviceTaintRule, TaintEffect};
use model::ownership::Ownership;
use model::reporter::is_own_word;

use super::super::super::happening::Broken;
use super::super::super::happening::TAINTS;
use super::super::World;

/// Checks that a change concerns a rule of the controller, and that the node of a device that it
/// takes out of service says that it has a session.
pub(in crate::simulate) fn rule(world: &World, planned: &PlannedRule) -> Result<(), Broken> {
    let PlannedRule { node, change, .. } = planned;
    let name = change.rule_name();
    if let Some(rule) = world.rules.of_others(&name) {
        let by = &rule.spec.by;
        return Err(format!("{change}: the rule {name} was made by {by:?}"));
    }
    let out = (change.after()).is_some_and(|rule| rule.spec.taint.effect > TaintEffect::None);
    let session = world
        .fleet
        .view(node)
        .and_then(|view| Ownership::read(view));
    if out && session.is_none() {
        return Err(format!("{change}: {node} carries no session"));
    }
    Ok(())
}

/// Checks that exactly those devices are out of service whose faults ask for it, that no other rule
/// is left without an open fault, and that rules of others are as they were.
pub(super) fn settled(world: &World, node: &str) -> Result<(), Broken> {
    if !world.setup.device_taints {
        return Ok(());
    }
    let ours = || world.rules.ours().filter(|rule| rule.spec.node == node);
    let gpu = |rule: &DeviceTaintRule| rule.spec.gpu.clone();
    let out = ours().filter(|rule| rule.spec.taint.effect > TaintEffect::None);
    let out: BTreeSet<String> = out.map(gpu).collect();
    let faulty = faulty(world, node, |event| event.check_name == TAINTS);
    if out != faulty {
        return Err(format!(
            "the GPUs of {node} that are tainted are {out:?}; its faults ask for {faulty:?}"
        ));
    }
    let open: BTreeSet<&str> = (world.fleet.book().faults(node).iter())
        .filter_map(|fault| gpu_of(&fault.event))
        .collect();
    if let Some(rule) = ours().find(|rule| !open.contains(rule.spec.gpu.as_str())) {
        return Err(format!("the rule {} has no open fault", rule.name));
    }
    untouched(world)
}

/// Checks that no rule of the controller is left.
pub(super) fn given_back(world: &World) -> Result<(), Broken> {
    if let Some(rule) = world.rules.ours().next() {
        let name = &rule.name;
        return Err(format!("no fault is open, and the rule {name} is left"));
    }
    untouched(world)
}

fn untouched(world: &World) -> Result<(), Broken> {
    match world.rules.lost() {
        Some(rule) => Err(format!(
            "the rule {}, which is another's, is not as it was",
            rule.name
        )),
        None => Ok(()),
    }
}

/// Returns the UUIDs of the GPUs whose faults take a node or its devices out of service, of those
/// faults that `counts`.
pub(super) fn faulty(
    world: &World,
    node: &str,
    counts: impl Fn(&HealthEvent) -> bool,
) -> BTreeSet<String> {
    let events = world.fleet.desired(node).events;
    let events = events.iter().map(|one| &one.event);
    let events = events.filter(|event| !is_own_word(event) && counts(event));
    events.filter_map(gpu_of).map(str::to_owned).collect()
}

fn gpu_of(event: &HealthEvent) -> Option<&str> {
    let mut entities = event.entities_impacted.iter();
    let gpu = entities.find(|one| one.entity_type == keys::ENTITY_GPU_UUID)?;
    Some(&gpu.entity_value)
}
