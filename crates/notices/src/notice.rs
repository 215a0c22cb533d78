//! A maintenance as a source tells it now.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Effect of a maintenance on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The machine restarts.
    Reboot,
    /// The virtual machine moves to another host, and keeps its memory.
    Migration,
    /// The machine loses its network for a while, and keeps running.
    Network,
    /// The machine, or hardware of its host, is replaced.
    Replacement,
    /// The machine ends.
    Stop,
}

/// Progress of a maintenance, as read from the provider's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The maintenance has not begun.
    Scheduled,
    /// The maintenance has begun.
    Ongoing,
    /// The maintenance is over.
    Completed,
    /// The maintenance does not take place.
    Cancelled,
}

/// A maintenance of one node, as a source tells it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Name of the node.
    pub node: String,
    /// The provider's id of the maintenance. Empty if the source has none; then it tells at most
    /// one maintenance of a node at a time.
    pub event: String,
    /// The provider: `gcp`, `aws`, `azure` and so on.
    pub provider: String,
    /// Type and id of the resource, such as `gce_instance` and the instance's number.
    pub resource: (String, String),
    /// Effect on the node.
    pub kind: Kind,
    /// Progress, as read from `word`.
    pub phase: Phase,
    /// The provider's own word for its status, unchanged.
    pub word: String,
    /// Scheduled begin.
    pub start: Option<Timestamp>,
    /// Scheduled end.
    pub end: Option<Timestamp>,
    /// True if the provider had no time to announce the maintenance.
    pub emergency: bool,
    /// Time of the provider's statement. `None` if the source tells what holds now.
    pub updated: Option<Timestamp>,
}

/// Result of reading a source once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The notices.
    pub notices: Vec<Notice>,
    /// True if these are all notices of the source; false for a change.
    pub complete: bool,
    /// Nodes about which a complete reading says nothing: theirs cannot be understood now.
    pub unseen: BTreeSet<String>,
}

// === impl Kind ===

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Reboot,
        Self::Migration,
        Self::Network,
        Self::Replacement,
        Self::Stop,
    ];

    /// Returns whether the machine has another boot id after it, if it is still the same machine.
    pub(crate) fn boots(self) -> bool {
        !matches!(self, Self::Migration | Self::Network)
    }

    /// Returns the name, as in metadata and in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reboot => "reboot",
            Self::Migration => "migration",
            Self::Network => "network",
            Self::Replacement => "replacement",
            Self::Stop => "stop",
        }
    }
}

// === impl Phase ===

impl Phase {
    /// All phases.
    pub const ALL: [Self; 4] = [
        Self::Scheduled,
        Self::Ongoing,
        Self::Completed,
        Self::Cancelled,
    ];

    /// Returns the name, as an agent tells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Ongoing => "ongoing",
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Returns whether the maintenance is still to come, or going on.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Scheduled | Self::Ongoing)
    }
}
