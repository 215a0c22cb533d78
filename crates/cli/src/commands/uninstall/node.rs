//! Decides what is removed from a node, and whether the node returns to service.

use cluster::Removal;
use contract::keys;
use fleet::session::{Marks, foreign_session, undo};
use maintenance::gpu_reset::Stopped;
use maintenance::janitor::label;
use maintenance::{handover, validation_request};
use model::attempt::{RemediationMark, ResourceKind};
use model::condition;
use model::node::{NodeChange, NodeTaint, NodeView};
use model::ownership::{Maker, Ownership};
use serde_json::{Value, json};

use super::Choice;
use super::owner::{Owner, owner_of, owner_of_key};
use crate::args::NodesFate;

/// Annotations with names of NVSentinel that gpuwarden writes on nodes without a session.
const ANNOTATIONS: [&str; 4] = [
    keys::UNCORDONED_MANUALLY,
    keys::UNTAINTED_MANUALLY,
    validation_request::ACTIVE,
    validation_request::SESSION,
];
/// Labels of a node that was returned, after any prefix.
const UNCORDON_LABELS: [&str; 3] = [
    keys::UNCORDON_BY,
    keys::UNCORDON_REASON,
    keys::UNCORDON_TIMESTAMP,
];
/// Most faults listed for a node.
const FAULTS: usize = 3;

/// Changes of a node, with the information that people need.
#[derive(Debug)]
pub(super) struct NodePlan {
    /// Node that the changes are based on.
    pub(super) view: NodeView,
    /// Faults of the node; `None` unless its session is ended.
    pub(super) faults: Option<String>,
    /// Attempt that the session has in progress.
    pub(super) attempt: Option<(String, ResourceKind)>,
    /// Change of labels, annotations, taints and the cordon.
    pub(super) change: NodeChange,
    /// Conditions that are removed.
    pub(super) conditions: Vec<String>,
    /// Removal of these conditions from the status.
    pub(super) status: Removal,
    /// Remainders on the node, each with the command or advice for a person.
    pub(super) left: Vec<String>,
}

/// Decides about a node. `None` if nothing of gpuwarden is on it.
pub(super) fn plan(object: &Value, choice: Choice) -> Option<NodePlan> {
    let managed = |map: &str, key: &str| owner_of_key(object, map, key);
    let view = NodeView::from_object(object.clone())?;
    let own = Ownership::read(&view);
    let mut plan = NodePlan {
        faults: None,
        attempt: None,
        change: NodeChange::default(),
        conditions: Vec::new(),
        status: Removal::default(),
        left: Vec::new(),
        view,
    };
    let node = &plan.view;
    if let Some(own) = own.as_ref().filter(|own| !is_ended(own, choice)) {
        plan.left.push(foreign(own, node));
        if own.mark.by.is_none() {
            (plan.conditions, plan.status) = conditions(object, |owner| owner == Owner::Ours);
        }
        return Some(plan);
    }
    let mut change = NodeChange::default();
    if let Some(own) = &own {
        plan.faults = Some(faults(own));
        let mark = own.mark.remediation.as_ref();
        let attempt = mark.and_then(RemediationMark::under_way);
        plan.attempt = attempt.map(|one| (one.key(), one.resource.clone()));
        change = undo(node, &Marks::default());
        // The end of an admission writes this mark.
        change.annotations.remove(keys::ADMITTED);
    }
    let taken_back = handover::left_behind(node, |_| false);
    let restored = Stopped::read(node).map(|stopped| stopped.put_back(node, false));
    let unasked = label::left_behind(node, |_| false);
    for later in [taken_back, restored, unasked].into_iter().flatten() {
        change = change.then(later);
    }
    for key in node.annotations.keys() {
        let is_ours = key.starts_with(keys::OWN_PREFIX) && key != keys::POLICY;
        let named = ANNOTATIONS.contains(&key.as_str());
        if is_ours || named && managed("f:annotations", key) != Owner::Other {
            change.annotations.insert(key.clone(), None);
        }
    }
    for key in node.labels.keys() {
        let named = UNCORDON_LABELS.iter().any(|name| key.ends_with(name))
            || key == validation_request::STATE;
        if named && managed("f:labels", key) != Owner::Other {
            change.labels.entry(key.clone()).or_insert(None);
        }
    }
    // Without the caller's choice a node in a session is only shown.
    if own.is_some() && choice.nodes.is_none() {
        return Some(plan);
    }
    if choice.nodes == Some(NodesFate::Leave) {
        let command = foreign_session::return_command(&change, &node.name);
        if !command.is_empty() {
            plan.left.push(format!(
                "stays out of service; once it is repaired: {command}"
            ));
        }
        change.unschedulable = None;
        change.remove_taints.clear();
    }
    let unvalidated = |taint: &&NodeTaint| {
        taint.taint.key == keys::NOT_VALIDATED && !change.remove_taints.contains(&taint.taint)
    };
    if let Some(on_node) = node.taints.iter().find(unvalidated) {
        plan.left.push(format!(
            "has the taint {} from its registration, which nobody removes now: take it out of \
             the kubelet's configuration, and kubectl taint node {} {}-",
            on_node.taint, node.name, on_node.taint.key
        ));
    }
    plan.change = change;
    (plan.conditions, plan.status) = conditions(object, |owner| owner != Owner::Other);
    let nothing = plan.change.is_empty() && plan.conditions.is_empty();
    (!nothing || !plan.left.is_empty()).then_some(plan)
}

/// Returns whether the caller has decided to end this session.
fn is_ended(own: &Ownership, choice: Choice) -> bool {
    match own.mark.by {
        Some(Maker::Controller) => true,
        Some(Maker::Node) => choice.machines,
        Some(Maker::Other(_)) | None => false,
    }
}

fn foreign(own: &Ownership, node: &NodeView) -> String {
    let end = match own.mark.by {
        Some(Maker::Node) => "stop it there, and name --machines".to_owned(),
        _ => format!(
            "if it is gone for good: {}",
            foreign_session::end_command(own, node)
        ),
    };
    format!(
        "is untouched: its session{} belongs to {}; {end}",
        foreign_session::since(own),
        foreign_session::owner(own, &node.name)
    )
}

/// Returns the faults that a session lists, for people.
fn faults(own: &Ownership) -> String {
    let mut names: Vec<String> = Vec::new();
    for event in &own.events {
        let name = format!("{} {}", event.check_name, event.error_code.join(","));
        let name = name.trim_end().to_owned();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let more = names.len().saturating_sub(FAULTS);
    names.truncate(FAULTS);
    match (names.join("; "), more) {
        (text, _) if text.is_empty() => "its annotations name no fault".to_owned(),
        (text, 0) => text,
        (text, more) => format!("{text}; and {more} more"),
    }
}

/// Returns the names of the conditions that gpuwarden has written, according to `is_ours`, and
/// their removal.
fn conditions(node: &Value, is_ours: impl Fn(Owner) -> bool) -> (Vec<String>, Removal) {
    let list = &node["status"]["conditions"];
    let owner = |kind: &Value| {
        let key = format!("k:{}", json!({ "type": kind }));
        owner_of(node, &["f:status", "f:conditions", &key])
    };
    let mut ours = condition::written(node);
    ours.retain(|index| is_ours(owner(&list[*index]["type"])));
    let name = |index: &usize| list[*index]["type"].as_str().map(str::to_owned);
    let names = ours.iter().filter_map(name).collect();
    let mut removal = Removal::from(node["metadata"]["uid"].as_str().unwrap_or_default());
    for index in ours.iter().rev() {
        let place = index.to_string();
        removal = removal.with(&["status", "conditions", &place], list[*index].clone());
    }
    (names, removal)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETURN: Choice = Choice {
        nodes: Some(NodesFate::Return),
        machines: false,
        crds: false,
    };
    const LEAVE: Choice = Choice {
        nodes: Some(NodesFate::Leave),
        ..RETURN
    };

    /// Returns a node in a session by `by`, with a cordon, a taint and a label that had another
    /// value before.
    fn quarantined(by: &str) -> Value {
        let session = json!({
            "id": "s", "since": "2027-01-15T08:00:00Z", "by": by, "labels": {"state": "mine"},
        });
        let taint = json!({"key": "bad", "value": "v", "effect": "NoSchedule"});
        let events = json!([{"checkName": "Mem", "errorCode": ["48"]}]);
        json!({
            "metadata": {
                "name": "n1", "uid": "u",
                "labels": {"state": "quarantined"},
                "annotations": {
                    keys::SESSION: session.to_string(),
                    keys::QUARANTINE_HEALTH_EVENT: events.to_string(),
                    keys::QUARANTINE_IS_CORDONED: "True",
                    keys::QUARANTINE_APPLIED_TAINTS: json!([taint]).to_string(),
                    keys::POLICY: "large",
                    "other": "stays",
                },
            },
            "spec": {"unschedulable": true, "taints": [taint]},
        })
    }

    fn after(plan: &NodePlan) -> Value {
        let object = plan.view.after(&plan.change).object();
        json!([
            object["metadata"]["labels"],
            object["metadata"]["annotations"],
            object["spec"]
        ])
    }

    #[test]
    fn a_node_returns_as_it_was_or_stays_out_without_our_marks() {
        let (labels, annotations) = (
            json!({"state": "mine"}),
            json!({keys::POLICY: "large", "other": "stays"}),
        );
        let returned = plan(&quarantined("controller"), RETURN).unwrap();
        assert_eq!(after(&returned), json!([labels, annotations, {}]));
        assert_eq!(returned.faults.as_deref(), Some("Mem 48"));
        assert_eq!(returned.left, [""; 0]);
        let left = plan(&quarantined("controller"), LEAVE).unwrap();
        let spec = quarantined("controller")["spec"].clone();
        assert_eq!(after(&left), json!([labels, annotations, spec]));
        assert_eq!(
            left.left,
            [
                "stays out of service; once it is repaired: kubectl uncordon n1 && kubectl taint \
                 node n1 bad:NoSchedule-"
            ]
        );
        // Nobody has decided yet.
        let asked = plan(&quarantined("controller"), Choice::default()).unwrap();
        assert!(asked.change.is_empty() && asked.faults.is_some());
        // The node afterwards has nothing of ours.
        let again = returned.view.after(&returned.change).object();
        assert!(plan(&again, RETURN).is_none());
    }

    #[test]
    fn the_session_of_another_is_left_alone_and_named() {
        let machines = Choice {
            machines: true,
            ..RETURN
        };
        for (by, choice, text) in [
            ("node", RETURN, "stop it there, and name --machines"),
            (
                "fleet",
                machines,
                "if it is gone for good: kubectl uncordon n1",
            ),
        ] {
            let plan = plan(&quarantined(by), choice).unwrap();
            assert!(plan.change.is_empty() && plan.faults.is_none(), "{by}");
            assert!(plan.left[0].contains(text), "{:?}", plan.left);
        }
        let ended = plan(&quarantined("node"), machines).unwrap();
        assert_eq!(ended.change.unschedulable, Some(false));
    }

    #[test]
    fn marks_without_a_session_go_except_those_that_others_wrote() {
        let written = |by: &str, map: &str, key: &str| {
            let (map, key) = (format!("f:{map}"), format!("f:{key}"));
            json!({"manager": by, "fieldsV1": {"f:metadata": {map: {key: {}}}}})
        };
        let node = json!({
            "metadata": {
                "name": "n1", "uid": "u",
                "labels": {"a.b/uncordon-by": "x", "c.d/uncordon-by": "x", "team": "x"},
                "annotations": {
                    keys::RELEASED_AT: "t", keys::VETO: "v", keys::UNCORDONED_MANUALLY: "True",
                    keys::POWER_CYCLE: "p", keys::POLICY: "large",
                },
                "managedFields": [
                    written("fault-quarantine", "labels", "c.d/uncordon-by"),
                    written("fault-quarantine", "annotations", keys::UNCORDONED_MANUALLY),
                ],
            },
            "spec": {"taints": [{"key": keys::NOT_VALIDATED, "effect": "NoSchedule"}]},
        });
        let plan = plan(&node, Choice::default()).unwrap();
        let gone = |map: &std::collections::BTreeMap<String, Option<String>>| {
            assert!(map.values().all(Option::is_none));
            map.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(gone(&plan.change.labels), ["a.b/uncordon-by"]);
        assert_eq!(
            gone(&plan.change.annotations),
            [keys::POWER_CYCLE, keys::RELEASED_AT, keys::VETO]
        );
        assert!(plan.left[0].contains("has the taint gpuwarden.dev/not-validated"));
    }

    #[test]
    fn hand_overs_stopped_services_and_requests_by_labels_are_undone() {
        let mark = json!({"request": "r", "uid": "x", "managed": null});
        let stopped = json!({
            "request": "g", "uid": "y", "since": "2027-01-15T08:00:00Z",
            "labels": {"nvidia.com/gpu.deploy.dcgm": "true"},
        });
        let asked = json!({"operation": "o", "bootId": "b", "key": "example.com/reboot"});
        let taint = json!({"key": keys::HANDED_OVER_TAINT, "value": "r", "effect": "NoSchedule"});
        let node = json!({
            "metadata": {
                "name": "n1",
                "labels": {
                    keys::HANDED_OVER_LABEL: "false", "nvidia.com/gpu.deploy.dcgm": "false",
                    "example.com/reboot": "gpuwarden",
                },
                "annotations": {
                    keys::LABEL_REQUEST: asked.to_string(),
                    keys::HANDED_OVER: mark.to_string(), keys::RESET_STOPPED: stopped.to_string(),
                    "other": "stays",
                },
            },
            "spec": {"taints": [taint]},
        });
        let returned = plan(&node, RETURN).unwrap();
        let labels = json!({"nvidia.com/gpu.deploy.dcgm": "true"});
        assert_eq!(after(&returned), json!([labels, {"other": "stays"}, {}]));
        let left = plan(&node, LEAVE).unwrap();
        let spec = json!({"taints": [taint]});
        assert_eq!(after(&left), json!([labels, {"other": "stays"}, spec]));
    }

    #[test]
    fn conditions_of_the_grammar_go_unless_another_program_wrote_them() {
        let condition = |kind: &str, reason: &str| json!({"type": kind, "status": "True", "reason": reason, "message": "<m>"});
        let (ready, theirs) = (condition("Ready", "Kubelet"), condition("B", "BIsHealthy"));
        let conditions = json!([
            condition("A", "AIsNotHealthy"),
            ready,
            theirs,
            condition("GPUHealthy", "A"),
            condition("Drained", "GpuwardenDrain"),
            condition("Drained", "Other"),
        ]);
        let key = r#"k:{"type":"B"}"#;
        let node = json!({
            "metadata": {"name": "n1", "uid": "u", "managedFields": [
                {"manager": "m", "fieldsV1": {"f:status": {"f:conditions": {key: {}}}}},
            ]},
            "status": {"conditions": conditions},
        });
        let plan = plan(&node, RETURN).unwrap();
        assert_eq!(plan.conditions, ["A", "GPUHealthy", "Drained"]);
        let at = |index: usize| (index.to_string(), conditions[index].clone());
        let mut expected = Removal::from("u");
        for (index, value) in [at(4), at(3), at(0)] {
            expected = expected.with(&["status", "conditions", &index], value);
        }
        assert_eq!(plan.status, expected);
    }
}
