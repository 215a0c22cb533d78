//! The times of machines that undo a session, and what they have undone, as the node says them. `session/uncordon.rs`
//! judges by it whose an uncordon was.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::node::NodeView;

/// Time after a boot in which an uncordon is a machine's: a driver is loaded by then, and the node
/// uncordoned that it was loaded on.
pub const AFTER_BOOT: SignedDuration = SignedDuration::from_mins(10);
/// Time after the upgrade of a driver in which an uncordon is a machine's still: the node is uncordoned just before
/// its label says that the upgrade is over, and both may be seen at once.
pub const AFTER_UPGRADE: SignedDuration = SignedDuration::from_mins(1);

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
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

// === impl Undone ===

impl Undone {
    /// Returns whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

// === impl Machines ===

impl Machines {
    /// Records a boot and the progress of a driver upgrade, as `node` shows them at `now`.
    pub fn take_in(&mut self, node: &NodeView, now: Timestamp) {
        let boot = &node.machine.boot_id;
        if !boot.is_empty() && self.boot != *boot {
            if !self.boot.is_empty() {
                self.booted = Some(now);
            }
            self.boot.clone_from(boot);
        }
        let upgrading = upgrade_of(node).is_some();
        if self.upgrading && !upgrading {
            self.upgraded = Some(now);
        }
        self.upgrading = upgrading;
    }

    /// Takes in that the clock was put back to `now`.
    pub fn clock_put_back(&mut self, now: Timestamp) {
        for at in [&mut self.booted, &mut self.upgraded] {
            *at = at.map(|at| at.min(now));
        }
    }

    /// Returns which time of machines it is on `node`, for people; `None`: none.
    pub fn at_work(&self, node: &NodeView, now: Timestamp) -> Option<String> {
        let within =
            |at: Option<Timestamp>, time| at.is_some_and(|at| now.duration_since(at) < time);
        if within(self.booted, AFTER_BOOT) {
            return Some(" within ten minutes of its boot".to_owned());
        }
        if let Some(state) = upgrade_of(node) {
            let label = keys::DRIVER_UPGRADE_STATE;
            return Some(format!(
                " while its GPU driver is upgraded ({label}={state})"
            ));
        }
        let upgraded = within(self.upgraded, AFTER_UPGRADE);
        upgraded.then(|| " at the end of an upgrade of its GPU driver".to_owned())
    }
}

/// Returns how far an upgrade of the driver is that is under way.
fn upgrade_of(node: &NodeView) -> Option<&str> {
    let state = node.labels.get(keys::DRIVER_UPGRADE_STATE)?.as_str();
    (!keys::DRIVER_UPGRADE_ENDED.contains(&state)).then_some(state)
}
