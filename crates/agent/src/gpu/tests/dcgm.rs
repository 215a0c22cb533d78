//! Tests of DCGM as a second source of the same faults.

use diagnosis::gpu::dcgm::{DcgmEntity, DcgmGpu, DcgmIncident, DcgmLook, ImexUse};

use super::super::dcgm::NAME;
use super::*;

/// A code that needs a reset of the GPU, a notice, and codes of a GPU's heat and of a switch.
const REMAP_FAILED: u32 = 80;
const REMAP_PENDING: u32 = 85;
const THERMAL: u32 = 10;
const SWITCH_FATAL: u32 = 15;

fn incident(system: u32, code: u32, group: u32, id: u32) -> DcgmIncident {
    DcgmIncident {
        system,
        health: 20,
        code,
        message: format!("DCGM's text of {code}"),
        entity: DcgmEntity { group, id },
    }
}

fn of_memory(code: u32) -> DcgmIncident {
    incident(0x10, code, DcgmEntity::GPU, 1)
}

/// Returns a machine with DCGM, without a calm period before problems close.
fn bench() -> Bench {
    let mut bench = Bench::new();
    bench.asks_dcgm = true;
    bench.config.limits.dcgm_calm_seconds = 0;
    bench
}

impl Bench {
    fn dcgm_look(&self, incidents: &[DcgmIncident]) -> DcgmLook {
        let gpus = self.inventory.gpus.iter().map(|gpu| DcgmGpu {
            id: gpu.index,
            index: Some(gpu.index),
            uuid: Some(gpu.uuid.clone()),
            pci: Some(gpu.pci.clone()),
        });
        DcgmLook {
            version: Some("4.6.0".to_owned()),
            gpus: gpus.collect(),
            switches: vec![2],
            incidents: incidents.to_vec(),
            is_whole: true,
        }
    }

    /// Sends a poll of DCGM, and waits until the monitor has processed it.
    async fn dcgm(&self, running: &Running, incidents: &[DcgmIncident]) {
        let records = running.source(NAME).records;
        running
            .dcgm_sees(Seen::Dcgm(self.dcgm_look(incidents)))
            .await;
        running
            .status_of(NAME, |status| status.records > records)
            .await;
    }
}

impl Running {
    async fn dcgm_sees(&self, seen: Seen) {
        self.dcgm.send(seen).await.unwrap();
    }

    async fn dcgm_fails(&self, reason: &str) {
        let reason = reason.to_owned();
        let (is_said, stuck) = (true, 0);
        let blind = Seen::Blind {
            reason,
            is_said,
            stuck,
        };
        self.dcgm_sees(blind).await;
    }

    /// Returns status and reason of DCGM's condition on a GPU, and checks its source.
    fn condition(&self, uuid: &str) -> Option<(i32, String)> {
        let gpus = self.devices.gpus();
        let gpu = gpus.iter().find(|gpu| gpu.name == uuid)?;
        let mut conditions = gpu.status.iter().flat_map(|status| &status.conditions);
        let condition = conditions.find(|one| one.r#type == "DCGMHealth")?;
        assert_eq!(condition.source, "dcgm-exporter");
        Some((condition.status, condition.reason.clone()))
    }
}

#[tokio::test]
async fn incidents_and_their_end_are_events_in_the_form_of_the_contract() {
    let bench = bench();
    let running = bench.start();
    bench.poll(&running).await;
    bench.dcgm(&running, &[]).await;
    let incidents = [
        of_memory(REMAP_FAILED),
        incident(0x80, THERMAL, DcgmEntity::GPU, 0),
        incident(0x800, SWITCH_FATAL, DcgmEntity::SWITCH, 2),
    ];
    bench.dcgm(&running, &incidents).await;
    bench.dcgm(&running, &incidents).await;
    bench.dcgm(&running, &[]).await;
    running.end().await;
    let stored = bench.stored().await;
    assert_eq!(stored.len(), 6, "only changes are reported: {stored:?}");
    let of = |check: &str, is_healthy: bool| {
        let mut events = stored.iter();
        let is = |it: &&HealthEvent| it.check_name == check && it.is_healthy == is_healthy;
        events.find(is).unwrap()
    };
    let failed = of("GpuMemWatch", false);
    assert_eq!(
        (failed.agent.as_str(), failed.component_class.as_str()),
        ("gpu-health-monitor", "GPU")
    );
    assert_eq!(failed.error_code, ["DCGM_FR_ROW_REMAP_FAILURE"]);
    assert_eq!(entities(failed), GPU_1);
    assert_eq!(failed.message, "DCGM's text of 80");
    assert!(failed.is_fatal);
    assert_eq!(
        failed.recommended_action(),
        RecommendedAction::ComponentReset
    );
    for (key, value) in [
        ("gpuwarden.dev/witnesses", "DCGM"),
        ("severity", "RESET"),
        ("chassis_serial", "C1"),
    ] {
        let told = failed.metadata.get(key).map(String::as_str);
        assert_eq!(told, Some(value), "{key}");
    }
    let hot = of("GpuThermalWatch", false);
    assert!(!hot.is_fatal);
    assert_eq!(hot.recommended_action(), RecommendedAction::None);
    let switch = of("GpuNvswitchFatalWatch", false);
    assert_eq!(entities(switch), [("NVSWITCH", "2")]);
    assert!(switch.is_fatal);
    let well = of("GpuMemWatch", true);
    assert_eq!(well.message, "GPU Mem watch reported no errors");
    assert!(well.error_code.is_empty());
    assert_eq!(entities(well), GPU_1);
    assert_eq!(bench.open().await, [""; 0]);
}

#[tokio::test]
async fn what_the_driver_sees_too_is_one_fault_with_two_witnesses_until_neither_sees_it() {
    let mut bench = bench();
    bench.config.limits.settling_seconds = 0;
    let running = bench.start();
    bench.poll(&running).await;
    let both = [of_memory(REMAP_FAILED), of_memory(REMAP_PENDING)];
    bench.dcgm(&running, &both).await;
    bench.readings[1].remap_failed = Some(true);
    bench.poll(&running).await;
    // The driver reports it, and DCGM does not.
    bench.dcgm(&running, &[of_memory(REMAP_PENDING)]).await;
    running.end().await;
    let title = |code: &str| format!("GpuMemWatch {code} on GPU 1, GPU_UUID GPU-1, PCI 0000:b1:00");
    let (pending, failed) = (
        title("DCGM_FR_PENDING_ROW_REMAP"),
        title("DCGM_FR_ROW_REMAP_FAILURE"),
    );
    assert_eq!(bench.open().await, [pending.clone(), failed]);

    // Also over a restart: the end of the driver's problem closes only that.
    let running = bench.start();
    bench.readings[1].remap_failed = Some(false);
    bench.poll(&running).await;
    running.end().await;
    assert_eq!(bench.open().await, [pending]);
    let running = bench.start();
    bench.poll(&running).await;
    bench.dcgm(&running, &[]).await;
    running.end().await;
    assert_eq!(bench.open().await, [""; 0]);
}

#[tokio::test]
async fn a_second_witness_is_named() {
    let mut bench = bench();
    let running = bench.start();
    bench.readings[1].remap_failed = Some(true);
    bench.poll(&running).await;
    bench.dcgm(&running, &[of_memory(REMAP_FAILED)]).await;
    running.end().await;
    // A repeat of the same fault, whose count is reported when its window ends.
    let kept = std::fs::read_to_string(bench.dir.path().join("data/gpu-health.json")).unwrap();
    assert!(kept.contains("NVML, DCGM"), "{kept}");
    assert_eq!(bench.stored().await.len(), 1);
}

#[tokio::test]
async fn a_host_engine_that_does_not_answer_is_blindness_of_its_source_alone() {
    let bench = bench();
    let running = bench.start();
    bench.poll(&running).await;
    bench.dcgm(&running, &[of_memory(REMAP_FAILED)]).await;
    let detail = "2 GPUs, DCGM 4.6.0, incidents: 1";
    running.status_of(NAME, |it| it.detail == detail).await;
    let why = "no host engine answers at localhost: dcgmConnect_v2 answered -21";
    for _ in 0..2 {
        running.dcgm_fails(why).await;
    }
    running
        .status_of(NAME, |it| {
            it.state == SourceState::Failing && it.detail == why
        })
        .await;
    running
        .status(|status| status.state == SourceState::Following)
        .await;
    let text = running.metrics.encode();
    assert!(text.contains("gpuwarden_dcgm_connected 0"), "{text}");
    bench.dcgm(&running, &[of_memory(REMAP_FAILED)]).await;
    running
        .status_of(NAME, |it| it.state == SourceState::Following)
        .await;
    let text = running.metrics.encode();
    for line in [
        "gpuwarden_dcgm_connected 1",
        "gpuwarden_dcgm_incidents 1",
        "gpuwarden_dcgm_looks_total 2",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
    running.end().await;
    let stored = bench.stored().await;
    let connectivity: Vec<_> = (stored.iter())
        .filter(|event| event.check_name == "GpuDcgmConnectivityFailure")
        .collect();
    let [lost, back] = connectivity[..] else {
        panic!("one event each: {stored:?}");
    };
    assert_eq!(lost.error_code, ["DCGM_CONNECTIVITY_ERROR"]);
    assert!(!lost.is_healthy && !lost.is_fatal && back.is_healthy);
    let action = lost.recommended_action();
    assert_eq!(action, RecommendedAction::ContactSupport);
    for event in [lost, back] {
        let strategy = event.processing_strategy();
        assert_eq!(strategy, ProcessingStrategy::ExecuteRemediation);
        assert_eq!(entities(event), []);
    }
    assert_eq!(bench.open().await.len(), 1);
}

/// Otherwise the fault would stay open forever, since no source reports its end.
#[tokio::test]
async fn a_host_engine_that_nobody_asks_any_more_is_not_missed() {
    let mut bench = bench();
    let running = bench.start();
    let (is_said, stuck) = (true, 0);
    let reason = "it does not answer".to_owned();
    let blind = Seen::Blind {
        reason,
        is_said,
        stuck,
    };
    running.dcgm.send(blind).await.unwrap();
    running
        .status_of(NAME, |it| it.state == SourceState::Failing)
        .await;
    running.end().await;
    let open = bench.open().await;
    assert!(
        open[0].starts_with("GpuDcgmConnectivityFailure DCGM_CONNECTIVITY_ERROR"),
        "{open:?}"
    );
    bench.asks_dcgm = false;
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
}

#[tokio::test]
async fn without_the_driver_dcgm_alone_tells_and_names_what_there_is() {
    let mut bench = bench();
    bench.asks_nvml = false;
    let running = bench.start();
    running
        .status(|it| it.state == SourceState::Following && it.detail == NOT_ASKED)
        .await;
    bench.dcgm(&running, &[of_memory(REMAP_FAILED)]).await;
    running.end().await;
    let stored = bench.stored().await;
    assert_eq!(entities(&stored[0]), GPU_1);
    assert_eq!(
        stored[0].recommended_action(),
        RecommendedAction::ComponentReset
    );
}

#[tokio::test]
async fn it_is_listened_to_once_it_is_known_how_the_driver_does() {
    let bench = bench();
    let running = bench.start();
    let look = || Seen::Dcgm(bench.dcgm_look(&[of_memory(REMAP_FAILED)]));
    running.dcgm_sees(look()).await;
    until(|| running.dcgm.capacity() == running.dcgm.max_capacity()).await;
    let reason = "no answer for 60 s from nvmlInit_v2".to_owned();
    let (is_said, stuck) = (false, 0);
    running
        .sees(Seen::Blind {
            reason,
            is_said,
            stuck,
        })
        .await;
    running
        .status(|status| status.detail.contains("no answer for 60 s"))
        .await;
    assert_eq!(running.source(NAME).records, 0);
    running.dcgm_sees(look()).await;
    running.status_of(NAME, |status| status.records == 1).await;
    running.end().await;
    assert_eq!(bench.open().await.len(), 1);
}

#[tokio::test]
async fn the_condition_of_dcgm_is_false_for_what_is_fatal_and_unknown_while_it_is_away() {
    let bench = bench();
    let running = bench.start();
    bench.poll(&running).await;
    let is = |status: i32, reason: &str| Some((status, reason.to_owned()));
    let (yes, no, unknown) = (1, 2, 3);
    let hot = incident(0x80, THERMAL, DcgmEntity::GPU, 0);
    let incidents = [hot, of_memory(REMAP_FAILED)];
    for incidents in [&incidents[..], &[]] {
        bench.dcgm(&running, incidents).await;
        let bad = if incidents.is_empty() {
            is(yes, "NoIncidents")
        } else {
            is(no, "Incidents")
        };
        until(|| running.condition("GPU-1") == bad).await;
        assert_eq!(running.condition("GPU-0"), is(yes, "NoIncidents"));
    }
    running.dcgm_fails("gone").await;
    until(|| running.condition("GPU-0") == is(unknown, "DcgmNotSeen")).await;
    let text = running.metrics.encode();
    let restarts = "gpuwarden_gpu_probe_restarts_total{source=\"gpu-dcgm\"} 1\n";
    assert!(text.contains(restarts), "{text}");
    running.end().await;
}

#[tokio::test]
async fn after_a_reboot_what_it_mends_is_told_again_if_dcgm_still_sees_it() {
    let mut bench = bench();
    let inforom = incident(0x40, 9, DcgmEntity::GPU, 0);
    let running = bench.start();
    bench.poll(&running).await;
    bench
        .dcgm(&running, &[inforom.clone(), of_memory(REMAP_FAILED)])
        .await;
    running.end().await;
    assert_eq!(bench.open().await.len(), 2);
    bench.boot = 2;
    let running = bench.start();
    bench.poll(&running).await;
    bench.dcgm(&running, &[inforom]).await;
    running.end().await;
    let open = bench.open().await;
    assert_eq!(open.len(), 1, "{open:?}");
    assert!(open[0].starts_with("GpuInforomWatch"), "{open:?}");
}

#[tokio::test]
async fn where_dcgm_is_not_asked_any_more_the_driver_alone_says_what_is_over() {
    let mut bench = bench();
    let inforom = incident(0x40, 9, DcgmEntity::GPU, 1);
    bench.readings[1].remap_failed = Some(true);
    let running = bench.start();
    bench.poll(&running).await;
    (bench.dcgm(&running, &[of_memory(REMAP_FAILED), inforom])).await;
    running.end().await;
    bench.asks_dcgm = false;
    bench.readings[1].remap_failed = Some(false);
    bench.poll_once().await;
    let open = bench.open().await;
    assert_eq!(open.len(), 1, "{open:?}");
    assert!(open[0].starts_with("GpuInforomWatch"), "{open:?}");
}

/// DCGM always reports IMEX, which counts while a pod relies on it.
#[tokio::test]
async fn imex_is_a_fault_while_pods_rely_on_it_and_its_end_says_that_it_is_not_judged() {
    let bench = bench();
    let running = bench.start();
    bench.poll(&running).await;
    let broken = [
        incident(0x2000, 122, DcgmEntity::NONE, 0),
        of_memory(REMAP_FAILED),
    ];
    bench.dcgm(&running, &broken).await;
    // Messages are processed in the order of sending.
    for imex in [ImexUse::Used, ImexUse::Unused] {
        running.imex.send_replace(imex);
        bench.dcgm(&running, &broken).await;
    }
    running.end().await;
    let stored = bench.stored().await;
    let [_memory, came, over] = &stored[..] else {
        panic!("{stored:?}");
    };
    for event in [came, over] {
        assert_eq!(event.check_name, "GpuImexWatch");
        assert_eq!(event.error_code, ["DCGM_FR_IMEX_UNHEALTHY"]);
        assert_eq!(entities(event), []);
    }
    assert!(came.is_fatal && !came.is_healthy && over.is_healthy);
    assert_eq!(came.message, "DCGM's text of 122");
    assert_eq!(
        over.message,
        "GPU Imex watch: DCGM_FR_IMEX_UNHEALTHY does not count: no pod relies on it"
    );
    let open = bench.open().await;
    assert_eq!(open.len(), 1, "{open:?}");
    assert!(open[0].starts_with("GpuMemWatch"), "{open:?}");
}

/// As after a reboot that has remediated nothing, with a driver that hangs.
#[tokio::test]
async fn the_word_of_the_kubelet_is_no_look_at_the_gpus_of_a_new_boot() {
    let mut bench = bench();
    bench.readings[1].remap_failed = Some(true);
    bench.poll_once().await;
    bench.boot = 2;
    let running = bench.start();
    running.imex.send_replace(ImexUse::Unused);
    running.dcgm_fails("gone").await;
    running
        .status_of(NAME, |status| status.state == SourceState::Failing)
        .await;
    running.end().await;
    let mut open = bench.open().await;
    open.retain(|it| !it.starts_with("GpuDcgmConnectivityFailure"));
    assert_eq!(open.len(), 1);
    bench.readings[1].remap_failed = Some(false);
    bench.poll_once().await;
    let open = bench.open().await;
    assert!(
        open.len() == 1 && open[0].starts_with("GpuDcgmConnectivityFailure"),
        "{open:?}"
    );
}
