//! Simulated cluster with nodes, objects and requests, which carries out actions like the API
//! server.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use model::node::{NodeChange, NodeView};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

mod refusals;
mod together;

const CONFIG: &str = r#"
apiVersion: nvsentinel.nvidia.com/v1alpha1
kind: ValidationConfiguration
spec:
  schedulingGate:
    cordon: {remove: true, labelPrefix: k8saas.nvidia.com/}
    taints: [{key: new, effect: NoSchedule, remove: true}, {key: stays, value: "x", effect: NoSchedule}]
  readinessCriteria:
    - name: gpu-allocatable
      expression: >-
        (has(node.status.allocatable) && "nvidia.com/gpu" in node.status.allocatable &&
        quantity(node.status.allocatable["nvidia.com/gpu"]) > 0) || resourceSlices.exists(s,
        s.spec.driver == "gpu.nvidia.com" && has(s.spec.devices) && size(s.spec.devices) > 0)
  defaultTests: [diag]
  maxConcurrentGroups: 2
  templates:
    job.yaml: |
      apiVersion: batch/v1
      kind: Job
      metadata: {name: "{{.ValidationRequestName}}-{{.TestGroupName}}", namespace: "{{.Namespace}}"}
      spec:
        activeDeadlineSeconds: {{.TimeoutSeconds}}
        nodeName: {{(index .Nodes 0).NodeName}}
        tolerations:
          {{- range .Tolerations}}
          - {key: {{.Key}}, value: "{{.Value}}", operator: {{.Operator}}, effect: {{.Effect}}}
          {{- end}}
        image: {{.Image}}
        command: [{{range .Command}}{{quote .}}, {{end}}]
        env: [{{range .Env}}{name: {{.Name}}, value: {{quote .Value}}}, {{end}}]
    gang.yaml: |
      apiVersion: x/v1
      kind: Gang
      spec:
        nodes: [{{range .Nodes}}{{.NodeName}}, {{end}}]
        tests: [{{range .Tests}}{{.}}, {{end}}]
  providers:
    jobs:
      {apiGroup: batch, version: v1, kind: Job, resource: jobs, templateFile: job.yaml, retries: 1,
       timeoutSeconds: 600, successfulCondition: {type: Complete, status: "True"},
       failedCondition: {type: Failed, status: "True"}}
    gangs:
      {apiGroup: x, version: v1, kind: Gang, resource: gangs, templateFile: gang.yaml,
       supportsTestBatching: true, successfulCondition: {type: Done, status: "True"},
       failedCondition: {type: Done, status: "False"}}
  tests:
    diag: {provider: jobs, image: dcgm, command: [sh, -c, 'dcgmi "diag"'], env: [{name: A, value: "1"}]}
    loopback: {provider: gangs, supportsBatchingNodes: true, minimumNodesPerBatch: 1, bandwidthGBps: "580"}
    allreduce: {provider: gangs, supportsBatchingNodes: true, minimumNodesPerBatch: 2, batchFailurePolicy: ignore}
    strict: {provider: gangs, supportsBatchingNodes: true, minimumNodesPerBatch: 2}
"#;

fn config() -> ValidationConfiguration {
    let none = |_: &str| Err(std::io::ErrorKind::NotFound.into());
    ValidationConfiguration::parse(CONFIG, "f", none).unwrap()
}

fn start() -> Timestamp {
    "2026-11-26T10:00:00Z".parse().unwrap()
}

struct World {
    config: ValidationConfiguration,
    nodes: BTreeMap<String, Value>,
    requests: BTreeMap<String, Value>,
    objects: BTreeMap<(String, String), Value>,
    now: Timestamp,
    /// Number of created objects.
    made: usize,
    /// Reason of the API server to refuse all objects.
    refuses: Option<&'static str>,
    /// True if no node has been observed since the start of the process.
    has_just_begun: bool,
    /// True if deleted objects stay until they are finished explicitly.
    lingers: bool,
    /// Names of malformed requests.
    unreadable: BTreeSet<String>,
}

impl World {
    fn new(nodes: &[&str]) -> Self {
        let node = |name: &&str| {
            let object = json!({
                "metadata": {"name": name, "uid": format!("uid-{name}"), "labels": {
                    "k8saas.nvidia.com/cordon-by": "joiner"}, "annotations": {}},
                "spec": {"unschedulable": true, "taints": [
                    {"key": "new", "effect": "NoSchedule"},
                    {"key": "stays", "value": "x", "effect": "NoSchedule"}]},
                "status": {"allocatable": {"nvidia.com/gpu": "8"}},
            });
            ((*name).to_owned(), object)
        };
        Self {
            config: config(),
            nodes: nodes.iter().map(node).collect(),
            requests: BTreeMap::new(),
            objects: BTreeMap::new(),
            now: start(),
            made: 0,
            refuses: None,
            has_just_begun: false,
            lingers: false,
            unreadable: BTreeSet::new(),
        }
    }

    fn ask(&mut self, name: &str, nodes: &[&str], tests: &[&str]) {
        let nodes: Vec<Value> = nodes.iter().map(|name| json!({"name": name})).collect();
        let object = json!({
            "metadata": {"name": name, "uid": format!("uid-{name}")},
            "spec": {"nodes": nodes, "tests": tests},
        });
        self.requests.insert(name.to_owned(), object);
    }

    fn request(&self, name: &str) -> ValidationRequest {
        ValidationRequest::read(&self.requests[name]).unwrap()
    }

    fn status(&self, name: &str) -> Status {
        self.request(name).status
    }

    fn step(&self, name: &str) -> ValidationStep {
        let request = self.request(name);
        let observed = request.nodes.iter().filter(|_| !self.has_just_begun);
        let nodes = observed.map(|name| {
            let state = match self.nodes.get(name) {
                None => NodeState::Gone,
                Some(object) => NodeState::There {
                    view: Box::new(NodeView::from_object(object.clone()).unwrap()),
                    readiness: self.config.readiness(object, &[], self.now),
                },
            };
            (name.clone(), state)
        });
        let requests = self.requests.values();
        let requests = requests.map(|object| ValidationRequest::read(object).unwrap());
        let requests = requests.map(|request| (request.name.clone(), request));
        let step = step(
            &request,
            &self.config,
            &ClusterView {
                nodes: &nodes.collect(),
                objects: &self.objects,
                namespace: "gpuwarden",
                requests: &requests.collect(),
                unreadable: &self.unreadable,
                now: self.now,
            },
        );
        let again = step.acts.is_empty() && step.wake.is_some_and(|at| at <= self.now);
        assert!(!again, "{name} is looked at for ever: {:?}", step.wake);
        step
    }

    fn carry_out(&mut self, request: &str, act: &Act) {
        match act {
            Act::Finalizers(finalizers) => {
                let object = self.requests.get_mut(request).unwrap();
                object["metadata"]["finalizers"] = json!(finalizers);
                let goes = object["metadata"]["deletionTimestamp"].is_string();
                if goes && finalizers.is_empty() {
                    self.requests.remove(request);
                }
            }
            Act::Node(view, change) => self.change(&view.name, change),
            Act::Make {
                provider, object, ..
            } => {
                let name = object["metadata"]["name"].as_str().unwrap().to_owned();
                assert!(name.len() <= 63, "{name}");
                let key = (provider.clone(), name);
                if !self.objects.contains_key(&key) {
                    let mut object = object.clone();
                    object["metadata"]["uid"] = json!(format!("object-{}", self.made));
                    self.objects.insert(key, object);
                    self.made += 1;
                }
            }
            Act::Delete { provider, name, .. } => {
                let key = (provider.clone(), name.clone());
                if self.lingers {
                    let object = self.objects.get_mut(&key).unwrap();
                    object["metadata"]["deletionTimestamp"] = json!(self.now);
                } else {
                    self.objects.remove(&key);
                }
            }
            Act::Status(status) => {
                let object = self.requests.get_mut(request).unwrap();
                object["status"] = json!(status);
            }
        }
    }

    fn change(&mut self, node: &str, change: &NodeChange) {
        let object = self.nodes.get_mut(node).unwrap();
        for (map, changes) in [
            ("annotations", &change.annotations),
            ("labels", &change.labels),
        ] {
            let map = object["metadata"][map].as_object_mut().unwrap();
            for (key, value) in changes {
                match value {
                    Some(value) => drop(map.insert(key.clone(), json!(value))),
                    None => drop(map.remove(key)),
                }
            }
        }
        if let Some(unschedulable) = change.unschedulable {
            object["spec"]["unschedulable"] = json!(unschedulable);
        }
        let taints = object["spec"]["taints"].as_array_mut().unwrap();
        taints.retain(|one| {
            !change
                .remove_taints
                .iter()
                .any(|taint| one["key"] == taint.key)
        });
    }

    /// Carries out actions until none is left, with a crash after `crash_after` of them.
    fn run(&mut self, mut crash_after: usize) {
        for _ in 0..1000 {
            let names: Vec<String> = self.requests.keys().cloned().collect();
            let mut acted = false;
            for name in names {
                for act in self.step(&name).acts {
                    acted = true;
                    if crash_after == 0 {
                        // The remaining actions of this step are lost.
                        (crash_after, self.has_just_begun) = (usize::MAX, true);
                        break;
                    }
                    crash_after -= 1;
                    let refused = self.refuses.filter(|_| matches!(act, Act::Make { .. }));
                    if let (Some(why), Act::Make { group, .. }) = (refused, &act) {
                        let request = self.request(&name);
                        let status = refused_status(&request, self, *group, why);
                        self.requests.get_mut(&name).unwrap()["status"] = json!(status);
                        break;
                    }
                    self.carry_out(&name, &act);
                }
            }
            self.check();
            if !acted && !std::mem::take(&mut self.has_just_begun) {
                return;
            }
        }
        panic!("it acts for ever: {:#?}", self.requests);
    }

    /// Checks the invariants of all requests.
    fn check(&self) {
        let mut busy = Vec::new();
        let mut groups = 0;
        for name in self.requests.keys() {
            for group in &self.status(name).test_groups {
                if group.phase == Phase::Running {
                    groups += 1;
                    busy.extend(group.nodes.clone());
                }
            }
        }
        assert!(groups <= 2, "{groups} groups at once");
        let all = busy.len();
        busy.sort_unstable();
        busy.dedup();
        assert_eq!(busy.len(), all, "two groups share a node");
    }

    /// Finishes all objects with this result.
    fn end(&mut self, passes: bool) {
        self.end_some(passes, usize::MAX);
    }

    /// Finishes the tests of some objects.
    fn end_some(&mut self, passes: bool, most: usize) {
        for ((provider, _), object) in self.objects.iter_mut().take(most) {
            let (kind, status) = match (provider.as_str(), passes) {
                ("jobs", true) => ("Complete", "True"),
                ("jobs", false) => ("Failed", "True"),
                (_, true) => ("Done", "True"),
                (_, false) => ("Done", "False"),
            };
            object["status"] = json!({"conditions": [
                {"type": kind, "status": status, "reason": "R", "message": "said"}]});
        }
    }

    fn delete(&mut self, request: &str) {
        let at = self.now.to_string();
        let object = self.requests.get_mut(request).unwrap();
        object["metadata"]["deletionTimestamp"] = json!(at);
    }

    /// Returns the cordon, the taints and the record of requests on the node.
    fn node(&self, name: &str) -> (bool, usize, Option<&str>) {
        let node = &self.nodes[name];
        (
            node["spec"]["unschedulable"] == true,
            node["spec"]["taints"].as_array().unwrap().len(),
            node["metadata"]["labels"]["nvsentinel.nvidia.com/validation-state"].as_str(),
        )
    }
}

fn refused_status(request: &ValidationRequest, world: &World, group: usize, why: &str) -> Status {
    refused(request, &world.config, group, why, world.now)
}

const LET_IN: (bool, usize, Option<&str>) = (false, 1, None);

fn names(status: &Status) -> Vec<&str> {
    let groups = status.test_groups.iter();
    groups.map(|group| group.name.as_str()).collect()
}

#[test]
fn nodes_are_tested_and_let_in() {
    let mut world = World::new(&["a", "b"]);
    world.ask("r", &["a", "b", "a"], &["diag", "loopback", "allreduce"]);
    world.run(usize::MAX);
    let status = world.status("r");
    assert_eq!(status.phase, Some(Phase::Running));
    let expected = ["diag-group-1", "diag-group-2", "allreduce-loopback-group-1"];
    assert_eq!(names(&status), expected);
    assert_eq!(world.node("a"), (true, 2, Some("validating")));
    let annotations = &world.nodes["a"]["metadata"]["annotations"];
    assert_eq!(
        annotations["nvsentinel.nvidia.com/active-validation-request"],
        "r"
    );
    let session = &annotations["nvsentinel.nvidia.com/validation-session"];
    let expected = r#"[{"name":"r","tests":["diag","loopback","allreduce"]}]"#;
    assert_eq!(session, expected);
    let job = &world.objects[&("jobs".to_owned(), "r-diag-group-2-1".to_owned())];
    assert_eq!(job["spec"]["nodeName"], "b");
    assert_eq!(
        job["spec"]["command"],
        json!(["sh", "-c", "dcgmi \"diag\""])
    );
    assert_eq!(job["spec"]["env"], json!([{"name": "A", "value": "1"}]));
    assert_eq!(job["spec"]["tolerations"][0]["operator"], "Exists");
    assert_eq!(job["spec"]["tolerations"][2]["operator"], "Equal");
    assert_eq!(job["metadata"]["ownerReferences"][0]["uid"], "uid-r");
    // The gang has nodes that are being tested.
    assert_eq!(world.made, 2);
    world.end(true);
    world.run(usize::MAX);
    let gang = world.objects.values().next().unwrap();
    assert_eq!(
        gang["spec"],
        json!({"nodes": ["a", "b"], "tests": ["loopback", "allreduce"]})
    );
    world.end(true);
    world.run(usize::MAX);
    let status = world.status("r");
    assert_eq!(status.phase, Some(Phase::Succeeded), "{status:#?}");
    assert_eq!(status.completion_time, Some(start()));
    assert_eq!((world.objects.len(), world.made), (0, 3));
    for node in ["a", "b"] {
        assert_eq!(world.node(node), LET_IN);
        let metadata = &world.nodes[node]["metadata"];
        assert_eq!(metadata["annotations"], json!({}));
        assert_eq!(
            metadata["labels"],
            json!({"k8saas.nvidia.com/uncordon-by": "NVSentinel",
                "k8saas.nvidia.com/uncordon-reason": "ValidationSucceeded",
                "k8saas.nvidia.com/uncordon-timestamp": "2026-11-26T10-00-00Z"})
        );
    }
}

#[test]
fn what_fails_is_tried_again_and_holds_its_nodes_until_it_passes() {
    let mut world = World::new(&["a"]);
    world.ask("r", &["a"], &[]);
    for attempt in 1..=2 {
        world.run(usize::MAX);
        assert_eq!(world.status("r").test_groups[0].attempts.len(), attempt);
        world.end(false);
    }
    world.run(usize::MAX);
    let status = world.status("r");
    assert_eq!(status.phase, Some(Phase::Failed));
    let last = &status.test_groups[0].attempts[1];
    assert_eq!(last.failure_reason.as_deref(), Some("TestFailed"));
    assert_eq!(last.message.as_deref(), Some("R: said"));
    assert_eq!(world.node("a"), (true, 2, Some("validation-failed")));
    assert!(world.objects.is_empty());
    // Other tests do not make up for the failure; the same tests do.
    world.ask("s", &["a"], &["loopback"]);
    world.run(usize::MAX);
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.status("s").phase, Some(Phase::Succeeded));
    assert_eq!(world.node("a"), (true, 2, Some("validation-failed")));
    world.ask("t", &["a"], &["diag"]);
    world.run(usize::MAX);
    assert_eq!(world.node("a").2, Some("validating"));
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.node("a"), LET_IN);
}

#[test]
fn an_attempt_that_ends_without_a_word_has_failed() {
    for (act, reason) in [
        (0, "TestTimeout"),
        (1, "TestFailed"),
        (2, "NodeReadinessViolation"),
    ] {
        let mut world = World::new(&["a"]);
        world.ask("r", &["a"], &[]);
        world.run(usize::MAX);
        let wake = world.step("r").wake;
        assert_eq!(wake, Some(start() + SignedDuration::from_secs(600)));
        match act {
            0 => world.now = wake.unwrap(),
            1 => world.objects.clear(),
            _ => world.nodes.get_mut("a").unwrap()["status"] = json!({}),
        }
        world.run(usize::MAX);
        let status = world.status("r");
        let attempts = &status.test_groups[0].attempts;
        assert_eq!(attempts[0].failure_reason.as_deref(), Some(reason));
        if act == 2 {
            assert_eq!(attempts[0].failed_nodes, ["a"]);
            let waits = "a is not ready: gpu-allocatable does not hold";
            assert_eq!(status.message.as_deref(), Some(waits));
            assert_eq!((attempts.len(), world.objects.len()), (1, 0));
        } else {
            assert_eq!((attempts.len(), world.objects.len()), (2, 1));
        }
    }
}

#[test]
fn a_node_that_is_gone_is_left_out() {
    let mut world = World::new(&["a", "b"]);
    world.ask("r", &["a", "b", "c"], &["strict", "allreduce"]);
    world.run(usize::MAX);
    assert_eq!(world.status("r").skipped.nodes, ["c"]);
    world.nodes.remove("b");
    world.run(usize::MAX);
    // One test has too few nodes and is mandatory.
    let status = world.status("r");
    assert_eq!(status.phase, Some(Phase::Failed));
    let why = "allreduce-strict-group-1: b is gone";
    assert_eq!(status.message.as_deref(), Some(why));
    let reason = &status.test_groups[0].attempts[0].failure_reason;
    assert_eq!(reason.as_deref(), Some("NodeDeleted"));
    assert_eq!(status.skipped.tests, ["allreduce"]);
    // A test of single nodes continues with the others, without a retry.
    let mut world = World::new(&["a", "b", "c"]);
    world.ask("r", &["a", "b", "c"], &["diag"]);
    world.run(usize::MAX);
    world.nodes.remove("a");
    world.nodes.remove("c");
    world.run(usize::MAX);
    world.end(true);
    world.run(usize::MAX);
    let status = world.status("r");
    assert_eq!(status.phase, Some(Phase::Succeeded), "{status:#?}");
    assert_eq!(status.skipped.nodes, ["a", "c"]);
    assert_eq!(world.node("b"), LET_IN);
    // Nothing has to be proven if all nodes are gone.
    let mut world = World::new(&["a"]);
    world.ask("r", &["a"], &["diag"]);
    world.run(usize::MAX);
    world.nodes.clear();
    world.run(usize::MAX);
    assert_eq!(world.status("r").phase, Some(Phase::Succeeded));
}

#[test]
fn a_quarantined_node_is_let_in_by_the_end_of_its_quarantine() {
    let mut world = World::new(&["a"]);
    world.ask("r", &["a"], &[]);
    world.run(usize::MAX);
    let annotations = &mut world.nodes.get_mut("a").unwrap()["metadata"]["annotations"];
    annotations["quarantineHealthEvent"] = json!(r#"[{"checkName": "X"}]"#);
    annotations["quarantineHealthEventIsCordoned"] = json!("True");
    annotations["quarantineHealthEventCordonPreExisting"] = json!("True");
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.status("r").phase, Some(Phase::Succeeded));
    // The cordon now belongs to the quarantine, not to an earlier cordon.
    assert_eq!(world.node("a"), (true, 1, None));
    let annotations = &world.nodes["a"]["metadata"]["annotations"];
    assert_eq!(annotations["quarantineHealthEventIsCordoned"], "True");
    assert!(annotations["quarantineHealthEventCordonPreExisting"].is_null());
}

#[test]
fn what_a_node_says_may_be_taken_away_and_no_two_requests_test_it() {
    let mut world = World::new(&["a", "b"]);
    world.ask("r", &["a"], &["loopback"]);
    world.run(usize::MAX);
    world.ask("an-older-one", &["a", "b"], &["diag"]);
    world.run(usize::MAX);
    let annotations = &mut world.nodes.get_mut("a").unwrap()["metadata"]["annotations"];
    *annotations = json!({});
    // Evaluated before the other request can record again that it tests the node.
    for _ in 0..5 {
        for act in world.step("an-older-one").acts {
            world.carry_out("an-older-one", &act);
        }
    }
    assert_eq!(world.made, 1);
    let waits = Some("a is tested for r".to_owned());
    assert_eq!(world.status("an-older-one").message, waits);
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.made, 3);
}

#[test]
fn a_node_that_was_made_anew_is_held_again() {
    let mut world = World::new(&["a"]);
    world.ask("r", &["a"], &[]);
    world.run(usize::MAX);
    let fresh = World::new(&["a"]);
    world.nodes = fresh.nodes;
    world.run(usize::MAX);
    assert_eq!(world.node("a").2, Some("validating"));
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.node("a"), LET_IN);
}

#[test]
fn a_request_that_is_deleted_leaves_nothing_behind() {
    let mut world = World::new(&["a", "b"]);
    world.ask("r", &["a", "b"], &["loopback"]);
    world.ask("s", &["b"], &[]);
    world.run(usize::MAX);
    let waits = Some("b is tested for r".to_owned());
    assert_eq!(world.status("s").message, waits);
    assert_eq!(world.node("b").2, Some("validating"));
    world.delete("r");
    world.run(usize::MAX);
    assert!(!world.requests.contains_key("r"));
    assert_eq!(world.node("a"), LET_IN);
    // The other request comes next.
    assert_eq!(world.node("b").2, Some("validating"));
    assert_eq!(world.status("s").phase, Some(Phase::Running));
    world.delete("s");
    world.run(usize::MAX);
    assert_eq!(world.node("b"), LET_IN);
    assert!(world.objects.is_empty() && world.requests.is_empty());
}

#[test]
fn wherever_it_is_ended_it_goes_on_and_tests_nothing_twice() {
    for crash in 0..40 {
        let mut world = World::new(&["a", "b"]);
        world.ask("r", &["a", "b"], &["diag", "loopback"]);
        for end in 0..4 {
            // A crash happens once in each of the runs.
            world.run(if end == crash % 4 {
                crash / 4
            } else {
                usize::MAX
            });
            world.end(true);
        }
        world.run(usize::MAX);
        assert_eq!(world.status("r").phase, Some(Phase::Succeeded), "{crash}");
        assert_eq!((world.made, world.objects.len()), (3, 0), "{crash}");
        assert_eq!(
            (world.node("a"), world.node("b")),
            (LET_IN, LET_IN),
            "{crash}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Under arbitrary events, each request ends once tests pass, and no node stays held by a
    /// passed request.
    #[test]
    fn whatever_happens_it_ends(
        acts in prop::collection::vec((0..7_u8, 0..30_usize), 1..30)
    ) {
        let mut world = World::new(&["a", "b", "c"]);
        world.ask("r", &["a", "b"], &["diag", "loopback"]);
        world.ask("s", &["b", "c"], &["diag", "allreduce"]);
        world.ask("t", &["c", "a"], &["strict"]);
        for (act, number) in acts {
            match act {
                0..=2 => world.run(number),
                3 => world.end(number % 3 > 0),
                4 => world.now += SignedDuration::from_mins(3),
                5 => drop(world.nodes.remove(["a", "b", "c"][number % 3])),
                _ => world.objects.clear(),
            }
        }
        for _ in 0..20 {
            world.run(usize::MAX);
            world.end(true);
        }
        for name in ["r", "s", "t"] {
            let status = world.status(name);
            prop_assert!(status.phase.is_some_and(Phase::is_over), "{status:#?}");
        }
        prop_assert!(world.objects.is_empty());
        let failed = |node: &&str| ["r", "s", "t"].iter().any(|name| {
            let request = world.request(name);
            request.status.phase == Some(Phase::Failed) && request.nodes.iter().any(|one| one == *node)
        });
        let nodes: Vec<String> = world.nodes.keys().cloned().collect();
        for node in nodes.iter().filter(|node| !failed(&node.as_str())) {
            prop_assert_eq!(world.node(node), LET_IN);
        }
    }
}
