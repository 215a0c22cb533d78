//! Cached results of decisions, with the inputs they depend on.

use std::sync::Arc;

use jiff::Timestamp;
use model::fault::{Cause, Fault};
use model::node::NodeView;
use model::position::Position;

use policy::Policy;
use policy::assess::{Desired, Dismissal};

/// Cached assessment of a node's faults, with its inputs.
#[derive(Debug)]
pub(super) struct Assessment {
    pub(super) view: Arc<NodeView>,
    pub(super) policy: Arc<Policy>,
    pub(super) faults: Vec<FaultVersion>,
    pub(super) dismissal: Option<Dismissal>,
    pub(super) desired: Desired,
}

/// Inputs of the conditions last written for a node.
#[derive(Debug)]
pub(super) struct ConditionInputs {
    pub(super) view: Arc<NodeView>,
    pub(super) faults: Vec<FaultVersion>,
    /// Number of checks that have reported on the node; it only grows.
    pub(super) checks: usize,
}

/// Version of a fault: what opened it, and its newest report.
#[derive(Debug, PartialEq)]
pub(super) struct FaultVersion {
    seq: Position,
    title: String,
    count: u64,
    last_seen: Timestamp,
    accepted_at: Timestamp,
    cause: Option<Cause>,
    awaits_primary: bool,
}

// === impl FaultVersion ===

impl FaultVersion {
    pub(super) fn of(fault: &Fault, now: Timestamp) -> Self {
        Self {
            seq: fault.seq,
            title: fault.title(),
            count: fault.count,
            last_seen: fault.last_seen,
            accepted_at: fault.accepted_at,
            cause: fault.cause.clone(),
            awaits_primary: fault
                .awaits_primary_until()
                .is_some_and(|until| now < until),
        }
    }
}
