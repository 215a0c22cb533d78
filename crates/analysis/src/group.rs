//! Groups of events: the values of an event for the keys that a rule groups by.

use contract::{Entity, HealthEvent, keys};
use diagnosis::subject::canonical_value;

/// Entity of a port of a NIC.
const NIC_PORT: &str = "NICPort";
/// Entities that name a GPU, the most durable name first. An event counts for its GPUs under the
/// first kind that it has.
const GPU_NAMES: [&str; 3] = [keys::ENTITY_GPU_UUID, keys::ENTITY_PCI, keys::ENTITY_GPU];
/// Key that a rule groups events by. The node is part of every group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKey {
    /// GPU.
    Gpu,
    /// NVLink of a GPU or switch.
    Link,
    /// NVSwitch.
    Switch,
    /// Network interface.
    Nic,
    /// Port of a network interface.
    Port,
    /// Error code.
    Code,
    /// Entity of this type.
    Entity(String),
}

/// Group of events: the node, and a value for each key of the rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// Name of the node.
    pub node: String,
    /// Values in the order of the rule's keys.
    pub values: Vec<GroupValue>,
}

/// Value of an event for a key of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GroupValue {
    /// Error code.
    Code(String),
    /// Entity, by type and value.
    Entity(String, String),
}

// === impl GroupKey ===

impl GroupKey {
    /// Names of the keys in files of rules, beside `node` and `entity:TYPE`.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("gpu", Self::Gpu),
        ("link", Self::Link),
        ("switch", Self::Switch),
        ("nic", Self::Nic),
        ("port", Self::Port),
        ("code", Self::Code),
    ];

    /// Returns the values that an event has for the key.
    pub fn values(&self, event: &HealthEvent) -> Vec<GroupValue> {
        match self {
            Self::Gpu => {
                let kinds = GPU_NAMES.map(|kind| of_entities(event, kind));
                kinds.into_iter().find(|values| !values.is_empty())
            }
            Self::Link => Some(of_entities(event, keys::ENTITY_NVLINK)),
            Self::Switch => Some(of_entities(event, keys::ENTITY_NVSWITCH)),
            Self::Nic => Some(of_entities(event, keys::ENTITY_NIC)),
            Self::Port => Some(of_entities(event, NIC_PORT)),
            Self::Code => Some(
                event
                    .error_code
                    .iter()
                    .cloned()
                    .map(GroupValue::Code)
                    .collect(),
            ),
            Self::Entity(kind) => Some(of_entities(event, kind)),
        }
        .unwrap_or_default()
    }

    /// Returns true if a healthy event is about the group with this value: it names the value, or
    /// nothing of the key's kind.
    pub(crate) fn is_healed(&self, value: &GroupValue, event: &HealthEvent) -> bool {
        let values = self.values(event);
        values.is_empty() || values.contains(value)
    }
}

impl GroupValue {
    /// Returns the text of the value, without its kind.
    pub fn text(&self) -> &str {
        match self {
            Self::Code(text) | Self::Entity(_, text) => text,
        }
    }
}

fn of_entities(event: &HealthEvent, kind: &str) -> Vec<GroupValue> {
    let of_kind = |entity: &&Entity| entity.entity_type == kind;
    let mut values: Vec<GroupValue> = event
        .entities_impacted
        .iter()
        .filter(of_kind)
        .map(|entity| canonical_value(kind, &entity.entity_value))
        .map(|value| GroupValue::Entity(kind.to_owned(), value))
        .collect();
    values.sort();
    values.dedup();
    values
}
