//! An agent's side: the same status document as a whole gpuwarden's, with what waits for
//! the controller in the place of faults and decisions, which the controller shows.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use connector::DeliveryStatus;
use connector::outbox::{Outbox, OutboxError};
use domain::view::FleetView;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::error::Refusal;
use super::guard::{self, CheckHost};
use super::{Info, SERVED_BY_ALL, health, needs_events, server};
use crate::api::{DeliveryView, Status, StoreView};

/// How long a probe waits for the outbox.
const OUTBOX_TIMEOUT: Duration = Duration::from_secs(2);

/// What an agent shows, and where it reads it.
#[derive(Clone)]
pub struct AgentConsole {
    /// What does not change while the process lives.
    pub info: Info,
    /// Where events are brought.
    pub controller: String,
    /// What can be seen, and how fresh that is.
    pub sources: Sources,
    /// What waits.
    pub outbox: Outbox,
    /// How bringing it does.
    pub delivery: watch::Receiver<DeliveryStatus>,
    /// What is wrong with the places of the process in the file system.
    pub places: watch::Receiver<Vec<String>>,
    /// What `/metrics` shows.
    pub metrics: Metrics,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// Serves an agent's status, metrics and probes until `cancel`, like
/// [`serve`](super::serve).
pub async fn serve_agent(listener: TcpListener, console: AgentConsole, cancel: CancellationToken) {
    let check_host = CheckHost::of(&listener);
    let routes = Router::new()
        .route("/", get(page))
        .route("/api/v1/status", get(status))
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .fallback(unserved)
        .layer(from_fn_with_state(check_host, guard::guard))
        .with_state(Arc::new(console));
    drop(server::serve(listener, routes, cancel, server::Limits::default()).await);
}

async fn page(State(console): State<Arc<AgentConsole>>) -> String {
    format!(
        "gpuwarden agent on {}, for the controller at {}\n\n/api/v1/status\n/metrics\n/healthz\n/readyz\n",
        console.info.node_name, console.controller
    )
}

async fn unserved(State(console): State<Arc<AgentConsole>>, uri: Uri) -> Refusal {
    if !needs_events(uri.path()) {
        return Refusal::unknown_route(SERVED_BY_ALL);
    }
    Refusal::elsewhere(
        "this is an agent: events, faults and decisions are at its controller".to_owned(),
        format!(
            "Ask the controller to which it delivers, {}: run the command there, or name its API \
             with --server.",
            console.controller
        ),
    )
}

async fn status(State(console): State<Arc<AgentConsole>>) -> Json<Status> {
    let now = (console.clock)();
    let not_ready = console.not_ready();
    let (outbox, delivery) = (*console.outbox.status().borrow(), console.delivery.borrow());
    Json(Status {
        fleet: FleetView {
            ready: true,
            ..FleetView::default()
        },
        sources: console.sources.statuses(),
        store: StoreView {
            events: outbox.events as u64,
            bytes: outbox.bytes,
            latest: outbox.newest.into(),
            oldest: outbox.oldest,
            ..StoreView::default()
        },
        delivery: Some(DeliveryView {
            controller: console.controller.clone(),
            delivered: delivery.delivered,
            refused: delivery.refused,
            not_taken: delivery.not_taken,
            suspects: delivery.suspects as u64,
            aside: outbox.aside,
            store: delivery.store.clone(),
            store_changes: delivery.store_changes,
            resent: delivery.resent,
            kept: outbox.kept as u64,
            failing: delivery.failing.clone(),
        }),
        ready: not_ready.is_empty(),
        not_ready,
        ..console.info.status(now)
    })
}

async fn metrics(State(console): State<Arc<AgentConsole>>) -> Response {
    (
        [(header::CONTENT_TYPE, health::OPENMETRICS)],
        console.metrics.encode_in_turn().await,
    )
        .into_response()
}

/// 200 as long as the process lives and the outbox answers, be it with an error: a restart
/// frees a hung thread, but not a full disk.
async fn healthz(State(console): State<Arc<AgentConsole>>) -> Response {
    let asked = console.outbox.waiting(u64::MAX, 1, 1);
    let answered = tokio::time::timeout(OUTBOX_TIMEOUT, asked).await;
    if answered.is_ok_and(|answer| is_alive(answer.err().as_ref())) {
        return "ok\n".into_response();
    }
    let text = "the outbox does not answer\n";
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

/// Whether the outbox's thread lives, by how it failed.
fn is_alive(failed: Option<&OutboxError>) -> bool {
    !matches!(failed, Some(OutboxError::Closed))
}

async fn readyz(State(console): State<Arc<AgentConsole>>) -> Response {
    health::readiness(&console.not_ready())
}

// === impl AgentConsole ===

impl AgentConsole {
    fn not_ready(&self) -> Vec<String> {
        let mut reasons = health::sources(&self.sources);
        reasons.extend(self.places.borrow().iter().cloned());
        let waiting = self.outbox.status().borrow().events;
        if let Some(failing) = &self.delivery.borrow().failing {
            reasons.push(format!(
                "the controller at {} does not take events, {waiting} wait: {failing}",
                self.controller
            ));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fails_is_no_reason_to_start_again_and_a_thread_that_is_gone_is() {
        let failed = || std::sync::Arc::new(std::io::Error::other("no space left on device"));
        let disk = OutboxError::Disk {
            action: "read",
            source: failed(),
        };
        let full = OutboxError::Full { what: "it".into() };
        assert!([None, Some(&disk), Some(&full)].into_iter().all(is_alive));
        assert!(!is_alive(Some(&OutboxError::Closed)));
    }
}
