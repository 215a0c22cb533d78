//! Rules, and the events that each is about.

use contract::{HealthEvent, RecommendedAction};
use policy::{CelRule, EventVariable};

use crate::condition::Condition;
use crate::group::{Group, GroupKey, GroupValue};

/// Most groups that one event counts for. An event beyond it counts for the first ones.
pub const MAX_GROUPS_OF_EVENT: usize = 64;

/// A rule: what it concludes from which events.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Name, which is the check of the conclusion's event.
    pub name: String,
    /// Events that count.
    pub matches: Matches,
    /// Keys of the groups, beside the node.
    pub group_by: Vec<GroupKey>,
    /// Key whose different values are counted; `None` for reports or bursts.
    pub distinct: Option<GroupKey>,
    /// Condition of a group.
    pub condition: Condition,
    /// Component class of the conclusion, such as `GPU`.
    pub component_class: String,
    /// Recommended action of the conclusion.
    pub action: RecommendedAction,
    /// True if the conclusion is a fatal event.
    pub fatal: bool,
    /// Text of the conclusion for people.
    pub message: String,
}

/// Events that a rule is about. An empty list admits all.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// Names of monitors.
    pub agents: Vec<String>,
    /// Names of checks.
    pub checks: Vec<String>,
    /// Error codes; one of the event's has to be among them.
    pub codes: Vec<String>,
    /// Expression over `event`, as in a policy.
    pub expression: Option<CelRule>,
}

// === impl Rule ===

impl Rule {
    /// Returns the groups that an event counts for. An event without a value for a key counts for
    /// none, and one with other codes than those of the rule not for these.
    pub fn groups(&self, event: &HealthEvent) -> Vec<Group> {
        let codes = &self.matches.codes;
        let mut rows: Vec<Vec<GroupValue>> = vec![Vec::new()];
        for key in &self.group_by {
            let mut values = key.values(event);
            if *key == GroupKey::Code && !codes.is_empty() {
                values.retain(|code| codes.iter().any(|one| one == code.text()));
            }
            let longer = rows.iter().flat_map(|row| {
                let with =
                    |value: &GroupValue| [row.as_slice(), std::slice::from_ref(value)].concat();
                values.iter().map(with).collect::<Vec<_>>()
            });
            rows = longer.take(MAX_GROUPS_OF_EVENT).collect();
        }
        let group = |values| Group {
            node: event.node_name.clone(),
            values,
        };
        rows.into_iter().map(group).collect()
    }

    /// Returns true if an event is part of the history of a group: it counts for the group, or it is
    /// healthy and heals the group.
    pub fn is_of(&self, group: &Group, event: &HealthEvent) -> bool {
        if event.node_name != group.node {
            return false;
        }
        if event.is_healthy {
            let mut pairs = self.group_by.iter().zip(&group.values);
            return self.matches.is_about(event)
                && pairs.all(|(key, value)| key.is_healed(value, event));
        }
        self.matches.counts(event).unwrap_or(false) && self.groups(event).contains(group)
    }
}

// === impl Matches ===

impl Matches {
    /// Returns true if monitor and check of an event are among those of the rule.
    pub fn is_about(&self, event: &HealthEvent) -> bool {
        admits(&self.agents, &event.agent) && admits(&self.checks, &event.check_name)
    }

    /// Returns true if an event counts. The error is the reason why the expression could not be
    /// evaluated; such an event does not count.
    pub fn counts(&self, event: &HealthEvent) -> Result<bool, String> {
        let has_code = self.codes.is_empty()
            || event
                .error_code
                .iter()
                .any(|code| self.codes.contains(code));
        if !has_code || !self.is_about(event) {
            return Ok(false);
        }
        match &self.expression {
            Some(expression) => {
                let variable = EventVariable::new(&policy::event_variable(event));
                expression.holds_for_event(&variable)
            }
            None => Ok(true),
        }
    }
}

fn admits(names: &[String], name: &str) -> bool {
    names.is_empty() || names.iter().any(|known| known == name)
}
