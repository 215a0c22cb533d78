//! Approvals: whether a person has approved an action of a session.

use jiff::Timestamp;
use model::attempt::Attempt;
use model::ownership::SessionMark;
use model::proposal::{Proposal, is_drain, repair_action};

/// Drain and repairs of a session so far: which of its proposals have begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done<'a> {
    /// Begin of the drain.
    pub(crate) drain: Option<Timestamp>,
    /// Attempts to repair the node.
    pub(crate) attempts: &'a [Attempt],
}

// === impl Done ===

impl<'a> Done<'a> {
    pub(crate) fn of(mark: &'a SessionMark) -> Self {
        let remediation = mark.remediation.as_ref();
        Self {
            drain: mark.drain.map(|drain| drain.since),
            attempts: remediation.map_or(&[], |remediation| &remediation.attempts),
        }
    }

    /// Returns whether any action of a proposal has begun: its approval then has no end.
    pub(crate) fn has_begun(self, proposal: &Proposal) -> bool {
        self.has_drained(proposal) || self.attempts_of(proposal).next().is_some()
    }

    /// Returns whether one of the proposals has the action, is approved, and is not used up. A repair
    /// is used up once it has succeeded, and not by failing; a drain once it is over after a repair
    /// has begun. What comes later is another proposal.
    pub(crate) fn has_approval(self, action: &str, proposals: &[Proposal]) -> bool {
        let mut approved = proposals.iter().filter(|one| one.approved.is_some());
        approved.any(|one| one.has(action) && !self.has_used_up(one, action))
    }

    fn has_used_up(self, proposal: &Proposal, action: &str) -> bool {
        let mut attempts = self.attempts_of(proposal);
        if is_drain(action) {
            return attempts.next().is_some() && !self.has_drained(proposal);
        }
        attempts.any(|one| one.succeeded() && repair_action(&one.action, &one.entity) == action)
    }

    fn has_drained(self, proposal: &Proposal) -> bool {
        proposal.drains() && self.drain.is_some_and(|since| since >= proposal.since)
    }

    fn attempts_of(self, proposal: &Proposal) -> impl Iterator<Item = &'a Attempt> {
        let attempts = self.attempts.iter();
        attempts.filter(move |one| proposal.led_to(one))
    }
}
