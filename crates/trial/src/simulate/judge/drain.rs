//! Invariants of drains.

use contract::{HealthEvent, RecommendedAction, keys};
use fleet::{Planned, PlannedRemoval, PlannedResource};

use fleet::drain::{Drain, Fate, fate};
use fleet::veto::Veto;
use jiff::SignedDuration;
use model::node::NodeView;
use model::ownership::Ownership;
use model::reporter::is_own_word;

use super::super::node::{SimNode, SimPod};
use super::super::repair::drain_key;
use super::super::setup::Route;
use super::super::world::World;
use super::devices::faulty;
use super::{Broken, routes};

/// Time for which pods of the namespace `later` are waited for.
const DELETE_AFTER: SignedDuration = SignedDuration::from_mins(60);
/// Time that an evicted pod has to end, with some slack, before it may be deleted.
const ENDS_WITHIN: SignedDuration = SignedDuration::from_mins(6);

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
        .is_some_and(|mark| mark.repairs().next().is_some());
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

/// Checks that a pod is removed only from a node that is marked as draining for its session, whose
/// faults are not all routed past the drain, and as its namespace asks.
pub(in crate::simulate) fn removal(world: &World, planned: &PlannedRemoval) -> Result<(), Broken> {
    let title = format!("{}/{} of {}", planned.namespace, planned.name, planned.node);
    let wrong = |why: &str| Err(format!("the pod {title} is to be removed: {why}"));
    let now = world.now;
    let Some(view) = world.fleet.view(&planned.node) else {
        return wrong("the controller does not know its node");
    };
    let Some(own) = Ownership::read(view) else {
        return wrong("its node has no session");
    };
    if own.takes_node_out() {
        if own.mark.drain.is_none_or(|mark| mark.done.is_some()) {
            return wrong("its node is not being drained");
        }
        // Pods leave for a further fault also while a remediation of single GPUs goes on.
        let state = view.labels.get(keys::STATE_LABEL).map(String::as_str);
        if !world.setup.partial && state != Some(keys::STATE_DRAINING) {
            return wrong("its node does not say that it is being drained");
        }
        if !view.unschedulable {
            return wrong("its node is in service");
        }
    } else if own.mark.drain_gpus.is_empty() {
        return wrong("its node is in service, and none of its GPUs is being drained");
    }
    if !own.mark.drain_gpus.is_empty() {
        holds_a_faulty_gpu(world, planned).or_else(|why| wrong(&why))?;
    }
    if world.setup.drains_by_resource(view) {
        return wrong("another operator drains its node");
    }
    may_drain(world, view).or_else(|why| wrong(&why))?;
    let Some(mark) = own.mark.drain else {
        return wrong("the session of its node has no drain");
    };
    let forced = routes(world, &planned.node).contains(&Some(Route::Forceful));
    let due = match planned.namespace.as_str() {
        "now" => mark.since,
        "later" | "jobs" if forced => mark.since,
        "later" => mark.since + DELETE_AFTER,
        "jobs" => return wrong("it is to be waited for"),
        _ => return wrong("its namespace is not drained"),
    };
    // The clock may have been set back since the drain began.
    let due = due - mark.since.duration_since(now).max(SignedDuration::ZERO);
    if now < due {
        return wrong(&format!("it is to be waited for until {due}"));
    }
    if planned.evict.is_none() && planned.namespace != "later" {
        return wrong("without a grace period, against the mode of its namespace");
    }
    if planned.evict.is_none() && now < due + ENDS_WITHIN {
        return wrong("without a grace period, before it had the time to end");
    }
    Ok(())
}

/// Checks that neither a veto nor the routes of all faults of a node hold its drain back.
fn may_drain(world: &World, view: &NodeView) -> Result<(), Broken> {
    if let Ok(Some(veto)) = Veto::of(view, world.now) {
        return Err(format!("{veto} holds it back"));
    }
    let routes = routes(world, &view.name);
    if routes.iter().all(|route| *route == Some(Route::Stays)) {
        return Err("the routes of all faults of its node skip the drain".to_owned());
    }
    Ok(())
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

/// Checks that a pod is known to hold a GPU with a fault.
fn holds_a_faulty_gpu(world: &World, planned: &PlannedRemoval) -> Result<(), Broken> {
    let title = format!("{}/{}", planned.namespace, planned.name);
    let pod = world
        .node(&planned.node)
        .and_then(|node| node.pods.get(&title));
    let Some(pod) = pod else {
        return Ok(()); // It has ended, and the controller has not been told.
    };
    if !pod.is_known() {
        return Err("nobody says which GPU it holds".to_owned());
    }
    let faulty = faulty(world, &planned.node, |_| true);
    match &pod.gpu {
        Some(gpu) if faulty.contains(gpu) => Ok(()),
        gpu => Err(format!(
            "it holds {gpu:?}, and the faulty GPUs are {faulty:?}"
        )),
    }
}
