//! Rate limit for reports of users, so that monitors' reports do not wait behind them: events
//! are stored in the order of their arrival.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Most events that all users together may report at once: one request of the largest size.
pub(crate) const BURST: u32 = 10_000;
/// Events per second that users may report continuously. A job's checks report a few.
pub(crate) const A_SECOND: u32 = 500;
/// Time that one event takes up at that rate.
const EACH: Duration = Duration::from_millis(1_000 / A_SECOND as u64);

/// Remaining allowance for reports of users.
#[derive(Debug)]
pub(crate) struct UsersPace {
    /// Time when past reports are paid off at the permitted rate; at most one burst ahead.
    until: Mutex<Instant>,
}

// === impl UsersPace ===

impl UsersPace {
    pub(crate) fn new() -> Self {
        Self {
            until: Mutex::new(Instant::now()),
        }
    }

    /// Uses the allowance for `events` reports. Returns false if it does not suffice.
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
