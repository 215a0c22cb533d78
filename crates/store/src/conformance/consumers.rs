//! Tests of the guarantees for consumers: the feed under load, checkpoints, the journal.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::journal::{EntryKind, JournalEntry};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::{Store, event, event_without_time, grow, joining, positions, read_feed, status, time};
use crate::{Checkpoint, MAX_CHECKPOINT_BYTES, Position, StoreError};

/// Events stored before `begin_anew` are history, and count again when they arrive again: at
/// the end of the feed, in the order of arrival.
pub async fn begins_anew_behind_its_history(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let first = store.identity();
    assert!(!first.id.is_empty());
    assert_eq!(first.since, Position::START);
    let old: Vec<_> = (0..3).map(|n| event("n1", n)).collect();
    // No time of its own, so that a repetition is a retry by its sender.
    let retried = event_without_time("n1", "again", time(3));
    store.append(old.clone()).await.unwrap();
    let newest = store.append(vec![retried.clone()]).await.unwrap()[0].seq;
    let id = old[1].event.id.clone();
    store.join_session(joining(&id, &id, 0)).await.unwrap();
    let checkpoint = Checkpoint {
        token: newest,
        state: b"x".to_vec(),
        parts: [("n1".to_owned(), b"y".to_vec())].into(),
    };
    store.save_checkpoint("c", checkpoint).await.unwrap();

    let anew = store.begin_anew().await.unwrap();
    assert_eq!((&anew.id, anew.since), (&first.id, newest));
    assert_ne!(anew.to_string(), first.to_string());
    assert_eq!(store.checkpoint("c").await.unwrap(), None);
    let empty = Checkpoint {
        token: newest,
        state: Vec::new(),
        parts: BTreeMap::new(),
    };
    store.save_checkpoint("c", empty.clone()).await.unwrap();
    assert_eq!(
        store.checkpoint("c").await.unwrap(),
        Some(empty),
        "its parts are gone too"
    );
    assert!(store.feed(newest, 10).await.unwrap().is_empty());
    assert_eq!(read_feed(&*store, 10).await.len(), 4, "it is all there");
    store.close().await;

    let store = open().await;
    assert_eq!(store.identity(), anew);
    // Some of the history again, in another order, with a new event in between.
    let mut late = old[1].clone();
    late.received_at += SignedDuration::from_hours(1);
    let new = event("n1", 9);
    let mut retry = retried.clone();
    retry.event.id = "retry".into();
    let again = vec![late, new.clone(), old[0].clone(), retry];
    let answers = store.append(again.clone()).await.unwrap();
    assert!(answers.iter().all(|one| one.new && one.seq > newest));
    assert!(grow(positions(&answers).into_iter()));
    let newest = answers[3].seq;
    let feed = store.feed(anew.since, 10).await.unwrap();
    let ids = |records: &[EventRecord]| -> Vec<String> {
        records.iter().map(|record| record.id.clone()).collect()
    };
    let expected = [&old[1], &new, &old[0]].map(|one| one.event.id.clone());
    assert_eq!(ids(&feed)[..3], expected);
    assert_eq!(feed[0].created_at, old[1].received_at, "as it was received");
    let status = status(&*store, &id).await.unwrap();
    assert_eq!(status.session, Some(id), "its status too");
    assert_eq!(*store.latest().borrow(), newest);
    // From now on these are repetitions.
    let answers = store.append(again).await.unwrap();
    assert!(answers.iter().all(|one| !one.new), "{answers:?}");
    let left = read_feed(&*store, 10).await;
    assert_eq!(left[0].id, old[2].event.id);
    assert_eq!(left.len(), 6);
    // Positions continue behind the moved events.
    let later = store.append(vec![event("n1", 10)]).await.unwrap();
    assert!(later[0].seq > newest && later[0].new);
    assert_eq!(store.begin_anew().await.unwrap().since, later[0].seq);
    store.close().await;
}

/// 64 tasks append at once, each event from two of them: the feed has every event once, and
/// each task's events in that task's order.
pub async fn loses_nothing_among_many_writers(open: impl AsyncFn() -> Store) {
    const TASKS: i64 = 64;
    const EACH: i64 = 12;
    let store = open().await;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            let mut answers = Vec::new();
            for n in 0..EACH {
                // Two tasks share a node, and so send the same events.
                let batch = (0..=n % 3).map(|k| event(&format!("n{}", task / 2), n * 10 + k));
                answers.extend(store.append(batch.collect()).await.unwrap());
            }
            assert!(answers.is_sorted_by_key(|answer| answer.seq));
            answers
        });
    }
    let answers: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    let records = read_feed(&*store, 100).await;
    assert!(grow(records.iter().map(|record| record.seq)));
    let expected: HashSet<_> = answers
        .iter()
        .map(|answer| (&answer.id, answer.seq))
        .collect();
    let found: HashSet<_> = records
        .iter()
        .map(|record| (&record.id, record.seq))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(
        records.len(),
        usize::try_from(TASKS / 2 * EACH * 2).unwrap()
    );
    assert_eq!(
        answers.iter().filter(|answer| answer.new).count(),
        records.len()
    );
    store.close().await;
}

/// A reader that waits for `latest` receives every event once, in order, while others write.
pub async fn feeds_a_follower_every_event_once(open: impl AsyncFn() -> Store) {
    const WRITERS: i64 = 8;
    const EACH: i64 = 40;
    let store = open().await;
    // End of the feed once all is written, so that a feed that lacks events fails instead of
    // hanging.
    let (end, mut ends) = watch::channel(Position::END);
    let follower = tokio::spawn({
        let store = Arc::clone(&store);
        async move {
            let mut latest = store.latest();
            let mut seen: Vec<EventRecord> = Vec::new();
            loop {
                let after = seen.last().map_or(Position::START, |record| record.seq);
                tokio::select! {
                    biased;
                    ended = ends.wait_for(|end| *end <= after) => break drop(ended.unwrap()),
                    more = latest.wait_for(|latest| *latest > after) => drop(more.unwrap()),
                }
                seen.extend(store.feed(after, 7).await.unwrap());
            }
            seen
        }
    });
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let store = Arc::clone(&store);
        writers.spawn(async move {
            let latest = store.latest();
            for n in 0..EACH {
                let answer = store
                    .append(vec![event(&format!("n{writer}"), n)])
                    .await
                    .unwrap();
                assert!(
                    *latest.borrow() >= answer[0].seq,
                    "announced before acknowledged"
                );
            }
        });
    }
    writers.join_all().await;
    end.send_replace(*store.latest().borrow());
    let seen = follower.await.unwrap();
    assert_eq!(seen.len(), usize::try_from(WRITERS * EACH).unwrap());
    assert!(grow(seen.iter().map(|record| record.seq)));
    for writer in 0..WRITERS {
        let node = format!("n{writer}");
        let of_writer = seen.iter().filter(|record| record.event.node_name == node);
        assert!(
            of_writer.map(|record| &record.id).eq((0..EACH)
                .map(|n| event(&node, n).event.id)
                .collect::<Vec<_>>()
                .iter())
        );
    }
    store.close().await;
}

/// Each consumer has its own token and state, and a token only moves forward.
pub async fn never_moves_a_token_back(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let at = |token: u64, state: &[u8]| Checkpoint {
        token: token.into(),
        state: state.to_vec(),
        ..Checkpoint::default()
    };
    assert_eq!(store.checkpoint("book").await.unwrap(), None);
    let largest = vec![7; MAX_CHECKPOINT_BYTES];
    for next in [
        at(0, b""),
        at(5, b"five"),
        at(5, b"five again"),
        at(9, &largest),
    ] {
        store.save_checkpoint("book", next.clone()).await.unwrap();
        assert_eq!(store.checkpoint("book").await.unwrap(), Some(next));
    }
    let error = store.save_checkpoint("book", at(8, b"")).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::TokenBackwards { stored, offered, consumer }
            if (*stored, *offered) == (9.into(), 8.into()) && consumer == "book"),
        "{error}"
    );
    assert!(!error.is_retryable());
    assert_eq!(
        store.checkpoint("book").await.unwrap().unwrap().token,
        9.into()
    );
    store.save_checkpoint("export", at(1, b"")).await.unwrap();
    assert_eq!(
        store.checkpoint("book").await.unwrap().unwrap().state,
        largest
    );

    // Among concurrent saves the highest token wins, and a refusal affects no other save.
    let mut tasks = JoinSet::new();
    for token in 1..=64 {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            let appended = store.append(vec![event("n1", token)]).await;
            let token = token.unsigned_abs();
            let saved = store
                .save_checkpoint(
                    "race",
                    Checkpoint {
                        token: token.into(),
                        ..Checkpoint::default()
                    },
                )
                .await;
            assert!(matches!(
                saved,
                Ok(()) | Err(StoreError::TokenBackwards { .. })
            ));
            appended.unwrap()
        });
    }
    tasks.join_all().await;
    assert_eq!(
        store.checkpoint("race").await.unwrap().unwrap().token,
        64.into()
    );
    store.close().await;
}

/// Parts of a state are added and deleted one by one, atomically with the token.
pub async fn keeps_the_parts_that_are_not_named(open: impl AsyncFn() -> Store) {
    let parts = |parts: &[(&str, &str)]| {
        let parts = parts.iter();
        parts
            .map(|(name, state)| ((*name).to_owned(), state.as_bytes().to_vec()))
            .collect()
    };
    let at = |token: u64, named: &[(&str, &str)]| Checkpoint {
        token: token.into(),
        state: token.to_string().into_bytes(),
        parts: parts(named),
    };
    let store = open().await;
    let first = at(1, &[("a", "1"), ("b", "1")]);
    store.save_checkpoint("book", first).await.unwrap();
    let other = at(7, &[("a", "another consumer's")]);
    store.save_checkpoint("other", other).await.unwrap();
    let second = at(2, &[("b", "2"), ("c", "2"), ("gone", "")]);
    store.save_checkpoint("book", second).await.unwrap();
    let third = at(3, &[("c", "")]);
    store.save_checkpoint("book", third).await.unwrap();
    let back = at(2, &[("a", "back"), ("b", "")]);
    store.save_checkpoint("book", back).await.unwrap_err();
    store.close().await;
    let store = open().await;
    let found = store.checkpoint("book").await.unwrap().unwrap();
    assert_eq!(found, at(3, &[("a", "1"), ("b", "2")]));
    let mut large = at(4, &[]);
    large.parts = [("a".to_owned(), vec![0; MAX_CHECKPOINT_BYTES + 1])].into();
    let error = store.save_checkpoint("book", large).await.unwrap_err();
    assert!(error.to_string().contains("the part \"a\""), "{error}");
    store.close().await;
}

/// The timeline of a node is the end of its journal, in order.
pub async fn keeps_the_journal_in_order(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let kinds = [
        EntryKind::Rules,
        EntryKind::Decision,
        EntryKind::DryRun,
        EntryKind::Call,
        EntryKind::Answer,
        EntryKind::Session,
        EntryKind::Attention,
    ];
    let entry = |node: &str, n: usize| JournalEntry {
        // Not in the order of writing, and with a precision finer than the store keeps.
        at: time(1_000 - i64::try_from(n).unwrap()) + SignedDuration::from_nanos(1_500),
        node: node.to_owned(),
        session: n.is_multiple_of(2).then(|| format!("session {n}")),
        kind: kinds[n % kinds.len()],
        text: format!("entry {n}: \0 ' \" \u{1f525}"),
        detail: match n % 3 {
            0 => serde_json::Value::Null,
            1 => serde_json::json!({"patch": [{"op": "test", "value": null}], "n": n}),
            _ => serde_json::json!("text"),
        },
    };
    let kept = |mut entry: JournalEntry| {
        entry.at = Timestamp::from_microsecond(entry.at.as_microsecond()).unwrap();
        entry
    };
    store.journal(&[]).await.unwrap();
    assert_eq!(store.timeline("a", 10).await.unwrap(), []);
    store
        .journal(&(0..20).map(|n| entry("a", n)).collect::<Vec<_>>())
        .await
        .unwrap();
    for n in 20..30 {
        store
            .journal(&[entry("b", n), entry("a", n)])
            .await
            .unwrap();
    }
    let expected = |node: &str, range: std::ops::Range<usize>| -> Vec<_> {
        range.map(|n| kept(entry(node, n))).collect()
    };
    assert_eq!(
        store.timeline("a", 100).await.unwrap(),
        expected("a", 0..30)
    );
    assert_eq!(store.timeline("a", 3).await.unwrap(), expected("a", 27..30));
    assert_eq!(
        store.timeline("b", 100).await.unwrap(),
        expected("b", 20..30)
    );
    assert_eq!(store.timeline("a", 0).await.unwrap(), []);
    assert_eq!(store.timeline("c", 10).await.unwrap(), []);
    store.close().await;
}
