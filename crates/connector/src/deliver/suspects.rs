//! Events that the receiver has answered with a fault of its own when each was sent alone:
//! who is at fault, the event or the receiver?
//!
//! The event, where it fails again and again while others are taken: it would hold up
//! all behind it for ever. The receiver, where nothing is taken: then no event is to
//! suffer for it, however long that takes. So an event is given up only after
//! [`FAILURES`] failures, of which one is older and one is younger than the taking of
//! another event. Until then it stays in the outbox, and what is behind it goes on.

use std::collections::BTreeMap;
use std::ops::Bound;

/// Failures alone after which an event may be given up. They are a second or more apart,
/// so a receiver that stumbles for a moment costs nothing.
pub(super) const FAILURES: u32 = 5;

/// The suspects, by position. There are no more than the outbox has events.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    known: BTreeMap<u64, Suspect>,
    /// Number of times that the receiver has taken events.
    taken: u64,
    /// Position of the one that was tried last.
    tried: u64,
}

/// An event that has failed alone.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    failures: u32,
    /// Value of `taken` at its first failure.
    since: u64,
}

// === impl Suspects ===

impl Suspects {
    /// Notes that the receiver has taken an event.
    pub(super) fn taken(&mut self) {
        self.taken += 1;
    }

    /// Notes that the event at `position` has failed alone, or could not be put aside. Returns
    /// whether it is at fault.
    pub(super) fn accuse(&mut self, position: u64) -> bool {
        let since = self.taken;
        let suspect = self
            .known
            .entry(position)
            .or_insert(Suspect { failures: 0, since });
        suspect.failures = suspect.failures.saturating_add(1);
        suspect.failures >= FAILURES && self.taken > suspect.since
    }

    /// Forgets the event at `position`, if it is a suspect: it was taken, or put aside.
    pub(super) fn clear(&mut self, position: u64) {
        self.known.remove(&position);
    }

    /// Returns the position of the oldest suspect.
    pub(super) fn first(&self) -> Option<u64> {
        self.known.keys().next().copied()
    }

    /// Returns how many suspects there are.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns whether another event was taken since the first failure of the one at `position`:
    /// then further failures tell something. `None`: it is no suspect.
    pub(super) fn others_taken_since(&self, position: u64) -> Option<bool> {
        let suspect = self.known.get(&position)?;
        Some(self.taken > suspect.since)
    }

    /// Returns the position of the suspect that is tried next: each in its order, then the first
    /// once more.
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
        // However often: nothing else was taken.
        for _ in 0..100 {
            assert!(!suspects.accuse(7));
        }
        assert_eq!(suspects.others_taken_since(7), Some(false));
        // The next failure is younger than what was taken.
        suspects.taken();
        assert_eq!(suspects.others_taken_since(7), Some(true));
        assert!(suspects.accuse(7));
        // What was taken before says nothing of a receiver that broke then.
        for _ in 0..100 {
            assert!(!suspects.accuse(8));
        }
        // A few failures are not enough, whatever is taken.
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
