//! The mode of gpuwarden: the one word for what it may do in the cluster, in settings, decisions
//! and what is shown.

use serde::{Deserialize, Serialize};

/// The mode, which says what gpuwarden may do in the cluster. Serialised names are part of the JSON API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Watches only: records and shows, and decides nothing.
    Observe,
    /// Decides and shows what it would do, and writes nothing.
    DryRun,
    /// Writes in the cluster what it decides: takes nodes out of service and gives them back.
    #[serde(rename = "quarantine")]
    Act,
}

// === impl Mode ===

impl Mode {
    /// Returns whether anything is decided.
    pub fn decides(self) -> bool {
        self != Self::Observe
    }

    /// Returns whether what is decided is written in the cluster.
    pub fn writes(self) -> bool {
        self == Self::Act
    }

    /// Returns the mode's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::DryRun => "dry-run",
            Self::Act => "quarantine",
        }
    }
}
