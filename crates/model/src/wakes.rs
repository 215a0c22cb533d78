//! The times at which nodes are looked at again even if nothing happens.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

/// Least by which the wall clock has to be put back to end all waits, which are by it.
pub const CLOCK_SLACK: SignedDuration = SignedDuration::from_secs(1);

/// The next time of each node, one at most. Asked on every turn of the loop, also while a thousand
/// nodes wait for their answers, so the next one is found without looking at all.
#[derive(Debug, Default)]
pub struct Wakes {
    of_node: BTreeMap<String, Timestamp>,
    order: BTreeSet<(Timestamp, String)>,
}

impl Wakes {
    /// Wakes `node` at `at`, and at no other time; `None`: not at all.
    pub fn set(&mut self, node: &str, at: Option<Timestamp>) {
        if self.of_node.get(node).copied() == at {
            return;
        }
        if let Some(before) = self.of_node.remove(node) {
            self.order.remove(&(before, node.to_owned()));
        }
        if let Some(at) = at {
            self.of_node.insert(node.to_owned(), at);
            self.order.insert((at, node.to_owned()));
        }
    }

    /// Returns when the next node is due.
    pub fn next(&self) -> Option<Timestamp> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Takes the nodes that are due out. Whoever looks at one sets its next time.
    pub fn take_due(&mut self, now: Timestamp) -> Vec<String> {
        let mut due = Vec::new();
        while self.next().is_some_and(|at| at <= now)
            && let Some((_, node)) = self.order.pop_first()
        {
            self.of_node.remove(&node);
            due.push(node);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_node_has_one_time_and_those_due_come_in_order() {
        let mut wakes = Wakes::default();
        assert_eq!(wakes.next(), None);
        for (node, second) in [("c", 3), ("a", 1), ("b", 2), ("a", 5)] {
            wakes.set(node, Some(at(second)));
        }
        assert_eq!(wakes.next(), Some(at(2)));
        wakes.set("unknown", None);
        assert_eq!(wakes.take_due(at(1)).len(), 0);
        assert_eq!(wakes.take_due(at(3)), ["b", "c"]);
        assert_eq!(wakes.take_due(at(4)).len(), 0, "each is taken once");
        wakes.set("b", Some(at(6)));
        wakes.set("a", None);
        assert_eq!(wakes.take_due(at(9)), ["b"]);
        assert_eq!(wakes.next(), None);
    }
}
