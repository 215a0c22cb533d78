//! Timers of nodes, which are evaluated again at a set time even without an event.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

/// Smallest step back of the wall clock that resets all waits.
pub const CLOCK_SLACK: SignedDuration = SignedDuration::from_secs(1);

/// Next wake-up time of each node, at most one per node. Ordered, so that every iteration of
/// the main loop finds the next one in constant time, even while a thousand nodes wait for
/// responses.
#[derive(Debug, Default)]
pub struct Wakes {
    of_node: BTreeMap<String, Timestamp>,
    order: BTreeSet<(Timestamp, String)>,
}

impl Wakes {
    /// Sets the only wake-up time of `node`. `None` removes it.
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

    /// Returns the next wake-up time.
    pub fn next(&self) -> Option<Timestamp> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Removes and returns the nodes that are due. The caller sets their next times.
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
