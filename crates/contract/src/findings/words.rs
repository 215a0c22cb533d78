//! Errors of the readers of TOML, YAML and JSON, in the terms of the file.

use serde::de::DeserializeOwned;
use serde_saphyr::{MessageFormatter as _, UserMessageFormatter};

use super::keys::{Key, joined};
use super::{Format, start_of_line};
use crate::nearest::hint;

/// Most keys that are listed as a hint.
const LISTED: usize = 40;
/// Most characters of a value that are shown.
const SHOWN: usize = 40;

/// First error of the reader of a format.
pub(super) struct ReadError {
    /// Byte offset in the file.
    pub(super) at: usize,
    message: String,
}

/// Deserializes a file.
pub(super) fn deserialize<T: DeserializeOwned>(text: &str, format: Format) -> Result<T, ReadError> {
    match format {
        Format::Toml => toml::from_str(text).map_err(|error| ReadError {
            at: error.span().map_or(0, |span| span.start),
            message: error.message().to_owned(),
        }),
        Format::Yaml => serde_saphyr::from_str(text).map_err(|error| yaml_error(&error)),
        Format::Json => serde_json::from_str(text).map_err(|error| {
            let shown = error.to_string();
            let place = format!(" at line {} column {}", error.line(), error.column());
            let message = shown.strip_suffix(&place).unwrap_or(&shown).to_owned();
            // The last byte that was read: before a list, and behind a value of a wrong form.
            let read = start_of_line(text, error.line()) + error.column().saturating_sub(1);
            let at = match text.as_bytes().get(read) {
                Some(b' ') => read + 1,
                Some(b',' | b'}' | b']') if !message.starts_with("missing") => {
                    read.saturating_sub(1)
                }
                _ => read,
            };
            ReadError { at, message }
        }),
    }
}

fn yaml_error(error: &serde_saphyr::Error) -> ReadError {
    let at = error
        .location()
        .and_then(|place| place.span().byte_offset());
    let mut error = error;
    while let serde_saphyr::Error::WithSnippet { error: inner, .. }
    | serde_saphyr::Error::AliasError { error: inner, .. } = error
    {
        error = inner;
    }
    ReadError {
        at: at.and_then(|at| at.try_into().ok()).unwrap_or_default(),
        message: UserMessageFormatter.format_message(error).into_owned(),
    }
}

// === impl ReadError ===

impl ReadError {
    /// Returns the offset and the text of the finding. `example` returns the form of a key's
    /// values.
    pub(super) fn explain(
        &self,
        text: &str,
        keys: &[Key],
        example: impl Fn(&Key) -> Option<String>,
    ) -> (usize, String) {
        let message = self.message.as_str();
        if let Some((name, known)) = quoted(message, "unknown field `") {
            let named = keys.iter().filter(|key| key.name == name);
            let key = named.filter_map(|key| Some((key.at?, &key.path)));
            let key = key.filter(|(at, _)| *at <= self.at).max();
            let (at, path) = key.map_or((self.at, name), |(at, path)| (at, path));
            return (at, unknown_key(path, name, &names(known)));
        }
        // The innermost value.
        let around = keys.iter().filter(|key| {
            let value = &key.value;
            value.contains(&self.at) || value.start == self.at
        });
        let key = around.max_by_key(|key| (key.value.start, key.path.len()));
        let path = key.map_or("", |key| &*key.path);
        if let Some((name, _)) = quoted(message, "missing field `") {
            let missing = Key {
                within: key.map_or_else(String::new, |key| joined(&key.within, &key.name)),
                name: name.to_owned(),
                ..Key::default()
            };
            let example = example(&missing).map_or_else(String::new, |it| format!("; write {it}"));
            let place = if path.is_empty() { "" } else { ": " };
            return (
                self.at,
                format!("{path}{place}the key '{name}' is missing{example}"),
            );
        }
        let Some(key) = key else {
            return (self.at, message.to_owned());
        };
        let variant = quoted(message, "unknown variant `");
        let wanted = match (example(key), variant) {
            (Some(example), _) => Some(format!("write {example}")),
            (None, Some((name, known))) => Some(one_of(name, &names(known))),
            (None, None) => wanted(message).map(|wanted| format!("write {wanted}")),
        };
        let what = match wanted {
            Some(wanted) => format!("{path} is {}; {wanted}", shown(text, key)),
            None => format!("{path}: {message}"),
        };
        (key.at.unwrap_or(self.at), what)
    }
}

/// Returns the text of the finding about a key that nothing reads.
pub(super) fn unknown_key(path: &str, name: &str, known: &[&str]) -> String {
    let hint = hint(name, known)
        .or_else(|| (known.len() <= LISTED).then(|| format!("there is {}", known.join(", "))));
    let hint = hint.map_or_else(String::new, |hint| format!("; {hint}"));
    format!("unknown key '{path}'{hint}")
}

/// Splits a message after a quoted name.
fn quoted<'a>(message: &'a str, begin: &str) -> Option<(&'a str, &'a str)> {
    message.strip_prefix(begin)?.split_once('`')
}

/// Returns the names in `, expected one of a, b`, which may be quoted.
fn names(expected: &str) -> Vec<&str> {
    const BETWEEN: [&str; 5] = ["", "expected", "one", "of", "or"];
    let words = expected.split([',', ' ', '`']);
    words.filter(|word| !BETWEEN.contains(word)).collect()
}

/// Returns the name that was meant, or all names.
pub(super) fn one_of(given: &str, names: &[&str]) -> String {
    hint(given, names).unwrap_or_else(|| match names {
        [first @ .., last] if !first.is_empty() => format!("write {} or {last}", first.join(", ")),
        names => format!("write {}", names.join(", ")),
    })
}

/// Returns what belongs in the place of a value, if the message says that.
fn wanted(message: &str) -> Option<String> {
    let (expected, is_named) = match message.strip_prefix("invalid ") {
        Some(what) => match what.rsplit_once(", expected ") {
            Some((_, expected)) => (expected, true),
            // Such as `invalid u8`.
            None => (what, false),
        },
        None => (message.strip_prefix("expected ")?, true),
    };
    let words = match expected {
        "i64" | "i32" | "isize" => "a whole number",
        "u64" | "usize" => "a whole number that is not negative",
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "f64" | "f32" | "floating point" => "a number",
        "bool" | "a boolean" | "boolean" | "boolean (true or false expected)" => "true or false",
        "a string" | "string" => "text in quotes",
        "string scalar" => "one value",
        "a sequence" | "sequence" | "sequence start" => "a list",
        "a map" | "map" | "mapping start" => "keys with their values",
        other if other.starts_with("struct ") => "keys with their values",
        other if is_named => other,
        _ => return None,
    };
    Some(words.to_owned())
}

/// Returns a value as written in the file, limited to one line.
pub(super) fn shown(text: &str, key: &Key) -> String {
    if let Some(kind) = key.kind {
        return kind.to_owned();
    }
    let value = text.get(key.value.clone()).unwrap_or_default();
    let line = value.lines().next().unwrap_or_default();
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line.to_owned(),
    }
}
