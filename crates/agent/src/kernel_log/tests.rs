use std::io::Write as _;

use connector::{AcceptNodes, Caller, Connector};
use contract::{EVENT_VERSION, HealthEvent, HealthEvents, RecommendedAction, json};
use diagnosis::fold::Sightings;
use diagnosis::gpu::Inventory;
use host::boot::BootId;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore, Upkeep as _};

use super::*;
use monitor::{MAX_UNSENT, WINDOW};

mod dump;
mod fall;
mod hand_over;
mod jobs;
mod machine;
mod reboots;
mod repeats;
mod reset;
mod switch;
mod unreadable;
mod unseen;

const XID_79: &str = "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
const XID_48: &str = "NVRM: Xid (PCI:0000:b3:00): 48, pid=1, name=a, DBE";

/// A monitor over a file, and its store.
struct Bench {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    /// Metrics of the last process.
    metrics: Metrics,
    boot: Boot,
    window: Duration,
    history: SignedDuration,
    refuse_user_space: bool,
    node_name: String,
    /// Description of the GPUs from the driver.
    machine: watch::Sender<Option<MachineGpus>>,
}

/// Returns a boot of the machine; boot `number` began in that hour of the day.
fn boot(number: u8) -> Boot {
    Boot {
        id: BootId::from_bytes([number; 16]),
        at: format!("2026-11-21T{number:02}:00:00Z").parse().unwrap(),
    }
}

/// Returns a line in rsyslog's format, `second` seconds after the start of [`boot`] `hour`.
fn at(hour: u8, second: u32, text: &str) -> String {
    let (minute, second) = (second / 60, second % 60);
    format!("2026-11-21T{hour:02}:{minute:02}:{second:02}.000000+00:00 n1 kernel: {text}")
}

fn xid(code: u32, gpu: u32) -> String {
    format!("NVRM: Xid (PCI:0000:{gpu:02x}:00): {code}, pid=1, name=a, text")
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(&dir.path().join("data")).unwrap());
        Self {
            dir,
            store,
            metrics: Metrics::default(),
            boot: boot(1),
            window: WINDOW,
            // The lines of most tests are old.
            history: SignedDuration::from_hours(24 * 365 * 100),
            refuse_user_space: false,
            node_name: "n1".into(),
            machine: watch::Sender::new(None),
        }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("kern.log")
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("data/kernel-log.json")
    }

    fn append(&self, text: &str) {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log())
            .unwrap();
        file.write_all(format!("{text}\n").as_bytes()).unwrap();
    }

    fn connector(&self) -> Connector {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as Arc<dyn EventStore>;
        let nodes = AcceptNodes::Own("n1".to_owned());
        Connector::new(store, nodes, &Metrics::default(), Timestamp::now)
    }

    fn monitor(&self, sources: &Sources, connector: Connector) -> KernelLogMonitor {
        let config = KernelLogConfig {
            spec: KernelLogSpec::File(self.log()),
            history: self.history,
            refuse_user_space: self.refuse_user_space,
            machine: self.machine.subscribe(),
            gpu_metadata: self.dir.path().join("gpu_metadata.json"),
            sysfs: self.dir.path().join("sys"),
            catalog: Arc::new(Catalog::builtin().clone()),
            jobs: JobSources {
                proc: self.dir.path().join("proc"),
                pod_logs: self.dir.path().join("pods"),
                kubelet: self.dir.path().join("kubelet.sock"),
                inventory: watch::channel(Inventory::default()).1,
            },
        };
        let frame = Frame {
            node_name: self.node_name.clone(),
            state_dir: Some(self.dir.path().join("data")),
            boot: Some(self.boot),
            window: self.window,
            connector,
            sources: sources.clone(),
            metrics: self.metrics.clone(),
            clock: Timestamp::now,
        };
        KernelLogMonitor::new(config, &frame)
    }

    /// Starts a process with the monitor in it.
    fn start(&mut self) -> Running {
        self.metrics = Metrics::default();
        let (sources, cancel) = (Sources::default(), CancellationToken::new());
        let connector = self.connector();
        let monitor = self.monitor(&sources, connector.clone());
        Running {
            has_gone: monitor.reporter.has_gone(),
            task: tokio::spawn(monitor.run(cancel.clone())),
            sources,
            cancel,
            connector,
        }
    }

    /// Runs a monitor until `count` events are stored and all lines are read, then ends the
    /// monitor.
    async fn run_until(&mut self, count: u64) -> Vec<HealthEvent> {
        let running = self.start();
        self.stored_at_least(count).await;
        running.following().await;
        running.end().await;
        self.stored().await
    }

    async fn stored_at_least(&self, count: u64) {
        let mut latest = self.store.latest();
        let waited = tokio::time::timeout(
            Duration::from_secs(20),
            latest.wait_for(|seq| *seq >= count.into()),
        );
        waited.await.expect("events are stored in time").unwrap();
    }

    async fn stored(&self) -> Vec<HealthEvent> {
        let query = EventQuery {
            limit: 10_000,
            ..EventQuery::default()
        };
        let mut records = self.store.events(query).await.unwrap();
        records.reverse();
        records.into_iter().map(|record| record.event).collect()
    }

    fn metric(&self, line: &str) -> bool {
        self.metrics.encode().lines().any(|found| found == line)
    }
}

struct Running {
    has_gone: Box<dyn Fn() -> bool + Send>,
    task: tokio::task::JoinHandle<()>,
    sources: Sources,
    cancel: CancellationToken,
    connector: Connector,
}

impl Running {
    /// Waits until the backlog has been read.
    async fn following(&self) {
        self.status(|status| status.state == SourceState::Following)
            .await;
    }

    async fn status(&self, is: impl Fn(&runtime::sources::SourceStatus) -> bool) {
        let reached = async {
            while !is(&self.sources.statuses()[0]) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached)
            .await
            .expect("the source comes to this state in time");
    }

    async fn end(self) {
        self.cancel.cancel();
        self.task.await.unwrap();
    }

    /// Ends the process at once.
    async fn kill(self) {
        self.task.abort();
        drop(self.task.await);
        while !(self.has_gone)() {
            tokio::task::yield_now().await;
        }
    }
}

/// Returns the number of lines that the events stand for.
fn lines_in(events: &[HealthEvent]) -> u64 {
    events
        .iter()
        .map(|event| Sightings::of(event, Timestamp::UNIX_EPOCH).count)
        .sum()
}

#[tokio::test]
async fn a_line_becomes_an_event_with_the_contracts_names() {
    let mut bench = Bench::new();
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
        RecommendedAction::RestartBm as i32
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

    let reset = "GPU reset executed: GPU-99, success: false";
    let fall = "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.";
    let switch = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 timeout";
    let nic = "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged";
    for (line, class, check, code) in [
        (XID_79, "GPU", "SysLogsXIDError", "79"),
        (reset, "GPU", "SysLogsXIDError", "GPU_RESET_FAILURE"),
        (switch, "GPU", "SysLogsSXIDError", "24007"),
        (fall, "GPU", "SysLogsGPUFallenOff", "GPU_FALLEN_OFF_BUS"),
        (nic, "NIC", "SysLogsNICDriverError", "module_unplugged"),
    ] {
        let event = event_of_line(line, "n1", Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(event.agent, "syslog-health-monitor", "{line}");
        assert_eq!(
            (&*event.component_class, &*event.check_name),
            (class, check)
        );
        assert_eq!(
            (event.error_code, event.version),
            (vec![code.to_owned()], 1)
        );
    }
}

#[tokio::test]
async fn a_restart_neither_repeats_nor_loses() {
    let mut bench = Bench::new();
    bench.append(&xid(79, 1));
    assert_eq!(bench.run_until(1).await.len(), 1);
    let early = std::fs::read(bench.state()).unwrap();
    bench.append(&xid(48, 1));
    assert_eq!(bench.run_until(2).await.len(), 2);
    // The place is behind the stored events, as after a power loss: read again, stored once.
    std::fs::write(bench.state(), early).unwrap();
    bench.append(&xid(79, 2));
    assert_eq!(bench.run_until(3).await.len(), 3);
}

#[tokio::test]
async fn the_same_text_in_a_file_that_was_written_anew_is_another_event() {
    let mut bench = Bench::new();
    bench.window = Duration::ZERO;
    bench.append(XID_79);
    assert_eq!(bench.run_until(1).await.len(), 1);
    let running = bench.start();
    // Rewritten, and longer than before: the offset of the line is the same.
    std::fs::write(bench.log(), "").unwrap();
    running.following().await;
    bench.append(XID_79);
    bench.stored_at_least(2).await;
    running.end().await;
}

/// Event names depend on the time of the rewrite, which the next process must know.
#[tokio::test]
async fn a_kill_behind_a_file_that_was_written_anew_doubles_nothing() {
    let mut bench = Bench::new();
    bench.append(&format!("{} and more", xid(79, 1)));
    let running = bench.start();
    bench.stored_at_least(1).await;
    std::fs::write(bench.log(), "").unwrap();
    bench.append(&xid(79, 2));
    bench.stored_at_least(2).await;
    running.kill().await;
    bench.append(&xid(79, 3));
    assert_eq!(bench.run_until(3).await.len(), 3);
}

#[tokio::test]
async fn lines_older_than_the_history_are_marked_on_a_first_start_only() {
    let mut bench = Bench::new();
    bench.append(&format!("2020-01-01T00:00:00,000000+00:00 {XID_79}"));
    bench.history = SignedDuration::from_mins(15);
    bench.run_until(1).await;
    let marked = |event: &HealthEvent| event.metadata.contains_key(keys::META_EARLIER_IN_BOOT);
    assert!(marked(&bench.stored().await[0]));
    bench.append(&format!("2020-01-01T00:00:01,000000+00:00 {XID_48}"));
    assert!(!marked(&bench.run_until(2).await[1]));
}

#[tokio::test]
async fn what_the_connector_refuses_is_counted_and_does_not_hold_up_the_log() {
    let mut bench = Bench::new();
    bench.append(&xid(79, 1));
    bench.append(&xid(48, 1));
    bench.node_name = "n".repeat(300);
    let running = bench.start();
    // The status shows that findings reach no store, however much is read.
    running
        .status(|status| status.state == SourceState::Failing && status.refused == 2)
        .await;
    running
        .status(|status| status.detail.contains("nodeName: "))
        .await;
    running.end().await;
    let refused = format!(
        "syslog_health_monitor_xid_processing_errors{{node=\"{}\",error_type=\"event_refused\"}} 2",
        bench.node_name
    );
    assert!(bench.metric(&refused), "{}", bench.metrics.encode());
    // The monitor has skipped the refused events.
    bench.node_name = "n1".into();
    bench.append(&xid(48, 2));
    let events = bench.run_until(1).await;
    assert_eq!(events.len(), 1);
    assert!(events[0].message.contains("0000:02:00"));
}

#[tokio::test]
async fn what_programs_write_is_marked_and_can_be_refused() {
    let mut bench = Bench::new();
    // As from `dmesg --raw` or a copy of /dev/kmsg: the number contains the facility.
    bench.append(&format!("3,1,1000,-;{}", xid(79, 1)));
    bench.append(&format!("11,2,2000,-;{}", xid(79, 2)));
    let events = bench.run_until(2).await;
    let marked: Vec<bool> = events
        .iter()
        .map(|event| event.metadata.contains_key(keys::META_FROM_USER_SPACE))
        .collect();
    assert_eq!(marked, [false, true]);
    bench.refuse_user_space = true;
    bench.append(&format!("11,3,3000,-;{}", xid(79, 3)));
    bench.append(&format!("3,4,4000,-;{}", xid(79, 4)));
    let events = bench.run_until(3).await;
    assert!(events.len() == 3 && events[2].message.contains("0000:04:00"));
    assert!(bench.metric("gpuwarden_kernel_log_user_space_records_total 1"));
}

#[tokio::test]
async fn lines_that_are_no_fault_do_not_write_the_place_each_time() {
    let mut bench = Bench::new();
    std::fs::write(bench.log(), "").unwrap();
    let running = bench.start();
    running.following().await;
    let began = std::time::Instant::now();
    let mut writings = std::collections::BTreeSet::new();
    for line in 0..100_u64 {
        bench.append(&at(1, 1, &format!("usb 1-1: line {line}")));
        running.status(|status| status.records > line).await;
        writings.insert(
            std::fs::metadata(bench.state())
                .and_then(|meta| meta.modified())
                .ok(),
        );
    }
    let most = 2 + began.elapsed().as_secs();
    assert!(writings.len() as u64 <= most, "{writings:?}");
    running.end().await;
    // The last place is written all the same.
    let state = std::fs::read_to_string(bench.state()).unwrap();
    let length = std::fs::metadata(bench.log()).unwrap().len();
    assert!(state.contains(&format!(":{length}:")), "{state}");
}

/// NVSentinel retries each of the first two lines forever.
#[tokio::test]
async fn lines_about_what_nobody_knows_hold_up_nothing() {
    let mut bench = Bench::new();
    for (second, line) in (0..).zip([
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 sourcetrack timeout error",
        "GPU reset executed: GPU-99, success: false",
        "NVRM: Xid (PCI:0000:b3:00): 163, power smoothing",
        "NVRM: Xid (PCI:0000:b3:00): 162, power smoothing",
        XID_79,
    ]) {
        bench.append(&at(1, second, line));
    }
    let events = bench.run_until(6).await;
    let told: Vec<_> = events
        .iter()
        .map(|event| {
            (
                event.check_name.as_str(),
                event.error_code.join(","),
                event.is_healthy,
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("SysLogsSXIDError", "24007".to_owned(), false),
            ("SysLogsXIDError", "GPU_RESET_FAILURE".to_owned(), false),
            ("SysLogsXIDError", "163".to_owned(), false),
            ("SysLogsXIDError", "162".to_owned(), false),
            // The fault that 162 ends.
            ("SysLogsXIDError", "163".to_owned(), true),
            ("SysLogsXIDError", "79".to_owned(), false),
        ]
    );
    let ended = &events[4];
    assert_eq!(ended.entities_impacted, events[2].entities_impacted);
    assert_eq!(ended.message, "Cancelled by SysLogsXIDError error code 162");
    assert_eq!(ended.metadata[keys::META_CANCELLED_BY], "162");
    assert_eq!((ended.is_fatal, ended.recommended_action), (false, 0));
    for line in [
        "syslog_health_monitor_sxid_errors{node=\"n1\",err_code=\"24007\",link=\"44\",nvswitch=\"3\"} 1",
        "syslog_health_monitor_xid_errors{node=\"n1\",err_code=\"79\"} 1",
    ] {
        assert!(bench.metric(line), "{line}");
    }
}
