//! What a provider has to do.

use async_trait::async_trait;
use maintenance::gpu_reset::Gpus;
use maintenance::janitor::{Action, Failure, Found};
use runtime::tcp_grpc::AddressError;
use runtime::tls::TlsError;

/// A signal to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// What is to be done.
    pub action: Action,
    /// The node.
    pub node: String,
    /// The operation: the same for each try of one request, and never the same for two.
    pub operation: String,
    /// The name of its resource; empty where nobody has said it.
    pub resource: String,
    /// The GPUs, for a reset.
    pub gpus: Gpus,
}

/// A service that acts on machines.
///
/// A failure says whether the signal may have had an effect: nothing else does the janitor go by.
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// Returns its name, for people.
    fn name(&self) -> &'static str;

    /// Sends a signal, and returns its request id. Of an operation that it knows it sends none, and returns
    /// the same id.
    async fn send(&self, signal: &Signal) -> Result<String, Failure>;

    /// Returns whether a signal was sent, by its operation.
    async fn find(&self, signal: &Signal) -> Result<Found, Failure>;

    /// Returns whether the node is back after a reboot, or its GPUs are reset. A
    /// [`Permanent`](maintenance::janitor::Class::Permanent) failure says that it will not be.
    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, Failure>;
}

// === impl Signal ===

impl Signal {
    /// Returns the signal of an operation to a node, all of its GPUs included.
    pub fn new(action: Action, node: &str, operation: &str) -> Self {
        Self {
            action,
            node: node.to_owned(),
            operation: operation.to_owned(),
            resource: String::new(),
            gpus: Gpus::default(),
        }
    }
}

/// The reason why a provider cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its address is none.
    #[error("cspProviderHost")]
    Address(#[source] AddressError),
    /// The certificates cannot be used.
    #[error("cspProviderCAPath")]
    Certificates(#[source] TlsError),
    /// The certificates of BMCs cannot be checked.
    #[error("redfish.caPath")]
    BmcCertificates(#[source] TlsError),
}
