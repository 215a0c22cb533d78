//! Other programs that are at work on a node, by the marks that they leave on it.
//!
//! docs/who-else-acts.md describes what each does; `gpuwarden doctor cluster` finds those that the
//! cluster has.

use std::fmt;

use crate::node::NodeView;

/// A program that is at work on a node. Displayed for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Actor {
    /// Name of the program.
    pub name: &'static str,
    /// Kind and key of the mark.
    mark: Mark,
    /// Setting with which it and gpuwarden live together.
    pub advice: &'static str,
}

/// A mark of a program on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    /// Key of a taint.
    Taint(&'static str),
    /// Key of a label, and the values, if any, that mean that nothing is going on.
    Label(&'static str, &'static [&'static str]),
    /// Key of an annotation, and the values, if any, that mean that nothing is going on.
    Annotation(&'static str, &'static [&'static str]),
}

const KARPENTER: &str =
    "protect-from = [\"karpenter\"] in the policy keeps it off nodes that are out";
const AUTOSCALER: &str =
    "protect-from = [\"cluster-autoscaler\"] in the policy keeps it off nodes that are out";
const UPGRADE: &str =
    "protect-from = [\"gpu-driver-upgrade\"] in the policy keeps it off nodes that are out";
const NOTHING: &str = "nothing has to be set: its marks stay, and gpuwarden undoes only its own";

/// The programs, with the marks of their documentation.
const ACTORS: [Actor; 16] = [
    actor(
        "Karpenter",
        Mark::Taint("karpenter.sh/disrupted"),
        KARPENTER,
    ),
    actor(
        "Karpenter",
        Mark::Taint("karpenter.sh/disruption"),
        KARPENTER,
    ),
    actor(
        "the cluster autoscaler",
        Mark::Taint("ToBeDeletedByClusterAutoscaler"),
        AUTOSCALER,
    ),
    actor(
        "the cluster autoscaler",
        Mark::Taint("DeletionCandidateOfClusterAutoscaler"),
        AUTOSCALER,
    ),
    actor(
        "the GPU operator's upgrade controller",
        Mark::Label(
            "nvidia.com/gpu-driver-upgrade-state",
            &["", "unknown", "upgrade-done"],
        ),
        UPGRADE,
    ),
    actor(
        "the network operator's upgrade controller",
        Mark::Label(
            "nvidia.com/ofed-driver-upgrade-state",
            &["", "unknown", "upgrade-done"],
        ),
        NOTHING,
    ),
    actor(
        "GKE's maintenance handler",
        Mark::Taint("cloud.google.com/impending-node-termination"),
        NOTHING,
    ),
    actor(
        "GKE's maintenance handler",
        Mark::Label("cloud.google.com/active-node-maintenance", &["", "false"]),
        NOTHING,
    ),
    actor(
        "AKS' remediator",
        Mark::Taint("remediator.kubernetes.azure.com/unschedulable"),
        NOTHING,
    ),
    actor(
        "Kured",
        Mark::Annotation("kured.dev/kured-reboot-in-progress", &[]),
        "its --blocking-pod-selector or --prometheus-url keeps it off nodes that are out",
    ),
    actor(
        "Kured",
        Mark::Annotation("weave.works/kured-reboot-in-progress", &[]),
        "its --blocking-pod-selector or --prometheus-url keeps it off nodes that are out",
    ),
    actor(
        "the AWS node termination handler",
        Mark::Taint("aws-node-termination-handler/scheduled-maintenance"),
        NOTHING,
    ),
    actor(
        "the AWS node termination handler",
        Mark::Taint("aws-node-termination-handler/spot-itn"),
        NOTHING,
    ),
    actor(
        "the AWS node termination handler",
        Mark::Taint("aws-node-termination-handler/asg-lifecycle-termination"),
        NOTHING,
    ),
    actor(
        "OpenShift's machine config operator",
        Mark::Annotation("machineconfiguration.openshift.io/state", &["", "Done"]),
        NOTHING,
    ),
    actor(
        "the node maintenance operator",
        Mark::Taint("medik8s.io/drain"),
        NOTHING,
    ),
];

const fn actor(name: &'static str, mark: Mark, advice: &'static str) -> Actor {
    Actor { name, mark, advice }
}

/// Returns the programs that are at work on a node, each once.
pub fn at_work(node: &NodeView) -> Vec<Actor> {
    let mut found: Vec<Actor> = Vec::new();
    for actor in ACTORS.iter().filter(|actor| actor.mark.is_on(node)) {
        if found.iter().all(|before| before.name != actor.name) {
            found.push(*actor);
        }
    }
    found
}

// === impl Mark ===

impl Mark {
    fn is_on(self, node: &NodeView) -> bool {
        let shows = |value: Option<&String>, quiet: &[&str]| {
            value.is_some_and(|value| !quiet.contains(&value.as_str()))
        };
        match self {
            Self::Taint(key) => node.taints.iter().any(|taint| taint.taint.key == key),
            Self::Label(key, quiet) => shows(node.labels.get(key), quiet),
            Self::Annotation(key, quiet) => shows(node.annotations.get(key), quiet),
        }
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, key) = match self.mark {
            Mark::Taint(key) => ("taint", key),
            Mark::Label(key, _) => ("label", key),
            Mark::Annotation(key, _) => ("annotation", key),
        };
        write!(f, "{} is at work on the node ({kind} {key})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(metadata: &Value, taints: &Value) -> NodeView {
        let object = json!({"metadata": metadata, "spec": {"taints": taints}});
        NodeView::from_object(object).unwrap()
    }

    #[test]
    fn each_program_is_recognised_by_its_mark_alone() {
        let bare = node(&json!({"name": "n"}), &json!([]));
        assert_eq!(at_work(&bare), []);
        for actor in ACTORS {
            let marked = match actor.mark {
                Mark::Taint(key) => node(
                    &json!({"name": "n"}),
                    &json!([{"key": key, "effect": "NoSchedule"}]),
                ),
                Mark::Label(key, quiet) | Mark::Annotation(key, quiet) => {
                    let kind = match actor.mark {
                        Mark::Label(..) => "labels",
                        _ => "annotations",
                    };
                    for value in quiet {
                        let quiet = node(&json!({"name": "n", kind: {key: value}}), &json!([]));
                        assert_eq!(at_work(&quiet), [], "{key}={value}");
                    }
                    node(
                        &json!({"name": "n", kind: {key: "drain-required"}}),
                        &json!([]),
                    )
                }
            };
            assert_eq!(at_work(&marked), [actor]);
        }
    }

    #[test]
    fn a_program_with_two_marks_is_named_once() {
        let taints = json!([
            {"key": "DeletionCandidateOfClusterAutoscaler", "effect": "PreferNoSchedule"},
            {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"},
        ]);
        let found = at_work(&node(&json!({"name": "n"}), &taints));
        let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "the cluster autoscaler is at work on the node (taint ToBeDeletedByClusterAutoscaler)"
            ]
        );
    }
}
