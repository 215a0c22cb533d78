//! Invariants of remediations and validations.

use fleet::PlannedResource;
use fleet::remediation::validation::Validation;
use jiff::SignedDuration;
use model::attempt::{Attempt, VALIDATION_GROUP};
use model::event::EventRecord;
use model::ownership::Ownership;

use super::super::super::happening::Broken;
use super::super::super::node::SimNode;
use super::super::super::setup::{Proof, Route};
use super::super::World;
use super::approval::may_repair;
use super::{asks_a_person, routes};

/// Time without a new fault that proves a node.
const QUIET: SignedDuration = SignedDuration::from_mins(1);

/// Checks that a node with a remediation is returned only after it has given the proof that is
/// configured: a later validation that has succeeded, or time without a fault.
pub(super) fn validated(world: &World, node: &SimNode) -> Result<(), Broken> {
    let own = Ownership::read(&node.view);
    let Some((own, proof)) = own.zip(world.setup.validation.some()) else {
        return Ok(());
    };
    let wrong = |last: &Attempt, why: &str| {
        let (name, title) = (&node.view.name, last.title());
        Err(format!("{name} is given back after {title}, and {why}"))
    };
    let mark = own.mark.remediation.unwrap_or_default();
    let made = |one: &&Attempt| one.made.is_some();
    let Some(last) = mark.remediations().filter(made).last() else {
        return Ok(());
    };
    if proof != Proof::Quiet {
        if !mark.validations().iter().any(Attempt::succeeded) {
            return wrong(last, "was not validated");
        }
        return Ok(());
    }
    if !own
        .events
        .iter()
        .any(|event| Validation::of(event).is_some())
    {
        return wrong(last, "was not to prove that it is quiet");
    }
    // After the clock was set back, times do not tell the order.
    let begins = |record: &&EventRecord| {
        let event = &record.event;
        event.node_name == node.view.name && !event.is_healthy && Validation::of(event).is_some()
    };
    let begun = world
        .store
        .events()
        .iter()
        .rfind(begins)
        .map(|record| record.created_at);
    let since = last.made.max(begun).filter(|_| !world.put_back);
    if since.is_some_and(|since| world.now < since + QUIET) {
        return wrong(last, "was not quiet for long enough");
    }
    Ok(())
}

/// Checks that a person is asked about a node whose last validation has not succeeded. This holds
/// once nothing is in progress.
pub(super) fn failure_is_told(node: &SimNode, awaits: &str) -> Result<(), Broken> {
    let Some(own) = Ownership::read(&node.view) else {
        return Ok(());
    };
    let validates = own
        .events
        .iter()
        .any(|event| Validation::of(event).is_some());
    let mark = own.mark.remediation.unwrap_or_default();
    match mark.validations().last() {
        Some(last) if validates && !last.succeeded() && !asks_a_person(awaits) => {
            let name = &node.view.name;
            let ending = last.ending();
            Err(format!("{ending}, and {name} waits for {awaits:?}"))
        }
        _ => Ok(()),
    }
}

/// Checks that the custom resource of a remediation is created only for the attempt that its
/// node records, once the node is drained, and not for faults that are routed past remediation.
pub(super) fn by_resource(world: &World, planned: &PlannedResource) -> Result<(), Broken> {
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
    let mark = own.mark.remediation.as_ref();
    let open = mark.and_then(|mark| mark.under_way());
    if open.is_some_and(|open| open.group == VALIDATION_GROUP) {
        return Ok(());
    }
    if let Some(open) = open {
        may_repair(world, &own, open).or_else(|why| wrong(&why))?;
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
