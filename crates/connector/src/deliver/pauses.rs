//! How long delivery waits, and for what.

use std::time::Duration;

use runtime::backoff::Backoff;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How often it is asked who is there, while nothing is sent and something is kept: as much
/// later than a leader its successor acts on what was brought to the one before.
const ASK_EVERY: Duration = Duration::from_secs(10);
/// Time between two changes of the store, at first: a leader that was killed is followed no
/// sooner, for so long lasts its Lease. Doubles up to the second where changes go on, so that
/// what waits comes through also where two controllers answer in turn.
const CHANGES: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(10 * 60));
/// The pauses.
pub(super) const PAUSES: Pauses = Pauses {
    first: Duration::from_millis(100),
    longest: Duration::from_secs(10),
    alone: Duration::from_secs(1),
    outbox: Duration::from_secs(1),
    ask: ASK_EVERY,
    changes: CHANGES,
};

/// How long is waited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pauses {
    /// Between attempts; doubles from attempt to attempt.
    pub(super) first: Duration,
    /// The longest of them. It also spreads the agents of a cluster when its controller
    /// comes back.
    pub(super) longest: Duration,
    /// The longest between events that are sent one by one: a good one is near, or the receiver
    /// fails for all, which costs it one small request in this time. And between two suspects.
    pub(super) alone: Duration,
    /// After the outbox could not be read.
    pub(super) outbox: Duration,
    /// Until it is asked who is there.
    pub(super) ask: Duration,
    /// Between two changes of the store, at least; and the longest.
    pub(super) changes: (Duration, Duration),
}

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
        Backoff::new(self.first, self.longest)
    }

    /// Returns how long a store that is turned to `now` is kept to; `turned` is when the one before
    /// was turned to, and how long it was to be kept to.
    pub(super) fn stay(&self, turned: Option<(Instant, Duration)>, now: Instant) -> Duration {
        let (first, longest) = self.changes;
        match turned {
            Some((at, stay)) if now < at + 2 * stay => (2 * stay).min(longest),
            _ => first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_that_change_soon_are_kept_to_for_longer_each_time() {
        let (mut now, mut turned) = (Instant::now(), None);
        let mut turn = |after: u64| {
            now += Duration::from_secs(after);
            let stay = PAUSES.stay(turned, now);
            turned = Some((now, stay));
            stay.as_secs()
        };
        assert_eq!(
            [0, 15, 30, 60, 120, 240, 480, 600].map(&mut turn),
            [15, 30, 60, 120, 240, 480, 600, 600]
        );
        // One that was kept to for twice as long as it had to be is no change in turn.
        assert_eq!([1_199, 1_200, 29, 60].map(&mut turn), [600, 15, 30, 15]);
    }
}
