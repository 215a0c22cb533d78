//! Resets GPUs of this machine, and returns the outcome for each.
//!
//! Everything is checked before anything is changed: whether each requested GPU is present, and
//! which processes use it. If a GPU is in use, the processes are reported and no GPU is
//! touched. A GPU that was not requested is never touched.
//!
//! NVML has no function for a reset, so the driver's tool does it; afterwards NVML shows
//! whether the GPU is healthy. Persistence mode is disabled for the reset, since its daemon
//! holds the GPUs open, and restored whatever happens.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{io, thread};

use diagnosis::gpu::{Inventory, RecoveryAction, pci_address};

use crate::library::LibraryPlaces;
use crate::nvml::{Nvml, NvmlError, NvmlOpenError};

mod holders;
mod log;
mod tool;

use holders::Holder;
pub use log::{LogError, TAG, line, tell};

/// Time within which the persistence daemon must release a GPU.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of checks for processes that use a GPU, and for the end of the tool.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Failure of a GPU that could have been reset itself.
const UNTOUCHED: &str = "it was not touched because another requested GPU cannot be reset";

/// Settings of a reset.
#[derive(Clone, Debug)]
pub struct ResetSettings {
    /// GPUs by UUID or PCI bus id; empty means all.
    pub targets: Vec<String>,
    /// Places to search for NVML.
    pub places: LibraryPlaces,
    /// Path of `nvidia-smi`; `None` to search for it.
    pub tool: Option<PathBuf>,
    /// Timeout of the tool.
    pub tool_time: Duration,
    /// Directory of device files, normally `/dev`.
    pub devices: PathBuf,
    /// Directory of processes, normally `/proc`.
    pub processes: PathBuf,
}

/// Outcome of the reset of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuReset {
    /// UUID, or the requested name if the GPU was not found.
    pub gpu: String,
    /// Reason why the GPU was not reset, or is not healthy after the reset; `None` on success.
    pub failure: Option<String>,
}

/// Error that prevents any reset.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// NVML cannot be used.
    #[error(transparent)]
    Nvml(#[from] NvmlOpenError),
    /// The driver does not answer.
    #[error("the driver cannot list its GPUs")]
    Driver(#[from] NvmlError),
    /// The requested name is neither a UUID nor a PCI bus id.
    #[error("{0:?} does not name a GPU: expected a UUID (GPU-...) or a PCI bus id (0000:3b:00.0)")]
    NotAName(String),
    /// The list of processes cannot be read.
    #[error("cannot list the processes that hold GPUs, in {}", at.display())]
    Processes {
        /// Directory that was read.
        at: PathBuf,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
    /// The tool was not found. Holds the paths that were tried.
    #[error("nvidia-smi was not found; tried {0}")]
    NoTool(String),
}

/// A GPU to reset.
#[derive(Clone, Debug)]
struct Target {
    /// Requested name: UUID or PCI bus id.
    requested: String,
    uuid: String,
    /// PCI address in this product's form.
    pci: String,
    index: u32,
    minor: Option<u32>,
}

/// Resets GPUs, and returns one entry for each. Blocks, and has no timeout for a call of NVML
/// that hangs.
pub fn reset(settings: &ResetSettings) -> Result<Vec<GpuReset>, ResetError> {
    let nvml = open(settings)?;
    let inventory = nvml.inventory()?;
    let (targets, mut failures) = targets(settings, &nvml, &inventory)?;
    let tool = tool::find(settings)?;
    let mut touched = false;
    if failures.is_empty() {
        let on = persistent(&nvml, &targets);
        failures = match disable_persistence(&nvml, &targets, &on) {
            Ok(()) => obstacles(settings, &nvml, &targets)?,
            Err(failures) => failures,
        };
        // The library holds the GPUs open as well.
        drop(nvml);
        if failures.is_empty() {
            touched = true;
            let uuids: Vec<&str> = targets.iter().map(|one| one.uuid.as_str()).collect();
            let outcome = tool::run(&tool, &uuids, settings);
            failures = verify(settings, &targets, &outcome);
        }
        restore_persistence(settings, &targets, &on);
    }
    let results = targets.iter().map(|one| {
        let failure = failures.remove(&one.uuid);
        let untouched = || (!touched).then(|| UNTOUCHED.to_owned());
        GpuReset {
            gpu: one.uuid.clone(),
            failure: failure.or_else(untouched),
        }
    });
    let mut results: Vec<GpuReset> = results.collect();
    results.extend(failures.into_iter().map(|(gpu, why)| GpuReset {
        gpu,
        failure: Some(why),
    }));
    Ok(results)
}

fn open(settings: &ResetSettings) -> Result<Nvml, NvmlOpenError> {
    Nvml::open(&settings.places, Box::new(|_, _| {}))
}

/// Returns the GPUs to reset, and the failures of GPUs that cannot be reset, by requested name.
fn targets(
    settings: &ResetSettings,
    nvml: &Nvml,
    inventory: &Inventory,
) -> Result<(Vec<Target>, BTreeMap<String, String>), ResetError> {
    let mut failures = BTreeMap::new();
    let all = inventory.gpus.iter().map(|gpu| Target {
        requested: gpu.uuid.clone(),
        uuid: gpu.uuid.clone(),
        pci: gpu.pci.clone(),
        index: gpu.index,
        minor: nvml.minor(gpu.index),
    });
    let all: Vec<Target> = all.collect();
    if settings.targets.is_empty() {
        for gone in &inventory.unreadable {
            let name = gone.uuid.clone().or_else(|| gone.pci.clone());
            let name = name.unwrap_or_else(|| format!("GPU {}", gone.index));
            failures.insert(name, format!("the driver answers {}", gone.error));
        }
        return Ok((all, failures));
    }
    let mut found: Vec<Target> = Vec::new();
    for requested in &settings.targets {
        let is_pci = requested.contains(':')
            && requested
                .chars()
                .all(|c| c.is_ascii_hexdigit() || ":.".contains(c));
        if !is_pci && !requested.starts_with("GPU-") {
            return Err(ResetError::NotAName(requested.clone()));
        }
        let wanted = pci_address(requested);
        let is = |one: &&Target| {
            one.uuid.eq_ignore_ascii_case(requested)
                || (is_pci && one.pci.eq_ignore_ascii_case(&wanted))
        };
        match all.iter().find(is) {
            Some(one) if found.iter().any(|before| before.uuid == one.uuid) => {}
            Some(one) => found.push(Target {
                requested: requested.clone(),
                ..one.clone()
            }),
            None => {
                let why = "the driver has no such GPU, or has lost it".to_owned();
                failures.insert(requested.clone(), why);
            }
        }
    }
    Ok((found, failures))
}

/// Returns the UUIDs of the GPUs with persistence mode enabled.
fn persistent(nvml: &Nvml, targets: &[Target]) -> Vec<String> {
    let on = targets
        .iter()
        .filter(|one| nvml.persistence(one.index) == Some(true));
    on.map(|one| one.uuid.clone()).collect()
}

/// Disables persistence mode on those of `targets` that are in `on`.
fn disable_persistence(
    nvml: &Nvml,
    targets: &[Target],
    on: &[String],
) -> Result<(), BTreeMap<String, String>> {
    let mut failures = BTreeMap::new();
    for one in targets.iter().filter(|one| on.contains(&one.uuid)) {
        if let Err(error) = nvml.set_persistence(one.index, false) {
            let why = format!("cannot disable its persistence mode: {error}");
            failures.insert(one.uuid.clone(), why);
        }
    }
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures)
    }
}

/// Returns the reasons that prevent a reset now, by UUID.
fn obstacles(
    settings: &ResetSettings,
    nvml: &Nvml,
    targets: &[Target],
) -> Result<BTreeMap<String, String>, ResetError> {
    let held = find_holders(settings, nvml, targets)?;
    match holders::fabric_manager(settings) {
        Some(why) if held.is_empty() => {
            let each = targets.iter().map(|one| (one.uuid.clone(), why.clone()));
            Ok(each.collect())
        }
        _ => Ok(held),
    }
}

/// Returns, for each GPU that is in use, which processes hold it. Waits a while for the
/// persistence daemon to release it.
fn find_holders(
    settings: &ResetSettings,
    nvml: &Nvml,
    targets: &[Target],
) -> Result<BTreeMap<String, String>, ResetError> {
    let until = Instant::now() + RELEASE_TIMEOUT;
    loop {
        let mut failures = BTreeMap::new();
        let mut can_wait = true;
        for one in targets {
            let listed = nvml.processes(one.index).unwrap_or_default();
            let held_by = holders::of(settings, one.minor, &listed)?;
            if !held_by.is_empty() {
                can_wait &= held_by.iter().all(Holder::is_persistence_daemon);
                let names: Vec<String> = held_by.iter().map(Holder::to_string).collect();
                let why = format!("it is held by {}", names.join(", "));
                failures.insert(one.uuid.clone(), why);
            }
        }
        if failures.is_empty() || !can_wait || Instant::now() >= until {
            return Ok(failures);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Checks the GPUs after the reset. Returns a reason for each that was not reset or is not
/// healthy.
fn verify(
    settings: &ResetSettings,
    targets: &[Target],
    outcome: &tool::ToolOutcome,
) -> BTreeMap<String, String> {
    let mut failures = BTreeMap::new();
    let mut fails = |one: &Target, why: String| {
        failures.entry(one.uuid.clone()).or_insert(why);
    };
    for one in targets {
        if let Err(why) = outcome.of(&one.pci) {
            fails(one, why);
        }
    }
    let read = open(settings).map_err(|error| error.to_string());
    let read = read.and_then(|nvml| match nvml.inventory() {
        Ok(inventory) => Ok((nvml, inventory)),
        Err(error) => Err(error.to_string()),
    });
    let (nvml, inventory) = match read {
        Ok(read) => read,
        Err(why) => {
            for one in targets {
                fails(
                    one,
                    format!("after the reset the driver does not answer: {why}"),
                );
            }
            return failures;
        }
    };
    for one in targets {
        let Some(gpu) = inventory.gpus.iter().find(|gpu| gpu.uuid == one.uuid) else {
            fails(one, "after the reset the driver has lost it".to_owned());
            continue;
        };
        match nvml.readings(gpu) {
            Err(gone) => fails(
                one,
                format!("after the reset the driver answers {}", gone.error),
            ),
            Ok(readings) => {
                let action = readings.recovery_action;
                if let Some(action) = action.filter(|action| *action != RecoveryAction::None) {
                    fails(
                        one,
                        format!("after the reset the driver still requests {action:?}"),
                    );
                }
            }
        }
    }
    failures
}

/// Enables persistence mode again on those of `targets` that are in `on`.
fn restore_persistence(settings: &ResetSettings, targets: &[Target], on: &[String]) {
    if on.is_empty() {
        return;
    }
    let nvml = match open(settings) {
        Ok(nvml) => nvml,
        Err(error) => {
            tracing::error!(%error, "cannot enable persistence mode again after the reset");
            return;
        }
    };
    let inventory = nvml.inventory().unwrap_or_default();
    for one in targets.iter().filter(|one| on.contains(&one.uuid)) {
        // The index of a GPU may have changed.
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == one.uuid);
        let done = gpu.map(|gpu| nvml.set_persistence(gpu.index, true));
        match done {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                tracing::error!(gpu = one.requested, %error, "cannot enable persistence mode again after the reset");
            }
            None => tracing::error!(
                gpu = one.requested,
                "the GPU is gone after the reset, so persistence mode was not enabled again"
            ),
        }
    }
}
