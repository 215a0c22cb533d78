//! Growth of a GPU's counters over time.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Span of time for growth, the same as DCGM's.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Most readings of one counter that are kept: one a second for twice the window. If a GPU is
/// polled more often, growth covers less time.
const MAX_READINGS: usize = 120;

/// A counter of a GPU; for a link with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Counter {
    PcieReplays,
    ThermalViolation,
    NvlinkReplays(u32),
    NvlinkRecoveries(u32),
    NvlinkCrcErrors(u32),
    NvlinkEffectiveErrors(u32),
}

/// Growth of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    /// Difference between the two values.
    pub(super) by: u64,
    /// Time between the two readings.
    pub(super) within: Duration,
}

/// Readings of a GPU's counters in the last minute.
#[derive(Clone, Debug, Default)]
pub(super) struct Trails {
    readings: BTreeMap<Counter, VecDeque<(Duration, u64)>>,
}

// === impl Growth ===

impl Growth {
    /// Returns true if the growth covers a whole [`WINDOW`], so that zero means no growth.
    pub(super) fn is_whole(self) -> bool {
        self.within >= WINDOW
    }
}

// === impl Trails ===

impl Trails {
    /// Records a reading, and returns the growth since a reading about a [`WINDOW`] earlier.
    /// `None` if there is no earlier reading. A value below the last one means that the counter
    /// was reset.
    pub(super) fn record(&mut self, counter: Counter, value: u64, now: Duration) -> Option<Growth> {
        let readings = self.readings.entry(counter).or_default();
        if readings.back().is_some_and(|(_, last)| value < *last) {
            readings.clear();
        }
        readings.push_back((now, value));
        let is_old = |at: &(Duration, u64)| now.saturating_sub(at.0) >= WINDOW;
        // Keep the newest of the readings that are a window old, unless polls stopped for so
        // long.
        while readings.get(1).is_some_and(is_old)
            || readings.len() > MAX_READINGS
            || readings
                .front()
                .is_some_and(|(at, _)| now.saturating_sub(*at) > 2 * WINDOW)
        {
            readings.pop_front();
        }
        let (since, before) = readings.front().filter(|_| readings.len() > 1)?;
        Some(Growth {
            by: value.saturating_sub(*before),
            within: now.saturating_sub(*since),
        })
    }
}
