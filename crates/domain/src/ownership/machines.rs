//! The times of machines that undo a session, and what they have undone, as the node says them. `session/uncordon.rs`
//! judges by it whose an uncordon was.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The times of machines on a node, as far as they were seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machines {
    /// The id of the boot; empty where it is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub boot: String,
    /// The time at which that was first seen in the place of another; `None`: it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub booted: Option<Timestamp>,
    /// True while the driver is upgraded.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub upgrading: bool,
    /// The time at which an upgrade was last seen to be over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgraded: Option<Timestamp>,
}

/// What machines have undone of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Undone {
    /// The times at which it was put back, of late.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub put_back: Vec<Timestamp>,
    /// Since when it is gone; `None`: it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

// === impl Machines ===

impl Machines {
    /// Returns whether nothing is known.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

// === impl Undone ===

impl Undone {
    /// Returns whether nothing is remembered.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
