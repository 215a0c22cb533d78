//! The status of a resource: its conditions and times, its phase and its Job, read and written.

use jiff::Timestamp;
use model::resource::ATTEMPT_COMPLETE;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Longest message of a condition that is written, in characters.
const MAX_MESSAGE: usize = 1024;

/// The status of a resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// A word for how far it is; empty where its kind has none.
    pub phase: String,
    /// The time when it was begun.
    pub start: Option<Timestamp>,
    /// The time when it ended.
    pub completion: Option<Timestamp>,
    /// Namespace and name of its Job.
    pub job: Option<(String, String)>,
    /// Conditions, also those of others.
    conditions: Vec<Condition>,
    /// The generation of the resource that conditions name; `None`: they name none.
    generation: Option<i64>,
}

/// A condition of a status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// `type`.
    #[serde(rename = "type")]
    kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// A word for programs.
    #[serde(default)]
    pub reason: String,
    /// For people.
    #[serde(default)]
    pub message: String,
    /// The time when `status` became what it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Timestamp>,
    /// The generation of the resource that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    observed_generation: Option<i64>,
}

/// The ends of a resource, as the reason of `AttemptComplete` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is done.
    Succeeded,
    /// Nothing was done, and another attempt may succeed.
    TransientFailure,
    /// Nothing was done, and another attempt will not succeed either.
    PermanentFailure,
    /// Nobody knows whether it was done. Our own word: whoever does not know it asks a person.
    AmbiguousFailure,
    /// Another resource asks for the same.
    Superseded,
    /// There is nothing any more to do it to, or for: its node is gone, or the session for which it was made.
    Cancelled,
}

// === impl Outcome ===

impl Outcome {
    /// Returns its word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Succeeded => "Succeeded",
            Self::TransientFailure => "TransientFailure",
            Self::PermanentFailure => "PermanentFailure",
            Self::AmbiguousFailure => "AmbiguousFailure",
            Self::Superseded => "Superseded",
            Self::Cancelled => "Cancelled",
        }
    }
}

// === impl Status ===

impl Status {
    /// Reads the status of an object; what cannot be read of it is left out. `generation`: what conditions
    /// that are set are to name.
    pub(super) fn read(object: &Value, generation: Option<i64>) -> Self {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let time = |pointer: &str| text(pointer)?.parse().ok();
        let job = text("/jobRef/namespace").zip(text("/jobRef/name"));
        let conditions = object.get("conditions").and_then(Value::as_array);
        Self {
            phase: text("/phase").unwrap_or_default().to_owned(),
            start: time("/startTime"),
            completion: time("/completionTime"),
            job: job.map(|(namespace, name)| (namespace.to_owned(), name.to_owned())),
            conditions: (conditions.into_iter().flatten())
                .filter_map(|one| Condition::deserialize(one).ok())
                .collect(),
            generation,
        }
    }

    /// Returns it as a merge patch of the field `status`.
    pub fn patch(&self) -> Value {
        let mut fields = Map::new();
        let times = [
            ("startTime", self.start),
            ("completionTime", self.completion),
        ];
        for (key, time) in times {
            if let Some(time) = time {
                fields.insert(key.to_owned(), json!(in_seconds(time)));
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

    /// Returns a condition.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions.iter().find(|one| one.kind == kind)
    }

    /// Returns whether a condition is true.
    pub(crate) fn is_true(&self, kind: &str) -> bool {
        self.condition(kind).is_some_and(|one| one.status == "True")
    }

    /// Returns whether a condition is false.
    pub(crate) fn is_false(&self, kind: &str) -> bool {
        self.condition(kind)
            .is_some_and(|one| one.status == "False")
    }

    /// Returns since when a condition has its status.
    pub(crate) fn since(&self, kind: &str) -> Option<Timestamp> {
        self.condition(kind)?.last_transition_time
    }

    /// Returns whether the resource has ended.
    pub fn has_ended(&self) -> bool {
        self.completion.is_some() || self.is_true(ATTEMPT_COMPLETE)
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
        let before = self.condition(kind).filter(|one| one.status == status);
        let since = before.and_then(|one| one.last_transition_time);
        let condition = Condition {
            kind: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: message.chars().take(MAX_MESSAGE).collect(),
            last_transition_time: Some(since.unwrap_or_else(|| in_seconds(now))),
            observed_generation: self.generation,
        };
        match self.conditions.iter_mut().find(|one| one.kind == kind) {
            Some(there) => *there = condition,
            None => self.conditions.push(condition),
        }
    }
}

/// Returns a time in whole seconds, as Kubernetes has them.
fn in_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
