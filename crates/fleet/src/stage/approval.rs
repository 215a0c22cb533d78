//! The approval stage: proposes to a person what the policy or the configuration lets happen only
//! with an approval, and records the approval in the session.
//!
//! Before the stages plan, [`ApprovalState::hold`] holds back the drains that have no approval in the
//! session. The stages then name what needs an approval ([`Desired::needs_approval`]); what of that
//! has none is the proposal that the session records. It waits for as long as it is asked for. If it
//! changes, it is another proposal, since a person approves what they have read. An approval on the
//! node is recorded first, and acted on in the next look.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use jiff::{SignedDuration, Timestamp};
use model::journal::EntryKind;
use model::ownership::Ownership;
use model::proposal::{ApprovalRequest, Proposal, drain_actions};
use policy::assess::{CountedEvent, Desired};
use serde_json::json;

use super::drain::{custom_of, drained_gpus};
use super::{Facts, Stage, StageRequests};
use crate::approval::Done;
use crate::session::{JournalNote, ObservedNode};
use crate::{Effect, EventReason};

/// State of the proposals of one node.
#[derive(Debug, Default)]
pub(crate) struct ApprovalState {
    /// The session's proposals at the last look; `None` until this process has looked.
    last: Option<Vec<Proposal>>,
    /// Reason why the approval on the node does not count, as last journaled.
    wrong: Option<String>,
    /// Text for people about the proposal that waits.
    awaits: Option<String>,
    /// Time when an approval ends that was not used yet.
    wake: Option<Timestamp>,
}

// === impl ApprovalState ===

impl ApprovalState {
    /// Drops the approvals that have expired unused, and holds back the drains that need one and have
    /// none.
    pub(crate) fn hold(facts: &Facts<'_>, desired: &mut Desired) {
        let Some((_, own)) = session_of(facts) else {
            return;
        };
        let (now, done) = (facts.state.now, Done::of(&own.mark));
        desired.proposals.clone_from(&own.mark.proposals);
        desired.proposals.retain(|one| {
            let approval = one.approved.as_ref();
            approval.is_none_or(|one| now < one.until) || done.has_begun(one)
        });
        // Where drains are off, there is none to be approved.
        if facts.state.settings.drain.is_some() {
            hold_drains(facts, own, desired);
        }
    }

    /// Takes in the approval on the node, and calls attention once to one that does not count.
    fn take_in(
        &mut self,
        facts: &Facts<'_>,
        proposals: &mut [Proposal],
        requests: &mut StageRequests<'_>,
    ) {
        let Some((observed, own)) = session_of(facts) else {
            return;
        };
        let read = ApprovalRequest::read(&observed.view)
            .map(|request| request?.approve(&own.session_id, proposals, facts.state.now));
        let wrong = read.and_then(Result::err);
        if let Some(why) = wrong
            .as_ref()
            .filter(|why| self.wrong.as_ref() != Some(why))
        {
            requests.call_attention(why.clone());
        }
        self.wrong = wrong;
    }

    /// Returns which approval is awaited, for people; `None` without a proposal that waits.
    pub(crate) fn awaits_approval(&self) -> Option<&str> {
        self.awaits.as_deref()
    }

    /// Returns the notes about the approval that is awaited, and about one that does not count.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        let waits = self
            .awaits
            .as_ref()
            .map(|awaits| format!("waits for {awaits}"));
        waits.into_iter().chain(self.wrong.clone())
    }

    /// Journals the changes of the session's proposals since the last look. The proposal that waits
    /// is journaled by each process.
    fn journal_changes(
        &mut self,
        facts: &Facts<'_>,
        own: &Ownership,
        requests: &mut StageRequests<'_>,
    ) {
        let proposals = &own.mark.proposals;
        let before = self.last.replace(proposals.clone());
        let known = before.as_deref().unwrap_or_default();
        let of = |all: &[Proposal], since| all.iter().find(|one| one.since == since).cloned();
        for one in proposals {
            let earlier = of(known, one.since);
            let title = one.title();
            match (&one.approved, earlier) {
                (None, None) => {
                    let node = facts.name;
                    let text = format!(
                        "proposed: {title}; it waits until a person approves it: gpuwarden approve {node}"
                    );
                    requests.call_attention(text);
                }
                (Some(approval), Some(earlier)) if earlier.approved.is_none() => {
                    let note = JournalNote {
                        kind: EntryKind::Session,
                        text: format!("approved by {}: {title}", approval.by),
                        detail: json!({"proposal": one.id(&own.session_id), "approval": approval}),
                    };
                    requests.journal(note, None);
                }
                _ => {}
            }
        }
        for one in known
            .iter()
            .filter(|one| of(proposals, one.since).is_none())
        {
            let title = one.title();
            let text = match &one.approved {
                Some(approval) if approval.until <= facts.state.now => {
                    let (by, until) = (&approval.by, approval.until);
                    format!("the approval by {by} has expired unused at {until:.0}: {title}")
                }
                Some(approval) => {
                    format!("approved by {}, and no longer due: {title}", approval.by)
                }
                None => format!("no longer proposed: {title}"),
            };
            requests.journal(JournalNote::new(EntryKind::Session, text), None);
        }
    }
}

impl Stage for ApprovalState {
    /// Sets the session's proposals: those that are approved, and one of all that needs an approval
    /// and has none.
    fn plan(
        &mut self,
        facts: &Facts<'_>,
        desired: &mut Desired,
        requests: &mut StageRequests<'_>,
    ) -> ControlFlow<()> {
        let Some((_, own)) = session_of(facts) else {
            return ControlFlow::Continue(());
        };
        let needs = std::mem::take(&mut desired.needs_approval);
        let proposals = &mut desired.proposals;
        self.take_in(facts, proposals, requests);
        let done = Done::of(&own.mark);
        let has = |action: &String| done.has_approval(action, proposals);
        let wanted: BTreeSet<String> = needs.iter().filter(|one| !has(one)).cloned().collect();
        let latest = proposals.last().map(|one| one.since);
        proposals.retain(|one| match one.approved {
            None => one.actions == wanted,
            // An approval that nothing has used is for what was due then, and for nothing later.
            Some(_) => done.has_begun(one) || needs.iter().any(|need| one.has(need)),
        });
        if !wanted.is_empty() && proposals.iter().all(|one| one.approved.is_some()) {
            let now = facts.state.now;
            // Two proposals of a session differ, also where the clock was put back.
            let after = latest.map(|latest| latest.saturating_add(SignedDuration::from_nanos(1)));
            let since = after
                .and_then(Result::ok)
                .map_or(now, |after| after.max(now));
            proposals.push(Proposal {
                since,
                actions: wanted,
                approved: None,
            });
        }
        ControlFlow::Continue(())
    }

    /// Tells people about the proposals that the node carries.
    fn act(&mut self, facts: &Facts<'_>, _desired: &Desired, requests: &mut StageRequests<'_>) {
        (self.awaits, self.wake) = (None, None);
        let Some((_, own)) = session_of(facts) else {
            if facts.observed.is_some() {
                *self = Self::default();
            }
            return;
        };
        let known = self.last.as_ref().and_then(|last| last.last()).cloned();
        self.journal_changes(facts, own, requests);
        let (done, proposals) = (Done::of(&own.mark), own.mark.proposals.iter());
        let unused = proposals.filter(|one| !done.has_begun(one));
        let ends = unused.filter_map(|one| Some(one.approved.as_ref()?.until));
        self.wake = ends.min();
        let Some(waits) = own.mark.proposal() else {
            return;
        };
        let (node, title) = (facts.name, waits.title());
        self.awaits = Some(format!(
            "a person's approval of {title}: gpuwarden approve {node}"
        ));
        if facts.state.acts() && known.as_ref() != Some(waits) {
            requests.effect(Effect::EmitEvent {
                node: node.to_owned(),
                since: waits.since,
                reason: EventReason::ApprovalNeeded,
                message: format!(
                    "{title} waits until a person approves it: gpuwarden approve {node}"
                ),
            });
        }
    }

    fn wake_at(&self, _now: Timestamp) -> Option<Timestamp> {
        self.wake
    }

    fn awaits_answer(&self) -> bool {
        false
    }

    fn clock_moved_back(&mut self, _now: Timestamp) {}

    fn answers_lost(&mut self) {}
}

/// Returns the node and the session on it, if that has a place to record proposals: a session of
/// `NVSentinel` has none.
fn session_of<'a>(facts: &Facts<'a>) -> Option<(&'a ObservedNode, &'a Ownership)> {
    let on_node = facts.session_on_node();
    on_node.filter(|(_, own)| own.replaced_labels.is_some())
}

/// Holds back the drains that routes ask for and that nobody has approved. Where the pods have left,
/// there is nothing to approve; and a sender's force takes precedence.
fn hold_drains(facts: &Facts<'_>, own: &Ownership, desired: &mut Desired) {
    let all = drained_gpus(facts, own, desired).unwrap_or_default();
    let (takes_node_out, done) = (desired.takes_node_out(), Done::of(&own.mark));
    // A drain that began with all pods continues with all pods.
    let drains_all = takes_node_out && own.mark.drain.is_some() && own.mark.drain_gpus.is_empty();
    let (mut actions, mut events) = (BTreeSet::new(), std::mem::take(&mut desired.events));
    for one in events.iter_mut().filter(|one| one.asks_approval()) {
        if one.drains().is_none() {
            continue;
        }
        let gpus = if drains_all {
            Vec::new()
        } else {
            gpus_of(facts, one, takes_node_out, &all)
        };
        let forced = (one.event.drain_overrides).is_some_and(|asked| asked.force);
        let drained = own
            .mark
            .drain_of(&gpus)
            .is_some_and(|mark| mark.done.is_some());
        if forced || drained {
            continue;
        }
        let drains = drain_actions(&gpus);
        let has = |action: &String| done.has_approval(action, &desired.proposals);
        one.unapproved = !drains.iter().all(has);
        actions.extend(drains);
    }
    desired.events = events;
    desired.needs_approval.extend(actions);
}

/// Returns the UUIDs of the GPUs whose pods leave for an event; empty if all pods do. `all` are those
/// of all events.
fn gpus_of(
    facts: &Facts<'_>,
    event: &CountedEvent,
    takes_node_out: bool,
    all: &[String],
) -> Vec<String> {
    if !takes_node_out {
        let named = event.named_gpus();
        return if named.is_empty() {
            all.to_vec()
        } else {
            named
        };
    }
    let drain = facts.state.settings.drain.as_ref();
    let partial = drain.is_some_and(|drain| drain.partial)
        && !facts.remediates_whole_node
        && custom_of(facts).is_none();
    let gpus = event.reset_gpus().filter(|_| partial);
    gpus.unwrap_or_default()
}

#[cfg(test)]
mod tests;
