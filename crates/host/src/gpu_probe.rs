//! The child process that calls the GPU driver's library, or DCGM's (`dcgm`), so that a call
//! that hangs or crashes inside the vendor's code costs this process and never the agent.
//!
//! The child only writes: one [`Said`] a line as JSON, for each call before it is made, for the
//! GPUs at each interval, and for an event at once. Its settings are its argument. The child
//! ends when its input closes, since its parent is gone then, and when the driver is gone: the
//! parent starts a new child, which loads the library that is installed by then.

mod dcgm;
mod listening;

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diagnosis::gpu::dcgm::DcgmLook;
use diagnosis::gpu::{GpuEvent, Inventory, Readings, UnreadableGpu};
use serde::{Deserialize, Serialize};

use crate::library::{LibraryPlaces, Listener};
use crate::nvml::{Nvml, NvmlError, Roster};
use listening::Listening;

/// Version of the messages; a parent that was upgraded may have a child of another version.
pub const PROTOCOL: u32 = 2;
/// Shortest pause between two polls, for a poll that an event triggers before the interval is
/// over, and for a driver so slow that a poll takes longer than the interval.
const SOONEST: Duration = Duration::from_secs(1);

/// Settings of the child, passed as JSON in its argument.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeSettings {
    /// Path of the library; `None` to search for it.
    pub library: Option<PathBuf>,
    /// Directory where the driver is mounted; `None` for `/`.
    pub driver_root: Option<PathBuf>,
    /// Interval between two polls, in milliseconds.
    pub interval_ms: u64,
    /// DCGM host engine to read instead of the driver, `HOST` or `HOST:PORT`.
    #[serde(default)]
    pub dcgm: Option<String>,
}

/// A message of the child, one line of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// The library is open. Always the first message.
    Hello {
        /// [`PROTOCOL`] of the child.
        protocol: u32,
        /// Path or name that the library was loaded from.
        library: String,
    },
    /// A library call begins. Repeats of the same call are not sent.
    Doing {
        /// Name of the library function.
        call: Cow<'static, str>,
        /// Index of the GPU that the call is about.
        gpu: Option<u32>,
    },
    /// The inventory; sent when it has changed.
    Inventory(Inventory),
    /// Readings of all GPUs that answer; ends a poll.
    Readings(Vec<Readings>),
    /// An event of the driver, sent at once.
    Event(GpuEvent),
    /// Findings of DCGM's health watches; ends a poll.
    Dcgm(DcgmLook),
    /// The reason why the child cannot continue. The child ends after it.
    Cannot(String),
}

/// Reason why a probe ended.
enum ProbeEnd {
    /// The driver cannot be called.
    Cannot(String),
    /// The parent does not read any longer.
    ParentGone(io::Error),
}

/// Writes messages to the parent.
struct Parent {
    output: Mutex<Box<dyn Write + Send>>,
    doing: Mutex<Option<(&'static str, Option<u32>)>>,
}

/// Monitoring loop over the GPUs of a machine.
struct Watch {
    nvml: Nvml,
    parent: Arc<Parent>,
    /// Devices of `inventory`, to detect a change.
    roster: Option<Roster>,
    inventory: Inventory,
    /// The inventory that was sent last, with lost GPUs moved to `unreadable`.
    sent: Option<Inventory>,
    listening: Option<Listening>,
}

/// Runs the child process: writes messages to standard output, and reads standard input only to
/// notice its end.
pub fn run(settings: &ProbeSettings) -> io::Result<()> {
    thread::Builder::new()
        .name("parent".to_owned())
        .spawn(|| end_with(io::stdin()))?;
    watch(settings, Box::new(io::stdout()))
}

/// Waits for the end of the input, then ends the process at once: another thread may hang in
/// the driver, and an orderly exit would wait for it.
fn end_with(mut input: impl Read) {
    let mut ignored = [0; 64];
    while !matches!(input.read(&mut ignored), Ok(0) | Err(_)) {}
    crate::program::end_now();
}

/// Monitors the GPUs until the driver cannot be called or the parent stops reading.
fn watch(settings: &ProbeSettings, output: Box<dyn Write + Send>) -> io::Result<()> {
    let parent = Arc::new(Parent {
        output: Mutex::new(output),
        doing: Mutex::new(None),
    });
    let ended = match &settings.dcgm {
        Some(address) => dcgm::watch(settings, address, &parent),
        None => Watch::begin(settings, &parent).and_then(|watch| watch.run_loop(settings)),
    };
    match ended {
        Ok(()) => Ok(()),
        Err(ProbeEnd::Cannot(why)) => parent.send(&Said::Cannot(why)),
        Err(ProbeEnd::ParentGone(error)) => Err(error),
    }
}

// === impl Watch ===

impl Watch {
    /// Opens the library and sends the first message.
    fn begin(settings: &ProbeSettings, parent: &Arc<Parent>) -> Result<Self, ProbeEnd> {
        parent.announce("dlopen", None);
        let nvml = Nvml::open(&settings.places(), Parent::listener(parent));
        let nvml = nvml.map_err(|error| ProbeEnd::Cannot(error.to_string()))?;
        parent.greet(nvml.found_at())?;
        Ok(Self {
            nvml,
            parent: Arc::clone(parent),
            roster: None,
            inventory: Inventory::default(),
            sent: None,
            listening: None,
        })
    }

    /// Polls the driver at each interval, and earlier if an event arrived.
    fn run_loop(mut self, settings: &ProbeSettings) -> Result<(), ProbeEnd> {
        let interval = Duration::from_millis(settings.interval_ms);
        loop {
            let began = Instant::now();
            self.poll()?;
            let soonest = Instant::now() + SOONEST;
            let latest = soonest.max(began + interval);
            match &mut self.listening {
                Some(listening) => {
                    listening.wait(soonest, latest);
                    listening.check().map_err(ProbeEnd::Cannot)?;
                }
                None => thread::sleep(latest.saturating_duration_since(Instant::now())),
            }
        }
    }

    /// Sends the inventory if it has changed, and the readings.
    fn poll(&mut self) -> Result<(), ProbeEnd> {
        let roster = self.nvml.roster()?;
        if self.roster.as_ref() != Some(&roster) {
            self.enumerate()?;
            self.roster = Some(roster);
        }
        let mut shown = self.inventory.clone();
        shown.gpus.clear();
        let mut readings = Vec::new();
        let waiting = self.listening.as_ref();
        let wait_error = waiting.and_then(|listening| listening.error.clone());
        for gpu in &self.inventory.gpus {
            match self.nvml.readings(gpu) {
                Ok(read) => {
                    let mut gpu = gpu.clone();
                    gpu.unmonitored = gpu.unmonitored.or_else(|| wait_error.clone());
                    shown.gpus.push(gpu);
                    readings.push(read);
                }
                Err(unreadable) => shown.unreadable.push(unreadable),
            }
        }
        shown.unreadable.sort_by_key(|gpu| gpu.index);
        if self.sent.as_ref() != Some(&shown) {
            self.parent.send(&Said::Inventory(shown.clone()))?;
            self.sent = Some(shown);
        }
        self.parent.send(&Said::Readings(readings))?;
        Ok(())
    }

    /// Rebuilds the inventory, and subscribes to the events of its GPUs.
    fn enumerate(&mut self) -> Result<(), ProbeEnd> {
        if let Some(listening) = self.listening.take() {
            self.parent.announce("nvmlEventSetWait_v2", None);
            listening.stop();
        }
        let mut inventory = self.nvml.inventory()?;
        remember(&mut inventory, &self.inventory);
        match self.nvml.events(&mut inventory) {
            Ok(events) => {
                let parent = Arc::clone(&self.parent);
                let send = move |event| parent.send(&Said::Event(event));
                let listening = Listening::begin(events, send);
                self.listening =
                    Some(listening.map_err(|error| ProbeEnd::Cannot(error.to_string()))?);
            }
            Err(error) => {
                for gpu in &mut inventory.gpus {
                    gpu.unmonitored = Some(error.to_string());
                }
            }
        }
        self.inventory = inventory;
        Ok(())
    }
}

/// Names GPUs that do not answer after the GPUs that had their index before. If the number of
/// GPUs has changed, their indexes may have changed too, and nothing is named.
fn remember(inventory: &mut Inventory, before: &Inventory) {
    let count = |inventory: &Inventory| inventory.gpus.len() + inventory.unreadable.len();
    if count(inventory) != count(before) {
        return;
    }
    for gpu in &mut inventory.unreadable {
        let answered = before.gpus.iter().find(|known| known.index == gpu.index);
        let did_not = |known: &&UnreadableGpu| known.index == gpu.index;
        if let Some(known) = answered {
            gpu.uuid = Some(known.uuid.clone());
            gpu.pci = Some(known.pci.clone());
        } else if let Some(known) = before.unreadable.iter().find(did_not) {
            gpu.uuid.clone_from(&known.uuid);
            gpu.pci.clone_from(&known.pci);
        }
    }
}

// === impl ProbeSettings ===

impl ProbeSettings {
    fn places(&self) -> LibraryPlaces {
        LibraryPlaces {
            path: self.library.clone(),
            driver_root: self.driver_root.clone(),
        }
    }
}

// === impl Parent ===

impl Parent {
    /// Returns a listener that announces each library call before it is made.
    fn listener(parent: &Arc<Self>) -> Listener {
        let parent = Arc::clone(parent);
        Box::new(move |call, gpu| parent.announce(call, gpu))
    }

    /// Sends the first message.
    fn greet(&self, library: &Path) -> io::Result<()> {
        self.send(&Said::Hello {
            protocol: PROTOCOL,
            library: library.display().to_string(),
        })
    }

    /// Writes one message, in a single write.
    fn send(&self, message: &Said) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        output.write_all(&line)?;
        output.flush()
    }

    /// Announces a call. A write error is ignored here; the next message will fail with it.
    fn announce(&self, call: &'static str, gpu: Option<u32>) {
        let mut doing = self.doing.lock().unwrap_or_else(PoisonError::into_inner);
        if doing.replace((call, gpu)) != Some((call, gpu)) {
            let call = Cow::Borrowed(call);
            let _ = self.send(&Said::Doing { call, gpu });
        }
    }
}

// === impl ProbeEnd ===

impl From<NvmlError> for ProbeEnd {
    fn from(error: NvmlError) -> Self {
        Self::Cannot(error.to_string())
    }
}

impl From<io::Error> for ProbeEnd {
    fn from(error: io::Error) -> Self {
        Self::ParentGone(error)
    }
}

#[cfg(test)]
mod tests;
