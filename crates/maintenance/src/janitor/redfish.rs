//! Power cycles by a machine's management controller (BMC), which speaks Redfish (DMTF DSP0266): where that
//! of a node is, which reset it is asked for, and whether one has happened.
//!
//! Redfish knows no operations. So before a signal is sent it is [recorded](Record) at the node, with what
//! tells a later reset apart: the node's boot, the time of the machine's last reset, and the last boot in the
//! log of the BMC (SEL). All times are those of the BMC, and only compared with one another.

mod config;
mod log;
mod record;

use serde_json::Value;

pub use config::{RedfishConfig, is_path};
pub use log::{Log, entries_of, log_of};
pub use record::{Record, Verdict};

/// The collection of the machines of a BMC.
pub const SYSTEMS: &str = "/redfish/v1/Systems";
/// The reset types that end what is left of a running machine and start it anew, the best first. A power
/// cycle also takes the power off its devices.
const RESTARTS: [&str; 2] = ["PowerCycle", "ForceRestart"];
/// The reset types that start a machine that is off.
const STARTS: [&str; 2] = ["On", "ForceOn"];
/// Longest time that is taken for one (bytes), which is noted at the node.
const LONGEST_TIME: usize = 64;
/// The action by which a machine is reset.
const RESET: &str = "/Actions/#ComputerSystem.Reset";

/// A machine as its BMC describes it (`ComputerSystem`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The path that takes a reset.
    pub target: String,
    /// The path of the description of what it takes, where the machine itself does not say so.
    pub action_info: Option<String>,
    /// The time of its last reset, in the BMC's words; `None`: the BMC does not say.
    pub last_reset: Option<String>,
    /// The path of its logs.
    pub logs: Option<String>,
    off: bool,
    allowed: Option<Vec<String>>,
}

// === impl Machine ===

impl Machine {
    /// Reads a machine. The error says what it lacks.
    pub fn read(object: &Value) -> Result<Self, String> {
        let text = |at: &str| {
            object
                .pointer(at)
                .and_then(Value::as_str)
                .map(str::to_owned)
        };
        let action = object.pointer(RESET);
        let target = action.and_then(|action| action["target"].as_str());
        let target = target.ok_or("the machine has no action #ComputerSystem.Reset")?;
        Ok(Self {
            target: target.to_owned(),
            action_info: text(&format!("{RESET}/@Redfish.ActionInfo")),
            last_reset: text("/LastResetTime").filter(|time| time.len() <= LONGEST_TIME),
            logs: text("/LogServices/@odata.id"),
            off: object["PowerState"] == "Off",
            allowed: action.and_then(|action| texts(&action["ResetType@Redfish.AllowableValues"])),
        })
    }

    /// Returns whether what resets it takes has to be looked up in [`Self::action_info`].
    pub fn says_no_types(&self) -> bool {
        self.allowed.is_none()
    }

    /// Takes in the description of the action (`ActionInfo`).
    pub fn learn_types(&mut self, action_info: &Value) {
        let parameters = action_info["Parameters"].as_array();
        let reset = (parameters.into_iter().flatten()).find(|one| one["Name"] == "ResetType");
        self.allowed = reset.and_then(|one| texts(&one["AllowableValues"]));
    }

    /// Returns the type of the reset to ask for. The error says what the machine takes instead. One that says
    /// nothing is asked for a `ForceRestart`, which nearly all take.
    pub fn reset_type(&self) -> Result<&'static str, String> {
        let wanted = if self.off { STARTS } else { RESTARTS };
        let Some(allowed) = &self.allowed else {
            return Ok(if self.off { STARTS[0] } else { RESTARTS[1] });
        };
        let taken = |one: &&str| allowed.iter().any(|allowed| allowed == one);
        wanted.into_iter().find(taken).ok_or_else(|| {
            format!(
                "the machine takes none of the resets {}, but {}",
                wanted.join(", "),
                allowed.join(", ")
            )
        })
    }
}

/// Returns the paths of the members of a collection.
pub fn members_of(collection: &Value) -> Vec<String> {
    let members = collection["Members"].as_array();
    let paths = members.into_iter().flatten();
    paths
        .filter_map(|one| one["@odata.id"].as_str().map(str::to_owned))
        .collect()
}

fn texts(list: &Value) -> Option<Vec<String>> {
    let texts = list.as_array()?.iter();
    Some(
        texts
            .filter_map(|one| one.as_str().map(str::to_owned))
            .collect(),
    )
}

#[cfg(test)]
mod tests;
