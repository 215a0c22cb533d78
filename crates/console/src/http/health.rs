//! Whether the process is well: for probes, and for the status page.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use runtime::logging::chain;
use runtime::sources::{SourceState, Sources};
use store::{StatusPatch, StoreError};

use super::App;
use crate::api::Mode;

/// Content type of metrics.
pub(super) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long a probe waits for the store's writer.
const WRITER_TIMEOUT: Duration = Duration::from_secs(2);

/// 200 as long as the process lives and the store's writer answers, be it with an error:
/// a restart frees a hung writer, but not a full disk.
pub(super) async fn healthz(State(app): State<Arc<App>>) -> Response {
    match app.ask_writer().await {
        Err(Writer::Hangs | Writer::Failed(StoreError::Closed)) => {
            let text = "the event store's writer does not answer\n";
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
        Ok(()) | Err(Writer::Failed(_)) => "ok\n".into_response(),
    }
}

/// 200, or 503 with the reasons, one a line.
pub(super) async fn readyz(State(app): State<Arc<App>>) -> Response {
    readiness(&app.not_ready().await)
}

/// The answer of a readiness probe.
pub(super) fn readiness(reasons: &[String]) -> Response {
    if reasons.is_empty() {
        return "ready\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response()
}

/// Why not everything is seen.
pub(super) fn sources(sources: &Sources) -> Vec<String> {
    let mut reasons = Vec::new();
    for source in sources.statuses() {
        let (name, detail) = (source.name, source.detail);
        reasons.extend(match source.state {
            SourceState::Following | SourceState::Ended => None,
            SourceState::CatchingUp => Some(format!(
                "source {name} still reads what was there before: {detail}"
            )),
            SourceState::Failing => Some(format!("source {name} fails: {detail}")),
            SourceState::Stuck => Some(format!(
                "source {name} is stuck: no sign of life since {}: {detail}",
                source.alive_at
            )),
        });
    }
    reasons
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    (
        [(header::CONTENT_TYPE, OPENMETRICS)],
        app.console.metrics.encode_in_turn().await,
    )
        .into_response()
}

/// Why the store's writer is of no use.
enum Writer {
    Hangs,
    Failed(StoreError),
}

// === impl App ===

impl App {
    /// Why the process does not see and do all that it is there for; empty where it does.
    pub(super) async fn not_ready(&self) -> Vec<String> {
        let mut reasons = sources(&self.console.sources);
        reasons.extend(self.console.places.borrow().iter().cloned());
        if self.console.fleet.has_changed().is_err() {
            reasons.push("the keeper of the fleet's state has ended".to_owned());
        }
        let fleet = Arc::clone(&self.console.fleet.borrow());
        if !fleet.ready {
            reasons.push("the events stored before the start are not all taken in".to_owned());
        }
        reasons.extend(fleet.troubles.iter().cloned());
        if let Some(cluster) = fleet.cluster.as_ref().filter(|cluster| !cluster.connected) {
            let error = cluster
                .error
                .as_deref()
                .unwrap_or("the connection is being made");
            reasons.push(format!(
                "no connection to the cluster at {}: {error}",
                cluster.server
            ));
        }
        let policy = Arc::clone(&self.console.policy.borrow());
        if policy.loaded_at.is_none() && self.console.info.mode != Mode::Observe {
            let error = policy.error.as_deref().unwrap_or("it is not read yet");
            reasons.push(format!("no policy from {}: {error}", policy.source));
        }
        if let Some(trouble) = &*self.console.store.trouble().borrow() {
            reasons.push(format!(
                "the event store cannot write: {trouble}; events are refused and come again"
            ));
        }
        match self.ask_writer().await {
            Ok(()) => {}
            Err(Writer::Hangs) => reasons.push(format!(
                "the event store's writer has not answered for {} s",
                WRITER_TIMEOUT.as_secs()
            )),
            Err(Writer::Failed(error)) => reasons.push(chain(&error)),
        }
        reasons
    }

    /// Asks the writer for a change of nothing: no event has this id.
    async fn ask_writer(&self) -> Result<(), Writer> {
        let asked = self
            .console
            .store
            .update_status("probe", StatusPatch::default());
        match tokio::time::timeout(WRITER_TIMEOUT, asked).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Writer::Failed(error)),
            Err(_) => Err(Writer::Hangs),
        }
    }
}
