//! Values that an expression reads, to explain to people why a rule does not match.

use cel::common::ast::{Expr, IdedExpr, LiteralValue, operators};
use serde_json::Value;

use super::{RuleKind, check};

/// Most values shown of one expression.
const MOST: usize = 12;
/// Longest value, in characters.
const LONGEST: usize = 120;

/// A step of a path into a value.
enum Step {
    Field(String),
    Key(String),
    Index(usize),
}

/// Returns the values at the paths in `expression`, as `path = value`.
pub(super) fn values(expression: &IdedExpr, kind: RuleKind, variable: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    collect(expression, kind, variable, &mut paths);
    let mut shown = Vec::new();
    for path in paths {
        let text = described(kind, &path, variable);
        if !shown.contains(&text) && shown.len() < MOST {
            shown.push(text);
        }
    }
    shown
}

fn collect(at: &IdedExpr, kind: RuleKind, variable: &Value, into: &mut Vec<Vec<Step>>) {
    if let Some(path) = path_of(at, kind) {
        if !path.is_empty() {
            into.push(path);
        }
        return;
    }
    // `'label' in node.metadata.labels` reads that label rather than all of them.
    if let Expr::Call(call) = &at.expr
        && call.func_name == operators::IN
        && let [key, map] = call.args.as_slice()
        && let Some(key) = literal_key(key)
        && let Some(mut path) = path_of(map, kind)
        && value_at(&path, variable).is_some_and(Value::is_object)
    {
        path.push(key);
        into.push(path);
        return;
    }
    for part in check::parts(at) {
        collect(part, kind, variable, into);
    }
}

/// Returns the path from the variable to the value that `at` names. `None` if `at` is not a
/// path.
fn path_of(at: &IdedExpr, kind: RuleKind) -> Option<Vec<Step>> {
    match &at.expr {
        Expr::Ident(name) => (name == kind.variable()).then(Vec::new),
        Expr::Select(select) => {
            let mut path = path_of(&select.operand, kind)?;
            path.push(Step::Field(select.field.clone()));
            Some(path)
        }
        Expr::Call(call) if call.func_name == operators::INDEX => {
            let [map, key] = call.args.as_slice() else {
                return None;
            };
            let mut path = path_of(map, kind)?;
            path.push(literal_key(key)?);
            Some(path)
        }
        _ => None,
    }
}

fn literal_key(at: &IdedExpr) -> Option<Step> {
    match &at.expr {
        Expr::Literal(LiteralValue::String(key)) => Some(Step::Key(key.inner().to_owned())),
        Expr::Literal(LiteralValue::Int(index)) => {
            usize::try_from(*index.inner()).ok().map(Step::Index)
        }
        _ => None,
    }
}

fn value_at<'a>(path: &[Step], variable: &'a Value) -> Option<&'a Value> {
    path.iter().try_fold(variable, |value, step| match step {
        Step::Field(name) | Step::Key(name) => value.get(name),
        Step::Index(index) => value.get(index),
    })
}

fn described(kind: RuleKind, path: &[Step], variable: &Value) -> String {
    let mut text = kind.variable().to_owned();
    for step in path {
        match step {
            Step::Field(name) => text.push_str(&format!(".{name}")),
            Step::Key(name) => text.push_str(&format!("['{name}']")),
            Step::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    let value = match value_at(path, variable) {
        // All numbers of an event are decimals for rules; whole ones are shown as such.
        Some(Value::Number(number)) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(decimal) => decimal.to_string(),
            None => number.to_string(),
        },
        Some(value) => value.to_string(),
        None => "(absent)".to_owned(),
    };
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{text} = {} ...", value.get(..end).unwrap_or_default()),
        None => format!("{text} = {value}"),
    }
}
