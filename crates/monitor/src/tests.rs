//! Tests of the frame, with a small monitor that polls a file with lines `GPU 3 hot` or
//! `GPU 3 ok`.

use std::collections::BTreeSet;
use std::sync::Arc;

use connector::AcceptNodes;
use contract::{Entity, RecommendedAction};
use diagnosis::fold::Sightings;
use host::boot::BootId;
use model::fault::{Fault, FaultBook};
use runtime::sources::{SourceState, SourceStatus};
use serde::Deserialize;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore};

use super::*;

const GPU_FILE: Monitor = Monitor {
    name: "gpu-file",
    agent: "gpu-file-monitor",
    checks: &[("GpuHot", keys::COMPONENT_GPU)],
};
const EVERY: Duration = Duration::from_millis(20);

struct GpuFile {
    path: PathBuf,
    reporter: Reporter<OpenFaults>,
}

/// Faults whose recovery must be reported, which a restart must not forget.
#[derive(Clone, Default, Serialize, Deserialize)]
struct OpenFaults {
    hot: BTreeSet<String>,
}

impl GpuFile {
    async fn run(mut self, cancel: CancellationToken) {
        loop {
            match tokio::fs::read_to_string(&self.path).await {
                Ok(text) => self.take_in(&text),
                Err(error) => self.reporter.cannot_see(&chain(&error)),
            }
            if !self.reporter.pause(EVERY, &cancel).await {
                break;
            }
        }
        self.reporter.finish(&cancel).await;
    }

    fn take_in(&mut self, text: &str) {
        self.reporter.has_looked(&self.path.display().to_string());
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (gpu, is_hot) = match words.as_slice() {
                ["GPU", gpu, "hot"] => (*gpu, true),
                ["GPU", gpu, "ok"] => (*gpu, false),
                _ => {
                    self.reporter.cannot_read(1);
                    continue;
                }
            };
            // A fault is reported for as long as it lasts, a recovery once.
            if is_hot {
                self.reporter.memory_mut().hot.insert(gpu.to_owned());
            } else if !self.reporter.memory_mut().hot.remove(gpu) {
                continue;
            }
            let mut event = self.reporter.event("GpuHot", keys::COMPONENT_GPU);
            (event.is_healthy, event.is_fatal) = (!is_hot, is_hot);
            event.message = line.to_owned();
            event.entities_impacted = vec![Entity {
                entity_type: keys::ENTITY_GPU.to_owned(),
                entity_value: gpu.to_owned(),
            }];
            if is_hot {
                event.recommended_action = RecommendedAction::RestartVm as i32;
            }
            self.reporter.report(event, Timestamp::now());
        }
    }
}

/// The file, and the store that the monitor reports to.
struct Bench {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    boot: u8,
}

struct Running {
    task: tokio::task::JoinHandle<()>,
    sources: Sources,
    metrics: Metrics,
    cancel: CancellationToken,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(&dir.path().join("data")).unwrap());
        Self {
            dir,
            store,
            boot: 1,
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("gpus")
    }

    fn write(&self, text: &str) {
        let new = self.dir.path().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.path()).unwrap();
    }

    fn reporter(&self, sources: &Sources, metrics: &Metrics) -> Reporter<OpenFaults> {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as _;
        let nodes = AcceptNodes::Own("n1".to_owned());
        let frame = Frame {
            node_name: "n1".to_owned(),
            state_dir: Some(self.dir.path().join("data")),
            boot: Some(Boot {
                id: BootId::from_bytes([self.boot; 16]),
                at: Timestamp::now(),
            }),
            window: WINDOW,
            connector: Connector::new(store, nodes, &Metrics::default(), Timestamp::now),
            sources: sources.clone(),
            metrics: metrics.clone(),
            clock: Timestamp::now,
        };
        Reporter::new(&GPU_FILE, frame)
    }

    fn start(&self) -> Running {
        let (sources, metrics) = (Sources::default(), Metrics::default());
        let cancel = CancellationToken::new();
        let monitor = GpuFile {
            path: self.path(),
            reporter: self.reporter(&sources, &metrics),
        };
        Running {
            task: tokio::spawn(monitor.run(cancel.clone())),
            sources,
            metrics,
            cancel,
        }
    }

    /// Returns the stored events, oldest first, as `hot`, `ok`, or the number of counted
    /// reports.
    async fn stored(&self) -> Vec<String> {
        let records = self.records().await;
        let text = |event: &HealthEvent| match Sightings::of(event, Timestamp::now()).count {
            _ if event.is_healthy && event.metadata.contains_key(keys::META_REBOOT) => {
                "boot".into()
            }
            _ if event.is_healthy => "ok".into(),
            _ if !event.metadata.contains_key(keys::META_COUNT) => "hot".into(),
            count => count.to_string(),
        };
        records.iter().map(|record| text(&record.event)).collect()
    }

    async fn records(&self) -> Vec<model::event::EventRecord> {
        let mut records = self.store.events(EventQuery::default()).await.unwrap();
        records.reverse();
        records
    }

    /// Returns the titles of the open faults.
    async fn open(&self) -> Vec<String> {
        let mut book = FaultBook::default();
        for record in self.records().await {
            book.record(&record);
        }
        book.faults("n1").iter().map(Fault::title).collect()
    }

    async fn until_last_is(&self, last: &str) {
        let reached = async {
            while self.stored().await.last().is_none_or(|it| it != last) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), reached).await;
        let stored = self.stored().await;
        waited.unwrap_or_else(|_| panic!("{last} is stored in time: {stored:?}"));
    }
}

impl Running {
    async fn status(&self, is: impl Fn(&SourceStatus) -> bool) {
        let reached = async {
            while !is(&self.sources.statuses()[0]) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached)
            .await
            .unwrap_or_else(|_| panic!("in time: {:?}", self.sources.statuses()));
    }

    /// Polls a few more times, then ends.
    async fn poll_and_end(self) {
        let records = self.sources.statuses()[0].records + 3;
        self.status(|status| status.records >= records).await;
        self.end().await;
    }

    async fn end(self) {
        self.cancel.cancel();
        self.task.await.unwrap();
    }
}

#[tokio::test]
async fn what_a_monitor_finds_and_nothing_mends_is_not_fatal() {
    for (action, is_fatal) in [
        (RecommendedAction::None, false),
        (RecommendedAction::RestartVm, true),
    ] {
        let bench = Bench::new();
        let mut reporter = bench.reporter(&Sources::default(), &Metrics::default());
        let mut event = reporter.event("GpuHot", keys::COMPONENT_GPU);
        event.is_fatal = true;
        event.recommended_action = action as i32;
        reporter.report(event, Timestamp::now());
        reporter.finish(&CancellationToken::new()).await;
        let records = bench.records().await;
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].event.is_fatal, is_fatal, "{records:?}");
    }
}

#[tokio::test]
async fn a_fault_that_lasts_is_told_once_and_its_end_also_after_a_restart() {
    let bench = Bench::new();
    bench.write("GPU 3 hot\nGPU 4 ok\n");
    let running = bench.start();
    bench.until_last_is("hot").await;
    running.poll_and_end().await;
    assert_eq!(bench.stored().await, ["hot"], "the others are counted");
    assert_eq!(bench.open().await, ["GpuHot on GPU 3"]);
    bench.write("GPU 3 ok\n");
    let running = bench.start();
    bench.until_last_is("ok").await;
    running.poll_and_end().await;
    let stored = bench.stored().await;
    assert!(
        stored.len() == 3 && stored[1].parse::<u64>().is_ok(),
        "{stored:?}"
    );
    assert_eq!(bench.open().await, [""; 0]);
}

#[tokio::test]
async fn a_reboot_closes_what_it_mends_and_what_is_still_there_is_told_anew() {
    let mut bench = Bench::new();
    bench.write("GPU 3 hot\nGPU 4 hot\n");
    let running = bench.start();
    bench.until_last_is("hot").await;
    running.poll_and_end().await;
    bench.boot = 2;
    bench.write("GPU 3 hot\n");
    let running = bench.start();
    bench.until_last_is("hot").await;
    let reached = async {
        while bench.open().await != ["GpuHot on GPU 3"] {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), reached).await;
    waited.unwrap_or_else(|_| panic!("one fault is open"));
    running.end().await;
    let stored = bench.stored().await;
    assert_eq!(stored[stored.len() - 2..], ["boot", "hot"], "{stored:?}");
}

#[tokio::test]
async fn what_cannot_be_seen_and_what_cannot_be_read_shows() {
    let bench = Bench::new();
    let running = bench.start();
    running
        .status(|status| status.state == SourceState::Failing && status.name == "gpu-file")
        .await;
    bench.write("GPU 3 hot\nnonsense\n");
    running
        .status(|status| {
            status.state == SourceState::Following
                && status.detail == bench.path().display().to_string()
                && status.faults > 0
                && status.malformed > 0
        })
        .await;
    let text = running.metrics.encode();
    for name in ["records", "repeats", "lost_records", "malformed_records"] {
        let line = format!("\ngpuwarden_gpu_file_{name}_total ");
        assert!(text.contains(&line), "{text}");
    }
    running.end().await;
}

#[tokio::test]
async fn a_state_that_cannot_be_written_shows_until_it_can() {
    let bench = Bench::new();
    bench.write("GPU 3 hot\n");
    let in_the_way = bench.dir.path().join("data/gpu-file.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let running = bench.start();
    let text = format!("{}; ", bench.path().display());
    running
        .status(|status| {
            status.state == SourceState::Following
                && status.detail.starts_with(&text)
                && status.detail.contains("gpu-file.json cannot be written: ")
        })
        .await;
    let failed = "gpuwarden_gpu_file_failed_saves_total 0";
    let text = running.metrics.encode();
    assert!(!text.lines().any(|line| line == failed), "{text}");
    std::fs::remove_dir(&in_the_way).unwrap();
    running
        .status(|status| status.detail == bench.path().display().to_string())
        .await;
    running.end().await;
}

/// The state is not written for each event, but no event that a kill would duplicate is handed
/// over.
#[tokio::test]
async fn what_would_not_be_found_again_waits_until_it_is_saved() {
    let bench = Bench::new();
    let mut reporter = bench.reporter(&Sources::default(), &Metrics::default());
    let now = Timestamp::now();
    let report = |reporter: &mut Reporter<OpenFaults>, gpu: &str, place: bool| {
        let mut event = reporter.event("GpuHot", keys::COMPONENT_GPU);
        event.error_code = vec![gpu.to_owned()];
        if place {
            let place = (keys::META_LOG_PLACE.to_owned(), gpu.to_owned());
            event.metadata.extend([place]);
        }
        reporter.report(event, now);
    };
    let file = bench.dir.path().join("data/gpu-file.json");
    report(&mut reporter, "0", true);
    assert_eq!(
        reporter.may_hand_over(),
        0,
        "a first start names its places anew"
    );
    reporter.save();
    reporter.saving_has_ended().await;
    assert_eq!(reporter.may_hand_over(), 1);
    let saved = std::fs::read(&file).unwrap();
    report(&mut reporter, "1", true);
    assert_eq!(
        reporter.may_hand_over(),
        2,
        "the record is read again after a kill"
    );
    report(&mut reporter, "2", false);
    report(&mut reporter, "3", true);
    assert_eq!(reporter.may_hand_over(), 2, "none overtakes another");
    // The two that are ready go first, then the state is written, then the others go.
    while reporter.state.outbox.len() > 2 {
        reporter.work().await;
    }
    assert_eq!(std::fs::read(&file).unwrap(), saved);
    while !reporter.state.outbox.is_empty() {
        reporter.work().await;
    }
    assert_ne!(std::fs::read(&file).unwrap(), saved);
    // After a kill they would be handed over again, and an outbox that has delivered them would
    // deliver again.
    reporter.saving_has_ended().await;
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("\"outbox\":[]"), "{text}");
    assert_eq!(bench.stored().await.len(), 4);
    // A count is named after its first record, and may be a larger number when it is repeated.
    report(&mut reporter, "1", true);
    reporter.end_windows();
    assert_eq!(
        (reporter.state.outbox.len(), reporter.may_hand_over()),
        (1, 0)
    );
}

/// A monitor in the controller watches all nodes: each event names its node, and a restart is no
/// reboot of any of them.
#[tokio::test]
async fn a_monitor_of_many_nodes_names_the_node_of_each_event() {
    const MAINTENANCE: Monitor = Monitor {
        name: "cloud-maintenance",
        agent: "cloud-maintenance-monitor",
        checks: &[("CloudMaintenance", "Node")],
    };
    let bench = Bench::new();
    for code in ["1", "2"] {
        let store: Arc<dyn EventStore> = Arc::clone(&bench.store) as _;
        let frame = Frame {
            node_name: "gpuwarden-0".to_owned(),
            state_dir: Some(bench.dir.path().join("data")),
            boot: None,
            window: WINDOW,
            connector: Connector::new(store, AcceptNodes::Any, &Metrics::default(), Timestamp::now),
            sources: Sources::default(),
            metrics: Metrics::default(),
            clock: Timestamp::now,
        };
        let mut reporter: Reporter<()> = Reporter::new(&MAINTENANCE, frame);
        reporter.has_looked("the provider's API");
        for node in ["n1", "n2"] {
            let mut event = reporter.event_about(node, "CloudMaintenance", "Node");
            event.error_code = vec![code.to_owned()];
            reporter.report(event, Timestamp::now());
        }
        reporter.finish(&CancellationToken::new()).await;
    }
    let records = bench.records().await;
    let nodes: Vec<&str> = (records.iter())
        .map(|record| record.event.node_name.as_str())
        .collect();
    assert_eq!(nodes, ["n1", "n2", "n1", "n2"]);
    assert!(records.iter().all(|record| !record.event.is_healthy));
}
