//! Fault quarantine: one task that owns the fault book and all sessions.
//!
//! ```text
//! store feed  --(hint)--> take in events -> fault book --+
//! node watch ----------------------------> node views ---+-> assess -> step -> patch
//! answers, timers ---------------------------------------+
//! ```
//!
//! Everything that arrives only marks nodes for another look; what is done follows from
//! state. One patch per node is under way at a time, [`MAX_IN_FLIGHT`] in all.

mod apply;
mod claim;
mod fleet;
mod metrics;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, NodeEvent};
use domain::assess::assess;
use domain::fault::FaultBook;
use domain::journal::{Entry, EntryKind};
use domain::node::NodeView;
use domain::policy::Policy;
use domain::session::{Phase, Session, ownership, step};
use domain::view::{ClusterView, FleetView};
use jiff::Timestamp;
use runtime::metrics::Metrics;
use serde_json::Value;
use store::{Checkpoint, EventStore, StoreError};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use apply::Applied;
use claim::Claim;
use fleet::NodeEntry;
use metrics::QuarantineMetrics;

/// Most patches under way at once. The API server's own limit for one flow is near it;
/// more only queue there.
pub const MAX_IN_FLIGHT: usize = 32;
/// Name of the feed token.
const CONSUMER: &str = "fault-quarantine";
/// Events read from the feed at once.
const FEED_PAGE: usize = 1_000;
/// How often the fault book is saved; events behind the saved one are read again.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// The view is published at most this often.
const PUBLISH_EVERY: Duration = Duration::from_millis(20);
/// Pause before the store is asked again after an error.
const STORE_RETRY: Duration = Duration::from_millis(500);
/// Most journal entries that wait for the store.
const JOURNAL_QUEUE: usize = 4_096;

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

/// What the task works with.
pub struct Config {
    /// The events.
    pub store: Arc<dyn EventStore>,
    /// The cluster; `None`: there is none, and nothing to act on.
    pub cluster: Option<Arc<Cluster>>,
    /// For which faults a node is taken out.
    pub policy: Policy,
    /// How far decisions are carried out.
    pub mode: Mode,
    /// Name of the node that this process runs on; a cluster that lacks it is told of.
    pub own_node: String,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// The task. See the module.
pub struct Quarantine {
    store: Arc<dyn EventStore>,
    cluster: Option<Arc<Cluster>>,
    policy: Policy,
    mode: Mode,
    own_node: String,
    clock: fn() -> Timestamp,
    metrics: QuarantineMetrics,

    book: FaultBook,
    saved_at: Instant,
    saved_seq: u64,
    nodes: BTreeMap<String, NodeEntry>,
    /// Nodes to look at.
    dirty: BTreeSet<String>,
    /// Nodes whose session wants to be looked at later.
    waiting: BTreeSet<String>,
    /// All events that were stored when we started are in the book.
    caught_up: bool,
    /// The cluster's nodes are known.
    listed: bool,
    /// Nodes seen since the list was begun anew.
    relisted: Option<BTreeSet<String>>,
    cluster_error: Option<String>,

    in_flight: Arc<Semaphore>,
    applying: JoinSet<Applied>,
    journal: mpsc::Sender<Entry>,
    view: watch::Sender<Arc<FleetView>>,
    publish_at: Option<Instant>,
    published_at: Instant,
}

/// The task's ends for others.
pub struct Handles {
    /// The state of all nodes, as it changes.
    pub view: watch::Receiver<Arc<FleetView>>,
    /// Writes the journal; runs until the task is gone and all is written.
    pub journal: JournalWriter,
}

/// Brings journal entries to the store.
pub struct JournalWriter {
    queue: mpsc::Receiver<Entry>,
    store: Arc<dyn EventStore>,
}

// === impl Quarantine ===

impl Quarantine {
    /// A task that has not begun.
    pub fn new(config: Config, metrics: &Metrics) -> (Self, Handles) {
        let (view, view_receiver) = watch::channel(Arc::new(FleetView::default()));
        let (journal, queue) = mpsc::channel(JOURNAL_QUEUE);
        let handles = Handles {
            view: view_receiver,
            journal: JournalWriter {
                queue,
                store: Arc::clone(&config.store),
            },
        };
        let task = Self {
            listed: config.cluster.is_none(),
            store: config.store,
            cluster: config.cluster,
            policy: config.policy,
            mode: config.mode,
            own_node: config.own_node,
            clock: config.clock,
            metrics: QuarantineMetrics::new(metrics),
            book: FaultBook::default(),
            saved_at: Instant::now(),
            saved_seq: 0,
            nodes: BTreeMap::new(),
            dirty: BTreeSet::new(),
            waiting: BTreeSet::new(),
            caught_up: false,
            relisted: None,
            cluster_error: None,
            in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
            applying: JoinSet::new(),
            journal,
            view,
            publish_at: None,
            published_at: Instant::now(),
        };
        (task, handles)
    }

    /// Runs until `cancel`; patches under way are brought to their end.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut hints = self.store.latest();
        let mut node_events = self
            .cluster
            .as_ref()
            .map(|one| one.watch_nodes(cancel.clone()));
        // Who may have to patch keeps a connection ready for it.
        let _warm = self
            .cluster
            .clone()
            .filter(|_| self.mode == Mode::Act)
            .map(|cluster| {
                let cancel = cancel.clone();
                tokio::spawn(async move { cancel.run_until_cancelled(cluster.keep_warm()).await })
            });
        self.load().await;
        self.take_in(&cancel).await;
        loop {
            self.look().await;
            self.save_if_due().await;
            let wake = self.next_wake();
            tokio::select! {
                () = cancel.cancelled() => break,
                changed = hints.changed() => {
                    if changed.is_err() {
                        break; // The store is closed.
                    }
                    self.take_in(&cancel).await;
                }
                event = receive(&mut node_events) => self.node_event(event),
                Some(done) = self.applying.join_next() => self.applied(done).await,
                () = sleep_until(wake) => {
                    let now = (self.clock)();
                    let due = self.waiting.iter().filter(|name| {
                        self.nodes
                            .get(*name)
                            .and_then(|entry| entry.session.wake_at())
                            .is_some_and(|at| at <= now)
                    });
                    self.dirty.extend(due.cloned().collect::<Vec<_>>());
                    if self.publish_at.is_some_and(|at| at <= Instant::now()) {
                        self.publish();
                    }
                }
            }
        }
        while let Some(done) = self.applying.join_next().await {
            self.applied(done).await;
        }
        self.save().await;
    }

    /// Loads the saved book. One that cannot be read is rebuilt from the feed.
    async fn load(&mut self) {
        let saved = self.store.checkpoint(CONSUMER).await;
        match saved {
            Ok(Some(checkpoint)) => match serde_json::from_slice(&checkpoint.state) {
                Ok(book) => self.book = book,
                Err(error) => {
                    tracing::warn!(err = %error, "the saved fault book is not understood; it is rebuilt");
                }
            },
            Ok(None) => {}
            Err(error) => {
                tracing::error!(err = %error, "the saved fault book cannot be read; it is rebuilt");
            }
        }
        self.saved_seq = self.book.applied();
        let names: Vec<String> = self.book.nodes().map(str::to_owned).collect();
        for name in names {
            self.touch(&name);
        }
    }

    /// Takes in all events that the feed has.
    async fn take_in(&mut self, cancel: &CancellationToken) {
        loop {
            let page = match self.store.feed(self.book.applied(), FEED_PAGE).await {
                Ok(page) => page,
                Err(StoreError::Closed) => return,
                Err(error) => {
                    tracing::error!(err = %error, "the event feed cannot be read; it is tried again");
                    self.metrics.error("feed_error");
                    tokio::select! {
                        () = cancel.cancelled() => return,
                        () = tokio::time::sleep(STORE_RETRY) => continue,
                    }
                }
            };
            let more = page.len() == FEED_PAGE;
            for record in page {
                self.metrics.received.inc();
                let node = record.event.node_name.clone();
                let changes = self.book.record(&record);
                tracing::debug!(event.id = record.id, node, ?changes, "event taken in");
                self.metrics.processed.inc();
                self.touch(&node);
            }
            if !more {
                self.caught_up = true;
                self.schedule_publish();
                return;
            }
        }
    }

    fn node_event(&mut self, event: Option<NodeEvent>) {
        match event {
            Some(NodeEvent::Restarted) => self.relisted = Some(BTreeSet::new()),
            Some(NodeEvent::Applied(view)) => {
                if let Some(seen) = &mut self.relisted {
                    seen.insert(view.name.clone());
                }
                let name = view.name.clone();
                let entry = self.entry(&name);
                if entry.see(view) {
                    self.touch(&name);
                }
            }
            Some(NodeEvent::Deleted(name)) => self.gone(&name),
            Some(NodeEvent::Listed) => {
                let seen = self.relisted.take().unwrap_or_default();
                let gone: Vec<String> = self
                    .nodes
                    .iter()
                    .filter(|(name, entry)| entry.view.is_some() && !seen.contains(*name))
                    .map(|(name, _)| name.clone())
                    .collect();
                for name in gone {
                    self.gone(&name);
                }
                self.listed = true;
                self.cluster_error = None;
                if self.mode == Mode::Act
                    && !self.own_node.is_empty()
                    && self
                        .nodes
                        .get(&self.own_node)
                        .is_none_or(|entry| entry.view.is_none())
                {
                    tracing::warn!(
                        node = self.own_node,
                        "the cluster has no node of this name: its faults cannot be acted on until \
                         it appears; --node-name sets the name"
                    );
                }
                self.dirty.extend(self.nodes.keys().cloned());
                self.schedule_publish();
            }
            Some(NodeEvent::Failing { error }) => {
                tracing::warn!(
                    err = error,
                    "the cluster's nodes cannot be watched; it is tried again"
                );
                self.cluster_error = Some(error);
                self.schedule_publish();
            }
            Some(NodeEvent::Recovered) => {
                tracing::info!("the cluster's nodes are watched again");
                self.cluster_error = None;
                self.schedule_publish();
            }
            None => {}
        }
    }

    fn gone(&mut self, name: &str) {
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.view = None;
        }
        self.touch(name);
    }

    /// Looks at all nodes that anything has happened to.
    async fn look(&mut self) {
        // Before all is known, nothing follows from what is known.
        if !self.caught_up || !self.listed {
            return;
        }
        while let Some(name) = self.dirty.pop_first() {
            if self.mode == Mode::Observe {
                continue;
            }
            self.look_at(&name).await;
        }
    }

    async fn look_at(&mut self, name: &str) {
        let Some(entry) = self.nodes.get(name) else {
            return;
        };
        if entry.in_flight {
            return; // Looked at again when the answer is there.
        }
        let Some(view) = entry.effective_view() else {
            if self.cluster.is_some() {
                self.look_at_missing(name).await;
            }
            return;
        };
        let claim = self.claim(&view).await;
        self.entry(name).anothers = claim == Claim::Anothers;
        if claim != Claim::Ours {
            self.schedule_publish();
            return;
        }
        let now = (self.clock)();
        let faults = self.book.faults(name);
        let desired = assess(faults, &self.policy, &view, ownership::released_at(&view));
        let prefix = self.policy_prefix();
        let entry = self.entry(name);
        let step = step(&entry.session, &desired, Some(&view), &prefix, now);
        entry.session = step.session;
        let session = entry.session.id.clone();
        let reasons_changed = entry.reasons != desired.reasons;
        if reasons_changed {
            entry.reasons.clone_from(&desired.reasons);
            self.metrics.evaluated(&self.policy, &desired);
            let text = if desired.reasons.is_empty() {
                "no open fault".to_owned()
            } else {
                desired.reasons.join("; ")
            };
            self.note(
                name,
                session.as_deref(),
                EntryKind::Rules,
                text,
                Value::Null,
            )
            .await;
        }
        for note in step.notes {
            tracing::info!(node = name, kind = note.kind.name(), "{}", note.text);
            self.note(name, session.as_deref(), note.kind, note.text, note.detail)
                .await;
        }
        if let Some(patch) = step.patch {
            self.carry_out(name, &view, patch, &desired).await;
        }
        self.remember_wake(name);
        self.schedule_publish();
    }

    /// A node with faults that the cluster does not know.
    async fn look_at_missing(&mut self, name: &str) {
        let now = (self.clock)();
        let unknown = NodeView::unknown(name);
        let desired = assess(self.book.faults(name), &self.policy, &unknown, None);
        let prefix = self.policy_prefix();
        let entry = self.entry(name);
        let step = step(&entry.session, &desired, None, &prefix, now);
        entry.session = step.session;
        let say = desired.wanted() && !entry.missing_said;
        entry.missing_said = desired.wanted();
        if say {
            tracing::warn!(
                node = name,
                "a fault asks to quarantine a node that the cluster does not have; waiting for it"
            );
            let text =
                "the cluster has no node of this name; it is quarantined as soon as it appears";
            self.note(
                name,
                None,
                EntryKind::Attention,
                text.to_owned(),
                Value::Null,
            )
            .await;
        }
        self.schedule_publish();
    }

    async fn note(
        &self,
        node: &str,
        session: Option<&str>,
        kind: EntryKind,
        text: String,
        detail: Value,
    ) {
        let entry = Entry {
            at: (self.clock)(),
            node: node.to_owned(),
            session: session.map(str::to_owned),
            kind,
            text,
            detail,
        };
        // It fails only when the writer is gone, at the very end.
        drop(self.journal.send(entry).await);
    }

    fn policy_prefix(&self) -> String {
        self.policy.label_prefix.clone()
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
        self.schedule_publish();
    }

    fn remember_wake(&mut self, name: &str) {
        if self
            .nodes
            .get(name)
            .is_some_and(|entry| entry.session.wake_at().is_some())
        {
            self.waiting.insert(name.to_owned());
        } else {
            self.waiting.remove(name);
        }
    }

    fn next_wake(&self) -> Option<Instant> {
        let now = (self.clock)();
        let session = self
            .waiting
            .iter()
            .filter_map(|name| self.nodes.get(name)?.session.wake_at())
            .min()
            .map(|at| {
                let wait = at.duration_since(now).unsigned_abs();
                if at <= now {
                    Instant::now()
                } else {
                    Instant::now() + wait
                }
            });
        let save = (self.book.applied() != self.saved_seq).then_some(self.saved_at + SAVE_EVERY);
        [session, save, self.publish_at].into_iter().flatten().min()
    }

    /// The view is published at once, unless that was done just now.
    fn schedule_publish(&mut self) {
        let earliest = self.published_at + PUBLISH_EVERY;
        self.publish_at
            .get_or_insert_with(|| earliest.max(Instant::now()));
    }

    fn publish(&mut self) {
        self.publish_at = None;
        self.published_at = Instant::now();
        // What is neither in the cluster nor faulty is forgotten.
        self.nodes.retain(|name, entry| {
            entry.view.is_some()
                || entry.in_flight
                || entry.session.phase != Phase::Idle
                || !self.book.faults(name).is_empty()
        });
        let nodes = self
            .nodes
            .iter()
            .filter_map(|(name, entry)| {
                entry.status(
                    name,
                    self.book.faults(name),
                    self.mode,
                    self.cluster.is_some(),
                )
            })
            .collect();
        let view = FleetView {
            applied: self.book.applied(),
            ready: self.caught_up,
            nodes,
            cluster: self.cluster.as_ref().map(|one| ClusterView {
                server: one.server().to_owned(),
                connected: self.listed && self.cluster_error.is_none(),
                error: self.cluster_error.clone(),
                nodes: self
                    .nodes
                    .values()
                    .filter(|entry| entry.view.is_some())
                    .count(),
            }),
        };
        self.metrics.current(&view);
        self.view.send_replace(Arc::new(view));
    }

    async fn save_if_due(&mut self) {
        let due = self.saved_at.elapsed() >= SAVE_EVERY;
        if due && self.book.applied() != self.saved_seq {
            self.save().await;
        }
    }

    async fn save(&mut self) {
        self.saved_at = Instant::now();
        let Ok(state) = serde_json::to_vec(&self.book) else {
            return;
        };
        let checkpoint = Checkpoint {
            token: self.book.applied(),
            state,
        };
        match self.store.save_checkpoint(CONSUMER, checkpoint).await {
            Ok(()) => self.saved_seq = self.book.applied(),
            Err(StoreError::Closed) => {}
            // Only costs reading the events behind the last one again.
            Err(error) => tracing::warn!(err = %error, "the fault book could not be saved"),
        }
    }
}

/// The next node event; waits for ever where there is no cluster, or its watch has ended.
async fn receive(events: &mut Option<mpsc::Receiver<NodeEvent>>) -> Option<NodeEvent> {
    if let Some(receiver) = events {
        if let Some(event) = receiver.recv().await {
            return Some(event);
        }
        *events = None;
    }
    std::future::pending().await
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

// === impl JournalWriter ===

impl JournalWriter {
    /// Writes until the task has ended and the queue is empty.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        while self.queue.recv_many(&mut batch, 256).await > 0 {
            if let Err(error) = self.store.journal(std::mem::take(&mut batch)).await {
                tracing::error!(err = %error, "journal entries are lost");
            }
        }
    }
}
