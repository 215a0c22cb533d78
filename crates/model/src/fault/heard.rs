//! The checks that have spoken of each node.
//!
//! Open faults tell what is broken. That a check is well can only be said of one that has
//! spoken: a condition on a node of which we know nothing may be another's, and true.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::MAX_FAULTY_NODES;
use crate::reporter::Authority;

/// Most checks by name, over all nodes. Names come from senders, and cannot fill the memory.
const MAX_CHECKS: u16 = 4_096;
/// Most checks of one node; the monitors of NVSentinel together have about 40.
const MAX_CHECKS_PER_NODE: usize = 128;
/// Divisor of both limits for users' checks: the rest is for the monitors.
const USERS_PART: usize = 2;

/// The checks that were heard of, by node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Heard {
    /// Names; each is kept once, for there are few, and thousands of nodes.
    checks: Vec<String>,
    /// Indexes into `checks`.
    nodes: BTreeMap<String, BTreeSet<u16>>,
}

// === impl Heard ===

impl Heard {
    /// Notes that `check` has spoken of `node`. Beyond the limits it is not noted.
    pub(super) fn note(&mut self, node: &str, check: &str, authority: Authority) {
        if self.of(node).any(|known| known == check) {
            return;
        }
        let part = match authority {
            Authority::Trusted => 1,
            Authority::User => USERS_PART,
        };
        let known = self.checks.iter().position(|known| known == check);
        let index = match known.map(u16::try_from) {
            Some(Ok(index)) => index,
            _ => match u16::try_from(self.checks.len()) {
                Ok(next) if usize::from(next) < usize::from(MAX_CHECKS) / part => {
                    self.checks.push(check.to_owned());
                    next
                }
                _ => return,
            },
        };
        if let Some(checks) = self.nodes.get_mut(node) {
            if checks.len() < MAX_CHECKS_PER_NODE / part {
                checks.insert(index);
            }
        } else if self.nodes.len() < MAX_FAULTY_NODES {
            self.nodes.insert(node.to_owned(), BTreeSet::from([index]));
        }
    }

    /// Returns the checks that have spoken of `node`.
    pub(super) fn of(&self, node: &str) -> impl Iterator<Item = &str> {
        let indexes = self.nodes.get(node).into_iter().flatten();
        indexes.filter_map(|index| self.checks.get(usize::from(*index)).map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_known_by_node_and_bounded() {
        let (user, trusted) = (Authority::User, Authority::Trusted);
        let mut heard = Heard::default();
        for (node, check) in [("n1", "A"), ("n2", "B"), ("n1", "B"), ("n1", "A")] {
            heard.note(node, check, trusted);
        }
        assert_eq!(heard.of("n1").collect::<Vec<_>>(), ["A", "B"]);
        assert_eq!(heard.of("n2").collect::<Vec<_>>(), ["B"]);
        assert_eq!(heard.of("n3").count(), 0);
        for check in 0..200 {
            heard.note("n1", &check.to_string(), user);
        }
        assert_eq!(heard.of("n1").count(), MAX_CHECKS_PER_NODE / 2);
        for check in 200..400 {
            heard.note("n1", &check.to_string(), trusted);
        }
        assert_eq!(heard.of("n1").count(), MAX_CHECKS_PER_NODE);
        for check in 0..10_000 {
            heard.note(&format!("u{}", check / 50), &format!("u{check}"), user);
        }
        assert_eq!(heard.checks.len(), usize::from(MAX_CHECKS) / 2);
        for check in 0..10_000 {
            heard.note(&format!("m{}", check / 100), &check.to_string(), trusted);
        }
        assert_eq!(heard.checks.len(), usize::from(MAX_CHECKS));
        let text = serde_json::to_string(&heard).unwrap();
        assert_eq!(serde_json::from_str::<Heard>(&text).unwrap(), heard);
    }
}
