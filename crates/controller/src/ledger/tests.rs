use connector::AcceptNodes;
use contract::{HealthEvent, keys};
use jiff::SignedDuration;
use model::event::EventRecord;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, Prune, Upkeep as _};

use super::*;

mod marks;

/// A store in a directory, and a connector in front of it.
struct Bench {
    directory: tempfile::TempDir,
    store: Arc<SqliteStore>,
}

struct Running {
    ledger: watch::Receiver<Ledger>,
    cancel: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(directory.path()).unwrap());
        Self { directory, store }
    }

    fn connector(&self) -> Connector {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as _;
        Connector::new(store, AcceptNodes::Any, &Metrics::default(), Timestamp::now)
    }

    fn keeper(&self) -> LedgerKeeper {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as _;
        LedgerKeeper::new(store, self.connector(), Timestamp::now, &Metrics::default())
    }

    fn start(&self) -> Running {
        Running::of(self.keeper(), CancellationToken::new())
    }

    async fn report(&self, event: HealthEvent) {
        let batch = HealthEvents {
            version: EVENT_VERSION,
            events: vec![event],
        };
        self.connector()
            .accept(batch, &Caller::Monitor)
            .await
            .unwrap();
    }

    /// Returns node and health of the stored reports of marked GPUs, oldest first.
    async fn reported(&self) -> Vec<(String, bool)> {
        let mut records = self.store.events(EventQuery::default()).await.unwrap();
        records.reverse();
        let is_report = |record: &EventRecord| record.event.check_name == keys::CHECK_KNOWN_BAD_GPU;
        let reports = records.into_iter().filter(is_report);
        reports
            .map(|record| (record.event.node_name, record.event.is_healthy))
            .collect()
    }

    /// Opens the store again, as the next process does.
    async fn reopen(&mut self) {
        self.store.close().await;
        self.store = Arc::new(SqliteStore::open(self.directory.path()).unwrap());
    }
}

impl Running {
    fn of(keeper: LedgerKeeper, cancel: CancellationToken) -> Self {
        let ledger = keeper.ledger();
        let task = tokio::spawn(keeper.run(cancel.clone()));
        Self {
            ledger,
            cancel,
            task,
        }
    }

    async fn until(&mut self, is: impl FnMut(&Ledger) -> bool) {
        let reached = self.ledger.wait_for(is);
        drop(
            tokio::time::timeout(Duration::from_secs(20), reached)
                .await
                .unwrap()
                .unwrap(),
        );
    }

    async fn end(self) {
        self.cancel.cancel();
        self.task.await.unwrap();
    }

    /// Ends the task as a crash does.
    async fn crash(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

fn event(check: &str, node: &str, healthy: bool) -> HealthEvent {
    let serial = (keys::META_GPU_SERIAL.to_owned(), "17".to_owned());
    HealthEvent {
        agent: "a".to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check_name: check.to_owned(),
        is_fatal: !healthy,
        is_healthy: healthy,
        node_name: node.to_owned(),
        metadata: [serial].into(),
        ..HealthEvent::default()
    }
}

fn mark(kind: &str) -> HealthEvent {
    let mut event = event(keys::CHECK_LEDGER_MARK, "desk", false);
    let mark = (keys::META_LEDGER_MARK.to_owned(), kind.to_owned());
    event.metadata.extend([mark]);
    event
}

fn inventory(node: &str) -> HealthEvent {
    event(keys::CHECK_GPU_INVENTORY, node, true)
}

fn is_reported(ledger: &Ledger, node: &str) -> bool {
    let row = ledger.gpu("17");
    row.is_some_and(|(_, row)| row.reported.contains_key(node))
}

#[tokio::test]
async fn a_marked_gpu_is_reported_once_whatever_crashes() {
    let mut bench = Bench::new();
    bench.report(event("Check", "a", false)).await;
    bench.report(mark("bad")).await;
    let mut running = bench.start();
    running.until(|ledger| ledger.gpu("17").is_some()).await;
    // Nothing was saved: the next process reads all events again.
    running.crash().await;
    bench.reopen().await;
    let mut running = bench.start();
    bench.report(inventory("b")).await;
    running.until(|ledger| is_reported(ledger, "b")).await;
    running.crash().await;
    bench.reopen().await;
    let mut running = bench.start();
    running.until(|ledger| is_reported(ledger, "b")).await;
    bench.report(mark("good")).await;
    running
        .until(|ledger| ledger.gpu("17").is_some() && !is_reported(ledger, "b"))
        .await;
    running.end().await;
    let expected = [("b".to_owned(), false), ("b".to_owned(), true)];
    assert_eq!(bench.reported().await, expected);
}

#[tokio::test]
async fn rows_outlive_their_events() {
    let mut bench = Bench::new();
    bench.report(event("Check", "a", false)).await;
    bench.report(mark("rma")).await;
    let mut running = bench.start();
    running
        .until(|ledger| ledger.gpu("17").is_some_and(|(_, row)| row.mark.is_some()))
        .await;
    running.end().await;
    bench.report(event("Other", "c", true)).await;
    let later = Timestamp::now() + SignedDuration::from_hours(1);
    let prune = Prune {
        before: later,
        passes_before: later,
        max_bytes: u64::MAX,
        finished: *bench.store.latest().borrow(),
        gone_before: Timestamp::MIN,
        keep: Vec::new(),
    };
    assert_eq!(bench.store.prune(prune).await.unwrap().events, 2);
    bench.reopen().await;
    let mut running = bench.start();
    running.until(|ledger| ledger.gpu("17").is_some()).await;
    bench.report(inventory("b")).await;
    running.until(|ledger| is_reported(ledger, "b")).await;
    let row = running.ledger.borrow().gpu("17").unwrap().1.clone();
    let nodes: Vec<&str> = row.places.iter().map(|place| place.node.as_str()).collect();
    assert_eq!(nodes, ["a", "b"]);
    assert_eq!(row.history.faults.len(), 1);
    running.end().await;
}

#[tokio::test]
async fn marks_of_the_past_are_not_acted_on_before_all_events_are_read() {
    let bench = Bench::new();
    bench.report(mark("bad")).await;
    bench.report(inventory("a")).await;
    bench.report(mark("good")).await;
    let mut running = bench.start();
    let is_good = |ledger: &Ledger| {
        let mark = ledger.gpu("17").and_then(|(_, row)| row.mark.as_ref());
        mark.is_some_and(|mark| mark.kind.name() == "good")
    };
    running.until(is_good).await;
    running.end().await;
    assert_eq!(bench.reported().await, []);
}
