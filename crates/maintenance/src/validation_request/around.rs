//! What is known around a request: its nodes, the objects of its runs, and the other requests.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use model::node::NodeView;
use serde_json::Value;

use super::Request;

/// What is known around a request.
pub struct Around<'a> {
    /// Its nodes; one that is not in it has not been looked at yet.
    pub nodes: &'a BTreeMap<String, NodeState>,
    /// Objects by provider and name; one that is not in it is not there.
    pub objects: &'a BTreeMap<(String, String), Value>,
    /// The namespace of the objects.
    pub namespace: &'a str,
    /// All requests, by name.
    pub requests: &'a BTreeMap<String, Request>,
    /// The names of requests that cannot be read: they hold their nodes all the same.
    pub unreadable: &'a BTreeSet<String>,
    /// The time.
    pub now: Timestamp,
}

/// A node of a request.
#[derive(Clone, Debug)]
pub enum NodeState {
    /// There is none of this name.
    Gone,
    /// It is there.
    There {
        /// As it was last seen.
        view: Box<NodeView>,
        /// Whether it is ready for tests.
        readiness: Readiness,
    },
}

/// Whether a node is ready for tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It is.
    Ready,
    /// A criterion does not hold, which ends a run.
    Not(String),
    /// Not all is known that criteria look at: nothing begins, and nothing ends.
    Unknown(&'static str),
}

/// The state of the object of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ObjectState {
    /// It is not there.
    Gone,
    /// Somebody else's has its name.
    Foreign,
    /// It has not come to its end.
    UnderWay,
    /// The tests have passed.
    Succeeded,
    /// They have not; with what it says.
    Failed(String),
}

// === impl Around ===

impl Around<'_> {
    /// Returns whether there is a request of this name.
    pub(super) fn knows(&self, request: &str) -> bool {
        self.requests.contains_key(request) || self.unreadable.contains(request)
    }
}

// === impl NodeState ===

impl NodeState {
    /// Returns whether a request may be decided about otherwise after this than after the other one: a heartbeat
    /// changes nothing.
    pub fn differs_from(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Gone, Self::Gone) => false,
            (
                Self::There { view, readiness },
                Self::There {
                    view: other,
                    readiness: of_other,
                },
            ) => {
                readiness != of_other
                    || view.uid != other.uid
                    || view.unschedulable != other.unschedulable
                    || view.taints != other.taints
                    || view.labels != other.labels
                    || view.annotations != other.annotations
            }
            _ => true,
        }
    }
}

// === impl Readiness ===

impl Readiness {
    /// Returns what is waited for of the node of this name; `None`: nothing.
    pub(super) fn waits(&self, node: &str) -> Option<String> {
        match self {
            Self::Ready => None,
            Self::Not(why) => Some(format!("{node} is not ready: {why}")),
            Self::Unknown(why) => Some(format!("{node}: {why}")),
        }
    }
}
