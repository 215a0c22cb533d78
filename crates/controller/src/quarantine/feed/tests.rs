use std::sync::Arc;
use std::time::Duration;

use analysis::RulesText;
use model::mode::Mode;
use runtime::metrics::Metrics;
use tokio::sync::watch;
use tokio::time::Instant;

use super::FEED_PAGE;
use crate::quarantine::tests::offline::{config, damage, fault, open, quarantine};
use crate::quarantine::{Quarantine, QuarantineConfig};

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
    quarantine.catch_up().await;
    let codes: Vec<_> = (quarantine.fleet.book().faults("n1").iter())
        .map(|fault| fault.code.as_str())
        .collect();
    assert_eq!(codes, ["1", "3"]);
    assert!(quarantine.fleet.is_caught_up() && quarantine.checkpoints.trouble().is_none());
    store.close().await;
}

/// Text of rules that puts two nodes into one rack.
fn one_rack() -> RulesText {
    RulesText {
        source: "rules.toml".to_owned(),
        text: "[[topology.nodes]]\nnames = [\"n?\"]\nrack = \"r1\"\n".to_owned(),
    }
}

#[tokio::test]
async fn faults_of_nodes_that_the_rules_put_into_one_rack_are_one_incident() {
    // The rules are there before the events, or come after them, as from a ConfigMap.
    for late in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path());
        let events = vec![fault("n1", 1), fault("n2", 2)];
        store.append(events).await.unwrap();
        let text = if late {
            RulesText::default()
        } else {
            one_rack()
        };
        let (rules, receiver) = watch::channel(Arc::new(text));
        let config = QuarantineConfig {
            rules: Some(receiver),
            ..config(Mode::Observe, &store)
        };
        let (mut quarantine, _handles) = Quarantine::new(config, &Metrics::default());
        quarantine.set_places();
        quarantine.catch_up().await;
        let together = |quarantine: &Quarantine| {
            let book = quarantine.fleet.book();
            let id = &book.faults("n1")[0].incident;
            book.nodes_of_incident(id).count() == 2
        };
        assert_eq!(together(&quarantine), !late);
        rules.send_replace(Arc::new(one_rack()));
        quarantine.set_places();
        assert!(together(&quarantine));
        store.close().await;
    }
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
        assert_eq!(quarantine.read_page().await, more);
        quarantine.feed.count_backlog(&quarantine.fleet).await;
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
    quarantine.catch_up().await; // It comes back.
    let first = quarantine.feed.retry_at().unwrap();
    assert!(quarantine.next_wake().is_some_and(|wake| wake <= first));
    quarantine.catch_up().await;
    assert!(quarantine.feed.retry_at().unwrap() > first);
    quarantine.publish();
    let told = handles.view.borrow().troubles.concat();
    assert!(told.contains("cannot be read"), "{told}");

    damage(directory.path(), "ALTER TABLE away RENAME TO event");
    tokio::time::pause();
    tokio::time::advance(failed_for(&quarantine)).await;
    tokio::time::resume();
    quarantine.catch_up().await;
    assert_eq!(quarantine.fleet.book().faults("n1").len(), 1);
    quarantine.publish();
    assert!(handles.view.borrow().troubles.is_empty());
    store.close().await;
}

/// Returns the time until the feed is read again.
fn failed_for(quarantine: &Quarantine) -> Duration {
    let retry_at = quarantine.feed.retry_at().unwrap();
    retry_at.saturating_duration_since(Instant::now())
}
