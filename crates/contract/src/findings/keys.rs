//! Places of the keys in a configuration file, by the path that findings name:
//! `rule-sets[0].match`.

use std::cell::OnceCell;
use std::ops::Range;

use serde_saphyr::granit_parser::{Event, Marker, Parser, Span};
use toml::de::{DeTable, DeValue};

use super::Format;

const LIST: &str = "a list";
const TABLE: &str = "a table";

/// Longest path of a list or a table whose values have places (bytes): a file of brackets alone
/// would have paths of its own length.
const MAX_PATH_BYTES: usize = 256;
/// Most elements of a file's arrays, other than tables, that have places: a [`Key`] takes a
/// hundred times the memory of an element such as `1`. Findings about further elements have the
/// line of their array.
const MAX_ELEMENTS: usize = 10_000;

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

/// Keys of a file, in its order.
#[derive(Clone, Debug, Default)]
pub(super) struct Keys {
    all: Vec<Key>,
    /// Indexes of the keys, sorted by path.
    by_path: OnceCell<Vec<usize>>,
    /// Number of array elements so far that are not tables.
    elements: usize,
}

/// List or table of a YAML file that is being read.
struct Open {
    /// Key of the list or table; without a name for the whole file.
    key: Key,
    /// Index of that key in the result; `None` for the whole file.
    index: Option<usize>,
    /// Number of the elements of a list so far.
    elements: usize,
    /// Name and byte offset of the table's key whose value comes next; `None` before a key. A
    /// list, a table or an alias as a key has no name.
    next: Option<(Option<String>, usize)>,
}

/// Returns the path of a key below another path.
pub(super) fn joined(above: &str, key: &str) -> String {
    match (above, key) {
        ("", one) | (one, "") => one.to_owned(),
        _ => format!("{above}.{key}"),
    }
}

/// Returns true if the value of a key is a list.
pub(super) fn is_list(key: &Key) -> bool {
    key.kind == Some(LIST)
}

// === impl Keys ===

impl Keys {
    /// Reads the keys of a file. The part behind a syntax error has none.
    pub(super) fn read(text: &str, format: Format) -> Self {
        let mut keys = Self::default();
        match format {
            Format::Toml => {
                if let Ok(root) = DeTable::parse(text) {
                    keys.of_table(&Key::default(), root.get_ref());
                }
            }
            // JSON is YAML.
            Format::Yaml | Format::Json => keys.of_yaml(text),
        }
        keys
    }

    /// Returns all keys, in the order of the file.
    pub(super) fn all(&self) -> &[Key] {
        &self.all
    }

    /// Returns the key at `path`; the first one if the file repeats it.
    pub(super) fn get(&self, path: &str) -> Option<&Key> {
        let path_at = |index: &usize| self.all.get(*index).map(|key| &*key.path);
        let by_path = self.by_path.get_or_init(|| {
            let mut indexes: Vec<usize> = (0..self.all.len()).collect();
            indexes.sort_by(|a, b| path_at(a).cmp(&path_at(b)));
            indexes
        });
        let first = by_path.partition_point(|index| path_at(index) < Some(path));
        let key = by_path.get(first).and_then(|index| self.all.get(*index));
        key.filter(|key| key.path == path)
    }

    /// Adds a key. Returns true if the keys inside its value are added as well.
    fn push(&mut self, key: &Key) -> bool {
        if key.at.is_none() && key.kind != Some(TABLE) {
            self.elements += 1;
            if self.elements > MAX_ELEMENTS {
                return false;
            }
        }
        self.all.push(key.clone());
        key.path.len() <= MAX_PATH_BYTES
    }

    fn of_table(&mut self, above: &Key, table: &DeTable<'_>) {
        for (name, value) in table {
            let key = above.below(name.get_ref(), Some(name.span().start), value.span());
            self.of_value(key, value.get_ref());
        }
    }

    fn of_value(&mut self, mut key: Key, value: &DeValue<'_>) {
        key.kind = match value {
            DeValue::Table(_) => Some(TABLE),
            DeValue::Array(_) => Some(LIST),
            _ => None,
        };
        if !self.push(&key) {
            return;
        }
        match value {
            DeValue::Table(table) => self.of_table(&key, table),
            DeValue::Array(values) => {
                for (index, value) in values.iter().enumerate() {
                    self.of_value(key.element(index, value.span()), value.get_ref());
                }
            }
            _ => {}
        }
    }

    fn of_yaml(&mut self, text: &str) {
        let place = |span: &Span| {
            let offset = |marker: Marker| marker.byte_offset().unwrap_or_default();
            offset(span.start)..offset(span.end)
        };
        let mut open: Vec<Open> = Vec::new();
        // Depth in a list or a table whose keys are not added.
        let mut skipped = 0_usize;
        for event in Parser::new_from_str(text) {
            let Ok((event, span)) = event else {
                return;
            };
            let value = place(&span);
            let kind = match &event {
                Event::MappingStart(..) => Some(TABLE),
                Event::SequenceStart(..) => Some(LIST),
                Event::Scalar(..) | Event::Alias(_) => None,
                Event::MappingEnd | Event::SequenceEnd if skipped > 0 => {
                    skipped -= 1;
                    continue;
                }
                Event::MappingEnd | Event::SequenceEnd => {
                    let index = open.pop().and_then(|ended| ended.index);
                    if let Some(key) = index.and_then(|index| self.all.get_mut(index)) {
                        key.value.end = value.end;
                    }
                    continue;
                }
                _ => continue,
            };
            let depth = usize::from(kind.is_some());
            if skipped > 0 {
                skipped += depth;
                continue;
            }
            let index = (!open.is_empty()).then_some(self.all.len());
            let key = match open.last_mut() {
                Some(within) => within.key(&event, value),
                None => Some(Key::default()),
            };
            let key = key.map(|key| Key { kind, ..key });
            match key.filter(|key| index.is_none() || self.push(key)) {
                Some(key) if kind.is_some() => open.push(Open {
                    key,
                    index,
                    elements: 0,
                    next: None,
                }),
                Some(_) => {}
                None => skipped = depth,
            }
        }
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
    /// Returns the key of a value; `None` for a table's key, and for a value whose key has no
    /// name.
    fn key(&mut self, event: &Event<'_>, value: Range<usize>) -> Option<Key> {
        if self.key.kind == Some(LIST) {
            self.elements += 1;
            return Some(self.key.element(self.elements - 1, value));
        }
        let Some((name, at)) = self.next.take() else {
            let name = match event {
                Event::Scalar(name, ..) => Some(name.clone().into_owned()),
                _ => None,
            };
            self.next = Some((name, value.start));
            return None;
        };
        Some(self.key.below(&name?, Some(at), value))
    }
}
