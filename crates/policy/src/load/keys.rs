//! Keys of a policy file: findings about unknown keys, and about values of a wrong type, in the
//! terms of TOML.
//!
//! NVSentinel ignores unknown keys. Most of them are typos, and a setting that is lost to a
//! typo is missed only when it is needed, so unknown keys are errors. Keys of NVSentinel
//! without a use here are known, so that its files load.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue, Error};

use contract::nearest::nearest;

/// Longest value shown in a finding, in characters.
const SHOWN: usize = 40;

/// All keys: table, name, type of the value, and an example. Rule sets of named policies have
/// the same keys as those of the file.
#[rustfmt::skip]
const KEYS: [(&str, &str, &str, &str); 52] = [
    ("", "label-prefix", STRING, "label-prefix = \"example.com/\""),
    ("", "circuitBreaker", TABLE, "[circuitBreaker] with percentage = 50 and duration = \"5m\""),
    ("", "brake", TABLE, "[[brake.budgets]] and max = \"10%\""),
    ("", "device-taints", TABLE, "[device-taints] with xid = \"NoSchedule\""),
    ("", "match-any-all", STRING, "match-any-all = \"both\" or match-any-all = \"either\""),
    ("", "unhealthy-taint", BOOLEAN, TRUE_OR_FALSE),
    ("", "uncordon-labels", BOOLEAN, TRUE_OR_FALSE),
    ("", "uncordon", STRING, "uncordon = \"releases\", \"not-during-repair\" or \"never\""),
    ("", "rule-sets", TABLES, "each rule set below a line [[rule-sets]]"),
    ("", "routes", TABLES, "each route below a line [[routes]]"),
    ("", "policies", TABLES, "each policy below a line [[policies]]"),
    ("brake", "budgets", TABLES, "each budget below a line [[brake.budgets]]"),
    ("brake.budgets", "max", "an integer or a share", "max = 5 or max = \"10%\""),
    ("brake.budgets", "per", STRING, "per = \"topology.kubernetes.io/zone\""),
    ("circuitBreaker", "percentage", "an integer", "percentage = 50"),
    ("circuitBreaker", "duration", STRING, "duration = \"5m\""),
    ("device-taints", "xid", STRING, "xid = \"NoSchedule\""),
    ("device-taints", "gpu-lost", STRING, "gpu-lost = \"NoSchedule\""),
    ("device-taints", "unmonitored", STRING, "unmonitored = \"None\""),
    ("device-taints", "memory", STRING, "memory = \"NoSchedule\""),
    ("device-taints", "nvlink", STRING, "nvlink = \"NoSchedule\""),
    ("device-taints", "thermal", STRING, "thermal = \"None\""),
    ("policies", "name", STRING, NAME),
    ("policies", "rule-sets", TABLES, "each rule set below a line [[rule-sets]]"),
    ("rule-sets", "enabled", BOOLEAN, TRUE_OR_FALSE),
    ("rule-sets", "version", STRING, "version = \"1\""),
    ("rule-sets", "name", STRING, NAME),
    ("rule-sets", "priority", "an integer", "priority = 100"),
    ("rule-sets", "match", TABLE, "rules below [[rule-sets.match.any]] or [[rule-sets.match.all]]"),
    ("rule-sets", "taint", TABLE, "[rule-sets.taint] with key, value and effect"),
    ("rule-sets", "cordon", TABLE, "[rule-sets.cordon] and shouldCordon = true"),
    ("rule-sets", "taint-devices", "an integer", "taint-devices = 1"),
    ("rule-sets.match", "any", TABLES, "each rule below a line [[rule-sets.match.any]]"),
    ("rule-sets.match", "all", TABLES, "each rule below a line [[rule-sets.match.all]]"),
    ("rule-sets.match.any", "kind", STRING, KIND),
    ("rule-sets.match.any", "expression", STRING, EXPRESSION),
    ("rule-sets.match.all", "kind", STRING, KIND),
    ("rule-sets.match.all", "expression", STRING, EXPRESSION),
    ("rule-sets.taint", "key", STRING, "key = \"example.com/gpu\""),
    ("rule-sets.taint", "value", STRING, "value = \"broken\""),
    ("rule-sets.taint", "effect", STRING, "effect = \"NoSchedule\""),
    ("rule-sets.cordon", "shouldCordon", BOOLEAN, TRUE_OR_FALSE),
    ("routes", "name", STRING, NAME),
    ("routes", "match", TABLE, "rules below [[routes.match.any]] or [[routes.match.all]]"),
    ("routes", "drain", "false or a string", "drain = false, drain = \"graceful\" or drain = \"forceful\""),
    ("routes", "remediate", BOOLEAN, TRUE_OR_FALSE),
    ("routes.match", "any", TABLES, "each rule below a line [[routes.match.any]]"),
    ("routes.match", "all", TABLES, "each rule below a line [[routes.match.all]]"),
    ("routes.match.any", "kind", STRING, KIND),
    ("routes.match.any", "expression", STRING, EXPRESSION),
    ("routes.match.all", "kind", STRING, KIND),
    ("routes.match.all", "expression", STRING, EXPRESSION),
];
const BOOLEAN: &str = "a boolean";
const STRING: &str = "a string";
const TABLE: &str = "a table";
const TABLES: &str = "an array of tables";
const TRUE_OR_FALSE: &str = "true or false, without quotes";
const NAME: &str = "name = \"fatal faults\"";
const KIND: &str = "kind = \"HealthEvent\" or kind = \"Node\"";
const EXPRESSION: &str = "expression = \"event.isFatal\"";

/// Keys of NVSentinel that have no use here, and what to do instead.
const UNUSED: [(&str, &str); 2] = [
    (
        "skip-node-labels",
        "NVSentinel's list of nodes that it leaves alone has no effect here; add a rule of kind \
         Node to each rule set, such as !('key' in node.metadata.labels)",
    ),
    (
        "rule-sets.label",
        "NVSentinel's label of a rule set has no effect here; a taint, or the label \
         cordon-reason, tells which rule set matched",
    ),
];

/// A key without a use.
pub(super) struct UnknownKey {
    /// Offset of the key in the file, in bytes.
    pub(super) offset: usize,
    /// Text of the finding.
    pub(super) what: String,
    /// True if the key makes the file unusable.
    pub(super) is_error: bool,
}

/// A value in the file.
#[derive(Clone, Copy)]
struct Node<'a> {
    /// Keys of the enclosing tables: `rule-sets.match`.
    within: &'a str,
    /// Full path, with the value's own key and array indexes: `rule-sets[0].match.any`.
    path: &'a str,
    key: &'a str,
    /// Offset of the key, in bytes. `None` for an element of an array.
    key_at: Option<usize>,
    value: &'a Spanned<DeValue<'a>>,
}

/// Returns the keys of a file without a use, in the order of the file.
pub(super) fn unknown(text: &str) -> Vec<UnknownKey> {
    let mut found = Vec::new();
    walk(text, &mut |node| found.extend(unknown_key(node)));
    found.sort_by(|a, b| (a.offset, &a.what).cmp(&(b.offset, &b.what)));
    found
}

fn unknown_key(node: &Node<'_>) -> Option<UnknownKey> {
    let (within, key, path) = (node.within, node.key, node.path);
    // Rule sets of a named policy have the same keys.
    let within = within.strip_prefix("policies.").unwrap_or(within);
    let known: Vec<&str> = keys_of(within).collect();
    let offset = node.key_at.filter(|_| !known.is_empty())?;
    if known.contains(&key) {
        return None;
    }
    let place = joined(within, key);
    let unused = UNUSED.iter().find(|(unused, _)| *unused == place);
    let what = match unused {
        Some((_, why)) => format!("'{path}': {why}"),
        None => format!("unknown key '{path}'; {}", hint(key, &known)),
    };
    Some(UnknownKey {
        offset,
        what,
        is_error: unused.is_none(),
    })
}

/// Returns a hint at the key that was meant, given the `known` keys of the table.
fn hint(key: &str, known: &[&str]) -> String {
    match nearest(key, known.iter().copied(), 1).first() {
        Some(meant) => format!("did you mean '{meant}'?"),
        None if keys_of("").any(|top| top == key) => {
            "it is of the whole file, so it stands before the first [[rule-sets]]".to_owned()
        }
        None => format!("there is {}", known.join(", ")),
    }
}

/// Returns the finding about a value of the wrong type in valid TOML.
pub(super) fn wrong_value(text: &str, error: &Error) -> String {
    let message = error.message();
    let mut found = None;
    // The innermost value at this position: a table has the position of its first line.
    walk(text, &mut |node| {
        if Some(node.value.span()) == error.span() {
            let kind = kind_of(node.value.get_ref());
            found = Some((
                node.path.to_owned(),
                node.key.to_owned(),
                kind,
                node.value.span(),
            ));
        }
    });
    let reason = || {
        message
            .split(", expected struct ")
            .next()
            .unwrap_or(message)
    };
    let Some((path, key, kind, place)) = found else {
        return reason().to_owned();
    };
    let belongs = |key: &str| KEYS.iter().find(|(_, known, ..)| *known == key);
    let example_of = |key: &str| match belongs(key) {
        Some((.., example)) => format!("; write {example}"),
        None => String::new(),
    };
    let missing = message.strip_prefix("missing field `");
    if let Some(missing) = missing.and_then(|rest| rest.split('`').next()) {
        return format!(
            "{path}: the key '{missing}' is missing{}",
            example_of(missing)
        );
    }
    match belongs(&key) {
        Some((.., what, example)) if !message.starts_with("unknown variant") => {
            let value = shown(text, place);
            format!("{path}: {value} is {kind}, and {what} belongs here; write {example}")
        }
        _ => format!("{path}: {}{}", reason(), example_of(&key)),
    }
}

fn kind_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::Table(_) => TABLE,
        DeValue::Array(_) => "an array",
        DeValue::String(_) => STRING,
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => BOOLEAN,
        DeValue::Datetime(_) => "a date",
    }
}

/// Returns a value as written in the file, limited to one line.
fn shown(text: &str, place: Range<usize>) -> String {
    let value = text.get(place).unwrap_or_default();
    let line = value.lines().next().unwrap_or_default();
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line.to_owned(),
    }
}

fn keys_of(table: &str) -> impl Iterator<Item = &'static str> {
    let keys = KEYS.iter().filter(move |(within, ..)| *within == table);
    keys.map(|(_, key, ..)| *key)
}

fn joined(above: &str, key: &str) -> String {
    match above {
        "" => key.to_owned(),
        above => format!("{above}.{key}"),
    }
}

/// Visits the values of a file, outer ones first.
fn walk(text: &str, visit: &mut dyn FnMut(&Node<'_>)) {
    if let Ok(root) = DeTable::parse(text) {
        walk_table(root.get_ref(), "", "", visit);
    }
}

fn walk_table(table: &DeTable<'_>, within: &str, above: &str, visit: &mut dyn FnMut(&Node<'_>)) {
    for (key, value) in table {
        let path = joined(above, key.get_ref());
        let node = Node {
            within,
            path: &path,
            key: key.get_ref(),
            key_at: Some(key.span().start),
            value,
        };
        walk_value(&node, visit);
    }
}

fn walk_value(node: &Node<'_>, visit: &mut dyn FnMut(&Node<'_>)) {
    visit(node);
    match node.value.get_ref() {
        DeValue::Table(table) => {
            walk_table(table, &joined(node.within, node.key), node.path, visit);
        }
        DeValue::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                let path = format!("{}[{index}]", node.path);
                let element = Node {
                    path: &path,
                    key_at: None,
                    value,
                    ..*node
                };
                walk_value(&element, visit);
            }
        }
        _ => {}
    }
}
