//! Sets the condition `NVMLReady` of each GPU in the Device API, from the driver's reports.
//!
//! A critical XID makes the condition false. It becomes true again when a GPU that was lost
//! answers, when the machine has rebooted, when the driver requests no action and no XID has
//! occurred for a while, or when a person ends the fault of the XID; never by time alone, and
//! never by another XID.

use contract::keys;
use devices::board::{Own, Said};
use devices::faults::{NodeFaults, concerns};
use diagnosis::gpu::{GpuEvent, GpuEventKind, Inventory, Readings};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::GpuMonitor;
use super::xid::{CALM, needs_no_action};

/// XIDs caused by programs rather than the GPU, as the provider's design lists them.
const OF_PROGRAMS: [u32; 6] = [13, 31, 43, 45, 68, 109];

/// Last critical XID of a GPU that is not ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Critical {
    code: u32,
    at: Timestamp,
    /// Event store with an open fault for an XID of the GPU. Another store may not have the
    /// fault yet, or have lost it, which does not mean that a person closed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    open_in: Option<String>,
}

impl GpuMonitor {
    /// Sends the inventory to the Device API, and keeps GPUs not ready that were so before.
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
            self.set_condition(uuid, critical.condition());
        }
    }

    /// Makes the GPU of a critical XID not ready, or all GPUs if the driver does not name one.
    pub(super) fn record_critical(&mut self, event: &GpuEvent) {
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
            self.set_condition(&uuid, critical.condition());
            self.reporter.memory_mut().not_ready.insert(uuid, critical);
        }
    }

    /// Makes GPUs ready again if the driver requests no action, a while after their last
    /// critical XID.
    pub(super) fn end_critical(&mut self, readings: &[Readings]) {
        let now = self.reporter.now();
        let is_over = |uuid: &str, critical: &Critical| {
            let read = readings.iter().find(|read| read.uuid == uuid);
            now.duration_since(critical.at) >= CALM && read.is_some_and(needs_no_action)
        };
        let over: Vec<String> = (self.reporter.memory().not_ready.iter())
            .filter(|(uuid, critical)| is_over(uuid, critical))
            .map(|(uuid, _)| uuid.clone())
            .collect();
        for uuid in over {
            let message = "No further XID, and the driver requests no action";
            self.set_condition(&uuid, Said::well("Recovered", message));
            self.reporter.memory_mut().not_ready.remove(&uuid);
        }
    }

    /// Makes GPUs ready again whose open faults of XIDs have ended: they were closed, or
    /// dismissed by a person who has released the node.
    pub(super) fn end_dismissed(&mut self) {
        if self.reporter.memory().not_ready.is_empty() {
            self.faults.mark_unchanged();
            return;
        }
        let NodeFaults::Told(known) = self.faults.borrow_and_update().clone() else {
            return;
        };
        let gpus = self.devices.gpus();
        let (mut opened, mut over) = (Vec::new(), Vec::new());
        for (uuid, critical) in &self.reporter.memory().not_ready {
            let mut gpus = gpus.iter();
            let Some(gpu) = gpus.find(|gpu| gpu.name.eq_ignore_ascii_case(uuid)) else {
                continue;
            };
            let mut faults = known.faults.iter();
            let is_open = faults.any(|it| it.check == keys::CHECK_XID && concerns(it, gpu));
            let was_open = critical.open_in.as_ref() == Some(&known.store_id);
            match (was_open, is_open) {
                (false, true) => opened.push(uuid.clone()),
                (true, false) => over.push(uuid.clone()),
                (true, true) | (false, false) => {}
            }
        }
        for uuid in opened {
            if let Some(critical) = self.reporter.memory_mut().not_ready.get_mut(&uuid) {
                critical.open_in = Some(known.store_id.clone());
            }
        }
        for uuid in over {
            let message = "The fault of its XID was closed or dismissed";
            self.set_condition(&uuid, Said::well("Recovered", message));
            self.reporter.memory_mut().not_ready.remove(&uuid);
        }
    }

    fn set_condition(&self, uuid: &str, condition: Said) {
        let Err(error) = self.devices.set_condition(Own::Nvml, uuid, condition) else {
            return;
        };
        // Each event of a GPU that is gone would log it again.
        if let Some(not_logged_before) = self.refusals.now() {
            tracing::warn!(
                err = %error, not_logged_before,
                "the Device API refuses the condition NVMLReady"
            );
        }
    }
}

// === impl Critical ===

impl Critical {
    fn condition(&self) -> Said {
        let code = self.code;
        Said::bad("XidError", format!("Critical XID error {code} detected"))
    }
}
