//! Settings of a fleet.

use std::sync::Arc;

use jiff::SignedDuration;
use model::mode::Mode;
use model::position::Position;

use crate::Owns;
use crate::brake::NodeLabel;
use crate::drain::DrainConfig;
use crate::remediation::RemediationConfig;

/// Settings of a fleet, fixed while a process runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Mode: observe, dry run or act.
    pub mode: Mode,
    /// Nodes that no other gpuwarden speaks for.
    pub owns: Owns,
    /// True if there is a cluster; without one no effect changes anything.
    pub cluster: bool,
    /// Id of the store.
    pub store: String,
    /// Feed position of the last event that counts as history.
    pub since: Position,
    /// True if the brake is on. Without it only a pause holds nodes back.
    pub brake: bool,
    /// Label of GPU nodes. The brake's percentages refer to their number.
    pub gpu_label: NodeLabel,
    /// Configuration of drains; `None` leaves the pods of nodes that are out of service alone.
    pub drain: Option<Arc<DrainConfig>>,
    /// Configuration of remediation; `None` leaves drained nodes alone.
    pub remediation: Option<Arc<RemediationConfig>>,
    /// Age limit of a node's newest report: older faults are dropped once the cluster no longer
    /// has the node.
    pub retention: SignedDuration,
    /// True if a node that flaps waits before it comes back. False where time only passes with
    /// events, as in a replay: no event would end the wait.
    pub returns_wait: bool,
}
