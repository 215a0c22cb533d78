//! What is said of a value that does not belong where it stands: its key, what it is, what
//! belongs there, and how that is written, in the words of TOML rather than those of the types
//! that it is read into.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue, Error};

/// Longest value that is shown, in characters.
const SHOWN: usize = 40;

/// Returns what is wrong, for a person. The text itself is TOML.
pub(super) fn explain(text: &str, error: &Error) -> String {
    let message = error.message();
    let root = DeTable::parse(text).ok();
    let found = root.as_ref().zip(error.span()).and_then(|(root, span)| {
        let top = |value: &Spanned<DeValue<'_>>| value.span() == span;
        in_table(root.get_ref(), "", &top)
    });
    let Some(found) = found else {
        return told(message);
    };
    let remedy = |key: &str| match belongs(key) {
        Some((_, example)) => format!("; write {example}"),
        None => String::new(),
    };
    let path = &found.path;
    if let Some(missing) = quoted(message, "missing field `") {
        return format!("{path}: the key '{missing}' is missing{}", remedy(missing));
    }
    match belongs(&found.key) {
        Some((what, example)) if !message.starts_with("unknown variant") => format!(
            "{path}: {} is {}, and {what} belongs here; write {example}",
            shown(text, found.place),
            found.kind
        ),
        _ => format!("{path}: {}{}", told(message), remedy(&found.key)),
    }
}

/// A value, and where it stands.
struct Found {
    /// `rule-sets[0].match.any`.
    path: String,
    /// The last key of it.
    key: String,
    kind: &'static str,
    place: Range<usize>,
}

type IsIt<'a> = dyn Fn(&Spanned<DeValue<'_>>) -> bool + 'a;

fn in_table(table: &DeTable<'_>, above: &str, is_it: &IsIt<'_>) -> Option<Found> {
    table.iter().find_map(|(key, value)| {
        let key = key.get_ref();
        let path = match above {
            "" => key.to_string(),
            above => format!("{above}.{key}"),
        };
        in_value(value, key, path, is_it)
    })
}

/// Returns the innermost of the values that it may be: a table has the place of what opens it.
fn in_value(
    value: &Spanned<DeValue<'_>>,
    key: &str,
    path: String,
    is_it: &IsIt<'_>,
) -> Option<Found> {
    let (inner, kind) = match value.get_ref() {
        DeValue::Table(table) => (in_table(table, &path, is_it), "a table"),
        DeValue::Array(array) => (
            array
                .iter()
                .enumerate()
                .find_map(|(index, value)| in_value(value, key, format!("{path}[{index}]"), is_it)),
            "an array",
        ),
        DeValue::String(_) => (None, "a string"),
        DeValue::Integer(_) => (None, "an integer"),
        DeValue::Float(_) => (None, "a float"),
        DeValue::Boolean(_) => (None, "a boolean"),
        DeValue::Datetime(_) => (None, "a date"),
    };
    inner.or_else(|| {
        is_it(value).then(|| Found {
            path,
            key: key.to_owned(),
            kind,
            place: value.span(),
        })
    })
}

fn shown(text: &str, place: Range<usize>) -> String {
    let value = text.get(place).unwrap_or_default();
    let line = value.lines().next().unwrap_or_default();
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line.to_owned(),
    }
}

fn quoted<'a>(message: &'a str, before: &str) -> Option<&'a str> {
    message.strip_prefix(before)?.split('`').next()
}

/// Returns a message as `serde` has it, without the names of our types.
fn told(message: &str) -> String {
    message
        .split(", expected struct ")
        .next()
        .unwrap_or(message)
        .to_owned()
}

/// Returns what the value of a key is, and how it is written.
fn belongs(key: &str) -> Option<(&'static str, &'static str)> {
    const TABLES: &str = "an array of tables";
    Some(match key {
        "rule-sets" => (TABLES, "each rule set below a line [[rule-sets]]"),
        "policies" => (TABLES, "each policy below a line [[policies]]"),
        "match" => (
            "a table",
            "rules below [[rule-sets.match.any]] or [[rule-sets.match.all]]",
        ),
        "any" => (TABLES, "each rule below a line [[rule-sets.match.any]]"),
        "all" => (TABLES, "each rule below a line [[rule-sets.match.all]]"),
        "kind" => ("a string", "kind = \"HealthEvent\" or kind = \"Node\""),
        "expression" => ("a string", "expression = \"event.isFatal\""),
        "cordon" => ("a table", "[rule-sets.cordon] and shouldCordon = true"),
        "taint" => ("a table", "[rule-sets.taint] with key, value and effect"),
        "effect" => ("a string", "effect = \"NoSchedule\""),
        "key" => ("a string", "key = \"example.com/gpu\""),
        "value" => ("a string", "value = \"broken\""),
        "name" => ("a string", "name = \"fatal faults\""),
        "version" => ("a string", "version = \"1\""),
        "label-prefix" => ("a string", "label-prefix = \"example.com/\""),
        "match-any-all" => (
            "a string",
            "match-any-all = \"both\" or match-any-all = \"either\"",
        ),
        "priority" => ("an integer", "priority = 100"),
        "enabled" | "shouldCordon" | "unhealthy-taint" | "uncordon-labels" => {
            ("a boolean", "true or false, without quotes")
        }
        "brake" => ("a table", "[[brake.budgets]] and max = \"10%\""),
        "budgets" => (TABLES, "each budget below a line [[brake.budgets]]"),
        "max" => ("an integer or a share", "max = 5 or max = \"10%\""),
        "per" => ("a string", "per = \"topology.kubernetes.io/zone\""),
        "circuitBreaker" => (
            "a table",
            "[circuitBreaker] with percentage = 50 and duration = \"5m\"",
        ),
        "percentage" => ("an integer", "percentage = 50"),
        "duration" => ("a string", "duration = \"5m\""),
        _ => return None,
    })
}
