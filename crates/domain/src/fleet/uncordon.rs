//! The times at which machines uncordon nodes, and take taints away ([`crate::session::uncordon`]).

use super::Fleet;
use crate::node::NodeView;
use crate::ownership::Ownership;
use crate::policy::Uncordon;
use crate::remedy::validation::Validation;
use crate::remedy::{Attempt, RemediationMark};
use crate::session::uncordon::AFTER_BOOT;
use crate::session::{Observed, Session};
use contract::effective_action_name;

impl Fleet {
    /// Returns why an uncordon of the node that is seen now is a machine's, for people; `None`: it is a
    /// person's.
    pub(super) fn machines(&self, name: &str, observed: &Observed) -> Option<String> {
        let rule = self.common.policy.as_ref()?.uncordon;
        if rule == Uncordon::Releases {
            return None;
        }
        let own = observed.own.as_deref()?;
        let mark = own.mark.remediation.as_ref();
        if mark.is_some_and(|mark| self.is_repairing(name, own, mark)) {
            return Some(" while it is repaired".to_owned());
        }
        let session = self.session(name);
        let at_work = session.and_then(|one| one.machines.at_work(&observed.view, self.common.now));
        if at_work.is_some() {
            return at_work;
        }
        if self.is_new(&observed.view, own) {
            return Some(" within ten minutes of its registration".to_owned());
        }
        (rule == Uncordon::Never).then(|| ", which gives no node back by the policy".to_owned())
    }

    /// Returns whether a repair that was begun is under way, or waits for its validation or the recovery of the
    /// faults.
    fn is_repairing(&self, name: &str, own: &Ownership, mark: &RemediationMark) -> bool {
        let Some(last) = mark.repairs().last() else {
            return false;
        };
        if last.end.is_some() {
            let awaits = self.awaits_validation(own) || self.is_awaited(name, last);
            return last.succeeded() && mark.person.is_none() && awaits;
        }
        let state = self.nodes.get(name).map(|entry| &entry.remedy);
        // Where nobody can see whether it was made, or begun, it may have been.
        state.is_some_and(|state| state.may_be_made(last) || state.has_begun(last).unwrap_or(true))
    }

    /// Returns whether the faults that an attempt has repaired are not over, or its validation is not.
    fn is_awaited(&self, name: &str, repaired: &Attempt) -> bool {
        let mut faults = self.common.book.faults(name).iter();
        faults.any(|fault| {
            let of_it = [&fault.event.id, &fault.opened_by].contains(&&repaired.event)
                || effective_action_name(&fault.event) == repaired.action;
            of_it || Validation::of_fault(fault).is_some()
        })
    }

    /// Returns whether a person took back what the session of a node did.
    pub(super) fn is_undone_by_person(&self, name: &str, observed: &Observed) -> bool {
        let own = observed.own.as_deref();
        let gone = own.is_some_and(|own| own.undone_by_hand(&observed.view).is_some());
        let again = || self.session(name).is_some_and(Session::is_undone);
        gone && !again() && self.machines(name, observed).is_none()
    }

    /// Returns whether the node is validated because it is new, and has registered just now: that is its first boot.
    fn is_new(&self, view: &NodeView, own: &Ownership) -> bool {
        let new = Some(Validation::Admission);
        let mut events = own.events.iter();
        let registered = view.machine.registered_at;
        registered.is_some_and(|at| self.common.now.duration_since(at) < AFTER_BOOT)
            && events.any(|event| Validation::of(event) == new)
    }

    /// Returns whether something is gone from a node, and what tells whether a machine did it is to be heard first:
    /// whether the repair that is under way was begun.
    pub(super) fn awaits_begin(&mut self, name: &str, observed: &Observed) -> bool {
        let follows = self.writes() && self.common.settings.cluster;
        let own = observed.own.as_deref().filter(|_| follows);
        let gone = own.filter(|own| own.undone_by_hand(&observed.view).is_some());
        let mark = gone.and_then(|own| own.mark.remediation.as_ref());
        let Some(open) = mark.and_then(RemediationMark::under_way) else {
            return false;
        };
        let state = &mut self.entry(name).remedy;
        let awaits = open.repairs() && state.has_begun(open).is_none() && !state.is_unseen();
        if awaits {
            state.wish();
        }
        awaits
    }
}

#[cfg(test)]
mod tests;
