//! The fixed values that an expression compares fields of its variable with. A policy is checked
//! for values among them that no event ever has.

use cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, operators};
use serde_json::{Value, json};

use super::{RuleKind, check};

/// A comparison of a field with a fixed value.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// The field of the first level.
    pub field: String,
    /// True if an element of the field is compared, not the field itself.
    pub element: bool,
    /// The way in which it is compared.
    pub how: How,
    /// The fixed value.
    pub literal: Value,
}

/// Ways to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// `==`, `!=`, or an element of a list.
    Equality,
    /// `startsWith`.
    Prefix,
}

/// A field, and whether an element of it is meant.
type Field = (String, bool);

/// Returns all comparisons of fields of the first level with fixed values.
pub(super) fn compared(expression: &IdedExpr, kind: RuleKind) -> Vec<Compared> {
    let mut found = Vec::new();
    walk(expression, kind, &mut Vec::new(), &mut found);
    found
}

fn walk(
    at: &IdedExpr,
    kind: RuleKind,
    elements: &mut Vec<(String, String)>,
    found: &mut Vec<Compared>,
) {
    match &at.expr {
        Expr::Call(call) => found.extend(comparisons(call, |at| field_of(at, kind, elements))),
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

fn comparisons(call: &CallExpr, field: impl Fn(&IdedExpr) -> Option<Field>) -> Vec<Compared> {
    let one = |field: Option<Field>, how, value: &IdedExpr| {
        let pair = field.zip(literal(value));
        pair.map(|((field, element), literal)| Compared {
            field,
            element,
            how,
            literal,
        })
    };
    match (call.func_name.as_str(), call.args.as_slice(), &call.target) {
        (operators::EQUALS | operators::NOT_EQUALS, [left, right], _) => {
            let found = one(field(left), How::Equality, right);
            let turned = || one(field(right), How::Equality, left);
            found.or_else(turned).into_iter().collect()
        }
        // `event.agent in ['a', 'b']`, or `'79' in event.errorCode`.
        (operators::IN, [left, right], _) => {
            if let (Some(field), Expr::List(list)) = (field(left), &right.expr) {
                let values = list.elements.iter();
                return values
                    .filter_map(|value| one(Some(field.clone()), How::Equality, value))
                    .collect();
            }
            let element = field(right).map(|(name, _)| (name, true));
            one(element, How::Equality, left).into_iter().collect()
        }
        ("startsWith", [prefix], Some(target)) => one(field(target), How::Prefix, prefix)
            .into_iter()
            .collect(),
        _ => Vec::new(),
    }
}

/// Returns the field of the first level that `at` names, or whose element it is.
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
