//! Results of custom resources, read from their status.
//!
//! The condition named in the action is true on success. Controllers may add more. gpuwarden's
//! janitor sets the condition `AttemptComplete`, whose reason distinguishes transient failures.
//! NVSentinel's janitor sets `completionTime` even if its condition stays open, and `phase:
//! Failed` beside a condition that is true. A Kubernetes Job has one condition for success and
//! one for failure, and a `ValidationRequest` has a phase and no conditions.

use contract::keys;
use serde_json::Value;

use crate::attempt::{AttemptOutcome, ResourceKind};

/// Longest message copied from a status, in characters.
const MAX_TEXT: usize = 300;
/// Condition that is true once an attempt has ended. Its reason is a [`CompletionReason`].
pub const ATTEMPT_COMPLETE: &str = "AttemptComplete";
/// Condition of an `ExternalRemediationRequest`, set by the external system: true on
/// completion, false if the system has put the request aside, which is not a failure.
pub const EXTERNAL_COMPLETE: &str = "ExternalRemediationComplete";
/// Conditions that may be true before any work is done.
const BEFORE: [&str; 2] = ["Ready", "ManualMode"];

/// Reason of the condition [`ATTEMPT_COMPLETE`]: how a resource ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionReason {
    /// The work was done.
    Succeeded,
    /// Nothing was done, and another attempt may succeed.
    TransientFailure,
    /// Nothing was done, and another attempt would fail as well.
    PermanentFailure,
    /// Unknown whether anything was done. Defined by gpuwarden: controllers that do not know
    /// this reason ask a person.
    AmbiguousFailure,
    /// Another resource requests the same.
    Superseded,
    /// The node, or the session that the resource was created for, no longer exists.
    Cancelled,
}

/// State of a custom resource that remediates or validates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceState {
    /// `metadata.uid` of the object.
    pub uid: String,
    /// Key of the attempt that the resource was created for. `None` if another program created
    /// it.
    pub attempt: Option<String>,
    /// True once the work has begun. Deleting the resource then undoes nothing.
    pub begun: bool,
    /// Outcome, and the reason for people. `None` while the resource is in progress.
    pub end: Option<(AttemptOutcome, String)>,
}

/// A condition in a status.
struct Condition<'a> {
    kind: &'a str,
    status: &'a str,
    reason: &'a str,
    message: &'a str,
}

// === impl CompletionReason ===

impl CompletionReason {
    const ALL: [Self; 6] = [
        Self::Succeeded,
        Self::TransientFailure,
        Self::PermanentFailure,
        Self::AmbiguousFailure,
        Self::Superseded,
        Self::Cancelled,
    ];

    /// Returns the reason as written in the status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Succeeded => "Succeeded",
            Self::TransientFailure => "TransientFailure",
            Self::PermanentFailure => "PermanentFailure",
            Self::AmbiguousFailure => "AmbiguousFailure",
            Self::Superseded => "Superseded",
            Self::Cancelled => "Cancelled",
        }
    }

    /// Returns the outcome of an attempt that ended for this reason.
    fn outcome(self) -> AttemptOutcome {
        match self {
            Self::Succeeded => AttemptOutcome::Succeeded,
            Self::TransientFailure => AttemptOutcome::FailedForNow,
            Self::PermanentFailure => AttemptOutcome::Failed,
            Self::AmbiguousFailure | Self::Superseded | Self::Cancelled => AttemptOutcome::Unclear,
        }
    }
}

// === impl ResourceState ===

impl ResourceState {
    /// Reads the state of an object of the given kind.
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

/// Returns the outcome of a resource with these conditions.
fn end(
    conditions: &[Condition<'_>],
    done: &str,
    phase: Option<&str>,
    completed: bool,
    leaves_out: bool,
) -> Option<(AttemptOutcome, String)> {
    let find = |kind: &str| conditions.iter().find(|one| one.kind == kind);
    if let Some(complete) = find(ATTEMPT_COMPLETE).filter(|one| one.status == "True") {
        let mut known = CompletionReason::ALL.into_iter();
        let reason = known.find(|one| one.name() == complete.reason);
        let outcome = reason.map_or(AttemptOutcome::Unclear, CompletionReason::outcome);
        return Some((outcome, complete.text()));
    }
    let done = find(done);
    // A failed GPUReset of NVSentinel has a condition that is true.
    if phase == Some("Failed") {
        let why = done.map_or_else(|| "its phase is Failed".to_owned(), Condition::text);
        return Some((failed(done), why));
    }
    // A failed Job has a second condition.
    let failed_job = find("Failed").filter(|one| one.status == "True");
    match done {
        // A successful ValidationRequest has a phase and no conditions. One with skipped nodes
        // or tests proves nothing.
        None if phase == Some("Succeeded") && conditions.is_empty() => Some(if leaves_out {
            let why = "it has left out nodes or tests, see status.skipped";
            (AttemptOutcome::Unclear, why.to_owned())
        } else {
            (
                AttemptOutcome::Succeeded,
                "its phase is Succeeded".to_owned(),
            )
        }),
        Some(one) if one.status == "True" => Some((AttemptOutcome::Succeeded, one.text())),
        _ if failed_job.is_some() => failed_job.map(|one| (AttemptOutcome::Failed, one.text())),
        Some(one) if one.kind == EXTERNAL_COMPLETE => None,
        Some(one) if one.status == "False" => Some((failed(done), one.text())),
        // The signal was not sent, so the condition is never set.
        _ if completed => {
            let refused = conditions.iter().find(|one| one.status == "False");
            let why = refused.map_or_else(
                || "it ended without being carried out".to_owned(),
                Condition::text,
            );
            Some((failed(refused), why))
        }
        _ => None,
    }
}

/// Returns the outcome of a failure. An action that timed out may still have been carried out.
fn failed(condition: Option<&Condition<'_>>) -> AttemptOutcome {
    let late = condition.is_some_and(|one| one.reason.contains("Timeout"));
    if late {
        AttemptOutcome::Unclear
    } else {
        AttemptOutcome::Failed
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

    /// Returns the condition for people.
    fn text(&self) -> String {
        let text = match (self.reason, self.message) {
            (reason, "") => format!("{} is {} ({reason})", self.kind, self.status),
            (reason, message) => format!("{reason}: {message}"),
        };
        text.chars().take(MAX_TEXT).collect()
    }
}
