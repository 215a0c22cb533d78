//! Groups in which the values of a rule were reported, such as the GPUs on which a job has failed.
//!
//! A value counts as reported elsewhere if another group has it in the same part of time, or in the
//! one before or after. A part is as long as the rule's window. For each part and value, two groups
//! are enough to answer that, and the first ones in their order are the same whatever the order of
//! arrival.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::group::Group;

/// Most values, in each part of time. Beyond it the oldest is forgotten.
const MAX_VALUES: usize = 20_000;
/// Groups of a value that are known. Two are enough; two more, since a GPU may be two groups while only
/// one of its names is known.
const GROUPS: usize = 4;
/// Most parts of a time that are looked at: the last ones.
const MAX_PARTS: i64 = 64;

/// Number of a part of time, number of a rule, and value.
type Key = (i64, usize, String);

/// Values of all rules with [`crate::ConditionKind::Exclusive`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(Key, Vec<Group>)>", into = "Vec<(Key, Vec<Group>)>")]
pub(crate) struct Elsewhere {
    groups: BTreeMap<Key, Vec<Group>>,
}

// === impl Elsewhere ===

impl Elsewhere {
    /// Adds a value of a group. Returns the other groups for which that may matter.
    pub(crate) fn add(
        &mut self,
        (rule, window): (usize, SignedDuration),
        value: &str,
        at: Timestamp,
        group: &Group,
    ) -> Vec<Group> {
        let part = part_of(at, window);
        let known = self
            .groups
            .entry((part, rule, value.to_owned()))
            .or_default();
        let Err(place) = known.binary_search(group) else {
            return Vec::new();
        };
        if place < GROUPS {
            known.insert(place, group.clone());
        }
        let displaced = (known.len() > GROUPS).then(|| known.pop()).flatten();
        if self.groups.len() > MAX_VALUES {
            self.groups.pop_first();
        }
        let near = (part - 1..=part + 1).flat_map(|part| self.of(&(part, rule, value.to_owned())));
        let near = near.cloned().chain(displaced);
        let mut others: Vec<Group> = near.filter(|other| other != group).collect();
        others.sort();
        others.dedup();
        others
    }

    /// Forgets the groups of a node.
    pub(crate) fn forget(&mut self, node: &str) {
        self.groups.retain(|_, groups| {
            groups.retain(|group| group.node != node);
            !groups.is_empty()
        });
    }

    /// Returns true if another group has the value about as early or late as between two times.
    pub(crate) fn has(
        &self,
        (rule, window): (usize, SignedDuration),
        value: &str,
        between: (Timestamp, Timestamp),
        group: &Group,
    ) -> bool {
        let last = part_of(between.1, window) + 1;
        let first = (part_of(between.0, window) - 1).max(last - MAX_PARTS);
        let mut near = (first..=last).flat_map(|part| self.of(&(part, rule, value.to_owned())));
        near.any(|other| other != group)
    }

    fn of(&self, key: &Key) -> &[Group] {
        self.groups.get(key).map(Vec::as_slice).unwrap_or_default()
    }
}

impl From<Vec<(Key, Vec<Group>)>> for Elsewhere {
    fn from(saved: Vec<(Key, Vec<Group>)>) -> Self {
        Self {
            groups: saved.into_iter().collect(),
        }
    }
}

impl From<Elsewhere> for Vec<(Key, Vec<Group>)> {
    fn from(elsewhere: Elsewhere) -> Self {
        elsewhere.groups.into_iter().collect()
    }
}

/// Returns the number of the part of time, each of this length.
fn part_of(at: Timestamp, length: SignedDuration) -> i64 {
    let length = i64::try_from(length.as_millis()).unwrap_or(i64::MAX);
    at.as_millisecond().div_euclid(length.max(1))
}
