//! What gpuwarden can see, and how fresh that is.
//!
//! "Cannot see" is never "broken": a source that has stopped, lost records or never
//! opened is shown here and makes the process not ready; it opens no fault.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A source that has not shown a sign of life for this long is stuck.
pub const STUCK_AFTER: Duration = Duration::from_secs(15);
/// Time in which a source has to show one, even when there is nothing to read.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// All sources of a process. Cheap to clone.
#[derive(Clone)]
pub struct Sources {
    entries: Arc<Mutex<BTreeMap<String, TrackedSource>>>,
    /// A function that returns the time since some moment. The wall clock may be set, and is only shown.
    elapsed: Arc<dyn Fn() -> Duration + Send + Sync>,
}

/// A source, and when it was last heard of.
#[derive(Debug)]
struct TrackedSource {
    status: SourceStatus,
    /// The time of the last sign of life of its reader, by `Sources::elapsed`.
    alive: Duration,
}

/// One source's place in [`Sources`], for the task that reads it.
#[derive(Debug)]
pub struct SourceHandle {
    name: String,
    sources: Sources,
}

/// The state of a source, with its counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    /// Name, for example `kernel-log`.
    pub name: String,
    /// Its state.
    pub state: SourceState,
    /// The thing that it reads, or what is wrong.
    pub detail: String,
    /// What to do about that; absent where nothing is wrong, or nothing is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Last sign of life of its reader.
    pub alive_at: Timestamp,
    /// The time of the newest record, or of the newest look that was answered; absent before the
    /// first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_record_at: Option<Timestamp>,
    /// Records of a log that were read, or looks at what is polled that were answered.
    pub records: u64,
    /// Faults found in them; one that is found again counts again.
    pub faults: u64,
    /// Records that were overwritten or missed before they could be read.
    pub lost: u64,
    /// Records that could not be read.
    pub malformed: u64,
    /// Events about its records that were not taken.
    #[serde(default)]
    pub refused: u64,
    /// The reason why its newest event was not taken; absent where it was, or there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// The state of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceState {
    /// Reading what was there when it was opened, or not looked yet.
    CatchingUp,
    /// Seeing what comes.
    Following,
    /// All read; nothing more will come.
    Ended,
    /// Cannot be opened or read, which is tried again; or its events are not taken.
    Failing,
    /// No sign of life from its reader.
    Stuck,
}

// === impl Sources ===

impl Sources {
    /// Returns sources whose silence is measured by `elapsed`, the time since some moment.
    pub fn with_elapsed(elapsed: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self {
            entries: Arc::default(),
            elapsed: Arc::new(elapsed),
        }
    }

    /// Adds a source; a name is given once.
    pub fn add(&self, name: &str, detail: &str, now: Timestamp) -> SourceHandle {
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
        self.with(|entries| entries.insert(name.to_owned(), TrackedSource { status, alive }));
        SourceHandle {
            name: name.to_owned(),
            sources: self.clone(),
        }
    }

    /// Returns the states of all sources, by name.
    pub fn statuses(&self) -> Vec<SourceStatus> {
        let now = (self.elapsed)();
        self.with(|entries| {
            entries
                .values()
                .map(|TrackedSource { status, alive }| {
                    let (state, mut status) = (status.state, status.clone());
                    if let Some(refusal) = status.refusal.as_ref().filter(|_| state.sees()) {
                        // What it sees reaches nobody: that is as blind as not to see it.
                        status.state = SourceState::Failing;
                        status.detail = format!("{}: events not taken: {refusal}", status.detail);
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

    /// Returns why not everything is seen, a line for each source that does not see it.
    pub fn not_seen(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        for source in self.statuses() {
            let (name, detail) = (source.name, source.detail);
            reasons.extend(match source.state {
                SourceState::Following | SourceState::Ended => None,
                SourceState::CatchingUp => Some(format!(
                    "source {name} still reads what was there before: {detail}"
                )),
                SourceState::Failing => Some(format!("source {name} fails: {detail}")),
                SourceState::Stuck => Some(format!(
                    "source {name} is stuck: no sign of life since {}: {detail}",
                    source.alive_at
                )),
            });
        }
        reasons
    }

    fn with<T>(&self, use_it: impl FnOnce(&mut BTreeMap<String, TrackedSource>) -> T) -> T {
        // The map stays usable whatever happened to a task that held the lock.
        use_it(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Default for Sources {
    fn default() -> Self {
        let start = Instant::now();
        Self::with_elapsed(move || start.elapsed())
    }
}

impl std::fmt::Debug for Sources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sources")
            .field("entries", &self.entries)
            .finish_non_exhaustive()
    }
}

// === impl SourceHandle ===

impl SourceHandle {
    /// Changes the status, and takes the call as a sign of life.
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

    /// Takes note of what became of its events: the newest was taken, or was not, and why.
    pub fn handed_over(&self, now: Timestamp, refused: u64, newest: Result<(), String>) {
        self.update(now, |status| {
            status.refused += refused;
            status.refusal = newest.err();
        });
    }

    /// Shows a sign of life.
    pub fn beat(&self, now: Timestamp) {
        self.update(now, |_| ());
    }
}

// === impl SourceState ===

impl SourceState {
    /// Returns whether the source can see what it is there to see.
    pub fn sees(self) -> bool {
        matches!(self, Self::CatchingUp | Self::Following | Self::Ended)
    }

    /// Returns the state's name, as serialised.
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
    fn a_source_whose_events_are_not_taken_fails_until_one_is() {
        let sources = Sources::default();
        let now = Timestamp::UNIX_EPOCH;
        let handle = sources.add("kernel-log", "/dev/kmsg", now);
        handle.handed_over(now, 2, Err("nodeName is empty".to_owned()));
        // What it reads meanwhile does not hide it.
        handle.update(now, |status| status.state = SourceState::Following);
        let status = &sources.statuses()[0];
        assert_eq!((status.state, status.refused), (SourceState::Failing, 2));
        assert_eq!(
            status.detail,
            "/dev/kmsg: events not taken: nodeName is empty"
        );
        handle.handed_over(now, 0, Ok(()));
        let status = &sources.statuses()[0];
        assert_eq!((status.state, status.refused), (SourceState::Following, 2));
        assert_eq!(status.detail, "/dev/kmsg");
    }
}
