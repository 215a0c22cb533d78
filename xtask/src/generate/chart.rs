//! Files that follow from the values of the Helm chart: the JSON schema, the known keys, and the
//! page about the values.
//!
//! The comment above a key of `values.yaml` is its meaning. `One of: A, B.` in it lists the values
//! that the key may have, and `Any keys.` permits others than those of the default.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value, json};

const CHART: &str = "deploy/helm/gpuwarden";
const PAGE: &str = "docs/helm-values.md";
const ONE_OF: &str = "One of: ";
const ANY_KEYS: &str = "Any keys.";

/// A key of the values.
struct Key {
    path: Vec<String>,
    /// Comment above the key, in one line.
    meaning: String,
    default: Value,
}

/// Returns the paths and contents of the files.
pub(super) fn files(root: &Path) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
    let chart = root.join(CHART);
    let path = chart.join("values.yaml");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let keys = keys(&text).with_context(|| format!("read {}", path.display()))?;
    let schema = serde_json::to_string_pretty(&schema(&keys)?)? + "\n";
    let known = serde_json::to_string_pretty(&known(&keys))? + "\n";
    Ok(vec![
        (chart.join("values.schema.json"), schema.into_bytes()),
        // JSON is YAML, which templates can read.
        (chart.join("files/keys.yaml"), known.into_bytes()),
        (root.join(PAGE), page(&keys).into_bytes()),
    ])
}

/// Returns the keys of `values.yaml` in their order, parents before their children.
fn keys(text: &str) -> anyhow::Result<Vec<Key>> {
    let values: Value = serde_saphyr::from_str(text)?;
    let mut keys: Vec<Key> = Vec::new();
    let mut path: Vec<String> = Vec::new();
    let mut comment = String::new();
    for (number, line) in text.lines().enumerate() {
        let content = line.trim_start();
        if let Some(words) = content.strip_prefix('#') {
            comment = format!("{comment} {}", words.trim());
            continue;
        }
        let meaning = std::mem::take(&mut comment);
        let Some((name, _)) = content.split_once(':') else {
            continue;
        };
        path.truncate((line.len() - content.len()) / 2);
        path.push(name.to_owned());
        // Other lines are part of a list or of a text.
        let Some(default) = at(&values, &path) else {
            path.pop();
            continue;
        };
        let parent = keys
            .iter()
            .find(|key| key.path[..] == path[..path.len() - 1]);
        if parent.is_some_and(Key::takes_any_keys) {
            continue;
        }
        ensure!(
            !meaning.is_empty(),
            "line {}: {} has no comment",
            number + 1,
            path.join(".")
        );
        keys.push(Key {
            path: path.clone(),
            meaning: meaning.trim().to_owned(),
            default: default.clone(),
        });
    }
    Ok(keys)
}

fn at<'a>(values: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(values, |value, name| value.get(name))
}

/// Returns the JSON schema of the values. Keys that the chart does not have are left to its
/// templates, which say what it has instead.
fn schema(keys: &[Key]) -> anyhow::Result<Value> {
    let mut root = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart gpuwarden",
        "type": "object",
        "properties": {},
    });
    for key in keys {
        let mut parent = &mut root;
        for name in &key.path[..key.path.len() - 1] {
            parent = &mut parent["properties"][name];
        }
        let Some(name) = key.path.last() else {
            continue;
        };
        parent["properties"][name] = key.schema()?;
    }
    Ok(root)
}

/// Returns the keys as maps of maps, with true for a value. An empty map takes any keys.
fn known(keys: &[Key]) -> Value {
    let mut root = json!({});
    for key in keys {
        let mut place = &mut root;
        for name in &key.path {
            place = &mut place[name];
        }
        // Not null, which merging in a template would drop.
        *place = if key.default.is_object() {
            json!({})
        } else {
            json!(true)
        };
    }
    root
}

fn page(keys: &[Key]) -> String {
    let mut page = String::from(
        "# Values of the Helm chart\n\n\
         This page is generated from [values.yaml](../deploy/helm/gpuwarden/values.yaml) by \
         `cargo xtask generate`.\n[install.md](install.md) shows how they are used. A key that the \
         chart does not have, or a value of the\nwrong type, is refused with its path.\n\n\
         | value | default | meaning |\n|---|---|---|\n",
    );
    for key in keys {
        let default = match &key.default {
            Value::Object(map) if !map.is_empty() && !key.takes_any_keys() => String::new(),
            Value::String(text) if text.contains('\n') => "in values.yaml".to_owned(),
            Value::String(text) if text.is_empty() => "empty".to_owned(),
            Value::String(text) => format!("`{text}`"),
            other => format!("`{other}`"),
        };
        let meaning = key.meaning.replace('|', "\\|");
        page.push_str(&format!(
            "| `{}` | {default} | {meaning} |\n",
            key.path.join(".")
        ));
    }
    page
}

// === impl Key ===

impl Key {
    fn takes_any_keys(&self) -> bool {
        self.meaning.contains(ANY_KEYS)
    }

    /// Returns the values that the key may have, if its meaning lists them.
    fn one_of(&self) -> Option<Vec<&str>> {
        let (_, list) = self.meaning.split_once(ONE_OF)?;
        let (list, _) = list.split_once('.')?;
        Some(list.split(", ").map(|it| it.trim_matches('"')).collect())
    }

    fn schema(&self) -> anyhow::Result<Value> {
        let kind = match &self.default {
            Value::Bool(_) => "boolean",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
            Value::Null => bail!("{} has no default", self.path.join(".")),
        };
        let mut schema = Map::new();
        schema.insert("description".to_owned(), json!(self.meaning));
        schema.insert("type".to_owned(), json!(kind));
        match self.one_of() {
            Some(values) => {
                let listed = values.iter().any(|value| self.default == **value);
                ensure!(
                    listed,
                    "the default of {} is not listed",
                    self.path.join(".")
                );
                schema.insert("enum".to_owned(), json!(values));
            }
            None if kind == "object" => {
                schema.insert("properties".to_owned(), json!({}));
            }
            None => {}
        }
        Ok(Value::Object(schema))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: &str = "# A part.\n\
                          part:\n  \
                            # Mode. One of: \"\", a, b.\n  \
                            mode: \"\"\n  \
                            # Labels. Any keys.\n  \
                            labels:\n    \
                              x: y\n  \
                            # A text.\n  \
                            text: |\n    \
                              mode: no key\n";

    #[test]
    fn keys_have_their_comments_and_texts_have_none() {
        let keys = keys(VALUES).unwrap();
        let paths: Vec<_> = keys.iter().map(|key| key.path.join(".")).collect();
        assert_eq!(paths, ["part", "part.mode", "part.labels", "part.text"]);
        assert_eq!(
            known(&keys),
            json!({"part": {"mode": true, "labels": {}, "text": true}})
        );
        let schema = schema(&keys).unwrap();
        let mode = &schema["properties"]["part"]["properties"]["mode"];
        assert_eq!(mode["enum"], json!(["", "a", "b"]));
        assert!(page(&keys).contains("| `part.text` | in values.yaml | A text. |"));
    }

    #[test]
    fn a_key_without_a_comment_or_with_an_unlisted_default_is_refused() {
        let error = keys("a: 1\n").err().unwrap().to_string();
        assert_eq!(error, "line 1: a has no comment");
        let keys = keys("# Mode. One of: a, b.\nmode: c\n").unwrap();
        assert!(schema(&keys).is_err());
    }
}
