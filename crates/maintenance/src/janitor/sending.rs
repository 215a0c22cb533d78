//! The sending of one signal: announced in the status, sent once, and asked for where its answer is lost.
//!
//! What it is a signal for, and how the resource ends, its callers say: `signal.rs` for reboots and
//! terminations, `reset.rs` for resets of GPUs.

use jiff::{SignedDuration, Timestamp};

use super::failure::{Class, Failure};
use super::record::{Record, SIGNAL_SENT};
use crate::{Outcome, Resource, Status};

/// Most signals of one resource that a provider refuses for now. The tries are some ten minutes apart
/// in all, within the usual deadline.
pub(super) const MAX_TRIES: u32 = 6;
/// Wait before the second try, where the provider names none. Each further one doubles it.
const BACK_OFF: SignedDuration = SignedDuration::from_secs(10);
/// Longest wait before another try, whatever the provider says: one that names hours would outlast the
/// deadline unseen.
const BACK_OFF_MAX: SignedDuration = SignedDuration::from_mins(5);
/// Time between two questions to a provider, how a signal is, or whether it knows one.
pub(super) const ASK_AGAIN: SignedDuration = SignedDuration::from_secs(30);

/// Reasons of `SignalSent` while it is unknown.
const SENDING: &str = "Sending";
pub(super) const RETRYING: &str = "Retrying";
pub(super) const UNCLEAR: &str = "Unclear";
/// Its reason once it is true.
pub(super) const SUCCEEDED: &str = "Succeeded";

/// A question to the provider, or a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Send the signal, and say under which id it is known.
    Send,
    /// Say whether the signal of this operation was sent.
    Find,
    /// Say whether the node is ready again, after the signal of this request id.
    Ready(String),
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Question::Send`]: the request id.
    Sent(Result<String, Failure>),
    /// To [`Question::Find`].
    Found(Result<Found, Failure>),
    /// To [`Question::Ready`].
    Ready(Result<bool, Failure>),
}

/// What a provider knows of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It was sent, and this is its request id.
    Sent(String),
    /// It was not, and a signal that comes late is known again.
    NotSent,
    /// The provider does not know operations again.
    CannotTell,
}

/// What this process remembers of a resource beside its status. All of it may be lost.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    /// The try whose signal this process has sent.
    pub(super) sent: Option<u32>,
    /// The answer that is not yet in the status.
    pub(super) heard: Option<Answer>,
    /// The time before which the provider is not asked again.
    pub(super) ask_after: Option<Timestamp>,
    /// True once the provider has said that it does not know operations again.
    pub(super) cannot_tell: bool,
    /// True once it has said that the node is ready again.
    pub(super) ready: bool,
}

/// The signal of a resource, as its status has it, and what this process remembers.
pub(super) struct Sending<'a> {
    pub(super) resource: &'a Resource,
    pub(super) memory: &'a Memory,
    /// The id of this process.
    pub(super) process: &'a str,
    pub(super) now: Timestamp,
}

/// What is to be done next about a signal that the provider has not taken yet.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Course {
    /// Write what the provider has answered.
    Note(Status),
    /// None is on its way. Write that one is about to be sent, and send it then.
    Announce(Status),
    /// None is on its way, and none is sent before this time.
    Later(Timestamp),
    /// None is on its way, and it is announced. Send it.
    Send,
    /// One may be on its way. Ask the provider for it.
    Find,
    /// The same, and nobody is asked before this time; `None`: nobody can be.
    Wait(Option<Timestamp>),
    /// None is on its way, and none will be: it ends so, for this reason.
    Refused(Outcome, String),
}

// === impl Sending ===

impl Sending<'_> {
    /// Returns what is to be done next, after what was recorded.
    pub(super) fn course(&self, record: &Record) -> Course {
        if let Some(answer) = &self.memory.heard
            && let Some(course) = self.heard(record, answer)
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

    /// Says in a status that the signal of a try is about to be sent.
    pub(super) fn announce(&self, status: &mut Status, record: &Record) {
        record.write(status, self.now);
        let message = format!("operation {}", self.resource.operation());
        self.say(status, "Unknown", SENDING, &message);
    }

    fn heard(&self, record: &Record, answer: &Answer) -> Option<Course> {
        match answer {
            Answer::Sent(Ok(request)) | Answer::Found(Ok(Found::Sent(request))) => {
                let mut status = self.resource.status.clone();
                self.say(&mut status, "True", SUCCEEDED, request);
                Some(Course::Note(status))
            }
            Answer::Sent(Err(failure)) => match failure.class {
                Class::Transient => Some(self.refused_for_now(record, failure)),
                Class::Permanent => {
                    let outcome = Outcome::PermanentFailure;
                    Some(Course::Refused(outcome, failure.text()))
                }
                Class::Ambiguous => self.unclear(failure),
            },
            Answer::Found(Ok(Found::NotSent)) => Some(self.send_again(record)),
            Answer::Found(Ok(Found::CannotTell) | Err(_)) | Answer::Ready(_) => None,
        }
    }

    /// Notes that nobody knows whether the signal was sent.
    fn unclear(&self, failure: &Failure) -> Option<Course> {
        let mut status = self.resource.status.clone();
        let message = format!(
            "nobody knows whether the signal was sent; the provider is asked for it: {}",
            failure.text()
        );
        self.say(&mut status, "Unknown", UNCLEAR, &message);
        (status != self.resource.status).then_some(Course::Note(status))
    }

    fn refused_for_now(&self, record: &Record, failure: &Failure) -> Course {
        if record.attempt >= MAX_TRIES {
            let message = format!("after {MAX_TRIES} tries: {}", failure.text());
            return Course::Refused(Outcome::TransientFailure, message);
        }
        let doubled = BACK_OFF
            .checked_mul(1 << record.attempt.saturating_sub(1).min(16))
            .unwrap_or(BACK_OFF_MAX);
        let wait = failure.retry_after.unwrap_or(doubled).min(BACK_OFF_MAX);
        let mut status = self.resource.status.clone();
        let record = Record {
            by: String::new(),
            not_before: self.now.checked_add(wait).ok(),
            ..record.clone()
        };
        record.write(&mut status, self.now);
        let message = format!("try {} of {MAX_TRIES}: {}", record.attempt, failure.text());
        self.say(&mut status, "Unknown", RETRYING, &message);
        Course::Note(status)
    }

    /// Announces another signal, of which it is known that the one before was not sent.
    fn send_again(&self, record: &Record) -> Course {
        if record.attempt >= MAX_TRIES {
            let message = format!("the signal did not reach the provider in {MAX_TRIES} tries");
            return Course::Refused(Outcome::TransientFailure, message);
        }
        let mut status = self.resource.status.clone();
        let record = Record {
            attempt: record.attempt + 1,
            by: self.process.to_owned(),
            not_before: None,
            ..record.clone()
        };
        self.announce(&mut status, &record);
        Course::Announce(status)
    }

    fn say(&self, status: &mut Status, to: &str, reason: &str, message: &str) {
        status.set(SIGNAL_SENT, to, reason, message, self.now);
    }
}
