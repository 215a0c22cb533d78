//! How fast the counters of a GPU grow.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Time over which growth is looked at, as DCGM does.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Most readings of one counter that are kept: one a second of twice the window. A GPU that is
/// looked at more often is judged over less time.
const MAX_READINGS: usize = 120;

/// A counter of a GPU; those of a link with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Counter {
    PcieReplays,
    ThermalViolation,
    NvlinkReplays(u32),
    NvlinkRecoveries(u32),
    NvlinkCrcErrors(u32),
    NvlinkEffectiveErrors(u32),
}

/// The growth of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    /// The amount.
    pub(super) by: u64,
    /// The time in which it grew.
    pub(super) within: Duration,
}

/// The readings of a GPU's counters of the last minute.
#[derive(Clone, Debug, Default)]
pub(super) struct Trails {
    readings: BTreeMap<Counter, VecDeque<(Duration, u64)>>,
}

// === impl Growth ===

impl Growth {
    /// Returns whether it is of a whole [`WINDOW`], so that no growth says something.
    pub(super) fn is_whole(self) -> bool {
        self.within >= WINDOW
    }
}

// === impl Trails ===

impl Trails {
    /// Takes in a reading, and returns the growth since a reading of about a [`WINDOW`] before.
    /// `None`: there is none to compare it with. A counter that falls has begun anew.
    pub(super) fn note(&mut self, counter: Counter, value: u64, now: Duration) -> Option<Growth> {
        let readings = self.readings.entry(counter).or_default();
        if readings.back().is_some_and(|(_, last)| value < *last) {
            readings.clear();
        }
        readings.push_back((now, value));
        let is_old = |at: &(Duration, u64)| now.saturating_sub(at.0) >= WINDOW;
        // The newest of those that are a window old is enough, unless nobody looked for so long.
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
