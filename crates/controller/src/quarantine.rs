//! Fault quarantine: the task around the decisions about all nodes.
//!
//! ```text
//! store feed --(hint)--> events ---+
//! node watch, switches, policy ----+--> fleet --> effects: patches, questions to the
//! answers, timers -----------------+                      store, journal, conditions
//! ```
//!
//! It turns I/O into inputs of [`Fleet`] and its effects into I/O, and decides nothing itself.
//! One patch per node is under way at a time; how many in all, the API server's answers decide
//! (`cluster`'s pace).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::Cluster;
use fleet::brake::NodeLabel;
use fleet::drain::DrainConfig;
use fleet::remediation::RemediationConfig;
use fleet::status::StatusUpdate;
use fleet::view::FleetView;
use fleet::{Fleet, FleetInput, Settings};
use jiff::{SignedDuration, Timestamp};
use model::mode::Mode;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::EventStore;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod apply;
mod ask;
mod devices;
mod drain;
mod drain_metrics;
mod intake;
mod journal;
mod metrics;
mod missed;
mod nodes;
mod publish;
mod questions;
mod remediation;
mod remediation_metrics;
mod statuses;
mod switches;
#[cfg(test)]
mod tests;

pub use fleet::Owns;
pub use journal::JournalWriter;
pub use questions::Questions;
pub use statuses::StatusWriter;

use crate::conditions::Board;

use apply::Applied;
use devices::{Changed, DeviceTaints};
use drain::{Drains, Removed};
use drain_metrics::DrainMetrics;
use intake::{FeedFailure, SaveState};
use journal::{JOURNAL_QUEUE, Journal};
use metrics::QuarantineMetrics;
use missed::Missed;
use publish::Publishing;
use questions::{MAX_QUESTIONS, Question};
use remediation::{Made, Remediations};
use remediation_metrics::RemediationMetrics;
use statuses::STATUS_QUEUE;
use switches::{Arrival, Switches};

use crate::policy::CurrentPolicy;

/// Node events, or answers, that are taken in before the nodes are looked at again: the brake
/// goes through all nodes, and is asked once about what comes together.
const ROUND: usize = 256;

/// The settings and parts that the task works with.
pub struct QuarantineConfig {
    /// The events.
    pub store: Arc<dyn EventStore>,
    /// The cluster; `None`: there is none, and nothing to act on.
    pub cluster: Option<Arc<Cluster>>,
    /// The policy, as it changes.
    pub policy: CurrentPolicy,
    /// The mode, which says what it may do.
    pub mode: Mode,
    /// The nodes for which nobody else speaks.
    pub owns: Owns,
    /// The sources of the node that this process runs on.
    pub sources: Sources,
    /// True if the brake holds nodes back; without it only a pause does.
    pub brake: bool,
    /// What is wished for the pods of nodes that are out; `None`: they stay.
    pub drain: Option<Arc<DrainConfig>>,
    /// What is done to mend nodes that are drained; `None`: nothing.
    pub remediation: Option<Arc<RemediationConfig>>,
    /// Label of GPU nodes, whose number the brake's percentages are of.
    pub gpu_label: NodeLabel,
    /// Namespace of the `ConfigMaps` in which people set the circuit breaker and a pause.
    pub namespace: String,
    /// The board for what is told on the nodes; `None`: nothing is.
    pub board: Option<Board>,
    /// Whether Kubernetes Events of nodes tell of drains.
    pub events: bool,
    /// The faults of a node that the cluster no longer has are dropped once its newest report is
    /// this old.
    pub retention: SignedDuration,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// The task. See the module.
pub struct Quarantine {
    fleet: Fleet,
    store: Arc<dyn EventStore>,
    cluster: Option<Arc<Cluster>>,
    policies: CurrentPolicy,
    sources: Sources,
    events: bool,
    board: Option<Board>,
    clock: fn() -> Timestamp,
    metrics: QuarantineMetrics,
    namespace: String,
    /// The switches that people have set in the cluster; `None`: there is none.
    switches: Option<Switches>,
    /// The time of the first event of each node that is not decided about yet, and their number.
    undecided: BTreeMap<String, (Instant, u32)>,
    saving: SaveState,
    missed: Missed,
    /// The failure to read the feed, if there is one.
    feed_failure: Option<FeedFailure>,
    cluster_error: Option<String>,
    /// Requests to the API server that are under way.
    requests: JoinSet<Answered>,
    /// The watch of single devices, and their rules.
    devices: DeviceTaints,
    /// The watches of pods; `None`: there is no cluster.
    drains: Option<Drains>,
    drain_metrics: DrainMetrics,
    /// The custom resources of repairs; `None`: there is no cluster.
    remediations: Option<Remediations>,
    remediation_metrics: RemediationMetrics,
    /// Questions to the store that are under way; each ends with its answer.
    asking: JoinSet<FleetInput>,
    journal: Journal,
    /// The way of statuses to the [`StatusWriter`].
    statuses: mpsc::Sender<StatusUpdate>,
    questions: mpsc::Receiver<Question>,
    publishing: Publishing,
}

/// A request to the API server, with its answer.
enum Answered {
    /// The patch of a node.
    Patch(Box<Applied>),
    /// The change of a rule that taints a device.
    Rule(Box<Changed>),
    /// The removal of a pod, or the request that it writes a checkpoint.
    Pod(Removed),
    /// The creation or deletion of a custom resource.
    Resource(Made),
}

/// The handles by which others reach the task.
pub struct Handles {
    /// The state of all nodes, as it changes.
    pub view: watch::Receiver<Arc<FleetView>>,
    /// Answers why a node is, or is not, quarantined.
    pub questions: Questions,
    /// Writes the journal; runs until the task is gone and all is written.
    pub journal: JournalWriter,
    /// Writes the statuses of events; runs as long.
    pub statuses: StatusWriter,
}

// === impl Quarantine ===

impl Quarantine {
    /// Returns a task that has not begun.
    pub fn new(config: QuarantineConfig, metrics: &Metrics) -> (Self, Handles) {
        let (view, view_receiver) = watch::channel(Arc::new(FleetView::default()));
        let (journal, queue) = mpsc::channel(JOURNAL_QUEUE);
        let (statuses, status_queue) = mpsc::channel(STATUS_QUEUE);
        let drain_metrics = DrainMetrics::registered(metrics);
        let remediation_metrics = RemediationMetrics::registered(metrics);
        let metrics = QuarantineMetrics::registered(metrics);
        let (ask, questions) = mpsc::channel(MAX_QUESTIONS);
        let handles = Handles {
            view: view_receiver,
            questions: Questions(ask),
            journal: JournalWriter::new(queue, Arc::clone(&config.store)),
            statuses: StatusWriter {
                queue: status_queue,
                store: Arc::clone(&config.store),
                metrics: metrics.clone(),
            },
        };
        let policy = config.policy.borrow().clone();
        let identity = config.store.identity();
        let settings = Settings {
            mode: config.mode,
            owns: config.owns,
            cluster: config.cluster.is_some(),
            store: identity.id,
            since: identity.since,
            brake: config.brake,
            gpu_label: config.gpu_label,
            drain: config.drain,
            remediation: config.remediation,
            retention: config.retention,
            returns_wait: true,
        };
        let task = Self {
            fleet: Fleet::new(settings, policy, (config.clock)()),
            store: config.store,
            cluster: config.cluster,
            policies: config.policy,
            sources: config.sources,
            board: config.board,
            events: config.events,
            clock: config.clock,
            namespace: config.namespace,
            switches: None,
            undecided: BTreeMap::new(),
            metrics,
            saving: SaveState::default(),
            missed: Missed::default(),
            feed_failure: None,
            cluster_error: None,
            requests: JoinSet::new(),
            devices: DeviceTaints::default(),
            drains: None,
            drain_metrics,
            remediations: None,
            remediation_metrics,
            asking: JoinSet::new(),
            journal: Journal::new(journal),
            statuses,
            questions,
            publishing: Publishing::new(view),
        };
        (task, handles)
    }

    /// Runs until `cancel`; patches under way are brought to their end. Ends by itself where
    /// the store or a watch of the cluster has ended.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut hints = self.store.latest();
        let mut node_events = self
            .cluster
            .as_ref()
            .map(|one| one.watch_nodes(cancel.clone()));
        let mut policies = self.policies.clone();
        self.switches = (self.cluster.clone())
            .map(|cluster| Switches::new(cluster, self.namespace.clone(), &cancel));
        self.take_switches();
        self.watch_devices(&cancel);
        let (drains, mut pod_events) = (self.cluster.as_ref())
            .map(|cluster| Drains::new(cluster, &cancel))
            .unzip();
        self.drains = drains;
        let (remediations, mut resource_events) = (self.cluster.as_ref())
            .map(|cluster| Remediations::new(cluster, &cancel))
            .unzip();
        self.remediations = remediations;
        self.load().await;
        self.take_in().await;
        loop {
            self.take_in_if_due().await;
            self.read_missed().await;
            self.decide();
            self.save_if_due().await;
            let wake = self.next_wake();
            tokio::select! {
                () = cancel.cancelled() => break,
                changed = hints.changed() => {
                    if changed.is_err() {
                        break; // The store is closed.
                    }
                    if self.take_page().await {
                        hints.mark_changed();
                    }
                }
                event = nodes::receive(&mut node_events) => match event {
                    Some(event) => {
                        self.node_event(event);
                        self.node_events(node_events.as_mut());
                    }
                    None => break, // Nothing more would be seen.
                },
                Some(done) = self.requests.join_next() => self.take_answers(done),
                event = nodes::receive(&mut self.devices.events) => match event {
                    Some(event) => self.device_events(event),
                    None => break, // The same.
                },
                event = nodes::receive(&mut pod_events) => match event {
                    Some(event) => self.pod_events(event, &mut pod_events),
                    None => break, // The same.
                },
                event = nodes::receive(&mut resource_events) => match event {
                    Some(event) => self.resource_event(event),
                    None => break, // The same.
                },
                Some(done) = self.asking.join_next() => self.asked(done),
                arrival = arrival(&mut self.switches) => match arrival {
                    Some(arrival) => self.switched(arrival),
                    None => break, // The same for the brake.
                },
                Some(question) = self.questions.recv() => self.answer(question),
                () = changed(&mut policies) => {
                    let policy = self.policies.borrow().clone();
                    self.take(FleetInput::Policy(policy));
                    self.watch_devices(&cancel);
                }
                () = sleep_until(wake) => {
                    self.wake_switches();
                    if self.publishing.at.is_some_and(|at| at <= Instant::now()) {
                        self.publish();
                        self.count_backlog().await;
                    }
                }
            }
        }
        while let Some(done) = self.requests.join_next().await {
            self.take_answers(done);
        }
        self.save().await;
    }

    /// Takes an answer, and those that are there beside it: the brake, which goes through all nodes, is asked
    /// once about what comes together.
    fn take_answers(&mut self, first: Result<Answered, JoinError>) {
        self.take_answer(first);
        for _ in 1..ROUND {
            let Some(done) = self.requests.try_join_next() else {
                return;
            };
            self.take_answer(done);
        }
    }

    fn take_answer(&mut self, done: Result<Answered, JoinError>) {
        match done {
            Ok(Answered::Patch(applied)) => self.patched(*applied),
            Ok(Answered::Rule(changed)) => self.rule_changed(*changed),
            Ok(Answered::Pod(removed)) => self.pod_removed(removed),
            Ok(Answered::Resource(made)) => self.resource_made(made),
            Err(error) => {
                // A bug. Which node it was is not known: all are looked at again.
                tracing::error!(err = %error, "a request ended without an answer");
                self.metrics.error("patch_panicked");
                self.take(FleetInput::AnswersLost);
            }
        }
    }

    /// Takes an input in.
    fn take(&mut self, input: FleetInput) {
        self.fleet.take(input, (self.clock)());
    }

    /// Has all nodes looked at that something has happened to, and carries the effects out.
    fn decide(&mut self) {
        let effects = self.fleet.decide((self.clock)());
        for effect in effects {
            self.carry_out(effect);
        }
        if self.fleet.take_news() {
            self.schedule_publish();
        }
    }

    /// Takes in the switches that people have set.
    fn switched(&mut self, arrival: Arrival) {
        let (write, now) = (self.fleet.writes(), (self.clock)());
        let switches = self.switches.as_mut();
        if switches.is_some_and(|switches| switches.take_in(arrival, write, now)) {
            self.take_switches();
        }
    }

    /// Does what the switches do by the clock: a write is tried again, a `ConfigMap` stays away.
    fn wake_switches(&mut self) {
        let (write, now) = (self.fleet.writes(), (self.clock)());
        if (self.switches.as_mut()).is_some_and(|switches| switches.wake(write, now)) {
            self.take_switches();
        }
    }

    /// Trips the circuit breaker.
    fn trip(&mut self) {
        let (write, now) = (self.fleet.writes(), (self.clock)());
        if let Some(switches) = &mut self.switches {
            switches.trip(write, now);
            self.take_switches();
        }
    }

    /// Hands the switches on to the fleet.
    fn take_switches(&mut self) {
        if let Some(switches) = &self.switches {
            let switched = Box::new(switches.switched());
            self.take(FleetInput::Switched(switched));
            self.schedule_publish();
        }
    }

    fn next_wake(&self) -> Option<Instant> {
        let now = (self.clock)();
        let timed = self.fleet.wake_at().map(|at| {
            Instant::now() + Duration::try_from(at.duration_since(now)).unwrap_or_default()
        });
        let retry = self.switches.as_ref().and_then(Switches::wake_at);
        let feed = self.feed_failure.as_ref().map(|failed| failed.retry_at);
        let missed = self.read_missed_at();
        [
            timed,
            retry,
            feed,
            missed,
            self.save_next(),
            self.publishing.at,
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

/// Waits for another policy; for ever where none can come any more.
async fn changed(policies: &mut CurrentPolicy) {
    if policies.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Returns what the switches have to tell; waits for ever where there are none.
async fn arrival(switches: &mut Option<Switches>) -> Option<Arrival> {
    match switches {
        Some(switches) => switches.next().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
