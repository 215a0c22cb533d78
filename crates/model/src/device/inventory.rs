//! Inventory of the devices of all nodes, assembled from the slices of their drivers.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use diagnosis::subject::{Subject, normalise_pci};

use super::{DeviceId, DeviceTaintRule, Slice, SliceDevice};

/// Devices of all nodes.
///
/// A driver publishes a pool in one or more slices, and updates them one by one when it starts
/// a new generation. The newest complete generation counts. Until one is complete, the devices
/// of the last complete generation stay.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    pools: BTreeMap<PoolId, Pool>,
    /// Pool of each slice, by the slice's name.
    slices: BTreeMap<String, PoolId>,
    /// Pools of each node.
    nodes: BTreeMap<String, BTreeSet<PoolId>>,
}

/// Driver and pool name.
type PoolId = (String, String);

#[derive(Clone, Debug, Default)]
struct Pool {
    /// Slices of all generations, by name.
    slices: BTreeMap<String, Slice>,
    /// Node of the newest complete generation. `devices` are its devices.
    node: Option<String>,
    devices: Vec<SliceDevice>,
}

/// Devices of one node.
#[derive(Clone, Debug, Default)]
pub struct NodeDevices(Vec<(DeviceId, SliceDevice)>);

// === impl Inventory ===

impl Inventory {
    /// Records the new state of a slice; `None` if it was deleted. Returns the affected nodes.
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

    /// Assembles a pool again. Returns the nodes it belonged to before and belongs to now.
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

    /// Returns the devices of a node. Devices of `rules` that the driver no longer publishes,
    /// such as those of a lost GPU, are restored from the rules.
    pub fn of_node<'a>(
        &self,
        node: &str,
        rules: impl Iterator<Item = &'a DeviceTaintRule>,
    ) -> NodeDevices {
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
    /// Takes the node and the devices from the newest complete generation.
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
    /// Returns the devices with the driver's description of each.
    pub fn iter(&self) -> impl Iterator<Item = &(DeviceId, SliceDevice)> {
        self.0.iter()
    }

    /// Returns whether the node has no devices.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the driver's description of a device.
    pub fn get(&self, id: &DeviceId) -> Option<&SliceDevice> {
        let mut all = self.0.iter();
        all.find(|(known, _)| known == id).map(|(_, device)| device)
    }

    /// Returns the devices of the GPU that `subject` names by its UUID, or else by its PCI
    /// address. A partitioned GPU has several devices, and a fault of the GPU or of one
    /// partition concerns all.
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
