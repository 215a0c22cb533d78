//! The functions of the CUDA runtime that are called, by the signatures of its header
//! (`cuda_runtime_api.h` of CUDA 13; 11 and 12 have them alike), each by a safe method of [`Functions`].

#![allow(
    unsafe_code,
    reason = "functions of a C library; no other module calls them"
)]
#![allow(non_snake_case, reason = "the names of cuda_runtime_api.h")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use super::error::{CudaError, NOT_READY};
use crate::library::functions;

/// The names under which it is installed: of CUDA 13, 12 and 11.
const NAMES: &[&str] = &["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"];
/// Bytes of a PCI address with its zero; the longest has 17.
const PCI_BYTES: usize = 32;
/// A stream that does not wait for the device's own (`cudaStreamNonBlocking`).
const NON_BLOCKING: c_uint = 1;
/// A copy from the machine to a device (`cudaMemcpyHostToDevice`).
const TO_DEVICE: c_uint = 1;
/// A copy from a device to the machine (`cudaMemcpyDeviceToHost`).
const FROM_DEVICE: c_uint = 2;
/// A copy within a device (`cudaMemcpyDeviceToDevice`).
const WITHIN_DEVICE: c_uint = 3;

type Code = c_uint;
/// A stream, as the library knows it (`cudaStream_t`).
pub(crate) type StreamHandle = *mut c_void;
/// An event, as the library knows it (`cudaEvent_t`).
type EventHandle = *mut c_void;
/// An address in the memory of a device.
pub(crate) type Address = *mut c_void;

/// A stream of a device, until [`Functions::end_stream`].
#[derive(Debug)]
pub(super) struct RawStream(pub(super) StreamHandle);

/// An event of a device, until [`Functions::end_event`].
#[derive(Debug)]
pub(super) struct RawEvent(EventHandle);

/// Memory of a device, until [`Functions::free`].
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) at: Address,
    pub(super) bytes: usize,
}

functions! {
    "the CUDA runtime", NAMES;
    required {
        cudaRuntimeGetVersion(*mut c_int) -> Code;
        cudaDriverGetVersion(*mut c_int) -> Code;
        cudaGetDeviceCount(*mut c_int) -> Code;
        cudaSetDevice(c_int) -> Code;
        cudaDeviceGetPCIBusId(*mut c_char, c_int, c_int) -> Code;
        cudaDeviceGetByPCIBusId(*mut c_int, *const c_char) -> Code;
        cudaMalloc(*mut Address, usize) -> Code;
        cudaFree(Address) -> Code;
        cudaMemset(Address, c_int, usize) -> Code;
        cudaMemcpy(*mut c_void, *const c_void, usize, c_uint) -> Code;
        cudaMemcpyAsync(*mut c_void, *const c_void, usize, c_uint, StreamHandle) -> Code;
        cudaStreamCreateWithFlags(*mut StreamHandle, c_uint) -> Code;
        cudaStreamQuery(StreamHandle) -> Code;
        cudaStreamSynchronize(StreamHandle) -> Code;
        cudaStreamDestroy(StreamHandle) -> Code;
        cudaEventCreate(*mut EventHandle) -> Code;
        cudaEventRecord(EventHandle, StreamHandle) -> Code;
        cudaEventElapsedTime(*mut f32, EventHandle, EventHandle) -> Code;
        cudaEventDestroy(EventHandle) -> Code;
    }
    optional {
        cudaGetErrorName(Code) -> *const c_char;
        cudaGetErrorString(Code) -> *const c_char;
        cudaGetLastError() -> Code;
    }
}

// === impl Functions ===

impl Functions {
    /// Returns the version of the runtime, such as 13050 for 13.5.
    pub(super) fn runtime_version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: The signature is its own, and what it writes to is borrowed for it alone.
        self.call("cudaRuntimeGetVersion", None, || unsafe {
            (self.cudaRuntimeGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Returns the newest version that the driver supports; 0 where there is no driver.
    pub(super) fn driver_version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: As above.
        self.call("cudaDriverGetVersion", None, || unsafe {
            (self.cudaDriverGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Returns the number of devices.
    pub(super) fn count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: As above.
        self.call("cudaGetDeviceCount", None, || unsafe {
            (self.cudaGetDeviceCount)(&raw mut count)
        })?;
        Ok(u32::try_from(count).unwrap_or_default())
    }

    /// Makes a device the one of this thread.
    pub(super) fn select(&self, device: u32) -> Result<(), CudaError> {
        // SAFETY: It takes a number.
        self.call("cudaSetDevice", Some(device), || unsafe {
            (self.cudaSetDevice)(number(device))
        })
    }

    /// Returns the PCI address of a device.
    pub(super) fn pci(&self, device: u32) -> Result<String, CudaError> {
        let mut text: [c_char; PCI_BYTES] = [0; PCI_BYTES];
        let length = c_int::try_from(PCI_BYTES).unwrap_or_default();
        self.call("cudaDeviceGetPCIBusId", Some(device), || {
            // SAFETY: There is as much room as it is told.
            unsafe { (self.cudaDeviceGetPCIBusId)(text.as_mut_ptr(), length, number(device)) }
        })?;
        let bytes = text.iter().take_while(|byte| **byte != 0);
        let bytes: Vec<u8> = bytes.map(|byte| byte.to_ne_bytes()[0]).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the device at a PCI address.
    pub(super) fn at_pci(&self, pci: &str) -> Result<u32, CudaError> {
        let pci = CString::new(pci).unwrap_or_default();
        let mut device = 0;
        self.call("cudaDeviceGetByPCIBusId", None, || {
            // SAFETY: The text ends with a zero; the number is written to.
            unsafe { (self.cudaDeviceGetByPCIBusId)(&raw mut device, pci.as_ptr()) }
        })?;
        Ok(u32::try_from(device).unwrap_or_default())
    }

    /// Returns memory of a device.
    pub(super) fn allocate(&self, device: u32, bytes: usize) -> Result<Memory, CudaError> {
        self.select(device)?;
        let mut at = ptr::null_mut();
        // SAFETY: The address is written to, and is borrowed for it alone.
        self.call("cudaMalloc", Some(device), || unsafe {
            (self.cudaMalloc)(&raw mut at, bytes)
        })?;
        Ok(Memory { at, bytes })
    }

    /// Gives memory back, once nothing on the device uses it any more.
    pub(super) fn free(&self, memory: &Memory) -> Result<(), CudaError> {
        // SAFETY: The library has given it out, and its owner is being dropped.
        self.call("cudaFree", None, || unsafe { (self.cudaFree)(memory.at) })
    }

    /// Sets each byte of memory.
    pub(super) fn fill(&self, memory: &Memory, byte: u8) -> Result<(), CudaError> {
        self.call("cudaMemset", None, || {
            // SAFETY: The library has given out so much memory.
            unsafe { (self.cudaMemset)(memory.at, byte.into(), memory.bytes) }
        })
    }

    /// Writes the beginning of memory, as much as there are bytes and as it has.
    pub(super) fn write(&self, memory: &Memory, bytes: &[u8]) -> Result<(), CudaError> {
        let length = bytes.len().min(memory.bytes);
        self.call("cudaMemcpy", None, || {
            // SAFETY: Both are as long as that at least.
            unsafe { (self.cudaMemcpy)(memory.at, bytes.as_ptr().cast(), length, TO_DEVICE) }
        })
    }

    /// Reads the beginning of memory, as much as there is room and as it has.
    pub(super) fn read(&self, memory: &Memory, bytes: &mut [u8]) -> Result<(), CudaError> {
        let length = bytes.len().min(memory.bytes);
        self.call("cudaMemcpy", None, || {
            // SAFETY: Both are as long as that at least.
            unsafe { (self.cudaMemcpy)(bytes.as_mut_ptr().cast(), memory.at, length, FROM_DEVICE) }
        })
    }

    /// Has a stream copy the beginning of memory to other memory of its device, as much as both have.
    pub(super) fn copy(
        &self,
        stream: &RawStream,
        from: &Memory,
        to: &Memory,
    ) -> Result<(), CudaError> {
        let length = from.bytes.min(to.bytes);
        self.call("cudaMemcpyAsync", None, || {
            // SAFETY: The library has given out all three, and both pieces are as long as that.
            unsafe {
                (self.cudaMemcpyAsync)(to.at, from.at.cast_const(), length, WITHIN_DEVICE, stream.0)
            }
        })
    }

    /// Returns a new stream of a device.
    pub(super) fn stream(&self, device: u32) -> Result<RawStream, CudaError> {
        self.select(device)?;
        let mut stream = ptr::null_mut();
        // SAFETY: The stream is written to, and is borrowed for it alone.
        self.call("cudaStreamCreateWithFlags", Some(device), || unsafe {
            (self.cudaStreamCreateWithFlags)(&raw mut stream, NON_BLOCKING)
        })?;
        Ok(RawStream(stream))
    }

    /// Returns whether all work of a stream is done.
    pub(super) fn is_done(&self, stream: &RawStream) -> Result<bool, CudaError> {
        // SAFETY: The library has given out the stream.
        let told = self.call("cudaStreamQuery", None, || unsafe {
            (self.cudaStreamQuery)(stream.0)
        });
        match told {
            Ok(()) => Ok(true),
            Err(error) if error.code == NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until all work of a stream is done.
    pub(super) fn synchronize(&self, stream: &RawStream) -> Result<(), CudaError> {
        // SAFETY: As above.
        self.call("cudaStreamSynchronize", None, || unsafe {
            (self.cudaStreamSynchronize)(stream.0)
        })
    }

    /// Ends a stream, once its work is done.
    pub(super) fn end_stream(&self, stream: &RawStream) -> Result<(), CudaError> {
        // SAFETY: As above, and its owner is being dropped.
        self.call("cudaStreamDestroy", None, || unsafe {
            (self.cudaStreamDestroy)(stream.0)
        })
    }

    /// Returns a new event of a device.
    pub(super) fn event(&self, device: u32) -> Result<RawEvent, CudaError> {
        self.select(device)?;
        let mut event = ptr::null_mut();
        // SAFETY: The event is written to, and is borrowed for it alone.
        self.call("cudaEventCreate", Some(device), || unsafe {
            (self.cudaEventCreate)(&raw mut event)
        })?;
        Ok(RawEvent(event))
    }

    /// Has an event happen when the work that a stream has now is done.
    pub(super) fn record(&self, event: &RawEvent, stream: &RawStream) -> Result<(), CudaError> {
        // SAFETY: The library has given out both.
        self.call("cudaEventRecord", None, || unsafe {
            (self.cudaEventRecord)(event.0, stream.0)
        })
    }

    /// Returns the milliseconds between two events.
    pub(super) fn elapsed(&self, from: &RawEvent, to: &RawEvent) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        self.call("cudaEventElapsedTime", None, || {
            // SAFETY: As above; the number is written to.
            unsafe { (self.cudaEventElapsedTime)(&raw mut milliseconds, from.0, to.0) }
        })?;
        Ok(milliseconds)
    }

    /// Ends an event.
    pub(super) fn end_event(&self, event: &RawEvent) -> Result<(), CudaError> {
        // SAFETY: As above, and its owner is being dropped.
        self.call("cudaEventDestroy", None, || unsafe {
            (self.cudaEventDestroy)(event.0)
        })
    }

    /// Makes a call. A failure is not left behind for the next one.
    fn call(
        &self,
        call: &'static str,
        device: Option<u32>,
        make: impl FnOnce() -> Code,
    ) -> Result<(), CudaError> {
        (self.listener)(call, device);
        let code = make();
        if code == 0 {
            return Ok(());
        }
        if let Some(forget) = self.cudaGetLastError {
            // SAFETY: It takes nothing.
            unsafe { forget() };
        }
        Err(CudaError {
            call,
            code,
            name: text(self.cudaGetErrorName, code),
            text: text(self.cudaGetErrorString, code),
        })
    }
}

/// Returns the library's text for a code.
fn text(of: Option<unsafe extern "C" fn(Code) -> *const c_char>, code: Code) -> String {
    let text = of.map_or(ptr::null(), |of| {
        // SAFETY: It takes a number, and returns a text that stays.
        unsafe { of(code) }
    });
    if text.is_null() {
        return String::new();
    }
    // SAFETY: A text of the library, closed by a zero.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn number(device: u32) -> c_int {
    c_int::try_from(device).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests;
