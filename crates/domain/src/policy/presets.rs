//! Named policies that are built in: published fleet policies, each in our rules and with
//! the place where its facts are published. What they disagree on is shown by
//! `policy diff`.

use super::DEFAULT_POLICY;

/// A named policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Name, behind `preset:`.
    pub name: &'static str,
    /// What it does, for people.
    pub what: &'static str,
    /// Where its facts are published.
    pub source: &'static str,
    /// The policy file.
    pub text: &'static str,
}

/// All presets, our own first.
pub fn all() -> &'static [Preset] {
    &PRESETS
}

/// The preset of this name.
pub fn find(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

const PRESETS: [Preset; 5] = [
    Preset {
        name: "default",
        what: "cordons for a fatal event, or one that asks for REPLACE_VM, of any monitor",
        source: "gpuwarden; what holds without --policy",
        text: DEFAULT_POLICY,
    },
    Preset {
        name: "nvsentinel",
        what: "cordons for fatal events of NVSentinel's own monitors",
        source: "NVIDIA/NVSentinel v1.14, \
                 distros/kubernetes/nvsentinel/charts/fault-quarantine/values.yaml",
        text: include_str!("../../data/presets/nvsentinel.toml"),
    },
    Preset {
        name: "gke",
        what: "cordons for the 8 XIDs that GKE marks a node for",
        source: "GoogleCloudPlatform/container-engine-accelerators 06e703e6, \
                 pkg/gpu/nvidia/health_check/health_checker.go",
        text: include_str!("../../data/presets/gke.toml"),
    },
    Preset {
        name: "eks",
        what: "cordons for the 21 XIDs for which EKS replaces a node",
        source: "aws/eks-node-monitoring-agent 3ca99028, monitors/nvidia/dcgm/dcgm_policies.go",
        text: include_str!("../../data/presets/eks.toml"),
    },
    Preset {
        name: "k8s-device-plugin",
        what: "cordons for every XID but the 6 that are the application's own",
        source: "NVIDIA/k8s-device-plugin 02597b97, internal/rm/health.go",
        text: include_str!("../../data/presets/k8s-device-plugin.toml"),
    },
];
