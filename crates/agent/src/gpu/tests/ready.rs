//! The condition `NVMLReady` of the Device API.

use super::*;

/// Returns the reason for which a GPU is ready or not, as the Device API has it.
fn ready(running: &Running, uuid: &str) -> String {
    let gpus = running.devices.gpus();
    let gpu = gpus.iter().find(|gpu| gpu.name == uuid).unwrap();
    let status = gpu.status.as_ref().unwrap();
    let mut conditions = status.conditions.iter();
    let ready = conditions.find(|one| one.r#type == "NVMLReady").unwrap();
    format!("{:?}/{}", ready.status(), ready.reason)
}

fn xid(uuid: Option<&str>, code: u32) -> Seen {
    Seen::Event(GpuEvent {
        uuid: uuid.map(str::to_owned),
        kind: GpuEventKind::Xid {
            code,
            gpu_instance: None,
            compute_instance: None,
        },
    })
}

#[tokio::test]
async fn a_critical_xid_takes_readiness_away_until_the_driver_asks_for_nothing() {
    let bench = Bench::new();
    let running = bench.start();
    bench.look(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "True/Initialized");
    // Of programs, and ignored by a setting.
    for code in [13, 31, 43, 45, 68, 109, 137] {
        running.sees(xid(Some("GPU-1"), code)).await;
    }
    bench.look(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "True/Initialized");
    running.sees(xid(Some("GPU-1"), 79)).await;
    // Another one neither ends it nor hides it.
    running.sees(xid(Some("GPU-1"), 13)).await;
    bench.look(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    assert_eq!(ready(&running, "GPU-0"), "True/Initialized");
    running.end().await;
    // Nor does a restart.
    let running = bench.start();
    bench.look(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    AHEAD.set(SignedDuration::from_mins(11));
    bench.look(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "True/Recovered");
    running.end().await;
}

#[tokio::test]
async fn time_alone_gives_no_readiness_back() {
    let mut bench = Bench::new();
    let running = bench.start();
    bench.look(&running).await;
    // The driver does not say whose it is.
    running.sees(xid(None, 79)).await;
    bench.look(&running).await;
    bench.readings[1].recovery_action = Some(RecoveryAction::Reset);
    AHEAD.set(SignedDuration::from_mins(11));
    bench.look(&running).await;
    assert_eq!(ready(&running, "GPU-0"), "True/Recovered");
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    let reason = "the driver hangs".to_owned();
    let (is_said, stuck) = (false, 0);
    running
        .sees(Seen::Blind {
            reason,
            is_said,
            stuck,
        })
        .await;
    running
        .status(|status| status.state == SourceState::Failing)
        .await;
    assert_eq!(ready(&running, "GPU-1"), "Unknown/DriverNotSeen");
    running.end().await;
}
