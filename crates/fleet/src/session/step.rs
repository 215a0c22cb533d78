//! One step of a session: from what is wanted and what is observed to the next change of the node.
//! The table of all steps is in [`super`].

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
use super::uncordon::Gone;
use super::{
    DEADLINE, Effect, Intent, Marks, Note, Observed, Patch, Phase, Session, Step, change, returns,
};
use crate::brake::Hold;

/// Returns the session after the next step, and what is to be done.
///
/// `observed` is the node as last seen, or `None` where the cluster does not know it.
/// `hold` is why the node must not be taken out now; it has no say in anything else. `machines` is why
/// an uncordon that is seen now is a machine's; `None`: it is a person's.
pub fn step(
    session: &Session,
    desired: &Desired,
    observed: Option<&Observed>,
    marks: &Marks,
    hold: Option<&Hold>,
    machines: Option<&str>,
    now: Timestamp,
) -> Step {
    let wanted = desired.wanted();
    let mut step = Step {
        session: session.clone(),
        effects: Vec::new(),
    };
    let Some(observed) = observed else {
        // Nothing to change. Once the node appears, this is called again.
        let phase = if wanted {
            Phase::Quarantining
        } else {
            Phase::Idle
        };
        step.enter(phase, desired, now, "the cluster does not know the node");
        return step;
    };
    let node = observed.view.as_ref();
    let released_at = step.session.take_in_times(observed, now);
    let own = step.session.take_in_own(observed, now);
    let Some(mut own) = own else {
        step.without_ours(node, desired, marks, hold, released_at, now);
        return step;
    };
    let gone = (step.session).judge(&mut own, node, desired, machines, now);
    let ending = ended_by_hand(session, node, &own, desired, &gone, now);
    match ending {
        Some(ending) => step.stand_down(node, &own, &ending, desired, marks, now),
        None if wanted => {
            let waited = step.session.back_at.take().is_some();
            let stands_since = own.mark.stands_since();
            let since = match stands_since {
                Some(since) => since.min(now),
                None => (own.in_phase_since(now))
                    .filter(|_| !waited && step.session.phase != Phase::Releasing)
                    .unwrap_or(now),
            };
            step.enter(Phase::of(&own.mark), desired, since, "seen on the node");
            // A drain and a remediation say themselves since when.
            let own_since = own.since.filter(|_| stands_since.is_some());
            let own = own.in_phase(own_since.unwrap_or(step.session.since), None);
            let puts_back = matches!(gone, Gone::PutBack(_));
            if let Gone::PutBack(Some(text)) | Gone::Left(_, Some(text)) = gone {
                let note = Note::new(EntryKind::Attention, text.clone());
                step.effects
                    .extend([Effect::Note(note), Effect::Tell(text)]);
            }
            let draft = Draft::new(node, &own, marks, now);
            let change = draft.update(desired, released_at, puts_back);
            step.drive(Intent::Update, change, now);
        }
        None => {
            let waits_since = (own.in_phase_since(now)).filter(|_| step.session.back_at.is_some());
            let since = waits_since.unwrap_or(now);
            let why = own.with_cordon_before(node, "no open fault asks for it any more");
            step.enter(Phase::Releasing, desired, since, &why);
            step.give_back(node, own, marks, now);
        }
    }
    step
}

/// The end of a session by a person.
struct EndByHand {
    by_hand: ByHand,
    /// Reports of faults are dismissed up to then.
    dismissed_up_to: Timestamp,
    /// The text for people.
    why: String,
}

/// Returns the end that a person makes of the session; `None` where nobody does.
///
/// Where no fault asks for the quarantine any more, an undone cordon or taint does not
/// count: the node is given back as after any recovery, the cordon included.
fn ended_by_hand(
    session: &Session,
    node: &NodeView,
    own: &Ownership,
    desired: &Desired,
    gone: &Gone,
    now: Timestamp,
) -> Option<EndByHand> {
    let newest = newest_listed(own, desired);
    // Where we have seen the node out of service, it was done just now: what was reported before
    // and is told later (a count, an outbox) is dismissed with it. Else nobody knows when, and
    // what has come since may be new.
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
    let Gone::ByHand(by_hand) = *gone else {
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

// === impl Step ===

impl Step {
    /// Has the session be in `phase`, since then where it was not.
    fn enter(&mut self, phase: Phase, desired: &Desired, since: Timestamp, why: &str) {
        let session = &mut self.session;
        let from = session.phase;
        session.watched = phase.is_out() || matches!(phase, Phase::Quarantining | Phase::Releasing);
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
        self.effects.push(Effect::Note(Note {
            kind: EntryKind::Session,
            text: format!("{} -> {}: {why}", from.name(), phase.name()),
            detail: json!({"from": from, "to": phase, "id": id}),
        }));
    }

    /// Takes a node out of service that carries nothing of ours, where that is wanted and nothing holds it back.
    fn without_ours(
        &mut self,
        node: &NodeView,
        desired: &Desired,
        marks: &Marks,
        hold: Option<&Hold>,
        released_at: Option<Timestamp>,
        now: Timestamp,
    ) {
        // Of what is done to it from here on nothing was seen yet.
        self.session.seen = desired.wanted().then(BTreeSet::new);
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
        self.enter(Phase::Releasing, desired, now, &ending.why);
        // Who has not seen it done does not know when it was, however often it is tried.
        self.session.watched = watched;
        let change = Draft::new(node, own, marks, now).stand_down(ending.by_hand, up_to);
        self.drive(Intent::StandDown, change, now);
    }

    /// Gives the node back, once it has waited; what a person did by hand waits for nothing.
    fn give_back(&mut self, node: &NodeView, own: Ownership, marks: &Marks, now: Timestamp) {
        let session = &mut self.session;
        let begins = session.back_at.is_none();
        if begins {
            returns::keep(&mut session.returns, [], now);
        }
        session.not_before = session.not_before.filter(|at| *at > now);
        let wait = returns::wait(session.returns.len());
        let back_at = *session.back_at.get_or_insert(now + wait);
        if own.undone_by_hand(node).is_some() || now >= back_at {
            let change = Draft::new(node, &own, marks, now).release();
            self.drive(Intent::Release, change, now);
            return;
        }
        if begins {
            self.effects.push(Effect::Note(Note {
                kind: EntryKind::Session,
                text: returns::text(session.returns.len(), back_at),
                detail: json!({"backAt": back_at, "returns": session.returns.len()}),
            }));
        }
        let own = own.in_phase(session.since, Some(back_at));
        let change = Draft::new(node, &own, marks, now).note_wait();
        self.drive(Intent::Update, change, now);
    }

    /// Makes a change, where it is one and it is time; asks a person where it does not get
    /// through.
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
                "{}: not taken by the API server for {} s, {} attempts failed; look at the API \
                 server, at gpuwarden's permissions, and at admission webhooks and policies for nodes",
                intent.name(),
                now.duration_since(since).as_secs(),
                session.failures
            );
            let note = Note::new(EntryKind::Attention, text);
            self.effects.push(Effect::Note(note));
        }
        if session
            .not_before
            .is_none_or(|not_before| now >= not_before)
        {
            session.not_before = None;
            self.effects.push(Effect::Patch(Patch { intent, change }));
        }
    }
}
