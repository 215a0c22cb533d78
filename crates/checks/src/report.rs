//! Brings the events of a check to the connector of its node, over the Unix socket that is mounted into
//! the pod.

use std::path::{Path, PathBuf};
use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvent, HealthEvents};
use runtime::backoff::Backoff;
use tokio::time::Instant;
use tonic::transport::Endpoint;
use tonic::{Code, Status};

/// First and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Longest time for one attempt: a connector that hangs is asked again.
const ATTEMPT: Duration = Duration::from_secs(10);

/// The events were not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    /// Nobody listens on the socket.
    #[error(
        "no connector listens on {}: the result is not reported (is the agent of this node running, \
         and its directory mounted?)",
        socket.display()
    )]
    Absent { socket: PathBuf },
    /// The connector does not want them.
    #[error("the connector does not take the result: {0}")]
    Refused(String),
    /// The connector did not take them in time.
    #[error("the connector did not take the result within {within:?}: {last}")]
    Late { within: Duration, last: String },
}

/// Sends events, and tries again until they are taken or the time is over.
pub(crate) async fn report(
    socket: &Path,
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
        let attempt = tokio::time::timeout(ATTEMPT, send(socket, events.clone()));
        let last = match tokio::time::timeout_at(end, attempt).await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(Problem::Refused(text)))) => return Err(ReportError::Refused(text)),
            Ok(Ok(Err(problem))) => problem,
            Ok(Err(_)) | Err(_) => Problem::Failed("no answer".to_owned()),
        };
        let next = Instant::now() + backoff.pause();
        if next >= end {
            return Err(match last {
                Problem::Absent => ReportError::Absent {
                    socket: socket.to_owned(),
                },
                Problem::Refused(last) | Problem::Failed(last) => {
                    ReportError::Late { within, last }
                }
            });
        }
        tokio::time::sleep_until(next).await;
    }
}

/// The reason why an attempt did not succeed.
enum Problem {
    Absent,
    /// It would not be taken another time either.
    Refused(String),
    Failed(String),
}

async fn send(socket: &Path, events: HealthEvents) -> Result<(), Problem> {
    let address = format!("unix://{}", socket.display());
    let endpoint = Endpoint::try_from(address).map_err(|_| Problem::Absent)?;
    let channel = endpoint.connect().await.map_err(|_| Problem::Absent)?;
    let answer = PlatformConnectorClient::new(channel)
        .health_event_occurred_v1(events)
        .await;
    answer.map(drop).map_err(|status| problem(&status))
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
