//! The status of a resource: conditions, times, phase and Job, and their serialisation.

use jiff::Timestamp;
use model::resource::ATTEMPT_COMPLETE;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Longest message of a condition, in characters.
const MAX_MESSAGE: usize = 1024;

/// Status of a resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Progress in one word. Empty for kinds without a phase.
    pub phase: String,
    /// Start of the work.
    pub start: Option<Timestamp>,
    /// End of the work.
    pub completion: Option<Timestamp>,
    /// Namespace and name of the Job.
    pub job: Option<(String, String)>,
    /// All conditions, including those of other programs.
    conditions: Vec<StatusCondition>,
    /// `observedGeneration` for conditions that are set. `None` to set none.
    generation: Option<i64>,
}

/// A condition of a status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusCondition {
    /// `type` of the condition.
    #[serde(rename = "type")]
    kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Reason of the status, for programs.
    #[serde(default)]
    pub reason: String,
    /// Message about the status, for people.
    #[serde(default)]
    pub message: String,
    /// Time of the last change of `status`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Timestamp>,
    /// Generation of the resource that the condition refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    observed_generation: Option<i64>,
}

// === impl Status ===

impl Status {
    /// Reads the status of an object, without malformed parts. `generation` is what conditions
    /// set from now on refer to.
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
                .filter_map(|one| StatusCondition::deserialize(one).ok())
                .collect(),
            generation,
        }
    }

    /// Returns the status as a merge patch for the field `status`.
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

    /// Returns the condition of this type.
    pub fn condition(&self, kind: &str) -> Option<&StatusCondition> {
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

    /// Returns the time of a condition's last change of status.
    pub(crate) fn since(&self, kind: &str) -> Option<Timestamp> {
        self.condition(kind)?.last_transition_time
    }

    /// Returns whether the resource has ended.
    pub fn has_ended(&self) -> bool {
        self.completion.is_some() || self.is_true(ATTEMPT_COMPLETE)
    }

    /// Sets a condition. Keeps the transition time if its status does not change.
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
        let condition = StatusCondition {
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

/// Returns a time truncated to whole seconds, the precision of Kubernetes.
fn in_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
