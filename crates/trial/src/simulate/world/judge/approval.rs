//! Invariants of approvals.

use std::collections::BTreeSet;

use contract::HealthEvent;
use fleet::Planned;
use model::attempt::Attempt;
use model::node::NodeView;
use model::ownership::Ownership;
use model::proposal::{drain_actions, repair_action};
use model::reporter::is_own_word;

use super::super::super::happening::Broken;
use super::super::super::resources::ASKS;
use super::super::World;

/// Checks that a session calls approved only what a person has approved.
pub(in crate::simulate) fn approved(world: &World, planned: &Planned) -> Result<(), Broken> {
    let Some(after) = Ownership::read(&planned.view.after(&planned.patch.change)) else {
        return Ok(());
    };
    let mut called = after
        .mark
        .proposals
        .iter()
        .filter(|one| one.approved.is_some());
    match called.find(|one| !world.approved.contains(&one.id(&after.session_id))) {
        Some(one) => {
            let (node, title) = (&planned.node, one.title());
            Err(format!(
                "{title} of {node} is called approved, and nobody has approved it"
            ))
        }
        None => Ok(()),
    }
}

/// Checks that the drain of a node is approved, unless one of its faults asks nobody. Where only the
/// pods of single GPUs leave, each pod is checked by itself: its GPU has such a fault.
pub(super) fn has_approval(world: &World, view: &NodeView) -> Result<(), Broken> {
    let own = Ownership::read(view).filter(|own| own.mark.drain_gpus.is_empty());
    let Some(own) = own else {
        return Ok(());
    };
    let events = world.fleet.desired(&view.name).events;
    let mut free = events.iter().filter(|one| {
        let asks = world.setup.asks(&one.event.check_name);
        one.drains().is_some() && !is_own_word(&one.event) && !asks
    });
    if free.next().is_some() || has(&own, &drain_actions(&[])) {
        return Ok(());
    }
    Err("nobody has approved the drain of its node".to_owned())
}

/// Returns true if the drain for an event has no approval, and needs one.
pub(super) fn waits(world: &World, node: &str, event: &HealthEvent) -> bool {
    let own = world
        .fleet
        .view(node)
        .and_then(|view| Ownership::read(view));
    let Some(own) = own.filter(|_| world.setup.asks(&event.check_name)) else {
        return false;
    };
    let gpus = event.entities_impacted.iter();
    let gpus: Vec<String> = gpus.map(|one| one.entity_value.clone()).collect();
    !has(&own, &drain_actions(&gpus))
}

/// Checks that a repair is approved, if its action or the route of its fault asks for that.
pub(super) fn may_repair(world: &World, own: &Ownership, open: &Attempt) -> Result<(), Broken> {
    let event = own.events.iter().find(|event| event.id == open.event);
    let asks = open.action == ASKS && world.setup.approvals
        || event.is_some_and(|event| world.setup.asks(&event.check_name));
    let action = repair_action(&open.action, &open.entity);
    if asks && !has(own, &[action.clone()].into()) {
        return Err(format!("nobody has approved {action}"));
    }
    Ok(())
}

/// Returns true if all of the actions are in approved proposals of the session.
fn has(own: &Ownership, actions: &BTreeSet<String>) -> bool {
    let approved = own
        .mark
        .proposals
        .iter()
        .filter(|one| one.approved.is_some());
    let approved: Vec<_> = approved.collect();
    actions
        .iter()
        .all(|action| approved.iter().any(|one| one.has(action)))
}
