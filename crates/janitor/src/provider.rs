//! What a provider has to do, and which one does it for each action.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use cluster::Cluster;
use domain::janitor::{Action, Failure, Found, JanitorConfig, ProviderPlace};
use runtime::tcp_grpc::AddressError;
use runtime::tls::TlsError;

use crate::client::Remote;
use crate::generic::Generic;

/// A signal to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// What is to be done.
    pub action: Action,
    /// The node.
    pub node: String,
    /// The operation: the same for each try of one request, and never the same for two.
    pub operation: String,
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

    /// Returns whether the node is back after a reboot. A [`Permanent`](domain::janitor::Class::Permanent)
    /// failure says that it will not be.
    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, Failure>;
}

/// The providers of a configuration.
#[derive(Clone)]
pub struct Providers(HashMap<ProviderPlace, Arc<dyn Provider>>);

/// The reason why a provider cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its address is none.
    #[error("cspProviderHost")]
    Address(#[source] AddressError),
    /// The certificates cannot be used.
    #[error("cspProviderCAPath")]
    Certificates(#[source] TlsError),
}

// === impl Providers ===

impl Providers {
    /// Opens the providers that a configuration names. The Jobs of the generic one are made in `namespace`
    /// where the configuration names no other. Must be called within a tokio runtime.
    pub fn open(
        config: &JanitorConfig,
        cluster: &Arc<Cluster>,
        namespace: &str,
    ) -> Result<Self, OpenError> {
        let mut providers: HashMap<ProviderPlace, Arc<dyn Provider>> = HashMap::new();
        for action in config.actions() {
            let Some(rules) = config.rules(action) else {
                continue;
            };
            let place = rules.provider.clone();
            if providers.contains_key(&place) {
                continue;
            }
            let provider: Arc<dyn Provider> = match &place {
                ProviderPlace::Generic => {
                    let generic = config.generic.clone();
                    Arc::new(Generic::new(Arc::clone(cluster), generic, namespace))
                }
                remote => Arc::new(Remote::open(remote)?),
            };
            providers.insert(place, provider);
        }
        Ok(Self(providers))
    }

    /// Returns the provider of a place.
    pub(crate) fn of(&self, place: &ProviderPlace) -> Option<Arc<dyn Provider>> {
        self.0.get(place).cloned()
    }
}
