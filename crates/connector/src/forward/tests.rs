mod tls;

use std::sync::Mutex;

use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use contract::{HealthEvent, HealthEvents};
use jiff::Timestamp;
use runtime::tls::ServerTls;
use store::sqlite::SqliteStore;
use store::{EventQuery, EventStore};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::*;
use crate::{AcceptNodes, Caller, Connector};

/// Installation with a store that forwards events to a port of this machine.
struct Installation {
    dir: tempfile::TempDir,
    store: Arc<dyn EventStore>,
    connector: Connector,
    forwarding: Forwarding,
    metrics: Metrics,
    delivering: JoinHandle<()>,
}

impl Installation {
    fn new(port: u16) -> Self {
        Self::at(tempfile::tempdir().unwrap(), port)
    }

    fn at(dir: tempfile::TempDir, port: u16) -> Self {
        Self::with(dir, port, None)
    }

    fn with(dir: tempfile::TempDir, port: u16, tls: Option<TargetTls>) -> Self {
        let metrics = Metrics::default();
        let store: Arc<dyn EventStore> = Arc::new(SqliteStore::open(dir.path()).unwrap());
        let token = dir.path().join("token");
        if !token.exists() {
            std::fs::write(&token, "one\n").unwrap();
        }
        let target = ForwardTarget {
            host: "127.0.0.1".into(),
            port,
            token: Some(token),
            tls,
        };
        let (forwarding, delivery) = Forwarding::open(&target, dir.path(), &metrics).unwrap();
        let nodes = AcceptNodes::Any;
        let connector = Connector::new(Arc::clone(&store), nodes, &metrics, Timestamp::now);
        Self {
            connector: connector.with_forwarding(forwarding.clone()),
            delivering: tokio::spawn(delivery.run(CancellationToken::new())),
            dir,
            store,
            forwarding,
            metrics,
        }
    }

    async fn accept(&self, messages: &[String]) {
        let events = messages.iter().map(|message| HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "c".into(),
            node_name: "n1".into(),
            message: message.clone(),
            generated_timestamp: Some(prost_types::Timestamp::default()),
            ..HealthEvent::default()
        });
        let batch = HealthEvents {
            version: 1,
            events: events.collect(),
        };
        self.connector
            .accept(batch, &Caller::Monitor)
            .await
            .unwrap();
    }

    async fn stored(&self) -> Vec<model::event::EventRecord> {
        let query = EventQuery {
            limit: 10_000,
            ..EventQuery::default()
        };
        let mut records = self.store.events(query).await.unwrap();
        records.sort_by_key(|record| record.seq);
        records
    }

    /// Waits until an attempt has failed, and returns the reason.
    async fn failing(&self, with: &str) -> String {
        let mut delivery = self.forwarding.delivery.clone();
        let failed = |status: &DeliveryStatus| {
            let why = status.failing.as_ref();
            why.is_some_and(|why| why.contains(with))
        };
        let waiting = tokio::time::timeout(Duration::from_secs(30), delivery.wait_for(failed));
        let Ok(status) = waiting.await else {
            panic!("{:?} says nothing of {with}", self.forwarding.status());
        };
        status.unwrap().failing.clone().unwrap()
    }

    /// Waits until no event is on its way to the target.
    async fn empty(&self) {
        let mut status = self.forwarding.outbox.status();
        status.wait_for(|status| status.events == 0).await.unwrap();
    }
}

/// Service of another vendor that accepts every event.
#[derive(Clone, Default)]
struct Target {
    taken: Arc<Mutex<Vec<HealthEvent>>>,
    tokens: Arc<Mutex<Vec<String>>>,
    /// Versions of the batches that the events came in.
    versions: Arc<Mutex<Vec<u32>>>,
}

impl Target {
    fn serve(&self, listener: TcpListener) -> (CancellationToken, JoinHandle<()>) {
        self.serve_by(listener, None)
    }

    fn serve_by(
        &self,
        listener: TcpListener,
        tls: Option<ServerTls>,
    ) -> (CancellationToken, JoinHandle<()>) {
        let cancel = CancellationToken::new();
        let stop = cancel.clone().cancelled_owned();
        let incoming = tcp_grpc::incoming(listener, tls.map(Arc::new));
        let service = PlatformConnectorServer::new(self.clone());
        let task = tokio::spawn(async move {
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming_shutdown(incoming, stop)
                .await
                .unwrap();
        });
        (cancel, task)
    }
}

#[tonic::async_trait]
impl PlatformConnector for Target {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        let token = request.metadata().get("authorization").unwrap();
        let token = token.to_str().unwrap().to_owned();
        self.tokens.lock().unwrap().push(token);
        let batch = request.into_inner();
        self.versions.lock().unwrap().push(batch.version);
        self.taken.lock().unwrap().extend(batch.events);
        Ok(Response::new(()))
    }
}

async fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn numbered(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|index| index.to_string()).collect()
}

#[tokio::test]
async fn what_is_stored_arrives_as_it_was_stored_also_where_the_target_was_away() {
    let (closed, port) = listener().await;
    drop(closed);
    let installation = Installation::new(port);
    // Without a target, the store accepts all events at once.
    for index in 0..50 {
        installation
            .accept(&numbered(index * 4..index * 4 + 4))
            .await;
    }
    let stored = installation.stored().await;
    assert_eq!(stored.len(), 200);
    installation.failing("").await;
    assert_eq!(installation.forwarding.status().waiting, 200);

    let target = Target::default();
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (stop, served) = target.serve(listener);
    installation.empty().await;
    let expected: Vec<HealthEvent> = stored.into_iter().map(|record| record.event).collect();
    assert_eq!(*target.taken.lock().unwrap(), expected);
    // The target stops and comes back; the token has changed meanwhile.
    stop.cancel();
    served.await.unwrap();
    std::fs::write(installation.dir.path().join("token"), "two").unwrap();
    installation.accept(&numbered(200..210)).await;
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (_stop, _served) = target.serve(listener);
    installation.empty().await;
    assert_eq!(target.taken.lock().unwrap().len(), 210);
    let tokens = target.tokens.lock().unwrap().clone();
    assert_eq!(tokens[0], "Bearer one");
    assert_eq!(tokens.last().unwrap(), "Bearer two");
    assert!(
        target
            .versions
            .lock()
            .unwrap()
            .iter()
            .all(|version| *version == 1)
    );

    let status = installation.forwarding.status();
    assert_eq!(status.target, format!("127.0.0.1:{port}"));
    assert_eq!((status.waiting, status.missed, status.aside), (0, 0, 0));
    assert_eq!(status.delivery.delivered, 210);
    assert_eq!(status.delivery.failing, None);
    let text = installation.metrics.encode();
    for line in [
        "gpuwarden_forward_events_total 210",
        "gpuwarden_forward_outbox_waiting_events 0",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    for status in ["success", "failed"] {
        let none = format!("grpc_sink_platform_connector_send_total{{status=\"{status}\"}} 0");
        assert!(!text.contains(&none), "{text}");
    }
}

#[tokio::test]
async fn what_waits_for_the_target_survives_a_restart() {
    let (closed, port) = listener().await;
    drop(closed);
    let installation = Installation::new(port);
    installation.accept(&numbered(0..5)).await;
    let Installation {
        dir,
        store,
        forwarding,
        delivering,
        ..
    } = installation;
    delivering.abort();
    drop(delivering.await);
    forwarding.close().await;
    store.close().await;
    let installation = Installation::at(dir, port);
    assert_eq!(installation.forwarding.status().waiting, 5);
    let target = Target::default();
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (_stop, _served) = target.serve(listener);
    installation.empty().await;
    let taken = target.taken.lock().unwrap();
    let messages: Vec<_> = taken.iter().map(|one| one.message.clone()).collect();
    assert_eq!(messages, numbered(0..5));
}

#[tokio::test]
async fn the_store_takes_events_whatever_becomes_of_the_target() {
    // Connections to the target are accepted, and no request is ever answered.
    let (silent, port) = listener().await;
    let installation = Installation::new(port);
    installation.accept(&numbered(0..3)).await;
    assert_eq!(installation.stored().await.len(), 3);
    drop(silent);

    // From here on, the outbox cannot be written.
    installation.forwarding.close().await;
    installation.accept(&numbered(3..6)).await;
    assert_eq!(installation.stored().await.len(), 6);

    // The disk hangs, so that no further call can wait.
    let (_closed, port) = listener().await;
    let installation = Installation::new(port);
    let behind = Arc::clone(&installation.forwarding.behind);
    let all = behind
        .acquire_many(u32::try_from(MAX_BEHIND).unwrap())
        .await
        .unwrap();
    installation.accept(&numbered(0..7)).await;
    assert_eq!(installation.stored().await.len(), 7);
    assert_eq!(installation.forwarding.status().missed, 7);
    let text = installation.metrics.encode();
    assert!(text.contains("gpuwarden_forward_missed_events_total 7"));
    drop(all);
    installation.accept(&numbered(7..8)).await;
    assert_eq!(installation.forwarding.status().missed, 7);
}

#[tokio::test]
async fn a_full_outbox_costs_the_target_events_and_not_the_store() {
    let (closed, port) = listener().await;
    drop(closed);
    let mut installation = Installation::new(port);
    let full = tempfile::tempdir().unwrap();
    let limits = OutboxLimits {
        events: 2,
        ..OutboxLimits::default()
    };
    installation.forwarding.outbox =
        Outbox::open(full.path(), limits, &Metrics::default()).unwrap();
    let nodes = AcceptNodes::Any;
    let store = Arc::clone(&installation.store);
    let connector = Connector::new(store, nodes, &Metrics::default(), Timestamp::now);
    installation.connector = connector.with_forwarding(installation.forwarding.clone());
    installation.accept(&numbered(0..2)).await;
    installation.accept(&numbered(2..5)).await;
    assert_eq!(installation.stored().await.len(), 5);
    let status = installation.forwarding.status();
    assert_eq!((status.waiting, status.missed), (2, 3));
}

#[tokio::test]
async fn a_store_that_does_not_take_events_hands_none_on() {
    let (_open, port) = listener().await;
    let installation = Installation::new(port);
    installation.store.close().await;
    let batch = HealthEvents {
        version: 1,
        events: vec![HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "c".into(),
            node_name: "n1".into(),
            ..HealthEvent::default()
        }],
    };
    let answer = installation.connector.accept(batch, &Caller::Monitor).await;
    assert!(answer.is_err());
    assert_eq!(installation.forwarding.status().waiting, 0);
}
