//! The devices of all nodes, put together from the slices of their drivers.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use diagnosis::subject::{Subject, normalise_pci};

use super::{DeviceId, Rule, Slice, SliceDevice};

/// The devices of all nodes.
///
/// A driver publishes a pool in one or more slices, and a new generation of it in as many steps.
/// The newest generation that is there as a whole counts; while there is none, what was known
/// does.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    pools: BTreeMap<PoolId, Pool>,
    /// The pool of each slice, by the slice's name.
    slices: BTreeMap<String, PoolId>,
    /// The pools of each node.
    nodes: BTreeMap<String, BTreeSet<PoolId>>,
}

/// A driver and its pool.
type PoolId = (String, String);

#[derive(Clone, Debug, Default)]
struct Pool {
    /// Its slices, of whatever generation.
    slices: BTreeMap<String, Slice>,
    /// The node and the devices of the generation that counts.
    node: Option<String>,
    devices: Vec<SliceDevice>,
}

/// The devices of one node.
#[derive(Clone, Debug, Default)]
pub struct NodeDevices(Vec<(DeviceId, SliceDevice)>);

// === impl Inventory ===

impl Inventory {
    /// Takes in a slice by its name, or that it is gone. Returns the nodes of which something has
    /// changed.
    pub fn take(&mut self, name: &str, slice: Option<Slice>) -> BTreeSet<String> {
        let after = slice
            .as_ref()
            .map(|slice| (slice.driver.clone(), slice.pool.clone()));
        let before = self.slices.remove(name);
        if let Some(pool) = before.as_ref().and_then(|id| self.pools.get_mut(id)) {
            pool.slices.remove(name);
        }
        if let (Some(id), Some(slice)) = (&after, slice) {
            self.slices.insert(name.to_owned(), id.clone());
            let pool = self.pools.entry(id.clone()).or_default();
            pool.slices.insert(name.to_owned(), slice);
        }
        let changed: BTreeSet<PoolId> = before.into_iter().chain(after).collect();
        changed.iter().flat_map(|id| self.renew(id)).collect()
    }

    /// Puts a pool together anew. Returns the nodes that it was of before and is of now.
    fn renew(&mut self, id: &PoolId) -> Vec<String> {
        let Some(pool) = self.pools.get_mut(id) else {
            return Vec::new();
        };
        let before = pool.node.clone();
        pool.renew();
        let (after, gone) = (pool.node.clone(), pool.slices.is_empty());
        if let Some(pools) = before.as_ref().and_then(|node| self.nodes.get_mut(node)) {
            pools.remove(id);
        }
        if let Some(node) = &after {
            let pools = self.nodes.entry(node.clone()).or_default();
            pools.insert(id.clone());
        }
        if gone {
            self.pools.remove(id);
        }
        before.into_iter().chain(after).collect()
    }

    /// Returns the devices of a node; with them those of `rules` that the driver publishes no
    /// more, as the rules remember them: a GPU that is lost may be one.
    pub fn of_node<'a>(&self, node: &str, rules: impl Iterator<Item = &'a Rule>) -> NodeDevices {
        let mut found = Vec::new();
        let pools = self.nodes.get(node).into_iter().flatten();
        for (id, pool) in pools.filter_map(|id| Some((id, self.pools.get(id)?))) {
            found.extend(pool.devices.iter().map(|device| {
                let id = DeviceId {
                    driver: id.0.clone(),
                    pool: id.1.clone(),
                    name: device.name.clone(),
                };
                (id, device.clone())
            }));
        }
        for spec in rules.map(|rule| &rule.spec) {
            if found.iter().any(|(id, _)| *id == spec.device) {
                continue;
            }
            let (uuid, gpu) = (spec.gpu.starts_with("GPU-"), Some(spec.gpu.clone()));
            let device = SliceDevice {
                name: spec.device.name.clone(),
                gpu: gpu.clone().filter(|_| uuid),
                pci: gpu.filter(|_| !uuid),
                ..SliceDevice::default()
            };
            found.push((spec.device.clone(), device));
        }
        NodeDevices(found)
    }
}

// === impl Pool ===

impl Pool {
    /// Takes the node and the devices from the newest generation that is there as a whole.
    fn renew(&mut self) {
        let is_whole = |generation: i64, slices: i64| {
            let same = self
                .slices
                .values()
                .filter(|one| one.generation == generation);
            usize::try_from(slices).is_ok_and(|slices| same.count() >= slices)
        };
        let all = self.slices.values();
        let whole = all.filter(|one| is_whole(one.generation, one.slices));
        let Some(newest) = whole.map(|one| one.generation).max() else {
            if self.slices.is_empty() {
                *self = Self::default();
            }
            return;
        };
        let newest = || (self.slices.values()).filter(|one| one.generation == newest);
        self.node = newest().find_map(|slice| slice.node.clone());
        self.devices = newest().flat_map(|slice| slice.devices.clone()).collect();
    }
}

// === impl NodeDevices ===

impl NodeDevices {
    /// Returns them with what the driver says of each.
    pub fn iter(&self) -> impl Iterator<Item = &(DeviceId, SliceDevice)> {
        self.0.iter()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns what the driver says of a device.
    pub fn get(&self, id: &DeviceId) -> Option<&SliceDevice> {
        let mut all = self.0.iter();
        all.find(|(known, _)| known == id).map(|(_, device)| device)
    }

    /// Returns the devices of the GPU that `subject` names: by its UUID, else by its PCI address.
    /// A GPU that is divided has several, and a fault of it, or of one of them, concerns all.
    pub fn find(&self, subject: &Subject) -> Vec<&DeviceId> {
        let by = |matches: &dyn Fn(&SliceDevice) -> bool| {
            let named = self.0.iter().find(|(_, device)| matches(device));
            let Some((id, named)) = named else {
                return Vec::new();
            };
            let same = |device: &SliceDevice| named.gpu.is_some() && device.gpu == named.gpu;
            let all = self.0.iter();
            all.filter(|(other, device)| other == id || same(device))
                .map(|(id, _)| id)
                .collect()
        };
        if let Some(uuid) = subject.name(keys::ENTITY_GPU_UUID) {
            let is = |known: &Option<String>| {
                (known.as_deref()).is_some_and(|known| known.eq_ignore_ascii_case(uuid))
            };
            return by(&|device| is(&device.gpu) || is(&device.mig));
        }
        let Some(pci) = subject.name(keys::ENTITY_PCI) else {
            return Vec::new();
        };
        by(&|device| (device.pci.as_deref()).is_some_and(|known| normalise_pci(known) == pci))
    }
}

#[cfg(test)]
mod tests;
