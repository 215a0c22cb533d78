//! The times for which delivery waits.

use std::time::Duration;

use runtime::backoff::Backoff;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The pauses of the product.
pub(super) const PAUSES: Pauses = Pauses {
    attempts: (Duration::from_millis(100), Duration::from_secs(10)),
    alone: Duration::from_secs(1),
    ask: Duration::from_secs(10),
    stays: (Duration::from_secs(15), Duration::from_secs(10 * 60)),
};

/// The times for which delivery waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pauses {
    /// The first and the longest between attempts that fail. The longest also spreads the agents
    /// of a cluster when its controller comes back.
    pub(super) attempts: (Duration, Duration),
    /// The longest between events that are sent one by one: a good one is near, or the receiver
    /// fails for all, which costs it one small request in this time. Also between two suspects,
    /// and after the outbox could not be read.
    pub(super) alone: Duration,
    /// Time between two questions who is there, while nothing is sent and something is kept: as
    /// much later than a leader its successor acts on what was brought to the one before.
    pub(super) ask: Duration,
    /// The first and the longest between two changes of the store; doubles while changes go on,
    /// so that what waits comes through also where two controllers answer in turn. The first is
    /// as long as a Lease: a leader that was killed is followed no sooner.
    pub(super) stays: (Duration, Duration),
}

/// The time for which the store is kept to that has what is delivered. Without chance, unlike
/// a [`Backoff`]: it has to be longer than a request takes.
pub(super) struct Stay {
    first: Duration,
    longest: Duration,
    length: Duration,
    until: Instant,
}

/// Waits, but no longer than until `cancel`.
pub(super) async fn pause(duration: Duration, cancel: &CancellationToken) {
    tokio::select! {
        () = cancel.cancelled() => {}
        () = tokio::time::sleep(duration) => {}
    }
}

// === impl Pauses ===

impl Pauses {
    /// Returns the pauses between attempts that fail.
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

    /// Returns whether the store has been kept to for long enough to turn to another.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Begins to keep to another store.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        // One that was kept to for twice as long as it had to be is no change in turn.
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
