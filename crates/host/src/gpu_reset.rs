//! Resets GPUs of this machine, and says of each how that went.
//!
//! Before anything is done, everything is looked at: whether each GPU that was asked for is here, and who
//! holds it. What holds it is named, and then nothing is touched. A GPU that was not asked for never is.
//! NVML has no function for a reset, so the driver's tool does it; NVML says afterwards whether the GPU is
//! well. The way that the GPUs stay initialised (persistence mode) is switched off for the reset, for the
//! daemon of that mode holds them open, and put back whatever happens.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{io, thread};

use diagnosis::gpu::{Inventory, RecoveryAction, pci_address};

use crate::library::Places;
use crate::nvml::{Nvml, NvmlError, OpenError};

mod holders;
mod log;
mod tool;

use holders::Holder;
pub use log::{LogError, TAG, line, tell};

/// Time for the daemon of the persistence mode to let go of a GPU.
const LETS_GO_WITHIN: Duration = Duration::from_secs(5);
/// Pause between two looks at who holds a GPU.
const LOOKS_EVERY: Duration = Duration::from_millis(100);

/// Said of a GPU that nothing is wrong with.
const UNTOUCHED: &str = "it was not touched, for another GPU that was asked for cannot be reset";

/// What is to be reset, and where things are.
#[derive(Clone, Debug)]
pub struct ResetSettings {
    /// The GPUs by UUID or PCI bus id; none: all.
    pub targets: Vec<String>,
    /// Where NVML is.
    pub places: Places,
    /// The driver's tool, where it is not to be looked for.
    pub tool: Option<PathBuf>,
    /// Time that the tool has.
    pub tool_time: Duration,
    /// The directory of device files, `/dev`.
    pub devices: PathBuf,
    /// The directory of processes, `/proc`.
    pub processes: PathBuf,
}

/// How it went with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuReset {
    /// Its UUID, or where that is not known what it was asked for by.
    pub gpu: String,
    /// Why it was not reset, or is not well after it; `None`: it is well.
    pub failure: Option<String>,
}

/// GPUs that cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// NVML cannot be used.
    #[error(transparent)]
    Nvml(#[from] OpenError),
    /// The driver does not answer.
    #[error("the driver does not say which GPUs there are")]
    Driver(#[from] NvmlError),
    /// What was asked for is no name of a GPU.
    #[error("{0:?} is no GPU: it is to be a UUID (GPU-...) or a PCI bus id (0000:3b:00.0)")]
    NotAName(String),
    /// The processes cannot be looked at.
    #[error("cannot look at who holds the GPUs, in {}", at.display())]
    Processes {
        /// The directory.
        at: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// There is no tool.
    #[error("nvidia-smi is not to be found: {0}")]
    NoTool(String),
}

/// A GPU that is to be reset.
#[derive(Clone, Debug)]
struct Target {
    /// What it was asked for by.
    asked: String,
    uuid: String,
    /// PCI address in this product's form.
    pci: String,
    index: u32,
    minor: Option<u32>,
}

/// Resets GPUs. Blocks; a call of NVML that hangs is not ended here. The result has one entry for each GPU.
pub fn reset(settings: &ResetSettings) -> Result<Vec<GpuReset>, ResetError> {
    let nvml = open(settings)?;
    let inventory = nvml.inventory()?;
    let (targets, mut failures) = targets(settings, &nvml, &inventory)?;
    let tool = tool::find(settings)?;
    let mut touched = false;
    if failures.is_empty() {
        let on = persistent(&nvml, &targets);
        failures = match switch_off(&nvml, &targets, &on) {
            Ok(()) => hindrances(settings, &nvml, &targets)?,
            Err(failures) => failures,
        };
        // The library holds the GPUs open as well.
        drop(nvml);
        if failures.is_empty() {
            touched = true;
            let uuids: Vec<&str> = targets.iter().map(|one| one.uuid.as_str()).collect();
            let said = tool::run(&tool, &uuids, settings);
            failures = verify(settings, &targets, &said);
        }
        put_back(settings, &targets, &on);
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

fn open(settings: &ResetSettings) -> Result<Nvml, OpenError> {
    Nvml::open(&settings.places, Box::new(|_, _| {}))
}

/// Returns the GPUs that are to be reset, and why others cannot be.
fn targets(
    settings: &ResetSettings,
    nvml: &Nvml,
    inventory: &Inventory,
) -> Result<(Vec<Target>, BTreeMap<String, String>), ResetError> {
    let mut failures = BTreeMap::new();
    let all = inventory.gpus.iter().map(|gpu| Target {
        asked: gpu.uuid.clone(),
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
    for asked in &settings.targets {
        let is_pci = asked.contains(':')
            && asked
                .chars()
                .all(|c| c.is_ascii_hexdigit() || ":.".contains(c));
        if !is_pci && !asked.starts_with("GPU-") {
            return Err(ResetError::NotAName(asked.clone()));
        }
        let wanted = pci_address(asked);
        let is = |one: &&Target| {
            one.uuid.eq_ignore_ascii_case(asked)
                || (is_pci && one.pci.eq_ignore_ascii_case(&wanted))
        };
        match all.iter().find(is) {
            Some(one) if found.iter().any(|before| before.uuid == one.uuid) => {}
            Some(one) => found.push(Target {
                asked: asked.clone(),
                ..one.clone()
            }),
            None => {
                let why = "the driver has no such GPU, or has lost it".to_owned();
                failures.insert(asked.clone(), why);
            }
        }
    }
    Ok((found, failures))
}

/// Returns which of the GPUs stay initialised while nobody uses them.
fn persistent(nvml: &Nvml, targets: &[Target]) -> Vec<String> {
    let on = targets
        .iter()
        .filter(|one| nvml.persistence(one.index) == Some(true));
    on.map(|one| one.uuid.clone()).collect()
}

/// Switches that off.
fn switch_off(
    nvml: &Nvml,
    targets: &[Target],
    on: &[String],
) -> Result<(), BTreeMap<String, String>> {
    let mut failures = BTreeMap::new();
    for one in targets.iter().filter(|one| on.contains(&one.uuid)) {
        if let Err(error) = nvml.set_persistence(one.index, false) {
            let why = format!("its persistence mode cannot be switched off: {error}");
            failures.insert(one.uuid.clone(), why);
        }
    }
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures)
    }
}

/// Returns why GPUs cannot be reset now.
fn hindrances(
    settings: &ResetSettings,
    nvml: &Nvml,
    targets: &[Target],
) -> Result<BTreeMap<String, String>, ResetError> {
    let held = look_at_holders(settings, nvml, targets)?;
    match holders::fabric_manager(settings) {
        Some(why) if held.is_empty() => {
            let each = targets.iter().map(|one| (one.uuid.clone(), why.clone()));
            Ok(each.collect())
        }
        _ => Ok(held),
    }
}

/// Returns of each GPU that is held by whom it is. The daemon of the persistence mode has a while to let go.
fn look_at_holders(
    settings: &ResetSettings,
    nvml: &Nvml,
    targets: &[Target],
) -> Result<BTreeMap<String, String>, ResetError> {
    let until = Instant::now() + LETS_GO_WITHIN;
    loop {
        let mut failures = BTreeMap::new();
        let mut waits = true;
        for one in targets {
            let told = nvml.processes(one.index).unwrap_or_default();
            let held_by = holders::of(settings, one.minor, &told)?;
            if !held_by.is_empty() {
                waits &= held_by.iter().all(Holder::is_persistence_daemon);
                let names: Vec<String> = held_by.iter().map(Holder::to_string).collect();
                let why = format!("it is held by {}", names.join(", "));
                failures.insert(one.uuid.clone(), why);
            }
        }
        if failures.is_empty() || !waits || Instant::now() >= until {
            return Ok(failures);
        }
        thread::sleep(LOOKS_EVERY);
    }
}

/// Returns of each GPU that is not well after a reset why so.
fn verify(
    settings: &ResetSettings,
    targets: &[Target],
    said: &tool::Said,
) -> BTreeMap<String, String> {
    let mut failures = BTreeMap::new();
    let mut fails = |one: &Target, why: String| {
        failures.entry(one.uuid.clone()).or_insert(why);
    };
    for one in targets {
        if let Err(why) = said.of(&one.pci) {
            fails(one, why);
        }
    }
    let looked = open(settings).map_err(|error| error.to_string());
    let looked = looked.and_then(|nvml| match nvml.inventory() {
        Ok(inventory) => Ok((nvml, inventory)),
        Err(error) => Err(error.to_string()),
    });
    let (nvml, inventory) = match looked {
        Ok(looked) => looked,
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
                let asks = readings.recovery_action;
                if let Some(action) = asks.filter(|action| *action != RecoveryAction::None) {
                    fails(
                        one,
                        format!("after the reset the driver still asks for {action:?}"),
                    );
                }
            }
        }
    }
    failures
}

/// Switches the persistence mode on again where it was.
fn put_back(settings: &ResetSettings, targets: &[Target], on: &[String]) {
    if on.is_empty() {
        return;
    }
    let nvml = match open(settings) {
        Ok(nvml) => nvml,
        Err(error) => {
            tracing::error!(%error, "the persistence mode is not switched on again");
            return;
        }
    };
    let inventory = nvml.inventory().unwrap_or_default();
    for one in targets.iter().filter(|one| on.contains(&one.uuid)) {
        // A GPU may have another index than before.
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == one.uuid);
        let done = gpu.map(|gpu| nvml.set_persistence(gpu.index, true));
        match done {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                tracing::error!(gpu = one.asked, %error, "the persistence mode is not switched on again");
            }
            None => tracing::error!(gpu = one.asked, "is gone, and its persistence mode with it"),
        }
    }
}
