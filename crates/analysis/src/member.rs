//! Members of groups, such as the GPUs of an NVLink domain, and the GPUs that each node is known to
//! have: a member that never reports is known by them alone.
//!
//! What is known follows from the set of inventory events, whatever their order.

use std::collections::BTreeMap;

use contract::{Entity, HealthEvent, keys};
use diagnosis::subject::canonical_value;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::group::GPU_NAMES;
use crate::slots::{Slot, Slots};

/// Most nodes whose GPUs are known. Beyond it, the node whose last inventory is oldest is forgotten.
const MAX_NODES: usize = 20_000;
/// Most GPUs of a node that are known: those named last.
const MAX_GPUS_OF_NODE: usize = 64;

/// Values of [`GPU_NAMES`] for one GPU; an unknown one is empty.
type Names = [Box<str>; GPU_NAMES.len()];

/// Member of a group: a GPU, or a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Member {
    /// Name of the node.
    pub node: String,
    /// Names of the GPU; none for the node itself.
    names: Names,
}

/// GPUs of all nodes, by the inventory events of their monitors.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownGpus {
    nodes: BTreeMap<String, GpusOfNode>,
}

/// GPUs of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpusOfNode {
    /// The GPU that was named last is the last one.
    gpus: Vec<KnownGpu>,
    slots: Slots,
}

/// Change by an inventory event.
#[derive(Debug, Default)]
pub(crate) struct Learned {
    /// True if other GPUs than before may be known.
    pub(crate) is_new: bool,
    /// True if events that name a GPU by one name may have another one for it than before.
    pub(crate) renames: bool,
    /// Node that had to make room.
    pub(crate) forgotten: Option<String>,
}

/// GPU as its last inventory event names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct KnownGpu {
    /// Time of acceptance.
    at: Timestamp,
    names: Names,
    /// Boot in which it was named; empty if unknown.
    boot: Box<str>,
}

// === impl Member ===

impl Member {
    /// Returns a node as a member.
    pub(crate) fn of_node(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            names: Names::default(),
        }
    }

    /// Returns the GPUs that an event names. The PCI address in an event about a switch is that of the
    /// switch.
    pub(crate) fn gpus(event: &HealthEvent) -> Vec<Self> {
        let of_kind = |kind: &str| {
            let entities = event.entities_impacted.iter();
            let of_kind = entities.filter(|one| one.entity_type == kind);
            let mut values: Vec<Box<str>> = of_kind
                .map(|one| canonical_value(kind, &one.entity_value))
                .filter(|value| !value.is_empty())
                .map(String::into_boxed_str)
                .collect();
            values.sort();
            values.dedup();
            values
        };
        if !of_kind(keys::ENTITY_NVSWITCH).is_empty() {
            return Vec::new();
        }
        let values = GPU_NAMES.map(of_kind);
        let member = |names| Self {
            node: event.node_name.clone(),
            names,
        };
        if values.iter().all(|values| values.len() <= 1) {
            let names = values.map(|values| values.into_iter().next().unwrap_or_default());
            let is_named = names.iter().any(|name| !name.is_empty());
            return is_named.then(|| member(names)).into_iter().collect();
        }
        // The names of several GPUs cannot be told apart, so each has one of the first kind.
        let first = values.iter().position(|values| !values.is_empty());
        let each = first.and_then(|kind| Some((kind, values.into_iter().nth(kind)?)));
        let named = each.into_iter().flat_map(|(kind, values)| {
            values.into_iter().map(move |value| {
                let mut names = Names::default();
                if let Some(name) = names.get_mut(kind) {
                    *name = value;
                }
                names
            })
        });
        named.map(member).collect()
    }

    /// Returns true if both are the same GPU or node: the first name that both have decides.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.node == other.node && same(&self.names, &other.names)
    }

    /// Returns true if a repair of `self` is one of the other: it is the same GPU, or on this node.
    pub(crate) fn includes(&self, other: &Self) -> bool {
        let is_node = self.names.iter().all(|name| name.is_empty());
        self.node == other.node && (is_node || same(&self.names, &other.names))
    }

    /// Adds the names that another event has for the same GPU.
    pub(crate) fn learn(&mut self, other: &Self) {
        for (name, known) in self.names.iter_mut().zip(&other.names) {
            if name.is_empty() {
                name.clone_from(known);
            }
        }
    }

    /// Returns the member without the index of the GPU, if it has a lasting name.
    pub(crate) fn lasting(&self) -> Self {
        let mut lasting = self.clone();
        if let [names @ .., index] = &mut lasting.names
            && names.iter().any(|name| !name.is_empty())
        {
            *index = Box::default();
        }
        lasting
    }

    /// Returns the entities that name the GPU; none for a node.
    pub(crate) fn entities(&self) -> impl Iterator<Item = Entity> {
        let named = GPU_NAMES.into_iter().zip(&self.names);
        let known = named.filter(|(_, name)| !name.is_empty());
        known.map(|(kind, name)| Entity {
            entity_type: kind.to_owned(),
            entity_value: name.to_string(),
        })
    }
}

impl std::fmt::Display for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.node)?;
        let name = self.entities().next();
        name.map_or(Ok(()), |one| {
            write!(f, ", {} {}", one.entity_type, one.entity_value)
        })
    }
}

// === impl KnownGpus ===

impl KnownGpus {
    /// Adds the GPUs that an inventory event names.
    pub(crate) fn add(&mut self, event: &HealthEvent, at: Timestamp) -> Learned {
        let boot = event.metadata.get(keys::META_BOOT_ID);
        let boot: Box<str> = boot.map_or("", String::as_str).into();
        let mut learned = Learned::default();
        for member in Member::gpus(event) {
            let of_node = self.nodes.entry(member.node).or_default();
            let [uuid, pci, _] = &member.names;
            if !uuid.is_empty() && !pci.is_empty() {
                let (uuid, pci) = (uuid.clone(), pci.clone());
                learned.renames |= of_node.slots.add(Slot { at, pci, uuid });
            }
            learned.is_new |= of_node.add(KnownGpu {
                at,
                names: member.names,
                boot: boot.clone(),
            });
        }
        if self.nodes.len() > MAX_NODES {
            let oldest = self.nodes.iter().min_by_key(|(_, one)| one.gpus.last());
            learned.forgotten = oldest.map(|(node, _)| node.clone());
        }
        if let Some(node) = &learned.forgotten {
            self.nodes.remove(node);
        }
        learned
    }

    /// Returns the name that an event of a time lacks, of the one GPU that it names by its address or
    /// UUID only. `None` if that is not known.
    pub(crate) fn missing_name(
        &self,
        event: &HealthEvent,
        at: impl FnOnce() -> Timestamp,
    ) -> Option<Entity> {
        let of_node = self.nodes.get(&event.node_name)?;
        of_node.slots.missing_name(event, at)
    }

    /// Returns the GPUs that a node has since its last boot.
    pub(crate) fn of<'a>(&'a self, node: &'a str) -> impl Iterator<Item = Member> + 'a {
        let gpus = self.nodes.get(node).map(|one| one.gpus.as_slice());
        let gpus = gpus.unwrap_or_default();
        let boot = gpus.last().map(|gpu| &gpu.boot);
        let present = gpus.iter().filter(move |gpu| Some(&gpu.boot) == boot);
        present.map(|gpu| Member {
            node: node.to_owned(),
            names: gpu.names.clone(),
        })
    }

    /// Returns what is known of a node, to be saved.
    pub(crate) fn saved(&self, node: &str) -> GpusOfNode {
        self.nodes.get(node).cloned().unwrap_or_default()
    }

    /// Takes over what was saved of a node.
    pub(crate) fn restore(&mut self, node: &str, gpus: GpusOfNode) {
        if !gpus.is_empty() {
            self.nodes.insert(node.to_owned(), gpus);
        }
    }
}

// === impl GpusOfNode ===

impl GpusOfNode {
    pub(crate) fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.slots.is_empty()
    }

    /// Adds a GPU, or makes the newer event about it count. Returns true if that changes anything.
    fn add(&mut self, gpu: KnownGpu) -> bool {
        let known = self.gpus.iter().position(|known| {
            let mut names = known.names.iter().zip(&gpu.names);
            // The same lasting name; an address may belong to another GPU since.
            names
                .find(|(one, other)| !one.is_empty() || !other.is_empty())
                .is_some_and(|(one, other)| one == other)
        });
        if let Some(known) = known {
            if self.gpus.get(known).is_some_and(|known| *known >= gpu) {
                return false;
            }
            self.gpus.remove(known);
        }
        let place = self.gpus.partition_point(|known| *known < gpu);
        self.gpus.insert(place, gpu);
        if self.gpus.len() > MAX_GPUS_OF_NODE {
            self.gpus.remove(0);
        }
        true
    }
}

/// Returns true if the first name that both GPUs have is the same, or if neither has one.
fn same(one: &Names, other: &Names) -> bool {
    let mut both = one.iter().zip(other);
    let first = both.find(|(one, other)| !one.is_empty() && !other.is_empty());
    let is_node = |names: &Names| names.iter().all(|name| name.is_empty());
    first.map_or(is_node(one) && is_node(other), |(one, other)| one == other)
}
