//! Console on a free port, over a real store in its own directory, with an HTTP/1.1 client.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use analysis::RulesText;
use analysis::ledger::Ledger;
use bytes::Bytes;
use contract::{Entity, HealthEvent, RecommendedAction, json, keys};
use devices::DeviceApi;
use fleet::session::Phase;
use fleet::view::{FaultView, FleetView, NodeState, NodeStatus, SessionView};
use gpuwarden_console::api::{Mode, PolicyView, ProcessView, Role};
use gpuwarden_console::{Console, ControllerPart, LeadershipSource};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use model::event;
use model::fault::FaultBook;
use runtime::metrics::Metrics;
use runtime::sources::{SourceHandle, SourceState, Sources};
use serde::de::DeserializeOwned;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventStore, NewEvent};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use trial::why_not::WhyNot;

/// Longest wait; far above anything the tests need.
pub(crate) const ENOUGH: Duration = Duration::from_secs(30);

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) fleet: watch::Sender<Arc<FleetView>>,
    pub(crate) sources: Sources,
    pub(crate) kernel_log: SourceHandle,
    pub(crate) store: Arc<SqliteStore>,
    pub(crate) ledger: watch::Sender<Ledger>,
    pub(crate) metrics: Metrics,
    pub(crate) devices: DeviceApi,
    pub(crate) cancel: CancellationToken,
    pub(crate) task: JoinHandle<TcpListener>,
    /// Passed time of the sources, in seconds.
    passed: Arc<AtomicU64>,
    dir: tempfile::TempDir,
}

/// Response with its whole body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) text: String,
}

/// Body that is read as it arrives.
pub(crate) struct Lines {
    body: Incoming,
    buffer: Vec<u8>,
}

/// Returns an XID of a GPU of `node`, as the kernel log monitor reports it.
pub(crate) fn xid(node: &str, code: &str, message: &str, at: Timestamp) -> HealthEvent {
    let entity = |entity_type: &str, value: &str| Entity {
        entity_type: entity_type.to_owned(),
        entity_value: value.to_owned(),
    };
    HealthEvent {
        version: 1,
        agent: keys::SYSLOG_AGENT.to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check_name: keys::CHECK_XID.to_owned(),
        is_fatal: true,
        message: message.to_owned(),
        recommended_action: RecommendedAction::RestartBm as i32,
        error_code: vec![code.to_owned()],
        entities_impacted: vec![entity(keys::ENTITY_PCI, "0000:b3:00")],
        metadata: [(keys::META_BOOT_ID.to_owned(), "b00t".to_owned())].into(),
        generated_timestamp: Some(json::proto_timestamp(at)),
        node_name: node.to_owned(),
        ..HealthEvent::default()
    }
}

/// Returns the process facts of a role.
pub(crate) fn process(role: Role, started_at: Timestamp) -> ProcessView {
    ProcessView {
        version: "0.1.0".into(),
        node_name: "gpu-a-01".into(),
        role,
        mode: Mode::Observe,
        started_at,
        data_dir: "/var/lib/gpuwarden".into(),
        data_dir_is_default: true,
        socket: "/var/run/nvsentinel.sock".into(),
    }
}

// === impl Server ===

impl Server {
    /// Starts a server that is ready and has no problems.
    pub(crate) async fn start() -> Self {
        Self::start_as(Role::Run, None).await
    }

    /// Starts a server in another role, with another source of the leader.
    pub(crate) async fn start_as(role: Role, leadership: Option<LeadershipSource>) -> Self {
        let now = Timestamp::now();
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(dir.path()).unwrap());
        let (fleet, receiver) = watch::channel(Arc::new(FleetView {
            ready: true,
            ..FleetView::default()
        }));
        let policy = watch::Sender::new(Arc::new(PolicyView {
            source: "built in".into(),
            rule_sets: vec!["fatal-fault".into()],
            loaded_at: Some(now),
            ..PolicyView::default()
        }));
        let passed = Arc::new(AtomicU64::new(0));
        let elapsed = Arc::clone(&passed);
        let sources =
            Sources::with_elapsed(move || Duration::from_secs(elapsed.load(Ordering::Relaxed)));
        let kernel_log = sources.add("kernel-log", "/dev/kmsg", now);
        kernel_log.update(now, |status| status.state = SourceState::Following);
        let ledger = watch::Sender::new(Ledger::default());
        let rules = watch::Sender::new(Arc::new(RulesText {
            source: "rules.toml".into(),
            text: "# none\n".into(),
        }));
        let metrics = Metrics::default();
        let devices = DeviceApi::new(&metrics, Timestamp::now);
        let console = Console {
            process: process(role, now),
            sources: sources.clone(),
            places: watch::Sender::default().subscribe(),
            leadership,
            controller: Some(ControllerPart {
                fleet: receiver.clone(),
                policy: policy.subscribe(),
                why_not: Arc::new(move |node| {
                    let why = known_or_not(&node, &receiver.borrow());
                    Box::pin(async move { Some(why) })
                }),
                unhealthy_gpus: Arc::new(|_| Box::pin(async { Vec::new() })),
                rules: Some(rules.subscribe()),
                ledger: ledger.subscribe(),
                maintenances: None,
                store: Arc::clone(&store) as Arc<dyn EventStore>,
                forwarding: None,
            }),
            agent: None,
            devices: Some(devices.clone()),
            metrics: metrics.clone(),
            clock: Timestamp::now,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cancel = CancellationToken::new();
        let task = tokio::spawn(gpuwarden_console::serve(listener, console, cancel.clone()));
        Self {
            address,
            fleet,
            sources,
            kernel_log,
            store,
            ledger,
            metrics,
            devices,
            cancel,
            task,
            passed,
            dir,
        }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Advances the time of the sources.
    pub(crate) fn pass(&self, time: Duration) {
        self.passed.fetch_add(time.as_secs(), Ordering::Relaxed);
    }

    pub(crate) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    pub(crate) async fn store(&self, events: Vec<HealthEvent>) {
        let now = Timestamp::now();
        let events = events.into_iter().map(|mut event| {
            event::normalise(&mut event, now);
            NewEvent {
                event,
                received_at: now,
            }
        });
        self.store.append(events.collect()).await.unwrap();
    }

    /// Stores events and publishes the faults that they open, as the controller would.
    pub(crate) async fn take(&self, events: Vec<HealthEvent>) {
        self.store(events).await;
        let records = self.store.feed(0.into(), 10_000).await.unwrap();
        let mut book = FaultBook::default();
        for record in &records {
            book.record(record);
        }
        let nodes = book.nodes().map(|node| NodeStatus {
            name: node.to_owned(),
            state: NodeState::of(&book.faults(node).iter().collect::<Vec<_>>(), None),
            session: None,
            in_cluster: None,
            unschedulable: None,
            faults: book.faults(node).iter().map(FaultView::of).collect(),
            notices: vec![],
            devices: vec![],
            notes: Vec::new(),
        });
        let view = FleetView {
            applied: book.applied(),
            ready: true,
            nodes: nodes.collect(),
            ..FleetView::default()
        };
        self.fleet.send_replace(Arc::new(view));
    }

    /// Publishes a node as quarantined a moment ago.
    pub(crate) fn quarantine(&self, node: &str) {
        self.fleet.send_modify(|view| {
            let view = Arc::make_mut(view);
            for status in view.nodes.iter_mut().filter(|status| status.name == node) {
                status.state = NodeState::Session(Phase::Quarantined);
                status.in_cluster = Some(true);
                status.unschedulable = Some(true);
                status.session = Some(SessionView {
                    id: "0123456789abcdef01234567".into(),
                    phase: Phase::Quarantined,
                    since: Timestamp::now(),
                    failures: 0,
                    proposal: None,
                    drain: None,
                    another: None,
                    awaits: "the recovery of its faults, or a release by hand".into(),
                    cordoned: true,
                    uncordon_releases: true,
                });
            }
        });
    }

    /// Sends a request on a new connection.
    pub(crate) async fn send(&self, method: &str, path: &str, host: &str) -> Response<Incoming> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(async move { drop(connection.await) });
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", host)
            .body(Empty::<Bytes>::new())
            .unwrap();
        tokio::time::timeout(ENOUGH, sender.send_request(request))
            .await
            .unwrap()
            .unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.read(self.send("GET", path, "localhost").await).await
    }

    pub(crate) async fn read(&self, response: Response<Incoming>) -> Answer {
        let (head, body) = response.into_parts();
        let body = tokio::time::timeout(ENOUGH, body.collect())
            .await
            .unwrap()
            .unwrap();
        let text = String::from_utf8(body.to_bytes().to_vec()).unwrap();
        Answer {
            status: head.status,
            headers: head.headers,
            text,
        }
    }

    pub(crate) async fn stream(&self, path: &str) -> Lines {
        let response = self.send("GET", path, "localhost").await;
        assert_eq!(response.status(), 200);
        Lines {
            body: response.into_body(),
            buffer: Vec::new(),
        }
    }
}

/// Returns the controller's answer about a node, reduced to the fields that routes use. The
/// cluster has `gpu-b-01`, without a fault.
fn known_or_not(node: &str, fleet: &FleetView) -> WhyNot {
    let in_cluster = node == "gpu-b-01";
    WhyNot {
        node: node.to_owned(),
        answer: format!("{node} is not quarantined: no fault of it is open"),
        checks: Vec::new(),
        in_cluster: Some(in_cluster),
        // In the product, a process also knows the node that it runs on.
        known: in_cluster
            || node == "gpu-a-01"
            || fleet.nodes.iter().any(|status| status.name == node),
        nearest: vec!["gpu-b-01".to_owned()],
    }
}

// === impl Answer ===

impl Answer {
    pub(crate) fn json<T: DeserializeOwned>(&self) -> T {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }
}

// === impl Lines ===

impl Lines {
    /// Returns the next line that is not empty; `None` when the stream has ended.
    pub(crate) async fn next(&mut self) -> Option<String> {
        tokio::time::timeout(ENOUGH, self.read())
            .await
            .expect("a line, or the end, in time")
    }

    async fn read(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let line = String::from_utf8(line).unwrap().trim_end().to_owned();
                if !line.is_empty() {
                    return Some(line);
                }
                continue;
            }
            let frame = self.body.frame().await?.ok()?;
            if let Some(data) = frame.data_ref() {
                self.buffer.extend_from_slice(data);
            }
        }
    }
}
