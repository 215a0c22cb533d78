//! Pauses of the delivery of events.

use std::time::Duration;

use runtime::backoff::Backoff;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Pauses used in production.
pub(super) const PAUSES: Pauses = Pauses {
    attempts: (Duration::from_millis(100), Duration::from_secs(10)),
    alone: Duration::from_secs(1),
    ask: Duration::from_secs(10),
    stays: (Duration::from_secs(15), Duration::from_secs(10 * 60)),
};

/// Pauses of the delivery of events.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pauses {
    /// Shortest and longest pause between failed attempts. The longest also spreads the agents
    /// of a cluster over time when its controller comes back.
    pub(super) attempts: (Duration, Duration),
    /// Longest pause between events that are sent one by one: either a good event is near, or
    /// the receiver fails for all, which costs it one small request per pause. Also the pause
    /// between two suspects, and after a failed read of the outbox.
    pub(super) alone: Duration,
    /// Interval between empty requests that ask which store answers, while none is to be sent
    /// and events are kept. A new leader acts on events sent to its predecessor with at most
    /// this delay.
    pub(super) ask: Duration,
    /// Shortest and longest time between two changes of the store. Doubles while changes
    /// continue, so that events get delivered even if two controllers answer alternately. The
    /// shortest is the duration of a Lease: a killed leader is not replaced sooner.
    pub(super) stays: (Duration, Duration),
}

/// Time to stay with the store that has the delivered events. Not random, unlike a [`Backoff`]:
/// it must be longer than a request takes.
pub(super) struct Stay {
    first: Duration,
    longest: Duration,
    length: Duration,
    until: Instant,
}

/// Waits for `duration`, or until `cancel`.
pub(super) async fn pause(duration: Duration, cancel: &CancellationToken) {
    tokio::select! {
        () = cancel.cancelled() => {}
        () = tokio::time::sleep(duration) => {}
    }
}

// === impl Pauses ===

impl Pauses {
    /// Returns the pauses between failed attempts.
    pub(super) fn backoff(&self) -> Backoff {
        Backoff::new(self.attempts.0, self.attempts.1)
    }
}

// === impl Stay ===

impl Stay {
    pub(super) fn new(pauses: &Pauses) -> Self {
        let (first, longest) = pauses.stays;
        Self {
            first,
            longest,
            length: Duration::ZERO,
            until: Instant::now(),
        }
    }

    /// Returns true if delivery may switch to another store.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Starts the stay with another store.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        // After a stay of twice the required time, the next change does not count as
        // alternating.
        let in_turn = now < self.until + self.length;
        self.length = if in_turn {
            (2 * self.length).min(self.longest)
        } else {
            self.first
        };
        self.until = now + self.length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stores_that_change_soon_are_kept_to_for_longer_each_time() {
        let mut stay = Stay::new(&PAUSES);
        for (after, expected) in [
            (0, 15),
            (15, 30),
            (30, 60),
            (119, 120),
            (120, 240),
            (240, 480),
            (480, 600),
            (600, 600),
            (1_199, 600),
            (1_200, 15),
            (30, 15),
        ] {
            tokio::time::advance(Duration::from_secs(after)).await;
            assert!(stay.is_over());
            stay.begin();
            assert_eq!(stay.length.as_secs(), expected, "after {after} s");
        }
        assert!(!stay.is_over());
    }
}
