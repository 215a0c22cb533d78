//! Tests of the steps of a resource on a board, and of the configuration file.

use jiff::{SignedDuration, Timestamp};
use model::node::NodeView;
use model::ownership::Permit;
use serde_json::{Value, json};

use super::generic::GenericConfig;
use super::*;
use crate::{EXPIRY, Expiry, MaintenanceResource, ResourceKey};

mod config;
mod labels;
mod permits;
mod requests;
mod simulator;
mod waits;

const NODE: &str = "gpu-1";
const TIMEOUT: SignedDuration = SignedDuration::from_mins(25);

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_790_000_000 + seconds).unwrap()
}

fn config(more: &str) -> JanitorConfig {
    let text = format!(
        "global:\n  timeout: 25m\n  cspProviderHost: provider:50051\n  cspProviderInsecure: true\n{more}"
    );
    JanitorConfig::parse(&text, "j").unwrap()
}

/// Returns an object as in the API server.
fn object(action: Action, name: &str, created: i64, node: &str) -> Value {
    json!({
        "apiVersion": "janitor.dgxc.nvidia.com/v1alpha1",
        "kind": action.kind().name(),
        "metadata": {
            "name": name, "uid": format!("uid-of-{name}"), "resourceVersion": "1", "generation": 1,
            "creationTimestamp": at(created),
        },
        "spec": {"nodeName": node, "force": false},
    })
}

fn node(boot_id: &str, ready: bool) -> NodeObservation {
    NodeObservation {
        uid: "uid-of-node".to_owned(),
        boot_id: boot_id.to_owned(),
        ready,
        ready_since: Some(at(-1000)),
        excluded: false,
        permit: Permit::default(),
        owner: label::OwnerAnswer::NotAsked,
    }
}

/// Returns a node as an input of the board.
fn update(observation: NodeObservation) -> Box<NodeUpdate> {
    let view = NodeView::unknown(NODE);
    Box::new(NodeUpdate { observation, view })
}

/// A board with an API server that accepts every write.
struct Scene {
    board: Board,
    action: Action,
    object: Value,
    now: i64,
    /// Latest effects of the board, without writes and events.
    last: Vec<Effect>,
    /// Question without a response yet.
    asked: Option<Question>,
    events: Vec<ResourceEvent>,
}

impl Scene {
    fn new(action: Action, more: &str) -> Self {
        let object = object(action, "r", -10, NODE);
        Self::of(action, object, more)
    }

    fn of(action: Action, object: Value, more: &str) -> Self {
        let ttl = Some(SignedDuration::from_hours(336));
        let board = Board::new(config(more), ttl, "p1".to_owned());
        let mut scene = Self {
            board,
            action,
            object,
            now: 0,
            last: Vec::new(),
            asked: None,
            events: Vec::new(),
        };
        scene.list();
        scene
    }

    fn list(&mut self) {
        for kind in Maintenance::ALL {
            self.take(Input::ListBegun(kind));
        }
        for kind in Maintenance::ALL {
            self.take(Input::Listed(kind));
        }
        self.deliver_update();
    }

    /// Continues with another process, which knows only the object.
    fn crash(&mut self) {
        let config = self.board.config().clone();
        self.asked = None;
        self.board = Board::new(
            config,
            Some(SignedDuration::from_hours(336)),
            "p2".to_owned(),
        );
        self.list();
    }

    fn resource(&self) -> MaintenanceResource {
        MaintenanceResource::read(self.action.kind(), &self.object).unwrap()
    }

    fn deliver_update(&mut self) {
        let resource = self.resource();
        self.take(Input::Updated(Box::new(resource)));
    }

    fn key(&self) -> ResourceKey {
        ResourceKey {
            kind: self.action.kind(),
            name: "r".to_owned(),
        }
    }

    fn take(&mut self, input: Input) {
        self.last.clear();
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            for effect in self.board.handle(input, at(self.now)) {
                match effect {
                    Effect::Write { key, status, .. } if key == self.key() => {
                        self.object["status"] = status;
                        let version: u64 = text(&self.object["metadata"]["resourceVersion"])
                            .parse()
                            .unwrap();
                        self.object["metadata"]["resourceVersion"] =
                            json!((version + 1).to_string());
                        inputs.push(Input::Written(
                            key,
                            WriteResult::Done(Box::new(self.resource())),
                        ));
                    }
                    Effect::Notify(events) => self.events.push(events),
                    Effect::Ask { question, .. } => self.asked = Some(question),
                    Effect::WatchNode(_) => {}
                    other => self.last.push(other),
                }
            }
        }
    }

    fn node(&mut self, observation: Option<NodeObservation>) {
        self.take(Input::Node(NODE.to_owned(), observation.map(update)));
    }

    fn answer(&mut self, answer: ProviderAnswer) {
        self.asked = None;
        let operation = text(&self.object["metadata"]["uid"]).to_owned();
        self.take(Input::Answered(self.key(), operation, answer));
    }

    fn later(&mut self, seconds: i64) {
        self.now += seconds;
        self.take(Input::Time);
    }

    fn asked(&self) -> Option<&Question> {
        self.asked.as_ref()
    }

    /// Returns a condition as `status reason`.
    fn says(&self, kind: &str) -> String {
        let conditions = self.object["status"]["conditions"].as_array();
        let found = conditions
            .into_iter()
            .flatten()
            .find(|one| one["type"] == kind);
        found.map_or(String::new(), |one| {
            format!("{} {}", text(&one["status"]), text(&one["reason"]))
        })
    }

    fn ended(&self) -> String {
        if self.object["status"]["completionTime"].is_string() {
            self.says("AttemptComplete").replace("True ", "")
        } else {
            String::new()
        }
    }

    /// Continues until the signal is accepted under the request id `boot-1`.
    fn sent(action: Action) -> Self {
        let mut scene = Self::new(action, "");
        scene.node(Some(node("boot-1", true)));
        assert_eq!(scene.asked(), Some(&Question::Send));
        scene.answer(ProviderAnswer::Sent(Ok("boot-1".to_owned())));
        assert_eq!(scene.says("SignalSent"), "True Succeeded");
        scene
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn failed(class: Class) -> ProviderFailure {
    ProviderFailure::new(class, "REASON", "what happened")
}

#[test]
fn a_reboot_is_recorded_sent_and_proven_by_the_boot_id() {
    let mut scene = Scene::new(Action::Reboot, "");
    assert_eq!(
        scene.last,
        [],
        "nothing is begun before the node was observed"
    );
    scene.node(Some(node("boot-1", true)));
    // The record is written before the signal is sent.
    assert_eq!(scene.says("SignalSent"), "Unknown Sending");
    assert_eq!(scene.says("NodeReady"), "Unknown Initializing");
    assert_eq!(scene.asked(), Some(&Question::Send));
    scene.answer(ProviderAnswer::Sent(Ok("boot-1".to_owned())));
    assert_eq!(scene.says("SignalSent"), "True Succeeded");
    // Readiness in the earlier boot proves nothing, however often it is observed.
    scene.node(Some(node("boot-1", true)));
    scene.later(40);
    assert_eq!(scene.asked(), Some(&Question::Ready("boot-1".to_owned())));
    scene.answer(ProviderAnswer::Ready(Ok(true)));
    scene.node(Some(node("boot-1", true)));
    assert_eq!(scene.ended(), "");
    scene.node(Some(node("boot-2", false)));
    assert_eq!(scene.ended(), "");
    // Readiness in an unknown boot proves nothing either.
    scene.node(Some(node("", true)));
    assert_eq!(scene.ended(), "");
    scene.node(Some(node("boot-2", true)));
    assert_eq!(scene.ended(), "Succeeded");
    assert_eq!(scene.says("NodeReady"), "True Succeeded");
    let took = Some(SignedDuration::from_secs(40));
    assert!(matches!(&scene.events[1], ResourceEvent::Ended { took: it, .. } if *it == took));
}

#[test]
fn a_crash_between_any_two_steps_makes_no_second_signal() {
    // After the record: unknown whether the previous process sent the signal.
    let mut scene = Scene::new(Action::Reboot, "");
    scene.node(Some(node("boot-1", true)));
    scene.crash();
    scene.node(Some(node("boot-1", true)));
    assert_eq!(scene.asked(), Some(&Question::Find));
    let known = scene.clone();
    scene.answer(ProviderAnswer::Found(Ok(FoundOperation::Sent(
        "boot-1".to_owned(),
    ))));
    assert_eq!(scene.says("SignalSent"), "True Succeeded");
    // The signal was not sent, and is sent now.
    let mut scene = known.clone();
    scene.answer(ProviderAnswer::Found(Ok(FoundOperation::NotSent)));
    assert_eq!(scene.asked(), Some(&Question::Send));
    // The provider does not know: the boot id decides, and at the deadline a person.
    let mut scene = known.clone();
    scene.answer(ProviderAnswer::Found(Ok(FoundOperation::CannotTell)));
    scene.later(600);
    assert_eq!(scene.asked(), None);
    let undecided = scene.clone();
    scene.node(Some(node("boot-2", true)));
    assert_eq!(scene.ended(), "Succeeded");
    let mut scene = undecided;
    scene.later(TIMEOUT.as_secs());
    assert_eq!(scene.ended(), "AmbiguousFailure");
    assert_eq!(scene.says("NodeReady"), "False Timeout");
    // The provider is unavailable: it is asked again, and nothing is sent.
    let mut scene = known;
    scene.answer(ProviderAnswer::Found(Err(failed(Class::Transient))));
    assert_eq!(scene.asked(), None);
    scene.later(31);
    assert_eq!(scene.asked(), Some(&Question::Find));
}

#[test]
fn a_failure_is_tried_again_ends_it_or_is_asked_about() {
    // Refused for now: tried again with growing waits, set by the provider, a limited number of times.
    let mut scene = Scene::new(Action::Reboot, "");
    scene.node(Some(node("boot-1", true)));
    let wait = failed(Class::Transient).after(SignedDuration::from_secs(70));
    scene.answer(ProviderAnswer::Sent(Err(wait)));
    assert_eq!(scene.says("SignalSent"), "Unknown Retrying");
    scene.later(69);
    assert_eq!(scene.asked(), None);
    scene.later(1);
    assert_eq!(scene.asked(), Some(&Question::Send));
    // A crash loses neither the count nor the time.
    scene.answer(ProviderAnswer::Sent(Err(failed(Class::Transient))));
    scene.crash();
    scene.node(Some(node("boot-1", true)));
    let mut sent = 2;
    while scene.ended().is_empty() {
        scene.later(1);
        if scene.asked() == Some(&Question::Send) {
            sent += 1;
            scene.answer(ProviderAnswer::Sent(Err(failed(Class::Transient))));
        }
    }
    assert_eq!((sent, &*scene.ended()), (6, "TransientFailure"));
    assert_eq!(scene.says("SignalSent"), "False Failed");
    assert_eq!(scene.says("NodeReady"), "Unknown Initializing");

    let mut scene = Scene::new(Action::Terminate, "");
    scene.node(Some(node("boot-1", true)));
    scene.answer(ProviderAnswer::Sent(Err(failed(Class::Permanent))));
    assert_eq!(scene.ended(), "PermanentFailure");

    let mut scene = Scene::new(Action::Reboot, "");
    scene.node(Some(node("boot-1", true)));
    scene.answer(ProviderAnswer::Sent(Err(failed(Class::Ambiguous))));
    assert_eq!(scene.says("SignalSent"), "Unknown Unclear");
    assert_eq!(scene.asked(), Some(&Question::Find));

    // After the signal only a permanent failure ends the resource.
    let mut scene = Scene::sent(Action::Reboot);
    for class in [Class::Transient, Class::Ambiguous] {
        scene.later(31);
        assert!(matches!(scene.asked(), Some(Question::Ready(_))));
        scene.answer(ProviderAnswer::Ready(Err(failed(class))));
        assert_eq!(scene.ended(), "");
    }
    scene.later(31);
    scene.answer(ProviderAnswer::Ready(Err(failed(Class::Permanent))));
    assert_eq!(
        (&*scene.ended(), &*scene.says("NodeReady")),
        ("PermanentFailure", "False Failed")
    );
}

#[test]
fn excluded_nodes_and_actions_that_are_off_are_left_alone() {
    let mut scene = Scene::new(Action::Reboot, "");
    let excluded = NodeObservation {
        excluded: true,
        ..node("boot-1", true)
    };
    scene.node(Some(excluded));
    assert_eq!((&*scene.ended(), scene.asked()), ("PermanentFailure", None));
    assert_eq!(scene.says("SignalSent"), "False Excluded");
    let mut scene = Scene::new(Action::Reboot, "rebootNodeController: {enabled: false}\n");
    scene.node(Some(node("boot-1", true)));
    assert_eq!(
        (scene.last.len(), &scene.object["status"]),
        (0, &Value::Null)
    );
}

#[test]
fn a_terminated_node_is_deleted_once_it_is_not_ready_and_done_when_it_is_gone() {
    let mut scene = Scene::sent(Action::Terminate);
    scene.node(Some(node("boot-1", true)));
    assert_eq!(scene.last, []);
    scene.node(Some(node("boot-1", false)));
    let deleted = Effect::DeleteNode {
        key: scene.key(),
        node: NODE.to_owned(),
        uid: "uid-of-node".to_owned(),
    };
    assert_eq!(scene.last, [deleted]);
    scene.take(Input::NodeTried(scene.key()));
    assert_eq!((&*scene.ended(), &scene.last[..]), ("", &[][..]));
    scene.node(None);
    assert_eq!(
        (&*scene.ended(), &*scene.says("NodeTerminated")),
        ("Succeeded", "True Succeeded")
    );
    // Only after the signal was accepted, which is unknown here.
    let mut scene = Scene::new(Action::Terminate, "");
    scene.node(Some(node("boot-1", true)));
    scene.answer(ProviderAnswer::Sent(Err(failed(Class::Ambiguous))));
    scene.node(Some(node("boot-1", false)));
    assert!(
        !scene
            .last
            .iter()
            .any(|effect| matches!(effect, Effect::DeleteNode { .. }))
    );
    // A new node with the old name is another node.
    let mut scene = Scene::sent(Action::Terminate);
    let another = NodeObservation {
        uid: "another".to_owned(),
        ..node("boot-9", false)
    };
    scene.node(Some(another));
    assert_eq!(scene.ended(), "Succeeded");
    let deletes = |effect: &Effect| matches!(effect, Effect::DeleteNode { .. });
    assert!(!scene.last.iter().any(deletes));
}

#[test]
fn one_resource_of_a_node_at_a_time_and_the_oldest_first() {
    let mut board = Board::new(config(""), None, "p".to_owned());
    let list = |board: &mut Board, action: Action, name, created| {
        let resource =
            MaintenanceResource::read(action.kind(), &object(action, name, created, NODE)).unwrap();
        board.handle(Input::Updated(Box::new(resource)), at(0))
    };
    list(&mut board, Action::Reboot, "younger", 5);
    list(&mut board, Action::Terminate, "other", 3);
    list(&mut board, Action::Reboot, "oldest", 1);
    for kind in Maintenance::ALL {
        board.handle(Input::Listed(kind), at(10));
    }
    let writes = |effects: &[Effect]| -> Vec<String> {
        let named = effects.iter().filter_map(|effect| match effect {
            Effect::Write { key, .. } => Some(key.name.clone()),
            _ => None,
        });
        named.collect()
    };
    let effects = board.handle(
        Input::Node(NODE.into(), Some(update(node("b1", true)))),
        at(10),
    );
    assert_eq!(writes(&effects), ["oldest"]);
    let Some(Effect::Write { key, status, .. }) = effects.into_iter().next() else {
        panic!("no write");
    };
    let written = |status: Value| {
        let mut object = object(Action::Reboot, "oldest", 1, NODE);
        object["status"] = status;
        object["metadata"]["resourceVersion"] = json!("2");
        WriteResult::Done(Box::new(
            MaintenanceResource::read(Maintenance::Reboot, &object).unwrap(),
        ))
    };
    let effects = board.handle(Input::Written(key.clone(), written(status.clone())), at(11));
    // A resource with the same request is superseded; one with another request waits.
    assert_eq!(writes(&effects), ["younger"]);
    let asks = |effect: &Effect| matches!(effect, Effect::Ask { .. });
    assert!(effects.iter().any(asks));
    let mut ended = status;
    ended["completionTime"] = json!(at(60));
    let effects = board.handle(Input::Written(key, written(ended)), at(61));
    assert_eq!(writes(&effects), ["other"]);
}

#[test]
fn what_nvsentinel_began_is_watched_and_never_signalled_again() {
    let condition = |kind: &str, status: &str, reason: &str, message: &str| {
        json!({"type": kind, "status": status, "reason": reason, "message": message,
               "lastTransitionTime": at(-60)})
    };
    let begun = |sent: Value| {
        let mut object = object(Action::Reboot, "r", -70, NODE);
        let ready = condition("NodeReady", "Unknown", "Initializing", "");
        object["status"] = json!({"startTime": at(-65), "conditions": [sent, ready]});
        object
    };
    // A signal may be on its way: that janitor sends before it writes.
    let object = begun(condition("SignalSent", "Unknown", "Initializing", ""));
    let mut scene = Scene::of(Action::Reboot, object, "");
    scene.node(Some(node("boot-1", true)));
    assert_eq!(
        (scene.asked(), &*scene.says("SignalSent")),
        (None, "Unknown Unclear")
    );
    scene.later(60);
    assert_eq!(scene.asked(), None);
    scene.node(Some(node("boot-2", true)));
    assert_eq!(scene.ended(), "Succeeded");
    // The signal was sent. The earlier boot is unknown, so the provider is asked, and the node has to
    // have become ready since.
    let object = begun(condition("SignalSent", "True", "Succeeded", "i-123"));
    let mut scene = Scene::of(Action::Reboot, object, "");
    scene.node(Some(node("boot-1", true)));
    assert_eq!(scene.asked(), Some(&Question::Ready("i-123".to_owned())));
    scene.answer(ProviderAnswer::Ready(Ok(true)));
    assert_eq!(scene.ended(), "");
    let since = NodeObservation {
        ready_since: Some(at(-5)),
        ..node("boot-1", true)
    };
    scene.node(Some(since));
    assert_eq!(scene.ended(), "Succeeded");
}

#[test]
fn a_resource_is_kept_for_its_time_after_its_end() {
    let ended = |annotations: Value| {
        let mut object = object(Action::Reboot, "r", -1_000_000, NODE);
        object["metadata"]["annotations"] = annotations;
        object["status"] =
            json!({"startTime": at(-900_000), "completionTime": at(-100), "conditions": []});
        object
    };
    let day = 24 * 3600;
    let (ttl, expiry) = ("nvsentinel.nvidia.com/ttl", EXPIRY);
    let table = [
        // Counted from the end, not from the creation or the first observation.
        (json!({}), Some(14 * day - 100)),
        (json!({ttl: "1h"}), Some(3500)),
        (json!({ttl: "1h30m"}), Some(5300)),
        (json!({ttl: "0s"}), None),
        (json!({ttl: "soon"}), None),
        (
            json!({"nvsentinel.nvidia.com/preserve": "true", ttl: "1s"}),
            None,
        ),
        (
            json!({"nvsentinel.nvidia.com/preserve": "yes", ttl: "1h"}),
            Some(3500),
        ),
        (json!({expiry: at(50)}), Some(50)),
        // An expiry before the end is NVSentinel's, which counts from its first observation.
        (json!({expiry: at(-200), ttl: "1h"}), Some(3500)),
        (json!({expiry: "soon", ttl: "1h"}), Some(3500)),
    ];
    for (annotations, due) in table {
        let object = ended(annotations.clone());
        let resource = MaintenanceResource::read(Maintenance::Reboot, &object).unwrap();
        let default = Some(SignedDuration::from_hours(336));
        let found = resource.due(default);
        assert_eq!(found, due.map(at), "{annotations}");
    }
    let mut scene = Scene::of(Action::Reboot, ended(json!({ttl: "1h"})), "");
    let key = scene.key();
    let written = Effect::Expire(key.clone(), Expiry::Announce(at(3500).to_string()));
    assert_eq!(scene.last, [written]);
    scene.object["metadata"]["annotations"][expiry] = json!(at(3500).to_string());
    scene.deliver_update();
    scene.take(Input::ExpiryTried(key.clone()));
    scene.later(3499);
    assert_eq!(scene.last, []);
    scene.later(1);
    let uid = "uid-of-r".to_owned();
    assert_eq!(scene.last, [Effect::Expire(key, Expiry::Delete(uid))]);
    // A resource that has not ended is never deleted.
    let mut object = ended(json!({expiry: at(-200), ttl: "1s"}));
    object["status"]["completionTime"] = Value::Null;
    let resource = MaintenanceResource::read(Maintenance::Reboot, &object).unwrap();
    assert_eq!(resource.due(None), None);
}

#[test]
fn the_job_of_a_reboot_is_named_by_its_operation_and_shows_what_failed() {
    let generic = GenericConfig::default();
    let long = "n".repeat(200);
    for node in [NODE, long.as_str(), "a.b-c"] {
        let job = generic.job(node, "boot-1", "op-1");
        let name = text(&job["metadata"]["name"]);
        assert!(name.len() <= 63 && name.starts_with("reboot-"), "{name}");
        assert_eq!(name, generic::job_name(node, "op-1"));
        assert_ne!(name, generic::job_name(node, "op-2"));
        assert_eq!(
            generic::boot_before(&job, "op-1").as_deref(),
            Some("boot-1")
        );
        assert_eq!(generic::boot_before(&job, "op-2"), None);
    }
    let pod = |status: Value| json!({"metadata": {"name": "p"}, "status": status});
    let state =
        |state: Value| pod(json!({"phase": "Running", "containerStatuses": [{"state": state}]}));
    let table = [
        (pod(json!({"phase": "Pending"})), None),
        (
            state(json!({"waiting": {"reason": "ContainerCreating"}})),
            None,
        ),
        (
            state(json!({"waiting": {"reason": "ImagePullBackOff"}})),
            Some("cannot start: ImagePullBackOff"),
        ),
        (
            state(json!({"terminated": {"exitCode": 1}})),
            Some("exit code 1"),
        ),
        (state(json!({"terminated": {"exitCode": 0}})), None),
        // As after a reboot.
        (state(json!({"terminated": {"exitCode": 137}})), None),
        (
            state(json!({"terminated": {"exitCode": 255, "reason": "Unknown"}})),
            None,
        ),
        (
            pod(json!({"phase": "Failed", "reason": "NodeAffinity"})),
            Some("refused by the kubelet: NodeAffinity"),
        ),
        (
            pod(
                json!({"phase": "Failed", "reason": "Terminated", "containerStatuses": [{"state": {}}]}),
            ),
            None,
        ),
    ];
    for (pod, expected) in table {
        let found = generic::failure_of([&pod]);
        match (&found, expected) {
            (None, None) => {}
            (Some(failure), Some(text)) => {
                assert!(failure.message.contains(text), "{failure:?}");
                assert_eq!(failure.class, Class::Permanent);
            }
            _ => panic!("{pod}: {found:?}"),
        }
    }
}

impl Clone for Scene {
    fn clone(&self) -> Self {
        Self {
            board: self.board.clone(),
            action: self.action,
            object: self.object.clone(),
            now: self.now,
            last: self.last.clone(),
            asked: self.asked.clone(),
            events: self.events.clone(),
        }
    }
}
