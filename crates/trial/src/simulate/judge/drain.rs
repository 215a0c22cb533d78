//! Invariants of drains.

use contract::keys;
use fleet::Planned;
use fleet::PlannedRemoval;
use fleet::drain::{Drain, Fate, fate};
use fleet::session::Intent;
use fleet::veto::Veto;
use jiff::SignedDuration;
use model::ownership::Ownership;

use super::super::node::SimNode;
use super::super::setup::Route;
use super::super::world::World;
use super::{Broken, routes};

/// Time for which pods of the namespace `later` are waited for.
const DELETE_AFTER: SignedDuration = SignedDuration::from_mins(60);
/// Time that an evicted pod has to end, with some slack, before it may be deleted.
const ENDS_WITHIN: SignedDuration = SignedDuration::from_mins(6);

/// Checks that all pods have left when the decision is made to call a node drained. Later,
/// somebody may bind another pod before the patch arrives.
pub(in crate::simulate) fn drained(
    world: &World,
    node: &SimNode,
    planned: &Planned,
) -> Result<(), Broken> {
    let (change, name, now) = (&planned.patch.change, &planned.node, world.now);
    let state = change
        .labels
        .get(keys::STATE_LABEL)
        .and_then(Option::as_deref);
    // A cancelled remediation returns a node to its earlier state: drained.
    let own = Ownership::read(&planned.view);
    let was_drained = own.is_some_and(|own| own.mark.drain.is_some_and(|one| one.done.is_some()));
    if state == Some(keys::STATE_DRAINED) && planned.patch.intent == Intent::Update && !was_drained
    {
        let drain = Drain {
            since: now,
            force: false,
        };
        let config = &world.configuration.drain;
        let left = node
            .pods
            .values()
            .find(|pod| matches!(fate(pod, drain, config, now), Fate::Leaves(..)));
        if let Some(pod) = left {
            return Err(format!(
                "{name} is called drained, and {} has not left",
                pod.title()
            ));
        }
    }
    Ok(())
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
    if view.labels.get(keys::STATE_LABEL).map(String::as_str) != Some(keys::STATE_DRAINING) {
        return wrong("its node is not being drained");
    }
    if !view.unschedulable {
        return wrong("its node is in service");
    }
    if let Ok(Some(veto)) = Veto::of(view, now) {
        return wrong(&format!("{veto} holds it back"));
    }
    let routes = routes(world, &planned.node);
    if routes.iter().all(|route| *route == Some(Route::Stays)) {
        return wrong("the routes of all faults of its node skip the drain");
    }
    let own = Ownership::read(view);
    let Some(mark) = own.and_then(|own| own.mark.drain) else {
        return wrong("the session of its node has no drain");
    };
    let forced = routes.contains(&Some(Route::Forceful));
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
