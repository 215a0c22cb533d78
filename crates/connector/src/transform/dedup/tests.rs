use model::event;
use model::fault::{Fault, FaultBook};
use model::reporter::Reporter;
use proptest::prelude::*;

use super::*;

mod any_events;

const START: i64 = 1_800_000_000;

/// A deduplicator with a clock.
struct Bench {
    dedup: Deduplicator,
    now: Timestamp,
    seq: u64,
}

fn settings() -> Settings {
    Settings {
        window: SignedDuration::from_mins(3),
        cleanup: SignedDuration::from_mins(1),
        checks: vec![],
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(START + seconds).unwrap()
}

impl Bench {
    fn new() -> Self {
        Self::with(Deduplicator::new(settings()))
    }

    fn with(dedup: Deduplicator) -> Self {
        Self {
            dedup,
            now: at(0),
            seq: 0,
        }
    }

    /// Judges and stores a batch. Returns the events after it, and the verdicts.
    fn batch(&mut self, events: &[HealthEvent]) -> (Vec<HealthEvent>, Vec<Treatment>) {
        self.batch_of(events, self.now)
    }

    /// Judges and stores a batch of events that were accepted at `accepted` and arrive now.
    fn batch_of(
        &mut self,
        events: &[HealthEvent],
        accepted: Timestamp,
    ) -> (Vec<HealthEvent>, Vec<Treatment>) {
        let mut events = events.to_vec();
        let mut batch = self.dedup.begin(self.now);
        let mut verdicts = Vec::new();
        for (index, event) in events.iter_mut().enumerate() {
            event::normalise(event, accepted);
            verdicts.push(self.dedup.judge(&mut batch, index, event, accepted));
        }
        let first = self.seq + 1;
        self.seq += events.len() as u64;
        self.dedup
            .stored(batch, |index| Some((first + index as u64).into()));
        (events, verdicts)
    }

    /// Returns true if a single event, after `wait` seconds, passes unchanged.
    fn passes(&mut self, wait: i64, event: &HealthEvent) -> bool {
        self.now += SignedDuration::from_secs(wait);
        let mut event = event.clone();
        event.generated_timestamp = Some(json::proto_timestamp(self.now));
        // Two reports within one second must differ.
        event.message = self.seq.to_string();
        let strategy = event.processing_strategy.max(1);
        let (events, verdicts) = self.batch(&[event]);
        let passes = verdicts == [Treatment::Passes];
        assert_eq!(
            events[0].processing_strategy,
            if passes { strategy } else { 3 }
        );
        passes
    }
}

fn entities(list: &[(&str, &str)]) -> Vec<Entity> {
    list.iter()
        .map(|(kind, value)| Entity {
            entity_type: (*kind).to_owned(),
            entity_value: (*value).to_owned(),
        })
        .collect()
}

fn with(edit: impl FnOnce(&mut HealthEvent)) -> HealthEvent {
    let mut event = HealthEvent {
        version: 1,
        agent: "syslog-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "SysLogsXIDError".into(),
        error_code: vec!["79".into()],
        entities_impacted: entities(&[("PCI", "0000:b3:00")]),
        node_name: "n1".into(),
        ..HealthEvent::default()
    };
    edit(&mut event);
    event
}

fn fault() -> HealthEvent {
    with(|_| ())
}

fn healthy(edit: impl FnOnce(&mut HealthEvent)) -> HealthEvent {
    let mut event = with(|event| event.is_healthy = true);
    edit(&mut event);
    event
}

type Edit = fn(&mut HealthEvent);

#[test]
fn a_repeat_within_the_window_is_for_analysis_only_and_says_of_what() {
    let mut bench = Bench::new();
    let (first, _) = bench.batch(&[fault()]);
    bench.now = at(60);
    let (second, verdicts) = bench.batch(&[fault()]);
    let original = Original {
        id: first[0].id.clone(),
        seq: Some(1.into()),
    };
    // Without a time of its own it would count as a retry, see below.
    assert_eq!(verdicts, [Treatment::Passes]);
    let timed = with(|event| {
        event.generated_timestamp = Some(json::proto_timestamp(at(60)));
    });
    let (repeat, verdicts) = bench.batch(&[timed]);
    assert_eq!(verdicts, [Treatment::Repeats(original)]);
    assert_eq!(repeat[0].processing_strategy, 3);
    assert_eq!(repeat[0].metadata[keys::META_REPEAT_OF], first[0].id);
    assert_eq!(second[0].processing_strategy, 1);
}

#[test]
fn the_window_begins_with_the_report_that_passed_and_is_not_extended() {
    let mut bench = Bench::new();
    assert!(bench.passes(0, &fault()));
    for wait in [60, 60, 59] {
        assert!(!bench.passes(wait, &fault()));
    }
    assert!(bench.passes(1, &fault()), "179 s + 1 s");
    assert!(!bench.passes(179, &fault()));
    assert!(bench.passes(1, &fault()));
}

#[test]
fn a_clock_that_goes_back_lets_a_report_through() {
    let mut bench = Bench::new();
    assert!(bench.passes(0, &fault()));
    assert!(bench.passes(-3600, &fault()));
    assert!(!bench.passes(10, &fault()));
}

#[test]
fn reports_of_an_hour_that_are_read_in_one_second_are_no_repeats() {
    let mut bench = Bench::new();
    let of = |seconds| {
        with(|event| event.generated_timestamp = Some(json::proto_timestamp(at(seconds))))
    };
    let (_, verdicts) = bench.batch(&[of(-3600), of(-3500), of(-1800)]);
    assert!(
        matches!(
            verdicts.as_slice(),
            [Treatment::Passes, Treatment::Repeats(_), Treatment::Passes]
        ),
        "{verdicts:?}"
    );
}

#[test]
fn what_is_the_same_and_what_is_not() {
    let two: Edit = |event| {
        event.entities_impacted = entities(&[("PCI", "a"), ("GPU_UUID", "u")]);
        event.error_code = vec!["1".into(), "2".into()];
    };
    let table: [(Edit, Edit, bool); 13] = [
        (two, two, true),
        (
            two,
            |event| event.entities_impacted = entities(&[("GPU_UUID", "u"), ("PCI", "a")]),
            true,
        ),
        (two, |event| event.error_code.reverse(), true),
        (two, |event| event.message = "other".into(), true),
        (
            two,
            |event| drop(event.metadata.insert("k".into(), "v".into())),
            true,
        ),
        (two, |event| event.version = 2, true),
        (two, |event| event.node_name = "n2".into(), false),
        (two, |event| event.check_name = "Other".into(), false),
        (two, |event| event.agent = "other".into(), false),
        (two, |event| event.error_code.push("3".into()), false),
        (
            two,
            |event| event.entities_impacted = entities(&[("PCI", "a")]),
            false,
        ),
        (
            two,
            |event| event.entities_impacted = entities(&[("PCI", "u"), ("GPU_UUID", "a")]),
            false,
        ),
        // Texts that are equal when concatenated.
        (
            |event| event.error_code = vec!["12".into(), "3".into()],
            |event| event.error_code = vec!["1".into(), "23".into()],
            false,
        ),
    ];
    for (number, (first, second, same)) in table.into_iter().enumerate() {
        let mut bench = Bench::new();
        assert!(bench.passes(0, &with(first)));
        let again = with(|event| {
            first(event);
            second(event);
        });
        assert_eq!(bench.passes(1, &again), !same, "row {number}");
    }
}

/// In NVSentinel a fault that has become fatal is held back for minutes, because gravity and
/// action are not part of its key.
#[test]
fn a_change_of_what_is_to_be_done_is_never_held_back() {
    let table: [(&str, Edit); 8] = [
        ("fatal", |event| event.is_fatal = true),
        ("action", |event| event.recommended_action = 24),
        ("custom action", |event| {
            event.recommended_action = 27;
            event.custom_recommended_action = "RECABLE".into();
        }),
        ("another custom action", |event| {
            event.recommended_action = 27;
            event.custom_recommended_action = "RESEAT".into();
        }),
        ("class", |event| event.component_class = "NVSwitch".into()),
        ("quarantine", |event| {
            event.quarantine_overrides = Some(BehaviourOverrides {
                force: true,
                skip: false,
            });
        }),
        ("drain", |event| {
            event.drain_overrides = Some(BehaviourOverrides {
                force: false,
                skip: true,
            });
        }),
        ("none of it", |_| ()),
    ];
    let mut bench = Bench::new();
    assert!(bench.passes(0, &fault()));
    for (what, edit) in table {
        // Each edit also differs from the previous one, and milder reports pass as well.
        assert!(bench.passes(1, &with(edit)), "{what}");
        assert!(!bench.passes(1, &with(edit)), "{what}");
    }
    // A different report that names the fault among others makes the first report new again.
    assert!(bench.passes(
        1,
        &with(|event| {
            event.error_code.push("48".into());
            event.is_fatal = true;
        })
    ));
    assert!(bench.passes(1, &fault()));
}

#[test]
fn only_reports_that_open_faults_are_looked_at() {
    let only: Edit = |event| event.processing_strategy = 2;
    let analyse: Edit = |event| event.processing_strategy = 3;
    let earlier: Edit = |event| {
        let key = keys::META_EARLIER_IN_BOOT.into();
        event.metadata.insert(key, "true".into());
    };
    for edit in [only, analyse, earlier] {
        let mut bench = Bench::new();
        // NVSentinel promotes a repeated STORE_ONLY event to STORE_AND_ANALYSE.
        assert!(bench.passes(0, &with(edit)));
        assert!(bench.passes(1, &with(edit)));
        // An event that opens no fault must not hold back one that does.
        assert!(bench.passes(1, &fault()));
        assert!(!bench.passes(1, &fault()));
        assert!(bench.passes(1, &with(edit)));
        assert!(!bench.passes(1, &fault()));
    }
    // An unknown strategy opens faults, and is not changed.
    let unknown = with(|event| event.processing_strategy = 9);
    let mut bench = Bench::new();
    assert!(bench.passes(0, &fault()));
    assert!(bench.passes(1, &unknown) && bench.passes(1, &unknown));
    assert!(bench.passes(1, &fault()));
}

#[test]
fn a_recovery_passes_and_forgets_what_it_may_have_healed_and_nothing_else() {
    let table: [(Edit, bool); 14] = [
        (|_| (), true),
        (|event| event.entities_impacted.clear(), true),
        (|event| event.error_code.clear(), true),
        (
            |event| event.error_code = vec!["48".into(), "79".into()],
            true,
        ),
        // Another spelling of the address, and another name, may mean the same GPU.
        (
            |event| event.entities_impacted = entities(&[("PCI", "00000000:B3:00.0")]),
            true,
        ),
        (
            |event| event.entities_impacted = entities(&[("GPU_UUID", "u")]),
            true,
        ),
        (
            |event| {
                event.entities_impacted = entities(&[("PCI", "0000:b4:00"), ("PCI", "0000:b3:00")]);
            },
            true,
        ),
        (|event| event.component_class = "other".into(), true),
        (|event| event.error_code = vec!["48".into()], false),
        (
            |event| event.entities_impacted = entities(&[("PCI", "0000:b4:00")]),
            false,
        ),
        (|event| event.node_name = "n2".into(), false),
        (|event| event.check_name = "Other".into(), false),
        (|event| event.agent = "other".into(), false),
        // An event with this strategy closes no fault.
        (|event| event.processing_strategy = 2, false),
    ];
    for (number, (edit, heals)) in table.into_iter().enumerate() {
        let mut bench = Bench::new();
        assert!(bench.passes(0, &fault()));
        assert!(bench.passes(1, &healthy(edit)), "row {number}");
        assert!(bench.passes(1, &healthy(edit)), "row {number}");
        assert_eq!(bench.passes(1, &fault()), heals, "row {number}");
    }
}

#[test]
fn checks_that_are_not_named_are_left_alone() {
    let mut bench = Bench::with(Deduplicator::new(Settings {
        checks: vec!["Named".into()],
        ..settings()
    }));
    let named = with(|event| event.check_name = "Named".into());
    assert!(bench.passes(0, &named) && !bench.passes(1, &named));
    assert!(bench.passes(0, &fault()) && bench.passes(1, &fault()));
}

#[test]
fn the_same_event_sent_again_is_as_it_was() {
    let timed = with(|event| event.generated_timestamp = Some(json::proto_timestamp(at(0))));
    for event in [timed, fault()] {
        let mut bench = Bench::new();
        let first = bench.batch(std::slice::from_ref(&event)).0;
        bench.now = at(100);
        let (again, verdicts) = bench.batch(&[event.clone(), event]);
        assert_eq!(verdicts, [Treatment::Passes, Treatment::Passes]);
        assert_eq!(again[0].processing_strategy, 1);
        assert_eq!(
            event::content_fingerprint(&again[1]),
            event::content_fingerprint(&first[0])
        );
    }
}

#[test]
fn repeats_of_one_batch_name_its_first() {
    let mut bench = Bench::new();
    let say = |text: &str| with(|event| event.message = text.into());
    let (events, verdicts) =
        bench.batch(&[say("a"), say("b"), healthy(|_| ()), say("c"), say("d")]);
    let of = |index: usize| {
        Treatment::Repeats(Original {
            id: events[index].id.clone(),
            seq: None,
        })
    };
    let expected = [
        Treatment::Passes,
        of(0),
        Treatment::Passes,
        Treatment::Passes,
        of(3),
    ];
    assert_eq!(verdicts, expected);
    let strategies: Vec<i32> = events
        .iter()
        .map(|event| event.processing_strategy)
        .collect();
    assert_eq!(strategies, [1, 3, 1, 1, 3]);
}

/// A report holds back others only once it is stored, and only if nothing came in between.
#[test]
fn a_report_that_was_not_stored_holds_nothing_back() {
    let begin = |bench: &mut Bench, text: &str| {
        let mut event = with(|event| event.message = text.into());
        event::normalise(&mut event, bench.now);
        let mut batch = bench.dedup.begin(bench.now);
        let verdict = bench.dedup.judge(&mut batch, 0, &mut event, bench.now);
        (batch, verdict == Treatment::Passes)
    };
    // Storing fails: the next attempt passes.
    let mut bench = Bench::new();
    let (batch, _) = begin(&mut bench, "a");
    bench.dedup.not_stored(batch);
    assert_eq!(bench.dedup.bytes, 0);
    assert!(bench.passes(1, &fault()));
    assert!(!bench.passes(1, &fault()));

    // Without a result, the next attempt passes as well.
    let mut bench = Bench::new();
    drop(begin(&mut bench, "a"));
    assert!(bench.passes(1, &fault()));

    // Two concurrent batches: neither holds back the other, the later one counts, and the
    // failure of the earlier one does not undo it.
    let mut bench = Bench::new();
    let (first, _) = begin(&mut bench, "a");
    let (second, passed) = begin(&mut bench, "b");
    assert!(passed);
    bench.dedup.stored(second, |_| Some(1.into()));
    bench.dedup.not_stored(first);
    assert!(!bench.passes(1, &fault()));

    // A recovery that arrives while the report is being stored.
    let mut bench = Bench::new();
    let (batch, _) = begin(&mut bench, "a");
    assert!(bench.passes(0, &healthy(|_| ())));
    bench.dedup.stored(batch, |_| Some(1.into()));
    assert!(bench.passes(1, &fault()));
}

/// The number of remembered faults of one scope is limited.
#[test]
fn faults_of_one_scope_are_remembered_up_to_a_number() {
    let mut bench = Bench::new();
    let of = |code: usize| with(|event| event.error_code = vec![code.to_string()]);
    let fits = (0..MAX_SEEN_PER_SCOPE * 2)
        .take_while(|code| bench.passes_with_room(&of(*code)))
        .count();
    assert_eq!(fits, MAX_SEEN_PER_SCOPE);
    assert!(!bench.passes(1, &of(0)), "what is known still holds back");
    let elsewhere = with(|event| event.node_name = "another".into());
    assert!(bench.passes_with_room(&elsewhere));
}

#[test]
fn where_there_is_no_room_reports_pass_and_room_comes_back() {
    let mut bench = Bench::with(Deduplicator::with_room(settings(), 4_000));
    let of = |code: usize| with(|event| event.error_code = vec![format!("{code:0>100}")]);
    let fits = (0..100)
        .take_while(|code| bench.passes_with_room(&of(*code)))
        .count();
    assert!((4..20).contains(&fits), "{fits}");
    assert!(bench.dedup.bytes <= 4_000);
    // Remembered faults still hold back repeats; one beyond the limit passes each time.
    assert!(!bench.passes(1, &of(0)));
    let (events, verdicts) = bench.batch(&[of(50)]);
    assert_eq!(
        (verdicts, events[0].processing_strategy),
        (vec![Treatment::NoRoom], 1)
    );
    bench.now = at(300);
    assert!(bench.passes_with_room(&of(50)));
    assert_eq!(bench.dedup.remembered(), 1);
}

impl Bench {
    fn passes_with_room(&mut self, event: &HealthEvent) -> bool {
        self.batch(std::slice::from_ref(event)).1 == [Treatment::Passes]
    }
}

#[test]
fn what_was_stored_before_a_restart_is_recalled() {
    let mut before = Bench::new();
    let mut records = Vec::new();
    for (seconds, event) in [
        (0, fault()),
        (100, with(|event| event.node_name = "n2".into())),
        (110, with(|event| event.node_name = "n3".into())),
        (120, healthy(|event| event.node_name = "n3".into())),
        (130, with(|event| event.message = "repeat".into())),
    ] {
        before.now = at(seconds);
        let (events, _) = before.batch(&[event]);
        records.push(EventRecord {
            seq: before.seq.into(),
            id: events[0].id.clone(),
            created_at: before.now,
            event: events[0].clone(),
        });
    }
    let mut after = Bench::new();
    for record in &records {
        after.dedup.recall(record);
    }
    after.now = at(181);
    assert!(after.passes(0, &fault()), "its window has ended");
    assert!(!after.passes(0, &with(|event| event.node_name = "n2".into())));
    assert!(after.passes(0, &with(|event| event.node_name = "n3".into())));
}

/// The scenario of NVSentinel's own end-to-end test: 8 of 26 events reach the reactions.
#[test]
fn of_26_xid_events_eight_pass() {
    let xid = |code: &str, list: &[(&str, &str)]| {
        let (code, list) = (code.to_owned(), entities(list));
        with(|event| {
            event.error_code = vec![code];
            event.entities_impacted = list;
        })
    };
    let mut events = vec![xid("95", &[("PCI", "0000:01:00"), ("GPU_UUID", "u1")]); 10];
    for bus in 2..=6 {
        let (pci, uuid) = (format!("0000:0{bus}:00"), format!("u{bus}"));
        events.push(xid("95", &[("PCI", &pci), ("GPU_UUID", &uuid)]));
        events.push(xid("95", &[("GPU_UUID", &uuid), ("PCI", &pci)]));
    }
    events.extend(vec![xid("119", &[("PCI", "0000:01:00")]); 4]);
    events.extend(vec![xid("119", &[("PCI", "0000:02:00")]); 2]);
    assert_eq!(events.len(), 26);
    let mut bench = Bench::new();
    let passed = events.iter().filter(|event| bench.passes(1, event)).count();
    assert_eq!(passed, 8);
}
