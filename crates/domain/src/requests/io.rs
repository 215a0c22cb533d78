//! What goes into the board and out of it.

use jiff::SignedDuration;
use serde_json::Value;

use super::{RequestKey, RequestKind};
use crate::gpu_reset::ServicePod;
use crate::handover;
use crate::node::{NodeChange, NodeView};

/// What the board is told.
#[derive(Clone, Debug)]
pub enum Input {
    /// A list of the requests of a kind begins.
    ListBegun(RequestKind),
    /// All of them were seen.
    Listed(RequestKind),
    /// One is there, new or changed.
    Seen(RequestKind, Box<Value>),
    /// One is gone.
    Gone(RequestKey),
    /// A node is as it says; `None`: there is none of this name.
    Node(String, Option<Box<NodeView>>),
    /// The pods of services on a node are these.
    Pods(String, Vec<ServicePod>),
    /// A list of Jobs begins, or has ended.
    Jobs {
        /// True once all were seen.
        listed: bool,
    },
    /// A Job is there, with what its pods said at their end; `None`: it is gone.
    Job(String, Option<Box<(Value, Option<String>)>>),
    /// Something else is at work on a node; `None`: not any more.
    Held(String, Option<String>),
    /// A node says that a request has changed it; perhaps that is not there any more.
    Marked(String),
    /// The answer to [`Effect::Act`].
    Answered(RequestKey, Answer),
    /// The answer to [`Effect::PutBack`].
    IsBack(String, Answer),
    /// Time has passed.
    Time,
}

/// The answer to an effect.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The request is this now.
    Request(Box<Value>),
    /// The node is this now.
    Node(Box<NodeView>),
    /// The Job is this.
    Job(Box<Value>),
    /// It was done, and there is nothing to be said.
    Done,
    /// It is refused for good, for this reason.
    Refused(String),
    /// It was not done, or nobody knows.
    Failed,
}

/// What the board has done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Tell of a node from now on; with the pods of services on it.
    Follow(String),
    /// Tell of it no more.
    Leave(String),
    /// Do something for a request.
    Act(RequestKey, Box<Act>),
    /// Change a node that was seen, for a request that is not there any more.
    PutBack(Box<NodeView>, NodeChange),
    /// Say what has happened.
    Tell(RequestNews),
}

/// What is done for a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Merge this into the request, if it still has the version that this names.
    Merge(Value),
    /// Merge this into its status, likewise.
    Status(Value),
    /// Change the node that was seen.
    Node(Box<NodeView>, NodeChange),
    /// Make the Job.
    Make(Value),
    /// Delete the Job of this name and uid, with its pods.
    Stop {
        /// Its name.
        name: String,
        /// Its uid.
        uid: String,
    },
}

/// What has happened to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestNews {
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
        /// The request.
        name: String,
        /// The node.
        node: String,
        /// The action that its event recommends.
        action: String,
        /// How far it was; `None`: it was not known.
        before: Option<handover::Phase>,
        /// How far it is; `None`: it is gone.
        after: Option<handover::Phase>,
        /// The word of the condition that has changed.
        reason: String,
        /// The time since it was made.
        age: Option<SignedDuration>,
    },
}
