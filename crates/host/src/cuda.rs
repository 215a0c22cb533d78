//! The CUDA runtime: devices of this process, device memory, streams and events. Covers only
//! what is needed to measure [`crate::nccl`].
//!
//! A call may hang or crash inside the vendor's code, so it belongs in a process that may be
//! killed. The runtime numbers devices per process; a PCI address is the same for every
//! process.

mod error;
mod functions;

use std::path::Path;
use std::sync::Arc;

use diagnosis::gpu::pci_address;

pub use self::error::CudaError;
use crate::library::{LibraryOpenError, LibraryPlaces, Listener};
pub(crate) use functions::{Address, StreamHandle};
use functions::{Functions, Memory, RawEvent, RawStream};

/// A loaded library, shared by its handles.
#[derive(Clone)]
pub struct Cuda {
    functions: Arc<Functions>,
}

/// A GPU that this process can use.
#[derive(Clone)]
pub struct Device {
    index: u32,
    functions: Arc<Functions>,
}

/// Device memory. Dropping the buffer frees the memory, and waits for work that uses it: abort
/// work that does not finish first.
pub struct Buffer {
    memory: Memory,
    functions: Arc<Functions>,
}

/// A queue of device work that is executed in order.
pub struct Stream {
    raw: RawStream,
    functions: Arc<Functions>,
}

/// A point in the work of a device, used to measure time.
pub struct Event {
    raw: RawEvent,
    functions: Arc<Functions>,
}

// === impl Cuda ===

impl Cuda {
    /// Opens the library. `listener` is called before every library call.
    pub fn open(places: &LibraryPlaces, listener: Listener) -> Result<Self, LibraryOpenError> {
        Ok(Self {
            functions: Arc::new(Functions::open(places, listener)?),
        })
    }

    /// Returns the path or name that the library was loaded from.
    pub fn found_at(&self) -> &Path {
        self.functions.found_at()
    }

    /// Returns the version of the runtime, such as `13.5`. CUDA 11 returns it only if a driver
    /// is loaded.
    pub fn version(&self) -> Result<String, CudaError> {
        self.functions.runtime_version().map(version)
    }

    /// Returns the newest version that the driver supports; `None` if there is no driver.
    pub fn driver_version(&self) -> Result<Option<String>, CudaError> {
        let number = self.functions.driver_version()?;
        Ok((number != 0).then(|| version(number)))
    }

    /// Returns the devices. Fails if there are none, or no driver.
    pub fn devices(&self) -> Result<Vec<Device>, CudaError> {
        let count = self.functions.count()?;
        Ok((0..count).map(|index| self.device(index)).collect())
    }

    /// Returns the device at a PCI address.
    pub fn device_at(&self, pci: &str) -> Result<Device, CudaError> {
        self.functions.at_pci(pci).map(|index| self.device(index))
    }

    fn device(&self, index: u32) -> Device {
        Device {
            index,
            functions: Arc::clone(&self.functions),
        }
    }
}

// === impl Device ===

impl Device {
    /// Returns the device's index within this process.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns the PCI address as `dddd:bb:dd.f`, in lower case.
    pub fn pci(&self) -> Result<String, CudaError> {
        self.functions.pci(self.index).map(|pci| pci_address(&pci))
    }

    /// Makes this the current device of the calling thread, as NCCL expects.
    pub(crate) fn select(&self) -> Result<(), CudaError> {
        self.functions.select(self.index)
    }

    /// Allocates `bytes` bytes of memory on this device.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, CudaError> {
        Ok(Buffer {
            memory: self.functions.allocate(self.index, bytes)?,
            functions: Arc::clone(&self.functions),
        })
    }

    /// Creates a stream that does not synchronize with the default stream.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        Ok(Stream {
            raw: self.functions.stream(self.index)?,
            functions: Arc::clone(&self.functions),
        })
    }

    /// Creates an event that is not recorded yet.
    pub fn event(&self) -> Result<Event, CudaError> {
        Ok(Event {
            raw: self.functions.event(self.index)?,
            functions: Arc::clone(&self.functions),
        })
    }
}

// === impl Buffer ===

impl Buffer {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// Sets every byte to `byte`.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        self.functions.fill(&self.memory, byte)
    }

    /// Copies `bytes` to the start of the buffer, truncated to its size.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CudaError> {
        self.functions.write(&self.memory, bytes)
    }

    /// Copies the start of the buffer to `bytes`, up to the shorter of the two.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.functions.read(&self.memory, bytes)
    }

    pub(crate) fn address(&self) -> Address {
        self.memory.at
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        log_failure(self.functions.free(&self.memory));
    }
}

// === impl Stream ===

impl Stream {
    /// Returns true if all queued work is done. Fails if some of it failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.functions.is_done(&self.raw)
    }

    /// Waits until all queued work is done; blocks forever if the work hangs.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.functions.synchronize(&self.raw)
    }

    /// Queues a copy from the start of one buffer to another of the same device, up to the
    /// shorter of the two. Neither buffer may be dropped before the copy is done.
    pub fn copy(&self, from: &Buffer, to: &mut Buffer) -> Result<(), CudaError> {
        self.functions.copy(&self.raw, &from.memory, &to.memory)
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.raw.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        log_failure(self.functions.end_stream(&self.raw));
    }
}

// === impl Event ===

impl Event {
    /// Records the event in `stream`: it completes when all work queued so far is done.
    pub fn record(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.functions.record(&self.raw, &stream.raw)
    }

    /// Returns the milliseconds since `earlier`. Fails if one of the two events is not complete
    /// yet.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        self.functions.elapsed(&earlier.raw, &self.raw)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        log_failure(self.functions.end_event(&self.raw));
    }
}

/// Formats a CUDA version number, such as 13050 as `13.5`.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Logs a failure to free a device resource.
fn log_failure(ended: Result<(), CudaError>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "cannot free a device resource");
    }
}
