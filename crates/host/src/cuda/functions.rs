//! Bindings to the CUDA runtime functions in use, with the signatures of `cuda_runtime_api.h`
//! of CUDA 13 (the same in 11 and 12). Each has a safe method of [`Functions`].

#![allow(
    unsafe_code,
    reason = "functions of a C library; no other module calls them"
)]
#![allow(non_snake_case, reason = "the names of cuda_runtime_api.h")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use super::error::{CudaError, NOT_READY};
use crate::library::functions;

/// Library names of CUDA 13, 12 and 11.
const NAMES: &[&str] = &["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"];
/// Buffer size for a PCI address with its terminating zero; the longest has 17 bytes.
const PCI_BYTES: usize = 32;
/// Flag for a stream that does not synchronize with the default stream
/// (`cudaStreamNonBlocking`).
const NON_BLOCKING: c_uint = 1;
/// Copy from host to device (`cudaMemcpyHostToDevice`).
const TO_DEVICE: c_uint = 1;
/// Copy from device to host (`cudaMemcpyDeviceToHost`).
const FROM_DEVICE: c_uint = 2;
/// Copy within a device (`cudaMemcpyDeviceToDevice`).
const WITHIN_DEVICE: c_uint = 3;

type Code = c_uint;
/// The library's stream handle (`cudaStream_t`).
pub(crate) type StreamHandle = *mut c_void;
/// The library's event handle (`cudaEvent_t`).
type EventHandle = *mut c_void;
/// An address in device memory.
pub(crate) type Address = *mut c_void;

/// A stream that is valid until [`Functions::end_stream`].
#[derive(Debug)]
pub(super) struct RawStream(pub(super) StreamHandle);

/// An event that is valid until [`Functions::end_event`].
#[derive(Debug)]
pub(super) struct RawEvent(EventHandle);

/// Device memory that is valid until [`Functions::free`].
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
        // SAFETY: The signature is that of the header, and the out-parameter is borrowed
        // exclusively.
        self.call("cudaRuntimeGetVersion", None, || unsafe {
            (self.cudaRuntimeGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Returns the newest version that the driver supports; 0 if there is no driver.
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

    /// Makes a device the current one of the calling thread.
    pub(super) fn select(&self, device: u32) -> Result<(), CudaError> {
        // SAFETY: The function takes a number.
        self.call("cudaSetDevice", Some(device), || unsafe {
            (self.cudaSetDevice)(number(device))
        })
    }

    /// Returns the PCI address of a device.
    pub(super) fn pci(&self, device: u32) -> Result<String, CudaError> {
        let mut text: [c_char; PCI_BYTES] = [0; PCI_BYTES];
        let length = c_int::try_from(PCI_BYTES).unwrap_or_default();
        self.call("cudaDeviceGetPCIBusId", Some(device), || {
            // SAFETY: The buffer is as long as the length passed.
            unsafe { (self.cudaDeviceGetPCIBusId)(text.as_mut_ptr(), length, number(device)) }
        })?;
        let bytes = text.iter().take_while(|byte| **byte != 0);
        let bytes: Vec<u8> = bytes.map(|byte| byte.to_ne_bytes()[0]).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the index of the device at a PCI address.
    pub(super) fn at_pci(&self, pci: &str) -> Result<u32, CudaError> {
        let pci = CString::new(pci).unwrap_or_default();
        let mut device = 0;
        self.call("cudaDeviceGetByPCIBusId", None, || {
            // SAFETY: The text is zero-terminated; the index is an out-parameter.
            unsafe { (self.cudaDeviceGetByPCIBusId)(&raw mut device, pci.as_ptr()) }
        })?;
        Ok(u32::try_from(device).unwrap_or_default())
    }

    /// Allocates `bytes` bytes of device memory.
    pub(super) fn allocate(&self, device: u32, bytes: usize) -> Result<Memory, CudaError> {
        self.select(device)?;
        let mut at = ptr::null_mut();
        // SAFETY: The address is an out-parameter, borrowed exclusively.
        self.call("cudaMalloc", Some(device), || unsafe {
            (self.cudaMalloc)(&raw mut at, bytes)
        })?;
        Ok(Memory { at, bytes })
    }

    /// Frees memory, once no work on the device uses it.
    pub(super) fn free(&self, memory: &Memory) -> Result<(), CudaError> {
        // SAFETY: The library allocated the memory, and its owner is being dropped.
        self.call("cudaFree", None, || unsafe { (self.cudaFree)(memory.at) })
    }

    /// Sets each byte of the memory.
    pub(super) fn fill(&self, memory: &Memory, byte: u8) -> Result<(), CudaError> {
        self.call("cudaMemset", None, || {
            // SAFETY: The library allocated that many bytes.
            unsafe { (self.cudaMemset)(memory.at, byte.into(), memory.bytes) }
        })
    }

    /// Copies `bytes` to the start of the memory, truncated to its size.
    pub(super) fn write(&self, memory: &Memory, bytes: &[u8]) -> Result<(), CudaError> {
        let length = bytes.len().min(memory.bytes);
        self.call("cudaMemcpy", None, || {
            // SAFETY: Both are at least `length` bytes long.
            unsafe { (self.cudaMemcpy)(memory.at, bytes.as_ptr().cast(), length, TO_DEVICE) }
        })
    }

    /// Copies the start of the memory to `bytes`, up to the shorter of the two.
    pub(super) fn read(&self, memory: &Memory, bytes: &mut [u8]) -> Result<(), CudaError> {
        let length = bytes.len().min(memory.bytes);
        self.call("cudaMemcpy", None, || {
            // SAFETY: Both are at least `length` bytes long.
            unsafe { (self.cudaMemcpy)(bytes.as_mut_ptr().cast(), memory.at, length, FROM_DEVICE) }
        })
    }

    /// Queues a copy between two memories of one device, up to the shorter of the two.
    pub(super) fn copy(
        &self,
        stream: &RawStream,
        from: &Memory,
        to: &Memory,
    ) -> Result<(), CudaError> {
        let length = from.bytes.min(to.bytes);
        self.call("cudaMemcpyAsync", None, || {
            // SAFETY: The library created all three, and both memories are at least `length`
            // bytes long.
            unsafe {
                (self.cudaMemcpyAsync)(to.at, from.at.cast_const(), length, WITHIN_DEVICE, stream.0)
            }
        })
    }

    /// Creates a stream on a device.
    pub(super) fn stream(&self, device: u32) -> Result<RawStream, CudaError> {
        self.select(device)?;
        let mut stream = ptr::null_mut();
        // SAFETY: The stream is an out-parameter, borrowed exclusively.
        self.call("cudaStreamCreateWithFlags", Some(device), || unsafe {
            (self.cudaStreamCreateWithFlags)(&raw mut stream, NON_BLOCKING)
        })?;
        Ok(RawStream(stream))
    }

    /// Returns true if all work of a stream is done.
    pub(super) fn is_done(&self, stream: &RawStream) -> Result<bool, CudaError> {
        // SAFETY: The library created the stream.
        let result = self.call("cudaStreamQuery", None, || unsafe {
            (self.cudaStreamQuery)(stream.0)
        });
        match result {
            Ok(()) => Ok(true),
            Err(error) if error.code == NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until all work of a stream is done.
    pub(super) fn synchronize(&self, stream: &RawStream) -> Result<(), CudaError> {
        // SAFETY: The library created the stream.
        self.call("cudaStreamSynchronize", None, || unsafe {
            (self.cudaStreamSynchronize)(stream.0)
        })
    }

    /// Destroys a stream, once its work is done.
    pub(super) fn end_stream(&self, stream: &RawStream) -> Result<(), CudaError> {
        // SAFETY: The library created the stream, and its owner is being dropped.
        self.call("cudaStreamDestroy", None, || unsafe {
            (self.cudaStreamDestroy)(stream.0)
        })
    }

    /// Creates an event on a device.
    pub(super) fn event(&self, device: u32) -> Result<RawEvent, CudaError> {
        self.select(device)?;
        let mut event = ptr::null_mut();
        // SAFETY: The event is an out-parameter, borrowed exclusively.
        self.call("cudaEventCreate", Some(device), || unsafe {
            (self.cudaEventCreate)(&raw mut event)
        })?;
        Ok(RawEvent(event))
    }

    /// Records an event in a stream, behind the work queued so far.
    pub(super) fn record(&self, event: &RawEvent, stream: &RawStream) -> Result<(), CudaError> {
        // SAFETY: The library created both.
        self.call("cudaEventRecord", None, || unsafe {
            (self.cudaEventRecord)(event.0, stream.0)
        })
    }

    /// Returns the milliseconds between two events.
    pub(super) fn elapsed(&self, from: &RawEvent, to: &RawEvent) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        self.call("cudaEventElapsedTime", None, || {
            // SAFETY: The library created both events; the number is an out-parameter.
            unsafe { (self.cudaEventElapsedTime)(&raw mut milliseconds, from.0, to.0) }
        })?;
        Ok(milliseconds)
    }

    pub(super) fn end_event(&self, event: &RawEvent) -> Result<(), CudaError> {
        // SAFETY: The library created the event, and its owner is being dropped.
        self.call("cudaEventDestroy", None, || unsafe {
            (self.cudaEventDestroy)(event.0)
        })
    }

    /// Makes a call, and clears the library's last error, which would otherwise fail the next
    /// one.
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
            // SAFETY: The function takes no arguments.
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
        // SAFETY: The function takes a number and returns a static string.
        unsafe { of(code) }
    });
    if text.is_null() {
        return String::new();
    }
    // SAFETY: The library returned a zero-terminated string.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn number(device: u32) -> c_int {
    c_int::try_from(device).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests;
