//! Providers of a configuration, by the place where each is configured.

use std::collections::HashMap;
use std::sync::Arc;

use cluster::Cluster;
use maintenance::janitor::{JanitorConfig, ProviderPlace};

use crate::client::Remote;
use crate::generic::Generic;
use crate::label::Label;
use crate::provider::{Provider, ProviderOpenError};
use crate::redfish::Redfish;

/// Open providers of a configuration. Cheap to clone.
#[derive(Clone)]
pub struct Providers(HashMap<ProviderPlace, Arc<dyn Provider>>);

// === impl Providers ===

impl Providers {
    /// Opens the providers that a configuration names. `namespace` is the default for the Jobs
    /// of the generic provider. Must be called within a tokio runtime.
    pub fn open(
        config: &JanitorConfig,
        cluster: &Arc<Cluster>,
        namespace: &str,
    ) -> Result<Self, ProviderOpenError> {
        let mut providers: HashMap<ProviderPlace, Arc<dyn Provider>> = HashMap::new();
        let rules = config.actions().filter_map(|action| config.rules(action));
        let places = rules.map(|rules| &rules.provider);
        for place in places.chain(&config.reset_provider).cloned() {
            if providers.contains_key(&place) {
                continue;
            }
            let provider: Arc<dyn Provider> = match &place {
                ProviderPlace::Generic => {
                    let generic = config.generic.clone();
                    Arc::new(Generic::new(Arc::clone(cluster), generic, namespace))
                }
                ProviderPlace::Redfish => {
                    let redfish = config.redfish.clone();
                    Arc::new(Redfish::open(Arc::clone(cluster), redfish)?)
                }
                ProviderPlace::Label => {
                    let label = config.label.clone();
                    Arc::new(Label::new(Arc::clone(cluster), label))
                }
                remote => Arc::new(Remote::open(remote)?),
            };
            providers.insert(place, provider);
        }
        Ok(Self(providers))
    }

    /// Returns the provider for a place.
    pub(crate) fn of(&self, place: &ProviderPlace) -> Option<Arc<dyn Provider>> {
        self.0.get(place).cloned()
    }
}
