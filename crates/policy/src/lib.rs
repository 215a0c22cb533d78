//! The policy: rule sets that say for which faults a node is taken out of service.
//!
//! The file format and the environment of the expressions are NVSentinel's
//! (`fault-quarantine` TOML, CEL over `event` and `node`), checked much harder when it
//! is loaded: a typo is an error with file and line, not a rule that never matches.

pub mod assess;
mod devices;
pub mod glob;
mod limits;
mod load;
mod route;
mod rule;
pub mod template;
mod uncordon;

use std::fmt;

use contract::findings::FileError;
use contract::{HealthEvent, action_name, keys};
use serde_json::Value;

pub use devices::DeviceTaints;
pub use limits::{Amount, Brake, Budget, DEFAULT_PERCENT, Window};
pub use load::{MAX_POLICY_BYTES, MAX_POLICY_COST, MAX_RULE_SETS, MAX_RULES};
pub use route::{ALL_STAGES, Route, RouteDrain, Routed};
#[cfg(test)]
pub(crate) use rule::counts;
pub use rule::{
    Compared, CompileError, CountExpression, Criterion, EventVariable, How, MAX_COST, MAX_DEPTH,
    MAX_EXPRESSION_BYTES, MAX_LOOPS, MAX_NODE_BYTES, MAX_NODE_ITEMS, NodeVariable, Rule, RuleKind,
};
pub use uncordon::Uncordon;

use model::node::{NodeView, Taint};

/// Characters of an expression that a sentence shows; the rest is in the file. The longest
/// of the rules that NVSentinel ships has about 270.
const SHOWN_EXPRESSION: usize = 300;

/// A policy: rule sets, and the settings that belong to them.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// The place that it was read from, for people.
    pub source: String,
    /// Prefix of the cordon labels, put before them as it is.
    pub label_prefix: String,
    /// Rule sets in the order of the file; those that are switched off are left out.
    pub rule_sets: Vec<RuleSet>,
    /// The stages that a node gets, by the events for which it is out; of those that fit one, the first
    /// counts.
    pub routes: Vec<Route>,
    /// Further rule sets that a node can name; see [`Policy::rule_sets_of`].
    pub policies: Vec<NamedPolicy>,
    /// True if a quarantined node also gets the taint [`keys::UNHEALTHY_TAINT`].
    pub unhealthy_taint: bool,
    /// True if a recovery leaves the reference's `uncordon-*` labels.
    pub uncordon_labels: bool,
    /// The meaning of an uncordon that gpuwarden has not made.
    pub uncordon: Uncordon,
    /// The limits of nodes that are taken out of service.
    pub brake: Brake,
    /// The effects of device taints; `None`: single devices are not tainted.
    pub device_taints: Option<DeviceTaints>,
    /// The requests of the file that have no effect; to be shown where it is loaded.
    pub warnings: Vec<String>,
}

/// Rule sets under a name, for the nodes that name it.
#[derive(Clone, Debug)]
pub struct NamedPolicy {
    /// Name, unique in a policy.
    pub name: String,
    /// Its rule sets in the order of the file; they stand in the place of the policy's own.
    pub rule_sets: Vec<RuleSet>,
}

/// A rule set: its rules, and what it asks for where they match.
#[derive(Clone, Debug)]
pub struct RuleSet {
    /// Name; goes into the cordon reason.
    pub name: String,
    /// The higher one decides about the effect of a taint that several rule sets ask for.
    pub priority: i64,
    /// The rules of which at least one must hold, where there are any.
    pub any: Vec<Rule>,
    /// The rules that must all hold.
    pub all: Vec<Rule>,
    /// True if one of `any` and `all` is enough where there are both, as in the reference.
    pub any_or_all: bool,
    /// Taint to put on the node.
    pub taint: Option<Taint>,
    /// True if the node is to be cordoned.
    pub cordon: bool,
    /// Number of GPUs up to which those that are faulty are tainted, and the node stays in
    /// service; `None`: the node is taken out for one.
    pub taint_devices: Option<u32>,
}

/// The answer of a rule set about one event on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleSetAnswer {
    /// The rule set matches.
    Matched,
    /// The rule set does not match, for this expression; of several of which one would have done,
    /// all, joined by `||`.
    NotMatched(String),
    /// The rule set could not be evaluated and so does not match: the expression and why.
    Failed(String, String),
    /// The rule set was not asked: users report more of the node than a look at it takes time for.
    NotAsked,
}

/// The policy that holds where none is given: a fatal event, or one that asks for the node's
/// replacement, takes the node out; a node that an operator has taken out of gpuwarden's hands by
/// label is left alone.
pub const DEFAULT_POLICY: &str = include_str!("../data/default-policy.toml");

// === impl Policy ===

impl Policy {
    /// Reads a policy. `source` names the file in errors.
    pub fn parse(text: &str, source: &str) -> Result<Self, FileError> {
        load::parse(text, source)
    }

    /// Returns the built-in policy, see [`DEFAULT_POLICY`].
    pub fn builtin() -> Self {
        // The text is compiled in and a test reads it; an empty policy matches nothing.
        Self::parse(DEFAULT_POLICY, "built-in default").unwrap_or_else(|error| Self {
            source: "built-in default".to_owned(),
            warnings: vec![format!("the built-in policy does not load: {error}")],
            ..Self::default()
        })
    }

    /// Returns the rule sets that decide about `node`: those of the policy that it names by the
    /// annotation [`keys::POLICY`], else the policy's own.
    ///
    /// A node can name a policy, never bring one: who may annotate a node must not thereby
    /// write rules.
    pub fn rule_sets_of(&self, node: &NodeView) -> &[RuleSet] {
        let named = chosen(node).and_then(|name| self.named(name));
        named.map_or(&self.rule_sets, |named| &named.rule_sets)
    }

    /// Returns the policy that `node` names and that does not exist; the cluster's holds for it.
    pub fn unknown_choice<'a>(&self, node: &'a NodeView) -> Option<&'a str> {
        chosen(node).filter(|name| self.named(name).is_none())
    }

    fn named(&self, name: &str) -> Option<&NamedPolicy> {
        self.policies.iter().find(|policy| policy.name == name)
    }
}

fn chosen(node: &NodeView) -> Option<&str> {
    let name = node.annotations.get(keys::POLICY)?.trim();
    (!name.is_empty()).then_some(name)
}

// === impl RuleSet ===

impl RuleSet {
    /// Returns whether it asks for anything where it matches.
    pub fn asks(&self) -> bool {
        self.cordon || self.taint.is_some() || self.taint_devices.is_some()
    }

    /// Returns whether a rule asks a node for more than its labels and annotations.
    pub fn reads_whole_node(&self) -> bool {
        let mut rules = self.any.iter().chain(&self.all);
        rules.any(Rule::reads_whole_node)
    }

    /// Returns whether the rule set matches an event on a node. With both `any` and `all`, both
    /// must hold, unless one of them is enough.
    pub fn answer(&self, event: &EventVariable, node: &NodeVariable) -> RuleSetAnswer {
        if self.any_or_all && !self.any.is_empty() && !self.all.is_empty() {
            let any = self.answer_any(event, node);
            return match any {
                RuleSetAnswer::Matched => any,
                _ => match self.answer_all(event, node) {
                    RuleSetAnswer::NotMatched(_) => any,
                    all => all,
                },
            };
        }
        if self.any.is_empty() && self.all.is_empty() {
            return RuleSetAnswer::NotMatched("the rule set has no rules".to_owned());
        }
        match self.answer_all(event, node) {
            RuleSetAnswer::Matched if !self.any.is_empty() => self.answer_any(event, node),
            answer => answer,
        }
    }

    fn answer_all(&self, event: &EventVariable, node: &NodeVariable) -> RuleSetAnswer {
        for rule in &self.all {
            match rule.holds(event, node) {
                Ok(true) => {}
                Ok(false) => return RuleSetAnswer::NotMatched(rule.expression.clone()),
                Err(error) => return RuleSetAnswer::Failed(rule.expression.clone(), error),
            }
        }
        RuleSetAnswer::Matched
    }

    fn answer_any(&self, event: &EventVariable, node: &NodeVariable) -> RuleSetAnswer {
        let mut last = None;
        for rule in &self.any {
            match rule.holds(event, node) {
                Ok(true) => return RuleSetAnswer::Matched,
                Ok(false) => {}
                Err(error) => last = Some((rule.expression.clone(), error)),
            }
        }
        match last {
            Some((expression, error)) => RuleSetAnswer::Failed(expression, error),
            None => RuleSetAnswer::NotMatched(
                self.any
                    .iter()
                    .map(|rule| rule.expression.as_str())
                    .collect::<Vec<_>>()
                    .join(" || "),
            ),
        }
    }
}

// === impl RuleSetAnswer ===

impl fmt::Display for RuleSetAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Matched => f.write_str("matches"),
            Self::NotMatched(expression) => {
                write!(f, "does not match: {}", shortened(expression))
            }
            Self::Failed(expression, why) => {
                write!(f, "cannot be evaluated: {}: {why}", shortened(expression))
            }
            Self::NotAsked => f.write_str(
                "is not asked, for users report more of the node than a look at it takes time for",
            ),
        }
    }
}

/// Returns an expression on one line, as long as it is readable in a sentence.
fn shortened(expression: &str) -> String {
    let line = expression.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN_EXPRESSION) {
        Some((end, _)) => format!("{} ...", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

/// Returns the variable `event` of rules.
pub fn event_variable(event: &HealthEvent) -> Value {
    contract::json::rule::to_value(event)
}

/// Returns the variable `event` of overrides: NVSentinel's, and beside it `entitiesImpacted`, which
/// its documentation promises. Lists and maps are empty where the event has none.
pub fn override_variable(event: &HealthEvent) -> Value {
    let mut variable = contract::json::to_value(event);
    if let Value::Object(fields) = &mut variable {
        fields.retain(|field, _| RuleKind::Override.fields().contains(&field.as_str()));
        let action = action_name(event.recommended_action);
        fields.insert("recommendedAction".to_owned(), action.into());
    }
    variable
}

#[cfg(test)]
mod tests;
