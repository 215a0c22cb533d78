//! Delivery of a check's events to the connector of its node, over the Unix socket mounted into
//! the pod, or to the webhook if there is none, which passes them to the controller.

use std::path::{Path, PathBuf};
use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvent, HealthEvents};
use hyper::{Method, StatusCode};
use preflight::rendezvous::{EVENTS_PATH, REPORT_VARIABLE};
use prost::Message as _;
use runtime::backoff::Backoff;
use tokio::time::Instant;
use tonic::transport::Endpoint;
use tonic::{Code, Status};

use crate::environment::{BadVariable, Environment};
use crate::webhook::{Webhook, refusal};

/// First and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Time limit for one attempt, so that a hanging connector is tried again.
const ATTEMPT: Duration = Duration::from_secs(10);

/// Destination of a check's reports.
#[derive(Clone)]
pub(crate) enum Way {
    /// Socket of the node's connector.
    Socket(PathBuf),
    /// The webhook, over HTTPS.
    Webhook(Webhook),
}

/// Reason why the events were not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    /// No process listens on the socket.
    #[error(
        "no connector listens on {}: the result is not reported (is the agent of this node running, \
         and its directory mounted?)",
        socket.display()
    )]
    Absent { socket: PathBuf },
    /// The connector refuses the events.
    #[error("the connector does not accept the result: {0}")]
    Refused(String),
    /// The connector did not accept the events in time.
    #[error("the connector did not accept the result within {within:?}: {last}")]
    Late { within: Duration, last: String },
}

/// Default socket of the connector (preflight ADR).
const SOCKET: &str = "/var/run/nvsentinel.sock";

// === impl Way ===

impl Way {
    /// Reads the destination from the environment.
    pub(crate) fn read(environment: &Environment) -> Result<Self, BadVariable> {
        if let Some(webhook) = Webhook::read(environment, REPORT_VARIABLE)? {
            return Ok(Self::Webhook(webhook));
        }
        let allowed = "the path of a socket, such as unix:///var/run/nvsentinel.sock";
        let socket = environment.parsed(&["PLATFORM_CONNECTOR_SOCKET"], allowed, |text| {
            let path = PathBuf::from(text.strip_prefix("unix://").unwrap_or(text));
            path.is_absolute().then_some(path)
        })?;
        Ok(Self::Socket(
            socket.unwrap_or_else(|| PathBuf::from(SOCKET)),
        ))
    }
}

/// Sends events, and retries until they are accepted or the time is over.
pub(crate) async fn report(
    way: &Way,
    events: Vec<HealthEvent>,
    within: Duration,
) -> Result<(), ReportError> {
    let end = Instant::now() + within;
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let events = HealthEvents {
        version: EVENT_VERSION,
        events,
    };
    loop {
        let sent = async {
            match way {
                Way::Socket(socket) => send(socket, events.clone()).await,
                Way::Webhook(webhook) => post(webhook, &events).await,
            }
        };
        let attempt = tokio::time::timeout(ATTEMPT, sent);
        let last = match tokio::time::timeout_at(end, attempt).await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(Problem::Refused(text)))) => return Err(ReportError::Refused(text)),
            Ok(Ok(Err(problem))) => problem,
            Ok(Err(_)) | Err(_) => Problem::Failed("no answer".to_owned()),
        };
        let next = Instant::now() + backoff.pause();
        if next >= end {
            return Err(match last {
                Problem::Absent(socket) => ReportError::Absent { socket },
                Problem::Refused(last) | Problem::Failed(last) => {
                    ReportError::Late { within, last }
                }
            });
        }
        tokio::time::sleep_until(next).await;
    }
}

/// Reason why an attempt failed.
enum Problem {
    Absent(PathBuf),
    /// A retry would be refused, too.
    Refused(String),
    Failed(String),
}

async fn send(socket: &Path, events: HealthEvents) -> Result<(), Problem> {
    let address = format!("unix://{}", socket.display());
    let endpoint = Endpoint::try_from(address).map_err(|_| Problem::Absent(socket.to_owned()))?;
    let channel = endpoint.connect().await;
    let channel = channel.map_err(|_| Problem::Absent(socket.to_owned()))?;
    let answer = PlatformConnectorClient::new(channel)
        .health_event_occurred_v1(events)
        .await;
    answer.map(drop).map_err(|status| problem(&status))
}

async fn post(webhook: &Webhook, events: &HealthEvents) -> Result<(), Problem> {
    let body = events.encode_to_vec();
    match webhook.ask(Method::POST, EVENTS_PATH, body).await {
        Ok((StatusCode::OK, _)) => Ok(()),
        Ok((status, body)) if is_final(status) => Err(Problem::Refused(refusal(status, &body))),
        Ok((status, body)) => Err(Problem::Failed(refusal(status, &body))),
        Err(why) => Err(Problem::Failed(format!("{}: {why}", webhook.uri()))),
    }
}

/// Returns true if a retry would get the same answer. A token may not be known yet.
fn is_final(status: StatusCode) -> bool {
    let may_pass = [StatusCode::UNAUTHORIZED, StatusCode::TOO_MANY_REQUESTS];
    status.is_client_error() && !may_pass.contains(&status)
}

fn problem(status: &Status) -> Problem {
    let text = format!("{:?}: {}", status.code(), status.message());
    match status.code() {
        Code::InvalidArgument
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::FailedPrecondition
        | Code::Unimplemented
        | Code::OutOfRange => Problem::Refused(text),
        _ => Problem::Failed(text),
    }
}
