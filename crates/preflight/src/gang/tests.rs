use serde_json::json;

use super::*;
use crate::config::Config;

fn by(discovery: &str) -> Discovery {
    let text = format!("image: i\ngangDiscovery: {discovery}\n");
    Config::parse(&text, "test")
        .expect("a configuration")
        .discovery
}

const VOLCANO: &str = "{method: volcano}";

#[test]
fn each_form_of_a_gang_is_known_from_the_pod_alone() {
    let labels = "{method: labels, labels: {gangIdLabel: gang, gangSizeLabel: size}}";
    for (pod, discovery, id) in [
        // 1.36 and 1.37.
        (
            json!({"spec": {"schedulingGroup": {"podGroupName": "workers"}}}),
            "{}",
            Some("kubernetes-training-workers"),
        ),
        // 1.35.
        (
            json!({"spec": {"workloadRef": {"name": "job", "podGroup": "workers"}}}),
            "{}",
            Some("kubernetes-training-job-workers"),
        ),
        (
            json!({"spec": {"workloadRef": {"name": "job"}}}),
            "{}",
            Some("kubernetes-training-job"),
        ),
        (
            json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": "pg"}}}),
            VOLCANO,
            Some("volcano-training-pg"),
        ),
        (
            json!({"metadata": {"annotations": {"volcano.sh/pod-group": "pg"}}}),
            VOLCANO,
            Some("volcano-training-pg"),
        ),
        (
            json!({"metadata": {"labels": {"kueue.x-k8s.io/workload-name": "wl"}}}),
            "{method: kueue}",
            Some("kueue-training-wl"),
        ),
        (
            json!({"metadata": {"annotations": {"kueue.x-k8s.io/workload": "wl"}}}),
            "{method: kueue}",
            Some("kueue-training-wl"),
        ),
        (
            json!({"metadata": {"labels": {"gang": "g", "size": "4"}}}),
            labels,
            Some("labels-training-g"),
        ),
        (json!({"spec": {"containers": []}}), "{}", None),
        (json!({"metadata": {"annotations": null}}), VOLCANO, None),
        (
            json!({"metadata": {"annotations": {"scheduling.k8s.io/group-name": ""}}}),
            VOLCANO,
            None,
        ),
        (
            json!({"metadata": {"labels": {"other": "x"}}}),
            labels,
            None,
        ),
    ] {
        let gang = Gang::of(&pod, "training", &by(discovery));
        let gang = gang.unwrap_or_else(|error| panic!("{pod}: {error}"));
        assert_eq!(gang.map(|gang| gang.id()).as_deref(), id, "{pod}");
    }
}

#[test]
fn what_a_pod_says_wrongly_is_refused_by_name() {
    let labels = "{method: labels, labels: {gangIdLabel: gang, gangSizeLabel: size}}";
    for (pod, discovery, part) in [
        (
            json!({"metadata": {"labels": {"gang": "g"}}}),
            labels,
            "`size` is missing",
        ),
        (
            json!({"metadata": {"labels": {"gang": "g", "size": "0"}}}),
            labels,
            "\"0\"",
        ),
        (
            json!({"metadata": {"labels": {"gang": "g", "size": "many"}}}),
            labels,
            "\"many\"",
        ),
        (
            json!({"metadata": {"labels": {"gang": "g", "size": "9999"}}}),
            labels,
            "1 to 8192",
        ),
        (
            json!({"metadata": {"labels": {"kueue.x-k8s.io/pod-group-name": "g"}}}),
            "{method: kueue}",
            "pod-group-total-count` is missing",
        ),
        (
            json!({"spec": {"schedulingGroup": {"podGroupName": "g".repeat(300)}}}),
            "{}",
            "at most 253",
        ),
    ] {
        let error = Gang::of(&pod, "training", &by(discovery)).expect_err(&pod.to_string());
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn each_object_says_how_many_members_it_asks_for() {
    let native = json!({"spec": {"schedulingGroup": {"podGroupName": "g"}}});
    let older = json!({"spec": {"workloadRef": {"name": "job", "podGroup": "workers"}}});
    let kueue = json!({"metadata": {"labels": {"kueue.x-k8s.io/workload-name": "wl"}}});
    let volcano = json!({"metadata": {"annotations": {"volcano.sh/pod-group": "pg"}}});
    let workload = json!({"spec": {"podGroups": [
        {"name": "driver", "policy": {"basic": {}}},
        {"name": "workers", "policy": {"gang": {"minCount": 16}}},
    ]}});
    for (pod, discovery, object, expected) in [
        (
            &native,
            "{}",
            json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 8}}}}),
            Ok(Size::Members(8)),
        ),
        (
            &native,
            "{}",
            json!({"spec": {"schedulingPolicy": {"basic": {}}}}),
            Ok(Size::NoGang),
        ),
        (&native, "{}", json!({"spec": {}}), Ok(Size::NotSaid)),
        (
            &native,
            "{}",
            json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 0}}}}),
            Err("1 to 8192"),
        ),
        (&older, "{}", workload, Ok(Size::Members(16))),
        (
            &kueue,
            "{method: kueue}",
            json!({"spec": {"podSets": [{"count": 1}, {"count": 7}, {}]}}),
            Ok(Size::Members(9)),
        ),
        (
            &volcano,
            VOLCANO,
            json!({"spec": {"minMember": 4}}),
            Ok(Size::Members(4)),
        ),
        (
            &volcano,
            VOLCANO,
            json!({"spec": {}}),
            Err("says no number of members"),
        ),
    ] {
        let by = by(discovery);
        let gang = Gang::of(pod, "training", &by)
            .expect("a gang")
            .expect("a gang");
        let size = gang.size_in(&object, &by);
        match (size, expected) {
            (Ok(size), Ok(expected)) => assert_eq!(size, expected, "{object}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, _) => panic!("{object}: {got:?}"),
        }
    }
}

#[test]
fn a_gang_of_kueue_says_its_size_itself() {
    let pod = json!({"metadata": {
        "labels": {"kueue.x-k8s.io/pod-group-name": "g"},
        "annotations": {"kueue.x-k8s.io/pod-group-total-count": "3"},
    }});
    let gang = Gang::of(&pod, "training", &Discovery::Kueue)
        .expect("a gang")
        .expect("a gang");
    assert_eq!(gang.size, SizeFrom::Pods(3));
}
