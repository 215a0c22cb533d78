//! States that the remediation of a node waits in, and what ends each.
//!
//! An [`Awaiting`] has a time of the next decision, or names somebody who was asked: so nothing
//! waits for ever without anybody knowing.

use jiff::{SignedDuration, Timestamp};

use model::time::later;

/// Awaited while an attempt has no approval. The proposal says which one.
pub(crate) const APPROVAL: &str = "a person's approval";

/// State that the remediation of a node waits in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Awaiting {
    /// No remediation is asked for: the recovery of the faults, or a person's release, ends it,
    /// as on a quarantined or drained node without remediation. The text is for people, if there
    /// is more to say.
    Recovery(Option<String>),
    /// The end of an attempt, or of a wait.
    Waits(Wait),
    /// The work of others, who have limits of their own or were asked by a person.
    Others(String),
    /// A person, beside what continues by itself.
    Person {
        /// Reason why a person is asked.
        why: String,
        /// Work that continues by itself.
        meanwhile: Option<Meanwhile>,
        /// Time when another attempt may be made.
        again: Option<Timestamp>,
    },
}

/// Work that continues by itself while a person is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    /// A wait until a time.
    Waits(Wait),
    /// The work of others.
    Others(String),
}

/// A wait for something, until a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    what: String,
    until: Timestamp,
}

/// Reason why nothing new begins on a node now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocker {
    /// Pods of the node have to leave first. The drain itself asks a person if they do not.
    Drain,
    /// Somebody else has the node, or has held it back, without an end; or its quarantine has to
    /// be restored first.
    Others(String),
    /// The hold ends by itself at this time.
    Until(Timestamp, String),
}

// === impl Wait ===

impl Wait {
    /// Creates a wait; a time that has passed is replaced by one second from now.
    pub(super) fn new(what: String, until: Timestamp, now: Timestamp) -> Self {
        let soon = later(now, SignedDuration::from_secs(1));
        let until = if until > now { until } else { soon };
        Self { what, until }
    }

    pub(super) fn until(&self) -> Timestamp {
        self.until
    }

    /// Returns the wait that ends first.
    pub(super) fn or_sooner(self, before: Option<Self>) -> Self {
        match before {
            Some(before) if before.until <= self.until => before,
            _ => self,
        }
    }
}

// === impl Blocker ===

impl Blocker {
    pub(super) fn awaiting(&self, now: Timestamp) -> Awaiting {
        match self {
            Self::Drain => Awaiting::Others("its pods to leave".to_owned()),
            Self::Others(what) => Awaiting::Others(what.clone()),
            Self::Until(until, what) => Awaiting::Waits(Wait::new(what.clone(), *until, now)),
        }
    }
}

// === impl Awaiting ===

impl Awaiting {
    /// Returns the same with a person asked beside it.
    pub(super) fn with_person(self, why: String, again: Option<Timestamp>) -> Self {
        let meanwhile = match self {
            Self::Recovery(_) => None,
            Self::Waits(wait) => Some(Meanwhile::Waits(wait)),
            Self::Others(what) => Some(Meanwhile::Others(what)),
            Self::Person { meanwhile, .. } => meanwhile,
        };
        Self::Person {
            why,
            meanwhile,
            again,
        }
    }

    /// Returns the wait, if there is one.
    pub(super) fn wait(&self) -> Option<&Wait> {
        match self {
            Self::Waits(wait)
            | Self::Person {
                meanwhile: Some(Meanwhile::Waits(wait)),
                ..
            } => Some(wait),
            _ => None,
        }
    }

    /// Returns why a person is asked.
    pub(super) fn person(&self) -> Option<&str> {
        match self {
            Self::Person { why, .. } => Some(why),
            _ => None,
        }
    }

    /// Returns when to decide anew if nothing happens.
    pub fn wake(&self) -> Option<Timestamp> {
        let again = match self {
            Self::Person { again, .. } => *again,
            _ => None,
        };
        self.wait().map(Wait::until).into_iter().chain(again).min()
    }

    /// Returns what is awaited, for people; `None` for the same as on a node without
    /// remediation.
    pub fn awaits(&self) -> Option<String> {
        match self {
            Self::Recovery(text) => text.clone(),
            Self::Waits(Wait { what, .. }) | Self::Others(what) => Some(what.clone()),
            Self::Person { why, meanwhile, .. } => Some(match meanwhile {
                Some(Meanwhile::Waits(Wait { what, .. }) | Meanwhile::Others(what)) => {
                    format!("a person: {why}; beside that, {what}")
                }
                None => format!("a person: {why}"),
            }),
        }
    }
}
