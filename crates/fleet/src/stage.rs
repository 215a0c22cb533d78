//! The stages of a node's way out of service and back.
//!
//! A look at a node is: every stage plans what it wants of the node, the session steps, every stage acts on
//! what the node says then ([`look`](super::look)). A stage reads the [`Facts`] and changes its own state;
//! everything else it asks for with [`Asks`]. What one stage needs to know of another is a fact.
//!
//! To add a stage: a file here with its state and `impl Stage`, a field of [`Stages`] and its name in
//! [`Stages::all`] and [`Stages::all_mut`], and, where it asks for something new, an [`Effect`] and its arm in the
//! controller.

use std::ops::ControlFlow;

use contract::HealthEvent;
use jiff::Timestamp;
use model::event::normalise;
use model::ownership::Ownership;
use policy::assess::Desired;

use super::agenda::{Agenda, Awaits};
use super::state::FleetState;
use super::{Effect, Level, Purpose};
use crate::session::{Note, Observed, Session};
use crate::veto::Veto;

pub(super) mod device_taints;
pub(super) mod drain;
mod hand_over;
pub(super) mod remediation;
pub(super) mod validation;
mod wanted;

use device_taints::DeviceTaints;
use drain::DrainState;
use hand_over::HandOver;
use remediation::RemediationState;
use validation::ValidationState;

/// A stage of a node's way out of service and back.
pub(super) trait Stage {
    /// Begins a look: until the stage wants something in it, nothing need go on.
    fn begin(&mut self) {}

    /// Writes into `desired` what the session is to say of the stage. `Break` where something has to be known
    /// first that the stage has asked for: then the session does not step, and no stage acts.
    fn plan(
        &mut self,
        _facts: &Facts<'_>,
        _desired: &mut Desired,
        _asks: &mut Asks<'_>,
    ) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// Does what follows from the state of the node and from what is wanted of it, after the session has
    /// stepped.
    fn act(&mut self, facts: &Facts<'_>, desired: &Desired, asks: &mut Asks<'_>);

    /// Starts or stops watching what the stage watches, to match what the look has asked for.
    fn settle(&mut self, _asks: &mut Asks<'_>) {}

    /// Returns when the node is to be looked at even if nothing happens to it.
    fn wake_at(&self, now: Timestamp) -> Option<Timestamp>;

    /// Returns whether the answer to a request is still to come: until then the node is not forgotten.
    fn awaits_answer(&self) -> bool;

    /// Adjusts waits and times after the clock was put back to `now`.
    fn clock_moved_back(&mut self, now: Timestamp);

    /// Gives up all requests whose answers are still to come: they were lost.
    fn answers_lost(&mut self);
}

/// The stages of one node.
#[derive(Debug, Default)]
pub(super) struct Stages {
    validation: ValidationState,
    hand_over: HandOver,
    pub(super) device_taints: DeviceTaints,
    pub(super) drain: DrainState,
    pub(super) remediation: RemediationState,
}

/// What a stage may read while its node is looked at.
#[derive(Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) name: &'a str,
    pub(super) state: &'a FleetState,
    /// The node as decisions see it; `None` where the cluster does not have it.
    pub(super) observed: Option<&'a Observed>,
    /// True if the node carries a session now, or a dry run pretends so.
    pub(super) in_session: bool,
    /// The session of the node as a whole.
    pub(super) session: &'a Session,
    /// The veto of a person that holds for the node.
    pub(super) veto: Option<&'a Veto>,
    /// True if a person has taken back what the session did on the node.
    pub(super) undone_by_person: bool,
    /// True where the reset of GPUs is not enough, and the node as a whole is repaired.
    pub(super) repairs_whole_node: bool,
    /// True while a patch is under way that may change whether the node is out of service.
    pub(super) unsettled: bool,
}

/// What is asked for in a look at one node.
pub(super) struct Asks<'a> {
    agenda: &'a mut Agenda,
    /// The question to the store about the node.
    awaits: &'a mut Option<Awaits>,
    node: &'a str,
    session: Option<String>,
    now: Timestamp,
}

// === impl Stages ===

impl Stages {
    /// Returns all stages, in the order in which they plan and act. Validation is the first, for it ends a look
    /// where its events have to be stored; the hand-over comes before those that look at what is wanted; pods
    /// leave before anything is repaired.
    pub(super) fn all(&self) -> [&dyn Stage; 5] {
        [
            &self.validation,
            &self.hand_over,
            &self.device_taints,
            &self.drain,
            &self.remediation,
        ]
    }

    /// Returns the same stages in the same order.
    pub(super) fn all_mut(&mut self) -> [&mut dyn Stage; 5] {
        [
            &mut self.validation,
            &mut self.hand_over,
            &mut self.device_taints,
            &mut self.drain,
            &mut self.remediation,
        ]
    }

    /// Returns when the node is to be looked at even if nothing happens to it.
    pub(super) fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let times = self
            .all()
            .into_iter()
            .filter_map(|stage| stage.wake_at(now));
        times.filter(|at| *at > now).min()
    }

    /// Returns whether the answer to a request of a stage is still to come.
    pub(super) fn await_answer(&self) -> bool {
        self.all().into_iter().any(Stage::awaits_answer)
    }
}

// === impl Facts ===

impl<'a> Facts<'a> {
    /// Returns the node, and what is ours on it; `None` where it carries no session.
    pub(super) fn ours(&self) -> Option<(&'a Observed, &'a Ownership)> {
        let observed = self.observed?;
        Some((observed, observed.own.as_deref()?))
    }
}

// === impl Asks ===

impl<'a> Asks<'a> {
    pub(super) fn new(
        agenda: &'a mut Agenda,
        awaits: &'a mut Option<Awaits>,
        (node, session): (&'a str, &Session),
        now: Timestamp,
    ) -> Self {
        let session = session.id.clone();
        Self {
            agenda,
            awaits,
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

    /// Asks for an effect.
    pub(super) fn effect(&mut self, effect: Effect) {
        self.agenda.effects.push(effect);
    }

    /// Appends events of our own to the store, and notes `text` once they are stored. Until then the node is
    /// not looked at.
    pub(super) fn append(&mut self, events: Vec<HealthEvent>, purpose: Purpose, text: String) {
        let now = self.now;
        let events = events.into_iter().map(|mut event| {
            normalise(&mut event, now);
            (event, now)
        });
        *self.awaits = Some(Awaits::OfOurs { text });
        self.agenda.effects.push(Effect::Append {
            node: self.node.to_owned(),
            events: events.collect(),
            purpose,
        });
    }

    /// Adds a note to the story of the node; with a level, it is logged, too.
    pub(super) fn note(&mut self, note: Note, level: Option<Level>) {
        let session = self.session.as_deref();
        self.agenda.note(self.now, self.node, session, note, level);
    }

    /// Logs a line about the node.
    pub(super) fn log(&mut self, level: Level, text: String) {
        self.agenda.log(level, Some(self.node), text);
    }

    /// Asks people to look at the node.
    pub(super) fn call_attention(&mut self, text: String) {
        self.agenda.call_attention(self.now, self.node, text);
    }

    /// Has the node looked at again at once.
    pub(super) fn look_again(&mut self) {
        self.agenda.dirty.insert(self.node.to_owned());
    }

    /// Has the node shown anew.
    pub(super) fn show(&mut self) {
        self.agenda.unshown.insert(self.node.to_owned());
    }
}
