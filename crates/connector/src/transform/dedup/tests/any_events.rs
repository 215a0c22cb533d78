//! Arbitrary events, compared with the fault book.

use super::*;

/// Few values, so that events often meet: healthy, fatal, devices, codes, action, strategy, wait
/// in seconds.
fn any_event() -> impl Strategy<Value = (HealthEvent, i64)> {
    let device = prop_oneof![
        Just(("PCI", "0000:b3:00")),
        Just(("PCI", "0000:b4:00")),
        Just(("GPU_UUID", "u")),
        Just(("NVLINK", "1")),
    ];
    let codes = proptest::collection::vec(prop_oneof![Just("79"), Just("48")], 0..3);
    (
        proptest::bool::weighted(0.2),
        any::<bool>(),
        proptest::collection::vec(device, 0..3),
        codes,
        prop_oneof![Just(2), Just(24)],
        prop_oneof![8 => Just(1), 1 => Just(2), 1 => Just(3), 1 => Just(9)],
        (0_i64..90, any::<bool>()),
    )
        .prop_map(
            |(is_healthy, fatal, devices, codes, action, strategy, (wait, trusted))| {
                let event = with(|event| {
                    event.is_healthy = is_healthy;
                    event.is_fatal = fatal && !is_healthy;
                    event.entities_impacted = entities(&devices);
                    event.error_code = codes.into_iter().map(str::to_owned).collect();
                    event.recommended_action = action;
                    event.processing_strategy = strategy;
                    if trusted {
                        Reporter::Monitor.note_in(event);
                    }
                });
                (event, wait)
            },
        )
}

/// Seconds since the acceptance of a late event, and whether it is a count of repeats.
fn late() -> impl Strategy<Value = (i64, bool)> {
    prop_oneof![
        3 => Just((0, false)),
        1 => (0_i64..200, any::<bool>()),
    ]
}

/// Otherwise a late event that opens no fault could hold back a new one.
#[test]
fn what_comes_late_holds_back_nothing() {
    let mut bench = Bench::new();
    let count = with(|event| {
        event.metadata.insert(keys::META_COUNT.into(), "2".into());
    });
    for (event, ago, holds_back) in [(fault(), 11, false), (fault(), 10, true), (count, 1, false)] {
        bench.passes(0, &healthy(|_| ()));
        bench.now += SignedDuration::from_mins(1);
        let accepted = bench.now - SignedDuration::from_secs(ago);
        let mut event = event;
        event.generated_timestamp = Some(json::proto_timestamp(accepted));
        let (_, verdicts) = bench.batch_of(&[event], accepted);
        assert_eq!(verdicts, [Treatment::Passes]);
        assert_eq!(bench.passes(1, &fault()), !holds_back, "{ago}");
    }
    // The late event itself is held back by a current report before it.
    bench.passes(0, &healthy(|_| ()));
    assert!(bench.passes(0, &fault()));
    bench.now += SignedDuration::from_secs(60);
    let accepted = bench.now - SignedDuration::from_secs(20);
    let mut late = fault();
    late.generated_timestamp = Some(json::proto_timestamp(accepted));
    assert!(matches!(
        bench.batch_of(&[late], accepted).1.as_slice(),
        [Treatment::Repeats(_)]
    ));
}

/// Returns the open faults, with the fields that affect reactions.
fn open(book: &FaultBook) -> Vec<(String, String, bool, i32, Authority)> {
    let open = |fault: &Fault| {
        (
            fault.code.clone(),
            fault.subject.to_string(),
            fault.event.is_fatal,
            fault.event.recommended_action,
            Authority::of(&fault.event),
        )
    };
    book.faults("n1").iter().map(open).collect()
}

proptest! {
    /// For any events, the open faults are the same as without deduplication.
    #[test]
    fn what_is_held_back_would_have_changed_nothing(
        events in proptest::collection::vec((any_event(), late()), 1..40),
    ) {
        let mut bench = Bench::new();
        let (mut plain, mut deduplicated) = (FaultBook::default(), FaultBook::default());
        for ((event, wait), late) in events {
            bench.now += SignedDuration::from_secs(wait);
            let (mut event, (late, count)) = (event, late);
            event.message = bench.seq.to_string();
            let accepted = bench.now - SignedDuration::from_secs(late);
            event.generated_timestamp = Some(json::proto_timestamp(accepted));
            if count {
                event.metadata.insert(keys::META_COUNT.into(), "2".into());
            }
            let (judged, _) = bench.batch_of(std::slice::from_ref(&event), accepted);
            let record = |event: &HealthEvent| EventRecord {
                seq: bench.seq.into(),
                id: judged[0].id.clone(),
                created_at: accepted,
                event: event.clone(),
            };
            plain.record(&record(&event));
            deduplicated.record(&record(&judged[0]));
            prop_assert_eq!(open(&plain), open(&deduplicated));
        }
    }
}
