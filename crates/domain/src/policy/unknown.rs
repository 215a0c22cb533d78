//! Keys of a policy file that mean nothing to us, and where they stand.
//!
//! The reference ignores them, so a file of its that has one must load; but most of them
//! are misspelt, so each is named.

use serde_ignored::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Part of the names by which `toml` hands over values with their place; no keys.
const PLACE: &str = "$__serde_spanned_private";

/// Keys that nothing reads.
#[derive(Default)]
pub(super) struct UnknownKeys {
    paths: Vec<Vec<Step>>,
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
        self.paths.push(steps);
    }

    /// Where each stands in `text` (offset in bytes), and its name: `rule-sets[0].cordn`.
    pub(super) fn places(&self, text: &str) -> Vec<(usize, String)> {
        let root = DeTable::parse(text).ok();
        let place = |path: &Vec<Step>| {
            let offset = root.as_ref().and_then(|root| find(root.get_ref(), path));
            (offset.unwrap_or(0), name(path))
        };
        let mut places: Vec<_> = self.paths.iter().map(place).collect();
        places.sort();
        places
    }
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
