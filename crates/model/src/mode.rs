//! The mode of gpuwarden: what it is allowed to do in the cluster.

use serde::{Deserialize, Serialize};

/// Operating mode. The serialised names are part of the JSON API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Records events and shows them, without making decisions.
    Observe,
    /// Makes decisions and shows them, without writing to the cluster.
    DryRun,
    /// Makes decisions and writes them to the cluster: takes nodes out of service and returns
    /// them.
    #[serde(rename = "quarantine")]
    Act,
}

// === impl Mode ===

impl Mode {
    /// Returns whether decisions are made.
    pub fn decides(self) -> bool {
        self != Self::Observe
    }

    /// Returns whether decisions are written to the cluster.
    pub fn writes(self) -> bool {
        self == Self::Act
    }

    /// Returns the name of the mode, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::DryRun => "dry-run",
            Self::Act => "quarantine",
        }
    }
}
