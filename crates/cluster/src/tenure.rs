//! Tenure of the leader: checked before every write, and cuts off writes when it ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Method, Request, Uri};
use kube::client::Body;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::{Layer, ServiceExt as _, service_fn};

use crate::counters::Counters;
use crate::layer::{Http, Limit, REQUEST_TIMEOUT};

/// Time after which a leader that cannot renew its Lease stops: five attempts.
pub(crate) const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// End of the writes in flight, after the last renewal. The rest of the Lease covers clocks that
/// run at different speeds: with 1 s of 15 s they may differ by 6 %.
pub(crate) const WRITES_END: Duration = Duration::from_secs(14);

/// The right to write in the cluster while this process holds the Lease. Cheap to clone; all
/// clones end together. A tenure that has ended never resumes.
#[derive(Clone, Debug)]
pub struct Tenure {
    /// Time when the last confirmed renewal was sent.
    renewed_at: Arc<Mutex<Instant>>,
    over: CancellationToken,
}

/// Error of a write without a tenure.
#[derive(Debug, thiserror::Error)]
#[error("this process is no longer the leader")]
pub(crate) struct NotLeading;

/// Layer that lets writes through while a [`Tenure`] lasts, and cuts off those in flight at its
/// end. Reads always pass.
pub(crate) struct TenureLayer {
    pub(crate) tenure: Tenure,
    pub(crate) counters: Arc<Counters>,
}

// === impl Tenure ===

impl Tenure {
    pub(crate) fn begin(renewed_at: Instant) -> Self {
        Self {
            renewed_at: Arc::new(Mutex::new(renewed_at)),
            over: CancellationToken::new(),
        }
    }

    pub(crate) fn note_renewal(&self, at: Instant) {
        let mut renewed_at = self
            .renewed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *renewed_at = at.max(*renewed_at);
    }

    /// Ends the tenure: no write begins, and those in flight are cut off.
    pub fn end(&self) {
        self.over.cancel();
    }

    /// Returns the longest time of a write that begins now: it has to end before another process
    /// can begin one.
    pub(crate) fn time_left(&self) -> Result<Duration, NotLeading> {
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

    /// Waits for the end of the tenure: the lead is lost, or the Lease is released.
    pub async fn over(&self) {
        self.over.cancelled().await;
    }
}

// === impl TenureLayer ===

impl Layer<Http> for TenureLayer {
    type Service = Http;

    fn layer(&self, below: Http) -> Http {
        let (tenure, counters) = (self.tenure.clone(), Arc::clone(&self.counters));
        Http::new(service_fn(move |mut request: Request<Body>| {
            let (below, tenure, counters) = (below.clone(), tenure.clone(), Arc::clone(&counters));
            async move {
                if request.method() == Method::GET {
                    return below.oneshot(request).await;
                }
                let limit = tenure.time_left().map_err(NotLeading::error)?;
                let limit = limit.min(REQUEST_TIMEOUT);
                *request.uri_mut() = with_timeout(request.uri(), limit)?;
                request.extensions_mut().insert(Limit(limit));
                tokio::select! {
                    () = tenure.over() => {
                        counters.failed.fetch_add(1, Ordering::Relaxed);
                        Err(NotLeading.error())
                    }
                    answer = below.oneshot(request) => answer,
                }
            }
        }))
    }
}

// === impl NotLeading ===

impl NotLeading {
    fn error(self) -> kube::Error {
        kube::Error::Service(self.into())
    }
}

/// Adds the time limit to the query, so that the API server gives up as well: it may still work
/// on a request whose caller is gone.
fn with_timeout(uri: &Uri, limit: Duration) -> Result<Uri, kube::Error> {
    let separator = match uri.query() {
        None => "?",
        Some("") => "",
        Some(_) => "&",
    };
    let seconds = limit.as_secs().max(1);
    let uri = format!("{uri}{separator}timeout={seconds}s");
    uri.parse()
        .map_err(|error: http::uri::InvalidUri| kube::Error::HttpError(error.into()))
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
        assert_eq!(tenure.time_left().unwrap(), Duration::from_secs(14));
        advance(9_999).await;
        assert_eq!(tenure.time_left().unwrap(), Duration::from_millis(4_001));
        advance(10_000).await;
        assert!(tenure.time_left().is_err());
        // A renewal counts from the time of its request, however late the answer.
        tenure.note_renewal(begin + Duration::from_secs(2));
        assert_eq!(tenure.time_left().unwrap(), Duration::from_secs(6));
        // The late answer to an older renewal changes nothing.
        tenure.note_renewal(begin + Duration::from_secs(1));
        assert_eq!(tenure.time_left().unwrap(), Duration::from_secs(6));
        let other = tenure.clone();
        other.end();
        assert!(tenure.time_left().is_err());
        tenure.note_renewal(Instant::now());
        assert!(tenure.time_left().is_err(), "it does not come back");
        tenure.over().await;
    }

    #[test]
    fn the_api_servers_deadline_is_part_of_the_query() {
        for (uri, millis, expected) in [
            ("/a", 10_000, "/a?timeout=10s"),
            ("/a", 4_900, "/a?timeout=4s"),
            ("/a?", 4_900, "/a?timeout=4s"),
            ("/a?b=c", 100, "/a?b=c&timeout=1s"),
        ] {
            let uri = with_timeout(&uri.parse().unwrap(), Duration::from_millis(millis));
            assert_eq!(uri.unwrap().to_string(), expected);
        }
    }
}
