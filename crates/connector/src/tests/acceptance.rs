//! Tests of the time of acceptance of an event, and of the senders that may set it.

use contract::keys;

use super::*;

fn now() -> Timestamp {
    "2026-11-21T12:00:00Z".parse().unwrap()
}

fn at(time: &str) -> Timestamp {
    time.parse().unwrap()
}

fn connector(served: &Served) -> Connector {
    let store: Arc<dyn EventStore> = Arc::clone(&served.store) as Arc<dyn EventStore>;
    Connector::new(store, AcceptNodes::Any, &Metrics::default(), now)
}

/// Returns the time of acceptance of `event`, sent by `caller`.
async fn accepted(event: HealthEvent, caller: &Caller) -> Timestamp {
    let served = Served::new();
    let connector = connector(&served);
    connector.accept(batch(vec![event]), caller).await.unwrap();
    let records = served.store.events(EventQuery::default()).await.unwrap();
    let metadata = &records[0].event.metadata;
    assert!(!metadata.contains_key(keys::META_ACCEPTED_AT));
    records[0].created_at
}

fn marked(time: &str) -> HealthEvent {
    let mut event = event("0");
    event::mark_accepted(&mut event, at(time));
    event
}

/// Otherwise a process could have its reports dismissed by a release that came before them.
#[tokio::test]
async fn a_local_process_does_not_say_when_its_events_were_accepted() {
    let local = Caller::Local(runtime::unix_grpc::UnixPeer {
        uid: 1000,
        gid: 1000,
        pid: None,
        is_operator: false,
    });
    for time in ["2026-11-21T11:00:00Z", "2026-11-21T13:00:00Z"] {
        assert_eq!(accepted(marked(time), &local).await, now());
        let node = Caller::Node("n1".into());
        assert_eq!(accepted(marked(time), &node).await, at(time).min(now()));
    }
    // Neither the timestamp nor the count of such a report changes the time of acceptance.
    let mut old = event("0");
    old.generated_timestamp = Some(contract::json::proto_timestamp(at("2026-11-21T11:00:00Z")));
    for (key, value) in [
        (keys::META_COUNT, "2"),
        (keys::META_FIRST_SEEN, "2026-11-21T10:00:00Z"),
        (keys::META_LAST_SEEN, "2026-11-21T11:00:00Z"),
    ] {
        old.metadata.insert(key.into(), value.into());
    }
    assert_eq!(accepted(old.clone(), &local).await, now());
    // For gpuwarden's monitors they do; the monitor's explicit time takes precedence.
    assert_eq!(
        accepted(old.clone(), &Caller::Monitor).await,
        at("2026-11-21T11:00:00Z")
    );
    event::mark_accepted(&mut old, at("2026-11-21T11:30:00Z"));
    assert_eq!(
        accepted(old, &Caller::Monitor).await,
        at("2026-11-21T11:30:00Z")
    );
}

#[tokio::test]
async fn what_a_monitor_of_ours_reports_is_as_old_as_it_is_within_two_days() {
    for (claimed, expected) in [
        ("2026-11-21T11:59:00Z", "2026-11-21T11:59:00Z"),
        ("2026-11-19T12:00:00Z", "2026-11-19T12:00:00Z"),
        // A time from a wrong clock must not hide a fault.
        ("2026-11-19T11:59:59Z", "2026-11-21T12:00:00Z"),
        ("1970-01-01T00:00:00Z", "2026-11-21T12:00:00Z"),
        ("2027-01-01T00:00:00Z", "2026-11-21T12:00:00Z"),
    ] {
        let mut event = event("0");
        event.generated_timestamp = Some(contract::json::proto_timestamp(at(claimed)));
        let monitor = &Caller::Monitor;
        assert_eq!(accepted(event, monitor).await, at(expected), "{claimed}");
        assert_eq!(accepted(marked(claimed), monitor).await, at(expected));
        assert_eq!(
            accepted(marked(claimed), &Caller::Central("c".into())).await,
            at(expected)
        );
        // A recovery does not become newer either.
        let healthy = HealthEvent {
            is_healthy: true,
            ..marked(claimed)
        };
        let recovered = accepted(healthy, monitor).await;
        assert_eq!(
            recovered,
            at(claimed).clamp(at("2026-11-19T12:00:00Z"), now()),
            "{claimed}"
        );
    }
}

/// A repeated recovery has closed nothing that was counted since.
#[tokio::test]
async fn a_recovery_is_told_to_monitors_once_however_often_it_is_sent() {
    let served = Served::new();
    let connector = connector(&served);
    let mut recoveries = connector.recoveries();
    let healthy = HealthEvent {
        is_healthy: true,
        is_fatal: false,
        ..event("0")
    };
    let other = HealthEvent {
        message: "another".into(),
        ..healthy.clone()
    };
    for _ in 0..3 {
        let again = batch(vec![event("1"), healthy.clone()]);
        connector.accept(again, &Caller::Monitor).await.unwrap();
    }
    let both = batch(vec![healthy, other]);
    connector.accept(both, &Caller::Monitor).await.unwrap();
    assert_eq!(recoveries.try_recv().unwrap().event.message, "");
    assert_eq!(recoveries.try_recv().unwrap().event.message, "another");
    assert!(recoveries.try_recv().is_err());
}
