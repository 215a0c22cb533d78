//! Expressions that count the devices of a node, from its object and from the `ResourceSlice`s of
//! its drivers.

use std::sync::{Arc, LazyLock};

use cel::common::ast::{Expr, IdedExpr};
use cel::common::types::{CelInt, DYN_TYPE};
use cel::common::value::CowVal;
use cel::{Context, Env, ExecutionError, Program, Value as CelValue, extensions};
use serde_json::{Map, Value, json};

use super::count::{Signed, whole_number};
use super::{CompileError, MAX_EXPRESSION_BYTES, MAX_LOOPS, check, compile};

/// Variable for the object of the node.
const NODE: &str = "node";
/// Variable for the slices of the node.
const SLICES: &str = "resourceSlices";
/// Maps of a node's object whose values are numbers for an expression, where they are whole
/// numbers: `int(node.metadata.labels['nvidia.com/gpu.count'])`.
const NUMBERS: [&str; 3] = [
    "/metadata/labels",
    "/status/allocatable",
    "/status/capacity",
];

/// An expression over a node and its slices with a whole number as result.
#[derive(Clone)]
pub struct InventoryExpression {
    /// Text of the expression.
    pub expression: String,
    /// True if the expression reads slices.
    pub reads_slices: bool,
    program: Arc<Program>,
}

/// A node and its slices as the variables of expressions.
pub struct Inventory(Context<'static, 'static>);

/// The standard functions, the strings extension, and `sum` for lists of whole numbers.
static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut environment = Env::stdlib();
    // Both calls fail only if a function is declared twice. Tests use both.
    drop(environment.add_extension(extensions::strings));
    drop(
        environment.add_overload("sum", "gpuwarden_list_sum", vec![DYN_TYPE], |arguments| {
            sum(&arguments).map(|sum| CowVal::owned(CelInt::from(sum)))
        }),
    );
    Arc::new(environment)
});

/// Implements `sum(list)`.
fn sum(arguments: &[CowVal<'_, '_>]) -> Result<i64, ExecutionError> {
    let wrong = |what| ExecutionError::function_error("sum", what);
    let [list] = arguments else {
        return Err(ExecutionError::invalid_argument_count(1, arguments.len()));
    };
    let list = list
        .as_iterable()
        .ok_or_else(|| wrong("is not called with a list"))?;
    let (mut elements, mut total) = (list.iter(), 0_i64);
    while let Some(element) = elements.next() {
        let number: &CelInt = element
            .downcast_ref()
            .ok_or_else(|| wrong("is called with a list that has more than whole numbers"))?;
        total = total
            .checked_add(*number.inner())
            .ok_or_else(|| wrong("is too large"))?;
    }
    Ok(total)
}

// === impl InventoryExpression ===

impl InventoryExpression {
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
        check::check_patterns(&program)?;
        let mut reads_slices = false;
        check_names(program.expression(), &mut Vec::new(), &mut reads_slices)?;
        let compiled = Self {
            expression: expression.to_owned(),
            reads_slices,
            program: Arc::new(program),
        };
        // A trial evaluation finds unknown functions. Missing keys depend on the node and are no
        // errors here.
        let sample = json!({"metadata": {"labels": {}}, "status": {"allocatable": {}}});
        match (compiled.program).execute(&Inventory::new(sample, &[]).0) {
            Err(ExecutionError::UndeclaredReference(name)) => {
                Err(format!("unknown function '{name}'"))
            }
            _ => Ok(compiled),
        }
    }

    /// Returns the number of devices. The error is the reason why there is none.
    pub fn count(&self, inventory: &Inventory) -> Result<u32, String> {
        let count = whole_number(self.program.execute(&inventory.0))?;
        u32::try_from(count).map_err(|_| format!("gives {count}, which is no number of devices"))
    }
}

impl std::fmt::Debug for InventoryExpression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("InventoryExpression")
            .field(&self.expression)
            .finish()
    }
}

// === impl Inventory ===

impl Inventory {
    /// Creates the variables of a node. Its labels and resources that are whole numbers become
    /// numbers.
    pub fn new(mut node: Value, slices: &[Value]) -> Self {
        for place in NUMBERS {
            if let Some(values) = node.pointer_mut(place).and_then(Value::as_object_mut) {
                read_numbers(values);
            }
        }
        let mut context = Context::with_env(ENVIRONMENT.clone());
        let mut add = |name, value: &Value| {
            let value = cel::to_value(Signed(value)).unwrap_or(CelValue::Null);
            context.add_variable_from_value(name, value);
        };
        add(NODE, &node);
        add(SLICES, &json!(slices));
        Self(context)
    }
}

impl std::fmt::Debug for Inventory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inventory")
    }
}

fn read_numbers(values: &mut Map<String, Value>) {
    for value in values.values_mut() {
        if let Some(number) = value.as_str().and_then(|text| text.parse::<i64>().ok()) {
            *value = json!(number);
        }
    }
}

/// Refuses unknown variables, and finds out whether slices are read.
fn check_names<'a>(
    at: &'a IdedExpr,
    bound: &mut Vec<&'a str>,
    reads_slices: &mut bool,
) -> Result<(), String> {
    match &at.expr {
        Expr::Ident(name) => {
            let is_bound = bound.contains(&name.as_str());
            *reads_slices |= name == SLICES && !is_bound;
            if is_bound || name == NODE || name == SLICES || check::is_type_name(name) {
                return Ok(());
            }
            Err(format!(
                "unknown variable '{name}'; the variables here are '{NODE}' and '{SLICES}'"
            ))
        }
        Expr::Comprehension(inner) => {
            check_names(&inner.iter_range, bound, reads_slices)?;
            check_names(&inner.accu_init, bound, reads_slices)?;
            let outer = bound.len();
            bound.push(&inner.iter_var);
            bound.extend(inner.iter_var2.as_deref());
            bound.push(&inner.accu_var);
            let inside = [&inner.loop_cond, &inner.loop_step, &inner.result];
            let checked =
                (inside.into_iter()).try_for_each(|part| check_names(part, bound, reads_slices));
            bound.truncate(outer);
            checked
        }
        _ => (check::parts(at).into_iter())
            .try_for_each(|part| check_names(part, bound, reads_slices)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(driver: &str, kinds: &[&str]) -> Value {
        let device = |kind: &&str| json!({"name": "d", "attributes": {"type": {"string": kind}}});
        let devices: Vec<Value> = kinds.iter().map(device).collect();
        json!({"spec": {"driver": driver, "devices": devices}})
    }

    #[test]
    fn devices_are_counted_by_labels_resources_and_slices() {
        let node = json!({
            "metadata": {"name": "n", "labels": {"nvidia.com/gpu.count": "8", "zone": "a"}},
            "status": {"allocatable": {"nvidia.com/mlnxnics": "4", "memory": "3Gi"}},
        });
        let slices = [
            slice("gpu.nvidia.com", &["gpu", "mig", "gpu"]),
            slice("x", &[]),
        ];
        let inventory = Inventory::new(node, &slices);
        // The two built-in classes of the reference, its example for NICs, and its form of a sum.
        for (expression, expected) in [
            ("int(node.metadata.labels['nvidia.com/gpu.count'])\n", Ok(8)),
            ("node.metadata.labels['nvidia.com/gpu.count']", Ok(8)),
            ("int(node.status.allocatable['nvidia.com/mlnxnics'])", Ok(4)),
            (
                "sum(resourceSlices.filter(rs, has(rs.spec.driver) && rs.spec.driver == \
                 'gpu.nvidia.com' && has(rs.spec.devices)).map(rs, rs.spec.devices.filter(d, \
                 has(d.attributes) && 'type' in d.attributes && has(d.attributes['type'].string) \
                 && d.attributes['type'].string == 'gpu').size()))",
                Ok(2),
            ),
            ("sum([])", Ok(0)),
            ("sum([1, 'a'])", Err("more than whole numbers")),
            ("size(resourceSlices) - 3", Err("gives -1")),
            ("node.metadata.name", Err("not a whole number")),
            ("int(node.metadata.labels['zone'])", Err("")),
            ("int(node.metadata.labels['none'])", Err("none")),
            ("int(node.status.allocatable['memory'])", Err("")),
        ] {
            let compiled = InventoryExpression::compile(expression).expect(expression);
            assert_eq!(compiled.reads_slices, expression.contains(SLICES));
            match (compiled.count(&inventory), expected) {
                (Ok(count), Ok(expected)) => assert_eq!(count, expected, "{expression}"),
                (Err(error), Err(part)) => assert!(error.contains(part), "{expression}: {error}"),
                (got, _) => panic!("{expression}: {got:?}"),
            }
        }
    }

    #[test]
    fn what_is_wrong_is_found_when_it_is_compiled() {
        for (expression, part) in [
            ("int(node.", "does not parse"),
            ("int(nodes.metadata)", "the variables here are 'node'"),
            ("resourceSlices.map(a, b)", "unknown variable 'b'"),
            ("total(resourceSlices)", "unknown function 'total'"),
            (&"x".repeat(5000), "at most 4096"),
            (
                "[1].map(a, [1].map(b, [1].map(c, [1].map(d, 1))))",
                "has 4 loops",
            ),
        ] {
            let error = InventoryExpression::compile(expression).expect_err(expression);
            assert!(error.to_string().contains(part), "{expression}: {error}");
        }
    }
}
