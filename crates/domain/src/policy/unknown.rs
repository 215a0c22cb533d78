//! Keys of a policy file that nothing reads: where they stand, and what was meant.
//!
//! The reference ignores what it does not know. Most such keys are misspelt, and a setting that
//! is off by a typo is found when it is needed; so they are errors. Keys of the reference that
//! have no use here are known, so that a file of its loads.

use serde_ignored::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::nearest::nearest;

/// Part of the names by which `toml` hands over values with their place; no keys.
const PLACE: &str = "$__serde_spanned_private";
/// Keys that are told one by one.
const TOLD: usize = 100;
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

/// Keys that nothing reads.
#[derive(Default)]
pub(super) struct UnknownKeys {
    paths: Vec<Vec<Step>>,
    more: usize,
    more_are_errors: bool,
}

/// What is to be said of a key, and where it stands (offset in bytes).
pub(super) struct Said {
    pub(super) offset: usize,
    pub(super) what: String,
    /// Whether the file cannot be used for it.
    pub(super) is_error: bool,
}

enum Step {
    Key(String),
    Index(usize),
}

// === impl UnknownKeys ===

impl UnknownKeys {
    /// Takes in that the key at `path` was not read.
    pub(super) fn note(&mut self, path: &Path<'_>) {
        let mut steps = Vec::new();
        collect(path, &mut steps);
        if self.paths.len() >= TOLD {
            let (_, is_error) = judged(&steps);
            self.more += 1;
            self.more_are_errors |= is_error;
            return;
        }
        self.paths.push(steps);
    }

    /// What is said of each, in the order of `text`.
    pub(super) fn said(&self, text: &str) -> Vec<Said> {
        let root = DeTable::parse(text).ok();
        let mut said: Vec<_> = self
            .paths
            .iter()
            .map(|path| {
                let offset = root.as_ref().and_then(|root| find(root.get_ref(), path));
                let (what, is_error) = judged(path);
                Said {
                    offset: offset.unwrap_or(0),
                    what,
                    is_error,
                }
            })
            .collect();
        said.sort_by(|a, b| (a.offset, &a.what).cmp(&(b.offset, &b.what)));
        if self.more > 0 {
            said.push(Said {
                offset: text.len(),
                what: format!("and {} more unknown keys", self.more),
                is_error: self.more_are_errors,
            });
        }
        said
    }
}

/// What is said of an unread key, and whether it is an error.
fn judged(path: &[Step]) -> (String, bool) {
    let name = name(path);
    let mut keys: Vec<&str> = path
        .iter()
        .filter_map(|step| match step {
            Step::Key(key) => Some(key.as_str()),
            Step::Index(_) => None,
        })
        .collect();
    if keys.first() == Some(&"policies") && keys.len() > 2 {
        keys.remove(0);
    }
    let whole = keys.join(".");
    if let Some((_, why)) = UNUSED.iter().find(|(known, _)| *known == whole) {
        return (format!("'{name}': {why}"), false);
    }
    let key = keys.pop().unwrap_or_default();
    let within = keys.join(".");
    let known = KEYS.iter().find(|(place, _)| *place == within);
    let known = known.map_or(&TOP as &[&str], |(_, known)| known);
    let hint = match nearest(key, known.iter().copied(), 1).first() {
        Some(meant) => format!("did you mean '{meant}'?"),
        None if TOP.contains(&key) => {
            "it is of the whole file, so it stands before the first [[rule-sets]]".to_owned()
        }
        None => format!("there is {}", known.join(", ")),
    };
    (format!("unknown key '{name}'; {hint}"), true)
}

fn collect(path: &Path<'_>, steps: &mut Vec<Step>) {
    match path {
        Path::Root => {}
        Path::Seq { parent, index } => {
            collect(parent, steps);
            steps.push(Step::Index(*index));
        }
        Path::Map { parent, key } => {
            collect(parent, steps);
            if !key.starts_with(PLACE) {
                steps.push(Step::Key(key.clone()));
            }
        }
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => collect(parent, steps),
    }
}

fn find(root: &DeTable<'_>, path: &[Step]) -> Option<usize> {
    let mut table = Some(root);
    let mut value: Option<&Spanned<DeValue<'_>>> = None;
    let mut offset = None;
    for step in path {
        match step {
            Step::Key(key) => {
                let (found, next) = table?
                    .iter()
                    .find(|(known, _)| known.get_ref().as_ref() == key)?;
                offset = Some(found.span().start);
                value = Some(next);
            }
            Step::Index(index) => {
                value = value?.get_ref().as_array()?.get(*index);
            }
        }
        table = value.and_then(|value| value.get_ref().as_table());
    }
    offset
}

fn name(path: &[Step]) -> String {
    let mut name = String::new();
    for step in path {
        match step {
            Step::Key(key) if name.is_empty() => name.push_str(key),
            Step::Key(key) => name.push_str(&format!(".{key}")),
            Step::Index(index) => name.push_str(&format!("[{index}]")),
        }
    }
    name
}
