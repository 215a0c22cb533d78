//! Tests of the fleet as one object: inputs in, effects out.

mod shown;

use contract::{HealthEvent, keys};
use serde_json::{Value, json};

use super::*;
use crate::event::normalise;
use crate::ownership::Ownership;
use crate::position::Position;
use crate::session::Intent;

const DAY: SignedDuration = SignedDuration::from_hours(24);

fn start() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

/// A fleet that acts, and the clock and the store behind it.
struct World {
    fleet: Fleet,
    now: Timestamp,
    stored: u64,
}

impl World {
    /// A cluster that has `n1`, which has one fault.
    fn new() -> Self {
        let mut world = Self::that(Owns::All);
        world.report("n1");
        world.take(Input::CaughtUp);
        world.list(&[object("n1", 1)]);
        world
    }

    fn that(owns: Owns) -> Self {
        Self::with(settings(owns))
    }

    fn with(settings: Settings) -> Self {
        Self {
            fleet: Fleet::new(settings, Some(Arc::new(Policy::builtin())), start()),
            now: start(),
            stored: 0,
        }
    }

    fn take(&mut self, input: Input) {
        self.fleet.take(input, self.now);
    }

    fn decide(&mut self) -> Vec<Effect> {
        self.fleet.decide(self.now)
    }

    fn list(&mut self, objects: &[Value]) {
        self.take(Input::ListBegun);
        for object in objects {
            self.take(seen(object));
        }
        self.take(Input::Listed);
    }

    fn report(&mut self, node: &str) -> String {
        self.report_that(node, false)
    }

    /// Each says something else: what is told twice is one event.
    fn report_that(&mut self, node: &str, is_healthy: bool) -> String {
        let mut event = HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "Check".into(),
            node_name: node.into(),
            is_fatal: !is_healthy,
            is_healthy,
            message: self.stored.to_string(),
            ..HealthEvent::default()
        };
        normalise(&mut event, self.now);
        self.store(event, self.now)
    }

    /// Stores an event and records it, as the feed would. Returns its id.
    fn store(&mut self, event: HealthEvent, created_at: Timestamp) -> String {
        self.stored += 1;
        let record = Record {
            seq: self.stored.into(),
            id: event.id.clone(),
            created_at,
            event,
        };
        self.fleet.record(&record, self.now);
        record.id
    }

    /// Decides, and answers what is asked of the store, until nothing more is asked of it.
    /// Returns the patches.
    fn settle(&mut self) -> Vec<Planned> {
        let mut patches = Vec::new();
        for _ in 0..10 {
            let effects = self.decide();
            let mut asked = false;
            for effect in effects {
                match effect {
                    Effect::Patch(planned) => patches.push(*planned),
                    Effect::Append { node, events, .. } => {
                        asked = true;
                        for (event, created_at) in events {
                            self.store(event, created_at);
                        }
                        let result = Ok(Some(self.stored.into()));
                        self.take(Input::Appended { node, result });
                    }
                    Effect::LookUp { node, ids } => {
                        asked = true;
                        let found = ids.into_iter().map(|id| (id, Found::Nothing)).collect();
                        let found = Some(found);
                        self.take(Input::Found { node, found });
                    }
                    _ => {}
                }
            }
            if !asked {
                return patches;
            }
        }
        panic!("the store is asked for ever");
    }

    fn faults(&self) -> usize {
        self.fleet.book().faults("n1").len()
    }
}

fn settings(owns: Owns) -> Settings {
    Settings {
        mode: Mode::Quarantine,
        owns,
        cluster: true,
        store: "ours".to_owned(),
        since: Position::START,
        brake: false,
        gpu_label: NodeLabel::parse("gpu=true").unwrap(),
        retention: DAY * 30,
        returns_wait: true,
    }
}

fn object(name: &str, version: u32) -> Value {
    let metadata = json!({"name": name, "uid": name, "resourceVersion": version.to_string()});
    json!({"metadata": metadata, "spec": {}, "status": {}})
}

fn seen(object: &Value) -> Input {
    Input::Seen(Arc::new(NodeView::from_object(object.clone()).unwrap()))
}

/// The node as an object that was made at `created`, of a machine.
fn of_machine(uid: &str, machine: &str, created: Timestamp) -> Input {
    seen(&json!({
        "metadata": {"name": "n1", "uid": uid, "creationTimestamp": created.to_string()},
        "status": {"nodeInfo": {"systemUUID": machine, "bootID": "b"}},
    }))
}

#[test]
fn a_node_that_comes_by_the_name_of_another_has_never_come_back() {
    let mut session = Session::idle(start());
    (session.returns, session.back_at) = (vec![start()], Some(start()));
    let mut entry = NodeEntry::new(session);
    entry.gone();
    assert_eq!(
        (entry.session.returns, entry.session.back_at),
        (vec![], None)
    );
}

#[test]
fn a_clock_that_is_put_back_makes_no_window_longer() {
    let mut world = World::new();
    let kept = Kept {
        book: FaultBook::default(),
        reports: BTreeMap::new(),
        recently_out: [("n2".to_owned(), start())].into(),
        begun: start(),
        sessions: BTreeMap::new(),
        unsaved: BTreeSet::new(),
    };
    world.fleet.restore(kept, start());
    world.now = start() - DAY;
    world.take(Input::CaughtUp);
    assert_eq!(world.fleet.recently_out()["n2"], world.now);
}

#[test]
fn what_waits_for_an_answer_is_not_looked_at_again_and_again() {
    let mut world = World::new();
    assert_eq!(world.settle().len(), 1);
    // The API server is silent for longer than it takes until a person is asked.
    let mut looks = 0;
    while let Some(at) = world.fleet.wake_at().filter(|_| looks < 10) {
        looks += 1;
        world.now = world.now.max(at);
        world.decide();
    }
    assert!(looks < 10);
}

#[test]
fn a_store_that_does_not_answer_holds_up_the_nodes_that_it_was_asked_about_and_no_other() {
    let mut world = World::that(Owns::All);
    world.report("n2");
    world.take(Input::CaughtUp);
    let mut quarantined = object("n1", 1);
    let listed = json!([{"id": "0123456789abcdef01234567", "agent": "a", "checkName": "c", "isFatal": true}]);
    quarantined["metadata"]["annotations"] =
        json!({keys::QUARANTINE_HEALTH_EVENT: listed.to_string()});
    world.list(&[quarantined, object("n2", 1)]);
    let effects = world.decide();
    let asked = |effects: &[Effect]| {
        let asks = |effect: &&Effect| matches!(effect, Effect::LookUp { node, .. } if node == "n1");
        effects.iter().filter(asks).count()
    };
    let patched: Vec<&str> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Patch(planned) => Some(planned.node.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!((asked(&effects), patched), (1, vec!["n2"]));
    // Another look asks nothing again.
    let mut labelled = object("n1", 2);
    labelled["metadata"]["annotations"] = json!({
        keys::QUARANTINE_HEALTH_EVENT: listed.to_string(), "another": "one",
    });
    world.take(seen(&labelled));
    assert_eq!(asked(&world.decide()), 0);
    // It is asked again after a while where it did not answer.
    let (node, found) = ("n1".to_owned(), None);
    world.take(Input::Found { node, found });
    assert_eq!(asked(&world.decide()), 0);
    world.now = world.fleet.wake_at().unwrap();
    assert_eq!(asked(&world.decide()), 1);
    // What the node lists and nobody knows is taken over before anything is decided.
    let found = BTreeMap::from([("0123456789abcdef01234567".to_owned(), Found::Nothing)]);
    let (node, found) = ("n1".to_owned(), Some(found));
    world.take(Input::Found { node, found });
    let patches = world.settle();
    assert!(
        patches
            .iter()
            .all(|one| one.patch.intent != Intent::Release)
    );
    assert_eq!(world.faults(), 1);
    assert_eq!(
        world.fleet.session("n1").unwrap().phase,
        crate::session::Phase::Quarantined
    );
}

#[test]
fn another_machine_under_the_name_does_not_inherit_the_faults() {
    use crate::session::Phase;

    let mut world = World::new();
    let later = start() + DAY * 2;
    let conflict = || Input::Answered {
        node: "n1".to_owned(),
        answer: Answer::Conflict,
    };
    world.take(of_machine(
        "1",
        "old",
        start() - SignedDuration::from_secs(1),
    ));
    assert_eq!(world.settle().len(), 1);
    world.take(conflict());
    world.take(Input::Gone("n1".to_owned()));
    assert!(world.settle().is_empty());
    assert_eq!(world.faults(), 1);
    // The same one joins again.
    world.take(of_machine("2", "old", later));
    world.now += SignedDuration::from_secs(1);
    assert_eq!((world.settle().len(), world.faults()), (1, 1));
    assert_eq!(
        world.fleet.session("n1").unwrap().phase,
        Phase::Quarantining
    );
    world.take(conflict());
    world.take(Input::Gone("n1".to_owned()));
    assert!(world.settle().is_empty());
    // Another one.
    world.take(of_machine("3", "new", later));
    assert!(
        world.settle().is_empty(),
        "nothing is decided by faults of the old one"
    );
    assert_eq!(world.faults(), 0);
    assert_eq!(world.fleet.session("n1").unwrap().phase, Phase::Idle);
}

#[test]
fn the_old_faults_of_a_node_that_is_long_gone_are_dropped() {
    let mut world = World::new();
    // Old enough, but gone for a moment only.
    world.now = start() + DAY * 31;
    world.take(Input::Gone("n1".to_owned()));
    world.settle();
    assert_eq!(world.faults(), 1);
    assert_eq!(world.fleet.wake_at(), Some(world.now + DAY));
    world.now += DAY;
    let append = world.decide();
    assert!(matches!(
        append[..],
        [Effect::Append {
            purpose: Purpose::Close,
            ..
        }]
    ));
    // A store that does not take it is asked again.
    let (node, result) = ("n1".to_owned(), Err(()));
    world.take(Input::Appended { node, result });
    let again = world.fleet.wake_at().unwrap();
    assert!(again > world.now && world.decide().is_empty());
    world.now = again;
    world.settle();
    assert_eq!(world.faults(), 0);
}

#[test]
fn what_another_store_keeps_is_left_alone_whatever_is_known() {
    use super::claim::Claim;

    let hour = SignedDuration::from_hours(1);
    for (owns, store, begun, expected) in [
        ("n1", "other", start() - hour, Claim::Anothers),
        ("n1", "other", start() + hour, Claim::Ours),
        ("n2", "other", start() + hour, Claim::Anothers),
        ("n1", "ours", start() - hour, Claim::Ours),
    ] {
        let mut world = World::that(Owns::Node(owns.to_owned()));
        world.fleet.begun = begun;
        let known = world.report("n1");
        let session =
            json!({"id": "s", "since": start().to_string(), "by": "node", "store": store});
        let annotations = json!({
            keys::SESSION: session.to_string(),
            keys::QUARANTINE_HEALTH_EVENT: json!([{"id": known}]).to_string(),
        });
        let metadata = json!({"name": "n1", "annotations": annotations});
        let view = NodeView::from_object(json!({ "metadata": metadata })).unwrap();
        let own = Ownership::read(&view);
        let claim = world.fleet.claim("n1", own.as_ref());
        assert_eq!(claim, expected, "{owns} {store}");
        world.fleet.keep_claim("n1", own.as_ref(), claim);
        let entry = &world.fleet.nodes["n1"];
        assert_eq!(entry.claim.anothers.is_some(), claim == Claim::Anothers);
        assert_eq!(
            entry.claim.on_our_node,
            entry.claim.anothers.is_some() && owns == "n1"
        );
    }
}

#[test]
fn of_a_node_that_the_cluster_lacks_no_events_are_kept_for_their_status() {
    let mut world = World::new();
    assert!(world.fleet.reports("n1").is_some());
    world.take(Input::Gone("n1".to_owned()));
    world.settle();
    assert!(world.fleet.reports("n1").is_none());
    assert_eq!(world.faults(), 1);
}

#[test]
fn a_session_that_begins_in_the_future_counts_from_when_it_was_seen() {
    let mut world = World::new();
    let session = json!({"id": "s", "since": Timestamp::MAX.to_string()});
    let mut out = object("n1", 2);
    out["metadata"]["annotations"] = json!({keys::SESSION: session.to_string()});
    world.take(seen(&out));
    world.decide();
    assert_eq!(world.fleet.nodes["n1"].out_since(), Some(start()));
}

/// As after etcd was restored from a backup.
#[test]
fn a_list_may_go_back_but_not_behind_our_own_patch() {
    let mut world = World::new();
    let known = |world: &World| {
        let view = world.fleet.view("n1").unwrap();
        view.resource_version.clone()
    };
    let applied = |version| seen(&object("n1", version));
    world.take(applied(1_000));
    world.take(applied(5));
    assert_eq!(known(&world), "1000", "late, and not from a list");
    world.fleet.entry("n1").patch.answered_at = Some(world.now);
    for (inputs, expected) in [
        ([Input::ListBegun, applied(6), Input::Listed], "1000"),
        ([Input::ListBegun, applied(7), Input::Listed], "7"),
        ([applied(6), applied(8), applied(5)], "8"),
    ] {
        for input in inputs {
            world.take(input);
        }
        assert_eq!(known(&world), expected);
        world.now += LIST_TAKES + SignedDuration::from_secs(1);
    }
}

#[test]
fn a_clock_that_is_put_back_ends_all_waits() {
    let mut world = World::new();
    // A first try whose answer is lost.
    assert_eq!(world.settle().len(), 1);
    let (node, answer) = ("n1".to_owned(), Answer::Unknown);
    world.take(Input::Answered { node, answer });
    assert_eq!(world.fleet.brake.doubt_ends, Some(start() + DOUBT));
    assert!(world.settle().is_empty(), "it waits");

    let hour = SignedDuration::from_hours(1);
    world.now = start() - hour;
    assert_eq!(world.settle().len(), 1);
    let ends = Some(start() - hour + DOUBT);
    assert_eq!(world.fleet.nodes["n1"].patch.in_doubt, ends);
    assert_eq!(world.fleet.brake.doubt_ends, ends);
}

#[test]
fn nothing_is_told_on_a_node_before_its_cordon_is_answered() {
    let mut world = World::new();
    let told = |effects: &[Effect]| {
        let tells = |effect: &&Effect| matches!(effect, Effect::Tell(_));
        effects.iter().filter(tells).count()
    };
    let effects = world.decide();
    assert_eq!(told(&effects), 0);
    let planned = effects.into_iter().find_map(|effect| match effect {
        Effect::Patch(planned) => Some(planned),
        _ => None,
    });
    let planned = planned.unwrap();
    // Not for another look either: the watch brings what others do to the node.
    let mut labelled = object("n1", 2);
    labelled["metadata"]["labels"] = json!({"zone": "a"});
    world.take(seen(&labelled));
    assert_eq!(told(&world.decide()), 0);
    let mut made = planned.view.after(&planned.patch.change);
    made.resource_version = "3".to_owned();
    let (node, answer) = (planned.node, Answer::Made(Arc::new(made)));
    world.take(Input::Answered { node, answer });
    assert_eq!(told(&world.decide()), 1);
}

#[test]
fn heartbeats_and_answers_ask_the_brake_nothing() {
    let mut world = World::new();
    let patches = world.settle();
    world.fleet.show_brake(world.now);
    assert!(!world.fleet.brake.stale, "its cordon was counted before");

    let ready = json!({"type": "Ready", "status": "True", "lastHeartbeatTime": "1"});
    let made = patches[0].view.after(&patches[0].patch.change);
    let mut out = made.object();
    out["metadata"]["resourceVersion"] = "2".into();
    out["status"]["conditions"] = json!([ready]);
    let made = Arc::new(NodeView::from_object(out.clone()).unwrap());
    let (node, answer) = ("n1".to_owned(), Answer::Made(made));
    world.take(Input::Answered { node, answer });
    world.decide();
    assert!(!world.fleet.brake.stale, "it counts as out, as before");
    world.fleet.show(&[], world.now);
    world.fleet.take_news();

    // Nor is there anything to look at or to show.
    out["metadata"]["resourceVersion"] = "3".into();
    out["status"]["conditions"][0]["lastHeartbeatTime"] = "2".into();
    world.take(seen(&out));
    assert!(world.fleet.dirty.is_empty() && !world.fleet.take_news());
    assert!(!world.fleet.brake.stale);
    let newest = &world.fleet.view("n1").unwrap().resource_version;
    assert_eq!(newest, "3", "the newest is kept");

    // Conditions are for the rules only; a GPU node more counts.
    out["metadata"]["resourceVersion"] = "4".into();
    out["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
    world.take(seen(&out));
    assert!(world.fleet.dirty.contains("n1") && !world.fleet.brake.stale);
    out["metadata"]["resourceVersion"] = "5".into();
    out["metadata"]["labels"]["gpu"] = "true".into();
    world.take(seen(&out));
    assert!(world.fleet.brake.stale);
}
