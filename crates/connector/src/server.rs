//! The gRPC service on the Unix socket.

use std::sync::Arc;
use std::time::Duration;

use contract::HealthEvents;
use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use runtime::unix_grpc;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{AcceptError, Connector};

/// Largest request, in bytes: the default limit of gRPC receivers, which senders know.
pub const MAX_REQUEST_BYTES: usize = 4 * 1024 * 1024;
/// Most requests that are worked on at once; one more is answered `RESOURCE_EXHAUSTED`.
pub const MAX_IN_FLIGHT: usize = 1024;
/// A request that is not answered by then is given up; its events may still be stored.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

struct Service {
    connector: Connector,
    in_flight: Arc<Semaphore>,
}

/// Serves the connector on a bound socket until `cancel`; requests under way are answered.
pub async fn serve(
    listener: UnixListener,
    connector: Connector,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let service = Service {
        connector,
        in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
    };
    let server = PlatformConnectorServer::new(service)
        .max_decoding_message_size(MAX_REQUEST_BYTES)
        .max_encoding_message_size(MAX_REQUEST_BYTES);
    tonic::transport::Server::builder()
        .timeout(REQUEST_TIMEOUT)
        .add_service(server)
        .serve_with_incoming_shutdown(unix_grpc::incoming(listener), cancel.cancelled_owned())
        .await
}

#[tonic::async_trait]
impl PlatformConnector for Service {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        let Ok(_permit) = self.in_flight.try_acquire() else {
            return Err(Status::resource_exhausted(format!(
                "{MAX_IN_FLIGHT} requests are being worked on; send it again later"
            )));
        };
        match self.connector.accept(request.into_inner()).await {
            Ok(_) => Ok(Response::new(())),
            Err(error) => Err(status(&error)),
        }
    }
}

fn status(error: &AcceptError) -> Status {
    match error {
        AcceptError::TooMany { .. } | AcceptError::Invalid { .. } => {
            Status::invalid_argument(error.to_string())
        }
        AcceptError::Store(source) => {
            tracing::error!(err = %source, "the event store did not take events");
            let text = format!("{error}: {source}");
            if source.is_retryable() {
                Status::unavailable(text)
            } else {
                Status::internal(text)
            }
        }
    }
}
