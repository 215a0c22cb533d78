//! The validation of nodes before they come back, or begin ([`crate::remedy::validation`]).
//!
//! The fault that keeps a node out is opened by an event of ours before the node is given back. Its Job is
//! made by the repair of nodes; once that has succeeded the fault is closed by another event.

use contract::HealthEvent;
use jiff::Timestamp;

use super::common::Common;
use super::entry::Awaits;
use super::{Effect, Fleet, Mode, Purpose};
use crate::assess::Desired;
use crate::event::normalise;
use crate::fault::Fault;
use crate::handover::is_handed_over;
use crate::ownership::{Ownership, ReleaseRequest};
use crate::remedy::validation::{FAILED, Validation};
use crate::remedy::{Attempt, Outcome, RemediationMark};
use crate::session::Observed;

impl Fleet {
    /// Opens or closes the faults that keep a node out until it has passed. Returns whether there is
    /// something to be stored first.
    pub(super) fn look_at_validation(
        &mut self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
    ) -> bool {
        // Who does not act validates nothing, and says of nothing that it has passed.
        if self.common.settings.mode != Mode::Quarantine || !self.common.settings.cluster {
            return false;
        }
        let faults = self.common.book.faults(name).iter();
        let open: Vec<Fault> = (faults.filter(|fault| Validation::of_fault(fault).is_some()))
            .cloned()
            .collect();
        let Some((events, text)) = self.next_of_validation(name, observed, desired, &open) else {
            return false;
        };
        let now = self.common.now;
        let events = events.into_iter().map(|mut event| {
            normalise(&mut event, now);
            (event, now)
        });
        let events = events.collect();
        self.entry(name).claim.awaits = Some(Awaits::OfOurs { text });
        let (node, purpose) = (name.to_owned(), Purpose::Validate);
        self.agenda.effects.push(Effect::Append {
            node,
            events,
            purpose,
        });
        true
    }

    /// Returns the events to be stored, and what they mean for people.
    fn next_of_validation(
        &self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
        open: &[Fault],
    ) -> Option<(Vec<HealthEvent>, String)> {
        let own = observed.own.as_deref();
        if open.is_empty() {
            let (which, why) = self.begins(name, observed, desired)?;
            let action = self.common.validates()?.action.as_deref();
            let event = which.begins(name, action, self.common.now);
            return Some((vec![event], why.to_owned()));
        }
        let gone = |why: &str| {
            let events = open.iter().map(|fault| fault.gone(why, self.common.now));
            Some((events.collect(), why.to_owned()))
        };
        let Some(own) = own else {
            if desired.wanted() {
                return None; // It is to be taken out.
            }
            return gone("the node is in service by a person's word");
        };
        let counts = |id: &str| desired.events.iter().any(|one| one.event.id == id);
        if !lists_validation(own) {
            // The node is to say first why it is out; or it was let in, and is out for another reason.
            let dismissed = !open.iter().any(|fault| counts(&fault.event.id));
            return dismissed
                .then(|| gone("a person has let the node in"))
                .flatten();
        }
        let pending = open.iter().find(|fault| fault.code.is_empty())?;
        let others = self.common.book.faults(name).iter();
        let mut others = others.filter(|fault| Validation::of_fault(fault).is_none());
        // What is wrong otherwise is mended first, and the validation of before does not count.
        let sound = !others.any(|fault| counts(&fault.event.id));
        let Some(config) = self.common.validates() else {
            return gone("nodes are not validated any more");
        };
        let Some(action) = &config.action else {
            // Time is enough.
            if !sound || quiet_until(&self.common, name, pending) > self.common.now {
                return None;
            }
            return gone("the node has passed its validation");
        };
        let last = last_validation(own, pending, action)?;
        let end = last.end.as_ref()?;
        match end.outcome {
            Outcome::Succeeded if sound => gone("the node has passed its validation"),
            Outcome::Failed if open.iter().all(|fault| fault.code != FAILED) => {
                let which = Validation::of_fault(pending)?;
                let why = format!("{} has failed: {}", last.title(), end.why);
                let text = format!("the node has failed its validation: {why}");
                Some((vec![which.failed(name, &why, self.common.now)], text))
            }
            // Another try, or a person: as of any repair.
            _ => None,
        }
    }

    /// Returns why a node without such a fault is to be validated now.
    fn begins(
        &self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
    ) -> Option<(Validation, &'static str)> {
        let config = self.common.validates()?;
        let (view, own) = (observed.view.as_ref(), observed.own.as_deref());
        if desired.wanted() || ReleaseRequest::read(view).is_some() || is_handed_over(&view.labels)
        {
            return None;
        }
        let Some(own) = own else {
            return (config.holds_new(view)).then_some((
                Validation::Admission,
                "the node is new: it is validated first",
            ));
        };
        let repaired = (own.mark.remediation.iter())
            .flat_map(RemediationMark::repairs)
            .any(|one| one.made.is_some());
        let validated = lists_validation(own);
        let entry = self.nodes.get(name);
        let undone = entry.is_some_and(|entry| entry.is_undone_by_person(&self.common));
        let ends = !undone && !self.common.book.misses_monitors(name);
        (config.after_repair && repaired && !validated && ends && own.takes_node_out()).then_some((
            Validation::Return,
            "the node was repaired: it is validated before it comes back",
        ))
    }
}

/// Returns until when a node that is validated is to have no new fault, before its Job begins.
fn quiet_until(common: &Common, name: &str, pending: &Fault) -> Timestamp {
    let quiet = common.validates().map(|config| config.quiet);
    let faults = common.book.faults(name).iter();
    let newest = faults.map(|fault| fault.first_seen).max();
    let since = newest.unwrap_or(pending.first_seen);
    since
        .checked_add(quiet.unwrap_or_default())
        .unwrap_or(Timestamp::MAX)
}

/// Returns until when nothing begins on a node that is validated; `None` where it is not, or that is
/// over.
pub(super) fn waits_for_quiet(common: &Common, name: &str) -> Option<Timestamp> {
    let mut faults = common.book.faults(name).iter();
    let pending = faults.find(|fault| Validation::of_fault(fault).is_some())?;
    Some(quiet_until(common, name, pending)).filter(|until| *until > common.now)
}

/// Returns whether the session lists an event about validation.
pub(super) fn lists_validation(own: &Ownership) -> bool {
    let mut events = own.events.iter();
    events.any(|event| Validation::of(event).is_some())
}

/// Returns the newest attempt of this action that was made for a fault, and after the last repair.
fn last_validation<'a>(own: &'a Ownership, pending: &Fault, action: &str) -> Option<&'a Attempt> {
    let attempts = own.mark.remediation.as_ref()?.validations().iter();
    let mut ours = attempts.filter(|one| one.action == action && one.since >= pending.first_seen);
    ours.next_back()
}

#[cfg(test)]
pub(super) mod tests;
