//! Tests of appending and querying events.

use std::collections::BTreeMap;

use contract::{BehaviourOverrides, Entity, HealthEvent, json};
use jiff::Timestamp;
use model::event::{EventRecord, normalise};

use super::{
    Store, all, event, event_without_time, grow, joining, numbers, positions, read_feed, report,
    time,
};
use crate::{Appended, EventQuery, MAX_PAGE, NewEvent, Position, Prune, RETRY_WINDOW};

/// Positions grow in the order of the appends; a page continues where the last one ended.
pub async fn appends_in_order(open: impl AsyncFn() -> Store) {
    let store = open().await;
    assert_eq!(*store.latest().borrow(), Position::START);
    assert!(store.append(Vec::new()).await.unwrap().is_empty());
    assert!(store.feed(Position::START, 10).await.unwrap().is_empty());

    let sent: Vec<_> = (0..25).map(|n| event("n1", n)).collect();
    let mut answers = store.append(sent[..10].to_vec()).await.unwrap();
    for one in &sent[10..] {
        answers.extend(store.append(vec![one.clone()]).await.unwrap());
    }
    let at = positions(&answers);
    assert!(Position::START < at[0] && grow(at.iter().copied()));
    assert_eq!(*store.latest().borrow(), at[24]);
    for (one, answer) in sent.iter().zip(&answers) {
        assert_eq!((&answer.id, answer.new), (&one.event.id, true));
    }
    for page in [1, 7, 100] {
        let read: Vec<_> = read_feed(&*store, page)
            .await
            .into_iter()
            .map(|r| r.event)
            .collect();
        let expected: Vec<_> = sent.iter().map(|one| one.event.clone()).collect();
        assert_eq!(read, expected);
    }
    assert_eq!(store.feed(at[23], 10).await.unwrap()[0].seq, at[24]);
    let from = store.feed(at[20].before(), 2).await.unwrap();
    assert_eq!(
        numbers(&from, &at),
        [21, 22],
        "right before a position is behind the last"
    );
    assert!(store.feed(at[24], 10).await.unwrap().is_empty());
    assert!(store.feed(Position::END, 10).await.unwrap().is_empty());
    assert!(store.feed(Position::START, 0).await.unwrap().is_empty());
    for (after, behind) in [
        (Position::START, 25),
        (at[9], 15),
        (at[24], 0),
        (Position::END, 0),
    ] {
        assert_eq!(store.behind(after).await.unwrap(), behind);
    }
    store.close().await;
}

/// Every field is returned unchanged; the time of receipt to the microsecond.
pub async fn keeps_an_event_as_it_was(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let hostile = "quote ' \" NUL \0 line\nend \u{1f525} </script> \\u0000 \u{7f} %s";
    let long_ago = Timestamp::new(-62_000_000_000, 999_999_999).unwrap();
    let mut full = HealthEvent {
        version: u32::MAX,
        agent: hostile.into(),
        component_class: hostile.into(),
        check_name: hostile.into(),
        is_fatal: true,
        is_healthy: true,
        message: hostile.into(),
        recommended_action: 77,
        error_code: vec![String::new(), hostile.into()],
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: hostile.into(),
        }],
        metadata: BTreeMap::from([
            (hostile.into(), hostile.into()),
            (String::new(), "x".into()),
        ]),
        generated_timestamp: Some(json::proto_timestamp(long_ago)),
        node_name: hostile.into(),
        quarantine_overrides: Some(BehaviourOverrides {
            force: false,
            skip: false,
        }),
        drain_overrides: Some(BehaviourOverrides {
            force: true,
            skip: true,
        }),
        processing_strategy: -9,
        id: String::new(),
        custom_recommended_action: hostile.into(),
    };
    let received_at: Timestamp = "2026-01-01T00:00:00.123456789Z".parse().unwrap();
    normalise(&mut full, received_at);
    let mut bare = HealthEvent::default();
    normalise(&mut bare, received_at);

    let events = [full, bare];
    let new = events.clone().map(|event| NewEvent { event, received_at });
    let answers = store.append(new.to_vec()).await.unwrap();
    for (seq, event) in positions(&answers).into_iter().zip(events) {
        let expected = EventRecord {
            seq,
            id: event.id.clone(),
            created_at: "2026-01-01T00:00:00.123456Z".parse().unwrap(),
            event,
        };
        assert_eq!(
            store.feed(seq.before(), 1).await.unwrap().pop(),
            Some(expected.clone())
        );
        assert_eq!(
            store.event(&expected.id).await.unwrap(),
            Some(expected.clone())
        );
        let query = EventQuery {
            node: Some(expected.event.node_name.clone()),
            ..all()
        };
        assert_eq!(store.events(query).await.unwrap(), [expected]);
    }
    store.close().await;
}

/// Events with the same id are one event: within a batch, across batches, after reopening.
pub async fn stores_an_event_once(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let batch = vec![event("n1", 1), event("n1", 2), event("n1", 1)];
    let answers = store.append(batch.clone()).await.unwrap();
    let (one, two) = (answers[0].seq, answers[1].seq);
    assert_eq!(seqs(&answers), [(one, true), (two, true), (one, false)]);
    let answers = store.append(batch.clone()).await.unwrap();
    assert_eq!(seqs(&answers), [(one, false), (two, false), (one, false)]);
    store.close().await;

    let store = open().await;
    let mut mixed = vec![event("n1", 3)];
    mixed.extend(batch);
    let answers = store.append(mixed).await.unwrap();
    let three = answers[0].seq;
    assert!(three > two);
    assert_eq!(
        seqs(&answers),
        [(three, true), (one, false), (two, false), (one, false)]
    );
    assert_eq!(answers[1].id, event("n1", 1).event.id);
    assert_eq!(read_feed(&*store, 10).await.len(), 3);
    store.close().await;
}

/// Repeated content without a time of its own is a retry within [`RETRY_WINDOW`], unless the
/// health changed in between.
pub async fn takes_a_repetition_without_a_time_for_a_retry(open: impl AsyncFn() -> Store) {
    const WINDOW: i64 = RETRY_WINDOW.as_secs();
    #[derive(Clone, Copy)]
    enum Is {
        Unhealthy,
        Healthy,
        Elsewhere,
    }
    use Is::{Elsewhere, Healthy, Unhealthy};
    type Reports = &'static [(Is, i64, bool)];
    // Each report, the second of its receipt, and whether it is stored.
    let table: [(&str, Reports); 7] = [
        (
            "again at once",
            &[
                (Unhealthy, 0, true),
                (Unhealthy, 1, false),
                (Unhealthy, 2, false),
            ],
        ),
        (
            "health changed",
            &[
                (Unhealthy, 0, true),
                (Healthy, 1, true),
                (Unhealthy, 2, true),
            ],
        ),
        (
            "retries on both sides of a change",
            &[
                (Healthy, 0, true),
                (Unhealthy, 1, true),
                (Unhealthy, 2, false),
                (Healthy, 3, true),
                (Healthy, 4, false),
            ],
        ),
        (
            "another stream changed",
            &[
                (Unhealthy, 0, true),
                (Elsewhere, 1, true),
                (Unhealthy, 2, false),
            ],
        ),
        (
            "end of the window",
            &[(Unhealthy, 0, true), (Unhealthy, WINDOW, false)],
        ),
        (
            "after the window",
            &[(Unhealthy, 0, true), (Unhealthy, WINDOW + 60, true)],
        ),
        (
            "clock set back",
            &[
                (Unhealthy, 9_000, true),
                (Unhealthy, 8_990, false),
                (Unhealthy, 0, true),
            ],
        ),
    ];
    let store = open().await;
    for (case, (name, reports)) in table.into_iter().enumerate() {
        // A separate node for each case, and separate appends, so that each report finds those
        // before it.
        let mut stored = Vec::new();
        for &(is, second, new) in reports {
            let node = match is {
                Elsewhere => format!("elsewhere-{case}"),
                Unhealthy | Healthy => format!("n{case}"),
            };
            let received_at = time(second);
            let mut event = report(&node, "the same");
            event.is_healthy = !matches!(is, Unhealthy);
            normalise(&mut event, received_at);
            let answer = store
                .append(vec![NewEvent { event, received_at }])
                .await
                .unwrap();
            assert_eq!(answer[0].new, new, "{name}, second {second}");
            if new {
                stored.push(answer[0].clone());
            } else {
                let last = stored.last().unwrap();
                let original = stored.iter().rfind(|one| one.seq == answer[0].seq).unwrap();
                assert_eq!(
                    answer[0].id, original.id,
                    "{name}: the id of what it repeats"
                );
                assert!(answer[0].seq <= last.seq);
            }
        }
    }

    // A whole batch sent again later stores nothing twice.
    let before = read_feed(&*store, MAX_PAGE).await.len();
    let batch = |second| -> Vec<_> {
        (0..50)
            .map(|n| event_without_time("batch", &format!("line {n}"), time(second)))
            .chain((0..50).map(|n| event("batch", n)))
            .collect()
    };
    let first = store.append(batch(0)).await.unwrap();
    let again = store.append(batch(7)).await.unwrap();
    assert!(first.iter().all(|answer| answer.new));
    assert!(again.iter().all(|answer| !answer.new));
    assert_eq!(ids(&first), ids(&again));
    assert_eq!(read_feed(&*store, MAX_PAGE).await.len(), before + 100);
    store.close().await;
}

/// A reader that pages back receives each event once, and every event that stays, while new
/// events arrive, old ones are deleted and a status changes.
pub async fn pages_stay_whole_while_rows_come_and_go(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let answers = store
        .append((0..20).map(|n| event("a", n)).collect())
        .await
        .unwrap();
    let (mut seen, mut before) = (Vec::new(), None);
    for round in 0.. {
        let query = EventQuery {
            node: Some("a".to_owned()),
            before,
            limit: 4,
            ..EventQuery::default()
        };
        let page = store.events(query).await.unwrap();
        let Some(last) = page.last() else { break };
        before = Some(last.seq);
        let joined = joining(&last.id, "s", round);
        store.join_session(joined).await.unwrap();
        seen.extend(numbers(&page, &positions(&answers)));
        let new = ["a", "b"].map(|node| event(node, 100 + round));
        store.append(new.to_vec()).await.unwrap();
        let prune = Prune {
            before: time(round * 2),
            passes_before: Timestamp::UNIX_EPOCH,
            max_bytes: u64::MAX,
            finished: Position::END,
            gone_before: Timestamp::UNIX_EPOCH,
            keep: Vec::new(),
        };
        store.prune(prune).await.unwrap();
    }
    // The first four were deleted before the reader reached them.
    assert_eq!(seen, (5..=20).rev().collect::<Vec<_>>());
    store.close().await;
}

/// Queries return newest events first; all conditions must hold.
pub async fn pages_and_filters(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let sent = (0..150).map(|n| event(if n % 3 == 0 { "a" } else { "b" }, n));
    let at = positions(&store.append(sent.collect()).await.unwrap());
    let find = async |query| numbers(&store.events(query).await.unwrap(), &at);
    let nth = |number: usize| Some(at[number - 1]);
    let node = |name: &str| Some(name.to_owned());
    let id_of_7 = Some(event("a", 6).event.id);

    assert_eq!(
        find(EventQuery::default()).await,
        (51..=150).rev().collect::<Vec<_>>()
    );
    assert_eq!(find(all()).await.len(), 150);
    assert_eq!(find(EventQuery { limit: 0, ..all() }).await, [0_usize; 0]);
    let of_a = (0..50).rev().map(|n| n * 3 + 1).collect::<Vec<_>>();
    assert_eq!(
        find(EventQuery {
            node: node("a"),
            ..all()
        })
        .await,
        of_a
    );
    assert_eq!(
        find(EventQuery {
            node: node("c"),
            ..all()
        })
        .await,
        [0_usize; 0]
    );
    assert_eq!(
        find(EventQuery {
            before: nth(4),
            ..all()
        })
        .await,
        [3, 2, 1]
    );
    assert_eq!(
        find(EventQuery {
            after: nth(148),
            ..all()
        })
        .await,
        [150, 149]
    );
    let between = EventQuery {
        before: nth(12),
        after: nth(3),
        node: node("a"),
        ..all()
    };
    assert_eq!(find(between).await, [10, 7, 4]);
    let page = EventQuery {
        before: nth(148),
        node: node("a"),
        limit: 2,
        ..all()
    };
    assert_eq!(find(page).await, [145, 142]);
    assert_eq!(
        find(EventQuery {
            id: id_of_7.clone(),
            ..all()
        })
        .await,
        [7]
    );
    assert_eq!(
        find(EventQuery {
            id: id_of_7,
            node: node("b"),
            ..all()
        })
        .await,
        [0_usize; 0]
    );

    let seventh = store.event(&event("a", 6).event.id).await.unwrap();
    assert_eq!(seventh.unwrap().seq, at[6]);
    assert_eq!(store.event("no such id").await.unwrap(), None);
    store.close().await;
}

/// Counts and times follow the events.
pub async fn states_what_it_holds(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let stats = store.stats().await.unwrap();
    assert_eq!((stats.events, stats.oldest, stats.newest), (0, None, None));
    assert!(stats.schema_version > 0);
    store
        .append((10..60).map(|n| event("n1", n)).collect())
        .await
        .unwrap();
    let stats = store.stats().await.unwrap();
    assert_eq!(
        (stats.events, stats.oldest, stats.newest),
        (50, Some(time(10)), Some(time(59)))
    );
    assert!(stats.bytes > 50 * 300, "{} bytes", stats.bytes);
    store.close().await;
}

fn seqs(answers: &[Appended]) -> Vec<(Position, bool)> {
    answers
        .iter()
        .map(|answer| (answer.seq, answer.new))
        .collect()
}

fn ids(answers: &[Appended]) -> Vec<&str> {
    answers.iter().map(|answer| answer.id.as_str()).collect()
}
