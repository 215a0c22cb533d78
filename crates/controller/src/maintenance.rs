//! Monitor of announced maintenance: reads the notices on the Node objects, those of agents and those of
//! the APIs of clouds, and reports each node that has one.
//!
//! ```text
//! known nodes --> notices::node_object --> Book --> events of the check CSPMaintenance
//! agents -------> machines.rs -------------^  |
//! APIs of clouds -> apis.rs ---------------^  +----> begin.rs: the provider may begin
//! ```
//!
//! `requests.rs` carries out `MaintenanceRequest` objects beside it.

mod apis;
mod begin;
mod machines;
mod metrics;
mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use apis::{Apis, Poller};
use clouds::{Environment, Failure};
use cluster::{Cluster, KnownNodes};
use contract::keys;
use fleet::view::{FleetView, NodeStatus};
use jiff::Timestamp;
use model::node::NodeView;
use monitor::{Frame, Monitor, Reporter};
use notices::{Book, MaintenanceConfig, NodeState, Record, Report, node_object};
use runtime::metrics::{Description, Metrics};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use machines::MachineNotices;
use metrics::MaintenanceMetrics;
pub use requests::MaintenanceRequests;

/// Component class of the events, as in NVSentinel.
const CLASS: &str = "CSP";
/// Pause between two looks at the nodes, which are in memory.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Most reports of one look. Others wait for the next one.
const MOST_REPORTS: usize = 1_000;

/// Returns the descriptions of the metrics of the monitor beside those of every monitor.
pub(crate) fn described_metrics() -> Vec<Description> {
    MaintenanceMetrics::described()
}

/// Shows that there is no maintenance, where no monitor runs: an alert on a missing metric knows no
/// configuration.
pub fn show_none(metrics: &Metrics) {
    MaintenanceMetrics::new(metrics);
}

static MONITOR: Monitor = Monitor {
    name: "maintenance",
    agent: notices::AGENT,
    checks: &[(keys::CHECK_CSP_MAINTENANCE, CLASS)],
};

/// The monitor; see the [module](self).
pub struct MaintenanceMonitor {
    config: MaintenanceConfig,
    nodes: KnownNodes,
    machines: MachineNotices,
    fleet: watch::Receiver<Arc<FleetView>>,
    /// Cluster in which nodes are marked whose maintenance may begin; `None` if none may begin before
    /// its time.
    marks: Option<Arc<Cluster>>,
    /// Maintenances that the book notes as told to the provider, before they are.
    noted: BTreeSet<String>,
    reporter: Reporter<Book>,
    records: watch::Sender<Arc<[Record]>>,
    metrics: MaintenanceMetrics,
    apis: Apis,
    /// Loops that ask the APIs, until they run.
    pollers: Vec<Poller>,
    /// Time of the first look.
    begun: Option<Timestamp>,
    /// Numbers of notices of the last look that could not be understood, and that found no room.
    unread: (u64, usize),
}

// === impl MaintenanceMonitor ===

impl MaintenanceMonitor {
    /// Creates the monitor, which [`Self::run`] starts. With `writes` it may mark nodes. Clouds are asked
    /// with the credentials of this process. Fails if no client of theirs can be made.
    pub fn new(
        config: MaintenanceConfig,
        cluster: Arc<Cluster>,
        writes: bool,
        machines: MachineNotices,
        fleet: watch::Receiver<Arc<FleetView>>,
        frame: Frame,
    ) -> Result<Self, Failure> {
        let marks = writes && config.begin_once_drained;
        let (sources, clock) = (frame.sources.clone(), frame.clock);
        let metrics = MaintenanceMetrics::new(&frame.metrics);
        let reporter: Reporter<Book> = Reporter::new(&MONITOR, frame);
        let environment = Environment::of_process();
        let book = reporter.memory();
        let (apis, pollers) = Apis::new(&config.clouds, &environment, book, &sources, clock)?;
        Ok(Self {
            config,
            nodes: cluster.known_nodes(),
            machines,
            fleet,
            marks: marks.then_some(cluster),
            noted: BTreeSet::new(),
            metrics,
            reporter,
            records: watch::Sender::new(Arc::default()),
            apis,
            pollers,
            begun: None,
            unread: (0, 0),
        })
    }

    /// Returns a receiver of all maintenances, which are none until the nodes are read.
    pub fn records(&self) -> watch::Receiver<Arc<[Record]>> {
        self.records.subscribe()
    }

    /// Runs until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let pollers = std::mem::take(&mut self.pollers);
        tokio::select! {
            () = self.observe(&cancel) => {}
            () = apis::ask(pollers) => {}
        }
        self.reporter.finish(&cancel).await;
    }

    /// Looks at the nodes again and again, until `cancel`.
    async fn observe(&mut self, cancel: &CancellationToken) {
        loop {
            self.look();
            self.let_begin().await;
            if !self.reporter.pause(LOOK_EVERY, cancel).await {
                break;
            }
        }
    }

    /// Reads all nodes, and reports what has changed.
    fn look(&mut self) {
        let fleet = Arc::clone(&self.fleet.borrow());
        if !self.nodes.is_complete() || !fleet.ready {
            return;
        }
        let nodes = self.nodes.all();
        let (reading, odd) = node_object::read(nodes.iter().map(AsRef::as_ref));
        self.reporter.has_looked("notices on the Node objects");

        let now = self.reporter.now();
        let mut book = self.reporter.memory().clone();
        let begun = *self.begun.get_or_insert_with(|| {
            let mut sources = self.apis.names();
            sources.extend([node_object::SOURCE, machines::SOURCE]);
            book.keep(&sources, now);
            now
        });
        book.read(node_object::SOURCE, &reading, now);
        self.apis
            .take(&mut book, &nodes.iter().map(AsRef::as_ref), now);
        // A fault of an earlier book ends if no notice is about its node, which only all sources
        // know. One that stays blind does not keep nodes out for ever.
        let is_late = now.duration_since(begun) >= self.config.settings.readiness;
        if self.apis.have_answered(&book) || is_late {
            book.take_over(&reported(&fleet), now);
        }
        let nodes: BTreeMap<&str, &NodeView> = (nodes.iter())
            .map(|node| (node.name.as_str(), node.as_ref()))
            .collect();
        let told = (self.machines).reading(|name| nodes.contains_key(name), book.records());
        book.read(machines::SOURCE, &told, now);
        let out = out_of_service(&fleet);
        let state = |name: &str| {
            let node = nodes.get(name)?;
            Some(NodeState {
                ready: node.is_ready,
                boot_id: node.machine.boot_id.clone(),
                is_out: out.contains(name),
            })
        };
        let reports = book.step(state, &self.config.settings, MOST_REPORTS, now);
        let unread = (odd, book.take_left_out());
        let before = std::mem::replace(&mut self.unread, unread);
        // Each is counted once, not at every look.
        self.reporter.cannot_read(odd.saturating_sub(before.0));
        let lost = unread.1.saturating_sub(before.1);
        self.reporter.has_lost(lost as u64);
        self.records.send_if_modified(|shown| {
            let is_new = **shown != *book.records();
            if is_new {
                *shown = book.records().into();
                self.metrics.show(book.records());
            }
            is_new
        });
        if book != *self.reporter.memory() {
            *self.reporter.memory_mut() = book;
        }
        self.apis.show(self.reporter.memory());
        for report in reports {
            self.report(&report, now);
        }
    }

    fn report(&mut self, report: &Report, now: Timestamp) {
        let check = keys::CHECK_CSP_MAINTENANCE;
        let mut event = self.reporter.event_about(&report.node, check, CLASS);
        report.fill(&mut event, |kind| self.config.action(kind));
        self.reporter.report(event, now);
    }
}

/// Returns the nodes with an open fault of this monitor, which a monitor with another book may have
/// reported.
fn reported(fleet: &FleetView) -> BTreeSet<&str> {
    let is_reported = |node: &&NodeStatus| {
        (node.faults.iter().chain(&node.notices)).any(|fault| {
            // One of another program is its own to end.
            fault.reported_by.is_none() && fault.check == keys::CHECK_CSP_MAINTENANCE
        })
    };
    let reported = fleet.nodes.iter().filter(is_reported);
    reported.map(|node| node.name.as_str()).collect()
}

/// Returns the nodes that gpuwarden has taken out of service.
fn out_of_service(fleet: &FleetView) -> BTreeSet<&str> {
    let is_out = |node: &&NodeStatus| node.state.is_out();
    let out = fleet.nodes.iter().filter(is_out);
    out.map(|node| node.name.as_str()).collect()
}
