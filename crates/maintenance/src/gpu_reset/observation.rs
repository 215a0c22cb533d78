//! Observed state of a reset, from its Job or from the responses of a provider.

use jiff::Timestamp;
use model::resource::CompletionReason;
use serde_json::Value;

/// Observed state of a reset: of the Job, or of the signal to a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResetObservation {
    /// Not observed yet, or not observable.
    Unknown,
    /// There is no Job, and no signal may be on its way.
    Absent,
    /// The API server or the provider refused the reset: the resulting end of the request, and
    /// the reason.
    Refused(CompletionReason, String),
    /// A signal may have been accepted, without a definite response so far.
    Unclear,
    /// The Job exists and belongs to the request, or the provider accepted the signal.
    Own(ResetState),
    /// The Job's name is taken by another object.
    Foreign,
}

/// State of a reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResetState {
    /// The reset is in progress, since this time if known.
    Active(Option<Timestamp>),
    /// The reset ended in success.
    Succeeded,
    /// The reset ended in failure, with the known reasons.
    Failed(String),
    /// The Job is being deleted.
    Deleting,
}

// === impl ResetObservation ===

impl ResetObservation {
    /// Reads a Job on behalf of the request with this uid. `why` is the termination message of
    /// its pods.
    pub fn read(object: &Value, uid: &str, why: Option<&str>) -> Self {
        let owners = object.pointer("/metadata/ownerReferences");
        let owners = owners.and_then(Value::as_array).into_iter().flatten();
        if !owners.into_iter().any(|owner| owner["uid"] == uid) {
            return Self::Foreign;
        }
        Self::Own(ResetState::read(object, why))
    }
}

// === impl ResetState ===

impl ResetState {
    /// Reads a Job. `why` is the termination message of its pods.
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
