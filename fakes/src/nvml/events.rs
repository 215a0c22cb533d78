//! Events, reported in the order of the scenario. The number of reported events is in a file
//! beside it, so that a restarted program does not receive them again.

use std::ffi::{c_uint, c_ulonglong};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, ptr, thread};

use nvml_wrapper_sys::bindings as sys;

use super::state::directory;
use super::{Device, Handle, of_device, of_gpu, of_system, write};
use crate::TOLD;
use crate::code;
use crate::scenario::{FakeEvent, Scenario};

/// Interval between two checks for an event.
const POLL: Duration = Duration::from_millis(10);

/// Registered GPUs, each with its event set and the event types it was registered for.
static REGISTERED: Mutex<Vec<(usize, u32, u64)>> = Mutex::new(Vec::new());
/// Number of the next event set.
static NEXT: Mutex<usize> = Mutex::new(1);

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(set: *mut usize) -> u32 {
    of_system("nvmlEventSetCreate", |_| {
        let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
        *next += 1;
        write(set, *next)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: usize) -> u32 {
    of_system("nvmlEventSetFree", |_| {
        let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        registered.retain(|(of, _, _)| *of != set);
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSupportedEventTypes(device: Handle, kinds: *mut c_ulonglong) -> u32 {
    of_gpu("nvmlDeviceGetSupportedEventTypes", device, |gpu| {
        write(kinds, gpu.supported_events)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(device: Handle, kinds: c_ulonglong, set: usize) -> u32 {
    of_device("nvmlDeviceRegisterEvents", device, |device, _| {
        let (Device::Gpu(gpu) | Device::Partition(gpu, _)) = device;
        if kinds & !gpu.supported_events != 0 {
            return code::NOT_SUPPORTED;
        }
        let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        registered.push((set, gpu.index, kinds));
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(
    set: usize,
    data: *mut sys::nvmlEventData_t,
    milliseconds: c_uint,
) -> u32 {
    let end = Instant::now() + Duration::from_millis(milliseconds.into());
    loop {
        let mut heard = None;
        let code = of_system("nvmlEventSetWait_v2", |scenario| {
            heard = next(scenario, set);
            code::SUCCESS
        });
        if code != code::SUCCESS {
            return code;
        }
        if let Some(event) = heard {
            return write(data, event);
        }
        if Instant::now() >= end {
            return code::TIMEOUT;
        }
        thread::sleep(POLL);
    }
}

/// Returns the next event for a set, and counts it as reported with the skipped ones before it.
fn next(scenario: &Scenario, set: usize) -> Option<sys::nvmlEventData_t> {
    if scenario.event.is_empty() {
        return None;
    }
    let file: PathBuf = directory().join(TOLD);
    let told = fs::read_to_string(&file).ok();
    let told = told.and_then(|told| told.trim().parse().ok()).unwrap_or(0);
    let told = usize::min(told, scenario.event.len());
    let registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_heard = |event: &FakeEvent| {
        registered
            .iter()
            .any(|(of, gpu, kinds)| *of == set && *gpu == event.gpu && kinds & kind(event) != 0)
    };
    let mut rest = scenario.event.iter().enumerate().skip(told);
    let (at, event) = rest.find(|(_, event)| is_heard(event))?;
    // If the file cannot be written, events are reported twice, which tests detect.
    let _ = fs::write(&file, (at + 1).to_string());
    Some(sys::nvmlEventData_t {
        device: ptr::without_provenance_mut(Handle::of_gpu(event.gpu).0),
        eventType: kind(event),
        eventData: event.xid.unwrap_or(0),
        gpuInstanceId: event.gpu_instance.unwrap_or(u32::MAX),
        computeInstanceId: event.compute_instance.unwrap_or(u32::MAX),
    })
}

fn kind(event: &FakeEvent) -> u64 {
    let xid = u64::from(sys::nvmlEventTypeXidCriticalError);
    event.kind.unwrap_or(xid)
}
