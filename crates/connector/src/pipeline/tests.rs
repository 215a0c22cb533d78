use std::sync::Condvar;
use std::time::Duration;

use crate::transform::load;
use contract::{Entity, HealthEvents, keys};
use serde_json::json;
use store::sqlite::SqliteStore;
use store::{EventLog as _, Upkeep as _};

use super::*;
use crate::{AcceptError, AcceptNodes, Caller, Connector, Sink, SinkError};

const DEDUP: &str = "suppressionWindow = '3m'\n";
const START: i64 = 1_700_000_000;

/// Store, cluster of one node, and metrics, shared by the connectors of a test.
struct Bench {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    zone: Arc<Mutex<String>>,
    metrics: Metrics,
}

/// Store with room for a given number of events.
struct Sparse {
    store: Arc<dyn EventStore>,
    room: Mutex<usize>,
    fail: Mutex<usize>,
}

#[async_trait::async_trait]
impl Sink for Arc<Sparse> {
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError> {
        let left = lock(&self.fail).checked_sub(1);
        if let Some(left) = left {
            *lock(&self.fail) = left;
            return Err(SinkError::Unavailable("the disk is full".into()));
        }
        let room = lock(&self.room).checked_sub(events.len());
        let Some(room) = room else {
            return Err(SinkError::Full {
                what: "as told".into(),
            });
        };
        *lock(&self.room) = room;
        Sink::append(&self.store, events).await
    }
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            store: Arc::new(SqliteStore::open(dir.path()).unwrap()),
            dir,
            zone: Arc::new(Mutex::new("z1".to_owned())),
            metrics: Metrics::default(),
        }
    }

    fn events(&self) -> Arc<dyn EventStore> {
        Arc::clone(&self.store) as Arc<dyn EventStore>
    }

    fn pipeline(&self, transformers: Vec<Transformer>) -> Pipeline {
        let zone = Arc::clone(&self.zone);
        let nodes: Arc<dyn NodeLookup> = Arc::new(move |name: &str| {
            let labels = json!({"zone": *lock(&zone)});
            let metadata = json!({"name": name, "labels": labels});
            let node = NodeView::from_object(json!({"metadata": metadata}))?;
            (name == "n1").then(|| Arc::new(node))
        });
        Pipeline::new(transformers, &nodes, &self.metrics)
    }

    fn connector(&self, transformers: Vec<Transformer>) -> Connector {
        self.over(self.events(), transformers)
    }

    fn over(&self, sink: impl Sink, transformers: Vec<Transformer>) -> Connector {
        Connector::new(sink, AcceptNodes::Any, &self.metrics, Timestamp::now)
            .with_pipeline(self.pipeline(transformers))
    }

    /// Returns the stored events, oldest first.
    async fn stored(&self) -> Vec<HealthEvent> {
        let records = self.store.feed(0.into(), 1_000).await.unwrap();
        records.into_iter().map(|record| record.event).collect()
    }

    async fn strategies(&self) -> Vec<i32> {
        let stored = self.stored().await;
        stored
            .iter()
            .map(|event| event.processing_strategy)
            .collect()
    }

    fn counted(&self, line: &str) {
        let text = self.metrics.encode();
        let found = text.lines().any(|counted| counted == line);
        assert!(found, "no {line:?} in\n{text}");
    }
}

fn augment() -> Transformer {
    Transformer::Augment(Labels(vec!["zone".into()]))
}

fn overrides(when: &str, change: &str) -> Transformer {
    let text = format!(
        "enabled = true\n[[rules]]\nname = 'r1'\nwhen = \"{when}\"\noverride = {{ {change} }}\n"
    );
    Transformer::Override(load::overrides(&text, "o").unwrap().0)
}

fn dedup() -> Transformer {
    Transformer::Deduplicate(load::dedup(DEDUP, "d").unwrap())
}

/// Returns the fault of a GPU, observed at a second.
fn fault(gpu: &str, second: i64) -> HealthEvent {
    HealthEvent {
        agent: "syslog-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "SysLogsXIDError".into(),
        node_name: "n1".into(),
        is_fatal: true,
        error_code: vec!["79".into(), "48".into()],
        entities_impacted: vec![Entity {
            entity_type: "PCI".into(),
            entity_value: gpu.into(),
        }],
        generated_timestamp: Some(prost_types::Timestamp {
            seconds: START + second,
            nanos: 0,
        }),
        ..HealthEvent::default()
    }
}

async fn send(connector: &Connector, events: &[HealthEvent]) -> Result<Vec<Appended>, AcceptError> {
    let batch = HealthEvents {
        version: 1,
        events: events.to_vec(),
    };
    connector.accept(batch, &Caller::Monitor).await
}

#[tokio::test]
async fn events_are_augmented_overridden_and_deduplicated_and_it_is_counted() {
    let bench = Bench::new();
    let when = "event.metadata['zone'] == 'z1'";
    let connector = bench.connector(vec![augment(), overrides(when, "isFatal = false"), dedup()]);
    let events = [fault("a", 0), fault("a", 1), fault("b", 2), fault("a", 3)];
    let answers = send(&connector, &events).await.unwrap();
    assert!(answers.iter().all(|answer| answer.new));
    let stored = bench.stored().await;
    assert!(
        stored
            .iter()
            .all(|event| !event.is_fatal && event.metadata["zone"] == "z1")
    );
    assert_eq!(bench.strategies().await, [1, 3, 1, 3]);
    assert_eq!(stored[3].metadata[keys::META_REPEAT_OF], stored[0].id);
    for line in [
        "platform_connector_health_events_received_total 4",
        "nvsentinel_overrides_applied_total{rule_name=\"r1\",field=\"isFatal\"} 4",
        "nvsentinel_override_evaluation_errors_total 0",
        "nvsentinel_platform_connector_dedup_store_and_analyse_total{check=\"SysLogsXIDError\",\
         node=\"n1\",err_code=\"48,79\"} 2",
        "platform_connector_workqueue_adds_total_databaseStore{workqueue=\"databaseStore\"} 1",
        "platform_connector_workqueue_depth_databaseStore{workqueue=\"databaseStore\"} 0",
        "platform_connector_workqueue_work_duration_seconds_databaseStore_count{workqueue=\"databaseStore\"} 1",
    ] {
        bench.counted(line);
    }
}

/// NVSentinel asks the API server for the node inside the call, behind one lock.
#[tokio::test]
async fn an_event_of_a_node_that_is_not_known_is_stored_as_it_is() {
    let bench = Bench::new();
    let connector = bench.connector(vec![augment()]);
    let unknown = HealthEvent {
        node_name: "n2".into(),
        ..fault("a", 0)
    };
    send(&connector, &[unknown, fault("a", 0)]).await.unwrap();
    let stored = bench.stored().await;
    assert!(!stored[0].metadata.contains_key("zone") && stored[1].metadata["zone"] == "z1");
    bench.counted("gpuwarden_events_unaugmented_total{reason=\"unknown_node\"} 1");
}

/// Each look-up ends only once the other has begun: behind one lock neither would end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_look_nodes_up_side_by_side() {
    let bench = Bench::new();
    let (inside, more) = (Mutex::new(0), Condvar::new());
    let nodes: Arc<dyn NodeLookup> = Arc::new(move |_: &str| {
        *lock(&inside) += 1;
        more.notify_all();
        let both = more.wait_timeout_while(lock(&inside), Duration::from_secs(20), |n| *n < 2);
        let (_inside, waited) = both.unwrap();
        assert!(!waited.timed_out(), "the other call was not let in");
        None
    });
    let pipeline = Pipeline::new(vec![augment()], &nodes, &bench.metrics);
    let connector = Connector::new(
        bench.events(),
        AcceptNodes::Any,
        &bench.metrics,
        Timestamp::now,
    );
    let connector = Arc::new(connector.with_pipeline(pipeline));
    let calls = ["a", "b"].map(|gpu| {
        let connector = Arc::clone(&connector);
        tokio::spawn(async move { send(&connector, &[fault(gpu, 0)]).await.unwrap() })
    });
    for call in calls {
        call.await.unwrap();
    }
    assert_eq!(bench.stored().await.len(), 2);
}

#[tokio::test]
async fn transformers_work_in_the_order_in_which_they_are_configured() {
    let when = "event.metadata['zone'] == 'z1'";
    for (augment_first, errors) in [(true, 0), (false, 1)] {
        let bench = Bench::new();
        let mut stages = vec![augment(), overrides(when, "isFatal = false")];
        if !augment_first {
            stages.reverse();
        }
        send(&bench.connector(stages), &[fault("a", 0)])
            .await
            .unwrap();
        assert_eq!(bench.stored().await[0].is_fatal, !augment_first);
        bench.counted(&format!(
            "nvsentinel_override_evaluation_errors_total {errors}"
        ));
    }
}

/// An event is identified by its sender's report, whatever the transformations made of the
/// event.
#[tokio::test]
async fn a_retry_is_the_same_event_although_the_node_has_changed() {
    let bench = Bench::new();
    let connector = bench.connector(vec![augment(), dedup()]);
    let timeless = HealthEvent {
        generated_timestamp: None,
        ..fault("b", 0)
    };
    let batch = [fault("a", 0), timeless];
    let first = send(&connector, &batch).await.unwrap();
    let again = send(&connector, &batch).await.unwrap();
    assert!(first.iter().all(|one| one.new) && again.iter().all(|one| !one.new));
    "z2".clone_into(&mut lock(&bench.zone));
    assert!(!send(&connector, &batch[..1]).await.unwrap()[0].new);
    assert_eq!(bench.strategies().await, [1, 1]);
    assert!(
        bench
            .stored()
            .await
            .iter()
            .all(|event| event.metadata["zone"] == "z1")
    );
}

#[tokio::test]
async fn a_batch_that_could_not_be_stored_does_not_hold_back_its_retry() {
    let bench = Bench::new();
    let sink = Arc::new(Sparse {
        store: bench.events(),
        room: Mutex::new(100),
        fail: Mutex::new(1),
    });
    let connector = bench.over(Arc::clone(&sink), vec![dedup()]);
    let error = send(&connector, &[fault("a", 0)]).await.unwrap_err();
    assert!(error.is_retryable());
    // Another report of the same fault, as sent by a monitor that checks again.
    send(&connector, &[fault("a", 1)]).await.unwrap();
    // The failed event does not appear behind later ones.
    assert_eq!(bench.strategies().await, [1]);
    assert_eq!(
        bench.stored().await[0].generated_timestamp.unwrap().seconds,
        START + 1
    );
}

#[tokio::test]
async fn where_there_is_no_room_repeats_are_left_out_before_anything_is_refused() {
    let bench = Bench::new();
    let sink = Arc::new(Sparse {
        store: bench.events(),
        room: Mutex::new(3),
        fail: Mutex::new(0),
    });
    let connector = bench.over(Arc::clone(&sink), vec![dedup()]);
    let first = send(&connector, &[fault("a", 0)]).await.unwrap();
    let events = [fault("b", 1), fault("b", 2), fault("a", 3), fault("c", 4)];
    let answers = send(&connector, &events).await.unwrap();
    let answered: Vec<(u64, bool)> = answers
        .iter()
        .map(|one| (one.seq.number(), one.new))
        .collect();
    assert_eq!(answered, [(2, true), (2, false), (1, false), (3, true)]);
    assert_eq!(answers[2].id, first[0].id);
    assert_eq!(bench.strategies().await, [1, 1, 1]);
    // Repeats alone need no room; a new event does, and is refused.
    send(&connector, &[fault("a", 5), fault("c", 5)])
        .await
        .unwrap();
    let error = send(&connector, &[fault("a", 6), fault("d", 6)])
        .await
        .unwrap_err();
    assert!(
        matches!(error, AcceptError::Sink(SinkError::Full { .. })),
        "{error}"
    );
    bench.counted("gpuwarden_events_left_out_total 4");
    // The event counts as new again when there is room.
    *lock(&sink.room) = 10;
    assert!(send(&connector, &[fault("d", 7)]).await.unwrap()[0].new);
    assert_eq!(bench.strategies().await, [1, 1, 1, 1]);
}

#[tokio::test]
async fn repeats_are_known_after_a_restart() {
    let mut bench = Bench::new();
    send(&bench.connector(vec![dedup()]), &[fault("a", 0)])
        .await
        .unwrap();
    bench.store.close().await;
    bench.store = Arc::new(SqliteStore::open(bench.dir.path()).unwrap());
    let pipeline = bench.pipeline(vec![dedup()]);
    let now = Timestamp::now();
    pipeline.recall(bench.store.as_ref(), now).await.unwrap();
    let connector = Connector::new(
        bench.events(),
        AcceptNodes::Any,
        &bench.metrics,
        Timestamp::now,
    )
    .with_pipeline(pipeline);
    send(&connector, &[fault("a", 1), fault("b", 1)])
        .await
        .unwrap();
    assert_eq!(bench.strategies().await, [1, 3, 1]);

    // Events older than the window are not read: repeats of them would pass anyway.
    let late = bench.pipeline(vec![dedup()]);
    let later = now + jiff::SignedDuration::from_mins(10);
    late.recall(bench.store.as_ref(), later).await.unwrap();
    let recalled = late.deduplicators().map(|dedup| lock(dedup).remembered());
    assert_eq!(recalled.collect::<Vec<_>>(), [0]);
}
