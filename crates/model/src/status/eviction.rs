//! `userpodsevictionstatus` in the record of each event: the progress of the drain of its node.
//! The values are NVSentinel's.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::NodeQuarantined;
use crate::event::floor_char_boundary;

/// Longest message, in bytes.
const MESSAGE_BYTES: usize = 1024;

/// A value of `userpodsevictionstatus.status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EvictionStatus {
    /// No pod was asked to leave.
    NotStarted,
    /// Pods are leaving the node.
    InProgress,
    /// The drain makes no progress, and a person was asked. It may recover.
    Failed,
    /// All pods that were to leave have left.
    Succeeded,
    /// There was nothing to do for this event.
    AlreadyDrained,
    /// The session has ended before its drain.
    Cancelled,
}

/// Progress of the drain of a node, for the record of an event. Displayed for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Eviction {
    /// Status of the drain.
    pub status: EvictionStatus,
    /// Reason, for people; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Reason why all pods of an out-of-service node stay. Displayed for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Skip {
    /// Drains are switched off.
    Off,
    /// NVSentinel has begun the session.
    Nvsentinel,
    /// The senders of all its events ask for it.
    Override,
    /// The policy keeps them, by these routes.
    Route(String),
    /// A person holds the drain back for a while, with this message.
    Veto(String),
    /// Routes of the policy, with this title, wait for a person's approval.
    Approval(String),
}

// === impl EvictionStatus ===

impl EvictionStatus {
    /// Returns the value in the record.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotStarted => "NotStarted",
            Self::InProgress => "InProgress",
            Self::Failed => "Failed",
            Self::Succeeded => "Succeeded",
            Self::AlreadyDrained => "AlreadyDrained",
            Self::Cancelled => "Cancelled",
        }
    }

    /// Returns whether a record with this status keeps it.
    pub fn is_final(self) -> bool {
        matches!(
            self,
            Self::Succeeded | Self::AlreadyDrained | Self::Cancelled
        )
    }
}

// === impl Eviction ===

impl Eviction {
    /// Creates a status with a message, which is truncated if too long.
    pub fn new(status: EvictionStatus, message: impl Into<String>) -> Self {
        let mut message = message.into();
        message.truncate(floor_char_boundary(&message, MESSAGE_BYTES));
        Self { status, message }
    }

    /// Returns the status of events on a node that is not drained for this reason.
    pub fn skipped(skip: &Skip) -> Self {
        let status = match skip {
            // The policy may change.
            Skip::Off | Skip::Nvsentinel | Skip::Route(_) | Skip::Veto(_) | Skip::Approval(_) => {
                EvictionStatus::NotStarted
            }
            Skip::Override => EvictionStatus::AlreadyDrained,
        };
        Self::new(status, skip.to_string())
    }

    /// Returns the time of the end of the drain, if this is its status since `at`. NVSentinel
    /// writes a time for these two.
    pub fn finished_at(&self, at: Timestamp) -> Option<Timestamp> {
        let done = [EvictionStatus::Succeeded, EvictionStatus::AlreadyDrained];
        done.contains(&self.status).then_some(at)
    }

    /// Returns whether no pod was asked to leave, for a reason.
    pub fn is_skipped(&self) -> bool {
        let none = [EvictionStatus::NotStarted, EvictionStatus::AlreadyDrained];
        none.contains(&self.status) && !self.message.is_empty()
    }

    /// Returns the status for a session that has ended.
    pub fn cancelled() -> Self {
        let why = "the session has ended before the drain";
        Self::new(EvictionStatus::Cancelled, why)
    }

    /// Returns the status of a recovery, given its `nodequarantined`.
    pub fn of_recovery(status: NodeQuarantined) -> Self {
        match status {
            NodeQuarantined::UnQuarantined => {
                Self::new(EvictionStatus::Succeeded, "the node is given back")
            }
            _ => Self::new(EvictionStatus::AlreadyDrained, "a recovery drains nothing"),
        }
    }

    /// Returns the status of an event that arrives during this one. `skips` is true if its
    /// sender asks that pods stay.
    #[must_use]
    pub fn of_newcomer(&self, skips: bool) -> Self {
        match self.status {
            _ if skips => Self::skipped(&Skip::Override),
            EvictionStatus::Succeeded => Self::new(
                EvictionStatus::AlreadyDrained,
                "the node was drained before",
            ),
            _ => self.clone(),
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, message } = self;
        f.write_str(status.name())?;
        if message.is_empty() {
            Ok(())
        } else {
            write!(f, ": {message}")
        }
    }
}

// === impl Skip ===

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "pods stay: gpuwarden runs without --drain",
            Self::Nvsentinel => "pods stay: NVSentinel has begun the session",
            Self::Override => "skipped by override: the sender asks that pods stay",
            Self::Route(routes) => return write!(f, "skipped by {routes}: pods stay"),
            Self::Veto(veto) => return write!(f, "held back by {veto}"),
            Self::Approval(routes) => {
                return write!(f, "held back by {routes}: it waits for an approval");
            }
        })
    }
}
