use model::node::Taint;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;

/// Applies `patch` as the API server does: `test` with `null` holds if the field is absent.
fn apply(patch: &Patch, object: &Value) -> Result<Value, json_patch::PatchError> {
    let mut object = object.clone();
    for operation in patch.iter() {
        if let PatchOperation::Test(test) = operation
            && test.value.is_null()
            && object.pointer(test.path.as_str()).is_none()
        {
            continue;
        }
        json_patch::patch(&mut object, std::slice::from_ref(operation))?;
    }
    Ok(object)
}

fn view(object: &Value) -> NodeView {
    NodeView::from_object(object.clone()).expect("a node")
}

fn taint(key: &str, value: &str, effect: &str) -> Taint {
    Taint {
        key: key.into(),
        value: value.into(),
        effect: effect.into(),
    }
}

/// Formats one operation per line: `test PATH VALUE`.
fn lines(patch: &Patch) -> Vec<String> {
    let line = |operation: &PatchOperation| match operation {
        PatchOperation::Test(op) => format!("test {} {}", op.path, op.value),
        PatchOperation::Add(op) => format!("add {} {}", op.path, op.value),
        PatchOperation::Remove(op) => format!("remove {}", op.path),
        other => panic!("unexpected {other}"),
    };
    patch.iter().map(line).collect()
}

fn strings(pairs: &[(&str, Option<&str>)]) -> BTreeMap<String, Option<String>> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)))
        .collect()
}

#[test]
fn nothing_to_change_is_an_empty_patch() {
    let node = view(&json!({"metadata": {"name": "n", "uid": "u"}}));
    assert!(render(&node, &NodeChange::default()).is_empty());
}

#[test]
fn patches() {
    let bare = json!({"metadata": {"name": "n", "uid": "u"}, "spec": {}});
    let full = json!({
        "metadata": {
            "name": "n", "uid": "u",
            "labels": {"zone": "a"},
            "annotations": {"quarantineHealthEvent": "[]", "mine": "1"},
        },
        "spec": {
            "unschedulable": true,
            "taints": [
                {"key": "gpu", "value": "bad", "effect": "NoSchedule"},
                {"key": "x", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"},
                {"key": "y", "effect": "NoExecute"},
            ],
        },
    });
    let gpu = taint("gpu", "bad", "NoSchedule");
    let on_full = [
        "test /metadata/annotations/gpuwarden.dev~1session null",
        r#"test /metadata/annotations/quarantineHealthEvent "[]""#,
        "test /metadata/annotations/quarantineHealthEventAppliedTaints null",
        "test /metadata/annotations/quarantineHealthEventCordonPreExisting null",
        "test /metadata/annotations/quarantineHealthEventIsCordoned null",
    ];
    let cases: [(&str, &Value, NodeChange, Vec<&str>); 8] = [
        (
            "cordon",
            &bare,
            NodeChange { unschedulable: Some(true), ..NodeChange::default() },
            vec![
                "test /spec/unschedulable null",
                "test /metadata/annotations null",
                "add /spec/unschedulable true",
            ],
        ),
        (
            "uncordon",
            &full,
            NodeChange { unschedulable: Some(false), ..NodeChange::default() },
            [&["test /spec/unschedulable true"], &on_full[..], &["remove /spec/unschedulable"]]
                .concat(),
        ),
        (
            "first annotation, label and taint",
            &bare,
            NodeChange {
                add_taints: vec![gpu.clone()],
                labels: strings(&[("a/b", Some("1")), ("gone", None)]),
                annotations: strings(&[("quarantineHealthEvent", Some("[]"))]),
                ..NodeChange::default()
            },
            vec![
                "test /spec/unschedulable null",
                "test /spec/taints null",
                "test /metadata/labels null",
                "test /metadata/annotations null",
                r#"add /spec/taints [{"effect":"NoSchedule","key":"gpu","value":"bad"}]"#,
                r#"add /metadata/labels {"a/b":"1"}"#,
                r#"add /metadata/annotations {"quarantineHealthEvent":"[]"}"#,
            ],
        ),
        (
            "one more taint",
            &full,
            NodeChange { add_taints: vec![taint("z", "", "NoExecute")], ..NodeChange::default() },
            [
                &["test /spec/unschedulable true"],
                &on_full[..],
                &[r#"add /spec/taints/- {"effect":"NoExecute","key":"z","value":""}"#],
            ]
            .concat(),
        ),
        (
            "two taints of three removed, as they stand",
            &full,
            NodeChange {
                remove_taints: vec![gpu, taint("x", "", "NoExecute")],
                ..NodeChange::default()
            },
            [
                &[
                    "test /spec/unschedulable true",
                    r#"test /spec/taints/1 {"effect":"NoExecute","key":"x","timeAdded":"2026-01-01T00:00:00Z"}"#,
                    r#"test /spec/taints/0 {"effect":"NoSchedule","key":"gpu","value":"bad"}"#,
                ],
                &on_full[..],
                &["remove /spec/taints/1", "remove /spec/taints/0"],
            ]
            .concat(),
        ),
        (
            "labels alone say nothing of a session",
            &full,
            NodeChange {
                labels: strings(&[("zone", None), ("a~b/c", Some("1"))]),
                ..NodeChange::default()
            },
            vec![
                "test /metadata/labels/a~0b~1c null",
                r#"test /metadata/labels/zone "a""#,
                r#"add /metadata/labels/a~0b~1c "1""#,
                "remove /metadata/labels/zone",
            ],
        ),
        (
            "a foreign annotation says nothing of a session",
            &full,
            NodeChange { annotations: strings(&[("mine", None)]), ..NodeChange::default() },
            vec![r#"test /metadata/annotations/mine "1""#, "remove /metadata/annotations/mine"],
        ),
        (
            "a taint or annotation that is not there is not removed",
            &bare,
            NodeChange {
                remove_taints: vec![taint("no", "", "NoExecute")],
                annotations: strings(&[("no", None)]),
                ..NodeChange::default()
            },
            vec!["test /spec/unschedulable null", "test /metadata/annotations null"],
        ),
    ];
    for (what, object, change, expected) in cases {
        let patch = render(&view(object), &change);
        let expected = [&[r#"test /metadata/uid "u""#], expected.as_slice()].concat();
        assert_eq!(lines(&patch), expected, "{what}");
        assert!(apply(&patch, object).is_ok(), "{what}");
    }
}

#[test]
fn a_node_without_uid_cannot_be_patched_by_mistake() {
    let node = NodeView::unknown("n");
    let change = NodeChange {
        unschedulable: Some(true),
        ..NodeChange::default()
    };
    let stored = json!({"metadata": {"name": "n", "uid": "u"}, "spec": {}});
    assert!(apply(&render(&node, &change), &stored).is_err());
}

#[test]
fn the_call_is_described() {
    let node = view(&json!({"metadata": {"name": "n", "uid": "u"}, "spec": {}}));
    let change = NodeChange {
        labels: strings(&[("a", Some("1"))]),
        ..NodeChange::default()
    };
    let call = serde_json::to_value(describe(&node, &change)).unwrap();
    assert_eq!(call["verb"], "PATCH");
    assert_eq!(call["path"], "/api/v1/nodes/n");
    assert_eq!(
        call["patch"][0],
        json!({"op": "test", "path": "/metadata/uid", "value": "u"})
    );
}

// === arbitrary nodes and changes ===

fn key() -> impl Strategy<Value = String> {
    let foreign = ["a", "b", "a/b", "a~b", "~1", "x.dev/~0/y"];
    select(
        foreign
            .iter()
            .chain(&SESSION_ANNOTATIONS)
            .map(ToString::to_string)
            .collect::<Vec<_>>(),
    )
}

fn some_taint() -> impl Strategy<Value = Taint> {
    let effect = select(vec!["NoSchedule", "NoExecute"]);
    ("[a-d]", "[xy]?", effect).prop_map(|(key, value, effect)| taint(&key, &value, effect))
}

/// Generates nodes as the API server returns them: no field is empty or false.
fn object() -> impl Strategy<Value = Value> {
    let entries = || btree_map(key(), "[xy]?", 0..4);
    let taints = vec((some_taint(), any::<bool>()), 0..5);
    (any::<bool>(), taints, entries(), entries()).prop_map(
        |(unschedulable, taints, labels, annotations)| {
            let mut object = json!({"metadata": {"name": "n", "uid": "u"}, "spec": {}});
            if unschedulable {
                object["spec"]["unschedulable"] = json!(true);
            }
            let taints: Vec<Value> = taints
                .into_iter()
                .map(|(taint, timed)| {
                    let mut raw = json!({"key": taint.key, "effect": taint.effect});
                    if !taint.value.is_empty() {
                        raw["value"] = json!(taint.value);
                    }
                    if timed {
                        raw["timeAdded"] = json!("2026-01-01T00:00:00Z");
                    }
                    raw
                })
                .collect();
            if !taints.is_empty() {
                object["spec"]["taints"] = json!(taints);
            }
            for (name, map) in [("labels", labels), ("annotations", annotations)] {
                if !map.is_empty() {
                    object["metadata"][name] = json!(map);
                }
            }
            object
        },
    )
}

fn change() -> impl Strategy<Value = NodeChange> {
    let entries = || btree_map(key(), option::of("[xy]?"), 0..4);
    let taints = || vec(some_taint(), 0..4);
    (
        option::of(any::<bool>()),
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

proptest! {
    #[test]
    fn the_patch_does_what_the_change_says(object in object(), change in change()) {
        let before = view(&object);
        let patched = apply(&render(&before, &change), &object).expect("it applies");
        let fields = |node: NodeView| {
            (node.unschedulable, node.taints, node.labels, node.annotations)
        };
        prop_assert_eq!(fields(view(&patched)), fields(before.after(&change)));
    }

    #[test]
    fn what_the_change_does_not_touch_survives(
        object in object(), change in change(), other in key(), at: Index,
    ) {
        prop_assume!(!change.annotations.contains_key(&other));
        prop_assume!(!SESSION_ANNOTATIONS.contains(&other.as_str()));
        let before = view(&object);
        prop_assume!(!before.annotations.is_empty());
        // Meanwhile another client annotates the node, and appends a taint after those that we
        // remove.
        let mut stored = object.clone();
        stored["metadata"]["annotations"][&other] = json!("theirs");
        let theirs = json!({"key": "theirs", "effect": "NoSchedule"});
        let tainted = !before.taints.is_empty();
        if let Some(taints) = stored["spec"]["taints"].as_array_mut() {
            let removed = before
                .taints
                .iter()
                .rposition(|on_node| change.remove_taints.contains(&on_node.taint))
                .map_or(0, |last| last + 1);
            taints.insert(removed + at.index(taints.len() + 1 - removed), theirs.clone());
        }
        let after = view(&apply(&render(&before, &change), &stored).expect("it applies"));
        prop_assert_eq!(after.annotations.get(&other).map(String::as_str), Some("theirs"));
        prop_assert_eq!(after.taints.iter().any(|on_node| on_node.raw == theirs), tainted);
    }

    #[test]
    fn the_patch_fails_where_a_field_differs_that_the_decision_read(
        object in object(), change in change(), at: Index,
    ) {
        let before = view(&object);
        let mut fields: Vec<Vec<String>> = vec![vec!["metadata".into(), "uid".into()]];
        for (map, touched) in [("labels", &change.labels), ("annotations", &change.annotations)] {
            let mut touched: Vec<&str> = touched.keys().map(String::as_str).collect();
            if map == "annotations" && is_of_session(&change) {
                touched.extend(SESSION_ANNOTATIONS);
            }
            let path = |key: &str| vec!["metadata".into(), map.into(), key.to_owned()];
            fields.extend(touched.into_iter().map(path));
        }
        if is_of_session(&change) {
            fields.push(vec!["spec".into(), "unschedulable".into()]);
        }
        for (index, on_node) in before.taints.iter().enumerate() {
            if change.remove_taints.contains(&on_node.taint) {
                fields.push(vec!["spec".into(), "taints".into(), index.to_string()]);
            }
        }
        prop_assume!(!change.is_empty());

        let field = at.get(&fields);
        let mut stored = object.clone();
        let (last, parents) = field.split_last().expect("not empty");
        let mut place = &mut stored;
        for token in parents {
            if place.get(token).is_none() {
                place[token] = json!({});
            }
            place = &mut place[token];
        }
        if let Some(taints) = place.as_array_mut() {
            taints[last.parse::<usize>().expect("an index")]["value"] = json!("other");
        } else if place.get(last).is_some() && at.index(2) == 0 {
            place.as_object_mut().expect("a map").remove(last);
        } else {
            let other = if last == "unschedulable" { json!(!before.unschedulable) } else { json!("other") };
            place[last] = other;
        }
        prop_assert!(apply(&render(&before, &change), &stored).is_err(), "differs at {:?}", field);
    }
}
