//! The ledger over whole sessions: what is due is written into a record of what was said.

use contract::{Entity, HealthEvent};

use super::*;
use crate::assess::assess;
use crate::event::{Record, normalise};
use crate::fault::FaultBook;
use crate::policy::Policy;
use crate::session::{Marks, Session, dismissal, step};

struct World {
    book: FaultBook,
    node: NodeView,
    session: Session,
    ledger: StatusLedger,
    /// Ids in the order of the events, and the words of their records.
    events: Vec<String>,
    words: BTreeMap<String, &'static str>,
    now: Timestamp,
}

impl World {
    fn new() -> Self {
        let now = Timestamp::from_second(1_000).unwrap();
        Self {
            book: FaultBook::default(),
            node: NodeView::unknown("n1"),
            session: Session::idle(now),
            ledger: StatusLedger::default(),
            events: Vec::new(),
            words: BTreeMap::new(),
            now,
        }
    }

    fn event(&mut self, gpu: &str, fatal: bool, healthy: bool) {
        self.now += jiff::SignedDuration::from_secs(1);
        let mut event = HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "c".into(),
            node_name: "n1".into(),
            is_fatal: fatal,
            is_healthy: healthy,
            entities_impacted: vec![Entity {
                entity_type: "GPU".into(),
                entity_value: gpu.into(),
            }],
            ..HealthEvent::default()
        };
        normalise(&mut event, self.now);
        let id = event.id.clone();
        let seq = self.events.len() as u64 + 1;
        let record = Record {
            seq: seq.into(),
            id: id.clone(),
            created_at: self.now,
            event,
        };
        let before: Vec<Fault> = self
            .book
            .touched_by(&record.event)
            .into_iter()
            .cloned()
            .collect();
        self.book.record(&record);
        let after = self.book.touched_by(&record.event);
        let faults = if healthy {
            before.iter().collect()
        } else {
            after
        };
        self.ledger.took_in("n1", &id, healthy, &faults);
        self.events.push(id);
    }

    /// One look; the patch that follows is made unless `lost`.
    fn look(&mut self, lost: bool) {
        self.now += jiff::SignedDuration::from_secs(1);
        let released = dismissal(&self.node, None, &self.session.times);
        let policy = Policy::builtin();
        let desired = assess(self.book.faults("n1"), &policy, &self.node, released);
        self.ledger.look(&self.node, &desired, self.now);
        let step = step(
            &self.session,
            &desired,
            Some(&self.node),
            &Marks::of(&policy),
            None,
            self.now,
        );
        self.session = step.session;
        if let Some(patch) = step.patch.filter(|_| !lost) {
            self.node = self.node.after(&patch.change);
        }
    }

    fn settle(&mut self) {
        for _ in 0..4 {
            self.look(false);
        }
    }

    /// As the store writes it.
    fn write(&mut self) {
        let due = self.ledger.due(usize::MAX);
        for one in &due {
            match one {
                Due::Event {
                    id,
                    status,
                    if_counted,
                    ..
                } => {
                    let counted = |id| {
                        self.words
                            .get(id)
                            .is_some_and(|word| NodeQuarantined::is_counted(word))
                    };
                    if if_counted.is_empty() || if_counted.iter().any(counted) {
                        self.words.entry(id.clone()).or_insert(status.name());
                    }
                }
                Due::Cancel { .. } => {
                    for id in self.events.iter().rev() {
                        let Some(word) = self.words.get_mut(id) else {
                            continue;
                        };
                        let first = *word == "Quarantined";
                        if *word == "UnQuarantined" {
                            break;
                        }
                        *word = "Cancelled";
                        if first {
                            break;
                        }
                    }
                }
            }
        }
        self.ledger.written(due.len());
    }

    fn words(&mut self) -> Vec<&'static str> {
        self.write();
        let words = &self.words;
        let word = |id| words.get(id).copied().unwrap_or("-");
        self.events.iter().map(word).collect()
    }
}

#[test]
fn each_event_of_a_quarantine_has_its_word() {
    let mut world = World::new();
    world.event("9", false, false); // Counts for nothing.
    world.event("0", true, false);
    world.settle();
    world.event("0", true, false); // Again.
    world.event("1", true, false);
    world.settle();
    world.event("1", false, true);
    world.settle();
    world.event("7", false, true); // Closes nothing.
    world.event("0", false, true);
    world.settle();
    world.event("9", false, true);
    world.settle();
    assert_eq!(
        world.words(),
        [
            "-",
            "Quarantined",
            "AlreadyQuarantined",
            "AlreadyQuarantined",
            "AlreadyQuarantined",
            "-",
            "UnQuarantined",
            "-"
        ]
    );
}

#[test]
fn two_recoveries_at_once_give_back_by_the_last() {
    let mut world = World::new();
    world.event("0", true, false);
    world.event("1", true, false);
    world.settle();
    world.event("0", false, true);
    world.event("1", false, true);
    world.look(true); // The release does not get through at first.
    world.settle();
    assert_eq!(
        world.words(),
        [
            "Quarantined",
            "AlreadyQuarantined",
            "AlreadyQuarantined",
            "UnQuarantined"
        ]
    );
}

#[test]
fn what_was_over_before_it_began_has_no_word() {
    let mut world = World::new();
    world.event("0", true, false);
    world.look(true);
    world.event("0", false, true);
    world.settle();
    assert_eq!(world.words(), ["-", "-"]);
}

#[test]
fn a_person_cancels_and_a_later_recovery_gives_nothing_back() {
    let mut world = World::new();
    world.event("0", true, false);
    world.settle();
    world.event("1", true, false);
    world.settle();
    world.node.unschedulable = false;
    world.settle();
    assert_eq!(world.words(), ["Cancelled", "Cancelled"]);
    world.event("0", false, true);
    world.settle();
    assert_eq!(world.words(), ["Cancelled", "Cancelled", "-"]);
    // A later quarantine is another one.
    world.event("2", true, false);
    world.settle();
    world.event("2", false, true);
    world.settle();
    assert_eq!(
        world.words(),
        [
            "Cancelled",
            "Cancelled",
            "-",
            "Quarantined",
            "UnQuarantined"
        ]
    );
}

#[test]
fn a_restart_makes_up_for_what_was_not_written() {
    // Nothing was written and the ledger is lost: the node lists what it is there for.
    let mut world = World::new();
    world.event("0", true, false);
    world.settle();
    world.ledger = StatusLedger::default();
    world.settle();
    assert_eq!(world.words(), ["Quarantined"]);
    // The release was made, and the word of it was not written: the feed is read again.
    world.event("0", false, true);
    world.settle();
    let closing = world.events[1].clone();
    let opened = world.words.clone();
    world.ledger = StatusLedger::default();
    let faults: Vec<Fault> = {
        let mut before = World::new();
        before.event("0", true, false);
        before.book.faults("n1").to_vec()
    };
    let faults: Vec<&Fault> = faults.iter().collect();
    world.ledger.took_in("n1", &closing, true, &faults);
    world.settle();
    assert_eq!(world.words(), ["Quarantined", "UnQuarantined"]);
    assert_eq!(opened.len(), 1);
    // Written twice, nothing changes.
    let saved = serde_json::to_string(&world.ledger).unwrap();
    world.ledger = serde_json::from_str(&saved).unwrap();
    world.settle();
    assert_eq!(world.words(), ["Quarantined", "UnQuarantined"]);
}

#[test]
fn a_node_that_is_gone_for_good_ends_its_quarantine() {
    let mut world = World::new();
    world.event("0", true, false);
    world.settle();
    assert!(world.ledger.forget("n1") && !world.ledger.forget("n1"));
    assert_eq!(world.words(), ["Cancelled"]);
    assert_eq!(world.ledger, StatusLedger::default());
}

#[test]
fn the_ledger_is_bounded() {
    let mut world = World::new();
    world.event("0", true, false);
    let fault = world.book.faults("n1")[0].clone();
    for seq in 0..2 * MAX_REPORTS {
        world
            .ledger
            .took_in("n1", &seq.to_string(), true, &[&fault]);
    }
    world.settle();
    assert!(world.ledger.due(usize::MAX).len() <= MAX_REPORTS + 1);
}

#[test]
fn of_a_recovery_of_many_faults_the_gravest_are_remembered() {
    let mut world = World::new();
    for gpu in 0..3 * MAX_REPORT_FAULTS {
        world.event(&gpu.to_string(), false, false);
    }
    world.event("the fatal one", true, false);
    let faults = world.book.faults("n1").to_vec();
    let faults: Vec<&Fault> = faults.iter().collect();
    world.ledger = StatusLedger::default();
    world.ledger.took_in("n1", "recovery", true, &faults);
    let report = &world.ledger.share("n1").unwrap().reports[0];
    assert_eq!(report.faults.len(), MAX_REPORT_FAULTS);
    assert!(report.faults.contains(world.events.last().unwrap()));
}

#[test]
fn what_a_long_session_has_counted_is_bounded_and_not_owed_again() {
    let mut world = World::new();
    world.event("0", true, false);
    world.settle();
    world.ledger.written(usize::MAX);
    let ledger = world.ledger.nodes.get_mut("n1").unwrap();
    let ended = (0..MAX_COUNTED).map(|fault| format!("ended {fault}"));
    ledger.counted.extend(ended);
    world.look(false);
    let counted = world.ledger.share("n1").unwrap().counted.len();
    assert_eq!(counted, 1);
    assert_eq!(world.ledger.due(1), []);
    assert!(
        world
            .ledger
            .share("n1")
            .unwrap()
            .counted
            .contains(&world.events[0])
    );
}

#[test]
fn a_ledger_is_the_sum_of_its_shares_and_says_when_one_changes() {
    let mut world = World::new();
    world.event("0", true, false);
    world.look(false);
    world.event("1", true, false);
    let desired = assess(
        world.book.faults("n1"),
        &Policy::builtin(),
        &world.node,
        None,
    );
    assert!(world.ledger.look(&world.node, &desired, world.now));
    assert!(!world.ledger.look(&world.node, &desired, world.now));
    let waiting = serde_json::to_string(&world.ledger.waiting()).unwrap();
    let mut back: StatusLedger = serde_json::from_str(&waiting).unwrap();
    assert_ne!(back, world.ledger);
    for node in world.ledger.nodes() {
        let share = serde_json::to_string(world.ledger.share(node).unwrap()).unwrap();
        back.restore(node, serde_json::from_str(&share).unwrap());
    }
    assert_eq!(back, world.ledger);
}
