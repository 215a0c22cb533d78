//! Invariants of drains.

use contract::{HealthEvent, RecommendedAction};
use fleet::drain::{Drain, Fate, fate};
use fleet::veto::Veto;
use fleet::{Planned, PlannedResource};
use model::node::NodeView;
use model::ownership::Ownership;
use model::reporter::is_own_word;

use super::super::super::happening::Broken;
use super::super::super::node::{SimNode, SimPod};
use super::super::super::resources::drain_key;
use super::super::super::setup::Route;
use super::super::World;
use super::approval::has_approval;
use super::routes;

/// Checks that a drain begins with all pods only where its faults ask for more than the reset of
/// the GPUs that they name, and that all pods that were to leave have left when the decision is made
/// to call a node drained. Later, somebody may bind another pod before the patch arrives.
pub(in crate::simulate) fn drained(
    world: &World,
    node: &SimNode,
    planned: &Planned,
) -> Result<(), Broken> {
    let (name, now) = (&planned.node, world.now);
    let before = Ownership::read(&planned.view).map(|own| own.mark);
    let before = before.unwrap_or_default();
    let after = Ownership::read(&planned.view.after(&planned.patch.change));
    let after = after.map(|own| own.mark).unwrap_or_default();
    let Some(mark) = after.drain else {
        return Ok(());
    };
    let gpus = &after.drain_gpus;
    let whole = gpus.is_empty() && (before.drain.is_none() || !before.drain_gpus.is_empty());
    let tried = after
        .remediation
        .is_some_and(|mark| mark.remediations().next().is_some());
    let by_resource = world.setup.drains_by_resource(&planned.view);
    if whole && world.setup.partial && !by_resource && !tried && resets_suffice(world, name) {
        return Err(format!(
            "all pods of {name} are to leave, and its faults ask for the reset of single GPUs"
        ));
    }
    // A cancelled remediation returns a node to its earlier state: drained.
    let was_done = before.drain.is_some_and(|mark| mark.done.is_some());
    if mark.done.is_none() || was_done && before.drain_gpus == *gpus {
        return Ok(());
    }
    if by_resource {
        let key = drain_key(&planned.view).unwrap_or_default();
        if !world.resources.is_drained(&key) {
            return Err(format!(
                "{name} is called drained, and the operator that drains it has not said so"
            ));
        }
        return Ok(());
    }
    let drain = Drain {
        since: now,
        force: false,
    };
    let config = &world.configuration.drain;
    let leaves = |pod: &&SimPod| {
        let holds = |gpu: &String| gpus.is_empty() || gpus.contains(gpu);
        let concerned = gpus.is_empty() || pod.gpu.as_ref().is_some_and(holds);
        concerned && matches!(fate(&pod.view, drain, config, now), Fate::Leaves(..))
    };
    match node.pods.values().find(leaves) {
        Some(pod) => Err(format!(
            "{name} is called drained, and {} has not left",
            pod.view.title()
        )),
        None => Ok(()),
    }
}

/// Returns true if the faults of a node that are not routed past the drain ask for no more than the
/// reset of the GPUs that they name.
fn resets_suffice(world: &World, node: &str) -> bool {
    let events = world.fleet.desired(node).events;
    let events = events.iter().map(|one| &one.event);
    let drained = |event: &&HealthEvent| {
        !is_own_word(event) && world.setup.route(&event.check_name) != Some(Route::Stays)
    };
    let mut drained = events.filter(drained).peekable();
    let resets = RecommendedAction::ComponentReset;
    drained.peek().is_some() && drained.all(|event| event.recommended_action() == resets)
}

/// Checks that neither a veto nor the routes of all faults of a node hold its drain back.
pub(super) fn may_drain(world: &World, view: &NodeView) -> Result<(), Broken> {
    if let Ok(Some(veto)) = Veto::of(view, world.now) {
        return Err(format!("{veto} holds it back"));
    }
    let routes = routes(world, &view.name);
    if routes.iter().all(|route| *route == Some(Route::Stays)) {
        return Err("the routes of all faults of its node skip the drain".to_owned());
    }
    has_approval(world, view)
}

/// Checks that the custom resource of a drain is created only for a node that another operator
/// drains, and whose session says that this drain is in progress.
pub(super) fn by_resource(world: &World, planned: &PlannedResource) -> Result<(), Broken> {
    let wrong = |why: &str| Err(format!("{} is to be made: {why}", planned.name));
    let Some(view) = world.fleet.view(&planned.node) else {
        return wrong("the controller does not know its node");
    };
    if !world.setup.drains_by_resource(view) {
        return wrong("no other operator drains its node");
    }
    let own = Ownership::read(view).filter(Ownership::takes_node_out);
    let done = own
        .and_then(|own| own.mark.drain)
        .is_none_or(|mark| mark.done.is_some());
    if done || drain_key(view).as_ref() != Some(&planned.key) {
        return wrong("the session of its node has no such drain in progress");
    }
    may_drain(world, view).or_else(|why| wrong(&why))
}
