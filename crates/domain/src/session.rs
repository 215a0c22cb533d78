//! The quarantine session of a node: a state machine without I/O.
//!
//! What gpuwarden has done to a node is written on the node ([`crate::ownership`]), in the same
//! patch that does it; so a restart forgets nothing, and a recovery takes back exactly
//! that. [`step`] compares what is wanted with what is observed and says what to change.
//! It may be called at any time, any number of times: it drives towards a state, and
//! does not count messages.
//!
//! ```text
//!            wanted                    seen on the node
//!   Idle ------------> Quarantining ------------------> Quarantined
//!    ^  \                ^                               |       |
//!    |   +---> Held -----+ there is room                 |       |
//!    | taken back                         not wanted any more    | by hand
//!    +---------------- Releasing <-----------------------+       |
//!    +-----------------------------------------------------------+
//! ```
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

pub mod another;
mod change;
mod dismissal;
pub mod returns;

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::assess::Desired;
use crate::brake::Hold;
use crate::future::{FutureTimes, is_future};
use crate::journal::EntryKind;
use crate::node::{NodeChange, NodeView};
use crate::ownership::{ByHand, Maker, Ownership, ReleaseRequest, released_at};
use crate::policy::Policy;
pub use dismissal::dismissal;

/// After how long a change that did not get through is brought to a person's attention.
pub const DEADLINE: SignedDuration = SignedDuration::from_secs(60);
/// Longest wait between two attempts.
pub const LONGEST_RETRY: SignedDuration = SignedDuration::from_secs(30);

/// Where the session of a node stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// Where it stands.
    pub phase: Phase,
    /// Identity: the id of the event that opened it; `None` while idle.
    pub id: Option<String>,
    /// Since when it is in this phase.
    pub since: Timestamp,
    /// Attempts in a row that failed.
    pub failures: u32,
    /// Not to be tried again before.
    pub not_before: Option<Timestamp>,
    /// Since when a change is wanted that is not seen on the node.
    pub pending_since: Option<Timestamp>,
    /// Whether a person has been asked about it.
    pub asked: bool,
    /// When it has come back to service, of late.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<Timestamp>,
    /// When it may come back; `None` while it is not to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_at: Option<Timestamp>,
    /// Times of the future on the node, and as what they count.
    #[serde(default, skip_serializing_if = "FutureTimes::is_empty")]
    pub times: FutureTimes,
    /// Whether it is in its phase by a step of this process: what a person has done to the node
    /// while no process was there may be of any time.
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
    /// The node is to be given back; not yet seen there.
    Releasing,
}

/// What a step decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The session from here on.
    pub session: Session,
    /// A change to make on the node now. Making it twice, or late, does no harm: it is
    /// conditional on what this step has seen.
    pub patch: Option<Patch>,
    /// What to keep for `explain`.
    pub notes: Vec<Note>,
}

/// A change to make on a node, and what for.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch {
    /// What for.
    pub intent: Intent,
    /// The change.
    pub change: NodeChange,
}

/// What a change is for.
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

/// Something to keep for `explain`.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// Kind of journal entry.
    pub kind: EntryKind,
    /// For people.
    pub text: String,
    /// For programs.
    pub detail: Value,
}

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The node was not as the decision had seen it: look again, soon.
    Conflict,
    /// Anything else; `retry_after` is the server's own wish.
    Error {
        /// As the server asked for, if it did.
        retry_after: Option<SignedDuration>,
    },
}

/// How a session marks a node, beside what every session does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Stands before the cordon labels, as it is.
    pub label_prefix: String,
    /// Whether a recovery leaves the reference's `uncordon-*` labels.
    pub uncordon_labels: bool,
    /// Who makes its sessions, for [`Ownership::maker`]; `None` says nothing.
    pub maker: Option<Maker>,
    /// Id of the store behind a node's own gpuwarden, for [`Ownership::store`]; `None` where a
    /// Lease says who acts.
    pub store: Option<String>,
}

/// Decides what to do next about a node.
///
/// `observed` is the node as last seen, or `None` where the cluster does not know it.
/// `hold` is why the node must not be taken out now; it has no say in anything else.
pub fn step(
    session: &Session,
    desired: &Desired,
    observed: Option<&NodeView>,
    marks: &Marks,
    hold: Option<&Hold>,
    now: Timestamp,
) -> Step {
    let Some(node) = observed else {
        // Nothing to change. Once the node appears, this is called again.
        let phase = if desired.wanted() {
            Phase::Quarantining
        } else {
            Phase::Idle
        };
        return session
            .clone()
            .enter(phase, desired, now, "the cluster does not know the node");
    };
    let mut session = session.clone();
    let released_at = session.take_in_times(node, now);
    let own = Ownership::read(node).map(|own| Ownership {
        since: session.times.counted(keys::SESSION, own.since),
        ..own
    });
    if own.is_none() && session.back_at.take().is_some() {
        returns::forget_old(&mut session.returns, now);
        session.returns.push(now);
    }
    if let Some(own) = &own
        && let Some((by_hand, released_at, why)) = ended_by_hand(&session, node, own, desired, now)
    {
        let change = change::stand_down(node, own, by_hand, released_at, marks);
        session.times.trust(keys::RELEASED_AT, released_at, now);
        session.back_at = None;
        return session
            .adopt(own)
            .enter(Phase::Releasing, desired, now, &why)
            .drive(Intent::StandDown, change, now);
    }
    match (desired.wanted(), own) {
        (true, None) if let Some(hold) = hold => {
            let why = format!("held back: {hold}");
            session.enter(Phase::Held, desired, now, &why)
        }
        (true, None) => {
            let change = change::quarantine(node, desired, marks, released_at, now);
            session
                .enter(Phase::Quarantining, desired, now, "a fault asks for it")
                .drive(Intent::Quarantine, change, now)
        }
        (true, Some(own)) => {
            let change = change::update(node, &own, desired, marks, released_at, now);
            session.back_at = None;
            session
                .adopt(&own)
                .enter(Phase::Quarantined, desired, now, "seen on the node")
                .drive(Intent::Update, change, now)
        }
        (false, Some(own)) => {
            let change = change::release(node, &own, marks, now);
            let by_hand = own.undone_by_hand(node).is_some();
            session
                .adopt(&own)
                .enter(
                    Phase::Releasing,
                    desired,
                    now,
                    "no open fault asks for it any more",
                )
                .give_back(change, by_hand, now)
        }
        (false, None) => session.enter(Phase::Idle, desired, now, "nothing of ours is on the node"),
    }
}

/// Whether a person ends the session: how, up to when reports are dismissed, and what to
/// say of it.
///
/// Where no fault asks for the quarantine any more, an undone cordon or taint does not
/// count: the node is given back as after any recovery, the cordon included.
fn ended_by_hand(
    session: &Session,
    node: &NodeView,
    own: &Ownership,
    desired: &Desired,
    now: Timestamp,
) -> Option<(ByHand, Timestamp, String)> {
    let newest = own.newest_listed(desired);
    // Where we have seen the node out of service, it was done just now: what was reported before
    // and is told later (a count, an outbox) is dismissed with it. Else nobody knows when, and
    // what has come since may be new.
    let newest = newest.max(session.watched.then(|| own.before_unlisted(desired, now)));
    if let Some(request) = ReleaseRequest::read(node) {
        let until = request.dismisses_until(newest, now);
        let ReleaseRequest { by, reason, at } = request;
        let future = at
            .filter(|at| is_future(*at, now))
            .map_or_else(String::new, |at| {
                format!(" (asked for at {at:.0}, which lies in the future and counts as now)")
            });
        return Some((
            ByHand::Released,
            until,
            format!("released by {by}: {reason}{future}"),
        ));
    }
    let by_hand = own.undone_by_hand(node).filter(|_| desired.wanted())?;
    let why = match by_hand {
        ByHand::Untainted => "somebody removed a quarantine taint by hand: the session ends",
        _ => "somebody uncordoned the node by hand: the session ends",
    };
    Some((by_hand, newest.unwrap_or(now), why.to_owned()))
}

/// The node as it would be if gpuwarden had never done anything to it: what a replay
/// begins with.
#[must_use]
pub fn without_ours(node: &NodeView, marks: &Marks) -> NodeView {
    let silent = Marks {
        uncordon_labels: false,
        ..marks.clone()
    };
    // Its time is only written into the labels that are left out.
    let release = |own| change::release(node, &own, &silent, Timestamp::UNIX_EPOCH);
    let mut change = Ownership::read(node).map_or_else(NodeChange::default, release);
    for key in [contract::keys::RELEASED_AT, contract::keys::RELEASE] {
        if node.annotations.contains_key(key) {
            change.annotations.insert(key.to_owned(), None);
        }
    }
    node.after(&change)
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

    /// The whole name of a label of the session.
    fn label(&self, name: &str) -> String {
        format!("{}{name}", self.label_prefix)
    }
}

// === impl Session ===

impl Session {
    /// A session that has not begun.
    pub fn idle(now: Timestamp) -> Self {
        Self {
            phase: Phase::Idle,
            id: None,
            since: now,
            failures: 0,
            not_before: None,
            pending_since: None,
            asked: false,
            returns: Vec::new(),
            back_at: None,
            times: FutureTimes::default(),
            watched: false,
        }
    }

    /// Returns whether nothing of it is worth keeping over a restart.
    pub fn is_blank(&self) -> bool {
        self.phase == Phase::Idle && self.returns.is_empty() && self.times.is_empty()
    }

    /// Takes in the times that people or others have written on the node. Returns up to when
    /// faults are dismissed, where that is to be written anew: it said a time of the future.
    pub fn take_in_times(&mut self, node: &NodeView, now: Timestamp) -> Option<Timestamp> {
        let since = Ownership::read(node).and_then(|own| own.since);
        self.times.take_in(keys::SESSION, since, now);
        let says = released_at(node);
        let counts = self.times.take_in(keys::RELEASED_AT, says, now);
        counts.filter(|_| counts != says)
    }

    /// Takes in what was kept over a restart: what waited is tried at once.
    #[must_use]
    pub fn restored(mut self, now: Timestamp) -> Self {
        self.clock_put_back(now);
        returns::forget_old(&mut self.returns, now);
        self
    }

    /// Until when it waits to be given back; `None`: it does not.
    pub fn waits_until(&self) -> Option<Timestamp> {
        let waits = self.phase == Phase::Releasing && self.pending_since.is_none();
        self.back_at.filter(|_| waits)
    }

    /// Takes in that an attempt failed: the next one waits.
    pub fn failed(&mut self, failure: Failure, now: Timestamp) {
        self.failures = self.failures.saturating_add(1);
        let doublings = self.failures.min(20) - 1;
        let (first, longest, wish) = match failure {
            Failure::Conflict => (10, SignedDuration::from_secs(1), None),
            Failure::Error { retry_after } => (100, LONGEST_RETRY, retry_after),
        };
        let wait = SignedDuration::from_millis(first << doublings).min(longest);
        let wait = wish.map_or(wait, |wish| wait.max(wish.min(LONGEST_RETRY)));
        self.not_before = Some(now + wait);
    }

    /// Takes in that the clock was put back to `now`: a wait that was set before would last
    /// as much longer, so it ends.
    pub fn clock_put_back(&mut self, now: Timestamp) {
        self.not_before = None;
        self.pending_since = self.pending_since.map(|since| since.min(now));
        self.back_at = self.back_at.map(|at| at.min(now + returns::LONGEST_WAIT));
        for at in &mut self.returns {
            *at = (*at).min(now);
        }
    }

    /// When to call [`step`] again even if nothing happens; `None`: not at all.
    pub fn wake_at(&self) -> Option<Timestamp> {
        let attention = self
            .pending_since
            .filter(|_| !self.asked)
            .map(|since| since.checked_add(DEADLINE).unwrap_or(Timestamp::MAX));
        let times = [self.not_before, attention, self.waits_until()];
        times.into_iter().flatten().min()
    }

    /// What is awaited, for people; `seen`: whether the cluster has the node.
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
            (Phase::Quarantining | Phase::Releasing, true) => {
                "a person: the API server has not taken the change for over a minute; \
                 it is tried again every 30 s"
            }
            (Phase::Quarantined, _) => "the recovery of its faults, or an uncordon by hand",
        };
        awaits.to_owned()
    }

    fn adopt(mut self, own: &Ownership) -> Self {
        self.id = Some(own.session_id.clone());
        self
    }

    fn enter(mut self, phase: Phase, desired: &Desired, now: Timestamp, why: &str) -> Step {
        let mut notes = Vec::new();
        let from = self.phase;
        self.watched = matches!(
            phase,
            Phase::Quarantining | Phase::Quarantined | Phase::Releasing
        );
        if phase != from {
            self.phase = phase;
            self.since = now;
            self.failures = 0;
            self.not_before = None;
            self.pending_since = None;
            self.asked = false;
        }
        let id = self.id.clone();
        match phase {
            Phase::Idle => {
                self.id = None;
                self.pending_since = None;
                self.not_before = None;
            }
            Phase::Held | Phase::Quarantining if self.id.is_none() => {
                self.id = desired
                    .events
                    .first()
                    .map(|counted| counted.event.id.clone());
            }
            _ => {}
        }
        if phase != from {
            notes.push(Note {
                kind: EntryKind::Session,
                text: format!("{} -> {}: {why}", from.name(), phase.name()),
                detail: json!({"from": from, "to": phase, "id": self.id.clone().or(id)}),
            });
        }
        Step {
            session: self,
            patch: None,
            notes,
        }
    }
}

// === impl Step ===

impl Step {
    /// Gives the node back, once it has waited; what a person did by hand waits for nothing.
    fn give_back(mut self, change: NodeChange, by_hand: bool, now: Timestamp) -> Self {
        let session = &mut self.session;
        let begins = session.back_at.is_none();
        if begins {
            returns::forget_old(&mut session.returns, now);
        }
        session.not_before = session.not_before.filter(|at| *at > now);
        let wait = returns::wait(session.returns.len());
        let back_at = *session.back_at.get_or_insert(now + wait);
        if by_hand || now >= back_at {
            return self.drive(Intent::Release, change, now);
        }
        if begins {
            let text = returns::text(session.returns.len(), back_at);
            self.notes.push(Note {
                kind: EntryKind::Session,
                text,
                detail: json!({"backAt": back_at, "returns": session.returns.len()}),
            });
        }
        self
    }

    fn drive(mut self, intent: Intent, change: NodeChange, now: Timestamp) -> Self {
        let session = &mut self.session;
        if change.is_empty() {
            session.failures = 0;
            session.not_before = None;
            session.pending_since = None;
            session.asked = false;
            return self;
        }
        let since = *session.pending_since.get_or_insert(now);
        if !session.asked && now.duration_since(since) >= DEADLINE {
            session.asked = true;
            self.notes.push(Note {
                kind: EntryKind::Attention,
                text: format!(
                    "{}: not taken by the API server for {} s, {} attempts failed; look at the \
                     API server and at gpuwarden's permissions",
                    intent.name(),
                    now.duration_since(since).as_secs(),
                    session.failures
                ),
                detail: Value::Null,
            });
        }
        if session
            .not_before
            .is_none_or(|not_before| now >= not_before)
        {
            session.not_before = None;
            self.patch = Some(Patch { intent, change });
        }
        self
    }
}

// === impl Phase ===

impl Phase {
    /// The phase's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Held => "held",
            Self::Quarantining => "quarantining",
            Self::Quarantined => "quarantined",
            Self::Releasing => "releasing",
        }
    }
}

// === impl Intent ===

impl Intent {
    /// The intent's name, as serialised.
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
