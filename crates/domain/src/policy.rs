//! The policy: rule sets that say for which faults a node is taken out of service.
//!
//! The file format and the environment of the expressions are NVSentinel's
//! (`fault-quarantine` TOML, CEL over `event` and `node`), checked much harder when it
//! is loaded: a typo is an error with file and line, not a rule that never matches.

mod limits;
mod load;
mod rule;
mod unknown;

use std::fmt;

use contract::findings::FileError;
use contract::{HealthEvent, action_name, keys};
use serde_json::{Map, Value, json};

pub use limits::{Amount, Brake, Budget, DEFAULT_PERCENT, Window};
pub use load::{MAX_POLICY_BYTES, MAX_POLICY_COST, MAX_RULE_SETS, MAX_RULES};
#[cfg(test)]
pub(crate) use rule::counts;
pub use rule::{
    Compared, CompileError, EventVariable, How, MAX_COST, MAX_DEPTH, MAX_EXPRESSION_BYTES,
    MAX_LOOPS, MAX_NODE_BYTES, MAX_NODE_ITEMS, NodeVariable, Rule, RuleKind,
};

use crate::node::{NodeView, Taint};

/// Characters of an expression that a sentence shows; the rest is in the file. The longest
/// of the rules that NVSentinel ships has about 270.
const SHOWN_EXPRESSION: usize = 300;

/// Rule sets and what belongs to them.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Where it was read from, for people.
    pub source: String,
    /// Prefix of the cordon labels, put before them as it is.
    pub label_prefix: String,
    /// Rule sets in the order of the file; those that are switched off are left out.
    pub rule_sets: Vec<RuleSet>,
    /// Further rule sets that a node can name; see [`Policy::rule_sets_of`].
    pub policies: Vec<NamedPolicy>,
    /// Whether a quarantined node also gets the taint [`keys::UNHEALTHY_TAINT`].
    pub unhealthy_taint: bool,
    /// Whether a recovery leaves the reference's `uncordon-*` labels.
    pub uncordon_labels: bool,
    /// How many nodes may be taken out of service.
    pub brake: Brake,
    /// What the file asks for that is not done; to be shown where it is loaded.
    pub warnings: Vec<String>,
}

/// Rule sets under a name: what holds for the nodes that name it.
#[derive(Clone, Debug)]
pub struct NamedPolicy {
    /// Name, unique in a policy.
    pub name: String,
    /// Its rule sets in the order of the file; they stand in the place of the policy's own.
    pub rule_sets: Vec<RuleSet>,
}

/// One rule set: when it matches, and what it then asks for.
#[derive(Clone, Debug)]
pub struct RuleSet {
    /// Name; goes into the cordon reason.
    pub name: String,
    /// The higher one decides about the effect of a taint that several rule sets ask for.
    pub priority: i64,
    /// At least one of these must hold (where there are any).
    pub any: Vec<Rule>,
    /// All of these must hold.
    pub all: Vec<Rule>,
    /// With both of these: one of them is enough, as in the reference.
    pub any_or_all: bool,
    /// Taint to put on the node.
    pub taint: Option<Taint>,
    /// Whether to cordon the node.
    pub cordon: bool,
}

/// What a rule set says of one event on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It matches.
    Matched,
    /// It does not match: the expression that failed it; of several of which one would have
    /// done, all, joined by `||`.
    NotMatched(String),
    /// It could not be evaluated and so does not match: the expression and why.
    Failed(String, String),
}

/// Used where no policy is given: a fatal event, or one that asks for the node's
/// replacement, takes the node out; a node that an operator has taken out of
/// gpuwarden's hands by label is left alone.
pub const DEFAULT_POLICY: &str = include_str!("../data/default-policy.toml");

// === impl Policy ===

impl Policy {
    /// Reads a policy. `source` names the file in errors.
    pub fn parse(text: &str, source: &str) -> Result<Self, FileError> {
        load::parse(text, source)
    }

    /// The built-in policy, see [`DEFAULT_POLICY`].
    pub fn builtin() -> Self {
        // The text is compiled in and a test reads it; an empty policy matches nothing.
        Self::parse(DEFAULT_POLICY, "built-in default").unwrap_or_else(|error| Self {
            source: "built-in default".to_owned(),
            label_prefix: String::new(),
            rule_sets: Vec::new(),
            policies: Vec::new(),
            unhealthy_taint: false,
            uncordon_labels: false,
            brake: Brake::default(),
            warnings: vec![format!("the built-in policy does not load: {error}")],
        })
    }

    /// The rule sets that decide about `node`: those of the policy that it names by the
    /// annotation [`keys::POLICY`], else the policy's own.
    ///
    /// A node can name a policy, never bring one: who may annotate a node must not thereby
    /// write rules.
    pub fn rule_sets_of(&self, node: &NodeView) -> &[RuleSet] {
        let named = chosen(node).and_then(|name| self.named(name));
        named.map_or(&self.rule_sets, |named| &named.rule_sets)
    }

    /// The policy that `node` names and that does not exist; the cluster's holds for it.
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
    /// Whether it asks for anything where it matches.
    pub fn asks(&self) -> bool {
        self.cordon || self.taint.is_some()
    }

    /// Returns whether a rule asks a node for more than its labels and annotations.
    pub fn reads_whole_node(&self) -> bool {
        let mut rules = self.any.iter().chain(&self.all);
        rules.any(Rule::reads_whole_node)
    }

    /// Whether the rule set matches an event on a node. With both `any` and `all`, both
    /// must hold, unless one of them is enough.
    pub fn answer(&self, event: &EventVariable, node: &NodeVariable) -> Answer {
        if self.any_or_all && !self.any.is_empty() && !self.all.is_empty() {
            let any = self.answer_any(event, node);
            return match any {
                Answer::Matched => any,
                _ => match self.answer_all(event, node) {
                    Answer::NotMatched(_) => any,
                    all => all,
                },
            };
        }
        if self.any.is_empty() && self.all.is_empty() {
            return Answer::NotMatched("the rule set has no rules".to_owned());
        }
        match self.answer_all(event, node) {
            Answer::Matched if !self.any.is_empty() => self.answer_any(event, node),
            answer => answer,
        }
    }

    fn answer_all(&self, event: &EventVariable, node: &NodeVariable) -> Answer {
        for rule in &self.all {
            match rule.holds(event, node) {
                Ok(true) => {}
                Ok(false) => return Answer::NotMatched(rule.expression.clone()),
                Err(error) => return Answer::Failed(rule.expression.clone(), error),
            }
        }
        Answer::Matched
    }

    fn answer_any(&self, event: &EventVariable, node: &NodeVariable) -> Answer {
        let mut last = None;
        for rule in &self.any {
            match rule.holds(event, node) {
                Ok(true) => return Answer::Matched,
                Ok(false) => {}
                Err(error) => last = Some((rule.expression.clone(), error)),
            }
        }
        match last {
            Some((expression, error)) => Answer::Failed(expression, error),
            None => Answer::NotMatched(
                self.any
                    .iter()
                    .map(|rule| rule.expression.as_str())
                    .collect::<Vec<_>>()
                    .join(" || "),
            ),
        }
    }
}

// === impl Answer ===

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Matched => f.write_str("matches"),
            Self::NotMatched(expression) => {
                write!(f, "does not match: {}", shortened(expression))
            }
            Self::Failed(expression, why) => {
                write!(f, "cannot be evaluated: {}: {why}", shortened(expression))
            }
        }
    }
}

/// An expression on one line, as long as it is readable in a sentence.
fn shortened(expression: &str) -> String {
    let line = expression.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN_EXPRESSION) {
        Some((end, _)) => format!("{} ...", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

/// Returns what rules see as `event`.
pub fn event_variable(event: &HealthEvent) -> Value {
    contract::json::rule::to_value(event)
}

/// Returns what rules of overrides see as `event`: NVSentinel's variable, and beside it `entitiesImpacted`, which
/// its documentation promises. Lists and maps are empty where the event has none.
pub fn override_variable(event: &HealthEvent) -> Value {
    let entities = event.entities_impacted.iter().map(
        |entity| json!({"entityType": entity.entity_type, "entityValue": entity.entity_value}),
    );
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    set("agent", json!(event.agent));
    set("checkName", json!(event.check_name));
    set("componentClass", json!(event.component_class));
    set("errorCode", json!(event.error_code));
    set("entitiesImpacted", entities.collect());
    set("isFatal", json!(event.is_fatal));
    set("isHealthy", json!(event.is_healthy));
    set(
        "recommendedAction",
        json!(action_name(event.recommended_action)),
    );
    set("nodeName", json!(event.node_name));
    set("metadata", json!(event.metadata));
    set("message", json!(event.message));
    Value::Object(fields)
}

#[cfg(test)]
mod tests;
