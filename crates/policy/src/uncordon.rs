//! Setting for uncordons of quarantined nodes that gpuwarden did not make.

use std::fmt;

use serde::Deserialize;

/// Effect of uncordoning a node out of service, or of removing a taint of the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Uncordon {
    /// The node is released, whoever uncordoned it.
    Releases,
    /// The node is released, except at times when automation uncordons nodes. The uncordon is
    /// then undone.
    #[default]
    NotDuringRepair,
    /// The uncordon is always undone.
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
