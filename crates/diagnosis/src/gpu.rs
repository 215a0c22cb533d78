//! State of the GPUs of a machine, as the driver reports it: which GPUs exist ([`Inventory`]),
//! their health ([`Readings`]), and events ([`GpuEvent`]).
//!
//! A value that a GPU or its driver does not report is `None`, which never means a fault. A
//! number without a name here, such as an architecture or a recovery action of a later driver,
//! is kept unchanged. The values are those of NVML (`nvml.h` of CUDA 13), whichever library
//! reads them.

use std::fmt;

use serde::{Deserialize, Serialize};

pub mod checks;
pub mod dcgm;

/// GPUs of a machine and their driver, from one poll.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inventory {
    /// Version of the driver, such as `580.65.06`.
    pub driver_version: Option<String>,
    /// Version of CUDA that the driver supports, such as `13.0`.
    pub cuda_version: Option<String>,
    /// GPUs that answered, sorted by index.
    pub gpus: Vec<Gpu>,
    /// GPUs that the driver counts but that did not answer.
    pub unreadable: Vec<UnreadableGpu>,
}

/// Attributes of a GPU that do not change while its driver runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// NVML index, which may change with a reboot.
    pub index: u32,
    /// UUID, such as `GPU-8c5f2a4e-...`.
    pub uuid: String,
    /// PCI address in the form `dddd:bb:dd.f` in lower case; a longer domain is kept whole.
    pub pci: String,
    /// Product name, such as `NVIDIA H100 80GB HBM3`.
    pub product: String,
    /// Architecture, such as `Hopper`; a number if it has no name here.
    pub architecture: Option<String>,
    /// Size of the memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Serial number of the board.
    pub serial: Option<String>,
    /// Part number of the board.
    pub board_part_number: Option<String>,
    /// Serial number of the chassis; drivers from 560.
    pub chassis_serial: Option<String>,
    /// Nearest NUMA node of the machine.
    pub numa_node: Option<u32>,
    /// Margin in degrees Celsius below which the GPU slows down (field 194).
    pub slowdown_margin_c: Option<i32>,
    /// Highest PCIe generation of GPU and slot.
    pub pcie_max_generation: Option<u32>,
    /// Highest PCIe width of GPU and slot, in lanes.
    pub pcie_max_width: Option<u32>,
    /// True if the GPU is partitioned (MIG); `None` if it cannot be.
    pub mig_enabled: Option<bool>,
    /// Partitions; empty unless `mig_enabled`.
    pub mig_devices: Vec<MigDevice>,
    /// Links that are up, or whose remote end the driver knows.
    pub nvlinks: Vec<Nvlink>,
    /// Reason why XID events cannot be received; `None` if they can.
    pub unmonitored: Option<String>,
}

/// A partition of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MigDevice {
    /// UUID, such as `MIG-...`.
    pub uuid: String,
    /// Number of the GPU instance.
    pub gpu_instance: u32,
    /// Number of the compute instance.
    pub compute_instance: u32,
    /// Size of the memory, in bytes.
    pub memory_bytes: Option<u64>,
}

/// Remote end of an `NVLink`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nvlink {
    /// Number of the link at this GPU.
    pub link: u32,
    /// PCI address of the remote device.
    pub remote_pci: Option<String>,
    /// True if the remote device is a switch.
    pub remote_is_switch: Option<bool>,
    /// Number of the link at the remote device.
    pub remote_link: Option<u32>,
}

/// A GPU that the driver counts but that did not answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnreadableGpu {
    /// NVML index of the GPU.
    pub index: u32,
    /// UUID, if the driver still reports it.
    pub uuid: Option<String>,
    /// PCI address, if the driver still reports it.
    pub pci: Option<String>,
    /// NVML error, such as `NVML_ERROR_GPU_IS_LOST`.
    pub error: String,
    /// True if the error means that the GPU is gone, rather than unreadable.
    pub is_lost: bool,
}

/// State of one GPU at one moment. Counters only grow, until the driver or the GPU is reset.
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
    /// Power draw, in milliwatts.
    pub power_mw: Option<u64>,
    /// Enforced power limit, in milliwatts.
    pub power_limit_mw: Option<u64>,
    /// Reasons for reduced clocks, as NVML's bits.
    pub clock_reasons: Option<u64>,
    /// Time that heat has slowed the GPU down, in nanoseconds.
    pub thermal_violation_ns: Option<u64>,
    /// Time that the power limit has slowed the GPU down, in nanoseconds.
    pub power_violation_ns: Option<u64>,
    /// Utilization of the GPU, in percent.
    pub utilization_percent: Option<u32>,
    /// Memory in use, in bytes.
    pub memory_used_bytes: Option<u64>,
    /// Corrected memory errors since the driver was loaded.
    pub ecc_corrected_volatile: Option<u64>,
    /// Uncorrected memory errors since the driver was loaded.
    pub ecc_uncorrected_volatile: Option<u64>,
    /// Corrected memory errors over the life of the GPU.
    pub ecc_corrected_aggregate: Option<u64>,
    /// Uncorrected memory errors over the life of the GPU.
    pub ecc_uncorrected_aggregate: Option<u64>,
    /// Pages retired because of corrected errors.
    pub retired_pages_sbe: Option<u32>,
    /// Pages retired because of uncorrected errors.
    pub retired_pages_dbe: Option<u32>,
    /// True if the retirement of a page waits for a restart of the driver.
    pub retired_pages_pending: Option<bool>,
    /// Memory rows remapped because of corrected errors.
    pub remapped_rows_correctable: Option<u32>,
    /// Memory rows remapped because of uncorrected errors.
    pub remapped_rows_uncorrectable: Option<u32>,
    /// True if the remapping of a row waits for a reset.
    pub remap_pending: Option<bool>,
    /// True if the remapping of a row failed.
    pub remap_failed: Option<bool>,
    /// True if the number of SRAM errors exceeds the threshold.
    pub sram_threshold_exceeded: Option<bool>,
    /// Number of PCIe replays.
    pub pcie_replays: Option<u64>,
    /// Current PCIe generation, from 1.
    pub pcie_generation: Option<u32>,
    /// Current PCIe width, in lanes.
    pub pcie_width: Option<u32>,
    /// State and errors of the `NVLink`s.
    pub nvlinks: Vec<NvlinkReadings>,
    /// Fabric that joins GPUs across machines; `None` if there is none.
    pub fabric: Option<Fabric>,
    /// Recovery action that the driver requests for the GPU.
    pub recovery_action: Option<RecoveryAction>,
    /// Recovery actions for the partitions, by UUID.
    pub mig_recovery_actions: Vec<(String, RecoveryAction)>,
    /// Failed calls with their errors, without those that are not supported.
    pub failed: Vec<(String, String)>,
}

/// State of an `NVLink`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NvlinkReadings {
    /// Number of the link at its GPU.
    pub link: u32,
    /// True if the link is up.
    pub up: Option<bool>,
    /// Number of replays on the link.
    pub replays: Option<u64>,
    /// Number of times that the link was retrained.
    pub recoveries: Option<u64>,
    /// Number of CRC errors.
    pub crc_errors: Option<u64>,
    /// Errors left after correction; NVLink 5 and later.
    pub effective_errors: Option<u64>,
}

/// Fabric that joins GPUs across machines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fabric {
    /// Progress of the GPU's registration.
    pub state: FabricState,
    /// NVML's name for the outcome of the registration, such as `NVML_SUCCESS`.
    pub status: String,
    /// Number of the clique; a GPU without one is in no fabric.
    pub clique: Option<u32>,
    /// UUID of the fabric's cluster.
    pub cluster: Option<String>,
    /// Bits of the fabric's health (version 2 and later).
    pub health_mask: Option<u32>,
}

/// Progress of a GPU's registration with its fabric (`nvmlGpuFabricState_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FabricState {
    /// The GPU takes part in no fabric.
    #[default]
    NotSupported,
    /// The registration has not started.
    NotStarted,
    /// The registration is in progress.
    InProgress,
    /// The registration has ended; the status is its outcome.
    Completed,
    /// A state of a later driver.
    Other(u32),
}

/// Recovery action that the driver requests for a GPU (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RecoveryAction {
    /// No action is needed.
    None,
    /// Reset the GPU, without a reboot.
    Reset,
    /// Reboot the machine, NVML's number 2.
    Reboot,
    /// Stop work that communicates with other GPUs.
    DrainPeers,
    /// Stop work on the GPU, and reset it.
    DrainAndReset,
    /// Recover the IMEX domain, within which machines share memory.
    RecoverImexDomain,
    /// Reset the GPU's bus.
    BusReset,
    /// Reboot the system, NVML's number 7.
    SystemReboot,
    /// An action of a later driver.
    Other(u32),
}

/// An event of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// UUID of the GPU; `None` if the driver does not report it.
    pub uuid: Option<String>,
    /// Kind of the event.
    pub kind: GpuEventKind,
}

/// Kinds of events that a driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuEventKind {
    /// An XID, with the affected instances if the GPU is partitioned.
    Xid {
        /// XID code, a decimal number.
        code: u32,
        /// Number of the GPU instance.
        gpu_instance: Option<u32>,
        /// Number of the compute instance.
        compute_instance: Option<u32>,
    },
    /// A corrected memory error.
    SingleBitEcc,
    /// An uncorrected memory error.
    DoubleBitEcc,
    /// Another subscribed event type, as NVML's bit.
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
    /// Known actions, indexed by their numbers in NVML, with their descriptions.
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

    /// Returns the action's number in NVML.
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

/// Converts a PCI address from NVML's form, `DDDDDDDD:BB:DD.F`, to gpuwarden's, `dddd:bb:dd.f`
/// in lower case. A domain that needs more than four digits is kept whole.
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
