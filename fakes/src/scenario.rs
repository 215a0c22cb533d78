//! Scenario of the fakes: a number of healthy H100s, and the differences from that.
//!
//! ```toml
//! gpus = 8
//!
//! [[gpu]]
//! index = 3
//! temperature_c = 91
//! margin_c = -4
//!
//! [[event]]
//! gpu = 3
//! xid = 79
//!
//! [calls]
//! nvmlDeviceGetPowerUsage = "NVML_ERROR_UNKNOWN"   # or "missing", "hang", "segfault"
//! dcgmConnect_v2 = "-21"                           # no host engine
//! ncclAllReduce = "3"                              # an internal error of NCCL
//!
//! [[dcgm.incident]]
//! gpu = 3
//! watch = 0x10
//! code = 80
//!
//! [nccl]
//! bandwidth_gb_s = 12.5
//! ```

use std::collections::{BTreeMap, BTreeSet};

use nvml_wrapper_sys::bindings as sys;
use serde::{Deserialize, Serialize};

use crate::code;

/// Largest number of GPUs in a scenario.
const MAX_GPUS: u32 = 64;
/// Largest number of links of a GPU.
pub(crate) const MAX_LINKS: u32 = 18;
/// Largest number of partitions of a GPU.
pub(crate) const MAX_PARTITIONS: usize = 64;

/// State of a fake machine: its driver, its GPUs, DCGM, CUDA and NCCL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// Number of GPUs. GPUs that are not listed in `gpu` are healthy.
    pub gpus: u32,
    /// Memory that the library allocates on initialisation, in MiB.
    pub library_mib: usize,
    /// Version of the driver.
    pub driver_version: String,
    /// Version of CUDA in NVML's form: 13000 is 13.0.
    pub cuda_version: i32,
    /// Newest version of the fabric structure that the driver supports: 1, 2, 3 or 4.
    pub fabric_version: u32,
    /// Field ids that the driver does not support.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub unknown_fields: BTreeSet<u32>,
    /// Behaviour that replaces functions, by their names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<String, Behaviour>,
    /// GPUs that differ from a healthy one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<FakeGpu>,
    /// Events, in order. Each is reported once; one that is added is reported at once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub event: Vec<FakeEvent>,
    /// Answers of DCGM about the GPUs.
    #[serde(skip_serializing_if = "FakeDcgm::is_usual")]
    pub dcgm: FakeDcgm,
    /// Properties of the CUDA runtime.
    pub cuda: FakeCuda,
    /// Properties of NCCL, for work across GPUs.
    pub nccl: FakeNccl,
}

/// Properties of a fake CUDA runtime.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeCuda {
    /// Version of the runtime in CUDA's form: 13000 is 13.0.
    pub runtime_version: i32,
    /// Bandwidth of a GPU's memory in GB/s, for reads and writes together.
    pub memory_bandwidth_gb_s: f64,
}

/// Properties of a fake NCCL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeNccl {
    /// Version in NCCL's form: 22809 is 2.28.9.
    pub version: i32,
    /// Bandwidth of an all-reduce at each GPU in GB/s (`busbw` of nccl-tests). With 0 it hangs.
    pub bandwidth_gb_s: f64,
    /// Bandwidth in GB/s if `NCCL_TOPO_FILE` names a topology file.
    pub bandwidth_with_topology_gb_s: Option<f64>,
    /// Error of work in progress, as a code of NCCL: 6 means that a remote rank is gone.
    pub async_error: u32,
    /// Bandwidth in GB/s in a process that has an environment variable, by the variable's name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub slowed_by: BTreeMap<String, f64>,
}

/// Answers of a fake DCGM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeDcgm {
    /// Version of the host engine.
    pub version: String,
    /// Number of NVSwitches of the machine.
    pub switches: u32,
    /// Newest version of the structure for incidents that it supports.
    pub response: u32,
    /// Capacity of the structure, in incidents.
    pub most_incidents: u32,
    /// Size of a text in the structure, in bytes.
    pub text_bytes: u32,
    /// Incidents that the health watches find.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub incident: Vec<FakeIncident>,
}

/// An incident of a health watch of DCGM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeIncident {
    /// Index of the GPU with the incident, unless `switch` or `machine` is set.
    pub gpu: u32,
    /// Number of the switch with the incident.
    pub switch: Option<u32>,
    /// True if the incident concerns the machine as a whole.
    pub machine: bool,
    /// Health watch, as a bit of DCGM: 0x10 is memory.
    pub watch: u32,
    /// Severity: 10 is a warning, 20 a failure.
    pub health: u32,
    /// Code of the incident, as a number of DCGM.
    pub code: u32,
    /// Text of the incident.
    pub message: String,
}

/// A GPU. The defaults are those of a healthy H100.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeGpu {
    /// Index of the GPU.
    pub index: u32,
    /// True if every call about the GPU returns that it is lost.
    pub lost: bool,
    /// True if the driver does not list the GPU; the following ones move up by one index.
    pub absent: bool,
    /// True if the GPU computes a wrong bit without an error.
    pub corrupts: bool,
    /// Behaviour that replaces functions for this GPU, by their names.
    pub calls: BTreeMap<String, Behaviour>,
    /// UUID; derived from the index by default.
    pub uuid: Option<String>,
    /// PCI address in NVML's form; derived from the index by default.
    pub pci: Option<String>,
    /// Product name, such as `NVIDIA H100 80GB HBM3`.
    pub product: String,
    /// Architecture as a number of NVML: 9 is Hopper.
    pub architecture: u32,
    /// Serial number; derived from the index by default.
    pub serial: Option<String>,
    /// Part number of the board.
    pub board_part_number: String,
    /// Serial number of the chassis; not supported if empty.
    pub chassis_serial: String,
    /// Nearest NUMA node of the host.
    pub numa_node: u32,
    /// Size of the memory in bytes.
    pub memory_bytes: u64,
    /// Used memory in bytes.
    pub memory_used_bytes: u64,
    /// Highest PCIe generation of GPU and slot.
    pub pcie_max_generation: u32,
    /// Highest PCIe width of GPU and slot, in lanes.
    pub pcie_max_width: u32,
    /// PCIe generation of the link now.
    pub pcie_generation: u32,
    /// PCIe width of the link now, in lanes.
    pub pcie_width: u32,
    /// Number of PCIe replays.
    pub pcie_replays: u32,
    /// Temperature in degrees Celsius.
    pub temperature_c: i32,
    /// Temperature of the memory in degrees Celsius.
    pub memory_temperature_c: u32,
    /// Degrees Celsius until the GPU slows down.
    pub margin_c: i32,
    /// Margin below which the GPU slows down.
    pub slowdown_margin_c: i32,
    /// Power draw in milliwatts.
    pub power_mw: u32,
    /// Power limit in milliwatts.
    pub power_limit_mw: u32,
    /// Reasons for reduced clocks, as bits of NVML.
    pub clock_reasons: u64,
    /// Time of slowdown by heat, in ns.
    pub thermal_violation_ns: u64,
    /// Time of slowdown by the power limit, in ns.
    pub power_violation_ns: u64,
    /// Load of the GPU in percent.
    pub utilization_percent: u32,
    /// Corrected memory errors since the driver was loaded.
    pub ecc_corrected_volatile: u64,
    /// Uncorrected memory errors since the driver was loaded.
    pub ecc_uncorrected_volatile: u64,
    /// Corrected memory errors over the lifetime of the GPU.
    pub ecc_corrected_aggregate: u64,
    /// Uncorrected memory errors over the lifetime of the GPU.
    pub ecc_uncorrected_aggregate: u64,
    /// True if the SRAM has exceeded its threshold of errors.
    pub sram_threshold_exceeded: bool,
    /// Pages retired because of corrected errors.
    pub retired_pages_sbe: u32,
    /// Pages retired because of uncorrected errors.
    pub retired_pages_dbe: u32,
    /// True if a page is pending retirement.
    pub retired_pages_pending: bool,
    /// Rows remapped because of corrected errors.
    pub remapped_rows_correctable: u32,
    /// Rows remapped because of uncorrected errors.
    pub remapped_rows_uncorrectable: u32,
    /// True if a row is pending a remapping.
    pub remap_pending: bool,
    /// True if the remapping of a row has failed.
    pub remap_failed: bool,
    /// Recovery action that the driver asks for: 0 none, 1 reset, 2 reboot, 3 drain of peers, 4
    /// drain and reset, 5 recovery of the IMEX domain, 6 reset of the bus, 7 reboot of the
    /// system.
    pub recovery_action: u32,
    /// Supported event types, as bits of NVML.
    pub supported_events: u64,
    /// Number of NVLinks. Links that are not listed in `link` are up and lead to switches.
    pub links: u32,
    /// Links that differ from a healthy one.
    pub link: Vec<FakeLink>,
    /// Multi-node fabric of the GPU, if any.
    pub fabric: Option<Fabric>,
    /// True if MIG is enabled.
    pub mig_enabled: bool,
    /// MIG devices of the GPU.
    pub partition: Vec<FakePartition>,
    /// Minor number of `/dev/nvidiaN`; the index by default.
    pub minor: Option<u32>,
    /// Persistence mode. Set by `nvmlDeviceSetPersistenceMode`.
    pub persistence: bool,
    /// Ids of the processes that use the GPU.
    pub processes: Vec<u32>,
}

/// An NVLink of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeLink {
    /// Number of the link at the GPU.
    pub link: u32,
    /// True if the link is up.
    pub up: bool,
    /// PCI address of the other end; derived from the number by default, not supported if empty.
    pub remote_pci: Option<String>,
    /// Number of the link at the other end; not supported by default.
    pub remote_link: Option<u32>,
    /// Kind of the other end: 0 a GPU, 2 a switch, 255 unknown.
    pub remote_kind: u32,
    /// Number of replays of the link.
    pub replays: u64,
    /// Number of recoveries of the link.
    pub recoveries: u64,
    /// Number of CRC errors.
    pub crc_errors: u64,
    /// Number of errors left after correction.
    pub effective_errors: u64,
}

/// Multi-node fabric, as reported by a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fabric {
    /// State of the registration: 0 not supported, 1 not started, 2 in progress, 3 completed.
    pub state: u8,
    /// Result of the registration, as a code of NVML; 0 is success.
    pub status: u32,
    /// Number of the clique.
    pub clique: u32,
    /// UUID of the cluster, as 16 bytes.
    pub cluster: [u8; 16],
    /// Health of the fabric, as bits of NVML.
    pub health_mask: u32,
}

/// A MIG device of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FakePartition {
    /// UUID of the MIG device.
    pub uuid: String,
    /// Id of the GPU instance.
    pub gpu_instance: u32,
    /// Id of the compute instance.
    #[serde(default)]
    pub compute_instance: u32,
    /// Size of the memory in bytes.
    pub memory_bytes: u64,
    /// Recovery action that the driver asks for, as for a GPU.
    #[serde(default)]
    pub recovery_action: u32,
}

/// An event of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeEvent {
    /// Index of the GPU.
    pub gpu: u32,
    /// Code of an XID.
    pub xid: Option<u64>,
    /// Type of another event, as a bit of NVML.
    pub kind: Option<u64>,
    /// Id of the GPU instance.
    pub gpu_instance: Option<u32>,
    /// Id of the compute instance.
    pub compute_instance: Option<u32>,
}

/// Behaviour that replaces a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Behaviour {
    /// Returns this code of the function's library.
    Code(u32),
    /// Hangs the call forever.
    Hang,
    /// Ends the process with a segmentation fault.
    Segfault,
}

// === impl Scenario ===

impl Default for Scenario {
    fn default() -> Self {
        Self {
            gpus: 8,
            library_mib: 0,
            driver_version: "580.65.06".to_owned(),
            cuda_version: 13000,
            fabric_version: 4,
            unknown_fields: BTreeSet::new(),
            calls: BTreeMap::new(),
            gpu: Vec::new(),
            event: Vec::new(),
            dcgm: FakeDcgm::default(),
            cuda: FakeCuda::default(),
            nccl: FakeNccl::default(),
        }
    }
}

impl Default for FakeCuda {
    fn default() -> Self {
        Self {
            runtime_version: 13000,
            memory_bandwidth_gb_s: 2800.0,
        }
    }
}

impl Default for FakeNccl {
    fn default() -> Self {
        Self {
            version: 22_809,
            bandwidth_gb_s: 480.0,
            bandwidth_with_topology_gb_s: None,
            async_error: 0,
            slowed_by: BTreeMap::new(),
        }
    }
}

impl Default for FakeDcgm {
    fn default() -> Self {
        Self {
            version: "4.6.0".to_owned(),
            switches: 0,
            response: 5,
            most_incidents: 1024,
            text_bytes: 1024,
            incident: Vec::new(),
        }
    }
}

impl FakeDcgm {
    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for FakeIncident {
    fn default() -> Self {
        Self {
            gpu: 0,
            switch: None,
            machine: false,
            watch: 0x10,
            health: 20,
            code: 80,
            message: "A row could not be replaced".to_owned(),
        }
    }
}

impl Scenario {
    /// Returns a scenario with this number of healthy GPUs.
    pub fn healthy(gpus: u32) -> Self {
        Self {
            gpus,
            ..Self::default()
        }
    }

    /// Parses a scenario. An error names the line if possible.
    pub fn from_toml(text: &str) -> Result<Self, String> {
        let scenario: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Serialises the scenario as TOML.
    pub fn to_toml(&self) -> Result<String, String> {
        self.check()?;
        toml::to_string(self).map_err(|error| error.to_string())
    }

    /// Returns the GPU with an index for changes, and adds an entry for a healthy one.
    pub fn gpu_mut(&mut self, index: u32) -> &mut FakeGpu {
        let at = self.gpu.iter().position(|gpu| gpu.index == index);
        let at = at.unwrap_or_else(|| {
            self.gpu.push(FakeGpu {
                index,
                ..FakeGpu::default()
            });
            self.gpu.len() - 1
        });
        &mut self.gpu[at]
    }

    /// Returns the state of the GPU with an index.
    pub(crate) fn gpu(&self, index: u32) -> FakeGpu {
        let listed = self.gpu.iter().find(|gpu| gpu.index == index).cloned();
        listed.unwrap_or_else(|| FakeGpu {
            index,
            ..FakeGpu::default()
        })
    }

    /// Returns the indexes in the scenario of the GPUs that the driver lists. The driver's own
    /// indexes differ from them once a GPU is absent.
    pub(crate) fn counted(&self) -> Vec<u32> {
        let absent = |index: &u32| self.gpu.iter().any(|gpu| gpu.index == *index && gpu.absent);
        (0..self.gpus).filter(|index| !absent(index)).collect()
    }

    fn check(&self) -> Result<(), String> {
        if self.gpus > MAX_GPUS {
            return Err(format!("gpus is {}, at most {MAX_GPUS}", self.gpus));
        }
        let slowed = self.nccl.slowed_by.iter();
        let slowed = slowed.map(|(name, gb_s)| (format!("slowed_by.{name}"), *gb_s));
        let usual = ("bandwidth_gb_s".to_owned(), self.nccl.bandwidth_gb_s);
        for (name, gb_s) in slowed.chain([usual]) {
            if !gb_s.is_finite() || gb_s < 0.0 {
                return Err(format!(
                    "nccl.{name} is {gb_s}; it is a number of gigabytes a second, or 0"
                ));
            }
        }
        let mut seen = BTreeSet::new();
        for gpu in &self.gpu {
            let index = gpu.index;
            if index >= self.gpus {
                return Err(format!("gpu {index} is listed, but gpus is {}", self.gpus));
            }
            if !seen.insert(index) {
                return Err(format!("gpu {index} is listed twice"));
            }
            if gpu.links > MAX_LINKS {
                return Err(format!(
                    "gpu {index} has {} links, at most {MAX_LINKS}",
                    gpu.links
                ));
            }
            if let Some(link) = gpu.link.iter().find(|link| link.link >= gpu.links) {
                let (link, links) = (link.link, gpu.links);
                return Err(format!(
                    "gpu {index} lists link {link}, but links is {links}"
                ));
            }
            if gpu.partition.len() > MAX_PARTITIONS {
                return Err(format!(
                    "gpu {index} has more than {MAX_PARTITIONS} partitions"
                ));
            }
        }
        for event in &self.event {
            if event.gpu >= self.gpus {
                let (gpu, gpus) = (event.gpu, self.gpus);
                return Err(format!("an event is about gpu {gpu}, but gpus is {gpus}"));
            }
            if event.xid.is_some() == event.kind.is_some() {
                return Err("an event has either xid or kind".to_owned());
            }
        }
        Ok(())
    }
}

// === impl FakeGpu ===

impl Default for FakeGpu {
    fn default() -> Self {
        Self {
            index: 0,
            lost: false,
            absent: false,
            corrupts: false,
            calls: BTreeMap::new(),
            uuid: None,
            pci: None,
            product: "NVIDIA H100 80GB HBM3".to_owned(),
            architecture: sys::NVML_DEVICE_ARCH_HOPPER,
            serial: None,
            board_part_number: "692-2G520-0200-000".to_owned(),
            chassis_serial: String::new(),
            numa_node: 0,
            memory_bytes: 80 << 30,
            memory_used_bytes: 0,
            pcie_max_generation: 5,
            pcie_max_width: 16,
            pcie_generation: 5,
            pcie_width: 16,
            pcie_replays: 0,
            temperature_c: 34,
            memory_temperature_c: 41,
            margin_c: 53,
            slowdown_margin_c: -2,
            power_mw: 71_500,
            power_limit_mw: 700_000,
            clock_reasons: 1, // idle
            thermal_violation_ns: 0,
            power_violation_ns: 0,
            utilization_percent: 0,
            ecc_corrected_volatile: 0,
            ecc_uncorrected_volatile: 0,
            ecc_corrected_aggregate: 0,
            ecc_uncorrected_aggregate: 0,
            sram_threshold_exceeded: false,
            retired_pages_sbe: 0,
            retired_pages_dbe: 0,
            retired_pages_pending: false,
            remapped_rows_correctable: 0,
            remapped_rows_uncorrectable: 0,
            remap_pending: false,
            remap_failed: false,
            recovery_action: 0,
            supported_events: u64::from(
                sys::nvmlEventTypeXidCriticalError
                    | sys::nvmlEventTypeSingleBitEccError
                    | sys::nvmlEventTypeDoubleBitEccError,
            ),
            links: MAX_LINKS,
            link: Vec::new(),
            fabric: None,
            mig_enabled: false,
            partition: Vec::new(),
            minor: None,
            persistence: false,
            processes: Vec::new(),
        }
    }
}

impl FakeGpu {
    pub(crate) fn uuid(&self) -> String {
        let uuid = || format!("GPU-fa4e0000-0000-4000-8000-{:012x}", self.index);
        self.uuid.clone().unwrap_or_else(uuid)
    }

    pub(crate) fn pci(&self) -> String {
        let pci = || format!("00000000:{:02X}:00.0", 0x18 + self.index);
        self.pci.clone().unwrap_or_else(pci)
    }

    pub(crate) fn serial(&self) -> String {
        let serial = || format!("16540230{:05}", self.index);
        self.serial.clone().unwrap_or_else(serial)
    }

    /// Returns a link of the GPU; `None` beyond the last.
    pub(crate) fn link(&self, link: u32) -> Option<FakeLink> {
        let listed = self.link.iter().find(|listed| listed.link == link).cloned();
        let healthy = || FakeLink {
            link,
            ..FakeLink::default()
        };
        (link < self.links).then(|| listed.unwrap_or_else(healthy))
    }
}

// === impl FakeLink ===

impl Default for FakeLink {
    fn default() -> Self {
        Self {
            link: 0,
            up: true,
            remote_pci: None,
            remote_link: None,
            remote_kind: sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
            replays: 0,
            recoveries: 0,
            crc_errors: 0,
            effective_errors: 0,
        }
    }
}

impl FakeLink {
    pub(crate) fn remote_pci(&self) -> String {
        let switch = || format!("00000000:{:02X}:00.0", 0x05 + self.link % 4);
        self.remote_pci.clone().unwrap_or_else(switch)
    }
}

// === impl Behaviour ===

/// Value in a scenario for a function that the driver lacks.
const MISSING: &str = "missing";

impl TryFrom<String> for Behaviour {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "hang" => return Ok(Self::Hang),
            "segfault" => return Ok(Self::Segfault),
            MISSING => return Ok(Self::Code(code::FUNCTION_NOT_FOUND)),
            _ => {}
        }
        let named = code::NAMED.iter().find(|(name, _)| *name == text);
        // The codes of DCGM are negative.
        let negative = || text.parse().ok().map(i32::cast_unsigned);
        let code = named.map(|(_, code)| *code);
        let code = code.or_else(|| text.parse().ok()).or_else(negative);
        code.map(Self::Code).ok_or_else(|| {
            let names: Vec<&str> = code::NAMED.iter().map(|(name, _)| *name).collect();
            format!(
                "'{text}' is nothing that a function can do: hang, segfault, missing, a number, \
                 or one of {}",
                names.join(", ")
            )
        })
    }
}

impl From<Behaviour> for String {
    fn from(behaviour: Behaviour) -> Self {
        match behaviour {
            Behaviour::Hang => "hang".to_owned(),
            Behaviour::Segfault => "segfault".to_owned(),
            Behaviour::Code(code::FUNCTION_NOT_FOUND) => MISSING.to_owned(),
            Behaviour::Code(code) => {
                let named = code::NAMED.iter().find(|(_, named)| *named == code);
                named.map_or_else(|| code.to_string(), |(name, _)| (*name).to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests;
