//! Tests of the statuses of events, and of the changes of their sessions.

use jiff::SignedDuration;
use model::attempt::RemediationProgress;
use model::status::eviction::{Eviction, EvictionStatus};
use model::status::{
    ConclusionNote, EventStatus, MAX_NOTES, NodeQuarantined, SessionChange, SessionEvent,
};

use super::{Store, event, joining, status, time};

/// A status is empty at first. An event keeps the status that it has in a session, until that is
/// cancelled or the event joins a later session.
pub async fn joins_an_event_to_its_session(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let both = vec![event("n1", 1), event("n1", 2)];
    let answers = store.append(both).await.unwrap();
    let (id, other) = (&answers[0].id, &answers[1].id);
    let join = async |event: SessionEvent| store.join_session(event).await.unwrap();
    assert_eq!(status(&*store, id).await, Some(EventStatus::default()));
    let first = SessionEvent {
        status: NodeQuarantined::Quarantined,
        at: time(3) + SignedDuration::from_micros(6),
        eviction: Some(Eviction::new(EvictionStatus::AlreadyDrained, "a reason")),
        ..joining(id, id, 0)
    };
    join(joining("no such id", id, 3)).await;
    join(first.clone()).await;
    join(joining(id, id, 5)).await;
    join(joining(id, "earlier", 2)).await;
    let expected = EventStatus {
        session: Some(id.clone()),
        node_quarantined: Some(NodeQuarantined::Quarantined),
        quarantine_finished_at: Some(first.at),
        pods_eviction: first.eviction.clone(),
        drain_finished_at: Some(first.at),
        ..EventStatus::default()
    };
    let ids = ["no such id", id, other].map(str::to_owned);
    let found = store.statuses(ids.to_vec()).await.unwrap();
    let expected = [None, Some(expected), Some(EventStatus::default())];
    assert_eq!(found, expected);

    let cancelled = SessionChange::Cancelled;
    store.change_session("n1", id, cancelled).await.unwrap();
    let now = async || status(&*store, id).await.unwrap();
    join(first).await;
    let kept = now().await;
    assert_eq!(kept.node_quarantined, Some(NodeQuarantined::Cancelled));
    join(joining(id, "later", 4)).await;
    let again = EventStatus {
        session: Some("later".to_owned()),
        node_quarantined: Some(NodeQuarantined::AlreadyQuarantined),
        quarantine_finished_at: Some(time(4)),
        ..kept
    };
    assert_eq!(now().await, again);
    join(joining(id, "last", 6)).await;
    let again = EventStatus {
        session: Some("last".to_owned()),
        quarantine_finished_at: Some(time(6)),
        ..again
    };
    // An event that is sent again keeps its status, and the feed does not move.
    store.append(vec![event("n1", 1)]).await.unwrap();
    assert_eq!(now().await, again);
    assert_eq!(*store.latest().borrow(), answers[1].seq);
    store.close().await;
}

/// A conclusion is noted once with each event that it rests on, in a bounded number.
pub async fn notes_conclusions_with_their_events(open: impl AsyncFn() -> Store) {
    let store = open().await;
    let both = vec![event("n1", 1), event("n1", 2)];
    let answers = store.append(both).await.unwrap();
    let note = |n: usize| ConclusionNote {
        rule: "Rule".to_owned(),
        conclusion: n.to_string(),
    };
    let all = ["no such id", &answers[0].id, &answers[1].id].map(str::to_owned);
    for n in [0, 1, 0] {
        store.note_conclusion(all.to_vec(), note(n)).await.unwrap();
    }
    let of = async |id: &str| status(&*store, id).await.unwrap().analysis;
    for answer in &answers {
        assert_eq!(of(&answer.id).await, [note(0), note(1)]);
    }
    for n in 2..MAX_NOTES + 3 {
        store
            .note_conclusion(vec![all[1].clone()], note(n))
            .await
            .unwrap();
    }
    assert_eq!(of(&all[1]).await.len(), MAX_NOTES);
    assert_eq!(of(&all[2]).await.len(), 2);
    // The rest of the status stays.
    store.join_session(joining(&all[1], "s", 4)).await.unwrap();
    assert_eq!(of(&all[1]).await.len(), MAX_NOTES);
    store.close().await;
}

/// A change applies to the open events of the session on the node, and of no other.
pub async fn changes_all_events_of_a_session(open: impl AsyncFn() -> Store) {
    use NodeQuarantined::{AlreadyQuarantined, Cancelled, UnQuarantined};
    let store = open().await;
    let mut events: Vec<_> = (0..5).map(|n| event("n1", n)).collect();
    events.push(event("n2", 0));
    let answers = store.append(events).await.unwrap();
    let ids: Vec<String> = answers.into_iter().map(|answer| answer.id).collect();
    let recovery = SessionEvent {
        status: NodeQuarantined::UnQuarantined,
        ..joining(&ids[3], "s", 9)
    };
    let mut joins = [0, 1, 2, 5].map(|n| joining(&ids[n], "s", 9)).to_vec();
    joins.extend([recovery, joining(&ids[4], "another", 9)]);
    for event in joins {
        store.join_session(event).await.unwrap();
    }
    let drain = SessionChange::Drain(Eviction::new(EvictionStatus::Succeeded, "why"), time(10));
    store.change_session("n1", "s", drain).await.unwrap();
    let repair = RemediationProgress {
        remediated: Some(true),
        attempted_at: Some(time(11)),
        up_to: time(1), // The time of the second event.
    };
    let repair = SessionChange::Remediation(repair);
    store.change_session("n1", "s", repair).await.unwrap();
    let cancelled = SessionChange::Cancelled;
    store.change_session("n1", "s", cancelled).await.unwrap();
    let found = store.statuses(ids).await.unwrap().into_iter();
    let summary = |status: EventStatus| {
        let finished = status.drain_finished_at == Some(time(10));
        let word = status.node_quarantined.unwrap();
        (word, finished, status.fault_remediated.is_some())
    };
    let found: Vec<_> = found.map(|status| summary(status.unwrap())).collect();
    let expected = [
        (Cancelled, true, true),
        (Cancelled, true, true),
        (Cancelled, true, false),
        (UnQuarantined, false, false),
        (AlreadyQuarantined, false, false),
        (AlreadyQuarantined, false, false), // The other node's.
    ];
    assert_eq!(found, expected);
    store.close().await;
}

/// Any series of joins and changes leads to the statuses that the rules of [`EventStatus`] give.
pub async fn keeps_statuses_by_their_rules(open: impl AsyncFn() -> Store) {
    use EvictionStatus::{AlreadyDrained, Cancelled, Failed, InProgress, NotStarted, Succeeded};
    const EVICTIONS: [EvictionStatus; 6] = [
        NotStarted,
        InProgress,
        Failed,
        Succeeded,
        AlreadyDrained,
        Cancelled,
    ];
    const SECONDS: [i64; 5] = [0, 1, 2, 3, 9];
    const STATUSES: [NodeQuarantined; 4] = [
        NodeQuarantined::Quarantined,
        NodeQuarantined::AlreadyQuarantined,
        NodeQuarantined::UnQuarantined,
        NodeQuarantined::Cancelled,
    ];
    let store = open().await;
    let mut expected = vec![EventStatus::default(); 5];
    let mut random = 1_u32;
    let mut below = |bound: usize| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 16) as usize % bound
    };
    for round in 0..60 {
        let events = (0..5).map(|n| event("n1", 10 * round + n)).collect();
        let answers = store.append(events).await.unwrap();
        expected.fill(EventStatus::default());
        // No session of an earlier round.
        let sessions = ["a", "b"].map(|session| format!("{session}{round}"));
        for step in 0..12 {
            let at = time(10 * round + SECONDS[below(5)]);
            let session = &sessions[below(2)];
            let eviction = Eviction::new(EVICTIONS[below(6)], format!("step {step}"));
            if below(2) == 0 {
                let n = below(5);
                let joining = SessionEvent {
                    status: STATUSES[below(4)],
                    at,
                    eviction: (below(3) > 0).then_some(eviction),
                    ..joining(&answers[n].id, session, 0)
                };
                expected[n].join(joining.clone());
                store.join_session(joining).await.unwrap();
                continue;
            }
            let change = match below(4) {
                0 => SessionChange::Cancelled,
                1 => SessionChange::Remediation(RemediationProgress {
                    remediated: [None, Some(false), Some(true)][below(3)],
                    attempted_at: (below(2) == 0).then_some(at),
                    up_to: at,
                }),
                _ => SessionChange::Drain(eviction, at),
            };
            for (n, status) in (0..).zip(&mut expected) {
                if status.session.as_ref() == Some(session) {
                    status.change(&change, time(10 * round + n));
                }
            }
            store.change_session("n1", session, change).await.unwrap();
        }
        let ids = answers.into_iter().map(|answer| answer.id).collect();
        let found = store.statuses(ids).await.unwrap();
        let found: Vec<EventStatus> = found.into_iter().flatten().collect();
        assert_eq!(found, expected, "round {round}");
    }
    store.close().await;
}
