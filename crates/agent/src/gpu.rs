//! The GPU health monitor: receives what a probe reads from the GPUs, has it evaluated
//! (`diagnosis/src/gpu/checks.rs`), and reports the problems that opened and closed.
//! [`monitor`] does the rest with a report.
//!
//! DCGM may be a second source (`dcgm`); a problem that both report is one fault. A driver that
//! does not respond is a failing source, never a fault. The driver's XIDs are reported if no
//! monitor reads them in the kernel log, by the same catalogue, so that one XID is one fault.

mod dcgm;
mod event;
mod inventory;
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
use diagnosis::gpu::checks::{Health, ProblemChange, Remembered};
use diagnosis::gpu::dcgm::{DcgmLook, ImexUse};
use diagnosis::gpu::{GpuEvent, Inventory, Readings};
use diagnosis::limits::CheckLimits;
use jiff::Timestamp;
use model::fault::clears_on_reboot;
use runtime::logging::Seldom;
use runtime::metrics::Group;
use runtime::sources::{SourceState, SourceStatus, Sources};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::kernel_log;
use dcgm::DcgmWatch;
use metrics::{GpuMetrics, ProbeMetrics};
use monitor::{Frame, Monitor, Reporter};
use ready::Critical;
use way::Way;

/// Describes the GPU health monitor to its frame.
const MONITOR: Monitor = Monitor {
    name: "gpu-health",
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

/// Prefix of all messages about fake GPUs.
const FAKE: &str = "fake: ";

/// Error that is shown once no probe runs.
const PROBE_HAS_ENDED: &str = "the probe of the GPUs has ended; only a restart starts it again";

#[derive(Clone, Debug)]
pub struct GpuConfig {
    pub limits: CheckLimits,
    /// True if the GPUs are fake: reports about them are marked, and the kernel log has nothing
    /// about them.
    pub is_fake: bool,
    /// XIDs that leave the condition `NVMLReady` alone, in addition to those that programs
    /// cause.
    pub ignored_xids: Vec<u32>,
    /// Catalogue with the meaning of the codes.
    pub catalog: Arc<Catalog>,
    /// Directory where the driver is mounted, if it is.
    pub driver_root: PathBuf,
    /// Time after a poll within which the next one is due. Later the state of the GPUs is
    /// unknown, well before a call of the driver counts as hung.
    pub late_after: Duration,
}

/// Name of the source for the driver.
pub const NAME: &str = MONITOR.name;

/// Detail of that source if only DCGM is queried.
const NOT_ASKED: &str = "the driver is not queried (--enable-nvml-provider false)";

/// The probes that the monitor receives from.
#[derive(Debug, Default)]
pub struct Probes {
    /// Probe of the driver; `None` if it is not queried.
    pub nvml: Option<mpsc::Receiver<Seen>>,
    /// Probe of DCGM; `None` if it is not queried.
    pub dcgm: Option<mpsc::Receiver<Seen>>,
}

/// A message from a probe of the GPUs.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// Path or name of the driver's library, once it is open.
    Library(String),
    /// The inventory. Sent before the first readings, and whenever it has changed.
    Inventory(Inventory),
    /// Readings of all GPUs that answer, from one poll.
    Readings(Vec<Readings>),
    /// An event of a GPU, sent at once.
    Event(GpuEvent),
    /// Findings of DCGM's health watches, from one poll.
    Dcgm(DcgmLook),
    /// Nothing is known until the next message of another kind.
    Blind {
        /// Reason, with the library call that was in progress.
        reason: String,
        /// True if the probe reports the reason itself, such as that there is no driver; false
        /// if the probe hung, crashed or could not be started.
        is_said: bool,
        /// Number of children that could not be killed.
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
    /// Open faults of this node, which show when a person closes one.
    faults: watch::Receiver<NodeFaults>,
    /// Receives whether pods rely on IMEX.
    imex: watch::Receiver<ImexUse>,
    /// Sender of `imex`, for the component that knows.
    imex_sender: watch::Sender<ImexUse>,
    health: Health,
    /// Time when the driver's next poll is due; `None` if none is expected.
    due: Option<Instant>,
    /// True if that time has passed.
    is_late: bool,
    /// Limits the log lines about conditions that the Device API refuses.
    refusals: Seldom,
    /// Number of polls that a GPU has answered while a fault of its start was open, by UUID.
    answered_since_failure: BTreeMap<String, u32>,
    /// True once this process has found a driver.
    has_driver: bool,
    /// Driver's library, and the way it was found.
    library: Option<String>,
    /// True once the driver, if it is queried, has answered or failed.
    driver_has_answered: bool,
    inventory: Inventory,
    /// The inventory, for subscribers.
    shown: watch::Sender<Inventory>,
    metrics: GpuMetrics,
    probe_metrics: ProbeMetrics,
    decoder: KernelLogDecoder,
    started: Instant,
}

/// State that must survive a restart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct GpuMemory {
    health: Remembered,
    /// Time of each GPU's last XID that was reported and not closed, by UUID.
    xids: BTreeMap<String, Timestamp>,
    /// Address and serial number of each GPU as reported since the boot, by UUID.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    inventory: BTreeMap<String, (String, Option<String>)>,
    /// Time when all of them were last reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    inventory_at: Option<Timestamp>,
    /// Last critical XID of each GPU that is not ready, by UUID.
    not_ready: BTreeMap<String, Critical>,
    /// True if a fault was reported that DCGM does not answer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    dcgm_is_lost: bool,
}

// === impl GpuMonitor ===

/// Returns the descriptions of the metrics of this monitor.
pub(crate) fn described_metrics() -> Group {
    let own = metrics::described().into_iter();
    let own = own.chain(MONITOR.described_metrics());
    Group::new("gpus", own.chain(dcgm::described_metrics()))
}

impl GpuMonitor {
    /// Creates a monitor that receives from `probes`, and is listed among the sources as
    /// `gpu-health`, and if it queries DCGM also as `gpu-dcgm`.
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
                "waiting for the driver's first response",
            ),
            None => reporter.show(SourceState::Following, NOT_ASKED),
        }
        let driver_has_answered = probes.nvml.is_none();
        let (imex_sender, imex) = watch::channel(ImexUse::default());
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
            imex_sender,
            devices,
            due: None,
            is_late: false,
            refusals: Seldom::default(),
            answered_since_failure: BTreeMap::new(),
            has_driver: false,
            library: None,
            driver_has_answered,
            inventory: Inventory::default(),
            shown: watch::Sender::default(),
            metrics,
            probe_metrics: ProbeMetrics::registered(&frame.metrics),
            started: Instant::now(),
        }
    }

    /// Returns a receiver of the inventory, which is empty before the first poll.
    pub fn inventory(&self) -> watch::Receiver<Inventory> {
        self.shown.subscribe()
    }

    /// Returns a sender that informs the monitor whether pods rely on IMEX.
    pub fn imex(&self) -> watch::Sender<ImexUse> {
        self.imex_sender.clone()
    }

    /// Processes the probes' messages until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        self.forget_connectivity();
        loop {
            tokio::select! {
                biased;
                () = cancel.cancelled() => break,
                () = self.reporter.work() => self.beat_dcgm(),
                // The sender is not dropped before `self.devices`.
                _ = self.faults.changed() => self.end_dismissed(),
                // `self` has a sender, so this does not end.
                _ = self.imex.changed(), if self.reporter.has_room() => self.process_imex(),
                () = until(self.due) => self.mark_late(),
                seen = next(&mut self.probes.nvml), if self.reporter.has_room() => match seen {
                    Some(seen) => self.process(seen),
                    None => self.cannot_see(PROBE_HAS_ENDED),
                },
                seen = next(&mut self.probes.dcgm), if self.reporter.has_room() => match seen {
                    Some(seen) => self.process_dcgm(seen),
                    None => self.cannot_see_dcgm(PROBE_HAS_ENDED),
                },
            }
        }
        self.reporter.finish(&cancel).await;
    }

    fn process(&mut self, seen: Seen) {
        // Without a driver, one process after the other looks for it, which does not count as a
        // restart.
        if let Seen::Blind { stuck, .. } = &seen
            && !self.never_had_gpus()
        {
            self.probe_metrics.blind(MONITOR.name, *stuck);
        }
        self.driver_has_answered |= matches!(seen, Seen::Readings(_) | Seen::Blind { .. });
        self.record_poll_time(&seen);
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
            Seen::Readings(readings) => self.process_readings(&readings),
            Seen::Event(event) => {
                self.record_critical(&event);
                // Memory errors are reported from the counters.
                if !self.others_read_xids() {
                    self.report_xid(&event);
                }
            }
            // Only a probe of DCGM sends these.
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
                self.cannot_see(&format!("{reason} ({stuck} probes cannot be killed)"));
            }
            Seen::Blind { reason, .. } => self.cannot_see(&reason),
        }
    }

    /// Records the time of a poll, and restores the state of the GPUs after a late one.
    fn record_poll_time(&mut self, seen: &Seen) {
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

    /// Makes the state of the GPUs unknown, because the driver's poll is late: the driver may
    /// be slow or hang.
    fn mark_late(&mut self) {
        (self.due, self.is_late) = (None, true);
        let seconds = self.config.late_after.as_secs();
        let why = format!("no readings from the driver for {seconds} s");
        self.devices.away(Own::Nvml, "DriverNotSeen", &why);
        self.reporter.show(SourceState::CatchingUp, &why);
    }

    /// Returns true if this appears to be a machine without GPUs, where none to read is no
    /// failure.
    fn never_had_gpus(&self) -> bool {
        !self.has_driver && !self.health.is_blind(&Inventory::default())
    }

    /// Returns true if a monitor reads XIDs in the kernel log, so that this one must not report
    /// them.
    fn others_read_xids(&self) -> bool {
        let reads = |source: SourceStatus| source.name == kernel_log::NAME && source.state.sees();
        !self.config.is_fake && self.sources.statuses().into_iter().any(reads)
    }

    /// Reports changes, and saves the state.
    fn report_changes(&mut self, changes: &[ProblemChange]) {
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

    /// Returns the prefix of messages about fake GPUs; empty for real ones.
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

    /// After a reboot, closes the faults that it remediates, before anything of the new boot is
    /// reported.
    fn begin_boot(&mut self) {
        if self.reporter.rebooted().is_none() {
            return;
        }
        self.reporter.boot_has_begun();
        let catalog = &self.config.catalog;
        let is_mended = |code: &str| clears_on_reboot(catalog.judge_dcgm(code).action as i32);
        self.health.boot_has_begun(is_mended);
        let memory = self.reporter.memory_mut();
        memory.xids.clear();
        memory.not_ready.clear();
        memory.inventory.clear();
    }

    /// Processes the readings of a poll.
    fn process_readings(&mut self, readings: &[Readings]) {
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
        self.report_inventory();
        let elapsed = self.started.elapsed();
        let changes = self.health.take(&self.inventory, readings, elapsed);
        self.report_changes(&changes);
        self.end_xids(readings);
        self.end_critical(readings);
        self.end_failed_starts(readings);
        self.end_dismissed();
    }
}

/// Waits until a time; forever if there is none.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Returns the next message of a probe, and `None` once, when the probe has ended.
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

/// Returns a short form of an error, and advice. For a library that is not found, the log has
/// the list of places that were searched, at level debug.
pub fn in_short(reason: &str) -> (String, Option<String>) {
    let Some((library, _)) = reason.split_once(" cannot be loaded: ") else {
        return (reason.to_owned(), None);
    };
    let advice = "provide it below --nvml-driver-root, or in the loader's search path; with GPUWARDEN_LOG=debug the log \
                  has the places that were searched";
    (
        format!("{library} cannot be loaded"),
        Some(advice.to_owned()),
    )
}

/// Describes what is monitored, with its problems. `library` is the driver's library, and the
/// way it was found.
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
