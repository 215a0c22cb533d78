//! Steps a session: from the desired and the observed state to the next change of the node.
//! [`super`] has the table of all steps.

use std::collections::BTreeSet;

use contract::keys;
use jiff::Timestamp;
use model::future::is_future;
use model::journal::EntryKind;
use model::node::{NodeChange, NodeView};
use model::ownership::{ByHand, Ownership, ReleaseRequest};
use policy::assess::Desired;
use serde_json::json;

use super::change::Draft;
use super::dismissal::{before_unlisted, newest_listed};
use super::uncordon::UndoneVerdict;
use super::{
    DEADLINE, Intent, JournalNote, Marks, ObservedNode, Patch, Phase, Session, SessionEffect,
    SessionStep, change, returns,
};
use crate::brake::Hold;

/// Returns the session after the next step, and the effects to carry out.
///
/// `observed` is the node as last observed, or `None` where the cluster does not have it. `hold`
/// says why the node must not be taken out now; it affects nothing else. `machines` says why an
/// uncordon observed now counts as a machine's; `None` means a person's.
pub fn step(
    session: &Session,
    desired: &Desired,
    observed: Option<&ObservedNode>,
    marks: &Marks,
    hold: Option<&Hold>,
    machines: Option<&str>,
    now: Timestamp,
) -> SessionStep {
    let wanted = desired.wanted();
    let mut step = SessionStep {
        session: session.clone(),
        effects: Vec::new(),
    };
    let Some(observed) = observed else {
        // There is nothing to change before the node appears.
        let phase = if wanted {
            Phase::Quarantining
        } else {
            Phase::Idle
        };
        step.enter(phase, desired, now, "the cluster does not know the node");
        return step;
    };
    let node = observed.view.as_ref();
    let released_at = step.session.update_times(observed, now);
    let own = step.session.update_from_node(observed, now);
    let Some(mut own) = own else {
        step.without_ours(node, desired, marks, hold, released_at, now);
        return step;
    };
    let verdict = (step.session).judge(&mut own, node, desired, machines, now);
    let ending = ended_by_hand(session, node, &own, desired, &verdict, now);
    match ending {
        Some(ending) => step.stand_down(node, &own, &ending, desired, marks, now),
        None if wanted => {
            let waited = step.session.back_at.take().is_some();
            let stands_since = own.mark.stands_since();
            let since = match stands_since {
                Some(since) => since.min(now),
                None => (own.in_phase_since(now))
                    .filter(|_| !waited && step.session.phase != Phase::Returning)
                    .unwrap_or(now),
            };
            step.enter(Phase::of(&own.mark), desired, since, "seen on the node");
            // The marks of a drain and of a remediation have times of their own.
            let own_since = own.since.filter(|_| stands_since.is_some());
            let own = own.in_phase(own_since.unwrap_or(step.session.since), None);
            let puts_back = matches!(verdict, UndoneVerdict::PutBack(_));
            if let UndoneVerdict::PutBack(Some(text)) | UndoneVerdict::LeftUndone(_, Some(text)) =
                verdict
            {
                let note = JournalNote::new(EntryKind::Attention, text.clone());
                step.effects
                    .extend([SessionEffect::Journal(note), SessionEffect::EmitEvent(text)]);
            }
            let draft = Draft::new(node, &own, marks, now);
            let change = draft.update(desired, released_at, puts_back);
            step.drive(Intent::Update, change, now);
        }
        None => {
            let waits_since = (own.in_phase_since(now)).filter(|_| step.session.back_at.is_some());
            let since = waits_since.unwrap_or(now);
            let why = own.with_cordon_before(node, "no open fault asks for it");
            step.enter(Phase::Returning, desired, since, &why);
            step.give_back(node, own, marks, now);
        }
    }
    step
}

/// The end of a session by a person.
struct EndByHand {
    by_hand: ByHand,
    /// Reports up to this time are dismissed.
    dismissed_up_to: Timestamp,
    /// Reason, as text for people.
    why: String,
}

/// Returns how a person ends the session; `None` if nobody does.
///
/// If no fault asks for the quarantine, an undone cordon or taint does not count: the node is
/// given back as after any recovery, including its cordon.
fn ended_by_hand(
    session: &Session,
    node: &NodeView,
    own: &Ownership,
    desired: &Desired,
    verdict: &UndoneVerdict,
    now: Timestamp,
) -> Option<EndByHand> {
    let newest = newest_listed(own, desired);
    // If this process has observed the node out of service, the person acted just now: earlier
    // reports that arrive late (a count, an outbox) are dismissed too. Otherwise the time is
    // unknown, and later reports may concern new faults.
    let newest = newest.max(session.watched.then(|| before_unlisted(own, desired, now)));
    if let Some(request) = ReleaseRequest::read(node) {
        let dismissed_up_to = request.dismisses_until(newest, now);
        let ReleaseRequest { by, reason, at } = request;
        let future = at
            .filter(|at| is_future(*at, now))
            .map_or_else(String::new, |at| {
                format!(" (asked for at {at:.0}, which lies in the future and counts as now)")
            });
        return Some(EndByHand {
            by_hand: ByHand::Released,
            dismissed_up_to,
            why: own.with_cordon_before(node, &format!("released by {by}: {reason}{future}")),
        });
    }
    let UndoneVerdict::ByHand(by_hand) = *verdict else {
        return None;
    };
    let why = match by_hand {
        ByHand::Untainted => "somebody removed a quarantine taint by hand: the session ends",
        _ => "somebody uncordoned the node by hand: the session ends",
    };
    Some(EndByHand {
        by_hand,
        dismissed_up_to: newest.unwrap_or(now),
        why: why.to_owned(),
    })
}

// === impl SessionStep ===

impl SessionStep {
    /// Enters `phase`, if the session is in another one, with `since` as its begin.
    fn enter(&mut self, phase: Phase, desired: &Desired, since: Timestamp, why: &str) {
        let session = &mut self.session;
        let from = session.phase;
        session.watched = phase.is_out() || matches!(phase, Phase::Quarantining | Phase::Returning);
        let id = session.id.clone();
        match phase {
            Phase::Idle => {
                session.id = None;
                session.settled();
            }
            Phase::Held | Phase::Quarantining if session.id.is_none() => {
                let first = desired.events.first();
                session.id = first.map(|counted| counted.event.id.clone());
            }
            _ => {}
        }
        if phase == from {
            return;
        }
        (session.phase, session.since) = (phase, since);
        session.settled();
        let id = session.id.clone().or(id);
        self.effects.push(SessionEffect::Journal(JournalNote {
            kind: EntryKind::Session,
            text: format!("{} -> {}: {why}", from.name(), phase.name()),
            detail: json!({"from": from, "to": phase, "id": id}),
        }));
    }

    /// Takes a node without our marks out of service, if its faults ask for it and nothing holds
    /// it back.
    fn without_ours(
        &mut self,
        node: &NodeView,
        desired: &Desired,
        marks: &Marks,
        hold: Option<&Hold>,
        released_at: Option<Timestamp>,
        now: Timestamp,
    ) {
        // None of the changes to come has been observed yet.
        self.session.observed_deeds = desired.wanted().then(BTreeSet::new);
        if !desired.wanted() {
            return self.enter(Phase::Idle, desired, now, "nothing of ours is on the node");
        }
        if let Some(hold) = hold {
            let why = format!("held back: {hold}");
            return self.enter(Phase::Held, desired, now, &why);
        }
        self.enter(Phase::Quarantining, desired, now, "a fault asks for it");
        let session = &self.session;
        let change = change::quarantine(node, desired, marks, released_at, session, now);
        self.drive(Intent::Quarantine, change, now);
    }

    /// Cleans up after a person who ends the session.
    fn stand_down(
        &mut self,
        node: &NodeView,
        own: &Ownership,
        ending: &EndByHand,
        desired: &Desired,
        marks: &Marks,
        now: Timestamp,
    ) {
        let up_to = ending.dismissed_up_to;
        self.session.times.trust(keys::RELEASED_AT, up_to, now);
        self.session.back_at = None;
        let watched = self.session.watched;
        self.enter(Phase::Returning, desired, now, &ending.why);
        // A process that did not observe the change cannot date it, however often it retries.
        self.session.watched = watched;
        let change = Draft::new(node, own, marks, now).stand_down(ending.by_hand, up_to);
        self.drive(Intent::StandDown, change, now);
    }

    /// Gives the node back after its wait; a change that a person made by hand does not wait.
    fn give_back(&mut self, node: &NodeView, own: Ownership, marks: &Marks, now: Timestamp) {
        let session = &mut self.session;
        let begins = session.back_at.is_none();
        if begins {
            returns::record(&mut session.returns, [], now);
        }
        session.not_before = session.not_before.filter(|at| *at > now);
        let wait = returns::wait(session.returns.len());
        let back_at = *session.back_at.get_or_insert(now + wait);
        if own.undone_by_hand(node).is_some() || now >= back_at {
            let change = Draft::new(node, &own, marks, now).give_back();
            self.drive(Intent::Return, change, now);
            return;
        }
        if begins {
            self.effects.push(SessionEffect::Journal(JournalNote {
                kind: EntryKind::Session,
                text: returns::text(session.returns.len(), back_at),
                detail: json!({"backAt": back_at, "returns": session.returns.len()}),
            }));
        }
        let own = own.in_phase(session.since, Some(back_at));
        let change = Draft::new(node, &own, marks, now).note_wait();
        self.drive(Intent::Update, change, now);
    }

    /// Requests a change, if there is one and it is due; asks a person if it keeps failing.
    fn drive(&mut self, intent: Intent, change: NodeChange, now: Timestamp) {
        let session = &mut self.session;
        if change.is_empty() {
            session.settled();
            return;
        }
        let since = *session.pending_since.get_or_insert(now);
        if !session.asked && now.duration_since(since) >= DEADLINE {
            session.asked = true;
            let text = format!(
                "{}: not accepted by the API server for {} s, {} attempts failed; look at the API \
                 server, at gpuwarden's permissions, and at admission webhooks and policies for nodes",
                intent.name(),
                now.duration_since(since).as_secs(),
                session.failures
            );
            let note = JournalNote::new(EntryKind::Attention, text);
            self.effects.push(SessionEffect::Journal(note));
        }
        if session
            .not_before
            .is_none_or(|not_before| now >= not_before)
        {
            session.not_before = None;
            self.effects
                .push(SessionEffect::Patch(Patch { intent, change }));
        }
    }
}
