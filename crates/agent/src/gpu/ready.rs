//! The condition `NVMLReady` of each GPU in the Device API: what the driver itself says of it.
//!
//! A critical XID takes it away. It comes back when a GPU that was lost answers again, when the
//! machine has booted anew, when the driver asks for nothing and no XID has come for a while, or by
//! the word of a person, which ends the fault of the XID; never by time alone, and never by another
//! XID.

use contract::keys;
use devices::board::{Own, Said};
use devices::faults::{NodeFaults, concerns};
use diagnosis::gpu::{GpuEvent, GpuEventKind, Inventory, Readings};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::GpuMonitor;
use super::xid::{CALM, asks_for_nothing};

/// XIDs that tell of a program's fault and not of the GPU's, as the provider's design lists them.
const OF_PROGRAMS: [u32; 6] = [13, 31, 43, 45, 68, 109];

/// The last critical XID of a GPU that is not ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Critical {
    code: u32,
    at: Timestamp,
    /// The event store in which a fault of an XID of the GPU was open since. Another store may not
    /// have it yet, or have lost it, which is nobody's word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    open_in: Option<String>,
}

impl GpuMonitor {
    /// Shows which GPUs there are, and those that are not ready as before.
    pub(super) fn show_inventory(&mut self, inventory: &Inventory) {
        let answers =
            |inventory: &Inventory, uuid: &str| inventory.gpus.iter().any(|gpu| gpu.uuid == uuid);
        let is_back = |uuid: &String| {
            self.inventory
                .unreadable
                .iter()
                .any(|gpu| gpu.uuid.as_ref() == Some(uuid))
                && answers(inventory, uuid)
        };
        let back: Vec<String> = (self.reporter.memory().not_ready.keys())
            .filter(|uuid| is_back(uuid))
            .cloned()
            .collect();
        for uuid in back {
            self.reporter.memory_mut().not_ready.remove(&uuid);
        }
        self.devices.set_inventory(inventory);
        for (uuid, critical) in &self.reporter.memory().not_ready {
            self.say(uuid, critical.said());
        }
    }

    /// Takes away the readiness of a GPU that a critical XID is about; of all GPUs where the driver
    /// does not say which it is.
    pub(super) fn note_critical(&mut self, event: &GpuEvent) {
        let GpuEventKind::Xid { code, .. } = event.kind else {
            return;
        };
        if OF_PROGRAMS.contains(&code) || self.config.ignored_xids.contains(&code) {
            return;
        }
        let at = self.reporter.now();
        let uuids: Vec<String> = match &event.uuid {
            Some(uuid) => vec![uuid.clone()],
            None => self
                .inventory
                .gpus
                .iter()
                .map(|gpu| gpu.uuid.clone())
                .collect(),
        };
        for uuid in uuids {
            let critical = Critical {
                code,
                at,
                open_in: None,
            };
            self.say(&uuid, critical.said());
            self.reporter.memory_mut().not_ready.insert(uuid, critical);
        }
    }

    /// Gives back the readiness of GPUs of which the driver asks for nothing, a while after their
    /// last critical XID.
    pub(super) fn end_critical(&mut self, readings: &[Readings]) {
        let now = self.reporter.now();
        let is_over = |uuid: &str, critical: &Critical| {
            let told = readings.iter().find(|told| told.uuid == uuid);
            now.duration_since(critical.at) >= CALM && told.is_some_and(asks_for_nothing)
        };
        let over: Vec<String> = (self.reporter.memory().not_ready.iter())
            .filter(|(uuid, critical)| is_over(uuid, critical))
            .map(|(uuid, _)| uuid.clone())
            .collect();
        for uuid in over {
            let message = "No further XID, and the driver asks for nothing";
            self.say(&uuid, Said::well("Recovered", message));
            self.reporter.memory_mut().not_ready.remove(&uuid);
        }
    }

    /// Gives back the readiness of GPUs whose faults of XIDs were open and are not any more: they were
    /// closed, or a person who has released the node has dismissed them.
    pub(super) fn end_by_word(&mut self) {
        if self.reporter.memory().not_ready.is_empty() {
            self.faults.mark_unchanged();
            return;
        }
        let NodeFaults::Told(told) = self.faults.borrow_and_update().clone() else {
            return;
        };
        let gpus = self.devices.gpus();
        let (mut opened, mut over) = (Vec::new(), Vec::new());
        for (uuid, critical) in &self.reporter.memory().not_ready {
            let mut gpus = gpus.iter();
            let Some(gpu) = gpus.find(|gpu| gpu.name.eq_ignore_ascii_case(uuid)) else {
                continue;
            };
            let mut faults = told.faults.iter();
            let is_open = faults.any(|it| it.check == keys::CHECK_XID && concerns(it, gpu));
            let was_open = critical.open_in.as_ref() == Some(&told.store_id);
            match (was_open, is_open) {
                (false, true) => opened.push(uuid.clone()),
                (true, false) => over.push(uuid.clone()),
                (true, true) | (false, false) => {}
            }
        }
        for uuid in opened {
            if let Some(critical) = self.reporter.memory_mut().not_ready.get_mut(&uuid) {
                critical.open_in = Some(told.store_id.clone());
            }
        }
        for uuid in over {
            let message = "The fault of its XID was closed or dismissed";
            self.say(&uuid, Said::well("Recovered", message));
            self.reporter.memory_mut().not_ready.remove(&uuid);
        }
    }

    fn say(&self, uuid: &str, said: Said) {
        let Err(error) = self.devices.set_condition(Own::Nvml, uuid, said) else {
            return;
        };
        // Each event of a GPU that is not there would say it anew.
        if let Some(not_logged_before) = self.not_taken.now() {
            tracing::warn!(
                err = %error, not_logged_before,
                "the Device API does not take a condition of NVMLReady"
            );
        }
    }
}

// === impl Critical ===

impl Critical {
    fn said(&self) -> Said {
        let code = self.code;
        Said::bad("XidError", format!("Critical XID error {code} detected"))
    }
}
