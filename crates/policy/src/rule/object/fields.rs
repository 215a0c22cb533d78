//! The fields of an object that expressions read, and an object reduced to them: a monitor of
//! many objects keeps nothing else.

use std::collections::BTreeMap;

use serde_json::Value;

/// Fields that are read, as a tree of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    /// True if the value is read as a whole.
    whole: bool,
    /// Fields of each element of a list, or of each value of a map.
    each: Option<Box<Fields>>,
    /// Fields by name.
    named: BTreeMap<String, Fields>,
}

/// Step of a path into a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Field of this name.
    Field(String),
    /// Each element of a list, or each value of a map.
    Each,
}

// === impl Fields ===

impl Fields {
    /// Returns whether the value is read as a whole.
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// Returns whether nothing but this field is read.
    pub fn is_only(&self, name: &str) -> bool {
        !self.whole && self.each.is_none() && self.named.keys().all(|key| key == name)
    }

    /// Returns whether the field of this name is read.
    pub fn reads(&self, name: &str) -> bool {
        self.whole || self.each.is_some() || self.named.contains_key(name)
    }

    /// Returns the names of the fields that are read, if they are read by name only.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.named.keys().map(String::as_str)
    }

    /// Adds the field at `path`. If `whole`, its value is read; otherwise only its presence, or the
    /// number of its elements.
    pub(super) fn add(&mut self, path: &[Step], whole: bool) {
        match path.split_first() {
            None => self.whole |= whole,
            Some((Step::Each, rest)) => self.each.get_or_insert_default().add(rest, whole),
            Some((Step::Field(name), rest)) => {
                self.named.entry(name.clone()).or_default().add(rest, whole);
            }
        }
    }

    /// Adds the fields of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.whole |= other.whole;
        if let Some(each) = &other.each {
            self.each.get_or_insert_default().merge(each);
        }
        for (name, fields) in &other.named {
            self.named.entry(name.clone()).or_default().merge(fields);
        }
    }

    /// Returns `value` without the fields that are not read.
    pub fn keep(&self, value: &Value) -> Value {
        match value {
            _ if self.whole => value.clone(),
            Value::Object(map) => {
                let kept = map.iter().filter_map(|(name, value)| {
                    let fields = match (self.named.get(name), &self.each) {
                        (None, None) => return None,
                        (Some(one), None) => return Some((name.clone(), one.keep(value))),
                        (None, Some(each)) => each.keep(value),
                        (Some(one), Some(each)) => {
                            let mut both = one.clone();
                            both.merge(each);
                            both.keep(value)
                        }
                    };
                    Some((name.clone(), fields))
                });
                Value::Object(kept.collect())
            }
            Value::Array(list) => match &self.each {
                Some(each) => list.iter().map(|value| each.keep(value)).collect(),
                // A list where the expression has a map: as it is, for the same error.
                None if !self.named.is_empty() => value.clone(),
                None => Value::Array(Vec::new()),
            },
            _ => value.clone(),
        }
    }
}
