//! Invariants of remediations and validations.

use fleet::PlannedResource;
use model::attempt::{Attempt, Outcome, VALIDATION_GROUP};
use model::ownership::Ownership;

use super::super::node::SimNode;
use super::super::setup::Route;
use super::super::world::World;
use super::{Broken, routes};

/// Checks that a node with a remediation is returned only after a later validation has
/// succeeded.
pub(super) fn validated(node: &SimNode) -> Result<(), Broken> {
    let own = Ownership::read(&node.view);
    let mark = own.and_then(|own| own.mark.remediation).unwrap_or_default();
    let is_repair = |one: &&Attempt| one.group != VALIDATION_GROUP && one.made.is_some();
    let passed = |one: &&Attempt| {
        let end = one.end.as_ref();
        one.group == VALIDATION_GROUP && end.is_some_and(|end| end.outcome == Outcome::Succeeded)
    };
    let counts = |one: &&Attempt| is_repair(one) || passed(one);
    match mark.attempts.iter().rfind(counts) {
        Some(last) if is_repair(&last) => Err(format!(
            "{} is given back after {}, and was not validated",
            node.view.name,
            last.title()
        )),
        _ => Ok(()),
    }
}

/// Checks that the custom resource of a remediation is created only for the attempt that its
/// node records, once the node is drained, and not for faults that are routed past remediation.
pub(super) fn repair(world: &World, planned: &PlannedResource) -> Result<(), Broken> {
    let wrong = |why: &str| Err(format!("{} is to be made: {why}", planned.name));
    let Some(view) = world.fleet.view(&planned.node) else {
        return wrong("the controller does not know its node");
    };
    let Some(own) = Ownership::read(view) else {
        return wrong("its node carries no session");
    };
    if Ownership::permit(view).attempt.as_ref() != Some(&planned.key) {
        return wrong("the session of its node has no such attempt in progress");
    }
    let validates = own
        .mark
        .remediation
        .as_ref()
        .and_then(|mark| mark.under_way());
    if validates.is_some_and(|open| open.group == VALIDATION_GROUP) {
        return Ok(());
    }
    if own.mark.drain.is_none_or(|mark| mark.done.is_none()) {
        return wrong("its node is not drained");
    }
    let routes = routes(world, &planned.node);
    if !routes.iter().any(|route| Route::remediates(*route)) {
        return wrong("the routes of all faults of its node skip remediation");
    }
    Ok(())
}
