//! The CUDA runtime: the devices of this process, their memory, and the order and time of their work.
//! As much of it as it takes to measure what [`crate::nccl`] does.
//!
//! A call may hang or crash inside the vendor's code, so it belongs into a process that may end. The
//! runtime counts its devices as this process sees them; a PCI address names one for everybody.

mod error;
mod functions;

use std::path::Path;
use std::sync::Arc;

use diagnosis::gpu::pci_address;

pub use self::error::CudaError;
use crate::library::{Listener, OpenError, Places};
pub(crate) use functions::{Address, StreamHandle};
use functions::{Functions, Memory, RawEvent, RawStream};

/// The open library.
#[derive(Clone)]
pub struct Cuda {
    functions: Arc<Functions>,
}

/// A device.
#[derive(Clone)]
pub struct Device {
    index: u32,
    functions: Arc<Functions>,
}

/// Memory of a device. It is given back when this is dropped, which waits for what uses it: abort first
/// what does not end.
pub struct Buffer {
    memory: Memory,
    functions: Arc<Functions>,
}

/// Work of a device that is done in order.
pub struct Stream {
    raw: RawStream,
    functions: Arc<Functions>,
}

/// A moment in the work of a device.
pub struct Event {
    raw: RawEvent,
    functions: Arc<Functions>,
}

// === impl Cuda ===

impl Cuda {
    /// Opens the library. `listener` hears of every call before it is made.
    pub fn open(places: &Places, listener: Listener) -> Result<Self, OpenError> {
        Ok(Self {
            functions: Arc::new(Functions::open(places, listener)?),
        })
    }

    /// Returns the path or the name by which the library was found.
    pub fn found_at(&self) -> &Path {
        self.functions.found_at()
    }

    /// Returns the version of the runtime, such as `13.5`. That of CUDA 11 tells it with a driver only.
    pub fn version(&self) -> Result<String, CudaError> {
        self.functions.runtime_version().map(version)
    }

    /// Returns the newest version that the driver supports; `None` where there is no driver.
    pub fn driver_version(&self) -> Result<Option<String>, CudaError> {
        let told = self.functions.driver_version()?;
        Ok((told != 0).then(|| version(told)))
    }

    /// Returns the devices. It fails where there is none, or no driver.
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
    /// Returns the number by which this process knows it.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns its PCI address in the form `dddd:bb:dd.f`, in lower case.
    pub fn pci(&self) -> Result<String, CudaError> {
        self.functions.pci(self.index).map(|pci| pci_address(&pci))
    }

    /// Makes it the device of this thread, for a library that works on that one.
    pub(crate) fn select(&self) -> Result<(), CudaError> {
        self.functions.select(self.index)
    }

    /// Returns a piece of its memory.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, CudaError> {
        Ok(Buffer {
            memory: self.functions.allocate(self.index, bytes)?,
            functions: Arc::clone(&self.functions),
        })
    }

    /// Returns a new stream.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        Ok(Stream {
            raw: self.functions.stream(self.index)?,
            functions: Arc::clone(&self.functions),
        })
    }

    /// Returns a new event, which has not happened.
    pub fn event(&self) -> Result<Event, CudaError> {
        Ok(Event {
            raw: self.functions.event(self.index)?,
            functions: Arc::clone(&self.functions),
        })
    }
}

// === impl Buffer ===

impl Buffer {
    /// Returns its size.
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// Sets each of its bytes.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        self.functions.fill(&self.memory, byte)
    }

    /// Writes its beginning, as much of the bytes as it has room for.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CudaError> {
        self.functions.write(&self.memory, bytes)
    }

    /// Reads its beginning, as much as there is room for.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.functions.read(&self.memory, bytes)
    }

    pub(crate) fn address(&self) -> Address {
        self.memory.at
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        tell(self.functions.free(&self.memory));
    }
}

// === impl Stream ===

impl Stream {
    /// Returns whether all of its work is done; fails where some of it has failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.functions.is_done(&self.raw)
    }

    /// Waits until all of its work is done, for ever where that does not end.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.functions.synchronize(&self.raw)
    }

    /// Begins to copy the beginning of a buffer to another one of the same device, as much as both have
    /// room for. Neither may be dropped before the stream is done with it.
    pub fn copy(&self, from: &Buffer, to: &mut Buffer) -> Result<(), CudaError> {
        self.functions.copy(&self.raw, &from.memory, &to.memory)
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.raw.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        tell(self.functions.end_stream(&self.raw));
    }
}

// === impl Event ===

impl Event {
    /// Has it happen when the work that a stream of the same device has now is done.
    pub fn record(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.functions.record(&self.raw, &stream.raw)
    }

    /// Returns the milliseconds since an earlier event; fails where one of them has not happened yet.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        self.functions.elapsed(&earlier.raw, &self.raw)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        tell(self.functions.end_event(&self.raw));
    }
}

/// Returns a version as people write it.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Says that something could not be given back.
fn tell(ended: Result<(), CudaError>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "something of a device was not given back");
    }
}
