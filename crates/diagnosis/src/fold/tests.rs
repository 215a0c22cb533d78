use contract::Entity;
use proptest::prelude::*;

use super::*;
use reports::{Step, healthy, report, second, step};

mod reports;

/// A fold with a clock, and the events that passed: line, count, and seconds from the start of
/// the log to the first and the last report.
#[derive(Default)]
struct Bench {
    fold: Fold,
    out: Vec<HealthEvent>,
}

impl Bench {
    fn take(&mut self, event: HealthEvent, at: i64, now: u64) {
        self.fold
            .take(event, second(at), Duration::from_secs(now), &mut self.out);
    }

    fn tick(&mut self, now: u64) {
        self.fold.tick(Duration::from_secs(now), &mut self.out);
    }

    fn passed(&mut self) -> Vec<(String, u64)> {
        self.out
            .drain(..)
            .map(|event| {
                let line = event.metadata[keys::META_LOG_PLACE].clone();
                (line, Sightings::of(&event, second(0)).count)
            })
            .collect()
    }
}

fn lines(list: &[(u64, u64)]) -> Vec<(String, u64)> {
    list.iter()
        .map(|(line, count)| (line.to_string(), *count))
        .collect()
}

#[test]
fn the_first_passes_at_once_and_repeats_become_one_event_per_window() {
    let mut bench = Bench::default();
    for line in 0..50 {
        bench.take(report("0000:b3:00", line), 0, 0);
    }
    assert_eq!(bench.passed(), lines(&[(0, 1)]));
    // The window ends by the clock here, since there is no further line.
    bench.tick(59);
    assert_eq!(bench.passed(), []);
    bench.tick(60);
    assert_eq!(bench.passed(), lines(&[(1, 49)]));
    // The count has opened the next window, which ends by a line's own time.
    bench.take(report("0000:b3:00", 50), 61, 61);
    bench.take(report("0000:b3:00", 51), 119, 61);
    assert_eq!(bench.passed(), []);
    bench.take(report("0000:b3:00", 52), 120, 62);
    assert_eq!(bench.passed(), lines(&[(50, 2)]));
    // A window without repeats ends silently, and the next report is a first one.
    bench.tick(122);
    assert_eq!(bench.passed(), lines(&[(52, 1)]));
    bench.tick(182);
    assert_eq!((bench.passed(), bench.fold.next_tick()), (vec![], None));
    bench.take(report("0000:b3:00", 53), 240, 240);
    assert_eq!(bench.passed(), lines(&[(53, 1)]));
}

/// The count does not undo a decision made between its last report and its sending.
#[test]
fn a_count_is_as_old_as_the_last_report_that_came() {
    let came = |line, at: i64| {
        let mut event = report("0000:b3:00", line);
        mark_accepted(&mut event, second(at));
        event
    };
    let mut bench = Bench::default();
    // The clock of the log is behind, and jumps.
    for (line, at, by_ours) in [(0, -500, 0), (1, -499, 1), (2, -450, 9), (3, -470, 8)] {
        bench.take(came(line, by_ours), at, 0);
    }
    // Also over a restart.
    let text = serde_json::to_string(&bench.fold).unwrap();
    bench.fold = serde_json::from_str(&text).unwrap();
    bench.tick(60);
    assert_eq!(accepted(&bench.out[1]), Some(second(9)));
    assert_eq!(Sightings::of(&bench.out[1], second(0)).last, second(-450));
    // Another sender's recovery between two repeats: also by the clock here.
    for (recovered, over) in [(8, false), (9, true), (-450, false)] {
        let mut bench = Bench::default();
        for (line, at, by_ours) in [(0, -500, 0), (1, -499, 9)] {
            bench.take(came(line, by_ours), at, 0);
        }
        let fold = &mut bench.fold;
        assert!(fold.recovered_elsewhere(
            &healthy("0000:b3:00"),
            second(recovered),
            &mut bench.out
        ));
        let stored_only = ProcessingStrategy::StoreOnly as i32;
        assert_eq!(
            bench.out[1].processing_strategy == stored_only,
            over,
            "{recovered}"
        );
    }
}

#[test]
fn the_event_says_when_its_reports_were_made() {
    let mut bench = Bench::default();
    for (line, at) in [(0, 0), (1, 7), (2, 3), (3, 40)] {
        bench.take(report("0000:b3:00", line), at, 0);
    }
    bench.tick(60);
    let folded = bench.out.pop().unwrap();
    let seen = Sightings {
        count: 3,
        first: second(3),
        last: second(40),
    };
    assert_eq!(Sightings::of(&folded, second(0)), seen);
    assert_eq!(
        folded.generated_timestamp,
        Some(json::proto_timestamp(second(40)))
    );
    // Another program's use of the metadata key is not taken for a count.
    let mut foreign = report("0000:b3:00", 9);
    foreign
        .metadata
        .insert(keys::META_COUNT.into(), "812".into());
    assert_eq!(Sightings::of(&foreign, second(5)).count, 1);
}

#[test]
fn what_is_different_passes_at_once() {
    type Edit = fn(&mut HealthEvent);
    let table: [Edit; 9] = [
        |event| event.is_fatal = false,
        |event| event.recommended_action = 15,
        |event| event.error_code = vec!["48".into()],
        |event| event.check_name = keys::CHECK_GPU_FALLEN_OFF.into(),
        |event| event.node_name = "n2".into(),
        |event| event.entities_impacted[0].entity_value = "0000:b4:00".into(),
        |event| event.processing_strategy = 2,
        |event| {
            event
                .metadata
                .insert(keys::META_EARLIER_IN_BOOT.into(), "true".into());
        },
        |event| {
            event
                .metadata
                .insert(keys::META_JOB.into(), "slurm 42".into());
        },
    ];
    for (index, edit) in table.into_iter().enumerate() {
        let mut bench = Bench::default();
        bench.take(report("0000:b3:00", 0), 0, 0);
        let mut other = report("0000:b3:00", 1);
        edit(&mut other);
        bench.take(other, 0, 0);
        assert_eq!(bench.passed().len(), 2, "edit {index}");
    }
    // The text, and descriptions of the fault, make no difference.
    let mut bench = Bench::default();
    bench.take(report("0000:b3:00", 0), 0, 0);
    let mut same = report("0000:B3:00.0", 1);
    same.message = "another text".into();
    same.entities_impacted.push(Entity {
        entity_type: "GPC".into(),
        entity_value: "3".into(),
    });
    bench.take(same, 0, 0);
    assert_eq!(bench.passed(), lines(&[(0, 1)]));
}

#[test]
fn reports_of_two_jobs_are_counted_apart_and_end_together() {
    let of_job = |line, job: Option<&str>| {
        let mut event = report("0000:b3:00", line);
        let job = job.map(|job| (keys::META_JOB.to_owned(), job.to_owned()));
        event.metadata.extend(job);
        event
    };
    let mut bench = Bench::default();
    let jobs = [Some("ml/a"), Some("ml/b"), None];
    for (line, job) in (0..).zip(jobs.repeat(3)) {
        bench.take(of_job(line, job), 0, 0);
    }
    // Also over a restart.
    let text = serde_json::to_string(&bench.fold).unwrap();
    bench.fold = serde_json::from_str(&text).unwrap();
    bench.take(healthy("0000:b3:00"), 1, 0);
    let counted: Vec<_> = bench
        .out
        .iter()
        .filter(|event| !event.is_healthy)
        .map(|event| {
            let job = event.metadata.get(keys::META_JOB).map(String::as_str);
            (job, Sightings::of(event, second(0)).count)
        })
        .collect();
    let of_jobs = [None, Some("ml/a"), Some("ml/b")];
    let first = jobs.map(|job| (job, 1));
    let repeats = of_jobs.map(|job| (job, 2));
    assert_eq!(counted, [first, repeats].concat());
    // All of them are over.
    bench.out.clear();
    bench.tick(60);
    assert_eq!(bench.out, []);
    bench.take(of_job(9, jobs[0]), 61, 61);
    assert_eq!(bench.passed(), lines(&[(9, 1)]));
}

#[test]
fn a_recovery_ends_the_windows_of_what_it_heals() {
    let mut bench = Bench::default();
    bench.take(report("0000:b3:00", 1), 0, 0);
    bench.take(report("0000:b4:00", 2), 0, 0);
    bench.take(report("0000:b3:00", 3), 1, 0);
    bench.take(report("0000:b4:00", 4), 1, 0);
    bench.take(healthy("0000:b3:00"), 2, 0);
    // The count comes before the recovery that ends the fault.
    assert_eq!(
        bench.passed(),
        lines(&[(1, 1), (2, 1), (3, 1), (0, 1)]),
        "line 0 is the recovery"
    );
    bench.take(report("0000:b3:00", 5), 3, 0);
    bench.take(report("0000:b4:00", 6), 3, 0);
    assert_eq!(bench.passed(), lines(&[(5, 1)]));
    // A recovery of something else ends nothing.
    let mut other_code = healthy("0000:b4:00");
    other_code.error_code = vec!["48".into()];
    bench.take(other_code, 4, 0);
    bench.take(report("0000:b4:00", 7), 4, 0);
    assert_eq!(bench.passed(), lines(&[(0, 1)]));
}

#[test]
fn a_recovery_from_elsewhere_is_not_undone_by_what_was_counted_before_it() {
    for (accepted, strategy) in [
        (9, ProcessingStrategy::StoreOnly),
        (4, ProcessingStrategy::default()),
    ] {
        let mut bench = Bench::default();
        bench.take(report("0000:b3:00", 1), 0, 0);
        bench.take(report("0000:b3:00", 2), 5, 0);
        let recovery = healthy("0000:b3:00");
        let out = &mut bench.out;
        assert!(
            bench
                .fold
                .recovered_elsewhere(&recovery, second(accepted), out)
        );
        assert_eq!(bench.out[1].processing_strategy, strategy as i32);
        assert_eq!(bench.passed(), lines(&[(1, 1), (2, 1)]));
        // The next report is a new fault, and passes at once.
        bench.take(report("0000:b3:00", 3), 6, 0);
        assert_eq!(bench.passed(), lines(&[(3, 1)]));
    }
}

#[test]
fn a_clock_that_jumps_back_neither_loses_nor_holds_back() {
    let mut bench = Bench::default();
    bench.take(report("0000:b3:00", 0), 3600, 0);
    bench.take(report("0000:b3:00", 1), 0, 1);
    bench.take(report("0000:b3:00", 2), 5, 30);
    bench.tick(60);
    assert_eq!(bench.passed(), lines(&[(0, 1), (1, 2)]));
}

#[test]
fn beyond_the_limit_the_oldest_window_ends_early() {
    let mut bench = Bench::default();
    for index in 0..=MAX_WINDOWS as u64 {
        let pci = format!("{index:04x}:00:00");
        bench.take(report(&pci, index), 0, index);
        bench.take(report(&pci, 10_000 + index), 0, index);
    }
    let passed = bench.passed();
    assert_eq!(passed.len(), MAX_WINDOWS + 2);
    // The window of the first fault, with its one repeat.
    assert_eq!(
        passed[MAX_WINDOWS..],
        lines(&[(10_000, 1), (MAX_WINDOWS as u64, 1)])
    );
}

#[test]
fn a_storm_gives_one_event_per_fault_and_window_and_counts_every_line() {
    const LINES: u64 = 100_000;
    const FAULTS: u64 = 29;
    let mut bench = Bench::default();
    let gpus: Vec<String> = (0..FAULTS)
        .map(|gpu| format!("0000:{gpu:02x}:00"))
        .collect();
    // Ten minutes of storm.
    for line in 0..LINES {
        let at = i64::try_from(line * 600 / LINES).unwrap();
        let gpu = &gpus[usize::try_from(line % FAULTS).unwrap()];
        bench.take(report(gpu, line), at, 0);
    }
    bench.tick(60);
    let passed = bench.passed();
    assert!(passed.len() as u64 <= 11 * FAULTS, "{}", passed.len());
    assert_eq!(passed.iter().map(|(_, count)| count).sum::<u64>(), LINES);
}

/// GPUs whose faults are open after the events that passed.
#[derive(Default)]
struct Downstream(std::collections::BTreeSet<String>);

impl Downstream {
    fn take(&mut self, events: &[HealthEvent]) {
        for event in events {
            let gpu = &event.entities_impacted[0].entity_value;
            if event.processing_strategy == ProcessingStrategy::StoreOnly as i32 {
            } else if event.is_healthy {
                self.0.remove(gpu);
            } else {
                self.0.insert(gpu.clone());
            }
        }
    }
}

fn all_clear(line: u64) -> HealthEvent {
    HealthEvent {
        is_healthy: true,
        error_code: vec!["163".into()],
        ..minor(line)
    }
}

fn minor(line: u64) -> HealthEvent {
    HealthEvent {
        is_fatal: false,
        error_code: vec!["163".into()],
        ..report("0000:b3:00", line)
    }
}

#[test]
fn equal_recoveries_become_one_with_their_count() {
    let mut bench = Bench::default();
    for line in 0..3_000 {
        bench.take(all_clear(line), 0, 0);
    }
    assert_eq!(bench.passed(), lines(&[(0, 1)]));
    // The count changed nothing.
    bench.tick(60);
    let counted = &bench.out[0];
    assert!(counted.is_healthy);
    let store_only = ProcessingStrategy::StoreOnly as i32;
    assert_eq!(counted.processing_strategy, store_only);
    assert_eq!(bench.passed(), lines(&[(1, 2_999)]));
    // One recovery passes in each window, since other senders may have reported faults.
    bench.take(all_clear(3_000), 61, 61);
    bench.take(all_clear(3_001), 62, 62);
    bench.take(all_clear(3_002), 121, 62);
    assert_eq!(bench.passed(), lines(&[(3_000, 1), (3_001, 1), (3_002, 1)]));
    // Another device or another code makes another recovery.
    let mut other = all_clear(4_000);
    other.entities_impacted[0].entity_value = "0000:b4:00".into();
    bench.take(other, 121, 62);
    let mut other = all_clear(4_001);
    other.error_code = Vec::new();
    bench.take(other, 121, 62);
    assert_eq!(bench.passed(), lines(&[(4_000, 1), (4_001, 1)]));
}

#[test]
fn a_recovery_after_a_new_fault_passes_at_once_and_in_its_order() {
    let mut bench = Bench::default();
    bench.take(all_clear(1), 0, 0);
    bench.take(all_clear(2), 0, 0);
    bench.take(minor(3), 1, 0);
    bench.take(minor(4), 1, 0);
    bench.take(all_clear(5), 2, 0);
    bench.take(minor(6), 3, 0);
    // A count comes before the event that ends the fault, and never after it.
    let expected = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)];
    assert_eq!(bench.passed(), lines(&expected));
    // A fault whose window has ended silently.
    bench.tick(60);
    assert_eq!(bench.passed(), []);
    bench.take(all_clear(7), 100, 100);
    assert_eq!(bench.passed(), lines(&[(7, 1)]));
}

#[test]
fn a_fault_that_comes_and_goes_is_told_a_few_times_in_a_window() {
    const PAIRS: u64 = 3_000;
    for stays in [false, true] {
        let mut bench = Bench::default();
        let mut downstream = Downstream::default();
        for pair in 0..PAIRS {
            bench.take(minor(2 * pair), 0, 0);
            bench.take(all_clear(2 * pair + 1), 0, 0);
            downstream.take(&bench.out);
            assert!(downstream.0.is_empty(), "pair {pair}");
        }
        if stays {
            bench.take(minor(2 * PAIRS), 1, 1);
        }
        bench.tick(60);
        downstream.take(&bench.out);
        assert_eq!(downstream.0.len(), usize::from(stays));
        assert!(bench.out.len() <= 2 * usize::from(MAX_RETURNS) + 4);
        let passed = bench.passed();
        let count: u64 = passed.iter().map(|(_, count)| count).sum();
        assert_eq!(count, 2 * PAIRS + u64::from(stays));
        // The next window is like the first.
        bench.take(all_clear(7_000), 61, 61);
        let at_once: &[(u64, u64)] = &[(7_000, 1)];
        assert_eq!(bench.passed(), lines(at_once));
    }
}

proptest! {
    #[test]
    fn every_report_is_counted_once(steps in prop::collection::vec(step(), 0..200)) {
        let mut bench = Bench::default();
        let (mut at, mut now, mut reports, mut recoveries) = (0, 0, 0, 0);
        for step in steps {
            match step {
                Step::Report { gpu, after } => {
                    at += after;
                    reports += 1;
                    bench.take(report(&format!("0000:{gpu:02x}:00"), reports), at, now);
                }
                Step::Wait(seconds) => {
                    now += seconds;
                    bench.tick(now);
                }
                Step::Recover(gpu) => {
                    let event = healthy(&format!("0000:{gpu:02x}:00"));
                    bench
                        .fold
                        .recovered_elsewhere(&event, second(at), &mut bench.out);
                }
                Step::Heal(gpu) => {
                    recoveries += 1;
                    let event = healthy(&format!("0000:{gpu:02x}:00"));
                    bench.take(event, at, now);
                }
                Step::Restart => {
                    let saved = serde_json::to_string(&bench.fold).unwrap();
                    bench.fold = serde_json::from_str(&saved).unwrap();
                }
            }
        }
        bench.fold.end(&mut bench.out);
        let count = |event: &HealthEvent| Sightings::of(event, second(0)).count;
        let (healthy, faults) = bench.out.drain(..).partition(|event| event.is_healthy);
        let healthy: Vec<HealthEvent> = healthy;
        prop_assert_eq!(healthy.iter().map(count).sum::<u64>(), recoveries);
        bench.out = faults;
        let passed = bench.passed();
        prop_assert_eq!(passed.iter().map(|(_, count)| count).sum::<u64>(), reports);
        // Each event has a line of its own.
        let mut lines: Vec<_> = passed.iter().map(|(line, _)| line).collect();
        lines.sort();
        lines.dedup();
        prop_assert_eq!(lines.len(), passed.len());
    }

    /// A recovery passes at once, and so does a fault that has not come and gone many times;
    /// everything else passes when the window ends.
    #[test]
    fn what_is_told_is_what_is_broken(steps in prop::collection::vec(step(), 0..300)) {
        let mut bench = Bench::default();
        let mut open = Downstream::default();
        let mut broken = std::collections::BTreeSet::new();
        let (mut at, mut latest, mut now, mut line) = (0, 0, 0, 0);
        for step in steps {
            line += 1;
            match step {
                Step::Report { gpu, after } => {
                    let gpu = format!("0000:{gpu:02x}:00");
                    at += after;
                    latest = latest.max(at);
                    bench.take(report(&gpu, line), at, now);
                    broken.insert(gpu);
                }
                Step::Wait(seconds) => {
                    now += seconds;
                    bench.tick(now);
                }
                Step::Recover(gpu) => {
                    let gpu = format!("0000:{gpu:02x}:00");
                    open.0.remove(&gpu);
                    let event = healthy(&gpu);
                    bench
                        .fold
                        .recovered_elsewhere(&event, second(latest), &mut bench.out);
                    broken.remove(&gpu);
                }
                Step::Heal(gpu) => {
                    let gpu = format!("0000:{gpu:02x}:00");
                    bench.take(healthy(&gpu), at, now);
                    broken.remove(&gpu);
                }
                Step::Restart => {
                    let saved = serde_json::to_string(&bench.fold).unwrap();
                    bench.fold = serde_json::from_str(&saved).unwrap();
                }
            }
            open.take(&bench.out);
            bench.out.clear();
            prop_assert!(open.0.is_subset(&broken), "{:?} {broken:?}", open.0);
        }
        bench.tick(now + 60);
        open.take(&bench.out);
        prop_assert_eq!(open.0, broken);
    }
}
