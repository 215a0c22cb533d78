//! The kernel-log monitor (NVSentinel's syslog health monitor): reads a kernel log,
//! finds the faults in it and hands them to the connector.
//!
//! Repeats of a fault are counted and reported once a minute (`domain/src/fold.rs`). What is
//! read is stored by the connector, or stands in the state file (`state`) until it is: a
//! restart loses nothing and doubles nothing. After a reboot the faults that it mends are
//! closed (`reboot`).

mod came;
mod event;
mod hand_over;
mod machine;
mod metrics;
mod nics;
mod reboot;
mod state;
mod unreadable;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use connector::{Connector, Recovery};
use contract::HealthEvent;
use domain::catalog::Catalog;
use domain::decode::KernelLogDecoder;
use domain::event::{mark_accepted, names_record};
use host::boot::Boot;
use host::kernel_log::{Event, OpenError, Position, Record, Source, Spec};
use jiff::{SignedDuration, Timestamp};
use runtime::logging::chain;
use runtime::metrics::Metrics;
use runtime::sources::{HEARTBEAT, SourceHandle, SourceState, Sources};
use tokio::sync::broadcast;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use came::Came;
use hand_over::{HandOver, MAX_UNSENT};
use machine::MachineFile;
use metrics::KernelLogMetrics;
use nics::NicNames;
use state::{State, StateFile};
use unreadable::Unreadable;

pub use domain::fold::WINDOW;
pub use event::{event_of_line, events_of_finding};

/// Most records between two looks at the connector.
const BATCH: usize = 512;
/// Pause before a source that cannot be read is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// How often the place in the log is written while lines pass that are worth no event: so
/// many seconds of them are read again after a kill.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// What the monitor needs to know.
pub struct Config {
    /// What to read.
    pub spec: Spec,
    /// Node name on the events.
    pub node_name: String,
    /// On a first start, older lines open no fault.
    pub history: SignedDuration,
    /// Directory for what is remembered over a restart; `None`: nothing is.
    pub state_dir: Option<PathBuf>,
    /// The running boot; `None`: not known, and then no reboot is noticed.
    pub boot: Option<Boot>,
    /// Repeats of a fault within this time become one event: [`WINDOW`].
    pub window: Duration,
    /// Whether records that programs wrote into the kernel's log are left out.
    pub refuse_user_space: bool,
    /// The file in which a collector describes the GPUs; it need not exist.
    pub gpu_metadata: PathBuf,
    /// Where sysfs is, for the names of NICs: [`host::nics::SYSFS`].
    pub sysfs: PathBuf,
    /// What the lines are judged by.
    pub catalog: Arc<Catalog>,
}

/// The monitor. Runs until cancelled, or until input that can end has ended.
pub struct KernelLogMonitor {
    config: Config,
    connector: Connector,
    recoveries: broadcast::Receiver<Recovery>,
    source: SourceHandle,
    metrics: KernelLogMetrics,
    clock: fn() -> Timestamp,
    decoder: KernelLogDecoder,
    machine: MachineFile,
    nics: NicNames,
    /// What of `config.spec` is read; known once it could be opened.
    chosen: Option<Spec>,
    file: Option<StateFile>,
    state: State,
    hand_over: HandOver,
    /// The file that is followed, while it is not there.
    missing: Option<PathBuf>,
    /// Whether `state` differs from the file.
    changed: bool,
    saved_at: Instant,
    save_failed: Option<String>,
    started: Instant,
    /// A boot whose beginning in the log has not come yet.
    rebooted: Option<Boot>,
    /// Older lines of the backlog open no fault; `None` but for the backlog of a first start.
    /// What comes later is new whatever its time says: the kernel's clock may lag behind.
    history_begins: Option<Timestamp>,
    /// Time of the newest line that has one.
    newest: Option<Timestamp>,
    last_place: Option<Position>,
    came: Came,
    unreadable: Unreadable,
}

// === impl KernelLogMonitor ===

impl KernelLogMonitor {
    /// A monitor that reports to `connector` and is listed in `sources` as `kernel-log`.
    pub fn new(
        config: Config,
        connector: Connector,
        sources: &Sources,
        metrics: &Metrics,
        clock: fn() -> Timestamp,
    ) -> Self {
        let source = sources.add("kernel-log", &config.spec.to_string(), clock());
        let metrics = KernelLogMetrics::new(metrics, &config.node_name);
        let file = config.state_dir.as_deref().map(StateFile::in_dir);
        let decoder = KernelLogDecoder::new(Arc::clone(&config.catalog));
        let machine = MachineFile::new(config.gpu_metadata.clone());
        let nics = NicNames::new(config.sysfs.clone());
        Self {
            config,
            recoveries: connector.recoveries(),
            connector,
            source,
            metrics,
            clock,
            decoder,
            machine,
            nics,
            chosen: None,
            file,
            state: State::default(),
            hand_over: HandOver::new(),
            missing: None,
            changed: false,
            saved_at: Instant::now(),
            save_failed: None,
            started: Instant::now(),
            rebooted: None,
            history_begins: None,
            newest: None,
            last_place: None,
            came: Came::default(),
            unreadable: Unreadable::default(),
        }
    }

    /// Reads until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        self.remember();
        self.look_at_machine();
        while let Some(source) = self.open(&cancel).await {
            if self.follow(source, &cancel).await {
                break;
            }
        }
        if self.file.is_none() {
            // What is counted would be forgotten.
            self.state.fold.end(&mut self.state.outbox);
        }
        self.finish_hand_over(&cancel).await;
        self.save();
    }

    /// Takes up what an earlier process has remembered.
    fn remember(&mut self) {
        let loaded = self
            .file
            .as_ref()
            .map(|file| (file.load(), file.path().display().to_string()));
        let remembered = match loaded {
            Some((Ok(state), _)) => state,
            Some((Err(error), path)) => {
                tracing::warn!(
                    path,
                    err = %chain(&error),
                    "the place in the kernel log is not known: it is read as on a first start"
                );
                None
            }
            None => None,
        };
        if let Some(state) = remembered {
            self.state = state;
        } else {
            self.history_begins = (self.clock)().checked_sub(self.config.history).ok();
            self.state.generation = (self.clock)().as_millisecond();
            let known = self.file.as_ref().and_then(StateFile::boot_id);
            self.state.boot_id = known.map(str::to_owned);
        }
        let boot_id = self.config.boot.map(|boot| boot.id.to_string());
        // A boot is another one only if an earlier one is known.
        if boot_id.is_some() && self.state.boot_id.is_some() && self.state.boot_id != boot_id {
            self.rebooted = self.config.boot;
        }
        if self.rebooted.is_none() {
            self.state.boot_id = boot_id.or(self.state.boot_id.take());
        }
        self.state.fold.set_window(self.config.window);
        self.last_place.clone_from(&self.state.position);
        // The boot is written also where no line ever comes.
        self.changed = true;
    }

    /// Opens the source, trying again until it opens. `None`: cancelled.
    async fn open(&mut self, cancel: &CancellationToken) -> Option<Source> {
        let mut said: Option<String> = None;
        loop {
            match self.choose_and_open().await {
                Ok(source) => {
                    self.missing = None;
                    let detail = self.detail();
                    self.source.update((self.clock)(), |status| {
                        status.state = SourceState::CatchingUp;
                        status.detail = detail;
                    });
                    return Some(source);
                }
                Err(error) => self.cannot_read(&chain(&error), &mut said),
            }
            if !self.wait(RETRY, cancel).await {
                return None;
            }
        }
    }

    /// Opens the source, behind the place that is remembered.
    async fn choose_and_open(&mut self) -> Result<Source, OpenError> {
        let spec = match &self.chosen {
            Some(spec) => spec.clone(),
            None => self.config.spec.resolve()?,
        };
        let position = &self.state.position;
        if position
            .as_ref()
            .is_some_and(|position| !spec.has(position))
        {
            // Another source: what it has of this boot was read there already.
            self.history_begins = (self.clock)().checked_sub(self.config.history).ok();
            self.state.position = None;
            self.last_place = None;
            self.came = Came::default();
        }
        if let Some(Position::Kmsg { seq, .. }) = self.state.position {
            self.learn(&spec, seq).await;
        }
        let source = host::kernel_log::open(&spec, self.state.position.as_ref())?;
        self.came.opened();
        if self.chosen.is_none() && self.config.spec == Spec::Auto {
            tracing::info!(source = %spec, "the kernel log that can be read here was chosen");
        }
        self.chosen = Some(spec);
        Ok(source)
    }

    /// Reads what was handled before a restart once more, only to learn from it: which
    /// GPU sits where, and which has just reported an XID.
    async fn learn(&mut self, spec: &Spec, up_to: u64) {
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
                        let at = record.wall.unwrap_or_else(self.clock);
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

    /// Follows an open source. `true`: nothing more will come, or it was cancelled.
    async fn follow(&mut self, mut source: Source, cancel: &CancellationToken) -> bool {
        let mut beat = tokio::time::interval(HEARTBEAT);
        let mut events = Vec::new();
        loop {
            self.begin_hand_over();
            let wake = self.next_wake();
            let has_room = self.state.outbox.len() < MAX_UNSENT;
            if !has_room {
                self.came.pauses();
            }
            let mut recovery = None;
            let mut handed_over = None;
            let mut was_read = false;
            let read = tokio::select! {
                () = cancel.cancelled() => return true,
                _ = beat.tick() => {
                    self.look_at_machine();
                    // A log that is not read shows as stuck.
                    if has_room {
                        let detail = self.detail();
                        self.source.update((self.clock)(), |status| status.detail = detail);
                    }
                    Ok(())
                }
                () = sleep_until(wake) => Ok(()),
                heard = next_recovery(&mut self.recoveries) => {
                    recovery = Some(heard);
                    Ok(())
                }
                answer = self.hand_over.next() => {
                    handed_over = answer;
                    Ok(())
                }
                read = source.next_batch(&mut events, BATCH), if has_room => {
                    was_read = true;
                    read
                }
            };
            let comes_or_goes = self.look_for_file(source.missing());
            self.handed_over(handed_over);
            if let Some(heard) = recovery {
                self.hear(heard);
            }
            let mut ended = false;
            let read_all = events.len() < BATCH;
            for event in events.drain(..) {
                ended |= event == Event::End;
                self.take_in(event);
            }
            // What a file that was not there has in it may be old.
            if was_read {
                let all = read_all && source.missing().is_none();
                self.came.read(all, (self.clock)());
            }
            if comes_or_goes {
                self.show_file();
            }
            let place = source.position();
            if place.is_some() && place != self.state.position {
                self.state.position = place;
                self.changed = true;
            }
            if self.state.outbox.is_empty() {
                // Else repeats go on being counted until the connector takes events.
                let now = self.started.elapsed();
                self.changed |= self.state.fold.tick(now, &mut self.state.outbox);
            }
            if self.changed && self.saved_at.elapsed() >= SAVE_EVERY {
                self.save();
            }
            if ended {
                self.state.fold.end(&mut self.state.outbox);
                self.finish_hand_over(cancel).await;
                return true;
            }
            if let Err(error) = read {
                self.cannot_read(&chain(&error), &mut None);
                return !self.wait(RETRY, cancel).await;
            }
        }
    }

    /// Whether the file that is followed has come, or is not there any more, since the last look.
    fn look_for_file(&mut self, missing: Option<&Path>) -> bool {
        if self.missing.as_deref() == missing {
            return false;
        }
        match (missing, &self.missing) {
            (Some(path), _) => tracing::warn!(
                "{} does not exist, and no fault in it is seen; waiting for it",
                path.display()
            ),
            (None, Some(path)) => {
                tracing::info!("{} is there now, and is followed", path.display());
            }
            (None, None) => {}
        }
        self.missing = missing.map(Path::to_owned);
        true
    }

    fn show_file(&self) {
        let (state, detail) = (self.seeing(), self.detail());
        self.source.update((self.clock)(), |status| {
            status.state = state;
            status.detail = detail;
        });
    }

    /// How a source does that has delivered what was there when it was opened.
    fn seeing(&self) -> SourceState {
        match self.missing {
            Some(_) => SourceState::Failing,
            None => SourceState::Following,
        }
    }

    /// Takes over what is newly known of the GPUs and the NICs.
    fn look_at_machine(&mut self) {
        if let Some(machine) = self.machine.look() {
            self.decoder.set_machine(Some(machine));
        }
        if let Some(names) = self.nics.look(Instant::now()) {
            self.decoder.set_nics(names);
        }
    }

    /// What is read, and what of it is not as it should be.
    fn detail(&self) -> String {
        if let Some(path) = &self.missing {
            return format!("{} does not exist; waiting for it", path.display());
        }
        let spec = &self.config.spec;
        let spec = match &self.chosen {
            Some(chosen) if chosen != spec => format!("{spec}: {chosen}"),
            _ => spec.to_string(),
        };
        match self.machine.problem() {
            Some(problem) => format!("{spec}; {problem}"),
            None => spec,
        }
    }

    /// When there is something to do without anything having come.
    fn next_wake(&self) -> Option<Instant> {
        let ticks = self.state.outbox.is_empty();
        let window_ends = self.state.fold.next_tick().filter(|_| ticks);
        let window_ends = window_ends.map(|due| self.started + due);
        let save = self.changed.then(|| self.saved_at + SAVE_EVERY);
        window_ends.into_iter().chain(save).min()
    }

    /// Takes in what the source said; what is to be sent goes to the outbox.
    fn take_in(&mut self, event: Event) {
        let now = (self.clock)();
        match event {
            Event::Record(record) => self.take_record(&record, now),
            Event::Lost { count, counted } => {
                // Blindness, never a fault: shown and counted.
                if counted {
                    tracing::warn!(
                        "{count} kernel log records were lost before they could be read"
                    );
                } else {
                    tracing::warn!(
                        "kernel log records were lost before they could be read, nobody can tell how \
                         many: counted as {}",
                        count.max(1)
                    );
                }
                self.metrics.lost.inc_by(count.max(1));
                self.source
                    .update(now, |status| status.lost += count.max(1));
            }
            Event::Malformed { reason } => {
                tracing::debug!(reason, "kernel log record skipped");
                self.metrics.malformed.inc();
                self.source.update(now, |status| status.malformed += 1);
            }
            Event::CaughtUp => {
                self.boot_has_begun();
                self.history_begins = None;
                self.came.caught_up();
                let state = self.seeing();
                self.source.update(now, |status| status.state = state);
            }
            Event::End => {
                self.source
                    .update(now, |status| status.state = SourceState::Ended);
            }
        }
    }

    fn take_record(&mut self, record: &Record, now: Timestamp) {
        if self.rebooted.is_some_and(|boot| is_of(boot, record)) {
            self.boot_has_begun();
        }
        let place = self.place(record);
        let began = std::time::Instant::now();
        let at = record.wall.or(self.newest).unwrap_or(now);
        self.newest = record.wall.or(self.newest);
        let came = self.came.at(at, now);
        self.metrics.records.inc();
        let from_user_space = record.facility.is_some_and(|facility| facility != 0);
        let findings = if from_user_space && self.config.refuse_user_space {
            self.metrics.user_space.inc();
            Vec::new()
        } else {
            self.decoder.record(record.text.as_bytes(), at)
        };
        self.source.update(now, |status| {
            status.records += 1;
            status.faults += findings.iter().filter(|it| !it.healthy).count() as u64;
            status.last_record_at = Some(at);
        });
        if let Some(garbled) = self.decoder.take_garbled() {
            self.metrics.garbled(garbled.lines);
            self.source
                .update(now, |status| status.malformed += garbled.lines);
            self.unreadable.tell(&garbled, Instant::now());
        }
        for finding in &findings {
            self.metrics.found(finding, began.elapsed());
            let events = event::of(&event::Context {
                finding,
                record,
                at: record.wall.unwrap_or(now),
                machine: self.decoder.machine(),
                node_name: &self.config.node_name,
                earlier_in_boot: self.history_begins.is_some_and(|begins| at < begins),
                place: place.as_deref(),
            });
            for mut event in events {
                mark_accepted(&mut event, came);
                self.fold(event, at);
            }
        }
    }

    fn fold(&mut self, event: HealthEvent, at: Timestamp) {
        let before = self.state.outbox.len();
        let now = self.started.elapsed();
        self.state.fold.take(event, at, now, &mut self.state.outbox);
        if self.state.outbox.len() == before {
            self.metrics.repeats.inc();
        }
        self.changed = true;
    }

    /// After a reboot: what the log has from before it is taken in, and what it mends is
    /// closed before anything of the new boot is looked at.
    fn boot_has_begun(&mut self) {
        let Some(boot) = self.rebooted.take() else {
            return;
        };
        tracing::info!(boot_id = %boot.id, "the machine was rebooted");
        self.state.fold.end(&mut self.state.outbox);
        let healthy = reboot::healthy_events(boot, &self.config.node_name);
        self.state.outbox.extend(healthy);
        self.state.boot_id = Some(boot.id.to_string());
        self.changed = true;
    }

    /// Takes in a recovery that somebody else has reported. `None`: some were missed.
    fn hear(&mut self, recovery: Option<Recovery>) {
        let Some(Recovery { event, accepted_at }) = recovery else {
            self.state.fold.end(&mut self.state.outbox);
            return;
        };
        // Our own have ended their windows already.
        if !names_record(&event) {
            let (fold, outbox) = (&mut self.state.fold, &mut self.state.outbox);
            self.changed |= fold.recovered_elsewhere(&event, accepted_at, outbox);
        }
    }

    /// Where a record stands in its file or journal: `None` for the kernel's own log.
    fn place(&mut self, record: &Record) -> Option<String> {
        let place = record.place.as_ref()?;
        let (dev, ino, offset) = match place {
            Position::Kmsg { .. } => return None,
            // The same in a copy of the file, as journald makes it from /run to /var.
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
        let goes_on = match &self.last_place {
            Some(Position::File {
                dev: d,
                ino: i,
                offset: before,
                ..
            }) => (d, i) == (dev, ino) && before < offset,
            _ => false,
        };
        if !goes_on && self.last_place.is_some() {
            let now = (self.clock)().as_millisecond();
            self.state.generation = now.max(self.state.generation + 1);
        }
        self.last_place = Some(place.clone());
        Some(format!("{dev}:{ino}:{}:{offset}", self.state.generation))
    }

    fn save(&mut self) {
        let Some(file) = &mut self.file else { return };
        self.saved_at = Instant::now();
        match file.save(&mut self.state) {
            Ok(()) => {
                self.changed = false;
                self.save_failed = None;
            }
            Err(error) => {
                let why = error.to_string();
                if self.save_failed.as_ref() != Some(&why) {
                    let path = file.path().display();
                    tracing::error!(
                        err = why, %path,
                        "what the kernel-log monitor has to remember cannot be written: a restart \
                         would read lines again, and count their repeats again"
                    );
                    self.save_failed = Some(why);
                }
            }
        }
    }

    fn cannot_read(&self, why: &str, said: &mut Option<String>) {
        if said.as_deref() != Some(why) {
            tracing::error!(
                err = why,
                "the kernel log cannot be read; it is tried again"
            );
            *said = Some(why.to_owned());
        }
        self.source.update((self.clock)(), |status| {
            status.state = SourceState::Failing;
            why.clone_into(&mut status.detail);
        });
    }
}

/// Whether a record was written in this boot: by its own word, else by its time.
fn is_of(boot: Boot, record: &Record) -> bool {
    record.boot_id.map_or_else(
        || record.wall.is_some_and(|wall| wall >= boot.at),
        |id| id == boot.id,
    )
}

async fn sleep_until(wake: Option<Instant>) {
    match wake {
        Some(wake) => tokio::time::sleep_until(wake).await,
        None => std::future::pending().await,
    }
}

/// `None`: some were missed.
async fn next_recovery(recoveries: &mut broadcast::Receiver<Recovery>) -> Option<Recovery> {
    match recoveries.recv().await {
        Ok(recovery) => Some(recovery),
        Err(broadcast::error::RecvError::Lagged(_)) => None,
        Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
