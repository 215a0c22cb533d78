mod faults;
mod random;

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, RecommendedAction, keys};
use jiff::{SignedDuration, Timestamp};

use super::*;

const SETTINGS: Settings = Settings {
    limit: SignedDuration::from_mins(30),
    delay: SignedDuration::from_mins(15),
    readiness: SignedDuration::from_mins(60),
    missing: SignedDuration::from_mins(1),
};

/// Returns a time, in minutes.
fn at(minute: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + 60 * minute).unwrap()
}

fn node(ready: bool, boot: &str) -> NodeState {
    NodeState {
        ready,
        boot_id: boot.to_owned(),
        is_out: false,
    }
}

/// Returns a notice of a reboot of the node `n`.
fn notice(phase: Phase, start: Option<i64>) -> Notice {
    Notice {
        node: "n".to_owned(),
        event: String::new(),
        provider: "gcp".to_owned(),
        resource: ("gce_instance".to_owned(), "17".to_owned()),
        kind: Kind::Reboot,
        phase,
        word: format!("{phase:?}"),
        start: start.map(at),
        end: start.map(|start| at(start + 60)),
        emergency: false,
        updated: None,
    }
}

/// A cloud with its nodes, and the faults that the reports leave open.
struct World {
    book: Book,
    now: i64,
    nodes: BTreeMap<String, NodeState>,
    /// Notices of the source now.
    notices: Vec<Notice>,
    unseen: BTreeSet<String>,
    /// Open faults: for each node and entity, whether it is fatal.
    open: BTreeMap<(String, String), bool>,
    /// All reports, for people: `n fatal`, `n announced`, `n healthy`.
    said: Vec<String>,
}

impl World {
    fn new() -> Self {
        Self {
            book: Book::default(),
            now: 0,
            nodes: [("n".to_owned(), node(true, "b1"))].into(),
            notices: Vec::new(),
            unseen: BTreeSet::new(),
            open: BTreeMap::new(),
            said: Vec::new(),
        }
    }

    /// Reads the source, and advances to this minute. Returns what was said.
    fn look(&mut self, minute: i64) -> Vec<String> {
        self.now = minute;
        let reading = Reading {
            notices: self.notices.clone(),
            complete: true,
            unseen: self.unseen.clone(),
        };
        self.book.read("source", &reading, at(minute));
        self.step()
    }

    fn step(&mut self) -> Vec<String> {
        let nodes = &self.nodes;
        let reports = (self.book).step(
            |name| nodes.get(name).cloned(),
            &SETTINGS,
            100,
            at(self.now),
        );
        let mut said = Vec::new();
        for report in reports {
            let word = match (report.healthy, report.is_fatal()) {
                (true, _) => "healthy",
                (_, true) => "fatal",
                _ => "announced",
            };
            said.push(format!("{} {word}", report.node));
            self.apply(&report);
        }
        for (name, node) in &mut self.nodes {
            node.is_out = self
                .open
                .iter()
                .any(|((of, _), fatal)| of == name && *fatal);
        }
        self.said.extend(said.iter().cloned());
        said
    }

    /// Changes the open faults as the fault book does: a fault only becomes graver.
    fn apply(&mut self, report: &Report) {
        let event = event(report);
        let entity = event.entities_impacted.first();
        let entity = entity.map(|entity| entity.entity_value.clone());
        let key = (report.node.clone(), entity.unwrap_or_default());
        if !report.healthy {
            *self.open.entry(key).or_insert(false) |= event.is_fatal;
        } else if key.1.is_empty() {
            self.open.retain(|(node, _), _| *node != report.node);
        } else {
            self.open.remove(&key);
        }
    }

    fn state(&self) -> State {
        self.book.records().last().unwrap().state
    }

    fn restart(&mut self) {
        let text = serde_json::to_string(&self.book).unwrap();
        self.book = serde_json::from_str(&text).unwrap();
    }
}

fn event(report: &Report) -> HealthEvent {
    let mut event = HealthEvent::default();
    report.fill(&mut event, |kind| match kind {
        Kind::Replacement => RecommendedAction::ReplaceVm,
        _ => RecommendedAction::None,
    });
    event
}

#[test]
fn a_node_leaves_before_its_maintenance_and_returns_after() {
    let mut world = World::new();
    assert!(world.look(0).is_empty());
    world.notices = vec![notice(Phase::Scheduled, Some(100))];
    assert_eq!(world.look(1), ["n announced"]);
    assert_eq!(world.state(), State::Detected);
    assert!(world.look(69).is_empty());
    assert_eq!(world.look(70), ["n fatal"]);
    assert_eq!(world.state(), State::QuarantineTriggered);
    assert!(world.look(71).is_empty());
    world.notices = vec![notice(Phase::Ongoing, None)];
    assert!(world.look(101).is_empty());
    assert_eq!(world.state(), State::MaintenanceOngoing);
    world.nodes.insert("n".to_owned(), node(false, "b1"));
    assert!(world.look(102).is_empty());
    world.notices = vec![notice(Phase::Completed, None)];
    world.nodes.insert("n".to_owned(), node(true, "b2"));
    world.nodes.get_mut("n").unwrap().is_out = true;
    assert!(world.look(120).is_empty());
    assert_eq!(world.state(), State::MaintenanceComplete);
    assert!(world.look(134).is_empty(), "the delay is not over");
    assert_eq!(world.look(135), ["n healthy"]);
    assert_eq!(world.state(), State::HealthyTriggered);
    // The notice stays, and says nothing new; then it goes.
    assert!(world.look(136).is_empty());
    world.notices.clear();
    assert!(world.look(137).is_empty());
    let record = &world.book.records()[0];
    assert_eq!(record.began, Some(at(101)));
    assert_eq!(record.ended, Some(at(120)));
    assert_eq!(record.start, Some(at(100)));
    // The next maintenance of the node is a record of its own.
    world.notices = vec![notice(Phase::Scheduled, Some(500))];
    assert_eq!(world.look(138), ["n announced"]);
    assert_eq!(world.book.records().len(), 2);
    assert_ne!(world.book.records()[0].id, world.book.records()[1].id);
}

#[test]
fn an_announcement_is_an_event_of_the_contract() {
    let mut world = World::new();
    let mut told = notice(Phase::Scheduled, Some(100));
    told.kind = Kind::Replacement;
    world.notices = vec![told];
    world.book.read(
        "source",
        &Reading {
            notices: world.notices.clone(),
            complete: true,
            ..Reading::default()
        },
        at(0),
    );
    let reports = world
        .book
        .step(|_| Some(node(true, "b1")), &SETTINGS, 100, at(0));
    let event = event(&reports[0]);
    assert!(!event.is_fatal && !event.is_healthy);
    assert_eq!(event.recommended_action, RecommendedAction::None as i32);
    let told = |key: &str| event.metadata.get(key).map(String::as_str);
    assert_eq!(told("maintenance_start"), Some("2027-01-15T09:40:00Z"));
    assert_eq!(told("maintenance_end"), Some("2027-01-15T10:40:00Z"));
    assert_eq!(told(keys::META_MAINTENANCE_KIND), Some("replacement"));
    assert_eq!(told(keys::META_MAINTENANCE_ID), Some("gcp-n-1"));
    let entity = &event.entities_impacted[0];
    assert_eq!(
        (entity.entity_type.as_str(), entity.entity_value.as_str()),
        ("gce_instance", "17")
    );
    assert!(event.error_code.is_empty());
    let record = serde_json::to_value(&world.book.records()[0]).unwrap();
    assert_eq!(record["status"], "DETECTED");
    assert_eq!(record["cspStatus"], "Scheduled");
    assert_eq!(record["maintenanceType"], "SCHEDULED");
    assert_eq!(record["scheduledStartTime"], "2027-01-15T09:40:00Z");
    // An action such as REPLACE_VM would take the node out: only a fatal event has one.
    let reports = world
        .book
        .step(|_| Some(node(true, "b1")), &SETTINGS, 100, at(90));
    let event = self::event(&reports[0]);
    assert!(event.is_fatal);
    assert_eq!(
        event.recommended_action,
        RecommendedAction::ReplaceVm as i32
    );
}

#[test]
fn an_emergency_skips_the_window() {
    let mut world = World::new();
    let mut told = notice(Phase::Scheduled, Some(1000));
    told.emergency = true;
    world.notices = vec![told];
    assert_eq!(world.look(0), ["n fatal"]);
}

#[test]
fn one_that_is_cancelled_gives_the_node_back() {
    for minute in [10, 80] {
        let mut world = World::new();
        world.notices = vec![notice(Phase::Scheduled, Some(100))];
        world.look(minute);
        world.notices = vec![notice(Phase::Cancelled, Some(100))];
        assert_eq!(world.look(minute + 1), ["n healthy"]);
        assert_eq!(world.state(), State::Cancelled);
        assert!(world.open.is_empty());
        assert!(world.look(minute + 2).is_empty());
        // The provider may change its mind.
        world.notices = vec![notice(Phase::Scheduled, Some(100))];
        assert_eq!(world.look(minute + 3).len(), 1);
    }
}

#[test]
fn one_that_is_put_off_gives_the_node_back_until_then() {
    let mut world = World::new();
    world.notices = vec![notice(Phase::Scheduled, Some(100))];
    assert_eq!(world.look(75), ["n fatal"]);
    // The node would leave again soon.
    world.notices = vec![notice(Phase::Scheduled, Some(130))];
    assert_eq!(world.look(76), ["n fatal"], "with the new times");
    world.notices = vec![notice(Phase::Scheduled, Some(200))];
    assert_eq!(world.look(77), ["n healthy", "n announced"]);
    assert_eq!(world.state(), State::Detected);
    // The times of an announcement are those of its last report.
    world.notices = vec![notice(Phase::Scheduled, Some(300))];
    assert_eq!(world.look(78), ["n healthy", "n announced"]);
    world.notices = vec![notice(Phase::Scheduled, Some(90))];
    assert_eq!(world.look(79), ["n fatal"]);
}

#[test]
fn one_that_vanishes_is_settled_by_boot_id_end_time_or_a_person() {
    let begun = |kind: Kind| {
        let mut world = World::new();
        let mut told = notice(Phase::Scheduled, Some(100));
        told.kind = kind;
        world.notices = vec![told];
        assert_eq!(world.look(80), ["n fatal"]);
        world
    };
    let settled = |world: &World| world.book.records()[0].settled;
    // Gone before it was due.
    let mut world = begun(Kind::Reboot);
    world.notices.clear();
    assert!(world.look(81).is_empty(), "it may only be missing");
    assert_eq!(world.look(82), ["n healthy"]);
    assert_eq!(
        (world.state(), settled(&world)),
        (State::Cancelled, Some(Settled::Withdrawn))
    );
    // The machine has booted since.
    let mut world = begun(Kind::Reboot);
    world.notices.clear();
    world.nodes.get_mut("n").unwrap().boot_id = "b2".to_owned();
    world.look(105);
    assert!(world.look(106).is_empty());
    assert_eq!(settled(&world), Some(Settled::BootId));
    assert_eq!(world.look(121), ["n healthy"]);
    // The announced time is over.
    let mut world = begun(Kind::Reboot);
    world.notices.clear();
    world.look(105);
    assert!(world.look(159).is_empty());
    world.look(160);
    assert_eq!(settled(&world), Some(Settled::EndTime));
    assert_eq!(world.look(175), ["n healthy"]);
    // A migration needs no boot.
    let mut world = begun(Kind::Migration);
    world.notices.clear();
    world.look(105);
    world.look(106);
    assert_eq!(world.state(), State::MaintenanceComplete);
    // Nothing shows how it ended: a person is asked, and answers by a release.
    let unknown = || {
        let mut world = begun(Kind::Reboot);
        let mut told = notice(Phase::Ongoing, None);
        told.end = Some(at(10_000));
        world.notices = vec![told];
        world.look(100);
        world.notices.clear();
        world.look(105);
        assert!(world.look(164).is_empty());
        assert_eq!(world.state(), State::MaintenanceOngoing);
        assert!(world.look(165).is_empty());
        assert_eq!(world.state(), State::Error);
        world
    };
    let mut world = unknown();
    world.nodes.get_mut("n").unwrap().is_out = false;
    assert_eq!(world.look(200), ["n healthy"]);
    assert_eq!(
        (world.state(), settled(&world)),
        (State::HealthyTriggered, Some(Settled::Person))
    );
    // The node is still watched.
    let mut world = unknown();
    world.nodes.get_mut("n").unwrap().boot_id = "b2".to_owned();
    world.look(200);
    assert_eq!(world.look(215), ["n healthy"]);
    // The notice comes back.
    let mut world = unknown();
    world.notices = vec![notice(Phase::Ongoing, None)];
    assert!(world.look(200).is_empty());
    assert_eq!(world.state(), State::MaintenanceOngoing);
}

#[test]
fn what_a_source_cannot_say_changes_nothing() {
    let mut world = World::new();
    world.notices = vec![notice(Phase::Scheduled, Some(100))];
    assert_eq!(world.look(80), ["n fatal"]);
    world.notices.clear();
    world.unseen.insert("n".to_owned());
    for minute in 81..400 {
        assert!(world.look(minute).is_empty());
    }
    assert_eq!(world.book.records()[0].vanished, None);
    // A change says nothing about other notices.
    world.book.read("source", &Reading::default(), at(401));
    assert_eq!(world.book.records()[0].vanished, None);
}

#[test]
fn a_node_with_two_maintenances_returns_after_the_last() {
    let mut world = World::new();
    let of = |event: &str, phase: Phase, start| Notice {
        event: event.to_owned(),
        ..notice(phase, Some(start))
    };
    world.notices = vec![
        of("a", Phase::Scheduled, 100),
        of("b", Phase::Scheduled, 110),
        of("c", Phase::Scheduled, 1000),
    ];
    assert_eq!(world.look(85), ["n fatal"]);
    world.notices[0] = of("a", Phase::Cancelled, 100);
    assert_eq!(world.look(86), ["n fatal"], "now because of the other");
    world.notices[1] = of("b", Phase::Completed, 110);
    world.look(120);
    assert_eq!(world.look(135), ["n healthy", "n announced"]);
    let ids: Vec<&str> = (world.book.records().iter())
        .map(|record| record.id.as_str())
        .collect();
    assert_eq!(ids, ["a", "b", "c"]);
}

#[test]
fn a_node_that_leaves_the_cluster_leaves_nothing_behind() {
    let mut world = World::new();
    world.notices = vec![notice(Phase::Scheduled, Some(100))];
    world.look(80);
    world.nodes.clear();
    world.notices.clear();
    assert!(world.look(81).is_empty());
    assert!(world.look(140).is_empty());
    assert_eq!(world.look(141), ["n healthy"]);
    assert_eq!(world.book.records()[0].settled, Some(Settled::NodeGone));
}

#[test]
fn a_fault_of_an_earlier_book_ends_once_its_node_is_ready() {
    let mut world = World::new();
    world.open.insert(("n".to_owned(), "17".to_owned()), true);
    world.nodes.get_mut("n").unwrap().ready = false;
    let open = BTreeSet::from(["n"]);
    world.book.take_over(&open, at(0));
    // A report of this book may be on its way.
    assert!(world.book.takes_over() && world.look(0).is_empty());
    world.book.take_over(&BTreeSet::new(), at(0));
    assert!(!world.book.takes_over());
    world.book.take_over(&open, at(0));
    world.book.take_over(&open, at(1));
    assert!(!world.book.takes_over());
    assert!(world.look(1).is_empty());
    world.restart();
    world.nodes.get_mut("n").unwrap().ready = true;
    assert_eq!(world.look(2), ["n healthy"]);
    assert!(world.open.is_empty() && world.look(3).is_empty());
    // The maintenance is still announced.
    world.book.take_over(&open, at(3));
    world.book.take_over(&open, at(4));
    world.notices = vec![notice(Phase::Ongoing, None)];
    assert_eq!(world.look(4), ["n fatal"]);
    world.notices = vec![notice(Phase::Cancelled, None)];
    assert_eq!(world.look(5), ["n healthy"]);
}

#[test]
fn what_is_not_reported_at_once_is_reported_later() {
    let mut book = Book::default();
    let notices = ["a", "b", "c"].map(|node| Notice {
        node: node.to_owned(),
        ..notice(Phase::Scheduled, Some(100))
    });
    let reading = Reading {
        notices: notices.to_vec(),
        complete: true,
        ..Reading::default()
    };
    book.read("source", &reading, at(0));
    let mut step = |minute| {
        let reports = book.step(|_| Some(node(true, "b")), &SETTINGS, 2, at(minute));
        let nodes: Vec<String> = reports.into_iter().map(|report| report.node).collect();
        nodes.join(" ")
    };
    assert_eq!([step(0), step(0), step(0)], ["a b", "c", ""]);
}

#[test]
fn the_book_is_bounded() {
    let mut book = Book::default();
    let of = |range: std::ops::Range<usize>, phase| Reading {
        notices: range
            .map(|number| Notice {
                node: format!("n{number}"),
                word: "w".repeat(1000),
                ..notice(phase, Some(100_000))
            })
            .collect(),
        complete: true,
        ..Reading::default()
    };
    let ready = |_: &str| Some(node(true, "b"));
    book.read("source", &of(0..MAX_OPEN + 7, Phase::Scheduled), at(0));
    assert_eq!((book.records().len(), book.take_left_out()), (MAX_OPEN, 7));
    assert_eq!(book.records()[0].word.len(), 253);
    book.step(ready, &SETTINGS, 100, at(0));
    book.read("source", &of(0..MAX_OPEN, Phase::Cancelled), at(1));
    book.step(ready, &SETTINGS, 100, at(1));
    assert_eq!(book.records().len(), 2 * MAX_ENDED);
    book.read("source", &of(0..0, Phase::Cancelled), at(2));
    book.step(ready, &SETTINGS, 100, at(2));
    assert_eq!(book.records().len(), MAX_ENDED);
}

#[test]
fn the_book_remembers_when_a_source_was_asked_and_forgets_one_that_is_asked_no_longer() {
    let mut world = World::new();
    world.notices = vec![notice(Phase::Scheduled, Some(100))];
    let reading = Reading {
        notices: world.notices.clone(),
        complete: true,
        ..Reading::default()
    };
    world.book.poll("source", &reading, at(79), at(80));
    world.now = 80;
    assert_eq!(world.step(), ["n fatal"]);
    world.restart();
    let polled = |world: &World| world.book.polled().get("source").copied();
    assert_eq!(polled(&world), Some(at(79)));
    world.book.keep(&["source", "other"].into(), at(81));
    assert_eq!(
        (polled(&world), world.book.records()[0].vanished),
        (Some(at(79)), None)
    );
    // Notices of a source that is asked no longer are settled as those that are gone.
    world.book.keep(&["other"].into(), at(81));
    assert_eq!(polled(&world), None);
    world.now = 82;
    assert_eq!(world.step(), ["n healthy"]);
}

#[test]
fn a_second_source_of_a_maintenance_is_no_second_report() {
    let mut book = Book::default();
    let settings = SETTINGS;
    let told = |start| Reading {
        notices: vec![notice(Phase::Scheduled, Some(start))],
        complete: true,
        ..Reading::default()
    };
    let mut look = |source: &str, reading: &Reading, minute| {
        book.read(source, reading, at(minute));
        let node = |_: &str| Some(NodeState::default());
        book.step(node, &settings, 10, at(minute)).len()
    };
    assert_eq!(look("first", &told(5), 0), 1);
    // One that is a little earlier, and one that is later.
    assert_eq!(look("second", &told(4), 0), 0);
    assert_eq!(look("third", &told(6), 0), 0);
}
