//! Access to the fields of Kubernetes objects as JSON.

use serde_json::Value;

/// Most characters of a name in a text for people. Names in Kubernetes have up to 63 or 253.
const MAX_SHOWN: usize = 100;

/// Shortens a name for a text for people: the creator of a pod chooses the names in it, and
/// their length.
pub(crate) fn shortened(name: &str) -> String {
    match name.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", name.get(..end).unwrap_or_default()),
        None => name.to_owned(),
    }
}

/// Returns the elements of the list at `pointer`; empty if there is no list.
pub(crate) fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    let found = object.pointer(pointer).and_then(Value::as_array);
    found.map_or(&[], Vec::as_slice)
}

/// Returns the text at `pointer`, unless it is empty or not a text.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> Option<&'a str> {
    let found = object.pointer(pointer).and_then(Value::as_str);
    found.filter(|text| !text.is_empty())
}

/// Returns the value of a label (`/metadata/labels`) or annotation (`/metadata/annotations`),
/// unless it is empty.
pub(crate) fn mark<'a>(object: &'a Value, place: &str, key: &str) -> Option<&'a str> {
    let marks = object.pointer(place)?;
    marks.get(key)?.as_str().filter(|text| !text.is_empty())
}

/// Returns the `name` of a container, a volume or another object.
pub(crate) fn name(object: &Value) -> &str {
    object
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default()
}
