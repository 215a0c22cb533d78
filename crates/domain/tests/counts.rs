//! What is counted on a node, held against the fault book of a controller.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Duration;

use contract::{Entity, HealthEvent, accepted, keys, mark_accepted};
use diagnosis::fold::{Fold, MAX_WINDOWS};
use gpuwarden_domain::event::Record;
use gpuwarden_domain::fault::{FaultBook, MAX_OPEN_FAULTS_PER_NODE};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

fn second(second: i64) -> Timestamp {
    "2026-11-21T11:40:00Z".parse::<Timestamp>().unwrap() + SignedDuration::from_secs(second)
}

/// A report of XID 95 on a GPU, in line `line` of the log.
fn report(pci: &str, line: u64) -> HealthEvent {
    HealthEvent {
        node_name: "n1".into(),
        agent: keys::SYSLOG_AGENT.into(),
        component_class: keys::COMPONENT_GPU.into(),
        check_name: keys::CHECK_XID.into(),
        error_code: vec!["95".into()],
        entities_impacted: vec![Entity {
            entity_type: keys::ENTITY_PCI.into(),
            entity_value: pci.into(),
        }],
        is_fatal: true,
        metadata: [(keys::META_LOG_PLACE.to_owned(), line.to_string())].into(),
        ..HealthEvent::default()
    }
}

fn healthy(pci: &str) -> HealthEvent {
    HealthEvent {
        is_healthy: true,
        is_fatal: false,
        error_code: Vec::new(),
        ..report(pci, 0)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Report(u8),
    Wait(u64),
    Heal(u8),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..4_u8).prop_map(Step::Report),
        2 => (0..90_u64).prop_map(Step::Wait),
        5 => (0..4_u8).prop_map(Step::Heal),
        1 => Just(Step::Restart),
    ]
}

#[test]
fn as_many_faults_are_counted_as_are_kept_open() {
    assert_eq!(MAX_WINDOWS, MAX_OPEN_FAULTS_PER_NODE);
}

proptest! {
    /// A controller hears of recoveries that the agent does not: what it is told later of lines
    /// from before opens nothing, and what came after is told when the window ends.
    #[test]
    fn a_recovery_elsewhere_holds_against_what_is_counted(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let (mut fold, mut book) = (Fold::default(), FaultBook::default());
        let mut out = Vec::new();
        let (mut now, mut seq) = (0_u64, 0);
        let (mut lines, mut recovered) = (BTreeMap::new(), BTreeMap::new());
        let pci = |gpu: u8| format!("0000:{gpu:02x}:00");
        let record = |book: &mut FaultBook, seq: &mut u64, event: HealthEvent, at: Timestamp| {
            *seq += 1;
            let (seq, id) = (*seq, seq.to_string());
            book.record(&Record { seq: seq.into(), id, created_at: at, event });
        };
        let wait_out = [Step::Wait(61)];
        for step in steps.into_iter().chain(wait_out) {
            now += 1;
            let at = second(i64::try_from(now).unwrap());
            match step {
                Step::Report(gpu) => {
                    let mut event = report(&pci(gpu), now);
                    mark_accepted(&mut event, at);
                    // The log's clock is another one.
                    let said = second(i64::try_from(now).unwrap() - 1_000);
                    fold.take(event, said, Duration::from_secs(now), &mut out);
                    lines.insert(pci(gpu), now);
                }
                Step::Wait(seconds) => {
                    now += seconds;
                    fold.tick(Duration::from_secs(now), &mut out);
                }
                Step::Heal(gpu) => {
                    record(&mut book, &mut seq, healthy(&pci(gpu)), at);
                    recovered.insert(pci(gpu), now);
                }
                Step::Restart => {
                    let saved = serde_json::to_string(&fold).unwrap();
                    fold = serde_json::from_str(&saved).unwrap();
                }
            }
            for event in out.drain(..) {
                let came = accepted(&event).unwrap();
                record(&mut book, &mut seq, event, came);
            }
            for fault in book.faults("n1") {
                let pci = &fault.subject.entities()[0].entity_value;
                prop_assert!(lines.get(pci) > recovered.get(pci), "{pci}");
            }
        }
        let open = lines.iter().filter(|(pci, line)| recovered.get(*pci).is_none_or(|at| at < *line));
        prop_assert_eq!(book.faults("n1").len(), open.count());
    }
}
