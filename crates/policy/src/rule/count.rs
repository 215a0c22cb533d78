//! Expressions with a number as result, such as the size of a gang.

use std::sync::Arc;

use cel::{Context, ExecutionError, Program, Value as CelValue};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::{CompileError, ENVIRONMENT, MAX_DEPTH, check, compile, first, one_line};

/// Longest expression (bytes). It names a field, and may choose between two.
const MAX_BYTES: usize = 1024;

/// An expression over one object with a whole number as result. It has no loops, so its cost is
/// small for any object.
#[derive(Clone)]
pub struct CountExpression {
    /// Text of the expression.
    pub expression: String,
    variable: &'static str,
    program: Arc<Program>,
}

// === impl CountExpression ===

impl CountExpression {
    /// Compiles an expression over the named variable. The error is for its author.
    pub fn compile(variable: &'static str, expression: &str) -> Result<Self, CompileError> {
        if expression.len() > MAX_BYTES {
            let found = expression.len();
            return Err(CompileError::Wrong(format!(
                "has {found} bytes, at most {MAX_BYTES} are taken"
            )));
        }
        compile(|| Self::compile_here(variable, expression))
    }

    fn compile_here(variable: &'static str, expression: &str) -> Result<Self, String> {
        let program = ENVIRONMENT
            .compile(expression)
            .map_err(|error| format!("does not parse: {}", first(&error)))?;
        let depth = check::depth(program.expression());
        if depth > MAX_DEPTH {
            return Err(format!(
                "is nested {depth} deep, at most {MAX_DEPTH} are taken"
            ));
        }
        if check::loops(program.expression()) > 0 {
            return Err("has a loop (all, exists, map, filter ...); name a field".to_owned());
        }
        let compiled = Self {
            expression: expression.to_owned(),
            variable,
            program: Arc::new(program),
        };
        // A trial evaluation finds unknown names. Missing keys depend on the object and are no
        // errors here.
        match compiled.evaluate(&json!({})) {
            Err(ExecutionError::UndeclaredReference(name)) => Err(format!(
                "unknown name '{name}'; the one variable here is '{variable}'"
            )),
            _ => Ok(compiled),
        }
    }

    /// Returns the number for an object. The error is the reason why there is none.
    pub fn count(&self, object: &Value) -> Result<i64, String> {
        whole_number(self.evaluate(object))
    }

    fn evaluate(&self, object: &Value) -> Result<CelValue, ExecutionError> {
        let mut context = Context::with_env(ENVIRONMENT.clone());
        let value = cel::to_value(Signed(object)).unwrap_or(CelValue::Null);
        context.add_variable_from_value(self.variable, value);
        self.program.execute(&context)
    }
}

/// Returns the number that an expression gives. The error is the reason why there is none.
pub(super) fn whole_number(result: Result<CelValue, ExecutionError>) -> Result<i64, String> {
    match result {
        Ok(CelValue::Int(count)) => Ok(count),
        Ok(CelValue::UInt(count)) => {
            i64::try_from(count).map_err(|_| format!("{count} is too many"))
        }
        Ok(other) => Err(format!("gives a {}, not a whole number", other.type_of())),
        Err(error) => Err(one_line(&error.to_string())),
    }
}

/// JSON whose whole numbers are signed, like literals in an expression: CEL does not mix signed
/// and unsigned numbers.
pub(super) struct Signed<'a>(pub(super) &'a Value);

impl Serialize for Signed<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Number(number) => match number.as_i64() {
                Some(number) => to.serialize_i64(number),
                None => number.serialize(to),
            },
            Value::Array(list) => to.collect_seq(list.iter().map(Signed)),
            Value::Object(map) => {
                to.collect_map(map.iter().map(|(key, value)| (key, Signed(value))))
            }
            other => other.serialize(to),
        }
    }
}

impl std::fmt::Debug for CountExpression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CountExpression")
            .field(&self.expression)
            .finish()
    }
}

impl PartialEq for CountExpression {
    fn eq(&self, other: &Self) -> bool {
        self.expression == other.expression && self.variable == other.variable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_counted_and_what_is_no_number_is_said() {
        let group = json!({"spec": {"minMember": 4, "name": "x", "half": 0.5}});
        for (expression, expected) in [
            ("podGroup.spec.minMember", Ok(4)),
            (
                "has(podGroup.spec.replicas) ? podGroup.spec.replicas : podGroup.spec.minMember",
                Ok(4),
            ),
            ("podGroup.spec.minMember * 2", Ok(8)),
            ("podGroup.spec.name", Err("not a whole number")),
            ("podGroup.spec.half", Err("not a whole number")),
            ("podGroup.status.size", Err("status")),
        ] {
            let compiled = CountExpression::compile("podGroup", expression).expect(expression);
            match (compiled.count(&group), expected) {
                (Ok(count), Ok(expected)) => assert_eq!(count, expected, "{expression}"),
                (Err(error), Err(part)) => assert!(error.contains(part), "{expression}: {error}"),
                (got, _) => panic!("{expression}: {got:?}"),
            }
        }
    }

    #[test]
    fn what_is_wrong_is_found_when_it_is_compiled() {
        for (expression, part) in [
            ("podGroup.spec.", "does not parse"),
            (
                "group.spec.minMember",
                "the one variable here is 'podGroup'",
            ),
            ("podGroup.spec.all(x, x > 1)", "has a loop"),
            (&"(".repeat(500), "does not parse"),
            (&"x".repeat(2000), "at most 1024"),
        ] {
            let error = CountExpression::compile("podGroup", expression).expect_err(expression);
            assert!(error.to_string().contains(part), "{expression}: {error}");
        }
    }
}
