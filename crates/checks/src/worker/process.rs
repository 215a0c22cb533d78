//! Main loop of the child process, which answers one request after the other.

use std::borrow::Cow;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use host::cuda::Cuda;
use host::library::{LibraryOpenError, LibraryPlaces, Listener};
use host::nccl::Nccl;
use host::nvml::{self, Nvml};

use super::{FromWorker, Libraries, SeenGpu, WorkerFailure, WorkerRequest, benchmark, copy};

/// Sender of messages to the parent.
#[derive(Clone)]
struct Speaker(Arc<Mutex<UnixStream>>);

/// Runs the child process. Returns when the parent is gone.
pub fn run() -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let speaker = Speaker(Arc::new(Mutex::new(socket.try_clone()?)));
    let (requests, asked) = mpsc::channel();
    thread::Builder::new()
        .name("parent".to_owned())
        .spawn(move || {
            for line in BufReader::new(socket).lines().map_while(Result::ok) {
                if requests.send(line).is_err() {
                    break;
                }
            }
            host::program::end_now();
        })?;
    for line in asked {
        let answer = match serde_json::from_str(&line) {
            Ok(request) => answer(&request, &speaker).unwrap_or_else(FromWorker::Failed),
            Err(error) => FromWorker::Failed(WorkerFailure::Crashed(format!(
                "was asked {line:?}: {error}"
            ))),
        };
        speaker.send(&answer)?;
    }
    Ok(())
}

fn answer(request: &WorkerRequest, speaker: &Speaker) -> Result<FromWorker, WorkerFailure> {
    match request {
        WorkerRequest::Gpus(libraries) => gpus(libraries, speaker).map(FromWorker::Gpus),
        WorkerRequest::Devices(libraries) => {
            let devices = cuda(libraries, speaker)?.devices()?.len();
            Ok(FromWorker::Devices(
                u32::try_from(devices).unwrap_or(u32::MAX),
            ))
        }
        WorkerRequest::Id(libraries) => {
            // Stays open, since joining ranks ask this process for the others.
            let nccl = Box::leak(Box::new(nccl(libraries, speaker)?));
            let id = nccl.unique_id().map_err(host::nccl::Error::from)?;
            let digits = id.bytes().map(|byte| format!("{byte:02x}"));
            Ok(FromWorker::Id(digits.concat()))
        }
        WorkerRequest::AllReduce(libraries, join, benchmark) => {
            // Neither is closed, since that would wait for work that may never end.
            let cuda = Box::leak(Box::new(cuda(libraries, speaker)?));
            let nccl = Box::leak(Box::new(nccl(libraries, speaker)?));
            benchmark::all_reduce(cuda, nccl, join, benchmark).map(FromWorker::Measured)
        }
        WorkerRequest::Copy(libraries, benchmark) => {
            let cuda = Box::leak(Box::new(cuda(libraries, speaker)?));
            copy::copy(cuda, benchmark).map(FromWorker::Measured)
        }
    }
}

/// Returns the GPUs that this container sees.
fn gpus(libraries: &Libraries, speaker: &Speaker) -> Result<Vec<SeenGpu>, WorkerFailure> {
    let places = libraries.places(libraries.nvml.as_ref());
    let nvml = Nvml::open(&places, speaker.listener()).map_err(|error| match error {
        nvml::NvmlOpenError::Library(error) => WorkerFailure::Library(error.to_string()),
        error @ nvml::NvmlOpenError::NotUsable { .. } => WorkerFailure::Nvml(error.to_string()),
    })?;
    let inventory = nvml.inventory();
    let inventory = inventory.map_err(|error| WorkerFailure::Nvml(error.to_string()))?;
    if let Some(unreadable) = inventory.unreadable.first() {
        return Err(WorkerFailure::Nvml(format!(
            "GPU {} of this container does not answer: {}",
            unreadable.index, unreadable.error
        )));
    }
    let seen = inventory.gpus.into_iter().map(|gpu| SeenGpu {
        nvlink: !gpu.nvlinks.is_empty(),
        partitions: gpu.mig_devices.into_iter().map(|one| one.uuid).collect(),
        uuid: gpu.uuid,
        pci: gpu.pci,
        product: gpu.product,
    });
    Ok(seen.collect())
}

fn cuda(libraries: &Libraries, speaker: &Speaker) -> Result<Cuda, WorkerFailure> {
    let places = libraries.places(libraries.cuda.as_ref());
    Cuda::open(&places, speaker.listener()).map_err(|error| missing(&error))
}

fn nccl(libraries: &Libraries, speaker: &Speaker) -> Result<Nccl, WorkerFailure> {
    let places = libraries.places(libraries.nccl.as_ref());
    Nccl::open(&places, speaker.listener()).map_err(|error| missing(&error))
}

fn missing(error: &LibraryOpenError) -> WorkerFailure {
    WorkerFailure::Library(error.to_string())
}

// === impl Libraries ===

impl Libraries {
    fn places(&self, path: Option<&std::path::PathBuf>) -> LibraryPlaces {
        LibraryPlaces {
            path: path.cloned(),
            driver_root: self.driver_root.clone(),
        }
    }
}

// === impl Speaker ===

impl Speaker {
    /// Sends a message, in one write.
    fn send(&self, message: &FromWorker) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        socket.write_all(&line)
    }

    /// Returns a listener that announces each call before it is made, except those that poll
    /// for the end of work.
    fn listener(&self) -> Listener {
        let speaker = self.clone();
        let last = Mutex::new(None);
        Box::new(move |call, device| {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            let is_look = matches!(call, "cudaStreamQuery" | "ncclCommGetAsyncError");
            if last.replace((call, device)) == Some((call, device)) || is_look {
                return;
            }
            let call = Cow::Borrowed(call);
            // If the parent is gone, sending the next answer fails, too.
            drop(speaker.send(&FromWorker::Doing { call, device }));
        })
    }
}
