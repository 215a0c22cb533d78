//! Stages of a node's way out of service and back.
//!
//! In a look at a node every stage plans what the session is to record of it, the session steps,
//! and every stage acts on what the node then says ([`look`](super::look)). A stage reads the
//! [`Facts`] and changes its own state; it requests everything else through [`StageRequests`]. If
//! one stage depends on another, the dependency is a fact.
//!
//! CONTRIBUTING.md has the steps to add a stage, and `toy.rs` one that does nothing but show them.

use std::ops::ControlFlow;

use contract::HealthEvent;
use jiff::Timestamp;
use model::event::normalise;
use model::ownership::Ownership;
use policy::assess::Desired;

use super::agenda::{Agenda, StoreQuestion};
use super::state::FleetState;
use super::{Effect, Level, Purpose};
use crate::remediation::APPROVAL;
use crate::session::{JournalNote, ObservedNode, Session};
use crate::veto::Veto;

mod approval;
pub(super) mod device_taints;
pub(super) mod drain;
mod hand_over;
mod managed_resource;
pub(super) mod remediation;
#[cfg(test)]
mod toy;
pub(super) mod validation;

pub(super) use approval::ApprovalState;
use device_taints::DeviceTaints;
use drain::DrainState;
use hand_over::HandOver;
use remediation::RemediationState;
use validation::ValidationState;

/// A stage of a node's way out of service and back.
pub(super) trait Stage {
    /// Begins a look: resets what the stage wanted in the last one, such as its watch.
    fn begin(&mut self) {}

    /// Writes into `desired` what the session is to record of the stage. Returns `Break` while
    /// an answer is missing that the stage has asked for: then the session does not step, and no
    /// stage acts.
    fn plan(
        &mut self,
        _facts: &Facts<'_>,
        _desired: &mut Desired,
        _requests: &mut StageRequests<'_>,
    ) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// Acts on the state of the node and on `desired`, after the session has stepped.
    fn act(&mut self, facts: &Facts<'_>, desired: &Desired, requests: &mut StageRequests<'_>);

    /// Starts or stops the stage's watches, to match what the look asked for.
    fn settle(&mut self, _requests: &mut StageRequests<'_>) {}

    /// Returns when to look at the node again if nothing happens.
    fn wake_at(&self, now: Timestamp) -> Option<Timestamp>;

    /// Returns whether the answer to a request is missing: until then the node's entry is kept.
    fn awaits_answer(&self) -> bool;

    /// Returns what the node's way back waits for in this stage, for people; `None` where it waits
    /// for nothing here.
    fn awaits(&self) -> Option<&str> {
        None
    }

    /// Adjusts waits and times after the clock was put back to `now`.
    fn clock_moved_back(&mut self, now: Timestamp);

    /// Gives up all requests without an answer: the answers were lost.
    fn answers_lost(&mut self);
}

/// Number of stages, with the one for tests.
const STAGES: usize = if cfg!(test) { 7 } else { 6 };

/// Stages of one node.
#[derive(Debug, Default)]
pub(super) struct Stages {
    validation: ValidationState,
    hand_over: HandOver,
    pub(super) device_taints: DeviceTaints,
    pub(super) drain: DrainState,
    pub(super) remediation: RemediationState,
    pub(super) approval: ApprovalState,
    #[cfg(test)]
    toy: toy::Toy,
}

/// Facts that a stage may read during a look at its node.
#[derive(Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) name: &'a str,
    pub(super) state: &'a FleetState,
    /// The node as decisions see it; `None` where the cluster does not have it.
    pub(super) observed: Option<&'a ObservedNode>,
    /// True if the node carries a session now, or a dry run pretends so.
    pub(super) in_session: bool,
    /// Session of the node.
    pub(super) session: &'a Session,
    /// A person's veto on the node.
    pub(super) veto: Option<&'a Veto>,
    /// True if a person has taken back the session's changes on the node.
    pub(super) undone_by_person: bool,
    /// True if a reset of GPUs is not enough, and the whole node is remediated.
    pub(super) remediates_whole_node: bool,
    /// True while a patch is in flight that may change whether the node is out of service.
    pub(super) unsettled: bool,
    /// True once the analysis has read the reports about the node, and its conclusions are recorded.
    pub(super) analysed: bool,
}

/// Requests that the stages of one node make during a look.
pub(super) struct StageRequests<'a> {
    agenda: &'a mut Agenda,
    /// Question to the store about the node.
    question: &'a mut Option<StoreQuestion>,
    node: &'a str,
    session: Option<String>,
    now: Timestamp,
}

// === impl Stages ===

impl Stages {
    /// Returns all stages, in their order of planning and acting. Validation comes first,
    /// because it ends a look while its events are being stored; the hand-over comes before the
    /// stages that read what is desired; the drain precedes the remediation; and the approval
    /// proposes what these two need.
    pub(super) fn all(&self) -> [&dyn Stage; STAGES] {
        [
            &self.validation,
            &self.hand_over,
            &self.device_taints,
            &self.drain,
            &self.remediation,
            &self.approval,
            #[cfg(test)]
            &self.toy,
        ]
    }

    /// Returns the same stages in the same order.
    pub(super) fn all_mut(&mut self) -> [&mut dyn Stage; STAGES] {
        [
            &mut self.validation,
            &mut self.hand_over,
            &mut self.device_taints,
            &mut self.drain,
            &mut self.remediation,
            &mut self.approval,
            #[cfg(test)]
            &mut self.toy,
        ]
    }

    /// Returns when to look at the node again if nothing happens.
    pub(super) fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let times = self
            .all()
            .into_iter()
            .filter_map(|stage| stage.wake_at(now));
        times.filter(|at| *at > now).min()
    }

    /// Returns whether the answer to a request of any stage is missing.
    pub(super) fn any_awaits_answer(&self) -> bool {
        self.all().into_iter().any(Stage::awaits_answer)
    }

    /// Returns what the node's way back waits for, for people: an approval, and of the other stages
    /// the last, which waits for the others.
    pub(super) fn awaits(&self) -> Option<String> {
        let other = self.all().into_iter().rev().find_map(Stage::awaits);
        let Some(approval) = self.approval.awaits_approval() else {
            return other.map(str::to_owned);
        };
        let other = other.filter(|other| *other != APPROVAL);
        let beside = other.map_or_else(String::new, |other| format!("; beside that, {other}"));
        Some(format!("{approval}{beside}"))
    }
}

// === impl Facts ===

impl<'a> Facts<'a> {
    /// Returns the node and the session on it; `None` where it carries no session.
    pub(super) fn session_on_node(&self) -> Option<(&'a ObservedNode, &'a Ownership)> {
        let observed = self.observed?;
        Some((observed, observed.own.as_deref()?))
    }
}

// === impl StageRequests ===

impl<'a> StageRequests<'a> {
    pub(super) fn new(
        agenda: &'a mut Agenda,
        question: &'a mut Option<StoreQuestion>,
        (node, session): (&'a str, &Session),
        now: Timestamp,
    ) -> Self {
        let session = session.id.clone();
        Self {
            agenda,
            question,
            node,
            session,
            now,
        }
    }

    /// Returns the id of the node's session.
    pub(super) fn session(&self) -> Option<String> {
        self.session.clone()
    }

    pub(super) fn node(&self) -> &'a str {
        self.node
    }

    pub(super) fn now(&self) -> Timestamp {
        self.now
    }

    /// Requests an effect from the caller.
    pub(super) fn effect(&mut self, effect: Effect) {
        self.agenda.effects.push(effect);
    }

    /// Appends events of gpuwarden itself to the store, and journals `text`, if any, once they are
    /// stored. Until then nothing is decided about the node.
    pub(super) fn append(
        &mut self,
        events: Vec<HealthEvent>,
        purpose: Purpose,
        text: Option<String>,
    ) {
        let now = self.now;
        let events = events.into_iter().map(|mut event| {
            normalise(&mut event, now);
            (event, now)
        });
        *self.question = Some(StoreQuestion::AppendOwn { text });
        self.agenda.effects.push(Effect::Append {
            node: self.node.to_owned(),
            events: events.collect(),
            purpose,
        });
    }

    /// Adds an entry to the journal of the node; with a level, logs it too.
    pub(super) fn journal(&mut self, note: JournalNote, level: Option<Level>) {
        let session = self.session.as_deref();
        self.agenda
            .journal(self.now, self.node, session, note, level);
    }

    /// Logs a line about the node.
    pub(super) fn log(&mut self, level: Level, text: String) {
        self.agenda.log(level, Some(self.node), text);
    }

    /// Journals and logs something that needs a person's attention.
    pub(super) fn call_attention(&mut self, text: String) {
        self.agenda.call_attention(self.now, self.node, text);
    }

    /// Marks the node for another look.
    pub(super) fn look_again(&mut self) {
        self.agenda.dirty.insert(self.node.to_owned());
    }

    /// Marks the node to be shown anew.
    pub(super) fn show(&mut self) {
        self.agenda.unshown.insert(self.node.to_owned());
    }
}
