//! The kernel-log monitor (NVSentinel's syslog health monitor): reads a kernel log, decodes the
//! faults in it and reports them. [`monitor`] does the rest with a report.

mod arrival;
pub(crate) mod event;
mod job;
mod machine;
mod metrics;
mod nics;
mod unreadable;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use contract::keys;
use diagnosis::catalog::Catalog;
use diagnosis::decode::{KernelLogDecoder, MachineGpus};
use host::boot::Boot;
use host::kernel_log::{
    Event, KernelLogOpenError, KernelLogRecord, KernelLogSpec, Position, Source,
};
use jiff::{SignedDuration, Timestamp};
use model::event::mark_accepted;
use runtime::logging::{Seldom, chain};
use runtime::metrics::Group;
use runtime::sources::{HEARTBEAT, SourceState};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use arrival::Arrival;
use job::Jobs;
use machine::MachineFile;
use metrics::KernelLogMetrics;
use monitor::{Frame, Monitor, Reporter};
use nics::NicNames;
use unreadable::Unreadable;

pub use event::{event_of_line, events_of_finding};
pub use job::JobSources;

pub(crate) const NAME: &str = "kernel-log";

/// Describes the kernel-log monitor to its frame.
const MONITOR: Monitor = Monitor {
    name: NAME,
    agent: keys::SYSLOG_AGENT,
    checks: &[
        (keys::CHECK_XID, keys::COMPONENT_GPU),
        (keys::CHECK_SXID, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_FALLEN_OFF, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_INIT, keys::COMPONENT_GPU),
        (keys::CHECK_NIC_DRIVER, keys::COMPONENT_NIC),
    ],
};
/// Most records that are read before other work gets a turn.
const BATCH: usize = 512;
/// Pause before a retry of a source that cannot be read.
const RETRY: Duration = Duration::from_secs(5);

pub struct KernelLogConfig {
    pub spec: KernelLogSpec,
    /// Age of a line beyond which it opens no fault on a first start.
    pub history: SignedDuration,
    /// True if records that programs wrote to the kernel log are ignored.
    pub refuse_user_space: bool,
    /// File with a collector's description of the GPUs; it need not exist.
    pub gpu_metadata: PathBuf,
    /// Description of the GPUs from the driver, which takes precedence over that file; `None`
    /// until the driver has one.
    pub machine: watch::Receiver<Option<MachineGpus>>,
    /// Directory of sysfs, for the names of NICs: [`host::nics::SYSFS`].
    pub sysfs: PathBuf,
    /// Catalogue with the meaning of the lines.
    pub catalog: Arc<Catalog>,
    /// Sources of the jobs that run on the GPUs.
    pub jobs: JobSources,
}

/// The monitor. Runs until cancelled, or until finite input has ended.
pub struct KernelLogMonitor {
    config: KernelLogConfig,
    reporter: Reporter<LogPlace>,
    metrics: KernelLogMetrics,
    decoder: KernelLogDecoder,
    machine: MachineFile,
    nics: NicNames,
    jobs: Jobs,
    /// Log that `config.spec` resolved to, once it was opened.
    chosen: Option<KernelLogSpec>,
    /// Path of the followed file while it does not exist.
    missing: Option<PathBuf>,
    /// Older lines open no fault. Set only for the backlog of a first start: later lines are
    /// new whatever their time, since the kernel's clock may lag behind.
    history_begins: Option<Timestamp>,
    /// Time of the newest line that has one.
    newest: Option<Timestamp>,
    last_place: Option<Position>,
    arrival: Arrival,
    unreadable: Unreadable,
    /// Limits the log lines about lost records.
    lost_log: Seldom,
}

/// Progress in the log, which survives a restart.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct LogPlace {
    /// Place after the last processed record.
    position: Option<Position>,
    /// Distinguishes the file from earlier content at the same offsets: changes when the file
    /// is truncated and rewritten.
    generation: i64,
}

// === impl KernelLogMonitor ===

/// Returns the descriptions of the metrics of this monitor.
pub(crate) fn described_metrics() -> Group {
    let own = KernelLogMetrics::described().into_iter();
    Group::new("kernel-log", own.chain(MONITOR.described_metrics()))
}

impl KernelLogMonitor {
    /// Creates a monitor that is listed among the sources as `kernel-log`.
    pub fn new(mut config: KernelLogConfig, frame: &Frame) -> Self {
        let mut frame = frame.clone();
        if config.spec == KernelLogSpec::Stdin {
            // Standard input and the like cannot be read again.
            frame.state_dir = None;
        }
        let metrics = KernelLogMetrics::new(&frame.metrics, &frame.node_name);
        let mut reporter: Reporter<LogPlace> =
            Reporter::new(&MONITOR, frame).counting_refused_in(metrics.refused.clone());
        reporter.show(SourceState::CatchingUp, &config.spec.to_string());
        // Marked so that an earlier value is used too.
        config.machine.mark_changed();
        let mut history_begins = None;
        if !reporter.remembers() {
            history_begins = reporter.now().checked_sub(config.history).ok();
            reporter.memory_mut().generation = reporter.now().as_millisecond();
        }
        Self {
            last_place: reporter.memory().position.clone(),
            reporter,
            metrics,
            decoder: KernelLogDecoder::new(Arc::clone(&config.catalog)),
            machine: MachineFile::new(config.gpu_metadata.clone()),
            nics: NicNames::new(config.sysfs.clone()),
            jobs: Jobs::new(config.jobs.clone()),
            config,
            chosen: None,
            missing: None,
            history_begins,
            newest: None,
            arrival: Arrival::default(),
            unreadable: Unreadable::default(),
            lost_log: Seldom::default(),
        }
    }

    /// Reads the log until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        self.update_descriptions();
        while let Some(source) = self.open(&cancel).await {
            if self.follow(source, &cancel).await {
                break;
            }
        }
        self.reporter.finish(&cancel).await;
    }

    /// Opens the source, with retries until it opens. `None` if cancelled.
    async fn open(&mut self, cancel: &CancellationToken) -> Option<Source> {
        loop {
            match self.choose_and_open().await {
                Ok(source) => {
                    self.missing = None;
                    let detail = self.detail();
                    self.reporter.show(SourceState::CatchingUp, &detail);
                    return Some(source);
                }
                Err(error) => self
                    .reporter
                    .cannot_see_with(&chain(&error), error.advice()),
            }
            if !self.reporter.pause(RETRY, cancel).await {
                return None;
            }
        }
    }

    /// Opens the source, after the remembered place.
    async fn choose_and_open(&mut self) -> Result<Source, KernelLogOpenError> {
        let spec = match &self.chosen {
            Some(spec) => spec.clone(),
            None => self.config.spec.resolve()?,
        };
        let position = self.reporter.memory().position.clone();
        if position.is_some_and(|position| !spec.has(&position)) {
            // Another source: an earlier process has already reported faults of this boot.
            self.history_begins = self.reporter.now().checked_sub(self.config.history).ok();
            self.reporter.memory_mut().position = None;
            self.last_place = None;
            self.arrival = Arrival::default();
        }
        if let Some(Position::Kmsg { seq, .. }) = self.reporter.memory().position {
            self.learn_from_handled(&spec, seq).await;
        }
        let position = self.reporter.memory().position.as_ref();
        let source = host::kernel_log::open(&spec, position)?;
        self.arrival.opened();
        if self.chosen.is_none() && self.config.spec == KernelLogSpec::Auto {
            tracing::info!(source = %spec, "chose the kernel log that can be read here");
        }
        self.chosen = Some(spec);
        Ok(source)
    }

    /// Rereads the records before a restart, to learn the addresses of GPUs and recent XIDs.
    async fn learn_from_handled(&mut self, spec: &KernelLogSpec, up_to: u64) {
        let Ok(mut source) = host::kernel_log::open(spec, None) else {
            return;
        };
        let mut events = Vec::new();
        loop {
            if source.next_batch(&mut events, BATCH).await.is_err() {
                return;
            }
            for event in events.drain(..) {
                match event {
                    Event::Record(record) if record.seq.is_some_and(|seq| seq <= up_to) => {
                        let at = record.wall.unwrap_or_else(|| self.reporter.now());
                        self.decoder.record(record.text.as_bytes(), at);
                        // Counted before the restart.
                        self.decoder.take_garbled();
                    }
                    Event::CaughtUp | Event::Record(_) => return,
                    _ => {}
                }
            }
        }
    }

    /// Follows an open source. Returns true if the source has ended for good, or was cancelled.
    async fn follow(&mut self, mut source: Source, cancel: &CancellationToken) -> bool {
        let mut checks = tokio::time::interval(HEARTBEAT);
        let mut events = Vec::new();
        loop {
            // A log that is not read shows as stuck.
            let has_room = self.reporter.has_room();
            if !has_room {
                self.arrival.pause();
            }
            let mut was_read = false;
            let read = tokio::select! {
                biased;
                () = cancel.cancelled() => return true,
                () = self.reporter.work() => Ok(()),
                _ = checks.tick() => {
                    self.update_descriptions();
                    if has_room {
                        self.reporter.show_detail(&self.detail());
                    }
                    Ok(())
                }
                read = source.next_batch(&mut events, BATCH), if has_room => {
                    was_read = true;
                    read
                }
            };
            let presence_changed = self.check_file(source.missing());
            let mut ended = false;
            let read_all = events.len() < BATCH;
            for event in events.drain(..) {
                ended |= event == Event::End;
                self.process(event).await;
            }
            // A file that has just appeared may contain old lines.
            if was_read {
                let all = read_all && source.missing().is_none();
                self.arrival.read(all, self.reporter.now());
            }
            if presence_changed {
                self.reporter
                    .show(self.state_when_caught_up(), &self.detail());
            }
            let place = source.position();
            if place.is_some() && place != self.reporter.memory().position {
                self.reporter.memory_mut().position = place;
            }
            if ended {
                self.reporter.end_windows();
                return true;
            }
            if let Err(error) = read {
                self.reporter.cannot_see(&chain(&error));
                return !self.reporter.pause(RETRY, cancel).await;
            }
        }
    }

    /// Returns true if the followed file has appeared or disappeared since the last check.
    fn check_file(&mut self, missing: Option<&Path>) -> bool {
        if self.missing.as_deref() == missing {
            return false;
        }
        match (missing, &self.missing) {
            (Some(path), _) => tracing::warn!(
                "{} does not exist, so its faults cannot be detected; waiting for it",
                path.display()
            ),
            (None, Some(path)) => {
                tracing::info!("{} exists now, and is followed", path.display());
            }
            (None, None) => {}
        }
        self.missing = missing.map(Path::to_owned);
        true
    }

    /// Returns the state of a source whose backlog has been delivered.
    fn state_when_caught_up(&self) -> SourceState {
        match self.missing {
            Some(_) => SourceState::Failing,
            None => SourceState::Following,
        }
    }

    /// Updates the descriptions of the GPUs and the NICs.
    fn update_descriptions(&mut self) {
        let described = &mut self.config.machine;
        // Fails if the sender is gone, and then the last value stays in use.
        if described.has_changed().unwrap_or(false)
            && let Some(machine) = described.borrow_and_update().clone()
        {
            self.decoder.set_machine(Some(machine));
        }
        if described.borrow().is_none()
            && let Some(machine) = self.machine.poll()
        {
            self.decoder.set_machine(Some(machine));
        }
        if let Some(names) = self.nics.poll(Instant::now()) {
            self.decoder.set_nics(names);
        }
    }

    /// Describes the log that is read, with problems of the GPUs' description.
    fn detail(&self) -> String {
        if let Some(path) = &self.missing {
            return format!("{} does not exist; waiting for it", path.display());
        }
        let spec = &self.config.spec;
        let spec = match &self.chosen {
            Some(chosen) if chosen != spec => format!("{spec}: {chosen}"),
            _ => spec.to_string(),
        };
        let counts = self.config.machine.borrow().is_none();
        match self.machine.problem().filter(|_| counts) {
            Some(problem) => format!("{spec}; {problem}"),
            None => spec,
        }
    }

    /// Processes an event of the source.
    async fn process(&mut self, event: Event) {
        match event {
            Event::Record(record) => self.process_record(&record, self.reporter.now()).await,
            Event::Lost { count, counted } => {
                // Lost records are shown and counted, but are no fault. In a storm some are
                // lost between any two reads, so the log lines are limited.
                match self.lost_log.counting(count.max(1)) {
                    Some(not_logged_before) if counted => tracing::warn!(
                        not_logged_before,
                        "{count} kernel log records were lost before they could be read"
                    ),
                    Some(not_logged_before) => tracing::warn!(
                        not_logged_before,
                        "an unknown number of kernel log records were lost before they could be \
                         read, counted as {}",
                        count.max(1)
                    ),
                    None => {}
                }
                self.reporter.has_lost(count.max(1));
            }
            Event::Malformed { reason } => {
                tracing::debug!(reason, "kernel log record skipped");
                self.reporter.cannot_read(1);
            }
            Event::CaughtUp => {
                self.reporter.boot_has_begun();
                self.history_begins = None;
                self.arrival.mark_caught_up();
                self.reporter
                    .show(self.state_when_caught_up(), &self.detail());
            }
            Event::End => self.reporter.show(SourceState::Ended, &self.detail()),
        }
    }

    async fn process_record(&mut self, record: &KernelLogRecord, now: Timestamp) {
        let rebooted = self.reporter.rebooted();
        if rebooted.is_some_and(|boot| is_of(boot, record)) {
            self.reporter.boot_has_begun();
        }
        let place = self.place(record);
        let began = std::time::Instant::now();
        let at = record.wall.or(self.newest).unwrap_or(now);
        self.newest = record.wall.or(self.newest);
        let came = self.arrival.came_at(at, now);
        self.reporter.has_read(at);
        let from_user_space = record.facility.is_some_and(|facility| facility != 0);
        let findings = if from_user_space && self.config.refuse_user_space {
            self.metrics.user_space();
            Vec::new()
        } else {
            self.decoder.record(record.text.as_bytes(), at)
        };
        if let Some(garbled) = self.decoder.take_garbled() {
            self.metrics.garbled(garbled.lines);
            self.reporter.cannot_read(garbled.lines);
            self.unreadable.log(&garbled, Instant::now());
        }
        for finding in &findings {
            self.metrics.found(finding, began.elapsed());
            let job = if self.arrival.is_new(came, now) {
                self.jobs.of(finding).await
            } else {
                None
            };
            let events = event::of(&event::Context {
                finding,
                record,
                at: record.wall.unwrap_or(now),
                machine: self.decoder.machine(),
                node_name: self.reporter.node_name(),
                earlier_in_boot: self.history_begins.is_some_and(|begins| at < begins),
                place: place.as_deref(),
                job: job.as_deref(),
            });
            for mut event in events {
                mark_accepted(&mut event, came);
                self.reporter.report(event, at);
            }
        }
    }

    /// Returns the place of a record in its file or journal; `None` for the kernel's own log.
    fn place(&mut self, record: &KernelLogRecord) -> Option<String> {
        let place = record.place.as_ref()?;
        let (dev, ino, offset) = match place {
            Position::Kmsg { .. } => return None,
            // Equal in a copy of the file, such as journald's from /run to /var.
            Position::Journal(cursor) => {
                return Some(format!(
                    "journal:{:x}:{:x}",
                    cursor.monotonic, cursor.xor_hash
                ));
            }
            Position::File {
                dev, ino, offset, ..
            } => (dev, ino, offset),
        };
        let continues = match &self.last_place {
            Some(Position::File {
                dev: d,
                ino: i,
                offset: before,
                ..
            }) => (d, i) == (dev, ino) && before < offset,
            _ => false,
        };
        if !continues && self.last_place.is_some() {
            let now = self.reporter.now().as_millisecond();
            let memory = self.reporter.memory_mut();
            memory.generation = now.max(memory.generation + 1);
            self.reporter.save_first();
        }
        self.last_place = Some(place.clone());
        let generation = self.reporter.memory().generation;
        Some(format!("{dev}:{ino}:{generation}:{offset}"))
    }
}

/// Returns true if a record was written in this boot, by its boot id, or else by its time.
fn is_of(boot: Boot, record: &KernelLogRecord) -> bool {
    record.boot_id.map_or_else(
        || record.wall.is_some_and(|wall| wall >= boot.at),
        |id| id == boot.id,
    )
}

#[cfg(test)]
mod tests;
