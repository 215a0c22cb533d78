//! The child process that talks to the GPUs' driver, or to DCGM (`dcgm`), so that a call that hangs or crashes inside the
//! vendor's library costs this process and never the agent.
//!
//! It only speaks: one [`Said`] a line as JSON, about each call before it is made, about the GPUs at
//! each interval, and about an event at once. Its settings are its argument. It ends when its input
//! closes, because then its parent is gone, and when the driver is: its parent starts a new one,
//! which loads whatever library is there then.

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

use crate::library::{Listener, Places};
use crate::nvml::{Nvml, NvmlError, Roster};
use listening::Listening;

/// The version of what is said; a parent that was upgraded may have a child of another.
pub const PROTOCOL: u32 = 2;
/// Shortest pause between two looks: when events ask for one before its time, and when the driver is
/// so slow that a look takes longer than the interval.
const SOONEST: Duration = Duration::from_secs(1);

/// The settings of the child.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeSettings {
    /// The library itself, where it is not to be looked for.
    pub library: Option<PathBuf>,
    /// The directory at which the driver is mounted.
    pub driver_root: Option<PathBuf>,
    /// Pause between two looks.
    pub interval_ms: u64,
    /// The host engine of DCGM that is to be asked, `HOST` or `HOST:PORT`, in the place of the driver.
    #[serde(default)]
    pub dcgm: Option<String>,
}

/// One line of the child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// The library is open; comes first.
    Hello {
        /// [`PROTOCOL`].
        protocol: u32,
        /// The path or the name by which the library was found.
        library: String,
    },
    /// A call of the library begins; the same one again is not repeated.
    Doing {
        /// The function.
        call: Cow<'static, str>,
        /// Index of the GPU that it is about.
        gpu: Option<u32>,
    },
    /// The inventory; said where it has changed.
    Inventory(Inventory),
    /// The readings of all GPUs that answer; ends a look.
    Readings(Vec<Readings>),
    /// Something that has just happened.
    Event(GpuEvent),
    /// The findings of DCGM's watches; ends a look at them.
    Dcgm(DcgmLook),
    /// The reason why nothing can be told any more. Then the child ends.
    Cannot(String),
}

/// The reason why a probe ended.
enum End {
    /// The driver cannot be asked.
    Cannot(String),
    /// Nobody listens any more.
    Unheard(io::Error),
}

/// Says things to the parent.
struct Speaker {
    output: Mutex<Box<dyn Write + Send>>,
    doing: Mutex<Option<(&'static str, Option<u32>)>>,
}

/// The watch over the GPUs of a machine.
struct Watch {
    nvml: Nvml,
    speaker: Arc<Speaker>,
    /// The devices from which the inventory was made.
    roster: Option<Roster>,
    inventory: Inventory,
    /// The inventory that was said last, in which GPUs that are lost are not among the others.
    said: Option<Inventory>,
    listening: Option<Listening>,
}

/// Is the whole of the child process: reads its input only to end with it, and speaks on its output.
pub fn run(settings: &ProbeSettings) -> io::Result<()> {
    thread::Builder::new()
        .name("parent".to_owned())
        .spawn(|| end_with(io::stdin()))?;
    watch(settings, Box::new(io::stdout()))
}

/// Waits for the end of the input, and ends the process as its parent would: another thread may hang
/// in the driver, which an orderly end would wait for.
fn end_with(mut input: impl Read) {
    let mut ignored = [0; 64];
    while !matches!(input.read(&mut ignored), Ok(0) | Err(_)) {}
    crate::program::end_now();
}

/// Watches the GPUs until the driver cannot be asked, or nobody listens.
fn watch(settings: &ProbeSettings, output: Box<dyn Write + Send>) -> io::Result<()> {
    let speaker = Arc::new(Speaker {
        output: Mutex::new(output),
        doing: Mutex::new(None),
    });
    let ended = match &settings.dcgm {
        Some(address) => dcgm::watch(settings, address, &speaker),
        None => Watch::begin(settings, &speaker).and_then(|watch| watch.go_on(settings)),
    };
    match ended {
        Ok(()) => Ok(()),
        Err(End::Cannot(why)) => speaker.say(&Said::Cannot(why)),
        Err(End::Unheard(error)) => Err(error),
    }
}

// === impl Watch ===

impl Watch {
    /// Opens the library.
    fn begin(settings: &ProbeSettings, speaker: &Arc<Speaker>) -> Result<Self, End> {
        speaker.announce("dlopen", None);
        let nvml = Nvml::open(&settings.places(), Speaker::listener(speaker));
        let nvml = nvml.map_err(|error| End::Cannot(error.to_string()))?;
        speaker.greet(nvml.found_at())?;
        Ok(Self {
            nvml,
            speaker: Arc::clone(speaker),
            roster: None,
            inventory: Inventory::default(),
            said: None,
            listening: None,
        })
    }

    /// Looks at each interval, and earlier where an event came.
    fn go_on(mut self, settings: &ProbeSettings) -> Result<(), End> {
        let interval = Duration::from_millis(settings.interval_ms);
        loop {
            let began = Instant::now();
            self.look()?;
            let soonest = Instant::now() + SOONEST;
            let latest = soonest.max(began + interval);
            match &mut self.listening {
                Some(listening) => {
                    listening.wait(soonest, latest);
                    listening.check().map_err(End::Cannot)?;
                }
                None => thread::sleep(latest.saturating_duration_since(Instant::now())),
            }
        }
    }

    /// Says what is there, where that has changed, and how it does.
    fn look(&mut self) -> Result<(), End> {
        let roster = self.nvml.roster()?;
        if self.roster.as_ref() != Some(&roster) {
            self.enumerate()?;
            self.roster = Some(roster);
        }
        let mut shown = self.inventory.clone();
        shown.gpus.clear();
        let mut readings = Vec::new();
        let waiting = self.listening.as_ref();
        let unheard = waiting.and_then(|listening| listening.error.clone());
        for gpu in &self.inventory.gpus {
            match self.nvml.readings(gpu) {
                Ok(read) => {
                    let mut gpu = gpu.clone();
                    gpu.unmonitored = gpu.unmonitored.or_else(|| unheard.clone());
                    shown.gpus.push(gpu);
                    readings.push(read);
                }
                Err(unreadable) => shown.unreadable.push(unreadable),
            }
        }
        shown.unreadable.sort_by_key(|gpu| gpu.index);
        if self.said.as_ref() != Some(&shown) {
            self.speaker.say(&Said::Inventory(shown.clone()))?;
            self.said = Some(shown);
        }
        self.speaker.say(&Said::Readings(readings))?;
        Ok(())
    }

    /// Makes the inventory anew, and listens for the events of what is in it.
    fn enumerate(&mut self) -> Result<(), End> {
        if let Some(listening) = self.listening.take() {
            self.speaker.announce("nvmlEventSetWait_v2", None);
            listening.stop();
        }
        let mut inventory = self.nvml.inventory()?;
        remember(&mut inventory, &self.inventory);
        match self.nvml.events(&mut inventory) {
            Ok(events) => {
                let speaker = Arc::clone(&self.speaker);
                let say = move |event| speaker.say(&Said::Event(event));
                let listening = Listening::begin(events, say);
                self.listening = Some(listening.map_err(|error| End::Cannot(error.to_string()))?);
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

/// Names the GPUs that do not answer by what was at their index before. Where their number has
/// changed, so may their indexes.
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
    fn places(&self) -> Places {
        Places {
            path: self.library.clone(),
            driver_root: self.driver_root.clone(),
        }
    }
}

// === impl Speaker ===

impl Speaker {
    /// Returns what has a speaker say each call before it is made.
    fn listener(speaker: &Arc<Self>) -> Listener {
        let speaker = Arc::clone(speaker);
        Box::new(move |call, gpu| speaker.announce(call, gpu))
    }

    /// Says that the library is open.
    fn greet(&self, library: &Path) -> io::Result<()> {
        self.say(&Said::Hello {
            protocol: PROTOCOL,
            library: library.display().to_string(),
        })
    }

    /// Says something, in one write.
    fn say(&self, said: &Said) -> io::Result<()> {
        let mut line = serde_json::to_vec(said)?;
        line.push(b'\n');
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        output.write_all(&line)?;
        output.flush()
    }

    /// Says which call begins. That nobody hears it is noticed with the next thing that is said.
    fn announce(&self, call: &'static str, gpu: Option<u32>) {
        let mut doing = self.doing.lock().unwrap_or_else(PoisonError::into_inner);
        if doing.replace((call, gpu)) != Some((call, gpu)) {
            let call = Cow::Borrowed(call);
            let _ = self.say(&Said::Doing { call, gpu });
        }
    }
}

// === impl End ===

impl From<NvmlError> for End {
    fn from(error: NvmlError) -> Self {
        Self::Cannot(error.to_string())
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Unheard(error)
    }
}

#[cfg(test)]
mod tests;
