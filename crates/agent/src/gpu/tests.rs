//! Tests of the monitor, from a probe's messages to the fault book.

use std::cell::Cell;
use std::time::Duration;

use connector::{AcceptNodes, Connector};
use contract::{HealthEvent, ProcessingStrategy, RecommendedAction};
use diagnosis::gpu::checks::ProblemChange;
use diagnosis::gpu::{Gpu, GpuEventKind, NvlinkReadings, RecoveryAction, UnreadableGpu};
use host::boot::{Boot, BootId};
use jiff::SignedDuration;
use model::fault::{Fault, FaultBook};
use runtime::metrics::Metrics;
use runtime::sources::{SourceStatus, Sources};
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore};

use super::*;
use monitor::WINDOW;

mod dcgm;
mod driver;
mod inventory;
mod ready;
mod seen;
mod starts;
mod xid;

thread_local! {
    /// Offset of the monitor's clock.
    static AHEAD: Cell<SignedDuration> = const { Cell::new(SignedDuration::ZERO) };
}

fn clock() -> Timestamp {
    Timestamp::now() + AHEAD.get()
}

/// A machine with two GPUs, and the store that its monitor reports to.
struct Bench {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    reads_log: bool,
    asks_nvml: bool,
    asks_dcgm: bool,
    boot: u8,
    config: GpuConfig,
    inventory: Inventory,
    readings: Vec<Readings>,
}

struct Running {
    task: tokio::task::JoinHandle<()>,
    imex: watch::Sender<ImexUse>,
    probe: mpsc::Sender<Seen>,
    dcgm: mpsc::Sender<Seen>,
    devices: DeviceApi,
    sources: Sources,
    metrics: Metrics,
    cancel: CancellationToken,
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        index,
        uuid: format!("GPU-{index}"),
        pci: format!("0000:b{index}:00.0"),
        serial: Some(format!("S{index}")),
        chassis_serial: Some("C1".to_owned()),
        slowdown_margin_c: Some(-2),
        ..Gpu::default()
    }
}

fn well(gpu: &Gpu) -> Readings {
    Readings {
        uuid: gpu.uuid.clone(),
        margin_c: Some(40),
        remap_pending: Some(false),
        remap_failed: Some(false),
        sram_threshold_exceeded: Some(false),
        recovery_action: Some(RecoveryAction::None),
        ..Readings::default()
    }
}

/// Waits until `holds` returns true.
async fn until(holds: impl Fn() -> bool) {
    let reached = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), reached)
        .await
        .unwrap();
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(&dir.path().join("data")).unwrap());
        let gpus: Vec<Gpu> = [0, 1].map(gpu).into();
        Self {
            dir,
            store,
            reads_log: false,
            asks_nvml: true,
            asks_dcgm: false,
            boot: 1,
            config: GpuConfig {
                limits: CheckLimits::default(),
                is_fake: false,
                ignored_xids: vec![137],
                catalog: Arc::new(Catalog::builtin().clone()),
                driver_root: "/run/nvidia/driver".into(),
                late_after: Duration::from_secs(600),
            },
            readings: gpus.iter().map(well).collect(),
            inventory: Inventory {
                driver_version: Some("580.65.06".to_owned()),
                gpus,
                ..Inventory::default()
            },
        }
    }

    fn start(&self) -> Running {
        let (sources, metrics) = (Sources::default(), Metrics::default());
        if self.reads_log {
            let kernel_log = sources.add(kernel_log::NAME, "", Timestamp::now());
            kernel_log.update(Timestamp::now(), |log| log.state = SourceState::Following);
        }
        let cancel = CancellationToken::new();
        let ((probe, nvml_seen), (dcgm, dcgm_seen)) = (mpsc::channel(8), mpsc::channel(8));
        let probes = Probes {
            nvml: self.asks_nvml.then_some(nvml_seen),
            dcgm: self.asks_dcgm.then_some(dcgm_seen),
        };
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
            clock,
        };
        let devices = DeviceApi::new(&Metrics::default(), clock);
        let monitor = GpuMonitor::new(self.config.clone(), &frame, probes, devices.clone());
        Running {
            imex: monitor.imex(),
            task: tokio::spawn(monitor.run(cancel.clone())),
            probe,
            dcgm,
            devices,
            sources,
            metrics,
            cancel,
        }
    }

    /// Sends a poll's readings, and waits until the monitor has processed them.
    async fn poll(&self, running: &Running) {
        let records = running.source(MONITOR.name).records;
        running.sees(Seen::Inventory(self.inventory.clone())).await;
        running.sees(Seen::Readings(self.readings.clone())).await;
        running.status(|status| status.records > records).await;
    }

    /// Starts a monitor, sends one poll, and ends the monitor.
    async fn poll_once(&self) {
        let running = self.start();
        self.poll(&running).await;
        running.end().await;
    }

    /// Returns the stored events, oldest first, without those that only name GPUs.
    async fn stored(&self) -> Vec<HealthEvent> {
        let mut events = self.all_stored().await;
        events.retain(|event| event.check_name != keys::CHECK_GPU_INVENTORY);
        events
    }

    async fn all_stored(&self) -> Vec<HealthEvent> {
        let mut records = self.store.events(EventQuery::default()).await.unwrap();
        records.reverse();
        records.into_iter().map(|record| record.event).collect()
    }

    /// Returns the titles of the open faults.
    async fn open(&self) -> Vec<String> {
        let mut records = self.store.events(EventQuery::default()).await.unwrap();
        records.reverse();
        let mut book = FaultBook::default();
        for record in &records {
            book.record(record);
        }
        book.faults("n1").iter().map(Fault::title).collect()
    }
}

impl Running {
    async fn sees(&self, seen: Seen) {
        self.probe.send(seen).await.unwrap();
    }

    fn source(&self, name: &str) -> SourceStatus {
        let mut sources = self.sources.statuses().into_iter();
        sources.find(|source| source.name == name).unwrap()
    }

    async fn status(&self, is: impl Fn(&SourceStatus) -> bool) {
        self.status_of(MONITOR.name, is).await;
    }

    async fn status_of(&self, name: &str, is: impl Fn(&SourceStatus) -> bool) {
        let reached = async {
            while !is(&self.source(name)) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached)
            .await
            .unwrap_or_else(|_| panic!("in time: {:?}", self.sources.statuses()));
    }

    /// Ends the monitor, which hands over its events.
    async fn end(self) {
        self.cancel.cancel();
        self.task.await.unwrap();
    }
}

fn entities(event: &HealthEvent) -> Vec<(&str, &str)> {
    let entities = event.entities_impacted.iter();
    entities
        .map(|it| (it.entity_type.as_str(), it.entity_value.as_str()))
        .collect()
}

const GPU_1: [(&str, &str); 3] = [("GPU", "1"), ("PCI", "0000:b1:00.0"), ("GPU_UUID", "GPU-1")];

#[tokio::test]
async fn a_problem_and_its_end_are_events_in_the_form_of_the_contract() {
    let mut bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    bench.readings[1].recovery_action = Some(RecoveryAction::Reset);
    bench.poll(&running).await;
    bench.poll(&running).await;
    bench.readings[1].recovery_action = Some(RecoveryAction::None);
    bench.poll(&running).await;
    running.end().await;
    let stored = bench.stored().await;
    let [reset, well] = &stored[..] else {
        panic!("only changes are reported: {stored:?}");
    };
    assert_eq!(
        (reset.agent.as_str(), reset.component_class.as_str()),
        ("gpu-health-monitor", "GPU")
    );
    assert_eq!(reset.check_name, "GpuDriverWatch");
    assert_eq!(reset.error_code, ["DCGM_FR_GPU_RECOVERY_RESET"]);
    assert_eq!(entities(reset), GPU_1);
    assert!(reset.is_fatal && !reset.is_healthy);
    assert_eq!(
        (reset.recommended_action(), reset.processing_strategy()),
        (
            RecommendedAction::ComponentReset,
            ProcessingStrategy::ExecuteRemediation
        )
    );
    assert_eq!(
        reset.message,
        "the driver asks for a reset of the GPU, because of the GPU"
    );
    for (key, value) in [
        ("gpu_index", "1"),
        ("gpu_uuid", "GPU-1"),
        ("driver_version", "580.65.06"),
        ("chassis_serial", "C1"),
        ("gpu_serial", "S1"),
        ("severity", "RESET"),
        (
            "gpuwarden.dev/meaning",
            "The driver asks for a reset of the GPU",
        ),
    ] {
        assert_eq!(reset.metadata.get(key).map(String::as_str), Some(value));
    }
    assert!(well.is_healthy && !well.is_fatal && well.error_code.is_empty());
    assert_eq!(well.message, "GPU Driver watch reported no errors");
    assert_eq!(entities(well), GPU_1);
    assert_eq!(well.recommended_action(), RecommendedAction::None);
}

#[tokio::test]
async fn what_is_over_ends_nothing_else_of_the_same_check() {
    let mut bench = Bench::new();
    let running = bench.start();
    let readings = &mut bench.readings[1];
    (readings.remap_pending, readings.remap_failed) = (Some(true), Some(true));
    bench.readings[0].remap_failed = Some(true);
    bench.poll(&running).await;
    bench.readings[1].remap_failed = Some(false);
    bench.poll(&running).await;
    running.end().await;
    let open = bench.open().await;
    let title = |code: &str, gpu: u32| {
        format!("GpuMemWatch {code} on GPU {gpu}, GPU_UUID GPU-{gpu}, PCI 0000:b{gpu}:00")
    };
    let expected = [
        title("DCGM_FR_ROW_REMAP_FAILURE", 0),
        title("DCGM_FR_PENDING_ROW_REMAP", 1),
    ];
    assert_eq!(open, expected);
}

#[tokio::test]
async fn a_link_is_a_part_of_its_gpu() {
    let mut bench = Bench::new();
    let running = bench.start();
    for replays in [7, 8] {
        bench.readings[1].nvlinks = vec![NvlinkReadings {
            link: 4,
            replays: Some(replays),
            ..NvlinkReadings::default()
        }];
        bench.poll(&running).await;
    }
    running.end().await;
    let stored = bench.stored().await;
    let parts: Vec<_> = GPU_1.into_iter().chain([("NVLINK", "4")]).collect();
    assert_eq!(entities(&stored[0]), parts);
    // A link that recovers takes nothing out of service.
    assert!(!stored[0].is_fatal);
}

#[tokio::test]
async fn a_restart_tells_nothing_twice_and_closes_what_is_over_meanwhile() {
    let mut bench = Bench::new();
    bench.readings[1].sram_threshold_exceeded = Some(true);
    bench.poll_once().await;
    bench.poll_once().await;
    assert_eq!(bench.stored().await.len(), 1);
    assert_eq!(bench.open().await.len(), 1);
    bench.readings[1].sram_threshold_exceeded = Some(false);
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
}

#[tokio::test]
async fn after_a_reboot_what_it_mends_is_told_again_if_it_is_there() {
    let mut bench = Bench::new();
    for readings in &mut bench.readings {
        readings.remap_pending = Some(true);
        readings.sram_threshold_exceeded = Some(true);
    }
    bench.poll_once().await;
    assert_eq!(bench.open().await.len(), 4);
    bench.boot = 2;
    // The reboot has remapped the row of GPU 0; the reading of GPU 1 is missing.
    bench.readings[0].remap_pending = Some(false);
    bench.poll_once().await;
    let open = bench.open().await;
    let is_of = |code: &str| open.iter().filter(|title| title.contains(code)).count();
    let counts = (is_of("PENDING_ROW_REMAP"), is_of("SRAM_THRESHOLD"));
    assert_eq!(counts, (1, 2), "{open:?}");
    bench.readings = bench.inventory.gpus.iter().map(well).collect();
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
}

#[tokio::test]
async fn a_gpu_that_is_lost_beside_another_is_a_fault_until_it_is_back() {
    let mut bench = Bench::new();
    let there = (bench.inventory.clone(), bench.readings.clone());
    let running = bench.start();
    bench.poll(&running).await;
    bench.inventory.gpus.pop();
    bench.readings.pop();
    bench.inventory.unreadable = vec![UnreadableGpu {
        index: 1,
        uuid: Some("GPU-1".to_owned()),
        error: "NVML_ERROR_GPU_IS_LOST".to_owned(),
        is_lost: true,
        ..UnreadableGpu::default()
    }];
    bench.poll(&running).await;
    running.end().await;
    let stored = bench.stored().await;
    assert_eq!(stored[0].error_code, ["DCGM_FR_FALLEN_OFF_BUS"]);
    assert_eq!(entities(&stored[0]), GPU_1);
    assert_eq!(stored[0].recommended_action(), RecommendedAction::RestartBm);
    (bench.inventory, bench.readings) = there;
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
}

#[tokio::test]
async fn a_margin_that_is_used_up_is_only_stored_unless_it_is_to_count() {
    for counts in [false, true] {
        let mut bench = Bench::new();
        bench.config.limits.margin_counts = counts;
        bench.readings[1].margin_c = Some(-3);
        bench.poll_once().await;
        let stored = bench.stored().await;
        assert_eq!(stored[0].error_code, ["GPU_TEMP_HW_SLOWDOWN_VIOLATION"]);
        assert_eq!(bench.open().await.len(), usize::from(counts));
    }
}

#[test]
fn a_gpu_without_a_name_cannot_be_reset_alone() {
    let config = Bench::new().config;
    let names = diagnosis::gpu::checks::GpuNames {
        index: 1,
        uuid: Some("GPU-1".to_owned()),
        pci: None,
        serial: None,
        chassis_serial: None,
    };
    let change = ProblemChange {
        gpu: Some(names),
        check: keys::CHECK_GPU_MEMORY.into(),
        code: "DCGM_FR_PENDING_ROW_REMAP".into(),
        link: None,
        switch: None,
        message: Some("a row waits".to_owned()),
        is_all_well: false,
        is_unjudged: false,
        seen_by: diagnosis::gpu::checks::Witnesses::default(),
    };
    let event = event::of(&change, HealthEvent::default(), None, &config);
    assert_eq!(event.recommended_action(), RecommendedAction::RestartVm);
    let action = &event.metadata["gpuwarden.dev/catalogue-action"];
    assert_eq!(action, "COMPONENT_RESET");
}
