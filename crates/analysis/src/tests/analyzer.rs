use contract::{Entity, HealthEvent, json};
use jiff::Timestamp;
use model::event::EventRecord;
use model::position::Position;
use proptest::prelude::*;

use super::at;
use crate::{AGENT, Analyzer, BUILT_IN, Change, Finding, META_EVIDENCE, parse};

/// An event of the XID check about a GPU.
pub(crate) fn xid(second: i64, code: &str, gpu: &str) -> EventRecord {
    let entity = |kind: &str, value: &str| Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    };
    record(
        second,
        HealthEvent {
            agent: "syslog-health-monitor".to_owned(),
            check_name: "SysLogsXIDError".to_owned(),
            error_code: vec![code.to_owned()],
            entities_impacted: vec![entity("GPU_UUID", gpu)],
            ..HealthEvent::default()
        },
    )
}

/// A recovery of the XID check of a GPU; an empty name: of all.
fn recovery(second: i64, gpu: &str) -> EventRecord {
    let mut event = xid(second, "", gpu).event;
    event.is_healthy = true;
    event.error_code.clear();
    if gpu.is_empty() {
        event.entities_impacted.clear();
    }
    record(second, event)
}

/// Returns an accepted event of the node `n1`, with an id that follows from its content.
pub(crate) fn record(second: i64, mut event: HealthEvent) -> EventRecord {
    event.node_name = "n1".to_owned();
    event.generated_timestamp = Some(json::proto_timestamp(at(second)));
    EventRecord {
        seq: Position::START,
        id: model::event::event_id(&event),
        created_at: at(second),
        event,
    }
}

pub(crate) fn analyzer() -> Analyzer {
    Analyzer::new(parse(BUILT_IN, "rules.toml").unwrap())
}

/// Records events in this order; those that come too late are added from all of them, as from a
/// store. Returns what changed.
pub(crate) fn feed(analyzer: &mut Analyzer, events: &[EventRecord]) -> Vec<Change> {
    let mut changes = Vec::new();
    for (index, event) in events.iter().enumerate() {
        for change in analyzer.record(event) {
            if let Change::TooLate(group, rule) = &change {
                changes.extend(analyzer.rebuild(group, rule, &events[..=index]));
            } else {
                changes.push(change);
            }
        }
    }
    changes
}

fn texts(finding: &Finding) -> Vec<String> {
    let values = finding.group.values.iter();
    values.map(|value| value.text().to_owned()).collect()
}

/// Returns rule and group of the open conclusions.
pub(crate) fn open(analyzer: &Analyzer) -> Vec<(String, Vec<String>)> {
    let mut open: Vec<_> = analyzer
        .open()
        .map(|it: &Finding| (it.rule.clone(), texts(it)))
        .collect();
    open.sort();
    open
}

#[test]
fn a_conclusion_is_drawn_once_and_names_its_evidence() {
    let mut analyzer = analyzer();
    let events: Vec<EventRecord> = (0..8).map(|n| xid(n * 600, "62", "GPU-1")).collect();
    let changes = feed(&mut analyzer, &events);
    let [Change::Opened(finding)] = &changes[..] else {
        panic!("{changes:?}");
    };
    assert_eq!(finding.rule, "RepeatedXIDErrorOnSameGPU");
    assert_eq!(texts(finding), ["GPU-1", "62"]);
    let ids: Vec<&str> = events[..5].iter().map(|it| it.id.as_str()).collect();
    assert_eq!(finding.conclusion.evidence, ids);

    let event = finding.event(analyzer.rule_of(finding).unwrap(), None);
    assert_eq!((event.agent.as_str(), event.is_fatal), (AGENT, true));
    assert_eq!(event.error_code, ["62"]);
    assert_eq!(event.entities_impacted[0].entity_value, "GPU-1");
    assert_eq!(event.metadata[META_EVIDENCE], ids.join(","));
    model::event::validate(&event).unwrap();
    let ended = finding.event(analyzer.rule_of(finding).unwrap(), Some(at(9)));
    assert!(ended.is_healthy && !ended.is_fatal);
    assert_eq!(ended.entities_impacted, event.entities_impacted);
}

#[test]
fn a_recovery_of_the_gpu_or_of_all_ends_it_and_that_of_another_does_not() {
    let events: Vec<EventRecord> = (0..2).map(|n| xid(n * 600, "31", "GPU-1")).collect();
    for (gpu, ends) in [("GPU-1", true), ("", true), ("GPU-2", false)] {
        let mut analyzer = analyzer();
        feed(&mut analyzer, &events);
        assert_eq!(open(&analyzer).len(), 1);
        let changes = feed(&mut analyzer, &[recovery(700, gpu)]);
        assert_eq!(changes.len(), usize::from(ends), "{gpu}: {changes:?}");
        assert_eq!(open(&analyzer).is_empty(), ends, "{gpu}");
    }
}

#[test]
fn conclusions_and_events_that_are_only_stored_are_no_input() {
    let mut analyzer = analyzer();
    for second in [0, 600, 1200] {
        let mut own = xid(second, "31", "GPU-1").event;
        own.agent = AGENT.to_owned();
        let mut stored = xid(second, "31", "GPU-1").event;
        stored.processing_strategy = contract::ProcessingStrategy::StoreOnly as i32;
        for event in [own, stored] {
            assert_eq!(analyzer.record(&record(second, event)), []);
        }
    }
    assert_eq!(open(&analyzer), []);
}

#[test]
fn a_clock_far_ahead_counts_at_the_time_of_acceptance() {
    let mut analyzer = analyzer();
    let mut ahead = xid(0, "31", "GPU-1");
    let year_2262 = Timestamp::from_second(9_200_000_000).unwrap();
    ahead.event.generated_timestamp = Some(json::proto_timestamp(year_2262));
    feed(&mut analyzer, &[ahead, xid(600, "31", "GPU-1")]);
    assert_eq!(open(&analyzer).len(), 1);
}

fn any_event() -> impl Strategy<Value = EventRecord> {
    // Both times in minutes, so that many reports share a burst, and some come very late.
    let gpu = prop_oneof!["GPU-1", "GPU-2"];
    prop_oneof![
        6 => (0_i64..300, prop_oneof!["13", "31", "79"], gpu.clone())
            .prop_map(|(minute, code, gpu)| xid(minute * 60, &code, &gpu)),
        1 => (0_i64..300, prop_oneof![Just(String::new()), gpu])
            .prop_map(|(minute, gpu)| recovery(minute * 60, &gpu)),
    ]
}

proptest! {
    /// The open conclusions are the same after any order of the events.
    #[test]
    fn open_conclusions_depend_on_the_set_of_events_alone(
        events in proptest::collection::vec(any_event(), 1..60),
    ) {
        let mut sorted = events.clone();
        sorted.sort_by_key(|it| (it.created_at, it.id.clone()));
        let (mut one, mut other) = (analyzer(), analyzer());
        feed(&mut one, &events);
        feed(&mut other, &sorted);
        let end = sorted.last().unwrap().created_at;
        one.time(end);
        other.time(end);
        prop_assert_eq!(open(&one), open(&other));
        let ids = |of: &Analyzer| of.open().map(|it| it.id.clone()).collect::<Vec<_>>();
        prop_assert_eq!(ids(&one), ids(&other));
    }
}
