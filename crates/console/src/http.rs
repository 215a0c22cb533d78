//! HTTP server: routes, and their shared state.
//!
//! It serves only `GET`, keeps no state and counts all streams. Each role serves the parts that
//! it has, under the same routes. `guard` refuses requests that a foreign web page could send;
//! `runtime::http_server` accepts connections.

mod agent;
mod changes;
mod controller;
mod error;
mod events;
mod guard;
mod health;
mod incidents;
mod ledger;
mod maintenance;
mod node;
mod page;
mod query;
pub(crate) mod room;
mod rules;
mod status;

use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use devices::DeviceApi;
use jiff::Timestamp;
use runtime::http_server;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::EventStore;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

pub use agent::AgentPart;
pub use changes::MAX_SUBSCRIBERS;
pub use controller::{ControllerPart, UnhealthyGpuSource, WhyNotSource};
pub use events::MAX_FOLLOWERS;

use crate::api::{GpuView, LeadershipView, ProcessView};
use error::Refusal;
use guard::CheckHost;
use room::Room;

/// Returns the state of the leader election.
pub type LeadershipSource = Arc<dyn Fn() -> LeadershipView + Send + Sync>;

/// Parts that the console shows.
#[derive(Clone)]
pub struct Console {
    pub process: ProcessView,
    /// Sources of events, with their freshness.
    pub sources: Sources,
    /// Problems with the files that the process uses.
    pub places: watch::Receiver<Vec<String>>,
    /// State of the leader election; `None` without one.
    pub leadership: Option<LeadershipSource>,
    /// Part of a process that stores events and makes decisions. A process with neither this
    /// part nor that of an agent is a standby.
    pub controller: Option<ControllerPart>,
    pub agent: Option<AgentPart>,
    /// GPUs of this machine; `None` if this process does not monitor any.
    pub devices: Option<DeviceApi>,
    pub metrics: Metrics,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// State that all routes share.
struct App {
    console: Console,
    /// Limits clients of `/api/v1/stream`.
    subscribers: Arc<Semaphore>,
    /// Limits clients of `/api/v1/events?follow=true`.
    followers: Arc<Semaphore>,
    /// Memory budget of responses.
    room: Room,
    cancel: CancellationToken,
}

/// Serves until `cancel`, and ends within a second of it: streams are closed, running requests
/// may finish. Returns the listener. Connections are limited as by [`http_server::serve`].
pub async fn serve(
    listener: TcpListener,
    console: Console,
    cancel: CancellationToken,
) -> TcpListener {
    let check_host = CheckHost::of(&listener);
    let routes = routes(App::new(console, cancel.clone()), check_host);
    http_server::serve(listener, None, routes, cancel).await
}

/// Paths of an agent or a standby controller, which have no events.
const SERVED_BY_ALL: &[&str] = &["/", "/api/v1/status", "/metrics", "/healthz", "/readyz"];
/// Paths of a standalone gpuwarden and of a leading controller.
const SERVED: &[&str] = &[
    "/",
    "/api/v1/status",
    "/api/v1/events",
    "/api/v1/nodes/NAME/explain",
    "/api/v1/nodes/NAME/why-not",
    "/api/v1/incidents",
    "/api/v1/incidents/NAME",
    "/api/v1/ledger",
    "/api/v1/ledger/NAME",
    "/api/v1/maintenance",
    "/api/v1/rules",
    "/api/v1/stream",
    "/metrics",
    "/healthz",
    "/readyz",
];

fn routes(app: App, check_host: CheckHost) -> Router {
    let has_page = app.console.controller.is_some();
    let mut router = Router::new()
        .route("/api/v1/status", get(status::status))
        .route("/api/v1/events", get(events::events))
        .route("/api/v1/nodes/{name}/explain", get(node::explain))
        .route("/api/v1/nodes/{name}/why-not", get(node::why_not))
        .route("/api/v1/incidents", get(incidents::incidents))
        .route("/api/v1/incidents/{name}", get(incidents::incident))
        .route("/api/v1/ledger", get(ledger::ledger))
        .route("/api/v1/ledger/{name}", get(ledger::entry))
        .route("/api/v1/maintenance", get(maintenance::maintenances))
        .route("/api/v1/rules", get(rules::rules))
        .route("/api/v1/stream", get(changes::stream))
        .route("/metrics", get(health::metrics))
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz));
    if has_page {
        for file in page::FILES {
            let answer = ([(header::CONTENT_TYPE, file.content_type)], file.content);
            router = router.route(file.path, get(async move || answer));
        }
    } else {
        router = router.route("/", get(page::text));
    }
    let served = if has_page { SERVED } else { SERVED_BY_ALL };
    router
        .fallback(async move || Refusal::unknown_route(served))
        .layer(from_fn_with_state(check_host, guard::guard))
        .with_state(Arc::new(app))
}

// === impl App ===

impl App {
    fn new(console: Console, cancel: CancellationToken) -> Self {
        let room = Room::default();
        if console.controller.is_some() {
            room.register(&console.metrics);
        }
        Self {
            room,
            console,
            subscribers: Arc::new(Semaphore::new(MAX_SUBSCRIBERS)),
            followers: Arc::new(Semaphore::new(MAX_FOLLOWERS)),
            cancel,
        }
    }

    /// Returns the part with the events, or an error that names the process which has it.
    fn controller(&self) -> Result<&ControllerPart, Refusal> {
        self.console.controller.as_ref().ok_or_else(|| {
            if let Some(agent) = &self.console.agent {
                return Refusal::elsewhere(
                    "this is an agent: events, faults and decisions are at its controller"
                        .to_owned(),
                    format!(
                        "Ask the controller to which it delivers, {}: run the command there, or \
                         name its API with --server.",
                        agent.controller
                    ),
                );
            }
            let standby = self.stands_by().unwrap_or_default();
            Refusal::elsewhere(
                format!("this controller does not act, {standby}"),
                "Ask the controller that leads: run the command there, or name its API with \
                 --server."
                    .to_owned(),
            )
        })
    }

    fn store(&self) -> Result<&dyn EventStore, Refusal> {
        Ok(self.controller()?.store.as_ref())
    }

    /// Returns the GPUs of this machine, ordered by index.
    fn gpus(&self) -> Vec<GpuView> {
        let gpus = self.console.devices.iter().flat_map(DeviceApi::gpus);
        let mut gpus: Vec<GpuView> = gpus.map(|gpu| GpuView::of(&gpu)).collect();
        gpus.sort_by_key(|gpu| gpu.index);
        gpus
    }

    fn now(&self) -> Timestamp {
        (self.console.clock)()
    }
}
