//! Sources that gpuwarden watches, and how fresh their data is.
//!
//! "Cannot see" is never "broken": a source that has stopped, lost records or never opened is
//! shown here and makes the process not ready; it opens no fault.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use serde::{Deserialize, Serialize};

use crate::metrics::{Description, Kind, Metrics};

/// Silence of a reader after which its source is stuck.
pub const STUCK_AFTER: Duration = Duration::from_secs(15);
/// Longest interval between two signs of life of a reader, even if there is nothing to read.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// All sources of a process. Cheap to clone.
#[derive(Clone)]
pub struct Sources {
    entries: Arc<Mutex<BTreeMap<String, TrackedSource>>>,
    /// Returns the time since some fixed moment. The wall clock may be changed, so it is only
    /// displayed.
    elapsed: Arc<dyn Fn() -> Duration + Send + Sync>,
}

/// Source, with the time of its last sign of life.
#[derive(Debug)]
struct TrackedSource {
    status: SourceStatus,
    /// Time of the reader's last sign of life, by `Sources::elapsed`.
    alive: Duration,
    /// True if the process is ready without the source.
    optional: bool,
}

/// Handle to one entry of [`Sources`], for the task that reads the source.
#[derive(Debug)]
pub struct SourceHandle {
    name: String,
    sources: Sources,
}

/// State of a source, with its counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    /// Name, for example `kernel-log`.
    pub name: String,
    /// Current state of the source.
    pub state: SourceState,
    /// Name of the input, such as a path, or the problem.
    pub detail: String,
    /// Advice on how to solve the problem; absent if there is no problem, or no advice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Time of the reader's last sign of life.
    pub alive_at: Timestamp,
    /// Time of the newest record, or of the newest poll that was answered; absent before the
    /// first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_record_at: Option<Timestamp>,
    /// Number of log records read, or of polls answered.
    pub records: u64,
    /// Number of faults found; a fault that is found again counts again.
    pub faults: u64,
    /// Number of records that were overwritten or missed before they could be read.
    pub lost: u64,
    /// Number of records that could not be parsed.
    pub malformed: u64,
    /// Number of events from this source that the connector refused.
    #[serde(default)]
    pub refused: u64,
    /// Reason why the newest event was refused; absent if it was accepted, or if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// Condition of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceState {
    /// Reading records from before it was opened, or not polled yet.
    CatchingUp,
    /// Reading new records as they arrive.
    Following,
    /// Read to its end; further records are impossible.
    Ended,
    /// Cannot be opened or read, which is retried; or its events are refused.
    Failing,
    /// No sign of life from the reader.
    Stuck,
}

// === impl Sources ===

impl Sources {
    /// Creates a set of sources whose silence is measured by `elapsed`, the time since some
    /// fixed moment.
    pub fn with_elapsed(elapsed: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self {
            entries: Arc::default(),
            elapsed: Arc::new(elapsed),
        }
    }

    /// Adds a source. Names are unique.
    pub fn add(&self, name: &str, detail: &str, now: Timestamp) -> SourceHandle {
        self.insert(name, detail, now, false)
    }

    /// Adds a source that the process is ready without: its failure is shown, and does not keep
    /// agents from a controller.
    pub fn add_optional(&self, name: &str, detail: &str, now: Timestamp) -> SourceHandle {
        self.insert(name, detail, now, true)
    }

    fn insert(&self, name: &str, detail: &str, now: Timestamp, optional: bool) -> SourceHandle {
        let status = SourceStatus {
            name: name.to_owned(),
            state: SourceState::CatchingUp,
            detail: detail.to_owned(),
            advice: None,
            alive_at: now,
            last_record_at: None,
            records: 0,
            faults: 0,
            lost: 0,
            malformed: 0,
            refused: 0,
            refusal: None,
        };
        let alive = (self.elapsed)();
        let tracked = TrackedSource {
            status,
            alive,
            optional,
        };
        self.with(|entries| entries.insert(name.to_owned(), tracked));
        SourceHandle {
            name: name.to_owned(),
            sources: self.clone(),
        }
    }

    /// Returns the states of all sources, by name.
    pub fn statuses(&self) -> Vec<SourceStatus> {
        self.select(|_| true)
    }

    fn select(&self, wanted: impl Fn(&TrackedSource) -> bool) -> Vec<SourceStatus> {
        let now = (self.elapsed)();
        self.with(|entries| {
            entries
                .values()
                .filter(|source| wanted(source))
                .map(|TrackedSource { status, alive, .. }| {
                    let (state, mut status) = (status.state, status.clone());
                    if let Some(refusal) = status.refusal.as_ref().filter(|_| state.sees()) {
                        // A source whose events reach nobody is as blind as one that cannot
                        // read.
                        status.state = SourceState::Failing;
                        status.detail = format!("{}: events refused: {refusal}", status.detail);
                    }
                    let silent = now.saturating_sub(*alive) > STUCK_AFTER;
                    if silent && state != SourceState::Ended {
                        status.state = SourceState::Stuck;
                    }
                    status
                })
                .collect()
        })
    }

    /// Returns the reasons why not everything is watched, one line per source.
    pub fn not_seen(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        for source in self.select(|source| !source.optional) {
            let (name, detail) = (source.name, source.detail);
            reasons.extend(match source.state {
                SourceState::Following | SourceState::Ended => None,
                SourceState::CatchingUp => {
                    Some(format!("source {name} is still catching up: {detail}"))
                }
                SourceState::Failing => Some(format!("source {name} fails: {detail}")),
                SourceState::Stuck => Some(format!(
                    "source {name} is stuck: no sign of life since {}: {detail}",
                    source.alive_at
                )),
            });
        }
        reasons
    }

    /// Registers the metric of the sources.
    pub fn register(&self, metrics: &Metrics) {
        metrics.collect_from(self.clone());
    }

    fn with<T>(&self, use_it: impl FnOnce(&mut BTreeMap<String, TrackedSource>) -> T) -> T {
        // The map stays consistent even if a task panicked while it held the lock.
        use_it(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Collector for Sources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let statuses = self.statuses();
        if statuses.is_empty() {
            return Ok(());
        }
        let Description { name, help, .. } = described();
        let mut gauge = encoder.encode_descriptor(&name, &help, None, MetricType::Gauge)?;
        for source in statuses {
            let labels = [("source", source.name)];
            let up = i64::from(source.state.sees());
            gauge.encode_family(&labels)?.encode_gauge(&up)?;
        }
        Ok(())
    }
}

/// Returns the description of the metric of the sources.
pub(crate) fn described() -> Description {
    Description::new(
        Kind::Gauge,
        "gpuwarden_source_up",
        &["source"],
        "1 if the source is read and its events are accepted; 0 while gpuwarden is blind for it",
    )
}

impl Default for Sources {
    fn default() -> Self {
        let start = Instant::now();
        Self::with_elapsed(move || start.elapsed())
    }
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources")
            .field("entries", &self.entries)
            .finish_non_exhaustive()
    }
}

// === impl SourceHandle ===

impl SourceHandle {
    /// Changes the status, and counts as a sign of life.
    pub fn update(&self, now: Timestamp, change: impl FnOnce(&mut SourceStatus)) {
        let alive = (self.sources.elapsed)();
        self.sources.with(|entries| {
            if let Some(entry) = entries.get_mut(&self.name) {
                entry.alive = alive;
                entry.status.alive_at = now;
                change(&mut entry.status);
            }
        });
    }

    /// Records the outcome of handing over events: the number refused, and whether the newest
    /// was accepted or why not.
    pub fn handed_over(&self, now: Timestamp, refused: u64, newest: Result<(), String>) {
        self.update(now, |status| {
            status.refused += refused;
            status.refusal = newest.err();
        });
    }

    /// Records a sign of life.
    pub fn beat(&self, now: Timestamp) {
        self.update(now, |_| ());
    }
}

// === impl SourceState ===

impl SourceState {
    /// Returns true if the source can be read.
    pub fn sees(self) -> bool {
        matches!(self, Self::CatchingUp | Self::Following | Self::Ended)
    }

    /// Returns the name of the state, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::CatchingUp => "catching-up",
            Self::Following => "following",
            Self::Ended => "ended",
            Self::Failing => "failing",
            Self::Stuck => "stuck",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn a_silent_reader_is_stuck_and_one_that_beats_is_not_whatever_the_wall_clock_does() {
        let seconds = Arc::new(AtomicU64::new(0));
        let elapsed = Arc::clone(&seconds);
        let sources =
            Sources::with_elapsed(move || Duration::from_secs(elapsed.load(Ordering::Relaxed)));
        let clock = Timestamp::UNIX_EPOCH + SignedDuration::from_hours(100);
        let handle = sources.add("kernel-log", "/dev/kmsg", clock);
        handle.update(clock, |status| status.state = SourceState::Following);
        let state_after = |more: Duration| {
            seconds.fetch_add(more.as_secs(), Ordering::Relaxed);
            sources.statuses()[0].state
        };
        assert_eq!(state_after(STUCK_AFTER), SourceState::Following);
        assert_eq!(state_after(Duration::from_secs(1)), SourceState::Stuck);
        for set in [
            SignedDuration::from_hours(-50),
            SignedDuration::from_hours(50),
        ] {
            handle.beat(clock + set);
            assert_eq!(state_after(Duration::from_secs(1)), SourceState::Following);
        }
        handle.update(clock, |status| status.state = SourceState::Ended);
        assert_eq!(state_after(2 * STUCK_AFTER), SourceState::Ended);
        assert!(!SourceState::Stuck.sees() && SourceState::Ended.sees());
    }

    #[test]
    fn a_process_is_ready_without_an_optional_source_whose_failure_is_shown() {
        let sources = Sources::default();
        let now = Timestamp::UNIX_EPOCH;
        let handles = [
            sources.add_optional("optional", "x", now),
            sources.add("needed", "y", now),
        ];
        for handle in &handles {
            handle.update(now, |status| status.state = SourceState::Failing);
        }
        assert_eq!(sources.not_seen(), ["source needed fails: y"]);
        assert_eq!(sources.statuses().len(), 2);
    }

    #[test]
    fn a_source_whose_events_are_not_taken_fails_until_one_is() {
        let sources = Sources::default();
        let now = Timestamp::UNIX_EPOCH;
        let handle = sources.add("kernel-log", "/dev/kmsg", now);
        handle.handed_over(now, 2, Err("nodeName is empty".to_owned()));
        // Reading on does not hide the refusal.
        handle.update(now, |status| status.state = SourceState::Following);
        let status = &sources.statuses()[0];
        assert_eq!((status.state, status.refused), (SourceState::Failing, 2));
        assert_eq!(
            status.detail,
            "/dev/kmsg: events refused: nodeName is empty"
        );
        handle.handed_over(now, 0, Ok(()));
        let status = &sources.statuses()[0];
        assert_eq!((status.state, status.refused), (SourceState::Following, 2));
        assert_eq!(status.detail, "/dev/kmsg");
    }
}
