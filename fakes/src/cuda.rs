//! Functions of the CUDA runtime that gpuwarden calls, as declared in `cuda_runtime_api.h` of
//! CUDA 13. Devices are the GPUs of the scenario; [`work`] holds their memory and the time of
//! their work.

#![allow(unsafe_code, reason = "exports the functions of a C library")]
#![allow(non_snake_case, reason = "the names of cuda_runtime_api.h")]

pub(crate) mod work;

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::slice;
use std::thread;
use std::time::Duration;

use crate::nvml::{behave, current};
use crate::scenario::{FakeGpu, Scenario};
use work::{Event, Memory, Progress, Stream, work};

const OK: u32 = 0;
/// Error code `cudaErrorInvalidValue`, as in CUDA 13.
const INVALID_VALUE: u32 = 1;
/// Error code `cudaErrorMemoryAllocation`, as in CUDA 13.
const NO_MEMORY: u32 = 2;
/// Error code `cudaErrorNoDevice`, as in CUDA 13.
const NO_DEVICE: u32 = 100;
/// Error code `cudaErrorInvalidDevice`, as in CUDA 13.
const INVALID_DEVICE: u32 = 101;
/// Error code `cudaErrorInvalidResourceHandle`, as in CUDA 13.
const INVALID_HANDLE: u32 = 400;
/// Error code `cudaErrorNotReady`, as in CUDA 13.
const NOT_READY: u32 = 600;
/// Value of `cudaErrorUnknown`, the result of calls for a lost GPU.
const UNKNOWN: u32 = 999;
/// A copy within a device (`cudaMemcpyDeviceToDevice`).
const WITHIN_DEVICE: c_uint = 3;

/// Error codes with their names and texts.
const ERRORS: [(u32, &CStr, &CStr); 9] = [
    (OK, c"cudaSuccess", c"no error"),
    (INVALID_VALUE, c"cudaErrorInvalidValue", c"invalid argument"),
    (NO_MEMORY, c"cudaErrorMemoryAllocation", c"out of memory"),
    (
        35,
        c"cudaErrorInsufficientDriver",
        c"CUDA driver version is insufficient for CUDA runtime version",
    ),
    (
        NO_DEVICE,
        c"cudaErrorNoDevice",
        c"no CUDA-capable device is detected",
    ),
    (
        INVALID_DEVICE,
        c"cudaErrorInvalidDevice",
        c"invalid device ordinal",
    ),
    (
        INVALID_HANDLE,
        c"cudaErrorInvalidResourceHandle",
        c"invalid resource handle",
    ),
    (NOT_READY, c"cudaErrorNotReady", c"device not ready"),
    (UNKNOWN, c"cudaErrorUnknown", c"unknown error"),
];

thread_local! {
    /// Number of the device that this thread has selected.
    static SELECTED: Cell<usize> = const { Cell::new(0) };
    /// Last error of this thread.
    static LAST: Cell<u32> = const { Cell::new(OK) };
}

/// Runs a call, and stores its error for `cudaGetLastError`.
fn answer(call: &str, tell: impl FnOnce(&Scenario) -> Result<(), u32>) -> u32 {
    let scenario = current();
    let code = match scenario.calls.get(call) {
        Some(behaviour) => behave(behaviour),
        None => tell(&scenario).err().unwrap_or(OK),
    };
    if code != OK {
        LAST.set(code);
    }
    code
}

/// Runs a call about a device.
fn of_device(call: &str, number: usize, tell: impl FnOnce(&FakeGpu) -> Result<(), u32>) -> u32 {
    answer(call, |scenario| {
        let gpu = gpu(scenario, number).ok_or(INVALID_DEVICE)?;
        match gpu.calls.get(call) {
            Some(behaviour) => match behave(behaviour) {
                OK => Ok(()),
                code => Err(code),
            },
            None if gpu.lost => Err(UNKNOWN),
            None => tell(&gpu),
        }
    })
}

/// Returns the GPU with this device number.
fn gpu(scenario: &Scenario, number: usize) -> Option<FakeGpu> {
    let counted = scenario.counted();
    counted.get(number).map(|index| scenario.gpu(*index))
}

/// Returns the index of the GPU that this thread has selected.
pub(crate) fn selected(scenario: &Scenario) -> Option<u32> {
    scenario.counted().get(SELECTED.get()).copied()
}

/// Converts a device number. A negative one becomes a number that no device has.
fn device(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Writes a result through a pointer.
fn write<T>(to: *mut T, value: T) -> Result<(), u32> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: The caller of a CUDA function passes a pointer to a value of this type.
    unsafe { to.write(value) };
    Ok(())
}

/// Returns a PCI address in CUDA's form: with the low four digits of NVML's domain.
fn pci(gpu: &FakeGpu) -> String {
    let pci = gpu.pci();
    let (domain, rest) = pci.split_once(':').unwrap_or(("0", &pci));
    let domain = u32::from_str_radix(domain, 16).unwrap_or_default();
    format!("{domain:04x}:{}", rest.to_ascii_lowercase())
}

#[unsafe(no_mangle)]
extern "C" fn cudaRuntimeGetVersion(version: *mut c_int) -> u32 {
    answer("cudaRuntimeGetVersion", |scenario| {
        write(version, scenario.cuda.runtime_version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaDriverGetVersion(version: *mut c_int) -> u32 {
    answer("cudaDriverGetVersion", |scenario| {
        write(version, scenario.cuda_version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceCount(count: *mut c_int) -> u32 {
    answer("cudaGetDeviceCount", |scenario| {
        let there = c_int::try_from(scenario.counted().len()).unwrap_or(c_int::MAX);
        write(count, there)?;
        if there == 0 { Err(NO_DEVICE) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(number: c_int) -> u32 {
    of_device("cudaSetDevice", device(number), |_| {
        SELECTED.set(device(number));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetPCIBusId(text: *mut c_char, length: c_int, number: c_int) -> u32 {
    of_device("cudaDeviceGetPCIBusId", device(number), |gpu| {
        let pci = pci(gpu);
        if text.is_null() || device(length) <= pci.len() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: The caller passes as much room as its length argument says.
        unsafe {
            text.copy_from_nonoverlapping(pci.as_ptr().cast(), pci.len());
            text.add(pci.len()).write(0);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetByPCIBusId(number: *mut c_int, text: *const c_char) -> u32 {
    answer("cudaDeviceGetByPCIBusId", |scenario| {
        if text.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: The caller passes a NUL-terminated string.
        let wanted = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let wanted = wanted.to_ascii_lowercase();
        let mut devices = scenario.counted().into_iter();
        let found = devices.position(|index| wanted.ends_with(&pci(&scenario.gpu(index))));
        let found = found.and_then(|at| c_int::try_from(at).ok());
        write(number, found.ok_or(INVALID_VALUE)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMalloc(at: *mut usize, bytes: usize) -> u32 {
    of_device("cudaMalloc", SELECTED.get(), |gpu| {
        let mut work = work();
        let used: u64 = work.used(gpu.index);
        if used.saturating_add(bytes as u64) > gpu.memory_bytes {
            return Err(NO_MEMORY);
        }
        write(at, work.allocate(Memory::new(gpu.index, bytes)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaFree(at: usize) -> u32 {
    answer("cudaFree", |_| {
        let freed = at == 0 || work().memory.remove(&at).is_some();
        if freed { Ok(()) } else { Err(INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemset(at: usize, byte: c_int, bytes: usize) -> u32 {
    answer("cudaMemset", |_| {
        let mut work = work();
        let memory = work.memory.get_mut(&at).ok_or(INVALID_VALUE)?;
        if bytes > memory.bytes {
            return Err(INVALID_VALUE);
        }
        memory.set(byte.to_le_bytes()[0], bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemcpy(to: usize, from: usize, bytes: usize, kind: c_uint) -> u32 {
    answer("cudaMemcpy", |_| {
        let mut work = work();
        let at = if kind == 1 { to } else { from };
        let memory = work.memory.get_mut(&at).ok_or(INVALID_VALUE)?;
        if bytes > memory.bytes || to == 0 || from == 0 {
            return Err(INVALID_VALUE);
        }
        match kind {
            // SAFETY: The caller's memory is as long as its length argument says.
            1 => memory.write(unsafe { slice::from_raw_parts(from as *const u8, bytes) }),
            // SAFETY: As above.
            2 => memory.read(unsafe { slice::from_raw_parts_mut(to as *mut u8, bytes) }),
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
#[allow(
    clippy::cast_precision_loss,
    reason = "bytes are far below what a number with a point holds"
)]
extern "C" fn cudaMemcpyAsync(
    to: usize,
    from: usize,
    bytes: usize,
    kind: c_uint,
    stream: usize,
) -> u32 {
    answer("cudaMemcpyAsync", |scenario| {
        let mut work = work();
        let gpu = work.streams.get(&stream).ok_or(INVALID_HANDLE)?.gpu;
        let source = work.memory.get(&from).ok_or(INVALID_VALUE)?;
        if kind != WITHIN_DEVICE || bytes > source.bytes {
            return Err(INVALID_VALUE);
        }
        let copied = source.beginning(bytes.min(source.kept()));
        let target = work.memory.get_mut(&to).ok_or(INVALID_VALUE)?;
        if bytes > target.bytes {
            return Err(INVALID_VALUE);
        }
        target.write(&copied);
        if scenario.gpu(gpu).corrupts {
            target.corrupt();
        }
        // Each byte is read once and written once.
        let seconds = bytes as f64 * 2.0 / (scenario.cuda.memory_bandwidth_gb_s * 1e9);
        work.occupy(&[(stream, 0)], Duration::try_from_secs_f64(seconds).ok());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreateWithFlags(stream: *mut usize, _flags: c_uint) -> u32 {
    of_device("cudaStreamCreateWithFlags", SELECTED.get(), |gpu| {
        write(stream, work().begin(Stream::of(gpu.index)))
    })
}

/// Returns the progress of a stream's work.
fn progress(stream: usize) -> Result<Progress, u32> {
    let work = work();
    let stream = work.streams.get(&stream).ok_or(INVALID_HANDLE)?;
    Ok(work.progress(&stream.end))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamQuery(stream: usize) -> u32 {
    answer("cudaStreamQuery", |_| match progress(stream)? {
        Progress::Done => Ok(()),
        Progress::Left(_) | Progress::Stuck => Err(NOT_READY),
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamSynchronize(stream: usize) -> u32 {
    answer("cudaStreamSynchronize", |_| {
        loop {
            match progress(stream)? {
                Progress::Done => return Ok(()),
                Progress::Left(time) => thread::sleep(time),
                Progress::Stuck => thread::sleep(Duration::from_millis(5)),
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamDestroy(stream: usize) -> u32 {
    answer("cudaStreamDestroy", |_| {
        let ended = work().streams.remove(&stream);
        ended.map(drop).ok_or(INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventCreate(event: *mut usize) -> u32 {
    of_device("cudaEventCreate", SELECTED.get(), |gpu| {
        let of = Event {
            gpu: gpu.index,
            at: None,
        };
        write(event, work().create(of))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventRecord(event: usize, stream: usize) -> u32 {
    answer("cudaEventRecord", |_| {
        let mut work = work();
        let stream = work.streams.get(&stream).ok_or(INVALID_HANDLE)?;
        let (gpu, end) = (stream.gpu, stream.end.clone());
        let event = work.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        if event.gpu != gpu {
            return Err(INVALID_HANDLE);
        }
        event.at = Some(end);
        Ok(())
    })
}

#[unsafe(no_mangle)]
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "CUDA tells milliseconds so"
)]
extern "C" fn cudaEventElapsedTime(milliseconds: *mut f32, from: usize, to: usize) -> u32 {
    answer("cudaEventElapsedTime", |_| {
        let work = work();
        let at = |event| {
            let event: &Event = work.events.get(event).ok_or(INVALID_HANDLE)?;
            let end = event.at.as_ref().ok_or(INVALID_HANDLE)?;
            match work.progress(end) {
                Progress::Done => Ok(end.clock_ns),
                Progress::Left(_) | Progress::Stuck => Err(NOT_READY),
            }
        };
        let nanoseconds = at(&to)?.saturating_sub(at(&from)?);
        write(milliseconds, (nanoseconds as f64 / 1e6) as f32)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventDestroy(event: usize) -> u32 {
    answer("cudaEventDestroy", |_| {
        let ended = work().events.remove(&event);
        ended.map(drop).ok_or(INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> u32 {
    LAST.replace(OK)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(code: u32) -> *const c_char {
    let found = ERRORS.iter().find(|(known, ..)| *known == code);
    found
        .map_or(c"unrecognized error code", |(_, name, _)| name)
        .as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(code: u32) -> *const c_char {
    let found = ERRORS.iter().find(|(known, ..)| *known == code);
    found
        .map_or(c"unrecognized error code", |(_, _, text)| text)
        .as_ptr()
}
