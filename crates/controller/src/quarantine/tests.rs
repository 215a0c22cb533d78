//! Tests of the task against a socket as the API server.

use std::sync::Arc;

use cluster::{Cluster, ConnectOptions, NodeEvent};
use contract::HealthEvent;
use fleet::FleetInput;
use fleet::brake::NodeLabel;
use jiff::{SignedDuration, Timestamp};
use model::condition::Options;
use model::event::normalise;
use model::mode::Mode;
use model::node::NodeView;
use policy::Policy;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use serde_json::{Value, json};
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventStore, NewEvent};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::requests::RequestAnswer;
use super::watches::WatchEvent;
use super::{Handles, Owns, Quarantine, QuarantineConfig, ROUND};
use crate::conditions;

pub(super) mod offline;
mod rules;
mod slow_store;

pub(super) fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

async fn cluster(server: &TcpListener, directory: &std::path::Path) -> Arc<Cluster> {
    let text = format!(
        "{{current-context: c, users: [{{name: u, user: {{}}}}], \
         clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}], \
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]}}",
        server.local_addr().unwrap()
    );
    let path = directory.join("kubeconfig");
    std::fs::write(&path, text).unwrap();
    let options = ConnectOptions {
        kubeconfig: Some(path),
        ..ConnectOptions::default()
    };
    Arc::new(Cluster::connect(options).await.unwrap())
}

async fn store(directory: &std::path::Path) -> Arc<dyn EventStore> {
    let mut event = HealthEvent {
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: "Check".into(),
        node_name: "n1".into(),
        is_fatal: true,
        ..HealthEvent::default()
    };
    normalise(&mut event, now());
    let store = SqliteStore::open(directory).unwrap();
    let received_at = now();
    let events = vec![NewEvent { event, received_at }];
    store.append(events).await.unwrap();
    Arc::new(store)
}

/// A quarantine that acts, on one node with one fault, its reporter of conditions, and the API
/// server.
pub(super) struct Bench {
    pub(super) quarantine: Quarantine,
    metrics: Metrics,
    server: TcpListener,
    _handles: Handles,
    _reporter: conditions::Reporter,
    directory: TempDir,
}

impl Bench {
    pub(super) async fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let metrics = Metrics::default();
        let cluster = cluster(&server, directory.path()).await;
        let conditions_config = conditions::ConditionsConfig {
            cluster: Arc::clone(&cluster),
            conditions: Some(Options {
                limits: model::condition::MessageLimits::default(),
                summary: false,
            }),
            events: None,
            clock: now,
        };
        let (board, reporter) = conditions::new(conditions_config, &metrics);
        let config = QuarantineConfig {
            store: store(directory.path()).await,
            cluster: Some(cluster),
            policy: watch::channel(Some(Arc::new(Policy::builtin()))).1,
            rules: None,
            mode: Mode::Act,
            owns: Owns::All,
            sources: Sources::default(),
            brake: false,
            drain: None,
            remediation: None,
            analysed: None,
            gpu_label: NodeLabel::parse("gpu=true").unwrap(),
            namespace: "gpuwarden".to_owned(),
            retention: SignedDuration::from_hours(30 * 24),
            board: Some(board),
            events: false,
            clock: now,
        };
        let (mut quarantine, handles) = Quarantine::new(config, &metrics);
        quarantine.catch_up().await;
        quarantine.handle_event(WatchEvent::Node(NodeEvent::Restarted));
        let node = NodeView::from_object(node(1)).unwrap();
        quarantine.handle_event(WatchEvent::Node(NodeEvent::Applied(Arc::new(node))));
        quarantine.handle_event(WatchEvent::Node(NodeEvent::Listed));
        Self {
            quarantine,
            metrics,
            server,
            _handles: handles,
            _reporter: reporter,
            directory,
        }
    }

    /// Receives the request of a patch, without answering. Returns its connection, head and
    /// patch.
    async fn asked(&self) -> (TcpStream, String, String) {
        let (mut connection, _) = self.server.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"]") {
            assert_ne!(connection.read_buf(&mut request).await.unwrap(), 0);
        }
        let request = String::from_utf8(request).unwrap();
        let (head, patch) = request.split_once("\r\n\r\n").unwrap();
        (connection, head.to_owned(), patch.to_owned())
    }

    /// Answers a patch with the node, and handles the answer in the quarantine.
    async fn answer(&mut self, mut connection: TcpStream, node: &Value) {
        let body = node.to_string();
        let length = body.len();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
        connection.write_all(answer.as_bytes()).await.unwrap();
        let answer = self.quarantine.requests.next().await.unwrap();
        self.quarantine.handle_answers(answer);
    }

    /// Returns the number of nodes with reports so far.
    fn work_count(&self) -> u32 {
        let name = "platform_connector_workqueue_adds_total_kubernetes{workqueue=\"kubernetes\"} ";
        let text = self.metrics.encode();
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        value.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
    }
}

fn node(version: u32) -> Value {
    let metadata = json!({"name": "n1", "uid": "u", "resourceVersion": version.to_string()});
    json!({"metadata": metadata, "spec": {}, "status": {}})
}

/// Applies a patch to a node that has neither labels nor annotations.
fn patched(mut node: Value, patch: &str) -> Value {
    for one in serde_json::from_str::<Vec<Value>>(patch).unwrap() {
        if one["op"] == "add" {
            let (place, key) = one["path"].as_str().unwrap().rsplit_once('/').unwrap();
            node.pointer_mut(place).unwrap()[key] = one["value"].clone();
        }
    }
    assert_eq!(node["spec"]["unschedulable"], true, "{patch}");
    node
}

#[tokio::test]
async fn nothing_is_told_on_a_node_before_its_cordon_is_answered() {
    let mut bench = Bench::new().await;
    bench.quarantine.decide();

    // The API server has received the cordon and does not answer yet.
    let (connection, head, patch) = bench.asked().await;
    assert!(head.starts_with("PATCH /api/v1/nodes/n1 "), "{head}");
    assert_eq!(bench.work_count(), 0);
    // Another evaluation, by a change of the node, does not write it either.
    let mut labelled = node(2);
    labelled["metadata"]["labels"] = json!({"zone": "a"});
    let labelled = NodeView::from_object(labelled).unwrap();
    let event = NodeEvent::Applied(Arc::new(labelled));
    bench.quarantine.handle_event(WatchEvent::Node(event));
    bench.quarantine.decide();
    assert_eq!(bench.work_count(), 0);

    bench.answer(connection, &patched(node(3), &patch)).await;
    bench.quarantine.decide();
    assert_eq!(bench.work_count(), 1);
}

#[tokio::test]
async fn a_watch_that_fails_again_for_the_same_reason_is_no_news() {
    let mut bench = Bench::new().await;
    let quarantine = &mut bench.quarantine;
    let failing = |error: &str| NodeEvent::Failing {
        error: error.to_owned(),
        refused: false,
    };
    for (event, news) in [
        (failing("refused"), true),
        (failing("refused"), false),
        (failing("no answer"), true),
        (NodeEvent::Recovered, true),
        (failing("no answer"), true),
    ] {
        quarantine.publish();
        quarantine.handle_event(WatchEvent::Node(event.clone()));
        assert_eq!(quarantine.publishing.due_at().is_some(), news, "{event:?}");
    }
}

#[tokio::test]
async fn more_answers_than_a_round_handles_are_all_handled() {
    let quarantine = &mut Bench::new().await.quarantine;
    let before = quarantine.fleet.nodes_in_cluster();
    let count = 2 * ROUND + 1;
    for number in 0..count {
        let mut object = node(1);
        object["metadata"]["name"] = json!(format!("other-{number}"));
        let view = Arc::new(NodeView::from_object(object).unwrap());
        let answer = RequestAnswer::from(FleetInput::NodeObserved(view));
        quarantine.requests.start(async { answer });
    }
    tokio::time::sleep(std::time::Duration::from_millis(10)).await; // All are there.
    while let Some(answer) = quarantine.requests.next().await {
        quarantine.handle_answers(answer);
    }
    assert_eq!(quarantine.fleet.nodes_in_cluster(), before + count);
}
