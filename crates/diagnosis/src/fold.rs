//! Storm control: merges repeats of a fault within a window into one event with their count.
//!
//! A broken GPU may print the same line 800,000 times. The first line is reported at once.
//! Further ones within the window are counted, and reported as one event when the window ends;
//! that event opens the next window, so a fault has at most one event per window, and the
//! counts of its events add up to the number of its lines. A report that differs (in device,
//! code, severity, action or job) is not a repeat and passes at once.
//!
//! Recoveries have windows of their own. A recovery that ends a reported fault passes at once,
//! after the fault's count so far; so does the next report of the fault, which is a new fault,
//! and ends the windows of the recoveries that would end it. A fault that comes and goes
//! repeatedly passes [`MAX_RETURNS`] times within its window; later reports are counted, and
//! the count is sent when the window ends: as a fault if the fault is open by then, else as a
//! record that opens none. Counts of recoveries are only records too, since their fault has
//! ended already.
//!
//! The log's own time of a report decides whether the report is in a window, so that a log
//! which is read late gives the same events. A window also ends by elapsed time here, since
//! there may be no further line, and the clocks of logs jump.
//!
//! A count carries the time of its last report ([`mark_accepted`]), so that a count that is
//! sent later undoes no decision made meanwhile.
//!
//! The fault book (`model/fault/book.rs`) evaluates the counts.

use std::collections::BTreeMap;
use std::time::Duration;

use contract::{HealthEvent, ProcessingStrategy, accepted, json, keys, mark_accepted};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::subject::{Subject, heals};

/// Repeats of a fault within this time become one event.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Most faults whose repeats are counted at once: as many as a node may have open. Beyond it
/// the oldest window ends early, and its count is sent then.
pub const MAX_WINDOWS: usize = 1024;

/// Most times within one window that an ended fault is reported again at once.
pub const MAX_RETURNS: u8 = 8;

/// Counts repeats of reports in windows.
#[derive(Clone, Debug, PartialEq)]
pub struct Fold {
    window: Duration,
    windows: BTreeMap<Key, Window>,
}

/// Count and times of the reports that an event stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sightings {
    /// Number of reports that the event stands for.
    pub count: u64,
    /// Time of the first report.
    pub first: Timestamp,
    /// Time of the last report.
    pub last: Timestamp,
}

/// Key of a window: two reports with the same key are repeats of each other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    healthy: bool,
    names: [String; 4],
    codes: Vec<String>,
    subjects: Vec<String>,
    action: (i32, String),
    fatal: bool,
    strategy: i32,
    /// True if the report opens no fault. Such a report is not a repeat of one that does.
    earlier_in_boot: bool,
    /// Job of the report, if known: an event with a count names one job.
    job: Option<String>,
}

/// A span of time with its count of an event's repeats.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Window {
    /// Event that opened the window; its key and subject are the window's.
    opened_by: HealthEvent,
    /// End of the window by the log's time, exclusive.
    until: Timestamp,
    /// End of the window by this process's clock, since the start of the process.
    #[serde(skip)]
    due: Duration,
    /// Repeats so far, not reported yet.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    repeats: Option<Repeats>,
    /// True if the fault has ended. Never true in a recovery's window.
    over: bool,
    /// Number of times that the fault was reported at once in this window after it had ended.
    returns: u8,
    /// True if the repeats are of a fault that has come back and was not reported since.
    held: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Repeats {
    /// First repeat; the event with the count uses its record.
    event: HealthEvent,
    count: u64,
    first: Timestamp,
    last: Timestamp,
}

// === impl Fold ===

impl Fold {
    /// Sets the length of windows that open from now on; the default is [`WINDOW`].
    pub fn set_window(&mut self, window: Duration) {
        self.window = window;
    }

    /// Processes a report, and appends to `out` what is to be sent now, in order.
    ///
    /// `at` is the time of the report; `now` is the time since the start of the process.
    pub fn take(
        &mut self,
        event: HealthEvent,
        at: Timestamp,
        now: Duration,
        out: &mut Vec<HealthEvent>,
    ) {
        let key = Key::of(&event);
        if event.is_healthy && self.heal(&event, out) {
            // The recovery ends a reported fault, so it passes even if its repeats were being
            // counted.
            if let Some(mut window) = self.windows.remove(&key) {
                out.extend(window.counted());
            }
        }
        let Some(window) = self.windows.get_mut(&key) else {
            if self.windows.len() >= MAX_WINDOWS {
                self.end_oldest(out);
            }
            self.end_recoveries_of(&event, out);
            self.windows
                .insert(key, Window::new(event.clone(), at, now, self.window));
            out.push(event);
            return;
        };
        if at < window.until {
            if !window.over {
                window.count(event, at);
            } else if window.returns < MAX_RETURNS {
                window.over = false;
                window.returns += 1;
                self.end_recoveries_of(&event, out);
                out.push(event);
            } else {
                window.over = false;
                window.held = true;
                window.count(event, at);
            }
            return;
        }
        // The window ended before this report. If it counted nothing, or the fault has ended,
        // this report is a first one again; a recovery always is.
        let before = window.end(at, now, self.window);
        let is_repeat = before.is_some() && !window.over && !event.is_healthy;
        window.over = false;
        if is_repeat {
            window.count(event.clone(), at);
        }
        self.end_recoveries_of(&event, out);
        out.extend(before);
        if !is_repeat {
            out.push(event);
        }
    }

    /// Ends the windows whose time has passed here, and returns true if there were any.
    pub fn tick(&mut self, now: Duration, out: &mut Vec<HealthEvent>) -> bool {
        let due: Vec<Key> = self
            .windows
            .iter()
            .filter(|(_, window)| window.due <= now)
            .map(|(key, _)| key.clone())
            .collect();
        for key in &due {
            let Some(window) = self.windows.get_mut(key) else {
                continue;
            };
            let last = window.repeats.as_ref().map(|repeats| repeats.last);
            let from = last.map_or(window.until, |last| last.max(window.until));
            let event = window.end(from, now, self.window);
            if window.over || event.is_none() || key.healthy {
                self.windows.remove(key);
            }
            if let Some(event) = event {
                self.end_recoveries_of(&event, out);
                out.push(event);
            }
        }
        !due.is_empty()
    }

    /// Returns the time when [`tick`](Self::tick) must be called next.
    pub fn next_tick(&self) -> Option<Duration> {
        self.windows.values().map(|window| window.due).min()
    }

    /// Ends the windows of the faults that another sender's recovery ends, which was accepted
    /// at `accepted`. Returns true if there were any.
    ///
    /// The counts so far are stored, but open no fault: they belong to the fault that was
    /// closed.
    pub fn recovered_elsewhere(
        &mut self,
        healthy: &HealthEvent,
        accepted: Timestamp,
        out: &mut Vec<HealthEvent>,
    ) -> bool {
        let mut ended = Vec::new();
        self.windows.retain(|_, window| {
            if window.over || !window.healed_by(healthy) {
                return true;
            }
            window.over = window
                .repeats
                .as_ref()
                .is_some_and(|repeats| repeats.last_came() <= accepted);
            ended.push(window.counted());
            false
        });
        for event in ended.iter().flatten() {
            self.end_recoveries_of(event, out);
            out.push(event.clone());
        }
        !ended.is_empty()
    }

    /// Marks the windows whose fault a recovery ends. Returns true if a reported fault is among
    /// them, whose count is then appended to `out`.
    fn heal(&mut self, healthy: &HealthEvent, out: &mut Vec<HealthEvent>) -> bool {
        let mut ends_fault = false;
        for window in self.windows.values_mut() {
            if window.over || !window.healed_by(healthy) {
                continue;
            }
            if !window.held {
                ends_fault = true;
                out.extend(window.counted());
            }
            window.over = true;
        }
        ends_fault
    }

    /// Ends the windows of recoveries that would end the fault reported now, and sends their
    /// counts before the report, so that the next recovery passes at once.
    fn end_recoveries_of(&mut self, event: &HealthEvent, out: &mut Vec<HealthEvent>) {
        if event.is_healthy {
            return;
        }
        self.windows.retain(|key, window| {
            let ends = key.healthy && ends(&window.opened_by, event);
            if ends {
                out.extend(window.counted());
            }
            !ends
        });
    }

    /// Ends all windows, and appends their counts to `out`.
    pub fn end(&mut self, out: &mut Vec<HealthEvent>) {
        let windows = std::mem::take(&mut self.windows).into_values();
        out.extend(windows.filter_map(|mut window| window.counted()));
    }

    fn end_oldest(&mut self, out: &mut Vec<HealthEvent>) {
        let oldest = self
            .windows
            .iter()
            .min_by_key(|(_, window)| window.due)
            .map(|(key, _)| key.clone());
        let window = oldest.and_then(|key| self.windows.remove(&key));
        if let Some(event) = window.and_then(|mut window| window.counted()) {
            self.end_recoveries_of(&event, out);
            out.push(event);
        }
    }
}

impl Default for Fold {
    fn default() -> Self {
        Self {
            window: WINDOW,
            windows: BTreeMap::new(),
        }
    }
}

/// Serializes the windows without their end by this process's clock: after a restart they end
/// with the first [`Fold::tick`], or with the next report of their fault.
impl Serialize for Fold {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.windows.values())
    }
}

impl<'de> Deserialize<'de> for Fold {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let windows = Vec::<Window>::deserialize(from)?;
        Ok(Self {
            window: WINDOW,
            windows: windows
                .into_iter()
                .map(|window| (Key::of(&window.opened_by), window))
                .collect(),
        })
    }
}

// === impl Key ===

impl Key {
    fn of(event: &HealthEvent) -> Self {
        let mut codes = event.error_code.clone();
        codes.sort();
        let mut subjects: Vec<String> = Subject::of_entities(&event.entities_impacted)
            .iter()
            .map(ToString::to_string)
            .collect();
        subjects.sort();
        Self {
            healthy: event.is_healthy,
            names: [
                event.node_name.clone(),
                event.agent.clone(),
                event.component_class.clone(),
                event.check_name.clone(),
            ],
            codes,
            subjects,
            action: (
                event.recommended_action,
                event.custom_recommended_action.clone(),
            ),
            fatal: event.is_fatal,
            strategy: event.processing_strategy,
            earlier_in_boot: event.metadata.contains_key(keys::META_EARLIER_IN_BOOT),
            job: event.metadata.get(keys::META_JOB).cloned(),
        }
    }
}

// === impl Window ===

impl Window {
    fn new(event: HealthEvent, at: Timestamp, now: Duration, length: Duration) -> Self {
        let mut window = Self {
            opened_by: event,
            until: at,
            due: now,
            repeats: None,
            over: false,
            returns: 0,
            held: false,
        };
        window.reopen(at, now, length);
        window
    }

    /// Starts the next window, and returns the count of the last one.
    fn end(&mut self, at: Timestamp, now: Duration, length: Duration) -> Option<HealthEvent> {
        let counted = self.counted();
        (self.returns, self.held) = (0, false);
        self.reopen(at, now, length);
        counted
    }

    /// Returns the count so far as an event. Only the count of an open fault can open one;
    /// others are only stored.
    fn counted(&mut self) -> Option<HealthEvent> {
        let mut event = self.repeats.take()?.into_event();
        if event.is_healthy || self.over {
            event.processing_strategy = ProcessingStrategy::StoreOnly as i32;
        }
        Some(event)
    }

    fn count(&mut self, event: HealthEvent, at: Timestamp) {
        match &mut self.repeats {
            Some(repeats) => {
                repeats.count = repeats.count.saturating_add(1);
                repeats.first = repeats.first.min(at);
                repeats.last = repeats.last.max(at);
                if let Some(seen) = accepted(&event)
                    && accepted(&repeats.event).is_none_or(|before| before < seen)
                {
                    mark_accepted(&mut repeats.event, seen);
                }
            }
            None => {
                self.repeats = Some(Repeats {
                    event,
                    count: 1,
                    first: at,
                    last: at,
                });
            }
        }
    }

    fn reopen(&mut self, at: Timestamp, now: Duration, length: Duration) {
        let signed = SignedDuration::try_from(length).unwrap_or(SignedDuration::MAX);
        self.until = at.checked_add(signed).unwrap_or(Timestamp::MAX);
        self.due = now.saturating_add(length);
    }

    fn healed_by(&self, healthy: &HealthEvent) -> bool {
        !self.opened_by.is_healthy && ends(healthy, &self.opened_by)
    }
}

/// Returns true if a recovery ends something that an event reports.
fn ends(healthy: &HealthEvent, event: &HealthEvent) -> bool {
    let subjects = Subject::of_entities(&event.entities_impacted);
    let no_code = event.error_code.is_empty().then_some("");
    let mut codes = event.error_code.iter().map(String::as_str).chain(no_code);
    let (agent, check) = (&event.agent, &event.check_name);
    event.node_name == healthy.node_name
        && codes.any(|code| {
            let mut subjects = subjects.iter();
            subjects.any(|subject| heals(healthy, agent, check, code, subject))
        })
}

// === impl Repeats ===

impl Repeats {
    /// Returns the time of the last repeat, by the same clock as the acceptance of recoveries,
    /// which may differ from the log's.
    fn last_came(&self) -> Timestamp {
        accepted(&self.event).unwrap_or(self.last)
    }

    fn into_event(self) -> HealthEvent {
        let mut event = self.event;
        event.generated_timestamp = Some(json::proto_timestamp(self.last));
        for (key, value) in [
            (keys::META_COUNT, self.count.to_string()),
            (keys::META_FIRST_SEEN, self.first.to_string()),
            (keys::META_LAST_SEEN, self.last.to_string()),
        ] {
            event.metadata.insert(key.to_owned(), value);
        }
        event
    }
}

// === impl Sightings ===

impl Sightings {
    /// Returns the count and the times in an event that was accepted at `accepted`. Without all
    /// three of count, first and last, the count is 1, at the event's own time.
    pub fn of(event: &HealthEvent, accepted: Timestamp) -> Self {
        let given = || {
            let get = |key| event.metadata.get(key);
            Some(Self {
                count: get(keys::META_COUNT)?
                    .parse()
                    .ok()
                    .filter(|count| *count > 0)?,
                first: get(keys::META_FIRST_SEEN)?.parse().ok()?,
                last: get(keys::META_LAST_SEEN)?.parse().ok()?,
            })
        };
        given().unwrap_or_else(|| {
            let at = event
                .generated_timestamp
                .and_then(json::timestamp)
                .unwrap_or(accepted);
            Self {
                count: 1,
                first: at,
                last: at,
            }
        })
    }

    /// Limits the times to `at`, whatever the sender claims.
    #[must_use]
    pub fn by(self, at: Timestamp) -> Self {
        Self {
            first: self.first.min(at),
            last: self.last.min(at),
            ..self
        }
    }
}

#[cfg(test)]
mod tests;
