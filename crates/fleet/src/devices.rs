//! Single devices of all nodes, and the rules in the cluster that taint them. The
//! [stage](super::stage::device_taints) of each node decides about its rules.

use std::collections::{BTreeMap, BTreeSet};

use model::device::{Claim, DeviceId, DeviceTaintRule, Inventory, NodeDevices, RuleChange, Slice};

use crate::drain::partial::DrainedGpus;

/// A change of single devices, or of their watch.
#[derive(Debug)]
pub enum DeviceInput {
    /// The state of the watch has changed.
    Watch(DeviceWatch),
    /// A driver's slice, by name; `None` once it is deleted.
    Slice(String, Option<Slice>),
    /// A gpuwarden's rule, by name; `None` once it is deleted.
    Rule(String, Option<Box<DeviceTaintRule>>),
    /// A claim, by name; `None` once it is deleted.
    Claim(String, Option<Claim>),
}

/// State of the watch of single devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceWatch {
    /// Devices are not watched: only whole nodes are decided about.
    #[default]
    Off,
    /// Devices are being listed: decisions about them wait.
    Pending,
    /// Devices cannot be tainted, for this reason: only whole nodes are decided about.
    Unserved(String),
    /// All devices are listed.
    Known,
}

/// A change of a rule to be made.
#[derive(Clone, Debug)]
pub struct PlannedRule {
    /// Name of the node.
    pub node: String,
    /// Id of the session that the change belongs to.
    pub session: Option<String>,
    /// Change to be made.
    pub change: RuleChange,
}

/// Single devices of all nodes, and the rules that taint them.
#[derive(Debug, Default)]
pub(super) struct Devices {
    pub(super) watch: DeviceWatch,
    inventory: Inventory,
    /// Rules of any gpuwarden, by name.
    rules: BTreeMap<String, DeviceTaintRule>,
    /// Names of the rules for the devices of each node.
    rules_of: BTreeMap<String, BTreeSet<String>>,
    claims: BTreeMap<String, Claim>,
    /// Names of the claims that hold each device.
    claims_of: BTreeMap<DeviceId, BTreeSet<String>>,
}

// === impl Devices ===

impl Devices {
    /// Handles a change. Returns the nodes that it concerns.
    pub(super) fn update(&mut self, input: DeviceInput) -> BTreeSet<String> {
        match input {
            DeviceInput::Watch(watch) => {
                self.watch = watch;
                BTreeSet::new()
            }
            DeviceInput::Slice(name, slice) => self.inventory.take(&name, slice),
            DeviceInput::Rule(name, rule) => self.update_rule(name, rule.map(|rule| *rule)),
            DeviceInput::Claim(name, claim) => self.update_claim(name, claim),
        }
    }

    fn update_rule(&mut self, name: String, rule: Option<DeviceTaintRule>) -> BTreeSet<String> {
        let before = self.rules.remove(&name);
        let mut nodes = BTreeSet::new();
        if let Some(before) = before {
            if let Some(names) = self.rules_of.get_mut(&before.spec.node) {
                names.remove(&name);
            }
            nodes.insert(before.spec.node);
        }
        if let Some(rule) = rule {
            let names = self.rules_of.entry(rule.spec.node.clone()).or_default();
            names.insert(name.clone());
            nodes.insert(rule.spec.node.clone());
            self.rules.insert(name, rule);
        }
        nodes
    }

    fn update_claim(&mut self, name: String, claim: Option<Claim>) -> BTreeSet<String> {
        let before = self.claims.remove(&name);
        for device in before.iter().flat_map(|claim| &claim.devices) {
            if let Some(names) = self.claims_of.get_mut(device) {
                names.remove(&name);
                if names.is_empty() {
                    self.claims_of.remove(device);
                }
            }
        }
        for device in claim.iter().flat_map(|claim| &claim.devices) {
            let names = self.claims_of.entry(device.clone()).or_default();
            names.insert(name.clone());
        }
        let claims = before.iter().chain(&claim);
        let devices: BTreeSet<&DeviceId> = claims.flat_map(|claim| &claim.devices).collect();
        let rules = self.rules.values().map(|rule| &rule.spec);
        let nodes = rules.filter(|spec| devices.contains(&spec.device));
        let nodes = nodes.map(|spec| spec.node.clone()).collect();
        if let Some(claim) = claim {
            self.claims.insert(name, claim);
        }
        nodes
    }

    pub(super) fn rules_of(&self, node: &str) -> impl Iterator<Item = &DeviceTaintRule> {
        let names = self.rules_of.get(node).into_iter().flatten();
        names.filter_map(|name| self.rules.get(name))
    }

    /// Returns whether the cluster has a rule of this name.
    pub(super) fn has_rule(&self, name: &str) -> bool {
        self.rules.contains_key(name)
    }

    /// Sets the state of a rule from the answer to its change, unless the watch has already
    /// delivered a newer state.
    pub(super) fn rule_answered(&mut self, name: &str, after: Option<Box<DeviceTaintRule>>) {
        let current = self.rules.get(name);
        let overtaken = (current.zip(after.as_ref()))
            .is_some_and(|(current, after)| after.is_older_than(current));
        if !overtaken {
            self.update(DeviceInput::Rule(name.to_owned(), after));
        }
    }

    /// Returns the devices of a node.
    pub(super) fn of_node(&self, node: &str) -> NodeDevices {
        self.inventory.of_node(node, self.rules_of(node))
    }

    /// Returns the GPUs of a node with these UUIDs, and the pods that hold them.
    pub(super) fn gpus(&self, node: &str, uuids: &[String]) -> DrainedGpus {
        let mut gpus = DrainedGpus {
            uuids: uuids.iter().cloned().collect(),
            ..DrainedGpus::default()
        };
        for (id, device) in self.of_node(node).iter() {
            let pods = self.pods(id);
            let pods = || pods.iter().map(|pod| (*pod).to_owned());
            let gpu = device.gpu.as_deref();
            if gpu.is_some_and(|gpu| uuids.iter().any(|one| one.eq_ignore_ascii_case(gpu))) {
                gpus.uuids.extend(device.mig.clone());
                gpus.holders.extend(pods());
            }
            gpus.claimed.extend(pods());
        }
        gpus
    }

    /// Returns the pods that hold a device by a claim.
    pub(super) fn pods(&self, device: &DeviceId) -> BTreeSet<&str> {
        let claims = self.claims_of.get(device).into_iter().flatten();
        let claims = claims.filter_map(|name| self.claims.get(name));
        let pods = claims.flat_map(|claim| &claim.pods);
        pods.map(String::as_str).collect()
    }
}
