//! Checks of a rule in addition to those of CEL: unknown names and functions, invalid patterns,
//! and expressions too large to evaluate.

use std::collections::BTreeSet;

use cel::common::ast::{CallExpr, EntryExpr, Expr, IdedExpr, LiteralValue};
use cel::{Context, Env, ExecutionError, Program};

use super::{ENVIRONMENT, MAX_DEPTH, RuleKind, first};
use contract::nearest::nearest;

/// Functions that are suggested for misspelt ones: those of `docs/policy.md`.
const FUNCTIONS: [&str; 26] = [
    "bit",
    "bool",
    "charAt",
    "contains",
    "double",
    "duration",
    "endsWith",
    "format",
    "indexOf",
    "int",
    "join",
    "lastIndexOf",
    "lowerAscii",
    "matches",
    "replace",
    "reverse",
    "size",
    "split",
    "startsWith",
    "string",
    "substring",
    "timestamp",
    "trim",
    "type",
    "uint",
    "upperAscii",
];
/// Macros that are suggested likewise. With a wrong number of arguments they parse as
/// functions.
const MACROS: [&str; 6] = ["all", "exists", "exists_one", "filter", "has", "map"];
/// Largest compiled pattern, in bytes: some milliseconds for each compilation. Patterns in the
/// field take some thousands.
pub(super) const MAX_PATTERN_BYTES: usize = 1024 * 1024;

/// Parses an expression, and refuses one that is nested too deeply, or has more than `max_loops`
/// loops inside one another.
pub(super) fn program(
    environment: &Env,
    expression: &str,
    max_loops: usize,
) -> Result<Program, String> {
    let program = environment
        .compile(expression)
        .map_err(|error| format!("does not parse: {}", first(&error)))?;
    let depth = depth(program.expression());
    if depth > MAX_DEPTH {
        return Err(format!(
            "is nested {depth} deep, at most {MAX_DEPTH} are taken"
        ));
    }
    let loops = loops(program.expression());
    if loops > max_loops {
        return Err(format!(
            "has {loops} loops (all, exists, map, filter ...) inside one another, at most {max_loops} \
             are taken"
        ));
    }
    Ok(program)
}

/// Returns the nesting depth of an expression.
pub(super) fn depth(at: &IdedExpr) -> usize {
    1 + parts(at).into_iter().map(depth).max().unwrap_or(0)
}

/// Returns the largest number of nested loops of an expression.
pub(super) fn loops(at: &IdedExpr) -> usize {
    let own = usize::from(matches!(at.expr, Expr::Comprehension(_)));
    own + parts(at).into_iter().map(loops).max().unwrap_or(0)
}

/// Returns whether an expression reads nothing of a node but labels and annotations.
pub(super) fn reads_only_labels(at: &IdedExpr) -> bool {
    match path(at).as_deref() {
        Some(["node", "metadata", "labels" | "annotations", ..]) => true,
        Some(["node", ..]) => false,
        _ => parts(at).into_iter().all(reads_only_labels),
    }
}

/// Returns the fields of the variable that an expression reads. `None` if it may read all of them.
pub(super) fn fields(at: &IdedExpr, kind: RuleKind) -> Option<BTreeSet<&str>> {
    let is_variable = |at: &IdedExpr| match &at.expr {
        Expr::Ident(name) => name.trim_start_matches('.') == kind.variable(),
        _ => false,
    };
    let mut read = BTreeSet::new();
    let rest = match &at.expr {
        Expr::Ident(_) if is_variable(at) => return None,
        Expr::Select(select) if is_variable(&select.operand) => {
            read.insert(select.field.as_str());
            Vec::new()
        }
        Expr::Call(call)
            if call.func_name == "bit" && call.target.as_deref().is_some_and(is_variable) =>
        {
            read.insert("entitiesImpacted");
            call.args.iter().collect()
        }
        _ => parts(at),
    };
    for part in rest {
        read.extend(fields(part, kind)?);
    }
    Some(read)
}

/// Returns the names of `a.b.c`, outermost first. `None` for any other expression.
pub(super) fn path(at: &IdedExpr) -> Option<Vec<&str>> {
    match &at.expr {
        Expr::Ident(name) => Some(vec![name]),
        Expr::Select(select) if !select.test => {
            let mut path = path(&select.operand)?;
            path.push(&select.field);
            Some(path)
        }
        _ => None,
    }
}

/// Returns the direct subexpressions of an expression.
pub(super) fn parts(at: &IdedExpr) -> Vec<&IdedExpr> {
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

/// Refuses unknown variables, and unknown top-level fields of known ones.
pub(super) fn check_names(
    at: &IdedExpr,
    kind: RuleKind,
    bound: &mut Vec<String>,
) -> Result<(), String> {
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
            if !check_call(call, kind, bound)?
                && let Some(target) = &call.target
            {
                check_names(target, kind, bound)?;
            }
            call.args
                .iter()
                .try_for_each(|argument| check_names(argument, kind, bound))
        }
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
        _ => (parts(at).into_iter()).try_for_each(|part| check_names(part, kind, bound)),
    }
}

/// Refuses an unknown function, which would fail at every event that reaches it. Returns
/// whether the name is qualified, such as `strings.quote`, so that the part before the dot is
/// not a value.
fn check_call(call: &CallExpr, kind: RuleKind, bound: &[String]) -> Result<bool, String> {
    let name = call.func_name.as_str();
    // Operators have names that no function can have: `_+_`, `!_`, `@in`.
    if !name.starts_with(|first: char| first.is_ascii_alphabetic()) {
        return Ok(false);
    }
    let (function, method) = (format!("{name}()"), format!("''.{name}()"));
    let (form, other) = match &call.target {
        Some(target) => {
            if let Expr::Ident(space) = &target.expr
                && space != kind.variable()
                && !bound.contains(space)
                && is_function(&format!("{space}.{name}()"))
            {
                return Ok(true);
            }
            (method, function)
        }
        None => (function, method),
    };
    if is_function(&form) {
        return Ok(false);
    }
    let hint = if MACROS.contains(&name) {
        "; it is called with other arguments, see docs/policy.md".to_owned()
    } else if is_function(&other) {
        match call.target {
            Some(_) => format!("; it is called as {name}(x)"),
            None => format!("; it is called on a value: x.{name}(...)"),
        }
    } else {
        match nearest(name, FUNCTIONS.into_iter().chain(MACROS), 1).first() {
            Some(known) => format!("; did you mean '{known}'?"),
            None => "; docs/policy.md lists what there is".to_owned(),
        }
    };
    Err(format!("unknown function '{name}'{hint}"))
}

/// Returns whether the function in `call`, which has no arguments, exists. Determined by
/// calling it: an error about its arguments shows that it exists.
pub(super) fn is_function(call: &str) -> bool {
    let Ok(program) = ENVIRONMENT.compile(call) else {
        return false;
    };
    let result = program.execute(&Context::with_env(ENVIRONMENT.clone()));
    !matches!(result, Err(ExecutionError::UndeclaredReference(_)))
}

/// Refuses patterns of `matches` that are not regular expressions, which would fail only at
/// evaluation. Also refuses patterns that are not literals: their cost would depend on the
/// sender.
pub(super) fn check_patterns(program: &Program) -> Result<(), String> {
    check_patterns_below(program, program.expression())
}

fn check_patterns_below(program: &Program, at: &IdedExpr) -> Result<(), String> {
    if let Expr::Call(call) = &at.expr
        && call.func_name == "matches"
        && let Some(argument) = call.args.last()
    {
        let place = place(program, argument.id);
        let Expr::Literal(LiteralValue::String(pattern)) = &argument.expr else {
            return Err(format!(
                "has a pattern{place} that is put together or read from the variable; write it \
                 into the rule as one text"
            ));
        };
        let compiled = regex::RegexBuilder::new(pattern.inner())
            .size_limit(MAX_PATTERN_BYTES)
            .build();
        if let Err(error) = compiled {
            return Err(format!(
                "has a pattern{place} that is no regular expression: {}",
                regex_error(&error.to_string())
            ));
        }
    }
    parts(at)
        .into_iter()
        .try_for_each(|part| check_patterns_below(program, part))
}

/// Returns the position of a part in the expression, for people.
pub(super) fn place(program: &Program, id: u64) -> String {
    let offset = program.source_info().offset_for(id);
    offset.map_or_else(String::new, |(start, _)| {
        let source = &program.source_info().source;
        let before = source.get(..start as usize).unwrap_or_default();
        format!(" at character {}", before.chars().count() + 1)
    })
}

/// Returns the library's message on one line: the pattern, the position in it, and the reason.
/// The library prints the pattern on one line, a caret below it, and the reason on the last
/// line.
fn regex_error(text: &str) -> String {
    let caret = text
        .lines()
        .zip(text.lines().skip(1))
        .find_map(|(pattern, marks)| {
            let marks_only = marks.contains('^') && marks.trim_matches(['^', ' ']).is_empty();
            let indented = pattern.len() - pattern.trim_start().len();
            let at = marks.find('^')?.checked_sub(indented)?;
            marks_only.then(|| format!("'{}', at its character {}", pattern.trim(), at + 1))
        });
    let reason = text.lines().last().unwrap_or_default();
    let reason = reason.strip_prefix("error: ").unwrap_or(reason);
    match caret {
        Some(place) => format!("{place}: {reason}"),
        None => reason.to_owned(),
    }
}

fn unknown_field(kind: RuleKind, field: &str) -> String {
    let meant = nearest(field, kind.fields().iter().copied(), 1);
    let hint = match meant.first() {
        Some(known) => format!("; did you mean '{known}'?"),
        None => format!("; fields are {}", kind.fields().join(", ")),
    };
    format!("unknown field '{field}' of '{}'{hint}", kind.variable())
}

/// Returns whether a name stands for a type, as in `type(x) == string`.
pub(super) fn is_type_name(name: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_functions_that_are_offered_exist() {
        for name in FUNCTIONS {
            let known = is_function(&format!("{name}()")) || is_function(&format!("''.{name}()"));
            assert!(known, "{name}");
        }
        assert!(is_function("strings.quote()"));
        assert!(!is_function("strings.nothing()") && !is_function("nothing()"));
    }
}
