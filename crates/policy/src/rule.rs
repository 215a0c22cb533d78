//! Rules: CEL expressions over `event` or `node`. This module and its submodules contain all
//! code that depends on CEL: the checks when a rule is loaded (`check`, `cost`), and the values
//! and comparisons in an expression (`values`, `comparison`).

mod bits;
mod check;
mod comparison;
mod cost;
mod count;
mod criterion;
mod inventory;
mod object;
mod values;

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use cel::common::types::{
    CelBool, CelInt, CelString, DYN_TYPE, INT_TYPE, LIST_TYPE, MAP_TYPE, NULL_TYPE, STRING_TYPE,
};
use cel::common::value::{CowVal, Val};
use cel::{Context, Env, ExecutionError, Program, Value as CelValue, extensions};
use contract::HealthEvent;
use serde_json::Value;

use bits::Bits;
pub use comparison::{Comparison, ComparisonKind};
pub use cost::{MAX_COST, MAX_NODE_BYTES, MAX_NODE_ITEMS};
pub use count::CountExpression;
pub use criterion::Criterion;
pub use inventory::{Inventory, InventoryExpression};
pub use object::{Evaluated, Fields, LookedUp, ObjectExpression, ObjectName, ObjectResult, Root};

/// Variable of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleKind {
    /// The variable `event` of a policy's rules.
    HealthEvent,
    /// The variable `node` of a policy's rules.
    Node,
    /// The variable `event` of overrides, a transformer of the connector. Not used in policies.
    Override,
}

/// Longest expression, in bytes. The longest rule known in the field has about 700.
pub const MAX_EXPRESSION_BYTES: usize = 4096;
/// Deepest nesting of an expression, counting parentheses and chains of operators. Evaluation
/// recurses on the caller's stack.
pub const MAX_DEPTH: usize = 64;
/// Most nested loops (`all`, `exists`, `map`, `filter` ...), including loops over the result of
/// another. [`MAX_COST`] bounds their work.
pub const MAX_LOOPS: usize = 3;
/// Stack for compiling, sufficient for any expression of [`MAX_EXPRESSION_BYTES`] before its
/// depth is known. Only the part in use takes memory.
const COMPILE_STACK: usize = 256 * 1024 * 1024;

/// Error of a rule that does not compile.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The expression is wrong. The message is for its author.
    #[error("{0}")]
    Wrong(String),
    /// The thread for compiling could not be started. The expression may be right.
    #[error(
        "cannot start a thread to check the rules ({0}): raise the limit of memory, of \
         address space (the thread needs {size} MiB of it) or of threads; the file may be right",
        size = COMPILE_STACK / 1024 / 1024
    )]
    NoThread(std::io::Error),
}

/// A compiled CEL expression.
#[derive(Clone)]
pub struct CelRule {
    /// Variable that the expression reads.
    pub kind: RuleKind,
    /// Text of the expression.
    pub expression: String,
    /// Upper bound of the steps of one evaluation, see [`MAX_COST`].
    pub cost: u64,
    /// True if the expression has a loop.
    loops: bool,
    /// True if the expression reads more of a node than labels and annotations.
    reads_whole_node: bool,
    /// Bits, if the expression reads nothing else.
    bits: Option<Arc<Bits>>,
    program: Arc<Program>,
}

/// The variable `event`, created once per event for all rules.
pub struct EventVariable(Context<'static, 'static>);

/// The variable `node`, created once per evaluation for all rules.
pub struct NodeVariable {
    context: Context<'static, 'static>,
    /// Reason why rules with a loop cannot be evaluated on the node.
    too_large: Option<String>,
}

/// The standard functions, the strings extension, `contains` for lists, and `bit` for events.
static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut environment = Env::stdlib();
    // Both calls fail only if a function is declared twice. Tests use both.
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
    drop(environment.add_member_overload(
        "bit",
        "gpuwarden_event_bit",
        MAP_TYPE,
        vec![STRING_TYPE, INT_TYPE],
        |arguments| event_bit(&arguments).map(|is_set| CowVal::owned(CelBool::from(is_set))),
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
    /// Returns the kind with this name in a policy file.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "HealthEvent" => Some(Self::HealthEvent),
            "Node" => Some(Self::Node),
            _ => None,
        }
    }

    /// Returns the name of the variable in expressions of this kind.
    pub fn variable(self) -> &'static str {
        match self {
            Self::HealthEvent | Self::Override => "event",
            Self::Node => "node",
        }
    }

    /// Returns the top-level fields of the variable.
    pub fn fields(self) -> &'static [&'static str] {
        match self {
            Self::HealthEvent => &EVENT_FIELDS,
            Self::Node => &NODE_FIELDS,
            Self::Override => &OVERRIDE_FIELDS,
        }
    }
}

// === impl CelRule ===

impl CelRule {
    /// Compiles an expression. Also finds errors that CEL reports only at evaluation: unknown
    /// names, and a result that is not a boolean.
    ///
    /// The error is for the author of the policy.
    pub fn compile(kind: RuleKind, expression: &str) -> Result<Self, CompileError> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            let found = expression.len();
            return Err(CompileError::Wrong(format!(
                "has {found} bytes, at most {MAX_EXPRESSION_BYTES} are taken; split it into several rules"
            )));
        }
        // The parser and the checks recurse as deeply as the expression is nested, possibly
        // beyond the stack of this thread.
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
            bits: Bits::of(program.expression()).map(Arc::new),
            program: Arc::new(program),
        };
        // A trial evaluation finds results of another type and unknown functions. Missing map
        // keys depend on the data and are no errors here.
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

    /// Returns the comparisons of the variable's fields with fixed values.
    pub fn comparisons(&self) -> Vec<Comparison> {
        comparison::comparisons(self.program.expression(), self.kind)
    }

    /// Returns the values that the expression reads from `variable`, as `path = value` for
    /// people.
    pub fn values(&self, variable: &Value) -> Vec<String> {
        values::values(self.program.expression(), self.kind, variable)
    }

    /// Returns the fields of the variable that the rule reads. `None` if it may read all of them.
    pub fn fields(&self) -> Option<BTreeSet<&str>> {
        check::fields(self.program.expression(), self.kind)
    }

    /// Returns whether the rule reads more of a node than its labels and annotations.
    pub fn reads_whole_node(&self) -> bool {
        self.reads_whole_node
    }

    /// Evaluates the rule. The error is the reason why it could not be evaluated.
    pub fn holds(&self, event: &EventVariable, node: &NodeVariable) -> Result<bool, String> {
        match (self.kind, &node.too_large) {
            (RuleKind::HealthEvent | RuleKind::Override, _) => self.holds_for_event(event),
            (RuleKind::Node, Some(why)) if self.loops => Err(why.clone()),
            (RuleKind::Node, _) => self.holds_in(&node.context),
        }
    }

    /// Evaluates a rule over `event`. The error is the reason why it could not be evaluated.
    pub fn holds_for_event(&self, event: &EventVariable) -> Result<bool, String> {
        self.holds_in(&event.0)
    }

    /// Evaluates a rule over `event` that needs no variable. `None` for all others.
    pub fn holds_without_variable(&self, event: &HealthEvent) -> Option<bool> {
        self.bits.as_ref().map(|bits| bits.hold_for(event))
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

impl std::fmt::Debug for CelRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rule")
            .field("kind", &self.kind)
            .field("expression", &self.expression)
            .finish_non_exhaustive()
    }
}

// === impl EventVariable ===

impl EventVariable {
    /// Creates the variable from the rules' form of an event, see
    /// [`event_variable`](crate::event_variable).
    pub fn new(event: &Value) -> Self {
        Self(context(RuleKind::HealthEvent, event))
    }

    /// Creates the variable of an event for rules that read these fields, all of them for `None`.
    /// Most of the time for a rule is the time for its variable.
    pub fn with_fields(event: &HealthEvent, fields: Option<&BTreeSet<String>>) -> Self {
        let mut variable = super::event_variable(event);
        if let (Value::Object(all), Some(fields)) = (&mut variable, fields) {
            all.retain(|field, _| fields.contains(field));
        }
        Self::new(&variable)
    }
}

impl std::fmt::Debug for EventVariable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventVariable")
    }
}

// === impl NodeVariable ===

impl NodeVariable {
    /// Creates the variable from a node object.
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

/// Runs `work` on a stack that is deep enough to compile any expression.
fn compile<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, CompileError> {
    on_stack(COMPILE_STACK, work)
        .map_err(CompileError::NoThread)?
        .unwrap_or_else(|| Err("cannot be compiled: the CEL library fails on it".to_owned()))
        .map_err(CompileError::Wrong)
}

/// Runs `work` on a thread with a stack of `bytes`. `None` if it panics.
fn on_stack<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> std::io::Result<Option<T>> {
    let builder = std::thread::Builder::new().stack_size(bytes);
    std::thread::scope(|scope| Ok(builder.spawn_scoped(scope, work)?.join().ok()))
}

/// Creates the context of an evaluation, which has one variable.
fn context(kind: RuleKind, value: &Value) -> Context<'static, 'static> {
    #[cfg(test)]
    counts::note(&counts::MADE);
    let mut context = Context::with_env(ENVIRONMENT.clone());
    // CEL can represent all JSON values.
    let value = cel::to_value(value).unwrap_or(CelValue::Null);
    context.add_variable_from_value(kind.variable(), value);
    context
}

/// Returns the values for the trial evaluation of a rule that is being loaded.
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

/// Implements `list.contains(x)`: true if an element equals `x` or, if both are strings,
/// contains it.
fn list_contains(arguments: &[CowVal<'_, '_>]) -> Result<bool, ExecutionError> {
    let [list, wanted] = arguments else {
        return Err(ExecutionError::invalid_argument_count(2, arguments.len()));
    };
    let part: Option<&CelString<'_>> = wanted.downcast_ref();
    let mut elements = list
        .as_iterable()
        .ok_or_else(|| ExecutionError::function_error("contains", "is not called on a list"))?
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

/// Implements `event.bit(register, n)`: true if the bit `n` is set in the register of this name, an
/// entity whose value is a binary number, as those of XID 74 are. False if there is none.
fn event_bit(arguments: &[CowVal<'_, '_>]) -> Result<bool, ExecutionError> {
    let [event, register, number] = arguments else {
        return Err(ExecutionError::invalid_argument_count(3, arguments.len()));
    };
    let name = register.downcast_ref::<CelString<'_>>();
    let number = number
        .downcast_ref::<CelInt>()
        .map(|number| *number.inner());
    let number = number.and_then(|number| usize::try_from(number).ok());
    let (Some(name), Some(number)) = (name, number) else {
        return Err(ExecutionError::function_error(
            "bit",
            "is called with the name of a register and the number of a bit from 0",
        ));
    };
    let Some(entities) = field(event.as_ref(), "entitiesImpacted") else {
        return Ok(false);
    };
    let Some(list) = entities.as_iterable() else {
        return Ok(false); // An event without entities has null.
    };
    let mut entities = list.iter();
    while let Some(entity) = entities.next() {
        let (kind, value) = (field(entity, "entityType"), field(entity, "entityValue"));
        let kind = kind.as_ref().and_then(text);
        if kind == Some(name.inner()) {
            let register = value.as_ref().and_then(text);
            return Ok(bits::is_set(register.unwrap_or_default(), number));
        }
    }
    Ok(false)
}

/// Returns the value of a map for a key.
fn field<'b, 'v>(of: &'b (dyn Val + 'v), key: &str) -> Option<CowVal<'b, 'v>> {
    of.as_indexer()?.get(&CelString::from(key)).ok()
}

/// Returns the text of a value that is one.
fn text<'b>(value: &'b CowVal<'_, '_>) -> Option<&'b str> {
    let text: &CelString<'_> = value.downcast_ref()?;
    Some(text.inner())
}

/// Returns the first error with its position. The parser's own message adds pictures of the
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

/// Counters of evaluated rules and created variables for tests, per thread, so that parallel
/// tests do not affect each other.
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
        // More than the available address space.
        let error = on_stack(1 << 50, || ()).unwrap_err();
        let message = CompileError::NoThread(error).to_string();
        assert!(message.starts_with("cannot start a thread"), "{message}");
        assert!(message.contains("256 MiB"), "{message}");
        assert_eq!(on_stack(1 << 20, || 7).unwrap(), Some(7));
    }
}
