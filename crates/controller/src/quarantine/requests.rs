//! Requests to the API server and to the store that are in flight.
//!
//! Each request is a task that ends with a [`RequestAnswer`]: the input for the fleet, and the
//! journal entry. A slow server or store delays only the nodes of its requests.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, ResourceKinds};
use fleet::FleetInput;
use jiff::{SignedDuration, Timestamp};
use model::journal::{EntryKind, JournalEntry};
use serde_json::{Value, json};
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::metrics::{DrainMetrics, QuarantineMetrics, RemediationMetrics};

pub(super) mod device_rule;
pub(super) mod event;
pub(super) mod node;
pub(super) mod pod;
pub(super) mod resource;
pub(super) mod store;

/// Result of a request.
#[derive(Debug)]
pub(super) struct RequestAnswer {
    /// Input for the fleet; `None` if no decision waits for the answer.
    pub(super) input: Option<FleetInput>,
    /// Journal entry about the answer, if any.
    pub(super) entry: Option<JournalEntry>,
}

/// Context of requests to the API server. Cheap to clone.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) cluster: Arc<Cluster>,
    /// Paths of custom resources in the cluster.
    pub(super) kinds: ResourceKinds,
    pub(super) clock: fn() -> Timestamp,
    pub(super) metrics: QuarantineMetrics,
    pub(super) drain_metrics: DrainMetrics,
    pub(super) remediation_metrics: RemediationMetrics,
    /// Cancelled when the process ends.
    pub(super) cancel: CancellationToken,
}

/// Tasks of the requests in flight.
pub(super) struct RequestTasks {
    tasks: JoinSet<RequestAnswer>,
    metrics: QuarantineMetrics,
}

// === impl RequestTasks ===

impl RequestTasks {
    pub(super) fn new(metrics: QuarantineMetrics) -> Self {
        Self {
            tasks: JoinSet::new(),
            metrics,
        }
    }

    /// Starts a request, whose answer [`Self::next`] returns.
    pub(super) fn start(&mut self, request: impl Future<Output = RequestAnswer> + Send + 'static) {
        self.tasks.spawn(request);
    }

    /// Waits for the next answer. Returns `None` if no request is in flight.
    pub(super) async fn next(&mut self) -> Option<RequestAnswer> {
        let ended = self.tasks.join_next().await?;
        Some(self.answer(ended))
    }

    /// Returns an answer that has already arrived.
    pub(super) fn try_next(&mut self) -> Option<RequestAnswer> {
        let ended = self.tasks.try_join_next()?;
        Some(self.answer(ended))
    }

    fn answer(&self, ended: Result<RequestAnswer, JoinError>) -> RequestAnswer {
        ended.unwrap_or_else(|error| {
            // A bug. The node of the request is unknown, so the fleet evaluates all nodes again.
            tracing::error!(err = %error, "a request ended without an answer");
            self.metrics.error("patch_panicked");
            RequestAnswer::from(FleetInput::AnswersLost)
        })
    }
}

// === impl Client ===

impl Client {
    /// Creates a journal entry about an answer of the API server.
    fn entry(
        &self,
        node: &str,
        session: Option<String>,
        text: String,
        detail: Value,
    ) -> JournalEntry {
        JournalEntry {
            at: (self.clock)(),
            node: node.to_owned(),
            session,
            kind: EntryKind::Answer,
            text,
            detail,
        }
    }
}

// === impl RequestAnswer ===

impl From<FleetInput> for RequestAnswer {
    fn from(input: FleetInput) -> Self {
        Self {
            input: Some(input),
            entry: None,
        }
    }
}

/// Returns the pause that the API server asks for, if any.
fn retry_after(error: &ApiError) -> Option<SignedDuration> {
    match error {
        ApiError::Throttled { retry_after } | ApiError::Held { retry_after, .. } => {
            retry_after.and_then(signed)
        }
        _ => None,
    }
}

fn signed(wait: Duration) -> Option<SignedDuration> {
    SignedDuration::try_from(wait).ok()
}

/// Returns the detail of a journal entry: the HTTP status of the answer.
fn status_of<T>(result: &Result<T, ApiError>, success: u16) -> Value {
    match result {
        Ok(_) => json!({"status": success}),
        Err(error) => json!({"status": error.status()}),
    }
}
