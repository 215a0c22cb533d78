//! The single devices of all nodes, and the rules that taint them, as the cluster has them. What is done with
//! the rules is decided by the [stage](super::stage::device_taints) of each node.

use std::collections::{BTreeMap, BTreeSet};

use model::device::{Claim, DeviceId, Inventory, NodeDevices, Rule, RuleChange, Slice};

use crate::drain::partial::Gpus;

/// News of single devices.
#[derive(Debug)]
pub enum DeviceInput {
    /// The state of the watch.
    Watch(DeviceWatch),
    /// A slice of a driver, by its name; `None`: it is gone.
    Slice(String, Option<Slice>),
    /// A rule of a gpuwarden, by its name; `None`: it is gone.
    Rule(String, Option<Box<Rule>>),
    /// A claim, by its name; `None`: it is gone.
    Claim(String, Option<Claim>),
}

/// The state of the watch of single devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceWatch {
    /// Nobody looks at them: only nodes are decided about.
    #[default]
    Off,
    /// They are being listed: what concerns them cannot be decided yet.
    Pending,
    /// They cannot be tainted, for this reason: only nodes are decided about.
    Unserved(String),
    /// They are known.
    Known,
}

/// A change of a rule to be made.
#[derive(Clone, Debug)]
pub struct PlannedRule {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// The change.
    pub change: RuleChange,
}

/// The single devices of all nodes, and the rules that taint them, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Devices {
    pub(super) watch: DeviceWatch,
    inventory: Inventory,
    /// Rules of any gpuwarden, by name.
    rules: BTreeMap<String, Rule>,
    /// The names of the rules for devices of each node.
    rules_of: BTreeMap<String, BTreeSet<String>>,
    claims: BTreeMap<String, Claim>,
    /// The names of the claims that were given a device.
    claims_of: BTreeMap<DeviceId, BTreeSet<String>>,
}

// === impl Devices ===

impl Devices {
    /// Takes news in. Returns the nodes that they concern.
    pub(super) fn take(&mut self, input: DeviceInput) -> BTreeSet<String> {
        match input {
            DeviceInput::Watch(watch) => {
                self.watch = watch;
                BTreeSet::new()
            }
            DeviceInput::Slice(name, slice) => self.inventory.take(&name, slice),
            DeviceInput::Rule(name, rule) => self.take_rule(name, rule.map(|rule| *rule)),
            DeviceInput::Claim(name, claim) => self.take_claim(name, claim),
        }
    }

    fn take_rule(&mut self, name: String, rule: Option<Rule>) -> BTreeSet<String> {
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

    fn take_claim(&mut self, name: String, claim: Option<Claim>) -> BTreeSet<String> {
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

    pub(super) fn rules_of(&self, node: &str) -> impl Iterator<Item = &Rule> {
        let names = self.rules_of.get(node).into_iter().flatten();
        names.filter_map(|name| self.rules.get(name))
    }

    /// Returns whether the cluster has a rule of this name.
    pub(super) fn has_rule(&self, name: &str) -> bool {
        self.rules.contains_key(name)
    }

    /// Takes the state of a rule as the answer to its change gives it. The watch may have told of a newer
    /// state before the answer came.
    pub(super) fn rule_answered(&mut self, name: &str, after: Option<Box<Rule>>) {
        let known = self.rules.get(name);
        let overtaken =
            (known.zip(after.as_ref())).is_some_and(|(known, after)| after.is_older_than(known));
        if !overtaken {
            self.take(DeviceInput::Rule(name.to_owned(), after));
        }
    }

    /// Returns the devices of a node.
    pub(super) fn of_node(&self, node: &str) -> NodeDevices {
        self.inventory.of_node(node, self.rules_of(node))
    }

    /// Returns what is known of GPUs of a node, which have these UUIDs, and of who holds them.
    pub(super) fn gpus(&self, node: &str, uuids: &[String]) -> Gpus {
        let mut gpus = Gpus {
            uuids: uuids.iter().cloned().collect(),
            ..Gpus::default()
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

    /// Returns the pods that use a device, by what claims were given.
    pub(super) fn pods(&self, device: &DeviceId) -> BTreeSet<&str> {
        let claims = self.claims_of.get(device).into_iter().flatten();
        let claims = claims.filter_map(|name| self.claims.get(name));
        let pods = claims.flat_map(|claim| &claim.pods);
        pods.map(String::as_str).collect()
    }
}
