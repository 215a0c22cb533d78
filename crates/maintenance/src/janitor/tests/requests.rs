//! GPU resets and hand-overs on a board.

use std::collections::BTreeMap;

use contract::keys;

use super::*;
use crate::gpu_reset::ResetSettings;
use crate::handover;

mod resets;

const PLUGIN: &str = "nvidia.com/gpu.deploy.device-plugin";

/// A cluster that carries out the board's effects and reports the results.
struct World {
    board: Board,
    objects: BTreeMap<ResourceKey, Value>,
    node: Option<NodeView>,
    job: Option<Value>,
    followed: bool,
    /// Actions for resources that have ended.
    expired: Vec<(ResourceKey, Expiry)>,
    version: u64,
    now: Timestamp,
    events: Vec<ResourceEvent>,
    /// True while effects are lost.
    deaf: bool,
    /// True if a provider resets GPUs.
    provider: bool,
    /// Id of the running process.
    process: String,
    /// Last question to the provider.
    asked: Option<Question>,
}

fn settings() -> ResetSettings {
    ResetSettings {
        services: true,
        timeout: SignedDuration::from_mins(25),
        namespace: "gpuwarden".to_owned(),
        image: "i".to_owned(),
        pull_secrets: Vec::new(),
        runtime_class: None,
        resources: Value::Null,
        write_log: true,
    }
}

fn board(provider: bool, process: &str) -> Board {
    let mut config = super::config("");
    config.resets = Some(settings());
    let host = "provider:1".to_owned();
    config.reset_provider = provider.then_some(ProviderPlace::Open { host });
    let ttl = Some(SignedDuration::from_hours(1));
    Board::new(config, ttl, process.to_owned())
}

fn node() -> NodeView {
    let labels = json!({PLUGIN: "true"});
    let object =
        json!({"metadata": {"name": "n1", "uid": "u", "labels": labels, "resourceVersion": "1"}});
    NodeView::from_object(object).unwrap()
}

fn reset(name: &str) -> ResourceKey {
    ResourceKey {
        kind: Maintenance::Reset,
        name: name.to_owned(),
    }
}

fn hand_over(name: &str) -> ResourceKey {
    ResourceKey {
        kind: Maintenance::HandOver,
        name: name.to_owned(),
    }
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            board: board(false, "p1"),
            objects: BTreeMap::new(),
            node: Some(node()),
            job: None,
            followed: false,
            expired: Vec::new(),
            version: 1,
            now: "2026-11-24T00:00:00Z".parse().unwrap(),
            events: Vec::new(),
            deaf: false,
            provider: false,
            process: "p1".to_owned(),
            asked: None,
        };
        world.begin();
        world
    }

    /// Lists everything to a new board.
    fn begin(&mut self) {
        self.board = board(self.provider, &self.process);
        self.followed = false;
        for kind in Maintenance::ALL {
            self.take(Input::ListBegun(kind));
        }
        for key in self.objects.keys().cloned().collect::<Vec<_>>() {
            self.see(&key);
        }
        self.take(Input::Jobs { listed: false });
        if let Some(job) = self.job.clone() {
            let name = job["metadata"]["name"].as_str().unwrap().to_owned();
            self.take(Input::Job(name, Some(Box::new((job, None)))));
        }
        self.take(Input::Jobs { listed: true });
        for kind in Maintenance::ALL {
            self.take(Input::Listed(kind));
        }
        let marks = [keys::RESET_STOPPED, keys::HANDED_OVER];
        let marked = |node: &NodeView| marks.iter().any(|key| node.annotations.contains_key(*key));
        if self.node.as_ref().is_some_and(marked) {
            self.take(Input::NodeMarked("n1".to_owned()));
        }
    }

    fn ask(&mut self, key: &ResourceKey) {
        self.version += 1;
        let spec = match key.kind {
            Maintenance::HandOver => {
                json!({"healthEvent": {"nodeName": "n1", "recommendedAction": 24}})
            }
            _ => json!({"nodeName": "n1"}),
        };
        let object = json!({
            "metadata": {"name": key.name, "uid": key.title(), "resourceVersion": self.version.to_string()},
            "spec": spec,
        });
        self.objects.insert(key.clone(), object);
        self.see(key);
    }

    fn see(&mut self, key: &ResourceKey) {
        match self.objects.get(key).cloned() {
            Some(object) => {
                let resource = MaintenanceResource::read(key.kind, &object).unwrap();
                self.take(Input::Updated(Box::new(resource)));
            }
            None => self.take(Input::Deleted(key.clone())),
        }
    }

    fn take(&mut self, input: Input) {
        let mut effects = self.board.handle(input, self.now);
        for _ in 0..100 {
            if effects.is_empty() {
                return;
            }
            for effect in std::mem::take(&mut effects) {
                if let Some(answer) = self.carry_out(effect) {
                    effects.extend(self.board.handle(answer, self.now));
                }
            }
        }
        panic!("it never settles: {effects:?}");
    }

    fn carry_out(&mut self, effect: Effect) -> Option<Input> {
        let answers = !matches!(effect, Effect::WatchNode(_) | Effect::WatchPods(_));
        let answers = answers && !matches!(effect, Effect::StopWatching(_) | Effect::Notify(_));
        if answers && self.deaf {
            return None;
        }
        self.version += 1;
        Some(match effect {
            Effect::WatchNode(name) => {
                assert!(!self.followed, "followed twice");
                self.followed = true;
                let update = self.node.clone().map(|view| {
                    let observation = super::node("boot-1", true);
                    Box::new(NodeUpdate { observation, view })
                });
                Input::Node(name, update)
            }
            Effect::WatchPods(name) => Input::Pods(name, Vec::new()),
            Effect::StopWatching(_) => {
                assert!(self.followed, "left twice");
                self.followed = false;
                return None;
            }
            Effect::Notify(events) => {
                self.events.push(events);
                return None;
            }
            Effect::Change(by, view, change) => {
                self.node = Some(view.after(&change));
                Input::Changed(by, "n1".to_owned(), self.node.clone().map(Box::new))
            }
            Effect::Write { key, status, .. } => self.merge(key, &json!({"status": status})),
            Effect::Merge(key, change) => self.merge(key, &change),
            Effect::Make(key, mut job) => {
                job["metadata"]["uid"] = json!("job-uid");
                self.job = Some(job.clone());
                Input::Created(key, CreateResult::Done(Box::new(job)))
            }
            Effect::Stop { key, .. } => {
                self.job = None;
                Input::Stopped(key)
            }
            Effect::Expire(key, expiry) => {
                self.expired.push((key.clone(), expiry));
                Input::ExpiryTried(key)
            }
            Effect::Ask { key, question, .. } => {
                if key.kind == Maintenance::Reset {
                    self.asked = Some(question);
                }
                return None;
            }
            Effect::DeleteNode { .. } => return None,
        })
    }

    fn merge(&mut self, key: ResourceKey, change: &Value) -> Input {
        let Some(object) = self.objects.get_mut(&key) else {
            return Input::Written(key, WriteResult::Changed);
        };
        if let Some(status) = change.get("status") {
            object["status"] = status.clone();
        }
        if let Some(version) = change["metadata"].get("resourceVersion") {
            assert_eq!(*version, object["metadata"]["resourceVersion"]);
        }
        if let Some(list) = change["metadata"].get("finalizers") {
            object["metadata"]["finalizers"] = list.clone();
        }
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let answer = MaintenanceResource::read(key.kind, object).unwrap();
        let empty = object["metadata"]["finalizers"] == json!([]);
        if empty && object["metadata"]["deletionTimestamp"].is_string() {
            self.objects.remove(&key);
        }
        Input::Written(key, WriteResult::Done(Box::new(answer)))
    }

    fn job_is(&mut self, condition: &str) {
        let mut job = self.job.clone().unwrap();
        job["status"] =
            json!({"conditions": [{"type": condition, "status": "True", "reason": "R"}]});
        self.job = Some(job.clone());
        let name = job["metadata"]["name"].as_str().unwrap().to_owned();
        self.take(Input::Job(
            name,
            Some(Box::new((job, Some("it is held by x (pid 1)".to_owned())))),
        ));
    }

    /// The external system reports on the hand-over `x1`.
    fn external_is(&mut self, status: &str) {
        self.version += 1;
        let key = hand_over("x1");
        let object = self.objects.get_mut(&key).unwrap();
        object["status"]["conditions"][1]["status"] = json!(status);
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.see(&key);
    }

    fn holds(&self) -> Option<String> {
        self.board.working_on("n1", |_| true)
    }

    fn phase(&self, key: &ResourceKey) -> &str {
        self.objects[key]["status"]["phase"]
            .as_str()
            .unwrap_or_default()
    }

    fn labels(&self) -> &BTreeMap<String, String> {
        &self.node.as_ref().unwrap().labels
    }
}

#[test]
fn a_reset_goes_its_way_and_is_told_of() {
    let mut world = World::new();
    let before = world.node.clone().unwrap();
    world.ask(&reset("r1"));
    assert_eq!(world.labels()[PLUGIN], "false");
    assert_eq!(world.holds().unwrap(), "GPUReset r1");
    world.job_is("Complete");
    assert_eq!(world.phase(&reset("r1")), "Succeeded");
    let after = world.node.clone().unwrap();
    assert_eq!(
        (after.labels, after.annotations),
        (before.labels, before.annotations)
    );
    let node = "n1".to_owned();
    assert_eq!(world.events[0], ResourceEvent::ResetBegun { node });
    assert!(matches!(
        &world.events[1],
        ResourceEvent::ResetEnded {
            failure: None,
            active: 0,
            ..
        }
    ));
    assert!(!world.followed && world.holds().is_none());
}

#[test]
fn a_failure_is_told_with_what_the_job_said() {
    let mut world = World::new();
    world.ask(&reset("r1"));
    world.job_is("Failed");
    assert_eq!(world.phase(&reset("r1")), "Failed");
    let text = world.objects[&reset("r1")].to_string();
    assert!(text.contains("it is held by x (pid 1)"), "{text}");
    let ended = &world.events[1];
    assert!(
        matches!(ended, ResourceEvent::ResetEnded { failure: Some(why), .. } if why == "ResetJobFailed")
    );
    assert_eq!(world.labels()[PLUGIN], "true");
}

#[test]
fn one_request_at_a_time_is_at_work_on_a_node() {
    let mut world = World::new();
    let reboot = ResourceKey {
        kind: Maintenance::Reboot,
        name: "b".to_owned(),
    };
    world.ask(&reboot);
    assert_eq!(world.holds().unwrap(), "RebootNode b");
    world.ask(&reset("r1"));
    world.ask(&reset("r2"));
    assert_eq!(
        (world.phase(&reset("r1")), world.phase(&reset("r2"))),
        ("Pending", "Pending")
    );
    world.objects.remove(&reboot);
    world.see(&reboot);
    assert_eq!(
        (world.phase(&reset("r1")), world.phase(&reset("r2"))),
        ("InProgress", "Pending")
    );
    // A hand-over waits as well.
    world.ask(&hand_over("x1"));
    assert!(!world.labels().contains_key(keys::HANDED_OVER_LABEL));
    world.job_is("Complete");
    assert_eq!(
        (world.phase(&reset("r1")), world.phase(&reset("r2"))),
        ("Succeeded", "InProgress")
    );
    assert!(!world.labels().contains_key(keys::HANDED_OVER_LABEL));
    world.job_is("Complete");
    assert_eq!(world.phase(&reset("r2")), "Succeeded");
    assert_eq!(world.labels()[keys::HANDED_OVER_LABEL], "false");
    assert_eq!(world.holds().unwrap(), "ExternalRemediationRequest x1");
}

#[test]
fn a_reboot_waits_for_what_is_at_work_on_its_node() {
    let reboot = ResourceKey {
        kind: Maintenance::Reboot,
        name: "b".to_owned(),
    };
    let mut world = World::new();
    world.ask(&reset("r1"));
    world.ask(&reboot);
    assert_eq!(world.objects[&reboot]["status"], Value::Null);
    world.job_is("Complete");
    assert!(world.objects[&reboot]["status"]["startTime"].is_string());
    let mut world = World::new();
    world.ask(&hand_over("x1"));
    world.ask(&reboot);
    assert_eq!(world.objects[&reboot]["status"], Value::Null);
    world.external_is("True");
    assert!(world.objects[&reboot]["status"]["startTime"].is_string());
}

#[test]
fn a_hand_over_is_told_of_at_each_step() {
    let mut world = World::new();
    let key = hand_over("x1");
    world.ask(&key);
    world.external_is("True");
    let phases: Vec<Option<handover::HandoverPhase>> = (world.events.iter())
        .filter_map(|events| match events {
            ResourceEvent::HandOver { after, action, .. } => {
                assert_eq!(action, "24");
                Some(*after)
            }
            _ => None,
        })
        .collect();
    let expected = [
        handover::HandoverPhase::Created,
        handover::HandoverPhase::Released,
        handover::HandoverPhase::Closed,
    ];
    assert_eq!(phases, expected.map(Some));
    assert_eq!(world.labels().len(), 1);
}

#[test]
fn whoever_starts_anew_goes_on_and_what_vanished_meanwhile_is_put_back() {
    let mut world = World::new();
    world.ask(&reset("r1"));
    world.begin();
    assert_eq!(world.holds().unwrap(), "GPUReset r1");
    world.job_is("Complete");
    assert_eq!(world.labels()[PLUGIN], "true");
    // The request disappears, with and without a running janitor.
    for looks in [true, false] {
        let mut world = World::new();
        world.ask(&reset("r1"));
        world.ask(&hand_over("x1"));
        world.objects.clear();
        if looks {
            world.see(&reset("r1"));
            world.see(&hand_over("x1"));
        } else {
            world.begin();
        }
        assert_eq!(world.labels(), &node().labels, "{looks}");
        assert!(!world.followed, "{looks}");
    }
}

#[test]
fn what_is_not_answered_is_done_by_the_next_one() {
    let mut world = World::new();
    world.deaf = true;
    world.ask(&reset("r1"));
    assert_eq!(world.phase(&reset("r1")), "");
    world.deaf = false;
    world.begin();
    assert_eq!(world.phase(&reset("r1")), "InProgress");
}

#[test]
fn the_gpuwarden_of_a_node_carries_out_what_is_about_that_node() {
    for (own, acts) in [("n1", true), ("n2", false)] {
        let mut world = World::new();
        world.board = world.board.for_node(Some(own.to_owned()));
        world.ask(&reset("r1"));
        world.ask(&hand_over("x1"));
        let has_begun = world.labels()[PLUGIN] == "false";
        assert_eq!((has_begun, world.followed), (acts, acts), "{own}");
    }
}

#[test]
fn a_request_is_kept_for_its_time_after_its_end() {
    let hour = SignedDuration::from_hours(1);
    for key in [reset("r1"), hand_over("x1")] {
        let mut world = World::new();
        world.ask(&key);
        // A running resource is kept, whatever its age.
        let under_way = MaintenanceResource::read(key.kind, &world.objects[&key]).unwrap();
        assert_eq!(under_way.due(Some(SignedDuration::from_secs(1))), None);
        world.now += SignedDuration::from_mins(5);
        world.take(Input::Time);
        assert_eq!(world.expired, [], "{key:?}");
        match key.kind {
            Maintenance::Reset => world.job_is("Complete"),
            _ => world.external_is("True"),
        }
        let end = world.now;
        assert!(world.objects[&key]["status"]["completionTime"].is_string());
        // At the end the time of the deletion is recorded, and the resource is deleted then.
        let due = end.checked_add(hour).unwrap();
        let expected = (key.clone(), Expiry::Announce(due.to_string()));
        assert_eq!(world.expired, [expected], "{key:?}");
        world.objects.get_mut(&key).unwrap()["metadata"]["annotations"] =
            json!({EXPIRY: due.to_string()});
        world.see(&key);
        world.now = due - SignedDuration::from_secs(1);
        world.take(Input::Time);
        assert_eq!(world.expired.len(), 1, "{key:?}");
        world.now = due;
        world.take(Input::Time);
        let deleted = (key.clone(), Expiry::Delete(key.title()));
        assert_eq!(world.expired.last(), Some(&deleted));
        // Kept for ever without a lifetime, or with the annotation for that.
        for own in [Some("0s"), None] {
            let mut object = world.objects[&key].clone();
            object["metadata"]["annotations"] = json!({"nvsentinel.nvidia.com/ttl": own});
            let resource = MaintenanceResource::read(key.kind, &object).unwrap();
            assert_eq!(resource.due(own.map(|_| hour)), None, "{key:?} {own:?}");
        }
    }
}
