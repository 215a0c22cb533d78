//! Boolean expressions over a node and its `ResourceSlice`s, in the language of NVSentinel's
//! lifecycle manager, that decide whether the node is ready for tests.

use std::sync::{Arc, LazyLock};

use cel::common::ast::{Expr, IdedExpr};
use cel::common::types::{CelDouble, CelString, STRING_TYPE};
use cel::common::value::CowVal;
use cel::{Context, Env, ExecutionError, Program, Value as CelValue, extensions};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::count::Signed;
use super::{CompileError, MAX_EXPRESSION_BYTES, check, compile};

/// Most nested loops. Criteria are rarely evaluated, and a node has a few hundred elements to
/// loop over.
const MAX_LOOPS: usize = 2;
/// Functions in addition to those of all expressions.
const FUNCTIONS: [&str; 2] = ["quantity", "now"];
/// Name of the variable with the slices.
const SLICES: &str = "resourceSlices";

/// An expression over `node` and `resourceSlices`, with the functions `quantity(text)` and
/// `now()`.
#[derive(Clone)]
pub struct Criterion {
    expression: String,
    program: Arc<Program>,
}

/// The standard functions, the strings extension, and `quantity`.
pub(super) static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut environment = Env::stdlib();
    // Both calls fail only if a function is declared twice. Tests use both.
    drop(environment.add_extension(extensions::strings));
    drop(environment.add_overload(
        "quantity",
        "gpuwarden_quantity",
        vec![STRING_TYPE],
        |arguments| quantity(&arguments).map(|number| CowVal::owned(CelDouble::from(number))),
    ));
    Arc::new(environment)
});

/// Converts a timestamp from text to CEL's type. Compiles, as tests show.
static TIMESTAMP: LazyLock<Option<Program>> =
    LazyLock::new(|| ENVIRONMENT.compile("timestamp(time)").ok());

// === impl Criterion ===

impl Criterion {
    /// Compiles an expression. The error is for its author.
    pub fn compile(expression: &str) -> Result<Self, CompileError> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            let found = expression.len();
            return Err(CompileError::Wrong(format!(
                "has {found} bytes, at most {MAX_EXPRESSION_BYTES} are taken"
            )));
        }
        compile(|| Self::compile_here(expression))
    }

    fn compile_here(expression: &str) -> Result<Self, String> {
        let program = check::program(&ENVIRONMENT, expression, MAX_LOOPS)?;
        check_functions(program.expression(), &FUNCTIONS)?;
        let compiled = Self {
            expression: expression.to_owned(),
            program: Arc::new(program),
        };
        // A trial evaluation finds unknown names. Missing keys depend on the node and are no
        // errors here.
        let node = json!({"metadata": {"labels": {}, "annotations": {}}, "spec": {}, "status": {}});
        match compiled.evaluate(&node, &[], Timestamp::UNIX_EPOCH) {
            Err(ExecutionError::UndeclaredReference(name)) => Err(format!(
                "unknown name '{name}'; there are 'node', '{SLICES}', quantity() and now()"
            )),
            Ok(CelValue::Bool(_)) | Err(_) => Ok(compiled),
            Ok(other) => Err(format!(
                "gives a {}, it must be true or false",
                other.type_of()
            )),
        }
    }

    /// Returns whether the expression reads the slices.
    pub fn reads_slices(&self) -> bool {
        self.expression.contains(SLICES)
    }

    /// Returns whether the expression reads the clock.
    pub fn reads_time(&self) -> bool {
        self.expression.contains("now(")
    }

    /// Evaluates the expression. The error is the reason why it could not be evaluated. The
    /// reason contains no values, so it is stable while the node's state is.
    pub fn holds(&self, node: &Value, slices: &[Value], now: Timestamp) -> Result<bool, String> {
        match self.evaluate(node, slices, now) {
            Ok(CelValue::Bool(holds)) => Ok(holds),
            Ok(other) => Err(format!("gives a {}, not true or false", other.type_of())),
            Err(ExecutionError::NoSuchKey(key)) => Err(format!("there is no {key}")),
            Err(_) => Err("it cannot be evaluated on this node".to_owned()),
        }
    }

    fn evaluate(
        &self,
        node: &Value,
        slices: &[Value],
        now: Timestamp,
    ) -> Result<CelValue, ExecutionError> {
        let mut context = Context::with_env(ENVIRONMENT.clone());
        let value = cel::to_value(Signed(node)).unwrap_or(CelValue::Null);
        context.add_variable_from_value("node", value);
        let slices = Value::Array(slices.to_vec());
        let value = cel::to_value(Signed(&slices)).unwrap_or(CelValue::Null);
        context.add_variable_from_value(SLICES, value);
        if let Some(now) = time_value(now) {
            // Fails only if such a function exists already.
            drop(context.add_function("now", move || now.clone()));
        }
        self.program.execute(&context)
    }
}

impl std::fmt::Debug for Criterion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Criterion").field(&self.expression).finish()
    }
}

/// Returns a time as CEL's type.
pub(super) fn time_value(time: Timestamp) -> Option<CelValue> {
    let mut context = Context::with_env(ENVIRONMENT.clone());
    context.add_variable_from_value("time", time.to_string());
    TIMESTAMP.as_ref()?.execute(&context).ok()
}

/// Refuses functions that are neither CEL's nor among `own`. One after a missing key would
/// otherwise be noticed much later.
pub(super) fn check_functions(at: &IdedExpr, own: &[&str]) -> Result<(), String> {
    if let Expr::Call(call) = &at.expr {
        let name = call.func_name.as_str();
        // Operators have names that no function can have.
        let is_name = name.starts_with(|first: char| first.is_ascii_alphabetic());
        let form = match &call.target {
            Some(_) => format!("''.{name}()"),
            None => format!("{name}()"),
        };
        if is_name && !own.contains(&name) && !check::is_function(&form) {
            return Err(format!("there is no function '{name}'"));
        }
    }
    (check::parts(at).into_iter()).try_for_each(|part| check_functions(part, own))
}

/// Returns the number of a Kubernetes quantity, such as `8`, `500m` or `2Gi`.
fn quantity(arguments: &[CowVal<'_, '_>]) -> Result<f64, ExecutionError> {
    let text: Option<&CelString<'_>> = match arguments {
        [text] => text.downcast_ref(),
        _ => None,
    };
    let text = text.map(CelString::inner).unwrap_or_default();
    number(text).ok_or_else(|| {
        ExecutionError::function_error("quantity", format!("{text:?} is no quantity"))
    })
}

fn number(text: &str) -> Option<f64> {
    const BINARY: [(&str, i32); 6] = [
        ("Ki", 1),
        ("Mi", 2),
        ("Gi", 3),
        ("Ti", 4),
        ("Pi", 5),
        ("Ei", 6),
    ];
    const DECIMAL: [(&str, i32); 9] = [
        ("n", -9),
        ("u", -6),
        ("m", -3),
        ("k", 3),
        ("M", 6),
        ("G", 9),
        ("T", 12),
        ("P", 15),
        ("E", 18),
    ];
    let finite = |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite());
    for (suffix, power) in BINARY {
        if let Some(digits) = text.strip_suffix(suffix) {
            return Some(finite(digits)? * 1024_f64.powi(power));
        }
    }
    for (suffix, power) in DECIMAL {
        if let Some(digits) = text.strip_suffix(suffix) {
            return Some(finite(digits)? * 10_f64.powi(power));
        }
    }
    finite(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(expression: &str, node: &Value) -> Result<bool, String> {
        let now = "2026-11-26T10:00:00Z".parse().unwrap();
        let slice = json!({"spec": {"driver": "gpu.nvidia.com", "devices": [{"name": "gpu-0"}]}});
        let criterion = Criterion::compile(expression).map_err(|error| error.to_string())?;
        criterion.holds(node, &[slice], now)
    }

    #[test]
    fn nodes_and_slices_are_asked() {
        let node = json!({
            "metadata": {"creationTimestamp": "2026-11-26T09:40:00Z", "labels": {"a": "b"}},
            "spec": {"unschedulable": true},
            "status": {"allocatable": {"nvidia.com/gpu": "8", "memory": "2Gi", "cpu": "500m"}},
        });
        for (expression, expected) in [
            (
                r#"quantity(node.status.allocatable["nvidia.com/gpu"]) > 0"#,
                Ok(true),
            ),
            (
                r#"quantity(node.status.allocatable["memory"]) == 2147483648.0"#,
                Ok(true),
            ),
            (r#"quantity(node.status.allocatable["cpu"]) < 1"#, Ok(true)),
            (r#"quantity("8x") > 0"#, Err("cannot be evaluated")),
            // CEL's own error would contain the time.
            (
                r#"now() - node.metadata.creationTimestamp < duration("30m")"#,
                Err("it cannot be evaluated on this node"),
            ),
            (
                r#"now() - timestamp(node.metadata.creationTimestamp) < duration("30m")"#,
                Ok(true),
            ),
            (
                r#"now() - timestamp(node.metadata.creationTimestamp) < duration("10m")"#,
                Ok(false),
            ),
            (
                "has(node.spec.unschedulable) && node.spec.unschedulable",
                Ok(true),
            ),
            (
                r#"!(has(node.metadata.annotations) && "a" in node.metadata.annotations)"#,
                Ok(true),
            ),
            (
                r#"resourceSlices.exists(s, s.spec.driver == "gpu.nvidia.com" && size(s.spec.devices) > 0)"#,
                Ok(true),
            ),
            (r#"node.metadata.labels["c"] == "b""#, Err("there is no c")),
            ("node.metadata", Err("must be true or false")),
            ("other == 1", Err("unknown name 'other'")),
            // The time is available only through now().
            (r#"time == """#, Err("unknown name 'time'")),
            (
                "has(node.spec.x) && amount(node.spec.x) > 0",
                Err("no function 'amount'"),
            ),
            ("node.", Err("does not parse")),
        ] {
            match (holds(expression, &node), expected) {
                (Ok(holds), Ok(expected)) => assert_eq!(holds, expected, "{expression}"),
                (Err(error), Err(part)) => assert!(error.contains(part), "{expression}: {error}"),
                (got, _) => panic!("{expression}: {got:?}"),
            }
        }
    }
}
