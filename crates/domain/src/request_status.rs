//! The status of a request for maintenance: its phase, its conditions, and its Job.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// Longest message of a condition, in characters: the schema takes no more.
const MAX_MESSAGE: usize = 1024;

/// The status of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestStatus {
    /// A word for how far it is; empty where its kind has none.
    pub phase: String,
    /// Since when it is worked on.
    pub start: Option<Timestamp>,
    /// Since when it is at its end.
    pub completion: Option<Timestamp>,
    /// Namespace and name of its Job.
    pub job: Option<(String, String)>,
    /// The conditions, also those of others.
    conditions: Vec<Value>,
}

// === impl RequestStatus ===

impl RequestStatus {
    /// Reads the status of an object; what cannot be read of it is left out.
    pub fn read(object: &Value) -> Self {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let time = |pointer: &str| text(pointer)?.parse().ok();
        let job = text("/jobRef/namespace").zip(text("/jobRef/name"));
        Self {
            phase: text("/phase").unwrap_or_default().to_owned(),
            start: time("/startTime"),
            completion: time("/completionTime"),
            job: job.map(|(namespace, name)| (namespace.to_owned(), name.to_owned())),
            conditions: (object.get("conditions").and_then(Value::as_array))
                .cloned()
                .unwrap_or_default(),
        }
    }

    /// Returns it as a merge patch of the field `status`.
    pub fn patch(&self) -> Value {
        let mut fields = Map::new();
        for (key, at) in [
            ("startTime", self.start),
            ("completionTime", self.completion),
        ] {
            if let Some(at) = at {
                fields.insert(key.to_owned(), json!(in_seconds(at)));
            }
        }
        if let Some((namespace, name)) = &self.job {
            let job = json!({"apiVersion": "batch/v1", "kind": "Job", "namespace": namespace, "name": name});
            fields.insert("jobRef".to_owned(), job);
        }
        if !self.phase.is_empty() {
            fields.insert("phase".to_owned(), json!(self.phase));
        }
        fields.insert("conditions".to_owned(), json!(self.conditions));
        Value::Object(fields)
    }

    fn condition(&self, kind: &str) -> Option<&Value> {
        self.conditions.iter().find(|one| one["type"] == kind)
    }

    /// Returns whether a condition is true.
    pub(crate) fn is_true(&self, kind: &str) -> bool {
        self.condition(kind)
            .is_some_and(|one| one["status"] == "True")
    }

    /// Returns since when a condition has its status.
    pub(crate) fn since(&self, kind: &str) -> Option<Timestamp> {
        self.condition(kind)?["lastTransitionTime"]
            .as_str()?
            .parse()
            .ok()
    }

    /// Returns the first of some conditions that is false, by its type.
    pub(crate) fn first_false(&self, kinds: &[&'static str]) -> Option<&'static str> {
        let is_false = |kind: &str| {
            self.condition(kind)
                .is_some_and(|one| one["status"] == "False")
        };
        kinds.iter().copied().find(|kind| is_false(kind))
    }

    /// Returns reason and message of a condition.
    pub(crate) fn words(&self, kind: &str) -> Option<(String, String)> {
        let condition = self.condition(kind)?;
        let text = |key: &str| condition[key].as_str().unwrap_or_default().to_owned();
        Some((text("reason"), text("message")))
    }

    /// Sets a condition.
    pub(crate) fn set(
        &mut self,
        kind: &str,
        status: &str,
        reason: &str,
        message: &str,
        now: Timestamp,
    ) {
        let message: String = message.chars().take(MAX_MESSAGE).collect();
        let before = self.condition(kind).filter(|one| one["status"] == status);
        let since = before.map(|one| one["lastTransitionTime"].clone());
        let condition = json!({
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since.unwrap_or_else(|| json!(in_seconds(now))),
        });
        match self.conditions.iter_mut().find(|one| one["type"] == kind) {
            Some(there) => *there = condition,
            None => self.conditions.push(condition),
        }
    }
}

/// Returns a time in whole seconds, as Kubernetes has them.
fn in_seconds(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}
