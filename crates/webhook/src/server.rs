//! The HTTPS server that API servers ask, and the server of probes and metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use runtime::http_server;
use runtime::metrics::Metrics;
use runtime::tls::ServerTls;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;

/// Largest question (bytes): an API server takes objects of 3 MiB, and a new one stands in it once.
const MAX_QUESTION_BYTES: usize = 4 * 1024 * 1024;
/// Questions that are read at a time, so that many large ones have room in memory. Others wait; they
/// never wait for an answer, which may take a look at the cluster.
const MAX_QUESTIONS: usize = 16;
/// Longest time for the body of a question.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which an idle connection is kept. API servers keep theirs for 90 s, and do not ask once more
/// where one is closed while they ask.
const IDLE: Duration = Duration::from_secs(120);

/// The server, as its routes see it.
#[derive(Clone)]
pub struct WebhookServer {
    admission: Admission,
    metrics: Metrics,
    turns: Arc<Semaphore>,
    /// Set once it is to end: API servers shall find another replica.
    ending: Arc<AtomicBool>,
}

// === impl WebhookServer ===

impl WebhookServer {
    /// Returns a server of answers.
    pub fn new(admission: Admission, metrics: Metrics) -> Self {
        Self {
            admission,
            metrics,
            turns: Arc::new(Semaphore::new(MAX_QUESTIONS)),
            ending: Arc::default(),
        }
    }

    /// Serves until `cancel`, and then for `drain` longer: it says that it is not ready, asks whoever
    /// is connected to come by another connection, and answers all that still comes.
    pub async fn serve(
        self,
        listener: TcpListener,
        tls: Arc<ServerTls>,
        drain: Duration,
        cancel: CancellationToken,
    ) {
        let over = CancellationToken::new();
        let serving =
            http_server::serve_keeping(IDLE, listener, Some(tls), self.routes(), over.clone());
        let ending = async {
            cancel.cancelled().await;
            self.ending.store(true, Ordering::Relaxed);
            tokio::time::sleep(drain).await;
            over.cancel();
        };
        tokio::join!(serving, ending);
    }

    /// Returns what API servers ask.
    fn routes(&self) -> Router {
        Router::new()
            .route("/mutate", post(mutate))
            .route("/mutate-pod", post(mutate))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .layer(DefaultBodyLimit::max(MAX_QUESTION_BYTES))
            .with_state(self.clone())
    }

    /// Serves probes and metrics in the open until `cancel`.
    pub async fn serve_metrics(self, listener: TcpListener, cancel: CancellationToken) {
        let routes = Router::new()
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .with_state(self);
        http_server::serve(listener, None, routes, cancel).await;
    }

    fn reasons_against(&self) -> Vec<String> {
        let ending = self.ending.load(Ordering::Relaxed);
        let ending = ending.then_some("it is about to end");
        let reasons = ending.into_iter().chain(self.admission.unknown());
        reasons.map(str::to_owned).collect()
    }
}

async fn mutate(State(server): State<WebhookServer>, request: Request) -> Response {
    let turn = server.turns.acquire().await;
    let reading = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, &server));
    let body = match reading.await {
        Ok(Ok(body)) => body,
        Ok(Err(refused)) => return refused.into_response(),
        Err(_) => return StatusCode::REQUEST_TIMEOUT.into_response(),
    };
    drop(turn);
    let mut response = match server.admission.answer(&body).await {
        Ok(answer) => axum::Json(answer).into_response(),
        Err(bad) => (StatusCode::BAD_REQUEST, format!("{bad}\n")).into_response(),
    };
    if server.ending.load(Ordering::Relaxed) {
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The process lives: an API server that is away is no reason to start it again.
async fn healthz() -> Response {
    http_server::liveness(None)
}

async fn readyz(State(server): State<WebhookServer>) -> Response {
    http_server::readiness(&server.reasons_against())
}

async fn metrics(State(server): State<WebhookServer>) -> Response {
    http_server::metrics(&server.metrics).await
}

#[cfg(test)]
pub(crate) mod tests;
