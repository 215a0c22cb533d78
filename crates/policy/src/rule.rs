//! One rule: a CEL expression over `event` or `node`. All that knows CEL is in this file
//! and below it: what is refused when a rule is loaded (`check`, `cost`), and which values an
//! expression has looked at (`seen`).

mod check;
mod compared;
mod cost;
mod count;
mod criterion;
mod seen;

use std::sync::{Arc, LazyLock};

use cel::common::types::{CelBool, CelString, DYN_TYPE, LIST_TYPE, NULL_TYPE};
use cel::common::value::CowVal;
use cel::{Context, Env, ExecutionError, Program, Value as CelValue, extensions};
use serde_json::Value;

pub use compared::{Compared, How};
pub use cost::{MAX_COST, MAX_NODE_BYTES, MAX_NODE_ITEMS};
pub use count::CountExpression;
pub use criterion::Criterion;

/// The variable of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleKind {
    /// The variable `event`.
    HealthEvent,
    /// The variable `node`.
    Node,
    /// The variable `event` of overrides, a transformer of the connector: no rule of a policy.
    Override,
}

/// Longest expression, in bytes. The longest rule known in the field has about 700.
pub const MAX_EXPRESSION_BYTES: usize = 4096;
/// Deepest nesting of an expression, parentheses and chains of operators alike. It is
/// evaluated recursively, on the stack of whoever asks.
pub const MAX_DEPTH: usize = 64;
/// Most loops (`all`, `exists`, `map`, `filter` ...) inside, or over the result of, one
/// another; how much work they may be is said by [`MAX_COST`].
pub const MAX_LOOPS: usize = 3;
/// Stack for compiling: enough for anything of [`MAX_EXPRESSION_BYTES`], before its depth
/// is known. Only what is used of it takes memory.
const COMPILE_STACK: usize = 256 * 1024 * 1024;

/// An error of a rule that cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The expression is wrong: for its author.
    #[error("{0}")]
    Wrong(String),
    /// The system gives no thread to compile in; that says nothing of the expression.
    #[error(
        "the system gives no thread to check the rules in ({0}): raise the limit of memory, of \
         address space (it takes {size} MiB of that) or of threads; the file may be right",
        size = COMPILE_STACK / 1024 / 1024
    )]
    NoThread(std::io::Error),
}

/// A compiled expression.
#[derive(Clone)]
pub struct Rule {
    /// The variable that it looks at.
    pub kind: RuleKind,
    /// Its text.
    pub expression: String,
    /// Most steps that asking it can take, see [`MAX_COST`].
    pub cost: u64,
    /// True if the expression has a loop.
    loops: bool,
    /// True if the expression asks a node for more than labels and annotations.
    reads_whole_node: bool,
    program: Arc<Program>,
}

/// The variable `event`, made once for all rules that are asked about the event.
pub struct EventVariable(Context<'static, 'static>);

/// A node as the variable `node`, made once for all rules of one look.
pub struct NodeVariable {
    context: Context<'static, 'static>,
    /// The reason why rules with a loop cannot be asked about it.
    too_large: Option<String>,
}

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
    /// Returns the kind by its name in a policy file.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "HealthEvent" => Some(Self::HealthEvent),
            "Node" => Some(Self::Node),
            _ => None,
        }
    }

    /// Returns the one variable of expressions of this kind.
    pub fn variable(self) -> &'static str {
        match self {
            Self::HealthEvent | Self::Override => "event",
            Self::Node => "node",
        }
    }

    /// Returns the fields that its variable has; of a node only `metadata`, `spec` and `status`
    /// are told apart.
    pub fn fields(self) -> &'static [&'static str] {
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
    pub fn compile(kind: RuleKind, expression: &str) -> Result<Self, CompileError> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            let found = expression.len();
            return Err(CompileError::Wrong(format!(
                "has {found} bytes, at most {MAX_EXPRESSION_BYTES} are taken; split it into several rules"
            )));
        }
        // Parser and checks recurse as deeply as the expression is nested, which can be
        // deeper than the stack of a thread; so they get one that is deep enough.
        compile(|| Self::compile_here(kind, expression))
    }

    fn compile_here(kind: RuleKind, expression: &str) -> Result<Self, String> {
        let program = ENVIRONMENT
            .compile(expression)
            .map_err(|error| format!("does not parse: {}", first(&error)))?;
        let depth = check::depth(program.expression());
        if depth > MAX_DEPTH {
            return Err(format!(
                "is nested {depth} deep, at most {MAX_DEPTH} are taken; use lists ('x in [a, b]') or \
                 several rules"
            ));
        }
        let loops = check::loops(program.expression());
        if loops > MAX_LOOPS {
            return Err(format!(
                "has {loops} loops (all, exists, map, filter ...) inside one another, at most \
                 {MAX_LOOPS} are taken; use several rules"
            ));
        }
        let mut bound = Vec::new();
        check::check_names(program.expression(), kind, &mut bound)?;
        check::check_patterns(&program)?;
        let rule = Self {
            kind,
            expression: expression.to_owned(),
            cost: cost::cost(&program, kind)?,
            loops: loops > 0,
            reads_whole_node: kind == RuleKind::Node
                && !check::reads_only_labels(program.expression()),
            program: Arc::new(program),
        };
        // Evaluated once, so that a result of another type, or a function that does not
        // exist, is found here. Missing map keys are the data's matter.
        for sample in samples(kind) {
            match rule.program.execute(&sample) {
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

    /// Returns the fixed values that it compares fields of its variable with.
    pub fn compared(&self) -> Vec<Compared> {
        compared::compared(self.program.expression(), self.kind)
    }

    /// Returns the values that the expression looks at, as `path = value` for people: those of
    /// `variable`, the event or the node that it is asked about.
    pub fn seen(&self, variable: &Value) -> Vec<String> {
        seen::seen(self.program.expression(), self.kind, variable)
    }

    /// Returns whether the rule asks a node for more than its labels and annotations.
    pub fn reads_whole_node(&self) -> bool {
        self.reads_whole_node
    }

    /// Returns whether the rule holds; the error says why it could not be evaluated.
    pub fn holds(&self, event: &EventVariable, node: &NodeVariable) -> Result<bool, String> {
        match (self.kind, &node.too_large) {
            (RuleKind::HealthEvent | RuleKind::Override, _) => self.holds_for_event(event),
            (RuleKind::Node, Some(why)) if self.loops => Err(why.clone()),
            (RuleKind::Node, _) => self.holds_in(&node.context),
        }
    }

    /// Returns whether a rule over `event` holds; the error says why it could not be evaluated.
    pub fn holds_for_event(&self, event: &EventVariable) -> Result<bool, String> {
        self.holds_in(&event.0)
    }

    fn holds_in(&self, context: &Context<'_, '_>) -> Result<bool, String> {
        #[cfg(test)]
        counts::note(&counts::ASKED);
        match self.program.execute(context) {
            Ok(CelValue::Bool(holds)) => Ok(holds),
            Ok(other) => Err(format!("gives a {}, not true or false", other.type_of())),
            Err(error) => Err(one_line(&error.to_string())),
        }
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

// === impl EventVariable ===

impl EventVariable {
    /// Returns the variable for an event as rules see it.
    pub fn new(event: &Value) -> Self {
        Self(context(RuleKind::HealthEvent, event))
    }
}

impl std::fmt::Debug for EventVariable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventVariable")
    }
}

// === impl NodeVariable ===

impl NodeVariable {
    /// Returns the variable for a node object.
    pub fn new(object: &Value) -> Self {
        Self {
            context: context(RuleKind::Node, object),
            too_large: cost::too_large(object),
        }
    }
}

impl std::fmt::Debug for NodeVariable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeVariable")
    }
}

/// Returns what `work` compiles, on a stack that is deep enough for any expression.
fn compile<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, CompileError> {
    on_stack(COMPILE_STACK, work)
        .map_err(CompileError::NoThread)?
        .unwrap_or_else(|| Err("cannot be compiled: the CEL library fails on it".to_owned()))
        .map_err(CompileError::Wrong)
}

/// Returns the result of `work` on a thread with a stack of so many bytes; `None` where it panics.
fn on_stack<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> std::io::Result<Option<T>> {
    let builder = std::thread::Builder::new().stack_size(bytes);
    std::thread::scope(|scope| Ok(builder.spawn_scoped(scope, work)?.join().ok()))
}

/// Returns the context in which an expression is evaluated: its one variable.
fn context(kind: RuleKind, value: &Value) -> Context<'static, 'static> {
    #[cfg(test)]
    counts::note(&counts::MADE);
    let mut context = Context::with_env(ENVIRONMENT.clone());
    // What JSON can say, CEL can.
    let value = cel::to_value(value).unwrap_or(CelValue::Null);
    context.add_variable_from_value(kind.variable(), value);
    context
}

/// Returns the values on which a rule is tried when it is loaded.
fn samples(kind: RuleKind) -> Vec<Context<'static, 'static>> {
    let objects = match kind {
        RuleKind::HealthEvent | RuleKind::Override => {
            let variable = match kind {
                RuleKind::Override => super::override_variable,
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
    objects.iter().map(|object| context(kind, object)).collect()
}

/// Returns whether an element equals `x`, or, where both are text, contains it: `list.contains(x)`.
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

/// Returns the first thing that is wrong, and where; the parser says more, with pictures of the
/// text.
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

/// Counts of asked rules and made variables, for tests; of each thread, so that tests side by side
/// do not count each other's.
#[cfg(test)]
pub(crate) mod counts {
    use std::cell::Cell;
    use std::thread::LocalKey;

    thread_local! {
        pub(super) static ASKED: Cell<usize> = const { Cell::new(0) };
        pub(super) static MADE: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn note(of: &'static LocalKey<Cell<usize>>) {
        of.set(of.get() + 1);
    }

    pub(crate) fn reset() {
        ASKED.set(0);
        MADE.set(0);
    }

    pub(crate) fn asked() -> usize {
        ASKED.get()
    }

    pub(crate) fn made() -> usize {
        MADE.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_that_gives_no_thread_is_told_from_an_expression_that_is_wrong() {
        // More than there is of address space.
        let error = on_stack(1 << 50, || ()).unwrap_err();
        let said = CompileError::NoThread(error).to_string();
        assert!(said.starts_with("the system gives no thread"), "{said}");
        assert!(said.contains("256 MiB"), "{said}");
        assert_eq!(on_stack(1 << 20, || 7).unwrap(), Some(7));
    }
}
