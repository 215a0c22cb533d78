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
    /// Number of items that are needed.
    pub needed: u32,
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
        let groups = self.groups.of_rule(index).into_iter();
        let views = groups.filter_map(|(group, state)| {
            let (rule, id) = (self.rules.get(index)?, (group.clone(), index));
            let seen = self.context.seen(rule, &id, &state.history);
            let conclusion = seen.conclusion(now).map(std::borrow::Cow::into_owned);
            let (held, until) = (seen.held(now), seen.changes_after(now));
            let needed = seen.needed();
            Some(GroupView {
                group: Group::clone(group),
                held,
                needed,
                conclusion,
                until,
            })
        });
        views.collect()
    }
}
