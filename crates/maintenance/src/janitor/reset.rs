//! GPU resets by a provider: the signal and its observed state, for
//! [`gpu_reset`](crate::gpu_reset).

use model::resource::CompletionReason;

use super::failure::Class;
use super::record::{SIGNAL_SENT, SignalRecord};
use super::sending::{Course, ProviderAnswer, Question, Sending};
use super::signal::SignalStep;
use crate::gpu_reset::{ResetObservation, ResetState, is_reset};
use crate::{Status, StatusCondition};

/// Signal of a reset.
pub(super) struct ResetSignal<'a>(pub(super) Sending<'a>);

// === impl ResetSignal ===

impl ResetSignal<'_> {
    /// Returns whether the signal is recorded in the status, so it may have been sent.
    pub(super) fn is_announced(&self) -> bool {
        self.record().is_some()
    }

    /// Returns the status with the provider's response. `None` if the status already has it.
    pub(super) fn note(&self) -> Option<Status> {
        let Sending { resource, now, .. } = self.0;
        if resource.status.completion.is_some() || self.is_answered() {
            return None;
        }
        match self.0.course(&self.record()?) {
            Course::Note(status) => Some(status),
            Course::Refused(outcome, why) => {
                let mut next = resource.status.clone();
                next.set(SIGNAL_SENT, "False", outcome.name(), &why, now);
                Some(next)
            }
            _ => None,
        }
    }

    /// Returns the observed state of the reset.
    pub(super) fn observation(&self) -> ResetObservation {
        let Some(record) = self.record() else {
            return ResetObservation::Absent;
        };
        if let Some(signal) = self.signal().filter(|_| self.is_answered()) {
            if signal.status == "True" {
                return ResetObservation::Own(self.state());
            }
            let for_now = CompletionReason::TransientFailure;
            let outcome = if signal.reason == for_now.name() {
                for_now
            } else {
                CompletionReason::PermanentFailure
            };
            return ResetObservation::Refused(outcome, signal.message.clone());
        }
        match self.0.course(&record) {
            Course::Announce(_) | Course::Later(_) | Course::Send => ResetObservation::Absent,
            _ => ResetObservation::Unclear,
        }
    }

    /// Returns the step that sends the signal. Must be called only if no signal is on its way.
    pub(super) fn send(&self) -> SignalStep {
        let Some(record) = self.record() else {
            let record = SignalRecord {
                attempt: 1,
                by: self.0.process.to_owned(),
                ..SignalRecord::default()
            };
            let mut next = self.0.resource.status.clone();
            self.0.announce(&mut next, &record);
            return SignalStep::Write(next);
        };
        match self.0.course(&record) {
            Course::Announce(status) => SignalStep::Write(status),
            Course::Later(time) => SignalStep::Wait(Some(time)),
            Course::Send => SignalStep::Ask(Question::Send),
            _ => SignalStep::Wait(None),
        }
    }

    /// Returns the question for the provider while nothing else is to be done.
    pub(super) fn ask(&self) -> SignalStep {
        let Some(record) = self.record().filter(|_| !is_reset(self.0.resource)) else {
            return SignalStep::Wait(None);
        };
        if self.is_answered() {
            let sent = self.signal().filter(|one| one.status == "True");
            let active = matches!(self.state(), ResetState::Active(_));
            return match (sent.filter(|_| active), self.0.memory.ask_after) {
                (None, _) => SignalStep::Wait(None),
                (Some(_), Some(time)) if self.0.now < time => SignalStep::Wait(Some(time)),
                (Some(signal), _) => SignalStep::Ask(Question::Ready(signal.message.clone())),
            };
        }
        match self.0.course(&record) {
            Course::Find => SignalStep::Ask(Question::Find),
            Course::Wait(until) => SignalStep::Wait(until),
            _ => SignalStep::Wait(None),
        }
    }

    fn signal(&self) -> Option<&StatusCondition> {
        self.0.resource.status.condition(SIGNAL_SENT)
    }

    /// Returns whether the provider is known to have accepted or refused the signal.
    fn is_answered(&self) -> bool {
        self.signal().is_some_and(|one| one.status != "Unknown")
    }

    /// Returns the record. A malformed one counts as a signal that may have been sent.
    fn record(&self) -> Option<SignalRecord> {
        let unreadable = || self.signal().map(|_| SignalRecord::default());
        SignalRecord::read(&self.0.resource.status).or_else(unreadable)
    }

    /// Returns the state of a reset whose signal was accepted.
    fn state(&self) -> ResetState {
        match &self.0.memory.response {
            _ if self.0.memory.ready => ResetState::Succeeded,
            Some(ProviderAnswer::Ready(Err(failure))) if failure.class == Class::Permanent => {
                ResetState::Failed(failure.text())
            }
            _ => ResetState::Active(self.0.resource.status.since(SIGNAL_SENT)),
        }
    }
}
