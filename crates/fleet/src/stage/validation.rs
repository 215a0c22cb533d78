//! The validation stage: validates nodes before they come back, or enter service
//! ([`crate::remediation::validation`]).
//!
//! An event of gpuwarden itself opens the fault that keeps a node out before the node is given
//! back. The remediation stage creates the Job; once that has succeeded another event closes the
//! fault.

use std::ops::ControlFlow;

use contract::{HealthEvent, keys};
use jiff::Timestamp;
use model::attempt::{Attempt, AttemptOutcome, RemediationMark};
use model::fault::Fault;
use model::ownership::{Ownership, ReleaseRequest};
use policy::assess::Desired;

use super::{Facts, Stage, StageRequests};
use crate::Purpose;
use crate::remediation::validation::Validation;
use crate::state::FleetState;

/// Validation of one node. Its whole state is on the node and in the fault book.
#[derive(Debug, Default)]
pub(crate) struct ValidationState;

impl Stage for ValidationState {
    /// Opens or closes the faults that keep the node out until it has passed.
    fn plan(
        &mut self,
        facts: &Facts<'_>,
        desired: &mut Desired,
        requests: &mut StageRequests<'_>,
    ) -> ControlFlow<()> {
        // A gpuwarden that does not act validates nothing, and must not say that a node has
        // passed.
        if !facts.state.acts() {
            return ControlFlow::Continue(());
        }
        let faults = facts.state.book.faults(facts.name).iter();
        let open: Vec<Fault> = (faults.filter(|fault| Validation::of_fault(fault).is_some()))
            .cloned()
            .collect();
        let Some((events, text)) = next_events(facts, desired, &open) else {
            return ControlFlow::Continue(());
        };
        requests.append(events, Purpose::Validate, Some(text));
        ControlFlow::Break(())
    }

    fn act(&mut self, _facts: &Facts<'_>, _desired: &Desired, _requests: &mut StageRequests<'_>) {}

    fn wake_at(&self, _now: Timestamp) -> Option<Timestamp> {
        None
    }

    fn awaits_answer(&self) -> bool {
        false
    }

    fn clock_moved_back(&mut self, _now: Timestamp) {}

    fn answers_lost(&mut self) {}
}

/// Returns the events to append, and their meaning for people.
fn next_events(
    facts: &Facts<'_>,
    desired: &Desired,
    open: &[Fault],
) -> Option<(Vec<HealthEvent>, String)> {
    let own = facts.observed?.own.as_deref();
    if open.is_empty() {
        let (which, why) = reason_to_begin(facts, desired)?;
        let action = facts.state.validates()?.action.as_deref();
        let event = which.begins(facts.name, action, facts.state.now);
        return Some((vec![event], why.to_owned()));
    }
    let close_all = |why: &str| {
        let events = open.iter().map(|fault| fault.gone(why, facts.state.now));
        (events.collect(), why.to_owned())
    };
    let Some(own) = own else {
        if desired.wanted() {
            return None; // The node is to be taken out of service.
        }
        return Some(close_all("a person has put the node in service"));
    };
    let counts = |id: &str| desired.events.iter().any(|one| one.event.id == id);
    if !lists_validation(own) {
        // The node has yet to list the fault; or it was let in, and is out for another reason.
        let dismissed = !open.iter().any(|fault| counts(&fault.event.id));
        return dismissed.then(|| close_all("a person has let the node in"));
    }
    let pending = open.iter().find(|fault| fault.code.is_empty())?;
    let others = facts.state.book.faults(facts.name).iter();
    let mut others = others.filter(|fault| Validation::of_fault(fault).is_none());
    // Other faults are remediated first, and an earlier validation does not count.
    let sound = !others.any(|fault| counts(&fault.event.id));
    let Some(config) = facts.state.validates() else {
        return Some(close_all("validation of nodes is switched off"));
    };
    let Some(action) = &config.action else {
        // Quiet time alone is enough.
        if !sound || quiet_until(facts.state, facts.name, pending) > facts.state.now {
            return None;
        }
        return Some(close_all("the node has passed its validation"));
    };
    let last = last_validation(own, pending, action)?;
    let end = last.end.as_ref()?;
    match end.outcome {
        AttemptOutcome::Succeeded if sound => Some(close_all("the node has passed its validation")),
        AttemptOutcome::Failed
            if open
                .iter()
                .all(|fault| fault.code != keys::CODE_VALIDATION_FAILED) =>
        {
            let which = Validation::of_fault(pending)?;
            let why = format!("{} has failed: {}", last.title(), end.why);
            let text = format!("the node has failed its validation: {why}");
            Some((vec![which.failed(facts.name, &why, facts.state.now)], text))
        }
        // A retry, or a person, as for any remediation.
        _ => None,
    }
}

/// Returns why a node without a validation fault is to be validated now.
fn reason_to_begin(facts: &Facts<'_>, desired: &Desired) -> Option<(Validation, &'static str)> {
    let config = facts.state.validates()?;
    let observed = facts.observed?;
    let (view, own) = (observed.view.as_ref(), observed.own.as_deref());
    if desired.wanted() || ReleaseRequest::read(view).is_some() || view.is_handed_over() {
        return None;
    }
    let Some(own) = own else {
        return (config.holds_new(view)).then_some((
            Validation::Admission,
            "the node is new: it is validated first",
        ));
    };
    let remediated = (own.mark.remediation.iter())
        .flat_map(RemediationMark::remediations)
        .any(|one| one.made.is_some());
    let validated = lists_validation(own);
    let ends = !facts.undone_by_person && !facts.state.book.misses_monitors(facts.name);
    (config.after_remediation && remediated && !validated && ends && own.takes_node_out())
        .then_some((
            Validation::Return,
            "the node was repaired: it is validated before it comes back",
        ))
}

/// Returns until when a node must have no new fault before its validation Job begins.
fn quiet_until(fleet: &FleetState, name: &str, pending: &Fault) -> Timestamp {
    let quiet = fleet.validates().map(|config| config.quiet);
    let faults = fleet.book.faults(name).iter();
    let newest = faults.map(|fault| fault.first_seen).max();
    let since = newest.unwrap_or(pending.first_seen);
    since
        .checked_add(quiet.unwrap_or_default())
        .unwrap_or(Timestamp::MAX)
}

/// Returns until when nothing begins on a node that is validated; `None` where that does not
/// apply, or is over.
pub(crate) fn waits_for_quiet(fleet: &FleetState, name: &str) -> Option<Timestamp> {
    let mut faults = fleet.book.faults(name).iter();
    let pending = faults.find(|fault| Validation::of_fault(fault).is_some())?;
    Some(quiet_until(fleet, name, pending)).filter(|until| *until > fleet.now)
}

/// Returns whether the session lists an event about validation.
pub(crate) fn lists_validation(own: &Ownership) -> bool {
    let mut events = own.events.iter();
    events.any(|event| Validation::of(event).is_some())
}

/// Returns the newest attempt of this action that was made for a fault, after the last
/// remediation.
fn last_validation<'a>(own: &'a Ownership, pending: &Fault, action: &str) -> Option<&'a Attempt> {
    let attempts = own.mark.remediation.as_ref()?.validations().iter();
    let mut ours = attempts.filter(|one| one.action == action && one.since >= pending.first_seen);
    ours.next_back()
}

#[cfg(test)]
pub(crate) mod tests;
