//! The built-in rules as SQL: a second definition of each, which shares nothing with the first.
//!
//! Random events go to the analyzer, in any order, some twice, with restarts and looks at the clock in
//! between, and into tables of `SQLite`. The open conclusions at the end are compared: rule, group, time of
//! the report that met the condition, and member or node. The queries look at all events at once.
//!
//! - `sql/facts.sql`: tables of events
//! - `sql/rules.sql`: numbers of the rules, and the reports of each rule and group
//! - `sql/conclusions.sql`: a query for each kind of rule

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    unreachable_pub
)]

extern crate gpuwarden_analysis as analysis;

#[path = "sql/events.rs"]
mod events;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use analysis::{Analyzer, Finding, Rule, Saved, built_in};
use contract::{ProcessingStrategy, keys};
use diagnosis::fold::Sightings;
use jiff::Timestamp;
use model::event::EventRecord;
use model::reporter::Authority;
use proptest::prelude::*;
use rusqlite::{Connection, params};

use events::{Dice, History};

/// Built-in rules; loading compiles their expressions, which takes a while.
static RULES: LazyLock<Vec<Rule>> = LazyLock::new(built_in);

/// Returns the open conclusions that follow from SQL.
fn by_sql(history: &History) -> Vec<String> {
    let table = Connection::open_in_memory().unwrap();
    table.execute_batch(include_str!("sql/facts.sql")).unwrap();
    let add = |text: &str, values: &[&dyn rusqlite::ToSql]| {
        table.prepare_cached(text).unwrap().execute(values).unwrap();
    };
    let distinct: BTreeMap<&str, &EventRecord> = history
        .events
        .iter()
        .map(|one| (one.id.as_str(), one))
        .collect();
    for (id, record) in distinct {
        let event = &record.event;
        let seen = Sightings::of(event, record.created_at);
        let get = |key: &str| event.metadata.get(key);
        add(
            "INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                id,
                event.node_name,
                event.agent,
                event.check_name,
                event.is_healthy,
                event.is_fatal,
                event.processing_strategy == ProcessingStrategy::StoreOnly as i32,
                Authority::of(event) == Authority::Trusted,
                record.created_at.as_millisecond(),
                seen.first.as_millisecond(),
                seen.last.as_millisecond(),
                i64::try_from(seen.count).unwrap(),
                get(keys::META_JOB),
                get(keys::META_EARLIER_IN_BOOT).is_some(),
                get(keys::META_BOOT_ID),
            ],
        );
        for code in &event.error_code {
            add("INSERT INTO code VALUES (?, ?)", params![id, code]);
        }
        for one in &event.entities_impacted {
            let values = params![id, one.entity_type, one.entity_value];
            add("INSERT INTO entity VALUES (?, ?, ?)", values);
        }
        for (key, value) in &event.metadata {
            add(
                "INSERT INTO label VALUES (?, ?, ?)",
                params![id, key, value],
            );
        }
    }
    for (number, labels) in history.cluster.iter().enumerate() {
        for (key, value) in labels {
            let values = params![i64::try_from(number).unwrap(), key, value];
            add("INSERT INTO cluster VALUES (?, ?, ?)", values);
        }
    }
    let now = history.now.as_millisecond();
    add("INSERT INTO clock VALUES (?)", params![now]);
    table.execute_batch(include_str!("sql/rules.sql")).unwrap();
    let conclusions = include_str!("sql/conclusions.sql");
    table.execute_batch(conclusions).unwrap();
    let text = "SELECT rule || ': ' || grp || ' since ' || since || ' about ' || about FROM open ORDER BY 1";
    let mut query = table.prepare(text).unwrap();
    let rows = query.query_map([], |row| row.get(0)).unwrap();
    rows.map(Result::unwrap).collect()
}

/// Returns the open conclusions of the analyzer, after the events in their order.
fn by_analyzer(history: &History, mut dice: Dice) -> Vec<String> {
    let mut analyzer = Analyzer::new(RULES.clone());
    let nodes: Vec<_> = history.cluster.iter().map(|labels| ("", labels)).collect();
    analyzer.set_nodes(&nodes);
    let mut saved = Saved::default();
    let mut now = Timestamp::MIN;
    for (index, event) in history.events.iter().enumerate() {
        now = now.max(event.created_at);
        analyzer.record(event);
        if dice.below(4) == 0 {
            analyzer.time(now);
        }
        rebuild(&mut analyzer, &history.events[..=index]);
        if dice.below(20) == 0 {
            let state = analyzer.save();
            saved.state = state.state;
            saved.parts.extend(state.parts);
            analyzer = Analyzer::new(RULES.clone());
            analyzer.restore(&saved).unwrap();
        }
    }
    analyzer.time(history.now);
    let mut found: Vec<String> = analyzer.open().map(line).collect();
    found.sort();
    found
}

/// Builds the groups of nodes with an event that came too late from all events, as from a store.
fn rebuild(analyzer: &mut Analyzer, events: &[EventRecord]) {
    for node in analyzer.late().clone() {
        let of_node = events.iter();
        let of_node = of_node.filter(|it| node.is_empty() || it.event.node_name == node);
        analyzer.rebuild(&node, of_node);
    }
}

fn line(finding: &Finding) -> String {
    let conclusion = &finding.conclusion;
    let member = conclusion.member.as_ref().map(ToString::to_string);
    let about = member.or_else(|| conclusion.node.clone());
    let since = conclusion.since.as_millisecond();
    let (rule, group) = (&finding.rule, &finding.group);
    format!(
        "{rule}: {group} since {since} about {}",
        about.unwrap_or_default()
    )
}

/// Compares the conclusions of both, and returns them.
fn compared(history: &History, dice: Dice) -> Result<Vec<String>, TestCaseError> {
    let (found, expected) = (by_analyzer(history, dice), by_sql(history));
    prop_assert_eq!(&found, &expected, "{}", history.text());
    Ok(found)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The analyzer and SQL conclude the same from any events.
    #[test]
    fn sql_concludes_the_same(
        scene in 0..events::SCENES.len(),
        events in proptest::collection::vec(any::<u64>(), 1..70),
        seed in any::<u64>(),
    ) {
        let history = History::new(&events::SCENES[scene], &events, seed);
        compared(&history, Dice(seed))?;
    }
}

/// All rules conclude something in some of these events, so the comparison is about all of them.
#[test]
fn each_built_in_rule_concludes_something() {
    let mut missing: BTreeSet<&str> = RULES.iter().map(|rule| rule.name.as_str()).collect();
    for seed in 0..400 {
        let mut dice = Dice(seed);
        let scene = &events::SCENES[usize::try_from(seed).unwrap() % events::SCENES.len()];
        let events: Vec<u64> = (0..60).map(|_| dice.below(u64::MAX)).collect();
        let found = compared(&History::new(scene, &events, seed), dice).unwrap();
        missing.retain(|rule| !found.iter().any(|it| it.starts_with(&format!("{rule}:"))));
        if missing.is_empty() {
            break;
        }
    }
    assert!(missing.is_empty(), "no conclusion of {missing:?}");
}
