use std::sync::Arc;

use contract::{RecommendedAction, keys};
use jiff::SignedDuration;
use model::mode::Mode;
use model::node::{NodeView, Taint};
use model::reporter::{OWN_AGENT, Process, Reporter};
use policy::{DEFAULT_POLICY, Policy};
use serde_json::{Value, json};

use super::*;
use crate::drain::DrainConfig;
use crate::remediation::RemediationConfig;
use crate::session::Phase;
use crate::world::{Fate, Restart, World, event, settings};
use crate::{CreateAnswer, FleetInput, Settings};

/// Actions that reboot and validate, up to the keys of the validation.
const CONFIG: &str = r#"
[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "reboot"
equivalenceGroup = "restart"

[remediationActions.VALIDATE]
apiGroup = "batch"
version = "v1"
kind = "Job"
namespace = "gpuwarden"
completeConditionType = "Complete"
templateFileName = "job"
equivalenceGroup = "validation"
timeoutMinutes = 30

[templates]
reboot = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "maintenance-{{ .NodeName }}-{{ .HealthEventID }}"}
spec: {nodeName: {{ .NodeName }}}
"""
job = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "validate-{{ .NodeName }}-{{ .HealthEventID }}"}
spec: {}
"""

[validation]
"#;

fn validates(keys: &str) -> Settings {
    let none = |_: &str| Err("there are no files".to_owned());
    let config = RemediationConfig::parse(&format!("{CONFIG}{keys}"), "test", none);
    Settings {
        drain: Some(Arc::new(DrainConfig::default())),
        remediation: Some(Arc::new(config.unwrap())),
        ..settings()
    }
}

pub(crate) fn world_of(keys: &str, node: NodeView) -> World {
    let mut world = World::with(validates(keys), &Policy::builtin(), [node]);
    world.restart(Restart::Nothing);
    world
}

pub(crate) fn world(keys: &str) -> World {
    world_of(keys, NodeView::unknown("n1"))
}

pub(crate) fn fault(world: &mut World) {
    world.tick();
    let mut event = event("GpuMemWatch", &[("GPU", "0")], true, false);
    event.recommended_action = RecommendedAction::RestartBm.into();
    world.store(event, world.now);
}

/// Looks until a custom resource exists; returns its attempt.
pub(crate) fn until_made(world: &mut World) -> Attempt {
    for _ in 0..12 {
        let own = Ownership::read(&world["n1"]);
        let mark = own.and_then(|own| own.mark.remediation);
        let open = mark.as_ref().and_then(|mark| mark.under_way());
        if let Some(open) = open.filter(|one| one.made.is_some()) {
            return open.clone();
        }
        looks(world, 1);
    }
    panic!("{:?}: {}", world.phase(), awaits(world));
}

/// Looks; creates every requested resource.
pub(crate) fn looks(world: &mut World, times: usize) {
    for _ in 0..times {
        for planned in world.look(Fate::Made).creations {
            let object = planned.object;
            world.resources.insert(planned.name, object.clone());
            let (node, key) = ("n1".to_owned(), planned.key);
            let answer = CreateAnswer::There(Box::new(object));
            world.handle(FleetInput::ResourceCreated { node, key, answer });
        }
    }
}

pub(crate) fn ends(world: &mut World, open: &Attempt, condition: &str) {
    let object = world.resources.get_mut(&open.name).unwrap();
    let condition = json!({"type": condition, "status": "True", "reason": "R", "message": "m"});
    object["status"] = json!({"conditions": [condition]});
    world.deliver_resources();
    looks(world, 4);
}

fn awaits(world: &World) -> String {
    let session = world.fleet.status("n1").unwrap().session;
    session.map(|one| one.awaits).unwrap_or_default()
}

fn checks(world: &World) -> Vec<(String, String)> {
    let faults = world.fleet.book().faults("n1").iter();
    faults
        .map(|one| (one.check.clone(), one.code.clone()))
        .collect()
}

fn remediated(world: &mut World) {
    fault(world);
    let reboot = until_made(world);
    assert_eq!(reboot.resource.kind, "RebootNode");
    ends(world, &reboot, "NodeReady");
    world.recovery(0);
    looks(world, 3);
}

#[test]
fn a_repaired_node_comes_back_once_its_job_has_succeeded() {
    let mut world = world("action = \"VALIDATE\"");
    let before = world["n1"].clone();
    remediated(&mut world);
    let pending = [("NodeValidation".to_owned(), String::new())];
    assert_eq!(checks(&world), pending);
    let job = until_made(&mut world);
    assert_eq!(
        (job.resource.kind.as_str(), job.action.as_str()),
        ("Job", "VALIDATE")
    );
    assert!(world["n1"].unschedulable);
    // The result does not depend on what happens to the controller meanwhile.
    world.restart(Restart::Nothing);
    looks(&mut world, 4);
    assert!(world["n1"].unschedulable, "{}", awaits(&world));
    ends(&mut world, &job, "Complete");
    world.now += SignedDuration::from_mins(15);
    looks(&mut world, 4);
    assert_eq!(world.phase(), Phase::Idle, "{}", awaits(&world));
    assert_eq!(checks(&world), Vec::new());
    let after = &world["n1"];
    assert_eq!(
        (
            &after.labels,
            &after.annotations,
            &after.taints,
            after.unschedulable
        ),
        (
            &before.labels,
            &before.annotations,
            &before.taints,
            before.unschedulable
        )
    );
}

#[test]
fn a_validation_that_fails_is_a_fault_and_a_person_s() {
    let mut world = world("action = \"VALIDATE\"");
    remediated(&mut world);
    let job = until_made(&mut world);
    ends(&mut world, &job, "Failed");
    let codes: Vec<String> = checks(&world).into_iter().map(|(_, code)| code).collect();
    assert!(
        codes.contains(&keys::CODE_VALIDATION_FAILED.to_owned()),
        "{codes:?}"
    );
    assert_eq!(world.phase(), Phase::RemediationFailed);
    assert!(awaits(&world).contains("a person"), "{}", awaits(&world));
    looks(&mut world, 10);
    assert_eq!(checks(&world).len(), 2, "it is told once");
    // The person's release counts.
    world.annotate(keys::RELEASE, "{}");
    looks(&mut world, 4);
    assert_eq!(world.phase(), Phase::Idle);
    assert!(!world["n1"].unschedulable);
    looks(&mut world, 4);
    assert_eq!(checks(&world), Vec::new(), "what it dismisses is closed");
}

#[test]
fn a_node_that_was_let_in_and_fails_at_once_is_validated_after_its_next_repair() {
    let mut world = world("action = \"VALIDATE\"");
    let text = format!("uncordon = \"releases\"\n{DEFAULT_POLICY}");
    world.set_policy(&Policy::parse(&text, "p").unwrap());
    remediated(&mut world);
    world["n1"].unschedulable = false;
    fault(&mut world);
    looks(&mut world, 4);
    let reboot = until_made(&mut world);
    assert_eq!(reboot.resource.kind, "RebootNode");
    ends(&mut world, &reboot, "NodeReady");
    world.recovery(0);
    looks(&mut world, 3);
    assert!(world["n1"].unschedulable, "it comes back untested");
    assert_eq!(until_made(&mut world).resource.kind, "Job");
}

#[test]
fn nobody_but_gpuwarden_says_that_a_node_has_passed() {
    let mut world = world("action = \"VALIDATE\"");
    remediated(&mut world);
    let pending = [("NodeValidation".to_owned(), String::new())];
    let root = Process { uid: 0, pid: None };
    for reporter in [
        Reporter::Operator(root),
        Reporter::Node,
        Reporter::Central("monitor".to_owned()),
        Reporter::User(root),
    ] {
        let mut event = world.fleet.book().faults("n1")[0].gone("it is well", world.now);
        event.metadata.clear();
        reporter.note_in(&mut event);
        world.tick();
        world.store(event, world.now);
        looks(&mut world, 2);
        assert_eq!(checks(&world), pending, "{reporter:?}");
        assert!(world["n1"].unschedulable, "{reporter:?}");
    }
}

#[test]
fn a_job_that_does_not_run_asks_a_person() {
    let mut world = world("action = \"VALIDATE\"");
    remediated(&mut world);
    until_made(&mut world);
    world.now += SignedDuration::from_mins(31);
    looks(&mut world, 3);
    assert!(
        awaits(&world).contains("does not end"),
        "{}",
        awaits(&world)
    );
    assert!(world["n1"].unschedulable);
}

#[test]
fn a_dry_run_lets_no_node_pass_and_who_validates_no_more_says_so() {
    let mut world = world("action = \"VALIDATE\"");
    remediated(&mut world);
    until_made(&mut world);
    let acting = world.settings.clone();
    world.settings.mode = Mode::DryRun;
    world.restart(Restart::All);
    looks(&mut world, 4);
    assert_eq!(checks(&world).len(), 1, "it has not passed");
    world.settings = Settings {
        remediation: None,
        ..acting
    };
    world.restart(Restart::All);
    looks(&mut world, 4);
    assert_eq!(checks(&world), Vec::new());
}

#[test]
fn a_node_without_a_repair_comes_back_at_once() {
    let mut world = world("action = \"VALIDATE\"");
    fault(&mut world);
    world.look(Fate::Made);
    world.recovery(0);
    looks(&mut world, 4);
    assert_eq!(world.phase(), Phase::Idle);
}

#[test]
fn a_new_fault_is_repaired_first_and_the_node_validated_once_more() {
    let mut world = world("action = \"VALIDATE\"");
    remediated(&mut world);
    let job = until_made(&mut world);
    fault(&mut world);
    ends(&mut world, &job, "Complete");
    let reboot = until_made(&mut world);
    assert_eq!(reboot.resource.kind, "RebootNode");
    ends(&mut world, &reboot, "NodeReady");
    assert!(!checks(&world).is_empty());
    world.recovery(0);
    looks(&mut world, 6);
    assert!(
        world["n1"].unschedulable,
        "it was validated before the repair only"
    );
}

#[test]
fn time_without_a_new_fault_is_enough_where_no_job_is_named() {
    let mut world = world("quietMinutes = 10");
    remediated(&mut world);
    looks(&mut world, 5);
    assert!(world["n1"].unschedulable);
    world.now += SignedDuration::from_mins(11);
    looks(&mut world, 4);
    assert_eq!(world.phase(), Phase::Idle, "{}", awaits(&world));
}

#[test]
fn a_job_begins_after_the_quiet_time() {
    let mut world = world("action = \"VALIDATE\"\nquietMinutes = 10");
    remediated(&mut world);
    looks(&mut world, 5);
    assert!(
        world
            .resources
            .keys()
            .all(|name| !name.starts_with("validate"))
    );
    assert!(
        awaits(&world).contains("without a new fault"),
        "{}",
        awaits(&world)
    );
    world.now += SignedDuration::from_mins(11);
    assert_eq!(until_made(&mut world).action, "VALIDATE");
}

/// Returns a node created at this second, with a taint that it was registered with.
fn new_node(created: i64) -> NodeView {
    let taint = json!({"key": keys::NOT_VALIDATED, "effect": "NoSchedule"});
    let object: Value = json!({
        "metadata": {"name": "n1", "uid": "u1", "resourceVersion": "1",
                     "creationTimestamp": Timestamp::from_second(created).unwrap().to_string(),
                     "labels": {"pool": "gpu"}},
        "spec": {"taints": [taint]},
    });
    NodeView::from_object(object).unwrap()
}

const NEW: &str = "action = \"VALIDATE\"\nnewNodesSince = \"2001-09-09T01:46:40Z\"\nnewNodesSelector = \"pool=gpu\"";

#[test]
fn a_new_node_begins_once_it_has_passed_and_is_not_asked_again() {
    let mut world = world_of(NEW, new_node(1_000_000_001));
    looks(&mut world, 3);
    assert!(world["n1"].unschedulable);
    assert_eq!(checks(&world)[0].0, "NodeAdmission");
    let job = until_made(&mut world);
    ends(&mut world, &job, "Complete");
    world.now += SignedDuration::from_mins(15);
    looks(&mut world, 4);
    let node = &world["n1"];
    assert!(!node.unschedulable, "{}", awaits(&world));
    assert_eq!(node.taints, []);
    assert_eq!(node.annotations.get(keys::ADMITTED), Some(&"u1".to_owned()));
    world.restart(Restart::Nothing);
    looks(&mut world, 3);
    assert_eq!(world.phase(), Phase::Idle);
}

#[test]
fn a_new_machine_under_an_old_name_has_to_pass_whatever_its_annotation_says() {
    for (admitted, held) in [("u1", false), ("u0", true), ("", true)] {
        let mut world = world_of(NEW, new_node(1_000_000_001));
        world.annotate(keys::ADMITTED, admitted);
        looks(&mut world, 3);
        assert_eq!(world["n1"].unschedulable, held, "admitted: {admitted:?}");
    }
}

#[test]
fn who_was_there_before_or_is_not_meant_or_is_let_in_by_a_person_is_not_held() {
    for (keys, created) in [
        (NEW, 1_000_000_000),
        (&NEW.replace("pool=gpu", "pool=cpu"), 1_000_000_001),
    ] {
        let mut world = world_of(keys, new_node(created));
        looks(&mut world, 3);
        assert_eq!(world.phase(), Phase::Idle);
        let taint = Taint {
            key: keys::NOT_VALIDATED.to_owned(),
            value: String::new(),
            effect: "NoSchedule".to_owned(),
        };
        assert!(world["n1"].has_taint(&taint), "it is not ours to take");
    }
    let mut world = world_of(NEW, new_node(1_000_000_001));
    looks(&mut world, 3);
    world["n1"].unschedulable = false;
    looks(&mut world, 5);
    let node = &world["n1"];
    assert_eq!((world.phase(), node.taints.len()), (Phase::Idle, 0));
    assert_eq!(checks(&world), Vec::new());
}

#[test]
fn a_repair_is_in_the_feed_before_its_validation_whichever_way_that_ends() {
    for (condition, last) in [
        ("Complete", (true, "")),
        ("Failed", (false, keys::CODE_VALIDATION_FAILED)),
    ] {
        let mut world = world("action = \"VALIDATE\"");
        remediated(&mut world);
        let job = until_made(&mut world);
        ends(&mut world, &job, condition);
        let told = world.stored.iter().map(|one| {
            let event = &one.event;
            let code = event.error_code.first().map_or("", String::as_str);
            let code = if event.agent == OWN_AGENT { code } else { "" };
            (event.check_name.as_str(), event.is_healthy, code)
        });
        let expected = [
            ("GpuMemWatch", false, ""),
            (keys::CHECK_REPAIRED, true, ""),
            ("GpuMemWatch", true, ""),
            ("NodeValidation", false, ""),
            ("NodeValidation", last.0, last.1),
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected);
    }
}
