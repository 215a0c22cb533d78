//! Sending of one signal: recorded in the status, sent once, and looked up at the provider if
//! its response is lost.
//!
//! The callers define the signal's purpose and the end of the resource: `signal.rs` for reboots
//! and terminations, `reset.rs` for GPU resets.

use jiff::{SignedDuration, Timestamp};
use model::resource::CompletionReason;

use super::failure::{Class, ProviderFailure};
use super::record::{SIGNAL_SENT, SignalRecord};
use crate::{MaintenanceResource, Status};

/// Most signals of one resource that a provider refuses for now. All tries together take some
/// ten minutes, within the usual deadline.
pub(super) const MAX_TRIES: u32 = 6;
/// Wait before the second try if the provider names none. Doubles with each further try.
const BACK_OFF: SignedDuration = SignedDuration::from_secs(10);
/// Longest wait before another try, whatever the provider requests: one of hours would exceed
/// the deadline unnoticed.
const BACK_OFF_MAX: SignedDuration = SignedDuration::from_mins(5);
/// Interval of questions to a provider about the state of a signal.
pub(super) const ASK_AGAIN: SignedDuration = SignedDuration::from_secs(30);

/// Reasons of `SignalSent` while its status is unknown.
const SENDING: &str = "Sending";
pub(super) const RETRYING: &str = "Retrying";
pub(super) const UNCLEAR: &str = "Unclear";
/// Reason of `SignalSent` once it is true.
pub(super) const SUCCEEDED: &str = "Succeeded";

/// A question or signal to the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Send the signal, and return its request id.
    Send,
    /// Return whether the signal of this operation was sent.
    Find,
    /// Return whether the node is ready again, after the signal with this request id.
    Ready(String),
}

/// Response to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProviderAnswer {
    /// Response to [`Question::Send`], with the request id.
    Sent(Result<String, ProviderFailure>),
    /// Response to [`Question::Find`], about the operation.
    Found(Result<FoundOperation, ProviderFailure>),
    /// Response to [`Question::Ready`]: true once the action is complete.
    Ready(Result<bool, ProviderFailure>),
}

/// Knowledge of a provider about an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundOperation {
    /// The signal was sent, with this request id.
    Sent(String),
    /// The signal was not sent, and a delayed one would be recognised.
    NotSent,
    /// The provider does not recognise operations.
    CannotTell,
}

/// State of this process about a resource, in addition to its status. May be lost.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    /// Try whose signal this process has sent.
    pub(super) sent: Option<u32>,
    /// Response that is not in the status yet.
    pub(super) response: Option<ProviderAnswer>,
    /// Earliest time of the next question.
    pub(super) ask_after: Option<Timestamp>,
    /// True once the provider has reported that it does not recognise operations.
    pub(super) cannot_tell: bool,
    /// True once the provider has reported that the node is ready again.
    pub(super) ready: bool,
}

/// Signal of a resource, from its status and the state of this process.
pub(super) struct Sending<'a> {
    pub(super) resource: &'a MaintenanceResource,
    pub(super) memory: &'a Memory,
    /// Id of this process.
    pub(super) process: &'a str,
    pub(super) now: Timestamp,
}

/// Next step for a signal that the provider has not accepted yet.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Course {
    /// Write the provider's response.
    Note(Status),
    /// No signal is on its way. Record that one is about to be sent, then send it.
    Announce(Status),
    /// No signal is on its way, and none is sent before this time.
    Later(Timestamp),
    /// No signal is on its way, and one is recorded. Send it.
    Send,
    /// A signal may be on its way. Ask the provider about it.
    Find,
    /// A signal may be on its way, and the next question is due at this time. `None` if the
    /// provider cannot be asked.
    Wait(Option<Timestamp>),
    /// No signal is on its way, and none will be sent: the resulting end and its reason.
    Refused(CompletionReason, String),
}

// === impl Sending ===

impl Sending<'_> {
    /// Returns the next step, given the record in the status.
    pub(super) fn course(&self, record: &SignalRecord) -> Course {
        if let Some(answer) = &self.memory.response
            && let Some(course) = self.course_after(record, answer)
        {
            return course;
        }
        let signal = self.resource.status.condition(SIGNAL_SENT);
        if signal.is_some_and(|one| one.reason == RETRYING) {
            let not_before = record.not_before.unwrap_or(self.now);
            if self.now < not_before {
                return Course::Later(not_before);
            }
            return self.send_again(record);
        }
        if record.attempt == 0 || self.memory.cannot_tell {
            return Course::Wait(None);
        }
        let unsent = self.memory.sent != Some(record.attempt);
        if record.by == self.process && unsent {
            return Course::Send;
        }
        match self.memory.ask_after {
            Some(time) if self.now < time => Course::Wait(Some(time)),
            _ => Course::Find,
        }
    }

    /// Records in a status that the signal of a try is about to be sent.
    pub(super) fn announce(&self, status: &mut Status, record: &SignalRecord) {
        record.write(status, self.now);
        let message = format!("operation {}", self.resource.operation());
        self.set(status, "Unknown", SENDING, &message);
    }

    fn course_after(&self, record: &SignalRecord, answer: &ProviderAnswer) -> Option<Course> {
        match answer {
            ProviderAnswer::Sent(Ok(request))
            | ProviderAnswer::Found(Ok(FoundOperation::Sent(request))) => {
                let mut status = self.resource.status.clone();
                self.set(&mut status, "True", SUCCEEDED, request);
                Some(Course::Note(status))
            }
            ProviderAnswer::Sent(Err(failure)) => match failure.class {
                Class::Transient => Some(self.refused_for_now(record, failure)),
                Class::Permanent => {
                    let outcome = CompletionReason::PermanentFailure;
                    Some(Course::Refused(outcome, failure.text()))
                }
                Class::Ambiguous => self.unclear(failure),
            },
            ProviderAnswer::Found(Ok(FoundOperation::NotSent)) => Some(self.send_again(record)),
            ProviderAnswer::Found(Ok(FoundOperation::CannotTell) | Err(_))
            | ProviderAnswer::Ready(_) => None,
        }
    }

    /// Records that it is unknown whether the signal was sent.
    fn unclear(&self, failure: &ProviderFailure) -> Option<Course> {
        let mut status = self.resource.status.clone();
        let message = format!(
            "it is unknown whether the signal was sent; the provider is asked about it: {}",
            failure.text()
        );
        self.set(&mut status, "Unknown", UNCLEAR, &message);
        (status != self.resource.status).then_some(Course::Note(status))
    }

    fn refused_for_now(&self, record: &SignalRecord, failure: &ProviderFailure) -> Course {
        if record.attempt >= MAX_TRIES {
            let message = format!("after {MAX_TRIES} tries: {}", failure.text());
            return Course::Refused(CompletionReason::TransientFailure, message);
        }
        let doubled = BACK_OFF
            .checked_mul(1 << record.attempt.saturating_sub(1).min(16))
            .unwrap_or(BACK_OFF_MAX);
        let wait = failure.retry_after.unwrap_or(doubled).min(BACK_OFF_MAX);
        let mut status = self.resource.status.clone();
        let record = SignalRecord {
            by: String::new(),
            not_before: self.now.checked_add(wait).ok(),
            ..record.clone()
        };
        record.write(&mut status, self.now);
        let message = format!("try {} of {MAX_TRIES}: {}", record.attempt, failure.text());
        self.set(&mut status, "Unknown", RETRYING, &message);
        Course::Note(status)
    }

    /// Starts another try after the previous signal was found not to be sent.
    fn send_again(&self, record: &SignalRecord) -> Course {
        if record.attempt >= MAX_TRIES {
            let message = format!("the signal did not reach the provider in {MAX_TRIES} tries");
            return Course::Refused(CompletionReason::TransientFailure, message);
        }
        let mut status = self.resource.status.clone();
        let record = SignalRecord {
            attempt: record.attempt + 1,
            by: self.process.to_owned(),
            not_before: None,
            ..record.clone()
        };
        self.announce(&mut status, &record);
        Course::Announce(status)
    }

    fn set(&self, status: &mut Status, to: &str, reason: &str, message: &str) {
        status.set(SIGNAL_SENT, to, reason, message, self.now);
    }
}
