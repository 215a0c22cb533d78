//! Tests of expressions over objects: what they give, what they read, and what is refused.

use proptest::prelude::*;

use super::*;

const NOW_TEXT: &str = "2026-11-26T10:00:00Z";

fn now() -> Timestamp {
    NOW_TEXT.parse().unwrap()
}

fn compiled(expression: &str) -> ObjectExpression {
    ObjectExpression::compile(ObjectResult::Bool, expression).unwrap()
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p", "namespace": "gpu-operator", "uid": "u",
            "labels": {"app": "driver", "large": "x"},
            "ownerReferences": [{"kind": "DaemonSet", "name": "d", "uid": "v"}],
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]},
        "status": {
            "phase": "Running",
            "startTime": "2026-11-26T09:00:00Z",
            "containerStatuses": [
                {"name": "c", "restartCount": 7, "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
            ],
        },
    })
}

/// Expressions of the field: the reference's own, its users', and our presets'.
const EXPRESSIONS: [&str; 16] = [
    r#"resource.status.conditions.filter(c, c.type == "Ready" && c.status == "False").size() > 0"#,
    r#"has(resource.status.conditions) && resource.status.conditions.exists(c, c.type == "Ready" && c.status == "False")"#,
    "resource.metadata.namespace == 'gpu-operator' && has(resource.metadata.ownerReferences) && \
     resource.metadata.ownerReferences.exists(r, r.kind == 'DaemonSet') && has(resource.spec.nodeName) && \
     resource.spec.nodeName != \"\" && resource.status.phase != 'Succeeded' && \
     has(resource.status.startTime) && now - timestamp(resource.status.startTime) > duration('30m')",
    "resource.status.containerStatuses.exists(s, has(s.state.waiting) && s.state.waiting.reason == 'CrashLoopBackOff')",
    "'large' in resource.metadata.labels && resource.metadata.labels['app'] == 'driver'",
    "resource.metadata.labels.exists(k, k.startsWith('lar'))",
    "size(resource.spec.containers) == 1",
    "resource.status.containerStatuses.map(s, s.name).exists(n, n == 'c')",
    "resource.status.containerStatuses.filter(s, s.restartCount > 5)[0].name == 'c'",
    "(has(resource.spec.nodeName) ? resource.spec : resource.status).nodeName == 'n1'",
    "resource.status.conditions.all(c, c.status != 'Unknown')",
    "[resource.metadata.name, 'q'].exists(n, n == 'p')",
    "resource.metadata.name + '-' + resource.spec.nodeName == 'p-n1'",
    "resource.spec.containers[0].image in ['i', 'j']",
    "resource.metadata == resource.metadata",
    "dyn(resource).kind == 'Pod'",
];

#[test]
fn only_the_fields_that_are_read_are_kept() {
    let kept = |expression: &str| {
        let compiled = compiled(expression);
        compiled.reads()[&Root::Resource].keep(&pod())
    };
    assert_eq!(
        kept(EXPRESSIONS[2]),
        json!({
            "metadata": {"namespace": "gpu-operator", "ownerReferences": [{"kind": "DaemonSet"}]},
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Running", "startTime": "2026-11-26T09:00:00Z"},
        })
    );
    let statuses = json!([{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]);
    assert_eq!(
        kept(EXPRESSIONS[3]),
        json!({"status": {"containerStatuses": statuses}})
    );
    assert_eq!(
        kept(EXPRESSIONS[4]),
        json!({"metadata": {"labels": {"app": "driver", "large": "x"}}})
    );
    assert_eq!(
        kept(EXPRESSIONS[8]),
        json!({"status": {"containerStatuses": [{"name": "c", "restartCount": 7}]}})
    );
    assert_eq!(kept(EXPRESSIONS[6]), json!({"spec": {"containers": [{}]}}));
    // Where the expression cannot be followed, the whole object is kept.
    assert_eq!(kept(EXPRESSIONS[15]), pod());
    let node = json!({"status": {"conditions": [
        {"type": "Ready", "status": "False", "message": "kubelet stopped", "reason": "r"},
    ], "images": [{"names": ["a"]}]}});
    let reads = compiled(EXPRESSIONS[0]);
    assert_eq!(
        reads.reads()[&Root::Resource].keep(&node),
        json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
    );
}

#[test]
fn other_objects_are_looked_up_and_named() {
    let expression = "resource.status.phase == 'Running' && \
                      lookup('v1', 'Node', '', resource.spec.nodeName).spec.unschedulable == true";
    let compiled = compiled(expression);
    let of_node = Root::Lookup {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
    };
    let node = json!({"metadata": {"name": "n1"}, "spec": {"unschedulable": true, "podCIDR": "c"}});
    let kept = compiled.reads()[&of_node].keep(&node);
    assert_eq!(kept, json!({"spec": {"unschedulable": true}}));
    let found = |_: &ObjectName| LookedUp::Found(kept.clone());
    let evaluated = compiled.evaluate(&pod(), now(), &found);
    assert_eq!(evaluated.value, Ok(json!(true)));
    let name = evaluated.looked_up.first().unwrap();
    assert_eq!((name.kind.as_str(), name.name.as_str()), ("Node", "n1"));
    assert!(!evaluated.read_time);
    // One that is absent is null; one that cannot be seen gives no value.
    let absent = compiled.evaluate(&pod(), now(), &|_| LookedUp::Absent);
    assert!(absent.value.is_err());
    let null =
        ObjectExpression::compile(ObjectResult::Bool, "lookup('v1', 'Node', '', 'n2') == null");
    let null = null.unwrap();
    let absent = null.evaluate(&pod(), now(), &|_| LookedUp::Absent);
    assert_eq!(absent.value, Ok(json!(true)));
    let unseen = null.evaluate(&pod(), now(), &|_| LookedUp::Unseen("forbidden".to_owned()));
    assert_eq!(unseen.value, Err("forbidden".to_owned()));
}

#[test]
fn the_time_counts_where_it_is_reached() {
    let compiled = compiled(
        "resource.status.phase == 'Running' && now - timestamp(resource.status.startTime) > duration('30m')",
    );
    let absent = |_: &ObjectName| LookedUp::Absent;
    let evaluated = compiled.evaluate(&pod(), now(), &absent);
    assert_eq!(
        (evaluated.value, evaluated.read_time),
        (Ok(json!(true)), true)
    );
    let mut ended = pod();
    ended["status"]["phase"] = json!("Succeeded");
    let evaluated = compiled.evaluate(&ended, now(), &absent);
    assert_eq!(
        (evaluated.value, evaluated.read_time),
        (Ok(json!(false)), false)
    );
}

#[test]
fn what_no_object_can_answer_is_refused() {
    for (expression, part) in [
        ("status.phase == 'a'", "unknown variable 'status'"),
        (
            "resource.spec.a == 1 && event.x == 2",
            "unknown variable 'event'",
        ),
        (
            "has(resource.spec.x) && amount(resource.spec.x) > 0",
            "no function 'amount'",
        ),
        ("resource.", "does not parse"),
        ("has(resource.metadata.labels['a'])", "does not parse"),
        ("'a'", "does not give true or false"),
        (
            "resource.metadata.name.matches('(')",
            "no regular expression",
        ),
        (
            "lookup('v1', resource.kind, '', 'a') == null",
            "write both as texts",
        ),
        (
            "lookup('Node', 'a') == null",
            "is called as lookup(apiVersion",
        ),
        ("resource.a.all(x, x.all(y, y.all(z, z == 1)))", "3 loops"),
    ] {
        let error = ObjectExpression::compile(ObjectResult::Bool, expression).unwrap_err();
        assert!(error.to_string().contains(part), "{expression}: {error}");
    }
    let error = ObjectExpression::compile(ObjectResult::Text, "1 == 1").unwrap_err();
    assert!(
        error.to_string().contains("does not give a text"),
        "{error}"
    );
}

/// Returns any JSON whose keys are those that the expressions name.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0..9_i64).prop_map(Value::from),
        prop::sample::select(vec![
            "Ready",
            "False",
            "Unknown",
            "gpu-operator",
            "DaemonSet",
            "n1",
            "p",
            "c",
            "driver",
            "CrashLoopBackOff",
            "2026-11-26T09:00:00Z",
            "",
        ])
        .prop_map(Value::from),
    ];
    let names = vec![
        "metadata",
        "spec",
        "status",
        "conditions",
        "type",
        "phase",
        "startTime",
        "nodeName",
        "namespace",
        "name",
        "labels",
        "app",
        "large",
        "ownerReferences",
        "kind",
        "containers",
        "containerStatuses",
        "state",
        "waiting",
        "reason",
        "restartCount",
        "image",
    ];
    leaf.prop_recursive(6, 64, 6, move |inner| {
        let names = prop::sample::select(names.clone()).prop_map(str::to_owned);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(names, inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Puts arbitrary values in places of a pod that the expressions read.
fn any_object() -> impl Strategy<Value = Value> {
    let places = vec![
        "/metadata",
        "/metadata/labels",
        "/metadata/ownerReferences",
        "/spec",
        "/spec/nodeName",
        "/spec/containers",
        "/status",
        "/status/phase",
        "/status/containerStatuses",
        "/status/containerStatuses/0",
        "/status/containerStatuses/0/state",
        "",
    ];
    let change = (prop::sample::select(places), any_value());
    prop::collection::vec(change, 0..4).prop_map(|changes| {
        let mut object = pod();
        for (place, value) in changes {
            if let Some(at) = object.pointer_mut(place) {
                *at = value;
            }
        }
        object
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Nothing that is left out can change a result.
    #[test]
    fn an_object_reduced_to_what_is_read_gives_the_same(object in any_object()) {
        for expression in EXPRESSIONS {
            let compiled = compiled(expression);
            let kept = compiled.reads()[&Root::Resource].keep(&object);
            let absent = |_: &ObjectName| LookedUp::Absent;
            let (whole, part) = (
                compiled.evaluate(&object, now(), &absent),
                compiled.evaluate(&kept, now(), &absent),
            );
            prop_assert_eq!(whole.value.ok(), part.value.ok(), "{} {}", expression, kept);
        }
    }
}
