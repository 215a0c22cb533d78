//! Built-in policies: published fleet policies in the form of gpuwarden's rules, each with its
//! source. `policy diff` shows how they differ.

use policy::DEFAULT_POLICY;

/// Built-in policy with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Name, used as `preset:NAME`.
    pub name: &'static str,
    /// Effect of the policy, for people.
    pub what: &'static str,
    /// Source of its facts.
    pub source: &'static str,
    /// Text of the policy file.
    pub text: &'static str,
}

/// Returns all presets, gpuwarden's own first.
pub fn all() -> &'static [Preset] {
    &PRESETS
}

/// Returns the preset with this name.
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
        text: include_str!("../data/presets/nvsentinel.toml"),
    },
    Preset {
        name: "gke",
        what: "cordons for the 8 XIDs that GKE marks a node for",
        source: "GoogleCloudPlatform/container-engine-accelerators 06e703e6, \
                 pkg/gpu/nvidia/health_check/health_checker.go",
        text: include_str!("../data/presets/gke.toml"),
    },
    Preset {
        name: "eks",
        what: "cordons for the 21 XIDs for which EKS replaces a node",
        source: "aws/eks-node-monitoring-agent 3ca99028, monitors/nvidia/dcgm/dcgm_policies.go",
        text: include_str!("../data/presets/eks.toml"),
    },
    Preset {
        name: "k8s-device-plugin",
        what: "cordons for every XID but the 6 that are the application's own",
        source: "NVIDIA/k8s-device-plugin 02597b97, internal/rm/health.go",
        text: include_str!("../data/presets/k8s-device-plugin.toml"),
    },
];

#[cfg(test)]
mod tests {
    use contract::{HealthEvent, keys};
    use policy::{EventVariable, NodeVariable, Policy, RuleSetAnswer, event_variable};
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn presets_load_and_say_where_they_come_from() {
        let xid = |code: &str, is_fatal: bool| HealthEvent {
            agent: keys::SYSLOG_AGENT.into(),
            component_class: keys::COMPONENT_GPU.into(),
            check_name: keys::CHECK_XID.into(),
            error_code: vec![code.into()],
            is_fatal,
            ..HealthEvent::default()
        };
        let node = json!({"metadata": {"name": "n"}});
        let opted_out =
            json!({"metadata": {"name": "n", "labels": {keys::MANAGED_LABEL: "false"}}});
        let table: [(&str, &[&str], &[&str]); 5] = [
            ("default", &[], &["48"]),
            ("nvsentinel", &[], &["48"]),
            ("gke", &["48", "79", "140"], &["13", "45", "74", "109"]),
            (
                "eks",
                &["46", "79", "109", "158"],
                &["13", "45", "94", "145"],
            ),
            (
                "k8s-device-plugin",
                &["48", "79", "145"],
                &["13", "31", "43", "45", "68", "109"],
            ),
        ];
        assert_eq!(all().len(), table.len());
        for (name, out, stays) in table {
            let preset = find(name).unwrap();
            assert!(!preset.source.is_empty());
            let policy = Policy::parse(preset.text, name).unwrap();
            let asks = |event: &HealthEvent, node: &Value| {
                let event = EventVariable::new(&event_variable(event));
                let node = NodeVariable::new(node);
                policy
                    .rule_sets
                    .iter()
                    .any(|set| set.asks() && set.answer(&event, &node) == RuleSetAnswer::Matched)
            };
            for code in out {
                assert!(asks(&xid(code, false), &node), "{name} {code}");
            }
            for code in stays {
                assert!(!asks(&xid(code, false), &node), "{name} {code}");
            }
            assert!(asks(&xid("79", true), &node), "{name}");
            assert!(!asks(&xid("79", true), &opted_out), "{name}");
            let mut fallen = xid("GPU_FALLEN_OFF_BUS", true);
            fallen.check_name = keys::CHECK_GPU_FALLEN_OFF.into();
            assert!(asks(&fallen, &node), "{name}");
        }
        assert!(find("mars").is_none());
    }
}
