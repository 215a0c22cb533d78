//! Tests of the restrictions on users of the machine.

use contract::keys;

use super::*;
use crate::server::status;

/// Any user can predict the position of the next line of the kernel log, which becomes the id
/// of its event.
#[tokio::test]
async fn no_user_can_have_a_line_pass_for_a_retry_before_it_is_there() {
    let served = Served::new();
    let connector = served.connector();
    let line = || {
        let mut line = event("0");
        line.agent = keys::SYSLOG_AGENT.to_owned();
        let place = (keys::META_LOG_PLACE.to_owned(), "1:2:3:400".to_owned());
        line.metadata.extend([place]);
        line
    };
    let mut forged = line();
    for (key, value) in [
        (keys::META_EARLIER_IN_BOOT, "true"),
        (keys::META_ACCEPTED_AT, "2020-01-01T00:00:00Z"),
        (keys::META_TAKEN_OVER, "9999-01-01T00:00:00Z"),
        (keys::META_REPORTED_BY, "monitor"),
        ("theirs", "x"),
    ] {
        forged.metadata.insert(key.to_owned(), value.to_owned());
    }
    let user = |pid| {
        Caller::Local(runtime::unix_grpc::UnixPeer {
            uid: 65534,
            gid: 65534,
            pid: Some(pid),
            is_operator: false,
        })
    };
    let before = Timestamp::now();
    for pid in [7, 8] {
        let sent = batch(vec![forged.clone()]);
        let answer = connector.accept(sent, &user(pid)).await.unwrap();
        assert_eq!(answer[0].new, pid == 7, "another pid makes no other event");
    }
    let answer = connector
        .accept(batch(vec![line()]), &Caller::Monitor)
        .await;
    assert!(answer.unwrap()[0].new);
    let query = EventQuery::default();
    let stored = served.store.events(query).await.unwrap();
    let [real, forged] = stored.as_slice() else {
        panic!("{stored:?}");
    };
    assert!(forged.created_at >= before - jiff::SignedDuration::from_millis(1));
    let metadata: Vec<(&str, &str)> = (forged.event.metadata.iter())
        .filter(|(key, _)| *key != keys::META_FUTURE_TIME)
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let reporter = (keys::META_REPORTED_BY, "user uid=65534 pid=7");
    assert_eq!(metadata, [reporter, ("theirs", "x")]);
    assert_eq!(real.event.metadata[keys::META_REPORTED_BY], "monitor");
    let metrics = served.metrics.encode();
    assert!(
        metrics.contains("gpuwarden_event_metadata_taken_off_total 6"),
        "{metrics}"
    );
}

#[tokio::test]
async fn users_who_report_too_fast_are_asked_to_wait_and_monitors_are_not() {
    let served = Served::new();
    let connector = served.connector();
    let user = Caller::Local(runtime::unix_grpc::UnixPeer {
        uid: 1000,
        gid: 1000,
        pid: None,
        is_operator: false,
    });
    let many = || batch(vec![event("0"); MAX_EVENTS]);
    connector.accept(many(), &user).await.unwrap();
    let refused = connector.accept(many(), &user).await.unwrap_err();
    assert!(refused.is_retryable() && !refused.blames_events());
    assert_eq!(status(&refused).code(), Code::ResourceExhausted);
    connector.accept(many(), &Caller::Monitor).await.unwrap();
    let metrics = served.metrics.encode();
    let counted = "gpuwarden_events_refused_total{reason=\"too_fast\"} 10000";
    assert!(metrics.contains(counted), "{metrics}");
}

#[tokio::test]
async fn a_user_s_recovery_is_not_told_to_the_monitors() {
    let served = Served::new();
    let connector = served.connector();
    let mut recoveries = connector.recoveries();
    let healthy = |agent: &str| {
        let mut healthy = event("0");
        (healthy.is_healthy, healthy.agent) = (true, agent.to_owned());
        batch(vec![healthy])
    };
    let peer = |is_operator| {
        Caller::Local(runtime::unix_grpc::UnixPeer {
            uid: 0,
            gid: 0,
            pid: None,
            is_operator,
        })
    };
    connector.accept(healthy("a"), &peer(false)).await.unwrap();
    connector.accept(healthy("b"), &peer(true)).await.unwrap();
    assert_eq!(recoveries.recv().await.unwrap().event.agent, "b");
}
