use model::resource::{ATTEMPT_COMPLETE, CompletionReason};
use std::collections::BTreeMap;

use contract::keys;
use serde_json::json;

use super::steps::READ_WITHIN;
use super::*;
use crate::Maintenance;

mod simulator;

const FINALIZER: &str = "janitor.dgxc.nvidia.com/finalizer";
const PLUGIN: &str = "nvidia.com/gpu.deploy.device-plugin";
const DCGM: &str = "nvidia.com/gpu.deploy.dcgm";
const DCGM_DRA: &str = "nvidia.com/gpu.deploy.dcgm-dra";
const UUID: &str = "GPU-d2e7c0ff-0000-4000-8000-000000000001";

fn settings() -> ResetSettings {
    ResetSettings {
        services: true,
        timeout: SignedDuration::from_mins(25),
        namespace: "gpuwarden".to_owned(),
        image: "example.com/gpuwarden:1".to_owned(),
        pull_secrets: vec!["pull".to_owned()],
        runtime_class: Some("nvidia".to_owned()),
        resources: json!({"limits": {"cpu": "100m"}}),
        write_log: true,
    }
}

fn node(labels: &[(&str, &str)]) -> NodeView {
    let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
    let object = json!({"metadata": {"name": "n1", "uid": "node-uid", "labels": labels}});
    NodeView::from_object(object).unwrap()
}

fn pod(app: &str, ready: bool) -> ServicePod {
    ServicePod {
        title: format!("gpu-operator/{app}-x"),
        app: app.to_owned(),
        ready,
    }
}

/// A request, and the simulated cluster.
struct World {
    object: Value,
    node: Option<NodeView>,
    pods: Vec<ServicePod>,
    /// True if the pods cannot be read.
    unread: bool,
    looks_since: Timestamp,
    job: ResetObservation,
    by_provider: bool,
    before: Option<String>,
    excluded: bool,
    settings: ResetSettings,
    now: Timestamp,
    made: Vec<Value>,
}

impl World {
    fn new(node: NodeView) -> Self {
        Self {
            object: json!({
                "metadata": {"name": "r1", "uid": "r1-uid"},
                "spec": {"nodeName": "n1", "selector": {"uuids": [UUID]}},
            }),
            node: Some(node),
            pods: Vec::new(),
            unread: false,
            looks_since: Timestamp::UNIX_EPOCH,
            job: ResetObservation::Absent,
            by_provider: false,
            before: None,
            excluded: false,
            settings: settings(),
            now: "2026-11-24T00:00:00Z".parse().unwrap(),
            made: Vec::new(),
        }
    }

    fn decide(&self) -> ResetDecision {
        decide(&ResetInput {
            request: &MaintenanceResource::read(Maintenance::Reset, &self.object).unwrap(),
            node: self.node.as_ref(),
            pods: (!self.unread).then_some(&self.pods),
            looks_since: self.looks_since,
            reset: &self.job,
            by_provider: self.by_provider,
            before: self.before.as_deref(),
            excluded: self.excluded,
            settings: &self.settings,
            now: self.now,
        })
    }

    /// Carries out decisions until none is left. Returns what the request then waits for.
    fn settle(&mut self) -> ResetDecision {
        for _ in 0..30 {
            let decision = self.decide();
            let Some(effect) = decision.act else {
                return decision;
            };
            self.apply(effect);
        }
        panic!("it never settles: {:?}", self.decide());
    }

    fn apply(&mut self, effect: Act) {
        match effect {
            Act::Finalizer(on) => {
                let list = if on { json!([FINALIZER]) } else { json!([]) };
                self.object["metadata"]["finalizers"] = list;
            }
            Act::Status(status) => self.object["status"] = status.patch(),
            Act::Node(change) => self.node = self.node.as_ref().map(|one| one.after(&change)),
            Act::Make(job) => {
                self.made.push(job);
                self.job = ResetObservation::Own(ResetState::Active(Some(self.now)));
            }
            Act::Stop => {
                assert!(!self.by_provider, "a provider cannot be stopped");
                self.job = ResetObservation::Absent;
            }
        }
    }

    fn passes(&mut self, minutes: i64) {
        self.now += SignedDuration::from_mins(minutes);
    }

    fn label(&self, label: &str) -> Option<&str> {
        self.node.as_ref()?.labels.get(label).map(String::as_str)
    }

    /// Returns `STATUS REASON` of a condition.
    fn says(&self, kind: &str) -> String {
        let conditions = self.object["status"]["conditions"].as_array().cloned();
        let conditions = conditions.unwrap_or_default();
        let Some(one) = conditions.iter().find(|one| one["type"] == kind) else {
            return String::new();
        };
        let text = |key: &str| one[key].as_str().unwrap().to_owned();
        format!("{} {}", text("status"), text("reason"))
    }

    fn phase(&self) -> &str {
        self.object["status"]["phase"].as_str().unwrap_or_default()
    }

    /// Returns the state as read by the remediation of the node.
    fn outcome(&self) -> Option<model::attempt::AttemptOutcome> {
        let kind = model::attempt::ResourceKind {
            group: "janitor.dgxc.nvidia.com".to_owned(),
            version: "v1alpha1".to_owned(),
            kind: "GPUReset".to_owned(),
            namespace: None,
            condition: COMPLETE.to_owned(),
        };
        let state = model::resource::ResourceState::read(&self.object, &kind);
        state.end.map(|(outcome, _)| outcome)
    }

    fn is_clean(&self) -> bool {
        let node = self.node.as_ref();
        node.is_none_or(|node| !node.annotations.contains_key(keys::RESET_STOPPED))
    }
}

#[test]
fn what_was_made_for_a_session_that_has_ended_stops_and_resets_nothing() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.object["metadata"]["annotations"] = json!({keys::ATTEMPT: "e1/t"});
    world.settle();
    assert_eq!(world.says(READY), "Unknown Pending");
    world.passes(1);
    world.settle();
    assert_eq!(
        (world.phase(), world.label(PLUGIN)),
        ("Failed", Some("true"))
    );
    assert_eq!(
        (world.says(READY).as_str(), world.made.len()),
        ("False SessionEnded", 0)
    );
}

#[test]
fn a_session_that_ends_before_the_job_is_made_stops_it() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.object["metadata"]["annotations"] = json!({keys::ATTEMPT: "e1/t"});
    let done = |kind: &str| json!({"type": kind, "status": "True", "reason": "R", "message": ""});
    world.object["status"] = json!({
        "phase": "InProgress", "startTime": world.now,
        "conditions": [done(READY), done(TORN_DOWN)],
    });
    world.settle();
    assert_eq!(
        (world.says(JOB_CREATED).as_str(), world.made.len()),
        ("False SessionEnded", 0)
    );
    assert_eq!(world.label(PLUGIN), Some("true"));
}

#[test]
fn its_time_begins_with_its_turn() {
    let mut world = World::new(node(&[]));
    world.before = Some("RebootNode b".to_owned());
    world.settle();
    let status = &world.object["status"];
    assert_eq!(
        (world.phase(), &status["startTime"]),
        ("Pending", &Value::Null)
    );
    world.passes(20);
    world.before = None;
    world.settle();
    let start = world.object["status"]["startTime"].as_str().unwrap();
    assert_eq!(start.parse::<Timestamp>().unwrap(), world.now);
    // The time limit counts from the request's first observation.
    let mut world = World::new(node(&[]));
    world.before = Some("RebootNode b".to_owned());
    let decision = world.settle();
    assert_eq!(decision.wake, Some(world.now + world.settings.timeout));
    world.passes(25);
    world.settle();
    assert_eq!(world.says(READY), "False ReadinessTimeoutExceeded");
}

#[test]
fn pods_of_services_that_cannot_be_read_end_a_reset_and_do_not_hold_it_for_ever() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.unread = true;
    let decision = world.settle();
    assert_eq!(decision.awaits, "the pods of services to be read");
    world.now = decision.wake.unwrap();
    world.settle();
    assert_eq!(world.says(TORN_DOWN), "False ServicePodsUnknown");
    assert_eq!(world.says(ATTEMPT_COMPLETE), "True PermanentFailure");
    // A process that has just started has not read the pods yet, so the deadline does not apply.
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.unread = true;
    world.settle();
    world.passes(60);
    world.looks_since = world.now;
    let decision = world.settle();
    assert_eq!(decision.awaits, "the pods of services to be read");
    assert_eq!(decision.wake, Some(world.now + READ_WITHIN));
    // After the reset, and with the stopped services restored.
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.settle();
    world.unread = true;
    world.job = ResetObservation::Own(ResetState::Succeeded);
    let decision = world.settle();
    assert_eq!(world.label(PLUGIN), Some("true"));
    world.now = decision.wake.unwrap();
    world.settle();
    assert_eq!(world.says(RESTORED), "False RestoredServicesUnknown");
    // The GPUs were reset, so no reboot follows automatically.
    assert_eq!(world.says(ATTEMPT_COMPLETE), "True AmbiguousFailure");
    assert!(world.object["status"]["completionTime"].is_string());
}

#[test]
fn a_reset_that_cannot_be_read_is_not_waited_for_for_ever() {
    for created in [true, false] {
        let mut world = World::new(node(&[(PLUGIN, "true")]));
        if !created {
            world.job = ResetObservation::Unknown;
        }
        world.settle();
        world.job = ResetObservation::Unknown;
        let decision = world.settle();
        assert!(decision.awaits.ends_with("to be read"), "{decision:?}");
        world.now = decision.wake.unwrap();
        world.settle();
        assert_eq!(world.says(JOB_COMPLETED), "False ResetTimeoutExceeded");
        // The state is unknown: the status says so, and the services are restored.
        world.passes(3);
        world.settle();
        assert_eq!(world.label(PLUGIN), Some("true"));
        assert_eq!(world.says(ATTEMPT_COMPLETE), "True AmbiguousFailure");
    }
}

#[test]
fn services_are_stopped_gpus_are_reset_and_all_is_as_it_was() {
    let mut world = World::new(node(&[(PLUGIN, "true"), (DCGM, "false"), ("a", "b")]));
    let before = world.node.clone().unwrap();
    world.pods = vec![pod("nvidia-device-plugin-daemonset", true)];
    let decision = world.settle();
    assert_eq!(world.label(PLUGIN), Some("false"));
    assert!(
        decision
            .awaits
            .contains("gpu-operator/nvidia-device-plugin-daemonset-x")
    );
    assert!(world.made.is_empty());
    assert_eq!(
        (world.phase(), world.says(READY).as_str()),
        ("InProgress", "True ReadyForReset")
    );
    // The Job is created once the pods are gone, for the requested GPUs.
    world.pods.clear();
    world.settle();
    assert_eq!(world.made.len(), 1);
    let pod_spec = &world.made[0]["spec"]["template"]["spec"];
    let env = &pod_spec["containers"][0]["env"][0];
    assert_eq!(
        (&env["name"], &env["value"]),
        (&json!("NVIDIA_GPU_RESETS"), &json!(UUID))
    );
    let security = &pod_spec["containers"][0]["securityContext"];
    assert_eq!(*security, json!({"privileged": true, "runAsUser": 0}));
    assert_eq!(pod_spec["nodeName"], "n1");
    assert_eq!(pod_spec["runtimeClassName"], "nvidia");
    assert_eq!(world.made[0]["metadata"]["name"], "r1-reset-job");
    assert_eq!(world.says(JOB_CREATED), "True ResetJobCreationSucceeded");
    assert_eq!(world.outcome(), None);
    // The labels are restored at once; then the request waits for the pods.
    world.job = ResetObservation::Own(ResetState::Succeeded);
    let decision = world.settle();
    assert_eq!(world.label(PLUGIN), Some("true"));
    assert!(
        decision.awaits.contains("nvidia-device-plugin-daemonset"),
        "{decision:?}"
    );
    world.pods = vec![pod("nvidia-device-plugin-daemonset", true)];
    world.settle();
    assert_eq!(world.says(COMPLETE), "True GPUResetSucceeded");
    assert_eq!(world.phase(), "Succeeded");
    assert_eq!(
        world.outcome(),
        Some(model::attempt::AttemptOutcome::Succeeded)
    );
    let node = world.node.unwrap();
    assert_eq!(
        (node.labels, node.annotations),
        (before.labels, before.annotations)
    );
    assert_eq!(world.object["metadata"]["finalizers"], json!([]));
}

#[test]
fn the_services_of_both_kinds_of_installation_are_known() {
    let mut world = World::new(node(&[(DCGM_DRA, "true")]));
    world.pods = vec![
        pod("nvidia-dcgm-dra", true),
        pod("nvidia-dcgm-exporter", true),
    ];
    let decision = world.settle();
    assert_eq!(world.label(DCGM_DRA), Some("false"));
    // A pod without a label of the node is not the operator's, and is not waited for.
    assert_eq!(
        decision.awaits,
        "pods of services are still there: gpu-operator/nvidia-dcgm-dra-x"
    );
    assert_eq!(SERVICES.len(), 6);
}

#[test]
fn each_failure_ends_as_one_with_the_services_as_they_were() {
    type Happens = fn(&mut World);
    let cases: [(&str, &str, Happens); 8] = [
        ("ServiceTeardownTimeoutExceeded", "pods stay", |world| {
            world.pods = vec![pod("nvidia-device-plugin-daemonset", true)];
            world.settle();
            world.passes(6);
        }),
        ("ResetJobFailed", "the Job fails", |world| {
            world.settle();
            world.job =
                ResetObservation::Own(ResetState::Failed("DeadlineExceeded: too late".to_owned()));
        }),
        ("ResetJobNotFound", "the Job vanishes", |world| {
            world.settle();
            world.job = ResetObservation::Absent;
        }),
        ("ResetJobFailed", "the Job never ends", |world| {
            world.settle();
            world.passes(8);
        }),
        ("ResetJobCreationFailed", "the Job is refused", |world| {
            world.job = ResetObservation::Refused(
                CompletionReason::PermanentFailure,
                "denied by policy".to_owned(),
            );
        }),
        ("ResetJobCreationFailed", "its name is taken", |world| {
            world.job = ResetObservation::Foreign;
        }),
        (
            "RestoreTimeoutExceeded",
            "a service does not come back",
            |world| {
                world.pods = vec![pod("nvidia-device-plugin-daemonset", true)];
                world.settle();
                world.pods.clear();
                world.settle();
                world.job = ResetObservation::Own(ResetState::Succeeded);
                world.settle();
                world.passes(11);
            },
        ),
        ("ReadinessTimeoutExceeded", "others never let go", |world| {
            world.before = Some("RebootNode b".to_owned());
            world.settle();
            world.passes(26);
        }),
    ];
    for (reason, what, happens) in cases {
        let mut world = World::new(node(&[(PLUGIN, "true")]));
        let before = world.node.clone().unwrap();
        happens(&mut world);
        world.settle();
        assert_eq!(world.says(COMPLETE), format!("False {reason}"), "{what}");
        assert_eq!(
            world.says(ATTEMPT_COMPLETE),
            "True PermanentFailure",
            "{what}"
        );
        assert_eq!(world.phase(), "Failed", "{what}");
        // The next group of the escalation, a reboot, follows.
        assert_eq!(
            world.outcome(),
            Some(model::attempt::AttemptOutcome::Failed),
            "{what}"
        );
        let node = world.node.unwrap();
        assert_eq!(node.labels, before.labels, "{what}");
        assert_eq!(node.annotations, before.annotations, "{what}");
        assert!(
            !matches!(world.job, ResetObservation::Own(ResetState::Active(_))),
            "{what}"
        );
    }
}

#[test]
fn deleted_at_any_step_it_puts_all_back_and_goes() {
    for step in 0..12 {
        let mut world = World::new(node(&[(PLUGIN, "true")]));
        let before = world.node.clone().unwrap();
        for _ in 0..step {
            if let Some(effect) = world.decide().act {
                world.apply(effect);
            }
        }
        let had = world.object["metadata"]["finalizers"] == json!([FINALIZER]);
        world.object["metadata"]["deletionTimestamp"] = json!(world.now);
        world.settle();
        assert_ne!(
            world.object["metadata"]["finalizers"],
            json!([FINALIZER]),
            "{step}"
        );
        let node = world.node.unwrap();
        assert_eq!(
            (&node.labels, &node.annotations),
            (&before.labels, &before.annotations),
            "{step}"
        );
        assert!(
            !matches!(world.job, ResetObservation::Own(ResetState::Active(_))),
            "{step}"
        );
        assert!(had || step == 0);
    }
}

#[test]
fn a_job_that_does_not_go_holds_nothing_up_for_ever() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.settle();
    world.job = ResetObservation::Own(ResetState::Deleting);
    world.object["metadata"]["deletionTimestamp"] = json!(world.now);
    assert_eq!(world.settle().awaits, "its Job to go");
    assert_eq!(world.label(PLUGIN), Some("false"));
    world.passes(3);
    world.settle();
    assert_eq!(world.label(PLUGIN), Some("true"));
    assert_eq!(world.object["metadata"]["finalizers"], json!([]));
}

#[test]
fn an_excluded_node_is_left_alone() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.excluded = true;
    world.settle();
    assert_eq!(world.says(COMPLETE), "False NodeExcluded");
    assert!(world.made.is_empty());
    assert_eq!(world.label(PLUGIN), Some("true"));
}

#[test]
fn without_its_node_it_fails_and_can_be_deleted() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.settle();
    world.node = None;
    world.settle();
    assert_eq!(world.says(COMPLETE), "False NodeNotFound");
    assert_eq!(
        world.outcome(),
        Some(model::attempt::AttemptOutcome::Failed)
    );
    world.object["metadata"]["deletionTimestamp"] = json!(world.now);
    world.settle();
    assert_eq!(world.object["metadata"]["finalizers"], json!([]));
}

#[test]
fn an_upgrade_of_the_driver_is_waited_for_and_its_labels_are_left_alone() {
    let mut world = World::new(node(&[
        (PLUGIN, "true"),
        (DCGM, "paused-for-driver-upgrade"),
    ]));
    let decision = world.settle();
    assert_eq!(world.says(READY), "Unknown ResourceContention");
    assert!(
        decision.awaits.contains("paused-for-driver-upgrade"),
        "{decision:?}"
    );
    assert_eq!(world.label(PLUGIN), Some("true"));
    let change = NodeChange {
        labels: BTreeMap::from([(DCGM.to_owned(), Some("true".to_owned()))]),
        ..NodeChange::default()
    };
    world.apply(Act::Node(change));
    world.settle();
    assert_eq!(world.made.len(), 1);
}

#[test]
fn a_service_that_comes_back_is_stopped_again_and_what_others_set_stays() {
    let mut world = World::new(node(&[(PLUGIN, "true"), (DCGM, "true")]));
    world.settle();
    let set = |label: &str, value: &str| {
        Act::Node(NodeChange {
            labels: BTreeMap::from([(label.to_owned(), Some(value.to_owned()))]),
            ..NodeChange::default()
        })
    };
    world.apply(set(PLUGIN, "true"));
    world.apply(set(DCGM, "paused-for-driver-upgrade"));
    world.settle();
    assert_eq!(world.label(PLUGIN), Some("false"));
    world.job = ResetObservation::Own(ResetState::Succeeded);
    world.settle();
    assert_eq!(world.phase(), "Succeeded");
    assert_eq!(world.label(PLUGIN), Some("true"));
    assert_eq!(world.label(DCGM), Some("paused-for-driver-upgrade"));
}

#[test]
fn what_a_request_that_vanished_has_stopped_is_put_back() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    let before = world.node.clone().unwrap();
    world.settle();
    let node = world.node.unwrap();
    assert_eq!(left_behind(&node, |uid| uid == "r1-uid"), None);
    let change = left_behind(&node, |_| false).unwrap();
    let node = node.after(&change);
    assert_eq!(
        (node.labels, node.annotations),
        (before.labels, before.annotations)
    );
}

#[test]
fn without_services_only_the_job_is_made() {
    let mut world = World::new(node(&[(PLUGIN, "true")]));
    world.settings.services = false;
    world.settle();
    assert_eq!(world.label(PLUGIN), Some("true"));
    assert_eq!(world.says(TORN_DOWN), "True Skipped");
    assert_eq!(world.made.len(), 1);
}

#[test]
fn names_of_jobs_fit_and_differ() {
    assert_eq!(job_name("a"), "a-reset-job");
    let long = format!("maintenance-{}", "n".repeat(80));
    let (one, other) = (
        job_name(&format!("{long}-1")),
        job_name(&format!("{long}-2")),
    );
    assert_eq!(one.len(), 63);
    assert!(one.ends_with("-reset-job") && one != other, "{one} {other}");
}

#[test]
fn a_request_for_all_gpus_names_none() {
    let mut world = World::new(node(&[]));
    world.object["spec"]["selector"] = Value::Null;
    world.settle();
    let env = &world.made[0]["spec"]["template"]["spec"]["containers"][0]["env"][0];
    assert_eq!(env["value"], "");
    let missing = MaintenanceResource::read(
        Maintenance::Reset,
        &json!({"metadata": {"name": "a", "uid": "b"}}),
    );
    let missing = missing.unwrap_err().to_string();
    assert_eq!(missing, "it has no spec.nodeName");
}
