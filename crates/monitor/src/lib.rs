//! The frame of every monitor: a monitor checks some part of the machine and reports its
//! findings, and a [`Reporter`] does everything after that.
//!
//! - Repeats of a fault are counted and reported once a minute (`diagnosis/src/fold.rs`).
//! - A report is stored by the connector, and kept in a file (`state`) until then: a restart
//!   loses nothing and duplicates nothing. The same file has the monitor's own memory, such as
//!   its place in a log.
//! - Events that the connector does not accept are retried (`hand_over`), while the monitor
//!   continues, up to a bound.
//! - After a reboot the faults that it remediates are closed (`reboot`).
//! - Status and metrics show whether the monitor can read its source.
//!
//! A monitor runs on each node (`agent`), or once for many nodes in the controller: it then names
//! the node of each event ([`Reporter::event_about`]), and has no boot of its own.
//!
//! A monitor is a loop of its own, which awaits [`Reporter::work`] or [`Reporter::pause`]
//! beside its own source. CONTRIBUTING.md has the steps, `tests.rs` a small monitor, and
//! `agent/kernel_log.rs` a large one.

mod hand_over;
mod metrics;
mod reboot;
mod source;
mod state;

use std::path::PathBuf;
use std::time::Duration;

use connector::{Connector, Recovery};
use contract::{EVENT_VERSION, HealthEvent, ProcessingStrategy, json, keys};
use host::boot::Boot;
use jiff::Timestamp;
use model::event::{accepted, mark_accepted, names_record};
use runtime::logging::chain;
use runtime::metrics::{LegacyCounter, Metrics};
use runtime::sources::{HEARTBEAT, SourceHandle, Sources};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::broadcast;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use hand_over::HandOver;
use metrics::MonitorMetrics;
use state::{MonitorState, Saving, StateFile};

pub use diagnosis::fold::WINDOW;

/// Most events that wait for the connector before the monitor has to wait. They are in the
/// state file, which is written once a second. As many as faults whose repeats are counted.
pub const MAX_UNSENT: usize = diagnosis::fold::MAX_WINDOWS;

/// Names of a monitor.
#[derive(Debug)]
pub struct Monitor {
    /// Name of the monitor's source and file, such as `kernel-log`, and after `gpuwarden_` the
    /// prefix of its metrics.
    pub name: &'static str,
    /// Agent of the monitor's events.
    pub agent: &'static str,
    /// Checks of the monitor, each with the component class of its faults. A reboot closes
    /// faults of these.
    pub checks: &'static [(&'static str, &'static str)],
}

/// Settings that all monitors of a node share.
#[derive(Clone)]
pub struct Frame {
    /// Name of the node that the monitor runs on. Its events are about this node unless they
    /// name another ([`Reporter::event_about`]).
    pub node_name: String,
    /// Directory for state that survives a restart; `None` to keep none.
    pub state_dir: Option<PathBuf>,
    /// The running boot; `None` if unknown, and then no reboot is detected.
    pub boot: Option<Boot>,
    /// Time within which repeats of a fault become one event: [`WINDOW`].
    pub window: Duration,
    /// The connector that takes the events.
    pub connector: Connector,
    /// List of sources in the process's status.
    pub sources: Sources,
    /// Metrics of the process, which get those of the monitor.
    pub metrics: Metrics,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// Brings a monitor's reports to the connector. `M` is the monitor's own memory that survives a
/// restart: a struct with named fields, which are written beside the reporter's own.
pub struct Reporter<M> {
    monitor: &'static Monitor,
    frame: Frame,
    recoveries: broadcast::Receiver<Recovery>,
    source: SourceHandle,
    metrics: MonitorMetrics,
    state: MonitorState<M>,
    remembers: bool,
    saving: Option<Saving>,
    hand_over: HandOver,
    /// Number of events at the front of the outbox that may be handed over: they are in the
    /// file, or would be found again without it.
    ready: usize,
    started: Instant,
    beaten: Instant,
    /// A new boot that was not reported yet.
    rebooted: Option<Boot>,
    /// Error of the source that was last logged.
    blind: Option<String>,
}

// === impl Reporter ===

impl<M> Reporter<M>
where
    M: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Creates a reporter that is listed among the sources under the monitor's name, with the
    /// state of an earlier process.
    pub fn new(monitor: &'static Monitor, frame: Frame) -> Self {
        let file = frame.state_dir.as_deref();
        let file = file.map(|dir| StateFile::in_dir(dir, monitor.name));
        let remembered = file.as_ref().and_then(StateFile::remembered);
        let remembers = remembered.is_some();
        let mut state: MonitorState<M> = remembered.unwrap_or_default();
        if !remembers {
            let boot_id = file.as_ref().and_then(StateFile::boot_id);
            state.boot_id = boot_id.map(str::to_owned);
        }
        let boot_id = frame.boot.map(|boot| boot.id.to_string());
        // A reboot is only detected if the earlier boot is known.
        let is_another = boot_id.is_some() && state.boot_id.is_some() && state.boot_id != boot_id;
        if !is_another {
            state.boot_id = boot_id.or(state.boot_id.take());
        }
        state.fold.set_window(frame.window);
        Self {
            monitor,
            recoveries: frame.connector.recoveries(),
            source: (frame.sources).add(monitor.name, "", (frame.clock)()),
            metrics: MonitorMetrics::new(&frame.metrics, monitor),
            remembers,
            // The earlier process may hand over everything in its file.
            ready: state.outbox.len(),
            state,
            saving: file.map(Saving::new),
            hand_over: HandOver::default(),
            started: Instant::now(),
            beaten: Instant::now(),
            rebooted: frame.boot.filter(|_| is_another),
            blind: None,
            frame,
        }
    }

    /// Counts events that the connector refuses in `counter`, too.
    #[must_use]
    pub fn counting_refused_in(mut self, counter: LegacyCounter) -> Self {
        self.metrics.refused = counter;
        self
    }

    /// Lets the process be ready while the monitor cannot see its source.
    #[must_use]
    pub fn optional(mut self) -> Self {
        let name = self.monitor.name;
        self.source = (self.frame.sources).add_optional(name, "", self.now());
        self
    }

    /// Returns true if an earlier process has left a state.
    pub fn remembers(&self) -> bool {
        self.remembers
    }

    /// Returns the name of the monitor's own node.
    pub fn node_name(&self) -> &str {
        &self.frame.node_name
    }

    /// Returns the current time of the frame's clock.
    pub fn now(&self) -> Timestamp {
        (self.frame.clock)()
    }

    /// Returns the monitor's own memory.
    pub fn memory(&self) -> &M {
        &self.state.memory
    }

    /// Returns the monitor's own memory, to change it.
    pub fn memory_mut(&mut self) -> &mut M {
        self.mark_changed();
        &mut self.state.memory
    }

    /// Returns a new event of one of the monitor's checks about its own node, to be filled in.
    pub fn event(&self, check: &str, component_class: &str) -> HealthEvent {
        self.event_about(&self.frame.node_name, check, component_class)
    }

    /// Returns a new event about any node, for a monitor that watches many from one place.
    pub fn event_about(&self, node: &str, check: &str, component_class: &str) -> HealthEvent {
        let boot_id = self.frame.boot.map(|boot| boot.id.to_string());
        HealthEvent {
            version: EVENT_VERSION,
            agent: self.monitor.agent.to_owned(),
            component_class: component_class.to_owned(),
            check_name: check.to_owned(),
            metadata: (boot_id.into_iter())
                .map(|id| (keys::META_BOOT_ID.to_owned(), id))
                .collect(),
            generated_timestamp: Some(json::proto_timestamp(self.now())),
            node_name: node.to_owned(),
            processing_strategy: ProcessingStrategy::ExecuteRemediation as i32,
            ..HealthEvent::default()
        }
    }

    /// Reports a fault, or the end of one, observed at `at`. Each observation may be reported.
    /// An event without an arrival time gets the current one.
    pub fn report(&mut self, mut event: HealthEvent, at: Timestamp) {
        model::event::not_fatal_without_action(&mut event);
        if accepted(&event).is_none() {
            mark_accepted(&mut event, self.now());
        }
        if !event.is_healthy {
            (self.source).update(self.now(), |status| status.faults += 1);
        }
        let before = self.state.outbox.len();
        let now = self.started.elapsed();
        self.state.fold.take(event, at, now, &mut self.state.outbox);
        let new = self.state.outbox.get(before..).unwrap_or_default();
        if new.is_empty() {
            self.metrics.repeats.inc();
        }
        let found_again = new.iter().all(is_found_again);
        self.mark_changed();
        if !found_again {
            self.save_first();
        }
        let waits = self.saving.as_ref().is_some_and(|saving| saving.first);
        if !waits && self.ready == before {
            self.ready = self.state.outbox.len();
        }
    }

    /// Returns the new boot since the last process, until it is reported.
    pub fn rebooted(&self) -> Option<Boot> {
        self.rebooted
    }

    /// After a reboot, closes the faults that it remediates, before anything of the new boot is
    /// reported. A monitor that reads a log calls this when everything from before the reboot
    /// is read.
    pub fn boot_has_begun(&mut self) {
        let Some(boot) = self.rebooted.take() else {
            return;
        };
        tracing::info!(boot_id = %boot.id, monitor = self.monitor.name, "the machine was rebooted");
        self.end_windows();
        for (check, component_class) in self.monitor.checks {
            let event = self.event(check, component_class);
            self.state.outbox.push(reboot::healed(event, boot));
        }
        self.state.boot_id = Some(boot.id.to_string());
    }

    /// Reports all counts, which would be lost, or whose fault's state is unknown now.
    pub fn end_windows(&mut self) {
        self.save_first();
        self.state.fold.end(&mut self.state.outbox);
    }

    /// Requires the state to be written before any further event is handed over, because the
    /// monitor has changed what event names depend on.
    pub fn save_first(&mut self) {
        if let Some(saving) = &mut self.saving {
            saving.changed = true;
            saving.first = true;
        }
    }

    /// Returns true if more may be reported: beyond [`MAX_UNSENT`] events the monitor must
    /// wait, and shows as stuck.
    pub fn has_room(&self) -> bool {
        self.state.outbox.len() < MAX_UNSENT
    }

    /// Waits for the next thing to do, and does it: hands over, counts, saves, and updates the
    /// heartbeat. Must be awaited repeatedly beside the monitor's own source; cancel-safe.
    pub async fn work(&mut self) {
        self.begin_hand_over();
        tokio::select! {
            () = tokio::time::sleep_until(self.next_wake()) => self.beat(),
            answer = self.hand_over.next() => self.handed_over(answer),
            saved = Saving::until_written(&mut self.saving) => self.saved(saved),
            recovery = next_recovery(&mut self.recoveries) => self.process_recovery(recovery),
        }
        // Otherwise repeats are counted further until the connector accepts events.
        if self.state.outbox.is_empty() {
            let now = self.started.elapsed();
            if self.state.fold.tick(now, &mut self.state.outbox) {
                self.save_first();
            }
        }
        if self.saving.as_ref().is_some_and(Saving::is_due) {
            self.save();
        }
    }

    /// Works for this time, and until there is room for more reports. Returns false if
    /// cancelled.
    pub async fn pause(&mut self, time: Duration, cancel: &CancellationToken) -> bool {
        let until = Instant::now() + time;
        loop {
            tokio::select! {
                () = cancel.cancelled() => return false,
                () = tokio::time::sleep_until(until), if self.has_room() => return true,
                () = self.work() => {}
            }
        }
    }

    /// Hands over the waiting events, in at least one attempt, until `cancel`; then saves the
    /// rest.
    pub async fn finish(mut self, cancel: &CancellationToken) {
        if self.saving.is_none() {
            // Without a file, the counts would be lost.
            self.end_windows();
        }
        self.hand_over.try_now();
        while !self.state.outbox.is_empty() {
            self.begin_hand_over();
            let is_busy = self.hand_over.is_under_way() || self.is_saving();
            tokio::select! {
                () = cancel.cancelled(), if !is_busy => break,
                () = self.work() => {}
            }
        }
        // Changes since the start of a write in progress must be written too.
        self.saving_has_ended().await;
        self.save();
        self.saving_has_ended().await;
    }

    async fn saving_has_ended(&mut self) {
        if self.is_saving() {
            let result = Saving::until_written(&mut self.saving).await;
            self.saved(result);
        }
    }

    fn beat(&mut self) {
        if self.beaten.elapsed() >= HEARTBEAT {
            self.beaten = Instant::now();
            // A monitor that has to wait shows as stuck.
            if self.has_room() {
                self.source.beat(self.now());
            }
        }
    }

    /// Returns the time of the next action that needs no external event.
    fn next_wake(&self) -> Instant {
        let ticks = self.state.outbox.is_empty();
        let window_ends = self.state.fold.next_tick().filter(|_| ticks);
        let window_ends = window_ends.map(|due| self.started + due);
        let save = self.saving.as_ref().and_then(Saving::due);
        let beat = self.beaten + HEARTBEAT;
        window_ends.into_iter().chain(save).fold(beat, Instant::min)
    }

    /// Processes a recovery of another sender. `None` means that some were missed.
    fn process_recovery(&mut self, recovery: Option<Recovery>) {
        let Some(Recovery { event, accepted_at }) = recovery else {
            self.end_windows();
            return;
        };
        // This monitor's own recoveries have already ended their windows.
        if !names_record(&event) {
            let (fold, outbox) = (&mut self.state.fold, &mut self.state.outbox);
            if fold.recovered_elsewhere(&event, accepted_at, outbox) {
                self.save_first();
            }
        }
    }

    /// Returns how many events at the front of the outbox may be handed over.
    fn may_hand_over(&self) -> usize {
        match self.saving {
            Some(_) => self.ready,
            None => self.state.outbox.len(),
        }
    }

    fn mark_changed(&mut self) {
        if let Some(saving) = &mut self.saving {
            saving.changed = true;
        }
    }

    fn is_saving(&self) -> bool {
        self.saving.as_ref().is_some_and(Saving::is_under_way)
    }

    /// Starts to write the state, unless a write is in progress.
    fn save(&mut self) {
        if let Some(saving) = &mut self.saving {
            saving.begin(&self.state);
        }
    }

    /// Processes the result of a write of the state.
    fn saved(&mut self, result: std::io::Result<()>) {
        let Some(saving) = &mut self.saving else {
            return;
        };
        // If the state cannot be written, events do not wait for it.
        self.ready = self.ready.max(saving.end());
        match result {
            Ok(()) => saving.failed = None,
            Err(error) => {
                self.metrics.unsaved.inc();
                saving.changed = true;
                let why = chain(&error);
                if saving.failed.as_ref() != Some(&why) {
                    tracing::error!(
                        err = why, path = %saving.path().display(), monitor = self.monitor.name,
                        "cannot write the monitor's state: after a restart, events would be \
                         reported and counted again"
                    );
                    saving.failed = Some(why);
                }
            }
        }
    }
}

#[cfg(any(test, feature = "test-util"))]
impl<M> Reporter<M> {
    /// Returns a function that is true once no write is in progress: a killed monitor leaves
    /// one behind in a test, unlike a killed process.
    pub fn has_gone(&self) -> Box<dyn Fn() -> bool + Send> {
        let file = self.saving.as_ref().map(Saving::file);
        Box::new(move || file.as_ref().is_none_or(|file| file.strong_count() == 0))
    }
}

/// Returns true if a monitor that restarts from an earlier state reports the event under the
/// same name, that of its log record, so that it is stored once. A count has the name of its
/// first record, and may be a different number then.
fn is_found_again(event: &HealthEvent) -> bool {
    names_record(event) && !event.metadata.contains_key(keys::META_COUNT)
}

/// Returns the next recovery. `None` means that some were missed.
async fn next_recovery(recoveries: &mut broadcast::Receiver<Recovery>) -> Option<Recovery> {
    match recoveries.recv().await {
        Ok(recovery) => Some(recovery),
        Err(broadcast::error::RecvError::Lagged(_)) => None,
        Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
