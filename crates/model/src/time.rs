//! Arithmetic with timestamps that saturates.

use jiff::{SignedDuration, Timestamp};

/// Returns `at + by`, or the maximum timestamp.
pub fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.checked_add(by).unwrap_or(Timestamp::MAX)
}
