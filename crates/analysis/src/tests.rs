mod analyzer;
mod built_in;

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
        id: id.to_owned(),
    };
    let report = Report {
        first: at(first),
        count,
        value: value.to_owned(),
    };
    (key, Entry::Report(report))
}

fn repair(second: i64, id: &str) -> (EntryKey, Entry) {
    let key = EntryKey {
        at: at(second),
        id: id.to_owned(),
    };
    (key, Entry::Repair)
}

fn evidence(condition: &Condition, entries: &[(EntryKey, Entry)], now: i64) -> Option<Vec<String>> {
    let history = History::of(condition, entries.iter().cloned());
    let conclusion = history.conclusion(condition, at(now))?;
    Some(conclusion.evidence.clone())
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
    let history = History::of(&two, entries.iter().cloned());
    assert_eq!(history.ends_at(&two), Some(at(101)));
    two.until_repaired = true;
    assert!(evidence(&two, &entries, 1_000_000).is_some());
    assert_eq!(History::of(&two, entries.clone()).ends_at(&two), None);
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
    let mut history = History::default();
    for index in 0..10_000 {
        let (key, entry) = report(index * 11, &format!("{index:05}"), "13");
        assert_eq!(history.record(&five, key, entry), Recorded::Done);
    }
    let debug = format!("{history:?}");
    assert!(debug.len() < 40_000, "{} bytes", debug.len());
}

/// Computes the conclusion from the definition: looks at all reports again at each report.
fn defined(condition: &Condition, entries: &BTreeMap<EntryKey, Entry>, now: Timestamp) -> bool {
    let mut open = false;
    let mut since_repair: Vec<(&EntryKey, &Report)> = Vec::new();
    for (key, entry) in entries {
        let Entry::Report(report) = entry else {
            open = false;
            since_repair.clear();
            continue;
        };
        let last = since_repair.last().map(|(key, _)| key.at);
        let is_over = last.is_some_and(|last| last < key.at - condition.window);
        open &= condition.until_repaired || !is_over;
        since_repair.push((key, report));
        open |= reached(condition, &since_repair, key.at) >= u64::from(condition.threshold);
    }
    let last = since_repair.last().map(|(key, _)| key.at);
    open && (condition.until_repaired || last.is_some_and(|last| last >= now - condition.window))
}

/// Returns the number that the condition counts within the window before a time.
fn reached(condition: &Condition, reports: &[(&EntryKey, &Report)], now: Timestamp) -> u64 {
    let begin = now - condition.window;
    let within = || reports.iter().filter(|(key, _)| key.at >= begin);
    match &condition.kind {
        ConditionKind::Count => within().map(|(_, report)| report.count).sum(),
        ConditionKind::Distinct => {
            let values: BTreeSet<&str> = within().map(|(_, it)| it.value.as_str()).collect();
            values.len() as u64
        }
        ConditionKind::Burst(gaps) => {
            // The number of bursts with a report within the window.
            let mut ends: Vec<Timestamp> = Vec::new();
            for (index, (key, report)) in reports.iter().enumerate() {
                let before = &reports[..index];
                let gap = |it: Option<&(&EntryKey, &Report)>, most| {
                    it.is_some_and(|(key, _)| report.first.duration_since(key.at) <= most)
                };
                let is_sticky = |value: &str| gaps.sticky.contains(value);
                let mut sticky = before.iter().rev().filter(|(_, it)| is_sticky(&it.value));
                let goes_on = gap(before.last(), gaps.gap)
                    || (is_sticky(&report.value) && gap(sticky.next(), gaps.sticky_gap));
                match ends.last_mut() {
                    Some(end) if goes_on => *end = key.at,
                    _ => ends.push(key.at),
                }
            }
            ends.iter().filter(|end| **end >= begin).count() as u64
        }
    }
}

fn any_condition() -> impl Strategy<Value = Condition> {
    let kind = prop_oneof![
        Just(ConditionKind::Count),
        Just(ConditionKind::Distinct),
        Just(bursts()),
    ];
    (kind, 1_u32..5, any::<bool>()).prop_map(|(kind, threshold, until_repaired)| Condition {
        until_repaired,
        ..condition(kind, threshold)
    })
}

fn any_entry() -> impl Strategy<Value = (EntryKey, Entry)> {
    let report = (
        0_i64..900,
        0_i64..20,
        "[a-d]",
        prop_oneof!["13", "79"],
        1_u64..4,
    );
    prop_oneof![
        8 => report.prop_map(|(first, long, id, value, count)| {
            folded(first, first + long, &format!("{id}{first}"), &value, count)
        }),
        1 => (0_i64..900).prop_map(|second| repair(second, "r")),
    ]
}

proptest! {
    /// Entries in any order, each up to twice, lead to the conclusion that the set of them defines.
    #[test]
    fn what_follows_depends_on_the_set_of_entries_alone(
        condition in any_condition(),
        arrivals in proptest::collection::vec(any_entry(), 1..120),
        again in any::<prop::sample::Index>(),
        pause in 0_i64..200,
    ) {
        let mut history = History::default();
        let mut all: BTreeMap<EntryKey, Entry> = BTreeMap::new();
        let twice = arrivals[again.index(arrivals.len())].clone();
        for (key, entry) in arrivals.into_iter().chain([twice]) {
            // A key has one entry.
            let entry = all.entry(key.clone()).or_insert(entry).clone();
            if history.record(&condition, key, entry) == Recorded::TooOld {
                history = History::of(&condition, all.clone());
            }
            let now = all.last_key_value().unwrap().0.at + secs(pause);
            let found = history.conclusion(&condition, now).is_some();
            prop_assert_eq!(found, defined(&condition, &all, now));
            prop_assert_eq!(&history.state_after(), &History::of(&condition, all.clone()).state_after());
        }
    }
}
