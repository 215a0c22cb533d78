use std::io::Write as _;
use std::sync::Arc;

use connector::AcceptNodes;
use contract::json;
use store::sqlite::SqliteStore;
use store::{EventQuery, EventStore};

use super::*;

const XID_79: &str = "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
const XID_48: &str = "NVRM: Xid (PCI:0000:b3:00): 48, pid=1, name=a, DBE";

/// A monitor over a file, its store, and what it has stored.
struct Bench {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(&dir.path().join("data")).unwrap());
        Self { dir, store }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("kern.log")
    }

    fn append(&self, text: &str) {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log())
            .unwrap();
        writeln!(file, "{text}").unwrap();
    }

    fn monitor(&self, sources: &Sources) -> KernelLogMonitor {
        let metrics = Metrics::default();
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as Arc<dyn EventStore>;
        let config = Config {
            spec: Spec::File(self.log()),
            node_name: "n1".into(),
            history: SignedDuration::from_mins(15),
            state_dir: Some(self.dir.path().join("data")),
        };
        let connector = Connector::new(
            store,
            AcceptNodes::Own("n1".to_owned()),
            &metrics,
            Timestamp::now,
        );
        KernelLogMonitor::new(config, connector, sources, &metrics, Timestamp::now)
    }

    /// Runs a monitor until `count` events are stored, then ends it.
    async fn run_until(&self, count: usize) -> Vec<HealthEvent> {
        let (sources, cancel) = (Sources::default(), CancellationToken::new());
        let task = tokio::spawn(self.monitor(&sources).run(cancel.clone()));
        let mut latest = self.store.latest();
        let waited = tokio::time::timeout(
            Duration::from_secs(10),
            latest.wait_for(|seq| *seq >= count as u64),
        );
        waited.await.expect("events are stored in time").unwrap();
        // Everything that was there has been read once the source follows.
        tokio::time::timeout(Duration::from_secs(10), async {
            while sources.statuses(Timestamp::now())[0].state != SourceState::Following {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
        cancel.cancel();
        task.await.unwrap();
        let query = EventQuery {
            limit: 100,
            ..EventQuery::default()
        };
        let mut records = self.store.events(query).await.unwrap();
        records.reverse();
        records.into_iter().map(|record| record.event).collect()
    }
}

#[tokio::test]
async fn a_line_becomes_an_event_with_the_contracts_names() {
    let bench = Bench::new();
    bench.append("[1.0] usb 1-1: new device");
    bench.append(&format!("2026-11-21T11:40:00,123456+00:00 {XID_79}"));
    let events = bench.run_until(1).await;
    let event = &events[0];
    assert_eq!(event.agent, "syslog-health-monitor");
    assert_eq!(
        (event.component_class.as_str(), event.check_name.as_str()),
        ("GPU", "SysLogsXIDError")
    );
    assert_eq!(event.error_code, ["79"]);
    assert_eq!(event.message, XID_79);
    assert_eq!(
        event.recommended_action,
        contract::RecommendedAction::RestartBm as i32
    );
    assert_eq!(
        (event.is_fatal, event.version, event.node_name.as_str()),
        (true, 1, "n1")
    );
    let pci = &event.entities_impacted[0];
    assert_eq!(
        (pci.entity_type.as_str(), pci.entity_value.as_str()),
        ("PCI", "0000:b3:00")
    );
    let time = json::timestamp(event.generated_timestamp.unwrap()).unwrap();
    assert_eq!(time.to_string(), "2026-11-21T11:40:00.123456Z");
}

#[tokio::test]
async fn a_restart_neither_repeats_nor_loses() {
    let bench = Bench::new();
    bench.append(XID_79);
    assert_eq!(bench.run_until(1).await.len(), 1);
    bench.append(XID_48);
    assert_eq!(bench.run_until(2).await.len(), 2);
    // The place is lost behind what is stored, as in a crash: read again, stored once.
    let place = bench.dir.path().join("data/kernel-log.position");
    let saved = std::fs::read_to_string(&place).unwrap();
    let (position, generation) = saved.trim().split_once(' ').unwrap();
    let start = position.rsplit_once(':').unwrap().0;
    std::fs::write(&place, format!("{start}:0 {generation}\n")).unwrap();
    bench.append(XID_79);
    assert_eq!(bench.run_until(3).await.len(), 3);
}

#[tokio::test]
async fn the_same_text_in_a_file_that_was_written_anew_is_another_event() {
    let bench = Bench::new();
    bench.append(XID_79);
    assert_eq!(bench.run_until(1).await.len(), 1);
    let (sources, cancel) = (Sources::default(), CancellationToken::new());
    let task = tokio::spawn(bench.monitor(&sources).run(cancel.clone()));
    // Written anew, and longer than before it was: the place of the line is the same.
    std::fs::write(bench.log(), "").unwrap();
    let mut latest = bench.store.latest();
    tokio::time::timeout(Duration::from_secs(10), async {
        while sources.statuses(Timestamp::now())[0].state != SourceState::Following {
            tokio::task::yield_now().await;
        }
        bench.append(XID_79);
        latest.wait_for(|seq| *seq >= 2).await.unwrap();
    })
    .await
    .expect("the line is taken as new");
    cancel.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn lines_older_than_the_history_are_marked_on_a_first_start_only() {
    let bench = Bench::new();
    bench.append(&format!("2020-01-01T00:00:00,000000+00:00 {XID_79}"));
    let events = bench.run_until(1).await;
    assert!(
        events[0]
            .metadata
            .contains_key(contract::keys::META_EARLIER_IN_BOOT)
    );
    bench.append(&format!("2020-01-01T00:00:01,000000+00:00 {XID_48}"));
    let events = bench.run_until(2).await;
    assert!(
        !events[1]
            .metadata
            .contains_key(contract::keys::META_EARLIER_IN_BOOT)
    );
}

#[tokio::test]
async fn a_source_that_cannot_be_opened_is_shown_and_tried_again() {
    let bench = Bench::new();
    std::fs::create_dir(bench.log()).unwrap();
    let (sources, cancel) = (Sources::default(), CancellationToken::new());
    let task = tokio::spawn(bench.monitor(&sources).run(cancel.clone()));
    let status = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            let status = sources.statuses(Timestamp::now()).remove(0);
            if status.state == SourceState::Failing {
                return status;
            }
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    assert!(status.detail.contains("directory"), "{}", status.detail);
    cancel.cancel();
    task.await.unwrap();
}

#[test]
fn without_the_uuid_a_gpu_cannot_be_reset_and_the_machine_is_restarted() {
    let at = Timestamp::UNIX_EPOCH;
    let event = event_of_line(XID_48, "n1", at).unwrap();
    assert_eq!(
        event.recommended_action,
        contract::RecommendedAction::RestartVm as i32
    );
    assert_eq!(
        event.metadata["gpuwarden.dev/catalogue-action"],
        "COMPONENT_RESET"
    );
    assert_eq!(event_of_line("all is well", "n1", at), None);
}
