//! The kernel-log monitor (NVSentinel's syslog health monitor): reads a kernel log,
//! finds the faults in it and hands them to the connector.
//!
//! The place in the log moves on only behind what the connector has stored, so a
//! restart loses nothing; what is read twice gets the same event id and is stored once.

mod event;
mod metrics;
mod position;

use std::path::PathBuf;
use std::time::Duration;

use connector::{Caller, Connector};
use contract::{EVENT_VERSION, HealthEvent, HealthEvents};
use domain::decode::KernelLogDecoder;
use host::boot::BootId;
use host::kernel_log::{Event, Position, Record, Source, Spec};
use jiff::{SignedDuration, Timestamp};
use runtime::logging::chain;
use runtime::metrics::Metrics;
use runtime::sources::{HEARTBEAT, SourceHandle, SourceState, Sources};
use tokio_util::sync::CancellationToken;

use metrics::KernelLogMetrics;
use position::{PositionFile, Saved};

/// Most records between two looks at the connector.
const BATCH: usize = 512;
/// Pause before a source that cannot be read is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Pauses between attempts to hand events over, doubling from the first to the last.
const HAND_OVER_RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// What the monitor needs to know.
pub struct Config {
    /// What to read.
    pub spec: Spec,
    /// Node name on the events.
    pub node_name: String,
    /// On a first start, older lines open no fault.
    pub history: SignedDuration,
    /// Directory for the place in the log; `None`: it is not kept.
    pub state_dir: Option<PathBuf>,
}

/// The monitor. Runs until cancelled, or until input that can end has ended.
pub struct KernelLogMonitor {
    config: Config,
    connector: Connector,
    source: SourceHandle,
    metrics: KernelLogMetrics,
    clock: fn() -> Timestamp,
    decoder: KernelLogDecoder,
    positions: Option<PositionFile>,
    /// Older lines of the backlog open no fault; `None` but for the backlog of a first start.
    /// What comes later is new whatever its time says: the kernel's clock may lag behind.
    history_begins: Option<Timestamp>,
    boot_id: Option<BootId>,
    /// Time of the newest line that has one.
    newest: Option<Timestamp>,
    /// Tells the file that is being read from what was at the same places before.
    generation: i64,
    last_place: Option<Position>,
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
        let positions = config.state_dir.as_deref().map(PositionFile::in_dir);
        let boot_id = matches!(config.spec, Spec::Kmsg)
            .then(|| BootId::current().ok())
            .flatten();
        Self {
            config,
            connector,
            source,
            metrics,
            clock,
            decoder: KernelLogDecoder::default(),
            positions,
            history_begins: None,
            boot_id,
            newest: None,
            generation: 0,
            last_place: None,
        }
    }

    /// Reads until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        while !cancel.is_cancelled() {
            let Some(source) = self.open(&cancel).await else {
                return;
            };
            if self.follow(source, &cancel).await {
                return;
            }
        }
    }

    /// Opens the source, trying again until it opens. `None`: cancelled.
    async fn open(&mut self, cancel: &CancellationToken) -> Option<Source> {
        let saved = self.positions.as_ref().and_then(PositionFile::load);
        let first_start = saved.is_none();
        self.generation = saved
            .as_ref()
            .map_or_else(|| (self.clock)().as_millisecond(), |saved| saved.generation);
        let resume = saved.map(|saved| saved.position);
        self.last_place.clone_from(&resume);
        if let Some(Position::Kmsg { seq, .. }) = resume {
            self.learn(seq).await;
        }
        let mut said: Option<String> = None;
        loop {
            match host::kernel_log::open(&self.config.spec, resume.as_ref()) {
                Ok(source) => {
                    if first_start {
                        self.history_begins = (self.clock)().checked_sub(self.config.history).ok();
                    }
                    let detail = self.config.spec.to_string();
                    self.source.update((self.clock)(), |status| {
                        status.state = SourceState::CatchingUp;
                        status.detail = detail;
                    });
                    return Some(source);
                }
                Err(error) => self.cannot_read(&chain(&error), &mut said),
            }
            tokio::select! {
                () = cancel.cancelled() => return None,
                () = tokio::time::sleep(RETRY) => {}
            }
        }
    }

    /// Reads what was handled before a restart once more, only to learn from it: which
    /// GPU sits where, and which has just reported an XID.
    async fn learn(&mut self, up_to: u64) {
        let Ok(mut source) = host::kernel_log::open(&self.config.spec, None) else {
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
                        self.decoder.line(record.text.as_bytes(), at);
                    }
                    Event::CaughtUp | Event::Record(_) => return,
                    _ => {}
                }
            }
        }
    }

    /// Follows an open source. `true`: nothing more will come.
    async fn follow(&mut self, mut source: Source, cancel: &CancellationToken) -> bool {
        let mut beat = tokio::time::interval(HEARTBEAT);
        let mut events = Vec::new();
        loop {
            let read = tokio::select! {
                () = cancel.cancelled() => {
                    self.save_position(&source);
                    return true;
                }
                _ = beat.tick() => {
                    self.source.beat((self.clock)());
                    continue;
                }
                read = source.next_batch(&mut events, BATCH) => read,
            };
            let mut found = Vec::new();
            let mut ended = false;
            for event in events.drain(..) {
                ended |= event == Event::End;
                found.extend(self.take_in(event));
            }
            if !found.is_empty() && !self.hand_over(found, cancel).await {
                return true;
            }
            self.save_position(&source);
            if ended {
                return true;
            }
            if let Err(error) = read {
                self.cannot_read(&chain(&error), &mut None);
                tokio::select! {
                    () = cancel.cancelled() => return true,
                    () = tokio::time::sleep(RETRY) => return false,
                }
            }
        }
    }

    /// Takes in what the source said; returns the event that it is worth.
    fn take_in(&mut self, event: Event) -> Option<HealthEvent> {
        let now = (self.clock)();
        match event {
            Event::Record(record) => {
                let place = self.place(&record);
                let began = std::time::Instant::now();
                let at = record.wall.or(self.newest).unwrap_or(now);
                self.newest = record.wall.or(self.newest);
                let finding = self.decoder.line(record.text.as_bytes(), at);
                self.source.update(now, |status| {
                    status.records += 1;
                    status.faults += u64::from(finding.is_some());
                    status.last_record_at = Some(at);
                });
                let finding = finding?;
                self.metrics.found(&finding, began.elapsed());
                let earlier = self.history_begins.is_some_and(|begins| at < begins);
                Some(event::of(&event::Context {
                    finding: &finding,
                    record: &record,
                    at: record.wall.unwrap_or(now),
                    node_name: &self.config.node_name,
                    boot_id: self.boot_id.as_ref().map(BootId::as_str),
                    earlier_in_boot: earlier,
                    place,
                }))
            }
            Event::Lost { count, counted } => {
                // Blindness, never a fault: shown and counted.
                tracing::warn!(
                    count,
                    counted,
                    "kernel log records were lost before they could be read"
                );
                self.metrics.lost.inc_by(count.max(1));
                self.source
                    .update(now, |status| status.lost += count.max(1));
                None
            }
            Event::Malformed { reason } => {
                tracing::debug!(reason, "kernel log record skipped");
                self.metrics.malformed.inc();
                self.source.update(now, |status| status.malformed += 1);
                None
            }
            Event::CaughtUp => {
                self.history_begins = None;
                self.source
                    .update(now, |status| status.state = SourceState::Following);
                None
            }
            Event::End => {
                self.source
                    .update(now, |status| status.state = SourceState::Ended);
                None
            }
        }
    }

    /// Hands events to the connector until it has them. `false`: cancelled before that.
    async fn hand_over(&self, events: Vec<HealthEvent>, cancel: &CancellationToken) -> bool {
        let batch = HealthEvents {
            version: EVENT_VERSION,
            events,
        };
        let (mut pause, longest) = HAND_OVER_RETRY;
        loop {
            match self.connector.accept(batch.clone(), &Caller::Monitor).await {
                Ok(_) => return true,
                Err(error) if error.is_retryable() => {
                    tracing::warn!(err = %chain(&error), "events wait for the store");
                }
                Err(error) => {
                    // Invalid in itself: trying again would stop the log for ever.
                    tracing::error!(err = %chain(&error), "events of the kernel log were refused");
                    self.metrics.refused.inc();
                    return true;
                }
            }
            tokio::select! {
                () = cancel.cancelled() => return false,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(longest),
            }
        }
    }

    /// Where a record stands in its file: `None` for the kernel's own log.
    fn place(&mut self, record: &Record) -> Option<String> {
        let place = record.place.as_ref()?;
        let Position::File { dev, ino, offset } = place else {
            return None;
        };
        let goes_on = match &self.last_place {
            Some(Position::File {
                dev: d,
                ino: i,
                offset: before,
            }) => (d, i) == (dev, ino) && before < offset,
            _ => false,
        };
        if !goes_on && self.last_place.is_some() {
            self.generation = (self.clock)().as_millisecond().max(self.generation + 1);
        }
        self.last_place = Some(place.clone());
        Some(format!("{dev}:{ino}:{}:{offset}", self.generation))
    }

    fn save_position(&mut self, source: &Source) {
        let generation = self.generation;
        if let (Some(file), Some(position)) = (&mut self.positions, source.position())
            && let Err(error) = file.save(Saved {
                position,
                generation,
            })
        {
            tracing::warn!(err = %error, "the place in the kernel log could not be saved");
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

/// The event that a line of kernel log is worth, as this monitor would report it; `None`
/// for a line that is no fault.
pub fn event_of_line(line: &str, node_name: &str, at: Timestamp) -> Option<HealthEvent> {
    let finding = KernelLogDecoder::default().line(line.as_bytes(), at)?;
    let record = Record {
        seq: None,
        boot_time_us: None,
        wall: Some(at),
        facility: None,
        level: None,
        place: None,
        line: None,
        text: line.to_owned(),
    };
    Some(event::of(&event::Context {
        finding: &finding,
        record: &record,
        at,
        node_name,
        boot_id: None,
        earlier_in_boot: false,
        place: None,
    }))
}

#[cfg(test)]
mod tests;
