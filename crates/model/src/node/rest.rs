//! The rest of a node's object beside the fields of a [`NodeView`](super::NodeView), kept small:
//! as JSON text, and apart from it what each heartbeat of the kubelet changes. So a heartbeat is
//! told from a change without reading the text.

use serde_json::Value;

/// The field of a condition that each heartbeat changes.
const HEARTBEAT: &str = "lastHeartbeatTime";

/// The rest of a node's object.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rest {
    /// The object without the below: JSON, its keys in order, without blanks.
    text: Box<str>,
    /// `lastHeartbeatTime` of each condition, in their order; `None` where it has none.
    heartbeats: Box<[Option<Value>]>,
}

// === impl Rest ===

impl Rest {
    /// Takes out of `object` what is kept apart, and keeps all.
    pub(super) fn of(object: &mut Value) -> Self {
        let heartbeats = conditions(object)
            .map(|condition| condition.as_object_mut()?.remove(HEARTBEAT))
            .collect();
        Self {
            text: object.to_string().into(),
            heartbeats,
        }
    }

    /// Returns what was kept, as it was.
    pub(super) fn object(&self) -> Value {
        // It was written from a value, and so it can be read.
        let mut object: Value = serde_json::from_str(&self.text).unwrap_or_default();
        for (condition, heartbeat) in conditions(&mut object).zip(&self.heartbeats) {
            if let (Some(condition), Some(heartbeat)) = (condition.as_object_mut(), heartbeat) {
                condition.insert(HEARTBEAT.to_owned(), heartbeat.clone());
            }
        }
        object
    }

    /// Returns whether they differ at most in when each condition was last written.
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
