//! Inputs and effects of the board.

use jiff::SignedDuration;
use model::node::{NodeChange, NodeView};
use serde_json::Value;

use crate::gpu_reset::{ResetGpus, ServicePod};
use crate::handover::HandoverPhase;
use crate::janitor::config::ProviderPlace;
use crate::janitor::sending::{ProviderAnswer, Question};
use crate::janitor::signal::NodeObservation;
use crate::{Expiry, Maintenance, MaintenanceResource, ResourceKey};

/// Input of the board.
#[derive(Clone, Debug)]
pub enum Input {
    /// A list of the resources of a kind starts.
    ListBegun(Maintenance),
    /// The list of a kind is complete.
    Listed(Maintenance),
    /// A resource is new or changed.
    Updated(Box<MaintenanceResource>),
    /// A resource was deleted.
    Deleted(ResourceKey),
    /// State of a node. `None` if there is no node of this name.
    Node(String, Option<Box<NodeUpdate>>),
    /// Service pods on a node.
    Pods(String, Vec<ServicePod>),
    /// A list of Jobs starts or ends.
    Jobs {
        /// True at the end of the list.
        listed: bool,
    },
    /// A Job, with the termination message of its pods. `None` if it was deleted.
    Job(String, Option<Box<(Value, Option<String>)>>),
    /// A node carries the mark of a resource, which may no longer exist.
    NodeMarked(String),
    /// Response to [`Effect::Write`] or [`Effect::Merge`].
    Written(ResourceKey, WriteResult),
    /// Response to [`Effect::Ask`], with the operation of the question.
    Answered(ResourceKey, String, ProviderAnswer),
    /// Response to [`Effect::Change`]: the resource, the node, and the state of the node after
    /// the change. `None` if the node was not changed, or the result is unknown.
    Changed(Option<ResourceKey>, String, Option<Box<NodeView>>),
    /// Response to [`Effect::Make`], for this resource.
    Created(ResourceKey, CreateResult),
    /// Response to [`Effect::Stop`], whether or not it succeeded.
    Stopped(ResourceKey),
    /// Response to [`Effect::Expire`], whether or not it succeeded.
    ExpiryTried(ResourceKey),
    /// Response to [`Effect::DeleteNode`], whether or not it succeeded.
    NodeTried(ResourceKey),
    /// The time given by `wake_at` has come.
    Time,
}

/// State of a node.
#[derive(Clone, Debug)]
pub struct NodeUpdate {
    /// Parts of the node that signals depend on.
    pub observation: NodeObservation,
    /// View of the node for changes.
    pub view: NodeView,
}

/// Response to a write.
#[derive(Clone, Debug)]
pub enum WriteResult {
    /// State of the resource after the write.
    Done(Box<MaintenanceResource>),
    /// The resource has changed since it was observed, or was deleted.
    Changed,
    /// The write failed, or its result is unknown.
    Failed,
}

/// Response to the creation of a Job.
#[derive(Clone, Debug)]
pub enum CreateResult {
    /// State of the created Job.
    Done(Box<Value>),
    /// A Job of this name exists. The watch shows its owner.
    Exists,
    /// The Job was refused permanently, for this reason.
    Refused(String),
    /// The creation failed, or its result is unknown.
    Failed,
}

/// Effect of the board.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Start watching a node.
    WatchNode(String),
    /// Start watching the service pods of a node.
    WatchPods(String),
    /// Stop watching a node and its pods.
    StopWatching(String),
    /// Write the status of a resource, if it still has this version.
    Write {
        /// Key of the resource.
        key: ResourceKey,
        /// Expected version of the resource.
        version: String,
        /// Field `status` as a merge patch.
        status: Value,
    },
    /// Merge a patch into a resource, if it still has the version in the patch.
    Merge(ResourceKey, Value),
    /// Send a question or a signal to a provider.
    Ask {
        /// Resource of the question.
        key: ResourceKey,
        /// Node of the resource.
        node: String,
        /// Id of the operation.
        operation: String,
        /// GPUs to reset. Empty for other actions.
        gpus: ResetGpus,
        /// Address of the provider.
        provider: ProviderPlace,
        /// Question or signal to send.
        question: Question,
    },
    /// Change an observed node on behalf of a resource. `None` if the resource no longer
    /// exists.
    Change(Option<ResourceKey>, Box<NodeView>, NodeChange),
    /// Create the Job of a resource.
    Make(ResourceKey, Value),
    /// Delete a Job with its pods.
    Stop {
        /// Resource of the Job.
        key: ResourceKey,
        /// Name of the Job.
        name: String,
        /// `metadata.uid` of the Job.
        uid: String,
    },
    /// Delete the node object with this uid.
    DeleteNode {
        /// Resource that requests the deletion.
        key: ResourceKey,
        /// Name of the node.
        node: String,
        /// `metadata.uid` of the node.
        uid: String,
    },
    /// Record when an ended resource is to be deleted, or delete it.
    Expire(ResourceKey, Expiry),
    /// Report an event to metrics and people.
    Notify(ResourceEvent),
}

/// Event of a resource, for metrics and people.
#[derive(Clone, Debug, PartialEq)]
pub enum ResourceEvent {
    /// A reboot or a termination has started.
    Begun {
        /// Resource that has started.
        key: ResourceKey,
        /// Node of the resource.
        node: String,
    },
    /// A reboot or a termination has ended.
    Ended {
        /// Resource that has ended.
        key: ResourceKey,
        /// Node of the resource.
        node: String,
        /// Reason of the condition `AttemptComplete`.
        outcome: String,
        /// Message of the condition, for people.
        message: String,
        /// Time from start to end. `None` if the work never started.
        took: Option<SignedDuration>,
    },
    /// A reset has started.
    ResetBegun {
        /// Node of the reset.
        node: String,
    },
    /// A reset has ended.
    ResetEnded {
        /// Node of the reset.
        node: String,
        /// Reason of the failure. `None` after success.
        failure: Option<String>,
        /// Time since the start of the request.
        took: Option<SignedDuration>,
        /// Number of running resets of the node.
        active: usize,
    },
    /// A hand-over has made progress.
    HandOver {
        /// Name of the request.
        name: String,
        /// Node of the request.
        node: String,
        /// Action recommended by the request's event.
        action: String,
        /// Previous progress. `None` for a new request.
        before: Option<HandoverPhase>,
        /// Current progress. `None` for a deleted request.
        after: Option<HandoverPhase>,
        /// Reason of the condition about the release of the node.
        reason: String,
        /// Age of the request.
        age: SignedDuration,
    },
}
