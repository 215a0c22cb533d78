//! Times of machines that uncordon nodes, or remove taints ([`crate::session::uncordon`]).

use model::attempt::{Attempt, RemediationMark};
use model::node::NodeView;
use model::ownership::AFTER_BOOT;
use model::ownership::Ownership;
use policy::Uncordon;

use super::entry::NodeEntry;
use super::stage::validation::lists_validation;
use super::state::FleetState;
use crate::remediation::validation::Validation;
use contract::effective_action_name;

impl NodeEntry {
    /// Returns why an uncordon of the node that is observed now is a machine's, for people;
    /// `None` if it is a person's.
    pub(super) fn machines(&self, fleet: &FleetState) -> Option<String> {
        let rule = fleet.policy.as_ref()?.uncordon;
        if rule == Uncordon::Releases {
            return None;
        }
        let observed = self.observed.as_ref()?;
        let own = observed.own.as_deref()?;
        let mark = own.mark.remediation.as_ref();
        if mark.is_some_and(|mark| self.is_remediating(fleet, own, mark)) {
            return Some(" while it is repaired".to_owned());
        }
        let at_work = self.session.machines.at_work(&observed.view, fleet.now);
        if at_work.is_some() {
            return at_work;
        }
        if is_new(fleet, &observed.view, own) {
            return Some(" within ten minutes of its registration".to_owned());
        }
        (rule == Uncordon::Never).then(|| ", which gives no node back by the policy".to_owned())
    }

    /// Returns whether an attempt that was begun is under way, or waits for the validation or
    /// the recovery of the faults.
    fn is_remediating(&self, fleet: &FleetState, own: &Ownership, mark: &RemediationMark) -> bool {
        let Some(last) = mark.remediations().last() else {
            return false;
        };
        if last.end.is_some() {
            let validation = fleet
                .validates()
                .is_some_and(|config| config.after_remediation);
            let awaits = validation && !lists_validation(own) || self.is_awaited(fleet, last);
            return last.succeeded() && mark.person.is_none() && awaits;
        }
        // If nobody can tell whether its resource was created, or its work begun, it may have
        // been.
        let remediation = &self.stages.remediation;
        remediation.may_exist(last) || remediation.has_begun(last).unwrap_or(true)
    }

    /// Returns whether the faults that an attempt has remediated, or its validation, are still
    /// open.
    fn is_awaited(&self, fleet: &FleetState, remediated: &Attempt) -> bool {
        let view = self.observed.as_ref().map(|observed| &observed.view);
        let mut faults = view
            .into_iter()
            .flat_map(|view| fleet.book.faults(&view.name));
        faults.any(|fault| {
            let of_it = [&fault.event.id, &fault.opened_by].contains(&&remediated.event)
                || effective_action_name(&fault.event) == remediated.action;
            of_it || Validation::of_fault(fault).is_some()
        })
    }

    /// Returns whether a person took back the session's changes on the node.
    pub(super) fn is_undone_by_person(&self, fleet: &FleetState) -> bool {
        let observed = self.observed.as_ref();
        let gone = observed.is_some_and(|observed| {
            let own = observed.own.as_deref();
            own.is_some_and(|own| own.undone_by_hand(&observed.view).is_some())
        });
        gone && !self.session.is_undone() && self.machines(fleet).is_none()
    }
}

/// Returns whether the node is validated because it is new, and has registered just now: this is
/// its first boot.
fn is_new(fleet: &FleetState, view: &NodeView, own: &Ownership) -> bool {
    let new = Some(Validation::Admission);
    let mut events = own.events.iter();
    let registered = view.machine.registered_at;
    registered.is_some_and(|at| fleet.now.duration_since(at) < AFTER_BOOT)
        && events.any(|event| Validation::of(event) == new)
}

#[cfg(test)]
mod tests;
