use contract::BehaviourOverrides;
use jiff::Timestamp;

use super::*;
use crate::event::{EventRecord, normalise};
use crate::fault::{FaultChange, Ignored};
use crate::reporter::{Process, Reporter};

/// Accepted events, and the book that recorded them.
#[derive(Default)]
struct Bench {
    log: Vec<EventRecord>,
    book: FaultBook,
}

impl Bench {
    fn report(
        &mut self,
        by: &Reporter,
        code: &str,
        edit: impl Fn(&mut HealthEvent),
    ) -> Vec<FaultChange> {
        let seq = self.log.len() as u64 + 1;
        let created_at = Timestamp::from_second(1_800_000_000 + seq.cast_signed()).unwrap();
        let mut event = HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "Check".into(),
            node_name: "n1".into(),
            is_fatal: true,
            error_code: vec![code.to_owned()],
            ..HealthEvent::default()
        };
        edit(&mut event);
        by.note_in(&mut event);
        normalise(&mut event, created_at);
        self.log.push(EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        });
        self.book.record(&self.log[self.log.len() - 1])
    }

    fn recover(&mut self, by: &Reporter, code: &str) -> Vec<FaultChange> {
        self.report(by, code, |event| {
            (event.is_healthy, event.is_fatal) = (true, false);
        })
    }

    /// Reads missed reports again if there is room for some. Returns the number of events read.
    fn read_again(&mut self) -> usize {
        let Some(mut again) = self.book.read_again("") else {
            return 0;
        };
        let after = again.read_up_to();
        let events = self.log.iter().filter(|record| record.seq > after);
        let read = events.map(|record| again.record(record)).count();
        assert_eq!(again.read_up_to(), self.book.applied());
        self.book.add_missed(again);
        read
    }

    fn has(&self, by: &Reporter, code: &str) -> bool {
        let is =
            |fault: &Fault| fault.code == code && reporter(&fault.event) == reporter(&noted(by));
        self.book.faults("n1").iter().any(is)
    }

    fn count(&self, by: &Reporter) -> usize {
        let of = |fault: &&Fault| reporter(&fault.event) == reporter(&noted(by));
        self.book.faults("n1").iter().filter(of).count()
    }
}

fn noted(by: &Reporter) -> HealthEvent {
    let mut event = HealthEvent::default();
    by.note_in(&mut event);
    event
}

fn user(uid: u32) -> Reporter {
    Reporter::User(Process { uid, pid: Some(77) })
}

fn large(size: usize) -> impl Fn(&mut HealthEvent) {
    move |event| {
        event.metadata.insert("text".into(), "x".repeat(size));
    }
}

fn skipped(event: &mut HealthEvent) {
    event.quarantine_overrides = Some(BehaviourOverrides {
        skip: true,
        force: false,
    });
}

#[test]
fn users_cannot_fill_the_room_of_the_monitors() {
    let edits: [fn(&mut HealthEvent); 3] = [skipped, |_| (), |event| event.is_fatal = false];
    for edit in edits {
        let mut bench = Bench::default();
        for code in 0..MAX_OPEN_FAULTS_PER_NODE + 76 {
            bench.report(&user(1000), &code.to_string(), edit);
        }
        assert_eq!(bench.count(&user(1000)), MAX_OPEN_FAULTS_PER_NODE);
        assert_eq!(bench.book.missed("n1"), 76);
        let changes = bench.report(&Reporter::Monitor, "79", |_| ());
        assert!(
            matches!(changes[..], [FaultChange::Opened(_)]),
            "{changes:?}"
        );
        assert_eq!(bench.count(&user(1000)), MAX_OPEN_FAULTS_PER_NODE);
    }
}

#[test]
fn who_has_many_makes_room_for_who_has_few_and_what_quarantines_nothing_goes_first() {
    let mut bench = Bench::default();
    for code in 0..MAX_OPEN_FAULTS_PER_NODE {
        let edit: fn(&mut HealthEvent) = if code == 7 { skipped } else { |_| () };
        bench.report(&user(1000), &code.to_string(), edit);
    }
    bench.report(&user(1001), "first", |_| ());
    assert!(bench.has(&user(1001), "first") && !bench.has(&user(1000), "7"));
    bench.report(&user(1001), "second", |_| ());
    assert!(bench.has(&user(1001), "second") && !bench.has(&user(1000), "0"));
    // The lightest report comes last.
    bench.report(&user(1002), "minor", |event| event.is_fatal = false);
    assert!(bench.has(&user(1002), "minor"));
    // Up to an equal number for both.
    for code in 0..MAX_OPEN_FAULTS_PER_NODE {
        bench.report(&user(1001), &code.to_string(), |_| ());
    }
    let half = MAX_OPEN_FAULTS_PER_NODE / 2;
    assert!(bench.count(&user(1000)).abs_diff(half) <= 1);
    assert!(bench.count(&user(1001)).abs_diff(half) <= 1);
}

#[test]
fn an_event_of_very_many_faults_opens_as_many_as_there_is_room_for() {
    let mut bench = Bench::default();
    let entities = (0..256).map(|gpu| contract::Entity {
        entity_type: "GPU".into(),
        entity_value: gpu.to_string(),
    });
    let entities: Vec<contract::Entity> = entities.collect();
    for _ in 0..2 {
        let changes = bench.report(&user(1000), "", |event| {
            event.error_code = (0..256).map(|code| code.to_string()).collect();
            event.entities_impacted.clone_from(&entities);
        });
        let refused = changes
            .iter()
            .filter(|change| **change == FaultChange::Ignored(Ignored::Overflow));
        assert_eq!(refused.count(), 1);
    }
    assert!(bench.count(&user(1000)) <= MAX_OPEN_FAULTS_PER_NODE);
    assert!(bench.count(&user(1000)) > 0);
}

#[test]
fn what_found_no_room_is_read_again_when_there_is_some() {
    let monitor = Reporter::Monitor;
    let mut bench = Bench::default();
    let over = MAX_OPEN_FAULTS_PER_NODE + 20;
    for code in 0..over {
        bench.report(&monitor, &code.to_string(), |_| ());
    }
    assert_eq!(bench.book.missed("n1"), 20);
    assert_eq!(bench.read_again(), 0, "there is no room");
    // Recovers while it is not in the book.
    let healed = (over - 1).to_string();
    let changes = bench.recover(&monitor, &healed);
    assert_eq!(changes, [FaultChange::Ignored(Ignored::NothingToClose)]);
    let half = MAX_OPEN_FAULTS_PER_NODE / 2;
    for code in 0..half {
        bench.recover(&monitor, &code.to_string());
    }
    let share = serde_json::to_string(&bench.book.share("n1")).unwrap();
    bench
        .book
        .restore("n1", serde_json::from_str(&share).unwrap());
    assert!(bench.read_again() > 0);
    assert_eq!(bench.book.missed("n1"), 0);
    assert_eq!(bench.read_again(), 0);
    let open: BTreeSet<String> = (bench.book.faults("n1").iter())
        .map(|fault| fault.code.clone())
        .collect();
    let expected = (half..over - 1).map(|code| code.to_string()).collect();
    assert_eq!(open, expected);
}

#[test]
fn what_had_to_go_is_read_again_too() {
    let mut bench = Bench::default();
    for code in 0..MAX_OPEN_FAULTS_PER_NODE {
        bench.report(&user(1000), &code.to_string(), |event| {
            event.is_fatal = false;
        });
    }
    bench.report(&user(1001), "fatal", |_| ());
    assert!(!bench.has(&user(1000), "0") && bench.book.missed("n1") == 1);
    for code in 500..MAX_OPEN_FAULTS_PER_NODE {
        bench.recover(&user(1001), &code.to_string());
    }
    assert!(bench.read_again() > 0);
    assert!(bench.has(&user(1000), "0") && bench.has(&user(1001), "fatal"));
    assert_eq!(bench.count(&user(1000)), 500);
}

/// Otherwise faults that open and close would keep earlier missed ones out for ever.
#[test]
fn reading_again_gets_further_each_time() {
    let monitor = Reporter::Monitor;
    let mut bench = Bench::default();
    let over = 3 * MAX_OPEN_FAULTS_PER_NODE;
    for code in 0..over {
        bench.report(&monitor, &code.to_string(), |_| ());
    }
    for code in (0..over).filter(|code| code % 300 != 0) {
        bench.recover(&monitor, &code.to_string());
    }
    let mut turns = 0;
    while bench.read_again() > 0 {
        turns += 1;
    }
    assert_eq!(turns, 2);
    assert_eq!(bench.book.missed("n1"), 0);
    assert_eq!(bench.count(&monitor), over.div_ceil(300));
}

#[test]
fn what_does_not_fit_is_not_read_again_all_the_time_and_monitors_come_first() {
    let mut bench = Bench::default();
    let half = MAX_FAULT_BYTES_PER_NODE / 2 + 1_000;
    bench.report(&user(1000), "big 1", large(half));
    bench.report(&user(1000), "big 2", large(half));
    assert_eq!(bench.book.missed("n1"), 1);
    assert!(bench.book.read_again("").is_none());
    for code in 0..=MAX_OPEN_FAULTS_PER_NODE {
        bench.report(&Reporter::Monitor, &code.to_string(), |_| ());
    }
    assert_eq!(
        bench.book.missed_from(),
        Some((bench.log.len() as u64).into())
    );
    for code in 0..MAX_OPEN_FAULTS_PER_NODE / 2 {
        bench.recover(&Reporter::Monitor, &code.to_string());
    }
    bench.recover(&user(1000), "big 1");
    let next = bench.book.read_again("n1").unwrap();
    assert_eq!(next.authority, Authority::Trusted);
    while bench.read_again() > 0 {}
    assert_eq!(
        (bench.book.missed("n1"), bench.book.missed_from()),
        (0, None)
    );
    assert!(bench.has(&user(1000), "big 2"));
}

#[test]
fn what_has_to_go_while_it_is_read_again_is_not_forgotten() {
    let monitor = Reporter::Monitor;
    let mut bench = Bench::default();
    bench.report(&monitor, "oldest", |event| event.is_fatal = false);
    for code in 0..MAX_OPEN_FAULTS_PER_NODE {
        bench.report(&monitor, &code.to_string(), |event| event.is_fatal = false);
    }
    for code in 0..MAX_OPEN_FAULTS_PER_NODE / 2 {
        bench.recover(&monitor, &code.to_string());
    }
    let mut again = bench.book.read_again("").unwrap();
    for code in 0..MAX_OPEN_FAULTS_PER_NODE {
        bench.report(&monitor, &format!("fatal {code}"), |_| ());
    }
    assert!(!bench.has(&monitor, "oldest"));
    let after = again.read_up_to();
    for record in bench.log.iter().filter(|record| record.seq > after) {
        again.record(record);
    }
    bench.book.add_missed(again);
    for code in 0..MAX_OPEN_FAULTS_PER_NODE {
        bench.recover(&monitor, &format!("fatal {code}"));
    }
    while bench.read_again() > 0 {}
    assert!(bench.has(&monitor, "oldest"));
}

/// A report that arrived late opens nothing, even when it is read again.
#[test]
fn what_a_recovery_has_closed_stays_closed_when_it_is_read_again() {
    let monitor = Reporter::Monitor;
    let mut bench = Bench::default();
    bench.report(&monitor, "healed", |_| ());
    bench.recover(&monitor, "healed");
    for code in ["1", "2", "3", "4"] {
        bench.report(&monitor, code, large(MAX_FAULT_BYTES_PER_NODE / 4));
    }
    // A count of reports from before the recovery.
    let count = |event: &mut HealthEvent| {
        event.metadata.insert(keys::META_COUNT.into(), "2".into());
    };
    bench.report(&monitor, "healed", count);
    let late = bench.log.len() - 1;
    bench.log[late].created_at = bench.log[0].created_at;
    let mut book = FaultBook::default();
    for record in &bench.log {
        book.record(record);
    }
    bench.book = book;
    for code in ["1", "2"] {
        bench.recover(&monitor, code);
    }
    assert!(bench.read_again() > 0);
    assert!(bench.has(&monitor, "4") && !bench.has(&monitor, "healed"));
}
