//! Devices of the simulated cluster, and the rules that taint them.

use std::collections::{BTreeMap, VecDeque};

use contract::keys;
use fleet::DeviceInput;
use fleet::session::RequestFailure;
use model::device::{
    DeviceId, DeviceTaint, DeviceTaintRule, GPU_DRIVER, RuleChange, RuleSpec, Slice, SliceDevice,
    TaintEffect,
};
use model::ownership::Maker;

use super::happening::{GPUS, NODES};
use super::node::{FOREIGN, name};

/// Rules of the cluster, as the API server stores them.
pub(super) struct Rules {
    by_name: BTreeMap<String, DeviceTaintRule>,
    /// Changes that the watch has not delivered yet.
    undelivered: VecDeque<DeviceInput>,
    /// Number of changes so far; versions are made from it.
    changes: u64,
}

/// Returns the UUID of a GPU.
pub(super) fn uuid(node: usize, gpu: usize) -> String {
    format!("GPU-{node}-{gpu}")
}

/// Returns the device of a GPU.
pub(super) fn device(node: usize, gpu: usize) -> DeviceId {
    DeviceId {
        driver: GPU_DRIVER.to_owned(),
        pool: name(node),
        name: format!("gpu-{gpu}"),
    }
}

/// Returns the slice that the driver of a node publishes.
pub(super) fn slice(node: usize) -> Slice {
    let devices = (0..GPUS).map(|gpu| SliceDevice {
        name: format!("gpu-{gpu}"),
        gpu: Some(uuid(node, gpu)),
        ..SliceDevice::default()
    });
    Slice {
        driver: GPU_DRIVER.to_owned(),
        pool: name(node),
        generation: 1,
        slices: 1,
        node: Some(name(node)),
        devices: devices.collect(),
    }
}

/// Returns a rule for the first GPU of a node that the node's own gpuwarden has made.
fn foreign(node: usize) -> DeviceTaintRule {
    DeviceTaintRule {
        name: format!("{FOREIGN}{node}"),
        resource_version: "1".to_owned(),
        created_at: None,
        spec: RuleSpec {
            device: device(node, 0),
            taint: DeviceTaint {
                key: format!("{}/memory", keys::GPU_DRIVER),
                value: "retired".to_owned(),
                effect: TaintEffect::NoSchedule,
            },
            node: name(node),
            gpu: uuid(node, 0),
            by: Maker::Node,
            store: Some("another".to_owned()),
        },
        eviction: None,
    }
}

// === impl Rules ===

impl Rules {
    /// Returns the rules that others have made before the simulation begins.
    pub(super) fn new() -> Self {
        let foreign = (0..NODES).map(foreign);
        Self {
            by_name: foreign.map(|rule| (rule.name.clone(), rule)).collect(),
            undelivered: VecDeque::new(),
            changes: 1,
        }
    }

    /// Returns all rules, as a new watch lists them.
    pub(super) fn list(&mut self) -> Vec<DeviceInput> {
        self.undelivered.clear();
        let rules = self.by_name.values().cloned();
        rules
            .map(|rule| DeviceInput::Rule(rule.name.clone(), Some(Box::new(rule))))
            .collect()
    }

    /// Returns the oldest change that the watch has not delivered.
    pub(super) fn deliver(&mut self) -> Option<DeviceInput> {
        self.undelivered.pop_front()
    }

    pub(super) fn is_delivered(&self) -> bool {
        self.undelivered.is_empty()
    }

    /// Returns the rules of the controller.
    pub(super) fn ours(&self) -> impl Iterator<Item = &DeviceTaintRule> {
        let rules = self.by_name.values();
        rules.filter(|rule| rule.spec.by == Maker::Controller)
    }

    /// Returns the rule of this name if somebody else has made it.
    pub(super) fn of_others(&self, name: &str) -> Option<&DeviceTaintRule> {
        let rule = self.by_name.get(name);
        rule.filter(|rule| rule.spec.by != Maker::Controller)
    }

    /// Returns a rule that somebody else has made, and that is gone or has changed.
    pub(super) fn lost(&self) -> Option<DeviceTaintRule> {
        let mut foreign = (0..NODES).map(foreign);
        foreign.find(|rule| self.by_name.get(&rule.name) != Some(rule))
    }

    /// Changes a rule like the API server: only if it still is as the decision saw it.
    pub(super) fn change(
        &mut self,
        change: &RuleChange,
    ) -> Result<Option<Box<DeviceTaintRule>>, RequestFailure> {
        let name = change.rule_name();
        let seen = match change {
            RuleChange::Create(_) => None,
            RuleChange::Update(rule, _) | RuleChange::Delete(rule) => Some(&rule.resource_version),
        };
        if self.by_name.get(&name).map(|rule| &rule.resource_version) != seen {
            return Err(RequestFailure::Conflict);
        }
        self.changes += 1;
        let after = change.after().map(|after| DeviceTaintRule {
            resource_version: self.changes.to_string(),
            ..after
        });
        self.set(name, after.clone());
        Ok(after.map(Box::new))
    }

    /// Deletes one of the controller's rules, as a person does.
    pub(super) fn delete(&mut self, which: usize) {
        let names: Vec<String> = self.ours().map(|rule| rule.name.clone()).collect();
        if let Some(name) = names.get(which % names.len().max(1)) {
            self.set(name.clone(), None);
        }
    }

    fn set(&mut self, name: String, rule: Option<DeviceTaintRule>) {
        match rule.clone() {
            Some(rule) => drop(self.by_name.insert(name.clone(), rule)),
            None => drop(self.by_name.remove(&name)),
        }
        let news = DeviceInput::Rule(name, rule.map(Box::new));
        self.undelivered.push_back(news);
    }
}
