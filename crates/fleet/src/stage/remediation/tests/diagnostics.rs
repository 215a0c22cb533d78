//! Diagnostics are collected beside the drain, and hold nothing up.

use super::*;
use crate::PodUpdate;
use crate::drain::PodView;

const CONFIG: &str = r#"
diagnosticsAction = "COLLECT"

[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "one"
equivalenceGroup = "restart"

[remediationActions.COLLECT]
apiGroup = "batch"
version = "v1"
kind = "Job"
namespace = "gpuwarden"
completeConditionType = "Complete"
templateFileName = "one"
equivalenceGroup = "diagnostics"
timeoutMinutes = 10

[templates]
one = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "maintenance-{{ .NodeName }}-{{ .HealthEventID }}"}
"""
"#;

/// Returns a node with a pod that is waited for.
fn world_with_pod() -> World {
    let none = |_: &str| Err("there are no files".to_owned());
    let config = RemediationConfig::parse(CONFIG, "test", none).unwrap();
    let mut world = world_with(Settings {
        remediation: Some(Arc::new(config)),
        ..remediates()
    });
    let pod = PodView {
        namespace: "jobs".to_owned(),
        name: "a".to_owned(),
        uid: "u".to_owned(),
        ..PodView::default()
    };
    world.pods.insert(pod.title(), pod);
    world.restart(Restart::Nothing);
    world
}

fn pod_ends(world: &mut World) {
    world.pods.clear();
    world.deliver_pod_update(PodUpdate::Gone("jobs/a".to_owned()));
}

#[test]
fn diagnostics_are_collected_while_pods_leave_and_the_repair_comes_after_them() {
    let mut world = world_with_pod();
    let id = fault(&mut world, 0, 24);
    let job = until_made(&mut world);
    assert_eq!(job.kind.kind, "Job");
    make(&mut world, &job);
    world.look(Fate::Made);
    assert_eq!(state(&world), Some("draining"));
    pod_ends(&mut world);
    (0..4).for_each(|_| drop(world.look(Fate::Made)));
    assert_eq!(state(&world), Some("drain-succeeded"));
    assert!(
        awaits(&world).contains("the end of Job"),
        "{}",
        awaits(&world)
    );
    let done = json!({"conditions": [{"type": "Complete", "status": "True"}]});
    set(&mut world, &job.name, done);
    let reboot = until_made(&mut world);
    assert_eq!(reboot.name, format!("maintenance-n1-{id}"));
    let own = Ownership::read(&world["n1"]).unwrap();
    let annotation = own.mark.remediation.unwrap().state_annotation();
    assert_eq!(annotation, None, "the Job is none of NVSentinel's repairs");
}

#[test]
fn diagnostics_that_do_not_end_or_cannot_be_made_hold_nothing_up() {
    let mut world = world_with_pod();
    fault(&mut world, 0, 24);
    let job = until_made(&mut world);
    make(&mut world, &job);
    pod_ends(&mut world);
    (0..3).for_each(|_| drop(world.look(Fate::Made)));
    world.now += SignedDuration::from_mins(11);
    assert_eq!(until_made(&mut world).kind.kind, "RebootNode");

    let mut world = world_with_pod();
    fault(&mut world, 0, 24);
    let job = until_made(&mut world);
    pod_ends(&mut world);
    let (node, key) = ("n1".to_owned(), job.key);
    let answer = CreateAnswer::Refused("no".to_owned());
    world.handle(FleetInput::ResourceCreated { node, key, answer });
    assert_eq!(until_made(&mut world).kind.kind, "RebootNode");
}

#[test]
fn what_asks_for_no_repair_collects_nothing_and_what_asks_for_a_person_does() {
    let mut world = world_with_pod();
    fault(&mut world, 0, 0);
    for _ in 0..5 {
        assert!(world.look(Fate::Made).creations.is_empty());
    }
    fault(&mut world, 1, 5);
    assert_eq!(until_made(&mut world).kind.kind, "Job");
}
