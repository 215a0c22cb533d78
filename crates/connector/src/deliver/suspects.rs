//! Events that made the receiver fail when each was sent alone, and the decision whether the
//! event or the receiver is at fault.
//!
//! The event is, if it fails repeatedly while others are accepted: it would block all behind it
//! forever. The receiver is, if it accepts nothing: then no event may be discarded, however
//! long that takes. So an event is given up only after [`FAILURES`] failures, at least one
//! before and one after the receiver accepted another event. Until then it stays in the outbox,
//! and the events behind it are sent.

use std::collections::BTreeMap;
use std::ops::Bound;

/// Failures alone after which an event may be given up. They are at least a second apart, so a
/// brief failure of the receiver discards nothing.
pub(super) const FAILURES: u32 = 5;

/// Suspects, by position. At most as many as the outbox has events.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    known: BTreeMap<u64, Suspect>,
    /// Number of times that the receiver has accepted events.
    taken: u64,
    /// Position of the last suspect that was retried.
    tried: u64,
}

/// Event that has failed alone.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    failures: u32,
    /// Value of `taken` at the event's first failure.
    since: u64,
}

// === impl Suspects ===

impl Suspects {
    /// Records that the receiver has accepted an event.
    pub(super) fn taken(&mut self) {
        self.taken += 1;
    }

    /// Records that the event at `position` has failed alone, or could not be put aside.
    /// Returns true if the event is at fault.
    pub(super) fn accuse(&mut self, position: u64) -> bool {
        let since = self.taken;
        let suspect = self
            .known
            .entry(position)
            .or_insert(Suspect { failures: 0, since });
        suspect.failures = suspect.failures.saturating_add(1);
        suspect.failures >= FAILURES && self.taken > suspect.since
    }

    /// Forgets the event at `position` if it is a suspect: it was accepted, or put aside.
    pub(super) fn clear(&mut self, position: u64) {
        self.known.remove(&position);
    }

    /// Returns the position of the oldest suspect.
    pub(super) fn first(&self) -> Option<u64> {
        self.known.keys().next().copied()
    }

    /// Returns the number of suspects.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns true if another event was accepted since the first failure of the one at
    /// `position`, so that further failures are conclusive. Returns `None` if that event is no
    /// suspect.
    pub(super) fn others_taken_since(&self, position: u64) -> Option<bool> {
        let suspect = self.known.get(&position)?;
        Some(self.taken > suspect.since)
    }

    /// Returns the position of the suspect to retry next: in order, then from the first again.
    pub(super) fn next(&mut self) -> Option<u64> {
        let behind = (Bound::Excluded(self.tried), Bound::Unbounded);
        let next = self.known.range(behind).next().map(|(at, _)| *at);
        let next = next.or_else(|| self.first())?;
        self.tried = next;
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_at_fault_only_where_others_are_taken_between_its_failures() {
        let mut suspects = Suspects::default();
        // Any number of failures: nothing else was accepted.
        for _ in 0..100 {
            assert!(!suspects.accuse(7));
        }
        assert_eq!(suspects.others_taken_since(7), Some(false));
        // The next failure comes after another event was accepted.
        suspects.taken();
        assert_eq!(suspects.others_taken_since(7), Some(true));
        assert!(suspects.accuse(7));
        // Events accepted before do not count: the receiver may have broken since.
        for _ in 0..100 {
            assert!(!suspects.accuse(8));
        }
        // A few failures are not enough, even if others are accepted.
        for _ in 1..FAILURES {
            assert!(!suspects.accuse(9));
            suspects.taken();
        }
        assert!(suspects.accuse(9));
    }

    #[test]
    fn all_get_their_turn() {
        let mut suspects = Suspects::default();
        assert_eq!(suspects.next(), None);
        for position in [5, 3, 9] {
            suspects.accuse(position);
        }
        let turns: Vec<_> = (0..4).map(|_| suspects.next().unwrap()).collect();
        assert_eq!(turns, [3, 5, 9, 3]);
        suspects.clear(5);
        assert_eq!((suspects.next(), suspects.first()), (Some(9), Some(3)));
        assert_eq!(suspects.len(), 2);
    }
}
