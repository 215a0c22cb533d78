mod analyzer;
mod built_in;
mod compared;
mod explain;
mod sizes;

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn secs(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

fn condition(kind: ConditionKind, threshold: u32) -> Condition {
    Condition {
        kind,
        threshold,
        window: secs(100),
        close: None,
        until_repaired: false,
    }
}

fn bursts() -> ConditionKind {
    ConditionKind::Burst(Gaps {
        gap: secs(10),
        sticky: ["79".to_owned()].into(),
        sticky_gap: secs(50),
    })
}

/// Returns an entry: a report with this value.
fn report(second: i64, id: &str, value: &str) -> (EntryKey, Entry) {
    folded(second, second, id, value, 1)
}

/// Returns an entry of several reports between two times.
fn folded(first: i64, last: i64, id: &str, value: &str, count: u64) -> (EntryKey, Entry) {
    let key = EntryKey {
        at: at(last),
        id: id.into(),
    };
    let report = Report {
        first: at(first),
        count,
        value: value.into(),
        job: None,
        steps: 1,
        node: None,
        only_counts: false,
        members: Vec::new(),
    };
    (key, Entry::Report(report))
}

/// Returns a report of a job.
fn of_job(second: i64, id: &str, job: &str) -> (EntryKey, Entry) {
    let (key, entry) = report(second, id, "13");
    let Entry::Report(report) = entry else {
        unreachable!()
    };
    let job = Some(job.into());
    (key, Entry::Report(Report { job, ..report }))
}

/// Returns a report that is part of these steps.
fn step(second: i64, id: &str, steps: u32) -> (EntryKey, Entry) {
    let (key, entry) = report(second, id, "13");
    let Entry::Report(report) = entry else {
        unreachable!()
    };
    (key, Entry::Report(Report { steps, ..report }))
}

/// Returns another fault of the group with this code, or its recovery.
fn other(second: i64, id: &str, code: &str, is_healthy: bool) -> (EntryKey, Entry) {
    let key = EntryKey {
        at: at(second),
        id: id.into(),
    };
    let other = OtherFault {
        check: "check".into(),
        codes: vec![code.into()],
        is_healthy,
    };
    (key, Entry::Other(other))
}

/// Builds a history of entries in any order.
fn history(condition: &Condition, entries: &[(EntryKey, Entry)]) -> History {
    let sorted: BTreeMap<EntryKey, Entry> = entries.iter().cloned().collect();
    let mut history = History::new(condition, None);
    for (key, entry) in sorted {
        assert_eq!(history.record(condition, key, entry), Recorded::Done);
    }
    history
}

fn repair(second: i64, id: &str) -> (EntryKey, Entry) {
    let key = EntryKey {
        at: at(second),
        id: id.into(),
    };
    (key, Entry::Repair)
}

fn evidence(condition: &Condition, entries: &[(EntryKey, Entry)], now: i64) -> Option<Vec<String>> {
    let history = history(condition, entries);
    let conclusion = history.conclusion(condition, at(now))?;
    Some(
        conclusion
            .evidence
            .iter()
            .map(|id| id.to_string())
            .collect(),
    )
}

#[test]
fn reports_are_counted_within_the_window_with_both_ends() {
    let three = condition(ConditionKind::Count, 3);
    let entries = |last| {
        [
            report(0, "a", "13"),
            report(50, "b", "13"),
            report(last, "c", "13"),
        ]
    };
    let all = Some(["a", "b", "c"].map(str::to_owned).to_vec());
    assert_eq!(evidence(&three, &entries(100), 100), all);
    assert_eq!(evidence(&three, &entries(101), 101), None);
    // An event that stands for repeats counts as many.
    let repeats = [report(0, "a", "13"), folded(1, 60, "b", "13", 2)];
    let both = Some(["a", "b"].map(str::to_owned).to_vec());
    assert_eq!(evidence(&three, &repeats, 60), both);
}

#[test]
fn a_conclusion_ends_with_its_window_or_with_a_repair() {
    let mut two = condition(ConditionKind::Count, 2);
    let entries = [report(0, "a", "13"), report(1, "b", "13")];
    assert!(evidence(&two, &entries, 101).is_some());
    assert_eq!(evidence(&two, &entries, 102), None);
    let ends = |two: &Condition| history(two, &entries).changes_after(two, at(1));
    assert_eq!(ends(&two), Some(at(101)));
    two.until_repaired = true;
    assert!(evidence(&two, &entries, 1_000_000).is_some());
    assert_eq!(ends(&two), None);
    let early = [&entries[..1], &[repair(0, "r"), report(3, "c", "13")]].concat();
    assert!(
        evidence(&two, &early, 3).is_some(),
        "nothing was concluded that could be repaired"
    );
    let repaired = [&entries[..], &[repair(2, "r"), report(3, "c", "13")]].concat();
    assert_eq!(
        evidence(&two, &repaired, 3),
        None,
        "it counts from the repair"
    );
}

#[test]
fn values_are_counted_once_each() {
    let two = condition(ConditionKind::Distinct, 2);
    let same = [report(0, "a", "GPU-1"), report(1, "b", "GPU-1")];
    assert_eq!(evidence(&two, &same, 1), None);
    let other = [&same[..], &[report(2, "c", "GPU-2")]].concat();
    let newest = Some(["b", "c"].map(str::to_owned).to_vec());
    assert_eq!(evidence(&two, &other, 2), newest);
}

#[test]
fn reports_close_to_each_other_are_one_burst_and_sticky_ones_for_longer() {
    let two = condition(bursts(), 2);
    let close = [
        report(0, "a", "13"),
        report(10, "b", "13"),
        report(20, "c", "13"),
    ];
    assert_eq!(evidence(&two, &close, 20), None);
    let apart = [report(0, "a", "13"), report(11, "b", "13")];
    assert!(evidence(&two, &apart, 11).is_some());
    let sticky = [report(0, "a", "79"), report(50, "b", "79")];
    assert_eq!(evidence(&two, &sticky, 50), None);
    let sticky = [report(0, "a", "79"), report(51, "b", "79")];
    assert!(evidence(&two, &sticky, 51).is_some());
    // The repeats that an event stands for fill the gap.
    let filled = [
        report(0, "a", "13"),
        folded(8, 40, "b", "13", 20),
        report(45, "c", "13"),
    ];
    assert_eq!(evidence(&two, &filled, 45), None);
}

#[test]
fn the_state_is_bounded_whatever_the_number_of_reports() {
    let five = condition(bursts(), 5);
    let mut history = History::new(&five, None);
    for index in 0..10_000 {
        let (key, entry) = report(index * 11, &format!("{index:05}"), "13");
        assert_eq!(history.record(&five, key, entry), Recorded::Done);
    }
    let debug = format!("{history:?}");
    assert!(debug.len() < 40_000, "{} bytes", debug.len());
}

#[test]
fn reports_of_one_job_count_once() {
    let two = condition(ConditionKind::Count, 2);
    let one_job = [
        of_job(0, "a", "j"),
        of_job(50, "b", "j"),
        of_job(99, "c", "j"),
    ];
    assert_eq!(evidence(&two, &one_job, 99), None);
    let other = [&one_job[..], &[of_job(99, "d", "k")]].concat();
    let all = Some(["a", "d"].map(str::to_owned).to_vec());
    assert_eq!(evidence(&two, &other, 99), all);
    let mut bursts = condition(bursts(), 2);
    assert_eq!(evidence(&bursts, &one_job, 99), None);
    bursts.threshold = 1;
    assert!(evidence(&bursts, &one_job, 99).is_some());
}

#[test]
fn two_close_to_each_other_are_needed_where_the_rule_says_so() {
    let mut three = condition(ConditionKind::Count, 3);
    three.close = Some(secs(5));
    let of = |middle| {
        [
            report(0, "a", "x"),
            report(middle, "b", "x"),
            report(60, "c", "x"),
        ]
    };
    assert_eq!(evidence(&three, &of(30), 60), None);
    assert!(evidence(&three, &of(55), 60).is_some());
    assert!(evidence(&three, &of(5), 60).is_some());
}

#[test]
fn steps_are_met_in_their_order_and_in_time() {
    let sequence = condition(ConditionKind::Sequence { within: secs(20) }, 3);
    let of = |middle, last| [step(0, "a", 1), step(middle, "b", 2), step(last, "c", 4)];
    let all = Some(["a", "b", "c"].map(str::to_owned).to_vec());
    assert_eq!(evidence(&sequence, &of(20, 40), 40), all);
    assert_eq!(evidence(&sequence, &of(21, 40), 40), None);
    let wrong = [step(0, "a", 2), step(1, "b", 1), step(2, "c", 4)];
    assert_eq!(evidence(&sequence, &wrong, 2), None);
    // A report is one step only, whatever it matches.
    assert_eq!(
        evidence(&sequence, &[step(0, "a", 7), step(1, "b", 7)], 1),
        None
    );
    assert!(
        evidence(
            &sequence,
            &[step(0, "a", 7), step(1, "b", 7), step(2, "c", 7)],
            2
        )
        .is_some()
    );
}

#[test]
fn a_report_is_alone_once_its_gap_has_passed_without_another_fault() {
    let solo = condition(ConditionKind::Solo { gap: secs(10) }, 1);
    let alone = [report(50, "a", "13")];
    assert_eq!(evidence(&solo, &alone, 60), None);
    assert!(evidence(&solo, &alone, 61).is_some());
    let with = |more: (EntryKey, Entry)| evidence(&solo, &[alone[0].clone(), more], 61);
    assert_eq!(with(report(60, "b", "13")), None);
    assert!(with(report(61, "b", "13")).is_some());
    assert_eq!(with(other(60, "b", "48", false)), None);
    assert_eq!(with(other(0, "b", "48", false)), None);
    assert!(with(other(60, "b", "48", true)).is_some());
    let recovered = [other(0, "b", "48", false), other(1, "c", "48", true)];
    assert!(evidence(&solo, &[&recovered[..], &alone[..]].concat(), 61).is_some());
    let another = [other(0, "b", "48", false), other(1, "c", "63", true)];
    assert_eq!(
        evidence(&solo, &[&another[..], &alone[..]].concat(), 61),
        None
    );
    assert_eq!(evidence(&solo, &[folded(50, 50, "a", "13", 2)], 61), None);
}

#[test]
fn a_trend_needs_a_window_before_and_the_factor() {
    let trend = condition(ConditionKind::Trend { factor: 3 }, 6);
    let before = [report(0, "a", "x"), report(20, "b", "x")];
    let six = |count| [&before[..], &[folded(110, 120, "c", "x", count)]].concat();
    assert!(evidence(&trend, &six(6), 120).is_some());
    assert_eq!(evidence(&trend, &six(5), 120), None);
    assert_eq!(
        evidence(&trend, &six(6)[2..], 120),
        None,
        "there is no window before"
    );
}

#[test]
fn what_only_counts_concludes_nothing_alone() {
    let two = condition(ConditionKind::Count, 2);
    let earlier = |second, id| {
        let (key, entry) = report(second, id, "13");
        let Entry::Report(report) = entry else {
            unreachable!()
        };
        let only_counts = true;
        (
            key,
            Entry::Report(Report {
                only_counts,
                ..report
            }),
        )
    };
    let both = [earlier(0, "a"), earlier(1, "b")];
    assert_eq!(evidence(&two, &both, 1), None);
    assert!(evidence(&two, &[both[0].clone(), report(1, "c", "13")], 1).is_some());
}

/// Computes the conclusion from the definition: looks at all entries again at each entry.
fn defined(condition: &Condition, entries: &BTreeMap<EntryKey, Entry>, now: Timestamp) -> bool {
    let mut open = false;
    let mut since: Vec<(&EntryKey, &Entry)> = Vec::new();
    let last_of = |since: &[(&EntryKey, &Entry)]| {
        let mut reports = since
            .iter()
            .filter(|(_, it)| matches!(it, Entry::Report(_)));
        reports.next_back().map(|(key, _)| key.at)
    };
    let over = |since: &[(&EntryKey, &Entry)], now: Timestamp| {
        let last = last_of(since);
        !condition.until_repaired && last.is_some_and(|last| last < now - condition.window)
    };
    let mut before = Timestamp::MIN;
    for (key, entry) in entries {
        open |= matured(condition, &since, before, key.at);
        open &= !over(&since, key.at);
        before = key.at;
        if *entry == Entry::Repair {
            if open {
                since.clear();
            }
            open = false;
            continue;
        }
        since.push((key, entry));
        if let Entry::Report(report) = entry {
            let reports: Vec<(&EntryKey, &Report)> = (since.iter())
                .filter_map(|(key, entry)| match entry {
                    Entry::Report(report) => Some((*key, report)),
                    _ => None,
                })
                .collect();
            open |= !report.only_counts && is_reached(condition, &reports, key.at);
        }
    }
    open |= matured(condition, &since, before, now);
    open && !over(&since, now)
}

/// Returns true if a report is found to stand alone between two times.
fn matured(
    condition: &Condition,
    since: &[(&EntryKey, &Entry)],
    before: Timestamp,
    now: Timestamp,
) -> bool {
    let ConditionKind::Solo { gap } = condition.kind else {
        return false;
    };
    since.iter().enumerate().any(|(index, (key, entry))| {
        let Entry::Report(report) = entry else {
            return false;
        };
        let judged = key.at + gap;
        let is_new = judged < now && judged >= before;
        let close = since.iter().enumerate().any(|(other, (at, it))| match it {
            Entry::Report(_) if other < index => report.first.duration_since(at.at) <= gap,
            Entry::Report(_) if other > index => at.at.duration_since(key.at) <= gap,
            Entry::Other(it) if other > index => !it.is_healthy && at.at <= judged,
            _ => false,
        });
        let mut others: BTreeMap<&str, Timestamp> = BTreeMap::new();
        for (at, it) in &since[..index] {
            if let Entry::Other(it) = it {
                let code = &*it.codes[0];
                if it.is_healthy {
                    others.remove(code);
                } else {
                    others.insert(code, at.at);
                }
            }
        }
        let is_open = others.values().any(|at| *at >= key.at - condition.window);
        is_new && !close && !is_open && report.count == 1 && !report.only_counts
    })
}

/// Returns true if the condition holds with the last of these reports.
fn is_reached(condition: &Condition, reports: &[(&EntryKey, &Report)], now: Timestamp) -> bool {
    let begin = now - condition.window;
    let within = || reports.iter().filter(|(key, _)| key.at >= begin);
    let jobs = || -> BTreeSet<&Text> { within().filter_map(|(_, it)| it.job.as_ref()).collect() };
    let threshold = u64::from(condition.threshold);
    let found = match &condition.kind {
        ConditionKind::Count => {
            let counts = within().filter(|(_, it)| it.job.is_none());
            counts.map(|(_, it)| it.count).sum::<u64>() + jobs().len() as u64
        }
        ConditionKind::Distinct => {
            let values: BTreeSet<&str> = within().map(|(_, it)| &*it.value).collect();
            values.len() as u64
        }
        ConditionKind::Burst(gaps) => {
            // End of each burst, and its job.
            let mut bursts: Vec<(Timestamp, Option<&Text>)> = Vec::new();
            for (index, (key, report)) in reports.iter().enumerate() {
                let earlier = &reports[..index];
                let gap = |it: Option<&(&EntryKey, &Report)>, most| {
                    it.is_some_and(|(key, _)| report.first.duration_since(key.at) <= most)
                };
                let is_sticky = |value: &str| gaps.sticky.contains(value);
                let mut sticky = earlier.iter().rev().filter(|(_, it)| is_sticky(&it.value));
                let goes_on = gap(earlier.last(), gaps.gap)
                    || (is_sticky(&report.value) && gap(sticky.next(), gaps.sticky_gap));
                bursts.retain(|(end, _)| *end >= key.at - condition.window || goes_on);
                let job = report.job.as_ref();
                let known = bursts.iter().position(|(_, of)| of.is_some() && *of == job);
                match (bursts.last_mut(), known) {
                    (Some(burst), _) if goes_on => burst.0 = key.at,
                    (_, Some(known)) => {
                        let burst = bursts.remove(known);
                        bursts.push((key.at, burst.1));
                    }
                    _ => bursts.push((key.at, job)),
                }
            }
            bursts.iter().filter(|(end, _)| *end >= begin).count() as u64
        }
        ConditionKind::Sequence { within } => {
            return chain(condition, *within, reports, condition.threshold, now);
        }
        // Tests of their own (`compared`).
        ConditionKind::Solo { .. }
        | ConditionKind::Exclusive { .. }
        | ConditionKind::Noisy { .. }
        | ConditionKind::Silent { .. } => return false,
        ConditionKind::Trend { factor } => {
            let length = i64::try_from(condition.window.as_millis()).unwrap() / 12;
            let part = |at: Timestamp| at.as_millisecond().div_euclid(length);
            let count = |from: i64, to: i64| -> u64 {
                let parts = (from + 1)..=to;
                let within = reports
                    .iter()
                    .filter(|(key, _)| parts.contains(&part(key.at)));
                within
                    .map(|(_, it)| if it.job.is_some() { 1 } else { it.count })
                    .sum()
            };
            let newest = part(now);
            let (count, before) = (count(newest - 12, newest), count(newest - 24, newest - 12));
            return count >= threshold && before > 0 && count >= before * u64::from(*factor);
        }
    };
    found >= threshold
}

/// Returns true if the last report is the last of `steps` steps.
fn chain(
    condition: &Condition,
    within: SignedDuration,
    reports: &[(&EntryKey, &Report)],
    steps: u32,
    end: Timestamp,
) -> bool {
    let Some(((key, report), earlier)) = reports.split_last() else {
        return false;
    };
    let is_step = report.steps >> (steps - 1) & 1 == 1;
    if !is_step || end.duration_since(key.at) > condition.window {
        return false;
    }
    steps == 1
        || (0..earlier.len()).any(|index| {
            key.at.duration_since(earlier[index].0.at) <= within
                && chain(condition, within, &earlier[..=index], steps - 1, end)
        })
}

fn any_condition() -> impl Strategy<Value = Condition> {
    let kind = prop_oneof![
        Just(ConditionKind::Count),
        Just(ConditionKind::Distinct),
        Just(bursts()),
        Just(ConditionKind::Sequence { within: secs(60) }),
        Just(ConditionKind::Solo { gap: secs(15) }),
        Just(ConditionKind::Trend { factor: 2 }),
    ];
    (kind, 1_u32..5, any::<bool>()).prop_map(|(kind, threshold, until_repaired)| Condition {
        until_repaired,
        ..condition(kind, threshold)
    })
}

fn any_entry() -> impl Strategy<Value = (EntryKey, Entry)> {
    let report = (
        (0_i64..900, 0_i64..20),
        "[a-d]",
        prop_oneof!["13", "79"],
        1_u64..4,
        (
            prop_oneof![3 => Just(None), 1 => "[jk]".prop_map(|job| Some(job.as_str().into()))],
            1_u32..16,
            prop::bool::weighted(0.1),
        ),
    );
    let others = (0_i64..900, prop_oneof!["48", "63"], any::<bool>());
    prop_oneof![
        8 => report.prop_map(|((first, long), id, value, count, (job, steps, only_counts))| {
            let (key, entry) = folded(first, first + long, &format!("{id}{first}"), &value, count);
            let Entry::Report(report) = entry else { unreachable!() };
            (key, Entry::Report(Report { job, steps, only_counts, ..report }))
        }),
        1 => others.prop_map(|(second, code, healthy)| other(second, &format!("o{second}"), &code, healthy)),
        1 => (0_i64..900).prop_map(|second| repair(second, "r")),
    ]
}

proptest! {
    /// Entries in any order, each up to twice, lead to the conclusion that the set of them defines.
    #[test]
    fn what_follows_depends_on_the_set_of_entries_alone(
        condition in any_condition(),
        arrivals in proptest::collection::vec(any_entry(), 1..80),
        again in any::<prop::sample::Index>(),
        pause in 0_i64..200,
    ) {
        let mut found = History::new(&condition, None);
        let mut all: BTreeMap<EntryKey, Entry> = BTreeMap::new();
        let twice = arrivals[again.index(arrivals.len())].clone();
        for (key, entry) in arrivals.into_iter().chain([twice]) {
            // A key has one entry.
            let entry = all.entry(key.clone()).or_insert(entry).clone();
            let sorted: Vec<(EntryKey, Entry)> = all.clone().into_iter().collect();
            if found.record(&condition, key, entry) == Recorded::TooOld {
                found = history(&condition, &sorted);
            }
            let now = all.last_key_value().unwrap().0.at + secs(pause);
            let is_open = found.conclusion(&condition, now).is_some();
            prop_assert_eq!(is_open, defined(&condition, &all, now));
            let again = history(&condition, &sorted);
            prop_assert_eq!(found.state(), again.state());
            let saved = serde_json::to_vec(&found).unwrap();
            prop_assert_eq!(&serde_json::from_slice::<History>(&saved).unwrap(), &found);
        }
    }
}
