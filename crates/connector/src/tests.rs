use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{Entity, HealthEvent};
use store::EventQuery;
use store::sqlite::SqliteStore;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::*;

fn event(gpu: &str) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        node_name: "n1".into(),
        is_fatal: true,
        // A number that we do not know is data.
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

struct Served {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    metrics: Metrics,
    cancel: CancellationToken,
}

impl Served {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(dir.path()).unwrap());
        let (metrics, cancel) = (Metrics::default(), CancellationToken::new());
        let served = Self {
            dir,
            store,
            metrics,
            cancel,
        };
        let listener = runtime::unix_grpc::bind(&served.socket(), 0o666).unwrap();
        tokio::spawn(serve(listener, served.connector(), served.cancel.clone()));
        served
    }

    fn connector(&self) -> Connector {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as Arc<dyn EventStore>;
        Connector::new(store, &self.metrics, Timestamp::now)
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("s.sock")
    }

    async fn client(&self) -> PlatformConnectorClient<tonic::transport::Channel> {
        let address = format!("unix://{}", self.socket().display());
        let channel = tonic::transport::Endpoint::try_from(address)
            .unwrap()
            .connect()
            .await
            .unwrap();
        PlatformConnectorClient::new(channel)
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
        .accept(batch(vec![event("0"); MAX_EVENTS + 1]))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("10000") && !error.is_retryable(),
        "{error}"
    );
    let mut long = event("0");
    long.check_name = "x".repeat(254);
    let error = connector.accept(batch(vec![long])).await.unwrap_err();
    assert!(error.to_string().contains("at most 253"), "{error}");
    // A request over the size limit is refused by gRPC itself, and the server lives on.
    let mut client = served.client().await.max_encoding_message_size(64 << 20);
    let mut huge = event("0");
    huge.message = "x".repeat(MAX_REQUEST_BYTES + 1);
    let status = client
        .health_event_occurred_v1(batch(vec![huge]))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
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
        .accept(batch(bad))
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("events[19].nodeName") && !error.contains("events[20]"),
        "{error}"
    );
    assert!(error.contains("and 5 more"), "{error}");
}
