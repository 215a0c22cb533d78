//! The checks that have reported about each node.
//!
//! Open faults name what is broken. A check without an open fault counts as healthy only if it
//! has reported: a condition on a node without reports may belong to another component, and be
//! true.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::MAX_FAULTY_NODES;
use crate::reporter::Authority;

/// Most names of checks over all nodes. Senders choose the names, and must not be able to fill
/// the memory.
const MAX_CHECKS: u16 = 4_096;
/// Most checks of one node. All monitors of NVSentinel together have about 40.
const MAX_CHECKS_PER_NODE: usize = 128;
/// Divisor of both limits for users' checks. The rest of the room is reserved for monitors.
const USERS_PART: usize = 2;

/// Checks that have reported, by node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ReportedChecks {
    /// Names of checks. Each is stored once: there are few names, and thousands of nodes.
    checks: Vec<String>,
    /// Indexes into `checks`, by node.
    nodes: BTreeMap<String, BTreeSet<u16>>,
}

// === impl ReportedChecks ===

impl ReportedChecks {
    /// Records a report of `check` about `node`. Beyond the limits it is dropped.
    pub(super) fn record(&mut self, node: &str, check: &str, authority: Authority) {
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

    /// Returns the checks that have reported about `node`.
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
        let mut reported = ReportedChecks::default();
        for (node, check) in [("n1", "A"), ("n2", "B"), ("n1", "B"), ("n1", "A")] {
            reported.record(node, check, trusted);
        }
        assert_eq!(reported.of("n1").collect::<Vec<_>>(), ["A", "B"]);
        assert_eq!(reported.of("n2").collect::<Vec<_>>(), ["B"]);
        assert_eq!(reported.of("n3").count(), 0);
        for check in 0..200 {
            reported.record("n1", &check.to_string(), user);
        }
        assert_eq!(reported.of("n1").count(), MAX_CHECKS_PER_NODE / 2);
        for check in 200..400 {
            reported.record("n1", &check.to_string(), trusted);
        }
        assert_eq!(reported.of("n1").count(), MAX_CHECKS_PER_NODE);
        for check in 0..10_000 {
            reported.record(&format!("u{}", check / 50), &format!("u{check}"), user);
        }
        assert_eq!(reported.checks.len(), usize::from(MAX_CHECKS) / 2);
        for check in 0..10_000 {
            reported.record(&format!("m{}", check / 100), &check.to_string(), trusted);
        }
        assert_eq!(reported.checks.len(), usize::from(MAX_CHECKS));
        let text = serde_json::to_string(&reported).unwrap();
        assert_eq!(
            serde_json::from_str::<ReportedChecks>(&text).unwrap(),
            reported
        );
    }
}
