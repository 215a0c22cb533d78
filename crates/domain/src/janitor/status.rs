//! The status of a resource: its conditions and times, and what of ours stands among them.

use jiff::{Timestamp, Unit};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Longest message of a condition that is written, in characters; the schema takes 32,768.
const MAX_MESSAGE: usize = 1024;
/// The condition that says whether the signal was sent; its message is the request id of the provider.
pub(super) const SIGNAL_SENT: &str = "SignalSent";
/// The condition that is true where somebody else sends the signal.
pub(super) const MANUAL_MODE: &str = "ManualMode";
/// The condition that is true once an attempt has ended; its reason says how.
pub(super) const ATTEMPT_COMPLETE: &str = "AttemptComplete";
/// The condition of our own whose message is the [`Record`].
const RECORD: &str = "gpuwarden.dev/Signal";

/// The status of a resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// The time when it was begun.
    pub start: Option<Timestamp>,
    /// The time when it ended.
    pub completion: Option<Timestamp>,
    /// Conditions, also those of others.
    pub conditions: Vec<Condition>,
}

/// A condition of a status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// `type`.
    #[serde(rename = "type")]
    pub kind: String,
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
    pub observed_generation: Option<i64>,
}

/// What is remembered of a signal, and stands in the status before the signal is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Record {
    /// The boot id of the node before.
    pub(super) boot_id: String,
    /// The uid of the node before.
    pub(super) node_uid: String,
    /// The number of the try, from 1 on; 0: it was begun by somebody else, who may have sent one.
    #[serde(rename = "try")]
    pub(super) attempt: u32,
    /// The process that sends it, and nobody else without asking the provider.
    pub(super) by: String,
    /// The time before which it is not tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) not_before: Option<Timestamp>,
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

/// What a condition says.
pub(super) struct Says<'a> {
    pub(super) kind: &'a str,
    pub(super) status: &'a str,
    pub(super) reason: &'a str,
    pub(super) message: &'a str,
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
    /// Reads the status of an object; what cannot be read of it is left out.
    pub(super) fn read(object: &Value) -> Self {
        let time = |key: &str| object.get(key)?.as_str()?.parse().ok();
        let conditions = object.get("conditions").and_then(Value::as_array);
        Self {
            start: time("startTime"),
            completion: time("completionTime"),
            conditions: conditions
                .into_iter()
                .flatten()
                .filter_map(|one| Condition::deserialize(one).ok())
                .collect(),
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
                fields.insert(key.to_owned(), json!(time));
            }
        }
        fields.insert("conditions".to_owned(), json!(self.conditions));
        Value::Object(fields)
    }

    /// Returns a condition.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions.iter().find(|one| one.kind == kind)
    }

    /// Returns whether the resource has ended.
    pub fn has_ended(&self) -> bool {
        let complete = self.condition(ATTEMPT_COMPLETE);
        self.completion.is_some() || complete.is_some_and(Condition::is_true)
    }

    /// Returns what is remembered of its signal; `None` where nothing is, or it cannot be read.
    pub(super) fn record(&self) -> Option<Record> {
        serde_json::from_str(&self.condition(RECORD)?.message).ok()
    }

    /// Sets a condition.
    pub(super) fn set(&mut self, says: &Says<'_>, generation: i64, now: Timestamp) {
        let message = says.message.chars().take(MAX_MESSAGE).collect();
        let before = self.condition(says.kind);
        let since = before
            .filter(|one| one.status == says.status)
            .and_then(|one| one.last_transition_time);
        let condition = Condition {
            kind: says.kind.to_owned(),
            status: says.status.to_owned(),
            reason: says.reason.to_owned(),
            message,
            last_transition_time: Some(since.unwrap_or_else(|| in_seconds(now))),
            observed_generation: (generation > 0).then_some(generation),
        };
        match self.conditions.iter_mut().find(|one| one.kind == says.kind) {
            Some(there) => *there = condition,
            None => self.conditions.push(condition),
        }
    }

    /// Remembers a signal.
    pub(super) fn remember(&mut self, record: &Record, generation: i64, now: Timestamp) {
        // Its few short texts cannot fail to be written.
        let message = serde_json::to_string(record).unwrap_or_default();
        // True where a signal may be on its way: what has a true condition is not withdrawn any more.
        let on_its_way = !record.by.is_empty() || record.attempt == 0;
        let says = Says {
            kind: RECORD,
            status: if on_its_way { "True" } else { "False" },
            reason: "Recorded",
            message: &message,
        };
        self.set(&says, generation, now);
    }
}

// === impl Condition ===

impl Condition {
    /// Returns whether it is true.
    pub fn is_true(&self) -> bool {
        self.status == "True"
    }
}

/// Returns a time in whole seconds, as Kubernetes has them.
pub(super) fn in_seconds(time: Timestamp) -> Timestamp {
    use jiff::{RoundMode, TimestampRound};
    let round = TimestampRound::new()
        .smallest(Unit::Second)
        .mode(RoundMode::Trunc);
    time.round(round).unwrap_or(time)
}
