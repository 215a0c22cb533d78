//! Fault quarantine: the task that drives the decisions about all nodes.
//!
//! ```text
//! store feed --(hint)--> events ---+
//! node watch, switches, policy ----+--> fleet --> effects: patches, questions to the
//! answers, timers -----------------+                      store, journal, conditions
//! ```
//!
//! The task turns I/O into inputs of [`Fleet`] and effects of [`Fleet`] into I/O; it makes no
//! decisions. At most one patch per node is in flight. How many there are in total depends on
//! the answers of the API server (`cluster/pace.rs`).
//!
//! | part | what it does |
//! |---|---|
//! | `feed.rs`, `checkpoint.rs` | reads events into the fault book, and saves the book |
//! | `watches.rs`, `switches.rs` | observes the cluster, and the switches that people have set |
//! | `effects.rs`, `requests.rs` | carries effects out, by requests to the API server and the store |
//! | `journal.rs`, `statuses.rs` | writes the story of each node, and the statuses of events |
//! | `publishing.rs`, `questions.rs` | shows the state of all nodes, and answers questions |

use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ResourceKinds};
use fleet::brake::NodeLabel;
use fleet::drain::DrainConfig;
use fleet::remediation::RemediationConfig;
use fleet::status::StatusUpdate;
use fleet::view::{ClusterView, FleetView};
use fleet::{Fleet, FleetInput, Settings};
use jiff::{SignedDuration, Timestamp};
use model::journal::JournalEntry;
use model::mode::Mode;
use model::position::Position;
use runtime::metrics::{Group, Metrics};
use runtime::sources::Sources;
use store::EventStore;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use trial::why_not::Connection;

mod checkpoint;
mod effects;
mod feed;
mod journal;
mod metrics;
mod publishing;
mod questions;
mod requests;
mod statuses;
mod switches;
#[cfg(test)]
mod tests;
mod watches;

pub use fleet::Owns;
pub use journal::JournalWriter;
pub use questions::Questions;
pub use statuses::StatusWriter;

use checkpoint::Checkpoints;
use feed::Feed;
use journal::{JOURNAL_QUEUE, Journal};
use metrics::{DrainMetrics, NodeMetrics, QuarantineMetrics, RemediationMetrics};
use publishing::Publishing;
use questions::{MAX_QUESTIONS, Question};
use requests::{Client, RequestAnswer, RequestTasks};
use statuses::STATUS_QUEUE;
use switches::{SwitchEvent, Switches};
use watches::{WatchEvent, Watches};

use crate::analysis::RulesTextReceiver;
use crate::conditions::Board;
use crate::policy::CurrentPolicy;

/// Most events of watches, or answers, that are handled before the fleet decides once about all
/// of them: the brake iterates over all nodes.
const ROUND: usize = 256;
/// Longest wait at the start for the nodes of the cluster.
const NODES_WITHIN: Duration = Duration::from_secs(5);

/// Settings and parts of the task.
pub struct QuarantineConfig {
    /// Store of the events.
    pub store: Arc<dyn EventStore>,
    /// Cluster; `None` to record events without acting.
    pub cluster: Option<Arc<Cluster>>,
    /// Receiver of the current policy.
    pub policy: CurrentPolicy,
    /// Text of the rules of the analysis, which may give nodes a place; `None` without them.
    pub rules: Option<RulesTextReceiver>,
    /// Mode, which limits what the task may change.
    pub mode: Mode,
    /// Nodes that this process is responsible for.
    pub owns: Owns,
    /// Sources of events on the node of this process.
    pub sources: Sources,
    /// True if the brake limits quarantines; otherwise only a pause does.
    pub brake: bool,
    /// Drain of nodes that are out of service; `None` if pods stay.
    pub drain: Option<Arc<DrainConfig>>,
    /// Position up to which the analysis has read the events, for remediations, which wait for it;
    /// `None` without an analysis.
    pub analysed: Option<watch::Receiver<Position>>,
    /// Remediation of drained nodes; `None` for none.
    pub remediation: Option<Arc<RemediationConfig>>,
    /// Label of GPU nodes. The percentages of the brake refer to their number.
    pub gpu_label: NodeLabel,
    /// Namespace of the `ConfigMap`s with the circuit breaker and a pause.
    pub namespace: String,
    /// Board for conditions and Events of nodes; `None` for none.
    pub board: Option<Board>,
    /// True if Kubernetes Events are emitted about drains.
    pub events: bool,
    /// Faults of a node that left the cluster are dropped once their newest report has this age.
    pub retention: SignedDuration,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// The task; see the [module](self).
pub struct Quarantine {
    fleet: Fleet,
    feed: Feed,
    checkpoints: Checkpoints,
    store: Arc<dyn EventStore>,
    /// Context of requests to the API server; `None` without a cluster.
    client: Option<Client>,
    watches: Watches,
    requests: RequestTasks,
    policies: CurrentPolicy,
    rules: Option<RulesTextReceiver>,
    /// Circuit breaker and pause; `None` without a cluster, and where nothing is decided.
    switches: Option<Switches>,
    /// Namespace of the `ConfigMap`s with the switches.
    namespace: String,
    board: Option<Board>,
    /// True if Kubernetes Events are emitted.
    events: bool,
    journal: Journal,
    /// Queue of the [`StatusWriter`].
    statuses: mpsc::Sender<StatusUpdate>,
    questions: mpsc::Receiver<Question>,
    /// Sources of events on this node, for answers to questions.
    sources: Sources,
    publishing: Publishing,
    clock: fn() -> Timestamp,
    metrics: QuarantineMetrics,
    node_metrics: NodeMetrics,
    drain_metrics: DrainMetrics,
    remediation_metrics: RemediationMetrics,
}

/// Handles for other tasks to reach this one.
pub struct Handles {
    /// Receiver of the state of all nodes.
    pub view: watch::Receiver<Arc<FleetView>>,
    /// Sender of questions why a node is quarantined or not.
    pub questions: Questions,
    /// Writer of the journal; runs until the task has ended and the queue is empty.
    pub journal: JournalWriter,
    /// Writer of the statuses of events; runs until the task has ended and the queue is empty.
    pub statuses: StatusWriter,
}

/// Returns the descriptions of the metrics of quarantines, drains and remediations.
pub(crate) fn described_metrics() -> [Group; 3] {
    metrics::described()
}

// === impl Quarantine ===

impl Quarantine {
    /// Creates the task, which [`Self::run`] starts, and its handles.
    pub fn new(config: QuarantineConfig, metrics: &Metrics) -> (Self, Handles) {
        let (view, view_receiver) = watch::channel(Arc::new(FleetView::default()));
        let (journal, queue) = mpsc::channel(JOURNAL_QUEUE);
        let (statuses, status_queue) = mpsc::channel(STATUS_QUEUE);
        let node_metrics = NodeMetrics::registered(metrics);
        let drain_metrics = DrainMetrics::registered(metrics);
        let remediation_metrics = RemediationMetrics::registered(metrics);
        let metrics = QuarantineMetrics::registered(metrics);
        let (ask, questions) = mpsc::channel(MAX_QUESTIONS);
        let (store, clock) = (config.store, config.clock);
        let handles = Handles {
            view: view_receiver,
            questions: Questions(ask),
            journal: JournalWriter::new(queue, Arc::clone(&store)),
            statuses: StatusWriter {
                queue: status_queue,
                store: Arc::clone(&store),
                metrics: metrics.clone(),
            },
        };
        let policy = config.policy.borrow().clone();
        let identity = store.identity();
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
        let client = config.cluster.map(|cluster| Client {
            cluster,
            kinds: ResourceKinds::default(),
            clock,
            metrics: metrics.clone(),
            drain_metrics: drain_metrics.clone(),
            remediation_metrics: remediation_metrics.clone(),
            cancel: CancellationToken::new(),
        });
        let task = Self {
            fleet: Fleet::new(settings, policy, clock()),
            feed: Feed::new(Arc::clone(&store), clock, metrics.clone(), config.analysed),
            checkpoints: Checkpoints::new(Arc::clone(&store), clock, metrics.clone()),
            store,
            client,
            watches: Watches::none(),
            requests: RequestTasks::new(metrics.clone()),
            policies: config.policy,
            rules: config.rules,
            switches: None,
            namespace: config.namespace,
            board: config.board,
            events: config.events,
            journal: Journal::new(journal),
            statuses,
            questions,
            sources: config.sources,
            publishing: Publishing::new(view, metrics.clone()),
            clock,
            metrics,
            node_metrics,
            drain_metrics,
            remediation_metrics,
        };
        (task, handles)
    }

    /// Runs until `cancel`, or until the store or a watch of the cluster ends. Then waits for
    /// the requests in flight and saves the fault book.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut hints = self.store.latest();
        let mut policies = self.policies.clone();
        let mut rules = self.rules.clone();
        self.connect(&cancel);
        self.checkpoints.load(&mut self.fleet).await;
        self.set_places();
        self.await_nodes(&cancel).await;
        self.catch_up().await;
        loop {
            if self.feed.retry_at().is_some_and(|at| at <= Instant::now()) {
                self.catch_up().await;
            }
            self.feed.read_missed(&mut self.fleet).await;
            self.decide();
            if self.checkpoints.save_if_due(&mut self.fleet).await {
                self.publishing.schedule();
            }
            let wake = self.next_wake();
            tokio::select! {
                () = cancel.cancelled() => break,
                changed = hints.changed() => {
                    if changed.is_err() {
                        break; // The store is closed.
                    }
                    if self.read_page().await {
                        hints.mark_changed();
                    }
                }
                () = self.feed.analysed() => self.catch_up().await,
                event = self.watches.next() => match event {
                    Some(event) => self.handle_events(event),
                    None => break, // The watches have ended.
                },
                Some(answer) = self.requests.next() => self.handle_answers(answer),
                event = next_switch_event(&mut self.switches) => match event {
                    Some(event) => self.handle_switch_event(event),
                    None => break, // The watches of the switches have ended.
                },
                Some(question) = self.questions.recv() => self.answer(question),
                () = changed(&mut policies) => {
                    let policy = self.policies.borrow().clone();
                    self.apply(FleetInput::Policy(policy));
                    self.watch_devices();
                }
                () = rules_changed(&mut rules) => self.set_places(),
                () = sleep_until(wake) => {
                    self.wake_switches();
                    if self.publishing.is_due() {
                        self.publish();
                        self.feed.count_backlog(&self.fleet).await;
                    }
                }
            }
        }
        while let Some(answer) = self.requests.next().await {
            self.handle_answers(answer);
        }
        self.checkpoints.save(&mut self.fleet).await;
    }

    /// Starts the watches of the cluster, if there is a cluster.
    fn connect(&mut self, cancel: &CancellationToken) {
        let Some(client) = &mut self.client else {
            return;
        };
        client.cancel = cancel.clone();
        let (cluster, kinds) = (Arc::clone(&client.cluster), client.kinds.clone());
        self.watches = Watches::start(&cluster, kinds, cancel.clone());
        if self.fleet.decides() {
            self.switches = Some(Switches::new(cluster, self.namespace.clone(), cancel));
            self.apply_switches();
        }
        self.watch_devices();
    }

    /// Waits for the nodes of the cluster, whose labels say which faults belong together. Not for
    /// long: what is stored is shown also while the API server is away.
    async fn await_nodes(&mut self, cancel: &CancellationToken) {
        let until = Instant::now() + NODES_WITHIN;
        while self.client.is_some() && !self.fleet.is_listed() {
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep_until(until) => return,
                event = self.watches.next() => match event {
                    Some(event) => self.handle_events(event),
                    None => return,
                },
            }
        }
    }

    /// Takes over the places that the rules of the analysis give to nodes.
    fn set_places(&mut self) {
        if let Some(rules) = &self.rules {
            let places = rules.borrow().places();
            self.feed.set_places(places, &mut self.fleet);
        }
    }

    /// Reads all events that are in the feed now.
    async fn catch_up(&mut self) {
        self.feed.catch_up(&mut self.fleet).await;
        self.publishing.schedule();
    }

    /// Reads a page of the feed. Returns true if there may be more.
    async fn read_page(&mut self) -> bool {
        let more = self.feed.read_page(&mut self.fleet).await;
        if !more {
            self.publishing.schedule();
        }
        more
    }

    /// Handles an event of a watch, and others that have arrived meanwhile.
    fn handle_events(&mut self, first: WatchEvent) {
        self.handle_event(first);
        for _ in 1..ROUND {
            let Some(event) = self.watches.try_next() else {
                return;
            };
            self.handle_event(event);
        }
    }

    fn handle_event(&mut self, event: WatchEvent) {
        let failed = self.watches.failure().map(str::to_owned);
        if let Some(input) = self.watches.input(event) {
            self.apply(input);
        }
        if self.watches.failure() != failed.as_deref() {
            self.publishing.schedule();
        }
    }

    /// Handles an answer, and others that have arrived meanwhile.
    fn handle_answers(&mut self, first: RequestAnswer) {
        self.handle_answer(first);
        for _ in 1..ROUND {
            let Some(answer) = self.requests.try_next() else {
                return;
            };
            self.handle_answer(answer);
        }
    }

    fn handle_answer(&mut self, RequestAnswer { input, entry }: RequestAnswer) {
        if let Some(entry) = entry {
            self.put_entry(entry);
        }
        if let Some(input) = input {
            self.apply(input);
        }
    }

    /// Applies an input to the fleet.
    fn apply(&mut self, input: FleetInput) {
        self.fleet.handle(input, (self.clock)());
    }

    /// Lets the fleet decide, and carries out the effects.
    fn decide(&mut self) {
        let effects = self.fleet.decide((self.clock)());
        for effect in effects {
            self.carry_out(effect);
        }
        if self.fleet.take_view_changed() {
            self.publishing.schedule();
        }
    }

    /// Handles a change of a switch, or the answer to a write.
    fn handle_switch_event(&mut self, event: SwitchEvent) {
        let (write, now) = (self.fleet.writes(), (self.clock)());
        let switches = self.switches.as_mut();
        if switches.is_some_and(|switches| switches.handle(event, write, now)) {
            self.apply_switches();
        }
    }

    /// Retries a write of the switches that is due, or ends the wait for a deleted `ConfigMap`.
    fn wake_switches(&mut self) {
        let (write, now) = (self.fleet.writes(), (self.clock)());
        if (self.switches.as_mut()).is_some_and(|switches| switches.wake(write, now)) {
            self.apply_switches();
        }
    }

    /// Trips the circuit breaker and applies the result to the fleet.
    fn trip(&mut self) {
        let (write, now) = (self.fleet.writes(), (self.clock)());
        if let Some(switches) = &mut self.switches {
            switches.trip(write, now);
            self.apply_switches();
        }
    }

    /// Applies the current switches to the fleet.
    fn apply_switches(&mut self) {
        if let Some(switches) = &self.switches {
            let switched = Box::new(switches.switched());
            self.apply(FleetInput::Switches(switched));
            self.publishing.schedule();
        }
    }

    /// Starts the watch of single devices if the policy taints any.
    fn watch_devices(&mut self) {
        let policy = self.policies.borrow().clone();
        let taints = policy.is_some_and(|policy| policy.device_taints.is_some());
        let writes = self.fleet.writes();
        let input = self
            .client
            .as_ref()
            .and_then(|client| self.watches.watch_devices(&client.cluster, taints, writes));
        if let Some(input) = input {
            self.apply(input);
        }
    }

    fn next_wake(&self) -> Option<Instant> {
        let now = (self.clock)();
        let timed = self.fleet.wake_at().map(|at| {
            Instant::now() + Duration::try_from(at.duration_since(now)).unwrap_or_default()
        });
        [
            timed,
            self.switches.as_ref().and_then(Switches::wake_at),
            self.feed.retry_at(),
            self.feed.read_missed_at(&self.fleet),
            self.checkpoints.due_at(&self.fleet),
            self.publishing.due_at(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Publishes the state of all nodes and updates the metrics.
    fn publish(&mut self) {
        let began = Instant::now();
        let (fleet, clock) = (&mut self.fleet, self.clock);
        let before = Arc::clone(&self.publishing.view());
        let nodes = fleet.show(&before.nodes, clock());
        self.metrics.forget_gone(|name| fleet.knows(name));
        let mut brake = fleet.show_brake(clock());
        if let (Some(view), Some(switches)) = (&mut brake, &self.switches) {
            switches.state().clone_into(&mut view.state);
            view.notes.splice(0..0, switches.notes());
        }
        let view = FleetView {
            applied: fleet.book().applied(),
            missed_from: fleet.book().missed_from(),
            ready: fleet.is_caught_up(),
            nodes,
            cluster: self.client.as_ref().map(|client| ClusterView {
                server: client.cluster.server().to_owned(),
                connected: fleet.is_listed() && self.watches.failure().is_none(),
                error: self.watches.failure().map(str::to_owned),
                nodes: fleet.nodes_in_cluster(),
            }),
            brake,
            troubles: [self.feed.trouble(), self.checkpoints.trouble()]
                .into_iter()
                .flatten()
                .collect(),
        };
        self.metrics.current(&view, fleet.brake_utilization());
        self.node_metrics.show(&view);
        self.publishing.log_overflow(fleet.book().overflow());
        self.publishing.publish(view, began);
    }

    /// Answers a question from the state of the fleet.
    fn answer(&self, question: Question) {
        let cluster = self.client.as_ref().map(|client| Connection {
            server: client.cluster.server(),
            connected: self.fleet.is_listed() && self.watches.failure().is_none(),
            listed: self.fleet.is_listed(),
            error: self.watches.failure(),
        });
        question.answer(&self.fleet, cluster, &self.sources, (self.clock)());
    }

    /// Queues a journal entry, without waiting for the disk.
    fn put_entry(&mut self, entry: JournalEntry) {
        if !self.journal.put(entry) {
            self.metrics.error("journal_full");
        }
    }
}

/// Waits for a change of the policy; for ever if its source has ended.
async fn changed(policies: &mut CurrentPolicy) {
    if policies.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Waits for a change of the rules; for ever without them, or if their source has ended.
async fn rules_changed(rules: &mut Option<RulesTextReceiver>) {
    let changed = match rules {
        Some(rules) => rules.changed().await.is_ok(),
        None => false,
    };
    if !changed {
        std::future::pending::<()>().await;
    }
}

/// Waits for an event of the switches; for ever without a cluster.
async fn next_switch_event(switches: &mut Option<Switches>) -> Option<SwitchEvent> {
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
