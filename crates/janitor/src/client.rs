//! Remote provider over NVSentinel's gRPC protocol.
//!
//! One connection is kept and re-established when it breaks. Certificates and the token are
//! read again after they change.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use contract::janitor_provider::csp_provider_service_client::CspProviderServiceClient as Client;
use contract::janitor_provider::{
    IsGpuResetCompleteRequest, IsNodeReadyRequest, SendGpuResetSignalRequest,
    SendRebootSignalRequest, SendTerminateSignalRequest,
};
use maintenance::janitor::{Action, Class, FoundOperation, ProviderFailure, ProviderPlace};
use runtime::tcp_grpc;
use runtime::tls::ClientTls;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::grpc;
use crate::provider::{Provider, ProviderOpenError, Signal};

/// Timeout of a signal. NVSentinel's provider for Nebius takes four minutes.
const SEND: Duration = Duration::from_secs(5 * 60);
/// Timeout of a query.
const ASK: Duration = Duration::from_secs(30);

/// Client of a remote provider.
#[derive(Debug)]
pub struct Remote {
    channel: Channel,
    token: Option<PathBuf>,
}

// === impl Remote ===

impl Remote {
    /// Creates the client for a place; it connects when needed. Must be called within a tokio
    /// runtime.
    pub fn open(place: &ProviderPlace) -> Result<Self, ProviderOpenError> {
        match place {
            ProviderPlace::Generic | ProviderPlace::Redfish | ProviderPlace::Label => {
                let url = String::new();
                let malformed = tcp_grpc::AddressError::Malformed { url };
                Err(ProviderOpenError::Address(malformed))
            }
            ProviderPlace::Open { host } => {
                let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
                let malformed = || tcp_grpc::AddressError::Malformed { url: host.clone() };
                let port = port
                    .parse()
                    .map_err(|_| ProviderOpenError::Address(malformed()))?;
                let name = name.trim_start_matches('[').trim_end_matches(']');
                let channel =
                    tcp_grpc::open_channel(name, port).map_err(ProviderOpenError::Address)?;
                Ok(Self {
                    channel,
                    token: None,
                })
            }
            ProviderPlace::Tls {
                host,
                authority,
                token,
            } => {
                let tls = ClientTls::load(authority.into(), None);
                let tls = Arc::new(tls.map_err(ProviderOpenError::Certificates)?);
                let channel = tcp_grpc::channel(&format!("https://{host}"), Some(tls));
                Ok(Self {
                    channel: channel.map_err(ProviderOpenError::Address)?,
                    token: Some(token.into()),
                })
            }
        }
    }

    /// Returns a client, and a request with the current token.
    async fn request<T>(
        &self,
        message: T,
        limit: Duration,
    ) -> Result<(Client<Channel>, Request<T>), ProviderFailure> {
        let mut request = Request::new(message);
        request.set_timeout(limit);
        if let Some(path) = &self.token {
            let unreadable = |what: String| {
                let message = format!("the token {}: {what}", path.display());
                ProviderFailure::new(Class::Transient, "AUTHENTICATION_FAILED", message)
            };
            let token = tokio::fs::read_to_string(path).await;
            let token = token.map_err(|error| unreadable(error.to_string()))?;
            let header = format!("Bearer {}", token.trim());
            let mut value = MetadataValue::try_from(header).map_err(|_| {
                unreadable("it contains characters that a header cannot have".to_owned())
            })?;
            value.set_sensitive(true);
            request.metadata_mut().insert("authorization", value);
        }
        Ok((Client::new(self.channel.clone()), request))
    }

    /// Queries the state of a signal; without a request id, only whether the operation is
    /// known.
    async fn query(
        &self,
        signal: &Signal,
        request_id: &str,
    ) -> Result<Result<Progress, Status>, ProviderFailure> {
        let (node_name, operation_id) = (signal.node.clone(), signal.operation.clone());
        let request_id = request_id.to_owned();
        if signal.action == Action::Reset {
            let message = IsGpuResetCompleteRequest {
                node_name,
                request_id,
                operation_id,
            };
            let (mut client, request) = self.request(message, ASK).await?;
            let answer = within(ASK, client.is_gpu_reset_complete(request)).await;
            return Ok(answer.map(|answer| {
                let failed = answer.is_complete && !answer.succeeded;
                let failure =
                    || ProviderFailure::new(Class::Permanent, "GPU_RESET_FAILED", answer.message);
                let progress = if failed {
                    Err(failure())
                } else {
                    Ok(answer.is_complete)
                };
                (progress, answer.request_id)
            }));
        }
        let message = IsNodeReadyRequest {
            node_name,
            request_id,
            operation_id,
        };
        let (mut client, request) = self.request(message, ASK).await?;
        let answer = within(ASK, client.is_node_ready(request)).await;
        Ok(answer.map(|answer| (Ok(answer.is_ready), answer.request_id)))
    }
}

/// Progress of a signal, and its request id.
type Progress = (Result<bool, ProviderFailure>, String);

/// Limits a call to `limit`, in case the server disappears silently.
async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded(format!(
            "no answer within {} s",
            limit.as_secs()
        ))),
    }
}

#[async_trait]
impl Provider for Remote {
    fn name(&self) -> &'static str {
        "grpc"
    }

    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        let (node_name, operation_id) = (signal.node.clone(), signal.operation.clone());
        let answer = match signal.action {
            Action::Reboot => {
                let message = SendRebootSignalRequest {
                    node_name,
                    operation_id,
                };
                let (mut client, request) = self.request(message, SEND).await?;
                let answer = within(SEND, client.send_reboot_signal(request)).await;
                answer.map(|answer| answer.request_id)
            }
            Action::Terminate => {
                let message = SendTerminateSignalRequest {
                    node_name,
                    operation_id,
                };
                let (mut client, request) = self.request(message, SEND).await?;
                let answer = within(SEND, client.send_terminate_signal(request)).await;
                answer.map(|answer| answer.request_id)
            }
            Action::Reset => {
                let message = SendGpuResetSignalRequest {
                    node_name,
                    cr_name: signal.resource.clone(),
                    gpu_uuids: signal.gpus.uuids.clone(),
                    gpu_pci_bus_ids: signal.gpus.pci_bus_ids.clone(),
                    operation_id,
                };
                let (mut client, request) = self.request(message, SEND).await?;
                let answer = within(SEND, client.send_gpu_reset_signal(request)).await;
                answer.map(|answer| answer.request_id)
            }
        };
        answer.map_err(|status| grpc::failure(&status))
    }

    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure> {
        let status = match self.query(signal, "").await? {
            // A provider without operation ids leaves the field empty.
            Ok((_, request_id)) if request_id.is_empty() => return Ok(FoundOperation::CannotTell),
            Ok((_, request_id)) => return Ok(FoundOperation::Sent(request_id)),
            Err(status) => status,
        };
        let details = grpc::parse_details(&status);
        if details.reason.as_deref() == Some(grpc::OPERATION_UNKNOWN) {
            return Ok(FoundOperation::NotSent);
        }
        // An error of the connection is not an answer of the provider.
        let unanswered = std::error::Error::source(&status).is_some();
        let passes = unanswered
            || matches!(
                status.code(),
                Code::Unavailable
                    | Code::DeadlineExceeded
                    | Code::ResourceExhausted
                    | Code::Unauthenticated
                    | Code::Aborted
                    | Code::Cancelled
            );
        let failure = grpc::failure(&status);
        if passes || (details.has_class() && failure.class != Class::Permanent) {
            return Err(failure);
        }
        Ok(FoundOperation::CannotTell)
    }

    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, ProviderFailure> {
        let status = match self.query(signal, request_id).await? {
            Ok((progress, _)) => return progress,
            Err(status) => status,
        };
        let failure = grpc::failure(&status);
        // NVSentinel's providers use the same code for all errors, so without a class it means
        // nothing.
        let class = if grpc::parse_details(&status).has_class() {
            failure.class
        } else {
            Class::Transient
        };
        Err(ProviderFailure { class, ..failure })
    }
}
