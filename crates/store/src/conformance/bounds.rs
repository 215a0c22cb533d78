//! Tests of a store's limits, of closing and of reopening.

use std::collections::HashSet;
use std::sync::Arc;

use contract::HealthEvent;
use jiff::Timestamp;
use model::journal::{EntryKind, JournalEntry};
use model::status::eviction::{Eviction, EvictionStatus};
use model::status::{EventStatus, SessionChange, SessionEvent};
use tokio::task::JoinSet;

use super::{Store, all, event, joining, numbers, positions, read_feed, status, time};
use crate::{
    Appended, Checkpoint, MAX_APPEND, MAX_CHECKPOINT_BYTES, MAX_ENTRY_BYTES, MAX_JOURNAL,
    MAX_NAME_BYTES, MAX_PAGE, Position, Prune, StoreError,
};

/// An input over a limit is refused as a whole, and the error names the limit; an input at the
/// limit is accepted.
pub async fn refuses_what_is_over_a_limit(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let refused = |result: Result<(), StoreError>, says: &str| {
        let error = result.unwrap_err();
        assert!(
            !error.is_retryable() && error.to_string().contains(says),
            "{says}: {error}"
        );
    };
    let many = |count: usize| {
        (0..)
            .map(|n| event("n1", n))
            .take(count)
            .collect::<Vec<_>>()
    };
    let with = |change: fn(&mut HealthEvent)| {
        let mut bad = event("n1", 1);
        change(&mut bad.event);
        vec![event("n1", 0), bad]
    };
    let none = |result: Result<Vec<Appended>, StoreError>| result.map(|_| ());
    refused(
        none(store.append(many(MAX_APPEND + 1)).await),
        "at most 10000",
    );
    refused(
        none(store.append(with(|event| event.id.clear())).await),
        "event 1: id",
    );
    let no_time = with(|event| event.generated_timestamp.as_mut().unwrap().nanos = -1);
    refused(
        none(store.append(no_time).await),
        "event 1: generatedTimestamp",
    );

    let entry = |node: &str, bytes: usize| JournalEntry {
        at: time(0),
        node: node.to_owned(),
        session: None,
        kind: EntryKind::Call,
        text: "x".repeat(bytes),
        detail: serde_json::Value::Null,
    };
    refused(
        store.journal(&vec![entry("n1", 1); MAX_JOURNAL + 1]).await,
        "at most 10000",
    );
    refused(
        store.journal(&[entry("n1", 1), entry("", 1)]).await,
        "journal entry 1: node",
    );
    let two = vec![entry("n1", 1), entry("n1", MAX_ENTRY_BYTES + 1)];
    refused(store.journal(&two).await, "shorten its detail");

    let save = async |consumer: &str, bytes| {
        store
            .save_checkpoint(
                consumer,
                Checkpoint {
                    token: 1.into(),
                    state: vec![0; bytes],
                    ..Checkpoint::default()
                },
            )
            .await
    };
    refused(save("", 0).await, "consumer is empty");
    refused(
        save(&"x".repeat(MAX_NAME_BYTES + 1), 0).await,
        "consumer has 254 bytes",
    );
    refused(
        save("c", MAX_CHECKPOINT_BYTES + 1).await,
        &format!("at most {MAX_CHECKPOINT_BYTES}"),
    );
    assert!(read_feed(&*store, 10).await.is_empty());
    assert!(store.timeline("n1", 10).await.unwrap().is_empty());
    assert_eq!(
        store.append(many(MAX_APPEND)).await.unwrap().len(),
        MAX_APPEND
    );
    store.append(vec![event("n2", 0)]).await.unwrap();
    assert_eq!(
        store.feed(Position::START, usize::MAX).await.unwrap().len(),
        MAX_PAGE
    );
    store
        .journal(&[entry("n1", MAX_ENTRY_BYTES)])
        .await
        .unwrap();
    store.close().await;
}

/// All acknowledged data is there after reopening, and positions continue.
pub async fn keeps_all_when_reopened(open: impl AsyncFn() -> Store) {
    let entry = JournalEntry {
        at: time(0),
        node: "n1".to_owned(),
        session: None,
        kind: EntryKind::Decision,
        text: "cordon".to_owned(),
        detail: serde_json::json!({"cordon": true}),
    };
    let checkpoint = Checkpoint {
        token: 3.into(),
        state: b"book".to_vec(),
        parts: [("n1".to_owned(), b"share".to_vec())].into(),
    };
    let joined = |id: &str| SessionEvent {
        eviction: Some(Eviction::new(EvictionStatus::Succeeded, "all have left")),
        ..joining(id, "s", 7)
    };
    let mut records = Vec::new();
    let mut newest = Position::START;
    for round in 0..3 {
        let store = open().await;
        assert_eq!(*store.latest().borrow(), newest);
        assert_eq!(read_feed(&*store, 100).await, records);
        let batch = (0..4).map(|n| event("n1", round * 4 + n)).collect();
        let answers = store.append(batch).await.unwrap();
        assert!(answers[0].seq > newest);
        newest = answers[3].seq;
        if round == 0 {
            store
                .save_checkpoint("book", checkpoint.clone())
                .await
                .unwrap();
            store.journal(std::slice::from_ref(&entry)).await.unwrap();
            let joined = joined(&answers[2].id);
            store.join_session(joined).await.unwrap();
        }
        records = read_feed(&*store, 100).await;
        store.close().await;
    }
    let store = open().await;
    assert_eq!(store.checkpoint("book").await.unwrap(), Some(checkpoint));
    assert_eq!(store.timeline("n1", 10).await.unwrap(), [entry]);
    let mut expected = EventStatus::default();
    expected.join(joined(&records[2].id));
    assert_eq!(status(&*store, &records[2].id).await, Some(expected));
    store.close().await;
}

/// Calls made before `close` are answered; later ones return that the store is closed.
pub async fn answers_closed_after_close(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let mut tasks = JoinSet::new();
    for n in 0..32 {
        let store = Arc::clone(&store);
        tasks.spawn(async move { (n, store.append(vec![event("n1", n)]).await) });
    }
    tokio::join!(store.close(), store.close());
    let mut acknowledged = HashSet::new();
    for (n, answer) in tasks.join_all().await {
        match answer {
            Ok(_) => assert!(acknowledged.insert(event("n1", n).event.id)),
            Err(error) => assert!(matches!(error, StoreError::Closed), "{error}"),
        }
    }
    store.close().await;

    let closed = |result: Result<(), StoreError>| {
        assert!(matches!(result, Err(StoreError::Closed)), "{result:?}");
    };
    let checkpoint = Checkpoint {
        token: 1.into(),
        ..Checkpoint::default()
    };
    closed(store.append(vec![event("n1", 99)]).await.map(|_| ()));
    closed(store.feed(Position::START, 1).await.map(|_| ()));
    closed(store.events(all()).await.map(|_| ()));
    closed(store.event("id").await.map(|_| ()));
    closed(store.checkpoint("c").await.map(|_| ()));
    closed(store.save_checkpoint("c", checkpoint).await);
    closed(store.timeline("n1", 1).await.map(|_| ()));
    closed(store.join_session(joining("id", "s", 0)).await);
    let change = SessionChange::Cancelled;
    closed(store.change_session("n1", "s", change).await);
    closed(store.statuses(vec!["id".into()]).await.map(|_| ()));
    closed(store.stats().await.map(|_| ()));

    let store = open().await;
    let kept: HashSet<_> = read_feed(&*store, 100)
        .await
        .into_iter()
        .map(|r| r.id)
        .collect();
    assert_eq!(kept, acknowledged);
    store.close().await;
}

/// Retention deletes old events, but none that a consumer still needs, and the feed continues
/// behind them.
pub async fn deletes_what_is_old_and_finished(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let appended = store
        .append((0..10).map(|n| event("n1", n)).collect())
        .await
        .unwrap();
    let at = positions(&appended);
    let entry = |n| JournalEntry {
        at: time(n),
        node: "n1".to_owned(),
        session: None,
        kind: EntryKind::Call,
        text: n.to_string(),
        detail: serde_json::Value::Null,
    };
    store
        .journal(&(0..10).map(entry).collect::<Vec<_>>())
        .await
        .unwrap();
    let prune = Prune {
        before: time(8),
        passes_before: Timestamp::UNIX_EPOCH,
        max_bytes: u64::MAX,
        finished: at[6],
        gone_before: Timestamp::UNIX_EPOCH,
        keep: vec![appended[2].id.clone()],
    };
    let token = |number: usize| Checkpoint {
        token: at[number - 1],
        ..Checkpoint::default()
    };
    store.save_checkpoint("slow", token(5)).await.unwrap();
    let pruned = store.prune(prune.clone()).await.unwrap();
    assert_eq!(
        (pruned.events, pruned.entries),
        (4, 8),
        "up to the slowest, but one"
    );
    assert!(!pruned.more && pruned.over == 0);
    let left = || async { numbers(&read_feed(&*store, 100).await, &at) };
    assert_eq!(left().await, [3, 6, 7, 8, 9, 10]);
    assert!(store.event(&appended[2].id).await.unwrap().is_some());

    store.save_checkpoint("slow", token(10)).await.unwrap();
    store.prune(prune.clone()).await.unwrap();
    assert_eq!(
        left().await,
        [3, 8, 9, 10],
        "up to what the caller is done with"
    );
    let all = Prune {
        before: time(1_000),
        finished: Position::END,
        keep: Vec::new(),
        ..prune
    };
    store.prune(all).await.unwrap();
    assert_eq!(left().await, [10], "the newest stays");
    assert_eq!(store.timeline("n1", 100).await.unwrap(), []);
    store.close().await;
    let store = open().await;
    assert_eq!(*store.latest().borrow(), at[9]);
    let next = store.append(vec![event("n1", 77)]).await.unwrap();
    assert!(next[0].seq > at[9], "no position is given out twice");
    store.close().await;
}

/// A consumer that has not saved its checkpoint for long holds nothing back, and is reported.
pub async fn keeps_nothing_for_a_consumer_that_is_gone(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let events = (0..10).map(|n| event("n1", n)).collect();
    let at = positions(&store.append(events).await.unwrap());
    let save = async |consumer: &str, number: usize| {
        let checkpoint = Checkpoint {
            token: at[number - 1],
            ..Checkpoint::default()
        };
        store.save_checkpoint(consumer, checkpoint).await.unwrap();
    };
    save("renamed", 2).await;
    save("idle", 5).await;
    // Checkpoint times have microsecond precision, so wait for the next microsecond.
    let first = Timestamp::now().as_microsecond();
    while Timestamp::now().as_microsecond() == first {}
    let mut prune = Prune {
        before: time(1_000),
        passes_before: Timestamp::UNIX_EPOCH,
        max_bytes: u64::MAX,
        finished: Position::END,
        gone_before: Timestamp::UNIX_EPOCH,
        keep: Vec::new(),
    };
    let pruned = store.prune(prune.clone()).await.unwrap();
    assert_eq!((pruned.events, pruned.gone_consumers), (2, Vec::new()));
    prune.gone_before = Timestamp::now();
    // A consumer without progress saves the same token again, and so is not gone.
    save("idle", 5).await;
    let pruned = store.prune(prune.clone()).await.unwrap();
    assert_eq!(
        (pruned.events, pruned.gone_consumers),
        (3, vec!["renamed".to_owned()])
    );
    // A consumer that saves again counts again.
    save("renamed", 2).await;
    save("idle", 9).await;
    let pruned = store.prune(prune).await.unwrap();
    assert_eq!((pruned.events, pruned.gone_consumers), (0, Vec::new()));
    store.close().await;
}

/// Passes of preflight checks are deleted sooner, unless a fault that they may have closed is
/// stored.
pub async fn deletes_passes_that_closed_nothing(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let report = |agent: &str, check: &str, node: &str, is_healthy: bool, n: i64| {
        let mut new = event(node, n);
        agent.clone_into(&mut new.event.agent);
        check.clone_into(&mut new.event.check_name);
        (new.event.is_healthy, new.event.is_fatal) = (is_healthy, !is_healthy);
        new
    };
    let (diag, all_reduce) = ("preflight-dcgm-diag", "preflight-nccl-allreduce");
    let appended = store
        .append(vec![
            report(diag, "Memory", "n1", true, 0),
            report(diag, "Pcie", "n1", true, 1),
            // The fault that a pass closes may be stored before it or, if reported late, behind
            // it.
            report(diag, "Pcie", "n1", false, 2),
            report(diag, "Pcie", "n1", true, 3),
            // Another node, another agent, another monitor.
            report(diag, "Pcie", "n2", true, 4),
            report(all_reduce, "Pcie", "n1", true, 5),
            report("syslog-health-monitor", "Xid", "n1", true, 6),
            report(diag, "Memory", "n1", true, 7),
            report(diag, "Memory", "n1", true, 8),
            report(diag, "Memory", "n1", true, 9),
        ])
        .await
        .unwrap();
    let at = positions(&appended);
    let prune = Prune {
        before: time(0),
        passes_before: time(8),
        max_bytes: u64::MAX,
        finished: at[8],
        gone_before: Timestamp::UNIX_EPOCH,
        keep: Vec::new(),
    };
    let pruned = store.prune(prune.clone()).await.unwrap();
    assert_eq!(pruned.events, 4);
    let left = || async { numbers(&read_feed(&*store, 100).await, &at) };
    assert_eq!(left().await, [2, 3, 4, 7, 9, 10]);
    // A consumer that has not read the events keeps them.
    let finished = Prune {
        passes_before: time(1_000),
        finished: at[7],
        ..prune
    };
    assert_eq!(store.prune(finished).await.unwrap().events, 0);
    store.close().await;
}

/// The oldest events go first if the store is too large, whatever their age. The size of data
/// that must stay is reported in `over`.
pub async fn deletes_the_oldest_where_there_is_too_much(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let mut newest = Position::START;
    for from in 0..5 {
        let events = (0..1_000).map(|n| event("n1", from * 1_000 + n)).collect();
        newest = store.append(events).await.unwrap()[999].seq;
    }
    // Reopened, so that the size is that of the events, without a log beside them.
    store.close().await;
    let store = open().await;
    let whole = store.stats().await.unwrap().bytes;
    let mut prune = Prune {
        before: time(0),
        passes_before: Timestamp::UNIX_EPOCH,
        max_bytes: whole / 2,
        finished: Position::END,
        gone_before: Timestamp::UNIX_EPOCH,
        keep: Vec::new(),
    };
    while store.prune(prune.clone()).await.unwrap().more {}
    let records = read_feed(&*store, 1_000).await;
    assert!(
        (500..4_500).contains(&records.len()) && records.last().unwrap().seq == newest,
        "{} left",
        records.len()
    );
    prune.max_bytes = 0;
    prune.keep = records.iter().map(|record| record.id.clone()).collect();
    let pruned = store.prune(prune).await.unwrap();
    assert!(
        pruned.events == 0 && pruned.over > 0 && !pruned.more,
        "{pruned:?}"
    );
    store.close().await;
}
