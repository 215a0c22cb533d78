//! Whether we lead: asked before every write, and cut off at once when we do not.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::election::{RENEW_DEADLINE, WRITES_END};

/// The right to write in the cluster while we hold the Lease. Cheap to clone; all clones end
/// together. Once over it never comes back.
#[derive(Clone, Debug)]
pub struct Tenure {
    /// When the last renewal was sent that is known to have been made.
    renewed_at: Arc<Mutex<Instant>>,
    over: CancellationToken,
}

/// A write was asked for, and we do not lead (any more).
#[derive(Debug, thiserror::Error)]
#[error("this process does not lead any more")]
pub(crate) struct NotLeading;

// === impl Tenure ===

impl Tenure {
    pub(crate) fn begin(renewed_at: Instant) -> Self {
        Self {
            renewed_at: Arc::new(Mutex::new(renewed_at)),
            over: CancellationToken::new(),
        }
    }

    pub(super) fn renewed(&self, at: Instant) {
        let mut renewed_at = self
            .renewed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *renewed_at = at.max(*renewed_at);
    }

    /// Ends it: nothing more is begun, and what is under way is cut off.
    pub fn end(&self) {
        self.over.cancel();
    }

    /// How long a write may take that begins now: it has to end before anybody else can
    /// begin one.
    pub(crate) fn leave(&self) -> Result<Duration, NotLeading> {
        let renewed_at = *self
            .renewed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if self.over.is_cancelled() || now >= renewed_at + RENEW_DEADLINE {
            return Err(NotLeading);
        }
        Ok((renewed_at + WRITES_END).saturating_duration_since(now))
    }

    /// Waits until it has ended: the lead is lost, or given back.
    pub async fn over(&self) {
        self.over.cancelled().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writes_end_before_the_lease_does() {
        let begin = Instant::now();
        let tenure = Tenure::begin(begin);
        let advance = |to: u64| {
            let by = begin + Duration::from_millis(to) - Instant::now();
            tokio::time::advance(by)
        };
        assert_eq!(tenure.leave().unwrap(), Duration::from_secs(14));
        advance(9_999).await;
        assert_eq!(tenure.leave().unwrap(), Duration::from_millis(4_001));
        advance(10_000).await;
        assert!(tenure.leave().is_err());
        // A renewal whose answer took long counts from when it was sent.
        tenure.renewed(begin + Duration::from_secs(2));
        assert_eq!(tenure.leave().unwrap(), Duration::from_secs(6));
        // An older one that is answered later changes nothing.
        tenure.renewed(begin + Duration::from_secs(1));
        assert_eq!(tenure.leave().unwrap(), Duration::from_secs(6));
        let other = tenure.clone();
        other.end();
        assert!(tenure.leave().is_err());
        tenure.renewed(Instant::now());
        assert!(tenure.leave().is_err(), "it does not come back");
        tenure.over().await;
    }
}
