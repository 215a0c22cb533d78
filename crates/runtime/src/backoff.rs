//! Pauses between failing attempts: each twice as long as the one before, up to a maximum.
//!
//! Pauses are randomised, so that many clients that failed together do not retry together.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// Pauses between failed attempts.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    due: Duration,
    random: RandomState,
}

// === impl Backoff ===

impl Backoff {
    /// Creates pauses from `first` to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            due: first,
            random: RandomState::new(),
        }
    }

    /// Returns the next pause: at random between half of the due pause and all of it.
    pub fn pause(&mut self) -> Duration {
        let half = self.due / 2;
        self.due = (self.due * 2).min(self.longest);
        // The hasher's state is random, and each instant is hashed only once.
        let spread = self.random.hash_one(Instant::now()) % 1024;
        half + half * u32::try_from(spread).unwrap_or(0) / 1024
    }

    /// Starts again with the first pause, after an attempt that succeeded.
    pub fn reset(&mut self) {
        self.due = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_limit_are_spread_and_begin_anew() {
        let (first, longest) = (Duration::from_millis(100), Duration::from_secs(10));
        let mut backoff = Backoff::new(first, longest);
        let pauses: Vec<Duration> = (0..40).map(|_| backoff.pause()).collect();
        let mut due = first;
        for pause in &pauses {
            assert!((due / 2..=due).contains(pause), "{pauses:?}");
            due = (due * 2).min(longest);
        }
        let last = &pauses[20..];
        assert!(last.iter().any(|one| *one != last[0]), "{last:?}");
        backoff.reset();
        assert!(backoff.pause() <= first);
    }
}
