//! Functions about one GPU, or one of its partitions.

use std::ffi::{c_char, c_int, c_longlong, c_uint, c_ulonglong};
use std::slice;

use nvml_wrapper_sys::bindings as sys;

use super::{
    Device, Handle, array, current, directory, of_device, of_gpu, tell, versioned, write,
    write_text,
};
use crate::code;
use crate::scenario::{FakeLink, MAX_PARTITIONS};

/// Exports functions that return a number of a GPU.
macro_rules! numbers {
    ($($name:ident: $type:ty = |$gpu:ident| $value:expr;)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: Handle, value: *mut $type) -> u32 {
            of_gpu(stringify!($name), device, |$gpu| write(value, $value))
        }
    )* };
}

/// Exports functions that return a text of a GPU.
macro_rules! texts {
    ($($name:ident = |$gpu:ident| $value:expr;)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: Handle, text: *mut c_char, length: c_uint) -> u32 {
            of_gpu(stringify!($name), device, |$gpu| write_text(text, length, &$value))
        }
    )* };
}

numbers! {
    nvmlDeviceGetArchitecture: c_uint = |gpu| gpu.architecture;
    nvmlDeviceGetNumaNodeId: c_uint = |gpu| gpu.numa_node;
    nvmlDeviceGetMaxPcieLinkGeneration: c_uint = |gpu| gpu.pcie_max_generation;
    nvmlDeviceGetMaxPcieLinkWidth: c_uint = |gpu| gpu.pcie_max_width;
    nvmlDeviceGetCurrPcieLinkGeneration: c_uint = |gpu| gpu.pcie_generation;
    nvmlDeviceGetCurrPcieLinkWidth: c_uint = |gpu| gpu.pcie_width;
    nvmlDeviceGetPcieReplayCounter: c_uint = |gpu| gpu.pcie_replays;
    nvmlDeviceGetPowerUsage: c_uint = |gpu| gpu.power_mw;
    nvmlDeviceGetEnforcedPowerLimit: c_uint = |gpu| gpu.power_limit_mw;
    nvmlDeviceGetCurrentClocksEventReasons: c_ulonglong = |gpu| gpu.clock_reasons;
    nvmlDeviceGetCurrentClocksThrottleReasons: c_ulonglong = |gpu| gpu.clock_reasons;
    nvmlDeviceGetRetiredPagesPendingStatus: c_uint = |gpu| gpu.retired_pages_pending.into();
    nvmlDeviceGetMinorNumber: c_uint = |gpu| gpu.minor.unwrap_or(gpu.index);
    nvmlDeviceGetPersistenceMode: c_uint = |gpu| gpu.persistence.into();
    nvmlDeviceGetUtilizationRates: sys::nvmlUtilization_t = |gpu| sys::nvmlUtilization_t {
        gpu: gpu.utilization_percent,
        memory: 0,
    };
}

texts! {
    nvmlDeviceGetName = |gpu| gpu.product;
    nvmlDeviceGetSerial = |gpu| gpu.serial();
    nvmlDeviceGetBoardPartNumber = |gpu| gpu.board_part_number;
}

/// Persistence mode is written to the scenario, because the driver keeps it as well.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetPersistenceMode(device: Handle, mode: c_uint) -> u32 {
    of_gpu("nvmlDeviceSetPersistenceMode", device, |gpu| {
        let mut scenario = current().as_ref().clone();
        scenario.gpu_mut(gpu.index).persistence = mode != 0;
        match crate::write(directory(), &scenario) {
            Ok(()) => code::SUCCESS,
            Err(_) => code::UNKNOWN,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    processes: *mut sys::nvmlProcessInfo_t,
) -> u32 {
    of_gpu("nvmlDeviceGetComputeRunningProcesses_v3", device, |gpu| {
        if count.is_null() {
            return code::INVALID_ARGUMENT;
        }
        let told = u32::try_from(gpu.processes.len()).unwrap_or(u32::MAX);
        // SAFETY: The caller passes a pointer to the number of processes that it has room for.
        let room = unsafe { count.replace(told) };
        if processes.is_null() || room < told {
            return code::INSUFFICIENT_SIZE;
        }
        for (at, pid) in gpu.processes.iter().enumerate() {
            let process = sys::nvmlProcessInfo_t {
                pid: *pid,
                usedGpuMemory: 1 << 30,
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            };
            // SAFETY: The room for all processes has been checked.
            unsafe { processes.add(at).write(process) };
        }
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: Handle, text: *mut c_char, length: c_uint) -> u32 {
    of_device("nvmlDeviceGetUUID", device, |device, _| match device {
        Device::Gpu(gpu) => write_text(text, length, &gpu.uuid()),
        Device::Partition(_, partition) => write_text(text, length, &partition.uuid),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: *mut sys::nvmlPciInfo_t) -> u32 {
    of_gpu("nvmlDeviceGetPciInfo_v3", device, |gpu| {
        write(pci, pci_info(&gpu.pci()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPlatformInfo(
    device: Handle,
    platform: *mut sys::nvmlPlatformInfo_v2_t,
) -> u32 {
    of_gpu("nvmlDeviceGetPlatformInfo", device, |gpu| {
        if gpu.chassis_serial.is_empty() {
            return code::NOT_SUPPORTED;
        }
        tell(versioned(platform, 2), |platform| {
            let serial: [c_char; 16] = array(&gpu.chassis_serial);
            platform.chassisSerialNumber = serial.map(|byte| byte.to_ne_bytes()[0]);
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: Handle, memory: *mut sys::nvmlMemory_t) -> u32 {
    of_device("nvmlDeviceGetMemoryInfo", device, |device, _| {
        let (total, used) = match device {
            Device::Gpu(gpu) => (gpu.memory_bytes, gpu.memory_used_bytes),
            Device::Partition(_, partition) => (partition.memory_bytes, 0),
        };
        let free = total.saturating_sub(used);
        write(memory, sys::nvmlMemory_t { total, free, used })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(device: Handle, _: c_uint, degrees: *mut c_uint) -> u32 {
    of_gpu("nvmlDeviceGetTemperature", device, |gpu| {
        write(degrees, u32::try_from(gpu.temperature_c).unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperatureV(
    device: Handle,
    told: *mut sys::nvmlTemperature_v1_t,
) -> u32 {
    of_gpu("nvmlDeviceGetTemperatureV", device, |gpu| {
        tell(versioned(told, 1), |told| {
            told.temperature = gpu.temperature_c;
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMarginTemperature(
    device: Handle,
    told: *mut sys::nvmlMarginTemperature_v1_t,
) -> u32 {
    of_gpu("nvmlDeviceGetMarginTemperature", device, |gpu| {
        tell(versioned(told, 1), |told| {
            told.marginTemperature = gpu.margin_c;
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetViolationStatus(
    device: Handle,
    policy: c_uint,
    told: *mut sys::nvmlViolationTime_t,
) -> u32 {
    of_gpu("nvmlDeviceGetViolationStatus", device, |gpu| {
        let violation = match policy {
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_THERMAL => gpu.thermal_violation_ns,
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_POWER => gpu.power_violation_ns,
            _ => return code::NOT_SUPPORTED,
        };
        let time = sys::nvmlViolationTime_t {
            referenceTime: 0,
            violationTime: violation,
        };
        write(told, time)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: Handle,
    kind: c_uint,
    counter: c_uint,
    count: *mut c_ulonglong,
) -> u32 {
    of_gpu("nvmlDeviceGetTotalEccErrors", device, |gpu| {
        let corrected = kind == sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED;
        let volatile = counter == sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
        let errors = match (corrected, volatile) {
            (true, true) => gpu.ecc_corrected_volatile,
            (false, true) => gpu.ecc_uncorrected_volatile,
            (true, false) => gpu.ecc_corrected_aggregate,
            (false, false) => gpu.ecc_uncorrected_aggregate,
        };
        write(count, errors)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSramEccErrorStatus(
    device: Handle,
    status: *mut sys::nvmlEccSramErrorStatus_v1_t,
) -> u32 {
    of_gpu("nvmlDeviceGetSramEccErrorStatus", device, |gpu| {
        tell(versioned(status, 1), |status| {
            status.bThresholdExceeded = gpu.sram_threshold_exceeded.into();
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRetiredPages(
    device: Handle,
    cause: c_uint,
    count: *mut c_uint,
    addresses: *mut c_ulonglong,
) -> u32 {
    of_gpu("nvmlDeviceGetRetiredPages", device, |gpu| {
        let double =
            sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
        let pages = if cause == double {
            gpu.retired_pages_dbe
        } else {
            gpu.retired_pages_sbe
        };
        let room = if addresses.is_null() {
            0
        } else {
            // SAFETY: The caller passes a pointer to the number of addresses that it has room
            // for.
            unsafe { count.read() }
        };
        if room < pages {
            write(count, pages);
            return code::INSUFFICIENT_SIZE;
        }
        for page in 0..pages as usize {
            // SAFETY: As above, there is room for the addresses.
            unsafe { addresses.add(page).write(page as c_ulonglong) };
        }
        write(count, pages)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRemappedRows(
    device: Handle,
    correctable: *mut c_uint,
    uncorrectable: *mut c_uint,
    pending: *mut c_uint,
    failed: *mut c_uint,
) -> u32 {
    of_gpu("nvmlDeviceGetRemappedRows", device, |gpu| {
        write(correctable, gpu.remapped_rows_correctable);
        write(uncorrectable, gpu.remapped_rows_uncorrectable);
        write(pending, gpu.remap_pending.into());
        write(failed, gpu.remap_failed.into())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, up: *mut c_uint) -> u32 {
    of_link("nvmlDeviceGetNvLinkState", device, link, |link| {
        write(up, link.up.into())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: Handle,
    link: c_uint,
    pci: *mut sys::nvmlPciInfo_t,
) -> u32 {
    of_link(
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
        device,
        link,
        |link| match link.remote_pci().as_str() {
            "" => code::NOT_SUPPORTED,
            remote => write(pci, pci_info(remote)),
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: Handle,
    link: c_uint,
    kind: *mut c_uint,
) -> u32 {
    of_link(
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        device,
        link,
        |link| write(kind, link.remote_kind),
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(device: Handle, now: *mut c_uint, pending: *mut c_uint) -> u32 {
    of_gpu("nvmlDeviceGetMigMode", device, |gpu| {
        write(pending, gpu.mig_enabled.into());
        write(now, gpu.mig_enabled.into())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: *mut c_uint) -> u32 {
    of_gpu("nvmlDeviceGetMaxMigDeviceCount", device, |gpu| {
        // Drivers report the number of slots, including empty ones.
        let slots = gpu.partition.len().clamp(7, MAX_PARTITIONS);
        write(count, u32::try_from(slots).unwrap_or(u32::MAX))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: Handle,
    index: c_uint,
    partition: *mut Handle,
) -> u32 {
    of_gpu("nvmlDeviceGetMigDeviceHandleByIndex", device, |gpu| {
        let at = index as usize;
        if gpu.mig_enabled && at < gpu.partition.len() {
            write(partition, Handle::of_partition(gpu.index, at))
        } else {
            code::NOT_FOUND
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceId(device: Handle, id: *mut c_uint) -> u32 {
    of_device(
        "nvmlDeviceGetGpuInstanceId",
        device,
        |device, _| match device {
            Device::Gpu(_) => code::NOT_SUPPORTED,
            Device::Partition(_, partition) => write(id, partition.gpu_instance),
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeInstanceId(device: Handle, id: *mut c_uint) -> u32 {
    of_device(
        "nvmlDeviceGetComputeInstanceId",
        device,
        |device, _| match device {
            Device::Gpu(_) => code::NOT_SUPPORTED,
            Device::Partition(_, partition) => write(id, partition.compute_instance),
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(
    device: Handle,
    count: c_int,
    values: *mut sys::nvmlFieldValue_t,
) -> u32 {
    of_device("nvmlDeviceGetFieldValues", device, |device, scenario| {
        // SAFETY: The caller passes as many values as its count argument says.
        let values =
            unsafe { slice::from_raw_parts_mut(values, usize::try_from(count).unwrap_or(0)) };
        for value in values {
            let told = (!scenario.unknown_fields.contains(&value.fieldId))
                .then(|| field(&device, value.fieldId, value.scopeId));
            match told.flatten() {
                Some(number) => {
                    value.nvmlReturn = code::SUCCESS;
                    value.valueType = sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG;
                    value.value.sllVal = number;
                }
                None => value.nvmlReturn = code::NOT_SUPPORTED,
            }
        }
        code::SUCCESS
    })
}

/// Returns the value of a field; `None` if the device does not support it.
fn field(device: &Device<'_>, id: u32, scope: u32) -> Option<c_longlong> {
    let gpu = match device {
        Device::Gpu(gpu) => gpu,
        Device::Partition(_, partition) => {
            let action = c_longlong::from(partition.recovery_action);
            return (id == sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).then_some(action);
        }
    };
    let of_link = |count: fn(FakeLink) -> u64| {
        let link = gpu.link(scope)?;
        c_longlong::try_from(count(link)).ok()
    };
    match id {
        sys::field_id::NVML_FI_DEV_MEMORY_TEMP => Some(gpu.memory_temperature_c.into()),
        sys::field_id::NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT => {
            Some(gpu.slowdown_margin_c.into())
        }
        sys::field_id::NVML_FI_DEV_PERF_POLICY_POWER => {
            c_longlong::try_from(gpu.power_violation_ns).ok()
        }
        sys::field_id::NVML_FI_DEV_PERF_POLICY_THERMAL => {
            c_longlong::try_from(gpu.thermal_violation_ns).ok()
        }
        sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => Some(gpu.recovery_action.into()),
        sys::field_id::NVML_FI_DEV_NVLINK_LINK_COUNT => Some(gpu.links.into()),
        sys::field_id::NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID => {
            gpu.link(scope)?.remote_link.map(c_longlong::from)
        }
        sys::field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY => of_link(|link| link.replays),
        sys::field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY
        | sys::field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS => {
            of_link(|link| link.recoveries)
        }
        sys::field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC => of_link(|link| link.crc_errors),
        sys::field_id::NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS => {
            of_link(|link| link.effective_errors)
        }
        _ => None,
    }
}

/// Runs a call about a link of a GPU.
fn of_link(call: &str, device: Handle, link: u32, answer: impl FnOnce(FakeLink) -> u32) -> u32 {
    of_gpu(call, device, |gpu| match gpu.link(link) {
        Some(link) => answer(link),
        None if gpu.links == 0 => code::NOT_SUPPORTED,
        None => code::INVALID_ARGUMENT,
    })
}

fn pci_info(address: &str) -> sys::nvmlPciInfo_t {
    sys::nvmlPciInfo_t {
        busIdLegacy: array(address.get(4..).unwrap_or(address)),
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: 0x2330_10de,
        pciSubSystemId: 0x16c1_10de,
        busId: array(address),
    }
}
