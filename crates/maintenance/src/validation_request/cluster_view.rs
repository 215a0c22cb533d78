//! The state that decisions about a request depend on: its nodes, the objects of its runs, and
//! other requests.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use model::node::NodeView;
use serde_json::Value;

use super::ValidationRequest;

/// State of the cluster cluster a request.
pub struct ClusterView<'a> {
    /// Nodes by name. Missing ones have not been observed yet.
    pub nodes: &'a BTreeMap<String, NodeState>,
    /// Existing objects, by provider and name.
    pub objects: &'a BTreeMap<(String, String), Value>,
    /// Namespace of the objects.
    pub namespace: &'a str,
    /// All requests, by name.
    pub requests: &'a BTreeMap<String, ValidationRequest>,
    /// Names of malformed requests, which still hold their nodes.
    pub unreadable: &'a BTreeSet<String>,
    /// Time of the decision.
    pub now: Timestamp,
}

/// State of a node.
#[derive(Clone, Debug)]
pub enum NodeState {
    /// There is no node of this name.
    Gone,
    /// The node exists, in this state.
    There {
        /// Last observed state of the node.
        view: Box<NodeView>,
        /// Readiness of the node for tests.
        readiness: Readiness,
    },
}

/// Readiness of a node for tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// All criteria of the configuration hold.
    Ready,
    /// A criterion does not hold, which ends a running test.
    Not(String),
    /// Some input of the criteria is unknown: no test starts, and none ends.
    Unknown(&'static str),
}

/// State of an attempt's object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ObjectState {
    /// The object does not exist.
    Gone,
    /// The name belongs to another party's object.
    Foreign,
    /// The tests are running.
    UnderWay,
    /// The tests have passed.
    Succeeded,
    /// The tests have failed, with this message.
    Failed(String),
}

// === impl ClusterView ===

impl ClusterView<'_> {
    /// Returns whether a request of this name exists.
    pub(super) fn knows(&self, request: &str) -> bool {
        self.requests.contains_key(request) || self.unreadable.contains(request)
    }
}

// === impl NodeState ===

impl NodeState {
    /// Returns whether a decision may change between the two states. A heartbeat makes no
    /// difference.
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
    /// Returns the reason to wait for the named node. `None` if it is ready.
    pub(super) fn reason_to_wait(&self, node: &str) -> Option<String> {
        match self {
            Self::Ready => None,
            Self::Not(why) => Some(format!("{node} is not ready: {why}")),
            Self::Unknown(why) => Some(format!("{node}: {why}")),
        }
    }
}
