//! The quarantine session of a node: a state machine without I/O.
//!
//! A node has one session, be it out as a whole or single devices of it: the rules that taint
//! devices follow from it ([`crate::fleet`]).
//!
//! What gpuwarden has done to a node is written on the node ([`model::ownership`]), in the same
//! patch that does it; so a restart forgets nothing, with its store or without, and a recovery
//! takes back exactly that. [`step`] compares what is wanted with what is observed and returns
//! the effects that lead from one to the other. It may be called at any time, any number of
//! times: it drives towards a state, and does not count messages.
//!
//! | wanted | ours is on the node | phase | effect |
//! |---|---|---|---|
//! | no | no | Idle | |
//! | yes, but held back | no | Held | |
//! | yes | no | Quarantining | a patch that takes the node out |
//! | yes | yes | Quarantined | a patch, where it is not what is wanted now |
//! | yes, and its pods are to leave | yes | Draining | the same; its pods are evicted ([`crate::fleet`]) |
//! | yes, and they have left | yes | Drained | the same |
//! | yes, and it is repaired | yes | Remediating | the same; custom resources are made ([`crate::fleet`]) |
//! | yes, and that has succeeded | yes | Remediated | the same |
//! | yes, and a person is to repair it | yes | `RemediationFailed` | the same |
//! | no | yes | Releasing | after the wait, a patch that gives the node back |
//! | | yes, and a person ends it | Releasing | a patch that cleans up |
//!
//! A node that has come back within the last hour waits in Releasing before it is given back
//! again ([`returns`]); a new fault takes it back to Quarantined. A person waits for nothing.
//!
//! Held is the only thing that the brake can do ([`crate::brake`]): it stands before a
//! quarantine, and nowhere else.
//!
//! A change that does not get through is tried again, ever more slowly, and after
//! [`DEADLINE`] a person is asked; it is given up only when it is wanted no more, for a
//! node that is not quarantined is not safe, and one that is not given back is lost.

mod change;
mod dismissal;
pub mod foreign_session;
pub mod returns;
mod step;
pub mod uncordon;

use std::collections::BTreeSet;
use std::sync::Arc;

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use model::attempt::RemediationMark;
use model::future::FutureTimes;
use model::journal::EntryKind;
use model::node::{NodeChange, NodeView};
use model::ownership::{Machines, Maker, Ownership, SessionMark, Undone, released_at};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use change::Draft;
pub use dismissal::dismissal;
use policy::Policy;
pub use step::step;

/// Time after which a change that did not get through is brought to a person's attention.
pub const DEADLINE: SignedDuration = SignedDuration::from_secs(60);
/// Longest wait between two attempts.
pub const LONGEST_RETRY: SignedDuration = SignedDuration::from_secs(30);

/// First wait after an error; it doubles with each further one, up to [`LONGEST_RETRY`].
const FIRST_RETRY: SignedDuration = SignedDuration::from_millis(100);

/// First and longest wait where the node has changed meanwhile: what decides again has seen it soon.
const CONFLICT_RETRY: (SignedDuration, SignedDuration) = (
    SignedDuration::from_millis(10),
    SignedDuration::from_secs(1),
);

/// Said of a change about which a person is asked.
const ASKED: &str = "a person: the API server has not taken the change for over a minute; it is tried \
                     again every 30 s";

/// Doublings of a wait beyond which no number of failures counts; any wait is at its longest by then.
const MAX_DOUBLINGS: u32 = 19;

/// The quarantine session of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// The phase in which it is.
    pub phase: Phase,
    /// Id of the event that opened it, by which it is known; `None` while idle.
    pub id: Option<String>,
    /// Since when it is in this phase.
    pub since: Timestamp,
    /// Number of attempts in a row that failed.
    pub failures: u32,
    /// Time before which a change is not tried again.
    pub not_before: Option<Timestamp>,
    /// Since when a change is wanted that is not seen on the node.
    pub pending_since: Option<Timestamp>,
    /// True once a person has been asked about that change.
    pub asked: bool,
    /// The times at which the node has come back to service, of late.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<Timestamp>,
    /// The times of the repairs that were tried, of late.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repairs: Vec<Timestamp>,
    /// The time at which the node may come back; `None` while it is not to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_at: Option<Timestamp>,
    /// Times of the future on the node, with those as which they count.
    #[serde(default, skip_serializing_if = "FutureTimes::is_empty")]
    pub times: FutureTimes,
    /// The times of machines on the node, as far as they were seen.
    #[serde(default, skip_serializing_if = "Machines::is_empty")]
    pub machines: Machines,
    /// What machines have undone of the session.
    #[serde(default, skip_serializing_if = "Undone::is_empty")]
    pub undone: Undone,
    /// What the session did and was seen on the node; `None` where nothing is known of that here.
    #[serde(skip)]
    seen: Option<BTreeSet<String>>,
    /// Until when the node is left without what a machine has undone.
    #[serde(skip)]
    left_until: Option<Timestamp>,
    /// True if the session is in its phase by a step of this process: what a person has done to the
    /// node while no process was there may be of any time.
    #[serde(skip)]
    pub watched: bool,
}

/// Phases of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Nothing of ours is on the node, and nothing is wanted.
    #[default]
    Idle,
    /// The node is to be taken out of service, and the brake holds it back.
    Held,
    /// The node is to be taken out of service; not yet seen there.
    Quarantining,
    /// The node is out of service.
    Quarantined,
    /// The node is out of service, and pods leave it.
    Draining,
    /// The node is out of service, and all pods that were to leave have left.
    Drained,
    /// The node is out of service, and is repaired.
    Remediating,
    /// The node is out of service and was repaired; its faults are to be over.
    Remediated,
    /// The node is out of service, and a person is to repair it.
    RemediationFailed,
    /// The node is to be given back; not yet seen there.
    Releasing,
}

/// A session after a step, and the effects that the step asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The session from here on.
    pub session: Session,
    /// The effects, in order.
    pub effects: Vec<Effect>,
}

/// A thing that a step asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Change the node now. Doing it twice, or late, does no harm: it is conditional on what the
    /// step has seen.
    Patch(Patch),
    /// Keep something for `explain`.
    Note(Note),
    /// Tell by an Event of the node what machines have undone, and what follows.
    Tell(String),
}

/// A change to make on a node, and its purpose.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch {
    /// The purpose.
    pub intent: Intent,
    /// The change.
    pub change: NodeChange,
}

/// The purpose of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Intent {
    /// Take the node out of service.
    Quarantine,
    /// Keep what is on the node in line with the faults that are open.
    Update,
    /// Give the node back.
    Release,
    /// Clean up after a person who gave the node back.
    StandDown,
}

/// A note to keep for `explain`.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// Kind of the journal entry.
    pub kind: EntryKind,
    /// The text for people.
    pub text: String,
    /// The same for programs; `null` where there is nothing more.
    pub detail: Value,
}

/// A failure of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The node was not as the decision had seen it: look again, soon.
    Conflict,
    /// The change was not made for another reason.
    Error {
        /// The time that the server asked to wait, if it did.
        retry_after: Option<SignedDuration>,
    },
}

/// A node as decisions see it, and the session on it, which is read from its annotations once, when
/// the node is seen.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The node.
    pub view: Arc<NodeView>,
    /// The session that it carries, ours or another gpuwarden's; `None` where it is in service.
    pub own: Option<Arc<Ownership>>,
}

/// The marks of a session on a node, beside those of every session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// The text before the name of each cordon label.
    pub label_prefix: String,
    /// True if a recovery leaves the reference's `uncordon-*` labels.
    pub uncordon_labels: bool,
    /// The maker of the session, for [`SessionMark::by`](model::ownership::SessionMark::by); `None`
    /// says nothing.
    pub maker: Option<Maker>,
    /// Id of the store behind a node's own gpuwarden, for
    /// [`SessionMark::store`](model::ownership::SessionMark::store); `None` where a Lease says who
    /// acts.
    pub store: Option<String>,
}

/// Returns the node as it would be if gpuwarden had never done anything to it: what a replay begins
/// with.
#[must_use]
pub fn without_ours(node: &NodeView, marks: &Marks) -> NodeView {
    let silent = Marks {
        uncordon_labels: false,
        ..marks.clone()
    };
    // Its time is only written into the labels that are left out.
    let release = |own| Draft::new(node, &own, &silent, Timestamp::UNIX_EPOCH).release();
    let mut change = Ownership::read(node).map_or_else(NodeChange::default, release);
    for key in [contract::keys::RELEASED_AT, contract::keys::RELEASE] {
        if node.annotations.contains_key(key) {
            change.annotations.insert(key.to_owned(), None);
        }
    }
    node.after(&change)
}

/// Returns the wait before the next attempt where so many in a row have failed.
pub(crate) fn retry_after(failures: u32, failure: Failure) -> SignedDuration {
    let doublings = failures.saturating_sub(1).min(MAX_DOUBLINGS);
    let ((first, longest), wish) = match failure {
        Failure::Conflict => (CONFLICT_RETRY, None),
        Failure::Error { retry_after } => ((FIRST_RETRY, LONGEST_RETRY), retry_after),
    };
    let wait = (first * (1 << doublings)).min(longest);
    wish.map_or(wait, |wish| wait.max(wish.min(LONGEST_RETRY)))
}

// === impl Note ===

impl Note {
    /// Returns a note without a part for programs.
    pub fn new(kind: EntryKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
            detail: Value::Null,
        }
    }
}

// === impl Observed ===

impl Observed {
    /// Returns `view` with what is read from its annotations.
    pub fn of(view: Arc<NodeView>) -> Self {
        let own = Ownership::read(&view).map(Arc::new);
        Self { view, own }
    }
}

// === impl Marks ===

impl Marks {
    /// Returns how the sessions of a policy mark a node. Who makes them is not the policy's.
    pub fn of(policy: &Policy) -> Self {
        Self {
            label_prefix: policy.label_prefix.clone(),
            uncordon_labels: policy.uncordon_labels,
            maker: None,
            store: None,
        }
    }

    /// Returns the whole name of a label of the session.
    fn label(&self, name: &str) -> String {
        format!("{}{name}", self.label_prefix)
    }
}

// === impl Session ===

impl Session {
    /// Returns a session of a node that has not begun.
    pub fn idle(now: Timestamp) -> Self {
        Self {
            since: now,
            ..Self::default()
        }
    }

    /// Returns the id of the session that the node carries, as of the last step.
    pub fn on_the_node(&self) -> Option<&str> {
        let there = self.phase.is_out() || self.phase == Phase::Releasing;
        self.id.as_deref().filter(|_| there)
    }

    /// Returns whether nothing of it is worth keeping over a restart.
    pub fn is_blank(&self) -> bool {
        let remembers = !(self.returns.is_empty() && self.repairs.is_empty());
        self.phase == Phase::Idle && !remembers && self.times.is_empty()
    }

    /// Takes in the times that people or others have written on the node. Returns up to when
    /// faults are dismissed, where that is to be written anew: it said a time of the future.
    pub fn take_in_times(&mut self, observed: &Observed, now: Timestamp) -> Option<Timestamp> {
        let since = observed.own.as_ref().and_then(|own| own.since);
        self.times.take_in(keys::SESSION, since, now);
        let says = released_at(&observed.view);
        let counts = self.times.take_in(keys::RELEASED_AT, says, now);
        counts.filter(|_| counts != says)
    }

    /// Takes in what the node says of the session: all of it, where it is one of which nothing is
    /// known here (what was kept is lost, or older). Returns it with the times as which those of
    /// the future count.
    fn take_in_own(&mut self, observed: &Observed, now: Timestamp) -> Option<Ownership> {
        let Some(own) = observed.own.as_deref() else {
            if self.back_at.take().is_some() {
                returns::keep(&mut self.returns, [now], now);
            }
            (self.undone, self.left_until) = (Undone::default(), None);
            return None;
        };
        let mut own = Ownership {
            since: self.times.counted(keys::SESSION, own.since),
            ..own.clone()
        };
        let is_new = self.is_new_here(&own);
        self.id = Some(own.session_id.clone());
        if let Some(remediation) = &own.mark.remediation {
            self.repairs = remediation.times(now);
        }
        if is_new {
            let returns = own.mark.returns.iter().copied();
            returns::keep(&mut self.returns, returns, now);
            let latest = now + returns::LONGEST_WAIT;
            self.back_at = own.mark.back_at.map(|at| at.min(latest));
        }
        self.take_in_deeds(&mut own, &observed.view, is_new);
        Some(own)
    }

    /// Takes in what was kept over a restart: what waited is tried at once.
    #[must_use]
    pub fn restored(mut self, now: Timestamp) -> Self {
        self.clock_put_back(now);
        returns::keep(&mut self.returns, [], now);
        self.repairs
            .retain(|at| RemediationMark::remembers(*at, now));
        self
    }

    /// Returns until when it waits to be given back; `None`: it does not.
    pub fn waits_until(&self) -> Option<Timestamp> {
        let waits = self.phase == Phase::Releasing && self.pending_since.is_none();
        self.back_at.filter(|_| waits)
    }

    /// Takes in that an attempt failed: the next one waits.
    pub fn failed(&mut self, failure: Failure, now: Timestamp) {
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + retry_after(self.failures, failure));
    }

    /// Takes in that the clock was put back to `now`: a wait that was set before would last
    /// as much longer, so it ends.
    pub fn clock_put_back(&mut self, now: Timestamp) {
        self.not_before = None;
        self.pending_since = self.pending_since.map(|since| since.min(now));
        self.back_at = self.back_at.map(|at| at.min(now + returns::LONGEST_WAIT));
        self.machines.clock_put_back(now);
        for at in self.returns.iter_mut().chain(&mut self.repairs) {
            *at = (*at).min(now);
        }
    }

    /// Returns when to call [`step`] again after `now` even if nothing happens; `None`: not at all.
    pub fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let attention = self
            .pending_since
            .filter(|_| !self.asked)
            .map(|since| since.checked_add(DEADLINE).unwrap_or(Timestamp::MAX));
        let times = [
            self.not_before,
            attention,
            self.waits_until(),
            self.left_until,
        ];
        // One that is over does not hide one that is to come.
        times.into_iter().flatten().filter(|at| *at > now).min()
    }

    /// Takes in that the node is as it should be now.
    fn settled(&mut self) {
        self.failures = 0;
        self.not_before = None;
        self.pending_since = None;
        self.asked = false;
    }

    /// Returns what is awaited of a node that is out of service before anything else, for people; `None`: nothing.
    pub fn awaits_first(&self) -> Option<String> {
        if let Some(until) = self.left_until {
            return Some(format!(
                "a person: something uncordons the node, or takes its taint, again and again; it is put back at \
                 {until:.0}"
            ));
        }
        (self.asked && self.phase.is_out()).then(|| ASKED.to_owned())
    }

    /// Returns what is awaited, for people; `seen`: whether the cluster has the node.
    pub fn awaits(&self, seen: bool) -> String {
        if let Some(back_at) = self.waits_until().filter(|_| seen) {
            let text = returns::text(self.returns.len(), back_at);
            return format!("the end of a wait: it is {text}");
        }
        let awaits = match (self.phase, self.asked) {
            (Phase::Idle, _) => "nothing",
            _ if !seen => "the node to appear in the cluster",
            (Phase::Held, _) => "room below the limits of the brake, or a person",
            (Phase::Quarantining, false) => "the API server's answer to the quarantine",
            (Phase::Releasing, false) => "the API server's answer to the release",
            (_, true) => ASKED,
            (Phase::Quarantined | Phase::Drained | Phase::Remediated, _) => {
                "the recovery of its faults, or a release by hand"
            }
            (Phase::Draining, _) => "its pods to leave",
            (Phase::Remediating, _) => "its repair",
            (Phase::RemediationFailed, _) => "a person to repair it, or a release by hand",
        };
        awaits.to_owned()
    }
}

// === impl Phase ===

impl Phase {
    /// Returns the phase of a node that is out of service, by what it says of its session.
    fn of(mark: &SessionMark) -> Self {
        match mark.state() {
            keys::STATE_DRAINING => Self::Draining,
            keys::STATE_DRAINED => Self::Drained,
            keys::STATE_REMEDIATING => Self::Remediating,
            keys::STATE_REMEDIATED => Self::Remediated,
            keys::STATE_REMEDIATION_FAILED => Self::RemediationFailed,
            _ => Self::Quarantined,
        }
    }

    /// Returns whether the node is out of service, and no change of that is wanted.
    pub fn is_out(self) -> bool {
        matches!(
            self,
            Self::Quarantined
                | Self::Draining
                | Self::Drained
                | Self::Remediating
                | Self::Remediated
                | Self::RemediationFailed
        )
    }

    /// Returns the phase's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Held => "held",
            Self::Quarantining => "quarantining",
            Self::Quarantined => "quarantined",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Remediating => "remediating",
            Self::Remediated => "remediated",
            Self::RemediationFailed => "remediation-failed",
            Self::Releasing => "releasing",
        }
    }
}

// === impl Intent ===

impl Intent {
    /// Returns the intent's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quarantine => "quarantine",
            Self::Update => "update",
            Self::Release => "release",
            Self::StandDown => "stand-down",
        }
    }
}

#[cfg(test)]
mod tests;
