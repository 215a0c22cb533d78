//! The single steps of a reset, each with its time limit and its reasons of failure.

use jiff::{SignedDuration, Timestamp};
use model::node::NodeView;
use model::resource::{ATTEMPT_COMPLETE, CompletionReason};
use model::time::later;

use super::job::{self, job_name};
use super::services::{self, ServicePod, Stopped};
use super::{
    COMPLETE, JOB_COMPLETED, JOB_CREATED, READY, RESTORED, ResetDecision, ResetInput, TORN_DOWN,
};
use super::{ResetObservation, ResetState};
use crate::{
    Act, NOT_OUT_OF_SERVICE, SESSION_ENDED, SESSION_ENDED_MESSAGE, SESSION_OBSERVED_WITHIN, Status,
};

const TERMINATING: &str = "Terminating";

/// Reason of a failure, defined by gpuwarden: the provider has refused the signal for now, and
/// too often or for too long.
const NOT_TAKEN: &str = "ResetSignalNotTaken";
/// Reason of a failure: unknown whether the provider accepted the signal.
const UNCLEAR: &str = "ResetSignalUnclear";
/// Reason of a failure: the provider's reset has no known result.
const TIMED_OUT: &str = "ResetTimeoutExceeded";
/// Reason of a failure: the reset succeeded, but the services' pods cannot be observed.
const UNSEEN: &str = "RestoredServicesUnknown";

/// Time for the pods of stopped services to disappear, as in NVSentinel.
const GONE_WITHIN: SignedDuration = SignedDuration::from_mins(5);
/// Time for services to be ready again, as in NVSentinel.
const READY_WITHIN: SignedDuration = SignedDuration::from_mins(10);
/// Time after the deadline of a Job or a provider's reset for its result to be observed.
const JOB_SLACK: SignedDuration = SignedDuration::from_mins(2);
/// Time for a newly started process to observe pods and Jobs. Deadlines do not expire before.
pub(super) const READ_WITHIN: SignedDuration = SignedDuration::from_mins(5);
/// Time for a stopped Job to disappear. The pods on a node that is gone never do.
const STOPS_WITHIN: SignedDuration = SignedDuration::from_mins(2);

/// Returns the reason of `AttemptComplete` for a failure.
fn outcome(reason: &str) -> CompletionReason {
    match reason {
        NOT_TAKEN => CompletionReason::TransientFailure,
        UNCLEAR | TIMED_OUT | UNSEEN => CompletionReason::AmbiguousFailure,
        // A reboot comes next, and is not affected by the failure of the reset.
        _ => CompletionReason::PermanentFailure,
    }
}

// === impl ResetInput ===

impl ResetInput<'_> {
    /// Returns the record of the services stopped by this request.
    pub(super) fn stopped(&self) -> Option<Stopped> {
        let stopped = Stopped::read(self.node?)?;
        (stopped.uid == self.request.uid).then_some(stopped)
    }

    fn status(&self, change: impl FnOnce(&mut Status)) -> ResetDecision {
        let mut next = self.request.status.clone();
        change(&mut next);
        if next == self.request.status {
            return ResetDecision::default(); // The status is already written.
        }
        ResetDecision::now(Act::Status(Box::new(next)))
    }

    /// Records in the status that a step is in progress, and waits until a time.
    fn waits(
        &self,
        kind: &str,
        reason: &str,
        why: &str,
        until: Option<Timestamp>,
    ) -> ResetDecision {
        let mut decision = self.status(|next| next.set(kind, "Unknown", reason, why, self.now));
        decision.wake = until;
        why.clone_into(&mut decision.awaits);
        decision
    }

    pub(super) fn fails(&self, kind: &str, reason: &str, why: &str) -> ResetDecision {
        self.status(|next| next.set(kind, "False", reason, why, self.now))
    }

    /// Starts the request once no other work on the node comes first.
    pub(super) fn begin(&self, node: &NodeView) -> ResetDecision {
        let first_observed = self.request.status.since(READY).unwrap_or(self.now);
        if !self.request.is_permitted(node) {
            let why = SESSION_ENDED_MESSAGE;
            let until = later(first_observed, SESSION_OBSERVED_WITHIN);
            if self.now >= until {
                return self.fails(READY, SESSION_ENDED, why);
            }
            return self.waits(READY, "Pending", why, Some(until));
        }
        let until = later(first_observed, self.settings.timeout);
        let other = Stopped::read(node).filter(|one| one.uid != self.request.uid);
        let other = other.map(|one| format!("GPUReset {}", one.request));
        let at_work = || services::at_work(node).filter(|_| self.settings.services);
        let before = self.before.map(str::to_owned).or(other).or_else(at_work);
        let before = before.map(|before| format!("{before} is working on the node"));
        let waits = self.request.waits_for_session(node);
        let Some(why) = before.or_else(|| waits.then(|| NOT_OUT_OF_SERVICE.to_owned())) else {
            return self.status(|next| {
                // The time limit counts from here, not from the creation of the request.
                next.start = Some(self.now);
                "InProgress".clone_into(&mut next.phase);
                next.set(READY, "True", "ReadyForReset", "", self.now);
            });
        };
        if self.now >= until {
            return self.fails(READY, "ReadinessTimeoutExceeded", &why);
        }
        self.waits(READY, "ResourceContention", &why, Some(until))
    }

    /// Stops the services that hold GPUs open, including those restarted since.
    pub(super) fn tear_down(&self, node: &NodeView) -> ResetDecision {
        let done = |reason: &str, text: &str| {
            self.status(|next| next.set(TORN_DOWN, "True", reason, text, self.now))
        };
        if !self.settings.services {
            return done("Skipped", "no services are configured");
        }
        let Some(pods) = self.pods else {
            let start = self.request.status.start.unwrap_or(self.now);
            return self.waits_for_pods(TORN_DOWN, later(start, GONE_WITHIN));
        };
        if let Some(act) = self.stop(node, pods) {
            return ResetDecision::now(act);
        }
        let Some(stopped) = self.stopped() else {
            return done("Skipped", "no service runs on the node by its label");
        };
        let there = services::still_there(node, pods);
        if there.is_empty() {
            return done("ServiceTeardownSucceeded", "");
        }
        let until = later(stopped.since, GONE_WITHIN);
        let why = format!("pods of services are still there: {}", there.join(", "));
        if self.now >= until {
            return self.fails(TORN_DOWN, "ServiceTeardownTimeoutExceeded", &why);
        }
        self.waits(TORN_DOWN, "TearingDownServices", &why, Some(until))
    }

    /// Waits until the service pods can be read. The step fails if they cannot be read in time.
    fn waits_for_pods(&self, step: &str, until: Timestamp) -> ResetDecision {
        let until = self.at_least_read(until);
        let what = "the pods of services";
        if self.now >= until {
            let text = format!("{what} cannot be read");
            let reason = if step == RESTORED {
                UNSEEN
            } else {
                "ServicePodsUnknown"
            };
            return self.fails(step, reason, &text);
        }
        let mut decision = ResetDecision::waiting(&format!("{what} to be read"));
        decision.wake = Some(until);
        decision
    }

    fn stop(&self, node: &NodeView, pods: &[ServicePod]) -> Option<Act> {
        let before = self.stopped();
        let whose = (self.request.name.as_str(), self.request.uid.as_str());
        services::stop(node, pods, before.as_ref(), whose, self.now).map(Act::Node)
    }

    /// Starts and follows the reset of the GPUs.
    pub(super) fn reset(&self, node: &NodeView) -> ResetDecision {
        let created = self.request.status.is_true(JOB_CREATED);
        if self.settings.services {
            match self.pods {
                // A service that was restarted in between would hold the GPUs open.
                Some(pods) => {
                    if let Some(act) = self.stop(node, pods) {
                        return ResetDecision::now(act);
                    }
                }
                None if !created => return self.waits_for_pods(JOB_CREATED, self.last_moment()),
                None => {}
            }
        }
        let what = self.what();
        match self.reset {
            ResetObservation::Unknown => {
                let until = self.at_least_read(self.unseen_until());
                if self.now >= until {
                    let text = format!("{what} cannot be read, so its result is unknown");
                    return self.fails(JOB_COMPLETED, TIMED_OUT, &text);
                }
                let mut decision = ResetDecision::waiting(&format!("{what} to be read"));
                decision.wake = Some(until);
                decision
            }
            ResetObservation::Absent if created => {
                let text = format!("{what} is gone, so its result is unknown");
                self.fails(JOB_COMPLETED, "ResetJobNotFound", &text)
            }
            ResetObservation::Absent => self.make(node),
            ResetObservation::Refused(outcome, why) => {
                let reason = match outcome {
                    CompletionReason::TransientFailure => NOT_TAKEN,
                    _ => "ResetJobCreationFailed",
                };
                self.fails(JOB_CREATED, reason, why)
            }
            ResetObservation::Unclear => {
                let until = self.last_moment();
                if self.now >= until {
                    let text = "it is unknown whether the provider has reset the GPUs";
                    return self.fails(JOB_CREATED, UNCLEAR, text);
                }
                let mut decision = ResetDecision::waiting("the provider to know of its signal");
                decision.wake = Some(until);
                decision
            }
            ResetObservation::Foreign => {
                let text = format!("{what} is not this request's");
                self.fails(JOB_CREATED, "ResetJobCreationFailed", &text)
            }
            ResetObservation::Own(_) if !created => self.status(|next| {
                let job = (
                    self.settings.namespace.clone(),
                    job_name(&self.request.name),
                );
                next.job = (!self.by_provider).then_some(job);
                let reason = "ResetJobCreationSucceeded";
                next.set(JOB_CREATED, "True", reason, "", self.now);
            }),
            ResetObservation::Own(state) => self.watch(state),
        }
    }

    /// Returns a name of the reset for people.
    fn what(&self) -> String {
        if self.by_provider {
            return "the reset by the provider".to_owned();
        }
        format!("Job {}", job_name(&self.request.name))
    }

    /// Returns the latest time for the reset to start.
    fn last_moment(&self) -> Timestamp {
        let start = self.request.status.start.unwrap_or(self.now);
        later(later(start, self.settings.timeout), GONE_WITHIN)
    }

    /// Returns the time limit for a reset that cannot be observed, which is that of one that
    /// can.
    fn unseen_until(&self) -> Timestamp {
        let begun = self.request.status.since(JOB_CREATED);
        begun.map_or_else(
            || self.last_moment(),
            |begun| later(later(begun, self.limit().0), JOB_SLACK),
        )
    }

    /// Extends a time limit such that a newly started process can observe the cluster first.
    fn at_least_read(&self, until: Timestamp) -> Timestamp {
        until.max(later(self.looks_since, READ_WITHIN))
    }

    /// Returns the time limit of a reset, and the reason of exceeding it.
    fn limit(&self) -> (SignedDuration, &'static str) {
        if self.by_provider {
            (self.settings.timeout, TIMED_OUT)
        } else {
            (
                SignedDuration::from_secs(job::JOB_SECONDS),
                "ResetJobFailed",
            )
        }
    }

    /// Creates the Job or sends the signal, unless the time limit is exceeded.
    fn make(&self, node: &NodeView) -> ResetDecision {
        if !self.request.is_permitted(node) {
            return self.fails(JOB_CREATED, SESSION_ENDED, SESSION_ENDED_MESSAGE);
        }
        let (until, what) = (self.last_moment(), self.what());
        if self.request.waits_for_session(node) && self.now < until {
            return ResetDecision {
                act: None,
                wake: Some(until),
                awaits: NOT_OUT_OF_SERVICE.to_owned(),
            };
        }
        if self.now >= until {
            let reason = if self.by_provider {
                NOT_TAKEN
            } else {
                "ResetJobCreationFailed"
            };
            let text = format!("{what} could not be begun in time");
            return self.fails(JOB_CREATED, reason, &text);
        }
        ResetDecision {
            act: Some(Act::Make(job::job_of(self.request, self.settings))),
            wake: Some(until),
            awaits: format!("{what} to be begun"),
        }
    }

    /// Follows a reset that has started.
    fn watch(&self, state: &ResetState) -> ResetDecision {
        let what = self.what();
        match state {
            ResetState::Succeeded => self.status(|next| {
                next.set(JOB_COMPLETED, "True", "ResetJobSucceeded", "", self.now);
            }),
            ResetState::Failed(why) => self.fails(JOB_COMPLETED, "ResetJobFailed", why),
            ResetState::Deleting => {
                let text = format!("{what} was deleted before it had ended");
                self.fails(JOB_COMPLETED, "ResetJobNotFound", &text)
            }
            ResetState::Active(since) => {
                let begun = self.request.status.since(JOB_CREATED);
                let since = since.or(begun).unwrap_or(self.now);
                let (limit, reason) = self.limit();
                let until = later(later(since, limit), JOB_SLACK);
                if self.now >= until {
                    let text = format!("{what} does not end");
                    return self.fails(JOB_COMPLETED, reason, &text);
                }
                let why = format!("the end of {what}");
                self.waits(JOB_COMPLETED, "ResetJobRunning", &why, Some(until))
            }
        }
    }

    /// Restores the services after a reset, waits for them, and ends the request.
    pub(super) fn restore(&self, node: &NodeView) -> ResetDecision {
        let Some(stopped) = self.stopped() else {
            return self.end(None);
        };
        if !stopped.labels.is_empty() {
            return ResetDecision::now(Act::Node(stopped.put_back(node, true)));
        }
        let Some(pods) = self.pods else {
            let since = self.request.status.since(JOB_COMPLETED);
            let until = later(since.unwrap_or(self.now), READY_WITHIN);
            return self.waits_for_pods(RESTORED, until);
        };
        let missing = stopped.not_ready(node, pods);
        if missing.is_empty() {
            return ResetDecision::now(Act::Node(stopped.put_back(node, false)));
        }
        let why = format!("services are not ready again: {}", missing.join(", "));
        let Some(since) = self.request.status.since(RESTORED) else {
            return self.waits(RESTORED, "RestoringServices", &why, None);
        };
        let until = later(since, READY_WITHIN);
        if self.now >= until {
            return self.fails(RESTORED, "RestoreTimeoutExceeded", &why);
        }
        self.waits(RESTORED, "RestoringServices", &why, Some(until))
    }

    /// Ends the request after a failure. The Job is stopped and the services are restored
    /// first.
    pub(super) fn fail_after(&self, step: &'static str) -> ResetDecision {
        let status = &self.request.status;
        let failed_at = status.since(step).unwrap_or(self.now);
        let undo = self.undo(later(failed_at, STOPS_WITHIN));
        undo.unwrap_or_else(|| {
            let words = status.condition(step);
            self.end(Some(words.map_or(("", ""), |one| {
                (one.reason.as_str(), one.message.as_str())
            })))
        })
    }

    /// Returns the next action to undo what was done. Waits until a time for a Job that does
    /// not disappear, and for a provider, whose reset cannot be stopped.
    fn undo(&self, until: Timestamp) -> Option<ResetDecision> {
        let waits = self.now < until && self.node.is_some();
        let awaits = match self.reset {
            ResetObservation::Own(ResetState::Active(_)) if self.by_provider => {
                Some("the end of its reset")
            }
            ResetObservation::Own(ResetState::Active(_)) => {
                return Some(ResetDecision::now(Act::Stop));
            }
            ResetObservation::Own(ResetState::Deleting) => Some("its Job to go"),
            ResetObservation::Unknown => Some("its Job to be read"),
            ResetObservation::Unclear => Some("the provider to know of its signal"),
            _ => None,
        };
        if let Some(awaits) = awaits.filter(|_| waits) {
            let mut decision = ResetDecision::waiting(awaits);
            decision.wake = Some(until);
            return Some(decision);
        }
        let (stopped, node) = self.stopped().zip(self.node)?;
        Some(ResetDecision::now(Act::Node(stopped.put_back(node, false))))
    }

    fn end(&self, failure: Option<(&str, &str)>) -> ResetDecision {
        let now = self.now;
        self.status(|next| {
            next.completion = Some(now);
            let Some((reason, message)) = failure else {
                next.set(RESTORED, "True", "ServiceRestoreSucceeded", "", now);
                next.set(COMPLETE, "True", "GPUResetSucceeded", "", now);
                let outcome = CompletionReason::Succeeded.name();
                next.set(ATTEMPT_COMPLETE, "True", outcome, "", now);
                "Succeeded".clone_into(&mut next.phase);
                return;
            };
            next.set(COMPLETE, "False", reason, message, now);
            let text = format!("{reason}: {message}");
            let outcome = outcome(reason).name();
            next.set(ATTEMPT_COMPLETE, "True", outcome, &text, now);
            "Failed".clone_into(&mut next.phase);
        })
    }

    /// Undoes everything and removes the finalizer.
    pub(super) fn delete(&self, since: Timestamp) -> ResetDecision {
        if !self.request.has_finalizer() {
            return ResetDecision::default();
        }
        let status = &self.request.status;
        let ended = status.completion.is_some();
        if !ended && status.condition(READY).is_some() && status.phase != "Terminating" {
            return self.status(|next| {
                "Terminating".clone_into(&mut next.phase);
                let reason = "FinalizerRestoringServices";
                next.set(TERMINATING, "True", reason, "", self.now);
            });
        }
        let undo = self.undo(later(since, STOPS_WITHIN));
        undo.unwrap_or_else(|| ResetDecision::now(Act::Finalizer(false)))
    }
}
