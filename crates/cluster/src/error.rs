//! Errors of requests: answers other than success, and missing answers.
//!
//! `request.rs` reads the `Status` of an answer; this module classifies it for callers.

use std::error::Error;
use std::time::Duration;

use kube::core::Status;

use crate::tenure::NotLeading;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The object or its namespace does not exist.
    #[error("{message}")]
    NotFound {
        /// Message of the API server.
        message: String,
    },
    /// The object has changed since the caller read it: read it again and decide anew.
    #[error("it has changed since it was read")]
    Conflict {
        /// HTTP status: 409 or 422.
        status: u16,
    },
    /// Credentials or permissions are missing or do not suffice.
    #[error("not allowed: {message}")]
    Forbidden {
        /// HTTP status: 401 or 403.
        status: u16,
        /// Message of the API server.
        message: String,
    },
    /// The API server, or an admission webhook, does not accept the request.
    #[error("the API server refuses it: {message}")]
    Invalid {
        /// HTTP status, a 4xx.
        status: u16,
        /// Message of the API server.
        message: String,
    },
    /// The API server is overloaded and asks to retry later (429).
    #[error("the API server asks to try later")]
    Throttled {
        /// Pause that the API server asks for, if any.
        retry_after: Option<Duration>,
    },
    /// A disruption budget forbids the eviction of a pod.
    #[error("{message}")]
    Held {
        /// Message of the API server.
        message: String,
        /// Pause that the API server asks for, if any.
        retry_after: Option<Duration>,
    },
    /// The API server cannot be reached, did not answer in time, has an internal error, or sent
    /// an answer that cannot be read. A change may have been made nevertheless; repeating a
    /// conditional one then ends in [`ApiError::Conflict`].
    #[error("the API server does not answer")]
    Unavailable {
        /// HTTP status of the answer, a 5xx; `None` without an answer.
        status: Option<u16>,
        /// Error of the connection, or of reading the answer.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The write was requested under a [`Tenure`](crate::Tenure) that has ended. A write that
    /// was in flight may have been made nevertheless.
    #[error("this process is no longer the leader")]
    NotLeading,
}

// === impl ApiError ===

impl ApiError {
    /// Returns true if a retry may succeed: after [`ApiError::Conflict`] with a fresh view,
    /// otherwise after a pause.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Conflict { .. }
            | Self::Throttled { .. }
            | Self::Held { .. }
            | Self::Unavailable { .. } => true,
            Self::NotFound { .. }
            | Self::Forbidden { .. }
            | Self::Invalid { .. }
            | Self::NotLeading => false,
        }
    }

    /// Returns true if the change may have been made in spite of the error.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::NotLeading)
    }

    /// Returns the HTTP status of the answer; `None` without an answer.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::NotFound { .. } => Some(404),
            Self::Throttled { .. } | Self::Held { .. } => Some(429),
            Self::Conflict { status }
            | Self::Forbidden { status, .. }
            | Self::Invalid { status, .. } => Some(*status),
            Self::Unavailable { status, .. } => *status,
            Self::NotLeading => None,
        }
    }

    /// Creates the error of an answer that cannot be read.
    pub fn unavailable(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unavailable {
            status: None,
            source: source.into(),
        }
    }
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => (*status).into(),
            kube::Error::Service(source) if source.is::<NotLeading>() => Self::NotLeading,
            kube::Error::Service(source) => Self::unavailable(source),
            error => Self::unavailable(error),
        }
    }
}

impl From<Status> for ApiError {
    fn from(answer: Status) -> Self {
        let retry_after = retry_after(&answer);
        let held = is_held(&answer);
        let Status {
            code: status,
            message,
            ..
        } = answer;
        match status {
            _ if held => Self::Held {
                message,
                retry_after,
            },
            401 | 403 => Self::Forbidden { status, message },
            404 => Self::NotFound { message },
            409 => Self::Conflict { status },
            429 => Self::Throttled { retry_after },
            400..=499 => Self::Invalid { status, message },
            _ => Self::Unavailable {
                status: Some(status),
                source: format!("HTTP status {status}: {message}").into(),
            },
        }
    }
}

/// Converts [`ApiError::NotFound`] to `None`. Unlike kube's `get_opt` this goes by the HTTP
/// status, which a proxy in front of the API server sends as well.
pub(crate) fn found<T>(result: Result<T, kube::Error>) -> Result<Option<T>, ApiError> {
    match result.map_err(ApiError::from) {
        Ok(object) => Ok(Some(object)),
        Err(ApiError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the pause that the API server asks for, if any.
pub(crate) fn retry_after(answer: &Status) -> Option<Duration> {
    let seconds = answer.details.as_ref()?.retry_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

/// Returns true if a disruption budget, and not overload, forbids the eviction of a pod.
pub(crate) fn is_held(answer: &Status) -> bool {
    let causes = answer.details.iter().flat_map(|details| &details.causes);
    // For a pod with several budgets the API server reports an internal error of its own.
    causes
        .map(|cause| cause.reason.as_str())
        .any(|reason| reason == "DisruptionBudget")
        || answer.message.contains("more than one PodDisruptionBudget")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fake::{self, FakeAnswer};
    use crate::layer::MESSAGE_CHARS;

    async fn error(code: u16, body: String) -> ApiError {
        let (cluster, _requests) = fake::serve(vec![FakeAnswer::Now(code, body)]).await;
        cluster.own_name().await.unwrap_err()
    }

    fn status(code: u16, message: &str, details: &Value) -> String {
        let status = "Failure";
        json!({"kind": "Status", "status": status, "code": code, "message": message, "details": details})
            .to_string()
    }

    #[tokio::test]
    async fn answers_are_told_apart() {
        let wait = json!({"retryAfterSeconds": 7});
        let plain = |code, message| status(code, message, &json!({}));
        let cases = [
            (
                401,
                plain(401, "Unauthorized"),
                "not allowed: Unauthorized",
                false,
            ),
            (403, plain(403, "no"), "not allowed: no", false),
            // From a proxy in front of the API server: JSON, but no `Status`.
            (
                403,
                r#"{"error": "no"}"#.into(),
                "not allowed: 403 Forbidden",
                false,
            ),
            (
                404,
                plain(404, "nodes \"n\" not found"),
                "nodes \"n\" not found",
                false,
            ),
            (404, String::new(), "404 Not Found", false),
            (409, plain(409, "x"), "it has changed", true),
            (
                422,
                plain(422, "Invalid value"),
                "refuses it: Invalid value",
                false,
            ),
            (
                422,
                "webhook denied".into(),
                "refuses it: webhook denied",
                false,
            ),
            (415, "what?".into(), "refuses it: what?", false),
            (429, "Too many requests".into(), "try later", true),
            (429, status(429, "wait", &wait), "try later", true),
            (500, plain(500, "etcd"), "does not answer", true),
            (503, String::new(), "does not answer", true),
            (504, "<html>".into(), "does not answer", true),
        ];
        for (code, body, text, retryable) in cases {
            let error = error(code, body.clone()).await;
            assert!(error.to_string().contains(text), "{code} {body}: {error}");
            assert_eq!(error.is_retryable(), retryable, "{code} {body}");
            assert_eq!(error.status(), Some(code), "{code} {body}");
            assert_eq!(error.is_in_doubt(), code >= 500, "{code} {body}");
        }
        let ApiError::Throttled { retry_after } = error(429, status(429, "", &wait)).await else {
            panic!("not throttled")
        };
        assert_eq!(retry_after, Some(Duration::from_secs(7)));
        let ApiError::Unavailable { source, .. } = error(500, plain(500, "etcd")).await else {
            panic!("not unavailable")
        };
        assert_eq!(source.to_string(), "HTTP status 500: etcd");
    }

    #[tokio::test]
    async fn long_answers_are_cut() {
        let ApiError::Invalid { message, .. } = error(400, "x".repeat(10_000)).await else {
            panic!("not invalid")
        };
        assert_eq!(message.len(), MESSAGE_CHARS);
    }
}
