//! What the fake tells: a number of healthy H100s, and what is different from that.
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

/// Most GPUs of a scenario.
const MAX_GPUS: u32 = 64;
/// Most links of a GPU.
pub(crate) const MAX_LINKS: u32 = 18;
/// Most partitions of a GPU.
pub(crate) const MAX_PARTITIONS: usize = 64;

/// All that a fake driver tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// The number of GPUs; all are healthy but for those below.
    pub gpus: u32,
    /// Memory that the library takes for itself once it is initialised, in MiB.
    pub library_mib: usize,
    /// Version of the driver.
    pub driver_version: String,
    /// Version of CUDA, as NVML tells it: 13000 is 13.0.
    pub cuda_version: i32,
    /// The newest structure for the fabric that the driver knows: 1, 2, 3 or 4.
    pub fabric_version: u32,
    /// The numbers of field values that the driver does not know.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub unknown_fields: BTreeSet<u32>,
    /// The behaviour of functions instead of their work, by their names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<String, Behaviour>,
    /// The GPUs that differ from a healthy one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<FakeGpu>,
    /// The events, in order. Each is told once; one that is added is told at once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub event: Vec<FakeEvent>,
    /// The words of DCGM about them.
    #[serde(skip_serializing_if = "FakeDcgm::is_usual")]
    pub dcgm: FakeDcgm,
    /// The CUDA runtime.
    pub cuda: FakeCuda,
    /// The work of the GPUs together.
    pub nccl: FakeNccl,
}

/// All that a fake CUDA runtime tells of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeCuda {
    /// Version of the runtime, as it tells it: 13000 is 13.0.
    pub runtime_version: i32,
    /// Bandwidth of a GPU's memory in gigabytes a second, of what is read and written together.
    pub memory_bandwidth_gb_s: f64,
}

/// All that a fake NCCL tells of itself, and does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeNccl {
    /// Version, as it tells it: 22809 is 2.28.9.
    pub version: i32,
    /// Bandwidth of an all-reduce in gigabytes a second, at each GPU (`busbw` of nccl-tests); with 0 it
    /// never ends.
    pub bandwidth_gb_s: f64,
    /// The same where `NCCL_TOPO_FILE` names a topology file.
    pub bandwidth_with_topology_gb_s: Option<f64>,
    /// The error of work that has begun, as a code of NCCL: 6 is a rank elsewhere that is gone.
    pub async_error: u32,
    /// The bandwidth instead of that in a process that has a variable, by its name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub slowed_by: BTreeMap<String, f64>,
}

/// All that a fake DCGM tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeDcgm {
    /// Version of the host engine.
    pub version: String,
    /// Number of switches.
    pub switches: u32,
    /// Number of the version of the structure for incidents that it knows.
    pub response: u32,
    /// Number of incidents that it has room for.
    pub most_incidents: u32,
    /// The bytes of the texts in it.
    pub text_bytes: u32,
    /// The incidents that its watches find.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub incident: Vec<FakeIncident>,
}

/// Something that a watch of DCGM finds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeIncident {
    /// Index of the GPU that it is about, unless a switch or the machine is.
    pub gpu: u32,
    /// Number of the switch that it is about.
    pub switch: Option<u32>,
    /// True if it is about the machine, and no part of it.
    pub machine: bool,
    /// The watch, as a bit of DCGM: 0x10 is memory.
    pub watch: u32,
    /// The gravity: 10 is a warning, 20 a failure.
    pub health: u32,
    /// The code, as a number of DCGM.
    pub code: u32,
    /// The text.
    pub message: String,
}

/// One GPU. What is not said is as a healthy H100 has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeGpu {
    /// Index of the GPU.
    pub index: u32,
    /// True if every call about the GPU answers that it is lost.
    pub lost: bool,
    /// True if the driver no longer counts the GPU; those behind it move up.
    pub absent: bool,
    /// True if a bit of what the GPU has worked out is wrong, without an error.
    pub corrupts: bool,
    /// The behaviour of functions instead of their work, when they are about this GPU, by their
    /// names.
    pub calls: BTreeMap<String, Behaviour>,
    /// UUID; made from the index where it is not said.
    pub uuid: Option<String>,
    /// PCI address in NVML's form; made from the index where it is not said.
    pub pci: Option<String>,
    /// Product.
    pub product: String,
    /// Architecture as a number of NVML: 9 is Hopper.
    pub architecture: u32,
    /// Serial number; made from the index where it is not said.
    pub serial: Option<String>,
    /// Part number of the board.
    pub board_part_number: String,
    /// Serial number of the chassis; none where it is empty.
    pub chassis_serial: String,
    /// Nearest node of the machine's memory.
    pub numa_node: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Memory in use in bytes.
    pub memory_used_bytes: u64,
    /// Highest PCIe generation.
    pub pcie_max_generation: u32,
    /// Highest PCIe width in lanes.
    pub pcie_max_width: u32,
    /// PCIe generation now.
    pub pcie_generation: u32,
    /// PCIe width now in lanes.
    pub pcie_width: u32,
    /// Times that something was sent again over PCIe.
    pub pcie_replays: u32,
    /// Temperature in degrees Celsius.
    pub temperature_c: i32,
    /// Temperature of the memory in degrees Celsius.
    pub memory_temperature_c: u32,
    /// Degrees Celsius until the GPU slows down.
    pub margin_c: i32,
    /// The margin below which it does.
    pub slowdown_margin_c: i32,
    /// Power in milliwatts.
    pub power_mw: u32,
    /// Limit of the power in milliwatts.
    pub power_limit_mw: u32,
    /// Reasons of clocks that are below what they could be, as bits.
    pub clock_reasons: u64,
    /// Nanoseconds for which heat slowed it down.
    pub thermal_violation_ns: u64,
    /// Nanoseconds for which the power limit slowed it down.
    pub power_violation_ns: u64,
    /// Load in percent.
    pub utilization_percent: u32,
    /// Corrected memory errors since the driver was loaded.
    pub ecc_corrected_volatile: u64,
    /// Uncorrected memory errors since the driver was loaded.
    pub ecc_uncorrected_volatile: u64,
    /// Corrected memory errors in its life.
    pub ecc_corrected_aggregate: u64,
    /// Uncorrected memory errors in its life.
    pub ecc_uncorrected_aggregate: u64,
    /// True if the static memory has passed its threshold of errors.
    pub sram_threshold_exceeded: bool,
    /// Pages retired because of corrected errors.
    pub retired_pages_sbe: u32,
    /// Pages retired because of uncorrected errors.
    pub retired_pages_dbe: u32,
    /// True if a page waits to be retired.
    pub retired_pages_pending: bool,
    /// Rows replaced because of corrected errors.
    pub remapped_rows_correctable: u32,
    /// Rows replaced because of uncorrected errors.
    pub remapped_rows_uncorrectable: u32,
    /// True if a row waits to be replaced.
    pub remap_pending: bool,
    /// True if a row could not be replaced.
    pub remap_failed: bool,
    /// The action that the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain of peers, 4 drain
    /// and reset, 5 recovery of the IMEX domain, 6 reset of the bus, 7 reboot of the system.
    pub recovery_action: u32,
    /// The events that can be waited for, as bits of NVML.
    pub supported_events: u64,
    /// The number of its NVLinks; all are up and lead to switches, but for those below.
    pub links: u32,
    /// The links that differ from that.
    pub link: Vec<FakeLink>,
    /// The fabric that joins machines, where there is one.
    pub fabric: Option<Fabric>,
    /// True if the GPU is divided.
    pub mig_enabled: bool,
    /// Its partitions, where it is.
    pub partition: Vec<FakePartition>,
    /// Number of its file `/dev/nvidiaN`; its index where it is not said.
    pub minor: Option<u32>,
    /// True if it stays initialised while nobody uses it, until that is changed.
    pub persistence: bool,
    /// Ids of the processes that work on it.
    pub processes: Vec<u32>,
}

/// One NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeLink {
    /// Its number at the GPU.
    pub link: u32,
    /// True if the link is up.
    pub up: bool,
    /// PCI address of the other end; made from the number where it is not said, none where empty.
    pub remote_pci: Option<String>,
    /// Its number at the other end; not told where it is not said.
    pub remote_link: Option<u32>,
    /// Kind of the other end: 0 a GPU, 2 a switch, 255 unknown.
    pub remote_kind: u32,
    /// Times that something was sent again.
    pub replays: u64,
    /// Times that the link was made anew.
    pub recoveries: u64,
    /// Wrong checksums.
    pub crc_errors: u64,
    /// Errors that were left after correction.
    pub effective_errors: u64,
}

/// The fabric, as a GPU knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fabric {
    /// The progress of the registration: 0 none, 1 not begun, 2 under way, 3 ended.
    pub state: u8,
    /// The result of the registration, as a code of NVML; 0 is success.
    pub status: u32,
    /// Number of the clique.
    pub clique: u32,
    /// UUID of the cluster, as 16 bytes.
    pub cluster: [u8; 16],
    /// Bits of its health.
    pub health_mask: u32,
}

/// One partition of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FakePartition {
    /// UUID.
    pub uuid: String,
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instance.
    #[serde(default)]
    pub compute_instance: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The action that the driver asks for, as for a GPU.
    #[serde(default)]
    pub recovery_action: u32,
}

/// Something that happens to a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeEvent {
    /// Index of the GPU.
    pub gpu: u32,
    /// Code of an XID.
    pub xid: Option<u64>,
    /// Another event, as its bit of NVML.
    pub kind: Option<u64>,
    /// GPU instance.
    pub gpu_instance: Option<u32>,
    /// Compute instance.
    pub compute_instance: Option<u32>,
}

/// The behaviour of a function instead of its work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Behaviour {
    /// Answers with a code, of the library that the function is of.
    Code(u32),
    /// Never comes back.
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
    /// Returns so many healthy GPUs.
    pub fn healthy(gpus: u32) -> Self {
        Self {
            gpus,
            ..Self::default()
        }
    }

    /// Reads a scenario; an error says the line where it can.
    pub fn from_toml(text: &str) -> Result<Self, String> {
        let scenario: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Writes the scenario.
    pub fn to_toml(&self) -> Result<String, String> {
        self.check()?;
        toml::to_string(self).map_err(|error| error.to_string())
    }

    /// Returns the GPU with an index, to be changed; one that was healthy gets an entry.
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

    /// Returns the GPU with an index as the scenario has it.
    pub(crate) fn gpu(&self, index: u32) -> FakeGpu {
        let listed = self.gpu.iter().find(|gpu| gpu.index == index).cloned();
        listed.unwrap_or_else(|| FakeGpu {
            index,
            ..FakeGpu::default()
        })
    }

    /// Returns the indexes of the GPUs that are counted, which are not the driver's where one is
    /// absent.
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

/// The word of a scenario for a function that the driver lacks.
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
        // Those of DCGM are negative.
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
