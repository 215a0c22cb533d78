use std::sync::LazyLock;

use contract::{Entity, HealthEvent, ProcessingStrategy, json, keys};
use jiff::Timestamp;
use model::event::EventRecord;
use model::position::Position;
use model::reporter::Reporter;
use proptest::prelude::*;

use super::at;
use crate::{AGENT, Analyzer, Finding, Rule, Saved, Saying, built_in, parse};

pub(crate) fn entity(kind: &str, value: &str) -> Entity {
    Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    }
}

/// Returns an event of the XID check about a GPU.
pub(crate) fn xid(second: i64, code: &str, gpu: &str) -> EventRecord {
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

/// Returns a recovery that a person reports, of a rule's conclusion about a GPU; an empty name: of
/// all.
pub(crate) fn recovery(second: i64, rule: &str, gpu: &str) -> EventRecord {
    let mut event = HealthEvent {
        agent: AGENT.to_owned(),
        check_name: rule.to_owned(),
        is_healthy: true,
        ..HealthEvent::default()
    };
    Reporter::Monitor.note_in(&mut event);
    if !gpu.is_empty() {
        event.entities_impacted.push(entity("GPU_UUID", gpu));
    }
    record(second, event)
}

/// Returns the event by which a repair is recorded.
pub(crate) fn repaired(second: i64) -> EventRecord {
    record(
        second,
        HealthEvent {
            agent: "gpuwarden".to_owned(),
            check_name: keys::CHECK_REPAIRED.to_owned(),
            is_healthy: true,
            processing_strategy: ProcessingStrategy::StoreAndAnalyse as i32,
            ..HealthEvent::default()
        },
    )
}

/// Returns an accepted event, of the node `n1` if it names none, with an id that follows from its
/// content.
pub(crate) fn record(second: i64, mut event: HealthEvent) -> EventRecord {
    if event.node_name.is_empty() {
        event.node_name = "n1".to_owned();
    }
    event.generated_timestamp = Some(json::proto_timestamp(at(second)));
    EventRecord {
        seq: Position::START,
        id: model::event::event_id(&event),
        created_at: at(second),
        event,
    }
}

/// Built-in rules; loading compiles their expressions, which takes a while.
static RULES: LazyLock<Vec<Rule>> = LazyLock::new(built_in);

pub(crate) fn analyzer() -> Analyzer {
    Analyzer::new(RULES.clone())
}

/// Returns an analyzer with some of the built-in rules.
fn with_rules(names: &[&str]) -> Analyzer {
    let mut rules = RULES.clone();
    rules.retain(|rule| names.contains(&rule.name.as_str()));
    assert_eq!(rules.len(), names.len());
    Analyzer::new(rules)
}

/// Records events in this order. Groups of nodes with events that come too late are built from all
/// of them, as from a store.
pub(crate) fn feed(analyzer: &mut Analyzer, events: &[EventRecord]) {
    for (index, event) in events.iter().enumerate() {
        analyzer.record(event);
        for node in analyzer.late().clone() {
            let of_node = events[..=index].iter();
            analyzer.rebuild(
                &node,
                of_node.filter(|it| node.is_empty() || it.event.node_name == node),
            );
        }
        assert!(
            analyzer.late().is_empty(),
            "a rebuild settles what came late"
        );
    }
}

fn texts(finding: &Finding) -> Vec<String> {
    let values = finding.group.values.iter();
    values.map(crate::GroupValue::text).collect()
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

/// Returns what is to be said, and notes it as stored.
pub(crate) fn say(analyzer: &mut Analyzer, now: i64) -> Vec<Saying> {
    let sayings = analyzer.to_say(at(now), 100);
    for saying in &sayings {
        analyzer.said(saying);
    }
    sayings
}

#[test]
fn a_conclusion_is_said_once_and_names_its_evidence() {
    let mut analyzer = analyzer();
    let events: Vec<EventRecord> = (0..8).map(|n| xid(n * 600, "62", "GPU-1")).collect();
    feed(&mut analyzer, &events);
    let sayings = analyzer.to_say(at(9000), 100);
    assert_eq!(sayings.len(), 1);
    assert_eq!(
        analyzer.to_say(at(9000), 100),
        sayings,
        "it was not stored yet"
    );
    let finding = sayings[0].finding.clone().unwrap();
    assert_eq!(finding.rule, "RepeatedXIDErrorOnSameGPU");
    assert_eq!(texts(&finding), ["GPU-1", "62"]);
    let ids: Vec<&str> = events[..5].iter().map(|it| it.id.as_str()).collect();
    let evidence: Vec<&str> = finding.conclusion.evidence.iter().map(|id| &**id).collect();
    assert_eq!(evidence, ids);

    let event = &sayings[0].event;
    assert_eq!((event.agent.as_str(), event.is_fatal), (AGENT, true));
    assert_eq!(event.error_code, ["62"]);
    assert_eq!(event.entities_impacted[0].entity_value, "GPU-1");
    assert_eq!(event.metadata[keys::META_EVIDENCE], ids.join(","));
    model::event::validate(event).unwrap();
    // The event is part of the feed now, and nothing more is said.
    analyzer.record(&record(4800, event.clone()));
    assert_eq!(analyzer.to_say(at(9000), 100), []);
}

#[test]
fn who_ends_a_conclusion_ends_it_for_the_analyzer_too() {
    let events: Vec<EventRecord> = (0..2).map(|n| xid(n * 600, "31", "GPU-1")).collect();
    let rule = "RepeatedXID31OnSameGPU";
    for (gpu, ends) in [("GPU-1", true), ("", true), ("GPU-2", false)] {
        let mut analyzer = with_rules(&[rule]);
        feed(&mut analyzer, &events);
        assert_eq!(say(&mut analyzer, 700).len(), 1);
        feed(&mut analyzer, &[recovery(700, rule, gpu)]);
        assert_eq!(open(&analyzer).is_empty(), ends, "{gpu}");
        assert_eq!(say(&mut analyzer, 700), [], "{gpu}");
        // The counts begin there.
        feed(&mut analyzer, &[xid(1300, "31", "GPU-1")]);
        assert_eq!(open(&analyzer).is_empty(), ends, "{gpu}");
        feed(&mut analyzer, &[xid(1900, "31", "GPU-1")]);
        assert_eq!(open(&analyzer).len(), 1);
        assert_eq!(say(&mut analyzer, 1900).len(), usize::from(ends), "{gpu}");
    }
    // A user of the machine cannot.
    let mut analyzer = with_rules(&[rule]);
    feed(&mut analyzer, &events);
    let mut by_user = recovery(700, rule, "").event;
    by_user.metadata.clear();
    feed(&mut analyzer, &[record(700, by_user)]);
    assert_eq!(open(&analyzer).len(), 1);
}

#[test]
fn a_reset_ends_what_asks_for_one_and_does_not_begin_the_count_anew() {
    let rule = "[[rules]]\nname = \"r\"\nchecks = [\"SysLogsXIDError\"]\ngroup_by = [\"gpu\"]\n\
                kind = \"count\"\nwindow = \"1h\"\nthreshold = 3\naction = \"COMPONENT_RESET\"\n\
                message = \"m\"\n";
    let rules = |rule: &str| parse(&format!("built_in = false\n{rule}"), "r").unwrap();
    let mut healthy = xid(0, "", "GPU-1").event;
    healthy.is_healthy = true;
    healthy.error_code.clear();
    Reporter::Monitor.note_in(&mut healthy);
    let healthy = |second| record(second, healthy.clone());
    let fault = |second| xid(second, "62", "GPU-1");
    let (mut reset, mut person) = (
        Analyzer::new(rules(rule)),
        Analyzer::new(rules(&rule.replace("COMPONENT_RESET", "CONTACT_SUPPORT"))),
    );
    for analyzer in [&mut reset, &mut person] {
        feed(
            analyzer,
            &[fault(0), healthy(1), fault(2), healthy(3), fault(4)],
        );
        assert_eq!(open(analyzer).len(), 1);
        feed(analyzer, &[healthy(5)]);
    }
    assert_eq!((open(&reset).len(), open(&person).len()), (0, 1));
}

#[test]
fn what_a_late_event_disproves_is_withdrawn() {
    let mut analyzer = analyzer();
    let alone = xid(1000, "13", "GPU-1");
    feed(&mut analyzer, &[alone]);
    analyzer.time(at(1200));
    assert_eq!(say(&mut analyzer, 1200).len(), 1);
    feed(&mut analyzer, &[xid(1001, "48", "GPU-1")]);
    analyzer.time(at(1200));
    let sayings = say(&mut analyzer, 1200);
    assert!(sayings[0].event.is_healthy && sayings[0].finding.is_none());
    assert_eq!(open(&analyzer), []);
}

#[test]
fn another_fault_does_not_prolong_a_conclusion() {
    let mut analyzer = with_rules(&["XIDErrorSoloNoBurst"]);
    feed(
        &mut analyzer,
        &[xid(0, "13", "GPU-1"), xid(3600, "48", "GPU-1")],
    );
    let day = 24 * 3600;
    analyzer.time(at(day));
    assert_eq!(open(&analyzer).len(), 1);
    analyzer.time(at(day + 1));
    assert_eq!(open(&analyzer), []);
}

#[test]
fn a_conclusion_that_a_late_event_moves_to_another_node_ends_on_the_first() {
    let mut analyzer = with_rules(&["RackFault"]);
    let of = |node: &str, second: i64| {
        let mut event = xid(second, "79", "GPU-1").event;
        event.node_name = node.to_owned();
        event.is_fatal = true;
        let rack = ("topology.kubernetes.io/rack".to_owned(), "r7".to_owned());
        event.metadata.extend([rack]);
        record(second, event)
    };
    let said = |analyzer: &mut Analyzer| -> Vec<(String, bool)> {
        let events = std::iter::from_fn(|| say(analyzer, 60).pop()).map(|saying| saying.event);
        events.map(|it| (it.node_name, it.is_healthy)).collect()
    };
    let on = |node: &str, is_healthy| (node.to_owned(), is_healthy);
    feed(&mut analyzer, &[of("a", 10), of("b", 30), of("c", 40)]);
    assert_eq!(said(&mut analyzer), [on("c", false)]);
    // The first event stays, so it is the same conclusion.
    feed(&mut analyzer, &[of("d", 20)]);
    assert_eq!(said(&mut analyzer), []);
    feed(&mut analyzer, &[of("e", 0)]);
    assert_eq!(said(&mut analyzer), [on("c", true), on("d", false)]);
}

#[test]
fn conclusions_and_events_that_are_only_stored_are_no_input() {
    let mut analyzer = analyzer();
    for second in [0, 600, 1200] {
        let mut own = xid(second, "31", "GPU-1").event;
        own.agent = AGENT.to_owned();
        let mut stored = xid(second, "31", "GPU-1").event;
        stored.processing_strategy = ProcessingStrategy::StoreOnly as i32;
        feed(
            &mut analyzer,
            &[record(second, own), record(second, stored)],
        );
    }
    assert_eq!(open(&analyzer), []);
}

#[test]
fn a_clock_far_ahead_counts_at_the_time_of_acceptance() {
    let mut analyzer = with_rules(&["RepeatedXID31OnSameGPU"]);
    let mut ahead = xid(0, "31", "GPU-1");
    let year_2262 = Timestamp::from_second(9_200_000_000).unwrap();
    ahead.event.generated_timestamp = Some(json::proto_timestamp(year_2262));
    feed(&mut analyzer, &[ahead, xid(600, "31", "GPU-1")]);
    assert_eq!(open(&analyzer).len(), 1);
}

#[test]
fn a_conclusion_of_a_rule_that_is_gone_is_withdrawn() {
    let mut before = with_rules(&["RepeatedXID31OnSameGPU"]);
    let events: Vec<EventRecord> = (0..2).map(|n| xid(n * 600, "31", "GPU-1")).collect();
    feed(&mut before, &events);
    let said = say(&mut before, 600).remove(0).event;
    let rules = "[[rules]]\nname = \"RepeatedXID31OnSameGPU\"\nenabled = false\n";
    let mut after = Analyzer::new(parse(rules, "r").unwrap());
    feed(&mut after, &events[1..]);
    feed(&mut after, &[record(600, said)]);
    let sayings = say(&mut after, 700);
    assert_eq!(sayings.len(), 1, "{sayings:?}");
    assert!(sayings[0].event.is_healthy && !sayings[0].event.is_fatal);
    model::event::validate(&sayings[0].event).unwrap();
    assert_eq!(say(&mut after, 700), []);
}

#[test]
fn a_conclusion_whose_evidence_is_no_longer_stored_is_taken_over() {
    let mut before = with_rules(&["RepeatedXID31OnSameGPU"]);
    let events: Vec<EventRecord> = (0..2).map(|n| xid(n * 600, "31", "GPU-1")).collect();
    feed(&mut before, &events);
    let said = say(&mut before, 600).remove(0).event;
    let mut after = with_rules(&["RepeatedXID31OnSameGPU"]);
    feed(&mut after, &[record(600, said)]);
    let unconfirmed = after.unconfirmed();
    assert_eq!(unconfirmed.len(), 1);
    let evidence: Vec<&str> = unconfirmed[0].1.iter().map(|id| &**id).collect();
    assert_eq!(evidence, [&*events[0].id, &*events[1].id]);
    after.adopt(&unconfirmed[0].0);
    assert_eq!(open(&after), open(&before));
    assert_eq!(say(&mut after, 700), []);
    feed(&mut after, &[recovery(800, "RepeatedXID31OnSameGPU", "")]);
    assert_eq!(open(&after), []);
}

#[test]
fn groups_without_anything_that_counts_are_forgotten() {
    let mut analyzer = analyzer();
    let events: Vec<EventRecord> = (0..2000)
        .map(|n| xid(n, "13", &format!("GPU-{n}")))
        .collect();
    feed(&mut analyzer, &events);
    assert!(analyzer.groups() > 2000);
    analyzer.time(at(24 * 3600 * 9));
    assert_eq!(analyzer.groups(), 0);
    assert_eq!(open(&analyzer), []);
}

#[test]
fn an_event_that_comes_after_its_group_is_forgotten_is_put_in_its_place() {
    // The second burst is within a day of the first, and comes when that day is over.
    let (day, gpu) = (24 * 3600, "GPU-1");
    let events = [
        xid(0, "31", gpu),
        // Another GPU tells the time.
        xid(2 * day, "31", "GPU-2"),
        xid(day, "31", gpu),
    ];
    let mut analyzer = with_rules(&["RepeatedXID31OnSameGPU"]);
    for (end, event) in events.iter().enumerate() {
        analyzer.record(event);
        for node in analyzer.late().clone() {
            analyzer.rebuild(&node, &events[..=end]);
        }
        analyzer.time(event.created_at);
    }
    let expected = ("RepeatedXID31OnSameGPU".to_owned(), vec![gpu.to_owned()]);
    assert_eq!(open(&analyzer), [expected]);
}

#[test]
fn a_restored_state_shares_texts_as_before() {
    let mut before = analyzer();
    feed(&mut before, &[xid(0, "13", "GPU-1")]);
    let mut after = analyzer();
    after.restore(&before.save()).unwrap();
    let ids = ["RepeatedXIDErrorOnSameGPU", "XIDErrorSoloNoBurst"].map(|rule| {
        let group = after.groups_of_rule(rule, at(0)).remove(0);
        group.held.evidence[0].as_ptr()
    });
    assert_eq!(ids[0], ids[1]);
}

/// Returns the event by which a monitor names both an address and the UUID of a GPU.
fn inventory(second: i64, pci: &str, gpu: &str) -> EventRecord {
    let mut event = xid(second, "", gpu).event;
    event.check_name = keys::CHECK_GPU_INVENTORY.to_owned();
    event.is_healthy = true;
    event.error_code.clear();
    event.processing_strategy = ProcessingStrategy::StoreOnly as i32;
    event.entities_impacted.push(entity("PCI", pci));
    Reporter::Monitor.note_in(&mut event);
    record(second, event)
}

/// Returns an XID of the GPU at an address.
fn xid_at(second: i64, code: &str, pci: &str) -> EventRecord {
    let mut event = xid(second, code, "").event;
    event.entities_impacted = vec![entity("PCI", pci)];
    record(second, event)
}

#[test]
fn a_gpu_by_its_address_is_the_one_by_its_uuid_whenever_both_are_named() {
    let pci = "0000:b3:00";
    let events = [
        inventory(0, pci, "GPU-1"),
        xid_at(10, "31", &format!("{pci}.0")),
        xid(700, "31", "GPU-1"),
    ];
    let of_one = (
        "RepeatedXID31OnSameGPU".to_owned(),
        vec!["GPU-1".to_owned()],
    );
    let rules = ["RepeatedXID31OnSameGPU", "RepeatedXID31OnDifferentGPU"];
    for order in [[0, 1, 2], [1, 2, 0], [2, 0, 1]] {
        let mut analyzer = with_rules(&rules);
        feed(&mut analyzer, &order.map(|place| events[place].clone()));
        assert_eq!(open(&analyzer), std::slice::from_ref(&of_one), "{order:?}");
    }
    // Another GPU is in its place since.
    let mut analyzer = with_rules(&rules[..1]);
    let replaced = inventory(500, pci, "GPU-2");
    feed(
        &mut analyzer,
        &[
            events[0].clone(),
            replaced,
            xid_at(600, "31", pci),
            events[2].clone(),
        ],
    );
    assert_eq!(open(&analyzer), []);
}

fn any_event() -> impl Strategy<Value = EventRecord> {
    // Times in minutes, so that many reports share a burst, and some come very late.
    let gpu = prop_oneof!["GPU-1", "GPU-2"];
    let recovered = prop_oneof![
        Just("RepeatedXID31OnSameGPU"),
        Just("XIDErrorSoloNoBurst"),
        Just("RepairNotWorking"),
    ];
    prop_oneof![
        6 => (0_i64..300, prop_oneof!["13", "31", "79"], gpu.clone(), any::<bool>()).prop_map(
            |(minute, code, gpu, is_fatal)| {
                let mut event = xid(minute * 60, &code, &gpu).event;
                event.is_fatal = is_fatal;
                record(minute * 60, event)
            }
        ),
        1 => (0_i64..300, recovered, prop_oneof![Just(String::new()), gpu])
            .prop_map(|(minute, rule, gpu)| recovery(minute * 60, rule, &gpu)),
        1 => (0_i64..300).prop_map(|minute| repaired(minute * 60)),
        2 => (0_i64..300, prop_oneof!["13", "31"]).prop_map(|(minute, code)| xid_at(minute * 60, &code, "0000:b3:00")),
        1 => (0_i64..300, prop_oneof!["GPU-1", "GPU-2"])
            .prop_map(|(minute, gpu)| inventory(minute * 60, "0000:b3:00", &gpu)),
    ]
}

proptest! {
    /// The open conclusions are the same after any order of the events, and after restarts.
    #[test]
    fn open_conclusions_depend_on_the_set_of_events_alone(
        events in proptest::collection::vec(any_event(), 1..60),
        restarts in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let mut sorted = events.clone();
        sorted.sort_by_key(|it| (it.created_at, it.id.clone()));
        let (mut one, mut other) = (analyzer(), analyzer());
        let mut saved = Saved::default();
        let mut fed = 0;
        let mut stops: Vec<usize> = restarts.iter().map(|it| it.index(events.len())).collect();
        stops.sort_unstable();
        for stop in stops.into_iter().chain([events.len()]) {
            // The events before are there as well where some come too late.
            for end in fed..stop {
                one.record(&events[end]);
                for node in one.late().clone() {
                    one.rebuild(&node, &events[..=end]);
                }
            }
            fed = fed.max(stop);
            let now = one.save();
            saved.state = now.state;
            saved.parts.extend(now.parts);
            one = analyzer();
            one.restore(&saved).unwrap();
        }
        feed(&mut other, &sorted);
        let end = sorted.last().unwrap().created_at;
        for analyzer in [&mut one, &mut other] {
            analyzer.time(end);
        }
        let found = |of: &Analyzer| of.open().map(|it| (it.id.clone(), it.clone())).collect::<Vec<_>>();
        prop_assert_eq!(found(&one), found(&other));
    }
}
