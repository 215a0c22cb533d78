//! The HTTP side: routes, and what they have in common.
//!
//! Only `GET`, no state of its own, every stream and connection counted. `guard` turns
//! away what a web page of somebody else might send; `server` accepts connections.

mod agent;
mod changes;
mod error;
mod events;
mod guard;
mod health;
mod node;
mod page;
mod query;
mod room;
mod server;
mod standby;
mod status;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use connector::Forwarding;
use domain::view::FleetView;
use futures::future::BoxFuture;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::EventStore;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use trial::why_not::WhyNot;

pub use agent::{AgentConsole, serve_agent};
pub use changes::MAX_SUBSCRIBERS;
pub use events::MAX_FOLLOWERS;
pub use server::MAX_CONNECTIONS;
pub use standby::{StandbyConsole, serve_standby};

use crate::api::{LeadershipView, Mode, PolicyView, Role, Status, StoreView};
use error::Refusal;
use guard::CheckHost;
use room::Room;

/// Answers why the node of a name is, or is not, quarantined; `None` where who knows it has
/// ended.
pub type WhyNotSource = Arc<dyn Fn(String) -> BoxFuture<'static, Option<WhyNot>> + Send + Sync>;

/// Says who leads.
pub type LeadershipSource = Arc<dyn Fn() -> LeadershipView + Send + Sync>;

/// What the console shows, and where it reads it.
#[derive(Clone)]
pub struct Console {
    /// What does not change while the process lives.
    pub info: Info,
    /// State of the fleet.
    pub fleet: watch::Receiver<Arc<FleetView>>,
    /// What decides about quarantine.
    pub policy: watch::Receiver<Arc<PolicyView>>,
    /// What can be seen, and how fresh that is.
    pub sources: Sources,
    /// Who knows why a node is, or is not, quarantined.
    pub why_not: WhyNotSource,
    /// Who leads; `None`: there is no election.
    pub leadership: Option<LeadershipSource>,
    /// Events and journal.
    pub store: Arc<dyn EventStore>,
    /// What hands events on to another service, where that is asked for.
    pub forwarding: Option<Forwarding>,
    /// What is wrong with the places of the process in the file system.
    pub places: watch::Receiver<Vec<String>>,
    /// What `/metrics` shows.
    pub metrics: Metrics,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// What does not change while the process lives.
#[derive(Clone, Debug)]
pub struct Info {
    /// Version of gpuwarden.
    pub version: String,
    /// Name of the node that it runs on; of the host, where it watches no node.
    pub node_name: String,
    /// What it is.
    pub role: Role,
    /// What it may do to the cluster.
    pub mode: Mode,
    /// When the process started.
    pub started_at: Timestamp,
    /// Where it keeps its data.
    pub data_dir: String,
    /// Whether that is the place where commands look by themselves.
    pub data_dir_is_default: bool,
    /// Unix socket on which it takes events.
    pub socket: String,
}

// === impl Info ===

impl Info {
    /// The status document of a process that sees and does nothing yet: each role adds what
    /// it has.
    fn status(&self, now: Timestamp) -> Status {
        Status {
            version: self.version.clone(),
            node_name: self.node_name.clone(),
            role: self.role,
            mode: self.mode,
            started_at: self.started_at,
            now,
            data_dir: self.data_dir.clone(),
            socket: self.socket.clone(),
            policy: PolicyView::default(),
            fleet: FleetView::default(),
            xids: BTreeMap::new(),
            sources: Vec::new(),
            store: StoreView::default(),
            delivery: None,
            leadership: None,
            forward: None,
            ready: false,
            not_ready: Vec::new(),
        }
    }
}

/// What every route gets.
struct App {
    console: Console,
    /// Places for `/api/v1/stream`.
    subscribers: Arc<Semaphore>,
    /// Places for `/api/v1/events?follow=true`.
    followers: Arc<Semaphore>,
    /// Room for answers.
    room: Room,
    /// Ends the streams.
    cancel: CancellationToken,
}

/// The routes, as for a listener on loopback: a `Host` that is neither an IP address
/// nor known is refused.
pub fn router(console: Console) -> Router {
    routes(App::new(console, CancellationToken::new()), CheckHost(true))
}

/// Serves until `cancel`, and ends within a second of it: streams are closed, requests
/// under way may finish. At most [`MAX_CONNECTIONS`] connections are kept at a time;
/// further ones get one answer each.
pub async fn serve(listener: TcpListener, console: Console, cancel: CancellationToken) {
    let check_host = CheckHost::of(&listener);
    let routes = routes(App::new(console, cancel.clone()), check_host);
    drop(server::serve(listener, routes, cancel, server::Limits::default()).await);
}

/// The paths of a whole gpuwarden and of a controller that leads.
const SERVED: &[&str] = &[
    "/",
    "/api/v1/status",
    "/api/v1/events",
    "/api/v1/nodes/NAME/explain",
    "/api/v1/nodes/NAME/why-not",
    "/api/v1/stream",
    "/metrics",
    "/healthz",
    "/readyz",
];
/// The paths of a process that has no events and decides nothing: an agent, or a controller
/// that stands by.
const SERVED_BY_ALL: &[&str] = &["/", "/api/v1/status", "/metrics", "/healthz", "/readyz"];

/// Whether `path` is one that only a process with events serves.
fn needs_events(path: &str) -> bool {
    let of_events = ["/api/v1/events", "/api/v1/stream"];
    of_events.contains(&path) || path.starts_with("/api/v1/nodes/")
}

fn routes(app: App, check_host: CheckHost) -> Router {
    let app = Arc::new(app);
    let mut router = Router::new()
        .route("/api/v1/status", get(status::status))
        .route("/api/v1/events", get(events::events))
        .route("/api/v1/nodes/{name}/explain", get(node::explain))
        .route("/api/v1/nodes/{name}/why-not", get(node::why_not))
        .route("/api/v1/stream", get(changes::stream))
        .route("/metrics", get(health::metrics))
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz));
    for file in page::FILES {
        let answer = ([(header::CONTENT_TYPE, file.content_type)], file.content);
        router = router.route(file.path, get(async move || answer));
    }
    router
        .fallback(async || Refusal::unknown_route(SERVED))
        .layer(from_fn_with_state(check_host, guard::guard))
        .with_state(app)
}

// === impl App ===

impl App {
    fn new(console: Console, cancel: CancellationToken) -> Self {
        Self {
            room: Room::new(&console.metrics),
            console,
            subscribers: Arc::new(Semaphore::new(MAX_SUBSCRIBERS)),
            followers: Arc::new(Semaphore::new(MAX_FOLLOWERS)),
            cancel,
        }
    }

    fn now(&self) -> Timestamp {
        (self.console.clock)()
    }
}
