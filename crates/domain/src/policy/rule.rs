//! One rule: a CEL expression over `event` or `node`. All that knows CEL is in this file.

use std::sync::{Arc, LazyLock};

use cel::common::ast::{EntryExpr, Expr, IdedExpr};
use cel::{Context, Env, ExecutionError, Program, Value as CelValue, extensions};
use serde_json::Value;

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

/// The standard functions and the strings extension.
static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut environment = Env::stdlib();
    // It fails only where a function is declared twice; a test uses the extension.
    drop(environment.add_extension(extensions::strings));
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

    fn fields(self) -> &'static [&'static str] {
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
            .map_err(|error| format!("does not parse: {}", one_line(&error.to_string())))?;
        let rule = Self {
            kind,
            expression: expression.to_owned(),
            program: Arc::new(program),
        };
        let depth = depth(rule.program.expression());
        if depth > MAX_DEPTH {
            return Err(format!(
                "is nested {depth} deep, at most {MAX_DEPTH} are taken; use lists ('x in [a, b]') or \
                 several rules"
            ));
        }
        let loops = loops(rule.program.expression());
        if loops > MAX_LOOPS {
            return Err(format!(
                "has {loops} loops (all, exists, map, filter ...) inside one another, at most \
                 {MAX_LOOPS} are taken; use several rules"
            ));
        }
        let mut bound = Vec::new();
        check_names(rule.program.expression(), kind, &mut bound)?;
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

/// How deeply an expression is nested.
fn depth(at: &IdedExpr) -> usize {
    1 + parts(at).into_iter().map(depth).max().unwrap_or(0)
}

/// How many loops of an expression are inside one another.
fn loops(at: &IdedExpr) -> usize {
    let own = usize::from(matches!(at.expr, Expr::Comprehension(_)));
    own + parts(at).into_iter().map(loops).max().unwrap_or(0)
}

/// The expressions that an expression consists of.
fn parts(at: &IdedExpr) -> Vec<&IdedExpr> {
    match &at.expr {
        Expr::Select(select) => vec![&select.operand],
        Expr::Call(call) => call.args.iter().chain(call.target.as_deref()).collect(),
        Expr::List(list) => list.elements.iter().collect(),
        Expr::Map(map) => map
            .entries
            .iter()
            .flat_map(|entry| of_entry(&entry.expr))
            .collect(),
        Expr::Struct(fields) => fields
            .entries
            .iter()
            .flat_map(|entry| of_entry(&entry.expr))
            .collect(),
        Expr::Comprehension(inner) => vec![
            &inner.iter_range,
            &inner.accu_init,
            &inner.loop_cond,
            &inner.loop_step,
            &inner.result,
        ],
        Expr::Ident(_) | Expr::Literal(_) | Expr::Unspecified => Vec::new(),
    }
}

fn of_entry(entry: &EntryExpr) -> Vec<&IdedExpr> {
    match entry {
        EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
        EntryExpr::StructField(field) => vec![&field.value],
    }
}

/// Refuses variables, and first-level fields of them, that do not exist.
fn check_names(at: &IdedExpr, kind: RuleKind, bound: &mut Vec<String>) -> Result<(), String> {
    match &at.expr {
        Expr::Ident(name) => {
            if name == kind.variable() || bound.contains(name) || is_type_name(name) {
                return Ok(());
            }
            let hint = match (kind, name.as_str()) {
                (RuleKind::HealthEvent, "node") => "; use a rule of kind Node for it".to_owned(),
                (RuleKind::Node, "event") => "; use a rule of kind HealthEvent for it".to_owned(),
                _ => format!("; the one variable here is '{}'", kind.variable()),
            };
            Err(format!("unknown variable '{name}'{hint}"))
        }
        Expr::Select(select) => {
            if let Expr::Ident(name) = &select.operand.expr
                && name == kind.variable()
                && !bound.contains(name)
                && !kind.fields().contains(&select.field.as_str())
            {
                return Err(unknown_field(kind, &select.field));
            }
            check_names(&select.operand, kind, bound)
        }
        Expr::Call(call) => {
            if let Some(target) = &call.target {
                check_names(target, kind, bound)?;
            }
            call.args
                .iter()
                .try_for_each(|argument| check_names(argument, kind, bound))
        }
        Expr::List(list) => list
            .elements
            .iter()
            .try_for_each(|element| check_names(element, kind, bound)),
        Expr::Map(map) => map.entries.iter().try_for_each(|entry| match &entry.expr {
            EntryExpr::MapEntry(entry) => {
                check_names(&entry.key, kind, bound)?;
                check_names(&entry.value, kind, bound)
            }
            EntryExpr::StructField(field) => check_names(&field.value, kind, bound),
        }),
        Expr::Struct(fields) => fields
            .entries
            .iter()
            .try_for_each(|entry| match &entry.expr {
                EntryExpr::MapEntry(entry) => check_names(&entry.value, kind, bound),
                EntryExpr::StructField(field) => check_names(&field.value, kind, bound),
            }),
        Expr::Comprehension(loop_) => {
            check_names(&loop_.iter_range, kind, bound)?;
            check_names(&loop_.accu_init, kind, bound)?;
            let outer = bound.len();
            bound.push(loop_.iter_var.clone());
            bound.extend(loop_.iter_var2.clone());
            bound.push(loop_.accu_var.clone());
            let inside = [&loop_.loop_cond, &loop_.loop_step, &loop_.result]
                .into_iter()
                .try_for_each(|part| check_names(part, kind, bound));
            bound.truncate(outer);
            inside
        }
        Expr::Literal(_) | Expr::Unspecified => Ok(()),
    }
}

fn unknown_field(kind: RuleKind, field: &str) -> String {
    let nearest = kind
        .fields()
        .iter()
        .min_by_key(|known| distance(known, field));
    let hint = match nearest {
        Some(known) if distance(known, field) <= 3 => format!("; did you mean '{known}'?"),
        _ => format!("; fields are {}", kind.fields().join(", ")),
    };
    format!("unknown field '{field}' of '{}'{hint}", kind.variable())
}

/// Names that stand for types, as in `type(x) == string`.
fn is_type_name(name: &str) -> bool {
    [
        "bool",
        "int",
        "uint",
        "double",
        "string",
        "bytes",
        "list",
        "map",
        "null_type",
        "type",
    ]
    .contains(&name)
}

/// How many single-letter edits, ignoring case, make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut previous = i;
        let mut current = i + 1;
        for (cell, to) in row.iter_mut().skip(1).zip(&b) {
            let replaced = previous + usize::from(from != *to);
            previous = *cell;
            current = replaced.min(current + 1).min(*cell + 1);
            *cell = current;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or_default()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
