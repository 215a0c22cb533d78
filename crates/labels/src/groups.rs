//! The numbers of devices of the nodes of each group, from which the expected number is learned.

use std::collections::{BTreeMap, BTreeSet};

/// The groups of all classes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Groups {
    /// Groups by class and name.
    groups: BTreeMap<(usize, String), Group>,
    /// Membership of each node in the group of each class.
    members: BTreeMap<String, Vec<Member>>,
}

/// Membership of a node in the group of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Name of the group.
    pub(crate) group: String,
    /// Number of devices; `None` if it is not known.
    pub(crate) current: Option<u32>,
    /// Number that the node's label expects.
    pub(crate) expected: Option<u32>,
}

#[derive(Clone, Debug, Default)]
struct Group {
    nodes: BTreeSet<String>,
    /// Numbers of its nodes, each with how many nodes have or expect it.
    numbers: BTreeMap<u32, usize>,
}

// === impl Groups ===

impl Groups {
    /// Records the membership of a node in the group of each class; none if the node is gone.
    /// Returns the nodes of groups whose largest number has changed.
    pub(crate) fn set(&mut self, node: &str, members: Vec<Member>) -> BTreeSet<String> {
        let before = self.members.remove(node).unwrap_or_default();
        if before == members {
            self.keep(node, members);
            return BTreeSet::new();
        }
        let keys = |members: &[Member]| -> Vec<(usize, String)> {
            let groups = members.iter().map(|member| member.group.clone());
            groups.enumerate().collect()
        };
        let changed: BTreeSet<_> = keys(&before).into_iter().chain(keys(&members)).collect();
        let most_before: Vec<_> = changed.iter().map(|key| self.most_of(key)).collect();
        for (key, member) in keys(&before).into_iter().zip(&before) {
            if let Some(group) = self.groups.get_mut(&key) {
                group.leave(node, member);
                if group.nodes.is_empty() {
                    self.groups.remove(&key);
                }
            }
        }
        for (key, member) in keys(&members).into_iter().zip(&members) {
            self.groups.entry(key).or_default().join(node, member);
        }
        self.keep(node, members);
        let mut affected = BTreeSet::new();
        for (key, before) in changed.iter().zip(most_before) {
            if before != self.most_of(key)
                && let Some(group) = self.groups.get(key)
            {
                affected.extend(group.nodes.iter().cloned());
            }
        }
        affected
    }

    fn keep(&mut self, node: &str, members: Vec<Member>) {
        if !members.is_empty() {
            self.members.insert(node.to_owned(), members);
        }
    }

    /// Returns the membership of a node in the group of a class.
    pub(crate) fn member(&self, node: &str, class: usize) -> Option<&Member> {
        self.members.get(node)?.get(class)
    }

    /// Returns the largest number that a node of a group has or expects.
    pub(crate) fn most(&self, class: usize, group: &str) -> Option<u32> {
        self.most_of(&(class, group.to_owned()))
    }

    fn most_of(&self, key: &(usize, String)) -> Option<u32> {
        let (most, _) = self.groups.get(key)?.numbers.last_key_value()?;
        Some(*most)
    }
}

// === impl Group ===

impl Group {
    fn join(&mut self, node: &str, member: &Member) {
        self.nodes.insert(node.to_owned());
        for number in [member.current, member.expected].into_iter().flatten() {
            *self.numbers.entry(number).or_default() += 1;
        }
    }

    fn leave(&mut self, node: &str, member: &Member) {
        self.nodes.remove(node);
        for number in [member.current, member.expected].into_iter().flatten() {
            if let Some(nodes) = self.numbers.get_mut(&number) {
                *nodes -= 1;
                if *nodes == 0 {
                    self.numbers.remove(&number);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_of_a_group_are_affected_by_its_largest_number_only() {
        let member = |current, expected| Member {
            group: "g".to_owned(),
            current,
            expected,
        };
        let mut groups = Groups::default();
        let mut set = |node: &str, members: &[Member]| {
            let affected = groups.set(node, members.to_vec());
            let affected: Vec<String> = affected.into_iter().collect();
            (affected.join(" "), groups.most(0, "g"))
        };
        assert_eq!(set("a", &[member(Some(4), None)]), ("a".into(), Some(4)));
        assert_eq!(set("b", &[member(None, Some(4))]), (String::new(), Some(4)));
        assert_eq!(
            set("b", &[member(Some(8), Some(4))]),
            ("a b".into(), Some(8))
        );
        assert_eq!(
            set("a", &[member(Some(3), Some(8))]),
            (String::new(), Some(8))
        );
        assert_eq!(
            set("b", &[]),
            (String::new(), Some(8)),
            "a still expects it"
        );
        assert_eq!(set("a", &[member(Some(3), None)]), ("a".into(), Some(3)));
        assert_eq!(set("a", &[]), (String::new(), None));
        assert!(groups.groups.is_empty() && groups.members.is_empty());
    }
}
