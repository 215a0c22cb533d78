//! Tests of the object that rules see, and of merged changes.

use proptest::prelude::*;

use super::*;

fn taints() -> impl Strategy<Value = Vec<Taint>> {
    prop::collection::btree_set((0_u8..4, 0_u8..2), 0..3).prop_map(|set| {
        set.into_iter()
            .map(|(key, value)| Taint {
                key: format!("t{key}"),
                value: value.to_string(),
                effect: "NoSchedule".to_owned(),
            })
            .collect()
    })
}

fn entries() -> impl Strategy<Value = BTreeMap<String, Option<String>>> {
    prop::collection::btree_map("[ab]", prop::option::of("[xy]"), 0..3)
}

fn change() -> impl Strategy<Value = NodeChange> {
    (
        any::<Option<bool>>(),
        taints(),
        taints(),
        entries(),
        entries(),
    )
        .prop_map(
            |(unschedulable, add_taints, remove_taints, labels, annotations)| NodeChange {
                unschedulable,
                add_taints,
                remove_taints,
                labels,
                annotations,
            },
        )
}

/// Holds for all parts that are stored separately, and for objects of any shape.
#[test]
fn rules_see_the_whole_object() {
    let ready = json!({
        "type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z",
    });
    let never = json!({"type": "Broken", "lastHeartbeatTime": null});
    let table = [
        json!({"metadata": {"name": "n1"}}),
        json!({"metadata": {"name": "n1"}, "spec": null, "status": "odd"}),
        json!({"metadata": {"name": "n1", "resourceVersion": "", "labels": {}}}),
        json!({"metadata": {"name": "n1", "resourceVersion": 7, "labels": null}}),
        json!({"metadata": {"name": "n1", "labels": {"a": "b", "odd": true}}}),
        json!({"metadata": {"name": "n1"}, "status": {"conditions": "odd"}}),
        json!({"metadata": {"name": "n1"}, "status": {"conditions": [7, ready, {}, never]}}),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": "n1", "uid": "u", "resourceVersion": "12",
                "labels": {"a": "b", "lastHeartbeatTime": "x"},
                "annotations": {"c": "d", "resourceVersion": "y"},
            },
            "spec": {
                "providerID": "p", "unschedulable": true,
                "taints": [{"key": "k", "effect": "NoExecute", "timeAdded": "t"}],
            },
            "status": {
                "capacity": {"nvidia.com/gpu": "8"}, "conditions": [ready],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            },
        }),
    ];
    for object in table {
        let node = NodeView::from_object(object.clone()).unwrap();
        assert_eq!(node.object(), object);
        let mut untrimmed = object.clone();
        untrimmed["metadata"]["managedFields"] = json!([{"manager": "m"}]);
        if let Some(status) = untrimmed.get_mut("status").and_then(Value::as_object_mut) {
            status.insert("images".to_owned(), json!([{"names": ["i"]}]));
        }
        assert_eq!(NodeView::from_object(untrimmed), Some(node), "{object}");
    }
}

#[test]
fn conditions_are_read_by_their_status() {
    let node = |conditions: Value| {
        let object = json!({"metadata": {"name": "n"}, "status": {"conditions": conditions}});
        NodeView::from_object(object).unwrap()
    };
    let event = |status: &str| {
        let kind = keys::CONDITION_VM_EVENT;
        let node = node(json!([{"type": kind, "status": status, "message": "m"}]));
        node.vm_event
            .map(|event| (event.status, event.message.to_string()))
    };
    assert_eq!(event("True"), Some((Some(true), "m".to_owned())));
    assert_eq!(event("False"), Some((Some(false), String::new())));
    assert_eq!(event("Unknown"), Some((None, String::new())));
    assert_eq!(node(json!([])).vm_event, None);
    for (status, expected) in [("True", true), ("False", false), ("Unknown", false)] {
        let node = node(json!([{"type": "Ready", "status": status}]));
        assert_eq!(node.is_ready, expected, "{status}");
    }
    assert!(!node(json!("odd")).is_ready);
}

#[test]
fn a_heartbeat_changes_nothing_that_rules_see() {
    let node = |change: &dyn Fn(&mut Value)| {
        let mut object = json!({
            "metadata": {"name": "n1", "uid": "u", "resourceVersion": "1"},
            "spec": {"providerID": "p"},
            "status": {
                "capacity": {"nvidia.com/gpu": "8"},
                "conditions": [{
                    "type": "Ready", "status": "True", "reason": "KubeletReady",
                    "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            },
        });
        change(&mut object);
        NodeView::from_object(object).unwrap()
    };
    let before = node(&|_| {});
    let heartbeat = node(&|object| {
        object["metadata"]["resourceVersion"] = "2".into();
        object["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:05:00Z".into();
    });
    assert!(before.same_but_for_heartbeat(&heartbeat) && before != heartbeat);
    assert_eq!(
        heartbeat.object()["status"]["conditions"][0]["lastHeartbeatTime"],
        "2026-01-01T00:05:00Z",
        "but they see it"
    );
    let changes: [(&str, Value); 9] = [
        ("/metadata/uid", "v".into()),
        ("/metadata/labels", json!({"resourceVersion": "a"})),
        ("/metadata/annotations", json!({"lastHeartbeatTime": "a"})),
        ("/spec/providerID", "q".into()),
        (
            "/spec/taints",
            json!([{"key": "k", "effect": "NoSchedule"}]),
        ),
        ("/status/capacity/nvidia.com~1gpu", "7".into()),
        ("/status/conditions/0/status", "False".into()),
        ("/status/conditions/0/reason", "KubeletNotReady".into()),
        ("/status/conditions/1", json!({"type": "DiskPressure"})),
    ];
    for (place, value) in changes {
        let changed = node(&|object| {
            let (parent, key) = place.rsplit_once('/').unwrap();
            match object.pointer_mut(parent).unwrap() {
                Value::Array(list) => list.push(value.clone()),
                Value::Object(parent) => {
                    drop(parent.insert(key.replace("~1", "/"), value.clone()));
                }
                other => panic!("{place}: {other}"),
            }
        });
        assert!(!before.same_but_for_heartbeat(&changed), "{place}");
        assert!(!changed.same_but_for_heartbeat(&before), "{place}");
    }
    let (a, b) = (
        node(&|object| object["metadata"]["labels"] = json!({"resourceVersion": "a"})),
        node(&|object| object["metadata"]["labels"] = json!({"resourceVersion": "b"})),
    );
    assert!(!a.same_but_for_heartbeat(&b));
}

proptest! {
    #[test]
    fn two_changes_in_one_lead_to_the_same_node(changes in prop::collection::vec(change(), 1..6)) {
        let start = NodeView::unknown("n1");
        // As sessions make them: an added taint is not on the node yet.
        let mut node = start.clone();
        let mut whole = NodeChange::default();
        for mut change in changes {
            change.add_taints.retain(|taint| {
                !node.has_taint(taint) || change.remove_taints.contains(taint)
            });
            node = node.after(&change);
            whole = whole.then(change);
        }
        let mut merged = start.after(&whole);
        for node in [&mut node, &mut merged] {
            node.taints.sort_by(|a, b| a.taint.cmp(&b.taint));
        }
        prop_assert_eq!(merged, node);
    }
}

#[test]
fn a_cordon_that_was_changed_here_is_nobodys_yet() {
    let object = json!({
        "metadata": {"name": "n", "managedFields": [
            {"manager": "kubectl-cordon", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}},
        ]},
        "spec": {"unschedulable": true},
    });
    let node = NodeView::from_object(object).unwrap();
    assert_eq!(node.cordoned_by.as_deref(), Some("kubectl-cordon"));
    let change = NodeChange {
        unschedulable: Some(false),
        ..NodeChange::default()
    };
    assert_eq!(node.after(&change).cordoned_by, None);
}
