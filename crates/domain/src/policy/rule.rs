//! One rule: a CEL expression over `event` or `node`. All that knows CEL is in this file
//! and below it: what is refused when a rule is loaded (`check`), and which values an
//! expression has looked at (`seen`).

mod check;
mod compared;
mod seen;

use std::sync::{Arc, LazyLock};

use cel::common::types::{CelBool, CelString, DYN_TYPE, LIST_TYPE, NULL_TYPE};
use cel::common::value::CowVal;
use cel::{Context, Env, ExecutionError, Program, Value as CelValue, extensions};
use serde_json::Value;

pub(super) use compared::{Compared, How};

/// What an expression looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleKind {
    /// The variable `event`.
    HealthEvent,
    /// The variable `node`.
    Node,
    /// The variable `event` of the connector's overrides, see
    /// [`crate::pipeline::overrides`]: no rule of a policy.
    Override,
}

/// Longest expression, in bytes. The longest rule known in the field has about 700.
pub const MAX_EXPRESSION_BYTES: usize = 4096;
/// Deepest nesting of an expression, parentheses and chains of operators alike. It is
/// evaluated recursively, on the stack of whoever asks.
pub const MAX_DEPTH: usize = 64;
/// Most loops (`all`, `exists`, `map`, `filter` ...) inside, or over the result of, one
/// another: each multiplies the work and the memory of the ones before.
pub const MAX_LOOPS: usize = 3;
/// Stack for compiling: enough for anything of [`MAX_EXPRESSION_BYTES`], before its depth
/// is known. Only what is used of it takes memory.
const COMPILE_STACK: usize = 256 * 1024 * 1024;

/// A compiled expression.
#[derive(Clone)]
pub struct Rule {
    /// What it looks at.
    pub kind: RuleKind,
    /// Its text.
    pub expression: String,
    program: Arc<Program>,
}

/// A node as the variable `node`, made once for all rules of one look.
pub struct NodeVariable(CelValue);

/// The standard functions, the strings extension, and `contains` of a list.
static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut environment = Env::stdlib();
    // They fail only where a function is declared twice; tests use both.
    drop(environment.add_extension(extensions::strings));
    drop(environment.add_member_overload(
        "contains",
        "gpuwarden_list_contains",
        LIST_TYPE,
        vec![DYN_TYPE],
        |arguments| list_contains(&arguments).map(|holds| CowVal::owned(CelBool::from(holds))),
    ));
    // An empty list of codes is null, and contains nothing.
    drop(environment.add_member_overload(
        "contains",
        "gpuwarden_null_contains",
        NULL_TYPE,
        vec![DYN_TYPE],
        |_| Ok(CowVal::owned(CelBool::from(false))),
    ));
    Arc::new(environment)
});

/// Fields of the variable `event`.
const EVENT_FIELDS: [&str; 18] = [
    "version",
    "agent",
    "componentClass",
    "checkName",
    "isFatal",
    "isHealthy",
    "message",
    "recommendedAction",
    "errorCode",
    "entitiesImpacted",
    "metadata",
    "generatedTimestamp",
    "nodeName",
    "quarantineOverrides",
    "drainOverrides",
    "processingStrategy",
    "id",
    "customRecommendedAction",
];
/// Fields of the variable `event` of overrides.
const OVERRIDE_FIELDS: [&str; 11] = [
    "agent",
    "checkName",
    "componentClass",
    "errorCode",
    "entitiesImpacted",
    "isFatal",
    "isHealthy",
    "recommendedAction",
    "nodeName",
    "metadata",
    "message",
];
/// Fields of the variable `node`.
const NODE_FIELDS: [&str; 5] = ["apiVersion", "kind", "metadata", "spec", "status"];

// === impl RuleKind ===

impl RuleKind {
    /// The kind by its name in a policy file.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "HealthEvent" => Some(Self::HealthEvent),
            "Node" => Some(Self::Node),
            _ => None,
        }
    }

    /// The one variable of expressions of this kind.
    pub fn variable(self) -> &'static str {
        match self {
            Self::HealthEvent | Self::Override => "event",
            Self::Node => "node",
        }
    }

    pub(super) fn fields(self) -> &'static [&'static str] {
        match self {
            Self::HealthEvent => &EVENT_FIELDS,
            Self::Node => &NODE_FIELDS,
            Self::Override => &OVERRIDE_FIELDS,
        }
    }
}

// === impl Rule ===

impl Rule {
    /// Compiles an expression and checks what CEL itself would find out event by event:
    /// names that do not exist, and a result that is not true or false.
    ///
    /// The error is for the author of the policy.
    pub fn compile(kind: RuleKind, expression: &str) -> Result<Self, String> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            let found = expression.len();
            return Err(format!(
                "has {found} bytes, at most {MAX_EXPRESSION_BYTES} are taken; split it into several rules"
            ));
        }
        // Parser and checks recurse as deeply as the expression is nested, which can be
        // deeper than the stack of a thread; so they get one that is deep enough.
        let builder = std::thread::Builder::new().stack_size(COMPILE_STACK);
        std::thread::scope(|scope| {
            let compiling = builder.spawn_scoped(scope, || Self::compile_here(kind, expression));
            match compiling.map(std::thread::ScopedJoinHandle::join) {
                Ok(Ok(compiled)) => compiled,
                Ok(Err(_)) => Err("cannot be compiled: the CEL library fails on it".to_owned()),
                Err(error) => Err(format!("cannot be compiled: no thread for it: {error}")),
            }
        })
    }

    fn compile_here(kind: RuleKind, expression: &str) -> Result<Self, String> {
        let program = ENVIRONMENT
            .compile(expression)
            .map_err(|error| format!("does not parse: {}", first(&error)))?;
        let rule = Self {
            kind,
            expression: expression.to_owned(),
            program: Arc::new(program),
        };
        let depth = check::depth(rule.program.expression());
        if depth > MAX_DEPTH {
            return Err(format!(
                "is nested {depth} deep, at most {MAX_DEPTH} are taken; use lists ('x in [a, b]') or \
                 several rules"
            ));
        }
        let loops = check::loops(rule.program.expression());
        if loops > MAX_LOOPS {
            return Err(format!(
                "has {loops} loops (all, exists, map, filter ...) inside one another, at most \
                 {MAX_LOOPS} are taken; use several rules"
            ));
        }
        let mut bound = Vec::new();
        check::check_names(rule.program.expression(), kind, &mut bound)?;
        check::check_patterns(&rule.program)?;
        // Evaluated once, so that a result of another type, or a function that does not
        // exist, is found here. Missing map keys are the data's matter.
        for sample in samples(kind) {
            match rule.evaluate(sample) {
                Ok(CelValue::Bool(_)) => {}
                Ok(other) => {
                    return Err(format!(
                        "gives a {}, a rule must be true or false",
                        other.type_of()
                    ));
                }
                Err(ExecutionError::UndeclaredReference(name)) => {
                    return Err(format!("unknown name '{name}'"));
                }
                Err(_) => {}
            }
        }
        Ok(rule)
    }

    /// The fixed values that it compares fields of its variable with.
    pub(super) fn compared(&self) -> Vec<Compared> {
        compared::compared(self.program.expression(), self.kind)
    }

    /// The values that the expression looks at, as `path = value` for people: those of
    /// `variable`, the event or the node that it is asked about.
    pub fn seen(&self, variable: &Value) -> Vec<String> {
        seen::seen(self.program.expression(), self.kind, variable)
    }

    /// Whether the rule holds; the error says why it could not be evaluated.
    pub fn holds(&self, event: &Value, node: &NodeVariable) -> Result<bool, String> {
        self.holds_for(match self.kind {
            RuleKind::HealthEvent | RuleKind::Override => to_cel(event)?,
            RuleKind::Node => node.0.clone(),
        })
    }

    /// Whether a rule over `event` holds; the error says why it could not be evaluated.
    pub fn holds_for_event(&self, event: &Value) -> Result<bool, String> {
        self.holds_for(to_cel(event)?)
    }

    fn holds_for(&self, variable: CelValue) -> Result<bool, String> {
        match self.evaluate(variable) {
            Ok(CelValue::Bool(holds)) => Ok(holds),
            Ok(other) => Err(format!("gives a {}, not true or false", other.type_of())),
            Err(error) => Err(one_line(&error.to_string())),
        }
    }

    fn evaluate(&self, variable: CelValue) -> Result<CelValue, ExecutionError> {
        let mut context = Context::with_env(ENVIRONMENT.clone());
        context.add_variable_from_value(self.kind.variable(), variable);
        self.program.execute(&context)
    }
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rule")
            .field("kind", &self.kind)
            .field("expression", &self.expression)
            .finish_non_exhaustive()
    }
}

// === impl NodeVariable ===

impl NodeVariable {
    /// The variable for a node object.
    pub fn new(object: &Value) -> Self {
        Self(to_cel(object).unwrap_or(CelValue::Null))
    }
}

impl std::fmt::Debug for NodeVariable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeVariable")
    }
}

fn to_cel(value: &Value) -> Result<CelValue, String> {
    cel::to_value(value).map_err(|error| one_line(&error.to_string()))
}

/// Values on which a rule is tried when it is loaded.
fn samples(kind: RuleKind) -> Vec<CelValue> {
    let objects = match kind {
        RuleKind::HealthEvent | RuleKind::Override => {
            let variable = match kind {
                RuleKind::Override => crate::pipeline::overrides::event_variable,
                _ => super::event_variable,
            };
            let filled = contract::HealthEvent {
                error_code: vec!["79".to_owned()],
                entities_impacted: vec![contract::Entity {
                    entity_type: "PCI".to_owned(),
                    entity_value: "0000:00:00".to_owned(),
                }],
                generated_timestamp: Some(prost_types::Timestamp::default()),
                quarantine_overrides: Some(contract::BehaviourOverrides::default()),
                drain_overrides: Some(contract::BehaviourOverrides::default()),
                metadata: [("key".to_owned(), "value".to_owned())].into(),
                ..contract::HealthEvent::default()
            };
            vec![
                variable(&contract::HealthEvent::default()),
                variable(&filled),
            ]
        }
        RuleKind::Node => vec![serde_json::json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node", "labels": {}, "annotations": {}},
            "spec": {},
            "status": {"conditions": []},
        })],
    };
    objects
        .iter()
        .filter_map(|object| to_cel(object).ok())
        .collect()
}

/// `list.contains(x)`: whether an element equals `x`, or, where both are text, contains it.
fn list_contains(arguments: &[CowVal<'_, '_>]) -> Result<bool, ExecutionError> {
    let [list, wanted] = arguments else {
        return Err(ExecutionError::invalid_argument_count(2, arguments.len()));
    };
    let part: Option<&CelString<'_>> = wanted.downcast_ref();
    let mut elements = list
        .as_iterable()
        .ok_or_else(|| ExecutionError::function_error("contains", "is asked of no list"))?
        .iter();
    while let Some(element) = elements.next() {
        let text: Option<&CelString<'_>> = element.downcast_ref();
        let holds = match (text, part) {
            (Some(text), Some(part)) => text.inner().contains(part.inner()),
            _ => element.equals(wanted.as_ref()),
        };
        if holds {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The first thing that is wrong, and where; the parser says more, with pictures of the text.
fn first(error: &cel::ParseErrors) -> String {
    let Some(first) = error.errors.first() else {
        return one_line(&error.to_string());
    };
    let ((line, column), what) = (first.pos, one_line(&first.msg));
    if line > 1 {
        format!("line {line}, column {column}: {what}")
    } else {
        format!("column {column}: {what}")
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
