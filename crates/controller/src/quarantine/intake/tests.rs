use std::path::Path;
use std::sync::Arc;

use contract::HealthEvent;
use fleet::Fleet;
use fleet::brake::NodeLabel;
use fleet::session::{Failure, Phase};
use jiff::Timestamp;
use model::event::normalise;
use model::mode::Mode;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::sqlite::SqliteStore;
use store::{EventStore, NewEvent};
use tokio::sync::watch;

use super::super::{Handles, Owns, QuarantineConfig};
use super::*;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn open(directory: &Path) -> Arc<dyn EventStore> {
    Arc::new(SqliteStore::open(directory).unwrap())
}

/// A quarantine that only records.
fn quarantine(store: &Arc<dyn EventStore>) -> (Quarantine, Handles) {
    quarantine_that(Mode::Observe, store)
}

fn quarantine_that(mode: Mode, store: &Arc<dyn EventStore>) -> (Quarantine, Handles) {
    Quarantine::new(config(mode, store), &Metrics::default())
}

fn config(mode: Mode, store: &Arc<dyn EventStore>) -> QuarantineConfig {
    QuarantineConfig {
        store: Arc::clone(store),
        cluster: None,
        policy: watch::channel(None).1,
        mode,
        owns: Owns::All,
        sources: Sources::default(),
        brake: false,
        drain: None,
        remediation: None,
        gpu_label: NodeLabel::parse("gpu=true").unwrap(),
        namespace: "gpuwarden".to_owned(),
        board: None,
        events: false,
        retention: jiff::SignedDuration::from_hours(30 * 24),
        clock: now,
    }
}

/// Returns the state that the fleet would keep now.
fn kept(fleet: &Fleet) -> Kept {
    Kept {
        book: fleet.book().clone(),
        reports: BTreeMap::new(),
        recently_out: fleet.recently_out().clone(),
        begun: fleet.begun(),
        sessions: BTreeMap::new(),
        unsaved: BTreeSet::new(),
    }
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
    let codes: Vec<_> = (quarantine.fleet.book().faults("n1").iter())
        .map(|fault| fault.code.as_str())
        .collect();
    assert_eq!(codes, ["1", "3"]);
    assert!(quarantine.fleet.is_caught_up() && quarantine.troubles().is_empty());
    store.close().await;
}

#[tokio::test]
async fn a_gap_in_the_feed_is_no_backlog() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let faults = |codes: std::ops::Range<u32>| codes.map(|code| fault("n1", code)).collect();
    let page = u32::try_from(FEED_PAGE).unwrap();
    store.append(faults(0..page)).await.unwrap();
    damage(
        directory.path(),
        "UPDATE sqlite_sequence SET seq = seq + 5000",
    );
    store.append(faults(page..page + 2)).await.unwrap();
    let metrics = Metrics::default();
    let (mut quarantine, _handles) = Quarantine::new(config(Mode::Observe, &store), &metrics);
    for (more, backlog) in [(true, 2), (false, 0)] {
        assert_eq!(quarantine.take_page().await, more);
        quarantine.count_backlog().await;
        let told = format!("fault_quarantine_event_backlog_count {backlog}\n");
        assert!(metrics.encode().contains(&told), "{}", metrics.encode());
    }
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
    assert!(failed.retry_at > first);
    quarantine.publish();
    let told = handles.view.borrow().troubles.concat();
    assert!(told.contains("cannot be read"), "{told}");

    damage(directory.path(), "ALTER TABLE away RENAME TO event");
    tokio::time::pause();
    tokio::time::advance(failed_for(&quarantine)).await;
    tokio::time::resume();
    quarantine.take_in_if_due().await;
    assert_eq!(quarantine.fleet.book().faults("n1").len(), 1);
    quarantine.publish();
    assert!(handles.view.borrow().troubles.is_empty());
    store.close().await;
}

/// Returns the time until the feed is read again.
fn failed_for(quarantine: &Quarantine) -> Duration {
    let failed = quarantine.feed_failure.as_ref().unwrap();
    failed.retry_at.saturating_duration_since(Instant::now())
}

/// A part of what is saved, as it lies in the file.
fn part(directory: &Path, node: &str) -> Option<Vec<u8>> {
    let connection = rusqlite::Connection::open(directory.join("events.db")).unwrap();
    let sql = "SELECT state FROM checkpoint_part WHERE part = ?1";
    connection.query_row(sql, [node], |row| row.get(0)).ok()
}

fn recovery(node: &str) -> NewEvent {
    let mut new = fault(node, 1);
    new.event.is_healthy = true;
    new.event.is_fatal = false;
    new.event.id.clear();
    normalise(&mut new.event, now());
    new
}

#[tokio::test]
async fn of_the_book_only_what_has_changed_is_saved() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store
        .append(vec![fault("n1", 1), fault("n2", 1)])
        .await
        .unwrap();
    let (mut first, _handles) = quarantine(&store);
    first.load().await;
    first.take_in().await;
    assert!(first.save_at().is_some());
    first.save().await;
    assert_eq!(first.save_at(), None);
    let before = part(directory.path(), "n1").unwrap();

    damage(
        directory.path(),
        "UPDATE checkpoint_part SET state = x'00' WHERE part = 'n2'",
    );
    store
        .append(vec![fault("n1", 2), fault("n3", 1)])
        .await
        .unwrap();
    first.take_in().await;
    first.save().await;
    assert_eq!(
        part(directory.path(), "n2"),
        Some(vec![0]),
        "not written again"
    );
    assert_ne!(part(directory.path(), "n1").unwrap(), before);

    // What cannot be understood is rebuilt from the events; nothing else is needed for it.
    let (mut second, _handles) = quarantine(&store);
    second.load().await;
    assert_eq!(second.save_at(), None, "not before it has caught up");
    second.take_in().await;
    assert_eq!(second.fleet.book(), first.fleet.book());
    second.save().await;
    let (mut third, _handles) = quarantine(&store);
    third.load().await;
    assert_eq!(third.fleet.book(), first.fleet.book());
    assert!(!third.fleet.is_unsaved());
    store.close().await;
}

#[tokio::test]
async fn what_is_saved_in_parts_comes_back_and_what_is_over_goes() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let events = vec![fault("n1", 1), recovery("n2")];
    store.append(events).await.unwrap();
    let (mut second, _handles) = quarantine(&store);
    second.take_in().await;
    second.save().await;
    let saved = store.checkpoint(CONSUMER).await.unwrap().unwrap();
    assert!(
        saved.parts.keys().eq(["n1", "n2"]),
        "{:?}",
        saved.parts.keys()
    );
    let (mut third, _handles) = quarantine(&store);
    third.load().await;
    assert_eq!(third.fleet.book(), second.fleet.book());

    // What is over leaves nothing behind but that its check was heard of.
    store.append(vec![recovery("n1")]).await.unwrap();
    third.take_in().await;
    third.save().await;
    let left = part(directory.path(), "n1").unwrap();
    assert!(String::from_utf8(left).unwrap().contains("\"faults\":[]"));
    store.close().await;
}

#[tokio::test]
async fn a_book_of_any_size_is_saved() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let large = (0..40).map(|node| {
        let mut new = fault(&format!("n{node}"), 1);
        let metadata = (0..128).map(|key| (format!("key-{key}"), "x".repeat(4_096)));
        new.event.metadata = metadata.collect();
        new
    });
    store.append(large.collect()).await.unwrap();
    let (mut first, _handles) = quarantine(&store);
    first.take_in().await;
    first.save().await;
    assert!(first.saving.failure.is_none());
    let (mut second, _handles) = quarantine(&store);
    second.load().await;
    assert_eq!(second.fleet.book(), first.fleet.book());
    assert_eq!(second.fleet.book().nodes().count(), 40);
    store.close().await;
}

#[tokio::test]
async fn a_book_that_cannot_be_saved_for_a_minute_is_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.append(vec![fault("n1", 1)]).await.unwrap();
    let (mut quarantine, handles) = quarantine(&store);
    quarantine.take_in().await;
    damage(
        directory.path(),
        "ALTER TABLE checkpoint_part RENAME TO away",
    );
    quarantine.save().await;
    assert!(quarantine.saving.failure.is_some() && quarantine.troubles().is_empty());
    assert!(quarantine.save_at().is_some(), "it is tried again");
    let saved = store.checkpoint(CONSUMER).await;
    assert!(!matches!(saved, Ok(Some(_))), "all at once, or nothing");
    tokio::time::pause();
    tokio::time::advance(SAVE_TROUBLE).await;
    tokio::time::resume();
    quarantine.save().await;
    quarantine.publish();
    let told = handles.view.borrow().troubles.concat();
    assert!(told.contains("could not be saved for 60 s"), "{told}");

    damage(
        directory.path(),
        "ALTER TABLE away RENAME TO checkpoint_part",
    );
    quarantine.save().await;
    assert!(quarantine.troubles().is_empty() && quarantine.save_at().is_none());
    assert!(
        part(directory.path(), "n1").is_some(),
        "nothing was forgotten"
    );
    store.close().await;
}

#[tokio::test]
async fn who_only_observes_keeps_no_events_for_their_status() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let events = vec![fault("n1", 1), fault("n1", 2), recovery("n1")];
    store.append(events).await.unwrap();
    for mode in [Mode::Observe, Mode::DryRun] {
        let (mut quarantine, _handles) = quarantine_that(mode, &store);
        quarantine.take_in().await;
        assert_eq!(quarantine.fleet.reports("n1"), None, "{mode:?}");
    }
    store.close().await;
}

#[tokio::test]
async fn the_brakes_window_is_remembered_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let restarted = async |mode| {
        let (mut quarantine, handles) = quarantine_that(mode, &store);
        quarantine.load().await;
        quarantine.take_in().await;
        (quarantine, handles)
    };
    let (mut first, _handles) = restarted(Mode::Act).await;
    first.save().await;
    assert_eq!(first.save_at(), None);
    let back = |quarantine: &mut Quarantine, node: &str| {
        let recently_out = [(node.to_owned(), now())].into();
        let kept = kept(&quarantine.fleet);
        quarantine.fleet.restore(
            Kept {
                recently_out,
                ..kept
            },
            now(),
        );
        quarantine.fleet.still_unsaved(Unsaved {
            recently_out: true,
            ..Unsaved::default()
        });
    };
    back(&mut first, "n1");
    assert!(first.save_at().is_some(), "also without a new event");
    first.save().await;
    let (second, _handles) = restarted(Mode::Act).await;
    assert_eq!(second.fleet.recently_out(), first.fleet.recently_out());
    assert_eq!(second.fleet.recently_out().len(), 1);

    // What a dry run pretends does not count for whoever acts next.
    let (mut dry, _handles) = restarted(Mode::DryRun).await;
    back(&mut dry, "n2");
    dry.save().await;
    let (next, _handles) = restarted(Mode::Act).await;
    assert!(!next.fleet.recently_out().contains_key("n2"));
    store.close().await;
}

#[tokio::test]
async fn sessions_go_on_over_a_restart_where_they_are_acted_on() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let restarted = async |mode| {
        let (mut quarantine, handles) = quarantine_that(mode, &store);
        quarantine.load().await;
        quarantine.take_in().await;
        (quarantine, handles)
    };
    let (mut first, _handles) = restarted(Mode::Act).await;
    let mut session = Session::idle(now());
    (session.phase, session.asked) = (Phase::Quarantining, true);
    session.pending_since = Some(now());
    session.failed(Failure::Error { retry_after: None }, now());
    session.returns.push(now());
    let report = serde_json::json!({"id": "r", "healthy": false, "faults": ["f"]});
    let reports = serde_json::json!({"waiting": [report], "said": [{"Cancel": {"node": "n3"}}]});
    let reports: SavedReports = serde_json::from_value(reports).unwrap();
    let put = |quarantine: &mut Quarantine, node: &str, session: Session| {
        let sessions = [(node.to_owned(), vec![session])].into();
        let reports = [("n3".to_owned(), reports.clone())].into();
        let unsaved = [node.to_owned()].into();
        let kept = kept(&quarantine.fleet);
        quarantine.fleet.restore(
            Kept {
                sessions,
                reports,
                unsaved,
                ..kept
            },
            now(),
        );
    };
    put(&mut first, "n1", session.clone());
    first.fleet.still_unsaved(Unsaved {
        nodes: ["n3".to_owned()].into(),
        recently_out: false,
    });
    let kept = session.clone().restored(now());
    assert!(session.not_before.is_some() && kept.not_before.is_none());
    first.save().await;

    for mode in [Mode::DryRun, Mode::Observe] {
        let (mut other, _handles) = restarted(mode).await;
        assert!(!other.fleet.knows("n1"), "{mode:?}");
        put(&mut other, "n2", session.clone());
        other.save().await;
    }
    let (mut second, _handles) = restarted(Mode::Act).await;
    assert_eq!(second.fleet.session("n1"), Some(&kept));
    assert_eq!(second.fleet.reports("n3"), Some(reports.clone()));
    assert!(!second.fleet.knows("n2"));
    // What has nothing to tell is not kept.
    put(&mut second, "n1", Session::idle(now()));
    second.save().await;
    let (third, _handles) = restarted(Mode::Act).await;
    assert!(!third.fleet.knows("n1"));
    store.close().await;
}

#[tokio::test]
async fn a_store_is_as_old_as_its_first_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    for clock in [now, || now() + jiff::SignedDuration::from_secs(9)] {
        let (mut quarantine, _handles) = quarantine(&store);
        quarantine.fleet.decide(clock());
        quarantine.load().await;
        quarantine.take_in().await;
        assert_eq!(quarantine.fleet.begun(), now());
        quarantine.save().await;
    }
    store.close().await;
}

#[tokio::test]
async fn a_book_that_does_not_change_is_saved_now_and_then() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.append(vec![fault("n1", 1)]).await.unwrap();
    let (mut first, _handles) = quarantine(&store);
    first.take_in().await;
    first.save().await;
    let saved = || {
        let other = rusqlite::Connection::open(directory.path().join("events.db")).unwrap();
        let sql = "SELECT saved_at FROM checkpoint";
        other
            .query_row(sql, [], |row| row.get::<_, i64>(0))
            .unwrap()
    };
    // Also by one that ends before an hour is over, each time.
    for _ in 0..2 {
        let (mut quarantine, _handles) = quarantine(&store);
        quarantine.load().await;
        quarantine.take_in().await;
        assert_eq!(quarantine.save_at(), None);
        for pause in [SAVE_EVERY, SAVE_UNCHANGED_EVERY] {
            damage(directory.path(), "UPDATE checkpoint SET saved_at = 0");
            quarantine.save_if_due().await;
            assert_eq!(saved(), 0, "not before it is time");
            tokio::time::pause();
            tokio::time::advance(pause).await;
            tokio::time::resume();
            quarantine.save_if_due().await;
            assert!(saved() > 0);
        }
    }
    store.close().await;
}

#[tokio::test]
async fn a_place_that_is_lost_is_the_start_of_what_is_stored() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let events = vec![fault("n1", 1), fault("n2", 1), recovery("n2")];
    store.append(events).await.unwrap();
    let (mut first, _handles) = quarantine(&store);
    first.take_in().await;
    first.save().await;
    damage(directory.path(), "DELETE FROM checkpoint");

    let (mut second, _handles) = quarantine(&store);
    second.load().await;
    assert_eq!(second.fleet.book().applied(), Position::START);
    second.take_in().await;
    assert_eq!(second.fleet.book(), first.fleet.book());
    assert_eq!(second.fleet.book().faults("n1").len(), 1);
    store.close().await;
}
