//! Tests of the monitor: an object from its first change to the end of its fault, with each known
//! fault of NVSentinel's monitor by name.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::marks;
use crate::step::Match;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

const NODES: &str = r#"
[[policies]]
name = "not-ready"
enabled = true
[policies.resource]
version = "v1"
kind = "Node"
[policies.predicate]
expression = 'resource.status.conditions.exists(c, c.type == "Ready" && c.status == "False")'
[policies.healthEvent]
componentClass = "Node"
isFatal = true
message = "Node is not ready"
recommendedAction = "CONTACT_SUPPORT"
errorCode = ["NODE_NOT_READY"]
"#;

const PODS: &str = r#"
[[policies]]
name = "failed"
enabled = true
[policies.resource]
version = "v1"
kind = "Pod"
[policies.predicate]
expression = 'resource.status.phase == "Failed"'
[policies.nodeAssociation]
expression = 'resource.spec.nodeName'
[policies.healthEvent]
componentClass = "Software"
isFatal = true
message = "pod failed"
recommendedAction = "CONTACT_SUPPORT"
"#;

/// A monitor with its states, as the controller holds them.
struct World {
    monitor: ObjectMonitor,
    matches: Matches,
    now: i64,
    /// Events so far: `fault` or `end`, node and object.
    said: Vec<String>,
}

impl World {
    fn new(policies: &str) -> Self {
        Self::with(policies, Matches::new())
    }

    fn with(policies: &str, matches: Matches) -> Self {
        let policies = crate::parse(policies, "p").unwrap().policies;
        Self {
            monitor: ObjectMonitor::new(policies),
            matches,
            now: 0,
            said: Vec::new(),
        }
    }

    /// Creates one whose watches have all listed these objects.
    fn listed(policies: &str, objects: &[Value]) -> Self {
        let mut world = Self::new(policies);
        world.list(objects);
        world
    }

    fn sight(&self, kind: &str) -> usize {
        let mut watched = self.monitor.watched();
        watched
            .position(|(watched, _)| watched.kind.kind == kind)
            .unwrap()
    }

    fn list(&mut self, objects: &[Value]) {
        for sight in 0..self.monitor.watched().count() {
            self.handle(Input::Restarted(sight));
        }
        for object in objects {
            self.apply(object);
        }
        for sight in 0..self.monitor.watched().count() {
            self.handle(Input::Listed(sight));
        }
    }

    fn apply(&mut self, object: &Value) {
        let sight = self.sight(object["kind"].as_str().unwrap());
        let reducer = self.monitor.watched().nth(sight).unwrap().1;
        let kept = reducer.reduce(&object.to_string()).unwrap();
        self.handle(Input::Applied(sight, kept));
    }

    fn delete(&mut self, kind: &str, key: &str) {
        self.handle(Input::Deleted(self.sight(kind), key.to_owned()));
    }

    fn wait(&mut self, seconds: i64) {
        self.now += seconds;
        self.handle(Input::Time);
    }

    fn handle(&mut self, input: Input) {
        let changes = self.monitor.handle(input, &self.matches, at(self.now));
        self.take(changes);
    }

    fn take(&mut self, changes: Vec<Change>) {
        for change in changes {
            for event in &change.events {
                let what = if event.is_healthy { "end" } else { "fault" };
                let object = &event.entities_impacted[0].entity_value;
                self.said
                    .push(format!("{what} {} {object}", event.node_name));
            }
            match change.state {
                Some(state) => self.matches.insert(change.key, state),
                None => self.matches.remove(&change.key),
            };
        }
    }

    fn said(&mut self) -> Vec<String> {
        std::mem::take(&mut self.said)
    }
}

fn node(name: &str, ready: &str) -> Value {
    json!({
        "kind": "Node",
        "metadata": {"name": name, "uid": format!("u-{name}"), "managedFields": [{"manager": "k"}]},
        "status": {"conditions": [
            {"type": "MemoryPressure", "status": "False", "message": "m"},
            {"type": "Ready", "status": ready, "message": "m"},
        ], "images": [{"names": ["large"]}]},
    })
}

fn pod(name: &str, uid: &str, node: &str, phase: &str) -> Value {
    json!({
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": uid},
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    })
}

#[test]
fn a_fault_opens_once_and_ends_with_the_state_of_its_object() {
    let mut world = World::listed(NODES, &[node("n1", "True"), node("n2", "True")]);
    assert!(world.said().is_empty());
    let changes = {
        let kept = world.monitor.watched().next().unwrap().1;
        let kept = kept.reduce(&node("n1", "False").to_string()).unwrap();
        world
            .monitor
            .handle(Input::Applied(0, kept), &world.matches, at(0))
    };
    let event = changes[0].events[0].clone();
    assert_eq!(event.agent, "kubernetes-object-monitor");
    assert_eq!((event.check_name.as_str(), event.version), ("not-ready", 1));
    assert!(event.is_fatal && !event.is_healthy);
    assert_eq!(event.error_code, ["NODE_NOT_READY"]);
    let entity = &event.entities_impacted[0];
    assert_eq!(
        (entity.entity_type.as_str(), entity.entity_value.as_str()),
        ("v1/Node", "n1")
    );
    world.take(changes);
    assert_eq!(world.said(), ["fault n1 n1"]);
    // Nothing that the policy reads has changed.
    world.apply(&node("n1", "False"));
    world.wait(60);
    assert!(world.said().is_empty());
    // An end has no codes, so that it closes a fault whose code the policy has changed since.
    let kept = world.monitor.watched().next().unwrap().1;
    let kept = kept.reduce(&node("n1", "True").to_string()).unwrap();
    let input = Input::Applied(0, kept);
    let changes = world.monitor.handle(input, &world.matches, at(60));
    let end = &changes[0].events[0];
    assert!(end.is_healthy && !end.is_fatal && end.error_code.is_empty());
    assert_eq!(end.entities_impacted, event.entities_impacted);
    world.take(changes);
    assert_eq!(world.said(), ["end n1 n1"]);
    assert!(world.matches.is_empty());
}

#[test]
fn what_is_read_of_an_object_that_changes_refreshes_its_fault() {
    let policies = PODS.replace(
        "resource.status.phase == \"Failed\"",
        "resource.status.phase == \"Failed\" && resource.status.reason != \"x\"",
    );
    let failed = |reason: &str| {
        let mut pod = pod("p", "u", "n1", "Failed");
        pod["status"]["reason"] = json!(reason);
        pod
    };
    let mut world = World::listed(&policies, &[failed("a")]);
    assert_eq!(world.said(), ["fault n1 ns/p"]);
    world.apply(&failed("b"));
    assert_eq!(world.said(), ["fault n1 ns/p"]);
}

#[test]
fn unknown_missing_and_errors_neither_open_nor_close() {
    let mut world = World::listed(NODES, &[node("n1", "Unknown"), node("n2", "False")]);
    assert_eq!(world.said(), ["fault n2 n2"]);
    let mut bare = node("n2", "True");
    for status in [json!({}), json!(null), json!({"conditions": "none"})] {
        bare["status"] = status;
        world.apply(&bare);
    }
    world.apply(&node("n2", "Unknown"));
    assert!(world.said().is_empty(), "a silent kubelet is no recovery");
    world.apply(&node("n2", "True"));
    assert_eq!(world.said(), ["end n2 n2"]);
    // A node that has no status yet lacks nothing.
    let lacking = NODES.replace(
        "resource.status",
        "!has(resource.status.conditions) || resource.status",
    );
    bare["status"] = json!({});
    let mut early = World::listed(&lacking, &[bare.clone()]);
    assert!(early.said().is_empty());
    bare["status"]["phase"] = json!("Pending");
    early.apply(&bare);
    assert!(early.said().is_empty(), "no policy reads the phase");
    // An unknown status that the answer does not depend on.
    let mut other = node("n1", "False");
    other["status"]["conditions"][0]["status"] = json!("Unknown");
    world.apply(&other);
    assert_eq!(world.said(), ["fault n1 n1"]);
    // An author who names it has decided.
    let named = NODES.replace(
        "c.status == \"False\"",
        "c.status in [\"False\", \"Unknown\"]",
    );
    let mut world = World::listed(&named, &[node("n1", "Unknown")]);
    assert_eq!(world.said(), ["fault n1 n1"]);
}

/// NVSentinel never ends the fault of an object that was deleted while its monitor was down.
#[test]
fn what_was_deleted_meanwhile_ends_at_the_first_list() {
    let mut world = World::listed(PODS, &[pod("p", "u", "n1", "Failed")]);
    let mut next = World::with(PODS, std::mem::take(&mut world.matches));
    next.list(&[]);
    assert_eq!(next.said(), ["end n1 ns/p"]);
    assert!(next.matches.is_empty());
}

/// NVSentinel reads its states before its cache has started, so it knows none.
#[test]
fn what_was_reported_before_a_restart_is_known() {
    let mut world = World::listed(NODES, &[node("n1", "False"), node("n2", "False")]);
    let mut next = World::with(NODES, std::mem::take(&mut world.matches));
    next.list(&[node("n1", "False"), node("n2", "True")]);
    assert_eq!(
        next.said(),
        ["end n2 n2"],
        "what is still so is not said again"
    );
}

/// NVSentinel misses a pod of the same name on another node.
#[test]
fn a_pod_of_the_same_name_on_another_node_moves_the_fault() {
    let mut world = World::listed(PODS, &[pod("p", "u1", "n1", "Failed")]);
    world.said();
    world.apply(&pod("p", "u2", "n2", "Failed"));
    assert_eq!(world.said(), ["end n1 ns/p", "fault n2 ns/p"]);
    // Also while nobody looked, and where the new one is fine.
    let mut next = World::with(PODS, world.matches.clone());
    next.list(&[pod("p", "u3", "n3", "Failed")]);
    assert_eq!(next.said(), ["end n2 ns/p", "fault n3 ns/p"]);
    let mut next = World::with(PODS, world.matches);
    next.list(&[pod("p", "u3", "n3", "Running")]);
    assert_eq!(next.said(), ["end n2 ns/p"]);
}

/// NVSentinel takes the name of an object that is on no node for that of a node.
#[test]
fn an_object_on_no_node_is_the_fault_of_none() {
    let mut unscheduled = pod("p", "u", "", "Failed");
    let mut world = World::listed(PODS, &[unscheduled.clone()]);
    unscheduled["spec"] = json!({});
    world.apply(&unscheduled);
    assert!(world.said().is_empty());
}

#[test]
fn a_deleted_pod_ends_its_fault_and_a_deleted_node_says_nothing() {
    let mut world = World::listed(PODS, &[pod("p", "u", "n1", "Failed")]);
    world.said();
    world.delete("Pod", "ns/p");
    assert_eq!(world.said(), ["end n1 ns/p"]);
    world.list(&[pod("p", "u", "n1", "Failed")]);
    world.said();
    world.list(&[]);
    assert_eq!(world.said(), ["end n1 ns/p"], "the watch listed again");
    let mut world = World::listed(NODES, &[node("n1", "False")]);
    world.said();
    world.delete("Node", "n1");
    assert!(world.said().is_empty() && world.matches.is_empty());
}

#[test]
fn a_time_has_to_pass_without_a_gap_before_it_opens_and_closes() {
    let timed = NODES.replace(
        "enabled = true",
        "enabled = true\nfor = \"5m\"\nclearFor = \"2m\"",
    );
    let mut world = World::listed(&timed, &[node("n1", "False")]);
    world.wait(200);
    assert_eq!(world.monitor.next_time(&world.matches), Some(at(300)));
    world.apply(&node("n1", "Unknown"));
    world.apply(&node("n1", "False"));
    world.wait(200);
    assert!(world.said().is_empty(), "the gap counts");
    world.wait(100);
    assert_eq!(world.said(), ["fault n1 n1"]);
    world.apply(&node("n1", "True"));
    world.wait(60);
    world.apply(&node("n1", "False"));
    world.said();
    world.apply(&node("n1", "True"));
    world.wait(119);
    assert!(world.said().is_empty());
    world.wait(1);
    assert_eq!(world.said(), ["end n1 n1"]);
}

#[test]
fn an_object_that_is_looked_up_wakes_those_that_used_it() {
    let policies = PODS.replace(
        "resource.status.phase == \"Failed\"",
        "resource.status.phase == \"Failed\" && lookup(\"v1\", \"Node\", \"\", resource.spec.nodeName).spec.unschedulable == true",
    );
    let cordoned = |is: bool| json!({"kind": "Node", "metadata": {"name": "n1"}, "spec": {"unschedulable": is}});
    let mut world = World::listed(&policies, &[pod("p", "u", "n1", "Failed"), cordoned(false)]);
    assert!(world.said().is_empty());
    world.apply(&cordoned(true));
    assert_eq!(world.said(), ["fault n1 ns/p"]);
    // A node that is gone is null, which has no fields: an error closes nothing.
    world.delete("Node", "n1");
    assert!(world.said().is_empty());
    world.apply(&cordoned(false));
    assert_eq!(world.said(), ["end n1 ns/p"]);
    // While nodes cannot be seen, a pod that would be one opens nothing.
    world.handle(Input::Failing(world.sight("Node")));
    world.apply(&cordoned(true));
    assert!(world.said().is_empty());
    world.handle(Input::Recovered(world.sight("Node")));
    world.wait(5);
    assert_eq!(world.said(), ["fault n1 ns/p"]);
}

#[test]
fn what_depends_on_the_time_is_looked_at_again() {
    let policies = NODES.replace(
        "c.status == \"False\")",
        "c.status == \"False\" && now - timestamp(c.lastTransitionTime) > duration(\"2h\"))",
    );
    let mut late = node("n1", "False");
    late["status"]["conditions"][1]["lastTransitionTime"] = json!(at(0).to_string());
    let mut world = World::listed(&policies, &[late, node("n2", "True")]);
    assert_eq!(
        world.monitor.rests.len(),
        1,
        "the time is read for one of the two"
    );
    world.wait(7190);
    assert!(world.said().is_empty());
    assert_eq!(world.monitor.next_time(&world.matches), Some(at(7200)));
    world.wait(20);
    assert_eq!(world.said(), ["fault n1 n1"]);
}

#[test]
fn a_watch_that_fails_blinds_its_policies_alone() {
    let both = format!(
        "{NODES}{}",
        PODS.replace("enabled = true", "enabled = true\nfor = \"1m\"")
    );
    let mut world = World::listed(&both, &[pod("p", "u", "n1", "Failed"), node("n1", "True")]);
    let pods = world.sight("Pod");
    assert_eq!(world.monitor.policies_of(pods), ["failed"]);
    world.handle(Input::Failing(pods));
    world.wait(3600);
    assert!(world.said().is_empty(), "it may be well by now");
    world.apply(&node("n1", "False"));
    assert_eq!(world.said(), ["fault n1 n1"]);
    world.handle(Input::Recovered(pods));
    world.wait(5);
    world.wait(59);
    assert!(world.said().is_empty());
    world.wait(1);
    assert_eq!(world.said(), ["fault n1 ns/p"]);
    // A list after an outage shows at once what is gone.
    world.handle(Input::Failing(pods));
    world.handle(Input::Recovered(pods));
    world.handle(Input::Restarted(pods));
    world.handle(Input::Listed(pods));
    assert_eq!(world.said(), ["end n1 ns/p"]);
}

#[test]
fn the_annotation_tells_another_leader_what_was_reported() {
    let world = World::listed(
        PODS,
        &[pod("p", "u", "n1", "Failed"), pod("q", "v", "n1", "Failed")],
    );
    let policies = world.monitor.policies().to_vec();
    let others = r#"{"theirs/ns/x":"n1"}"#;
    let gone = BTreeSet::new();
    let text = marks::wanted(others, "n1", &world.matches, &policies, &gone).unwrap();
    assert_eq!(
        text,
        r#"{"failed/ns/p":"n1","failed/ns/q":"n1","theirs/ns/x":"n1"}"#
    );
    let adopted = marks::adopted(&text, &policies, at(0));
    assert_eq!(adopted.len(), 2, "those of another monitor are not ours");
    // The next leader has another store: what is still so is reported there, what is not ends.
    let mut next = World::with(PODS, adopted);
    next.list(&[pod("p", "u", "n1", "Failed")]);
    assert_eq!(next.said(), ["fault n1 ns/p", "end n1 ns/q"]);
    assert!(!next.matches["failed/ns/p"].adopted);
    next.delete("Pod", "ns/p");
    let text = marks::wanted(&text, "n1", &next.matches, &policies, &gone);
    assert_eq!(text.as_deref(), Some(others));
    assert_eq!(
        marks::wanted("{}", "n1", &next.matches, &policies, &gone),
        None
    );
    assert!(marks::adopted("no json", &policies, at(0)).is_empty());
}

#[test]
fn a_policy_that_is_removed_ends_its_faults() {
    let mut world = World::listed(PODS, &[pod("p", "u", "n1", "Failed")]);
    let mut next = World::with(NODES, std::mem::take(&mut world.matches));
    let changes = next.monitor.orphans(&next.matches, at(0));
    assert_eq!(changes[0].events[0].check_name, "failed");
    next.take(changes);
    assert_eq!(next.said(), ["end n1 ns/p"]);
    assert!(next.matches.is_empty());
}

#[test]
fn an_object_is_kept_in_less_than_two_kilobytes() {
    let text = include_str!("../../data/node-problem-detector.toml");
    let monitor = ObjectMonitor::new(crate::parse(text, "p").unwrap().policies);
    let conditions: Vec<Value> = (0..20)
        .map(|one| {
            json!({"type": format!("SomeCondition{one}"), "status": "False", "reason": "r",
                          "message": "a message of some length ".repeat(10),
                          "lastHeartbeatTime": "2026-11-26T09:00:00Z"})
        })
        .collect();
    let node = json!({"metadata": {"name": "n1", "uid": "u", "labels": {"a": "b"}},
                      "status": {"conditions": conditions, "images": ["x".repeat(10_000)]}});
    let kept = monitor
        .watched()
        .next()
        .unwrap()
        .1
        .reduce(&node.to_string())
        .unwrap();
    assert!(
        node.to_string().len() > 15_000 && kept.text.len() < 1_100,
        "{}",
        kept.text.len()
    );
}

#[derive(Clone, Debug)]
enum Act {
    Apply(u8, u8, u8),
    Delete(u8),
    Relist,
    Restart,
    Outage,
    Wait(i64),
}

fn any_act() -> impl Strategy<Value = Act> {
    prop_oneof![
        5 => (0..3_u8, 0..3_u8, 0..4_u8).prop_map(|(pod, node, phase)| Act::Apply(pod, node, phase)),
        2 => (0..3_u8).prop_map(Act::Delete),
        1 => Just(Act::Relist),
        1 => Just(Act::Restart),
        1 => Just(Act::Outage),
        3 => (1..90_i64).prop_map(Act::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever happens, the events tell the open states; and once nothing changes any longer, what
    /// is open is what is a fault.
    #[test]
    fn what_is_said_is_what_is_so(acts in prop::collection::vec(any_act(), 1..40), times in any::<bool>()) {
        let timed = PODS.replace("enabled = true", "enabled = true\nfor = \"1m\"\nclearFor = \"30s\"");
        let policies = if times { timed.as_str() } else { PODS };
        let mut world = World::listed(policies, &[]);
        let mut real: BTreeMap<String, Value> = BTreeMap::new();
        let mut open: BTreeSet<(String, String)> = BTreeSet::new();
        let mut uid = 0;
        for act in acts {
            match act {
                Act::Apply(name, node, phase) => {
                    let key = format!("ns/p{name}");
                    uid += 1;
                    // A pod never moves: one on another node is another one.
                    let on = format!("n{node}");
                    let old = real.get(&key).filter(|old| old["spec"]["nodeName"] == on.as_str());
                    let uid = old.map_or(uid.to_string(), |old| old["metadata"]["uid"].as_str().unwrap().to_owned());
                    let phase = ["Running", "Failed", "Unknown", "Succeeded"][usize::from(phase)];
                    let object = pod(&format!("p{name}"), &uid, &on, phase);
                    world.apply(&object);
                    real.insert(key, object);
                }
                Act::Delete(name) => {
                    let key = format!("ns/p{name}");
                    if real.remove(&key).is_some() {
                        world.delete("Pod", &key);
                    }
                }
                Act::Relist => world.list(&real.values().cloned().collect::<Vec<_>>()),
                Act::Restart => {
                    let mut next = World::with(policies, world.matches.clone());
                    next.now = world.now;
                    next.said = world.said();
                    world = next;
                    world.list(&real.values().cloned().collect::<Vec<_>>());
                }
                Act::Outage => {
                    world.handle(Input::Failing(0));
                    world.wait(30);
                    world.handle(Input::Recovered(0));
                    world.list(&real.values().cloned().collect::<Vec<_>>());
                }
                Act::Wait(seconds) => world.wait(seconds),
            }
            for line in world.said() {
                let mut parts = line.split(' ').map(str::to_owned);
                let (what, node, key) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
                if what == "end" {
                    prop_assert!(open.remove(&(key, node)), "ended and not open: {}", line);
                } else {
                    open.insert((key, node));
                }
            }
            let states: BTreeSet<(String, String)> = world.matches.iter()
                .filter(|(_, state)| state.open)
                .map(|(key, state)| (key.strip_prefix("failed/").unwrap().to_owned(), state.node.clone()))
                .collect();
            prop_assert_eq!(&states, &open);
        }
        // Nothing is unknown any longer, and time passes.
        for object in real.values_mut().filter(|one| one["status"]["phase"] == "Unknown") {
            object["status"]["phase"] = json!("Running");
            world.apply(object);
        }
        world.wait(30);
        world.wait(60);
        world.wait(60);
        let faults: BTreeSet<(String, String)> = real.iter()
            .filter(|(_, one)| one["status"]["phase"] == "Failed")
            .map(|(key, one)| (key.clone(), one["spec"]["nodeName"].as_str().unwrap().to_owned()))
            .collect();
        let states: BTreeSet<(String, String)> = world.matches.iter()
            .map(|(key, state): (&String, &Match)| (key.strip_prefix("failed/").unwrap().to_owned(), state.node.clone()))
            .collect();
        prop_assert_eq!(states, faults);
    }
}
