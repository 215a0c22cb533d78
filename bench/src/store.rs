//! Durable events per second into the embedded store and into an agent's outbox. Each event is on
//! disk before it is acknowledged.
//!
//! The benchmark measures in turns: many appenders at once (which the store gathers into one
//! commit), large batches, one appender that waits for each commit, and, as the limit of the disk,
//! a bare file that is synchronised after each record.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use agent::kernel_log::event_of_line;
use anyhow::Context as _;
use cli::bench::{Figure, median};
use connector::Sink;
use connector::outbox::{Outbox, OutboxLimits};
use contract::HealthEvent;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use store::{NewEvent, StoreUrl};
use tokio::task::JoinSet;

use crate::file_system::FileSystem;

/// Appenders that work at once.
const APPENDERS: usize = 64;
const BATCH: usize = 100;
/// Turns of each way; odd, so that the median is a measured value.
const ROUNDS: usize = 5;
const TURN: Duration = Duration::from_millis(800);
/// Size of the outbox; more than a turn fills.
const ROOM: OutboxLimits = OutboxLimits {
    bytes: 4 << 30,
    events: 4_000_000,
};
const UNIT: &str = "events/s";

/// Creates events with distinct ids at little cost.
struct Events {
    template: HealthEvent,
    made: AtomicU64,
}

pub(crate) async fn run() -> anyhow::Result<Vec<Figure>> {
    let home = tempfile::Builder::new()
        .prefix("gpuwarden-bench-")
        .tempdir()
        .context("create a directory")?;
    let place = home.path().canonicalize()?;
    let embedded = StoreUrl::in_data_dir(&place).open().await?;
    let store: Arc<dyn Sink> = Arc::new(Arc::clone(&embedded));
    let outbox = Outbox::open(&place.join("agent"), ROOM, &Metrics::default())?;
    let agent: Arc<dyn Sink> = Arc::new(outbox.clone());
    let events = Arc::new(Events::new()?);
    let mut file = File::create_new(place.join("bare"))?;
    let body = contract::json::to_string(&events.template);

    let mut rates = [const { Vec::<f64>::new() }; 4];
    let mut outbox_rates = [const { Vec::<f64>::new() }; 3];
    for _ in 0..ROUNDS {
        let [many, batches, single] = &mut outbox_rates;
        let ways = [(many, APPENDERS, 1), (batches, 1, BATCH), (single, 1, 1)];
        for (rates, appenders, batch) in ways {
            rates.push(append(&agent, &events, appenders, batch).await?);
            let newest = outbox.status().borrow().newest;
            outbox.delivered(newest).await?;
        }
        let [many, batches, single, bare] = &mut rates;
        many.push(append(&store, &events, APPENDERS, 1).await?);
        batches.push(append(&store, &events, 1, BATCH).await?);
        single.push(append(&store, &events, 1, 1).await?);
        bare.push(append_bare(&mut file, body.as_bytes())?);
    }
    embedded.close().await;
    outbox.close().await;

    let [many, batches, single, bare] = rates.map(|rates| median(&rates));
    let durability = durability(&place, bare);
    let mut rows = ways("store", many, batches, single, &durability);
    rows.push(Figure::new("store.single", single, UNIT).beside("bare file", bare).note(format!(
        "one appender, one event per commit; beside it, {} bytes appended to a file and fdatasync",
        body.len()
    )));
    let [many, batches, single] = outbox_rates.map(|rates| median(&rates));
    rows.extend(ways("outbox", many, batches, single, &durability));
    rows.push(Figure::new("outbox.single", single, UNIT).beside("bare file", bare));
    Ok(rows)
}

/// Returns the rates of a sink, beside the rate of one appender that waits for each commit.
fn ways(name: &str, many: f64, batches: f64, single: f64, durability: &str) -> Vec<Figure> {
    vec![
        Figure::new(format!("{name}.concurrent"), many, UNIT)
            .beside("one appender", single)
            .note(format!(
                "{APPENDERS} appenders of one event each; {durability}"
            )),
        Figure::new(format!("{name}.batches"), batches, UNIT)
            .beside("one appender", single)
            .note(format!("one appender, batches of {BATCH}")),
    ]
}

/// Returns the events per second of `appenders` that append `batch` events at a time.
async fn append(
    sink: &Arc<dyn Sink>,
    events: &Arc<Events>,
    appenders: usize,
    batch: usize,
) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut working = JoinSet::new();
    for _ in 0..appenders {
        let (sink, events) = (Arc::clone(sink), Arc::clone(events));
        working.spawn(async move {
            let mut appended = 0;
            while began.elapsed() < TURN {
                let batch = events.make(batch);
                let answers = sink.append(batch).await?;
                appended += answers.iter().filter(|one| one.new).count();
            }
            anyhow::Ok(appended)
        });
    }
    let mut appended = 0;
    while let Some(done) = working.join_next().await {
        appended += done??;
    }
    Ok(per_second(appended, began.elapsed()))
}

/// Returns the records per second that can be appended to a file and synchronised one by one.
fn append_bare(file: &mut File, record: &[u8]) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut appended = 0;
    while began.elapsed() < TURN {
        file.write_all(record)?;
        file.sync_data()?;
        appended += 1;
    }
    Ok(per_second(appended, began.elapsed()))
}

#[allow(clippy::cast_precision_loss)] // Far below 2^53.
fn per_second(count: usize, took: Duration) -> f64 {
    count as f64 / took.as_secs_f64()
}

/// Describes the file system of `place` and its durability. A disk that ignores a
/// synchronisation cannot be detected, except by a time as short as that of memory.
fn durability(place: &Path, syncs_per_second: f64) -> String {
    let Some(file_system) = FileSystem::of(place) else {
        return format!("in {}, file system unknown", place.display());
    };
    if file_system.is_memory() {
        return format!(
            "on {file_system}: in memory only, nothing is durable; set TMPDIR to a directory on a disk"
        );
    }
    let micros = 1e6 / syncs_per_second.max(1.0);
    format!("on {file_system}, where fdatasync takes {micros:.0} µs")
}

// === impl Events ===

impl Events {
    fn new() -> anyhow::Result<Self> {
        let line = "NVRM: Xid (PCI:0000:b3:00): 31, pid=48213, name=python3, Ch 00000008, intr 00000000. \
                    MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f2c_41bd4000";
        let mut template = event_of_line(line, "gpuwarden-bench", Timestamp::now())
            .context("our own decoder does not decode the line")?;
        model::event::normalise(&mut template, Timestamp::now());
        Ok(Self {
            template,
            made: AtomicU64::new(0),
        })
    }

    fn make(&self, count: usize) -> Vec<NewEvent> {
        let received_at = Timestamp::now();
        let one = || {
            let number = self.made.fetch_add(1, Ordering::Relaxed);
            let mut event = self.template.clone();
            // As long as a real id.
            event.id = format!("{number:024x}");
            NewEvent { event, received_at }
        };
        std::iter::repeat_with(one).take(count).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn events_differ() {
        let events = Events::new().unwrap();
        let mut ids = BTreeSet::new();
        for new in [events.make(1), events.make(BATCH)].concat() {
            assert!(model::event::validate(&new.event).is_ok());
            ids.insert(new.event.id);
        }
        assert_eq!(ids.len(), BATCH + 1);
    }

    #[tokio::test]
    async fn every_event_that_is_counted_is_stored() {
        let dir = tempfile::tempdir().unwrap();
        let store = StoreUrl::in_data_dir(dir.path()).open().await.unwrap();
        let sink: Arc<dyn Sink> = Arc::new(Arc::clone(&store));
        let events = Arc::new(Events::new().unwrap());
        let began = Instant::now();
        let rate = append(&sink, &events, 2, 10).await.unwrap();
        let longest = began.elapsed().as_secs_f64();
        let stored = f64::from(u32::try_from(store.stats().await.unwrap().events).unwrap());
        // The rate divides by a time between a turn and the whole time of this test.
        assert!(
            stored > 0.0 && rate * TURN.as_secs_f64() <= stored,
            "{stored}, {rate}"
        );
        assert!(stored <= rate * longest, "{stored}, {rate}, {longest}");
        store.close().await;
    }
}
