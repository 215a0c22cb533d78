//! Counting on a node, compared with the fault book of a controller.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Duration;

use contract::{HealthEvent, accepted, mark_accepted};
use diagnosis::fold::{Fold, MAX_WINDOWS};
use gpuwarden_model::event::EventRecord;
use gpuwarden_model::fault::{FaultBook, MAX_OPEN_FAULTS_PER_NODE};
use jiff::Timestamp;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

#[path = "../../diagnosis/src/fold/tests/reports.rs"]
mod reports;

use reports::{Step, healthy, report, second, step};

#[test]
fn as_many_faults_are_counted_as_are_kept_open() {
    assert_eq!(MAX_WINDOWS, MAX_OPEN_FAULTS_PER_NODE);
}

/// Stores failures in `counts.proptest-regressions` beside this file: there is no `lib.rs`
/// above it.
fn keeps_failures() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource(
            "proptest-regressions",
        ))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(keeps_failures())]

    /// A controller receives recoveries that the agent does not. Later reports about lines from
    /// before a recovery open nothing, and newer lines are reported when the window ends.
    #[test]
    fn a_recovery_elsewhere_holds_against_what_is_counted(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let (mut fold, mut book) = (Fold::default(), FaultBook::default());
        let mut out = Vec::new();
        let (mut now, mut log, mut seq) = (0_u64, -1_000, 0);
        let (mut lines, mut recovered) = (BTreeMap::new(), BTreeMap::new());
        let pci = |gpu: u8| format!("0000:{gpu:02x}:00");
        let record = |book: &mut FaultBook, seq: &mut u64, event: HealthEvent, at: Timestamp| {
            *seq += 1;
            let (seq, id) = (*seq, seq.to_string());
            book.record(&EventRecord { seq: seq.into(), id, created_at: at, event });
        };
        let wait_out = [Step::Wait(61)];
        for step in steps.into_iter().chain(wait_out) {
            now += 1;
            let at = second(i64::try_from(now).unwrap());
            match step {
                Step::Report { gpu, after } => {
                    let mut event = report(&pci(gpu), now);
                    mark_accepted(&mut event, at);
                    // The log has its own clock.
                    log += after;
                    let logged_at = second(log);
                    fold.take(event, logged_at, Duration::from_secs(now), &mut out);
                    lines.insert(pci(gpu), now);
                }
                Step::Wait(seconds) => {
                    now += seconds;
                    fold.tick(Duration::from_secs(now), &mut out);
                }
                Step::Recover(gpu) | Step::Heal(gpu) => {
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
