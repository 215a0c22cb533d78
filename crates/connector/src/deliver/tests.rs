use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use contract::{HealthEvent, HealthEvents};
use jiff::Timestamp;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore, NewEvent};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::metadata::MetadataValue;
use tonic::service::Routes;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Response};

use super::*;
use crate::outbox::OutboxLimits;
use crate::{AcceptNodes, Caller, Connector, addressee, service};

mod failing;
mod stores;

/// Node with an outbox, and the address of a controller that may or may not run.
struct Node {
    dir: tempfile::TempDir,
    outbox: Outbox,
    connector: Connector,
    metrics: Metrics,
    cancel: CancellationToken,
    status: watch::Receiver<DeliveryStatus>,
    task: JoinHandle<()>,
}

impl Node {
    /// Creates the node `n1`, which delivers to a port of this machine.
    fn new(port: u16) -> Self {
        Self::with(port, PAUSES)
    }

    fn with(port: u16, pauses: Pauses) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (metrics, cancel) = (Metrics::default(), CancellationToken::new());
        let outbox = Outbox::open(dir.path(), OutboxLimits::default(), &metrics).unwrap();
        let nodes = AcceptNodes::Any;
        let connector = Connector::new(outbox.clone(), nodes, &metrics, Timestamp::now);
        let endpoint = Endpoint::try_from(format!("http://127.0.0.1:{port}")).unwrap();
        let header: Header = Arc::new(|| Ok(Some(MetadataValue::from_static("Bearer t"))));
        let channel = endpoint.connect_lazy();
        let mut delivery = Delivery::new(outbox.clone(), channel, header, &metrics);
        delivery.pauses = pauses;
        delivery.backoff = pauses.backoff();
        delivery.stay = Stay::new(&pauses);
        let status = delivery.status();
        let task = tokio::spawn(delivery.run(cancel.clone()));
        Self {
            dir,
            outbox,
            connector,
            metrics,
            cancel,
            status,
            task,
        }
    }

    async fn accept(&self, events: Vec<HealthEvent>) {
        let batch = HealthEvents { version: 1, events };
        self.connector
            .accept(batch, &Caller::Monitor)
            .await
            .unwrap();
    }

    /// Returns the messages of the events that are put aside.
    fn aside(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.dir.path().join("outbox/refused.jsonl"));
        let text = text.unwrap_or_default();
        let lines = text.lines().map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["event"]["message"].as_str().unwrap().to_owned()
        });
        lines.collect()
    }

    async fn empty(&self) {
        let mut status = self.outbox.status();
        status.wait_for(|status| status.events == 0).await.unwrap();
    }
}

fn event(message: &str) -> HealthEvent {
    HealthEvent {
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: "c".into(),
        node_name: "n1".into(),
        message: message.into(),
        ..HealthEvent::default()
    }
}

/// Controller: the real service over a real store.
struct Controller {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
}

impl Controller {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(dir.path()).unwrap());
        Self { dir, store }
    }

    fn serve(&self, listener: TcpListener) -> (CancellationToken, JoinHandle<()>) {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as Arc<dyn EventStore>;
        let nodes = AcceptNodes::Own("nobody".into());
        let connector = Connector::new(store, nodes, &Metrics::default(), Timestamp::now);
        let service = service(connector, |_| Some(Caller::Node("n1".into())));
        serve_routes(listener, Routes::new(service))
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

    async fn messages(&self) -> Vec<String> {
        let records = self.stored().await;
        records.into_iter().map(|one| one.event.message).collect()
    }
}

fn serve<T: PlatformConnector>(
    listener: TcpListener,
    service: PlatformConnectorServer<T>,
) -> (CancellationToken, JoinHandle<()>) {
    serve_routes(listener, Routes::new(service))
}

fn serve_routes(listener: TcpListener, routes: Routes) -> (CancellationToken, JoinHandle<()>) {
    let cancel = CancellationToken::new();
    let stop = cancel.clone().cancelled_owned();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let task = tokio::spawn(async move {
        tonic::transport::Server::builder()
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, stop)
            .await
            .unwrap();
    });
    (cancel, task)
}

/// Service that answers by a script, then OK, and records the messages that it accepted.
#[derive(Clone, Default)]
struct Script {
    answers: Arc<Mutex<VecDeque<Status>>>,
    calls: Arc<AtomicUsize>,
    /// Refuses every batch that has an event with one of these messages.
    poison: Vec<&'static str>,
    /// Fails on every batch that has an event with one of these messages.
    fatal: Vec<String>,
    /// Panics on every batch that has an event with this message.
    deadly: Option<&'static str>,
    /// Range of calls that fail.
    broken: std::ops::Range<usize>,
    taken: Arc<Mutex<Vec<String>>>,
    /// Versions of all batches.
    versions: Arc<Mutex<Vec<u32>>>,
}

#[tonic::async_trait]
impl PlatformConnector for Script {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        assert_eq!(request.metadata().get("authorization").unwrap(), "Bearer t");
        assert!(request.metadata().contains_key("grpc-timeout"));
        self.versions
            .lock()
            .unwrap()
            .push(request.get_ref().version);
        if let Some(status) = self.answers.lock().unwrap().pop_front() {
            return Err(status);
        }
        let events = request.into_inner().events.into_iter();
        let messages: Vec<String> = events.map(|one| one.message).collect();
        if messages
            .iter()
            .any(|one| self.poison.contains(&one.as_str()))
        {
            return Err(Status::invalid_argument("something in it is bad"));
        }
        let has = |wanted: &dyn Fn(&str) -> bool| messages.iter().any(|one| wanted(one));
        assert!(!has(&|one| Some(one) == self.deadly), "no answer");
        if self.broken.contains(&call) || has(&|one| self.fatal.iter().any(|bad| bad == one)) {
            return Err(Status::internal("the events cannot be stored"));
        }
        self.taken.lock().unwrap().extend(messages);
        Ok(Response::new(()))
    }
}

async fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

#[tokio::test]
async fn what_waits_while_the_controller_is_away_arrives_once_in_order_and_unchanged() {
    let (closed, port) = listener().await;
    drop(closed);
    let node = Node::new(port);
    let before = Timestamp::now();
    for index in 0..300 {
        let events = (index * 4..index * 4 + 4).map(|index| event(&index.to_string()));
        node.accept(events.collect()).await;
    }
    let after = Timestamp::now();
    let mut status = node.status.clone();
    status.wait_for(|one| one.failing.is_some()).await.unwrap();
    let failing = status.borrow().failing.clone().unwrap();
    assert!(failing.contains("Connection refused"), "{failing}");

    let controller = Controller::new();
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let served_at = Instant::now();
    let (stop, served) = controller.serve(listener);
    node.empty().await;
    // The age of an event is relative to the node's clock when the event is sent.
    let after = after + served_at.elapsed();
    let stored = controller.stored().await;
    let expected: Vec<String> = (0..1_200).map(|index| index.to_string()).collect();
    assert_eq!(controller.messages().await, expected);
    for record in &stored {
        // As accepted by the node: with its time and id, and without metadata of the delivery.
        assert!((before..=after).contains(&record.created_at), "{record:?}");
        assert!(
            !record
                .event
                .metadata
                .contains_key(contract::keys::META_ACCEPTED_AT)
        );
        assert!(model::event::lacks_own_time(&record.event));
    }
    assert_eq!(status.borrow().failing, None);
    // The controller stops and comes back, with events in between.
    stop.cancel();
    served.await.unwrap();
    node.accept(vec![event("between")]).await;
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (_stop, _served) = controller.serve(listener);
    node.empty().await;
    assert_eq!(controller.messages().await.len(), 1_201);
    let text = node.metrics.encode();
    assert!(
        text.contains("gpuwarden_delivery_events_total 1201"),
        "{text}"
    );
    assert!(text.contains("gpuwarden_delivery_failures_total{code=\"Unavailable\"}"));
    drop(controller.dir);
}

#[tokio::test]
async fn an_answer_that_was_lost_doubles_nothing() {
    let controller = Controller::new();
    let (listener, port) = listener().await;
    let (_stop, _served) = controller.serve(listener);
    let node = Node::new(port);
    node.accept(vec![event("one"), event("two")]).await;
    node.empty().await;
    // Sends the same events again, as after a kill between the answer and its recording.
    let (stored, outbox) = (controller.stored().await, &node.outbox);
    let again = stored.iter().map(|record| NewEvent {
        event: record.event.clone(),
        received_at: record.created_at,
    });
    outbox.append(again.collect()).await.unwrap();
    node.empty().await;
    assert_eq!(controller.stored().await, stored);
}

#[tokio::test]
async fn refused_events_are_put_aside_and_hold_up_nothing() {
    // Named by the receiver, so one attempt is enough. An event of another node is one.
    let controller = Controller::new();
    let (open, port) = listener().await;
    let (_stop, _served) = controller.serve(open);
    let node = Node::new(port);
    let foreign = HealthEvent {
        node_name: "n2".into(),
        ..event("foreign")
    };
    node.accept(vec![event("one"), foreign, event("two")]).await;
    node.accept(vec![event("three")]).await;
    node.empty().await;
    assert_eq!(controller.messages().await, ["one", "two", "three"]);
    let aside = std::fs::read_to_string(node.dir.path().join("outbox/refused.jsonl")).unwrap();
    assert_eq!(aside.lines().count(), 1);
    assert!(
        aside.contains("\"foreign\"") && aside.contains("speaks for itself only"),
        "{aside}"
    );
    let text = node.metrics.encode();
    assert!(
        text.contains("gpuwarden_delivery_refused_events_total 1"),
        "{text}"
    );

    // Not named: halves of the batch show which ones.
    let script = Script {
        poison: vec!["7", "8", "40"],
        ..Script::default()
    };
    let (open, port) = listener().await;
    let (_stop, _served) = serve(open, PlatformConnectorServer::new(script.clone()));
    let node = Node::new(port);
    let events = (0..64).map(|index| event(&index.to_string()));
    node.accept(events.collect()).await;
    node.empty().await;
    let expected: Vec<String> = (0..64)
        .filter(|index| ![7, 8, 40].contains(index))
        .map(|index| index.to_string())
        .collect();
    assert_eq!(*script.taken.lock().unwrap(), expected);
    assert!(script.calls.load(Ordering::Relaxed) < 40);
    assert_eq!(node.status.borrow().refused, 3);
}

#[tokio::test]
async fn what_may_pass_is_tried_again_and_nothing_is_thrown_away() {
    let script = Script::default();
    let codes = [
        Code::Unavailable,
        Code::DeadlineExceeded,
        Code::ResourceExhausted,
        Code::Unauthenticated,
        Code::PermissionDenied,
        Code::Internal,
    ];
    let answers = codes.map(|code| Status::new(code, "not now"));
    script.answers.lock().unwrap().extend(answers);
    let (open, port) = listener().await;
    let (_stop, _served) = serve(open, PlatformConnectorServer::new(script.clone()));
    let node = Node::new(port);
    node.accept(vec![event("one")]).await;
    node.empty().await;
    assert_eq!(*script.taken.lock().unwrap(), ["one"]);
    assert_eq!(script.calls.load(Ordering::Relaxed), codes.len() + 1);
    // The batch has a version besides those of its events.
    assert_eq!(*script.versions.lock().unwrap(), [1; 7]);
    assert_eq!(node.status.borrow().refused, 0);
}

#[tokio::test]
async fn an_end_with_work_queued_is_orderly_and_keeps_what_it_could_not_deliver() {
    let (open, port) = listener().await;
    let script = Script::default();
    let (_stop, _served) = serve(open, PlatformConnectorServer::new(script.clone()));
    let node = Node::new(port);
    let events = (0..2_000).map(|index| event(&index.to_string()));
    node.accept(events.collect()).await;
    // Accepted events are delivered before the end.
    node.cancel.cancel();
    node.task.await.unwrap();
    assert_eq!(script.taken.lock().unwrap().len(), 2_000);

    // No receiver: delivery ends at once, and all events are kept.
    let (closed, port) = listener().await;
    drop(closed);
    let node = Node::new(port);
    node.accept(vec![event("one")]).await;
    node.cancel.cancel();
    node.task.await.unwrap();
    assert_eq!(node.outbox.status().borrow().events, 1);
}

/// Short pauses, for tests that do not depend on them.
const SHORT: Pauses = Pauses {
    attempts: (Duration::from_micros(100), Duration::from_millis(4)),
    alone: Duration::from_micros(500),
    ask: Duration::from_millis(20),
    stays: (Duration::from_millis(1), Duration::from_millis(8)),
};

async fn scripted(script: &Script) -> (Node, CancellationToken) {
    let (open, port) = listener().await;
    let (stop, _) = serve(open, PlatformConnectorServer::new(script.clone()));
    (Node::with(port, SHORT), stop)
}
