//! Small objects that the product keeps in its namespace: read, made, and changed only
//! where nobody else has changed them meanwhile.
//!
//! Unlike nodes they see no heartbeats, so their `resourceVersion` can be the condition.

use std::error::Error;
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{Method, Request, StatusCode};
use kube::core::Status;
use serde_json::Value;

use crate::connect::Cluster;
use crate::pace::Urgency;

/// Longest text of an answer that an error keeps, in characters.
const MESSAGE_CHARS: usize = 300;

/// Why an object was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// Somebody else has changed or made it meanwhile. Look again and decide anew.
    #[error("it has changed since it was looked at")]
    Conflict,
    /// It does not exist, or its namespace does not.
    #[error("not found: {message}")]
    NotFound {
        /// What the API server says.
        message: String,
    },
    /// The API server refuses it: credentials, permissions, or the content.
    #[error("refused: {message}")]
    Refused {
        /// HTTP status, a 4xx.
        status: u16,
        /// What the API server says.
        message: String,
    },
    /// The API server cannot be reached, did not answer in time, or is in trouble itself.
    /// A change may have been made all the same.
    #[error("the API server does not answer")]
    Unavailable {
        /// What happened.
        source: Box<dyn Error + Send + Sync>,
    },
}

// === impl ObjectError ===

impl ObjectError {
    pub(crate) fn unavailable(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unavailable {
            source: source.into(),
        }
    }

    pub(crate) fn from_answer(status: StatusCode, body: &[u8]) -> Self {
        let message = serde_json::from_slice::<Status>(body).map_or_else(
            |_| {
                let text = String::from_utf8_lossy(body);
                text.trim().chars().take(MESSAGE_CHARS).collect()
            },
            |told| told.message,
        );
        match status.as_u16() {
            404 => Self::NotFound { message },
            409 => Self::Conflict,
            429 | 500.. => Self::Unavailable {
                source: format!("HTTP status {status}: {message}").into(),
            },
            status => Self::Refused { status, message },
        }
    }
}

// === impl Cluster ===

impl Cluster {
    /// Reads an object.
    pub(crate) async fn get_object(
        &self,
        path: &str,
        limit: Duration,
    ) -> Result<Value, ObjectError> {
        self.call(Method::GET, path, None, limit).await
    }

    /// Makes an object in the list at `path`.
    pub(crate) async fn create_object(
        &self,
        path: &str,
        object: &Value,
        limit: Duration,
    ) -> Result<Value, ObjectError> {
        let body = Some(("application/json", object));
        self.call(Method::POST, path, body, limit).await
    }

    /// Merges `change` into an object. With a `metadata.resourceVersion` in it only where
    /// the object still has that version.
    pub(crate) async fn merge_object(
        &self,
        path: &str,
        change: &Value,
        limit: Duration,
    ) -> Result<Value, ObjectError> {
        let body = Some(("application/merge-patch+json", change));
        self.call(Method::PATCH, path, body, limit).await
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
        limit: Duration,
    ) -> Result<Value, ObjectError> {
        let mut request = Request::builder().method(method).uri(path);
        let mut bytes = Vec::new();
        if let Some((kind, object)) = body {
            request = request.header(CONTENT_TYPE, kind);
            bytes = serde_json::to_vec(object).map_err(ObjectError::unavailable)?;
        }
        let request = request.body(bytes).map_err(ObjectError::unavailable)?;
        // What people have set, and who leads, goes before what only tells.
        let exchange = self.exchange(Urgency::Act, request);
        let answer = tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| format!("no answer within {:.1} s", limit.as_secs_f64()))
            .map_err(ObjectError::unavailable)?
            .map_err(ObjectError::unavailable)?;
        if !answer.status.is_success() {
            return Err(ObjectError::from_answer(answer.status, &answer.body));
        }
        serde_json::from_slice(&answer.body).map_err(ObjectError::unavailable)
    }
}
