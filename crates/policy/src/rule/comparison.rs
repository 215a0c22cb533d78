//! Comparisons of a variable's fields with fixed values. `policy lint` looks among them for
//! values that no event has.

use cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, operators};
use serde_json::{Value, json};

use super::{RuleKind, check};

/// A comparison of a field with a fixed value.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Top-level field of the variable.
    pub field: String,
    /// True if an element of the field is compared, rather than the field.
    pub element: bool,
    /// Kind of the comparison.
    pub kind: ComparisonKind,
    /// Fixed value in the expression.
    pub literal: Value,
}

/// Kind of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparisonKind {
    /// `==`, `!=`, or membership in a list.
    Equality,
    /// `startsWith`, with the value as prefix.
    Prefix,
}

/// A field, and whether an element of it is meant.
type Field = (String, bool);

/// Returns all comparisons of top-level fields with fixed values.
pub(super) fn comparisons(expression: &IdedExpr, kind: RuleKind) -> Vec<Comparison> {
    let mut found = Vec::new();
    walk(expression, kind, &mut Vec::new(), &mut found);
    found
}

fn walk(
    at: &IdedExpr,
    kind: RuleKind,
    elements: &mut Vec<(String, String)>,
    found: &mut Vec<Comparison>,
) {
    match &at.expr {
        Expr::Call(call) => found.extend(of_call(call, |at| field_of(at, kind, elements))),
        Expr::Comprehension(inner) => {
            if let Some((field, false)) = field_of(&inner.iter_range, kind, elements) {
                elements.push((inner.iter_var.clone(), field));
                walk(&inner.loop_step, kind, elements, found);
                elements.pop();
                return;
            }
        }
        _ => {}
    }
    for part in check::parts(at) {
        walk(part, kind, elements, found);
    }
}

fn of_call(call: &CallExpr, field: impl Fn(&IdedExpr) -> Option<Field>) -> Vec<Comparison> {
    let one = |field: Option<Field>, compared_by, value: &IdedExpr| {
        let pair = field.zip(literal(value));
        pair.map(|((field, element), literal)| Comparison {
            field,
            element,
            kind: compared_by,
            literal,
        })
    };
    match (call.func_name.as_str(), call.args.as_slice(), &call.target) {
        (operators::EQUALS | operators::NOT_EQUALS, [left, right], _) => {
            let found = one(field(left), ComparisonKind::Equality, right);
            let turned = || one(field(right), ComparisonKind::Equality, left);
            found.or_else(turned).into_iter().collect()
        }
        // `event.agent in ['a', 'b']`, or `'79' in event.errorCode`.
        (operators::IN, [left, right], _) => {
            if let (Some(field), Expr::List(list)) = (field(left), &right.expr) {
                let values = list.elements.iter();
                return values
                    .filter_map(|value| one(Some(field.clone()), ComparisonKind::Equality, value))
                    .collect();
            }
            let element = field(right).map(|(name, _)| (name, true));
            one(element, ComparisonKind::Equality, left)
                .into_iter()
                .collect()
        }
        ("startsWith", [prefix], Some(target)) => {
            one(field(target), ComparisonKind::Prefix, prefix)
                .into_iter()
                .collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the top-level field that `at` names, directly or as a loop variable over its
/// elements.
fn field_of(at: &IdedExpr, kind: RuleKind, elements: &[(String, String)]) -> Option<Field> {
    match &at.expr {
        Expr::Ident(name) => {
            let (_, field) = elements
                .iter()
                .rev()
                .find(|(variable, _)| variable == name)?;
            Some((field.clone(), true))
        }
        Expr::Select(select) if !select.test => match &select.operand.expr {
            Expr::Ident(name) if name == kind.variable() => Some((select.field.clone(), false)),
            _ => None,
        },
        _ => None,
    }
}

fn literal(at: &IdedExpr) -> Option<Value> {
    let Expr::Literal(value) = &at.expr else {
        return None;
    };
    Some(match value {
        LiteralValue::Boolean(value) => json!(value.inner()),
        LiteralValue::Double(value) => json!(value.inner()),
        LiteralValue::Int(value) => json!(value.inner()),
        LiteralValue::UInt(value) => json!(value.inner()),
        LiteralValue::String(value) => json!(value.inner()),
        LiteralValue::Bytes(_) | LiteralValue::Null => return None,
    })
}
