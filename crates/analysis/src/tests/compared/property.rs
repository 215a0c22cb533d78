//! The set of events defines what comparisons conclude.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::Saved;

/// Members in the order of node and GPU, with the times of their reports.
type Times = BTreeMap<(String, u8), Vec<i64>>;

/// Computes from all events which GPU is silent.
fn silent(events: &[EventRecord], now: i64) -> Option<String> {
    let second = |one: &EventRecord| one.created_at.as_second();
    let gpu = |one: &EventRecord| {
        let uuid = &one.event.entities_impacted[1].entity_value;
        let index = uuid[uuid.len() - 1..].parse::<u8>().unwrap();
        (one.event.node_name.clone(), index)
    };
    let of = |check: &'static str| events.iter().filter(move |it| it.event.check_name == check);
    let repaired = |node: &str| {
        of("silent")
            .filter(|it| it.event.node_name == node)
            .map(|it| (second(it), it.id.clone()))
            .max()
    };
    let mut times: Times = BTreeMap::new();
    let mut last = i64::MIN;
    let mut sorted: Vec<&EventRecord> = of(keys::CHECK_XID).collect();
    sorted.sort_by_key(|it| (it.created_at, it.id.clone()));
    for one in sorted {
        last = last.max(second(one));
        if repaired(&one.event.node_name)
            .is_none_or(|repair| repair < (second(one), one.id.clone()))
        {
            times.entry(gpu(one)).or_default().push(second(one));
        }
    }
    times.retain(|_, times| times.last().is_some_and(|at| *at >= last - WINDOW));
    let first = |times: &Vec<i64>| {
        let mut begin = *times.last().unwrap();
        for at in times.iter().rev() {
            if begin - at <= WINDOW {
                begin = *at;
            } else {
                break;
            }
        }
        begin
    };
    let since = times.values().map(first).max()?;
    let boots: BTreeMap<String, (i64, String)> =
        of(keys::CHECK_GPU_INVENTORY).fold(BTreeMap::new(), |mut boots, one| {
            let known = boots
                .entry(one.event.node_name.clone())
                .or_insert((i64::MIN, String::new()));
            *known = known
                .clone()
                .max((second(one), one.event.metadata[keys::META_BOOT_ID].clone()));
            boots
        });
    let nodes: BTreeSet<&String> = times.keys().map(|(node, _)| node).collect();
    let named = of(keys::CHECK_GPU_INVENTORY)
        .filter(|it| it.event.metadata[keys::META_BOOT_ID] == boots[&it.event.node_name].1);
    let named: BTreeSet<(String, u8)> = named
        .map(gpu)
        .filter(|(node, _)| nodes.contains(node))
        .collect();
    let mut silent = named.iter().filter(|one| !times.contains_key(*one));
    let (node, index) = silent.next()?;
    let is_open =
        silent.next().is_none() && times.len() >= 3 && since + GAP < now && last >= now - WINDOW;
    is_open.then(|| format!("silent {node} 0000:b{index}:00"))
}

/// Computes from all events on which GPUs two jobs have failed and on no other GPU.
fn exclusive(events: &[EventRecord], now: i64) -> Vec<String> {
    let second = |one: &EventRecord| one.created_at.as_second();
    let uuid = |one: &EventRecord| one.event.entities_impacted[1].entity_value.clone();
    let mut sorted: Vec<&EventRecord> = events
        .iter()
        .filter(|it| it.event.metadata.contains_key(keys::META_JOB))
        .collect();
    sorted.sort_by_key(|it| (it.created_at, it.id.clone()));
    let job = |one: &EventRecord| one.event.metadata[keys::META_JOB].clone();
    let gpus: BTreeSet<(String, String)> = sorted
        .iter()
        .map(|it| (it.event.node_name.clone(), uuid(it)))
        .collect();
    let mut found = Vec::new();
    for (node, gpu) in gpus {
        let repairs = events
            .iter()
            .filter(|it| it.event.check_name == "exclusive" && it.event.node_name == node);
        let repairs = repairs.filter(|it| {
            it.event
                .entities_impacted
                .iter()
                .all(|one| one.entity_value == gpu)
        });
        let repaired = repairs.map(|it| (second(it), it.id.clone())).max();
        // First and last time of each job, which two pauses of a window divide.
        let mut spans: Vec<(String, i64, i64)> = Vec::new();
        for one in sorted.iter().filter(|it| uuid(it) == gpu) {
            if repaired
                .as_ref()
                .is_some_and(|repair| (second(one), one.id.clone()) < *repair)
            {
                continue;
            }
            let known = spans
                .iter_mut()
                .find(|(of, _, last)| *of == job(one) && second(one) - *last <= WINDOW);
            match known {
                Some((_, _, last)) => *last = second(one),
                None => spans.push((job(one), second(one), second(one))),
            }
        }
        spans.retain(|(of, first, last)| {
            let near = (first.div_euclid(WINDOW) - 1)..=(last.div_euclid(WINDOW) + 1);
            let mut others = sorted.iter().filter(|it| job(it) == *of && uuid(it) != gpu);
            !others.any(|it| near.contains(&second(it).div_euclid(WINDOW)))
        });
        let met = |at: i64| {
            spans
                .iter()
                .filter(|(_, first, last)| *first <= at && at <= last + WINDOW)
                .count()
                >= 2
        };
        if spans
            .iter()
            .any(|(_, first, _)| met(*first) && first + GAP < now)
        {
            found.push(format!("exclusive {node} {gpu}"));
        }
    }
    found
}

fn any_event() -> impl Strategy<Value = EventRecord> {
    let place = || (0_i64..1500, prop_oneof!["a", "b", "c"], 0_u8..3);
    prop_oneof![
        6 => (place(), 1_u64..9).prop_map(|((at, node, gpu), count)| xids(at, &node, gpu, count)),
        3 => (place(), "[jkl]").prop_map(|((at, node, gpu), job)| of_job(at, &node, gpu, &job)),
        3 => place().prop_map(|(at, node, gpu)| inventory(at, &node, gpu, if at < 700 { "1" } else { "2" })),
        1 => (place(), prop_oneof!["silent", "noisy", "exclusive"], any::<bool>()).prop_map(
            |((at, node, gpu), rule, is_named)| {
                let gpu = if is_named { format!("GPU-{node}{gpu}") } else { String::new() };
                let mut event = recovery(at, &rule, &gpu).event;
                event.node_name = node;
                event.metadata.insert(RACK.to_owned(), "r".to_owned());
                record(at, event)
            }
        ),
    ]
}

/// Returns an event of each GPU, so that one of them may be silent.
fn all_gpus() -> impl Strategy<Value = Vec<EventRecord>> {
    let gpus = || {
        ["a", "b"]
            .into_iter()
            .flat_map(|node| (0..3).map(move |gpu| (node, gpu)))
    };
    (
        1200_i64..1500,
        prop::sample::subsequence(gpus().collect::<Vec<_>>(), 4..=6),
    )
        .prop_map(move |(at, noisy)| {
            let named = gpus().map(|(node, gpu)| inventory(at - 90, node, gpu, "2"));
            let noisy = noisy.into_iter().map(|(node, gpu)| xid(at, node, gpu));
            named.chain(noisy).collect()
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Conclusions that compare are the same after any order of the events, repetition and restart, and
    /// they are those that the set of events defines.
    #[test]
    fn comparisons_depend_on_the_set_of_events_alone(
        some in proptest::collection::vec(any_event(), 1..60),
        all in all_gpus(),
        order in Just(()).prop_perturb(|(), mut random| random.next_u64()),
        restarts in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
        pause in 0_i64..60,
    ) {
        let text = [rule("silent", SILENT), rule("noisy", NOISY), rule("exclusive", EXCLUSIVE)].concat();
        let rules = rules(&text);
        let mut events = [some, all].concat();
        events.push(events[usize::try_from(order % events.len() as u64).unwrap()].clone());
        let hash = |one: &EventRecord| {
            let bytes = one.id.bytes().chain(order.to_le_bytes());
            bytes.fold(0_u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)))
        };
        events.sort_by_key(hash);
        let mut sorted = events.clone();
        sorted.sort_by_key(|it| (it.created_at, it.id.clone()));
        let (mut one, mut other) = (Analyzer::new(rules.clone()), Analyzer::new(rules.clone()));
        let mut saved = Saved::default();
        let mut stops: Vec<usize> = restarts.iter().map(|it| it.index(events.len())).collect();
        stops.sort_unstable();
        let mut fed = 0;
        for stop in stops.into_iter().chain([events.len()]) {
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
            one = Analyzer::new(rules.clone());
            one.restore(&saved).unwrap();
        }
        feed(&mut other, &sorted);
        let now = sorted.last().unwrap().created_at.as_second() + pause;
        for analyzer in [&mut one, &mut other] {
            analyzer.time(at(now));
        }
        prop_assert_eq!(one.open().collect::<Vec<_>>(), other.open().collect::<Vec<_>>());
        let mut expected = exclusive(&events, now);
        expected.extend(silent(&events, now));
        expected.sort();
        let mut open = found(&one);
        open.retain(|it| !it.starts_with("noisy"));
        prop_assert_eq!(open, expected);
    }
}
