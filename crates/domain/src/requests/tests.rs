use std::collections::BTreeMap;

use contract::keys;
use serde_json::json;

use super::*;

const PLUGIN: &str = "nvidia.com/gpu.deploy.device-plugin";

/// A cluster that does what the board asks for, and tells of it.
struct World {
    board: RequestBoard,
    objects: BTreeMap<RequestKey, Value>,
    node: Option<NodeView>,
    job: Option<Value>,
    followed: bool,
    version: u64,
    now: Timestamp,
    news: Vec<RequestNews>,
    /// True while answers are lost, and nothing is done.
    deaf: bool,
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

fn node() -> NodeView {
    let labels = json!({PLUGIN: "true"});
    let object =
        json!({"metadata": {"name": "n1", "uid": "u", "labels": labels, "resourceVersion": "1"}});
    NodeView::from_object(object).unwrap()
}

fn reset(name: &str) -> RequestKey {
    RequestKey {
        kind: RequestKind::Reset,
        name: name.to_owned(),
    }
}

fn hand_over(name: &str) -> RequestKey {
    RequestKey {
        kind: RequestKind::HandOver,
        name: name.to_owned(),
    }
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            board: RequestBoard::new(Some(settings()), Vec::new()),
            objects: BTreeMap::new(),
            node: Some(node()),
            job: None,
            followed: false,
            version: 1,
            now: "2026-11-24T00:00:00Z".parse().unwrap(),
            news: Vec::new(),
            deaf: false,
        };
        world.begin();
        world
    }

    /// Has a board that knows nothing learn all.
    fn begin(&mut self) {
        self.board = RequestBoard::new(Some(settings()), Vec::new());
        self.followed = false;
        for kind in RequestKind::ALL {
            self.take(Input::ListBegun(kind));
        }
        for (key, object) in self.objects.clone() {
            self.take(Input::Seen(key.kind, Box::new(object)));
        }
        self.take(Input::Jobs { listed: false });
        if let Some(job) = self.job.clone() {
            let name = job["metadata"]["name"].as_str().unwrap().to_owned();
            self.take(Input::Job(name, Some(Box::new((job, None)))));
        }
        self.take(Input::Jobs { listed: true });
        for kind in RequestKind::ALL {
            self.take(Input::Listed(kind));
        }
        let marks = [keys::RESET_STOPPED, keys::HANDED_OVER];
        let marked = |node: &NodeView| marks.iter().any(|key| node.annotations.contains_key(*key));
        if self.node.as_ref().is_some_and(marked) {
            self.take(Input::Marked("n1".to_owned()));
        }
    }

    fn ask(&mut self, key: &RequestKey) {
        self.version += 1;
        let spec = match key.kind {
            RequestKind::Reset => json!({"nodeName": "n1"}),
            RequestKind::HandOver => {
                json!({"healthEvent": {"nodeName": "n1", "recommendedAction": 24}})
            }
        };
        let object = json!({
            "metadata": {"name": key.name, "uid": key.title(), "resourceVersion": self.version.to_string()},
            "spec": spec,
        });
        self.objects.insert(key.clone(), object);
        self.see(key);
    }

    fn see(&mut self, key: &RequestKey) {
        match self.objects.get(key).cloned() {
            Some(object) => self.take(Input::Seen(key.kind, Box::new(object))),
            None => self.take(Input::Gone(key.clone())),
        }
    }

    fn take(&mut self, input: Input) {
        let mut effects = self.board.take(input, self.now);
        for _ in 0..100 {
            if effects.is_empty() {
                return;
            }
            for effect in std::mem::take(&mut effects) {
                if let Some(answer) = self.carry_out(effect) {
                    for input in answer {
                        effects.extend(self.board.take(input, self.now));
                    }
                }
            }
        }
        panic!("it never settles: {effects:?}");
    }

    fn carry_out(&mut self, effect: Effect) -> Option<Vec<Input>> {
        match effect {
            Effect::Follow(node) => {
                assert!(!self.followed, "followed twice");
                self.followed = true;
                let view = self.node.clone().map(Box::new);
                Some(vec![
                    Input::Node(node.clone(), view),
                    Input::Pods(node, Vec::new()),
                ])
            }
            Effect::Leave(_) => {
                assert!(self.followed, "left twice");
                self.followed = false;
                None
            }
            Effect::Tell(news) => {
                self.news.push(news);
                None
            }
            Effect::PutBack(view, change) => {
                self.node = Some(view.after(&change));
                let view = Box::new(self.node.clone().unwrap());
                Some(vec![Input::IsBack("n1".to_owned(), Answer::Node(view))])
            }
            Effect::Act(..) if self.deaf => None,
            Effect::Act(key, act) => {
                let answer = self.act(&key, *act);
                Some(vec![Input::Answered(key, answer)])
            }
        }
    }

    fn act(&mut self, key: &RequestKey, act: Act) -> Answer {
        self.version += 1;
        match act {
            Act::Merge(change) | Act::Status(change) => {
                let Some(object) = self.objects.get_mut(key) else {
                    return Answer::Failed;
                };
                assert_eq!(
                    change["metadata"]["resourceVersion"],
                    object["metadata"]["resourceVersion"]
                );
                if let Some(status) = change.get("status") {
                    object["status"] = status.clone();
                }
                if let Some(list) = change["metadata"].get("finalizers") {
                    object["metadata"]["finalizers"] = list.clone();
                }
                object["metadata"]["resourceVersion"] = json!(self.version.to_string());
                let answer = object.clone();
                let empty = json!([]);
                let gone = answer["metadata"]["deletionTimestamp"].is_string()
                    && answer["metadata"]["finalizers"] == empty;
                if gone {
                    self.objects.remove(key);
                }
                Answer::Request(Box::new(answer))
            }
            Act::Node(view, change) => {
                self.node = Some(view.after(&change));
                Answer::Node(Box::new(self.node.clone().unwrap()))
            }
            Act::Make(mut job) => {
                job["metadata"]["uid"] = json!("job-uid");
                self.job = Some(job.clone());
                Answer::Job(Box::new(job))
            }
            Act::Stop { .. } => {
                self.job = None;
                Answer::Done
            }
        }
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

    fn phase(&self, key: &RequestKey) -> &str {
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
    assert_eq!(world.board.holds("n1").unwrap(), "GPUReset r1");
    world.job_is("Complete");
    assert_eq!(world.phase(&reset("r1")), "Succeeded");
    let after = world.node.clone().unwrap();
    assert_eq!(
        (after.labels, after.annotations),
        (before.labels, before.annotations)
    );
    let node = "n1".to_owned();
    assert_eq!(world.news[0], RequestNews::ResetBegun { node });
    assert!(matches!(
        &world.news[1],
        RequestNews::ResetEnded {
            failure: None,
            active: 0,
            ..
        }
    ));
    assert!(!world.followed && world.board.holds("n1").is_none());
}

#[test]
fn a_failure_is_told_with_what_the_job_said() {
    let mut world = World::new();
    world.ask(&reset("r1"));
    world.job_is("Failed");
    assert_eq!(world.phase(&reset("r1")), "Failed");
    let text = world.objects[&reset("r1")].to_string();
    assert!(text.contains("it is held by x (pid 1)"), "{text}");
    let ended = &world.news[1];
    assert!(
        matches!(ended, RequestNews::ResetEnded { failure: Some(why), .. } if why == "ResetJobFailed")
    );
    assert_eq!(world.labels()[PLUGIN], "true");
}

#[test]
fn one_request_at_a_time_is_at_work_on_a_node() {
    let mut world = World::new();
    world.take(Input::Held(
        "n1".to_owned(),
        Some("RebootNode b".to_owned()),
    ));
    world.ask(&reset("r1"));
    world.ask(&reset("r2"));
    assert_eq!(
        (world.phase(&reset("r1")), world.phase(&reset("r2"))),
        ("Pending", "Pending")
    );
    world.take(Input::Held("n1".to_owned(), None));
    assert_eq!(
        (world.phase(&reset("r1")), world.phase(&reset("r2"))),
        ("InProgress", "Pending")
    );
    // One that hands over waits as well.
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
    assert_eq!(
        world.board.holds("n1").unwrap(),
        "ExternalRemediationRequest x1"
    );
}

#[test]
fn a_hand_over_is_told_of_at_each_step() {
    let mut world = World::new();
    let key = hand_over("x1");
    world.ask(&key);
    world.version += 1;
    let version = json!(world.version.to_string());
    let object = world.objects.get_mut(&key).unwrap();
    object["status"]["conditions"][1]["status"] = json!("True");
    object["metadata"]["resourceVersion"] = version;
    world.see(&key);
    let phases: Vec<Option<handover::Phase>> = (world.news.iter())
        .filter_map(|news| match news {
            RequestNews::HandOver { after, action, .. } => {
                assert_eq!(action, "24");
                Some(*after)
            }
            _ => None,
        })
        .collect();
    let expected = [
        handover::Phase::Created,
        handover::Phase::Released,
        handover::Phase::Closed,
    ];
    assert_eq!(phases, expected.map(Some));
    assert_eq!(world.labels().len(), 1);
}

#[test]
fn whoever_starts_anew_goes_on_and_what_vanished_meanwhile_is_put_back() {
    let mut world = World::new();
    world.ask(&reset("r1"));
    world.begin();
    assert_eq!(world.board.holds("n1").unwrap(), "GPUReset r1");
    world.job_is("Complete");
    assert_eq!(world.labels()[PLUGIN], "true");
    // Its request vanishes, while somebody looks and while nobody does.
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
