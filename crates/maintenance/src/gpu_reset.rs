//! A `GPUReset`, step by step: services that hold GPUs open are stopped, a Job resets the GPUs, or a provider
//! does, and the services are put back.
//!
//! [`decide`] is pure: what is done next follows from the status of the request, from the node and from the
//! Job or the provider, so a crash between any two effects changes nothing. What was stopped stands on the node from the
//! patch on that stops it (`services.rs`), and every way out puts it back: success, failure, a deadline, the
//! deletion of the request (by its finalizer), and its disappearance ([`left_behind`]).
//!
//! ```text
//! Ready -> ServicesTornDown -> ResetJobCreated -> ResetJobCompleted -> ServicesRestored -> Complete
//!    \____________\_________________\____________________\_____ a failure: the Job is stopped, the
//!                                                               services are put back, Complete=False
//! ```

use jiff::{SignedDuration, Timestamp};
use model::node::{NodeChange, NodeView};
use model::resource::ATTEMPT_COMPLETE;
use model::time::later;
use serde_json::Value;

use crate::SESSION_SEEN_WITHIN;
use crate::{Act, ITS_SESSION_HAS_ENDED, NOT_OUT, Outcome, Resource, SESSION_ENDED, Status};

mod job;
mod seen;
mod services;

pub use job::{Gpus, job, job_name};
pub use seen::{ResetSeen, ResetState};
pub use services::{SERVICES, Service, ServicePod, Stopped};

/// The condition that is true once GPUs are reset and services run.
pub const COMPLETE: &str = "Complete";
const READY: &str = "Ready";
const TORN_DOWN: &str = "ServicesTornDown";
const JOB_CREATED: &str = "ResetJobCreated";
const JOB_COMPLETED: &str = "ResetJobCompleted";
const RESTORED: &str = "ServicesRestored";
const TERMINATING: &str = "Terminating";

/// The steps, in their order: one whose condition is false has failed.
const STEPS: [&str; 5] = [READY, TORN_DOWN, JOB_CREATED, JOB_COMPLETED, RESTORED];

/// Reasons of a failure, our own: the provider has refused the signal for now, and too often or too long;
const NOT_TAKEN: &str = "ResetSignalNotTaken";
/// nobody knows whether it has taken it;
const UNCLEAR: &str = "ResetSignalUnclear";
/// and nobody knows how its reset has ended.
const TIMED_OUT: &str = "ResetTimeoutExceeded";
/// The reset has succeeded, and nobody can see whether the services are ready again.
const UNSEEN: &str = "RestoredServicesUnknown";

/// Time for the pods of stopped services to go. NVSentinel's.
const GONE_WITHIN: SignedDuration = SignedDuration::from_mins(5);
/// Time for them to be ready again. NVSentinel's.
const READY_WITHIN: SignedDuration = SignedDuration::from_mins(10);
/// Time after the deadline of a Job, or of a provider's reset, in which it is to be heard of.
const JOB_SLACK: SignedDuration = SignedDuration::from_mins(2);
/// Time for a process that has just begun to read pods and Jobs: a time that is over says nothing before.
const READ_WITHIN: SignedDuration = SignedDuration::from_mins(5);
/// Time for a Job to go that is stopped: the pods of a node that is gone never do.
const STOPS_WITHIN: SignedDuration = SignedDuration::from_mins(2);

/// How GPUs are reset in this cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ResetSettings {
    /// False: nothing holds the GPUs open that is to be stopped.
    pub services: bool,
    /// Time in which a reset is to be begun.
    pub timeout: SignedDuration,
    /// Namespace of the Job.
    pub namespace: String,
    /// Image of the Job.
    pub image: String,
    /// Secrets with which it is pulled.
    pub pull_secrets: Vec<String>,
    /// Runtime class of the Job's pod.
    pub runtime_class: Option<String>,
    /// Resources of its container, as Kubernetes has them.
    pub resources: Value,
    /// True if the reset is written to the log of the machine, where it gives the GPU back.
    pub write_log: bool,
}

// === impl ResetSettings ===

impl ResetSettings {
    /// Returns the settings of whoever only makes the Job, of this image: the services are another's to stop.
    pub fn of_job(image: &str) -> Self {
        Self {
            services: false,
            timeout: SignedDuration::ZERO,
            namespace: String::new(),
            image: image.to_owned(),
            pull_secrets: Vec::new(),
            runtime_class: None,
            resources: Value::Null,
            write_log: true,
        }
    }
}

/// A request to be decided about.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The request.
    pub request: &'a Resource,
    /// Its node; `None`: the cluster has none of this name.
    pub node: Option<&'a NodeView>,
    /// The pods of services on it; `None`: they could not be read yet.
    pub pods: Option<&'a [ServicePod]>,
    /// The reset of the request.
    pub reset: &'a ResetSeen,
    /// True if a provider carries it out, and no Job.
    pub by_provider: bool,
    /// What is at work on the node before it, such as another request; `None`: it is its turn.
    pub before: Option<&'a str>,
    /// True if the configuration says that the node is left alone.
    pub excluded: bool,
    /// How GPUs are reset.
    pub settings: &'a ResetSettings,
    /// Since when this process looks.
    pub looks_since: Timestamp,
    /// The time.
    pub now: Timestamp,
}

/// What is to be done now: at most one thing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// What is done.
    pub act: Option<Act>,
    /// When to ask again even if nothing happens.
    pub wake: Option<Timestamp>,
    /// What is awaited, for people.
    pub awaits: String,
}

/// Decides what is done next about a request.
pub fn decide(case: &Case<'_>) -> Decision {
    let Case { request, now, .. } = *case;
    let status = &request.status;
    if let Some(since) = request.deleted_at {
        return case.delete(since);
    }
    if status.completion.is_some() {
        if let Some((stopped, node)) = case.stopped().zip(case.node) {
            return Decision::now(Act::Node(stopped.put_back(node, false)));
        }
        // Nothing is left to be undone: whoever deletes it waits for nobody.
        return Decision {
            act: request.has_finalizer().then_some(Act::Finalizer(false)),
            ..Decision::default()
        };
    }
    if !request.has_finalizer() {
        return Decision::now(Act::Finalizer(true));
    }
    if status.condition(READY).is_none() {
        let mut next = status.clone();
        "Pending".clone_into(&mut next.phase);
        next.set(READY, "Unknown", "Pending", "", now);
        return Decision::now(Act::Status(Box::new(next)));
    }
    if let Some(step) = STEPS.into_iter().find(|step| status.is_false(step)) {
        return case.fail_after(step);
    }
    let Some(node) = case.node else {
        let text = format!("the cluster has no node {}", request.node);
        return case.fails(READY, "NodeNotFound", &text);
    };
    if !status.is_true(READY) {
        if case.excluded {
            return case.fails(READY, "NodeExcluded", "the configuration excludes the node");
        }
        return case.begin(node);
    }
    if !status.is_true(TORN_DOWN) {
        return case.tear_down(node);
    }
    if !status.is_true(JOB_COMPLETED) {
        return case.reset(node);
    }
    case.restore(node)
}

/// Returns the change that puts services back that a request has stopped which is not there any more.
/// `exists`: whether there is a request of this uid.
pub fn left_behind(node: &NodeView, exists: impl Fn(&str) -> bool) -> Option<NodeChange> {
    let stopped = Stopped::read(node)?;
    (!exists(&stopped.uid)).then(|| stopped.put_back(node, false))
}

/// Returns whether the GPUs are reset.
pub(crate) fn is_reset(request: &Resource) -> bool {
    request.status.is_true(JOB_COMPLETED)
}

/// Returns whether a request is under way.
pub(crate) fn is_active(request: &Resource) -> bool {
    request.status.is_true(READY) && request.status.completion.is_none()
}

/// Returns whether a request is at work on its node.
pub(crate) fn holds(request: &Resource, node: Option<&NodeView>) -> bool {
    let stopped = node.and_then(Stopped::read);
    is_active(request) || stopped.is_some_and(|stopped| stopped.uid == request.uid)
}

/// Returns the reason of the failure of a request, where it has ended so.
pub(crate) fn failure(request: &Resource) -> Option<String> {
    let complete = request.status.condition(COMPLETE)?;
    (complete.status == "False").then(|| complete.reason.clone())
}

/// Returns how a request ends whose failure has this reason.
fn outcome(reason: &str) -> Outcome {
    match reason {
        NOT_TAKEN => Outcome::TransientFailure,
        UNCLEAR | TIMED_OUT | UNSEEN => Outcome::AmbiguousFailure,
        // A reboot is tried next: what stopped the reset is not in its way.
        _ => Outcome::PermanentFailure,
    }
}

// === impl Case ===

impl Case<'_> {
    /// Returns what this request has stopped.
    fn stopped(&self) -> Option<Stopped> {
        let stopped = Stopped::read(self.node?)?;
        (stopped.uid == self.request.uid).then_some(stopped)
    }

    fn status(&self, change: impl FnOnce(&mut Status)) -> Decision {
        let mut next = self.request.status.clone();
        change(&mut next);
        if next == self.request.status {
            return Decision::default(); // Said already.
        }
        Decision::now(Act::Status(Box::new(next)))
    }

    /// Says in the status that a step goes on, and then waits until a time.
    fn waits(&self, kind: &str, reason: &str, why: &str, until: Option<Timestamp>) -> Decision {
        let mut decision = self.status(|next| next.set(kind, "Unknown", reason, why, self.now));
        decision.wake = until;
        why.clone_into(&mut decision.awaits);
        decision
    }

    fn fails(&self, kind: &str, reason: &str, why: &str) -> Decision {
        self.status(|next| next.set(kind, "False", reason, why, self.now))
    }

    /// Waits for its turn, and for others to let go of the node.
    fn begin(&self, node: &NodeView) -> Decision {
        let seen = self.request.status.since(READY).unwrap_or(self.now);
        if !self.request.is_permitted(node) {
            let why = ITS_SESSION_HAS_ENDED;
            let until = later(seen, SESSION_SEEN_WITHIN);
            if self.now >= until {
                return self.fails(READY, SESSION_ENDED, why);
            }
            return self.waits(READY, "Pending", why, Some(until));
        }
        let until = later(seen, self.settings.timeout);
        let other = Stopped::read(node).filter(|one| one.uid != self.request.uid);
        let other = other.map(|one| format!("GPUReset {}", one.request));
        let at_work = || services::at_work(node).filter(|_| self.settings.services);
        let before = self.before.map(str::to_owned).or(other).or_else(at_work);
        let before = before.map(|before| format!("{before} is at work on the node"));
        let waits = self.request.waits_for_session(node);
        let Some(why) = before.or_else(|| waits.then(|| NOT_OUT.to_owned())) else {
            return self.status(|next| {
                // Its time begins with its turn, and not when it was seen.
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

    /// Stops the services that hold GPUs open; again, where somebody has started one.
    fn tear_down(&self, node: &NodeView) -> Decision {
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
            return Decision::now(act);
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

    /// Waits until the pods of services can be read; a step for which they never can has failed.
    fn waits_for_pods(&self, step: &str, until: Timestamp) -> Decision {
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
        let mut decision = Decision::waiting(&format!("{what} to be read"));
        decision.wake = Some(until);
        decision
    }

    fn stop(&self, node: &NodeView, pods: &[ServicePod]) -> Option<Act> {
        let before = self.stopped();
        let whose = (self.request.name.as_str(), self.request.uid.as_str());
        services::stop(node, pods, before.as_ref(), whose, self.now).map(Act::Node)
    }

    /// Has the GPUs reset.
    fn reset(&self, node: &NodeView) -> Decision {
        let created = self.request.status.is_true(JOB_CREATED);
        if self.settings.services {
            match self.pods {
                // Somebody has started a service in between: it would hold the GPUs open.
                Some(pods) => {
                    if let Some(act) = self.stop(node, pods) {
                        return Decision::now(act);
                    }
                }
                None if !created => return self.waits_for_pods(JOB_CREATED, self.last_moment()),
                None => {}
            }
        }
        let what = self.what();
        match self.reset {
            ResetSeen::Unknown => {
                let until = self.at_least_read(self.unseen_until());
                if self.now >= until {
                    let text = format!("{what} cannot be read, and nobody knows how it ended");
                    return self.fails(JOB_COMPLETED, TIMED_OUT, &text);
                }
                let mut decision = Decision::waiting(&format!("{what} to be read"));
                decision.wake = Some(until);
                decision
            }
            ResetSeen::Absent if created => {
                let text = format!("{what} is gone, and nobody knows how it ended");
                self.fails(JOB_COMPLETED, "ResetJobNotFound", &text)
            }
            ResetSeen::Absent => self.make(node),
            ResetSeen::Refused(outcome, why) => {
                let reason = match outcome {
                    Outcome::TransientFailure => NOT_TAKEN,
                    _ => "ResetJobCreationFailed",
                };
                self.fails(JOB_CREATED, reason, why)
            }
            ResetSeen::Unclear => {
                let until = self.last_moment();
                if self.now >= until {
                    let text = "nobody knows whether the provider has reset the GPUs";
                    return self.fails(JOB_CREATED, UNCLEAR, text);
                }
                let mut decision = Decision::waiting("the provider to know of its signal");
                decision.wake = Some(until);
                decision
            }
            ResetSeen::Anothers => {
                let text = format!("{what} is not this request's");
                self.fails(JOB_CREATED, "ResetJobCreationFailed", &text)
            }
            ResetSeen::Ours(_) if !created => self.status(|next| {
                let job = (
                    self.settings.namespace.clone(),
                    job_name(&self.request.name),
                );
                next.job = (!self.by_provider).then_some(job);
                let reason = "ResetJobCreationSucceeded";
                next.set(JOB_CREATED, "True", reason, "", self.now);
            }),
            ResetSeen::Ours(state) => self.watch(state),
        }
    }

    /// Returns the reset itself, for people.
    fn what(&self) -> String {
        if self.by_provider {
            return "the reset by the provider".to_owned();
        }
        format!("Job {}", job_name(&self.request.name))
    }

    /// Returns when a reset has to be on its way.
    fn last_moment(&self) -> Timestamp {
        let start = self.request.status.start.unwrap_or(self.now);
        later(later(start, self.settings.timeout), GONE_WITHIN)
    }

    /// Returns until when a reset that cannot be read is waited for: no longer than for one that can be.
    fn unseen_until(&self) -> Timestamp {
        let begun = self.request.status.since(JOB_CREATED);
        begun.map_or_else(
            || self.last_moment(),
            |begun| later(later(begun, self.limit().0), JOB_SLACK),
        )
    }

    /// Returns until when something is waited for that cannot be read.
    fn at_least_read(&self, until: Timestamp) -> Timestamp {
        until.max(later(self.looks_since, READ_WITHIN))
    }

    /// Returns the time that a reset has, and the reason where it takes longer.
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

    /// Has the Job made, or the signal sent, unless it is too late for that.
    fn make(&self, node: &NodeView) -> Decision {
        if !self.request.is_permitted(node) {
            return self.fails(JOB_CREATED, SESSION_ENDED, ITS_SESSION_HAS_ENDED);
        }
        let (until, what) = (self.last_moment(), self.what());
        if self.request.waits_for_session(node) && self.now < until {
            return Decision {
                act: None,
                wake: Some(until),
                awaits: NOT_OUT.to_owned(),
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
        Decision {
            act: Some(Act::Make(job::job_of(self.request, self.settings))),
            wake: Some(until),
            awaits: format!("{what} to be begun"),
        }
    }

    /// Watches a reset that is on its way.
    fn watch(&self, state: &ResetState) -> Decision {
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
                    let text = format!("{what} does not come to its end");
                    return self.fails(JOB_COMPLETED, reason, &text);
                }
                let why = format!("the end of {what}");
                self.waits(JOB_COMPLETED, "ResetJobRunning", &why, Some(until))
            }
        }
    }

    /// Puts the services back after a reset, waits for them, and ends.
    fn restore(&self, node: &NodeView) -> Decision {
        let Some(stopped) = self.stopped() else {
            return self.end(None);
        };
        if !stopped.labels.is_empty() {
            return Decision::now(Act::Node(stopped.put_back(node, true)));
        }
        let Some(pods) = self.pods else {
            let since = self.request.status.since(JOB_COMPLETED);
            let until = later(since.unwrap_or(self.now), READY_WITHIN);
            return self.waits_for_pods(RESTORED, until);
        };
        let missing = stopped.not_ready(node, pods);
        if missing.is_empty() {
            return Decision::now(Act::Node(stopped.put_back(node, false)));
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

    /// Ends after a failure: the Job is stopped and the services are put back first.
    fn fail_after(&self, step: &'static str) -> Decision {
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

    /// Returns what is still to be undone. A Job that does not go is waited for until a time, and so is a
    /// provider, which nobody can stop.
    fn undo(&self, until: Timestamp) -> Option<Decision> {
        let waits = self.now < until && self.node.is_some();
        let awaits = match self.reset {
            ResetSeen::Ours(ResetState::Active(_)) if self.by_provider => {
                Some("the end of its reset")
            }
            ResetSeen::Ours(ResetState::Active(_)) => return Some(Decision::now(Act::Stop)),
            ResetSeen::Ours(ResetState::Deleting) => Some("its Job to go"),
            ResetSeen::Unknown => Some("its Job to be read"),
            ResetSeen::Unclear => Some("the provider to know of its signal"),
            _ => None,
        };
        if let Some(awaits) = awaits.filter(|_| waits) {
            let mut decision = Decision::waiting(awaits);
            decision.wake = Some(until);
            return Some(decision);
        }
        let (stopped, node) = self.stopped().zip(self.node)?;
        Some(Decision::now(Act::Node(stopped.put_back(node, false))))
    }

    fn end(&self, failure: Option<(&str, &str)>) -> Decision {
        let now = self.now;
        self.status(|next| {
            next.completion = Some(now);
            let Some((reason, message)) = failure else {
                next.set(RESTORED, "True", "ServiceRestoreSucceeded", "", now);
                next.set(COMPLETE, "True", "GPUResetSucceeded", "", now);
                let outcome = Outcome::Succeeded.word();
                next.set(ATTEMPT_COMPLETE, "True", outcome, "", now);
                "Succeeded".clone_into(&mut next.phase);
                return;
            };
            next.set(COMPLETE, "False", reason, message, now);
            let text = format!("{reason}: {message}");
            let outcome = outcome(reason).word();
            next.set(ATTEMPT_COMPLETE, "True", outcome, &text, now);
            "Failed".clone_into(&mut next.phase);
        })
    }

    /// Undoes everything, and lets the request go.
    fn delete(&self, since: Timestamp) -> Decision {
        if !self.request.has_finalizer() {
            return Decision::default();
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
        undo.unwrap_or_else(|| Decision::now(Act::Finalizer(false)))
    }
}

// === impl Decision ===

impl Decision {
    fn now(act: Act) -> Self {
        Self {
            act: Some(act),
            ..Self::default()
        }
    }

    fn waiting(awaits: &str) -> Self {
        Self {
            awaits: awaits.to_owned(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests;
