//! Groups of all rules. Many rules have the same groups, so one look finds the states of all of them.

use std::collections::HashMap;
use std::sync::Arc;

use super::{GroupId, GroupState};
use crate::group::Group;

/// Groups of all rules.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Groups of each node, in no order.
    nodes: HashMap<String, HashMap<Arc<Group>, OfRules>>,
    /// Number of groups, those of each rule counted.
    len: usize,
}

/// States of a group, one for each rule that has it.
#[derive(Debug)]
pub(super) struct OfRules {
    group: Arc<Group>,
    /// States by the number of their rule, in its order.
    states: Vec<(usize, Box<GroupState>)>,
}

// === impl Groups ===

impl Groups {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn of(&self, group: &Group) -> Option<&OfRules> {
        self.nodes.get(&group.node)?.get(group)
    }

    pub(super) fn of_mut(&mut self, group: &Group) -> Option<&mut OfRules> {
        self.nodes.get_mut(&group.node)?.get_mut(group)
    }

    pub(super) fn get(&self, (group, rule): &GroupId) -> Option<&GroupState> {
        self.of(group)?.get(*rule)
    }

    pub(super) fn get_mut(&mut self, (group, rule): &GroupId) -> Option<&mut GroupState> {
        self.of_mut(group)?.get_mut(*rule)
    }

    pub(super) fn insert(&mut self, (group, rule): GroupId, state: GroupState) {
        let of_node = self.nodes.entry(group.node.clone()).or_default();
        let of_rules = of_node
            .entry(group)
            .or_insert_with_key(|group| OfRules::new(group.clone()));
        let state = Box::new(state);
        match of_rules.place(rule) {
            Ok(place) => drop(of_rules.states.get_mut(place).map(|it| it.1 = state)),
            Err(place) => {
                of_rules.states.insert(place, (rule, state));
                self.len += 1;
            }
        }
    }

    pub(super) fn remove(&mut self, (group, rule): &GroupId) -> Option<Box<GroupState>> {
        let of_node = self.nodes.get_mut(&group.node)?;
        let of_rules = of_node.get_mut(group)?;
        let place = of_rules.place(*rule).ok()?;
        let (_, removed) = of_rules.states.remove(place);
        self.len -= 1;
        if of_rules.states.is_empty() {
            of_node.remove(group);
            if of_node.is_empty() {
                self.nodes.remove(&group.node);
            }
        }
        Some(removed)
    }

    /// Returns true if a node has no groups.
    pub(super) fn is_without(&self, node: &str) -> bool {
        !self.nodes.contains_key(node)
    }

    /// Returns the groups of a node in their order.
    pub(super) fn of_node(&self, node: &str) -> Vec<GroupId> {
        let groups = self.nodes.get(node).into_iter().flat_map(HashMap::values);
        let mut ids: Vec<GroupId> = groups.flat_map(OfRules::ids).collect();
        ids.sort_unstable();
        ids
    }

    /// Returns what is wanted of the states of all groups, in their order.
    pub(super) fn all<'a, T>(
        &'a self,
        wanted: impl Fn(usize, &'a GroupState) -> Option<T>,
    ) -> Vec<(&'a Arc<Group>, T)> {
        let mut all = Vec::new();
        for of_rules in self.nodes.values().flat_map(HashMap::values) {
            let states = of_rules.states.iter();
            let states = states.filter_map(|(rule, state)| wanted(*rule, state));
            all.extend(states.map(|state| (&of_rules.group, state)));
        }
        // The rules of a group are in their order.
        all.sort_by_key(|(group, _)| *group);
        all
    }

    /// Returns the groups of a rule with their states, in their order.
    pub(super) fn of_rule(&self, number: usize) -> Vec<(&Arc<Group>, &GroupState)> {
        self.all(|rule, state| (rule == number).then_some(state))
    }

    /// Takes the groups of a node.
    pub(super) fn take_node(&mut self, node: &str) -> Vec<(GroupId, GroupState)> {
        let taken = self.nodes.remove(node).unwrap_or_default().into_values();
        let taken = taken.flat_map(|of_rules| {
            let OfRules { group, states } = of_rules;
            let states = states.into_iter();
            states.map(move |(rule, state)| ((group.clone(), rule), *state))
        });
        let taken: Vec<(GroupId, GroupState)> = taken.collect();
        self.len -= taken.len();
        taken
    }
}

// === impl OfRules ===

impl OfRules {
    fn new(group: Arc<Group>) -> Self {
        Self {
            group,
            states: Vec::new(),
        }
    }

    pub(super) fn group(&self) -> Arc<Group> {
        self.group.clone()
    }

    pub(super) fn get(&self, rule: usize) -> Option<&GroupState> {
        let place = self.place(rule).ok()?;
        self.states.get(place).map(|(_, state)| &**state)
    }

    pub(super) fn get_mut(&mut self, rule: usize) -> Option<&mut GroupState> {
        let place = self.place(rule).ok()?;
        self.states.get_mut(place).map(|(_, state)| &mut **state)
    }

    fn ids(&self) -> impl Iterator<Item = GroupId> {
        let ids = self.states.iter();
        ids.map(|(rule, _)| (self.group.clone(), *rule))
    }

    fn place(&self, rule: usize) -> Result<usize, usize> {
        self.states.binary_search_by_key(&rule, |(rule, _)| *rule)
    }
}
