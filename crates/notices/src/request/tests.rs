use super::*;

fn object(name: &str, node: &str) -> Value {
    json!({
        "metadata": {"name": name, "uid": format!("uid-{name}"), "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"healthEvent": {
            "version": 1, "agent": "my-tool", "componentClass": "Node",
            "checkName": "PlannedMaintenance", "nodeName": node, "isHealthy": false,
            "isFatal": false, "recommendedAction": "NONE", "message": "a disk",
        }},
    })
}

fn held(mut object: Value) -> Value {
    object["metadata"]["finalizers"] = json!(["another", FINALIZER]);
    object
}

fn with(mut object: Value, condition: &Value) -> Value {
    object["status"] = json!({"conditions": [condition]});
    object
}

fn step(object: &Value, others: &[&Value]) -> Step {
    let others: Vec<Request> = others.iter().map(|other| Request::read(other)).collect();
    Request::read(object).step(&others)
}

#[test]
fn a_request_is_held_opened_and_closed() {
    let new = object("a", "n1");
    assert_eq!(step(&new, &[]), Step::Hold);
    let new = held(new);
    let Step::Open(event) = step(&new, &[]) else {
        panic!("{:?}", step(&new, &[]));
    };
    assert_eq!(
        (
            event.id.as_str(),
            event.agent.as_str(),
            event.node_name.as_str()
        ),
        ("he-mr-uid-a", "lifecycle-manager", "n1")
    );
    let metadata = |key: &str| event.metadata[key].as_str();
    assert_eq!(
        [metadata(NAME), metadata(UID), metadata(REQUESTER)],
        ["a", "uid-a", "my-tool"]
    );
    assert!(event.quarantine_overrides.unwrap().force && !event.is_fatal);
    model::event::validate(&event).unwrap();

    let open = with(new.clone(), &emitted());
    assert_eq!(step(&open, &[]), Step::Wait);
    // Also where the condition was not written any more before the deletion.
    for mut deleted in [open, new] {
        deleted["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
        let Step::Close(Some(event)) = step(&deleted, &[]) else {
            panic!("{:?}", step(&deleted, &[]));
        };
        assert_eq!(event.id, "he-mr-clear-uid-a");
        assert!(event.is_healthy && event.check_name == "PlannedMaintenance");
        model::event::validate(&event).unwrap();
        deleted["metadata"]["finalizers"] = json!(["another"]);
        assert_eq!(step(&deleted, &[]), Step::Wait);
    }
}

#[test]
fn one_request_of_a_node_at_a_time() {
    let (first, second) = (held(object("a", "n1")), held(object("b", "n1")));
    let elsewhere = held(object("0", "n2"));
    let Step::Say(said) = step(&second, &[&elsewhere, &first]) else {
        panic!("{:?}", step(&second, &[&first]));
    };
    assert_eq!(
        (said["status"].as_str(), said["reason"].as_str()),
        (Some("False"), Some("Blocked"))
    );
    assert_eq!(step(&with(second.clone(), &said), &[&first]), Step::Wait);
    assert!(matches!(step(&first, &[&second]), Step::Open(_)));
    // The deletion of one that waits leaves the other's fault open.
    let mut waiting = second.clone();
    waiting["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
    let open = with(first.clone(), &emitted());
    assert_eq!(step(&waiting, &[&open]), Step::Close(None));
    assert!(matches!(step(&waiting, &[]), Step::Close(Some(_))));
    // One that was refused holds no node.
    let refused = with(first.clone(), &failed("no such check"));
    assert!(matches!(step(&second, &[&refused]), Step::Open(_)));
    // One that is open goes first, whatever its name.
    let open = with(second, &emitted());
    assert!(matches!(step(&first, &[&open]), Step::Say(_)));
}

#[test]
fn what_is_no_event_is_refused_and_can_be_deleted() {
    let edited = |edit: fn(&mut Value)| {
        let mut object = held(object("a", "n1"));
        edit(&mut object["spec"]["healthEvent"]);
        object
    };
    for (object, says) in [
        (
            edited(|event| *event = Value::Null),
            "spec.healthEvent is missing",
        ),
        (
            edited(|event| *event = json!([1])),
            "a JSON object is expected",
        ),
        (
            edited(|event| event["nodeName"] = json!("")),
            "nodeName is missing",
        ),
        (
            edited(|event| event["isHealthy"] = json!(true)),
            "isHealthy has to be false",
        ),
        (
            edited(|event| event["isFatal"] = json!("x")),
            "spec.healthEvent: ",
        ),
    ] {
        let Step::Say(said) = step(&object, &[]) else {
            panic!("{:?}", step(&object, &[]));
        };
        assert!(said["message"].as_str().unwrap().contains(says), "{said}");
        assert_eq!(said["reason"], "Invalid");
        let mut deleted = object;
        deleted["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
        assert_eq!(step(&deleted, &[]), Step::Close(None));
    }
}
