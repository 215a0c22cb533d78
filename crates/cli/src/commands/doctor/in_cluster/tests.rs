use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::args::{ActArgs, RunArgs};
use crate::commands::doctor::Outcome;
use crate::settings::resolve;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn act(circuit_breaker: bool) -> ActSettings {
    let args = RunArgs {
        act: ActArgs {
            kubeconfig: Some("/a b".into()),
            namespace: Some("gw".into()),
            circuit_breaker: Some(circuit_breaker),
            ..ActArgs::default()
        },
        ..RunArgs::default()
    };
    resolve(args).unwrap().act
}

#[test]
fn clocks_that_differ_by_more_than_the_question_took_are_told() {
    for (there, asked, answered, expected) in [
        (100, 100, 100, Outcome::Ok),
        (100, 101, 102, Outcome::Ok),
        (95, 90, 100, Outcome::Ok),
        (100, 110, 110, Outcome::Warning),
        (110, 100, 101, Outcome::Warning),
        (100, 200, 200, Outcome::Problem),
        (200, 100, 100, Outcome::Problem),
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
        (Some(35), Outcome::Warning),
        (Some(36), Outcome::Ok),
        (Some(37), Outcome::Ok),
        (Some(38), Outcome::Warning),
        (None, Outcome::Warning),
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
    let found = own_node("n", None, &label, at(0));
    assert_eq!(results(&found), [Outcome::Problem]);
    assert!(found[0].fix.as_ref().unwrap().contains("--node-name"));
    let good = with(json!({"nvidia.com/gpu.present": "true"}));
    assert_eq!(
        results(&own_node("n", Some(&good), &label, at(0))),
        [Outcome::Ok]
    );
    let found = own_node("n", Some(&with(json!({}))), &label, at(0));
    assert_eq!(results(&found), [Outcome::Ok, Outcome::Warning]);
    assert_eq!(
        found[1].fix.as_deref(),
        Some("kubectl label node n nvidia.com/gpu.present=true")
    );
    let mut released = good.clone();
    let future = (keys::RELEASED_AT.to_owned(), at(100).to_string());
    released.annotations.extend([future]);
    for (now, expected) in [(0, 2), (50, 1)] {
        let found = own_node("n", Some(&released), &label, at(now));
        assert_eq!(found.len(), expected, "{found:?}");
    }
    assert_eq!(gpu_nodes(true, &label).result, Outcome::Ok);
    assert_eq!(gpu_nodes(false, &label).result, Outcome::Warning);
}

#[test]
fn a_breaker_is_closed_tripped_or_off() {
    let read = |status: &str| {
        let data = BTreeMap::from([("status".to_owned(), status.to_owned())]);
        Switch::read(&data, &BTreeMap::new())
    };
    for (on, switch, expected) in [
        (true, Switch::default(), Outcome::Ok),
        (true, read("CLOSED"), Outcome::Ok),
        (true, read("TRIPPED"), Outcome::Problem),
        (true, read("what"), Outcome::Problem),
        (false, read("TRIPPED"), Outcome::Warning),
    ] {
        let found = breaker(&act(on), &switch);
        assert_eq!(found.result, expected, "{found:?}");
    }
    let fix = breaker(&act(true), &read("TRIPPED")).fix.unwrap();
    let command = "kubectl -n gw patch configmap circuit-breaker --type merge -p \
                   '{\"data\":{\"status\":\"CLOSED\"}}'";
    assert!(fix.starts_with(command), "{fix}");
}

#[test]
fn times_of_the_future_on_the_breaker_are_warned_of() {
    let future = Some(Timestamp::MAX);
    let (reset_at, dropped_at) = (Some(at(50)), future);
    let switch = Switch {
        reset_at,
        dropped_at,
        ..Switch::default()
    };
    let found = future_times(&act(true), &switch, at(100));
    let [found] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert_eq!(found.result, Outcome::Warning);
    assert!(found.what.contains("dropped-at says 9999-"), "{found:?}");
    let fix = "kubectl -n gw annotate configmap circuit-breaker gpuwarden.dev/dropped-at-";
    assert_eq!(found.fix.as_deref(), Some(fix));
}

#[test]
fn a_pause_holds_until_it_ends() {
    let text = |until: i64| {
        json!({"reason": "r", "by": "me", "since": at(0), "until": at(until)}).to_string()
    };
    for (text, expected) in [
        (None, Outcome::Ok),
        (Some(String::new()), Outcome::Ok),
        (Some(text(50)), Outcome::Ok),
        (Some(text(200)), Outcome::Warning),
        (Some("what".to_owned()), Outcome::Warning),
    ] {
        let found = pause(text.as_deref(), at(100), String::new());
        assert_eq!(found.result, expected, "{found:?}");
    }
    let options = act(true).cluster.unwrap();
    assert_eq!(kubectl(&options), "kubectl --kubeconfig '/a b'");
}

#[test]
fn many_nodes_that_each_act_for_themselves_are_told() {
    assert_eq!((alone(1), alone(50)), (None, None));
    let found = alone(51).unwrap();
    assert_eq!(found.result, Outcome::Warning);
    assert!(found.what.contains("51 nodes"), "{found:?}");
}
