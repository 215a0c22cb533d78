use std::time::Duration;

use connector::AcceptNodes;
use contract::{Entity, HealthEvent, json, keys};
use runtime::metrics::Metrics;
use store::sqlite::SqliteStore;
use store::{EventLog as _, Upkeep as _};
use tokio::task::JoinHandle;

use super::*;

const RULE: &str = "RepeatedXID31OnSameGPU";

/// A store, and the analysis of its events.
struct Bench {
    store: Arc<SqliteStore>,
    connector: Connector,
    metrics: Metrics,
    cancel: CancellationToken,
    _directory: tempfile::TempDir,
    rules: watch::Sender<Arc<Vec<Rule>>>,
    analysed: watch::Sender<Position>,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(directory.path()).unwrap());
        let metrics = Metrics::default();
        let rules = analysis::built_in()
            .into_iter()
            .filter(|rule| rule.name == RULE);
        Self {
            connector: Connector::new(
                Arc::clone(&store) as Arc<dyn EventStore>,
                AcceptNodes::Any,
                &metrics,
                Timestamp::now,
            ),
            store,
            metrics,
            cancel: CancellationToken::new(),
            _directory: directory,
            rules: watch::Sender::new(Arc::new(rules.collect())),
            analysed: watch::Sender::default(),
        }
    }

    fn start(&mut self) -> JoinHandle<()> {
        self.cancel = CancellationToken::new();
        let config = AnalysisConfig {
            store: Arc::clone(&self.store) as Arc<dyn EventStore>,
            connector: self.connector.clone(),
            rules: self.rules.subscribe(),
            nodes: None,
            clock: Timestamp::now,
            analysed: self.analysed.clone(),
        };
        let analysis = Analysis::new(config, &Metrics::default());
        tokio::spawn(analysis.run(self.cancel.clone()))
    }

    async fn stop(&self, task: JoinHandle<()>) {
        self.cancel.cancel();
        task.await.unwrap();
    }

    async fn report(&self, event: HealthEvent) -> String {
        let events = vec![event];
        let batch = HealthEvents { version: 1, events };
        let stored = self.connector.accept(batch, &Caller::Monitor).await;
        stored.unwrap().remove(0).id
    }

    /// Waits until the conclusion was reported this often; returns whether it is healthy each time,
    /// in the order of the reports.
    async fn said(&self, count: usize) -> Vec<bool> {
        for _ in 0..600 {
            let found = self.store.events(EventQuery::default()).await.unwrap();
            let mut said: Vec<bool> = (found.iter())
                .filter(|one| one.event.check_name == RULE)
                .map(|one| one.event.is_healthy)
                .collect();
            if said.len() >= count {
                said.reverse();
                return said;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("{}", self.metrics.encode());
    }
}

/// Returns an XID 31 of some minutes ago.
fn xid(minutes: i64) -> HealthEvent {
    let at = Timestamp::now() - SignedDuration::from_mins(minutes);
    HealthEvent {
        version: 1,
        agent: keys::SYSLOG_AGENT.into(),
        component_class: "GPU".into(),
        check_name: keys::CHECK_XID.into(),
        error_code: vec!["31".into()],
        message: format!("{minutes} minutes ago"),
        entities_impacted: vec![Entity {
            entity_type: keys::ENTITY_GPU_UUID.into(),
            entity_value: "GPU-1".into(),
        }],
        generated_timestamp: Some(json::proto_timestamp(at)),
        node_name: "n1".into(),
        ..HealthEvent::default()
    }
}

#[tokio::test]
async fn how_far_it_has_read_is_said_once_what_follows_is_stored() {
    let mut bench = Bench::new();
    let mut analysed = bench.analysed.subscribe();
    let task = bench.start();
    bench.report(xid(20)).await;
    let id = bench.report(xid(5)).await;
    let stored = || bench.store.events(EventQuery::default());
    let events = stored().await.unwrap();
    let last = events.iter().find(|one| one.id == id).unwrap().seq;
    analysed.wait_for(|upto| *upto >= last).await.unwrap();
    let events = stored().await.unwrap();
    assert!(events.iter().any(|one| one.event.check_name == RULE));
    bench.stop(task).await;
    bench.store.close().await;
}

#[tokio::test]
async fn an_event_that_comes_late_is_put_in_its_place() {
    let mut bench = Bench::new();
    let task = bench.start();
    for minutes in [20, 19, 5] {
        bench.report(xid(minutes)).await;
    }
    assert_eq!(bench.said(1).await, [false]);
    bench.stop(task).await;

    let mut bench = Bench::new();
    bench.report(xid(0)).await;
    let task = bench.start();
    // The analysis has read the first one by then.
    tokio::time::sleep(Duration::from_millis(300)).await;
    bench.report(xid(60)).await;
    assert_eq!(bench.said(1).await, [false]);
    bench.stop(task).await;
    bench.store.close().await;
}

#[tokio::test]
async fn a_conclusion_stays_without_its_evidence_and_is_withdrawn_where_that_disproves_it() {
    for disproved in [false, true] {
        let mut bench = Bench::new();
        let first = bench.report(xid(30)).await;
        let second = if disproved {
            // Both are one burst.
            bench.report(xid(29)).await
        } else {
            "of an event that was deleted".to_owned()
        };
        let mut conclusion = HealthEvent {
            agent: ANALYZER_AGENT.into(),
            check_name: RULE.into(),
            is_fatal: true,
            recommended_action: 26,
            ..xid(29)
        };
        conclusion.error_code.clear();
        conclusion.metadata = [
            (keys::META_CONCLUSION.to_owned(), "c".to_owned()),
            (keys::META_EVIDENCE.to_owned(), format!("{first},{second}")),
        ]
        .into();
        bench.report(conclusion).await;
        let task = bench.start();
        if disproved {
            assert_eq!(bench.said(2).await, [false, true]);
        } else {
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert_eq!(bench.said(1).await, [false]);
        }
        bench.stop(task).await;
        // A restart says nothing more.
        let task = bench.start();
        tokio::time::sleep(Duration::from_millis(300)).await;
        bench.stop(task).await;
        assert_eq!(bench.said(1).await.len(), 1 + usize::from(disproved));
        bench.store.close().await;
    }
}
