//! The quarantine session of a node: a state machine without I/O.
//!
//! A node has one session, whether the whole node is out or only single devices of it: the rules
//! that taint devices follow from the session ([`crate::Fleet`]).
//!
//! Each change that gpuwarden makes on a node is recorded in the node's annotations
//! ([`model::ownership`]) by the same patch. So a restart forgets nothing, with its store or
//! without, and a recovery takes back exactly that. [`step()`] compares the desired state with the
//! observed one and returns the effects that lead from one to the other. It may be called at any
//! time and any number of times, since it drives towards a state and counts no messages.
//!
//! | desired | our marks on the node | phase | effect |
//! |---|---|---|---|
//! | in service | no | Idle | |
//! | out, but held back | no | Held | |
//! | out | no | Quarantining | a patch that takes the node out |
//! | out | yes | Quarantined | a patch, if the marks differ from the desired state |
//! | out, and its pods are to leave | yes | Draining | the same; its pods are evicted ([`crate::Fleet`]) |
//! | out, and they have left | yes | Drained | the same |
//! | out, and under remediation | yes | Remediating | the same; custom resources are created ([`crate::Fleet`]) |
//! | out, and that has succeeded | yes | Remediated | the same |
//! | out, and a person is to remediate it | yes | `RemediationFailed` | the same |
//! | in service | yes | Returning | after the wait, a patch that gives the node back |
//! | any, and a person ends it | yes | Returning | a patch that cleans up |
//!
//! A node that has come back within the last hour waits in Returning before it is given back
//! again ([`returns`]); a new fault takes it back to Quarantined. A release by a person waits
//! for nothing.
//!
//! Held is the only effect of the brake ([`crate::brake`]): it precedes a quarantine, and occurs
//! nowhere else.
//!
//! A change that fails is retried, ever more slowly, and after [`DEADLINE`] a person is asked.
//! It is given up only when it is no longer wanted: a faulty node that is not quarantined is not
//! safe, and one that is not given back is lost.

mod change;
mod dismissal;
pub mod foreign_session;
mod phase;
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
use model::ownership::{Machines, Maker, Ownership, Undone, released_at};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use change::Draft;
pub use dismissal::dismissal;
pub use phase::Phase;
use policy::{Policy, ProtectFrom};
pub use step::step;

/// Time after which a change that keeps failing is brought to a person's attention.
pub const DEADLINE: SignedDuration = SignedDuration::from_secs(60);
/// Longest wait between two attempts.
pub const LONGEST_RETRY: SignedDuration = SignedDuration::from_secs(30);

/// First wait after an error; it doubles with each further one, up to [`LONGEST_RETRY`].
const FIRST_RETRY: SignedDuration = SignedDuration::from_millis(100);

/// First and longest wait after a conflict: the next decision has observed the changed node
/// soon.
const CONFLICT_RETRY: (SignedDuration, SignedDuration) = (
    SignedDuration::from_millis(10),
    SignedDuration::from_secs(1),
);

/// Awaited once a person has been asked about a change.
const ASKED: &str = "a person: the API server has not accepted the change for over a minute; it is tried \
                     again every 30 s";

/// Most doublings of a wait; every wait has reached its maximum by then.
const MAX_DOUBLINGS: u32 = 19;

/// Quarantine session of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// Current phase of the session.
    pub phase: Phase,
    /// Id of the event that opened the session, which identifies it; `None` while idle.
    pub id: Option<String>,
    /// Begin of the phase.
    pub since: Timestamp,
    /// Number of failed attempts in a row.
    pub failures: u32,
    /// Time before which a change is not retried.
    pub not_before: Option<Timestamp>,
    /// Time since which a wanted change has not been observed on the node.
    pub pending_since: Option<Timestamp>,
    /// True once a person has been asked about that change.
    pub asked: bool,
    /// Times when the node came back to service within the last hour; see [`returns`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<Timestamp>,
    /// Times of recent remediation attempts.
    #[serde(rename = "repairs", default, skip_serializing_if = "Vec::is_empty")]
    pub remediations: Vec<Timestamp>,
    /// Time when the node may come back; `None` while it is to stay out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_at: Option<Timestamp>,
    /// Times on the node that lie in the future, with the times they count as.
    #[serde(default, skip_serializing_if = "FutureTimes::is_empty")]
    pub times: FutureTimes,
    /// Observed times of machines that may uncordon the node.
    #[serde(default, skip_serializing_if = "Machines::is_empty")]
    pub machines: Machines,
    /// Changes of the session that machines have undone.
    #[serde(default, skip_serializing_if = "Undone::is_empty")]
    pub undone: Undone,
    /// Changes of the session observed on the node; `None` if this process has not observed it.
    #[serde(skip)]
    observed_deeds: Option<BTreeSet<String>>,
    /// Time until which a change that a machine has undone is left undone.
    #[serde(skip)]
    left_until: Option<Timestamp>,
    /// True if a step of this process has entered the phase: what people did to the node while
    /// no process ran may have happened at any time.
    #[serde(skip)]
    pub watched: bool,
}

/// A session after a step, and the effects that the step asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionStep {
    /// The session after the step.
    pub session: Session,
    /// Effects to carry out, in order.
    pub effects: Vec<SessionEffect>,
}

/// An action that a step asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum SessionEffect {
    /// Change the node now. Doing it twice, or late, does no harm: the patch is conditional on
    /// what the step has observed.
    Patch(Patch),
    /// Add an entry to the journal for `explain`.
    Journal(JournalNote),
    /// Emit an Event of the node about a change that machines have undone.
    EmitEvent(String),
}

/// A change to make on a node, and its purpose.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch {
    /// Purpose of the change.
    pub intent: Intent,
    /// Change to make on the node.
    pub change: NodeChange,
}

/// Purpose of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Intent {
    /// Take the node out of service.
    Quarantine,
    /// Bring the marks on the node in line with the open faults.
    Update,
    /// Give the node back. Journaled as `release`.
    #[serde(rename = "release")]
    Return,
    /// Clean up after a person who gave the node back.
    StandDown,
}

/// An entry for the journal.
#[derive(Clone, Debug, PartialEq)]
pub struct JournalNote {
    /// Kind of the journal entry.
    pub kind: EntryKind,
    /// Text of the entry, for people.
    pub text: String,
    /// Details for programs; `null` where there are none.
    pub detail: Value,
}

/// Failure of a request to change the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestFailure {
    /// The node has changed since the decision: decide again soon.
    Conflict,
    /// The change was not made for another reason.
    Error {
        /// Wait that the server asks for, if any.
        retry_after: Option<SignedDuration>,
    },
}

/// A node as decisions see it, with the session parsed once from its annotations.
#[derive(Clone, Debug)]
pub struct ObservedNode {
    /// Node as observed, or in a dry run as pretended.
    pub view: Arc<NodeView>,
    /// Session on the node, ours or another gpuwarden's; `None` where it is in service.
    pub own: Option<Arc<Ownership>>,
}

/// Policy-dependent marks of a session on a node, beside those of every session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Prefix of each cordon label.
    pub label_prefix: String,
    /// True if a recovery leaves NVSentinel's `uncordon-*` labels.
    pub uncordon_labels: bool,
    /// Programs that are to leave the node alone.
    pub protect_from: Vec<ProtectFrom>,
    /// Maker of the session, for [`SessionMark::by`](model::ownership::SessionMark::by); `None`
    /// leaves it out.
    pub maker: Option<Maker>,
    /// Id of the store behind a node's own gpuwarden, for
    /// [`SessionMark::store`](model::ownership::SessionMark::store); `None` where a Lease
    /// decides who acts.
    pub store: Option<String>,
}

/// Returns the node without any change of gpuwarden: the start of a replay.
#[must_use]
pub fn without_ours(node: &NodeView, marks: &Marks) -> NodeView {
    node.after(&undo(node, marks))
}

/// Returns the change that takes a session off the node, as its recovery would, without a trace
/// of it in labels or annotations.
#[must_use]
pub fn undo(node: &NodeView, marks: &Marks) -> NodeChange {
    let silent = Marks {
        uncordon_labels: false,
        ..marks.clone()
    };
    // The time is only written into the labels that are left out.
    let give_back = |own| Draft::new(node, &own, &silent, Timestamp::UNIX_EPOCH).give_back();
    let mut change = Ownership::read(node).map_or_else(NodeChange::default, give_back);
    for key in [contract::keys::RELEASED_AT, contract::keys::RELEASE] {
        if node.annotations.contains_key(key) {
            change.annotations.insert(key.to_owned(), None);
        }
    }
    change
}

/// Returns the wait before the next attempt after `failures` failures in a row.
pub(crate) fn retry_after(failures: u32, failure: RequestFailure) -> SignedDuration {
    let doublings = failures.saturating_sub(1).min(MAX_DOUBLINGS);
    let ((first, longest), server_wait) = match failure {
        RequestFailure::Conflict => (CONFLICT_RETRY, None),
        RequestFailure::Error { retry_after } => ((FIRST_RETRY, LONGEST_RETRY), retry_after),
    };
    let wait = (first * (1 << doublings)).min(longest);
    server_wait.map_or(wait, |server_wait| wait.max(server_wait.min(LONGEST_RETRY)))
}

// === impl JournalNote ===

impl JournalNote {
    /// Creates a note without details for programs.
    pub fn new(kind: EntryKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
            detail: Value::Null,
        }
    }
}

// === impl ObservedNode ===

impl ObservedNode {
    /// Parses the session in the annotations of `view`.
    pub fn of(view: Arc<NodeView>) -> Self {
        let own = Ownership::read(&view).map(Arc::new);
        Self { view, own }
    }
}

// === impl Marks ===

impl Marks {
    /// Returns the marks that a policy asks for. The maker does not depend on the policy.
    pub fn of(policy: &Policy) -> Self {
        Self {
            label_prefix: policy.label_prefix.clone(),
            uncordon_labels: policy.uncordon_labels,
            protect_from: policy.protect_from.clone(),
            maker: None,
            store: None,
        }
    }

    /// Returns the full name of a label of the session.
    fn label(&self, name: &str) -> String {
        format!("{}{name}", self.label_prefix)
    }
}

// === impl Session ===

impl Session {
    /// Creates a session that has not begun.
    pub fn idle(now: Timestamp) -> Self {
        Self {
            since: now,
            ..Self::default()
        }
    }

    /// Returns the id of the session that the node carries, as of the last step.
    pub fn on_the_node(&self) -> Option<&str> {
        let there = self.phase.is_out() || self.phase == Phase::Returning;
        self.id.as_deref().filter(|_| there)
    }

    /// Returns whether nothing in the session is worth saving.
    pub fn is_blank(&self) -> bool {
        let remembers = !(self.returns.is_empty() && self.remediations.is_empty());
        self.phase == Phase::Idle && !remembers && self.times.is_empty()
    }

    /// Updates the times that people or others have written on the node. Returns up to when
    /// faults are dismissed, if that is to be rewritten because it lay in the future.
    pub fn update_times(&mut self, observed: &ObservedNode, now: Timestamp) -> Option<Timestamp> {
        let since = observed.own.as_ref().and_then(|own| own.since);
        self.times.take_in(keys::SESSION, since, now);
        let written = released_at(&observed.view);
        let counts = self.times.take_in(keys::RELEASED_AT, written, now);
        counts.filter(|_| counts != written)
    }

    /// Updates the session from the node: completely, if this process does not know the session
    /// (the saved state is lost, or older). Returns the node's marks, with future times replaced
    /// by those they count as.
    fn update_from_node(&mut self, observed: &ObservedNode, now: Timestamp) -> Option<Ownership> {
        let Some(own) = observed.own.as_deref() else {
            if self.back_at.take().is_some() {
                returns::record(&mut self.returns, [now], now);
            }
            (self.undone, self.left_until) = (Undone::default(), None);
            return None;
        };
        let mut own = Ownership {
            since: self.times.counted(keys::SESSION, own.since),
            ..own.clone()
        };
        let is_new = self.is_unknown(&own);
        self.id = Some(own.session_id.clone());
        if let Some(remediation) = &own.mark.remediation {
            self.remediations = remediation.times(now);
        }
        if is_new {
            let returns = own.mark.returns.iter().copied();
            returns::record(&mut self.returns, returns, now);
            let latest = now + returns::LONGEST_WAIT;
            self.back_at = own.mark.back_at.map(|at| at.min(latest));
        }
        self.update_deeds(&mut own, &observed.view, is_new);
        Some(own)
    }

    /// Prepares a session that was saved before a restart: changes that waited are tried at
    /// once.
    #[must_use]
    pub fn restored(mut self, now: Timestamp) -> Self {
        self.clock_moved_back(now);
        returns::record(&mut self.returns, [], now);
        self.remediations
            .retain(|at| RemediationMark::remembers(*at, now));
        self
    }

    /// Returns until when the node waits to be given back; `None` if it does not wait.
    pub fn waits_until(&self) -> Option<Timestamp> {
        let waits = self.phase == Phase::Returning && self.pending_since.is_none();
        self.back_at.filter(|_| waits)
    }

    /// Records a failed attempt: the next one waits.
    pub fn failed(&mut self, failure: RequestFailure, now: Timestamp) {
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + retry_after(self.failures, failure));
    }

    /// Ends waits after the clock was put back to `now`: a wait that was set before would last
    /// that much longer.
    pub fn clock_moved_back(&mut self, now: Timestamp) {
        self.not_before = None;
        self.pending_since = self.pending_since.map(|since| since.min(now));
        self.back_at = self.back_at.map(|at| at.min(now + returns::LONGEST_WAIT));
        self.machines.clock_put_back(now);
        for at in self.returns.iter_mut().chain(&mut self.remediations) {
            *at = (*at).min(now);
        }
    }

    /// Returns when to call [`step()`] again after `now` if nothing happens; `None` for never.
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
        // A past time must not hide a later one.
        times.into_iter().flatten().filter(|at| *at > now).min()
    }

    /// Records that the node is in the desired state.
    fn settled(&mut self) {
        self.failures = 0;
        self.not_before = None;
        self.pending_since = None;
        self.asked = false;
    }

    /// Returns what an out-of-service node awaits before anything else, for people; `None` if
    /// nothing.
    pub fn awaits_first(&self) -> Option<String> {
        if let Some(until) = self.left_until {
            return Some(format!(
                "a person: something uncordons the node, or removes its taint, again and again; it is put back at \
                 {until:.0}"
            ));
        }
        (self.asked && self.phase.is_out()).then(|| ASKED.to_owned())
    }

    /// Returns what the session awaits, for people; `seen` is true if the cluster has the node.
    pub fn awaits(&self, in_cluster: bool) -> String {
        if let Some(back_at) = self.waits_until().filter(|_| in_cluster) {
            let text = returns::text(self.returns.len(), back_at);
            return format!("the end of a wait: it is {text}");
        }
        let awaits = match (self.phase, self.asked) {
            (Phase::Idle, _) => "nothing",
            _ if !in_cluster => "the node to appear in the cluster",
            (Phase::Held, _) => "room below the limits of the brake, or a person",
            (Phase::Quarantining, false) => "the API server's answer to the quarantine",
            (Phase::Returning, false) => "the API server's answer to the release",
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

// === impl Intent ===

impl Intent {
    /// Returns the intent's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quarantine => "quarantine",
            Self::Update => "update",
            Self::Return => "release",
            Self::StandDown => "stand-down",
        }
    }
}

#[cfg(test)]
mod tests;
