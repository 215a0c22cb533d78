//! The other end of the protocol: a provider for janitors, gpuwarden's and NVSentinel's.
//!
//! A signal is carried out to its end, also where the caller has gone: whoever asks by its operation then
//! waits for it, and so learns the truth.

mod callers;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use contract::janitor_provider::csp_provider_service_server::{
    CspProviderService, CspProviderServiceServer,
};
use contract::janitor_provider::{
    IsGpuResetCompleteRequest, IsGpuResetCompleteResponse, IsNodeReadyRequest, IsNodeReadyResponse,
    SendGpuResetSignalRequest, SendGpuResetSignalResponse, SendRebootSignalRequest,
    SendRebootSignalResponse, SendTerminateSignalRequest, SendTerminateSignalResponse,
};
use maintenance::gpu_reset::Gpus;
use maintenance::janitor::{Action, Class, Failure, Found};
use runtime::logging::Seldom;
use runtime::tcp_grpc;
use runtime::tls::ServerTls;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

pub use callers::{AUDIENCE, Callers};

use crate::grpc;
use crate::provider::{Provider, Signal};

/// Operations that are looked after apart from each other: those of one room wait for one another.
const ROOMS: usize = 64;
/// The silence after which a connection is asked whether the other end is there, and the longest wait for
/// its answer.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// Largest request (bytes): twice the names of as many GPUs as one may have. It is read before anybody knows who
/// calls.
const MAX_REQUEST: usize = 256 * 1024;
/// Most requests of a connection at once: a janitor has one for each node that it works on, and strangers must
/// not have many.
const MAX_STREAMS: u32 = 64;
/// Longest name and id that is taken (bytes): that of a node, and some.
const MAX_ID: usize = 512;

/// Most GPUs that a request names: more than any machine has, so that whoever calls cannot fill the memory.
const MAX_GPUS: usize = 256;

/// The service over a provider.
struct Service {
    provider: Arc<dyn Provider>,
    callers: Callers,
    rooms: Arc<[Mutex<()>; ROOMS]>,
    random: RandomState,
    unnamed: AtomicU64,
    /// The limit on the line that a signal was not sent, which stands in the janitor's log, too.
    failed: Seldom,
}

/// Serves a provider on `listener` until `cancel`; calls under way are answered.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    provider: Arc<dyn Provider>,
    callers: Callers,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let service = Service {
        provider,
        callers,
        rooms: Arc::new([const { Mutex::const_new(()) }; ROOMS]),
        random: RandomState::new(),
        unnamed: AtomicU64::new(0),
        failed: Seldom::default(),
    };
    let service = CspProviderServiceServer::new(service).max_decoding_message_size(MAX_REQUEST);
    tonic::transport::Server::builder()
        .max_concurrent_streams(Some(MAX_STREAMS))
        .http2_keepalive_interval(Some(PING.0))
        .http2_keepalive_timeout(Some(PING.1))
        .add_service(service)
        .serve_with_incoming_shutdown(tcp_grpc::incoming(listener, tls), cancel.cancelled_owned())
        .await
}

// === impl Service ===

impl Service {
    fn room(&self, operation: &str) -> usize {
        usize::try_from(self.random.hash_one(operation) % ROOMS as u64).unwrap_or_default()
    }

    /// Returns the signal that a request means.
    fn signal(&self, mut asked: Signal) -> Result<Signal, Failure> {
        check(&asked)?;
        // NVSentinel's janitor names no operation: each of its requests is one of its own.
        if asked.operation.is_empty() {
            let count = self.unnamed.fetch_add(1, Ordering::Relaxed);
            let random = self.random.hash_one((count, &asked.node));
            asked.operation = format!("unnamed-{random:016x}");
        }
        Ok(asked)
    }

    async fn send(&self, asked: Signal) -> Result<String, Status> {
        let action = asked.action;
        let about = [
            ("operation", action.name()),
            ("provider", self.provider.name()),
        ];
        let failed = |failure: Failure| {
            if let Some(not_logged_before) = self.failed.now() {
                let text = failure.text();
                tracing::warn!(not_logged_before, "{} failed: {text}", action.name());
            }
            grpc::status(&failure, &about)
        };
        let signal = self.signal(asked).map_err(failed)?;
        let room = self.room(&signal.operation);
        let (provider, rooms) = (Arc::clone(&self.provider), Arc::clone(&self.rooms));
        tracing::info!(
            node = signal.node,
            operation = signal.operation,
            "{} is asked for",
            action.name()
        );
        // Also where the caller goes away: half a signal is what nobody can tell of.
        let sending = tokio::spawn(async move {
            let _turn = match rooms.get(room) {
                Some(room) => Some(room.lock().await),
                None => None,
            };
            provider.send(&signal).await
        });
        match sending.await {
            Ok(sent) => sent.map_err(failed),
            Err(_) => Err(failed(Failure::new(
                Class::Ambiguous,
                "AMBIGUOUS_RESULT",
                "the provider has failed within the call",
            ))),
        }
    }

    /// Returns whether what a signal is for is done, and the request id; without one in the request, only
    /// whether the operation is known.
    async fn look(
        &self,
        asked: Signal,
        request_id: String,
    ) -> Result<(Result<bool, Failure>, String), Status> {
        let failed = |failure: Failure| self.status(&failure);
        if request_id.is_empty() && asked.operation.is_empty() {
            return Err(failed(invalid("request_id and operation_id are empty")));
        }
        let signal = self.signal(asked).map_err(failed)?;
        if !request_id.is_empty() {
            return Ok((
                self.provider.is_ready(&signal, &request_id).await,
                request_id,
            ));
        }
        let _turn = match self.rooms.get(self.room(&signal.operation)) {
            Some(room) => Some(room.lock().await),
            None => None,
        };
        match self.provider.find(&signal).await.map_err(failed)? {
            Found::Sent(request_id) => Ok((Ok(false), request_id)),
            Found::NotSent => Err(grpc::operation_unknown(&signal.operation)),
            Found::CannotTell => Err(failed(unsupported("finding an operation again"))),
        }
    }

    fn status(&self, failure: &Failure) -> Status {
        grpc::status(failure, &[("provider", self.provider.name())])
    }

    async fn known<T>(&self, request: &Request<T>) -> Result<(), Status> {
        self.callers.check(request.metadata()).await
    }
}

/// Refuses a request that is no signal, or larger than any.
fn check(asked: &Signal) -> Result<(), Failure> {
    if asked.node.is_empty() {
        return Err(invalid("node_name is empty"));
    }
    let Gpus { uuids, pci_bus_ids } = &asked.gpus;
    if uuids.len() + pci_bus_ids.len() > MAX_GPUS {
        return Err(invalid("too many GPUs are named"));
    }
    let ids = [&asked.node, &asked.operation, &asked.resource];
    let mut ids = ids.into_iter().chain(uuids).chain(pci_bus_ids);
    if ids.any(|id| id.len() > MAX_ID) {
        return Err(invalid("a name or an id is too long"));
    }
    Ok(())
}

fn invalid(what: &str) -> Failure {
    Failure::new(Class::Permanent, "INVALID_REQUEST", what)
}

fn unsupported(what: &str) -> Failure {
    let message = format!("{what} is not supported");
    Failure::new(Class::Permanent, "UNSUPPORTED_OPERATION", message)
}

#[tonic::async_trait]
impl CspProviderService for Service {
    async fn send_reboot_signal(
        &self,
        request: Request<SendRebootSignalRequest>,
    ) -> Result<Response<SendRebootSignalResponse>, Status> {
        self.known(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Reboot, &request.node_name, &request.operation_id);
        let request_id = self.send(signal).await?;
        Ok(Response::new(SendRebootSignalResponse { request_id }))
    }

    async fn is_node_ready(
        &self,
        request: Request<IsNodeReadyRequest>,
    ) -> Result<Response<IsNodeReadyResponse>, Status> {
        self.known(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Reboot, &request.node_name, &request.operation_id);
        let (is_ready, request_id) = self.look(signal, request.request_id).await?;
        Ok(Response::new(IsNodeReadyResponse {
            is_ready: is_ready.map_err(|failure| self.status(&failure))?,
            request_id,
        }))
    }

    async fn send_terminate_signal(
        &self,
        request: Request<SendTerminateSignalRequest>,
    ) -> Result<Response<SendTerminateSignalResponse>, Status> {
        self.known(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Terminate, &request.node_name, &request.operation_id);
        let request_id = self.send(signal).await?;
        Ok(Response::new(SendTerminateSignalResponse { request_id }))
    }

    async fn send_gpu_reset_signal(
        &self,
        request: Request<SendGpuResetSignalRequest>,
    ) -> Result<Response<SendGpuResetSignalResponse>, Status> {
        self.known(&request).await?;
        let request = request.into_inner();
        let signal = Signal {
            action: Action::Reset,
            node: request.node_name,
            operation: request.operation_id,
            resource: request.cr_name,
            gpus: Gpus {
                uuids: request.gpu_uuids,
                pci_bus_ids: request.gpu_pci_bus_ids,
            },
        };
        let request_id = self.send(signal).await?;
        Ok(Response::new(SendGpuResetSignalResponse { request_id }))
    }

    async fn is_gpu_reset_complete(
        &self,
        request: Request<IsGpuResetCompleteRequest>,
    ) -> Result<Response<IsGpuResetCompleteResponse>, Status> {
        self.known(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Reset, &request.node_name, &request.operation_id);
        let (is_reset, request_id) = self.look(signal, request.request_id).await?;
        let (is_complete, succeeded, message) = match is_reset {
            Ok(is_reset) => (is_reset, is_reset, String::new()),
            // It has failed for good, and that is an answer.
            Err(failure) if failure.class == Class::Permanent => (true, false, failure.text()),
            Err(failure) => return Err(self.status(&failure)),
        };
        Ok(Response::new(IsGpuResetCompleteResponse {
            is_complete,
            succeeded,
            message,
            request_id,
        }))
    }
}
