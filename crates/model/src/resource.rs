//! What the status of a custom resource says of a repair.
//!
//! The condition that its action names is true once it is done. Whoever carries it out may say more: the
//! condition `AttemptComplete` with a reason that says whether a failure may pass; NVSentinel's janitor
//! says `completionTime` also where its condition stays open, and has `phase: Failed` beside a true one. A
//! Job of Kubernetes has a condition for each end, and a `ValidationRequest` has a phase and no conditions.

use contract::keys;
use serde_json::Value;

use crate::attempt::{Outcome, ResourceKind};

/// Longest text of a status that is taken over, in characters.
const MAX_TEXT: usize = 300;
/// Condition that is true once an attempt has ended; its reason says how.
pub const ATTEMPT_COMPLETE: &str = "AttemptComplete";
/// Condition that the external system sets on an `ExternalRemediationRequest`: true once it is done, false where it
/// puts the request aside, which is no failure.
pub const EXTERNAL_COMPLETE: &str = "ExternalRemediationComplete";
/// Conditions that are true before anything is done.
const BEFORE: [&str; 2] = ["Ready", "ManualMode"];

/// A custom resource, as far as a repair looks at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceState {
    /// Its uid.
    pub uid: String,
    /// The attempt for which we have made it; `None`: it is not ours.
    pub attempt: Option<String>,
    /// True once what it asks for is being done: to delete it then undoes nothing.
    pub begun: bool,
    /// Its end, with a reason.
    pub end: Option<(Outcome, String)>,
}

/// A condition of a status.
struct Condition<'a> {
    kind: &'a str,
    status: &'a str,
    reason: &'a str,
    message: &'a str,
}

// === impl ResourceState ===

impl ResourceState {
    /// Reads an object of a kind.
    pub fn read(object: &Value, kind: &ResourceKind) -> Self {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let annotations = object.pointer("/metadata/annotations");
        let attempt = annotations.and_then(|all| all.get(keys::ATTEMPT)?.as_str());
        let conditions: Vec<Condition<'_>> = (object.pointer("/status/conditions"))
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .map(Condition::read)
            .collect();
        let counts = |one: &&Condition<'_>| one.status == "True" && !BEFORE.contains(&one.kind);
        Self {
            uid: text("/metadata/uid").unwrap_or_default().to_owned(),
            attempt: attempt.map(str::to_owned),
            begun: conditions.iter().any(|one| counts(&one)),
            end: end(
                &conditions,
                &kind.condition,
                text("/status/phase"),
                text("/status/completionTime").is_some(),
                object.pointer("/status/skipped").is_some(),
            ),
        }
    }
}

/// Returns how it has ended.
fn end(
    conditions: &[Condition<'_>],
    done: &str,
    phase: Option<&str>,
    completed: bool,
    leaves_out: bool,
) -> Option<(Outcome, String)> {
    let find = |kind: &str| conditions.iter().find(|one| one.kind == kind);
    if let Some(complete) = find(ATTEMPT_COMPLETE).filter(|one| one.status == "True") {
        let outcome = match complete.reason {
            "Succeeded" => Outcome::Succeeded,
            "TransientFailure" => Outcome::FailedForNow,
            "PermanentFailure" => Outcome::Failed,
            // Superseded, Cancelled, and words that we do not know.
            _ => Outcome::Unclear,
        };
        return Some((outcome, complete.text()));
    }
    let done = find(done);
    // A failure of a GPUReset of NVSentinel, whose condition is true then.
    if phase == Some("Failed") {
        let why = done.map_or_else(|| "its phase is Failed".to_owned(), Condition::text);
        return Some((failed(done), why));
    }
    // Of a Job: its other condition.
    let failed_job = find("Failed").filter(|one| one.status == "True");
    match done {
        // Of a ValidationRequest, which has a phase and no conditions. What was left out proves nothing.
        None if phase == Some("Succeeded") && conditions.is_empty() => Some(if leaves_out {
            let why = "it has left out nodes or tests, see status.skipped";
            (Outcome::Unclear, why.to_owned())
        } else {
            (Outcome::Succeeded, "its phase is Succeeded".to_owned())
        }),
        Some(one) if one.status == "True" => Some((Outcome::Succeeded, one.text())),
        _ if failed_job.is_some() => failed_job.map(|one| (Outcome::Failed, one.text())),
        Some(one) if one.kind == EXTERNAL_COMPLETE => None,
        Some(one) if one.status == "False" => Some((failed(done), one.text())),
        // The signal was not sent: the condition is never set.
        _ if completed => {
            let refused = conditions.iter().find(|one| one.status == "False");
            let why = refused.map_or_else(|| "it has ended undone".to_owned(), Condition::text);
            Some((failed(refused), why))
        }
        _ => None,
    }
}

/// Returns the outcome of a failure: what took too long may have been done all the same.
fn failed(condition: Option<&Condition<'_>>) -> Outcome {
    let late = condition.is_some_and(|one| one.reason.contains("Timeout"));
    if late {
        Outcome::Unclear
    } else {
        Outcome::Failed
    }
}

// === impl Condition ===

impl<'a> Condition<'a> {
    fn read(value: &'a Value) -> Self {
        let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
        Self {
            kind: text("type"),
            status: text("status"),
            reason: text("reason"),
            message: text("message"),
        }
    }

    /// Returns it for people.
    fn text(&self) -> String {
        let text = match (self.reason, self.message) {
            (reason, "") => format!("{} is {} ({reason})", self.kind, self.status),
            (reason, message) => format!("{reason}: {message}"),
        };
        text.chars().take(MAX_TEXT).collect()
    }
}
