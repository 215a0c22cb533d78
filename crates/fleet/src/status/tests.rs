//! Reports over whole sessions: the updates are written into a record of each event.

use contract::HealthEvent;
use model::event::EventRecord;
use model::fault::FaultBook;
use model::node::NodeView;
use model::status::EventStatus;
use policy::Policy;

use super::*;
use crate::FleetInput;
use crate::world::{Fate, Restart, World, event};

mod drained;

struct Story {
    world: World,
    /// Ids in the order of the events.
    events: Vec<String>,
    /// Statuses of their records.
    records: BTreeMap<String, EventStatus>,
}

impl Story {
    fn new() -> Self {
        Self::of(World::new(&Policy::builtin()))
    }

    fn of(world: World) -> Self {
        Self {
            world,
            events: Vec::new(),
            records: BTreeMap::new(),
        }
    }

    fn event(&mut self, gpu: u8, fatal: bool, healthy: bool) {
        let id = self.world.event("c", gpu, fatal, healthy);
        self.events.push(id);
    }

    /// Looks at the node once.
    fn look(&mut self, fate: Fate) {
        for status in self.world.look(fate).statuses {
            self.write(&status);
        }
    }

    fn settle(&mut self) {
        for _ in 0..4 {
            self.look(Fate::Made);
        }
    }

    /// Writes an update as the store does.
    fn write(&mut self, update: &StatusUpdate) {
        match update {
            StatusUpdate::Event(event) => {
                let record = self.records.entry(event.id.clone()).or_default();
                record.join(event.clone());
            }
            StatusUpdate::Session {
                session, change, ..
            } => {
                let records = self.records.values_mut();
                for record in records.filter(|one| one.session.as_ref() == Some(session)) {
                    record.change(change, self.world.now);
                }
            }
            StatusUpdate::Ended(end) => {
                for update in end.settle(&self.records) {
                    self.write(&update);
                }
            }
        }
    }

    fn evictions(&self) -> Vec<String> {
        let eviction = |id| self.records.get(id)?.pods_eviction.as_ref();
        let text = |id| eviction(id).map_or("-".to_owned(), Eviction::to_string);
        self.events.iter().map(text).collect()
    }

    fn statuses(&self) -> Vec<&str> {
        let status = |id| self.records.get(id)?.node_quarantined;
        let name = |id| status(id).map_or("-", NodeQuarantined::name);
        self.events.iter().map(name).collect()
    }
}

#[test]
fn each_event_of_a_quarantine_has_its_word() {
    let mut story = Story::new();
    story.event(9, false, false); // counts for nothing
    story.event(0, true, false);
    story.settle();
    story.event(0, true, false); // again
    story.event(1, true, false);
    story.settle();
    story.event(1, false, true);
    story.settle();
    story.event(7, false, true); // closes nothing
    story.event(0, false, true);
    story.settle();
    story.event(9, false, true);
    story.settle();
    assert_eq!(
        story.statuses(),
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
    for restart in [None, Some(Restart::All)] {
        let mut story = Story::new();
        story.event(0, true, false);
        story.event(1, true, false);
        story.settle();
        story.event(0, false, true);
        story.event(1, false, true);
        story.look(Fate::Conflict); // the release does not get through at first
        if let Some(with) = restart {
            story.world.restart(with);
        }
        story.settle();
        let already = "AlreadyQuarantined";
        let expected = ["Quarantined", already, already, "UnQuarantined"];
        assert_eq!(story.statuses(), expected, "{restart:?}");
    }
}

#[test]
fn what_was_over_before_it_began_has_no_word() {
    let mut story = Story::new();
    story.event(0, true, false);
    story.look(Fate::Refused);
    story.event(0, false, true);
    story.settle();
    assert_eq!(story.statuses(), ["-", "-"]);
}

#[test]
fn a_person_cancels_and_a_later_recovery_gives_nothing_back() {
    let mut story = Story::new();
    story.event(0, true, false);
    story.settle();
    story.event(1, true, false);
    story.settle();
    story.world["n1"].unschedulable = false;
    story.settle();
    assert_eq!(story.statuses(), ["Cancelled", "Cancelled"]);
    story.event(0, false, true);
    story.settle();
    assert_eq!(story.statuses(), ["Cancelled", "Cancelled", "-"]);
    // A later quarantine is another one.
    story.event(2, true, false);
    story.settle();
    story.event(2, false, true);
    story.settle();
    assert_eq!(
        story.statuses(),
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
    for with in [Restart::All, Restart::Events] {
        // Nothing was written: the node lists its events.
        let mut story = Story::new();
        story.event(0, true, false);
        story.settle();
        story.records.clear();
        story.world.restart(with);
        story.settle();
        assert_eq!(story.statuses(), ["Quarantined"], "{with:?}");
        // The release was made, and its status was not written: the feed is read again.
        story.event(0, false, true);
        let written = story.records.clone();
        story.settle();
        story.records = written;
        story.world.restart(with);
        story.settle();
        assert_eq!(story.statuses(), ["Quarantined", "UnQuarantined"]);
        // A repeated update changes nothing.
        story.world.restart(with);
        story.settle();
        assert_eq!(story.statuses(), ["Quarantined", "UnQuarantined"]);
    }
}

#[test]
fn a_release_that_nobody_has_seen_before_a_restart_is_one_by_the_recovery() {
    for saved_before in [false, true] {
        let mut story = Story::new();
        story.event(0, true, false);
        story.settle();
        let before = story.world.saved_state();
        story.event(0, false, true);
        story.look(Fate::Made); // the release is made
        let at_the_end = story.world.saved_state();
        let kept = if saved_before { before } else { at_the_end };
        story.world.restart_from(Some(kept));
        assert!(!story.world["n1"].unschedulable);
        story.settle();
        let expected = ["Quarantined", "UnQuarantined"];
        assert_eq!(story.statuses(), expected, "{saved_before}");
    }
}

#[test]
fn a_release_by_hand_that_nobody_has_seen_before_a_restart_is_none_by_the_recovery() {
    let mut story = Story::new();
    story.event(0, true, false);
    story.settle();
    story.world["n1"].unschedulable = false;
    story.look(Fate::Made);
    let kept = story.world.saved_state();
    story.event(0, false, true);
    story.world.restart_from(Some(kept));
    story.settle();
    assert_eq!(story.statuses(), ["Cancelled", "-"]);
}

#[test]
fn what_a_process_before_has_begun_is_not_cancelled_after_a_restart() {
    let mut story = Story::new();
    story.event(0, true, false);
    story.settle();
    let kept = story.world.saved_state();
    story.event(0, false, true);
    let written = story.records.clone();
    story.settle();
    story.event(1, true, false);
    story.settle();
    // The updates may be lost with the process.
    for records in [story.records.clone(), written] {
        story.records = records;
        story.world.restart_from(Some(kept.clone()));
        assert!(story.world["n1"].unschedulable);
        story.settle();
        let expected = ["Quarantined", "UnQuarantined", "Quarantined"];
        assert_eq!(story.statuses(), expected);
    }
}

#[test]
fn a_node_that_is_gone_for_good_ends_its_quarantine() {
    for restart in [None, Some(Restart::All)] {
        let mut story = Story::new();
        story.event(0, true, false);
        story.settle();
        if let Some(with) = restart {
            story.world.restart(with);
        }
        let gone = |story: &mut Story| {
            story.world.handle(FleetInput::NodeGone("n1".to_owned()));
            story.world.look_without_watch(Fate::Made).statuses
        };
        // This follows the updates repeated after the restart.
        let updates = gone(&mut story);
        story.write(updates.last().unwrap());
        assert_eq!(story.statuses(), ["Cancelled"], "{restart:?}");
        assert_eq!(gone(&mut story), []);
    }
}

#[test]
fn a_fault_that_takes_its_node_out_again_after_a_cancelled_session_has_its_word_again() {
    let mut story = Story::new();
    story.event(0, true, false);
    story.settle();
    story.world["n1"].unschedulable = false;
    story.settle();
    assert_eq!(story.statuses(), ["Cancelled"]);
    story.event(0, true, false);
    story.settle();
    assert_eq!(story.statuses(), ["Quarantined", "AlreadyQuarantined"]);
    story.event(0, false, true);
    story.settle();
    let expected = ["Quarantined", "AlreadyQuarantined", "UnQuarantined"];
    assert_eq!(story.statuses(), expected);
}

#[test]
fn a_recovery_of_what_did_not_count_takes_no_word_from_the_one_that_ended_the_session() {
    let mut story = Story::new();
    story.event(0, true, false);
    story.event(9, false, false);
    story.settle();
    let (kept, statuses) = (story.world.saved_state(), story.records.clone());
    story.event(0, false, true);
    story.event(9, false, true);
    story.settle();
    let expected = ["Quarantined", "-", "UnQuarantined", "-"];
    assert_eq!(story.statuses(), expected);
    // The statuses of the recoveries are lost with the process.
    story.records = statuses;
    story.world.restart_from(Some(kept));
    story.settle();
    assert_eq!(story.statuses(), expected);
}

#[test]
fn a_session_that_a_recovery_ended_before_a_restart_is_not_cancelled_with_its_node() {
    let mut story = Story::new();
    story.event(0, true, false);
    story.settle();
    let (kept, statuses) = (story.world.saved_state(), story.records.clone());
    story.event(0, false, true);
    story.settle();
    story.records = statuses;
    story.world.restart_from(Some(kept));
    story.world.handle(FleetInput::NodeGone("n1".to_owned()));
    for status in story.world.look_without_watch(Fate::Made).statuses {
        story.write(&status);
    }
    assert_eq!(story.statuses(), ["Quarantined", "UnQuarantined"]);
}

fn book(events: impl Iterator<Item = HealthEvent>) -> FaultBook {
    let mut book = FaultBook::default();
    for (seq, mut event) in (1_u64..).zip(events) {
        let created_at = Timestamp::UNIX_EPOCH;
        model::event::normalise(&mut event, created_at);
        book.record(&EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        });
    }
    book
}

#[test]
fn what_waits_is_bounded() {
    let book = book([event("c", &[], true, false)].into_iter());
    let mut reports = Reports::default();
    for seq in 0..2 * MAX_REPORTS {
        reports.add(&seq.to_string(), true, book.faults("n1").iter().collect());
    }
    assert_eq!(reports.waiting.len(), MAX_REPORTS);
}

#[test]
fn of_what_was_said_the_newest_is_said_again() {
    let book = book([event("c", &[], true, false)].into_iter());
    let node = ObservedNode::of(NodeView::unknown("n1").into());
    let mut reports = Reports::default();
    let mut last = Vec::new();
    for seq in 0..=MAX_REPORTS {
        reports.add(&seq.to_string(), true, book.faults("n1").iter().collect());
        last = reports.update(&node, &Desired::default(), None, Timestamp::UNIX_EPOCH);
    }
    assert_eq!(reports.updates.len(), MAX_REPORTS);
    assert!(reports.updates.ends_with(&last) && last.len() == 1);
}

#[test]
fn of_a_recovery_of_many_faults_the_gravest_are_remembered() {
    let gpus: Vec<String> = (0..3 * MAX_REPORT_FAULTS)
        .map(|gpu| gpu.to_string())
        .collect();
    let minor = gpus
        .iter()
        .map(|gpu| event("c", &[("GPU", gpu)], false, false));
    let fatal = event("c", &[("GPU", "the fatal one")], true, false);
    let book = book(minor.chain([fatal]));
    let faults = book.faults("n1");
    let mut reports = Reports::default();
    reports.add("recovery", true, faults.iter().collect());
    let report = &reports.waiting[0];
    assert_eq!(report.faults.len(), MAX_REPORT_FAULTS);
    let fatal = faults.iter().find(|fault| fault.event.is_fatal).unwrap();
    assert!(report.faults.contains(&fatal.event.id));
}
