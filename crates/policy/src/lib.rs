//! The policy: rule sets that decide which faults take a node out of service.
//!
//! The file format and the environment of expressions are those of NVSentinel
//! (`fault-quarantine` TOML, CEL over `event` and `node`). Loading is much stricter: a typo is
//! an error with file and line, not a rule that never matches.

pub mod assess;
mod devices;
pub mod glob;
mod limits;
mod load;
mod protect;
mod route;
mod rule;
pub mod template;
mod uncordon;

use std::fmt;

use contract::findings::FileError;
use contract::{HealthEvent, action_name, keys};
use serde_json::Value;

pub use devices::DeviceTaints;
pub use limits::{Amount, Brake, Budget, DEFAULT_PERCENT, Limit, Window};
pub use load::{MAX_POLICY_COST, MAX_RULE_SETS, MAX_RULES};
pub use protect::{ProtectFrom, ProtectionMark};
pub use route::{ALL_STAGES, Route, RouteDrain, Routed};
#[cfg(test)]
pub(crate) use rule::counts;
pub use rule::{
    CelRule, Comparison, ComparisonKind, CompileError, CountExpression, Criterion, Evaluated,
    EventVariable, Fields, Inventory, InventoryExpression, LookedUp, MAX_COST, MAX_DEPTH,
    MAX_EXPRESSION_BYTES, MAX_LOOPS, MAX_NODE_BYTES, MAX_NODE_ITEMS, NodeVariable,
    ObjectExpression, ObjectName, ObjectResult, Root, RuleKind,
};
pub use uncordon::Uncordon;

use model::node::{NodeView, Taint};

/// Longest expression shown within a sentence, in characters; longer ones are cut. The longest
/// rule that NVSentinel ships has about 270.
const SHOWN_EXPRESSION: usize = 300;

/// A policy: rule sets, and the settings that belong to them.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// Origin of the policy for people, such as its file.
    pub source: String,
    /// Prefix of the cordon labels, including its separator.
    pub label_prefix: String,
    /// Enabled rule sets, in the order of the file.
    pub rule_sets: Vec<RuleSet>,
    /// Routes, which choose the stages of a node by the events that took it out of service. The
    /// first match wins.
    pub routes: Vec<Route>,
    /// Alternative rule sets that a node can choose by name; see [`Policy::rule_sets_of`].
    pub policies: Vec<NamedPolicy>,
    /// True if a quarantined node also gets the taint [`keys::UNHEALTHY_TAINT`].
    pub unhealthy_taint: bool,
    /// True if a recovery leaves NVSentinel's `uncordon-*` labels on the node.
    pub uncordon_labels: bool,
    /// Effect of an uncordon that gpuwarden did not make.
    pub uncordon: Uncordon,
    /// Programs that are to leave a node alone while it is out of service.
    pub protect_from: Vec<ProtectFrom>,
    /// Limits on nodes out of service.
    pub brake: Brake,
    /// Effects of device taints. `None` if single devices are not tainted.
    pub device_taints: Option<DeviceTaints>,
    /// Settings of the file that have no effect. Shown whenever the file is loaded.
    pub warnings: Vec<String>,
}

/// Rule sets with a name, for the nodes that choose it.
#[derive(Clone, Debug)]
pub struct NamedPolicy {
    /// Name, unique in a policy.
    pub name: String,
    /// Enabled rule sets in the order of the file. They replace the policy's own.
    pub rule_sets: Vec<RuleSet>,
}

/// A rule set: its rules, and the measures taken if they match.
#[derive(Clone, Debug)]
pub struct RuleSet {
    /// Name of the rule set. Part of the cordon reason.
    pub name: String,
    /// Priority among rule sets that request the same taint with different effects: the highest
    /// wins.
    pub priority: i64,
    /// Alternative rules: at least one must hold, if there are any.
    pub any: Vec<CelRule>,
    /// Rules that must all hold.
    pub all: Vec<CelRule>,
    /// True if either `any` or `all` suffices when both are present, as in NVSentinel.
    pub any_or_all: bool,
    /// Taint to put on the node.
    pub taint: Option<Taint>,
    /// True if the node is to be cordoned.
    pub cordon: bool,
    /// Largest number of faulty GPUs that only taint their devices and leave the node in service.
    /// `None` if a single one takes the node out.
    pub taint_devices: Option<u32>,
}

/// Answer of a rule set about one event on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleSetAnswer {
    /// The rule set matches.
    Matched,
    /// The rule set does not match because of this expression. Alternatives are joined by `||`.
    NotMatched(String),
    /// The rule set could not be evaluated, and so does not match: the expression and the
    /// reason.
    Failed(String, String),
    /// The rule set was not evaluated: users report more about the node than one evaluation has
    /// time for.
    NotAsked,
}

/// Policy that applies if none is configured. A fatal event, or one that asks for the node's
/// replacement, takes the node out of service. Nodes excluded by the operator's label are left
/// alone.
pub const DEFAULT_POLICY: &str = include_str!("../data/default-policy.toml");

// === impl Policy ===

impl Policy {
    /// Parses a policy. `source` names the file in errors.
    pub fn parse(text: &str, source: &str) -> Result<Self, FileError> {
        load::parse(text, source)
    }

    /// Returns the built-in policy, see [`DEFAULT_POLICY`].
    pub fn builtin() -> Self {
        // The text is compiled in and covered by a test. An empty policy matches nothing.
        Self::parse(DEFAULT_POLICY, "built-in default").unwrap_or_else(|error| Self {
            source: "built-in default".to_owned(),
            warnings: vec![format!("the built-in policy does not load: {error}")],
            ..Self::default()
        })
    }

    /// Returns the rule sets for `node`: those of the policy chosen by its annotation
    /// [`keys::POLICY`], or else the policy's own.
    ///
    /// A node can choose a policy but not define one: permission to annotate a node must not
    /// include writing rules.
    pub fn rule_sets_of(&self, node: &NodeView) -> &[RuleSet] {
        let named = chosen(node).and_then(|name| self.named(name));
        named.map_or(&self.rule_sets, |named| &named.rule_sets)
    }

    /// Returns the name chosen by `node` if no policy has it. The policy's own rule sets then
    /// apply.
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
    /// Returns whether a match has any effect.
    pub fn asks(&self) -> bool {
        self.cordon || self.taint.is_some() || self.taint_devices.is_some()
    }

    /// Returns whether any rule reads more of a node than labels and annotations.
    pub fn reads_whole_node(&self) -> bool {
        let mut rules = self.any.iter().chain(&self.all);
        rules.any(CelRule::reads_whole_node)
    }

    /// Returns whether the rule set matches an event on a node. If it has both `any` and `all`,
    /// both must hold, unless `any_or_all` is set.
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
                "is not evaluated: users report more about the node than one evaluation has time for",
            ),
        }
    }
}

/// Returns an expression on one line, cut to a readable length.
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

/// Returns the variable `event` of overrides: NVSentinel's fields, and `entitiesImpacted`,
/// which NVSentinel documents but does not provide. Lists and maps are empty if the event has
/// none.
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
