//! Fault quarantine: one task that owns the fault book and all sessions.
//!
//! ```text
//! store feed  --(hint)--> take in events -> fault book --+
//! node watch ----------------------------> node views ---+-> assess -> brake -> step -> patch
//! answers, timers ---------------------------------------+
//! ```
//!
//! Everything that arrives only marks nodes for another look; what is done follows from
//! state. One patch per node is under way at a time; how many in all, the API server's
//! answers decide (`cluster`'s pace).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::Cluster;
use domain::brake::{DOUBT, NodeLabel};
use domain::fault::{Fault, FaultBook};
use domain::policy::Policy;
use domain::session::Session;
use domain::status::StatusLedger;
use domain::view::FleetView;
use jiff::{SignedDuration, Timestamp};
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::EventStore;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod apply;
mod brake;
mod claim;
mod departed;
mod fleet;
mod intake;
mod journal;
mod look;
mod metrics;
mod missed;
mod nodes;
mod publish;
mod questions;
mod statuses;
mod switches;

pub use journal::JournalWriter;
pub use questions::Questions;

use crate::conditions::Board;
use crate::wakes::{CLOCK_SLACK, Wakes};

use apply::Applied;
use brake::BrakeState;
use fleet::NodeEntry;
use intake::{FeedFailure, SaveState};
use journal::{JOURNAL_QUEUE, Journal};
use metrics::QuarantineMetrics;
use missed::Missed;
use nodes::Relisted;
use publish::Publishing;
use questions::{MAX_QUESTIONS, Question};
use statuses::Written;
use switches::{Arrival, Switches};

use crate::policy::CurrentPolicy;

/// Node events, or answers, that are taken in before the nodes are looked at again: the brake
/// goes through all nodes, and is asked once about what comes together.
const ROUND: usize = 256;

/// How far decisions are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Record and show; decide nothing.
    Observe,
    /// Decide and show; write nothing in the cluster.
    DryRun,
    /// Act.
    Act,
}

/// For which nodes nobody else speaks: sessions on them that the store does not know are
/// taken over, where another kind of gpuwarden did not make them (`quarantine/claim.rs`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owns {
    /// The node that this process runs on; a cluster that lacks it is told of.
    Node(String),
    /// Every node: a controller speaks for its cluster.
    All,
}

/// What the task works with.
pub struct Config {
    /// The events.
    pub store: Arc<dyn EventStore>,
    /// The cluster; `None`: there is none, and nothing to act on.
    pub cluster: Option<Arc<Cluster>>,
    /// For which faults a node is taken out, as it changes.
    pub policy: CurrentPolicy,
    /// How far decisions are carried out.
    pub mode: Mode,
    /// For which nodes nobody else speaks.
    pub owns: Owns,
    /// What sees the faults of the node that this process runs on.
    pub sources: Sources,
    /// Whether the brake holds. Without it only a pause does.
    pub brake: bool,
    /// Label of GPU nodes, whose number the brake's percentages are of.
    pub gpu_label: NodeLabel,
    /// Namespace of the `ConfigMaps` in which people set the circuit breaker and a pause.
    pub namespace: String,
    /// Where to say what is known of the nodes; `None`: nothing is told on them.
    pub board: Option<Board>,
    /// How old the newest report of a node has to be, for its faults to be dropped where the
    /// cluster has no such node any more.
    pub retention: SignedDuration,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// The task. See the module.
pub struct Quarantine {
    store: Arc<dyn EventStore>,
    cluster: Option<Arc<Cluster>>,
    policies: CurrentPolicy,
    /// The policy that holds; `None`: not known yet.
    policy: Option<Arc<Policy>>,
    mode: Mode,
    owns: Owns,
    sources: Sources,
    board: Option<Board>,
    retention: SignedDuration,
    clock: fn() -> Timestamp,
    metrics: QuarantineMetrics,
    namespace: String,
    brake: BrakeState,
    /// What people have set in the cluster; `None`: there is none.
    switches: Option<Switches>,
    /// When the pause that holds ends by itself.
    pause_ends: Option<Timestamp>,

    book: FaultBook,
    /// What became of the events, and is to be written.
    statuses: StatusLedger,
    writing: JoinSet<Written>,
    /// Panics over the batch that is to be written.
    writing_panics: u32,
    saving: SaveState,
    missed: Missed,
    /// Why the feed could not be read, if it could not.
    feed_failure: Option<FeedFailure>,
    nodes: BTreeMap<String, NodeEntry>,
    /// Nodes to look at.
    dirty: BTreeSet<String>,
    /// When a session wants to be looked at later.
    wakes: Wakes,
    /// The clock at the last turn of the loop.
    turned_at: Timestamp,
    /// All events that were stored when we started are in the book.
    caught_up: bool,
    /// The cluster's nodes are known.
    listed: bool,
    /// A list that is not complete yet.
    relisted: Option<Relisted>,
    cluster_error: Option<String>,

    applying: JoinSet<Applied>,
    journal: Journal,
    questions: mpsc::Receiver<Question>,
    publishing: Publishing,
}

/// The task's ends for others.
pub struct Handles {
    /// The state of all nodes, as it changes.
    pub view: watch::Receiver<Arc<FleetView>>,
    /// Answers why a node is, or is not, quarantined.
    pub questions: Questions,
    /// Writes the journal; runs until the task is gone and all is written.
    pub journal: JournalWriter,
}

// === impl Quarantine ===

impl Quarantine {
    /// A task that has not begun.
    pub fn new(config: Config, metrics: &Metrics) -> (Self, Handles) {
        let (view, view_receiver) = watch::channel(Arc::new(FleetView::default()));
        let (journal, queue) = mpsc::channel(JOURNAL_QUEUE);
        let (ask, questions) = mpsc::channel(MAX_QUESTIONS);
        let handles = Handles {
            view: view_receiver,
            questions: Questions(ask),
            journal: JournalWriter::new(queue, Arc::clone(&config.store)),
        };
        let policy = config.policy.borrow().clone();
        let task = Self {
            listed: config.cluster.is_none(),
            store: config.store,
            cluster: config.cluster,
            policy,
            policies: config.policy,
            mode: config.mode,
            owns: config.owns,
            sources: config.sources,
            board: config.board,
            retention: config.retention,
            clock: config.clock,
            namespace: config.namespace,
            brake: BrakeState::new(config.brake, config.gpu_label),
            switches: None,
            pause_ends: None,
            metrics: QuarantineMetrics::new(metrics),
            book: FaultBook::default(),
            statuses: StatusLedger::default(),
            writing: JoinSet::new(),
            writing_panics: 0,
            saving: SaveState::default(),
            missed: Missed::default(),
            feed_failure: None,
            nodes: BTreeMap::new(),
            dirty: BTreeSet::new(),
            wakes: Wakes::default(),
            turned_at: (config.clock)(),
            caught_up: false,
            relisted: None,
            cluster_error: None,
            applying: JoinSet::new(),
            journal: Journal::new(journal),
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
        self.load().await;
        self.take_in().await;
        loop {
            self.watch_the_clock();
            self.take_in_if_due().await;
            self.read_missed().await;
            self.look().await;
            self.write_statuses();
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
                Some(done) = self.applying.join_next() => {
                    self.applied(done);
                    self.answers();
                }
                arrival = arrival(&mut self.switches) => match arrival {
                    Some(arrival) => self.switched(arrival),
                    None => break, // The same for the brake.
                },
                Some(question) = self.questions.recv() => self.answer(question),
                Some(done) = self.writing.join_next() => self.statuses_written(done),
                () = changed(&mut policies) => self.policy_changed(),
                () = sleep_until(wake) => {
                    let now = (self.clock)();
                    self.dirty.extend(self.wakes.take_due(now));
                    self.brake_timers();
                    if self.publishing.at.is_some_and(|at| at <= Instant::now()) {
                        self.publish();
                        self.count_backlog().await;
                    }
                }
            }
        }
        while let Some(done) = self.applying.join_next().await {
            self.applied(done);
        }
        while let Some(done) = self.writing.join_next().await {
            self.statuses_written(done);
        }
        self.save().await;
    }

    /// Takes in what people have set.
    fn switched(&mut self, arrival: Arrival) {
        let (write, now) = (self.writes(), (self.clock)());
        let Some(switches) = &mut self.switches else {
            return;
        };
        let dropped_at = switches.dropped_at();
        if switches.take_in(arrival, write, now) {
            self.switches_changed(dropped_at);
        }
    }

    /// Looks again after a change of what people have set.
    fn switches_changed(&mut self, dropped_before: Option<Timestamp>) {
        if self.dropped_at() != dropped_before {
            // What counts of the faults has changed.
            self.touch_all();
        }
        self.brake.changed();
        self.schedule_publish();
    }

    /// What the brake does by the clock: a pause ends, a write is tried again, a `ConfigMap`
    /// stays away.
    fn brake_timers(&mut self) {
        let (write, now) = (self.writes(), (self.clock)());
        let dropped_at = self.dropped_at();
        if (self.switches.as_mut()).is_some_and(|switches| switches.wake(write, now)) {
            self.switches_changed(dropped_at);
        }
        if self.brake.doubt_ends.is_some_and(|at| at <= now) {
            let doubts = self.nodes.values().filter_map(|entry| entry.in_doubt);
            self.brake.doubt_ends = doubts.filter(|until| *until > now).min();
            self.brake.changed();
        }
        if self.pause_ends.is_some_and(|at| at <= now) {
            self.brake.changed();
            self.schedule_publish();
        }
    }

    /// Ends all waits where the clock was put back since the last turn. What wakes the loop
    /// is another clock, so the next turn comes.
    fn watch_the_clock(&mut self) {
        let now = (self.clock)();
        let before = std::mem::replace(&mut self.turned_at, now);
        if now >= before - CLOCK_SLACK {
            return;
        }
        let by = before.duration_since(now);
        tracing::warn!("the clock was put back by {by:#}: what waits is tried now");
        let mut doubt = None;
        for entry in self.nodes.values_mut() {
            entry.session.clock_put_back(now);
            entry.in_doubt = entry.in_doubt.map(|_| now + DOUBT);
            doubt = doubt.or(entry.in_doubt);
        }
        self.brake.doubt_ends = doubt;
        self.brake.changed();
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            self.remember_wake(&name);
        }
        self.touch_all();
    }

    /// When what the brake had held back was last dropped.
    fn dropped_at(&self) -> Option<Timestamp> {
        self.switches.as_ref().and_then(Switches::dropped_at)
    }

    /// Whether we write what follows into the cluster.
    fn writes(&self) -> bool {
        self.mode == Mode::Act
    }

    fn entry(&mut self, name: &str) -> &mut NodeEntry {
        let now = (self.clock)();
        self.nodes
            .entry(name.to_owned())
            .or_insert_with(|| NodeEntry::new(Session::idle(now)))
    }

    /// Marks a node for another look.
    fn touch(&mut self, name: &str) {
        self.entry(name);
        self.dirty.insert(name.to_owned());
        self.publishing.unshown.insert(name.to_owned());
        self.schedule_publish();
    }

    /// Marks all nodes for another look.
    fn touch_all(&mut self) {
        self.dirty.extend(self.nodes.keys().cloned());
        self.publishing.unshown.extend(self.nodes.keys().cloned());
    }

    fn remember_wake(&mut self, name: &str) {
        let now = (self.clock)();
        let session = self.nodes.get(name).map(|entry| entry.session.wake_at());
        // Then it is no longer shown.
        let notices = self.book.faults(name).iter().map(Fault::notice_until);
        let notice = notices.flatten().filter(|until| *until > now).min();
        let at = session.flatten().into_iter().chain(notice).min();
        self.wakes.set(name, at);
    }

    fn next_wake(&mut self) -> Option<Instant> {
        let now = (self.clock)();
        let switches = self.switches.as_ref();
        self.pause_ends = switches.and_then(|one| one.pause_ends(now));
        let retry = switches.and_then(Switches::wake_at);
        let timed = [self.wakes.next(), self.pause_ends, self.brake.doubt_ends]
            .into_iter()
            .flatten()
            .min();
        let timed = timed.map(|at| {
            Instant::now() + Duration::try_from(at.duration_since(now)).unwrap_or_default()
        });
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

/// What the switches have to tell; waits for ever where there are none.
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
