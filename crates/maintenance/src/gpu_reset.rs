//! The steps of a `GPUReset`: stop the services that hold GPUs open, reset the GPUs by a Job or
//! a provider, and restore the services.
//!
//! [`decide`] is pure. The next action follows from the status of the request, the node, and
//! the Job or provider, so a crash between two actions is harmless. Stopped services are
//! recorded on the node by the patch that stops them (`services.rs`). Every end restores them:
//! success, failure, a deadline, the deletion of the request (through its finalizer), and its
//! disappearance ([`left_behind`]).
//!
//! ```text
//! Ready -> ServicesTornDown -> ResetJobCreated -> ResetJobCompleted -> ServicesRestored -> Complete
//!    \____________\_________________\____________________\_____ failure: the Job is stopped, the
//!                                                               services are restored, Complete=False
//! ```

use jiff::{SignedDuration, Timestamp};
use model::node::{NodeChange, NodeView};
use serde_json::Value;

use crate::{Act, MaintenanceResource};

mod job;
mod observation;
mod services;
mod steps;

pub use job::{ResetGpus, job, job_name};
pub use observation::{ResetObservation, ResetState};
pub use services::{OperatorService, SERVICES, ServicePod, Stopped};

/// Condition that is true once GPUs are reset and services run.
pub const COMPLETE: &str = "Complete";
const READY: &str = "Ready";
const TORN_DOWN: &str = "ServicesTornDown";
const JOB_CREATED: &str = "ResetJobCreated";
const JOB_COMPLETED: &str = "ResetJobCompleted";
const RESTORED: &str = "ServicesRestored";

/// Steps in their order. A step whose condition is false has failed.
const STEPS: [&str; 5] = [READY, TORN_DOWN, JOB_CREATED, JOB_COMPLETED, RESTORED];

/// Settings for GPU resets in this cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ResetSettings {
    /// True if services hold GPUs open and have to be stopped.
    pub services: bool,
    /// Time limit for the start of a reset.
    pub timeout: SignedDuration,
    /// Namespace of the Job.
    pub namespace: String,
    /// Container image of the Job.
    pub image: String,
    /// Names of the image pull secrets.
    pub pull_secrets: Vec<String>,
    /// Runtime class of the Job's pod.
    pub runtime_class: Option<String>,
    /// Resources of the container, in Kubernetes' format.
    pub resources: Value,
    /// True if the Job writes a line to the machine's log when a GPU has recovered by the
    /// reset.
    pub write_log: bool,
}

// === impl ResetSettings ===

impl ResetSettings {
    /// Returns settings for a caller that only creates the Job with this image and does not
    /// stop services.
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

/// Input of a decision about a request.
#[derive(Clone, Copy, Debug)]
pub struct ResetInput<'a> {
    /// Request to decide about.
    pub request: &'a MaintenanceResource,
    /// Node of the request. `None` if the cluster has no node of this name.
    pub node: Option<&'a NodeView>,
    /// Pods of services on the node. `None` until they have been read.
    pub pods: Option<&'a [ServicePod]>,
    /// Observed state of the reset.
    pub reset: &'a ResetObservation,
    /// True if a provider carries out the reset instead of a Job.
    pub by_provider: bool,
    /// Other work on the node that comes first, such as another request. `None` if the request
    /// may proceed.
    pub before: Option<&'a str>,
    /// True if the configuration excludes the node.
    pub excluded: bool,
    /// Settings for GPU resets.
    pub settings: &'a ResetSettings,
    /// Start of this process's observation.
    pub looks_since: Timestamp,
    /// Time of the decision.
    pub now: Timestamp,
}

/// Decision about a request, with at most one action.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResetDecision {
    /// Action to take now.
    pub act: Option<Act>,
    /// Time of the next decision if nothing happens before.
    pub wake: Option<Timestamp>,
    /// Condition that the request waits for, in words for people.
    pub awaits: String,
}

/// Decides on the next action for a request.
pub fn decide(input: &ResetInput<'_>) -> ResetDecision {
    let ResetInput { request, now, .. } = *input;
    let status = &request.status;
    if let Some(since) = request.deleted_at {
        return input.delete(since);
    }
    if status.completion.is_some() {
        if let Some((stopped, node)) = input.stopped().zip(input.node) {
            return ResetDecision::now(Act::Node(stopped.put_back(node, false)));
        }
        // Nothing is left to undo, so the deletion of the resource need not wait.
        return ResetDecision {
            act: request.has_finalizer().then_some(Act::Finalizer(false)),
            ..ResetDecision::default()
        };
    }
    if !request.has_finalizer() {
        return ResetDecision::now(Act::Finalizer(true));
    }
    if status.condition(READY).is_none() {
        let mut next = status.clone();
        "Pending".clone_into(&mut next.phase);
        next.set(READY, "Unknown", "Pending", "", now);
        return ResetDecision::now(Act::Status(Box::new(next)));
    }
    if let Some(step) = STEPS.into_iter().find(|step| status.is_false(step)) {
        return input.fail_after(step);
    }
    let Some(node) = input.node else {
        let text = format!("the cluster has no node {}", request.node);
        return input.fails(READY, "NodeNotFound", &text);
    };
    if !status.is_true(READY) {
        if input.excluded {
            return input.fails(READY, "NodeExcluded", "the configuration excludes the node");
        }
        return input.begin(node);
    }
    if !status.is_true(TORN_DOWN) {
        return input.tear_down(node);
    }
    if !status.is_true(JOB_COMPLETED) {
        return input.reset(node);
    }
    input.restore(node)
}

/// Returns the change that restores the services stopped for a request that no longer exists.
/// `exists` returns whether there is a request with a uid.
pub fn left_behind(node: &NodeView, exists: impl Fn(&str) -> bool) -> Option<NodeChange> {
    let stopped = Stopped::read(node)?;
    (!exists(&stopped.uid)).then(|| stopped.put_back(node, false))
}

/// Returns whether the GPUs have been reset.
pub(crate) fn is_reset(request: &MaintenanceResource) -> bool {
    request.status.is_true(JOB_COMPLETED)
}

/// Returns whether a request is in progress.
pub(crate) fn is_active(request: &MaintenanceResource) -> bool {
    request.status.is_true(READY) && request.status.completion.is_none()
}

/// Returns whether a request is working on its node.
pub(crate) fn holds(request: &MaintenanceResource, node: Option<&NodeView>) -> bool {
    let stopped = node.and_then(Stopped::read);
    is_active(request) || stopped.is_some_and(|stopped| stopped.uid == request.uid)
}

/// Returns the reason of the failure, if the request ended in one.
pub(crate) fn failure(request: &MaintenanceResource) -> Option<String> {
    let complete = request.status.condition(COMPLETE)?;
    (complete.status == "False").then(|| complete.reason.clone())
}

// === impl ResetDecision ===

impl ResetDecision {
    pub(super) fn now(act: Act) -> Self {
        Self {
            act: Some(act),
            ..Self::default()
        }
    }

    pub(super) fn waiting(awaits: &str) -> Self {
        Self {
            awaits: awaits.to_owned(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests;
