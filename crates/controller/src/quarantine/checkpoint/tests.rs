use std::path::Path;

use fleet::Fleet;
use fleet::session::{Phase, RequestFailure};
use model::event::normalise;
use model::mode::Mode;
use store::NewEvent;

use super::*;
use crate::quarantine::Quarantine;
use crate::quarantine::tests::now;
use crate::quarantine::tests::offline::{damage, fault, open, quarantine, quarantine_that};

/// Returns the state that the fleet would save now.
fn kept(fleet: &Fleet) -> SavedState {
    SavedState {
        book: fleet.book().clone(),
        reports: BTreeMap::new(),
        recently_out: fleet.recently_out().clone(),
        begun: fleet.begun(),
        sessions: BTreeMap::new(),
        unsaved: BTreeSet::new(),
    }
}

/// The saved part of a node, as in the file.
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
    first.checkpoints.load(&mut first.fleet).await;
    first.catch_up().await;
    assert!(first.checkpoints.changes_due_at(&first.fleet).is_some());
    first.checkpoints.save(&mut first.fleet).await;
    assert_eq!(first.checkpoints.changes_due_at(&first.fleet), None);
    let before = part(directory.path(), "n1").unwrap();

    damage(
        directory.path(),
        "UPDATE checkpoint_part SET state = x'00' WHERE part = 'n2'",
    );
    store
        .append(vec![fault("n1", 2), fault("n3", 1)])
        .await
        .unwrap();
    first.catch_up().await;
    first.checkpoints.save(&mut first.fleet).await;
    assert_eq!(
        part(directory.path(), "n2"),
        Some(vec![0]),
        "not written again"
    );
    assert_ne!(part(directory.path(), "n1").unwrap(), before);

    // A book that cannot be parsed is rebuilt from the events alone.
    let (mut second, _handles) = quarantine(&store);
    second.checkpoints.load(&mut second.fleet).await;
    assert_eq!(
        second.checkpoints.changes_due_at(&second.fleet),
        None,
        "not before it has caught up"
    );
    second.catch_up().await;
    assert_eq!(second.fleet.book(), first.fleet.book());
    second.checkpoints.save(&mut second.fleet).await;
    let (mut third, _handles) = quarantine(&store);
    third.checkpoints.load(&mut third.fleet).await;
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
    second.catch_up().await;
    second.checkpoints.save(&mut second.fleet).await;
    let saved = store.checkpoint(CONSUMER).await.unwrap().unwrap();
    assert!(
        saved.parts.keys().eq(["n1", "n2"]),
        "{:?}",
        saved.parts.keys()
    );
    let (mut third, _handles) = quarantine(&store);
    third.checkpoints.load(&mut third.fleet).await;
    assert_eq!(third.fleet.book(), second.fleet.book());

    // A closed fault leaves only the record that its check has reported.
    store.append(vec![recovery("n1")]).await.unwrap();
    third.catch_up().await;
    third.checkpoints.save(&mut third.fleet).await;
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
    first.catch_up().await;
    first.checkpoints.save(&mut first.fleet).await;
    assert!(first.checkpoints.failure.is_none());
    let (mut second, _handles) = quarantine(&store);
    second.checkpoints.load(&mut second.fleet).await;
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
    quarantine.catch_up().await;
    damage(
        directory.path(),
        "ALTER TABLE checkpoint_part RENAME TO away",
    );
    quarantine.checkpoints.save(&mut quarantine.fleet).await;
    assert!(quarantine.checkpoints.failure.is_some() && quarantine.checkpoints.trouble().is_none());
    assert!(
        quarantine
            .checkpoints
            .changes_due_at(&quarantine.fleet)
            .is_some(),
        "it is tried again"
    );
    let saved = store.checkpoint(CONSUMER).await;
    assert!(!matches!(saved, Ok(Some(_))), "all at once, or nothing");
    tokio::time::pause();
    tokio::time::advance(SAVE_TROUBLE).await;
    tokio::time::resume();
    quarantine.checkpoints.save(&mut quarantine.fleet).await;
    quarantine.publish();
    let told = handles.view.borrow().troubles.concat();
    assert!(told.contains("could not be saved for 60 s"), "{told}");

    damage(
        directory.path(),
        "ALTER TABLE away RENAME TO checkpoint_part",
    );
    quarantine.checkpoints.save(&mut quarantine.fleet).await;
    assert!(
        quarantine.checkpoints.trouble().is_none()
            && quarantine
                .checkpoints
                .changes_due_at(&quarantine.fleet)
                .is_none()
    );
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
        quarantine.catch_up().await;
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
        quarantine.checkpoints.load(&mut quarantine.fleet).await;
        quarantine.catch_up().await;
        (quarantine, handles)
    };
    let (mut first, _handles) = restarted(Mode::Act).await;
    first.checkpoints.save(&mut first.fleet).await;
    assert_eq!(first.checkpoints.changes_due_at(&first.fleet), None);
    let back = |quarantine: &mut Quarantine, node: &str| {
        let recently_out = [(node.to_owned(), now())].into();
        let kept = kept(&quarantine.fleet);
        quarantine.fleet.restore(
            SavedState {
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
    assert!(
        first.checkpoints.changes_due_at(&first.fleet).is_some(),
        "also without a new event"
    );
    first.checkpoints.save(&mut first.fleet).await;
    let (second, _handles) = restarted(Mode::Act).await;
    assert_eq!(second.fleet.recently_out(), first.fleet.recently_out());
    assert_eq!(second.fleet.recently_out().len(), 1);

    // The pretended changes of a dry run do not affect a later run that acts.
    let (mut dry, _handles) = restarted(Mode::DryRun).await;
    back(&mut dry, "n2");
    dry.checkpoints.save(&mut dry.fleet).await;
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
        quarantine.checkpoints.load(&mut quarantine.fleet).await;
        quarantine.catch_up().await;
        (quarantine, handles)
    };
    let (mut first, _handles) = restarted(Mode::Act).await;
    let mut session = Session::idle(now());
    (session.phase, session.asked) = (Phase::Quarantining, true);
    session.pending_since = Some(now());
    session.failed(RequestFailure::Error { retry_after: None }, now());
    session.returns.push(now());
    let report = serde_json::json!({"id": "r", "healthy": false, "faults": ["f"]});
    let ended = serde_json::json!({
        "node": "n3", "session": null, "drained": false, "by_hand": true, "reports": [report], "at": now()
    });
    let reports = serde_json::json!({"waiting": [report], "updates": [{"Ended": ended}]});
    let reports: Reports = serde_json::from_value(reports).unwrap();
    let put = |quarantine: &mut Quarantine, node: &str, session: Session| {
        let sessions = [(node.to_owned(), vec![session])].into();
        let reports = [("n3".to_owned(), reports.clone())].into();
        let unsaved = [node.to_owned()].into();
        let kept = kept(&quarantine.fleet);
        quarantine.fleet.restore(
            SavedState {
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
    first.checkpoints.save(&mut first.fleet).await;

    for mode in [Mode::DryRun, Mode::Observe] {
        let (mut other, _handles) = restarted(mode).await;
        assert!(!other.fleet.knows("n1"), "{mode:?}");
        put(&mut other, "n2", session.clone());
        other.checkpoints.save(&mut other.fleet).await;
    }
    let (mut second, _handles) = restarted(Mode::Act).await;
    assert_eq!(second.fleet.session("n1"), Some(&kept));
    assert_eq!(second.fleet.reports("n3"), Some(&reports));
    assert!(!second.fleet.knows("n2"));
    // Empty parts are not saved.
    put(&mut second, "n1", Session::idle(now()));
    second.checkpoints.save(&mut second.fleet).await;
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
        quarantine.checkpoints.load(&mut quarantine.fleet).await;
        quarantine.catch_up().await;
        assert_eq!(quarantine.fleet.begun(), now());
        quarantine.checkpoints.save(&mut quarantine.fleet).await;
    }
    store.close().await;
}

#[tokio::test]
async fn a_book_that_does_not_change_is_saved_now_and_then() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.append(vec![fault("n1", 1)]).await.unwrap();
    let (mut first, _handles) = quarantine(&store);
    first.catch_up().await;
    first.checkpoints.save(&mut first.fleet).await;
    let saved = || {
        let other = rusqlite::Connection::open(directory.path().join("events.db")).unwrap();
        let sql = "SELECT saved_at FROM checkpoint";
        other
            .query_row(sql, [], |row| row.get::<_, i64>(0))
            .unwrap()
    };
    // Even if each process ends within an hour.
    for _ in 0..2 {
        let (mut quarantine, _handles) = quarantine(&store);
        quarantine.checkpoints.load(&mut quarantine.fleet).await;
        quarantine.catch_up().await;
        assert_eq!(
            quarantine.checkpoints.changes_due_at(&quarantine.fleet),
            None
        );
        for pause in [SAVE_EVERY, SAVE_UNCHANGED_EVERY] {
            damage(directory.path(), "UPDATE checkpoint SET saved_at = 0");
            quarantine
                .checkpoints
                .save_if_due(&mut quarantine.fleet)
                .await;
            assert_eq!(saved(), 0, "not before it is time");
            tokio::time::pause();
            tokio::time::advance(pause).await;
            tokio::time::resume();
            quarantine
                .checkpoints
                .save_if_due(&mut quarantine.fleet)
                .await;
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
    first.catch_up().await;
    first.checkpoints.save(&mut first.fleet).await;
    damage(directory.path(), "DELETE FROM checkpoint");

    let (mut second, _handles) = quarantine(&store);
    second.checkpoints.load(&mut second.fleet).await;
    assert_eq!(second.fleet.book().applied(), Position::START);
    second.catch_up().await;
    assert_eq!(second.fleet.book(), first.fleet.book());
    assert_eq!(second.fleet.book().faults("n1").len(), 1);
    store.close().await;
}
