//! Error responses: JSON with the problem and a hint.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use runtime::logging::{Seldom, chain};
use store::StoreError;
use trial::why_not::WhyNot;

use crate::api::ErrorBody;

/// Longest wait of a request for the store.
pub(super) const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// Rate limit of the log line about failed reads, since every request could cause one.
static FAILED: Seldom = Seldom::new();

/// Error response to a request.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) error: String,
    pub(super) hint: String,
}

/// Waits for an answer of the store, up to [`STORE_TIMEOUT`].
pub(super) async fn ask<T>(
    answer: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, Refusal> {
    match tokio::time::timeout(STORE_TIMEOUT, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(StoreError::Invalid { what })) => Err(Refusal::bad_request(
            what,
            "The store cannot look for this.",
        )),
        Ok(Err(error)) => {
            let error = chain(&error);
            if let Some(not_logged_before) = FAILED.now() {
                tracing::warn!(%error, not_logged_before, "cannot read the event store");
            }
            Err(Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                error,
                "Look at the disk that holds the data directory, and at gpuwarden's log.",
            ))
        }
        Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "the event store gave no answer within {} s",
                STORE_TIMEOUT.as_secs()
            ),
            "Look at the disk that holds the data directory; then try again.",
        )),
    }
}

// === impl Refusal ===

impl Refusal {
    pub(super) fn new(
        status: StatusCode,
        error: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self {
            status,
            error: error.into(),
            hint: hint.into(),
        }
    }

    pub(super) fn bad_request(error: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error, hint)
    }

    /// Returns the error for a node that neither the cluster nor any event mentions.
    pub(super) fn unknown_node(why: &WhyNot) -> Self {
        let hint = match why.nearest.as_slice() {
            [] => "`gpuwarden status` and `kubectl get nodes` list what there is.".to_owned(),
            names => format!("Did you mean {}?", names.join(" or ")),
        };
        let error = format!(
            "neither the cluster nor any event knows a node {:?}",
            why.node
        );
        Self::new(StatusCode::NOT_FOUND, error, hint)
    }

    /// Returns the error for an unknown path. `served` lists the known ones.
    pub(super) fn unknown_route(served: &[&str]) -> Self {
        let hint = match served {
            [others @ .., last] => format!("There are {} and {last}.", others.join(", ")),
            [] => String::new(),
        };
        Self::new(StatusCode::NOT_FOUND, "there is nothing at this path", hint)
    }

    /// Returns the error for a path that only another process of gpuwarden serves.
    pub(super) fn elsewhere(error: String, hint: String) -> Self {
        Self::new(StatusCode::NOT_FOUND, error, hint)
    }

    pub(super) fn body(self) -> ErrorBody {
        ErrorBody {
            error: self.error,
            hint: self.hint,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = self.status;
        let mut response = (status, Json(self.body())).into_response();
        if status == StatusCode::METHOD_NOT_ALLOWED {
            response
                .headers_mut()
                .insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests for the page must not flood the log while the store cannot be read.
    #[tokio::test]
    async fn a_store_that_cannot_be_read_is_logged_now_and_then() {
        let log = testkit::Log::begin();
        for _ in 0..50 {
            let asked = ask(async { Err::<(), _>(StoreError::Closed) }).await;
            assert_eq!(asked.unwrap_err().status, StatusCode::SERVICE_UNAVAILABLE);
        }
        assert_eq!(log.lines_with("cannot read the event store").len(), 1);
    }
}
