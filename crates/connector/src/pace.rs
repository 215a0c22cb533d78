//! How fast users may report, so that what monitors report does not wait behind it: events are
//! taken in their order.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Events that all users together may report at once: one request of the largest.
pub(crate) const BURST: u32 = 10_000;
/// Events a second that they may go on with. A job's checks report a few.
pub(crate) const A_SECOND: u32 = 500;
/// The time that one event takes of that.
const EACH: Duration = Duration::from_millis(1_000 / A_SECOND as u64);

/// The room that is left for reports of users.
#[derive(Debug)]
pub(crate) struct UsersPace {
    /// The time until which their reports last, at their pace: at most a burst ahead.
    until: Mutex<Instant>,
}

// === impl UsersPace ===

impl UsersPace {
    pub(crate) fn new() -> Self {
        Self {
            until: Mutex::new(Instant::now()),
        }
    }

    /// Takes leave for so many events. Returns whether there was.
    pub(crate) fn take(&self, events: usize) -> bool {
        let Ok(events) = u32::try_from(events) else {
            return false;
        };
        let now = Instant::now();
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let then = now.max(*until) + EACH * events;
        let is_leave = then.duration_since(now) <= EACH * BURST;
        if is_leave {
            *until = then;
        }
        is_leave
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_then_so_many_a_second() {
        let pace = UsersPace::new();
        let burst = model::event::MAX_EVENTS;
        assert!(pace.take(burst) && !pace.take(1));
        tokio::time::advance(Duration::from_millis(100)).await;
        assert!(!pace.take(51) && pace.take(50) && !pace.take(1));
        tokio::time::advance(Duration::from_hours(1)).await;
        assert!(!pace.take(burst + 1) && pace.take(burst));
    }
}
