use contract::HealthEvent;

use super::*;

const LIMITS: OutboxLimits = OutboxLimits {
    bytes: MIN_BYTES,
    events: MAX_EVENTS,
};

fn event(name: &str) -> NewEvent {
    let received_at: Timestamp = "2026-01-01T00:00:00.000001Z".parse().unwrap();
    let mut event = HealthEvent {
        agent: "a".into(),
        message: name.into(),
        ..HealthEvent::default()
    };
    model::event::normalise(&mut event, received_at);
    NewEvent { event, received_at }
}

#[test]
fn a_newer_form_and_a_second_owner_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Metrics::default();
    let outbox = Outbox::open(dir.path(), LIMITS, &metrics).unwrap();
    let error = Outbox::open(dir.path(), LIMITS, &metrics).unwrap_err();
    assert!(error.to_string().contains("in use by process"), "{error}");
    drop(outbox);
    let magic = *b"GPWOUTB\x02";
    let checksum = crc32fast::hash(&magic).to_le_bytes();
    let file = dir.path().join("outbox/00000000000000000001.events");
    std::fs::write(file, [&magic[..], &checksum[..]].concat()).unwrap();
    let error = Log::open(&dir.path().join("outbox"), LIMITS).unwrap_err();
    assert!(
        matches!(error, OutboxOpenError::Newer { found: 2, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn many_callers_share_a_synchronisation_and_find_their_events_announced() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Metrics::default();
    let outbox = Outbox::open(dir.path(), LIMITS, &metrics).unwrap();
    let calls = (0..500).map(|index| {
        let outbox = outbox.clone();
        tokio::spawn(async move {
            let answers = outbox
                .append(vec![event(&index.to_string())])
                .await
                .unwrap();
            let status = *outbox.status().borrow();
            assert!(status.newest >= answers[0].seq.number());
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    assert_eq!(outbox.status().borrow().events, 500);
    assert!(
        metrics
            .encode()
            .contains("gpuwarden_outbox_waiting_events 500")
    );
    outbox.delivered(499).await.unwrap();
    assert_eq!(outbox.waiting(0, 10, 1 << 20).await.unwrap().len(), 1);
    outbox.close().await;
    let closed = outbox.append(vec![event("late")]).await.unwrap_err();
    assert!(matches!(closed, OutboxError::Closed));
    // The directory is free as soon as the outbox is closed.
    let outbox = Outbox::open(dir.path(), LIMITS, &metrics).unwrap();
    assert_eq!(outbox.status().borrow().events, 1);
}

#[tokio::test]
async fn a_connector_says_that_it_is_full_and_takes_events_again_when_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let limits = OutboxLimits {
        events: 1,
        ..LIMITS
    };
    let metrics = Metrics::default();
    let outbox = Outbox::open(dir.path(), limits, &metrics).unwrap();
    let own = crate::AcceptNodes::Own("n1".into());
    let connector = crate::Connector::new(outbox.clone(), own, &metrics, Timestamp::now);
    let accept = |name: &str| {
        let batch = contract::HealthEvents {
            version: 1,
            events: vec![HealthEvent {
                component_class: "GPU".into(),
                check_name: "c".into(),
                node_name: "n1".into(),
                generated_timestamp: Some(prost_types::Timestamp::default()),
                id: String::new(),
                ..event(name).event
            }],
        };
        let connector = connector.clone();
        async move { connector.accept(batch, &crate::Caller::Monitor).await }
    };
    accept("one").await.unwrap();
    let error = accept("two").await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let status = crate::server::status(&error);
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
    assert!(!accept("one").await.unwrap()[0].new);
    outbox.delivered(1).await.unwrap();
    accept("two").await.unwrap();
    outbox.close().await;
    let error = accept("three").await.unwrap_err();
    assert_eq!(
        crate::server::status(&error).code(),
        tonic::Code::Unavailable
    );
}

#[tokio::test]
async fn damage_to_the_file_of_refused_events_costs_what_it_lies_on() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Metrics::default();
    let file = dir.path().join("outbox/refused.jsonl");
    std::fs::create_dir(dir.path().join("outbox")).unwrap();
    // A whole line, a line that is not text, and one that was cut short.
    std::fs::write(&file, b"{\"reason\":\"x\"}\n\xff\x00\n\n{\"reas").unwrap();
    let outbox = Outbox::open(dir.path(), LIMITS, &metrics).unwrap();
    assert_eq!(outbox.status().borrow().aside, 3);
    let aside = vec![(event("one"), "why".to_owned())];
    outbox.put_aside(aside.clone()).await.unwrap();
    assert_eq!(outbox.status().borrow().aside, 4);
    let bytes = std::fs::read(&file).unwrap();
    let last = bytes.split(|byte| *byte == b'\n').rev().nth(1).unwrap();
    let last: serde_json::Value = serde_json::from_slice(last).unwrap();
    assert_eq!(last["reason"], "why");
    assert_eq!(last["event"]["message"], "one");
    // A full file is renamed, and the one before it is dropped, so that the size stays bounded.
    std::fs::write(&file, vec![b'x'; 1 << 20]).unwrap();
    outbox.put_aside(aside).await.unwrap();
    assert_eq!(outbox.status().borrow().aside, 2);
    let old = dir.path().join("outbox/refused.old.jsonl");
    assert_eq!(std::fs::metadata(old).unwrap().len(), 1 << 20);
    outbox.close().await;
    std::fs::remove_file(&file).unwrap();
    let outbox = Outbox::open(dir.path(), LIMITS, &metrics).unwrap();
    assert_eq!(outbox.status().borrow().aside, 1);
}
