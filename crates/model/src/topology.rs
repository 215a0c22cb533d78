//! Places of a node that faults of several nodes may have in common: its NVLink domain and its
//! rack. An event has them in its metadata: the labels of its node.

use std::collections::BTreeMap;

use contract::{HealthEvent, keys};

/// Place that faults of several nodes may have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Node, by name.
    Node(String),
    /// NVLink domain; of machines without one of the labels the chassis, by serial number.
    NvlinkDomain(String),
    /// Rack.
    Rack(String),
    /// Job.
    Job(String),
}

// === impl Place ===

impl Place {
    /// Returns the places of an event.
    pub fn all_of(event: &HealthEvent) -> impl Iterator<Item = Self> {
        let places = [
            Some(Self::Node(event.node_name.clone())),
            Self::nvlink_domain(event),
            first(event, &keys::RACK_LABELS).map(Self::Rack),
            first(event, &[keys::META_JOB]).map(Self::Job),
        ];
        places.into_iter().flatten()
    }

    /// Returns the NVLink domain of an event.
    pub fn nvlink_domain(event: &HealthEvent) -> Option<Self> {
        let chassis = || first(event, &[keys::META_CHASSIS_SERIAL]);
        let domain = first(event, &keys::NVLINK_DOMAIN_LABELS).or_else(chassis);
        domain.map(Self::NvlinkDomain)
    }
}

/// Returns the labels of a node that say where it is and that an event of the node lacks.
pub fn missing_labels(
    event: &HealthEvent,
    labels: &BTreeMap<String, String>,
) -> Vec<(String, String)> {
    let keys = keys::NVLINK_DOMAIN_LABELS.iter().chain(&keys::RACK_LABELS);
    let missing = keys.filter(|key| !event.metadata.contains_key(**key));
    let missing = missing.filter_map(|key| labels.get_key_value(*key));
    missing
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// Returns the first of these metadata of an event that has a value.
fn first(event: &HealthEvent, keys: &[&str]) -> Option<String> {
    let mut values = keys.iter().filter_map(|key| event.metadata.get(*key));
    values.find(|value| !value.is_empty()).cloned()
}
