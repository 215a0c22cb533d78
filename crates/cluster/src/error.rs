//! The errors of requests: answers other than success, and none at all.
//!
//! Its `Status` is read once, in `request.rs`; callers tell apart what is told apart here.

use std::error::Error;
use std::time::Duration;

use kube::core::Status;

use crate::tenure::NotLeading;

/// The reason why the API server did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The object does not exist, or its namespace does not.
    #[error("{message}")]
    NotFound {
        /// The message of the API server.
        message: String,
    },
    /// The object is not what the caller has seen any more. Look again and decide anew.
    #[error("it has changed since it was looked at")]
    Conflict {
        /// HTTP status: 409 or 422.
        status: u16,
    },
    /// Credentials or permissions do not suffice.
    #[error("not allowed: {message}")]
    Forbidden {
        /// HTTP status: 401 or 403.
        status: u16,
        /// The message of the API server.
        message: String,
    },
    /// The API server, or an admission webhook, does not accept the request.
    #[error("the API server refuses it: {message}")]
    Invalid {
        /// HTTP status, a 4xx.
        status: u16,
        /// Its message.
        message: String,
    },
    /// The API server asks to slow down.
    #[error("the API server asks to try later")]
    Throttled {
        /// The wait after which to try again, if it says so.
        retry_after: Option<Duration>,
    },
    /// A disruption budget keeps a pod where it is.
    #[error("{message}")]
    Held {
        /// The message of the API server.
        message: String,
        /// The wait after which to try again, if it says so.
        retry_after: Option<Duration>,
    },
    /// The API server cannot be reached, did not answer in time, is in trouble itself, or its
    /// answer cannot be read. A change may have been made all the same: then a second try of
    /// a conditional one ends as [`ApiError::Conflict`].
    #[error("the API server does not answer")]
    Unavailable {
        /// HTTP status if there was an answer, a 5xx.
        status: Option<u16>,
        /// The error of the connection.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A write was asked for under a [`Tenure`](crate::Tenure) that is over. One that was
    /// under way may have been made all the same.
    #[error("this process does not lead any more")]
    NotLeading,
}

// === impl ApiError ===

impl ApiError {
    /// Returns whether the same intention may succeed later: after [`ApiError::Conflict`]
    /// with a fresh look, otherwise after waiting.
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

    /// Returns whether a change may have been made in spite of the error.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::NotLeading)
    }

    /// Returns the HTTP status of the answer; `None` where there was none.
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

    /// Returns the error of an answer that is not what it should be.
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

/// Returns `None` where the answer is that there is no such object. Unlike kube's `get_opt` it
/// goes by the HTTP status, which something in front of the API server gives as well.
pub(crate) fn found<T>(result: Result<T, kube::Error>) -> Result<Option<T>, ApiError> {
    match result.map_err(ApiError::from) {
        Ok(object) => Ok(Some(object)),
        Err(ApiError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns when the API server wants to be asked again, if it says so.
pub(crate) fn retry_after(answer: &Status) -> Option<Duration> {
    let seconds = answer.details.as_ref()?.retry_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

/// Returns whether a disruption budget, and no want of capacity, refuses the eviction of a pod.
pub(crate) fn is_held(answer: &Status) -> bool {
    let causes = answer.details.iter().flat_map(|details| &details.causes);
    // Of a pod that several budgets protect the API server says that it is an error of its own.
    causes
        .map(|cause| cause.reason.as_str())
        .any(|reason| reason == "DisruptionBudget")
        || answer.message.contains("more than one PodDisruptionBudget")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fake::{self, Answer};
    use crate::layer::MESSAGE_CHARS;

    async fn error(code: u16, body: String) -> ApiError {
        let (cluster, _requests) = fake::serve(vec![Answer::Now(code, body)]).await;
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
            // Of something in front of the API server: JSON, but no `Status`.
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
