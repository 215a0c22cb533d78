//! The frame of every monitor: a monitor looks at something of the machine and says what it
//! finds, and a [`Reporter`] does all that comes after.
//!
//! - Repeats of a fault are counted and reported once a minute (`diagnosis/src/fold.rs`).
//! - What is reported is stored by the connector, or stands in a file (`state`) until it is: a
//!   restart loses nothing and doubles nothing. The monitor's own memory, such as its place in a
//!   log, stands in the same file.
//! - What the connector does not take is tried again (`hand_over`), and meanwhile the monitor
//!   goes on, up to a bound.
//! - After a reboot the faults that it mends are closed (`reboot`).
//! - Status and metrics tell whether the monitor sees what it is there to see.
//!
//! A monitor is a loop of its own, in which [`Reporter::work`] or [`Reporter::pause`] is waited
//! for beside what the monitor waits for. CONTRIBUTING.md has the steps, `tests.rs` a small
//! monitor, and `kernel_log.rs` a large one.

mod hand_over;
mod metrics;
mod reboot;
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
use runtime::sources::{HEARTBEAT, SourceHandle, SourceState, Sources};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::broadcast;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use hand_over::HandOver;
use metrics::MonitorMetrics;
use state::{MonitorState, Saving, StateFile};

pub use diagnosis::fold::WINDOW;

/// Events that wait for the connector before the monitor waits for them: they stand in the state
/// file, which is written once a second. As many as faults whose repeats are counted.
pub const MAX_UNSENT: usize = diagnosis::fold::MAX_WINDOWS;

/// The names of a monitor.
#[derive(Debug)]
pub struct Monitor {
    /// Name of its source and its file, and with `gpuwarden_` before it the beginning of its
    /// metrics: `kernel-log`.
    pub name: &'static str,
    /// The things that it reads, in the words of its metrics: `Kernel log records`.
    pub records: &'static str,
    /// Agent of its events.
    pub agent: &'static str,
    /// Its checks, each with the component class of its faults. A reboot closes what they found.
    pub checks: &'static [(&'static str, &'static str)],
}

/// The things that all monitors of a node are made with.
#[derive(Clone)]
pub struct Frame {
    /// Node name on the events.
    pub node_name: String,
    /// Directory for what is remembered over a restart; `None`: nothing is.
    pub state_dir: Option<PathBuf>,
    /// The running boot; `None`: not known, and then no reboot is noticed.
    pub boot: Option<Boot>,
    /// Repeats of a fault within this time become one event: [`WINDOW`].
    pub window: Duration,
    /// The connector that takes their events.
    pub connector: Connector,
    /// The list of sources in which each is shown.
    pub sources: Sources,
    /// The metrics of the process.
    pub metrics: Metrics,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// Brings what a monitor finds to the connector. `M` is what the monitor itself has to remember
/// over a restart: a struct with named fields, which are written beside the reporter's own.
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
    /// Number of events of the outbox, from its front, that stand in the file, or would be found
    /// again without it.
    ready: usize,
    started: Instant,
    beaten: Instant,
    /// A boot whose beginning was not told yet.
    rebooted: Option<Boot>,
    /// The reason why nothing is seen, as it was last said in the log.
    blind: Option<String>,
}

// === impl Reporter ===

impl<M> Reporter<M>
where
    M: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Returns a reporter that is listed among the sources by the monitor's name. What an earlier
    /// process has remembered is read from its file.
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
        // A boot is another one only if an earlier one is known.
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
            // What is handed over by now was handed over from there.
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

    /// Returns whether an earlier process has left a state behind.
    pub fn remembers(&self) -> bool {
        self.remembers
    }

    /// Returns the name of the node.
    pub fn node_name(&self) -> &str {
        &self.frame.node_name
    }

    /// Returns the time by the clock of the frame.
    pub fn now(&self) -> Timestamp {
        (self.frame.clock)()
    }

    /// Returns the monitor's own memory.
    pub fn memory(&self) -> &M {
        &self.state.memory
    }

    /// Returns the monitor's own memory, to change it.
    pub fn memory_mut(&mut self) -> &mut M {
        self.note_change();
        &mut self.state.memory
    }

    /// Returns an event of one of the monitor's checks about its node, of now, to be filled in.
    pub fn event(&self, check: &str, component_class: &str) -> HealthEvent {
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
            node_name: self.frame.node_name.clone(),
            processing_strategy: ProcessingStrategy::ExecuteRemediation as i32,
            ..HealthEvent::default()
        }
    }

    /// Reports a fault, or the end of one, that was seen at `at`. It may be reported as often as
    /// it is seen. Where the event does not say when it came, it came now.
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
        self.note_change();
        if !found_again {
            self.save_first();
        }
        let waits = self.saving.as_ref().is_some_and(|saving| saving.first);
        if !waits && self.ready == before {
            self.ready = self.state.outbox.len();
        }
    }

    /// Takes note of a record that was read, and says `at` of itself.
    pub fn has_read(&self, at: Timestamp) {
        self.metrics.records.inc();
        self.source.update(self.now(), |status| {
            status.records += 1;
            status.last_record_at = Some(at);
        });
    }

    /// Takes note of a look that was answered, by a monitor that polls: it sees, and what it
    /// finds is of this boot. `detail` says what it looks at.
    pub fn has_looked(&mut self, detail: &str) {
        self.boot_has_begun();
        self.has_read(self.now());
        self.show(SourceState::Following, detail);
    }

    /// Takes note of records that were lost before they could be read.
    pub fn has_lost(&self, count: u64) {
        self.metrics.lost.inc_by(count);
        (self.source).update(self.now(), |status| status.lost += count);
    }

    /// Takes note of records that cannot be read.
    pub fn cannot_read(&self, count: u64) {
        self.metrics.malformed.inc_by(count);
        (self.source).update(self.now(), |status| status.malformed += count);
    }

    /// Shows that nothing is seen, and why; it is said in the log once.
    pub fn cannot_see(&mut self, why: &str) {
        self.cannot_see_with(why, None);
    }

    /// Shows that nothing is seen, why, and what to do about it; it is said in the log once.
    pub fn cannot_see_with(&mut self, why: &str, advice: Option<String>) {
        if self.blind.as_deref() != Some(why) {
            let monitor = self.monitor.name;
            tracing::error!(
                err = why,
                monitor,
                advice,
                "the source of a monitor cannot be read; it is tried again"
            );
            self.blind = Some(why.to_owned());
        }
        self.show(SourceState::Failing, why);
        (self.source).update(self.now(), |status| status.advice = advice);
    }

    /// Shows how the monitor does, and what it looks at or what is wrong with that.
    pub fn show(&mut self, state: SourceState, detail: &str) {
        if state.sees() {
            self.blind = None;
        }
        let detail = self.with_trouble(detail);
        self.source.update(self.now(), |status| {
            status.state = state;
            status.detail = detail;
            status.advice = None;
        });
    }

    /// Shows what the monitor looks at; how it does is as before.
    pub fn show_detail(&self, detail: &str) {
        let detail = self.with_trouble(detail);
        (self.source).update(self.now(), |status| status.detail = detail);
    }

    /// Returns `detail`, and that the state cannot be written where that is so.
    fn with_trouble(&self, detail: &str) -> String {
        let saving = self.saving.as_ref();
        match saving.and_then(|saving| Some((saving.path(), saving.failed.as_ref()?))) {
            Some((path, why)) => format!("{detail}; {} cannot be written: {why}", path.display()),
            None => detail.to_owned(),
        }
    }

    /// Returns the boot that the machine has made since the last process, until its beginning
    /// is told.
    pub fn rebooted(&self) -> Option<Boot> {
        self.rebooted
    }

    /// Closes what a reboot mends, where there was one, before anything of the new boot is
    /// reported. A monitor that reads a log calls this when all from before it is read.
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

    /// Reports what is counted: it would be forgotten, or something is not known any more.
    pub fn end_windows(&mut self) {
        self.save_first();
        self.state.fold.end(&mut self.state.outbox);
    }

    /// Makes the state be written before any further event is handed over, for the monitor has
    /// changed what events are named by.
    pub fn save_first(&mut self) {
        if let Some(saving) = &mut self.saving {
            saving.changed = true;
            saving.first = true;
        }
    }

    /// Returns whether more may be reported: beyond [`MAX_UNSENT`] events the monitor has to
    /// wait, and shows as stuck.
    pub fn has_room(&self) -> bool {
        self.state.outbox.len() < MAX_UNSENT
    }

    /// Waits until there is something to do, and does it: hands over, counts, saves, and shows a
    /// sign of life. To be called again and again beside what the monitor waits for;
    /// cancel-safe.
    pub async fn work(&mut self) {
        self.begin_hand_over();
        tokio::select! {
            () = tokio::time::sleep_until(self.next_wake()) => self.beat(),
            answer = self.hand_over.next() => self.handed_over(answer),
            saved = Saving::until_written(&mut self.saving) => self.saved(saved),
            heard = next_recovery(&mut self.recoveries) => self.take_in_recovery(heard),
        }
        // Else repeats go on being counted until the connector takes events.
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

    /// Works for this long, and until there is room for more reports. `false`: cancelled.
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

    /// Hands over what waits, and tries at least once, until `cancel`; then saves the rest.
    pub async fn finish(mut self, cancel: &CancellationToken) {
        if self.saving.is_none() {
            // What is counted would be forgotten.
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
        // What has changed since one began that is under way has to be written, too.
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

    /// Returns the time of the next thing to do that nothing has to come for.
    fn next_wake(&self) -> Instant {
        let ticks = self.state.outbox.is_empty();
        let window_ends = self.state.fold.next_tick().filter(|_| ticks);
        let window_ends = window_ends.map(|due| self.started + due);
        let save = self.saving.as_ref().and_then(Saving::due);
        let beat = self.beaten + HEARTBEAT;
        window_ends.into_iter().chain(save).fold(beat, Instant::min)
    }

    /// Takes in a recovery that somebody else has reported. `None`: some were missed.
    fn take_in_recovery(&mut self, recovery: Option<Recovery>) {
        let Some(Recovery { event, accepted_at }) = recovery else {
            self.end_windows();
            return;
        };
        // Our own have ended their windows already.
        if !names_record(&event) {
            let (fold, outbox) = (&mut self.state.fold, &mut self.state.outbox);
            if fold.recovered_elsewhere(&event, accepted_at, outbox) {
                self.save_first();
            }
        }
    }

    /// Returns how many events of the outbox, from its front, may be handed over.
    fn may_hand_over(&self) -> usize {
        match self.saving {
            Some(_) => self.ready,
            None => self.state.outbox.len(),
        }
    }

    fn note_change(&mut self) {
        if let Some(saving) = &mut self.saving {
            saving.changed = true;
        }
    }

    fn is_saving(&self) -> bool {
        self.saving.as_ref().is_some_and(Saving::is_under_way)
    }

    /// Begins to write the state, unless it is being written.
    fn save(&mut self) {
        if let Some(saving) = &mut self.saving {
            saving.begin(&self.state);
        }
    }

    /// Takes note of what became of a writing of the state.
    fn saved(&mut self, result: std::io::Result<()>) {
        let Some(saving) = &mut self.saving else {
            return;
        };
        // Where it cannot be written, events do not wait for it.
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
                        "what the monitor has to remember cannot be written: a restart would \
                         report again, and count again, what was reported and counted"
                    );
                    saving.failed = Some(why);
                }
            }
        }
    }
}

#[cfg(test)]
impl<M> Reporter<M> {
    /// Returns a function that says whether nothing writes the state any more: a test that kills a
    /// monitor leaves a writing behind, which no process does that is killed.
    pub(crate) fn has_gone(&self) -> Box<dyn Fn() -> bool + Send> {
        let file = self.saving.as_ref().map(Saving::file);
        Box::new(move || file.as_ref().is_none_or(|file| file.strong_count() == 0))
    }
}

/// Returns whether a monitor that begins anew from an earlier state reports the event by the
/// same name, so that it is stored once: that of the log record it was read from. A count has
/// the name of its first record, and what it counted may be another number then.
fn is_found_again(event: &HealthEvent) -> bool {
    names_record(event) && !event.metadata.contains_key(keys::META_COUNT)
}

/// Returns the next recovery. `None`: some were missed.
async fn next_recovery(recoveries: &mut broadcast::Receiver<Recovery>) -> Option<Recovery> {
    match recoveries.recv().await {
        Ok(recovery) => Some(recovery),
        Err(broadcast::error::RecvError::Lagged(_)) => None,
        Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
