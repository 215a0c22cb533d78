//! Tests of XIDs that the driver reports.

use super::*;

fn xid(code: u32) -> Seen {
    Seen::Event(GpuEvent {
        uuid: Some("GPU-1".to_owned()),
        kind: GpuEventKind::Xid {
            code,
            gpu_instance: None,
            compute_instance: None,
        },
    })
}

#[tokio::test]
async fn an_xid_is_reported_by_the_catalogue_where_nobody_reads_the_log() {
    for (reads_log, is_fake) in [(true, false), (false, false), (true, true)] {
        let mut bench = Bench::new();
        (bench.reads_log, bench.config.is_fake) = (reads_log, is_fake);
        let running = bench.start();
        bench.poll(&running).await;
        // 154 is reported as the driver's requested action.
        for code in [154, 79, 79] {
            running.sees(xid(code)).await;
        }
        running
            .sees(Seen::Event(GpuEvent {
                uuid: Some("GPU-1".to_owned()),
                kind: GpuEventKind::DoubleBitEcc,
            }))
            .await;
        bench.poll(&running).await;
        running.end().await;
        let stored = bench.stored().await;
        if reads_log && !is_fake {
            assert_eq!(stored, []);
            continue;
        }
        let event = &stored[0];
        assert_eq!(
            (event.agent.as_str(), event.check_name.as_str()),
            ("gpu-health-monitor", "SysLogsXIDError")
        );
        assert_eq!(event.error_code, ["79"]);
        let names = [("PCI", "0000:b1:00"), ("GPU_UUID", "GPU-1"), ("GPU", "1")];
        assert_eq!(entities(event), names);
        assert!(event.is_fatal);
        assert_eq!(event.recommended_action(), RecommendedAction::RestartBm);
        assert_eq!(event.metadata["gpu_index"], "1");
        assert_eq!(event.metadata.contains_key(keys::META_INJECTED), is_fake);
        assert_eq!(bench.open().await.len(), 1, "{stored:?}");
    }
}

#[tokio::test]
async fn an_xid_of_a_partition_names_it() {
    let bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    running
        .sees(Seen::Event(GpuEvent {
            uuid: Some("GPU-1".to_owned()),
            kind: GpuEventKind::Xid {
                code: 48,
                gpu_instance: Some(2),
                compute_instance: Some(0),
            },
        }))
        .await;
    bench.poll(&running).await;
    running.end().await;
    let metadata = &bench.stored().await[0].metadata;
    assert_eq!(metadata["gpuwarden.dev/gpu-instance"], "2");
    assert_eq!(metadata["gpuwarden.dev/compute-instance"], "0");
}

/// Neither time alone nor another XID ends one: the driver must request no action.
#[tokio::test]
async fn an_xid_is_over_when_it_is_calm_and_the_driver_asks_for_nothing() {
    let mut bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    running.sees(xid(48)).await;
    bench.readings[1].recovery_action = None;
    bench.poll(&running).await;
    running.end().await;
    assert_eq!(bench.open().await.len(), 1);
    let later = |minutes| AHEAD.set(SignedDuration::from_mins(minutes));
    for (minutes, action, open) in [
        (60, None, 1),
        (61, Some(RecoveryAction::Reset), 2),
        (62, Some(RecoveryAction::None), 0),
    ] {
        later(minutes);
        bench.readings[1].recovery_action = action;
        bench.poll_once().await;
        assert_eq!(bench.open().await.len(), open, "{action:?}");
    }
    // Another XID restarts the delay, and one caused by a job ends nothing.
    let running = bench.start();
    bench.poll(&running).await;
    running.sees(xid(48)).await;
    bench.poll(&running).await;
    later(71);
    running.sees(xid(31)).await;
    bench.poll(&running).await;
    running.end().await;
    let open = bench.open().await;
    assert!(open[0].starts_with("SysLogsXIDError 48 "), "{open:?}");
    later(73);
    // A request to recover the domain of machines is no action on the GPU.
    bench.readings[1].recovery_action = Some(RecoveryAction::RecoverImexDomain);
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
    AHEAD.set(SignedDuration::ZERO);
}

#[tokio::test]
async fn a_reboot_closes_what_xids_it_mends() {
    let mut bench = Bench::new();
    let running = bench.start();
    bench.poll(&running).await;
    running.sees(xid(48)).await;
    bench.poll(&running).await;
    running.end().await;
    assert_eq!(bench.open().await.len(), 1);
    bench.boot = 2;
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
    // An XID before the first poll belongs to the new boot, and ends like any other.
    bench.boot = 3;
    let running = bench.start();
    running.sees(xid(48)).await;
    bench.poll(&running).await;
    running.end().await;
    assert_eq!(bench.open().await.len(), 1);
    AHEAD.set(SignedDuration::from_mins(11));
    bench.poll_once().await;
    assert_eq!(bench.open().await, [""; 0]);
    AHEAD.set(SignedDuration::ZERO);
}
