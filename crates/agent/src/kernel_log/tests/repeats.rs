//! Tests of the counting of repeated lines.

use super::*;

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
    // The count has survived the restart, and is reported when the window ends.
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
            // Less than a minute in all, so that windows end by the clock here.
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

/// A report does not undo a person's decision between the line and the report.
#[tokio::test]
async fn a_count_is_accepted_as_of_its_last_line_also_after_a_restart() {
    let mut bench = Bench::new();
    bench.append("[1.0] usb 1-1: new device");
    let running = bench.start();
    running.following().await;
    let began = Timestamp::now();
    // The clock of the log differs.
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
    // Within the window, but a new fault.
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
