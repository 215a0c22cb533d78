//! Power cycles through a machine's management controller (BMC) by Redfish (DMTF DSP0266):
//! location of the machine, choice of the reset type, and detection of a reset.
//!
//! Redfish has no ids of operations. Before a signal is sent, the node therefore
//! [records](PowerCycleRecord) what distinguishes a later reset: the node's boot, the time of the
//! machine's last reset, and the last boot in the BMC's log (SEL). All these times are from the
//! BMC's clock, and compared only with each other.

mod config;
mod log;
mod record;

use serde_json::Value;

pub use config::{RedfishConfig, is_path};
pub use log::{Log, entries_of, log_of};
pub use record::{PowerCycleRecord, SignalEffect};

/// Collection of the machines of a BMC.
pub const SYSTEMS: &str = "/redfish/v1/Systems";
/// Reset types that stop a running machine and start it again, best first. A power cycle also
/// cuts the power of its devices.
const RESTARTS: [&str; 2] = ["PowerCycle", "ForceRestart"];
/// Reset types that start a machine that is off.
const STARTS: [&str; 2] = ["On", "ForceOn"];
/// Longest accepted time from a BMC (bytes), which is recorded on the node.
const LONGEST_TIME: usize = 64;
/// Action that resets a machine.
const RESET: &str = "/Actions/#ComputerSystem.Reset";

/// A machine as described by its BMC (`ComputerSystem`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputerSystem {
    /// Path that accepts resets.
    pub target: String,
    /// Path of the action's description, if the machine does not list reset types itself.
    pub action_info: Option<String>,
    /// Time of the last reset, as written by the BMC. `None` if the BMC does not report it.
    pub last_reset: Option<String>,
    /// Path of the machine's logs.
    pub logs: Option<String>,
    off: bool,
    allowed: Option<Vec<String>>,
}

// === impl ComputerSystem ===

impl ComputerSystem {
    /// Reads a machine. The error names the missing part.
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

    /// Returns whether the reset types have to be read from [`Self::action_info`].
    pub fn says_no_types(&self) -> bool {
        self.allowed.is_none()
    }

    /// Sets the reset types from the description of the action (`ActionInfo`).
    pub fn learn_types(&mut self, action_info: &Value) {
        let parameters = action_info["Parameters"].as_array();
        let reset = (parameters.into_iter().flatten()).find(|one| one["Name"] == "ResetType");
        self.allowed = reset.and_then(|one| texts(&one["AllowableValues"]));
    }

    /// Returns the reset type to request. The error lists the types that the machine accepts. A
    /// machine that lists none is sent a `ForceRestart`, which nearly all accept.
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
