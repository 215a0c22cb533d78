use serde_json::json;

use super::*;
use crate::commands::doctor::Severity;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

#[test]
fn clocks_that_differ_by_more_than_the_question_took_are_told() {
    for (there, asked, answered, expected) in [
        (100, 100, 100, Severity::Ok),
        (100, 101, 102, Severity::Ok),
        (95, 90, 100, Severity::Ok),
        (100, 110, 110, Severity::Warning),
        (110, 100, 101, Severity::Warning),
        (100, 200, 200, Severity::Problem),
        (200, 100, 100, Severity::Problem),
    ] {
        let found = clock(at(there), at(asked), at(answered));
        assert_eq!(found.result, expected, "{found:?}");
    }
    assert!(
        clock(at(100), at(200), at(200))
            .what
            .ends_with("are 99 s apart")
    );
}

#[test]
fn versions_that_nothing_is_known_of_are_told() {
    for (minor, expected) in [
        (Some(34), Severity::Warning),
        (Some(35), Severity::Ok),
        (Some(36), Severity::Ok),
        (Some(37), Severity::Ok),
        (Some(38), Severity::Warning),
        (None, Severity::Warning),
    ] {
        let info = ServerInfo {
            version: "v1".into(),
            minor,
            time: None,
        };
        assert_eq!(version("https://c", &info).result, expected);
    }
}

#[test]
fn a_node_is_there_with_its_label_or_not() {
    let label = NodeLabel::parse("nvidia.com/gpu.present=true").unwrap();
    let with = |labels: serde_json::Value| {
        let object = json!({"metadata": {"name": "n", "uid": "u", "resourceVersion": "1",
            "labels": labels}});
        NodeView::from_object(object).unwrap()
    };
    let results = |found: &[Finding]| found.iter().map(|it| it.result).collect::<Vec<_>>();
    let found = own_node("n", None, &label);
    assert_eq!(results(&found), [Severity::Problem]);
    assert!(found[0].fix.as_ref().unwrap().contains("--node-name"));
    let good = with(json!({"nvidia.com/gpu.present": "true"}));
    assert_eq!(results(&own_node("n", Some(&good), &label)), [Severity::Ok]);
    let found = own_node("n", Some(&with(json!({}))), &label);
    assert_eq!(results(&found), [Severity::Ok, Severity::Warning]);
    assert_eq!(
        found[1].fix.as_deref(),
        Some("kubectl label node n nvidia.com/gpu.present=true")
    );
}

#[test]
fn many_nodes_that_each_act_for_themselves_are_told() {
    assert_eq!((alone(1), alone(50)), (None, None));
    let found = alone(51).unwrap();
    assert_eq!(found.result, Severity::Warning);
    assert!(found.what.contains("51 nodes"), "{found:?}");
}
