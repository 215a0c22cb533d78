//! The state of the GPUs of a machine, as its driver tells it: what is there ([`Inventory`]), how
//! it does ([`Readings`]), and what has just happened to it ([`GpuEvent`]).
//!
//! What a GPU or its driver does not tell is `None`, which is never "broken". A number that has
//! no name here, such as an architecture or a recovery action of a later driver, is kept as it is.
//! Facts are those of NVML (`nvml.h` of CUDA 13), whoever reads them.

use std::fmt;

use serde::{Deserialize, Serialize};

pub mod checks;
pub mod dcgm;

/// The GPUs of a machine, and their driver, as a look found them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inventory {
    /// Version of the driver, such as `580.65.06`.
    pub driver_version: Option<String>,
    /// Version of CUDA that the driver supports, such as `13.0`.
    pub cuda_version: Option<String>,
    /// The GPUs that answered, in the order of their index.
    pub gpus: Vec<Gpu>,
    /// The GPUs that the driver counts and that did not answer.
    pub unreadable: Vec<UnreadableGpu>,
}

/// One GPU, and what of it does not change while its driver runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Index of NVML, which may change with a reboot.
    pub index: u32,
    /// UUID, such as `GPU-8c5f2a4e-...`.
    pub uuid: String,
    /// PCI address in the form `dddd:bb:dd.f` in lower case; a longer domain is kept whole.
    pub pci: String,
    /// Product, such as `NVIDIA H100 80GB HBM3`.
    pub product: String,
    /// Architecture, such as `Hopper`; a number where it has no name yet.
    pub architecture: Option<String>,
    /// Size of its memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Serial number of its board.
    pub serial: Option<String>,
    /// Part number of its board.
    pub board_part_number: Option<String>,
    /// Serial number of the chassis; drivers from 560.
    pub chassis_serial: Option<String>,
    /// Node of the machine's memory that is nearest.
    pub numa_node: Option<u32>,
    /// Margin to the slowdown in degrees Celsius below which the GPU slows down (field 194).
    pub slowdown_margin_c: Option<i32>,
    /// Highest PCIe generation of GPU and slot.
    pub pcie_max_generation: Option<u32>,
    /// Highest PCIe width of GPU and slot, in lanes.
    pub pcie_max_width: Option<u32>,
    /// True if the GPU is divided; `None` where it cannot be.
    pub mig_enabled: Option<bool>,
    /// Its partitions.
    pub mig_devices: Vec<MigDevice>,
    /// Its links that are in use, or ought to be.
    pub nvlinks: Vec<Nvlink>,
    /// The reason why its XID events cannot be waited for; `None` if they can.
    pub unmonitored: Option<String>,
}

/// One partition of a divided GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MigDevice {
    /// UUID, such as `MIG-...`.
    pub uuid: String,
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instance.
    pub compute_instance: u32,
    /// Size of its memory in bytes.
    pub memory_bytes: Option<u64>,
}

/// The other end of one NVLink.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nvlink {
    /// Number of the link at this GPU.
    pub link: u32,
    /// PCI address of what is at the other end.
    pub remote_pci: Option<String>,
    /// True if the other end is a switch.
    pub remote_is_switch: Option<bool>,
    /// Number of the link there.
    pub remote_link: Option<u32>,
}

/// A GPU that the driver counts and that did not answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnreadableGpu {
    /// Index of NVML.
    pub index: u32,
    /// UUID and PCI address, where it still tells them.
    pub uuid: Option<String>,
    /// PCI address, where it still tells it.
    pub pci: Option<String>,
    /// Error of NVML, such as `NVML_ERROR_GPU_IS_LOST`.
    pub error: String,
    /// True if the error says that the GPU is gone, not that it cannot be read.
    pub is_lost: bool,
}

/// The state of one GPU at a moment. Counters only grow, until the driver or the GPU begins anew.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Readings {
    /// UUID of the GPU.
    pub uuid: String,
    /// Temperature of the GPU in degrees Celsius.
    pub temperature_c: Option<i32>,
    /// Temperature of the memory in degrees Celsius.
    pub memory_temperature_c: Option<i32>,
    /// Degrees Celsius until the GPU slows down (`nvmlDeviceGetMarginTemperature`, field 153 of
    /// DCGM); negative beyond that.
    pub margin_c: Option<i32>,
    /// Power in milliwatts.
    pub power_mw: Option<u64>,
    /// Limit of the power in milliwatts that is enforced.
    pub power_limit_mw: Option<u64>,
    /// The reasons why the clocks are below what they could be, as bits of NVML.
    pub clock_reasons: Option<u64>,
    /// Nanoseconds for which heat has slowed the GPU down.
    pub thermal_violation_ns: Option<u64>,
    /// Nanoseconds for which its power limit has slowed the GPU down.
    pub power_violation_ns: Option<u64>,
    /// Load of the GPU in percent.
    pub utilization_percent: Option<u32>,
    /// Memory in use in bytes.
    pub memory_used_bytes: Option<u64>,
    /// Memory errors that were corrected, since the driver was loaded.
    pub ecc_corrected_volatile: Option<u64>,
    /// Memory errors that were not corrected, since the driver was loaded.
    pub ecc_uncorrected_volatile: Option<u64>,
    /// Memory errors that were corrected, in the life of the GPU.
    pub ecc_corrected_aggregate: Option<u64>,
    /// Memory errors that were not corrected, in the life of the GPU.
    pub ecc_uncorrected_aggregate: Option<u64>,
    /// Pages retired because of errors that were corrected.
    pub retired_pages_sbe: Option<u32>,
    /// Pages retired because of errors that were not corrected.
    pub retired_pages_dbe: Option<u32>,
    /// True if a page waits for a restart of the driver to be retired.
    pub retired_pages_pending: Option<bool>,
    /// Memory rows replaced because of errors that were corrected.
    pub remapped_rows_correctable: Option<u32>,
    /// Memory rows replaced because of errors that were not corrected.
    pub remapped_rows_uncorrectable: Option<u32>,
    /// True if a row waits for a reset to be replaced.
    pub remap_pending: Option<bool>,
    /// True if a row could not be replaced.
    pub remap_failed: Option<bool>,
    /// True if the static memory has passed its threshold of errors.
    pub sram_threshold_exceeded: Option<bool>,
    /// Times that something was sent again over PCIe.
    pub pcie_replays: Option<u64>,
    /// PCIe generation now.
    pub pcie_generation: Option<u32>,
    /// PCIe width now, in lanes.
    pub pcie_width: Option<u32>,
    /// State and errors of its NVLinks.
    pub nvlinks: Vec<NvlinkReadings>,
    /// The fabric that joins GPUs across machines; `None` where there is none.
    pub fabric: Option<Fabric>,
    /// The action that the driver asks for to mend the GPU.
    pub recovery_action: Option<RecoveryAction>,
    /// The same for its partitions, by UUID, where it is divided.
    pub mig_recovery_actions: Vec<(String, RecoveryAction)>,
    /// The calls that failed otherwise than by "not supported", each with its error.
    pub failed: Vec<(String, String)>,
}

/// The state of one NVLink.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NvlinkReadings {
    /// Number of the link at its GPU.
    pub link: u32,
    /// True if the link is up.
    pub up: Option<bool>,
    /// Times that something was sent again.
    pub replays: Option<u64>,
    /// Times that the link was made anew.
    pub recoveries: Option<u64>,
    /// Checksums that were wrong.
    pub crc_errors: Option<u64>,
    /// Errors that were left after correction; NVLink 5 and later.
    pub effective_errors: Option<u64>,
}

/// The fabric that joins GPUs across machines, as the driver tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fabric {
    /// The progress of the registration.
    pub state: FabricState,
    /// Name of NVML for how the registration ended, such as `NVML_SUCCESS`.
    pub status: String,
    /// Number of the clique; a GPU without one is in no fabric.
    pub clique: Option<u32>,
    /// UUID of the cluster.
    pub cluster: Option<String>,
    /// Bits of the fabric's health (version 2 and later).
    pub health_mask: Option<u32>,
}

/// The progress of a GPU's registration with its fabric (`nvmlGpuFabricState_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FabricState {
    /// It takes part in no fabric.
    #[default]
    NotSupported,
    /// It has not begun.
    NotStarted,
    /// It is under way.
    InProgress,
    /// It has ended; how is told by the status.
    Completed,
    /// A state of a later driver.
    Other(u32),
}

/// The action that the driver asks for to mend a GPU (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RecoveryAction {
    /// Nothing.
    None,
    /// A reset of the GPU.
    Reset,
    /// A reboot of the machine.
    Reboot,
    /// To end what talks to its peers.
    DrainPeers,
    /// To end what runs on it, and a reset.
    DrainAndReset,
    /// A recovery of the domain in which machines share memory.
    RecoverImexDomain,
    /// A reset of the GPU's bus.
    BusReset,
    /// A reboot of the system.
    SystemReboot,
    /// An action of a later driver.
    Other(u32),
}

/// Something that has just happened to a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// UUID of the GPU; `None` where the driver does not tell it any more.
    pub uuid: Option<String>,
    /// The event.
    pub kind: GpuEventKind,
}

/// The kinds of events that a driver tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuEventKind {
    /// An XID, and the instances that it is about where the GPU is divided.
    Xid {
        /// The code.
        code: u32,
        /// GPU instance.
        gpu_instance: Option<u32>,
        /// Compute instance.
        compute_instance: Option<u32>,
    },
    /// A memory error that was corrected.
    SingleBitEcc,
    /// A memory error that was not corrected.
    DoubleBitEcc,
    /// Another one that was asked for, by its bit.
    Other(u64),
}

// === impl FabricState ===

impl From<u32> for FabricState {
    fn from(value: u32) -> Self {
        match value {
            0 => Self::NotSupported,
            1 => Self::NotStarted,
            2 => Self::InProgress,
            3 => Self::Completed,
            other => Self::Other(other),
        }
    }
}

// === impl RecoveryAction ===

impl RecoveryAction {
    /// The actions that have a name, by their numbers in NVML, with their words for people.
    const NAMED: [(Self, &str); 8] = [
        (Self::None, "nothing"),
        (Self::Reset, "a reset of the GPU"),
        (Self::Reboot, "a reboot of the machine"),
        (Self::DrainPeers, "an end of what talks to other GPUs"),
        (
            Self::DrainAndReset,
            "an end of what runs on it, and a reset",
        ),
        (Self::RecoverImexDomain, "a recovery of its IMEX domain"),
        (Self::BusReset, "a reset of its bus"),
        (Self::SystemReboot, "a reboot of the system"),
    ];

    /// Returns the number of the action in NVML.
    pub fn number(self) -> u32 {
        if let Self::Other(number) = self {
            return number;
        }
        let named = (0..).zip(Self::NAMED);
        let mut same = named.filter(|(_, (action, _))| *action == self);
        same.next().map_or(0, |(number, _)| number)
    }
}

impl From<u32> for RecoveryAction {
    fn from(number: u32) -> Self {
        let index = usize::try_from(number).ok();
        let named = index.and_then(|index| Self::NAMED.get(index));
        named.map_or(Self::Other(number), |(action, _)| *action)
    }
}

impl fmt::Display for RecoveryAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.iter().find(|(action, _)| action == self) {
            Some((_, words)) => f.write_str(words),
            None => write!(f, "action {}, which is not known", self.number()),
        }
    }
}

/// Returns a PCI address as all of gpuwarden writes it, `dddd:bb:dd.f` in lower case, from the
/// form of NVML, `DDDDDDDD:BB:DD.F`. A domain that needs more than four digits is kept whole.
pub fn pci_address(of_nvml: &str) -> String {
    let lower = of_nvml.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 => {
            let cut = domain.len() - 4;
            let (high, low) = domain.split_at(cut);
            let is_short = high.bytes().all(|digit| digit == b'0');
            format!("{}:{rest}", if is_short { low } else { domain })
        }
        _ => lower,
    }
}

#[cfg(test)]
mod tests {
    use super::RecoveryAction;

    #[test]
    fn a_number_of_an_action_stays_what_it_is() {
        for number in 0..12 {
            let action = RecoveryAction::from(number);
            assert_eq!(action.number(), number);
            let is_known = !matches!(action, RecoveryAction::Other(_));
            assert_eq!(is_known, number < 8, "{action}");
        }
        assert_eq!(RecoveryAction::from(4), RecoveryAction::DrainAndReset);
        let newer = RecoveryAction::from(9);
        assert_eq!(newer.to_string(), "action 9, which is not known");
    }
}
