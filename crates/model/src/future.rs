//! Future times in annotations written by people or other programs.
//!
//! A future time would dismiss all faults, or use up a limit, until it comes. It therefore
//! counts as the time when it was first observed. The mapping is stored by value: read
//! again, the same time still counts as the same moment, and dismisses no report made since.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// Most that another machine's clock may run ahead before a time counts as in the future. The
/// clocks of a cluster differ by less, and a minute disables nothing.
pub const CLOCKS_DIFFER: SignedDuration = SignedDuration::from_secs(60);

/// Observed future times, by the key of their annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FutureTimes(BTreeMap<String, FutureTime>);

/// A time in the future.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FutureTime {
    /// Time in the annotation.
    #[serde(rename = "says")]
    written: Timestamp,
    /// Time of the first observation, used in place of the written one.
    #[serde(rename = "seen")]
    counts_as: Timestamp,
}

/// Returns whether `time` lies further in the future than clocks may differ.
pub fn is_future(time: Timestamp, now: Timestamp) -> bool {
    time.duration_since(now) > CLOCKS_DIFFER
}

/// Returns the message about a future time.
pub fn text(key: &str, written: Timestamp) -> String {
    format!("the annotation {key} has the time {written:.0}, which lies in the future")
}

// === impl FutureTimes ===

impl FutureTimes {
    /// Returns the time to use for the time `written` in the annotation `key`. A future time is
    /// remembered.
    pub fn take_in(
        &mut self,
        key: &str,
        written: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let known = self
            .0
            .get(key)
            .filter(|known| Some(known.written) == written);
        if let Some(known) = known {
            return Some(known.counts_as);
        }
        self.0.remove(key);
        let written = written?;
        if !is_future(written, now) {
            return Some(written);
        }
        self.0.insert(
            key.to_owned(),
            FutureTime {
                written,
                counts_as: now,
            },
        );
        Some(now)
    }

    /// Remembers a time that gpuwarden wrote itself, so that it is used unchanged. Such a time
    /// may lie in the future if it is that of a fault accepted while our own clock ran ahead.
    pub fn trust(&mut self, key: &str, written: Timestamp, now: Timestamp) {
        if is_future(written, now) {
            let own = FutureTime {
                written,
                counts_as: written,
            };
            self.0.insert(key.to_owned(), own);
        }
    }

    /// Returns the time to use for `written`, without remembering it.
    pub fn counted(&self, key: &str, written: Option<Timestamp>) -> Option<Timestamp> {
        let known = self
            .0
            .get(key)
            .filter(|known| Some(known.written) == written);
        known.map(|known| known.counts_as).or(written)
    }

    /// Returns whether no time is remembered.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns a sentence for each remembered time.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let others = self
            .0
            .iter()
            .filter(|(_, time)| time.written != time.counts_as);
        others.map(|(key, FutureTime { written, counts_as })| {
            let text = text(key, *written);
            format!("{text}: it counts as {counts_as:.0}, when it was first seen")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_time_of_the_future_counts_as_when_it_was_first_seen_and_stays_so() {
        let mut times = FutureTimes::default();
        let mut resolved = |written, now| times.take_in("k", Some(at(written)), at(now));
        assert_eq!(resolved(90, 100), Some(at(90)));
        assert_eq!(
            resolved(160, 100),
            Some(at(160)),
            "within what clocks differ"
        );
        assert_eq!(resolved(1_000, 100), Some(at(100)));
        // The result stays the same when the time is read again, even after it has passed.
        for now in [101, 939, 941, 5_000] {
            assert_eq!(resolved(1_000, now), Some(at(100)), "{now}");
        }
        // Another value is another time.
        assert_eq!(resolved(9_000, 5_000), Some(at(5_000)));
        let text = serde_json::to_string(&times).unwrap();
        let mut again: FutureTimes = serde_json::from_str(&text).unwrap();
        assert_eq!(
            again.take_in("k", Some(at(9_000)), at(6_000)),
            Some(at(5_000))
        );
        assert_eq!(again.counted("k", Some(at(9_000))), Some(at(5_000)));
        assert!(
            again
                .notes()
                .all(|note| note.contains("counts as 1970-01-01T01:23:20Z"))
        );
        assert_eq!(again.take_in("k", None, at(7_000)), None);
        assert!(again.is_empty());
    }
}
