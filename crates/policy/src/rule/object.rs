//! Expressions over any Kubernetes object, in the language of NVSentinel's object monitor: the
//! variables `resource` and `now`, and the function `lookup` for other objects.

mod fields;
mod reads;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cel::common::ast::{Expr, IdedExpr};
use cel::common::value::CowVal;
use cel::context::VariableResolver;
use cel::{Context, ExecutionError, Program, Value as CelValue};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::count::Signed;
use super::criterion::{ENVIRONMENT, check_functions, time_value};
use super::{CompileError, MAX_EXPRESSION_BYTES, check, compile};

pub use fields::Fields;
pub use reads::Root;

/// Most nested loops. An object has a few hundred elements to loop over.
const MAX_LOOPS: usize = 2;
/// Most objects that one evaluation looks up.
const MAX_LOOKUPS: usize = 16;
/// Name of the variable with the object.
const RESOURCE: &str = "resource";
/// Name of the variable with the time.
const NOW: &str = "now";
/// Name of the function that returns another object.
const LOOKUP: &str = "lookup";
/// Functions in addition to those of all expressions.
const FUNCTIONS: [&str; 2] = ["quantity", LOOKUP];

/// An expression over `resource`, `now` and `lookup(apiVersion, kind, namespace, name)`.
#[derive(Clone)]
pub struct ObjectExpression {
    /// Text of the expression.
    pub expression: String,
    gives: ObjectResult,
    reads: BTreeMap<Root, Fields>,
    program: Arc<Program>,
}

/// Type of the result of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectResult {
    /// True or false.
    Bool,
    /// Text, or null for none.
    Text,
}

/// Name of an object that an expression looks up.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectName {
    /// Group and version, such as `v1` or `apps/v1`.
    pub api_version: String,
    /// Kind, such as `Pod`.
    pub kind: String,
    /// Namespace; empty for an object without one.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
}

/// Answer to a look-up.
#[derive(Clone, Debug, PartialEq)]
pub enum LookedUp {
    /// The object, with at least the fields that the expression reads.
    Found(Value),
    /// There is no such object.
    Absent,
    /// The object cannot be looked for, for this reason.
    Unseen(String),
}

/// Result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    /// The value: true, false, text or null. The error is the reason why there is none.
    pub value: Result<Value, String>,
    /// True if the value depends on the time.
    pub read_time: bool,
    /// Objects that were looked up.
    pub looked_up: BTreeSet<ObjectName>,
}

/// Look-ups of an evaluation: the answers so far, and the names without one.
#[derive(Default)]
struct Lookups {
    known: BTreeMap<ObjectName, CelValue>,
    asked: Mutex<BTreeSet<ObjectName>>,
}

/// Observer of whether an expression reads the time.
#[derive(Default)]
struct TimeRead(AtomicBool);

// === impl ObjectExpression ===

impl ObjectExpression {
    /// Compiles an expression whose result is `gives`. The error is for its author.
    pub fn compile(gives: ObjectResult, expression: &str) -> Result<Self, CompileError> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            let found = expression.len();
            return Err(CompileError::Wrong(format!(
                "has {found} bytes, at most {MAX_EXPRESSION_BYTES} are taken"
            )));
        }
        compile(|| Self::compile_here(gives, expression))
    }

    fn compile_here(gives: ObjectResult, expression: &str) -> Result<Self, String> {
        let program = check::program(&ENVIRONMENT, expression, MAX_LOOPS)?;
        check_functions(program.expression(), &FUNCTIONS)?;
        check_variables(program.expression(), &mut Vec::new())?;
        check::check_patterns(&program)?;
        let compiled = Self {
            expression: expression.to_owned(),
            gives,
            reads: reads::reads(program.expression())?,
            program: Arc::new(program),
        };
        // A trial evaluation finds a result of another type. Missing keys depend on the object and
        // are no errors here.
        let sample = json!({"metadata": {"labels": {}}, "spec": {}, "status": {"conditions": []}});
        let absent = |_: &ObjectName| LookedUp::Absent;
        let tried = compiled.run(&sample, Timestamp::UNIX_EPOCH, &absent);
        match tried.value.map(|value| compiled.typed(value)) {
            Ok(Err(wrong)) => Err(wrong),
            _ => Ok(compiled),
        }
    }

    /// Returns the fields that the expression reads, of the object and of each kind that it looks
    /// up.
    pub fn reads(&self) -> &BTreeMap<Root, Fields> {
        &self.reads
    }

    /// Returns whether the expression names the status `Unknown`, so that its author has decided
    /// what that means.
    pub fn names_unknown(&self) -> bool {
        self.expression.contains("\"Unknown\"") || self.expression.contains("'Unknown'")
    }

    /// Evaluates the expression for an object. `lookup` returns other objects. The reason of an
    /// error contains no values, so it is stable while the object's state is.
    pub fn evaluate(
        &self,
        object: &Value,
        now: Timestamp,
        lookup: &dyn Fn(&ObjectName) -> LookedUp,
    ) -> Evaluated {
        let mut evaluated = self.run(object, now, lookup);
        evaluated.value = evaluated.value.and_then(|value| self.typed(value));
        evaluated
    }

    fn typed(&self, value: Value) -> Result<Value, String> {
        match (self.gives, &value) {
            (ObjectResult::Bool, Value::Bool(_))
            | (ObjectResult::Text, Value::String(_) | Value::Null) => Ok(value),
            (ObjectResult::Bool, _) => Err("does not give true or false".to_owned()),
            (ObjectResult::Text, _) => Err("does not give a text".to_owned()),
        }
    }

    /// Evaluates the expression until all objects that it looks up are known.
    fn run(
        &self,
        object: &Value,
        now: Timestamp,
        lookup: &dyn Fn(&ObjectName) -> LookedUp,
    ) -> Evaluated {
        let mut known = BTreeMap::new();
        loop {
            let (value, read_time, asked) = self.run_with(object, now, known.clone());
            let looked_up = known.keys().chain(&asked).cloned().collect();
            let ended = |value| Evaluated {
                value,
                read_time,
                looked_up,
            };
            if asked.is_empty() {
                return ended(value);
            }
            if known.len() + asked.len() > MAX_LOOKUPS {
                return ended(Err(format!("looks up more than {MAX_LOOKUPS} objects")));
            }
            for name in asked {
                let value = match lookup(&name) {
                    LookedUp::Found(object) => {
                        cel::to_value(Signed(&object)).unwrap_or(CelValue::Null)
                    }
                    LookedUp::Absent => CelValue::Null,
                    LookedUp::Unseen(why) => return ended(Err(why)),
                };
                known.insert(name, value);
            }
        }
    }

    fn run_with(
        &self,
        object: &Value,
        now: Timestamp,
        known: BTreeMap<ObjectName, CelValue>,
    ) -> (Result<Value, String>, bool, BTreeSet<ObjectName>) {
        let lookups = Arc::new(Lookups {
            known,
            ..Lookups::default()
        });
        let time_read = TimeRead::default();
        let mut context = Context::with_env(ENVIRONMENT.clone());
        let value = cel::to_value(Signed(object)).unwrap_or(CelValue::Null);
        context.add_variable_from_value(RESOURCE, value);
        if let Some(now) = time_value(now) {
            context.add_variable_from_value(NOW, now);
        }
        context.set_variable_resolver(&time_read);
        let of = Arc::clone(&lookups);
        let answer = move |api_version: Arc<String>,
                           kind: Arc<String>,
                           namespace: Arc<String>,
                           name: Arc<String>| {
            of.answer(ObjectName {
                api_version: api_version.to_string(),
                kind: kind.to_string(),
                namespace: namespace.to_string(),
                name: name.to_string(),
            })
        };
        // Fails only if such a function exists already.
        drop(context.add_function(LOOKUP, answer));
        let value = match self.program.execute(&context) {
            Ok(value) => value
                .json()
                .map_err(|_| "gives no value that JSON has".to_owned()),
            Err(ExecutionError::NoSuchKey(key)) => Err(format!("there is no {key}")),
            Err(_) => Err("it cannot be evaluated on this object".to_owned()),
        };
        drop(context);
        let asked = lookups.asked.lock().unwrap_or_else(PoisonError::into_inner);
        (value, time_read.0.load(Ordering::Relaxed), asked.clone())
    }
}

impl std::fmt::Debug for ObjectExpression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ObjectExpression")
            .field(&self.expression)
            .finish()
    }
}

impl PartialEq for ObjectExpression {
    fn eq(&self, other: &Self) -> bool {
        self.expression == other.expression && self.gives == other.gives
    }
}

// === impl Lookups ===

impl Lookups {
    fn answer(&self, name: ObjectName) -> Result<CelValue, ExecutionError> {
        if let Some(value) = self.known.get(&name) {
            return Ok(value.clone());
        }
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert(name);
        Err(ExecutionError::function_error(
            LOOKUP,
            "is not answered yet",
        ))
    }
}

// === impl TimeRead ===

impl VariableResolver for TimeRead {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        if variable == NOW {
            self.0.store(true, Ordering::Relaxed);
        }
        None
    }
}

/// Refuses unknown variables, also those that an evaluation reaches only for some objects.
fn check_variables<'a>(at: &'a IdedExpr, bound: &mut Vec<&'a str>) -> Result<(), String> {
    match &at.expr {
        Expr::Ident(name) => {
            let name = name.trim_start_matches('.');
            if [RESOURCE, NOW].contains(&name) || bound.contains(&name) || check::is_type_name(name)
            {
                return Ok(());
            }
            Err(format!(
                "unknown variable '{name}'; there are '{RESOURCE}', '{NOW}' and {LOOKUP}()"
            ))
        }
        Expr::Comprehension(inner) => {
            check_variables(&inner.iter_range, bound)?;
            check_variables(&inner.accu_init, bound)?;
            let outer = bound.len();
            bound.push(&inner.iter_var);
            bound.extend(inner.iter_var2.as_deref());
            bound.push(&inner.accu_var);
            let inside = [&inner.loop_cond, &inner.loop_step, &inner.result];
            let inside = (inside.into_iter()).try_for_each(|part| check_variables(part, bound));
            bound.truncate(outer);
            inside
        }
        _ => (check::parts(at).into_iter()).try_for_each(|part| check_variables(part, bound)),
    }
}

#[cfg(test)]
mod tests;
