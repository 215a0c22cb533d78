//! What an uncordon of a node in quarantine means that gpuwarden has not made.

use std::fmt;

use serde::Deserialize;

/// The meaning of an uncordon of a node that is out of service, and of the removal of a taint of ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Uncordon {
    /// A person gives the node back, whenever it is.
    Releases,
    /// The same, but at the times at which machines uncordon nodes; then it is undone.
    #[default]
    NotDuringRepair,
    /// It is undone, whenever it is.
    Never,
}

// === impl Uncordon ===

impl fmt::Display for Uncordon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Releases => "releases",
            Self::NotDuringRepair => "not-during-repair",
            Self::Never => "never",
        })
    }
}
