//! Rules of the analysis over a day of events, beside the same questions to an indexed table.
//!
//! A baseline asks `SQLite` three of the rules' questions at each event, as NVSentinel's analyzer asks
//! its database, and has to come to the same conclusions.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use analysis::{Analyzer, Saved, built_in};
use anyhow::ensure;
use contract::{Entity, HealthEvent, keys};
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::position::Position;
use rusqlite::{Connection, params};

use cli::bench::Figure;

/// Events of the whole run, over a day.
const EVENTS: u32 = 1_000_000;
/// Events at the begin and at the end whose times are compared.
const PART: u32 = 10_000;
/// Events that both answer.
const COMPARED: u32 = 20_000;
const NODES: u64 = 1_000;
const GPUS: u64 = 8;
/// Codes of the events: of applications, of links, and of hardware.
const CODES: [&str; 8] = ["13", "31", "43", "48", "63", "74", "79", "119"];
/// Name of the baseline.
const BASELINE: &str = "SQLite, 3 of the rules";
/// Rules that the baseline asks for.
const ASKED: [&str; 3] = [
    "RepeatedXIDErrorOnSameGPU",
    "RepeatedXID31OnSameGPU",
    "RepeatedXID31OnDifferentGPU",
];

/// Events one after the other, the same in every run.
struct Stream {
    random: u64,
    index: u64,
    /// Number of nodes that they are spread over.
    nodes: u64,
    /// Time between two events.
    step: SignedDuration,
    begin: Timestamp,
}

impl Stream {
    fn new(events: u32, nodes: u64) -> Self {
        Self {
            random: 42,
            index: 0,
            nodes,
            step: SignedDuration::from_hours(24) / i32::try_from(events).unwrap_or(i32::MAX),
            begin: Timestamp::UNIX_EPOCH,
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % end
    }

    fn next(&mut self) -> EventRecord {
        let node = self.below(self.nodes);
        let gpu = self.below(GPUS);
        let code = CODES[usize::try_from(self.below(CODES.len() as u64)).unwrap_or(0)];
        let steps = i32::try_from(self.index).unwrap_or(i32::MAX);
        let at = self.begin + self.step * steps;
        self.index += 1;
        let entity = |kind: &str, value: String| Entity {
            entity_type: kind.to_owned(),
            entity_value: value,
        };
        let mut entities = vec![entity(keys::ENTITY_GPU_UUID, format!("GPU-{node}-{gpu}"))];
        if code == "74" {
            entities.push(entity(keys::ENTITY_NVLINK, "3".to_owned()));
            let bit = self.below(32);
            entities.push(entity("REG0", format!("{:032b}", 1_u32 << bit)));
        }
        EventRecord {
            seq: Position::from(self.index),
            id: format!("{:024x}", self.index),
            created_at: at,
            event: HealthEvent {
                agent: keys::SYSLOG_AGENT.to_owned(),
                component_class: keys::COMPONENT_GPU.to_owned(),
                check_name: keys::CHECK_XID.to_owned(),
                error_code: vec![code.to_owned()],
                entities_impacted: entities,
                is_fatal: code == "79",
                generated_timestamp: Some(contract::json::proto_timestamp(at)),
                node_name: format!("n{node}"),
                ..HealthEvent::default()
            },
        }
    }
}

/// Records an event, and notes as stored what follows from it.
fn take(analyzer: &mut Analyzer, record: &EventRecord, found: &mut BTreeSet<(String, String)>) {
    analyzer.record(record);
    analyzer.time(record.created_at);
    for saying in analyzer.to_say(record.created_at, usize::MAX) {
        analyzer.said(&saying);
        let event = &saying.event;
        if !event.is_healthy {
            let group = event.entities_impacted.first().map(|one| &one.entity_value);
            let group = group.unwrap_or(&event.node_name);
            let codes = event.error_code.concat();
            found.insert((event.check_name.clone(), format!("{group} {codes}")));
        }
    }
}

pub(crate) fn run() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let before = resident()?;
    let mut analyzer = Analyzer::new(built_in());
    let mut stream = Stream::new(EVENTS, NODES);
    let mut found = BTreeSet::new();
    let (mut all, mut first, mut last) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for index in 0..EVENTS {
        let record = stream.next();
        let began = Instant::now();
        take(&mut analyzer, &record, &mut found);
        let took = began.elapsed();
        all += took;
        // The groups of all GPUs are there from the second part on.
        if (PART..2 * PART).contains(&index) {
            first += took;
        }
        if index >= EVENTS - PART {
            last += took;
        }
    }
    let megabytes = resident()? - before;
    let rate = f64::from(EVENTS) / all.as_secs_f64();
    let each = |took: Duration| took.as_secs_f64() * 1e9 / f64::from(PART);
    let note = format!(
        "{EVENTS} events of {NODES} nodes in a day, {} rules",
        built_in().len()
    );
    figures.push(Figure::new("analyzer.rate", rate, "events/s").note(note));
    figures.push(
        Figure::new("analyzer.late", each(last), "ns/event")
            .beside("the second 10,000 events", each(first))
            .note("the last 10,000 events"),
    );
    let note = format!("{} groups of events", analyzer.groups());
    figures.push(Figure::new("analyzer.memory", megabytes, "MiB").note(note));

    let began = Instant::now();
    let saved: Saved = analyzer.save();
    let bytes: usize = saved.parts.values().map(Vec::len).sum();
    let kilobytes = f64::from(u32::try_from(bytes / 1024)?);
    let mut restored = Analyzer::new(built_in());
    let saving = began.elapsed();
    let began = Instant::now();
    restored.restore(&saved).map_err(anyhow::Error::msg)?;
    let restoring = began.elapsed();
    ensure!(
        restored.open().eq(analyzer.open()),
        "the saved state differs"
    );
    figures.push(
        Figure::new("analyzer.start", restoring.as_secs_f64() * 1e3, "ms")
            .beside(
                "all events read again, from memory",
                all.as_secs_f64() * 1e3,
            )
            .note(format!(
                "from a saved state of {:.1} MiB, which takes {:.0} ms to write",
                kilobytes / 1024.0,
                saving.as_secs_f64() * 1e3
            )),
    );
    figures.push(beside_sql()?);
    Ok(figures)
}

/// Compares the time of all rules with that of three of them as queries, which have to answer the
/// same.
fn beside_sql() -> anyhow::Result<Figure> {
    let mut analyzer = Analyzer::new(built_in());
    let table = Table::new()?;
    let (mut found, mut expected) = (BTreeSet::new(), BTreeSet::new());
    let (mut ours, mut theirs) = (Duration::ZERO, Duration::ZERO);
    let mut stream = Stream::new(COMPARED, 20);
    for _ in 0..COMPARED {
        let record = stream.next();
        let began = Instant::now();
        take(&mut analyzer, &record, &mut found);
        ours += began.elapsed();
        let began = Instant::now();
        table.take(&record, &mut expected)?;
        theirs += began.elapsed();
    }
    found.retain(|(rule, _)| ASKED.contains(&rule.as_str()));
    ensure!(
        found == expected,
        "the conclusions differ from those of the queries"
    );
    let each = |took: Duration| took.as_secs_f64() * 1e9 / f64::from(COMPARED);
    let note = format!(
        "{COMPARED} events of 20 nodes; both conclude the same {} times",
        found.len()
    );
    Ok(Figure::new("analyzer.event", each(ours), "ns/event")
        .beside(BASELINE, each(theirs))
        .note(note))
}

/// Table of events, in memory.
struct Table(Connection);

impl Table {
    fn new() -> anyhow::Result<Self> {
        let connection = Connection::open_in_memory()?;
        connection.execute_batch(
            "CREATE TABLE event (node TEXT, gpu TEXT, code TEXT, at REAL);
             CREATE INDEX by_gpu ON event (gpu, code, at);
             CREATE INDEX by_node ON event (node, code, at);",
        )?;
        Ok(Self(connection))
    }

    /// Stores an event, and asks what it completes.
    fn take(
        &self,
        record: &EventRecord,
        found: &mut BTreeSet<(String, String)>,
    ) -> anyhow::Result<()> {
        let event = &record.event;
        let (node, gpu) = (&event.node_name, &event.entities_impacted[0].entity_value);
        let code = &event.error_code[0];
        let at = record.created_at.as_duration().as_secs_f64();
        (self.0)
            .prepare_cached("INSERT INTO event VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![node, gpu, code, at])?;
        // The newest events that make up the window, and whether each begins a burst.
        let gap = if ["74", "79", "95", "109", "119"].contains(&code.as_str()) {
            10_800.0
        } else {
            180.0
        };
        let bursts: i64 = (self.0)
            .prepare_cached(
                "SELECT count(*) FROM (
                     SELECT at - lag(at) OVER (ORDER BY at) AS gap FROM event
                     WHERE gpu = ?1 AND code = ?2 AND at >= ?3 - 86400 AND at <= ?3)
                 WHERE gap IS NULL OR gap > ?4",
            )?
            .query_row(params![gpu, code, at, gap], |row| row.get(0))?;
        if code != "31" {
            if bursts >= 5 {
                found.insert((ASKED[0].to_owned(), format!("{gpu} {code}")));
            }
            return Ok(());
        }
        if bursts >= 2 {
            found.insert((ASKED[1].to_owned(), format!("{gpu} ")));
        }
        let gpus: i64 = (self.0)
            .prepare_cached(
                "SELECT count(DISTINCT gpu) FROM event
                 WHERE node = ?1 AND code = '31' AND at >= ?2 - 86400 AND at <= ?2",
            )?
            .query_row(params![node, at], |row| row.get(0))?;
        if gpus >= 2 {
            found.insert((ASKED[2].to_owned(), format!("{node} ")));
        }
        Ok(())
    }
}

/// Returns the memory of this process (MiB).
fn resident() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    let kilobytes: f64 = kilobytes.unwrap_or_default().parse()?;
    Ok(kilobytes / 1024.0)
}
