use std::io::Write as _;

use connector::{AcceptNodes, Caller};
use contract::{EVENT_VERSION, HealthEvent, HealthEvents, RecommendedAction, json};
use diagnosis::fold::Sightings;
use host::boot::BootId;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore, Upkeep as _};

use super::*;
use crate::monitor::{MAX_UNSENT, WINDOW};

mod dump;
mod fall;
mod hand_over;
mod machine;
mod reboots;
mod switch;
mod unreadable;
mod unseen;

const XID_79: &str = "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
const XID_48: &str = "NVRM: Xid (PCI:0000:b3:00): 48, pid=1, name=a, DBE";

/// A monitor over a file, its store, and what it has stored.
struct Bench {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    /// The metrics of the process that ran last.
    metrics: Metrics,
    boot: Boot,
    window: Duration,
    history: SignedDuration,
    refuse_user_space: bool,
    node_name: String,
}

/// Returns a boot of the machine; the `number`th began in that hour of the day.
fn boot(number: u8) -> Boot {
    Boot {
        id: BootId::from_bytes([number; 16]),
        at: format!("2026-11-21T{number:02}:00:00Z").parse().unwrap(),
    }
}

/// Returns a line of kernel log as rsyslog writes it, `second` seconds after the beginning of
/// [`boot`] `hour`.
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
            // The lines of most tests are not new.
            history: SignedDuration::from_hours(24 * 365 * 100),
            refuse_user_space: false,
            node_name: "n1".into(),
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
        let config = Config {
            spec: Spec::File(self.log()),
            node: monitor::Config {
                node_name: self.node_name.clone(),
                state_dir: Some(self.dir.path().join("data")),
                boot: Some(self.boot),
                window: self.window,
            },
            history: self.history,
            refuse_user_space: self.refuse_user_space,
            gpu_metadata: self.dir.path().join("gpu_metadata.json"),
            sysfs: self.dir.path().join("sys"),
            catalog: Arc::new(Catalog::builtin().clone()),
        };
        KernelLogMonitor::new(config, connector, sources, &self.metrics, Timestamp::now)
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

    /// Runs a monitor until `count` events are stored and all lines are read, then ends it.
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
    /// Waits until everything that was there has been read.
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

    /// Ends at once, whatever is under way.
    async fn kill(self) {
        self.task.abort();
        drop(self.task.await);
        while !(self.has_gone)() {
            tokio::task::yield_now().await;
        }
    }
}

/// Returns how many lines events stand for.
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
    // The place is behind what is stored, as after a loss of power: read again, stored once.
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
    // Written anew, and longer than before it was: the place of the line is the same.
    std::fs::write(bench.log(), "").unwrap();
    running.following().await;
    bench.append(XID_79);
    bench.stored_at_least(2).await;
    running.end().await;
}

/// Its events are named by when it was written anew, so that has to be known by the next process.
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
async fn a_storm_becomes_one_event_per_fault_and_window_and_no_line_is_missing() {
    const FAULTS: u32 = 29;
    const LINES: u32 = 20_000;
    let mut bench = Bench::new();
    let mut storm = String::new();
    for line in 0..LINES {
        storm.push_str(&at(1, 10 + line / 1_000, &xid(95, line % FAULTS)));
        storm.push('\n');
    }
    bench.append(storm.trim_end());
    let events = bench.run_until(u64::from(FAULTS)).await;
    assert_eq!(events.len(), FAULTS as usize, "one each within the window");
    assert!(bench.metric("gpuwarden_kernel_log_records_total 20000"));
    assert!(bench.metric("gpuwarden_kernel_log_repeats_total 19971"));
    assert!(bench.metric("syslog_health_monitor_xid_errors{node=\"n1\",err_code=\"95\"} 20000"));
    // What was counted has survived the restart, and is reported when the window ends.
    bench.window = Duration::from_millis(100);
    let events = bench.run_until(u64::from(2 * FAULTS)).await;
    assert_eq!(events.len(), 2 * FAULTS as usize);
    assert_eq!(lines_in(&events), u64::from(LINES));
    let last = events.last().unwrap();
    assert_eq!(
        Sightings::of(last, Timestamp::UNIX_EPOCH).last.to_string(),
        "2026-11-21T01:00:29Z"
    );
}

#[tokio::test]
async fn killed_at_any_moment_it_counts_every_line_once() {
    const LINES: u64 = 3_000;
    let mut bench = Bench::new();
    bench.window = Duration::from_millis(20);
    let mut written = 0;
    let mut kills = 0;
    while written < LINES {
        let running = bench.start();
        for _ in 0..100 {
            // Less than a minute in all: windows end by the time that passes here.
            let second = u32::try_from(written * 50 / LINES).unwrap();
            bench.append(&at(
                1,
                second,
                &xid(95, u32::try_from(written % 7).unwrap()),
            ));
            written += 1;
        }
        // A different moment each time.
        tokio::time::sleep(Duration::from_micros(written * 7_919 % 30_000)).await;
        running.kill().await;
        kills += 1;
    }
    assert!(kills >= 30);
    let running = bench.start();
    running.following().await;
    let all = async {
        while lines_in(&bench.stored().await) < LINES {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    drop(tokio::time::timeout(Duration::from_secs(20), all).await);
    running.end().await;
    assert_eq!(lines_in(&bench.stored().await), LINES);
}

/// What a person decides between the line and its report is not undone by it.
#[tokio::test]
async fn a_count_is_accepted_as_of_its_last_line_also_after_a_restart() {
    let mut bench = Bench::new();
    bench.append("[1.0] usb 1-1: new device");
    let running = bench.start();
    running.following().await;
    let began = Timestamp::now();
    // The clock of the log is another one.
    bench.append(&at(1, 0, &xid(79, 1)));
    bench.append(&at(1, 1, &xid(79, 1)));
    bench.stored_at_least(1).await;
    running.status(|status| status.records == 3).await;
    let decided = Timestamp::now();
    running.end().await;
    bench.run_until(2).await;
    let records = bench.store.events(EventQuery::default()).await.unwrap();
    let count = &records[0];
    assert_eq!(Sightings::of(&count.event, decided).count, 1);
    assert!(count.event.metadata.contains_key(keys::META_COUNT));
    assert!(
        began <= count.created_at && count.created_at <= decided,
        "{count:?}"
    );
}

#[tokio::test]
async fn a_recovery_that_somebody_else_reports_ends_the_window() {
    let mut bench = Bench::new();
    let running = bench.start();
    bench.append(&xid(79, 1));
    bench.stored_at_least(1).await;
    let injected = HealthEvent {
        version: EVENT_VERSION,
        agent: keys::SYSLOG_AGENT.to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check_name: keys::CHECK_XID.to_owned(),
        is_healthy: true,
        node_name: "n1".to_owned(),
        ..HealthEvent::default()
    };
    let batch = HealthEvents {
        version: EVENT_VERSION,
        events: vec![injected],
    };
    let own = Caller::Monitor;
    running.connector.accept(batch, &own).await.unwrap();
    // Within the window, and new all the same.
    bench.append(&xid(79, 1));
    bench.stored_at_least(3).await;
    running.end().await;
    let events = bench.stored().await;
    assert_eq!(
        events
            .iter()
            .map(|event| event.is_healthy)
            .collect::<Vec<_>>(),
        [false, true, false]
    );
}

#[tokio::test]
async fn what_the_connector_refuses_is_counted_and_does_not_hold_up_the_log() {
    let mut bench = Bench::new();
    bench.append(&xid(79, 1));
    bench.append(&xid(48, 1));
    bench.node_name = "n".repeat(300);
    let running = bench.start();
    // What it sees reaches nobody, and that shows, however much it reads.
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
    // It has passed them by.
    bench.node_name = "n1".into();
    bench.append(&xid(48, 2));
    let events = bench.run_until(1).await;
    assert_eq!(events.len(), 1);
    assert!(events[0].message.contains("0000:02:00"));
}

#[tokio::test]
async fn what_is_known_of_the_gpus_stands_on_events_and_a_broken_file_costs_no_event() {
    let mut bench = Bench::new();
    let path = bench.dir.path().join("gpu_metadata.json");
    std::fs::write(&path, "{").unwrap();
    bench.append(&xid(79, 1));
    let running = bench.start();
    bench.stored_at_least(1).await;
    running
        .status(|status| status.detail.contains("gpu_metadata.json is not used"))
        .await;
    running.end().await;
    let gpus = r#"{"driver_version": "570.86.15", "chassis_serial": "42", "gpus": [
        {"gpu_id": 3, "uuid": "GPU-1", "pci_address": "0000:02:00.0"}]}"#;
    std::fs::write(&path, gpus).unwrap();
    bench.append(&xid(79, 2));
    let events = bench.run_until(2).await;
    assert!(!events[0].metadata.contains_key("gpu_uuid"));
    for (key, value) in [
        ("gpu_uuid", "GPU-1"),
        ("gpu_index", "3"),
        ("driver_version", "570.86.15"),
        ("chassis_serial", "42"),
    ] {
        assert_eq!(events[1].metadata.get(key).map(String::as_str), Some(value));
    }
}

#[tokio::test]
async fn what_programs_write_is_marked_and_can_be_refused() {
    let mut bench = Bench::new();
    // As from `dmesg --raw` or a copy of /dev/kmsg: the facility is in the number.
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
    // The last word is written all the same.
    let state = std::fs::read_to_string(bench.state()).unwrap();
    let length = std::fs::metadata(bench.log()).unwrap().len();
    assert!(state.contains(&format!(":{length}:")), "{state}");
}

/// On each of the first two lines NVSentinel hangs: it reads them again for ever.
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
            // What 162 ends.
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

#[tokio::test]
async fn a_fall_told_in_three_lines_is_one_event_with_all_of_them() {
    let mut bench = Bench::new();
    let lines = [
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ];
    for line in lines {
        bench.append(&at(1, 0, line));
    }
    let events = bench.run_until(1).await;
    assert_eq!(events[0].message, lines.join("\n"));
    assert_eq!(events[0].error_code, ["GPU_FALLEN_OFF_BUS"]);
}

#[test]
fn the_end_of_all_faults_of_a_gpu_names_no_code() {
    let line = "GPU reset executed: GPU-99, success: true";
    let event = event_of_line(line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert!(event.is_healthy && !event.is_fatal && event.error_code.is_empty());
    assert_eq!(event.check_name, "SysLogsXIDError");
    assert_eq!(event.message, line);
    let line = "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged";
    let event = event_of_line(line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert_eq!(event.component_class, "NIC");
    assert_eq!(event.processing_strategy, 2, "STORE_ONLY");
}

#[test]
fn a_reset_that_failed_says_what_follows() {
    let line = "GPU reset executed: GPU-99, success: false";
    let event = event_of_line(line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert_eq!(
        event.message,
        "GPU reset failed, proceeding with a node reboot"
    );
    assert_eq!(event.metadata["gpuwarden.dev/log-line"], line);
    // However much stands around it.
    let line = format!("{}{line}", " ".repeat(20_000));
    let event = event_of_line(&line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert_eq!(event.metadata["gpuwarden.dev/log-line"].len(), 4_096);
}

#[test]
fn without_the_uuid_a_gpu_cannot_be_reset_and_the_machine_is_restarted() {
    let at = Timestamp::UNIX_EPOCH;
    let event = event_of_line(XID_48, "n1", at).unwrap();
    assert_eq!(
        event.recommended_action,
        RecommendedAction::RestartVm as i32
    );
    assert_eq!(
        event.metadata["gpuwarden.dev/catalogue-action"],
        "COMPONENT_RESET"
    );
    assert_eq!(event_of_line("all is well", "n1", at), None);
}

/// There only the machine file's is, for the reset could not be acknowledged without it.
#[tokio::test]
async fn a_uuid_from_the_log_is_enough_for_a_reset() {
    let mut bench = Bench::new();
    bench.append(&at(1, 1, "NVRM: GPU at PCI:0000:b3:00: GPU-bb"));
    bench.append(&at(1, 2, XID_48));
    let events = bench.run_until(1).await;
    let reset = RecommendedAction::ComponentReset as i32;
    assert_eq!(events[0].recommended_action, reset);
}
