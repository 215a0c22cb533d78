//! Functions of NVML that gpuwarden calls, as declared in `nvml.h` of CUDA 13, answered from the
//! scenario beside this library.

#![allow(unsafe_code, reason = "exports the functions of a C library")]
#![allow(non_snake_case, reason = "the names of nvml.h")]

mod device;
mod events;
mod fabric;
mod state;

use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::code;
use crate::scenario::{Behaviour, FakeGpu, FakePartition, Scenario};
pub(crate) use state::{current, directory};
use state::{is_open, set_open};

/// Signal of a segmentation fault.
const SIGSEGV: c_int = 11;

unsafe extern "C" {
    fn raise(signal: c_int) -> c_int;
}

/// Handle of a device: the index of its GPU plus one and, in the bits above, the number of its
/// partition plus one.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Handle(usize);

/// A GPU, or a partition of one.
enum Device<'a> {
    Gpu(&'a FakeGpu),
    Partition(&'a FakeGpu, &'a FakePartition),
}

// === impl Handle ===

impl Handle {
    /// Number of bits for the index of a GPU.
    const GPU_BITS: u32 = 16;

    fn of_gpu(index: u32) -> Self {
        Self(index as usize + 1)
    }

    fn of_partition(gpu: u32, at: usize) -> Self {
        Self(Self::of_gpu(gpu).0 | (at + 1) << Self::GPU_BITS)
    }

    fn gpu(self) -> Option<u32> {
        let below = self.0 & ((1 << Self::GPU_BITS) - 1);
        u32::try_from(below).ok()?.checked_sub(1)
    }

    fn partition(self) -> Option<usize> {
        (self.0 >> Self::GPU_BITS).checked_sub(1)
    }
}

/// Runs a call about the whole machine.
fn of_system(call: &str, answer: impl FnOnce(&Scenario) -> u32) -> u32 {
    let scenario = current();
    if let Some(behaviour) = scenario.calls.get(call) {
        return behave(behaviour);
    }
    if is_open() {
        answer(&scenario)
    } else {
        code::UNINITIALIZED
    }
}

/// Runs a call about a device.
fn of_device(call: &str, handle: Handle, answer: impl FnOnce(Device<'_>, &Scenario) -> u32) -> u32 {
    of_system(call, |scenario| {
        let Some(index) = handle.gpu().filter(|index| *index < scenario.gpus) else {
            return code::INVALID_ARGUMENT;
        };
        let gpu = scenario.gpu(index);
        if let Some(behaviour) = gpu.calls.get(call) {
            return behave(behaviour);
        }
        if gpu.lost || gpu.absent {
            return code::GPU_IS_LOST;
        }
        match handle.partition() {
            None => answer(Device::Gpu(&gpu), scenario),
            Some(at) => match gpu.partition.get(at) {
                Some(partition) => answer(Device::Partition(&gpu, partition), scenario),
                None => code::NOT_FOUND,
            },
        }
    })
}

/// Runs a call about a GPU that partitions do not support.
fn of_gpu(call: &str, handle: Handle, answer: impl FnOnce(&FakeGpu) -> u32) -> u32 {
    of_device(call, handle, |device, _| match device {
        Device::Gpu(gpu) => answer(gpu),
        Device::Partition(..) => code::NOT_SUPPORTED,
    })
}

/// Applies the behaviour that a scenario sets for a function.
pub(crate) fn behave(behaviour: &Behaviour) -> u32 {
    match behaviour {
        Behaviour::Code(code) => *code,
        Behaviour::Hang => loop {
            thread::sleep(Duration::from_secs(3600));
        },
        Behaviour::Segfault => loop {
            // SAFETY: The argument is a number. The first signal may only remove Rust's own
            // handler.
            unsafe { raise(SIGSEGV) };
        },
    }
}

/// Writes a result through a pointer.
fn write<T>(to: *mut T, value: T) -> u32 {
    if to.is_null() {
        return code::INVALID_ARGUMENT;
    }
    // SAFETY: The caller of an NVML function passes a pointer to a value of this type.
    unsafe { to.write(value) };
    code::SUCCESS
}

/// Writes a NUL-terminated text, if there is room for it.
fn write_text(to: *mut c_char, length: c_uint, text: &str) -> u32 {
    if text.len() >= length as usize {
        return code::INSUFFICIENT_SIZE;
    }
    // SAFETY: The caller of an NVML function passes as much room as its length argument says.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        to.add(text.len()).write(0);
    }
    code::SUCCESS
}

/// Returns the structure behind a pointer, if its version field has this version.
fn versioned<'a, T>(at: *mut T, number: u32) -> Result<&'a mut T, u32> {
    if at.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    let expected = u32::try_from(size_of::<T>()).unwrap_or(0) | number << 24;
    // SAFETY: The version is the first field of each versioned structure, and the caller passes
    // one.
    if unsafe { at.cast::<u32>().read() } != expected {
        return Err(code::ARGUMENT_VERSION_MISMATCH);
    }
    // SAFETY: The version has been checked.
    Ok(unsafe { &mut *at })
}

/// Fills a structure, or returns the error for an unknown version.
fn tell<T>(structure: Result<&mut T, u32>, fill: impl FnOnce(&mut T)) -> u32 {
    match structure {
        Ok(structure) => {
            fill(structure);
            code::SUCCESS
        }
        Err(code) => code,
    }
}

/// Returns a text as a NUL-terminated array, cut to its size.
fn array<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    let room = N.saturating_sub(1);
    for (to, byte) in array.iter_mut().take(room).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([byte]);
    }
    array
}

/// Initialises the library for `call`.
fn open(call: &str) -> u32 {
    let scenario = current();
    if let Some(behaviour) = scenario.calls.get(call) {
        return behave(behaviour);
    }
    set_open(true);
    take_memory(scenario.library_mib);
    code::SUCCESS
}

/// Allocates and writes memory, and keeps it allocated.
fn take_memory(mib: usize) {
    static TAKEN: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    taken.resize(mib << 20, 1);
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    open("nvmlInit_v2")
}

/// NVIDIA's Python bindings initialise the library with this function.
#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_: c_uint) -> u32 {
    open("nvmlInitWithFlags")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> u32 {
    of_system("nvmlShutdown", |_| {
        set_open(false);
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(text: *mut c_char, length: c_uint) -> u32 {
    of_system("nvmlSystemGetDriverVersion", |scenario| {
        write_text(text, length, &scenario.driver_version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> u32 {
    of_system("nvmlSystemGetCudaDriverVersion_v2", |scenario| {
        write(version, scenario.cuda_version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> u32 {
    of_system("nvmlDeviceGetCount_v2", |scenario| {
        let counted = scenario.counted().len();
        write(count, u32::try_from(counted).unwrap_or(u32::MAX))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> u32 {
    let call = "nvmlDeviceGetHandleByIndex_v2";
    let counted = current().counted().get(index as usize).copied();
    let Some(gpu) = counted else {
        return of_system(call, |_| code::INVALID_ARGUMENT);
    };
    of_device(call, Handle::of_gpu(gpu), |_, _| {
        write(device, Handle::of_gpu(gpu))
    })
}
