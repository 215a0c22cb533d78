//! The HTTP side: routes, and what they have in common.
//!
//! Only `GET`, no state of its own, every stream counted. Each role shows the parts that it has,
//! by the same routes. `guard` turns away what a web page of somebody else might send;
//! `runtime::http_server` accepts connections.

mod agent;
mod changes;
mod controller;
mod error;
mod events;
mod guard;
mod health;
mod node;
mod page;
mod query;
mod room;
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

/// Returns the state of the election.
pub type LeadershipSource = Arc<dyn Fn() -> LeadershipView + Send + Sync>;

/// The parts that the console shows.
#[derive(Clone)]
pub struct Console {
    /// The process itself.
    pub process: ProcessView,
    /// The sources of events, and their freshness.
    pub sources: Sources,
    /// The troubles with the files that the process uses.
    pub places: watch::Receiver<Vec<String>>,
    /// The election; `None`: there is none.
    pub leadership: Option<LeadershipSource>,
    /// The part of a process that has events and decides. A process that has neither this part
    /// nor that of an agent stands by.
    pub controller: Option<ControllerPart>,
    /// The part of an agent.
    pub agent: Option<AgentPart>,
    /// The GPUs of this machine; `None`: this process does not look after any.
    pub devices: Option<DeviceApi>,
    /// The metrics.
    pub metrics: Metrics,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// The state that all routes share.
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

/// Serves until `cancel`, and ends within a second of it: streams are closed, requests under
/// way may finish. Returns the listener. Connections are bounded as by [`http_server::serve`].
pub async fn serve(
    listener: TcpListener,
    console: Console,
    cancel: CancellationToken,
) -> TcpListener {
    let check_host = CheckHost::of(&listener);
    let routes = routes(App::new(console, cancel.clone()), check_host);
    http_server::serve(listener, None, routes, cancel).await
}

/// The paths of a process that has no events and decides nothing: an agent, or a controller
/// that stands by.
const SERVED_BY_ALL: &[&str] = &["/", "/api/v1/status", "/metrics", "/healthz", "/readyz"];
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

fn routes(app: App, check_host: CheckHost) -> Router {
    let has_page = app.console.controller.is_some();
    let mut router = Router::new()
        .route("/api/v1/status", get(status::status))
        .route("/api/v1/events", get(events::events))
        .route("/api/v1/nodes/{name}/explain", get(node::explain))
        .route("/api/v1/nodes/{name}/why-not", get(node::why_not))
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

    /// Returns the part with the events, or where it is to be found.
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

    /// Returns the GPUs of this machine, by their index.
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
