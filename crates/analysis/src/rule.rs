//! Rules, and the events that each is about.

use std::cell::OnceCell;
use std::collections::BTreeSet;

use contract::{HealthEvent, ProcessingStrategy, RecommendedAction};
use model::fault::clears_on_reboot;
use policy::{CelRule, EventVariable};

use crate::condition::{Condition, ConditionKind, Entry};
use crate::group::{Group, GroupKey, GroupValue};
use crate::member::Member;

/// Most groups that one event counts for. An event beyond it counts for the first ones.
pub const MAX_GROUPS_OF_EVENT: usize = 64;

/// A rule: what it concludes from which events.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Name, which is the check of the conclusion's event.
    pub name: String,
    /// Events that count; of a sequence, what its steps have in common.
    pub matches: Matches,
    /// Events of each step of a sequence, one for each report that it needs; none in other rules.
    pub steps: Vec<Matches>,
    /// Keys of the groups, beside the node.
    pub group_by: Vec<GroupKey>,
    /// Keys whose different values are counted; none for reports or bursts.
    pub distinct: Vec<GroupKey>,
    /// Key of the members of a group that are compared; `None` if none are.
    pub member: Option<GroupKey>,
    /// Condition of a group.
    pub condition: Condition,
    /// Share of the nodes of a group, in percent from 1 to 100, that has to be reached beside the
    /// threshold. Counts where the number of these nodes is known, and up to
    /// [`MAX_THRESHOLD`](crate::MAX_THRESHOLD) nodes.
    pub share: Option<u8>,
    /// Checks whose healthy event about the group ends the conclusion.
    pub recover: Vec<String>,
    /// Component class of the conclusion, such as `GPU`.
    pub component_class: String,
    /// Recommended action of the conclusion.
    pub action: RecommendedAction,
    /// True if the conclusion is a fatal event.
    pub fatal: bool,
    /// Text of the conclusion for people.
    pub message: String,
    /// Strategy of the conclusion's event: one that is only stored shows what a new rule would do.
    pub strategy: ProcessingStrategy,
}

/// Events that a rule, or a step of it, is about. An empty list admits all.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// Names of monitors.
    pub agents: Vec<String>,
    /// Names of checks.
    pub checks: Vec<String>,
    /// Error codes; one of the event's has to be among them.
    pub codes: Vec<String>,
    /// Error codes that do not count.
    pub other_than: Vec<String>,
    /// True for healthy events, false for reports of faults.
    pub is_healthy: bool,
    /// True for fatal events, false for others; `None` for both.
    pub is_fatal: Option<bool>,
    /// Expression over `event`, as in a policy.
    pub expression: Option<CelRule>,
}

/// An event with the variable of expressions, which is made on first use.
pub struct EventView<'a> {
    /// Event.
    pub event: &'a HealthEvent,
    /// Fields that expressions read; `None` for all.
    fields: Option<&'a BTreeSet<String>>,
    variable: OnceCell<EventVariable>,
}

// === impl Rule ===

impl Rule {
    /// Returns the groups that an event counts for. An event without a value for a key counts for
    /// none, and one with other codes than those of the rule not for these.
    pub fn groups(&self, event: &HealthEvent) -> Vec<Group> {
        let mut rows: Vec<Vec<GroupValue>> = vec![Vec::new()];
        for key in &self.group_by {
            let mut values = key.values(event);
            if *key == GroupKey::Code {
                values.retain(|code| self.matches.admits_code(&code.text()));
            }
            if let ([row], [value]) = (&mut rows[..], &mut values[..]) {
                row.push(value.clone());
                continue;
            }
            let longer = rows.iter().flat_map(|row| {
                let with =
                    |value: &GroupValue| [row.as_slice(), std::slice::from_ref(value)].concat();
                values.iter().map(with).collect::<Vec<_>>()
            });
            rows = longer.take(MAX_GROUPS_OF_EVENT).collect();
        }
        let node = if self.is_of_one_node() {
            event.node_name.as_str()
        } else {
            ""
        };
        let group = |values| Group {
            node: node.to_owned(),
            values,
        };
        rows.into_iter().map(group).collect()
    }

    /// Returns the labels of a node that the rule reads.
    pub fn labels(&self) -> impl Iterator<Item = &String> {
        let keys = self.group_by.iter().chain(&self.distinct);
        keys.flat_map(GroupKey::labels)
    }

    /// Returns true if the events of a group are of one node.
    pub fn is_of_one_node(&self) -> bool {
        !self.group_by.iter().any(GroupKey::groups_nodes) || self.group_by.contains(&GroupKey::Node)
    }

    /// Returns the members of a group that an event is about.
    pub fn members(&self, event: &HealthEvent) -> Vec<Member> {
        match self.member {
            None => Vec::new(),
            Some(GroupKey::Node) => vec![Member::of_node(&event.node_name)],
            Some(_) => Member::gpus(event),
        }
    }

    /// Returns the entry of a repair that an event reports.
    pub(crate) fn repair(&self, event: &HealthEvent) -> Entry {
        if self.member.is_none() {
            return Entry::Repair;
        }
        let members = Member::gpus(event);
        Entry::RepairOf(if members.is_empty() {
            vec![Member::of_node(&event.node_name)]
        } else {
            members
        })
    }

    /// Returns the steps of the rule that an event is part of, as bits. A rule without steps has
    /// one. The first error of an expression goes to `errors`; such an event is part of nothing.
    pub fn steps_of(&self, view: &EventView<'_>, errors: &mut Vec<String>) -> u32 {
        let mut admits = |matches: &Matches| match matches.admits(view) {
            Ok(admits) => admits,
            Err(error) => {
                errors.push(error);
                false
            }
        };
        if self.steps.is_empty() {
            return u32::from(admits(&self.matches));
        }
        let steps = self.steps.iter().zip(0_u32..32);
        steps.fold(0, |bits, (matches, step)| {
            bits | (u32::from(admits(matches)) << step)
        })
    }

    /// Returns true if healthy events can be part of the rule.
    pub fn has_healthy_step(&self) -> bool {
        self.matches.is_healthy || self.steps.iter().any(|step| step.is_healthy)
    }

    /// Returns true if other faults of a group matter to the rule.
    pub fn needs_others(&self) -> bool {
        matches!(self.condition.kind, ConditionKind::Solo { .. })
    }

    /// Returns true if an event is about a group: it names the group's values, or nothing of their
    /// kinds.
    pub fn covers(&self, group: &Group, event: &HealthEvent) -> bool {
        let of_node = group.node.is_empty() || group.node == event.node_name;
        let mut pairs = self.group_by.iter().zip(&group.values);
        of_node && pairs.all(|(key, value)| key.covers(value, event))
    }

    /// Returns true if groups of several nodes are about the job or labels of an event.
    pub(crate) fn is_for_groups_of_nodes(&self, event: &HealthEvent) -> bool {
        let mut keys = self.group_by.iter().filter(|key| key.groups_nodes());
        !self.is_of_one_node() && keys.all(|key| !key.values(event).is_empty())
    }

    /// Returns true if a healthy event, which is about a group, repairs it: by a check that the rule
    /// names, or, if a reset or restart is asked for, by one that reported the fault.
    pub fn is_repaired_by(&self, event: &HealthEvent) -> bool {
        let by_restart = self.condition.until_repaired
            && self.action != RecommendedAction::None
            && clears_on_reboot(self.action as i32)
            && self.steps.is_empty()
            && self.matches.is_about(event);
        by_restart || self.recover.contains(&event.check_name)
    }
}

// === impl Matches ===

impl Matches {
    /// Returns true if monitor and check of an event are among those of the rule.
    fn is_about(&self, event: &HealthEvent) -> bool {
        among(&self.agents, &event.agent) && among(&self.checks, &event.check_name)
    }

    /// Returns true if a code is among those of the rule.
    fn admits_code(&self, code: &str) -> bool {
        among(&self.codes, code) && !self.other_than.iter().any(|other| other == code)
    }

    /// Returns true if an event counts. The error is the reason why the expression could not be
    /// evaluated.
    fn admits(&self, view: &EventView<'_>) -> Result<bool, String> {
        let event = view.event;
        let codes = &event.error_code;
        let has_code = if self.codes.is_empty() && (self.other_than.is_empty() || codes.is_empty())
        {
            true
        } else {
            codes.iter().any(|code| self.admits_code(code))
        };
        let is_kind = event.is_healthy == self.is_healthy
            && self.is_fatal.is_none_or(|fatal| fatal == event.is_fatal);
        if !is_kind || !has_code || !self.is_about(event) {
            return Ok(false);
        }
        match &self.expression {
            Some(expression) => match expression.holds_without_variable(event) {
                Some(holds) => Ok(holds),
                None => expression.holds_for_event(view.variable()),
            },
            None => Ok(true),
        }
    }
}

fn among(names: &[String], name: &str) -> bool {
    names.is_empty() || names.iter().any(|known| known == name)
}

// === impl EventView ===

impl<'a> EventView<'a> {
    /// Creates the view of an event.
    pub fn new(event: &'a HealthEvent) -> Self {
        Self::with_fields(event, None)
    }

    /// Creates the view of an event for expressions that read these fields; `None` for all.
    pub(crate) fn with_fields(
        event: &'a HealthEvent,
        fields: Option<&'a BTreeSet<String>>,
    ) -> Self {
        Self {
            event,
            fields,
            variable: OnceCell::new(),
        }
    }

    fn variable(&self) -> &EventVariable {
        self.variable
            .get_or_init(|| EventVariable::with_fields(self.event, self.fields))
    }
}
