//! The server on the Unix socket, and over the network: our services, NVSentinel's, health and
//! reflection.
//!
//! Whoever may open the socket reads, and over the network whoever has a certificate. Who may write is
//! [`Providers`], and nobody over the network: who writes there is not known.

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
use crate::watch::Told;
use crate::{DeviceApi, MAX_WATCHERS};

/// Largest request, in bytes: a provider's whole status of a GPU has room in it.
pub(crate) const MAX_REQUEST_BYTES: usize = 64 * 1024;
/// Most calls on one connection at once; a client holds back more.
const MAX_STREAMS: u32 = 256;
/// A request that is not answered by then is given up. A watch is answered by its begin.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two questions to a silent connection whether the other end is there, and time
/// for the answer.
const PING: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// Pause between two looks whether providers are heard.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Most connections over the network at the same time: as many as watchers can have places there.
const MAX_NETWORK_CONNECTIONS: usize = 512;

/// The user whose share all watchers over the network take together. No user of a machine has this
/// number.
const NETWORK: u32 = u32::MAX;

/// The processes that may write as providers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Providers {
    /// Those of root and of our own user, in our own namespaces.
    #[default]
    Operators,
    /// Whoever may open the socket.
    Any,
}

/// The stream of answers of a watch.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// All services, which differ in their traits.
#[derive(Clone)]
struct Service {
    api: DeviceApi,
    providers: Providers,
    cancel: CancellationToken,
}

/// Serves the API on a bound Unix socket until `cancel`. Watchers are told then that it ends, and
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

/// Serves the API over TCP until `cancel`, for reading. Without `tls` it goes in the open, which is
/// for this machine itself; whom the certificates let in is theirs to say.
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

/// Returns a server of all services.
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
    // Clients speak either of its versions.
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => server = server.add_service(v1).add_service(v1alpha),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(err = %error, "gRPC reflection is not served");
        }
    }
    server
}

/// Returns a server with the limits of all of this room.
pub(crate) fn builder() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .timeout(REQUEST_TIMEOUT)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(PING.0))
        .http2_keepalive_timeout(Some(PING.1))
}

/// Returns what tells clients our services of GPUs.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(contract::DESCRIPTORS)
        .with_service_name(<GpuServiceServer<Service> as NamedService>::NAME)
        .with_service_name(<ProviderServiceServer<Service> as NamedService>::NAME)
        .with_service_name(<ReferenceServer<Service> as NamedService>::NAME)
}

/// Looks all the time whether providers are heard.
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
    /// Returns what a watcher is told from a version on. It ends with an error when the server
    /// does.
    fn watch<T: From<Told> + 'static>(
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
        let told = self.api.watch(from, user).ok_or_else(|| {
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
        let told = told.map(|told| Ok(T::from(told))).take_until(ends);
        Ok(Box::pin(told.chain(ending)))
    }

    fn position(&self, version: &str) -> Result<Position, Status> {
        self.api
            .board()
            .position(version)
            .map_err(|error| status(&error))
    }
}

/// Returns the answer to what the board has refused.
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
