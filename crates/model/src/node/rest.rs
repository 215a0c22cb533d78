//! The parts of a node's object that are not fields of a [`NodeView`](super::NodeView), stored
//! compactly as JSON text. The heartbeat times are stored separately, so a heartbeat is
//! distinguished from a change without parsing the text.

use serde_json::Value;

/// Field of a condition that every heartbeat changes.
const HEARTBEAT: &str = "lastHeartbeatTime";

/// Remaining parts of a node's object.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rest {
    /// Object without the heartbeat times: compact JSON with sorted keys.
    text: Box<str>,
    /// `lastHeartbeatTime` of each condition, in their order. `None` if a condition has none.
    heartbeats: Box<[Option<Value>]>,
}

// === impl Rest ===

impl Rest {
    /// Moves the heartbeat times out of `object` and stores both.
    pub(super) fn of(object: &mut Value) -> Self {
        let heartbeats = conditions(object)
            .map(|condition| condition.as_object_mut()?.remove(HEARTBEAT))
            .collect();
        Self {
            text: object.to_string().into(),
            heartbeats,
        }
    }

    /// Restores the whole object.
    pub(super) fn object(&self) -> Value {
        // The text was serialised from a value, so it can be parsed.
        let mut object: Value = serde_json::from_str(&self.text).unwrap_or_default();
        for (condition, heartbeat) in conditions(&mut object).zip(&self.heartbeats) {
            if let (Some(condition), Some(heartbeat)) = (condition.as_object_mut(), heartbeat) {
                condition.insert(HEARTBEAT.to_owned(), heartbeat.clone());
            }
        }
        object
    }

    /// Returns whether both differ at most in their heartbeat times.
    pub(super) fn same_but_for_heartbeat(&self, other: &Self) -> bool {
        let has =
            |one: &Self| -> Vec<bool> { one.heartbeats.iter().map(Option::is_some).collect() };
        self.text == other.text && has(self) == has(other)
    }
}

fn conditions(object: &mut Value) -> impl Iterator<Item = &mut Value> {
    let list = object.pointer_mut("/status/conditions");
    list.and_then(Value::as_array_mut).into_iter().flatten()
}
