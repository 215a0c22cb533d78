//! The functions of NVML that gpuwarden calls, as `nvml.h` of CUDA 13 declares them, answered from
//! the scenario beside this library.

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

/// The signal of a segmentation fault.
const SIGSEGV: c_int = 11;

unsafe extern "C" {
    fn raise(signal: c_int) -> c_int;
}

/// A device, as programs hold it: the index of its GPU plus one, and a partition's number plus one
/// above that.
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
    /// Bits of the index of a GPU.
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

/// Answers a call about the whole machine.
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

/// Answers a call about a device.
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

/// Answers a call about a GPU that partitions do not support.
fn of_gpu(call: &str, handle: Handle, answer: impl FnOnce(&FakeGpu) -> u32) -> u32 {
    of_device(call, handle, |device, _| match device {
        Device::Gpu(gpu) => answer(gpu),
        Device::Partition(..) => code::NOT_SUPPORTED,
    })
}

/// Does what a scenario says instead of a function's work.
pub(crate) fn behave(behaviour: &Behaviour) -> u32 {
    match behaviour {
        Behaviour::Code(code) => *code,
        Behaviour::Hang => loop {
            thread::sleep(Duration::from_secs(3600));
        },
        Behaviour::Segfault => loop {
            // SAFETY: Takes a number only. The first may only take Rust's own handler away.
            unsafe { raise(SIGSEGV) };
        },
    }
}

/// Writes an answer.
fn write<T>(to: *mut T, value: T) -> u32 {
    if to.is_null() {
        return code::INVALID_ARGUMENT;
    }
    // SAFETY: The caller of a function of NVML passes a pointer to such a value.
    unsafe { to.write(value) };
    code::SUCCESS
}

/// Writes a text with its zero, where it has room.
fn write_text(to: *mut c_char, length: c_uint, text: &str) -> u32 {
    if text.len() >= length as usize {
        return code::INSUFFICIENT_SIZE;
    }
    // SAFETY: The caller of a function of NVML passes as much room as it says.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        to.add(text.len()).write(0);
    }
    code::SUCCESS
}

/// Returns the structure at a pointer, if its first field says that it has this version.
fn versioned<'a, T>(at: *mut T, number: u32) -> Result<&'a mut T, u32> {
    if at.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    let expected = u32::try_from(size_of::<T>()).unwrap_or(0) | number << 24;
    // SAFETY: All structures with a version begin with it, and the caller passes one of them.
    if unsafe { at.cast::<u32>().read() } != expected {
        return Err(code::ARGUMENT_VERSION_MISMATCH);
    }
    // SAFETY: Its version says that it is this one.
    Ok(unsafe { &mut *at })
}

/// Fills a structure, if it was one that is known.
fn tell<T>(structure: Result<&mut T, u32>, fill: impl FnOnce(&mut T)) -> u32 {
    match structure {
        Ok(structure) => {
            fill(structure);
            code::SUCCESS
        }
        Err(code) => code,
    }
}

/// Returns a text in an array with zeros behind it, cut to leave one.
fn array<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    let room = N.saturating_sub(1);
    for (to, byte) in array.iter_mut().take(room).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([byte]);
    }
    array
}

/// Initialises the library.
fn open(call: &str) -> u32 {
    let scenario = current();
    if let Some(behaviour) = scenario.calls.get(call) {
        return behave(behaviour);
    }
    set_open(true);
    take_memory(scenario.library_mib);
    code::SUCCESS
}

/// Takes memory, written to, and keeps it.
fn take_memory(mib: usize) {
    static TAKEN: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    taken.resize(mib << 20, 1);
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    open("nvmlInit_v2")
}

/// So NVIDIA's bindings for Python begin.
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
