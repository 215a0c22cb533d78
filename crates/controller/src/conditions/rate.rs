//! Token bucket that limits the rate of Events.

use jiff::{SignedDuration, Timestamp};

/// Token bucket that holds up to `capacity` tokens and regains one every `refill`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    capacity: i64,
    refill: SignedDuration,
    /// Time when the bucket was, or will be, full.
    full_at: Timestamp,
}

// === impl Bucket ===

impl Bucket {
    /// Creates a full bucket.
    pub(super) fn new(capacity: i64, refill: SignedDuration, now: Timestamp) -> Self {
        Self {
            capacity,
            refill,
            full_at: now,
        }
    }

    /// Takes a token. The error is the time of the next one.
    pub(super) fn take(&mut self, now: Timestamp) -> Result<(), Timestamp> {
        let full_at = self.full_at.max(now) + self.refill;
        let room = self.refill * i32::try_from(self.capacity).unwrap_or(i32::MAX);
        if full_at.duration_since(now) > room {
            return Err(full_at - room);
        }
        self.full_at = full_at;
        Ok(())
    }

    /// Puts a token back.
    pub(super) fn give_back(&mut self) {
        self.full_at -= self.refill;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_a_rate() {
        let second = SignedDuration::from_secs(1);
        let start = Timestamp::from_second(1_000).unwrap();
        let mut bucket = Bucket::new(3, second * 10, start);
        for _ in 0..3 {
            assert_eq!(bucket.take(start), Ok(()));
        }
        assert_eq!(bucket.take(start), Err(start + second * 10));
        assert_eq!(bucket.take(start + second * 9), Err(start + second * 10));
        assert_eq!(bucket.take(start + second * 10), Ok(()));
        assert_eq!(bucket.take(start + second * 11), Err(start + second * 20));
        bucket.give_back();
        assert_eq!(bucket.take(start + second * 11), Ok(()));
        let later = start + second * 10_000;
        let taken = (0..10).filter(|_| bucket.take(later).is_ok()).count();
        assert_eq!(taken, 3, "it holds no more than its capacity");
    }
}
