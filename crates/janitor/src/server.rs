//! gRPC server of a provider, for the janitors of gpuwarden and NVSentinel.
//!
//! A signal is completed even if the caller disconnects. A query for its operation waits for
//! that, and so returns the result.

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
use maintenance::gpu_reset::ResetGpus;
use maintenance::janitor::{Action, Class, FoundOperation, ProviderFailure};
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

/// Number of locks for operations: operations with the same lock wait for each other.
const LOCKS: usize = 64;
/// Idle time before a keepalive ping, and timeout of its response.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// Largest request in bytes: twice the names of as many GPUs as allowed. It is read before the
/// caller is authenticated.
const MAX_REQUEST: usize = 256 * 1024;
/// Most concurrent requests of a connection. A janitor sends one per node in progress;
/// strangers must not send many.
const MAX_STREAMS: u32 = 64;
/// Longest name or id in bytes: above that of any node.
const MAX_ID: usize = 512;

/// Most GPUs in a request: above any machine, and small enough to bound the memory per caller.
const MAX_GPUS: usize = 256;

/// gRPC service of one provider.
struct Service {
    provider: Arc<dyn Provider>,
    callers: Callers,
    locks: Arc<[Mutex<()>; LOCKS]>,
    random: RandomState,
    unnamed: AtomicU64,
    /// Rate limit of the log line about failed signals, which the janitor logs as well.
    failed: Seldom,
}

/// Serves a provider on `listener` until `cancel`, and completes running calls.
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
        locks: Arc::new([const { Mutex::const_new(()) }; LOCKS]),
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
    fn lock_of(&self, operation: &str) -> usize {
        usize::try_from(self.random.hash_one(operation) % LOCKS as u64).unwrap_or_default()
    }

    /// Returns the signal of a request, with an operation id.
    fn signal(&self, mut asked: Signal) -> Result<Signal, ProviderFailure> {
        check(&asked)?;
        // NVSentinel's janitor sends no operation id, so each of its requests is a new
        // operation.
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
        let failed = |failure: ProviderFailure| {
            if let Some(not_logged_before) = self.failed.now() {
                let text = failure.text();
                tracing::warn!(not_logged_before, "{} failed: {text}", action.name());
            }
            grpc::status(&failure, &about)
        };
        let signal = self.signal(asked).map_err(failed)?;
        let lock = self.lock_of(&signal.operation);
        let (provider, locks) = (Arc::clone(&self.provider), Arc::clone(&self.locks));
        tracing::info!(
            node = signal.node,
            operation = signal.operation,
            "{} requested",
            action.name()
        );
        // A separate task, since a signal that a disconnect cut short would have an unknown
        // result.
        let sending = tokio::spawn(async move {
            let _turn = match locks.get(lock) {
                Some(lock) => Some(lock.lock().await),
                None => None,
            };
            provider.send(&signal).await
        });
        match sending.await {
            Ok(sent) => sent.map_err(failed),
            Err(_) => Err(failed(ProviderFailure::new(
                Class::Ambiguous,
                "AMBIGUOUS_RESULT",
                "the provider failed during the call",
            ))),
        }
    }

    /// Returns the progress of a signal and its request id. If the request has no request id,
    /// it only tells whether the operation is known.
    async fn query(
        &self,
        asked: Signal,
        request_id: String,
    ) -> Result<(Result<bool, ProviderFailure>, String), Status> {
        let failed = |failure: ProviderFailure| self.status(&failure);
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
        let _turn = match self.locks.get(self.lock_of(&signal.operation)) {
            Some(lock) => Some(lock.lock().await),
            None => None,
        };
        match self.provider.find(&signal).await.map_err(failed)? {
            FoundOperation::Sent(request_id) => Ok((Ok(false), request_id)),
            FoundOperation::NotSent => Err(grpc::operation_unknown(&signal.operation)),
            FoundOperation::CannotTell => Err(failed(unsupported("finding an operation again"))),
        }
    }

    fn status(&self, failure: &ProviderFailure) -> Status {
        grpc::status(failure, &[("provider", self.provider.name())])
    }

    async fn authorize<T>(&self, request: &Request<T>) -> Result<(), Status> {
        self.callers.check(request.metadata()).await
    }
}

/// Refuses a request without a node, or with fields that are too large.
fn check(asked: &Signal) -> Result<(), ProviderFailure> {
    if asked.node.is_empty() {
        return Err(invalid("node_name is empty"));
    }
    let ResetGpus { uuids, pci_bus_ids } = &asked.gpus;
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

fn invalid(what: &str) -> ProviderFailure {
    ProviderFailure::new(Class::Permanent, "INVALID_REQUEST", what)
}

fn unsupported(what: &str) -> ProviderFailure {
    let message = format!("{what} is not supported");
    ProviderFailure::new(Class::Permanent, "UNSUPPORTED_OPERATION", message)
}

#[tonic::async_trait]
impl CspProviderService for Service {
    async fn send_reboot_signal(
        &self,
        request: Request<SendRebootSignalRequest>,
    ) -> Result<Response<SendRebootSignalResponse>, Status> {
        self.authorize(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Reboot, &request.node_name, &request.operation_id);
        let request_id = self.send(signal).await?;
        Ok(Response::new(SendRebootSignalResponse { request_id }))
    }

    async fn is_node_ready(
        &self,
        request: Request<IsNodeReadyRequest>,
    ) -> Result<Response<IsNodeReadyResponse>, Status> {
        self.authorize(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Reboot, &request.node_name, &request.operation_id);
        let (is_ready, request_id) = self.query(signal, request.request_id).await?;
        Ok(Response::new(IsNodeReadyResponse {
            is_ready: is_ready.map_err(|failure| self.status(&failure))?,
            request_id,
        }))
    }

    async fn send_terminate_signal(
        &self,
        request: Request<SendTerminateSignalRequest>,
    ) -> Result<Response<SendTerminateSignalResponse>, Status> {
        self.authorize(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Terminate, &request.node_name, &request.operation_id);
        let request_id = self.send(signal).await?;
        Ok(Response::new(SendTerminateSignalResponse { request_id }))
    }

    async fn send_gpu_reset_signal(
        &self,
        request: Request<SendGpuResetSignalRequest>,
    ) -> Result<Response<SendGpuResetSignalResponse>, Status> {
        self.authorize(&request).await?;
        let request = request.into_inner();
        let signal = Signal {
            action: Action::Reset,
            node: request.node_name,
            operation: request.operation_id,
            resource: request.cr_name,
            gpus: ResetGpus {
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
        self.authorize(&request).await?;
        let request = request.into_inner();
        let signal = Signal::new(Action::Reset, &request.node_name, &request.operation_id);
        let (is_reset, request_id) = self.query(signal, request.request_id).await?;
        let (is_complete, succeeded, message) = match is_reset {
            Ok(is_reset) => (is_reset, is_reset, String::new()),
            // A permanent failure is a result, not an error of the call.
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
