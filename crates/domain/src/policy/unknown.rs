//! Keys of a policy file that nothing reads: where they stand, and what was meant.
//!
//! The reference ignores what it does not know. Most such keys are misspelt, and a setting that
//! is off by a typo is found when it is needed; so they are errors. Keys of the reference that
//! have no use here are known, so that a file of its loads.

use toml::de::{DeTable, DeValue};

use crate::nearest::nearest;

/// The keys there are, by where they stand; a rule set of a named policy has those of one of the
/// file. The tables of the brake are their own, and refuse what they do not know themselves.
const KEYS: [(&str, &[&str]); 9] = [
    ("", &TOP),
    ("circuitBreaker", &["percentage", "duration"]),
    ("policies", &["name", "rule-sets"]),
    (
        "rule-sets",
        &[
            "enabled", "version", "name", "priority", "match", "taint", "cordon",
        ],
    ),
    ("rule-sets.match", &["any", "all"]),
    ("rule-sets.match.any", &RULE),
    ("rule-sets.match.all", &RULE),
    ("rule-sets.taint", &["key", "value", "effect"]),
    ("rule-sets.cordon", &["shouldCordon"]),
];
const TOP: [&str; 8] = [
    "label-prefix",
    "circuitBreaker",
    "brake",
    "match-any-all",
    "unhealthy-taint",
    "uncordon-labels",
    "rule-sets",
    "policies",
];
const RULE: [&str; 2] = ["kind", "expression"];
/// Keys of the reference that have no use here, and what to do instead.
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

/// A key that nothing reads.
pub(super) struct UnknownKey {
    /// Where it stands, in bytes.
    pub(super) offset: usize,
    /// What is said of it.
    pub(super) what: String,
    /// Whether the file cannot be used for it.
    pub(super) is_error: bool,
}

/// Returns the keys of a file that nothing reads, in its order.
pub(super) fn keys(text: &str) -> Vec<UnknownKey> {
    let mut found = Vec::new();
    if let Ok(root) = DeTable::parse(text) {
        look(root.get_ref(), "", "", &mut found);
    }
    found.sort_by(|a, b| (a.offset, &a.what).cmp(&(b.offset, &b.what)));
    found
}

/// Looks at a table that stands `within` these keys, and has this name for people.
fn look(table: &DeTable<'_>, within: &str, name: &str, found: &mut Vec<UnknownKey>) {
    // A rule set of a named policy.
    let within = within.strip_prefix("policies.").unwrap_or(within);
    let Some((_, known)) = KEYS.iter().find(|(place, _)| *place == within) else {
        return;
    };
    for (key, value) in table {
        let (offset, key) = (key.span().start, key.get_ref().as_ref());
        let below = |above: &str| match above {
            "" => key.to_owned(),
            above => format!("{above}.{key}"),
        };
        let (within, name) = (below(within), below(name));
        if known.contains(&key) {
            match value.get_ref() {
                DeValue::Table(table) => look(table, &within, &name, found),
                DeValue::Array(tables) => {
                    let tables = tables.iter().map(|one| one.get_ref().as_table());
                    for (index, table) in tables.enumerate() {
                        if let Some(table) = table {
                            look(table, &within, &format!("{name}[{index}]"), found);
                        }
                    }
                }
                _ => {}
            }
            continue;
        }
        let unused = UNUSED.iter().find(|(unused, _)| *unused == within);
        let what = match unused {
            Some((_, why)) => format!("'{name}': {why}"),
            None => format!("unknown key '{name}'; {}", hint(key, known)),
        };
        found.push(UnknownKey {
            offset,
            what,
            is_error: unused.is_none(),
        });
    }
}

/// Returns what was meant by `key`, where the `known` keys stand.
fn hint(key: &str, known: &[&str]) -> String {
    match nearest(key, known.iter().copied(), 1).first() {
        Some(meant) => format!("did you mean '{meant}'?"),
        None if TOP.contains(&key) => {
            "it is of the whole file, so it stands before the first [[rule-sets]]".to_owned()
        }
        None => format!("there is {}", known.join(", ")),
    }
}
