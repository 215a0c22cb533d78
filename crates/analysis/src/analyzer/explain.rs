//! Groups of a rule, for people: their items and conclusions.

use jiff::Timestamp;

use super::Analyzer;
use crate::condition::{Conclusion, Held};
use crate::group::Group;

/// Group of a rule as of a time.
#[derive(Clone, Debug)]
pub struct GroupView {
    /// Node and values of the group.
    pub group: Group,
    /// Items that count.
    pub held: Held,
    /// Open conclusion.
    pub conclusion: Option<Conclusion>,
    /// Time after which the conclusion ends, or nothing counts any longer, if no further event
    /// comes. `None` for a conclusion that lasts until a repair.
    pub until: Option<Timestamp>,
}

// === impl Analyzer ===

impl Analyzer {
    /// Returns the groups of a rule, by node.
    pub fn groups_of_rule(&self, name: &str, now: Timestamp) -> Vec<GroupView> {
        let Some(index) = self.rules.iter().position(|rule| rule.name == name) else {
            return Vec::new();
        };
        let views = self.groups.of_rule(index).filter_map(|(group, state)| {
            let condition = &self.rules.get(index)?.condition;
            let conclusion = state.history.conclusion(condition, now);
            Some(GroupView {
                group,
                held: state.history.held(condition, now),
                conclusion: conclusion.map(std::borrow::Cow::into_owned),
                until: state.history.changes_after(condition, now),
            })
        });
        views.collect()
    }
}
