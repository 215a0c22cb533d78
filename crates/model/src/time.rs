//! Arithmetic with times that cannot fail.

use jiff::{SignedDuration, Timestamp};

/// Returns `at` plus `by`, or the last time that there is.
pub fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.checked_add(by).unwrap_or(Timestamp::MAX)
}
