use std::path::Path;
use std::sync::Arc;

use contract::HealthEvent;
use domain::brake::NodeLabel;
use domain::event::normalise;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::sqlite::SqliteStore;
use store::{EventStore, NewEvent};
use tokio::sync::watch;

use super::super::{Config, Handles, Mode, Owns};
use super::*;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn open(directory: &Path) -> Arc<dyn EventStore> {
    Arc::new(SqliteStore::open(directory).unwrap())
}

/// A quarantine that only records.
fn quarantine(store: &Arc<dyn EventStore>) -> (Quarantine, Handles) {
    let config = Config {
        store: Arc::clone(store),
        cluster: None,
        policy: watch::channel(None).1,
        mode: Mode::Observe,
        owns: Owns::All,
        sources: Sources::default(),
        brake: false,
        gpu_label: NodeLabel::parse("gpu=true").unwrap(),
        namespace: "gpuwarden".to_owned(),
        board: None,
        clock: now,
    };
    Quarantine::new(config, &Metrics::default())
}

fn fault(node: &str, code: u32) -> NewEvent {
    let mut event = HealthEvent {
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: "Check".into(),
        node_name: node.into(),
        error_code: vec![code.to_string()],
        is_fatal: true,
        ..HealthEvent::default()
    };
    normalise(&mut event, now());
    NewEvent {
        event,
        received_at: now(),
    }
}

fn damage(directory: &Path, sql: &str) {
    let connection = rusqlite::Connection::open(directory.join("events.db")).unwrap();
    connection.execute_batch(sql).unwrap();
}

#[tokio::test]
async fn an_event_that_cannot_be_read_does_not_stop_those_behind_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let events = (1..=3).map(|code| fault("n1", code)).collect();
    store.append(events).await.unwrap();
    damage(
        directory.path(),
        "UPDATE event SET body = replace(body, ':', ';') WHERE seq = 2",
    );
    let (mut quarantine, _handles) = quarantine(&store);
    quarantine.take_in().await;
    let codes: Vec<_> = (quarantine.book.faults("n1").iter())
        .map(|fault| fault.code.as_str())
        .collect();
    assert_eq!(codes, ["1", "3"]);
    assert!(quarantine.caught_up && quarantine.troubles().is_empty());
    store.close().await;
}

#[tokio::test]
async fn a_feed_that_fails_holds_nothing_else_up_and_is_told_and_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.append(vec![fault("n1", 1)]).await.unwrap();
    damage(directory.path(), "ALTER TABLE event RENAME TO away");
    let (mut quarantine, handles) = quarantine(&store);
    quarantine.take_in().await; // It comes back.
    let first = quarantine.feed_failure.as_ref().unwrap().retry_at;
    assert!(quarantine.next_wake().is_some_and(|wake| wake <= first));
    quarantine.take_in().await;
    let failed = quarantine.feed_failure.as_ref().unwrap();
    assert_eq!(failed.pause, FEED_RETRY * 2);
    quarantine.publish();
    let told = handles.view.borrow().troubles.concat();
    assert!(told.contains("cannot be read"), "{told}");

    damage(directory.path(), "ALTER TABLE away RENAME TO event");
    tokio::time::pause();
    tokio::time::advance(failed_for(&quarantine)).await;
    tokio::time::resume();
    quarantine.take_in_if_due().await;
    assert_eq!(quarantine.book.faults("n1").len(), 1);
    quarantine.publish();
    assert!(handles.view.borrow().troubles.is_empty());
    store.close().await;
}

/// How long it waits before it tries again.
fn failed_for(quarantine: &Quarantine) -> Duration {
    let failed = quarantine.feed_failure.as_ref().unwrap();
    failed.retry_at.saturating_duration_since(Instant::now())
}
