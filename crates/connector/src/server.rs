//! gRPC service, and its server on the Unix socket.

use std::error::Error as _;
use std::time::Duration;

use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use contract::{HealthEvents, keys};
use jiff::Timestamp;
use model::event;
use runtime::unix_grpc::{self, UnixPeer};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Extensions, Request, Response, Status};

use super::{AcceptError, Caller, Connector, Reason, SinkError};
use super::{addressee, refusal};

mod admission;
mod preflight;

use admission::Reached;

pub use admission::Admission;
pub(crate) use preflight::problem;

/// Largest request (bytes): the default limit of gRPC receivers, which senders expect.
///
/// A larger request is answered `OUT_OF_RANGE`, with both sizes, before it is read. Other
/// receivers answer `RESOURCE_EXHAUSTED`. Do not change this: here that code means "retry
/// later", and agents would retry forever, while on `OUT_OF_RANGE` they halve a batch and put
/// aside a single event that is too large (`deliver/answer.rs`).
pub const MAX_REQUEST_BYTES: usize = 4 * 1024 * 1024;
/// Most concurrent requests; a further one is answered `RESOURCE_EXHAUSTED`. One user of this
/// machine may have a share of them ([`runtime::shares`]).
pub const MAX_IN_FLIGHT: usize = 1024;
/// Most bytes of requests being read or processed; a further request is answered
/// `RESOURCE_EXHAUSTED`. Room for 16 of the largest, or for a whole node's reports in small
/// ones. Shared like the requests.
pub const MAX_IN_FLIGHT_BYTES: usize = 16 * MAX_REQUEST_BYTES;
/// Most concurrent calls on one connection; clients hold back further ones. As many as one user
/// may have on all its connections.
pub const MAX_STREAMS: u32 = 128;
/// Time limit for a request. Its events may still be stored afterwards.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between pings on a silent connection, and time limit for the response: a stopped
/// process does not keep its connection.
const PING: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));

/// Function that identifies the sender of a request, from the extensions set by lower layers;
/// `None` if the sender has proven no identity.
pub type Identify = fn(&Extensions) -> Option<Caller>;

/// Implementation of the service behind [`Admission`].
pub struct ConnectorService {
    connector: Connector,
}

/// Returns the service, for a server of any kind. Requests without a sender known to `identify`
/// are refused as `UNAUTHENTICATED`.
pub fn service(
    connector: Connector,
    identify: Identify,
) -> Admission<PlatformConnectorServer<ConnectorService>> {
    let service = PlatformConnectorServer::new(ConnectorService { connector })
        .max_decoding_message_size(MAX_REQUEST_BYTES)
        .max_encoding_message_size(MAX_REQUEST_BYTES);
    Admission::new(service, identify)
}

/// Serves the connector and the counting of preflight checks on a bound Unix socket until
/// `cancel`; requests in progress are answered.
pub async fn serve(
    listener: UnixListener,
    connector: Connector,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let local: Identify = |extensions| extensions.get::<UnixPeer>().copied().map(Caller::Local);
    let events = service(connector.clone(), local);
    let checks = events.beside(preflight::service(connector));
    tonic::transport::Server::builder()
        .timeout(REQUEST_TIMEOUT)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(PING.0))
        .http2_keepalive_timeout(Some(PING.1))
        .add_service(events)
        .add_service(checks)
        .serve_with_incoming_shutdown(unix_grpc::incoming(listener), cancel.cancelled_owned())
        .await
}

/// Marks a request as having reached its service, and returns the sender.
fn reached_by<T>(request: &mut Request<T>) -> Result<Caller, Status> {
    if let Some(reached) = request.extensions().get::<Reached>() {
        reached.set();
    }
    let caller = request.extensions_mut().remove::<Caller>();
    caller.ok_or_else(|| Status::internal("a request bypassed the admission"))
}

// === impl ConnectorService ===

#[tonic::async_trait]
impl PlatformConnector for ConnectorService {
    async fn health_event_occurred_v1(
        &self,
        mut request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        let caller = reached_by(&mut request)?;
        let ours = self.connector.store();
        addressee::check(request.metadata(), ours.as_ref())?;
        let sent = request.metadata().get(keys::HEADER_SENT_AT);
        let sent: Option<Timestamp> = sent.and_then(|sent| sent.to_str().ok()?.parse().ok());
        let mut events = request.into_inner();
        if let Some(sent) = sent {
            let now = (self.connector.clock)();
            for event in &mut events.events {
                event::accepted_by_our_clock(event, sent, now);
            }
        }
        match self.connector.accept(events, &caller).await {
            Ok(_) => Ok(addressee::taken(ours.as_ref())),
            Err(error) => Err(status(&error)),
        }
    }
}

pub(super) fn status(error: &AcceptError) -> Status {
    match error {
        AcceptError::TooMany { .. } => Status::invalid_argument(error.to_string()),
        AcceptError::TooFast { .. } => Status::resource_exhausted(error.to_string()),
        AcceptError::Refused { refused, .. } => {
            let valid = |refused: &super::Refused| refused.reason == Reason::ForeignNode;
            let code = if refused.iter().all(valid) {
                Code::PermissionDenied
            } else {
                Code::InvalidArgument
            };
            Status::with_metadata(code, error.to_string(), refusal::header(refused))
        }
        AcceptError::Sink(sink) => {
            let mut text = format!("{error}: {sink}");
            if let Some(cause) = sink.source() {
                text = format!("{text}: {cause}");
            }
            if sink.is_retryable() {
                text.push_str("; send them again");
            }
            match sink {
                SinkError::Full { .. } => Status::resource_exhausted(text),
                SinkError::Unavailable(_) => Status::unavailable(text),
                SinkError::Failed(_) => Status::internal(text),
            }
        }
    }
}
