//! Periods when automation, such as a GPU operator, uncordons nodes, and the changes it has
//! undone, as recorded on the node. `fleet/session/uncordon.rs` uses them to decide whether a
//! person or a program has uncordoned a node.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::node::NodeView;

/// Time after a boot during which an uncordon is attributed to automation: it loads the driver
/// and uncordons the node within that time.
pub const AFTER_BOOT: SignedDuration = SignedDuration::from_mins(10);
/// Time after a driver upgrade during which an uncordon is still attributed to automation: the
/// node is uncordoned just before its label reports the end of the upgrade, and both may be
/// observed at once.
pub const AFTER_UPGRADE: SignedDuration = SignedDuration::from_mins(1);

/// Recent reboots and driver upgrades of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machines {
    /// Id of the current boot. Empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub boot: String,
    /// Time when the current boot was first observed. `None` if no other boot was observed
    /// before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub booted: Option<Timestamp>,
    /// True while the driver is upgraded.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub upgrading: bool,
    /// Time when the end of an upgrade was last observed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgraded: Option<Timestamp>,
}

/// Changes of a session that automation has undone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Undone {
    /// Recent times when a session restored its changes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub put_back: Vec<Timestamp>,
    /// Time when the changes were found undone. `None` while they are in effect.
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
    /// Returns whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

// === impl Machines ===

impl Machines {
    /// Records a boot and the progress of a driver upgrade, as observed on `node` at `now`.
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

    /// Limits all times to `now`, after the clock was set back.
    pub fn clock_put_back(&mut self, now: Timestamp) {
        for at in [&mut self.booted, &mut self.upgraded] {
            *at = at.map(|at| at.min(now));
        }
    }

    /// Returns which automation may have uncordoned `node`, as a clause for people. `None` if
    /// none was active.
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

/// Returns the state of a running driver upgrade.
fn upgrade_of(node: &NodeView) -> Option<&str> {
    let state = node.labels.get(keys::DRIVER_UPGRADE_STATE)?.as_str();
    (!keys::DRIVER_UPGRADE_ENDED.contains(&state)).then_some(state)
}
