//! Groups of all rules, by node and rule, so that few of them are compared to find one.

use std::collections::BTreeMap;

use super::{GroupId, GroupState};
use crate::group::{Group, GroupValue};

/// Groups of a rule on a node.
type OfRule = BTreeMap<Vec<GroupValue>, GroupState>;

/// Groups of all rules.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Groups of each node, by the number of their rule.
    nodes: BTreeMap<String, Vec<OfRule>>,
    len: usize,
}

// === impl Groups ===

impl Groups {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, (group, rule): &GroupId) -> Option<&GroupState> {
        let of_node = self.nodes.get(&group.node)?;
        of_node.get(*rule)?.get(group.values.as_slice())
    }

    pub(super) fn get_mut(&mut self, (group, rule): &GroupId) -> Option<&mut GroupState> {
        let of_node = self.nodes.get_mut(&group.node)?;
        of_node.get_mut(*rule)?.get_mut(group.values.as_slice())
    }

    pub(super) fn insert(&mut self, (group, rule): GroupId, state: GroupState) {
        let of_node = self.nodes.entry(group.node).or_default();
        if of_node.len() <= rule {
            of_node.resize_with(rule + 1, OfRule::new);
        }
        let of_rule = of_node.get_mut(rule);
        let before = of_rule.and_then(|of_rule| of_rule.insert(group.values, state));
        self.len += usize::from(before.is_none());
    }

    pub(super) fn remove(&mut self, (group, rule): &GroupId) -> Option<GroupState> {
        let of_node = self.nodes.get_mut(&group.node)?;
        let removed = of_node.get_mut(*rule)?.remove(group.values.as_slice())?;
        self.len -= 1;
        if of_node.iter().all(BTreeMap::is_empty) {
            self.nodes.remove(&group.node);
        }
        Some(removed)
    }

    /// Returns the groups of a node in the order of their rules.
    pub(super) fn of_node<'a>(&'a self, node: &'a str) -> impl Iterator<Item = GroupId> + 'a {
        let rules = self.nodes.get(node).into_iter().flatten().enumerate();
        rules.flat_map(move |(rule, groups)| {
            let id = move |values: &Vec<GroupValue>| {
                let (node, values) = (node.to_owned(), values.clone());
                (Group { node, values }, rule)
            };
            groups.keys().map(id)
        })
    }

    /// Returns the groups of a rule with their states, by node.
    pub(super) fn of_rule(&self, rule: usize) -> impl Iterator<Item = (Group, &GroupState)> {
        self.nodes.iter().flat_map(move |(node, rules)| {
            let groups = rules.get(rule).into_iter().flatten();
            groups.map(move |(values, state)| {
                let (node, values) = (node.clone(), values.clone());
                (Group { node, values }, state)
            })
        })
    }

    /// Returns the states of all groups, by node.
    pub(super) fn states(&self) -> impl Iterator<Item = &GroupState> {
        let rules = self.nodes.values().flatten();
        rules.flat_map(BTreeMap::values)
    }

    /// Takes the groups of a node.
    pub(super) fn take_node(&mut self, node: &str) -> Vec<(GroupId, GroupState)> {
        let taken = self.nodes.remove(node).unwrap_or_default();
        let taken = taken.into_iter().enumerate().flat_map(|(rule, groups)| {
            let id = move |(values, state)| {
                let node = node.to_owned();
                ((Group { node, values }, rule), state)
            };
            groups.into_iter().map(id)
        });
        let taken: Vec<(GroupId, GroupState)> = taken.collect();
        self.len -= taken.len();
        taken
    }
}
