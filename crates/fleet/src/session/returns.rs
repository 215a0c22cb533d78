//! Recent returns of a node to service, and the wait before the next one.
//!
//! Alternating faults and recoveries, from a monitor that cannot decide or a malicious sender,
//! would take a node out and give it back many times a second. A node that is taken out at once
//! need not come back at once: the first return within an hour is immediate, and further ones
//! wait ever longer. During the wait a new fault keeps the node out, in the same session.

use jiff::{SignedDuration, Timestamp};

/// Time within which returns count.
pub const WITHIN: SignedDuration = SignedDuration::from_hours(1);
/// Wait before the second return; each further one doubles it.
pub const FIRST_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// Longest wait: a healthy node comes back, and an hour still has few returns.
pub const LONGEST_WAIT: SignedDuration = SignedDuration::from_mins(10);

/// Most returns remembered, the newest: given the waits, a node comes back less often within an
/// hour, and more returns would not lengthen the wait.
pub const MAX_RETURNS: usize = 16;

/// Returns how long a node waits after `returns` returns within the hour.
pub fn wait(returns: usize) -> SignedDuration {
    let Some(doublings) = returns.checked_sub(1) else {
        return SignedDuration::ZERO;
    };
    // Waits of 30 s, then 1, 2, 4, 8 and 10 minutes.
    let doublings = u32::try_from(doublings).unwrap_or(u32::MAX).min(5);
    (FIRST_WAIT * 2_i32.pow(doublings)).min(LONGEST_WAIT)
}

/// Adds further returns to the known ones, and drops those that no longer count at `now`. The
/// input is untrusted: anyone who may annotate the node may have written it.
pub fn record(
    known: &mut Vec<Timestamp>,
    further: impl IntoIterator<Item = Timestamp>,
    now: Timestamp,
) {
    known.extend(further.into_iter().map(|at| at.min(now)));
    known.retain(|at| now.duration_since(*at) < WITHIN);
    known.sort_unstable();
    known.dedup();
    known.drain(..known.len().saturating_sub(MAX_RETURNS));
}

/// Returns the text about a wait, for people.
pub fn text(returns: usize, back_at: Timestamp) -> String {
    let times = if returns == 1 {
        "once".to_owned()
    } else {
        format!("{returns} times")
    };
    format!("given back at {back_at:.0}, for it has come back {times} within the hour")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_return_is_at_once_and_the_longest_wait_is_ten_minutes() {
        let waits: Vec<i64> = (0..9).map(|returns| wait(returns).as_secs()).collect();
        assert_eq!(waits, [0, 30, 60, 120, 240, 480, 600, 600, 600]);
        assert_eq!(wait(usize::MAX), LONGEST_WAIT);
    }
}
