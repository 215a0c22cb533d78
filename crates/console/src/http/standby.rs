//! Who stands by while another controller leads: the same status document, metrics and
//! probes, and nothing else. It is not ready, so that a Service sends agents to who leads.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use jiff::Timestamp;
use runtime::metrics::Metrics;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::error::Refusal;
use super::guard::{self, CheckHost};
use super::{Info, LeadershipSource, SERVED_BY_ALL, health, needs_events, server};
use crate::api::{LeadershipView, Status};

/// What is shown while another leads, and where it is read.
#[derive(Clone)]
pub struct StandbyConsole {
    /// What does not change while the process lives.
    pub info: Info,
    /// Who leads.
    pub leadership: LeadershipSource,
    /// What `/metrics` shows.
    pub metrics: Metrics,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// Serves until `cancel`, like [`serve`](super::serve), and gives the listener back.
pub async fn serve_standby(
    listener: TcpListener,
    console: StandbyConsole,
    cancel: CancellationToken,
) -> TcpListener {
    let check_host = CheckHost::of(&listener);
    let routes = Router::new()
        .route("/", get(page))
        .route("/api/v1/status", get(status))
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .fallback(unserved)
        .layer(from_fn_with_state(check_host, guard::guard))
        .with_state(Arc::new(console));
    server::serve(listener, routes, cancel, server::Limits::default()).await
}

async fn page(State(console): State<Arc<StandbyConsole>>) -> String {
    format!(
        "gpuwarden controller on {}\n{}\n\n/api/v1/status\n/metrics\n/healthz\n/readyz\n",
        console.info.node_name,
        not_ready(&(console.leadership)())
    )
}

async fn unserved(State(console): State<Arc<StandbyConsole>>, uri: Uri) -> Refusal {
    if !needs_events(uri.path()) {
        return Refusal::unknown_route(SERVED_BY_ALL);
    }
    Refusal::elsewhere(
        format!(
            "this controller does not act, {}",
            not_ready(&(console.leadership)())
        ),
        "Ask the controller that leads: run the command there, or name its API with --server."
            .to_owned(),
    )
}

async fn status(State(console): State<Arc<StandbyConsole>>) -> Json<Status> {
    let leadership = (console.leadership)();
    Json(Status {
        not_ready: vec![not_ready(&leadership)],
        leadership: Some(leadership),
        ..console.info.status((console.clock)())
    })
}

async fn metrics(State(console): State<Arc<StandbyConsole>>) -> Response {
    (
        [(header::CONTENT_TYPE, health::OPENMETRICS)],
        console.metrics.encode_in_turn().await,
    )
        .into_response()
}

async fn readyz(State(console): State<Arc<StandbyConsole>>) -> Response {
    health::readiness(&[not_ready(&(console.leadership)())])
}

fn not_ready(leadership: &LeadershipView) -> String {
    let LeadershipView {
        lease,
        leader,
        error,
        ..
    } = leadership;
    match (error, leader.as_str()) {
        (Some(error), _) => format!(
            "standby: the Lease {lease} cannot be asked for: {error} (the namespace has to exist, \
             and we need to get, create and patch leases.coordination.k8s.io in it)"
        ),
        (None, "") => "standby: nobody leads yet".to_owned(),
        (None, leader) => format!("standby: {leader} leads"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stands_by_says_for_whom_or_why() {
        let view = |leader: &str, error: Option<&str>| LeadershipView {
            lease: "g/c".into(),
            identity: "me".into(),
            leader: leader.into(),
            leads: false,
            error: error.map(str::to_owned),
        };
        let table = [
            (view("other", None), "standby: other leads"),
            (view("", None), "standby: nobody leads yet"),
            (
                view("other", Some("refused: no")),
                "standby: the Lease g/c cannot be asked for: refused: no (",
            ),
        ];
        for (view, expected) in table {
            let text = not_ready(&view);
            assert!(text.starts_with(expected), "{text}");
        }
    }
}
