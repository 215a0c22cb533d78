//! Times that people or other programs have written and that lie in the future.
//!
//! Such a time would dismiss every fault, or keep a limit used up, until it comes. So it
//! counts as the time at which it was first seen. That is kept by its value: read again, it
//! counts as the same time, and dismisses nothing that was reported since.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// Most by which a time of another machine's clock may lie ahead of ours to be taken as it
/// is: the clocks of a cluster's machines differ by less, and a minute switches nothing off.
pub const CLOCKS_DIFFER: SignedDuration = SignedDuration::from_secs(60);

/// Times of the future that were seen, by the name of the annotation that says them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FutureTimes(BTreeMap<String, FutureTime>);

/// A time of the future.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FutureTime {
    /// The time as it is written.
    says: Timestamp,
    /// The time when it was first seen, as which it counts.
    seen: Timestamp,
}

/// Returns whether `time` lies further in the future than clocks differ.
pub fn is_future(time: Timestamp, now: Timestamp) -> bool {
    time.duration_since(now) > CLOCKS_DIFFER
}

/// Returns what is said of a time of the future.
pub fn text(key: &str, says: Timestamp) -> String {
    format!("the annotation {key} says {says:.0}, which lies in the future")
}

// === impl FutureTimes ===

impl FutureTimes {
    /// Returns the time as which the time `says` of the annotation `key` counts, and remembers
    /// it where it lies in the future.
    pub fn take_in(
        &mut self,
        key: &str,
        says: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let known = self.0.get(key).filter(|known| Some(known.says) == says);
        if let Some(known) = known {
            return Some(known.seen);
        }
        self.0.remove(key);
        let says = says?;
        if !is_future(says, now) {
            return Some(says);
        }
        self.0
            .insert(key.to_owned(), FutureTime { says, seen: now });
        Some(now)
    }

    /// Remembers that a time which we write ourselves counts as it is: it is that of a fault that
    /// was accepted while our own clock was ahead.
    pub fn trust(&mut self, key: &str, says: Timestamp, now: Timestamp) {
        if is_future(says, now) {
            let own = FutureTime { says, seen: says };
            self.0.insert(key.to_owned(), own);
        }
    }

    /// Returns what the time `says` counts as, as far as that is remembered.
    pub fn counted(&self, key: &str, says: Option<Timestamp>) -> Option<Timestamp> {
        let known = self.0.get(key).filter(|known| Some(known.says) == says);
        known.map(|known| known.seen).or(says)
    }

    /// Returns whether none is remembered.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns a sentence for each time that is remembered.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let others = self.0.iter().filter(|(_, time)| time.says != time.seen);
        others.map(|(key, FutureTime { says, seen })| {
            let text = text(key, *says);
            format!("{text}: it counts as {seen:.0}, when it was first seen")
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
        let mut taken = |says, now| times.take_in("k", Some(at(says)), at(now));
        assert_eq!(taken(90, 100), Some(at(90)));
        assert_eq!(taken(160, 100), Some(at(160)), "within what clocks differ");
        assert_eq!(taken(1_000, 100), Some(at(100)));
        // Read again, also once its time has come.
        for now in [101, 939, 941, 5_000] {
            assert_eq!(taken(1_000, now), Some(at(100)), "{now}");
        }
        // Another value is another time.
        assert_eq!(taken(9_000, 5_000), Some(at(5_000)));
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
