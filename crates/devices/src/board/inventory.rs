//! Applies the driver's list of GPUs to the board.
//!
//! A GPU stays on the board when the driver loses it: a GPU that is missing beside others that
//! answer is lost, which is a fault. If none answers, the driver is out of sight, which is not.

use std::collections::BTreeMap;

use contract::device::{ConditionStatus, GpuSpec, MigDevice};
use diagnosis::gpu::{Gpu as Found, Inventory, UnreadableGpu};
use jiff::Timestamp;

use super::limits::MAX_GPUS;
use super::record::{GpuRecord, Registration, SourceCondition};
use super::{Board, Own, key};

/// Reason for a GPU that was enumerated.
const INITIALIZED: &str = "Initialized";
/// Reason for a GPU that the driver has lost.
const LOST: &str = "GPULost";
/// Reason for a lost GPU that has come back.
const RECOVERED: &str = "Recovered";
/// Reason for a GPU that the driver cannot read.
const UNREADABLE: &str = "Unreadable";
/// Reason for GPUs whose driver lists none.
const NO_GPUS: &str = "NoGPUs";

impl Board {
    /// Applies the driver's inventory. Returns the number of GPUs beyond the limit.
    pub fn set_inventory(&mut self, inventory: &Inventory, now: Timestamp) -> usize {
        let mut specs: BTreeMap<String, GpuSpec> = BTreeMap::new();
        for gpu in &inventory.gpus {
            specs.insert(key(&gpu.uuid), spec(gpu));
        }
        let mut left_out = 0;
        for lost in &inventory.unreadable {
            let Some(uuid) = &lost.uuid else { continue };
            // The driver names the GPU although it does not answer.
            left_out += usize::from(
                self.driver_record(uuid, spec_of_unreadable(uuid, lost))
                    .is_none(),
            );
        }
        for (key, spec) in &specs {
            match self.driver_record(&spec.uuid, spec.clone()) {
                Some(record) => answers(record, spec),
                None => left_out += 1,
            }
            self.refresh(key, now);
        }
        let gone: Vec<String> = (self.gpus.iter())
            .filter(|(key, gpu)| {
                !specs.contains_key(*key) && gpu.registrations.contains_key(Own::Nvml.source())
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in gone {
            if let Some(record) = self.gpus.get_mut(&key) {
                does_not_answer(record, inventory);
            }
            self.refresh(&key, now);
        }
        self.left_out = left_out;
        left_out
    }

    /// Returns the record of a GPU that the driver names; `None` beyond the limit.
    fn driver_record(&mut self, uuid: &str, spec: GpuSpec) -> Option<&mut GpuRecord> {
        let known = self
            .gpus
            .get(&key(uuid))
            .is_some_and(GpuRecord::is_of_driver);
        // Providers' GPUs do not count towards the driver's limit.
        let room = || self.gpus.values().filter(|gpu| gpu.is_of_driver()).count() < MAX_GPUS;
        (known || room()).then(|| {
            let new = || GpuRecord::new(uuid.to_owned(), spec);
            let record = self.gpus.entry(key(uuid)).or_insert_with(new);
            record.registration(Own::Nvml.source(), None);
            record
        })
    }
}

/// Records that a GPU answers. A fault that its monitor has reported stays until the monitor
/// reports the end, unless the GPU was lost since: then it has been reset.
fn answers(record: &mut GpuRecord, spec: &GpuSpec) {
    record.spec.clone_from(spec);
    let registration = record.registration(Own::Nvml.source(), None);
    registration.silence = None;
    let condition = registration.conditions.get(Own::Nvml.kind());
    match condition.map(|condition| condition.reason.as_str()) {
        None => nvml(
            registration,
            ConditionStatus::True,
            INITIALIZED,
            "GPU enumerated via NVML",
        ),
        Some(LOST) => nvml(
            registration,
            ConditionStatus::True,
            RECOVERED,
            "The GPU was lost and has come back",
        ),
        Some(_) => {}
    }
}

fn does_not_answer(record: &mut GpuRecord, inventory: &Inventory) {
    let (uuid, pci) = (record.spec.uuid.clone(), record.spec.pci_bus_id.clone());
    let is_it = |one: &&UnreadableGpu| {
        let is = |name: &Option<String>, ours: &str| {
            (name.as_deref()).is_some_and(|name| name.eq_ignore_ascii_case(ours))
        };
        is(&one.uuid, &uuid) || is(&one.pci, &pci)
    };
    let unreadable = inventory.unreadable.iter().find(is_it);
    let registration = record.registration(Own::Nvml.source(), None);
    let lost = match unreadable {
        Some(one) if one.is_lost => Some(format!("NVML: {}", one.error)),
        Some(one) => {
            let message = format!("NVML cannot read it: {}", one.error);
            // The condition does not exist yet if the GPU was never read.
            let kind = Own::Nvml.kind().to_owned();
            let unknown = SourceCondition::unknown(UNREADABLE, message);
            registration
                .conditions
                .entry(kind)
                .or_insert(unknown.clone());
            registration.silence = Some(unknown);
            None
        }
        None if inventory.gpus.is_empty() => {
            let message = "NVML does not list any GPU".to_owned();
            registration.silence = Some(SourceCondition::unknown(NO_GPUS, message));
            None
        }
        None => Some("NVML lists other GPUs but not this one".to_owned()),
    };
    if let Some(message) = lost {
        registration.silence = None;
        nvml(registration, ConditionStatus::False, LOST, &message);
    }
}

fn nvml(registration: &mut Registration, status: ConditionStatus, reason: &str, message: &str) {
    let condition = SourceCondition {
        status,
        reason: reason.to_owned(),
        message: message.to_owned(),
        since: None,
    };
    registration.set(Own::Nvml.kind(), condition);
}

fn spec(gpu: &Found) -> GpuSpec {
    let mig_devices = gpu.mig_devices.iter().map(|mig| MigDevice {
        uuid: mig.uuid.clone(),
        gpu_instance: mig.gpu_instance,
        compute_instance: mig.compute_instance,
        memory_bytes: mig.memory_bytes.unwrap_or_default(),
    });
    GpuSpec {
        uuid: gpu.uuid.clone(),
        index: i32::try_from(gpu.index).unwrap_or(i32::MAX),
        product_name: gpu.product.clone(),
        architecture: gpu.architecture.clone().unwrap_or_default(),
        memory_bytes: gpu.memory_bytes.unwrap_or_default(),
        pci_bus_id: gpu.pci.clone(),
        mig_devices: mig_devices.collect(),
    }
}

fn spec_of_unreadable(uuid: &str, gpu: &UnreadableGpu) -> GpuSpec {
    GpuSpec {
        uuid: uuid.to_owned(),
        index: i32::try_from(gpu.index).unwrap_or(i32::MAX),
        pci_bus_id: gpu.pci.clone().unwrap_or_default(),
        ..GpuSpec::default()
    }
}
