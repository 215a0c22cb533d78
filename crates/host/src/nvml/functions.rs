//! Bindings to the NVML functions in use, with the signatures of `nvml.h` of CUDA 13.
//!
//! Each has a safe method of [`Functions`]. A function that a driver lacks returns NVML's own
//! code [`FUNCTION_NOT_FOUND`], so that callers handle missing functions and unsupported values
//! alike.

#![allow(
    unsafe_code,
    reason = "functions of a C library; no other module calls them"
)]
#![allow(non_snake_case, reason = "the names of nvml.h")]

use std::convert::Infallible;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::{mem, ptr};

use nvml_wrapper_sys::bindings as sys;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEccSramErrorStatus_v1_t, nvmlEnableState_t, nvmlEventData_t, nvmlEventSet_t,
    nvmlFieldValue_t, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v3_t, nvmlMarginTemperature_v1_t,
    nvmlMemory_t, nvmlPciInfo_t, nvmlPlatformInfo_v2_t, nvmlProcessInfo_t, nvmlReturn_t,
    nvmlTemperature_v1_t, nvmlUtilization_t, nvmlViolationTime_t,
};

use super::error::{FUNCTION_NOT_FOUND, NvmlError};
use super::types::{FabricInfoV4, Length, Text};
use crate::library::{Library, LibraryOpenError, LibraryPlaces, Listener};

/// Library name, the same for every driver.
const NAMES: &[&str] = &["libnvidia-ml.so.1"];

/// Most processes of one kind that are read per device; a GPU rarely has more than a dozen.
const MAX_PROCESSES: usize = 256;

/// The library's handle of a GPU or a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device {
    handle: nvmlDevice_t,
    /// Index of the GPU; for a partition, of the GPU that it belongs to.
    pub(super) gpu: u32,
}

/// A set of events that is valid until [`Functions::free`].
#[derive(Debug)]
pub(super) struct EventSet(nvmlEventSet_t);

/// An event, with the handle of its device.
pub(super) struct RawEvent {
    device: nvmlDevice_t,
    pub(super) kind: u64,
    pub(super) data: u64,
    pub(super) gpu_instance: u32,
    pub(super) compute_instance: u32,
}

/// A structure of NVML that may be all zeroes.
///
/// # Safety
///
/// All fields must be numbers, or arrays and unions of numbers.
pub(super) unsafe trait Plain: Copy {
    /// Returns the value with all bytes zero.
    fn zero() -> Self {
        // SAFETY: Guaranteed by the trait's contract.
        unsafe { mem::zeroed() }
    }
}

// SAFETY: The handle is an opaque name, which the library accepts on any thread.
unsafe impl Send for Device {}
// SAFETY: As above.
unsafe impl Sync for Device {}
// SAFETY: As above; a set cannot be copied, so only one thread waits for it.
unsafe impl Send for EventSet {}

macro_rules! plain {
    ($($type:ty),* $(,)?) => { $(
        // SAFETY: Numbers and arrays of numbers, in nvml.h and in the bindings made from it.
        unsafe impl Plain for $type {}
    )* };
}
plain!(
    nvmlPciInfo_t,
    nvmlPlatformInfo_v2_t,
    nvmlMemory_t,
    nvmlTemperature_v1_t,
    nvmlMarginTemperature_v1_t,
    nvmlUtilization_t,
    nvmlViolationTime_t,
    nvmlEccSramErrorStatus_v1_t,
    nvmlGpuFabricInfo_t,
    nvmlGpuFabricInfo_v3_t,
    FabricInfoV4,
    nvmlFieldValue_t,
    u32,
    u64,
);

/// Declares the table of functions, and a method for each but the raw ones, whose arguments
/// only this file may construct.
macro_rules! functions {
    (
        required { $($needed:ident($($needed_arg:ident: $needed_type:ty),*);)* }
        system { $($system:ident($($system_arg:ident: $system_type:ty),*);)* }
        device { $($device:ident($($device_arg:ident: $device_type:ty),*);)* }
        raw { $($raw:ident($($raw_type:ty),*);)* }
    ) => {
        /// The loaded library and its functions.
        pub(super) struct Functions {
            $($needed: unsafe extern "C" fn($($needed_type),*) -> nvmlReturn_t,)*
            $($system: Option<unsafe extern "C" fn($($system_type),*) -> nvmlReturn_t>,)*
            $($device: Option<unsafe extern "C" fn(nvmlDevice_t $(, $device_type)*) -> nvmlReturn_t>,)*
            $($raw: Option<unsafe extern "C" fn($($raw_type),*) -> nvmlReturn_t>,)*
            listener: Listener,
            /// Declared last, since its functions are invalid after it is dropped.
            library: Library,
        }

        impl Functions {
            /// Opens the library and looks up its functions.
            pub(super) fn open(places: &LibraryPlaces, listener: Listener) -> Result<Self, LibraryOpenError> {
                listener("dlopen", None);
                let library = Library::open(NAMES, places)?;
                // SAFETY: The signatures are those of nvml.h, and the table does not outlive
                // the library.
                unsafe {
                    Ok(Self {
                        $($needed: library.required(stringify!($needed), "NVML")?,)*
                        $($system: library.function(stringify!($system)),)*
                        $($device: library.function(stringify!($device)),)*
                        $($raw: library.function(stringify!($raw)),)*
                        listener,
                        library,
                    })
                }
            }

            $(pub(super) fn $needed(&self $(, $needed_arg: $needed_type)*) -> Result<(), NvmlError> {
                (self.listener)(stringify!($needed), None);
                // SAFETY: The library is open and the signature is that of the header;
                // out-parameters are borrowed exclusively.
                NvmlError::check(stringify!($needed), unsafe { (self.$needed)($($needed_arg),*) })
            })*

            $(pub(super) fn $system(&self $(, $system_arg: $system_type)*) -> Result<(), NvmlError> {
                (self.listener)(stringify!($system), None);
                let code = self.$system.map_or(FUNCTION_NOT_FOUND, |function| {
                    // SAFETY: As above.
                    unsafe { function($($system_arg),*) }
                });
                NvmlError::check(stringify!($system), code)
            })*

            $(pub(super) fn $device(
                &self,
                device: Device
                $(, $device_arg: $device_type)*
            ) -> Result<(), NvmlError> {
                (self.listener)(stringify!($device), Some(device.gpu));
                let code = self.$device.map_or(FUNCTION_NOT_FOUND, |function| {
                    // SAFETY: As above, and the library created the device handle.
                    unsafe { function(device.handle $(, $device_arg)*) }
                });
                NvmlError::check(stringify!($device), code)
            })*

            /// Names and parameter types of the functions.
            #[cfg(test)]
            const SIGNATURES: &[(&str, &[&str])] = &[
                $((stringify!($needed), &[$(stringify!($needed_type)),*]),)*
                $((stringify!($system), &[$(stringify!($system_type)),*]),)*
                $((stringify!($device), &["nvmlDevice_t", $(stringify!($device_type)),*]),)*
                $((stringify!($raw), &[$(stringify!($raw_type)),*]),)*
            ];

            /// Returns the name of each function, and true if the library has it.
            #[cfg(test)]
            fn has(&self) -> Vec<(&'static str, bool)> {
                vec![
                    $((stringify!($needed), true),)*
                    $((stringify!($system), self.$system.is_some()),)*
                    $((stringify!($device), self.$device.is_some()),)*
                    $((stringify!($raw), self.$raw.is_some()),)*
                ]
            }
        }
    };
}

// `&mut T` is a pointer that is never null; `Option<&Infallible>` is always null.
functions! {
    required {
        nvmlInit_v2();
        nvmlShutdown();
        nvmlDeviceGetCount_v2(count: &mut c_uint);
    }
    system {
        nvmlSystemGetDriverVersion(text: &mut Text, length: Length);
        nvmlSystemGetCudaDriverVersion_v2(version: &mut c_int);
    }
    device {
        nvmlDeviceGetUUID(text: &mut Text, length: Length);
        nvmlDeviceGetName(text: &mut Text, length: Length);
        nvmlDeviceGetSerial(text: &mut Text, length: Length);
        nvmlDeviceGetBoardPartNumber(text: &mut Text, length: Length);
        nvmlDeviceGetPciInfo_v3(pci: &mut nvmlPciInfo_t);
        nvmlDeviceGetPlatformInfo(platform: &mut nvmlPlatformInfo_v2_t);
        nvmlDeviceGetArchitecture(architecture: &mut c_uint);
        nvmlDeviceGetNumaNodeId(node: &mut c_uint);
        nvmlDeviceGetMemoryInfo(memory: &mut nvmlMemory_t);
        nvmlDeviceGetMaxPcieLinkGeneration(generation: &mut c_uint);
        nvmlDeviceGetMaxPcieLinkWidth(width: &mut c_uint);
        nvmlDeviceGetCurrPcieLinkGeneration(generation: &mut c_uint);
        nvmlDeviceGetCurrPcieLinkWidth(width: &mut c_uint);
        nvmlDeviceGetPcieReplayCounter(count: &mut c_uint);
        nvmlDeviceGetTemperature(sensor: c_uint, degrees: &mut c_uint);
        nvmlDeviceGetTemperatureV(temperature: &mut nvmlTemperature_v1_t);
        nvmlDeviceGetMarginTemperature(margin: &mut nvmlMarginTemperature_v1_t);
        nvmlDeviceGetPowerUsage(milliwatts: &mut c_uint);
        nvmlDeviceGetEnforcedPowerLimit(milliwatts: &mut c_uint);
        nvmlDeviceGetCurrentClocksEventReasons(reasons: &mut c_ulonglong);
        nvmlDeviceGetCurrentClocksThrottleReasons(reasons: &mut c_ulonglong);
        nvmlDeviceGetViolationStatus(policy: c_uint, violation: &mut nvmlViolationTime_t);
        nvmlDeviceGetUtilizationRates(utilization: &mut nvmlUtilization_t);
        nvmlDeviceGetTotalEccErrors(kind: c_uint, counter: c_uint, count: &mut c_ulonglong);
        nvmlDeviceGetSramEccErrorStatus(status: &mut nvmlEccSramErrorStatus_v1_t);
        nvmlDeviceGetRetiredPages(
            cause: c_uint,
            count: &mut c_uint,
            addresses: Option<&Infallible>
        );
        nvmlDeviceGetRetiredPagesPendingStatus(pending: &mut c_uint);
        nvmlDeviceGetRemappedRows(
            correctable: &mut c_uint,
            uncorrectable: &mut c_uint,
            pending: &mut c_uint,
            failed: &mut c_uint
        );
        nvmlDeviceGetNvLinkState(link: c_uint, up: &mut c_uint);
        nvmlDeviceGetNvLinkRemotePciInfo_v2(link: c_uint, pci: &mut nvmlPciInfo_t);
        nvmlDeviceGetNvLinkRemoteDeviceType(link: c_uint, kind: &mut c_uint);
        nvmlDeviceGetGpuFabricInfo(fabric: &mut nvmlGpuFabricInfo_t);
        // The library writes as much as the version covers; the structure of version 3 extends
        // that of 2.
        nvmlDeviceGetGpuFabricInfoV(fabric: &mut nvmlGpuFabricInfo_v3_t);
        nvmlDeviceGetGpuFabricInfo_v4(fabric: &mut FabricInfoV4);
        nvmlDeviceGetMigMode(current: &mut c_uint, pending: &mut c_uint);
        nvmlDeviceGetMaxMigDeviceCount(count: &mut c_uint);
        nvmlDeviceGetGpuInstanceId(id: &mut c_uint);
        nvmlDeviceGetComputeInstanceId(id: &mut c_uint);
        nvmlDeviceGetSupportedEventTypes(kinds: &mut c_ulonglong);
        nvmlDeviceGetMinorNumber(minor: &mut c_uint);
        nvmlDeviceGetPersistenceMode(mode: &mut nvmlEnableState_t);
        nvmlDeviceSetPersistenceMode(mode: nvmlEnableState_t);
    }
    raw {
        nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, *mut c_uint, *mut nvmlProcessInfo_t);
        nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, *mut c_uint, *mut nvmlProcessInfo_t);
        nvmlDeviceGetHandleByIndex_v2(c_uint, *mut nvmlDevice_t);
        nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t, c_uint, *mut nvmlDevice_t);
        nvmlDeviceGetFieldValues(nvmlDevice_t, c_int, *mut nvmlFieldValue_t);
        nvmlEventSetCreate(*mut nvmlEventSet_t);
        nvmlEventSetFree(nvmlEventSet_t);
        nvmlEventSetWait_v2(nvmlEventSet_t, *mut nvmlEventData_t, c_uint);
        nvmlDeviceRegisterEvents(nvmlDevice_t, c_ulonglong, nvmlEventSet_t);
    }
}

// === impl Functions ===

impl Functions {
    /// Returns the path or name that the library was loaded from.
    pub(super) fn found_at(&self) -> &std::path::Path {
        &self.library.found_at
    }

    /// Returns the GPU with an index.
    pub(super) fn gpu(&self, index: u32) -> Result<Device, NvmlError> {
        let call = "nvmlDeviceGetHandleByIndex_v2";
        (self.listener)(call, Some(index));
        let mut handle = ptr::null_mut();
        let code = self
            .nvmlDeviceGetHandleByIndex_v2
            // SAFETY: The handle is an out-parameter, borrowed exclusively.
            .map_or(FUNCTION_NOT_FOUND, |function| unsafe {
                function(index, &raw mut handle)
            });
        NvmlError::check(call, code)?;
        Ok(Device { handle, gpu: index })
    }

    /// Returns the partition of a GPU with an index.
    pub(super) fn partition(&self, of: Device, index: u32) -> Result<Device, NvmlError> {
        let call = "nvmlDeviceGetMigDeviceHandleByIndex";
        (self.listener)(call, Some(of.gpu));
        let mut handle = ptr::null_mut();
        let code = self
            .nvmlDeviceGetMigDeviceHandleByIndex
            // SAFETY: As above, and the library created the device handle.
            .map_or(FUNCTION_NOT_FOUND, |function| unsafe {
                function(of.handle, index, &raw mut handle)
            });
        NvmlError::check(call, code)?;
        Ok(Device {
            handle,
            gpu: of.gpu,
        })
    }

    /// Returns the ids of the processes that run on a device.
    pub(super) fn processes(&self, device: Device) -> Result<Vec<u32>, NvmlError> {
        let questions = [
            (
                "nvmlDeviceGetComputeRunningProcesses_v3",
                self.nvmlDeviceGetComputeRunningProcesses_v3,
            ),
            (
                "nvmlDeviceGetGraphicsRunningProcesses_v3",
                self.nvmlDeviceGetGraphicsRunningProcesses_v3,
            ),
        ];
        let mut found = Vec::new();
        for (call, function) in questions {
            (self.listener)(call, Some(device.gpu));
            let nothing = nvmlProcessInfo_t {
                pid: 0,
                usedGpuMemory: 0,
                gpuInstanceId: 0,
                computeInstanceId: 0,
            };
            let mut processes = vec![nothing; MAX_PROCESSES];
            let mut count = c_uint::try_from(MAX_PROCESSES).unwrap_or(0);
            // SAFETY: As above; the array has room for `count` processes.
            let code = function.map_or(FUNCTION_NOT_FOUND, |function| unsafe {
                function(device.handle, &raw mut count, processes.as_mut_ptr())
            });
            match NvmlError::check(call, code) {
                Ok(()) => {}
                // The processes that fitted are enough.
                Err(error) if error.is_too_small() => {}
                Err(error) if error.is_unsupported() => continue,
                Err(error) => return Err(error),
            }
            let written = usize::try_from(count).unwrap_or(usize::MAX);
            found.extend(processes.iter().take(written).map(|one| one.pid));
        }
        found.retain(|pid| *pid != 0);
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Queries field values; each has a return code of its own.
    pub(super) fn field_values(
        &self,
        device: Device,
        values: &mut [nvmlFieldValue_t],
    ) -> Result<(), NvmlError> {
        let call = "nvmlDeviceGetFieldValues";
        (self.listener)(call, Some(device.gpu));
        let count = c_int::try_from(values.len()).unwrap_or(c_int::MAX);
        let code = self
            .nvmlDeviceGetFieldValues
            // SAFETY: As above; the length passed is that of the slice.
            .map_or(FUNCTION_NOT_FOUND, |function| unsafe {
                function(device.handle, count, values.as_mut_ptr())
            });
        NvmlError::check(call, code)
    }

    /// Creates a set of events.
    pub(super) fn event_set(&self) -> Result<EventSet, NvmlError> {
        let call = "nvmlEventSetCreate";
        (self.listener)(call, None);
        let mut set = ptr::null_mut();
        let code = self
            .nvmlEventSetCreate
            // SAFETY: The set is an out-parameter, borrowed exclusively.
            .map_or(FUNCTION_NOT_FOUND, |function| unsafe {
                function(&raw mut set)
            });
        NvmlError::check(call, code)?;
        Ok(EventSet(set))
    }

    /// Adds event types of a GPU to a set.
    pub(super) fn register(
        &self,
        device: Device,
        kinds: u64,
        set: &EventSet,
    ) -> Result<(), NvmlError> {
        let call = "nvmlDeviceRegisterEvents";
        (self.listener)(call, Some(device.gpu));
        let code = self
            .nvmlDeviceRegisterEvents
            // SAFETY: The library created device and set, and the set is not freed yet.
            .map_or(FUNCTION_NOT_FOUND, |function| unsafe {
                function(device.handle, kinds, set.0)
            });
        NvmlError::check(call, code)
    }

    /// Waits for the next event of a set. Does not call the listener, since a wait is no hang.
    pub(super) fn wait(
        &self,
        set: &mut EventSet,
        milliseconds: u32,
    ) -> Result<RawEvent, NvmlError> {
        let mut event = nvmlEventData_t {
            device: ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        let code = self
            .nvmlEventSetWait_v2
            // SAFETY: The library created the set, which is not freed yet; the event is an
            // out-parameter.
            .map_or(FUNCTION_NOT_FOUND, |function| unsafe {
                function(set.0, &raw mut event, milliseconds)
            });
        NvmlError::check("nvmlEventSetWait_v2", code)?;
        Ok(RawEvent {
            device: event.device,
            kind: event.eventType,
            data: event.eventData,
            gpu_instance: event.gpuInstanceId,
            compute_instance: event.computeInstanceId,
        })
    }

    /// Frees a set of events.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the handle is invalid afterwards"
    )]
    pub(super) fn free(&self, set: EventSet) -> Result<(), NvmlError> {
        let call = "nvmlEventSetFree";
        (self.listener)(call, None);
        let code = self
            .nvmlEventSetFree
            // SAFETY: The library created the set, and `set` is its only owner.
            .map_or(FUNCTION_NOT_FOUND, |function| unsafe { function(set.0) });
        NvmlError::check(call, code)
    }
}

impl Drop for Functions {
    /// Shuts NVML down, once no thread waits for its events.
    fn drop(&mut self) {
        if let Err(error) = self.nvmlShutdown() {
            tracing::debug!(%error, "NVML was not shut down");
        }
    }
}

// === impl RawEvent ===

impl RawEvent {
    /// Returns true if the event is about that device.
    pub(super) fn is_of(&self, device: Device) -> bool {
        self.device == device.handle
    }
}

/// Returns the number in a field value; `None` if its kind is unknown here or it is too large.
pub(super) fn number(field: &nvmlFieldValue_t) -> Option<i64> {
    let value = field.value;
    // SAFETY: Any bytes are a number of each of these kinds, and the kind tells which one was
    // written.
    unsafe {
        match field.valueType {
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => Some(value.uiVal.into()),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG
            | sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG => {
                i64::try_from(value.ullVal).ok()
            }
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => Some(value.sllVal),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => Some(value.siVal.into()),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT => Some(value.usVal.into()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
