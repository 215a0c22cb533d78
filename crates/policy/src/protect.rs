//! Marks with which other programs leave a node alone while it is out of service.

use std::fmt;

use serde::Deserialize;

/// A program that removes or upgrades nodes by itself, and has a mark to leave one alone. A
/// drained node is empty, which is a reason for these programs to act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProtectFrom {
    /// The cluster autoscaler, which removes empty nodes.
    ClusterAutoscaler,
    /// Karpenter, which removes empty nodes.
    Karpenter,
    /// The GPU operator's upgrade controller, which upgrades the driver of cordoned nodes.
    GpuDriverUpgrade,
}

/// A label or annotation of a node; its value is `true`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtectionMark {
    /// Key of a label.
    Label(&'static str),
    /// Key of an annotation.
    Annotation(&'static str),
}

// === impl ProtectFrom ===

impl ProtectFrom {
    /// All programs.
    pub const ALL: [Self; 3] = [
        Self::ClusterAutoscaler,
        Self::Karpenter,
        Self::GpuDriverUpgrade,
    ];

    /// Returns the mark of the program's own documentation.
    pub fn mark(self) -> ProtectionMark {
        match self {
            Self::ClusterAutoscaler => {
                ProtectionMark::Annotation("cluster-autoscaler.kubernetes.io/scale-down-disabled")
            }
            Self::Karpenter => ProtectionMark::Annotation("karpenter.sh/do-not-disrupt"),
            Self::GpuDriverUpgrade => ProtectionMark::Label("nvidia.com/gpu-driver-upgrade.skip"),
        }
    }
}

impl fmt::Display for ProtectFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ClusterAutoscaler => "cluster-autoscaler",
            Self::Karpenter => "karpenter",
            Self::GpuDriverUpgrade => "gpu-driver-upgrade",
        })
    }
}
