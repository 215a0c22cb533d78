//! Tests of the condition `NVMLReady` of the Device API.

use contract::node::{FaultEntity, ListFaultsResponse, OpenFault};

use super::*;

/// Returns status and reason of a GPU's readiness in the Device API.
fn ready(running: &Running, uuid: &str) -> String {
    let gpus = running.devices.gpus();
    let gpu = gpus.iter().find(|gpu| gpu.name == uuid).unwrap();
    let status = gpu.status.as_ref().unwrap();
    let mut conditions = status.conditions.iter();
    let ready = conditions.find(|one| one.r#type == "NVMLReady").unwrap();
    format!("{:?}/{}", ready.status(), ready.reason)
}

/// Returns the message of the condition.
fn message(running: &Running, uuid: &str) -> String {
    let gpus = running.devices.gpus();
    let gpu = gpus.iter().find(|gpu| gpu.name == uuid).unwrap();
    let status = gpu.status.as_ref().unwrap();
    let mut conditions = status.conditions.iter();
    let ready = conditions.find(|one| one.r#type == "NVMLReady").unwrap();
    ready.message.clone()
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
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "True/Initialized");
    // XIDs of programs, and one ignored by a setting.
    for code in [13, 31, 43, 45, 68, 109, 137] {
        running.sees(xid(Some("GPU-1"), code)).await;
    }
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "True/Initialized");
    assert_eq!(message(&running, "GPU-1"), "GPU enumerated via NVML");
    // Events other than XIDs leave the condition alone, though some are counted as faults.
    for kind in [
        GpuEventKind::SingleBitEcc,
        GpuEventKind::DoubleBitEcc,
        GpuEventKind::Other(0x400),
    ] {
        let uuid = Some("GPU-1".to_owned());
        running.sees(Seen::Event(GpuEvent { uuid, kind })).await;
    }
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "True/Initialized");
    running.sees(xid(Some("GPU-1"), 79)).await;
    // Another XID neither ends nor hides it.
    running.sees(xid(Some("GPU-1"), 13)).await;
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    assert_eq!(message(&running, "GPU-1"), "Critical XID error 79 detected");
    assert_eq!(ready(&running, "GPU-0"), "True/Initialized");
    running.end().await;
    // Nor does a restart.
    let running = bench.start();
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    AHEAD.set(SignedDuration::from_mins(11));
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "True/Recovered");
    running.end().await;
}

#[tokio::test]
async fn time_alone_gives_no_readiness_back() {
    let mut bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    // The driver does not name the GPU.
    running.sees(xid(None, 79)).await;
    bench.poll(&running).await;
    bench.readings[1].recovery_action = Some(RecoveryAction::Reset);
    AHEAD.set(SignedDuration::from_mins(11));
    bench.poll(&running).await;
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

/// A slow driver, or a stopped child, counts as hung only after a minute and more.
#[tokio::test]
async fn what_was_not_seen_lately_is_unknown_until_it_is_seen_again() {
    let mut bench = Bench::new();
    bench.config.late_after = Duration::from_secs(1);
    let running = bench.start();
    bench.poll(&running).await;
    running
        .status(|it| {
            it.state == SourceState::CatchingUp
                && it.detail.contains("no readings from the driver for")
        })
        .await;
    assert_eq!(ready(&running, "GPU-1"), "Unknown/DriverNotSeen");
    // The inventory is sent only if it has changed.
    running.sees(Seen::Readings(bench.readings.clone())).await;
    until(|| ready(&running, "GPU-1") == "True/Initialized").await;
    running.end().await;
    assert_eq!(bench.open().await, [""; 0]);
}

/// Returns the open faults in the book of a store: XIDs, each with its GPU.
fn known_faults(store_id: &str, xids: &[(&str, &str)]) -> NodeFaults {
    let faults = xids.iter().map(|(code, uuid)| OpenFault {
        agent: "syslog-health-monitor".to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check: keys::CHECK_XID.to_owned(),
        code: (*code).to_owned(),
        fatal: true,
        entities: vec![FaultEntity {
            r#type: keys::ENTITY_GPU_UUID.to_owned(),
            value: (*uuid).to_owned(),
        }],
    });
    NodeFaults::Told(ListFaultsResponse {
        store_id: store_id.to_owned(),
        faults: faults.collect(),
    })
}

/// A person closes a fault, or dismisses it by a release: either way it is not listed.
#[tokio::test]
async fn the_word_of_a_person_gives_readiness_back() {
    let bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    for uuid in ["GPU-0", "GPU-1"] {
        running.sees(xid(Some(uuid), 79)).await;
    }
    bench.poll(&running).await;
    // The fault may be on its way.
    running.devices.take_faults(known_faults("s", &[]));
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    let both = known_faults("s", &[("79", "GPU-0"), ("79", "GPU-1")]);
    running.devices.take_faults(both);
    bench.poll(&running).await;
    running.end().await;
    // Nor does a restart, before the faults are known.
    let running = bench.start();
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    let blind = NodeFaults::Unseen { why: String::new() };
    running.devices.take_faults(blind);
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    running
        .devices
        .take_faults(known_faults("s", &[("79", "GPU-0")]));
    until(|| ready(&running, "GPU-1") == "True/Recovered").await;
    assert_eq!(ready(&running, "GPU-0"), "False/XidError");
    // From now on a new fault is needed.
    running.sees(xid(Some("GPU-1"), 48)).await;
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    running.end().await;
}

/// As of a controller whose store was lost.
#[tokio::test]
async fn a_store_that_does_not_have_the_fault_is_nobodys_word() {
    let bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    running.sees(xid(Some("GPU-1"), 79)).await;
    running
        .devices
        .take_faults(known_faults("s", &[("79", "GPU-1")]));
    bench.poll(&running).await;
    running.devices.take_faults(known_faults("another", &[]));
    bench.poll(&running).await;
    assert_eq!(ready(&running, "GPU-1"), "False/XidError");
    // The fault is sent to the new store, and then closed.
    running
        .devices
        .take_faults(known_faults("another", &[("79", "GPU-1")]));
    bench.poll(&running).await;
    running.devices.take_faults(known_faults("another", &[]));
    until(|| ready(&running, "GPU-1") == "True/Recovered").await;
    running.end().await;
}
