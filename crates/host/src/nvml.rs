//! NVML, NVIDIA's library for GPU management: inventory, health and events of GPUs.
//!
//! A call may hang or crash inside the vendor's code, so only [`crate::gpu_probe`] and
//! [`crate::gpu_reset`] use this module, each in a process of its own. A value that a GPU or
//! its driver does not support is `None`; a call that fails is listed in [`Readings::failed`];
//! a GPU that is gone is an [`UnreadableGpu`]. Old drivers lack functions, new ones return
//! numbers without a name here: neither is an error.

mod error;
mod events;
mod fabric;
mod functions;
mod links;
mod query;
mod readings;
mod types;

use std::path::Path;
use std::sync::Arc;

use diagnosis::gpu::{Gpu, Inventory, MigDevice, Readings, UnreadableGpu, pci_address};
use nvml_wrapper_sys::bindings::{self as sys, field_id as field, nvmlPlatformInfo_v2_t};

pub use self::error::{NvmlError, NvmlOpenError};
pub use self::events::Events;
use crate::library::{LibraryPlaces, Listener};
use functions::{Device, Functions};
use query::Query;
use types::{Length, TEXT_BYTES, text, version};

/// Most GPUs that are read; a machine has eight or sixteen.
const MAX_GPUS: u32 = 256;
/// Most partitions of one GPU that are read; the largest have seven.
const MAX_PARTITIONS: u32 = 64;

/// Architecture after Blackwell (`NVML_DEVICE_ARCH_RUBIN`), which the bindings lack.
const ARCH_RUBIN: u32 = 13;

/// The loaded and initialised library.
pub struct Nvml {
    functions: Arc<Functions>,
}

/// UUIDs of the devices, and errors of those that do not answer: a cheap check for whether the
/// inventory must be rebuilt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roster(Vec<Result<GpuUuids, UnreadableGpu>>);

/// UUIDs of a GPU and of its partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GpuUuids {
    uuid: String,
    partitions: Vec<String>,
}

// === impl Nvml ===

impl Nvml {
    /// Opens and initialises the library. `listener` is called before every library call.
    pub fn open(places: &LibraryPlaces, listener: Listener) -> Result<Self, NvmlOpenError> {
        let functions = Functions::open(places, listener)?;
        functions
            .nvmlInit_v2()
            .map_err(|source| NvmlOpenError::NotUsable {
                library: functions.found_at().to_owned(),
                source,
            })?;
        Ok(Self {
            functions: Arc::new(functions),
        })
    }

    /// Returns the path or name that the library was loaded from.
    pub fn found_at(&self) -> &Path {
        self.functions.found_at()
    }

    /// Returns which devices answer. Fails if the driver rather than one GPU is gone.
    pub fn roster(&self) -> Result<Roster, NvmlError> {
        let devices = (0..self.count()?).map(|index| match self.identify(index) {
            Ok((device, uuid)) => {
                let mut gpu = Query::new(&self.functions, device);
                let partitions = partitions(&mut gpu);
                let partitions = partitions.into_iter().map(|(_, uuid)| uuid).collect();
                Ok(Ok(GpuUuids { uuid, partitions }))
            }
            Err(error) if error.is_driver_error() => Err(error),
            Err(error) => Ok(Err(unreadable(index, error))),
        });
        devices.collect::<Result<_, _>>().map(Roster)
    }

    /// Returns the inventory. Fails if the driver rather than one GPU is gone.
    pub fn inventory(&self) -> Result<Inventory, NvmlError> {
        let mut inventory = Inventory {
            driver_version: self.driver_version(),
            cuda_version: self.cuda_version(),
            ..Inventory::default()
        };
        for index in 0..self.count()? {
            let described = self.identify(index).and_then(|(device, uuid)| {
                let mut gpu = Query::new(&self.functions, device);
                let described = describe(&mut gpu, uuid);
                gpu.lost.map_or(Ok(described), Err)
            });
            match described {
                Ok(gpu) => inventory.gpus.push(gpu),
                Err(error) if error.is_driver_error() => return Err(error),
                Err(error) => inventory.unreadable.push(unreadable(index, error)),
            }
        }
        Ok(inventory)
    }

    /// Returns the readings of a GPU, or an error if the GPU is gone.
    pub fn readings(&self, of: &Gpu) -> Result<Readings, UnreadableGpu> {
        let gone = |error| UnreadableGpu {
            uuid: Some(of.uuid.clone()),
            pci: Some(of.pci.clone()),
            ..unreadable(of.index, error)
        };
        let mut readings = Readings {
            uuid: of.uuid.clone(),
            ..Readings::default()
        };
        let device = self.functions.gpu(of.index).map_err(gone)?;
        let mut gpu = Query::new(&self.functions, device);
        readings::read(&mut gpu, &mut readings);
        if of.mig_enabled == Some(true) {
            for (partition, uuid) in partitions(&mut gpu) {
                let mut partition = Query::new(&self.functions, partition);
                if let Some(action) = readings::recovery_action(&mut partition) {
                    readings.mig_recovery_actions.push((uuid, action));
                }
            }
        }
        readings.failed = gpu.failed;
        gpu.lost.map_or(Ok(readings), |error| Err(gone(error)))
    }

    /// Subscribes to the events of the GPUs, and records in `inventory` which GPUs have none.
    pub fn events(&self, inventory: &mut Inventory) -> Result<Events, NvmlError> {
        Events::new(&self.functions, inventory)
    }

    /// Returns the ids of the processes that use a GPU; empty if the driver cannot list them.
    pub(crate) fn processes(&self, index: u32) -> Result<Vec<u32>, NvmlError> {
        let device = self.functions.gpu(index)?;
        self.functions.processes(device)
    }

    /// Returns the number N of the GPU's device file `/dev/nvidiaN`; `None` if the driver does
    /// not report it.
    pub(crate) fn minor(&self, index: u32) -> Option<u32> {
        let device = self.functions.gpu(index).ok()?;
        Query::new(&self.functions, device).value(Functions::nvmlDeviceGetMinorNumber)
    }

    /// Returns true if persistence mode is enabled; `None` if the driver does not report it.
    pub(crate) fn persistence(&self, index: u32) -> Option<bool> {
        let device = self.functions.gpu(index).ok()?;
        let mode =
            Query::new(&self.functions, device).value(Functions::nvmlDeviceGetPersistenceMode);
        mode.map(|mode: u32| mode != 0)
    }

    /// Enables or disables persistence mode.
    pub(crate) fn set_persistence(&self, index: u32, on: bool) -> Result<(), NvmlError> {
        let device = self.functions.gpu(index)?;
        self.functions
            .nvmlDeviceSetPersistenceMode(device, on.into())
    }

    /// Returns the driver's number of GPUs.
    fn count(&self) -> Result<u32, NvmlError> {
        let mut count = 0;
        self.functions.nvmlDeviceGetCount_v2(&mut count)?;
        Ok(count.min(MAX_GPUS))
    }

    /// Returns handle and UUID of the GPU with an index.
    fn identify(&self, index: u32) -> Result<(Device, String), NvmlError> {
        let device = self.functions.gpu(index)?;
        let mut uuid = [0; TEXT_BYTES];
        self.functions
            .nvmlDeviceGetUUID(device, &mut uuid, Length::OF_TEXT)?;
        Ok((device, text(&uuid)))
    }

    fn driver_version(&self) -> Option<String> {
        let mut version = [0; TEXT_BYTES];
        let result = self
            .functions
            .nvmlSystemGetDriverVersion(&mut version, Length::OF_TEXT);
        result.ok().map(|()| text(&version))
    }

    fn cuda_version(&self) -> Option<String> {
        let mut version = 0;
        let result = self
            .functions
            .nvmlSystemGetCudaDriverVersion_v2(&mut version);
        result.ok()?;
        Some(format!("{}.{}", version / 1000, version % 1000 / 10))
    }
}

/// Returns the entry for a GPU that did not answer.
fn unreadable(index: u32, error: NvmlError) -> UnreadableGpu {
    UnreadableGpu {
        index,
        uuid: None,
        pci: None,
        error: error.name(),
        is_lost: error.is_lost(),
    }
}

/// Returns the attributes of a GPU that do not change while its driver runs.
fn describe(gpu: &mut Query<'_>, uuid: String) -> Gpu {
    let pci = gpu.value(Functions::nvmlDeviceGetPciInfo_v3);
    let memory = gpu.value(Functions::nvmlDeviceGetMemoryInfo);
    let [slowdown] = gpu.fields([(field::NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, 0)]);
    let numa_node: Option<u32> = gpu.value(Functions::nvmlDeviceGetNumaNodeId);
    let mig_enabled = gpu.call(|nvml, device| {
        let (mut current, mut pending) = (0, 0);
        nvml.nvmlDeviceGetMigMode(device, &mut current, &mut pending)?;
        Ok(current != 0)
    });
    Gpu {
        index: gpu.device.gpu,
        uuid,
        pci: pci
            .map(|pci| pci_address(&text(&pci.busId)))
            .unwrap_or_default(),
        product: gpu.text(Functions::nvmlDeviceGetName).unwrap_or_default(),
        architecture: architecture(gpu),
        memory_bytes: memory.map(|memory| memory.total),
        serial: gpu.text(Functions::nvmlDeviceGetSerial),
        board_part_number: gpu.text(|nvml, device, number, length| {
            nvml.nvmlDeviceGetBoardPartNumber(device, number, length)
        }),
        chassis_serial: chassis_serial(gpu),
        numa_node: numa_node.filter(|node| *node != u32::MAX),
        slowdown_margin_c: slowdown.and_then(|degrees| i32::try_from(degrees).ok()),
        pcie_max_generation: gpu.value(Functions::nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_max_width: gpu.value(Functions::nvmlDeviceGetMaxPcieLinkWidth),
        mig_enabled,
        mig_devices: mig_devices(gpu),
        nvlinks: links::ends(gpu),
        unmonitored: None,
    }
}

/// Returns the name of the architecture; its number if there is no name here.
fn architecture(gpu: &mut Query<'_>) -> Option<String> {
    let number = gpu.value(Functions::nvmlDeviceGetArchitecture)?;
    let name = match number {
        sys::NVML_DEVICE_ARCH_KEPLER => "Kepler",
        sys::NVML_DEVICE_ARCH_MAXWELL => "Maxwell",
        sys::NVML_DEVICE_ARCH_PASCAL => "Pascal",
        sys::NVML_DEVICE_ARCH_VOLTA => "Volta",
        sys::NVML_DEVICE_ARCH_TURING => "Turing",
        sys::NVML_DEVICE_ARCH_AMPERE => "Ampere",
        sys::NVML_DEVICE_ARCH_ADA => "Ada",
        sys::NVML_DEVICE_ARCH_HOPPER => "Hopper",
        sys::NVML_DEVICE_ARCH_BLACKWELL => "Blackwell",
        ARCH_RUBIN => "Rubin",
        sys::NVML_DEVICE_ARCH_UNKNOWN => return None,
        other => return Some(other.to_string()),
    };
    Some(name.to_owned())
}

/// Returns the serial number of the chassis, if the machine is part of one.
fn chassis_serial(gpu: &mut Query<'_>) -> Option<String> {
    let platform = gpu.value(|nvml, device, platform: &mut nvmlPlatformInfo_v2_t| {
        platform.version = version::<nvmlPlatformInfo_v2_t>(2);
        nvml.nvmlDeviceGetPlatformInfo(device, platform)
    })?;
    let serial = platform.chassisSerialNumber;
    let serial = serial.split(|byte| *byte == 0).next().unwrap_or_default();
    let serial = String::from_utf8_lossy(serial).trim().to_owned();
    (!serial.is_empty()).then_some(serial)
}

/// Returns the partitions of a GPU and their UUIDs; leaves out one that is destroyed meanwhile.
fn partitions(gpu: &mut Query<'_>) -> Vec<(Device, String)> {
    let count: Option<u32> = gpu.value(Functions::nvmlDeviceGetMaxMigDeviceCount);
    let mut found = Vec::new();
    for index in 0..count.unwrap_or(0).min(MAX_PARTITIONS) {
        let partition = gpu.call(|nvml, device| match nvml.partition(device, index) {
            Ok(partition) => {
                let mut uuid = [0; TEXT_BYTES];
                nvml.nvmlDeviceGetUUID(partition, &mut uuid, Length::OF_TEXT)?;
                Ok(Some((partition, text(&uuid))))
            }
            // An unused slot; all slots are unused if the GPU is not partitioned.
            Err(error) if error.is_not_found() || error.is_out_of_range() => Ok(None),
            Err(error) => Err(error),
        });
        found.extend(partition.flatten());
    }
    found
}

/// Returns the attributes of a GPU's partitions.
fn mig_devices(gpu: &mut Query<'_>) -> Vec<MigDevice> {
    let mut devices = Vec::new();
    for (device, uuid) in partitions(gpu) {
        devices.extend(gpu.call(|nvml, _| {
            let (mut gpu_instance, mut compute_instance) = (0, 0);
            nvml.nvmlDeviceGetGpuInstanceId(device, &mut gpu_instance)?;
            nvml.nvmlDeviceGetComputeInstanceId(device, &mut compute_instance)?;
            let mut partition = Query::new(nvml, device);
            let memory = partition.value(Functions::nvmlDeviceGetMemoryInfo);
            Ok(MigDevice {
                uuid,
                gpu_instance,
                compute_instance,
                memory_bytes: memory.map(|memory: sys::nvmlMemory_t| memory.total),
            })
        }));
    }
    devices
}
