//! Reports XIDs from the driver, if no monitor reads them in the kernel log.

use contract::{Entity, HealthEvent, keys};
use diagnosis::decode::{Finding, Mig, XidLine};
use diagnosis::gpu::checks::GpuNames;
use diagnosis::gpu::{Gpu, GpuEvent, GpuEventKind, Readings, RecoveryAction};
use host::kernel_log::RecordRef;
use jiff::{SignedDuration, Timestamp};

use super::{GpuMonitor, event};
use crate::kernel_log::event::{Context, of};

/// Time without an XID after which a GPU's XIDs are over, if the driver also requests no
/// action: an XID without an effect by then has none.
pub(super) const CALM: SignedDuration = SignedDuration::from_mins(10);

/// XID that reports the driver's requested action. The action has a check of its own, and the
/// event does not contain it.
const RECOVERY_XID: u32 = 154;

impl GpuMonitor {
    /// Reports an XID as the kernel log monitor would, had it read the line.
    pub(super) fn report_xid(&mut self, event: &GpuEvent) {
        let Some(finding) = self.finding(event) else {
            return;
        };
        self.begin_boot();
        let now = self.reporter.now();
        let gpu = self.gpu_of(event);
        let names = gpu.map(GpuNames::from);
        for mut event in self.events_of(&finding, now) {
            let blank = self.reporter.event(&event.check_name, keys::COMPONENT_GPU);
            event.agent = blank.agent;
            event.metadata.extend(blank.metadata);
            let driver_version = self.inventory.driver_version.as_deref();
            event::add_names(&mut event, names.as_ref(), driver_version);
            event
                .entities_impacted
                .extend(names.as_ref().map(|gpu| Entity {
                    entity_type: keys::ENTITY_GPU.to_owned(),
                    entity_value: gpu.index.to_string(),
                }));
            self.report(event);
        }
        if let (Some(uuid), true) = (&event.uuid, finding.fatal) {
            self.reporter.memory_mut().xids.insert(uuid.clone(), now);
        }
    }

    /// Returns the catalogue's finding of an XID; `None` for another event.
    fn finding(&mut self, event: &GpuEvent) -> Option<Finding> {
        let GpuEventKind::Xid {
            code,
            gpu_instance,
            compute_instance,
        } = event.kind
        else {
            return None;
        };
        if code == RECOVERY_XID {
            return None;
        }
        let pci = self.gpu_of(event).map(|gpu| gpu.pci.clone());
        let line = XidLine {
            pci: pci.as_deref().unwrap_or_default(),
            mig: gpu_instance.map(|gpu_instance| Mig {
                gpu_instance,
                compute_instance,
            }),
            code,
            pid: None,
            process: None,
            detail: "",
            message: "",
        };
        let mut finding = self.decoder.xid(&line, self.reporter.now());
        finding.pci = finding.pci.filter(|pci| !pci.is_empty());
        finding.gpu_uuid.clone_from(&event.uuid);
        Some(finding)
    }

    fn gpu_of(&self, event: &GpuEvent) -> Option<&Gpu> {
        let uuid = event.uuid.as_ref()?;
        self.inventory.gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }

    fn events_of(&self, finding: &Finding, at: Timestamp) -> Vec<HealthEvent> {
        let code = finding.code().unwrap_or_default();
        let text = format!("XID {code} reported by the driver: {}", finding.meaning);
        let record = RecordRef {
            wall: Some(at),
            raw_text: text.as_bytes(),
            ..RecordRef::default()
        };
        of(&Context {
            finding,
            record: &record.to_record(),
            at,
            machine: None,
            node_name: self.reporter.node_name(),
            earlier_in_boot: false,
            place: None,
            job: None,
        })
    }

    /// Closes the XIDs of GPUs if the driver requests no action, and no other XID has occurred
    /// for a while. Time alone closes none.
    pub(super) fn end_xids(&mut self, readings: &[Readings]) {
        let now = self.reporter.now();
        let xids = &self.reporter.memory().xids;
        let is_over = |gpu: &&Gpu| {
            let last = xids.get(&gpu.uuid);
            let is_calm = last.is_some_and(|last| now.duration_since(*last) >= CALM);
            let read = readings.iter().find(|read| read.uuid == gpu.uuid);
            is_calm && read.is_some_and(needs_no_action)
        };
        let gpus = self.inventory.gpus.iter().filter(is_over);
        let over: Vec<Gpu> = gpus.cloned().collect();
        for gpu in over {
            let blank = self.reporter.event(keys::CHECK_XID, keys::COMPONENT_GPU);
            let message = "No further XID, and the driver requests no action";
            self.report(event::recovery(&gpu, message, blank));
            self.reporter.memory_mut().xids.remove(&gpu.uuid);
        }
    }
}

/// Returns true if the driver requests no action for a GPU and its partitions.
pub(super) fn needs_no_action(readings: &Readings) -> bool {
    // A recovery of the IMEX domain is no action on this GPU.
    let is_nothing = |action: RecoveryAction| {
        matches!(
            action,
            RecoveryAction::None | RecoveryAction::RecoverImexDomain
        )
    };
    let mut partitions = readings.mig_recovery_actions.iter();
    readings.recovery_action.is_some_and(is_nothing)
        && partitions.all(|(_, action)| is_nothing(*action))
}
