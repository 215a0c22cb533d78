use std::path::Path;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{Entity, HealthEvent};
use http_body_util::Full;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore, Upkeep as _};
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::body::Body;
use tonic::codegen::{Bytes, Service as _, http};
use tonic::transport::{Channel, Endpoint};

use super::*;

mod acceptance;
mod checks;
mod garbage;
mod slow;
mod users;

fn event(gpu: &str) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        node_name: "n1".into(),
        is_fatal: true,
        // An unknown number is passed through as data.
        recommended_action: 77,
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: gpu.into(),
        }],
        generated_timestamp: Some(prost_types::Timestamp {
            seconds: 1_800_000_000,
            nanos: 5,
        }),
        ..HealthEvent::default()
    }
}

fn batch(events: Vec<HealthEvent>) -> HealthEvents {
    HealthEvents { version: 1, events }
}

async fn dial(socket: &Path) -> PlatformConnectorClient<Channel> {
    let address = format!("unix://{}", socket.display());
    let endpoint = Endpoint::try_from(address).unwrap();
    PlatformConnectorClient::new(endpoint.connect().await.unwrap())
}

struct Served {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    metrics: Metrics,
    nodes: AcceptNodes,
    cancel: CancellationToken,
}

impl Served {
    fn new() -> Self {
        Self::taking(AcceptNodes::Own("n1".into()))
    }

    fn taking(nodes: AcceptNodes) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(dir.path()).unwrap());
        let (metrics, cancel) = (Metrics::default(), CancellationToken::new());
        let served = Self {
            dir,
            store,
            metrics,
            nodes,
            cancel,
        };
        let listener = runtime::unix_grpc::bind(&served.socket(), 0o666).unwrap();
        tokio::spawn(serve(listener, served.connector(), served.cancel.clone()));
        served
    }

    fn connector(&self) -> Connector {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as Arc<dyn EventStore>;
        Connector::new(store, self.nodes.clone(), &self.metrics, Timestamp::now)
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("s.sock")
    }

    async fn client(&self) -> PlatformConnectorClient<Channel> {
        dial(&self.socket()).await
    }

    async fn stored(&self) -> Vec<HealthEvent> {
        let query = EventQuery {
            limit: 100,
            ..EventQuery::default()
        };
        self.store
            .events(query)
            .await
            .unwrap()
            .into_iter()
            .map(|record| record.event)
            .collect()
    }
}

#[tokio::test]
async fn what_is_answered_ok_is_stored_once_however_often_it_is_sent() {
    let served = Served::new();
    let mut client = served.client().await;
    for _ in 0..3 {
        client
            .health_event_occurred_v1(batch(vec![event("0"), event("1")]))
            .await
            .unwrap();
    }
    let stored = served.stored().await;
    assert_eq!(stored.len(), 2);
    assert_eq!(stored[0].recommended_action, 77);
    assert_eq!(stored[0].processing_strategy, 1);
    assert!(
        served
            .metrics
            .encode()
            .contains("platform_connector_health_events_received_total 6")
    );
}

#[tokio::test]
async fn good_events_are_stored_and_each_bad_one_is_named() {
    let served = Served::new();
    let mut client = served.client().await;
    let nameless = HealthEvent {
        node_name: String::new(),
        ..event("1")
    };
    let custom = HealthEvent {
        recommended_action: 27,
        ..event("2")
    };
    let mixed = batch(vec![event("0"), nameless, custom, event("3")]);
    for _ in 0..2 {
        let status = client
            .health_event_occurred_v1(mixed.clone())
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        for part in [
            "events[1].nodeName",
            "events[2].customRecommendedAction",
            "other 2 events",
        ] {
            assert!(status.message().contains(part), "{}", status.message());
        }
        assert_eq!(served.stored().await.len(), 2);
    }
}

#[tokio::test]
async fn limits_are_stated_in_the_answer() {
    let served = Served::new();
    let connector = served.connector();
    let error = connector
        .accept(batch(vec![event("0"); MAX_EVENTS + 1]), &Caller::Monitor)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("10000") && !error.is_retryable(),
        "{error}"
    );
    let mut long = event("0");
    long.check_name = "x".repeat(254);
    let error = connector
        .accept(batch(vec![long]), &Caller::Monitor)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("at most 253"), "{error}");
    // A request over the size limit is refused by gRPC itself, and the server continues.
    let mut client = served.client().await.max_encoding_message_size(64 << 20);
    let mut huge = event("0");
    huge.message = "x".repeat(MAX_REQUEST_BYTES + 1);
    let status = client
        .health_event_occurred_v1(batch(vec![huge]))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    for part in ["4194304", "in several requests"] {
        assert!(status.message().contains(part), "{status}");
    }
    client
        .health_event_occurred_v1(batch(vec![event("0")]))
        .await
        .unwrap();
    assert_eq!(served.stored().await.len(), 1);
}

#[tokio::test]
async fn a_store_that_does_not_take_events_is_unavailable_and_nothing_is_acknowledged() {
    let served = Served::new();
    let mut client = served.client().await;
    served.store.close().await;
    let status = client
        .health_event_occurred_v1(batch(vec![event("0")]))
        .await
        .unwrap_err();
    assert!(
        matches!(status.code(), Code::Unavailable | Code::Internal),
        "{status}"
    );
}

#[tokio::test]
async fn the_error_names_twenty_and_counts_the_rest() {
    let served = Served::new();
    let bad = vec![HealthEvent::default(); 25];
    let error = served
        .connector()
        .accept(batch(bad), &Caller::Monitor)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("events[19].nodeName") && !error.contains("events[20]"),
        "{error}"
    );
    assert!(error.contains("and 5 more"), "{error}");
}

fn on(node: &str, gpu: &str) -> HealthEvent {
    HealthEvent {
        node_name: node.into(),
        ..event(gpu)
    }
}

/// NVSentinel accepts any node's name from every process that can open its socket.
#[tokio::test]
async fn a_local_process_speaks_for_its_own_node_only() {
    let served = Served::new();
    let mut client = served.client().await;
    let mixed = batch(vec![event("0"), on("n2", "0"), event("1")]);
    let status = client.health_event_occurred_v1(mixed).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    for part in [
        "events[1].nodeName",
        "\"n2\"",
        "\"n1\"",
        "--accept-nodes any",
        "other 2 events",
    ] {
        assert!(status.message().contains(part), "{}", status.message());
    }
    let stored = served.stored().await;
    assert!(stored.len() == 2 && stored.iter().all(|event| event.node_name == "n1"));
    // An invalid event is refused whoever sends it.
    let wrong = HealthEvent::default();
    let status = client
        .health_event_occurred_v1(batch(vec![on("n2", "0"), wrong]))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let metrics = served.metrics.encode();
    for line in [
        "gpuwarden_events_refused_total{reason=\"foreign_node\"} 2",
        "gpuwarden_events_refused_total{reason=\"invalid\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
}

#[tokio::test]
async fn where_any_node_is_accepted_a_local_process_speaks_for_all() {
    let served = Served::taking(AcceptNodes::Any);
    let mut client = served.client().await;
    client
        .health_event_occurred_v1(batch(vec![on("n1", "0"), on("n2", "0")]))
        .await
        .unwrap();
    assert_eq!(served.stored().await.len(), 2);
}

#[tokio::test]
async fn a_node_that_has_proven_its_name_speaks_for_itself_whatever_local_processes_may() {
    let served = Served::taking(AcceptNodes::Any);
    let connector = served.connector();
    let node = Caller::Node("n2".into());
    let both = batch(vec![on("n1", "0"), on("n2", "0")]);
    let error = connector.accept(both, &node).await.unwrap_err();
    assert!(!error.is_retryable());
    let AcceptError::Refused { refused, stored } = error else {
        panic!("{error}");
    };
    assert_eq!((stored, refused.len(), refused[0].index), (1, 1, 0));
    assert_eq!(refused[0].reason, Reason::ForeignNode);
    assert_eq!(served.stored().await[0].node_name, "n2");
}

#[tokio::test]
async fn a_sender_that_is_not_known_is_not_heard() {
    let served = Served::new();
    let path = served.dir.path().join("other.sock");
    let listener = runtime::unix_grpc::bind(&path, 0o600).unwrap();
    let nobody = service(served.connector(), |_| None);
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(nobody)
            .serve_with_incoming(runtime::unix_grpc::incoming(listener)),
    );
    let mut client = dial(&path).await;
    let status = client
        .health_event_occurred_v1(batch(vec![event("0")]))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(served.stored().await, []);
}

/// Sink that answers by a script, and records the events passed to it.
#[derive(Default)]
struct Scripted {
    answer: Option<fn() -> SinkError>,
}

#[async_trait::async_trait]
impl Sink for Scripted {
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError> {
        match self.answer {
            Some(error) => Err(error()),
            None => Ok((1_u64..)
                .zip(events)
                .map(|(seq, new)| Appended {
                    id: new.event.id,
                    seq: seq.into(),
                    new: true,
                })
                .collect()),
        }
    }
}

#[tokio::test]
async fn what_a_sink_says_reaches_the_sender() {
    type Answer = fn() -> SinkError;
    let table: [(Answer, Code, bool, &str); 3] = [
        (
            || SinkError::Full {
                what: "the outbox has 7 of 7 bytes".into(),
            },
            Code::ResourceExhausted,
            true,
            "7 of 7 bytes; send them again",
        ),
        (
            || SinkError::Unavailable("disk is full".into()),
            Code::Unavailable,
            true,
            "disk is full; send them again",
        ),
        (
            || SinkError::Failed("damaged".into()),
            Code::Internal,
            false,
            "damaged",
        ),
    ];
    for (answer, code, retryable, text) in table {
        let sink = Scripted {
            answer: Some(answer),
        };
        let metrics = Metrics::default();
        let connector = Connector::new(sink, AcceptNodes::Any, &metrics, Timestamp::now);
        let error = connector
            .accept(batch(vec![event("0")]), &Caller::Monitor)
            .await
            .unwrap_err();
        assert_eq!(error.is_retryable(), retryable);
        let status = server::status(&error);
        assert_eq!(status.code(), code);
        assert!(status.message().ends_with(text), "{}", status.message());
    }
}

/// Senders must not be able to fill the log while the disk is full.
#[tokio::test]
async fn a_store_that_takes_nothing_is_logged_now_and_then() {
    let log = testkit::Log::begin();
    let sink = Scripted {
        answer: Some(|| SinkError::Unavailable("disk is full".into())),
    };
    let metrics = Metrics::default();
    let connector = Connector::new(sink, AcceptNodes::Any, &metrics, Timestamp::now);
    for _ in 0..50 {
        let accepted = connector.accept(batch(vec![event("0")]), &Caller::Monitor);
        server::status(&accepted.await.unwrap_err());
    }
    let lines = log.lines_with("disk is full");
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("ERROR") && lines[0].contains("events were not accepted"));
}

#[tokio::test]
async fn monitors_hear_of_recoveries_that_others_report() {
    let served = Served::new();
    let connector = served.connector();
    let mut recoveries = connector.recoveries();
    let healthy = HealthEvent {
        is_healthy: true,
        is_fatal: false,
        ..event("0")
    };
    // All clones are one connector, including the one that serves the socket.
    connector
        .clone()
        .accept(
            batch(vec![event("0"), healthy, HealthEvent::default()]),
            &Caller::Monitor,
        )
        .await
        .unwrap_err();
    assert!(recoveries.try_recv().unwrap().event.is_healthy);
    assert!(recoveries.try_recv().is_err(), "a fault is no recovery");
}

/// Otherwise new faults of a node whose clock is slow would count as older than its release by
/// a person, and be dismissed.
#[tokio::test]
async fn an_event_is_as_old_as_it_is_whatever_the_clock_of_its_node_says() {
    fn ours() -> Timestamp {
        "2026-11-21T12:00:00Z".parse().unwrap()
    }
    let table = [
        // Ten minutes slow; an hour fast; right; set back in between.
        (Some("11:50:00"), "11:49:58", "11:59:58"),
        (Some("13:00:00"), "12:59:55", "11:59:55"),
        (Some("12:00:00"), "11:00:00", "11:00:00"),
        (Some("11:00:00"), "11:30:00", "12:00:00"),
        // An impossible time.
        (
            Some("9998-01-01T00:00:00"),
            "0001-01-01T00:00:00",
            "12:00:00",
        ),
        // An agent that sends no time.
        (None, "11:59:00", "11:59:00"),
        (None, "12:30:00", "12:00:00"),
    ];
    for (index, (sent, accepted, expected)) in table.into_iter().enumerate() {
        let served = Served::new();
        let store: Arc<dyn EventStore> = Arc::clone(&served.store) as Arc<dyn EventStore>;
        let nodes = AcceptNodes::Own("nobody".into());
        let connector = Connector::new(store, nodes, &Metrics::default(), ours);
        let service = service(connector, |_| Some(Caller::Node("n1".into())));
        let at = |time: &str| {
            let day = if time.len() > 8 { "" } else { "2026-11-21T" };
            format!("{day}{time}Z").parse::<Timestamp>().unwrap()
        };
        let mut event = event("0");
        event::mark_accepted(&mut event, at(accepted));
        let mut request = tonic::Request::new(batch(vec![event]));
        if let Some(sent) = sent {
            let sent = at(sent).to_string().parse().unwrap();
            request.metadata_mut().insert("gpuwarden-sent-at", sent);
        }
        let mut client = PlatformConnectorClient::new(service);
        client.health_event_occurred_v1(request).await.unwrap();
        let records = served.store.events(EventQuery::default()).await.unwrap();
        assert_eq!(records[0].created_at, at(expected), "{index}");
    }
}

/// NVSentinel records a failed insert in its log, and in no metric.
#[tokio::test]
async fn what_could_not_be_stored_is_counted_and_asked_for_again() {
    type Answer = fn() -> SinkError;
    let passing: Answer = || SinkError::Unavailable("disk is full".into());
    let lasting: Answer = || SinkError::Failed("damaged".into());
    for (answer, retries) in [(passing, 1), (lasting, 0)] {
        let metrics = Metrics::default();
        let sink = Scripted {
            answer: Some(answer),
        };
        let connector = Connector::new(sink, AcceptNodes::Any, &metrics, Timestamp::now);
        let two = batch(vec![event("0"), event("1")]);
        connector.accept(two, &Caller::Monitor).await.unwrap_err();
        let text = metrics.encode();
        let queue = "platform_connector_workqueue_retries_total_databaseStore";
        for line in [
            "gpuwarden_events_not_stored_total 2".to_owned(),
            format!("{queue}{{workqueue=\"databaseStore\"}} {retries}"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}

/// Sink that stores nothing and never answers.
struct Stuck;

#[async_trait::async_trait]
impl Sink for Stuck {
    async fn append(&self, _events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError> {
        std::future::pending().await
    }
}

/// NVSentinel queues incoming events without a limit.
#[tokio::test]
async fn what_waits_for_a_store_that_hangs_is_bounded_by_number_and_by_size() {
    let large = |count: usize| {
        let mut event = event("0");
        event.message = "x".repeat(4_000_000);
        batch(vec![event; count])
    };
    let small = batch(vec![event("0")]);
    for (request, fit) in [(large(1), 16), (small, MAX_IN_FLIGHT)] {
        let metrics = Metrics::default();
        let connector = Connector::new(Stuck, AcceptNodes::Any, &metrics, Timestamp::now);
        let service = service(connector, |_| Some(Caller::Monitor));
        let mut service = PlatformConnectorClient::new(service);
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..fit {
            let (mut service, request) = (service.clone(), request.clone());
            waiting.spawn(async move { service.health_event_occurred_v1(request).await });
        }
        let depth = format!(
            "platform_connector_workqueue_depth_databaseStore{{workqueue=\"databaseStore\"}} {fit}\n"
        );
        while !metrics.encode().contains(&depth) {
            tokio::task::yield_now().await;
        }
        let one_more = service.health_event_occurred_v1(request);
        let at_once = tokio::time::timeout(std::time::Duration::from_secs(20), one_more);
        let status = at_once.await.expect("it does not wait").unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        // Calls that are given up make room again.
        waiting.shutdown().await;
        assert!(
            metrics
                .encode()
                .contains("_databaseStore{workqueue=\"databaseStore\"} 0\n")
        );
    }
}

/// In NVSentinel a call has no deadline: a connector that hangs blocks its monitor forever.
#[tokio::test(start_paused = true)]
async fn a_call_on_a_store_that_hangs_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let listener = runtime::unix_grpc::bind(&path, 0o600).unwrap();
    let metrics = Metrics::default();
    let connector = Connector::new(Stuck, AcceptNodes::Any, &metrics, Timestamp::now);
    let cancel = CancellationToken::new();
    tokio::spawn(serve(listener, connector, cancel.clone()));
    let mut client = dial(&path).await;
    let call = client.health_event_occurred_v1(batch(vec![event("0")]));
    // By the paused clock: longer than any limit of the connector.
    let answer = tokio::time::timeout(std::time::Duration::from_mins(10), call).await;
    let status = answer.expect("an answer").unwrap_err();
    // Stock clients retry on these codes.
    let again = matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded);
    assert!(again, "{status}");
    cancel.cancel();
}
