use contract::Entity;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::*;
use crate::event::normalise;
use crate::fault::causes::tests::saved;
use crate::reporter::{Process, Reporter};

mod bounds;
mod closed;

fn record(seq: u64, edit: impl FnOnce(&mut HealthEvent)) -> EventRecord {
    let created_at = Timestamp::from_second(1_800_000_000 + i64::try_from(seq).unwrap()).unwrap();
    let mut event = HealthEvent {
        version: 1,
        agent: "syslog-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "SysLogsXIDError".into(),
        node_name: "n1".into(),
        is_fatal: true,
        error_code: vec!["79".into()],
        entities_impacted: vec![entity("PCI", "0000:b3:00")],
        recommended_action: 24,
        ..HealthEvent::default()
    };
    edit(&mut event);
    normalise(&mut event, created_at);
    EventRecord {
        seq: seq.into(),
        id: event.id.clone(),
        created_at,
        event,
    }
}

/// Returns the record, accepted `second` seconds after the epoch of these tests.
fn accepted(mut record: EventRecord, second: i64) -> EventRecord {
    record.created_at = Timestamp::from_second(1_800_000_000 + second).unwrap();
    record
}

fn entity(kind: &str, value: &str) -> Entity {
    Entity {
        entity_type: kind.into(),
        entity_value: value.into(),
    }
}

fn healthy(seq: u64, edit: impl FnOnce(&mut HealthEvent)) -> EventRecord {
    record(seq, |event| {
        event.is_healthy = true;
        event.is_fatal = false;
        event.error_code.clear();
        event.recommended_action = 0;
        edit(event);
    })
}

fn by(reporter: Reporter) -> impl Fn(&mut HealthEvent) {
    move |event| reporter.note_in(event)
}

fn user(uid: u32) -> Reporter {
    let pid = i32::try_from(uid).ok();
    Reporter::User(Process { uid, pid })
}

#[test]
fn a_report_closes_only_what_its_own_authority_or_a_lower_one_opened() {
    let operator = Reporter::Operator(Process { uid: 0, pid: None });
    let trusted = [
        Reporter::Monitor,
        operator,
        Reporter::Node,
        Reporter::Central("cloud".into()),
    ];
    for opens in trusted.iter().cloned().chain([user(1000)]) {
        for closes in trusted.iter().cloned().chain([user(1001)]) {
            let may = trusted.contains(&closes) || !trusted.contains(&opens);
            let mut book = FaultBook::default();
            book.record(&record(1, by(opens.clone())));
            let recovery = record(2, by(closes.clone()));
            assert_eq!(
                book.touched_by(&healthy(2, by(closes.clone())).event).len(),
                usize::from(may)
            );
            // A second report is the same fault if both reporters have the same authority.
            let same = trusted.contains(&closes) == trusted.contains(&opens);
            book.record(&recovery);
            assert_eq!(book.faults("n1").len(), if same { 1 } else { 2 });
            let changes = book.record(&healthy(3, by(closes.clone())));
            let left = usize::from(!may);
            assert_eq!(book.faults("n1").len(), left, "{opens:?} {closes:?}");
            assert!(matches!(changes[0], FaultChange::Closed(_)), "{changes:?}");
            let changes = book.record(&healthy(4, by(closes.clone())));
            let expected = if may {
                Ignored::NothingToClose
            } else {
                Ignored::LacksAuthority
            };
            assert_eq!(changes, [FaultChange::Ignored(expected)]);
        }
    }
}

#[test]
fn a_fault_opens_is_refreshed_and_closes() {
    let mut book = FaultBook::default();
    let title = "SysLogsXIDError 79 on PCI 0000:b3:00".to_owned();
    assert_eq!(
        book.record(&record(1, |_| ())),
        [FaultChange::Opened(title.clone())]
    );
    assert_eq!(
        book.record(&record(2, |_| ())),
        [FaultChange::Refreshed(title.clone())]
    );
    let fault = &book.faults("n1")[0];
    assert_eq!((fault.count, fault.first_seen < fault.last_seen), (2, true));
    assert_eq!(
        book.record(&healthy(3, |_| ())),
        [FaultChange::Closed(title)]
    );
    assert_eq!(book.nodes().count(), 0);
    assert_eq!(
        book.record(&healthy(4, |_| ())),
        [FaultChange::Ignored(Ignored::NothingToClose)]
    );
}

#[test]
fn a_book_begins_behind_what_is_history() {
    let mut book = FaultBook::since(7.into());
    assert_eq!(book.applied(), 7.into());
    let old = book.record(&record(7, |_| ()));
    assert_eq!(old, [FaultChange::Ignored(Ignored::AlreadyRecorded)]);
    assert_eq!(book.nodes().count(), 0);
    book.record(&record(8, |_| ()));
    assert_eq!(book.faults("n1").len(), 1);
}

/// A new leader takes a fault over from the node before the node's agent has sent the earlier
/// events again.
#[test]
fn what_was_taken_over_is_not_closed_by_a_recovery_from_before_it() {
    let at = |mut record: EventRecord, second: i64| {
        record.event.generated_timestamp = Some(prost_types::Timestamp {
            seconds: 1_800_000_000 + second,
            nanos: 0,
        });
        record
    };
    let mut book = FaultBook::since(10.into());
    let taken_over = record(11, |event| {
        let now = Timestamp::from_second(1_800_000_400).unwrap().to_string();
        let mark = (keys::META_TAKEN_OVER.to_owned(), now);
        event.metadata.extend([mark]);
    });
    book.record(&at(taken_over, 300));
    // The fault's earlier event, with another action, and its recovery.
    let earlier = record(12, |event| event.recommended_action = 15);
    book.record(&at(earlier, 100));
    book.record(&at(healthy(13, |_| ()), 200));
    let open = book.faults("n1");
    assert_eq!(open.len(), 1);
    assert_eq!(open[0].event.recommended_action, 24);
    book.record(&at(healthy(14, |_| ()), 300));
    assert_eq!(book.nodes().count(), 0);
    // Times are not compared for events that arrive in order: a clock may have been set back.
    book.record(&at(record(15, |_| ()), 300));
    book.record(&at(healthy(16, |_| ()), 100));
    assert_eq!(book.nodes().count(), 0);
}

/// NVSentinel sorts a batch by the senders' times, with an unstable sort.
#[test]
fn of_one_time_the_order_of_the_feed_counts() {
    let at = |mut record: EventRecord, second: i64| {
        record.event.generated_timestamp = Some(prost_types::Timestamp {
            seconds: second,
            nanos: 0,
        });
        record
    };
    let (fault, well) = (|seq| record(seq, |_| ()), |seq| healthy(seq, |_| ()));
    for (faulty, healed) in [(5, 5), (9, 1)] {
        let mut book = FaultBook::default();
        book.record(&at(fault(1), faulty));
        book.record(&at(well(2), healed));
        assert!(book.faults("n1").is_empty(), "{faulty} {healed}");
        book.record(&at(fault(3), healed));
        assert_eq!(book.faults("n1").len(), 1, "{faulty} {healed}");
    }
}

#[test]
fn an_event_takes_effect_once_however_often_it_is_delivered() {
    let mut book = FaultBook::default();
    let first = record(1, |_| ());
    book.record(&first);
    book.record(&healthy(2, |_| ()));
    assert_eq!(
        book.record(&first),
        [FaultChange::Ignored(Ignored::AlreadyRecorded)]
    );
    assert!(book.faults("n1").is_empty());
}

#[test]
fn faults_close_per_entity_and_code() {
    let mut book = FaultBook::default();
    book.record(&record(1, |event| {
        event.entities_impacted = vec![entity("GPU", "0"), entity("GPU", "1")];
        event.error_code = vec!["48".into(), "95".into()];
    }));
    assert_eq!(book.faults("n1").len(), 4);
    book.record(&healthy(2, |event| {
        event.entities_impacted = vec![entity("GPU", "0")];
        event.error_code = vec!["48".into()];
    }));
    assert_eq!(book.faults("n1").len(), 3);
    book.record(&healthy(3, |event| {
        event.entities_impacted = vec![entity("GPU", "0")];
    }));
    assert_eq!(book.faults("n1").len(), 2);
    book.record(&healthy(4, |event| event.entities_impacted.clear()));
    assert!(book.faults("n1").is_empty());
}

#[test]
fn another_agent_check_or_node_does_not_close() {
    let mut book = FaultBook::default();
    book.record(&record(1, |_| ()));
    book.record(&healthy(2, |event| {
        event.agent = "gpu-health-monitor".into();
    }));
    book.record(&healthy(3, |event| {
        event.check_name = "SysLogsSXIDError".into();
    }));
    book.record(&healthy(4, |event| event.node_name = "n2".into()));
    assert_eq!(book.faults("n1").len(), 1);
    // The component class is not part of the identity (a known defect in the recovery of a NIC
    // monitor).
    book.record(&healthy(5, |event| event.component_class = "NIC".into()));
    assert!(book.faults("n1").is_empty());
}

#[test]
fn a_fault_only_gets_graver_until_it_closes() {
    let mut book = FaultBook::default();
    book.record(&record(1, |event| event.is_fatal = false));
    let changes = book.record(&record(2, |event| event.message = "worse".into()));
    assert!(matches!(changes.as_slice(), [FaultChange::Escalated(_)]));
    book.record(&record(3, |event| event.is_fatal = false));
    let fault = &book.faults("n1")[0];
    assert_eq!(
        (
            fault.event.is_fatal,
            fault.event.message.as_str(),
            fault.count
        ),
        (true, "worse", 3)
    );
    // An event of equal gravity with another action replaces the first.
    book.record(&record(4, |event| event.recommended_action = 25));
    assert_eq!(book.faults("n1")[0].event.recommended_action, 25);
}

#[test]
fn a_second_name_of_the_device_is_learned() {
    let mut book = FaultBook::default();
    book.record(&record(1, |_| ()));
    book.record(&record(2, |event| {
        event.entities_impacted.push(entity("GPU_UUID", "GPU-1"));
    }));
    assert_eq!(book.faults("n1").len(), 1);
    book.record(&healthy(3, |event| {
        event.entities_impacted = vec![entity("GPU_UUID", "GPU-1")];
    }));
    assert!(book.faults("n1").is_empty());
}

#[test]
fn stored_only_and_earlier_events_open_nothing() {
    let mut book = FaultBook::default();
    for (seq, strategy) in [(1, 2), (2, 3)] {
        let changes = book.record(&record(seq, |event| event.processing_strategy = strategy));
        assert_eq!(changes, [FaultChange::Ignored(Ignored::Strategy)]);
    }
    // The event has both marks; the reported reason is its age.
    let changes = book.record(&record(3, |event| {
        event.processing_strategy = 2;
        event
            .metadata
            .insert(keys::META_EARLIER_IN_BOOT.into(), "true".into());
    }));
    assert_eq!(changes, [FaultChange::Ignored(Ignored::EarlierInBoot)]);
    assert!(book.faults("n1").is_empty());
    // An unknown strategy counts as the default one: it must not hide a fault.
    book.record(&record(4, |event| event.processing_strategy = 42));
    assert_eq!(book.faults("n1").len(), 1);
}

#[test]
fn a_book_is_the_sum_of_its_shares() {
    let mut book = FaultBook::default();
    book.record(&record(1, |_| ()));
    book.record(&record(2, |event| event.error_code = vec!["48".into()]));
    book.record(&healthy(3, |event| event.node_name = "well".into()));
    let mut back = FaultBook::default();
    for node in ["n1", "well"] {
        let share = serde_json::to_string(&book.share(node)).unwrap();
        back.restore(node, serde_json::from_str(&share).unwrap());
    }
    assert_eq!(
        (back.faults("n1"), back.reported_checks("well").count()),
        (book.faults("n1"), 1)
    );
    assert!(book.share("unheard of").is_empty() && !book.share("well").is_empty());
}

/// Generates events over few names, so that they often concern the same fault.
fn any_record() -> impl Strategy<Value = (bool, bool, Vec<u8>, Vec<u8>, u8)> {
    let few = || proptest::collection::vec(0_u8..3, 0..3);
    (any::<bool>(), any::<bool>(), few(), few(), 0_u8..2)
}

fn build(
    seq: u64,
    (healthy, fatal, gpus, codes, node): &(bool, bool, Vec<u8>, Vec<u8>, u8),
) -> EventRecord {
    record(seq, |event| {
        event.is_healthy = *healthy;
        event.is_fatal = *fatal && !*healthy;
        event.node_name = format!("n{node}");
        event.entities_impacted = gpus
            .iter()
            .map(|gpu| entity("GPU", &gpu.to_string()))
            .collect();
        event.error_code = codes.iter().map(ToString::to_string).collect();
    })
}

proptest! {
    #[test]
    fn redelivery_and_restart_change_nothing(
        events in proptest::collection::vec(any_record(), 1..40),
        again in proptest::collection::vec(0_usize..40, 0..20),
        restart_at in 0_usize..40,
    ) {
        let records: Vec<_> = (1_u64..).zip(&events).map(|(seq, event)| build(seq, event)).collect();
        let mut plain = FaultBook::default();
        for record in &records {
            plain.record(record);
        }
        let mut disturbed = FaultBook::default();
        for (index, record) in records.iter().enumerate() {
            disturbed.record(record);
            for earlier in again.iter().filter(|earlier| **earlier <= index) {
                disturbed.record(&records[*earlier]);
            }
            if index == restart_at {
                disturbed = saved(&disturbed);
            }
        }
        prop_assert_eq!(plain, disturbed);
    }

    #[test]
    fn a_healthy_event_without_entities_and_codes_closes_all_of_its_check(
        events in proptest::collection::vec(any_record(), 1..40),
    ) {
        let mut book = FaultBook::default();
        let mut seq = 0;
        for event in &events {
            seq += 1;
            book.record(&build(seq, event));
        }
        for node in ["n0", "n1"] {
            seq += 1;
            book.record(&healthy(seq, |event| {
                event.node_name = node.into();
                event.entities_impacted.clear();
            }));
        }
        prop_assert_eq!(book.nodes().count(), 0);
    }
}

#[test]
fn an_event_that_stands_for_many_reports_counts_for_them() {
    let mut book = FaultBook::default();
    book.record(&record(1, |_| ()));
    let many = record(2, |event| {
        for (key, value) in [
            (keys::META_COUNT, "812"),
            (keys::META_FIRST_SEEN, "2027-01-15T08:00:02Z"),
            (keys::META_LAST_SEEN, "2027-01-15T08:00:59Z"),
        ] {
            event.metadata.insert(key.into(), value.into());
        }
    });
    book.record(&accepted(many, 60));
    let fault = &book.faults("n1")[0];
    assert_eq!(fault.count, 813);
    assert_eq!(fault.last_seen.to_string(), "2027-01-15T08:00:59Z");
}

#[test]
fn a_reboot_closes_what_it_mends_and_only_that() {
    // All actions of the contract, and an unknown number.
    let table = [
        (0, true),
        (2, true),
        (5, false),
        (6, false),
        (15, true),
        (24, true),
        (25, false),
        (26, false),
        (27, false),
        (99, true),
        (77, false),
    ];
    for (action, mended) in table {
        let mut book = FaultBook::default();
        book.record(&record(1, |event| event.recommended_action = action));
        book.record(&record(2, |event| {
            event.recommended_action = action;
            event.entities_impacted = vec![entity("PCI", "0000:b4:00")];
            event
                .metadata
                .insert(keys::META_BOOT_ID.into(), "new".into());
        }));
        let reboot = healthy(3, |event| {
            event.entities_impacted.clear();
            event
                .metadata
                .insert(keys::META_BOOT_ID.into(), "new".into());
            event
                .metadata
                .insert(keys::META_REBOOT.into(), "true".into());
        });
        book.record(&reboot);
        let left: Vec<String> = book.faults("n1").iter().map(Fault::title).collect();
        let of_new_boot = "SysLogsXIDError 79 on PCI 0000:b4:00".to_owned();
        assert!(left.contains(&of_new_boot), "action {action}: {left:?}");
        assert_eq!(left.len() == 1, mended, "action {action}: {left:?}");
    }
}

/// Otherwise the node would return to service, since nothing asks for its quarantine.
#[test]
fn a_milder_report_that_asks_for_something_else_does_not_take_the_fatal_one_s_place() {
    let mut book = FaultBook::default();
    book.record(&record(1, |event| event.message = "fatal".into()));
    let milder = record(2, |event| {
        event.is_fatal = false;
        event.recommended_action = RecommendedAction::None as i32;
        event.quarantine_overrides = Some(contract::BehaviourOverrides {
            force: false,
            skip: true,
        });
    });
    assert!(matches!(
        book.record(&milder).as_slice(),
        [FaultChange::Refreshed(_)]
    ));
    let fault = &book.faults("n1")[0];
    assert!(fault.event.is_fatal && fault.event.quarantine_overrides.is_none());
    assert_eq!((fault.event.recommended_action, fault.count), (24, 2));
}

#[test]
fn old_notices_are_forgotten_but_for_those_that_something_is_done_about() {
    let mut book = FaultBook::default();
    let notice = |event: &mut HealthEvent| {
        event.is_fatal = false;
        event.recommended_action = 0;
    };
    let first = record(1, notice);
    book.record(&first);
    book.record(&record(2, |event| {
        notice(event);
        event.error_code = vec!["31".into()];
    }));
    book.record(&record(3, |event| event.error_code = vec!["48".into()]));
    let day = crate::fault::NOTICE_SHOWN;
    assert!(!book.forget_notices(
        "n1",
        first.created_at + day - SignedDuration::from_secs(1),
        |_| false
    ));
    assert!(book.forget_notices("n1", first.created_at + day * 2, |id| id == first.id));
    let codes: Vec<&str> = (book.faults("n1").iter())
        .map(|fault| fault.code.as_str())
        .collect();
    assert_eq!(codes, ["79", "48"]);
    assert!(!book.forget_notices("n2", first.created_at, |_| false));
}
