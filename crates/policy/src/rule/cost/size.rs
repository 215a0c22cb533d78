//! Largest sizes of values in rules: those of events by their limits, and those of nodes.

use std::rc::Rc;

use cel::common::ast::LiteralValue;
use model::event::{
    MAX_ITEMS, MAX_MESSAGE_BYTES, MAX_METADATA, MAX_METADATA_BYTES, MAX_NAME_BYTES, MAX_VALUE_BYTES,
};
use serde_json::Value;

use crate::RuleKind;

/// Bytes copied or compared in one step. Also the overhead of a value in addition to its text.
pub(super) const BYTES_A_STEP: u64 = 64;
/// Room for the entries that connectors add to the metadata of an event.
const MARKS: usize = 16;
/// Most entries of a list or map of a node for rules with loops: labels, conditions, taints.
/// The API server sets no limit; real nodes have a tenth of this.
pub const MAX_NODE_ITEMS: usize = 1024;
/// Most text of a node for rules with loops, in bytes: what etcd accepts for one object.
pub const MAX_NODE_BYTES: usize = 1536 * 1024;
/// Largest label key, label value, and total of annotations in Kubernetes, in bytes.
const LABEL_KEY_BYTES: usize = 317;
const LABEL_VALUE_BYTES: usize = 63;
const ANNOTATIONS_BYTES: usize = 256 * 1024;

/// Largest size of a value.
#[derive(Clone)]
pub(super) struct Size {
    /// Number of entries of a list or map.
    pub(super) items: u64,
    /// Size in bytes: [`BYTES_A_STEP`] for each contained value, plus its text.
    pub(super) bytes: u64,
    /// Size of a key, if a loop over the value is known to iterate over keys.
    pub(super) key: Option<Rc<Size>>,
    /// Size of an element. If unknown, an element can be as large as the whole.
    pub(super) each: Option<Rc<Size>>,
}

/// Returns why a rule with a loop cannot be evaluated on a node: the node is larger than
/// assumed when rules are loaded.
pub(in crate::rule) fn too_large(node: &Value) -> Option<String> {
    let mut bytes = 0;
    let items = measure(node, &mut bytes);
    if items > MAX_NODE_ITEMS {
        return Some(format!(
            "the node has a list or map of {items} entries, a rule with a loop takes at most \
             {MAX_NODE_ITEMS}"
        ));
    }
    (bytes > MAX_NODE_BYTES).then(|| {
        format!("the node has {bytes} bytes, a rule with a loop takes at most {MAX_NODE_BYTES}")
    })
}

/// Returns the largest number of entries of any list or map in a value. Adds the value's text
/// to `bytes`.
fn measure(value: &Value, bytes: &mut usize) -> usize {
    match value {
        Value::String(text) => {
            *bytes += text.len();
            0
        }
        Value::Array(items) => {
            let below = items.iter().map(|item| measure(item, bytes)).max();
            below.unwrap_or(0).max(items.len())
        }
        Value::Object(fields) => {
            *bytes += fields.keys().map(String::len).sum::<usize>();
            let below = fields.values().map(|item| measure(item, bytes)).max();
            below.unwrap_or(0).max(fields.len())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

// === impl Size ===

impl Size {
    /// Returns the size of a text of `bytes`, or of a value without text.
    pub(super) fn text(bytes: usize) -> Self {
        Self::of(0, BYTES_A_STEP.saturating_add(count(bytes)))
    }

    /// Returns a size without known keys and elements.
    pub(super) fn of(items: u64, bytes: u64) -> Self {
        Self {
            items,
            bytes,
            key: None,
            each: None,
        }
    }

    pub(super) fn list(items: u64, each: Self) -> Self {
        Self {
            items,
            bytes: items
                .saturating_mul(each.bytes)
                .saturating_add(BYTES_A_STEP),
            key: None,
            each: Some(Rc::new(each)),
        }
    }

    pub(super) fn map(items: u64, key: Self, each: Self) -> Self {
        let entry = key.bytes.saturating_add(each.bytes);
        Self {
            items,
            bytes: items.saturating_mul(entry).saturating_add(BYTES_A_STEP),
            key: Some(Rc::new(key)),
            each: Some(Rc::new(each)),
        }
    }

    /// Returns the size of the value at an index or field.
    pub(super) fn part(&self) -> Self {
        self.each.as_deref().unwrap_or(self).clone()
    }

    /// Returns the steps to copy, compare or search the value.
    pub(super) fn steps(&self) -> u64 {
        self.bytes / BYTES_A_STEP
    }

    /// Returns a size that covers either value.
    pub(super) fn or(&self, other: &Self) -> Self {
        Self {
            items: self.items.max(other.items),
            bytes: self.bytes.max(other.bytes),
            key: both(self.key.as_deref(), other.key.as_deref()),
            each: both(self.each.as_deref(), other.each.as_deref()),
        }
    }

    /// Returns the size of both values concatenated.
    pub(super) fn and(&self, other: &Self) -> Self {
        Self {
            items: self.items.saturating_add(other.items),
            bytes: self.bytes.saturating_add(other.bytes),
            ..self.or(other)
        }
    }

    /// Returns the size of a literal value.
    pub(super) fn of_literal(literal: &LiteralValue) -> Self {
        match literal {
            LiteralValue::String(text) => Self::text(text.inner().len()),
            LiteralValue::Bytes(bytes) => Self::text(bytes.inner().len()),
            LiteralValue::Boolean(_)
            | LiteralValue::Double(_)
            | LiteralValue::Int(_)
            | LiteralValue::UInt(_)
            | LiteralValue::Null => Self::text(0),
        }
    }

    /// Returns the size of the whole variable.
    pub(super) fn of_variable(kind: RuleKind) -> Self {
        if kind == RuleKind::Node {
            return Self::of_node();
        }
        let fields = kind.fields().iter();
        let sizes = fields.filter_map(|field| Self::of_path(kind, &[field]));
        Self::of(
            count(MAX_ITEMS),
            sum(sizes.map(|size| size.bytes)).saturating_add(BYTES_A_STEP),
        )
    }

    /// Returns the size of an arbitrary part of a node.
    fn of_node() -> Self {
        let values = count(MAX_NODE_ITEMS).saturating_mul(BYTES_A_STEP);
        Self::of(
            count(MAX_NODE_ITEMS),
            values.saturating_add(count(MAX_NODE_BYTES)),
        )
    }

    /// Returns the size of a field of the variable, if it has its own limits.
    pub(super) fn of_path(kind: RuleKind, path: &[&str]) -> Option<Self> {
        let items = count(MAX_ITEMS);
        let labels = count(MAX_NODE_ITEMS);
        match (kind, path) {
            (RuleKind::Node, ["metadata", "labels"]) => Some(Self::map(
                labels,
                Self::text(LABEL_KEY_BYTES),
                Self::text(LABEL_VALUE_BYTES),
            )),
            (RuleKind::Node, ["metadata", "annotations"]) => {
                let key = Self::text(LABEL_KEY_BYTES);
                let mut map = Self::map(labels, key, Self::text(ANNOTATIONS_BYTES));
                map.bytes = labels * 2 * BYTES_A_STEP + count(ANNOTATIONS_BYTES);
                Some(map)
            }
            (RuleKind::Node, ["metadata", "name"]) => Some(Self::text(MAX_NAME_BYTES)),
            (RuleKind::Node, _) => None,
            (_, ["errorCode"]) => Some(Self::list(items, Self::text(MAX_NAME_BYTES))),
            (_, ["entitiesImpacted"]) => {
                let mut entity = Self::map(2, Self::text(16), Self::text(MAX_VALUE_BYTES));
                entity.bytes = 5 * BYTES_A_STEP + count(2 * 16 + MAX_NAME_BYTES + MAX_VALUE_BYTES);
                Some(Self::list(items, entity))
            }
            (_, ["metadata"]) => Some(Self::map(
                count(MAX_METADATA + MARKS),
                Self::text(MAX_METADATA_BYTES),
                Self::text(MAX_METADATA_BYTES),
            )),
            (_, ["message"]) => Some(Self::text(MAX_MESSAGE_BYTES)),
            (_, ["customRecommendedAction" | "recommendedAction"]) => {
                Some(Self::text(MAX_VALUE_BYTES))
            }
            // Names, numbers, and maps with two of them.
            (_, [_]) => Some(Self::of(2, 4 * BYTES_A_STEP + count(MAX_NAME_BYTES))),
            _ => None,
        }
    }
}

/// Returns a size that covers either. `None` if one is unknown.
fn both(one: Option<&Size>, other: Option<&Size>) -> Option<Rc<Size>> {
    one.zip(other).map(|(one, other)| Rc::new(one.or(other)))
}

pub(super) fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

pub(super) fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}
