use contract::{BehaviourOverrides, Entity};

use super::*;
use crate::reporter::Process;

fn good() -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        node_name: "n1".into(),
        error_code: vec!["48".into()],
        ..HealthEvent::default()
    }
}

type Break = fn(&mut HealthEvent);

#[test]
fn required_fields_are_named() {
    validate(&good()).unwrap();
    // NVSentinel's cloud monitor sets no version.
    let without_version = HealthEvent {
        version: 0,
        ..good()
    };
    validate(&without_version).unwrap();
    let table: [(&str, Break); 10] = [
        ("nodeName", |e| e.node_name.clear()),
        ("agent", |e| e.agent = "  ".into()),
        ("componentClass", |e| e.component_class.clear()),
        ("checkName", |e| e.check_name.clear()),
        ("customRecommendedAction", |e| e.recommended_action = 27),
        ("generatedTimestamp", |e| {
            e.generated_timestamp = Some(prost_types::Timestamp {
                seconds: 0,
                nanos: 1_000_000_000,
            });
        }),
        ("errorCode[1]", |e| {
            e.error_code.push("x".repeat(MAX_NAME_BYTES + 1));
        }),
        ("entitiesImpacted", |e| {
            e.entities_impacted = vec![Entity::default(); MAX_ITEMS + 1];
        }),
        ("entitiesImpacted[0]", |e| {
            e.entities_impacted.push(Entity::default());
        }),
        ("metadata[k]", |e| {
            e.metadata
                .insert("k".into(), "v".repeat(MAX_METADATA_BYTES + 1));
        }),
    ];
    for (field, break_it) in table {
        let mut event = good();
        break_it(&mut event);
        assert_eq!(validate(&event).unwrap_err().field, field);
    }
}

#[test]
fn an_event_sent_again_has_the_same_id_and_another_has_not() {
    let time: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let later: Timestamp = "2026-01-01T00:00:09Z".parse().unwrap();
    let mut first = good();
    first.generated_timestamp = Some(json::proto_timestamp(time));
    let mut again = HealthEvent {
        id: "sender's own".into(),
        ..first.clone()
    };
    normalise(&mut first, time);
    normalise(&mut again, later);
    assert_eq!(first, again);
    assert_eq!(first.id.len(), 24);

    let mut other = HealthEvent {
        quarantine_overrides: Some(BehaviourOverrides {
            force: true,
            skip: false,
        }),
        ..first.clone()
    };
    normalise(&mut other, time);
    assert_ne!(first.id, other.id);
    assert_eq!(
        content_fingerprint(&first),
        content_fingerprint(&first.clone())
    );
    assert_ne!(content_fingerprint(&first), content_fingerprint(&other));
}

/// Otherwise a sender that can predict the next log line could make it look like a retry.
#[test]
fn who_reports_is_part_of_the_identity_and_the_pid_is_not() {
    let process = |uid, pid| Reporter::User(Process { uid, pid });
    let of_line: fn(&mut HealthEvent) = |event| {
        let place = (keys::META_LOG_PLACE.to_owned(), "1:2:3:4".to_owned());
        event.metadata.extend([place]);
    };
    for edit in [of_line, |_| ()] {
        let ids = |reporter: Reporter| {
            let mut event = good();
            edit(&mut event);
            reporter.note_in(&mut event);
            (event_id(&event), content_fingerprint(&event))
        };
        let first = ids(process(1000, Some(7)));
        assert_eq!(first, ids(process(1000, Some(8))));
        assert_eq!(first, ids(process(1000, None)));
        let others = [
            process(1001, Some(7)),
            Reporter::Operator(Process {
                uid: 1000,
                pid: None,
            }),
            Reporter::Monitor,
            Reporter::Node,
        ];
        for other in others {
            let other = ids(other);
            assert!(other.0 != first.0 && other.1 != first.1);
        }
    }
}

#[test]
fn what_differs_in_any_part_is_another_event() {
    let with = |edit: Break| {
        let mut event = good();
        edit(&mut event);
        event_id(&event)
    };
    let edits: [Break; 9] = [
        |e| e.node_name = "n2".into(),
        |e| e.agent = "a".into(),
        |e| e.component_class = "NIC".into(),
        |e| e.check_name = "c".into(),
        |e| e.error_code.push("49".into()),
        |e| e.is_fatal = true,
        |e| e.is_healthy = true,
        |e| e.recommended_action = 15,
        |e| e.generated_timestamp = Some(prost_types::Timestamp::default()),
    ];
    let mut ids: Vec<String> = edits.into_iter().map(with).collect();
    ids.push(with(|_| ()));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 10);
    // A record of a log belongs to its node.
    let of_log: Break = |e| {
        e.metadata.insert(keys::META_LOG_PLACE.into(), "1".into());
    };
    assert_ne!(
        with(of_log),
        with(|e| {
            e.node_name = "n2".into();
            e.metadata.insert(keys::META_LOG_PLACE.into(), "1".into());
        })
    );
}

#[test]
fn a_time_in_the_future_counts_as_the_time_of_receipt_and_a_retry_stays_one() {
    let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
    let generated: Timestamp = "9998-01-01T00:00:00.000000001Z".parse().unwrap();
    let mut first = good();
    first.generated_timestamp = Some(json::proto_timestamp(generated));
    first.processing_strategy = 1;
    let (sent, mut again) = (first.clone(), first.clone());
    normalise(&mut first, at(0));
    assert_eq!(
        first.generated_timestamp,
        Some(json::proto_timestamp(at(0)))
    );
    assert_eq!(
        first.metadata[keys::META_FUTURE_TIME],
        generated.to_string()
    );
    // The id depends on what was sent, however late the event arrives again, and also at the
    // next connector, whose clock may still be behind the event's time.
    assert_eq!(first.id, event_id(&sent));
    normalise(&mut again, at(500));
    assert_eq!(again.id, first.id);
    let mut onward = first.clone();
    normalise(&mut onward, at(-500));
    assert_eq!(onward.id, first.id);
    assert_eq!(onward.metadata, first.metadata);
    assert_eq!(
        onward.generated_timestamp,
        Some(json::proto_timestamp(at(-500)))
    );
    // Small differences between clocks are accepted.
    for (ahead, counts) in [(60, 60), (61, 0)] {
        let mut event = good();
        event.generated_timestamp = Some(json::proto_timestamp(at(ahead)));
        normalise(&mut event, at(0));
        assert_eq!(
            event.generated_timestamp,
            Some(json::proto_timestamp(at(counts)))
        );
    }
}

#[test]
fn acceptance_lies_in_the_last_two_days_and_doubt_hides_no_fault() {
    let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
    let bound = MAX_ACCEPTANCE_AGE.as_secs();
    let well = HealthEvent {
        is_healthy: true,
        ..good()
    };
    for (claimed, fault, recovery) in [
        (0, 0, 0),
        (-7, -7, -7),
        (7, 0, 0),
        (-bound, -bound, -bound),
        (-bound - 1, 0, -bound),
        (-250_000_000_000, 0, -bound),
    ] {
        let claimed = Timestamp::from_second(1_800_000_000 + claimed).unwrap_or(Timestamp::MIN);
        assert_eq!(accepted_at(&good(), claimed, at(0)), at(fault));
        assert_eq!(accepted_at(&well, claimed, at(0)), at(recovery));
    }
}

#[test]
fn a_log_record_read_again_is_the_same_event() {
    let with = |pairs: &[(&str, &str)], edit: fn(&mut HealthEvent)| {
        let mut event = good();
        event.message = "NVRM: Xid (PCI:0000:b3:00): 48, DBE".into();
        for (key, value) in pairs {
            event
                .metadata
                .insert((*key).to_owned(), (*value).to_owned());
        }
        edit(&mut event);
        event_id(&event)
    };
    let kernel = [(keys::META_BOOT_ID, "b"), (keys::META_KERNEL_SEQUENCE, "7")];
    let later: fn(&mut HealthEvent) = |event| {
        event.generated_timestamp = Some(prost_types::Timestamp {
            seconds: 9,
            nanos: 0,
        });
        event
            .metadata
            .insert(keys::META_EARLIER_IN_BOOT.into(), "true".into());
        event.recommended_action = 15;
    };
    assert_eq!(with(&kernel, |_| ()), with(&kernel, later));
    assert_ne!(with(&kernel[..1], |_| ()), with(&kernel[..1], later));
    let place = [(keys::META_LOG_PLACE, "1:2:300")];
    assert_eq!(with(&place, |_| ()), with(&place, later));
    let other = [(keys::META_LOG_PLACE, "1:2:301")];
    assert_ne!(with(&place, |_| ()), with(&other, |_| ()));
}

#[test]
fn without_a_timestamp_the_time_of_receipt_counts_and_is_marked() {
    let mut first = good();
    let mut second = good();
    normalise(&mut first, "2026-01-01T00:00:00Z".parse().unwrap());
    normalise(&mut second, "2026-01-01T00:00:09Z".parse().unwrap());
    assert!(lacks_own_time(&first));
    assert_ne!(first.id, second.id);
    assert_eq!(content_fingerprint(&first), content_fingerprint(&second));
    assert_eq!(first.processing_strategy, 1);
}

#[test]
fn on_its_way_from_connector_to_connector_an_event_stays_what_it_is() {
    let first: Timestamp = "2026-01-01T00:00:00.123456Z".parse().unwrap();
    let later: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
    let mut full = good();
    full.message = "x".repeat(MAX_MESSAGE_BYTES + 1);
    for index in 0..MAX_METADATA {
        full.metadata.insert(index.to_string(), "v".into());
    }
    let from_log = {
        let mut event = good();
        let place = (keys::META_LOG_PLACE.to_owned(), "1:2:3:4".to_owned());
        event.metadata.extend([place]);
        event
    };
    for mut event in [good(), full, from_log] {
        validate(&event).unwrap();
        normalise(&mut event, first);
        let mut sent = event.clone();
        mark_accepted(&mut sent, first);
        assert_eq!(take_accepted(&mut sent), Some(first));
        validate(&sent).unwrap();
        normalise(&mut sent, later);
        assert_eq!(sent, event);
    }
    assert_eq!(take_accepted(&mut good()), None);
}

#[test]
fn what_was_accepted_is_as_old_as_its_sender_says_and_never_newer_than_now() {
    let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
    for (accepted, sent, expected) in [(0, 7, 993), (5_000, 5_007, 993), (7, 0, 1_000)] {
        let mut event = good();
        mark_accepted(&mut event, at(accepted));
        accepted_by_our_clock(&mut event, at(sent), at(1_000));
        assert_eq!(take_accepted(&mut event), Some(at(expected)));
    }
    let mut event = good();
    accepted_by_our_clock(&mut event, at(0), at(1_000));
    assert_eq!(event, good());
}

#[test]
fn a_long_message_is_cut_between_characters_and_marked() {
    let mut event = good();
    event.message = "ü".repeat(MAX_MESSAGE_BYTES);
    validate(&event).unwrap();
    normalise(&mut event, Timestamp::UNIX_EPOCH);
    assert_eq!(event.message.len(), MAX_MESSAGE_BYTES);
    assert_eq!(
        event.metadata[keys::META_MESSAGE_CUT],
        (2 * MAX_MESSAGE_BYTES).to_string()
    );
}
