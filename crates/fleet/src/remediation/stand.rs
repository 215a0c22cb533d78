//! How the repair of a node stands, and what ends that.
//!
//! A [`Stand`] that waits has a time at which it is decided anew, or names somebody who was asked: so nothing
//! waits for ever of which nobody knows.

use jiff::{SignedDuration, Timestamp};

use model::time::later;

/// How the repair of a node stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stand {
    /// No repair is asked for: the recovery of the faults, or a person's release, ends it, as of a node that is
    /// quarantined or drained and not repaired. The text is for people, where there is more to say.
    Rests(Option<String>),
    /// An attempt is under way, or something passes.
    Waits(Wait),
    /// Somebody else is at work, who has limits of their own or was asked by a person.
    Others(String),
    /// A person is asked, beside what goes on by itself.
    Person {
        /// The reason.
        why: String,
        /// What goes on by itself.
        beside: Option<Beside>,
        /// The time at which another attempt may be made.
        again: Option<Timestamp>,
    },
}

/// What goes on by itself while a person is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Something is waited for.
    Waits(Wait),
    /// Somebody else is at work.
    Others(String),
}

/// Something that is waited for, until a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    what: String,
    until: Timestamp,
}

/// The reason why nothing new begins on a node now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Pods of the node are to leave first. The drain asks a person itself where they do not.
    Drain,
    /// Somebody has it in their hands, or has said so, without an end; or its quarantine is to be put back first.
    Others(String),
    /// It ends by itself.
    Until(Timestamp, String),
}

// === impl Wait ===

impl Wait {
    /// Returns what is waited for until a time; one that is over is looked at a second later.
    pub(super) fn new(what: String, until: Timestamp, now: Timestamp) -> Self {
        let soon = later(now, SignedDuration::from_secs(1));
        let until = if until > now { until } else { soon };
        Self { what, until }
    }

    pub(super) fn until(&self) -> Timestamp {
        self.until
    }

    /// Returns the one that is over first.
    pub(super) fn or_sooner(self, before: Option<Self>) -> Self {
        match before {
            Some(before) if before.until <= self.until => before,
            _ => self,
        }
    }
}

// === impl Hold ===

impl Hold {
    pub(super) fn stand(&self, now: Timestamp) -> Stand {
        match self {
            Self::Drain => Stand::Others("its pods to leave".to_owned()),
            Self::Others(what) => Stand::Others(what.clone()),
            Self::Until(until, what) => Stand::Waits(Wait::new(what.clone(), *until, now)),
        }
    }
}

// === impl Stand ===

impl Stand {
    /// Returns it with a person asked beside it.
    pub(super) fn asking(self, why: String, again: Option<Timestamp>) -> Self {
        let beside = match self {
            Self::Rests(_) => None,
            Self::Waits(wait) => Some(Beside::Waits(wait)),
            Self::Others(what) => Some(Beside::Others(what)),
            Self::Person { beside, .. } => beside,
        };
        Self::Person { why, beside, again }
    }

    /// Returns what is waited for until a time.
    pub(super) fn wait(&self) -> Option<&Wait> {
        match self {
            Self::Waits(wait)
            | Self::Person {
                beside: Some(Beside::Waits(wait)),
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

    /// Returns when it is to be decided anew even if nothing happens.
    pub fn wake(&self) -> Option<Timestamp> {
        let again = match self {
            Self::Person { again, .. } => *again,
            _ => None,
        };
        self.wait().map(Wait::until).into_iter().chain(again).min()
    }

    /// Returns what is awaited, for people; `None`: what a node without a repair awaits.
    pub fn awaits(&self) -> Option<String> {
        match self {
            Self::Rests(text) => text.clone(),
            Self::Waits(Wait { what, .. }) | Self::Others(what) => Some(what.clone()),
            Self::Person { why, beside, .. } => Some(match beside {
                Some(Beside::Waits(Wait { what, .. }) | Beside::Others(what)) => {
                    format!("a person: {why}; beside that, {what}")
                }
                None => format!("a person: {why}"),
            }),
        }
    }
}
