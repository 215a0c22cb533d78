//! The GPU health monitor: takes what a probe sees of the GPUs, has it judged
//! (`diagnosis/src/gpu/checks.rs`), and reports the problems that have come and those that are over.
//! What becomes of a report is the business of [`crate::monitor`].
//!
//! DCGM may be asked beside the driver (`dcgm`); what both see is one fault. A driver that does not
//! answer is blindness, never a fault. Its XIDs are reported where nobody
//! reads them in the kernel log, by the same catalogue, so that one XID is one fault.

mod dcgm;
mod event;
pub mod metadata;
mod metrics;
pub mod probe;
mod ready;
mod starts;
pub mod way;
mod xid;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{HealthEvent, keys};
use devices::DeviceApi;
use devices::board::Own;
use devices::faults::NodeFaults;
use diagnosis::catalog::Catalog;
use diagnosis::decode::KernelLogDecoder;
use diagnosis::gpu::checks::{Change, Health, Remembered};
use diagnosis::gpu::dcgm::{DcgmLook, ImexUse};
use diagnosis::gpu::{GpuEvent, Inventory, Readings};
use diagnosis::limits::Limits;
use jiff::Timestamp;
use model::fault::is_mended_by_reboot;
use runtime::logging::Seldom;
use runtime::sources::{SourceState, SourceStatus, Sources};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::kernel_log;
use crate::monitor::{Frame, Monitor, Reporter};
use dcgm::DcgmWatch;
use metrics::{GpuMetrics, ProbeMetrics};
use ready::Critical;
use way::Way;

/// Describes the GPU health monitor to its frame.
const MONITOR: Monitor = Monitor {
    name: "gpu-health",
    records: "Looks at the GPUs",
    agent: keys::GPU_AGENT,
    checks: &[
        (keys::CHECK_GPU_PCIE, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_MEMORY, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_THERMAL, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_THERMAL_MARGIN, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_POWER, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_DRIVER, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_NVLINK, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_COUNT, keys::COMPONENT_GPU),
        (keys::CHECK_XID, keys::COMPONENT_GPU),
    ],
};

/// Mark of all that is told of GPUs that are not there.
const FAKE: &str = "fake: ";

/// The trouble that is shown once no probe asks the driver any more.
const PROBE_HAS_ENDED: &str = "the probe of the GPUs has ended; only a restart begins it anew";

/// The settings of the monitor.
#[derive(Clone, Debug)]
pub struct GpuConfig {
    /// Thresholds of the checks.
    pub limits: Limits,
    /// True if the GPUs are fake: reports about them are marked, and the kernel's log knows nothing
    /// of them.
    pub is_fake: bool,
    /// XIDs that leave the condition `NVMLReady` alone, beside those of programs.
    pub ignored_xids: Vec<u32>,
    /// The catalogue by which codes are judged.
    pub catalog: Arc<Catalog>,
    /// The directory at which the driver is mounted, where it is.
    pub driver_root: PathBuf,
    /// Time after a look in which there ought to be another. From then on it is not known how the GPUs
    /// do, well before a call of the driver counts as hung.
    pub late_after: Duration,
}

/// Name of the source of what the driver tells.
pub const NAME: &str = MONITOR.name;

/// The detail of the source where the driver is not asked, but DCGM alone.
const NOT_ASKED: &str = "the driver is not asked (--enable-nvml-provider false)";

/// The probes from which the monitor learns.
#[derive(Debug, Default)]
pub struct Probes {
    /// The probe of the driver; `None`: it is not asked.
    pub nvml: Option<mpsc::Receiver<Seen>>,
    /// The probe of DCGM; `None`: it is not asked.
    pub dcgm: Option<mpsc::Receiver<Seen>>,
}

/// A message of a probe of the GPUs.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// The driver's library is there.
    Library(String),
    /// The inventory. It comes before the first look, and whenever it has changed.
    Inventory(Inventory),
    /// The readings of all GPUs that answer, from one look.
    Readings(Vec<Readings>),
    /// Something that has just happened to a GPU.
    Event(GpuEvent),
    /// The findings of DCGM's watches, from one look.
    Dcgm(DcgmLook),
    /// Nothing can be seen until something else is told.
    Blind {
        /// The reason, and what the driver was asked for.
        reason: String,
        /// True if the probe says so itself, such as that there is no driver; false if it hung, crashed
        /// or could not be started.
        is_said: bool,
        /// The children that could not be ended and are still there.
        stuck: usize,
    },
}

/// The monitor. Runs until cancelled.
pub struct GpuMonitor {
    config: GpuConfig,
    reporter: Reporter<GpuMemory>,
    probes: Probes,
    dcgm: Option<DcgmWatch>,
    sources: Sources,
    devices: DeviceApi,
    /// The open faults of this node, by which a person's word is seen.
    faults: watch::Receiver<NodeFaults>,
    /// The word on whether pods rely on IMEX, as far as it is told.
    imex: watch::Receiver<ImexUse>,
    /// The other end, for those who tell it.
    imex_told: watch::Sender<ImexUse>,
    health: Health,
    /// The time by which the driver ought to have told of another look; `None`: it is not waited for.
    due: Option<Instant>,
    /// True if that time has passed.
    is_late: bool,
    /// Limits what is said of conditions that the Device API does not take.
    not_taken: Seldom,
    /// The looks in which a GPU has answered while a start of it that failed was open, by UUID.
    answered_since_failure: BTreeMap<String, u32>,
    /// True once this process has found a driver.
    has_driver: bool,
    /// The driver's library, and by which way it was found.
    library: Option<String>,
    /// True once the driver, if it is asked, has answered or failed.
    driver_has_spoken: bool,
    inventory: Inventory,
    /// The same, for those who follow it.
    shown: watch::Sender<Inventory>,
    metrics: GpuMetrics,
    probe_metrics: ProbeMetrics,
    decoder: KernelLogDecoder,
    started: Instant,
}

/// The things that the monitor has to remember over a restart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct GpuMemory {
    health: Remembered,
    /// The time of each GPU's last XID that is reported and not closed, by UUID.
    xids: BTreeMap<String, Timestamp>,
    /// The last critical XID of each GPU that is not ready, by UUID.
    not_ready: BTreeMap<String, Critical>,
    /// True if it was told that DCGM does not answer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    dcgm_is_lost: bool,
}

// === impl GpuMonitor ===

impl GpuMonitor {
    /// Returns a monitor that is listed among the sources as `gpu-health`, and where it asks DCGM
    /// also as `gpu-dcgm`, and learns from `probes`.
    pub fn new(config: GpuConfig, frame: &Frame, probes: Probes, devices: DeviceApi) -> Self {
        let metrics = GpuMetrics::new(&frame.metrics);
        let dcgm = probes.dcgm.is_some().then(|| DcgmWatch::new(frame));
        let monitor = if dcgm.is_some() {
            &dcgm::MONITOR
        } else {
            &MONITOR
        };
        let mut reporter: Reporter<GpuMemory> = Reporter::new(monitor, frame.clone());
        match probes.nvml {
            Some(_) => reporter.show(
                SourceState::CatchingUp,
                "waiting for the driver's first word",
            ),
            None => reporter.show(SourceState::Following, NOT_ASKED),
        }
        let driver_has_spoken = probes.nvml.is_none();
        let (imex_told, imex) = watch::channel(ImexUse::default());
        let remembered = reporter.memory().health.clone();
        let mut health = Health::new(config.limits.clone(), remembered);
        if dcgm.is_none() {
            dcgm::forget(&mut health, &mut reporter);
        }
        Self {
            health,
            dcgm,
            decoder: KernelLogDecoder::new(Arc::clone(&config.catalog)),
            config,
            reporter,
            probes,
            sources: frame.sources.clone(),
            faults: devices.faults(),
            imex,
            imex_told,
            devices,
            due: None,
            is_late: false,
            not_taken: Seldom::default(),
            answered_since_failure: BTreeMap::new(),
            has_driver: false,
            library: None,
            driver_has_spoken,
            inventory: Inventory::default(),
            shown: watch::Sender::default(),
            metrics,
            probe_metrics: ProbeMetrics::registered(&frame.metrics),
            started: Instant::now(),
        }
    }

    /// Returns what is there, as it changes; no GPUs before the first look.
    pub fn inventory(&self) -> watch::Receiver<Inventory> {
        self.shown.subscribe()
    }

    /// Returns where it is told whether pods rely on IMEX; until then that is not known.
    pub fn imex(&self) -> watch::Sender<ImexUse> {
        self.imex_told.clone()
    }

    /// Takes in what the probe sees until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        self.forget_connectivity();
        loop {
            tokio::select! {
                biased;
                () = cancel.cancelled() => break,
                () = self.reporter.work() => self.beat_dcgm(),
                // It does not end before the API does, which is ours.
                _ = self.faults.changed() => self.end_by_word(),
                // Nor does this one, of which we keep the other end.
                _ = self.imex.changed(), if self.reporter.has_room() => self.take_in_imex(),
                () = until(self.due) => self.is_not_seen_lately(),
                seen = next(&mut self.probes.nvml), if self.reporter.has_room() => match seen {
                    Some(seen) => self.take_in(seen),
                    None => self.cannot_see(PROBE_HAS_ENDED),
                },
                seen = next(&mut self.probes.dcgm), if self.reporter.has_room() => match seen {
                    Some(seen) => self.take_in_dcgm(seen),
                    None => self.cannot_see_dcgm(PROBE_HAS_ENDED),
                },
            }
        }
        self.reporter.finish(&cancel).await;
    }

    fn take_in(&mut self, seen: Seen) {
        // Where there is no driver, one process after the other looks for it.
        if let Seen::Blind { stuck, .. } = &seen
            && !self.never_had_gpus()
        {
            self.probe_metrics.blind(MONITOR.name, *stuck);
        }
        self.driver_has_spoken |= matches!(seen, Seen::Readings(_) | Seen::Blind { .. });
        self.note_time(&seen);
        match seen {
            Seen::Library(library) => {
                self.has_driver = true;
                let way = Way::of(&library, &self.config.driver_root);
                self.library = (!self.config.is_fake).then(|| format!("{library} {way}"));
            }
            Seen::Inventory(inventory) => {
                self.show_inventory(&inventory);
                self.shown.send_replace(inventory.clone());
                self.inventory = inventory;
                if self.health.is_blind(&self.inventory) {
                    self.cannot_see("none of the GPUs of this machine answers");
                }
            }
            Seen::Readings(readings) => self.look(&readings),
            Seen::Event(event) => {
                self.note_critical(&event);
                // The counters tell of memory errors.
                if !self.others_read_xids() {
                    self.report_xid(&event);
                }
            }
            // Only a probe of DCGM says that.
            Seen::Dcgm(_) => {}
            Seen::Blind {
                reason,
                is_said: true,
                ..
            } if self.never_had_gpus() => {
                let (short, _) = in_short(&reason);
                let detail = format!("waiting for a driver: {short}");
                self.reporter.show(SourceState::Following, &detail);
            }
            Seen::Blind { reason, stuck, .. } if stuck > 0 => {
                self.cannot_see(&format!("{reason} ({stuck} probes cannot be ended)"));
            }
            Seen::Blind { reason, .. } => self.cannot_see(&reason),
        }
    }

    /// Notes when the driver has last told of a look, and shows again what it has not told anew.
    fn note_time(&mut self, seen: &Seen) {
        match seen {
            Seen::Readings(_) => {
                if std::mem::take(&mut self.is_late) {
                    self.show_inventory(&self.inventory.clone());
                }
                self.due = Some(Instant::now() + self.config.late_after);
            }
            Seen::Blind { .. } => (self.due, self.is_late) = (None, false),
            Seen::Library(_) | Seen::Inventory(_) | Seen::Event(_) | Seen::Dcgm(_) => {}
        }
    }

    /// Makes unknown how the GPUs do, because no look has ended lately: the driver may be slow, or hang.
    fn is_not_seen_lately(&mut self) {
        (self.due, self.is_late) = (None, true);
        let seconds = self.config.late_after.as_secs();
        let why = format!("the driver has told of no look for {seconds} s");
        self.devices.away(Own::Nvml, "DriverNotSeen", &why);
        self.reporter.show(SourceState::CatchingUp, &why);
    }

    /// Returns whether, as far as one can tell, this is a machine without GPUs, which is not blind
    /// where none is seen.
    fn never_had_gpus(&self) -> bool {
        !self.has_driver && !self.health.is_blind(&Inventory::default())
    }

    /// Returns whether XIDs are read in the kernel log, so that here they need not be.
    fn others_read_xids(&self) -> bool {
        let reads = |source: SourceStatus| source.name == kernel_log::NAME && source.state.sees();
        !self.config.is_fake && self.sources.statuses().into_iter().any(reads)
    }

    /// Reports what has changed, and remembers it.
    fn report_changes(&mut self, changes: &[Change]) {
        for change in changes {
            let blank = self.reporter.event(&change.check, keys::COMPONENT_GPU);
            let driver_version = self.inventory.driver_version.as_deref();
            let event = event::of(change, blank, driver_version, &self.config);
            self.report(event);
        }
        if self.reporter.memory().health != *self.health.remembered() {
            self.reporter.memory_mut().health = self.health.remembered().clone();
        }
    }

    /// Returns the mark of reports about fake GPUs; empty for real ones.
    fn fake_mark(&self) -> &'static str {
        if self.config.is_fake { FAKE } else { "" }
    }

    /// Reports a fault, or the end of one.
    fn report(&mut self, mut event: HealthEvent) {
        if self.config.is_fake {
            let marked = (keys::META_INJECTED.to_owned(), "true".to_owned());
            event.metadata.extend([marked]);
            event.message = format!("{}{}", self.fake_mark(), event.message);
        }
        self.reporter.report(event, self.reporter.now());
    }

    fn cannot_see(&mut self, why: &str) {
        let (short, advice) = in_short(why);
        self.metrics.show(&Inventory::default(), &[]);
        self.devices.away(Own::Nvml, "DriverNotSeen", &short);
        self.reporter.cannot_see_with(&short, advice);
    }

    /// Closes what a reboot has mended, where there was one, before anything of the new boot is
    /// reported.
    fn begin_boot(&mut self) {
        if self.reporter.rebooted().is_none() {
            return;
        }
        self.reporter.boot_has_begun();
        let catalog = &self.config.catalog;
        let is_mended = |code: &str| is_mended_by_reboot(catalog.judge_dcgm(code).action as i32);
        self.health.boot_has_begun(is_mended);
        let memory = self.reporter.memory_mut();
        memory.xids.clear();
        memory.not_ready.clear();
    }

    /// Takes in a look at the GPUs.
    fn look(&mut self, readings: &[Readings]) {
        if self.health.is_blind(&self.inventory) {
            return;
        }
        self.begin_boot();
        let fake = self.fake_mark();
        self.reporter.has_looked(&format!(
            "{fake}{}",
            detail(&self.inventory, self.library.as_deref())
        ));
        self.metrics.show(&self.inventory, readings);
        let elapsed = self.started.elapsed();
        let changes = self.health.take(&self.inventory, readings, elapsed);
        self.report_changes(&changes);
        self.end_xids(readings);
        self.end_critical(readings);
        self.end_failed_starts(readings);
        self.end_by_word();
    }
}

/// Waits until a time; for ever where there is none.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Returns the next thing that a probe sees, and `None` once, when it has ended.
async fn next(probe: &mut Option<mpsc::Receiver<Seen>>) -> Option<Seen> {
    let Some(open) = probe else {
        return std::future::pending().await;
    };
    let seen = open.recv().await;
    if seen.is_none() {
        *probe = None;
    }
    seen
}

/// Returns why nothing is seen in a sentence, and what to do. Of a library that is not found, the many places in
/// which it was looked for are in the log, at the level debug.
pub fn in_short(reason: &str) -> (String, Option<String>) {
    let Some((library, _)) = reason.split_once(" cannot be loaded: ") else {
        return (reason.to_owned(), None);
    };
    let advice = "have it below --nvml-driver-root, or where the loader finds it; the log has the places in which it \
                  was looked for, with GPUWARDEN_LOG=debug";
    (
        format!("{library} cannot be loaded"),
        Some(advice.to_owned()),
    )
}

/// Returns what is looked at, and the trouble with that. `library` is the driver's library, and how it was found.
pub fn detail(inventory: &Inventory, library: Option<&str>) -> String {
    let count = inventory.gpus.len();
    let driver = inventory.driver_version.as_deref().unwrap_or("unknown");
    let library = library.map_or_else(String::new, |library| format!(", {library}"));
    let mut detail = format!("{count} GPUs, driver {driver}{library}");
    for gpu in inventory.unreadable.iter().filter(|gpu| !gpu.is_lost) {
        detail.push_str(&format!(
            "; GPU {} cannot be read: {}",
            gpu.index, gpu.error
        ));
    }
    detail
}

#[cfg(test)]
mod tests;
