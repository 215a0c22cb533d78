//! HTTPS server for API servers, and plain server for probes and metrics.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use runtime::http_server::{self, Bodies, BodyError, Clients, Peer, ReadBody};
use runtime::metrics::Metrics;
use runtime::tls::ServerTls;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::requests::RequestAdmission;
use crate::review::Unanswered;

/// Largest review in bytes. An API server accepts objects of 3 MiB, and sends `managedFields`
/// with them, which can be twice as large again.
const MAX_REVIEW_BYTES: usize = 10 * 1024 * 1024;
/// Most bytes of reviews that are read or answered at a time.
const MAX_READ_BYTES: usize = 32 * 1024 * 1024;
/// Timeout for the body of a review.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for an answer. The API server gives up after 10 s and then reports only that nobody
/// answered; this timeout is shorter, so that the creator of the object sees the reason.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
/// An API server opens a connection for each concurrent review and keeps it idle for 90 s. If
/// it is closed while a review is sent, the API server does not retry.
const CLIENTS: Clients = Clients {
    connections: 512,
    idle: Duration::from_secs(120),
};
/// Interval of heartbeats from the threads that answer.
const BEAT: Duration = Duration::from_secs(1);
/// Time without a heartbeat until the liveness probe fails. Far above any work of these
/// threads: a restart does not help a busy replica.
const MAX_SILENCE: Duration = Duration::from_secs(60);

/// State of the routes.
#[derive(Clone)]
pub struct WebhookServer {
    admission: Admission,
    /// Validation of the janitor's requests, if enabled.
    requests: Option<RequestAdmission>,
    metrics: Metrics,
    bodies: Arc<Bodies>,
    body_timeout: Duration,
    answer_timeout: Duration,
    /// Set at shutdown, so that API servers choose another replica.
    ending: Arc<AtomicBool>,
    /// Last heartbeat of the threads that answer.
    alive: Arc<Mutex<Instant>>,
}

// === impl WebhookServer ===

impl WebhookServer {
    /// Creates a server that answers for `admission`.
    pub fn new(admission: Admission, metrics: Metrics) -> Self {
        Self {
            admission,
            requests: None,
            metrics,
            bodies: Bodies::new(MAX_READ_BYTES),
            body_timeout: BODY_TIMEOUT,
            answer_timeout: ANSWER_TIMEOUT,
            ending: Arc::default(),
            alive: Arc::new(Mutex::new(Instant::now())),
        }
    }

    /// Also validates the janitor's requests.
    #[must_use]
    pub fn with_requests(self, requests: Option<RequestAdmission>) -> Self {
        Self { requests, ..self }
    }

    /// Serves until `cancel`, then drains for `drain`: reports not ready, asks clients to
    /// reconnect elsewhere, and answers what still arrives.
    pub async fn serve(
        self,
        listener: TcpListener,
        tls: Arc<ServerTls>,
        drain: Duration,
        cancel: CancellationToken,
    ) {
        let over = CancellationToken::new();
        let serving =
            http_server::serve_clients(CLIENTS, listener, Some(tls), self.routes(), over.clone());
        let ending = async {
            cancel.cancelled().await;
            self.ending.store(true, Ordering::Relaxed);
            tokio::time::sleep(drain).await;
            over.cancel();
        };
        tokio::join!(serving, ending);
    }

    /// Returns the routes for API servers.
    fn routes(&self) -> Router {
        let validate = match self.requests {
            Some(_) => Router::new().route("/validate", post(validate)),
            None => Router::new(),
        };
        validate
            .route("/mutate", post(mutate))
            .route("/mutate-pod", post(mutate))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .with_state(self.clone())
    }

    /// Starts the server of probes and metrics, without TLS, and returns a future that ends
    /// after `cancel`. The server has its own thread, so that probes are answered however busy
    /// the others are.
    pub fn serve_metrics(
        self,
        listener: TcpListener,
        cancel: CancellationToken,
    ) -> io::Result<impl Future<Output = ()>> {
        let listener = listener.into_std()?;
        let own = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (ended, end) = oneshot::channel::<()>();
        let (server, until) = (self.clone(), cancel.clone());
        let serve = async move {
            let listener = match TcpListener::from_std(listener) {
                Ok(listener) => listener,
                Err(error) => return tracing::error!(%error, "cannot serve probes"),
            };
            let routes = Router::new()
                .route("/healthz", get(liveness))
                .route("/readyz", get(readyz))
                .route("/metrics", get(metrics))
                .with_state(server);
            http_server::serve(listener, None, routes, until).await;
        };
        std::thread::Builder::new()
            .name("probes".to_owned())
            .spawn(move || {
                own.block_on(serve);
                drop(ended);
            })?;
        Ok(async move {
            let beating = async {
                loop {
                    self.beat();
                    tokio::time::sleep(BEAT).await;
                }
            };
            cancel.run_until_cancelled(beating).await;
            // The sender is dropped without a value when the server ends.
            drop(end.await);
        })
    }

    /// Reads the body of a review. The error is the response.
    async fn read(&self, peer: Peer, request: Request) -> Result<ReadBody, Response> {
        let body = request.into_body();
        let within = self.body_timeout;
        let reading = self.bodies.read(peer, body, MAX_REVIEW_BYTES, within);
        reading.await.map_err(IntoResponse::into_response)
    }

    /// Returns the response to a review. While no memory is free for new reviews, one that
    /// waits for its turn or for the cluster is refused.
    async fn unless_crowded(
        &self,
        gives_way: impl Future<Output = ()>,
        answering: impl Future<Output = Result<Value, Unanswered>>,
    ) -> Response {
        tokio::select! {
            biased;
            answered = answering => self.respond(answered),
            () = gives_way => BodyError::Crowded.into_response(),
        }
    }

    /// Returns the response for an answer.
    fn respond(&self, answered: Result<Value, Unanswered>) -> Response {
        let mut response = match answered {
            Ok(answer) => axum::Json(answer).into_response(),
            Err(why) => why.into_response(),
        };
        if self.ending.load(Ordering::Relaxed) {
            let headers = response.headers_mut();
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    fn beat(&self) {
        *self.alive.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Returns the component without a recent heartbeat.
    fn silent(&self) -> Option<&'static str> {
        let last = *self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        (last.elapsed() >= MAX_SILENCE).then_some("the webhook")
    }

    fn reasons_against(&self) -> Vec<String> {
        let ending = self.ending.load(Ordering::Relaxed);
        let ending = ending.then_some("it is about to end");
        let reasons = ending.into_iter().chain(self.admission.unknown());
        reasons.map(str::to_owned).collect()
    }
}

async fn mutate(
    State(server): State<WebhookServer>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    let until = tokio::time::Instant::now() + server.answer_timeout;
    match server.read(peer, request).await {
        Ok(body) => {
            let (gives_way, answering) = (body.gives_way(), server.admission.answer(body, until));
            server.unless_crowded(gives_way, answering).await
        }
        Err(refused) => refused,
    }
}

async fn validate(
    State(server): State<WebhookServer>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    let Some(requests) = &server.requests else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let until = tokio::time::Instant::now() + server.answer_timeout;
    match server.read(peer, request).await {
        Ok(body) => {
            let (gives_way, answering) = (body.gives_way(), requests.answer(body, until));
            server.unless_crowded(gives_way, answering).await
        }
        Err(refused) => refused,
    }
}

// === impl Unanswered ===

impl IntoResponse for Unanswered {
    /// Returns the error response; the registration's failure policy decides about the object.
    /// The API server shows the text of a 500 to the creator of the object, but not of a 503.
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Bad(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Late(_) | Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, format!("{self}\n")).into_response()
    }
}

/// Liveness of the HTTPS server. An unreachable API server is no reason for a restart.
async fn healthz() -> Response {
    http_server::liveness(None)
}

/// Liveness of the threads that answer.
async fn liveness(State(server): State<WebhookServer>) -> Response {
    http_server::liveness(server.silent())
}

async fn readyz(State(server): State<WebhookServer>) -> Response {
    http_server::readiness(&server.reasons_against())
}

async fn metrics(State(server): State<WebhookServer>) -> Response {
    http_server::metrics(&server.metrics).await
}

#[cfg(test)]
pub(crate) mod tests;
