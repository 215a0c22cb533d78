//! Places of the keys in a configuration file, by the path that findings name:
//! `rule-sets[0].match`.

use std::ops::Range;

use serde_saphyr::granit_parser::{Event, Marker, Parser, Span};
use toml::de::{DeTable, DeValue};

use super::Format;

const LIST: &str = "a list";
const TABLE: &str = "a table";

/// Longest path of a list or a table whose values have places (bytes): a file of brackets alone
/// would have paths of its own length.
const MAX_PATH_BYTES: usize = 256;

/// A value in a file.
#[derive(Clone, Debug, Default)]
pub struct Key {
    /// Path with the indexes of arrays: `rule-sets[0].match`.
    pub path: String,
    /// Keys of the enclosing tables, without indexes: `rule-sets`.
    pub within: String,
    /// Name of the key. An element of an array has that of the array.
    pub name: String,
    /// Byte offset of the key; `None` for an element of an array.
    pub at: Option<usize>,
    /// Byte range of the value. That of a TOML table is its header.
    pub value: Range<usize>,
    /// Word for a list or a table; `None` for any other value.
    pub kind: Option<&'static str>,
}

/// List or table of a YAML file that is being read.
struct Open {
    /// Key of the list or table; without a name for the whole file.
    key: Key,
    /// Index of that key in the result; `None` for the whole file.
    index: Option<usize>,
    /// Number of the elements of a list so far.
    elements: usize,
    /// Name of the key whose value comes next, and the key's byte offset.
    next: Option<(String, usize)>,
}

/// Returns the keys of a file. The part behind a syntax error has none.
pub(super) fn keys(text: &str, format: Format) -> Vec<Key> {
    let mut keys = Vec::new();
    match format {
        Format::Toml => {
            if let Ok(root) = DeTable::parse(text) {
                of_table(&Key::default(), root.get_ref(), &mut keys);
            }
        }
        // JSON is YAML.
        Format::Yaml | Format::Json => yaml_keys(text, &mut keys),
    }
    keys
}

/// Returns the path of a key below another path.
pub(super) fn joined(above: &str, key: &str) -> String {
    match (above, key) {
        ("", one) | (one, "") => one.to_owned(),
        _ => format!("{above}.{key}"),
    }
}

fn of_table(above: &Key, table: &DeTable<'_>, keys: &mut Vec<Key>) {
    for (name, value) in table {
        let key = above.below(name.get_ref(), Some(name.span().start), value.span());
        of_value(key, value.get_ref(), keys);
    }
}

fn of_value(mut key: Key, value: &DeValue<'_>, keys: &mut Vec<Key>) {
    key.kind = match value {
        DeValue::Table(_) => Some(TABLE),
        DeValue::Array(_) => Some(LIST),
        _ => None,
    };
    keys.push(key.clone());
    if key.path.len() > MAX_PATH_BYTES {
        return;
    }
    match value {
        DeValue::Table(table) => of_table(&key, table, keys),
        DeValue::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                of_value(key.element(index, value.span()), value.get_ref(), keys);
            }
        }
        _ => {}
    }
}

fn yaml_keys(text: &str, keys: &mut Vec<Key>) {
    let place = |span: &Span| {
        let offset = |marker: Marker| marker.byte_offset().unwrap_or_default();
        offset(span.start)..offset(span.end)
    };
    let mut open: Vec<Open> = Vec::new();
    for event in Parser::new_from_str(text) {
        let Ok((event, span)) = event else {
            return;
        };
        let value = place(&span);
        let kind = match &event {
            Event::MappingStart(..) => Some(TABLE),
            Event::SequenceStart(..) => Some(LIST),
            Event::Scalar(name, ..) => {
                if let Some(table) = open.last_mut()
                    && table.key.kind == Some(TABLE)
                    && table.next.is_none()
                {
                    table.next = Some((name.clone().into_owned(), value.start));
                    continue;
                }
                None
            }
            Event::Alias(_) => None,
            Event::MappingEnd | Event::SequenceEnd => {
                let index = open.pop().and_then(|ended| ended.index);
                if let Some(key) = index.and_then(|index| keys.get_mut(index)) {
                    key.value.end = value.end;
                }
                continue;
            }
            _ => continue,
        };
        let key = open.last_mut().map(|within| within.key(value));
        let key = key.map(|key| Key { kind, ..key });
        if kind.is_some() {
            if key
                .as_ref()
                .is_some_and(|key| key.path.len() > MAX_PATH_BYTES)
            {
                return;
            }
            let whole = Key {
                kind,
                ..Key::default()
            };
            open.push(Open {
                index: key.as_ref().map(|_| keys.len()),
                key: key.clone().unwrap_or(whole),
                elements: 0,
                next: None,
            });
        }
        keys.extend(key);
    }
}

// === impl Key ===

impl Key {
    fn below(&self, name: &str, at: Option<usize>, value: Range<usize>) -> Self {
        Self {
            path: joined(&self.path, name),
            within: joined(&self.within, &self.name),
            name: name.to_owned(),
            at,
            value,
            kind: None,
        }
    }

    fn element(&self, index: usize, value: Range<usize>) -> Self {
        Self {
            path: format!("{}[{index}]", self.path),
            at: None,
            value,
            kind: None,
            ..self.clone()
        }
    }
}

// === impl Open ===

impl Open {
    /// Returns the key of the next value.
    fn key(&mut self, value: Range<usize>) -> Key {
        if self.key.kind == Some(LIST) {
            self.elements += 1;
            return self.key.element(self.elements - 1, value);
        }
        // A list or a table as a key has no name.
        let (name, at) = self.next.take().unzip();
        self.key.below(&name.unwrap_or_default(), at, value)
    }
}
