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
        // Kubernetes 1.36 and 1.37.
        (
            json!({"spec": {"schedulingGroup": {"podGroupName": "workers"}}}),
            "{}",
            Some("kubernetes-training-workers"),
        ),
        // Kubernetes 1.35.
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
fn of_several_names_the_first_annotation_counts_and_then_the_first_label() {
    let own = "{name: own, annotationKeys: [a, b], labelKeys: [c, d], podGroupGVR: {group: g, version: v, \
               resource: r}}";
    let pod = |annotations: Value, labels: Value| json!({"metadata": {"annotations": annotations, "labels": labels}});
    for (pod, discovery, id) in [
        (
            pod(json!({"b": "2", "a": "1"}), json!({"c": "3"})),
            own,
            "own-training-1",
        ),
        (
            pod(json!({"b": "2"}), json!({"c": "3", "a": "4"})),
            own,
            "own-training-2",
        ),
        (
            pod(json!({"c": "5"}), json!({"d": "4", "c": "3"})),
            own,
            "own-training-3",
        ),
        (pod(json!({}), json!({"d": "4"})), own, "own-training-4"),
        (
            pod(
                json!({"volcano.sh/pod-group": "2", "scheduling.k8s.io/group-name": "1"}),
                json!({}),
            ),
            VOLCANO,
            "volcano-training-1",
        ),
        // The label of ADR-026 wins over the one of Kueue's topology-aware scheduling.
        (
            pod(
                json!({"kueue.x-k8s.io/workload": "2"}),
                json!({"kueue.x-k8s.io/workload-name": "1"}),
            ),
            "{method: kueue}",
            "kueue-training-1",
        ),
    ] {
        let gang = Gang::of(&pod, "training", &by(discovery))
            .expect("a gang")
            .expect("a gang");
        assert_eq!(gang.id(), id, "{pod}");
    }
}

#[test]
fn an_expression_says_where_the_size_stands() {
    let discovery = by(
        "{name: x, labelKeys: [group], podGroupGVR: {group: g, version: v, resource: r}, \
         minCountExpr: 'podGroup.spec.size + podGroup.spec.spares'}",
    );
    let pod = json!({"metadata": {"labels": {"group": "g"}}});
    let gang = Gang::of(&pod, "training", &discovery)
        .expect("a gang")
        .expect("a gang");
    let object = json!({"spec": {"size": 5, "spares": 2, "minMember": 3}});
    assert_eq!(gang.size_in(&object, &discovery), Ok(Size::Members(7)));
    let error = gang
        .size_in(&json!({"spec": {"minMember": 3}}), &discovery)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`podGroup.spec.size + podGroup.spec.spares`"),
        "{error}"
    );
}

#[test]
fn a_gang_has_as_many_members_as_its_config_map_has_room_for() {
    let labels = by("{method: labels, labels: {gangIdLabel: gang, gangSizeLabel: size}}");
    let volcano = by(VOLCANO);
    for (count, is_taken) in [(0, false), (1, true), (8192, true), (8193, false)] {
        let pod = json!({"metadata": {"labels": {"gang": "g", "size": count.to_string()}}});
        assert_eq!(Gang::of(&pod, "n", &labels).is_ok(), is_taken, "{count}");
        let pod = json!({"metadata": {"annotations": {"volcano.sh/pod-group": "g"}}});
        let gang = Gang::of(&pod, "n", &volcano)
            .expect("a gang")
            .expect("a gang");
        let object = json!({"spec": {"minMember": count}});
        assert_eq!(gang.size_in(&object, &volcano).is_ok(), is_taken, "{count}");
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
            Err("gives no number of members"),
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
