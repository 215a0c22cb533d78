//! Reports from before a recovery that arrive after it, and times in the future.

use super::*;
use crate::fault::MAX_CLOSED_PER_NODE;

type Edit = fn(&mut HealthEvent);

fn counted(event: &mut HealthEvent) {
    for (key, value) in [
        (keys::META_COUNT, "3"),
        (keys::META_FIRST_SEEN, "2027-01-15T08:00:00Z"),
        (keys::META_LAST_SEEN, "2027-01-15T08:00:00Z"),
    ] {
        event.metadata.insert(key.into(), value.into());
    }
}

/// An agent counts for a minute, and an event may wait in its outbox for an hour.
#[test]
fn what_was_accepted_before_a_recovery_and_comes_after_it_opens_nothing() {
    let before = [FaultChange::Ignored(Ignored::BeforeRecovery)];
    let opens = |changes: &[FaultChange]| matches!(changes, [FaultChange::Opened(_)]);
    let book = || {
        let mut book = FaultBook::default();
        book.record(&accepted(record(1, |_| ()), 0));
        book.record(&accepted(healthy(2, |_| ()), 100));
        // As after a restart.
        let share = serde_json::to_string(&book.share("n1")).unwrap();
        let mut restored = FaultBook::since(2.into());
        restored.restore("n1", serde_json::from_str(&share).unwrap());
        restored
    };
    let count = |second| accepted(record(3, counted), second);
    let plain = |second| accepted(record(3, |_| ()), second);
    for (report, late) in [
        (count(1), true),
        (count(99), true),
        // The order of the feed decides.
        (count(100), false),
        (count(101), false),
        (plain(1), true),
        (plain(89), true),
        // Two requests of an agent may differ this much in their delay.
        (plain(90), false),
        (plain(101), false),
        // A day apart: no fault is hidden, whatever the clocks were.
        (count(100 - 24 * 60 * 60), true),
        (count(99 - 24 * 60 * 60), false),
    ] {
        let mut book = book();
        let changes = book.record(&report);
        assert_eq!(changes == before, late, "{changes:?} {}", report.created_at);
        assert_eq!(opens(&changes), !late);
        assert_eq!(book.nodes().count(), usize::from(!late));
    }
    // A late report does not change a fault that opened since, and does not concern other
    // faults.
    let mut book = book();
    book.record(&accepted(record(3, |event| event.is_fatal = false), 200));
    assert_eq!(book.record(&accepted(record(4, |_| ()), 50)), before);
    assert!(!book.faults("n1")[0].event.is_fatal);
    let others: [Edit; 5] = [
        |event| event.error_code = vec!["48".into()],
        |event| event.check_name = "SysLogsSXIDError".into(),
        |event| event.agent = "a".into(),
        |event| event.entities_impacted = vec![entity("PCI", "0000:b4:00")],
        |event| event.node_name = "n2".into(),
    ];
    for (seq, other) in (5..).zip(others) {
        assert!(opens(&book.record(&accepted(record(seq, other), 50))));
    }
}

#[test]
fn what_is_found_in_a_new_boot_or_on_a_new_machine_is_not_from_before() {
    let boot = |event: &mut HealthEvent, id: &str| {
        event.metadata.insert(keys::META_BOOT_ID.into(), id.into());
    };
    let mut book = FaultBook::default();
    book.record(&accepted(record(1, |event| boot(event, "old")), 0));
    let reboot = healthy(2, |event| {
        boot(event, "new");
        event
            .metadata
            .insert(keys::META_REBOOT.into(), "true".into());
    });
    book.record(&accepted(reboot, 100));
    assert!(book.faults("n1").is_empty());
    // The clock was wrong until the network came up.
    let late = accepted(record(3, |event| boot(event, "old")), 50);
    let ignored = [FaultChange::Ignored(Ignored::BeforeRecovery)];
    assert_eq!(book.record(&late), ignored);
    book.record(&accepted(record(4, |event| boot(event, "new")), 50));
    assert_eq!(book.faults("n1").len(), 1);

    let mut book = FaultBook::default();
    book.record(&accepted(record(1, |_| ()), 0));
    let gone = healthy(2, |event| {
        let after = Timestamp::from_second(1_800_000_000).unwrap().to_string();
        event.metadata.insert(keys::META_GONE_AFTER.into(), after);
    });
    book.record(&accepted(gone, 500));
    assert!(book.faults("n1").is_empty());
    book.record(&accepted(record(3, |_| ()), 50));
    assert_eq!(book.faults("n1").len(), 1);
}

#[test]
fn of_a_node_so_many_closed_faults_are_remembered_the_newest() {
    let gpu = |index: usize| {
        move |event: &mut HealthEvent| {
            event.entities_impacted = vec![entity("GPU", &index.to_string())];
        }
    };
    let mut book = FaultBook::default();
    let mut seq = 0;
    for index in 0..=MAX_CLOSED_PER_NODE {
        // A fault that is closed twice is remembered once.
        for _ in 0..2 {
            book.record(&accepted(record(seq + 1, gpu(index)), 0));
            book.record(&accepted(healthy(seq + 2, gpu(index)), 100));
            seq += 2;
        }
    }
    for (index, opens) in [(1, false), (MAX_CLOSED_PER_NODE, false), (0, true)] {
        seq += 1;
        book.record(&accepted(record(seq, gpu(index)), 50));
        assert_eq!(book.nodes().count(), usize::from(opens), "{index}");
    }
}

/// An event taken over from a node carries its own time, which anybody may have written.
#[test]
fn no_time_in_the_future_keeps_a_fault_open() {
    let generated_at = |mut record: EventRecord, time: &str| {
        let time: Timestamp = time.parse().unwrap();
        record.event.generated_timestamp = Some(json::proto_timestamp(time));
        record
    };
    let mut book = FaultBook::default();
    let taken_over = record(1, |event| {
        let now = Timestamp::from_second(1_800_000_001).unwrap().to_string();
        event.metadata.insert(keys::META_TAKEN_OVER.into(), now);
    });
    book.record(&generated_at(taken_over, "9998-01-01T00:00:00Z"));
    let fault = &book.faults("n1")[0];
    assert!(fault.first_seen <= fault.accepted_at && fault.last_seen <= fault.accepted_at);
    book.record(&generated_at(healthy(2, |_| ()), "2027-01-15T08:00:02Z"));
    assert!(book.faults("n1").is_empty());
}
