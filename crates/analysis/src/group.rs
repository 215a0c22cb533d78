//! Groups of events: the values of an event for the keys that a rule groups by.

use std::fmt;

use contract::{Entity, HealthEvent, keys};
use diagnosis::subject::{Subject, canonical_value};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::place::{NamedNodes, NodePlaces};

/// Entity of a port of a NIC.
const NIC_PORT: &str = "NICPort";
/// Entities that name a GPU, the most durable name first. An event counts for its GPUs under the
/// first kind that it has.
pub(crate) const GPU_NAMES: [&str; 3] = [keys::ENTITY_GPU_UUID, keys::ENTITY_PCI, keys::ENTITY_GPU];

/// Keys of an event's metadata that say where its node is: labels of the node, or what its monitor
/// knows. The first one that the event has counts, unless the node has a place by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Keys of the rack.
    pub rack: Vec<String>,
    /// Keys of the NVLink domain.
    pub nvlink_domain: Vec<String>,
    /// Keys of the zone.
    pub zone: Vec<String>,
    /// Places of nodes by their names.
    pub nodes: NodePlaces,
}

/// Key that a rule groups events by. The node is part of a group, unless a key groups nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKey {
    /// Node, where a key that groups nodes leaves it out otherwise.
    Node,
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
    /// Fault: check, error code and broken device.
    Fault,
    /// Entity of this type.
    Entity(String),
    /// Job, on any node.
    Job,
    /// Value of the first of some metadata keys that an event has, such as labels of its node.
    /// Groups nodes.
    Label {
        /// Name of the key in a file of rules.
        name: String,
        /// Metadata keys.
        labels: Vec<String>,
        /// Nodes that have a value by their names, as one of the first key.
        nodes: Arc<NamedNodes>,
    },
}

/// Group of events: a value for each key of the rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Group {
    /// Name of the node. Empty in a group of several nodes.
    pub node: String,
    /// Values in the order of the rule's keys.
    pub values: Vec<GroupValue>,
}

/// Key of a group of a rule: the group, and the number of the rule.
pub(crate) type GroupId = (Arc<Group>, usize);

/// Value of an event for a key of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum GroupValue {
    /// Node.
    Node(String),
    /// Error code.
    Code(String),
    /// Entity, by type and value.
    Entity(String, String),
    /// Fault: monitor and check, code, and entities that name the device.
    Fault(String, String, Vec<(String, String)>),
    /// Value of a metadata key: a job, or a label of the node.
    Metadata(String, String),
}

// === impl Topology ===

impl Default for Topology {
    /// Returns the usual labels. Without them the chassis that events of GPUs name is the rack, and
    /// the NVLink domain: of machines with a domain of their own that is a group of one node.
    fn default() -> Self {
        let or_chassis = |labels: [&str; 2]| {
            let keys = labels.into_iter().chain([keys::META_CHASSIS_SERIAL]);
            keys.map(str::to_owned).collect()
        };
        Self {
            rack: or_chassis(keys::RACK_LABELS),
            nvlink_domain: or_chassis(keys::NVLINK_DOMAIN_LABELS),
            zone: vec![keys::ZONE_LABEL.to_owned()],
            nodes: NodePlaces::default(),
        }
    }
}

// === impl GroupKey ===

impl GroupKey {
    /// Returns the key with this name in a file of rules. `None` if there is none.
    pub fn parse(name: &str, topology: &Topology) -> Option<Self> {
        let label = |labels: &[String], nodes: &Arc<NamedNodes>| Self::Label {
            name: name.to_owned(),
            labels: labels.to_vec(),
            nodes: Arc::clone(nodes),
        };
        let places = &topology.nodes;
        Some(match name {
            "node" => Self::Node,
            "gpu" => Self::Gpu,
            "link" => Self::Link,
            "switch" => Self::Switch,
            "nic" => Self::Nic,
            "port" => Self::Port,
            "code" => Self::Code,
            "fault" => Self::Fault,
            "job" => Self::Job,
            "rack" => label(&topology.rack, &places.rack),
            "nvlink_domain" => label(&topology.nvlink_domain, &places.nvlink_domain),
            "zone" => label(&topology.zone, &places.zone),
            _ => match name.split_once(':') {
                Some(("entity", kind)) if !kind.is_empty() => Self::Entity(kind.to_owned()),
                Some(("label", key)) if !key.is_empty() => {
                    label(&[key.to_owned()], &Arc::default())
                }
                _ => return None,
            },
        })
    }

    /// Names of the keys for people.
    pub const NAMES: &str = "node, gpu, link, switch, nic, port, code, fault, job, rack, \
                             nvlink_domain, zone, entity:TYPE or label:KEY";

    /// Returns true if a group of the key may have events of several nodes.
    pub fn groups_nodes(&self) -> bool {
        matches!(self, Self::Label { .. } | Self::Job)
    }

    /// Returns the labels of a node that the key reads.
    pub fn labels(&self) -> &[String] {
        match self {
            Self::Label { labels, .. } => labels,
            _ => &[],
        }
    }

    /// Returns the values that an event has for the key.
    pub fn values(&self, event: &HealthEvent) -> Vec<GroupValue> {
        let metadata = |key: &str| {
            let value = event.metadata.get(key).filter(|value| !value.is_empty());
            value.map(|value| GroupValue::Metadata(key.to_owned(), value.clone()))
        };
        match self {
            Self::Node => vec![GroupValue::Node(event.node_name.clone())],
            Self::Gpu => {
                let kinds = GPU_NAMES.map(|kind| of_entities(event, kind));
                let mut named = kinds.into_iter().filter(|values| !values.is_empty());
                named.next().unwrap_or_default()
            }
            Self::Link => of_entities(event, keys::ENTITY_NVLINK),
            Self::Switch => of_entities(event, keys::ENTITY_NVSWITCH),
            Self::Nic => of_entities(event, keys::ENTITY_NIC),
            Self::Port => of_entities(event, NIC_PORT),
            Self::Code => {
                let codes = event.error_code.iter().cloned();
                codes.map(GroupValue::Code).collect()
            }
            Self::Fault => faults(event),
            Self::Entity(kind) => of_entities(event, kind),
            Self::Job => metadata(keys::META_JOB).into_iter().collect(),
            Self::Label { labels, nodes, .. } => {
                let named = labels.first().zip(nodes.of(&event.node_name));
                let named = named
                    .map(|(label, place)| GroupValue::Metadata(label.clone(), place.to_owned()));
                let mut known = labels.iter().filter_map(|label| metadata(label));
                named.or_else(|| known.next()).into_iter().collect()
            }
        }
    }

    /// Returns true if an event, healthy or about a repair, is about the group with this value: it
    /// names the value, or nothing of the key's kind.
    pub(crate) fn covers(&self, value: &GroupValue, event: &HealthEvent) -> bool {
        if let GroupValue::Fault(_, code, entities) = value {
            let entities: Vec<Entity> = entities.iter().map(entity).collect();
            let mut subjects = Subject::of_entities(&entities).into_iter();
            let codes = &event.error_code;
            return (codes.is_empty() || codes.contains(code))
                && subjects.any(|subject| subject.healed_by(&event.entities_impacted));
        }
        let values = self.values(event);
        // An event without a job or a label is not about all jobs or racks.
        (values.is_empty() && !self.groups_nodes()) || values.contains(value)
    }
}

impl fmt::Display for GroupKey {
    /// Writes the name of the key in a file of rules.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "node",
            Self::Gpu => "gpu",
            Self::Link => "link",
            Self::Switch => "switch",
            Self::Nic => "nic",
            Self::Port => "port",
            Self::Code => "code",
            Self::Fault => "fault",
            Self::Job => "job",
            Self::Entity(kind) => return write!(f, "entity:{kind}"),
            Self::Label { name, .. } => name,
        })
    }
}

// === impl Group ===

impl fmt::Display for Group {
    /// Writes the node, if the group is of one, and the values with their kinds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = Some(self.node.clone()).filter(|node| !node.is_empty());
        let parts = node
            .into_iter()
            .chain(self.values.iter().map(ToString::to_string));
        f.write_str(&parts.collect::<Vec<_>>().join(", "))
    }
}

impl Group {
    /// Returns the group of all events of a node; it comes before all other groups of the node.
    pub fn of_node(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            values: Vec::new(),
        }
    }
}

// === impl GroupValue ===

impl GroupValue {
    /// Returns the text of the value, without its kind.
    pub fn text(&self) -> String {
        match self {
            Self::Node(text)
            | Self::Code(text)
            | Self::Entity(_, text)
            | Self::Metadata(_, text) => text.clone(),
            Self::Fault(check, code, entities) => {
                let entities = entities
                    .iter()
                    .map(|(kind, value)| format!("{kind} {value}"));
                let parts = [check.clone(), code.clone()].into_iter().chain(entities);
                let parts: Vec<String> = parts.filter(|part| !part.is_empty()).collect();
                parts.join(" ")
            }
        }
    }

    /// Writes the value into the event of a conclusion, where [`GroupKey::values`] finds it.
    pub(crate) fn write(&self, event: &mut HealthEvent) {
        match self {
            Self::Node(name) => event.node_name.clone_from(name),
            Self::Code(code) => event.error_code.push(code.clone()),
            Self::Entity(kind, value) => {
                let pair = (kind.clone(), value.clone());
                event.entities_impacted.push(entity(&pair));
            }
            Self::Fault(check, code, entities) => {
                let about = keys::META_ANALYSED_CHECK.to_owned();
                event.metadata.insert(about, check.clone());
                if !code.is_empty() {
                    event.error_code.push(code.clone());
                }
                event.entities_impacted.extend(entities.iter().map(entity));
            }
            Self::Metadata(key, value) => {
                event.metadata.insert(key.clone(), value.clone());
            }
        }
    }
}

impl fmt::Display for GroupValue {
    /// Writes the value with its kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(_) | Self::Fault(..) => f.write_str(&self.text()),
            Self::Code(code) => write!(f, "code {code}"),
            Self::Entity(kind, value) | Self::Metadata(kind, value) => write!(f, "{kind} {value}"),
        }
    }
}

/// Returns a value for each fault that an event reports.
fn faults(event: &HealthEvent) -> Vec<GroupValue> {
    let check = event.metadata.get(keys::META_ANALYSED_CHECK).cloned();
    let check = check.unwrap_or_else(|| format!("{}/{}", event.agent, event.check_name));
    let none = [String::new()];
    let codes = if event.error_code.is_empty() {
        &none[..]
    } else {
        &event.error_code
    };
    let mut faults = Vec::new();
    for subject in Subject::of_entities(&event.entities_impacted) {
        let names = subject.entities().into_iter();
        let names: Vec<_> = names.map(|it| (it.entity_type, it.entity_value)).collect();
        for code in codes {
            faults.push(GroupValue::Fault(
                check.clone(),
                code.clone(),
                names.clone(),
            ));
        }
    }
    faults
}

fn entity((kind, value): &(String, String)) -> Entity {
    Entity {
        entity_type: kind.clone(),
        entity_value: value.clone(),
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
