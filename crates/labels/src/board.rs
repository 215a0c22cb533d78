//! Facts about all nodes, and the change that each node needs.

use std::collections::{BTreeMap, BTreeSet};

use model::node::{NodeChange, NodeView};
use serde_json::Value;

use crate::LabelConfig;
use crate::classes::Class;
use crate::counts::{Skip, counts};
use crate::groups::{Groups, Member};
use crate::pod::{Pod, PodRole};
use crate::slices::Slices;
use crate::software::{Software, set_label};

/// The parts of all pods, slices and nodes that labels depend on. Nodes themselves are passed to
/// each call.
#[derive(Clone, Debug)]
pub struct Board {
    config: LabelConfig,
    /// Expressions that read slices, for the names of the fields that they read.
    read_of_slices: String,
    pods: BTreeMap<PodKey, Pod>,
    pods_of_node: BTreeMap<String, BTreeSet<PodKey>>,
    /// Roles whose pods were listed at least once.
    known: BTreeSet<PodRole>,
    slices: Slices,
    groups: Groups,
}

/// Role and `NAMESPACE/NAME` of a pod.
type PodKey = (PodRole, String);

/// Result of a look at a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Learned {
    /// Nodes whose expected numbers may have changed, which may include the node itself.
    pub peers: BTreeSet<String>,
    /// Classes whose number of devices is not known, by name.
    pub skipped: Vec<(String, Skip)>,
}

/// Numbers of devices of a node in a class.
#[derive(Clone, Debug)]
pub struct Counted<'a> {
    /// Class of the devices.
    pub class: &'a Class,
    /// Group of nodes that should have the same number.
    pub group: &'a str,
    /// Number of devices that the node has.
    pub current: u32,
    /// Number of devices that the node should have.
    pub expected: u32,
}

// === impl Board ===

impl Board {
    /// Creates a board without pods, slices and nodes.
    pub fn new(config: LabelConfig) -> Self {
        let expressions = config.classes.iter().map(|class| &class.expression);
        let read_of_slices = expressions
            .filter(|expression| expression.reads_slices)
            .map(|expression| expression.expression.as_str())
            .collect::<Vec<_>>()
            .join("\n");
        Self {
            config,
            read_of_slices,
            pods: BTreeMap::new(),
            pods_of_node: BTreeMap::new(),
            known: BTreeSet::new(),
            slices: Slices::default(),
            groups: Groups::default(),
        }
    }

    /// Returns the classes of devices.
    pub fn classes(&self) -> &[Class] {
        &self.config.classes
    }

    /// Records that all pods of a role are known. Until then a label that depends on them is not
    /// removed. Returns true if that is new: all nodes are to be looked at.
    pub fn set_known(&mut self, role: PodRole) -> bool {
        self.known.insert(role)
    }

    /// Records the current state of a pod; `None` if it is gone. Returns the affected nodes: none
    /// if the pod has not changed.
    pub fn set_pod(&mut self, role: PodRole, title: &str, pod: Option<Pod>) -> Vec<String> {
        let key = (role, title.to_owned());
        if self.pods.get(&key) == pod.as_ref() {
            return Vec::new();
        }
        let before = self.pods.remove(&key).map(|pod| pod.node);
        if let Some(node) = &before
            && let Some(pods) = self.pods_of_node.get_mut(node)
        {
            pods.remove(&key);
            if pods.is_empty() {
                self.pods_of_node.remove(node);
            }
        }
        let after = pod.as_ref().map(|pod| pod.node.clone());
        if let Some(pod) = pod {
            let pods = self.pods_of_node.entry(pod.node.clone()).or_default();
            pods.insert(key.clone());
            self.pods.insert(key, pod);
        }
        before.into_iter().chain(after).collect()
    }

    /// Records the current state of a slice; `None` if it is gone. Returns the affected nodes.
    pub fn set_slice(&mut self, name: &str, object: Option<&Value>) -> Vec<String> {
        self.slices.set(name, object, &self.read_of_slices)
    }

    /// Counts the devices of a node. To be called for each new state of a node, and for each node
    /// that another change affects, before [`Self::change`].
    pub fn learn(&mut self, node: &NodeView) -> Learned {
        let mut learned = Learned::default();
        if self.config.classes.is_empty() {
            return learned;
        }
        let counted = counts(&self.config.classes, node, &self.slices);
        let mut members = Vec::with_capacity(counted.len());
        for (class, counted) in self.config.classes.iter().zip(counted) {
            let label = node.labels.get(&class.expected);
            members.push(Member {
                group: class.group(&node.labels),
                current: counted.as_ref().ok().copied(),
                expected: label.and_then(|value| value.parse().ok()),
            });
            if let Err(skip) = counted {
                learned.skipped.push((class.name.clone(), skip));
            }
        }
        learned.peers = self.groups.set(&node.name, members);
        learned
    }

    /// Forgets a node that is gone. Returns the nodes whose expected numbers may have changed.
    pub fn forget(&mut self, node: &str) -> BTreeSet<String> {
        self.groups.set(node, Vec::new())
    }

    /// Returns the numbers of devices of a node in the classes where they are known.
    pub fn counted(&self, node: &NodeView) -> Vec<Counted<'_>> {
        let classes = self.config.classes.iter().enumerate();
        classes
            .filter_map(|(index, class)| {
                let member = self.groups.member(&node.name, index)?;
                let current = member.current?;
                let learned = || self.groups.most(index, &member.group);
                let expected = class.override_of(&node.labels).or_else(learned);
                Some(Counted {
                    class,
                    group: &member.group,
                    current,
                    expected: expected.unwrap_or(current),
                })
            })
            .collect()
    }

    /// Returns the change that brings the labels and the annotation of a node up to date; an empty
    /// one if they are, or if the node is handed over to an external system.
    pub fn change(&self, node: &NodeView) -> NodeChange {
        let mut change = NodeChange::default();
        if node.is_handed_over() {
            return change;
        }
        let pods = self.pods_of_node.get(&node.name).into_iter().flatten();
        let pods = pods.filter_map(|key| Some((key.0, self.pods.get(key)?)));
        let software = Software {
            config: &self.config,
            node,
            pods: pods.collect(),
            known: &self.known,
        };
        software.change(&mut change);
        // The last one of several classes with the same labels counts.
        let mut numbers = BTreeMap::new();
        for counted in self.counted(node) {
            numbers.insert(&counted.class.current, counted.current);
            numbers.insert(&counted.class.expected, counted.expected);
        }
        for (label, number) in numbers {
            set_label(&mut change, node, label, Some(&number.to_string()));
        }
        change
    }
}

#[cfg(test)]
mod tests;
