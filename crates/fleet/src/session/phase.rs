//! Phases of a session.

use contract::keys;
use model::ownership::SessionMark;
use serde::{Deserialize, Serialize};

/// Phases of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The node has no marks of ours, and needs none.
    #[default]
    Idle,
    /// The node is to be taken out of service, and the brake holds it back.
    Held,
    /// The node is to be taken out of service; not yet observed.
    Quarantining,
    /// The node is out of service.
    Quarantined,
    /// The node is out of service, and pods leave it.
    Draining,
    /// The node is out of service, and all pods that were to leave have left.
    Drained,
    /// The node is out of service and under remediation.
    Remediating,
    /// The node is out of service and was remediated; its faults have yet to recover.
    Remediated,
    /// The node is out of service, and a person has to remediate it.
    RemediationFailed,
    /// The node is to be given back; not yet observed. Stored as `releasing`.
    #[serde(rename = "releasing")]
    Returning,
}

// === impl Phase ===

impl Phase {
    /// Returns the phase of an out-of-service node, from its session mark.
    pub(super) fn of(mark: &SessionMark) -> Self {
        match mark.state() {
            keys::STATE_DRAINING => Self::Draining,
            keys::STATE_DRAINED => Self::Drained,
            keys::STATE_REMEDIATING => Self::Remediating,
            keys::STATE_REMEDIATED => Self::Remediated,
            keys::STATE_REMEDIATION_FAILED => Self::RemediationFailed,
            _ => Self::Quarantined,
        }
    }

    /// Returns whether the node is out of service and is to stay so.
    pub fn is_out(self) -> bool {
        matches!(
            self,
            Self::Quarantined
                | Self::Draining
                | Self::Drained
                | Self::Remediating
                | Self::Remediated
                | Self::RemediationFailed
        )
    }

    /// Returns the phase's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Held => "held",
            Self::Quarantining => "quarantining",
            Self::Quarantined => "quarantined",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Remediating => "remediating",
            Self::Remediated => "remediated",
            Self::RemediationFailed => "remediation-failed",
            Self::Returning => "releasing",
        }
    }
}
