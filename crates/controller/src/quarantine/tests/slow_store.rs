//! Tests with a store whose write takes long.

use fleet::{Effect, FleetInput, Purpose};

use super::*;

#[tokio::test]
async fn a_slow_store_stalls_no_watch() {
    let mut bench = Bench::new().await;
    // All other writers wait until this transaction ends.
    let file = bench.directory.path().join("events.db");
    let holder = rusqlite::Connection::open(file).unwrap();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut event = HealthEvent {
        node_name: "n2".into(),
        ..HealthEvent::default()
    };
    normalise(&mut event, now());
    let events = vec![(event, now())];
    let quarantine = &mut bench.quarantine;
    quarantine.carry_out(Effect::Append {
        node: "n2".into(),
        events,
        purpose: Purpose::TakeOver,
    });

    // A change of another node arrives, and the fleet decides.
    let changed = NodeView::from_object(node(2)).unwrap();
    quarantine.handle_event(WatchEvent::Node(NodeEvent::Applied(Arc::new(changed))));
    quarantine.decide();
    let (connection, head, patch) = bench.asked().await;
    assert!(head.starts_with("PATCH /api/v1/nodes/n1 "), "{head}");
    bench.answer(connection, &patched(node(3), &patch)).await;
    assert!(bench.quarantine.requests.try_next().is_none());

    holder.execute_batch("COMMIT").unwrap();
    let answer = bench.quarantine.requests.next().await.unwrap();
    assert!(matches!(
        answer.input,
        Some(FleetInput::EventsAppended { result: Ok(_), .. })
    ));
}
