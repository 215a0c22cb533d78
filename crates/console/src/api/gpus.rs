//! GPUs in the form of the JSON API.

use contract::device::{ConditionStatus, Gpu, GpuPhase, GpuStatus};
use contract::json;
use devices::board::READY;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// GPU of this machine, as its Device API describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// UUID of the GPU.
    pub name: String,
    /// Index in the driver.
    pub index: i32,
    /// Product name, such as `NVIDIA H100 80GB HBM3`.
    pub product: String,
    /// Architecture name, such as `Hopper`.
    pub architecture: String,
    /// Size of its memory, in bytes.
    pub memory_bytes: u64,
    /// PCI address, such as `0000:b3:00.0`.
    pub pci: String,
    /// UUIDs of its MIG devices.
    pub mig_devices: Vec<String>,
    /// `Ready`, `NotReady`, `Pending` or `Unknown`.
    pub phase: String,
    /// Conditions in the order of the Device API.
    pub conditions: Vec<GpuConditionView>,
    /// Version of this state; it changes with every update.
    pub resource_version: String,
}

/// Condition of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuConditionView {
    /// Type, such as `Ready`.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Reason for the status, in CamelCase.
    pub reason: String,
    pub message: String,
    /// Time of the last change of `status`.
    pub last_transition_time: Option<Timestamp>,
    /// Source of the condition.
    pub source: String,
}

// === impl GpuView ===

impl GpuView {
    /// Converts a GPU of the Device API.
    pub fn of(gpu: &Gpu) -> Self {
        let spec = gpu.spec.clone().unwrap_or_default();
        let conditions = gpu.status.iter().flat_map(|status| &status.conditions);
        let conditions = conditions.map(|one| GpuConditionView {
            r#type: one.r#type.clone(),
            status: match one.status() {
                ConditionStatus::True => "True",
                ConditionStatus::False => "False",
                ConditionStatus::Unknown | ConditionStatus::Unspecified => "Unknown",
            }
            .to_owned(),
            reason: one.reason.clone(),
            message: one.message.clone(),
            last_transition_time: one.last_transition_time.and_then(json::timestamp),
            source: one.source.clone(),
        });
        Self {
            name: gpu.name.clone(),
            index: spec.index,
            product: spec.product_name,
            architecture: spec.architecture,
            memory_bytes: spec.memory_bytes,
            pci: spec.pci_bus_id,
            mig_devices: spec.mig_devices.into_iter().map(|mig| mig.uuid).collect(),
            phase: match gpu.status.as_ref().map(GpuStatus::phase) {
                Some(GpuPhase::Pending) => "Pending",
                Some(GpuPhase::Ready) => "Ready",
                Some(GpuPhase::NotReady) => "NotReady",
                Some(GpuPhase::Unknown | GpuPhase::Unspecified) | None => "Unknown",
            }
            .to_owned(),
            conditions: conditions.collect(),
            resource_version: gpu.resource_version.clone(),
        }
    }

    /// Returns true if the GPU is known to be bad.
    pub fn is_bad(&self) -> bool {
        self.phase == "NotReady"
    }

    /// Returns the start of the current phase, if known.
    pub fn since(&self) -> Option<Timestamp> {
        let ready = self.conditions.iter().find(|one| one.r#type == READY);
        ready.and_then(|ready| ready.last_transition_time)
    }

    /// Returns reason and message of each condition that is not true; empty if there is none.
    pub fn why(&self) -> String {
        let conditions = self.conditions.iter();
        let wrong = conditions.filter(|one| one.status != "True" && one.r#type != READY);
        let reasons = wrong.map(|one| {
            let reason = format!("{} {}: {}", one.r#type, one.reason, one.message);
            reason.trim_end_matches(": ").to_owned()
        });
        reasons.collect::<Vec<_>>().join("; ")
    }
}
