//! The HTTPS server that API servers ask, and the server of probes and metrics.

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
use crate::requests::Requests;
use crate::review::Unanswered;

/// Largest question (bytes). An API server takes objects of 3 MiB, and writes beside them who manages which of
/// their fields, which may be twice as much again.
const MAX_QUESTION_BYTES: usize = 10 * 1024 * 1024;
/// Most bytes of questions that are read or answered at a time.
const MAX_READ_BYTES: usize = 32 * 1024 * 1024;
/// Longest time for the body of a question.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time until a question is answered: an API server gives up after 10 s, and says then that nobody answered,
/// and not why.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
/// API servers open a connection for each question that they ask at the same time, and keep them idle for 90 s; where
/// one is closed while they ask by it, they do not ask once more.
const CLIENTS: Clients = Clients {
    connections: 512,
    idle: Duration::from_secs(120),
};
/// Time between two signs of life of the threads that answer.
const BEAT: Duration = Duration::from_secs(1);
/// Time without a sign of life after which the process is to be started anew. Far longer than any work that the
/// threads have to do: a replica that has much to do is not helped by a start.
const MAX_SILENCE: Duration = Duration::from_secs(60);

/// The server, as its routes see it.
#[derive(Clone)]
pub struct WebhookServer {
    admission: Admission,
    /// Answers about requests of the janitor, if anybody does.
    requests: Option<Requests>,
    metrics: Metrics,
    bodies: Arc<Bodies>,
    body_timeout: Duration,
    answer_timeout: Duration,
    /// Set once it is to end: API servers shall find another replica.
    ending: Arc<AtomicBool>,
    /// The time of the last sign of life of the threads that answer.
    alive: Arc<Mutex<Instant>>,
}

// === impl WebhookServer ===

impl WebhookServer {
    /// Returns a server of answers.
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

    /// Answers about requests of the janitor as well.
    #[must_use]
    pub fn with_requests(self, requests: Option<Requests>) -> Self {
        Self { requests, ..self }
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
            http_server::serve_clients(CLIENTS, listener, Some(tls), self.routes(), over.clone());
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

    /// Starts the server of probes and metrics, in the open, and returns what ends after `cancel`. It has a thread of
    /// its own: however much the others have to do, a probe is answered, so that nobody ends the process for it.
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
                Err(error) => return tracing::error!(%error, "probes are not answered"),
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
            // It is dropped, and nothing sent.
            drop(end.await);
        })
    }

    /// Reads a question. The error is what is said in the place of an answer.
    async fn read(&self, peer: Peer, request: Request) -> Result<ReadBody, Response> {
        let body = request.into_body();
        let within = self.body_timeout;
        let reading = self.bodies.read(peer, body, MAX_QUESTION_BYTES, within);
        reading.await.map_err(IntoResponse::into_response)
    }

    /// Returns the response to a question that was read. One that waits for its turn, or for the cluster, while there is
    /// no room for others makes room, and is refused.
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

    /// Returns the response with an answer.
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

    /// Gives a sign of life.
    fn beat(&self) {
        *self.alive.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Returns who has given no sign of life for long.
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
    /// The failure policy of the registration says what becomes of the object. Of a 500 the API server passes the text
    /// on to whoever creates it; of a 503 it does not.
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Bad(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Late(_) | Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, format!("{self}\n")).into_response()
    }
}

/// The process lives: an API server that is away is no reason to start it again.
async fn healthz() -> Response {
    http_server::liveness(None)
}

/// The process lives while the threads that answer do.
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
