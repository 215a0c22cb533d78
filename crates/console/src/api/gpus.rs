//! GPUs as people and scripts see them.

use contract::device::{ConditionStatus, Gpu, GpuPhase, GpuStatus};
use contract::json;
use devices::board::READY;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A GPU of this machine, by its Device API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// Its name: the UUID.
    pub name: String,
    /// Its index in the driver.
    pub index: i32,
    /// The product.
    pub product: String,
    /// The architecture.
    pub architecture: String,
    /// Its memory (bytes).
    pub memory_bytes: u64,
    /// Its PCI address.
    pub pci: String,
    /// The UUIDs of its MIG devices.
    pub mig_devices: Vec<String>,
    /// `Ready`, `NotReady`, `Pending` or `Unknown`.
    pub phase: String,
    /// Its conditions.
    pub conditions: Vec<GpuConditionView>,
    /// The version of this state.
    pub resource_version: String,
}

/// A condition of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuConditionView {
    /// The type.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The reason, in one word.
    pub reason: String,
    /// The message, for people.
    pub message: String,
    /// The time at which the status changed last.
    pub last_transition_time: Option<Timestamp>,
    /// The source that says so.
    pub source: String,
}

// === impl GpuView ===

impl GpuView {
    /// Returns how a GPU is shown.
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

    /// Returns since when the GPU is in its phase, where that is known.
    pub fn since(&self) -> Option<Timestamp> {
        let ready = self.conditions.iter().find(|one| one.r#type == READY);
        ready.and_then(|ready| ready.last_transition_time)
    }

    /// Returns what is wrong with the GPU, each condition with its reason and its message; empty
    /// where nothing is.
    pub fn why(&self) -> String {
        let conditions = self.conditions.iter();
        let wrong = conditions.filter(|one| one.status != "True" && one.r#type != READY);
        let said = wrong.map(|one| {
            let said = format!("{} {}: {}", one.r#type, one.reason, one.message);
            said.trim_end_matches(": ").to_owned()
        });
        said.collect::<Vec<_>>().join("; ")
    }
}
