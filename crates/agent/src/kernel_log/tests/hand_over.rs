//! Tests of events that wait for a connector which accepts nothing.

use super::*;

#[tokio::test]
async fn events_wait_for_a_store_that_does_not_take_them_over_a_restart() {
    let mut bench = Bench::new();
    bench.store.close().await;
    bench.append(&xid(79, 1));
    let running = bench.start();
    running.status(|status| status.faults == 1).await;
    running.end().await;
    bench.store = Arc::new(SqliteStore::open(&bench.dir.path().join("data")).unwrap());
    assert_eq!(bench.run_until(1).await.len(), 1);
}

/// The kernel's ring buffer does not wait: unread records are overwritten.
#[tokio::test]
async fn while_a_store_takes_nothing_the_log_goes_on_being_read_up_to_a_bound() {
    let mut bench = Bench::new();
    bench.store.close().await;
    bench.append(&xid(79, 1));
    let running = bench.start();
    running.status(|status| status.faults == 1).await;
    for gpu in 1..=3 {
        bench.append(&xid(79, gpu));
        bench.append(&xid(79, gpu));
    }
    running.status(|status| status.records == 7).await;
    // More different faults than may wait.
    for gpu in 0..=255 {
        let codes = [48, 61, 62, 63, 64, 69, 92, 94, 95, 119].map(|code| xid(code, gpu));
        bench.append(&codes.join("\n"));
    }
    running
        .status(|status| status.records > MAX_UNSENT as u64)
        .await;
    running.end().await;
    let state: serde_json::Value =
        serde_json::from_slice(&std::fs::read(bench.state()).unwrap()).unwrap();
    let waiting = state["outbox"].as_array().unwrap().len();
    assert!(waiting < MAX_UNSENT + 2 * BATCH, "{waiting}");

    // Everything arrives, each fault once.
    bench.store = Arc::new(SqliteStore::open(&bench.dir.path().join("data")).unwrap());
    let events = bench.run_until(2_563).await;
    let faults = events.iter().filter(|event| !event.is_healthy);
    let texts: std::collections::BTreeSet<&str> =
        faults.map(|event| event.message.as_str()).collect();
    assert_eq!(texts.len(), 2_563);
}
