use cluster::ConnectOptions;

use super::watched::REFUSED_AFTER;
use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// Creates the switches of a cluster that cannot be reached.
async fn switches() -> Switches {
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n\
                users: [{name: u, user: {}}]\n\
                contexts: [{name: c, context: {cluster: c, user: u}}]\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubeconfig");
    std::fs::write(&path, text).unwrap();
    let options = ConnectOptions {
        kubeconfig: Some(path),
        ..ConnectOptions::default()
    };
    let cluster = Cluster::connect(options).await.unwrap();
    Switches::new(
        Arc::new(cluster),
        "ns".to_owned(),
        &CancellationToken::new(),
    )
}

fn breaker(event: ConfigMapEvent) -> SwitchEvent {
    SwitchEvent::Breaker(event)
}

fn failing(refused: bool) -> SwitchEvent {
    let error = format!("refused: {refused}");
    breaker(ConfigMapEvent::Failing { error, refused })
}

#[tokio::test(start_paused = true)]
async fn what_was_never_read_is_not_said_to_be_missing() {
    let mut switches = switches().await;
    for refused in [false, true] {
        switches.handle(failing(refused), false, at(1));
        tokio::time::advance(REFUSED_AFTER).await;
        switches.handle(failing(refused), false, at(1));
        assert_eq!(switches.logged, None, "{refused}");
    }
    // Nobody can close a breaker that cannot be read, so the window begins with the process.
    assert_eq!(switches.switched().reset_at, Some(at(1)));
    switches.trip(false, at(2));
    let logged = switches.logged.as_deref().unwrap();
    assert!(
        logged.starts_with("circuit breaker TRIPPED: too many"),
        "{logged}"
    );
    assert_eq!(switches.state(), keys::BREAKER_TRIPPED);

    switches.handle(breaker(ConfigMapEvent::Missing), false, at(3));
    let logged = "circuit breaker CLOSED: the ConfigMap did not exist";
    assert_eq!(switches.logged.as_deref(), Some(logged));
    assert_eq!(switches.switched().reset_at, Some(at(3)));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_counts_only_where_it_lasts() {
    let mut switches = switches().await;
    let own = |event| SwitchEvent::Own(event);
    switches.handle(own(ConfigMapEvent::Missing), false, at(1));
    let held = |switches: &Switches| {
        matches!(switches.switched().stop(true, at(1)), Some(Hold::Unread(_)))
    };
    for (refused, seconds, expected) in [
        (true, 0, true),
        (true, 59, true),
        // Another failure in between, so the API server may allow it by now.
        (false, 30, true),
        (true, 1, true),
        (true, 59, true),
        (true, 1, false),
        (false, 1, false),
    ] {
        tokio::time::advance(Duration::from_secs(seconds)).await;
        switches.handle(failing(refused), false, at(1));
        assert_eq!(held(&switches), expected, "{refused} after {seconds} s");
    }
    // An operator had tripped the breaker nevertheless.
    let mut map = ConfigMap::default();
    let tripped = (
        keys::BREAKER_STATUS.to_owned(),
        keys::BREAKER_TRIPPED.to_owned(),
    );
    map.data.extend([tripped]);
    switches.handle(breaker(ConfigMapEvent::Seen(map)), false, at(1));
    assert_eq!(switches.switched().stop(true, at(1)), Some(Hold::Tripped));
}

#[tokio::test]
async fn what_cannot_be_written_is_said_once_and_resets_the_window_once() {
    let mut switches = switches().await;
    switches.handle(breaker(ConfigMapEvent::Missing), false, at(1));
    let logged = switches.logged.clone().unwrap();
    for second in 2..5 {
        let message = "namespaces \"ns\" not found".to_owned();
        let error = SwitchEvent::Written(Err(ApiError::NotFound { message }));
        switches.handle(error, false, at(second));
        switches.write(false);
        assert!(!switches.is_new_line(&logged));
        assert_eq!(switches.switched().reset_at, Some(at(1)));
    }
    // Both are written once the `ConfigMap` can be created.
    let annotations = change(&Switch::default(), &switches.switch).annotations;
    assert_eq!(annotations[keys::RESET_AT], Some(at(1).to_string()));
}
fn map(version: u32, status: &str, cursor: &str, tripped_at: Option<i64>) -> ConfigMap {
    let words = [
        (keys::BREAKER_STATUS, status),
        (keys::BREAKER_CURSOR, cursor),
    ];
    let tripped_at = tripped_at.map(|second| (keys::TRIPPED_AT.to_owned(), at(second).to_string()));
    ConfigMap {
        resource_version: version.to_string(),
        annotations: tripped_at.into_iter().collect(),
        data: (words.iter())
            .map(|(key, word)| ((*key).to_owned(), (*word).to_owned()))
            .collect(),
    }
}

fn seen(map: ConfigMap) -> SwitchEvent {
    breaker(ConfigMapEvent::Seen(map))
}

#[tokio::test(start_paused = true)]
async fn one_that_is_deleted_holds_for_a_while_and_its_successor_is_an_edit() {
    for (seconds, successor, closed) in [
        (1, Some("CREATE"), true),
        (9, Some("RESUME"), true),
        (9, None, false),
        (10, None, true),
    ] {
        let mut switches = switches().await;
        let tripped = map(1, "TRIPPED", "RESUME", Some(1));
        switches.handle(seen(tripped), false, at(2));
        switches.handle(breaker(ConfigMapEvent::Missing), true, at(3));
        assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
        // A failure in between: only the time of certain absence counts.
        switches.handle(failing(false), true, at(3));
        assert_eq!(switches.wake_at(), None);
        switches.handle(breaker(ConfigMapEvent::Missing), true, at(3));
        tokio::time::advance(Duration::from_secs(seconds)).await;
        switches.wake(true, at(4));
        assert_eq!(switches.absent, seconds < 10);
        assert_eq!(
            switches.writing.is_empty(),
            seconds < 10,
            "only then made by us"
        );
        if let Some(cursor) = successor {
            switches.handle(seen(map(5, "CLOSED", cursor, None)), false, at(4));
            assert!(!switches.absent && switches.wake_at().is_none());
        }
        assert_eq!(switches.state() == keys::BREAKER_CLOSED, closed);
        assert_eq!(switches.switched().reset_at, closed.then_some(at(4)));
        let dropped = (successor == Some("CREATE")).then_some(at(4));
        assert_eq!(
            switches.switched().dropped_at,
            dropped,
            "{seconds} {successor:?}"
        );
    }
}

#[tokio::test]
async fn a_trip_while_a_write_is_under_way_is_kept_and_written_behind_it() {
    let mut switches = switches().await;
    switches.handle(breaker(ConfigMapEvent::Missing), true, at(1));
    assert_eq!(switches.writing.len(), 1, "it is made");
    switches.trip(true, at(2));
    // The watch may be faster than the answer to the write.
    switches.handle(seen(map(1, "CLOSED", "RESUME", None)), true, at(3));
    assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
    switches.writing = JoinSet::new();
    let made = SwitchEvent::Written(Ok(map(1, "CLOSED", "RESUME", None)));
    switches.handle(made, true, at(3));
    assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
    assert_eq!(switches.writing.len(), 1);
    switches.writing = JoinSet::new();
    let made = SwitchEvent::Written(Ok(map(2, "TRIPPED", "RESUME", Some(3))));
    switches.handle(made, true, at(4));
    // The watch may be slower.
    switches.handle(seen(map(1, "CLOSED", "RESUME", None)), true, at(4));
    assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
    // A person closes the breaker.
    switches.handle(seen(map(3, "CLOSED", "RESUME", Some(3))), true, at(5));
    assert_eq!(switches.state(), keys::BREAKER_CLOSED);
    assert_eq!(switches.switched().reset_at, Some(at(5)));
}

#[tokio::test]
async fn an_edit_while_a_write_is_under_way_is_taken_in_and_written_behind_it() {
    let mut switches = switches().await;
    switches.handle(seen(map(1, "TRIPPED", "RESUME", None)), true, at(1));
    switches.handle(seen(map(2, "CLOSED", "CREATE", Some(1))), true, at(2));
    assert_eq!(switches.switched().dropped_at, Some(at(2)));
    switches.writing = JoinSet::new();
    let conflict = || SwitchEvent::Written(Err(ApiError::Conflict { status: 409 }));
    switches.handle(conflict(), true, at(3));
    assert_eq!(switches.writing.len(), 1, "on what was seen meanwhile");
    switches.writing = JoinSet::new();
    switches.handle(conflict(), true, at(4));
    assert!(
        switches.writing.is_empty(),
        "the watch has to bring it first"
    );
    assert_eq!(switches.switched().dropped_at, Some(at(2)));
}

#[tokio::test]
async fn a_drop_in_the_future_dismisses_what_was_before_it_was_seen() {
    let mut switches = switches().await;
    for (version, second) in [(1, 5), (2, 9)] {
        let mut map = map(version, "CLOSED", "RESUME", None);
        let future = (keys::DROPPED_AT.to_owned(), Timestamp::MAX.to_string());
        map.annotations.extend([future]);
        // Without a write the same state is read repeatedly.
        switches.handle(seen(map), false, at(second));
        assert_eq!(switches.switched().dropped_at, Some(at(5)));
        assert!(switches.notes()[0].contains(keys::DROPPED_AT));
        let change = change(&switches.in_cluster(), &switches.switch);
        assert_eq!(
            change.annotations[keys::DROPPED_AT],
            Some(at(5).to_string())
        );
    }
}

#[tokio::test(start_paused = true)]
async fn while_one_is_absent_nothing_is_written_and_what_was_dropped_stays_dropped() {
    let mut switches = switches().await;
    let mut closed = map(1, "CLOSED", "RESUME", None);
    for key in [keys::DROPPED_AT, keys::RESET_AT] {
        let time = (key.to_owned(), at(1).to_string());
        closed.annotations.extend([time]);
    }
    switches.handle(seen(closed), true, at(2));
    switches.handle(breaker(ConfigMapEvent::Missing), true, at(3));
    switches.trip(true, at(4));
    assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
    assert!(
        switches.writing.is_empty(),
        "a person may be about to make it"
    );
    tokio::time::advance(ABSENT_AFTER).await;
    assert!(switches.wake(true, at(5)));
    assert_eq!(switches.state(), keys::BREAKER_CLOSED);
    assert_eq!(switches.switched().reset_at, Some(at(5)));
    assert_eq!(
        (switches.switched().dropped_at, switches.writing.len()),
        (Some(at(1)), 1)
    );
}

#[tokio::test]
async fn one_that_a_person_makes_anew_is_not_tripped_by_what_was_before() {
    let mut switches = switches().await;
    switches.handle(seen(map(1, "CLOSED", "RESUME", None)), true, at(1));
    switches.handle(breaker(ConfigMapEvent::Missing), true, at(2));
    switches.trip(true, at(3));
    switches.handle(seen(map(2, "CLOSED", "RESUME", None)), true, at(4));
    assert_eq!(switches.state(), keys::BREAKER_CLOSED);
}
