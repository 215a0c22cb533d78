mod marks;
mod rma;

use contract::{Entity, ProcessingStrategy, RecommendedAction, json};
use model::event::normalise;
use proptest::prelude::*;

use super::*;

const HOUR: i64 = 3_600;
const DAY: i64 = 24 * HOUR;
/// Some time in 2027.
const BEGIN: i64 = 1_800_000_000;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(BEGIN + second).unwrap()
}

/// Returns a fatal fault of XID 79, reported by the node's agent.
fn fault(node: &str, serial: &str, uuid: &str, slot: &str, second: i64) -> EventRecord {
    let entity = |kind: &str, value: &str| Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    };
    let entities = [(keys::ENTITY_PCI, slot), (keys::ENTITY_GPU_UUID, uuid)];
    let entities = entities.into_iter().filter(|(_, value)| !value.is_empty());
    let event = HealthEvent {
        agent: keys::SYSLOG_AGENT.to_owned(),
        check_name: keys::CHECK_XID.to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        error_code: vec!["79".to_owned()],
        is_fatal: true,
        recommended_action: RecommendedAction::RestartBm as i32,
        entities_impacted: entities.map(|(kind, value)| entity(kind, value)).collect(),
        metadata: [
            (keys::META_GPU_SERIAL.to_owned(), serial.to_owned()),
            (keys::META_REPORTED_BY.to_owned(), "node".to_owned()),
        ]
        .into(),
        node_name: node.to_owned(),
        ..HealthEvent::default()
    };
    accepted(event, at(second))
}

/// Returns the healthy event that names a GPU in its slot.
fn inventory(node: &str, serial: &str, slot: &str, second: i64) -> EventRecord {
    let named = fault(node, serial, &format!("GPU-of-{serial}"), slot, second);
    let event = HealthEvent {
        check_name: keys::CHECK_GPU_INVENTORY.to_owned(),
        is_healthy: true,
        is_fatal: false,
        error_code: Vec::new(),
        processing_strategy: ProcessingStrategy::StoreOnly as i32,
        ..named.event
    };
    accepted(event, at(second))
}

fn mark(serial: &str, kind: MarkKind, second: i64) -> EventRecord {
    let metadata = [
        (keys::META_GPU_SERIAL, serial),
        (keys::META_LEDGER_MARK, kind.name()),
        (keys::META_LEDGER_BY, "alice"),
        (keys::META_REPORTED_BY, "operator uid=0 pid=7"),
    ];
    let event = HealthEvent {
        agent: "gpuwarden-cli".to_owned(),
        check_name: keys::CHECK_LEDGER_MARK.to_owned(),
        message: "it burns".to_owned(),
        metadata: metadata
            .map(|(key, value)| (key.into(), value.into()))
            .into(),
        node_name: "desk".to_owned(),
        ..HealthEvent::default()
    };
    accepted(event, at(second))
}

fn accepted(mut event: HealthEvent, at: Timestamp) -> EventRecord {
    event.generated_timestamp = event
        .generated_timestamp
        .or(Some(json::proto_timestamp(at)));
    normalise(&mut event, at);
    EventRecord {
        seq: 1.into(),
        id: event.id.clone(),
        created_at: at,
        event,
    }
}

fn ledger<'a>(records: impl IntoIterator<Item = &'a EventRecord>) -> Ledger {
    let mut ledger = Ledger::default();
    records.into_iter().for_each(|record| ledger.record(record));
    ledger
}

/// Returns node, slot, and the seconds of first and last sighting of each place.
fn places<'a>(ledger: &'a Ledger, gpu: &str) -> Vec<(&'a str, &'a str, i64, i64)> {
    let (_, row) = ledger.gpu(gpu).unwrap();
    let place = |place: &'a Place| {
        let second = |at: Timestamp| at.as_second() - BEGIN;
        let (from, to) = (second(place.from), second(place.to));
        (place.node.as_str(), place.slot.as_str(), from, to)
    };
    row.places.iter().map(place).collect()
}

/// Sends the events that are due into the feed at a time. Returns node and health of each.
fn settle(ledger: &mut Ledger, second: i64) -> Vec<(String, bool)> {
    let due = ledger.due();
    let said = due
        .iter()
        .map(|event| (event.node_name.clone(), event.is_healthy));
    let said = said.collect();
    for mut event in due {
        model::reporter::Reporter::Monitor.note_in(&mut event);
        ledger.record(&accepted(event, at(second)));
    }
    assert_eq!(ledger.due(), [], "what is recorded is due no longer");
    said
}

#[test]
fn a_gpu_that_moves_keeps_its_row() {
    let records = [
        fault("a", "17", "GPU-1", "0000:3b:00.0", 0),
        fault("a", "17", "GPU-1", "0000:3b:00", HOUR),
        fault("b", "17", "GPU-1", "0000:5e:00", 3 * DAY),
        fault("b", "17", "GPU-1", "0000:5e:00", 4 * DAY),
        fault("a", "17", "GPU-1", "0000:3b:00", 9 * DAY),
    ];
    let ledger = ledger(&records);
    let expected = [
        ("a", "0000:3b:00", 0, HOUR),
        ("b", "0000:5e:00", 3 * DAY, 4 * DAY),
        ("a", "0000:3b:00", 9 * DAY, 9 * DAY),
    ];
    assert_eq!(places(&ledger, "17"), expected);
    assert_eq!(places(&ledger, "GPU-1"), expected, "found by its UUID, too");
    let (_, row) = ledger.gpu("17").unwrap();
    assert_eq!(row.on_two_nodes(), None);
    assert_eq!(
        row.history.faults.len(),
        4,
        "two reports within an hour are one fault"
    );
    assert_eq!(ledger.node("a").unwrap().history.faults.len(), 2);
}

#[test]
fn the_row_of_a_uuid_becomes_that_of_its_serial_number() {
    let records = [
        fault("a", "", "GPU-1", "0000:3b:00", 0),
        fault("a", "17", "GPU-1", "0000:3b:00", 2 * HOUR),
        fault("a", "", "GPU-1", "0000:3b:00", 4 * HOUR),
    ];
    for order in [[0, 1, 2], [1, 0, 2], [2, 0, 1]] {
        let ledger = ledger(order.map(|index| &records[index]));
        let keys: Vec<&str> = ledger.gpus().map(|(key, _)| key).collect();
        assert_eq!(keys, ["17"], "{order:?}");
        assert_eq!(places(&ledger, "GPU-1"), [("a", "0000:3b:00", 0, 4 * HOUR)]);
        assert_eq!(ledger.gpu("17").unwrap().1.history.faults.len(), 3);
        assert_eq!(
            ledger.part("g:GPU-1").unwrap(),
            b"",
            "the old part is deleted"
        );
    }
}

#[test]
fn a_placeholder_is_no_name() {
    for name in [
        "",
        " ",
        "0",
        "000000",
        "N/A",
        "[N/A]",
        "n/a",
        "Unknown",
        "[Unknown Error]",
        "None",
        "GPU-00000000-0000-0000-0000-000000000000",
        "0x0",
        "ffffffff",
        "Not Specified",
        "a\tb",
    ] {
        assert_eq!(real_name(name), None, "{name:?}");
        assert_eq!(
            ledger(&[fault("a", name, name, "", 0)]).gpus().count(),
            0,
            "{name:?}"
        );
    }
    for name in [
        "1320221000042",
        " 17 ",
        "0001",
        "GPU-00000000-0000-0000-0000-000000000001",
        "F",
    ] {
        assert_eq!(real_name(name).as_deref(), Some(name.trim()));
    }
    // The partition of a GPU is not the GPU.
    assert_eq!(ledger(&[fault("a", "", "MIG-1", "", 0)]).gpus().count(), 0);
}

#[test]
fn only_monitors_and_operators_count() {
    let reporters = [
        ("user uid=1000", 0),
        ("pod a/b", 0),
        ("", 0),
        ("node", 1),
        ("monitor", 1),
    ];
    for (reporter, rows) in reporters {
        let mut record = fault("a", "17", "", "", 0);
        let by = record
            .event
            .metadata
            .get_mut(keys::META_REPORTED_BY)
            .unwrap();
        *by = reporter.to_owned();
        assert_eq!(ledger(&[record]).gpus().count(), rows, "{reporter}");
    }
}

#[test]
fn a_serial_number_on_two_nodes_is_shown_and_not_acted_on() {
    let mut records = vec![
        inventory("a", "17", "0000:3b:00", 0),
        mark("17", MarkKind::Bad, 10),
        inventory("b", "17", "0000:3b:00", HOUR),
        inventory("a", "17", "0000:3b:00", 2 * HOUR),
    ];
    let both = ledger(&records);
    let (_, row) = both.gpu("17").unwrap();
    assert_eq!(row.on_two_nodes(), Some(("a", "b")));
    assert_eq!(both.due(), []);
    // On one node for a day again.
    records.push(inventory("b", "17", "0000:3b:00", 3 * DAY));
    let mut one = ledger(&records);
    assert_eq!(one.gpu("17").unwrap().1.on_two_nodes(), None);
    assert_eq!(settle(&mut one, 3 * DAY), [("b".to_owned(), false)]);
}

#[test]
fn a_marked_gpu_that_turns_up_is_reported_until_it_is_good() {
    let mut ledger = ledger(&[
        fault("a", "17", "GPU-1", "0000:3b:00", 0),
        mark("17", MarkKind::Rma, 10),
    ]);
    assert_eq!(ledger.due(), [], "not seen since the mark");
    ledger.record(&inventory("b", "17", "0000:5e:00", 5 * DAY));
    let due = ledger.due();
    let event = &due[0];
    assert_eq!(
        (
            event.agent.as_str(),
            event.check_name.as_str(),
            event.is_fatal
        ),
        ("health-events-analyzer", "KnownBadGPU", true)
    );
    assert_eq!(
        event.recommended_action(),
        RecommendedAction::ContactSupport
    );
    assert!(
        event.message.contains("alice: it burns"),
        "{}",
        event.message
    );
    assert_eq!(settle(&mut ledger, 5 * DAY + 1), [("b".to_owned(), false)]);
    // The fault of the GPU is closed with its machine: nothing is reported anew.
    let mut gone = inventory("b", "17", "0000:5e:00", 5 * DAY + 2);
    gone.event.agent = crate::AGENT.to_owned();
    gone.event.check_name = keys::CHECK_KNOWN_BAD_GPU.to_owned();
    let after = (
        keys::META_GONE_AFTER.to_owned(),
        gone.created_at.to_string(),
    );
    gone.event.metadata.extend([after]);
    Reporter::Monitor.note_in(&mut gone.event);
    assert!(gone.event.is_healthy);
    ledger.record(&gone);
    assert_eq!(ledger.due(), []);
    // Nothing is repeated, and the report is not a fault of the GPU's own.
    ledger.record(&inventory("b", "17", "0000:5e:00", 6 * DAY));
    assert_eq!(ledger.due(), []);
    assert_eq!(ledger.gpu("17").unwrap().1.history.faults.len(), 1);
    ledger.record(&mark("17", MarkKind::Good, 7 * DAY));
    assert_eq!(settle(&mut ledger, 7 * DAY), [("b".to_owned(), true)]);
    // An earlier mark that comes late changes nothing; a new one does, once the GPU is seen.
    ledger.record(&mark("17", MarkKind::Bad, 6 * DAY));
    assert_eq!(ledger.due(), []);
    ledger.record(&mark("17", MarkKind::Bad, 8 * DAY));
    assert_eq!(ledger.due(), []);
    ledger.record(&inventory("b", "17", "0000:5e:00", 9 * DAY));
    assert_eq!(settle(&mut ledger, 9 * DAY), [("b".to_owned(), false)]);
}

#[test]
fn another_gpu_in_its_slot_ends_the_report_and_a_node_elsewhere_does_not() {
    let mut ledger = ledger(&[
        mark("17", MarkKind::Bad, 0),
        inventory("a", "17", "0000:3b:00", DAY),
    ]);
    assert_eq!(settle(&mut ledger, DAY), [("a".to_owned(), false)]);
    ledger.record(&inventory("b", "17", "0000:3b:00", 5 * DAY));
    assert_eq!(settle(&mut ledger, 5 * DAY), [("b".to_owned(), false)]);
    ledger.record(&inventory("a", "18", "0000:3b:00", 6 * DAY));
    assert_eq!(settle(&mut ledger, 6 * DAY), [("a".to_owned(), true)]);
    let (key, row) = ledger.gpu("17").unwrap();
    assert!(!ledger.is_in(key, &row.places[0]));
    assert!(ledger.is_in(key, &row.places[1]));
}

#[test]
fn what_a_lost_gpu_and_a_recovery_name_is_not_there() {
    let mut lost = fault("a", "17", "GPU-1", "0000:3b:00", 0);
    lost.event.check_name = keys::CHECK_GPU_PCIE.to_owned();
    lost.event.error_code = vec![keys::CODE_GPU_LOST.to_owned()];
    let mut healthy = fault("a", "18", "GPU-2", "0000:3b:00", 0);
    healthy.event.is_healthy = true;
    let ledger = ledger(&[lost, healthy]);
    let (_, row) = ledger.gpu("17").unwrap();
    assert_eq!((row.places.len(), row.history.faults.len()), (0, 1));
    assert_eq!(ledger.gpu("18"), None);
}

#[test]
fn resets_and_reboots_are_repairs() {
    let mut reset = fault("a", "17", "GPU-1", "", 0);
    reset.event.is_healthy = true;
    reset.event.error_code = Vec::new();
    let mut failed = fault("a", "17", "GPU-1", "", HOUR);
    failed.event.error_code = vec![keys::CODE_GPU_RESET_FAILURE.to_owned()];
    let reboot = |check: &str, second| {
        let mut record = fault("a", "", "", "", second);
        record.event.is_healthy = true;
        check.clone_into(&mut record.event.check_name);
        let mark = (keys::META_REBOOT.to_owned(), "true".to_owned());
        record.event.metadata.extend([mark]);
        record
    };
    let ledger = ledger(&[reset, failed, reboot("X", DAY), reboot("Y", DAY + 1)]);
    let repairs = |history: &FaultHistory| -> Vec<(RepairKind, bool)> {
        let repairs = history.repairs.iter();
        repairs
            .map(|repair| (repair.kind, repair.succeeded))
            .collect()
    };
    let resets = [(RepairKind::GpuReset, true), (RepairKind::GpuReset, false)];
    assert_eq!(repairs(&ledger.gpu("17").unwrap().1.history), resets);
    let node = repairs(&ledger.node("a").unwrap().history);
    assert_eq!(node, [resets[0], resets[1], (RepairKind::Reboot, true)]);
}

#[test]
fn a_wrong_clock_and_a_forged_count_change_little() {
    for stated in [
        at(-BEGIN),
        at(0),
        Timestamp::from_second(9_214_646_400).unwrap(),
    ] {
        let mut record = fault("a", "17", "GPU-1", "", 0);
        record.event.metadata.extend([
            (keys::META_COUNT.to_owned(), u64::MAX.to_string()),
            (keys::META_FIRST_SEEN.to_owned(), stated.to_string()),
            (keys::META_LAST_SEEN.to_owned(), stated.to_string()),
        ]);
        let ledger = ledger(&[record]);
        let (_, row) = ledger.gpu("17").unwrap();
        assert_eq!(
            (row.history.faults[0].first, row.history.faults[0].last),
            (at(0), at(0))
        );
        let score = Score::of(&row.history, at(0));
        assert!((score.value - 1.0).abs() < 1e-9, "{score:?}");
    }
    // Our own clock: 1970 and 2262.
    for second in [-BEGIN, 9_214_646_400 - BEGIN] {
        let ledger = ledger(&[
            fault("a", "17", "", "", second),
            fault("b", "17", "", "", 0),
        ]);
        assert_eq!(places(&ledger, "17").len(), 2);
        let score = Score::of(&ledger.gpu("17").unwrap().1.history, at(0));
        assert!(score.value.is_finite() && score.value <= 2.0, "{score:?}");
    }
}

#[test]
fn a_score_halves_with_the_half_life_and_shows_its_terms() {
    let mut slight = fault("a", "17", "GPU-1", "", 0);
    slight.event.is_fatal = false;
    slight.event.check_name = "GpuPowerWatch".to_owned();
    let ledger = ledger(&[fault("a", "17", "GPU-1", "", 0), slight]);
    let history = &ledger.gpu("17").unwrap().1.history;
    let later = at(0) + HALF_LIFE;
    let score = Score::of(history, later);
    assert!((score.value - 0.6).abs() < 1e-9, "{score:?}");
    let terms: Vec<(&str, f64)> = score
        .terms
        .iter()
        .map(|it| (&*it.what, it.weight))
        .collect();
    assert_eq!(
        terms,
        [("SysLogsXIDError 79", 1.0), ("GpuPowerWatch 79", 0.2)]
    );
    let none = Score::of(&FaultHistory::default(), later);
    assert_eq!(
        (format!("{:.2}", none.value), none.terms),
        ("0.00".to_owned(), vec![])
    );
}

#[test]
fn all_lists_are_bounded_and_say_so() {
    let nodes = |second: i64| format!("n{second}");
    let many = (0..200).map(|day| fault(&nodes(day), "17", "GPU-1", "", day * 3 * DAY));
    let ledger = ledger(&many.collect::<Vec<_>>());
    let (_, row) = ledger.gpu("17").unwrap();
    assert_eq!(row.places.len(), MAX_PLACES);
    assert_eq!(row.places.last().unwrap().node, "n199");
    assert_eq!(row.history.faults.len(), MAX_KEPT_OF_HISTORY);
    assert!(row.places_are_cut && row.history.is_cut);
    assert!(ledger.occupants.len() <= MAX_PLACES);
}

#[test]
fn gpus_without_a_mark_make_room() {
    let mut ledger = ledger(&[
        inventory("a", "lucky", "0000:3b:00", 0),
        inventory("a", "marked", "0000:5e:00", 0),
        mark("marked", MarkKind::Bad, 1),
        fault("a", "faulty", "", "", 0),
    ]);
    for number in 0..MAX_GPUS {
        ledger.record(&inventory("a", &format!("s{number}"), "", DAY));
    }
    assert!(ledger.gpus.len() <= MAX_GPUS);
    assert!(ledger.left_out() > 0);
    for (name, is_there) in [("lucky", false), ("marked", true), ("faulty", true)] {
        assert_eq!(ledger.gpu(name).is_some(), is_there, "{name}");
    }
    assert_eq!(ledger.part("g:lucky").unwrap(), b"");
}

#[test]
fn what_is_saved_is_restored() {
    let mut ledger = ledger(&[
        fault("a", "17", "GPU-1", "0000:3b:00", 0),
        mark("17", MarkKind::Bad, 10),
        inventory("b", "17", "0000:3b:00", DAY),
        inventory("a", "18", "0000:3b:00", DAY),
    ]);
    settle(&mut ledger, DAY);
    let mut restored = Ledger::default();
    for name in ledger.take_unsaved() {
        restored
            .restore(&name, &ledger.part(&name).unwrap())
            .unwrap();
    }
    assert_eq!(restored, ledger);
    assert!(!ledger.is_unsaved());
    assert!(restored.restore("g:19", b"[]").is_err());
}

fn arbitrary() -> impl Strategy<Value = EventRecord> {
    let gpu = (0..3_usize, 0..3_usize, 0..40_i64);
    gpu.prop_map(|(gpu, kind, hours)| {
        let serial = ["17", "18", "19"][gpu];
        let uuid = ["GPU-1", "GPU-2", "GPU-3"][gpu];
        // Each GPU stays on its node: where it is only late reports can tell otherwise.
        let node = ["a", "b", "c"][gpu];
        match kind {
            0 => fault(node, serial, uuid, "0000:3b:00", hours * HOUR / 2),
            1 => fault(node, "", uuid, "0000:3b:00", hours * HOUR / 2),
            _ => mark(
                serial,
                MarkKind::ALL[usize::try_from(hours).unwrap() % 3],
                hours,
            ),
        }
    })
}

proptest! {
    #[test]
    fn order_and_repetition_change_nothing(
        records in proptest::collection::vec(arbitrary(), 0..30),
        seed in any::<u64>(),
    ) {
        let mut mixed: Vec<&EventRecord> = records.iter().chain(&records).collect();
        let order = |record: &&EventRecord| {
            use std::hash::{DefaultHasher, Hash as _, Hasher as _};
            let mut hasher = DefaultHasher::new();
            (seed, &record.id).hash(&mut hasher);
            hasher.finish()
        };
        mixed.sort_by_key(order);
        let (mut one, mut other) = (ledger(&records), ledger(mixed));
        one.take_unsaved();
        other.take_unsaved();
        prop_assert_eq!(one, other);
    }
}
