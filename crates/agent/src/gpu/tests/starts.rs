//! Tests of GPUs that the driver could not start.

use contract::node::{FaultEntity, ListFaultsResponse, OpenFault};
use contract::{Entity, RecommendedAction};
use diagnosis::decode::KernelLogDecoder;
use model::event::EventRecord;

use super::*;
use crate::gpu::starts::{POLLS, REPEAT_AFTER};

/// Returns the kernel log monitor's report that the GPU on this bus failed to start.
fn failed(bus: &str) -> HealthEvent {
    let line = format!("NVRM: GPU 0000:{bus}:00.0: RmInitAdapter failed! (0x62:0x65:1858)");
    let mut decoder = KernelLogDecoder::default();
    let finding = [line.clone(), line].iter().find_map(|line| {
        let found = decoder.record(line.as_bytes(), Timestamp::now());
        found.into_iter().next()
    });
    let finding = finding.unwrap();
    assert_eq!(finding.action, RecommendedAction::ComponentReset);
    HealthEvent {
        version: 1,
        agent: keys::SYSLOG_AGENT.to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check_name: finding.check().to_owned(),
        error_code: finding.code().into_iter().collect(),
        is_fatal: finding.fatal,
        recommended_action: finding.action as i32,
        entities_impacted: finding.entities(),
        node_name: "n1".to_owned(),
        ..HealthEvent::default()
    }
}

/// Returns the open faults in the node's fault book.
fn known_faults(events: &[HealthEvent]) -> NodeFaults {
    let entity = |it: &Entity| FaultEntity {
        r#type: it.entity_type.clone(),
        value: it.entity_value.clone(),
    };
    let faults = events.iter().map(|event| OpenFault {
        agent: event.agent.clone(),
        component_class: event.component_class.clone(),
        check: event.check_name.clone(),
        code: event.error_code[0].clone(),
        fatal: true,
        entities: event.entities_impacted.iter().map(entity).collect(),
    });
    NodeFaults::Told(ListFaultsResponse {
        store_id: "s".to_owned(),
        faults: faults.collect(),
    })
}

/// Without any setting, the GPUs of the last boot are remembered.
#[tokio::test]
async fn a_gpu_that_does_not_come_up_after_a_reboot_is_missed_until_its_absence_is_accepted() {
    let mut bench = Bench::new();
    bench.config.limits.missing_seconds = 0;
    bench.poll_once().await;
    bench.boot = 2;
    bench.inventory.gpus.pop();
    bench.readings.pop();
    bench.poll_once().await;
    let open = bench.open().await;
    let is_missed = |it: &String| it.starts_with("GpuPcieWatch DCGM_FR_FALLEN_OFF_BUS");
    assert!(open.len() == 1 && open.iter().all(is_missed), "{open:?}");
    // A person removed the GPU, and sets the number.
    bench.config.limits.expected_gpus = Some(1);
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
    bench.config.limits.expected_gpus = None;
    bench.boot = 3;
    bench.poll_once().await;
    assert_eq!(
        bench.open().await,
        [""; 0],
        "from then on it is none of this machine"
    );
}

#[tokio::test]
async fn a_start_that_failed_is_over_when_the_gpu_answers_again() {
    let mut bench = Bench::new();
    let both = [failed("b0"), failed("b1")];
    let answering = (bench.inventory.clone(), bench.readings.clone());
    bench.inventory.gpus.pop();
    bench.readings.pop();
    let running = bench.start();
    bench.poll(&running).await;
    running.devices.take_faults(known_faults(&both[1..]));
    for _ in 0..3 {
        bench.poll(&running).await;
    }
    assert_eq!(bench.stored().await, [], "it does not answer");
    (bench.inventory, bench.readings) = answering;
    bench.poll(&running).await;
    assert_eq!(bench.stored().await, [], "the look may be from before it");
    for _ in 0..3 {
        bench.poll(&running).await;
    }
    running.devices.take_faults(known_faults(&both));
    for _ in 0..3 {
        bench.poll(&running).await;
    }
    running.end().await;
    let over = bench.stored().await;
    // Each is reported once, for the GPU that has started.
    assert_eq!(over.len(), 2, "{over:?}");
    let mut book = FaultBook::default();
    let record = |event: &HealthEvent, seq: u64| EventRecord {
        seq: seq.into(),
        id: format!("{seq:024}"),
        event: event.clone(),
        created_at: Timestamp::now(),
    };
    for (seq, event) in (1..).zip(&both) {
        book.record(&record(event, seq));
    }
    for (seq, (event, left)) in (3..).zip(over.iter().zip([1, 0])) {
        assert!(event.is_healthy);
        book.record(&record(event, seq));
        assert_eq!(book.faults("n1").len(), left, "{event:?}");
    }
}

/// The fault may be reopened between the recovery and the next list of open faults, which then
/// shows no gap.
#[tokio::test]
async fn the_end_of_a_start_that_failed_is_told_again_while_its_fault_stays_open() {
    let bench = Bench::new();
    let running = bench.start();
    running.devices.take_faults(known_faults(&[failed("b1")]));
    // Most polls that the recovery takes; the poll with the GPU may follow the first of them.
    for _ in 0..=POLLS {
        bench.poll(&running).await;
    }
    // Skips the minute after a recovery, when the same one would count as a repeat.
    AHEAD.set(SignedDuration::from_mins(2));
    for _ in 0..REPEAT_AFTER {
        bench.poll(&running).await;
    }
    running.end().await;
    AHEAD.set(SignedDuration::ZERO);
    let told = bench.stored().await;
    assert_eq!(told.len(), 2, "{told:?}");
    for event in &told {
        assert!(event.is_healthy, "{event:?}");
        assert_eq!(event.check_name, keys::CHECK_GPU_INIT);
        assert_eq!(
            entities(event),
            [("PCI", "0000:b1:00.0"), ("GPU_UUID", "GPU-1")]
        );
    }
}
