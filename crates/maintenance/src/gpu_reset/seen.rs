//! The reset itself, as it is seen: by its Job, or by the answers of a provider.

use jiff::Timestamp;
use serde_json::Value;

use crate::Outcome;

/// The reset itself, as it is seen: the Job, or what a provider has answered to its signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResetSeen {
    /// Nobody has looked yet, or cannot.
    Unknown,
    /// There is no Job, and no signal is on its way.
    Absent,
    /// The API server or the provider refuses it, for this reason. How that ends the request.
    Refused(Outcome, String),
    /// A signal may have been taken, and nobody knows yet.
    Unclear,
    /// The Job is there and is this request's, or the provider has taken the signal.
    Ours(ResetState),
    /// Another's has the name of the Job.
    Anothers,
}

/// The state of a reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResetState {
    /// It is not at its end. Since when it is under way.
    Active(Option<Timestamp>),
    /// It has succeeded.
    Succeeded,
    /// It has failed, with what is known of why.
    Failed(String),
    /// It is being deleted.
    Deleting,
}

// === impl ResetSeen ===

impl ResetSeen {
    /// Reads a Job for the request of a uid. `why`: what its pods said at their end.
    pub fn read(object: &Value, uid: &str, why: Option<&str>) -> Self {
        let owners = object.pointer("/metadata/ownerReferences");
        let owners = owners.and_then(Value::as_array).into_iter().flatten();
        if !owners.into_iter().any(|owner| owner["uid"] == uid) {
            return Self::Anothers;
        }
        Self::Ours(ResetState::read(object, why))
    }
}

// === impl ResetState ===

impl ResetState {
    /// Reads a Job. `why`: what its pods said at their end.
    pub fn read(object: &Value, why: Option<&str>) -> Self {
        let conditions = object.pointer("/status/conditions");
        let conditions = conditions.and_then(Value::as_array).into_iter().flatten();
        let conditions: Vec<&Value> = conditions.collect();
        let is = |kind: &str| {
            let found = conditions.iter().find(|one| one["type"] == kind);
            found.filter(|one| one["status"] == "True")
        };
        if is("Complete").is_some() {
            return Self::Succeeded;
        }
        if let Some(failed) = is("Failed") {
            let words = [failed["reason"].as_str(), failed["message"].as_str(), why];
            let words: Vec<&str> = words
                .into_iter()
                .flatten()
                .filter(|it| !it.is_empty())
                .collect();
            return Self::Failed(words.join(": "));
        }
        if object.pointer("/metadata/deletionTimestamp").is_some() {
            return Self::Deleting;
        }
        let since = object.pointer("/metadata/creationTimestamp");
        let since = since
            .and_then(Value::as_str)
            .and_then(|time| time.parse().ok());
        Self::Active(since)
    }
}
