//! What goes into the board and out of it.

use jiff::SignedDuration;
use model::node::{NodeChange, NodeView};
use serde_json::Value;

use crate::gpu_reset::{Gpus, ServicePod};
use crate::handover::Phase;
use crate::janitor::config::ProviderPlace;
use crate::janitor::sending::{Answer, Question};
use crate::janitor::signal::NodeSeen;
use crate::{Expiry, Key, Maintenance, Resource};

/// What the board is told.
#[derive(Clone, Debug)]
pub enum Input {
    /// A list of the resources of a kind begins.
    ListBegun(Maintenance),
    /// All of them were seen.
    Listed(Maintenance),
    /// One is there, new or changed.
    Seen(Box<Resource>),
    /// One is gone.
    Gone(Key),
    /// A node is as it says; `None`: there is none of this name.
    Node(String, Option<Box<NodeTold>>),
    /// The pods of services on a node are these.
    Pods(String, Vec<ServicePod>),
    /// A list of Jobs begins, or has ended.
    Jobs {
        /// True once all were seen.
        listed: bool,
    },
    /// A Job is there, with what its pods said at their end; `None`: it is gone.
    Job(String, Option<Box<(Value, Option<String>)>>),
    /// A node says that a resource has changed it; perhaps that is not there any more.
    Marked(String),
    /// The answer to [`Effect::Write`] or [`Effect::Merge`].
    Written(Key, Written),
    /// The answer to [`Effect::Ask`], with the operation that was asked about.
    Answered(Key, String, Answer),
    /// The answer to [`Effect::Change`]: for which resource, which node, and what it is now; `None`: it was not
    /// changed, or nobody knows.
    Changed(Option<Key>, String, Option<Box<NodeView>>),
    /// The answer to [`Effect::Make`].
    Made(Key, Made),
    /// The answer to [`Effect::Stop`]: it was tried.
    Stopped(Key),
    /// The answer to [`Effect::Expire`]: it was tried.
    Tried(Key),
    /// The answer to [`Effect::DeleteNode`]: it was tried.
    NodeTried(Key),
    /// Time has passed.
    Time,
}

/// A node that is told of.
#[derive(Clone, Debug)]
pub struct NodeTold {
    /// As signals look at it.
    pub seen: NodeSeen,
    /// As it can be changed.
    pub view: NodeView,
}

/// The answer to a write.
#[derive(Clone, Debug)]
pub enum Written {
    /// The resource after it.
    Done(Box<Resource>),
    /// The resource is not any more what was seen, or gone.
    Changed,
    /// It was not made, or nobody knows.
    Failed,
}

/// The answer to the making of a Job.
#[derive(Clone, Debug)]
pub enum Made {
    /// The Job is this.
    Done(Box<Value>),
    /// There is one of its name, and the watch tells whose.
    Exists,
    /// It is refused for good, for this reason.
    Refused(String),
    /// It was not made, or nobody knows.
    Failed,
}

/// What the board has done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Tell of a node from now on.
    Follow(String),
    /// Tell of the pods of services on it as well.
    FollowPods(String),
    /// Tell of it and its pods no more.
    Leave(String),
    /// Write the status of a resource, if it still has this version.
    Write {
        /// The resource.
        key: Key,
        /// Its version.
        version: String,
        /// The field `status` as a merge patch.
        status: Value,
    },
    /// Merge a patch into a resource, if it still has the version that this names.
    Merge(Key, Value),
    /// Ask a provider.
    Ask {
        /// The resource.
        key: Key,
        /// Its node.
        node: String,
        /// The operation.
        operation: String,
        /// The GPUs, for a reset.
        gpus: Gpus,
        /// The provider.
        provider: ProviderPlace,
        /// The question.
        question: Question,
    },
    /// Change a node that was seen, for a resource; `None`: for one that is not there any more.
    Change(Option<Key>, Box<NodeView>, NodeChange),
    /// Make the Job of a resource.
    Make(Key, Value),
    /// Delete a Job with its pods.
    Stop {
        /// The resource.
        key: Key,
        /// The name of the Job.
        name: String,
        /// Its uid.
        uid: String,
    },
    /// Delete the node object of this uid.
    DeleteNode {
        /// The resource.
        key: Key,
        /// The node.
        node: String,
        /// Its uid.
        uid: String,
    },
    /// Say when a resource that has ended is to be deleted, or delete it.
    Expire(Key, Expiry),
    /// Say what has happened.
    Tell(News),
}

/// What has happened to a resource.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// A reboot or a termination was begun.
    Begun {
        /// The resource.
        key: Key,
        /// Its node.
        node: String,
    },
    /// It has ended.
    Ended {
        /// The resource.
        key: Key,
        /// Its node.
        node: String,
        /// How, as the reason of `AttemptComplete` says.
        outcome: String,
        /// Why, for people.
        message: String,
        /// The time from its begin to its end; `None` where nothing was begun.
        took: Option<SignedDuration>,
    },
    /// A reset is begun.
    ResetBegun {
        /// The node.
        node: String,
    },
    /// A reset has ended.
    ResetEnded {
        /// The node.
        node: String,
        /// The reason of a failure; `None`: it has succeeded.
        failure: Option<String>,
        /// The time since it was asked for.
        took: Option<SignedDuration>,
        /// Number of resets of the node that are under way.
        active: usize,
    },
    /// A node is handed over, put aside or back.
    HandOver {
        /// The name of the resource.
        name: String,
        /// The node.
        node: String,
        /// The action that its event recommends.
        action: String,
        /// How far it was; `None`: it was not known.
        before: Option<Phase>,
        /// How far it is; `None`: it is gone.
        after: Option<Phase>,
        /// The word of the condition that has changed.
        reason: String,
        /// The time since it was made.
        age: SignedDuration,
    },
}
