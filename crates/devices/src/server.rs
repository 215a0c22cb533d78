//! The server on the Unix socket and over the network: gpuwarden's services, NVSentinel's,
//! health and reflection.
//!
//! On the socket, every process that may open it may read; over the network, every client with
//! a certificate. [`Providers`] decides who may write on the socket; network clients cannot
//! write, since their identity is unknown.

mod gpus;
mod providers;
mod reference;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use contract::device::gpu_service_server::GpuServiceServer;
use contract::device::provider_service_server::ProviderServiceServer;
use contract::nvsentinel_device::gpu_service_server::GpuServiceServer as ReferenceServer;
use futures::{Stream, StreamExt as _};
use runtime::tcp_grpc;
use runtime::tls::ServerTls;
use runtime::unix_grpc::{self, UnixPeer};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic::transport::server::Router;
use tonic::{Extensions, Status};

use crate::board::{BoardError, Position};
use crate::watch::Message;
use crate::{DeviceApi, MAX_WATCHERS};

/// Largest request, in bytes: enough for a provider's complete status of a GPU.
pub(crate) const MAX_REQUEST_BYTES: usize = 64 * 1024;
/// Most concurrent calls on one connection; a client queues further ones.
const MAX_STREAMS: u32 = 256;
/// Timeout of a request. For a watch, it covers the start of the response only.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of pings on an idle connection, and timeout of their answers.
const PING: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// Interval of checks for silent providers.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Most connections over the network at the same time: as many as there can be watchers over
/// it.
const MAX_NETWORK_CONNECTIONS: usize = 512;

/// User id that stands for all network watchers, which together get one user's share. No user
/// of a machine has this number.
const NETWORK: u32 = u32::MAX;

/// Processes that may write as providers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Providers {
    /// Processes of root and of gpuwarden's own user, in gpuwarden's namespaces.
    #[default]
    Operators,
    /// Any process that may open the socket.
    Any,
}

/// Stream of messages of a watch.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Implements all services, which differ in their traits.
#[derive(Clone)]
struct Service {
    api: DeviceApi,
    providers: Providers,
    cancel: CancellationToken,
}

/// Serves the API on a bound Unix socket until `cancel`. Watchers then receive an error, and
/// watch again.
pub async fn serve(
    listener: UnixListener,
    api: DeviceApi,
    providers: Providers,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let service = Service {
        api: api.clone(),
        providers,
        cancel: cancel.clone(),
    };
    let serving = (router(service).await)
        .serve_with_incoming_shutdown(unix_grpc::incoming(listener), cancel.cancelled_owned());
    tokio::select! {
        served = serving => served,
        never = listen_for_providers(&api) => match never {},
    }
}

/// Serves the API over TCP until `cancel`, for reading. Without `tls` the connection is
/// unencrypted, which is meant for this machine only; the certificates decide who has access.
pub async fn serve_tcp(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    api: DeviceApi,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let service = Service {
        api,
        providers: Providers::Operators,
        cancel: cancel.clone(),
    };
    let incoming = tcp_grpc::incoming_up_to(listener, tls, MAX_NETWORK_CONNECTIONS);
    (router(service).await)
        .serve_with_incoming_shutdown(incoming, cancel.cancelled_owned())
        .await
}

/// Creates a server with all services.
async fn router(service: Service) -> Router {
    let ours = GpuServiceServer::new(service.clone()).max_decoding_message_size(MAX_REQUEST_BYTES);
    let provider =
        ProviderServiceServer::new(service.clone()).max_decoding_message_size(MAX_REQUEST_BYTES);
    let reference = ReferenceServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<GpuServiceServer<Service>>().await;
    health.set_serving::<ProviderServiceServer<Service>>().await;
    health.set_serving::<ReferenceServer<Service>>().await;
    let mut server = builder()
        .add_service(ours)
        .add_service(provider)
        .add_service(reference)
        .add_service(health_service);
    // Clients use either version of reflection.
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => server = server.add_service(v1).add_service(v1alpha),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(err = %error, "cannot serve gRPC reflection");
        }
    }
    server
}

/// Creates a server with the limits of this room.
pub(crate) fn builder() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .timeout(REQUEST_TIMEOUT)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(PING.0))
        .http2_keepalive_timeout(Some(PING.1))
}

/// Returns the reflection service for gpuwarden's GPU services.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(contract::DESCRIPTORS)
        .with_service_name(<GpuServiceServer<Service> as NamedService>::NAME)
        .with_service_name(<ProviderServiceServer<Service> as NamedService>::NAME)
        .with_service_name(<ReferenceServer<Service> as NamedService>::NAME)
}

/// Checks periodically for silent providers.
async fn listen_for_providers(api: &DeviceApi) -> std::convert::Infallible {
    let mut look = tokio::time::interval(LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        api.expire();
    }
}

// === impl Service ===

impl Service {
    /// Returns the messages to a watcher from a version on. The stream ends with an error when
    /// the server stops.
    fn watch<T: From<Message> + 'static>(
        &self,
        version: &str,
        extensions: &Extensions,
    ) -> Result<Answers<T>, Status> {
        let from = match version {
            "" => None,
            version => Some(self.position(version)?),
        };
        let user = match extensions.get::<UnixPeer>() {
            Some(peer) => peer.sharing_user(),
            None => Some(NETWORK),
        };
        let messages = self.api.watch(from, user).ok_or_else(|| {
            Status::resource_exhausted(format!(
                "there are too many watchers: {MAX_WATCHERS} in all, of one user, or over the network, an \
                 eighth"
            ))
        })?;
        let ends = self.cancel.clone().cancelled_owned();
        let ending = futures::stream::once(async {
            Err(Status::unavailable(
                "the server ends; watch again from the last version",
            ))
        });
        let messages = messages
            .map(|message| Ok(T::from(message)))
            .take_until(ends);
        Ok(Box::pin(messages.chain(ending)))
    }

    fn position(&self, version: &str) -> Result<Position, Status> {
        self.api
            .board()
            .position(version)
            .map_err(|error| status(&error))
    }
}

/// Converts a refused write to a gRPC status.
fn status(error: &BoardError) -> Status {
    let text = error.to_string();
    match error {
        BoardError::NoSuchGpu { .. } => Status::not_found(text),
        BoardError::NotRegistered { .. } => Status::failed_precondition(text),
        BoardError::Owned { .. } | BoardError::Taken { .. } => Status::permission_denied(text),
        BoardError::Invalid { .. } => Status::invalid_argument(text),
        BoardError::TooMany { .. } | BoardError::TooManyOfOthers { .. } => {
            Status::resource_exhausted(text)
        }
    }
}
