//! Tests of the source's status, and of how it shows that no GPU can be read.

use super::*;

const NOT_FOUND: &str = "no libnvidia-ml.so.1";

fn blind(reason: &str) -> Seen {
    Seen::Blind {
        reason: reason.to_owned(),
        is_said: true,
        stuck: 0,
    }
}

#[tokio::test]
async fn a_driver_that_does_not_answer_is_blindness_and_no_fault() {
    let bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    running
        .status(|status| {
            status.state == SourceState::Following && status.detail == "2 GPUs, driver 580.65.06"
        })
        .await;
    let hung = "no answer for 60 s in nvmlDeviceGetFieldValues";
    let stuck = Seen::Blind {
        reason: hung.to_owned(),
        is_said: false,
        stuck: 2,
    };
    for (seen, why) in [
        (blind(hung), hung.to_owned()),
        (stuck, format!("{hung} (2 probes cannot be killed)")),
        (
            Seen::Inventory(Inventory::default()),
            "none of the GPUs of this machine answers".to_owned(),
        ),
    ] {
        running.sees(seen).await;
        running
            .status(|status| status.state == SourceState::Failing && status.detail == why)
            .await;
        assert!(
            !running
                .metrics
                .encode()
                .contains("gpuwarden_gpu_temperature")
        );
        bench.poll(&running).await;
        running
            .status(|status| status.state == SourceState::Following)
            .await;
    }
    let text = running.metrics.encode();
    for line in [
        // No process follows the second, since two cannot be killed.
        "gpuwarden_gpu_probe_restarts_total{source=\"gpu-health\"} 1",
        "gpuwarden_gpu_probe_stuck{source=\"gpu-health\"} 2",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
    running.end().await;
    assert_eq!(bench.stored().await, []);
}

#[tokio::test]
async fn a_probe_that_has_ended_shows() {
    let bench = Bench::new();
    let mut running = bench.start();
    bench.poll(&running).await;
    running.probe = mpsc::channel(1).0;
    running
        .status(|status| status.state == SourceState::Failing && status.detail == PROBE_HAS_ENDED)
        .await;
    running.end().await;
}

/// A driver that does not exist cannot hang.
#[tokio::test]
async fn a_driver_that_hangs_from_the_start_is_blindness() {
    let bench = Bench::new();
    let running = bench.start();
    let hung = "no answer for 60 s from nvmlInit_v2";
    let hangs = Seen::Blind {
        reason: hung.to_owned(),
        is_said: false,
        stuck: 0,
    };
    running.sees(hangs).await;
    running
        .status(|status| status.state == SourceState::Failing && status.detail == hung)
        .await;
    running.sees(blind(NOT_FOUND)).await;
    running
        .status(|status| status.state == SourceState::Following)
        .await;
    running.end().await;
    assert_eq!(bench.stored().await, []);
}

#[tokio::test]
async fn a_machine_without_a_driver_is_not_blind_until_it_had_one() {
    let bench = Bench::new();
    let running = bench.start();
    running.sees(blind(NOT_FOUND)).await;
    let waiting = format!("waiting for a driver: {NOT_FOUND}");
    running
        .status(|status| status.state == SourceState::Following && status.detail == waiting)
        .await;
    let text = running.metrics.encode();
    assert!(
        !text.contains("gpuwarden_gpu_probe_restarts_total"),
        "{text}"
    );
    running
        .sees(Seen::Library("libnvidia-ml.so.1".to_owned()))
        .await;
    running.sees(blind(NOT_FOUND)).await;
    running
        .status(|status| status.state == SourceState::Failing)
        .await;
    bench.poll(&running).await;
    running.end().await;
    // The GPUs are remembered.
    let running = bench.start();
    running.sees(blind(NOT_FOUND)).await;
    running
        .status(|status| status.state == SourceState::Failing)
        .await;
    running.end().await;
    assert_eq!(bench.stored().await, []);
}

#[tokio::test]
async fn a_gpu_that_cannot_be_read_is_named() {
    let mut bench = Bench::new();
    bench.inventory.unreadable = vec![UnreadableGpu {
        index: 7,
        error: "NVML_ERROR_UNKNOWN".to_owned(),
        ..UnreadableGpu::default()
    }];
    let running = bench.start();
    bench.poll(&running).await;
    let detail = "2 GPUs, driver 580.65.06; GPU 7 cannot be read: NVML_ERROR_UNKNOWN";
    running.status(|status| status.detail == detail).await;
    running.end().await;
    assert_eq!(bench.stored().await, []);
}

#[tokio::test]
async fn the_gauges_are_those_of_the_gpus_that_are_there() {
    let mut bench = Bench::new();
    bench.readings[0].power_mw = Some(700_000);
    bench.readings[0].utilization_percent = Some(25);
    bench.readings[0].pcie_replays = Some(7);
    bench.readings[0].thermal_violation_ns = Some(1_500_000_000);
    bench.readings[1].nvlinks = vec![NvlinkReadings {
        link: 4,
        up: Some(false),
        ..NvlinkReadings::default()
    }];
    bench.readings[1].recovery_action = Some(RecoveryAction::Other(9));
    let running = bench.start();
    assert!(!running.metrics.encode().contains("gpuwarden_gpu_power"));
    bench.poll(&running).await;
    let text = running.metrics.encode();
    for line in [
        "gpuwarden_gpu_temperature_margin_celsius{gpu=\"0\",uuid=\"GPU-0\"} 40.0",
        "gpuwarden_gpu_utilization_ratio{gpu=\"0\",uuid=\"GPU-0\"} 0.25",
        "gpuwarden_gpu_pcie_replays_total{gpu=\"0\",uuid=\"GPU-0\"} 7.0",
        "gpuwarden_gpu_thermal_violation_seconds_total{gpu=\"0\",uuid=\"GPU-0\"} 1.5",
        "gpuwarden_gpu_power_watts{gpu=\"0\",uuid=\"GPU-0\"} 700.0",
        "gpuwarden_gpu_recovery_action{gpu=\"1\",uuid=\"GPU-1\"} 9.0",
        "gpuwarden_gpu_nvlink_up{gpu=\"1\",uuid=\"GPU-1\",link=\"4\"} 0.0",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
    // A missing value has no series.
    assert!(
        !text.contains("gpuwarden_gpu_power_watts{gpu=\"1\""),
        "{text}"
    );
    bench.inventory.gpus.pop();
    bench.poll(&running).await;
    let text = running.metrics.encode();
    assert!(text.contains("GPU-0") && !text.contains("GPU-1"), "{text}");
    running.end().await;
}

#[tokio::test]
async fn a_library_that_is_not_found_is_told_in_a_sentence_with_what_to_do_beside_it() {
    let places: Vec<String> = (0..9)
        .map(|place| format!("/opt/{place}/libnvidia-ml.so.1: not there"))
        .collect();
    let reason = format!("libnvidia-ml.so.1 cannot be loaded: {}", places.join("; "));
    let bench = Bench::new();
    let running = bench.start();
    running
        .sees(Seen::Library("/opt/libnvidia-ml.so.1".to_owned()))
        .await;
    bench.poll(&running).await;
    let detail = "2 GPUs, driver 580.65.06, /opt/libnvidia-ml.so.1 of this machine";
    running
        .status(|status| status.state == SourceState::Following && status.detail == detail)
        .await;
    running.sees(blind(&reason)).await;
    running
        .status(|status| {
            let advice = status.advice.as_deref().unwrap_or_default();
            status.state == SourceState::Failing
                && status.detail == "libnvidia-ml.so.1 cannot be loaded"
                && advice.contains("--nvml-driver-root")
        })
        .await;
    running.end().await;
}
