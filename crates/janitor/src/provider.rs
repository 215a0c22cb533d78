//! Interface between the janitor and the services that act on machines.

use async_trait::async_trait;
use maintenance::gpu_reset::ResetGpus;
use maintenance::janitor::{Action, FoundOperation, ProviderFailure};
use runtime::tcp_grpc::AddressError;
use runtime::tls::TlsError;

/// Request to act on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    pub action: Action,
    pub node: String,
    /// Id of the operation: the same for all attempts of one request, and never shared by two
    /// requests.
    pub operation: String,
    /// Name of the Kubernetes resource behind the request; empty if the caller did not send it.
    pub resource: String,
    /// GPUs to reset; ignored by other actions.
    pub gpus: ResetGpus,
}

/// Service that acts on machines.
///
/// The class of a failure must be right about whether the signal may have had an effect: the
/// janitor decides about a retry by nothing else.
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// Returns the name for log lines and metadata.
    fn name(&self) -> &'static str;

    /// Sends a signal and returns its request id. If the operation was already signalled, it
    /// only returns the same id.
    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure>;

    /// Returns whether the operation of a signal was sent before.
    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure>;

    /// Returns true once the node has rebooted and is ready, or its GPUs are reset. Fails with
    /// [`Permanent`](maintenance::janitor::Class::Permanent) if that will never happen.
    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, ProviderFailure>;
}

// === impl Signal ===

impl Signal {
    /// Creates a signal for all GPUs of a node and without a resource name.
    pub fn new(action: Action, node: &str, operation: &str) -> Self {
        Self {
            action,
            node: node.to_owned(),
            operation: operation.to_owned(),
            resource: String::new(),
            gpus: ResetGpus::default(),
        }
    }
}

/// Error of opening a provider. The text is the key of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ProviderOpenError {
    /// The address is malformed.
    #[error("cspProviderHost")]
    Address(#[source] AddressError),
    /// The certificate authorities cannot be loaded.
    #[error("cspProviderCAPath")]
    Certificates(#[source] TlsError),
    /// The certificate authorities of BMCs cannot be loaded.
    #[error("redfish.caPath")]
    BmcCertificates(#[source] TlsError),
}
