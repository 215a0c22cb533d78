//! Writes labels on nodes that tell which software and how many devices they have, for the
//! monitors of NVSentinel and others that choose their nodes by them.
//!
//! ```text
//! watches of pods and slices, changed nodes --> labels::Board --> one patch for each node that
//!                                                                 differs
//! ```
//!
//! Events only name nodes to look at; what a node needs follows from the current objects
//! (`labels`). A patch is conditional, so that one that comes late does no harm. Nothing is
//! written before all objects are known, and a watch that fails leaves the labels alone that
//! depend on it.

mod metrics;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, KnownNodes, Reason, Signal, Urgency, apply_signal};
use jiff::Timestamp;
use labels::pod::{PodObject, PodRole};
use labels::{Board, LabelConfig};
use model::listing::Listing;
use model::node::{NodeChange, NodeView};
use runtime::backoff::Backoff;
use runtime::logging::{Seldom, chain};
use runtime::metrics::{Description, Metrics};
use runtime::sources::{HEARTBEAT, SourceHandle, SourceState, Sources};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use metrics::LabelMetrics;

/// Most nodes with a patch in flight. The requests of this process share one limit, which adapts
/// to the API server.
const MOST_UNDER_WAY: usize = 16;
/// Most nodes that are looked at before events are read again: some 10 ms.
const MOST_AT_ONCE: usize = 64;
/// Failures in a row, before the first complete list, after which nodes are labelled without the
/// objects of a watch.
const PATIENCE: u32 = 10;
/// First and longest pause before a failed patch is tried again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Settings of the labels, and the cluster that they are written in.
pub struct LabelerConfig {
    /// Cluster of the nodes.
    pub cluster: Arc<Cluster>,
    /// Settings of the labels.
    pub labels: LabelConfig,
    /// Label selector of the pods of each role.
    pub selectors: BTreeMap<PodRole, String>,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// Task that writes labels on nodes.
pub struct Labeler {
    config: LabelerConfig,
    known: KnownNodes,
    board: Board,
    pods: BTreeMap<PodRole, Objects>,
    /// Slices of all nodes, if a class counts their devices.
    slices: Option<Objects>,
    /// Nodes that have changed, or whose objects have.
    changed: BTreeSet<String>,
    /// Nodes whose labels may differ.
    due: BTreeSet<String>,
    /// Nodes with a patch in flight.
    busy: BTreeSet<String>,
    retries: BTreeMap<String, Retry>,
    metrics: LabelMetrics,
    seldom: Seldom,
}

/// Objects of a watch, by name alone, and the state of the watch.
struct Objects {
    names: Listing<String, ()>,
    failures: u32,
    /// True once the first list is complete, or is not waited for any longer.
    settled: bool,
    source: SourceHandle,
    /// Text for people about the objects.
    detail: String,
}

/// A node whose last patch failed.
struct Retry {
    pauses: Backoff,
    due: Option<Instant>,
}

/// Outcome of a patch.
struct Done {
    node: String,
    result: Result<(), ApiError>,
    took: Duration,
}

/// Returns the descriptions of the metrics of labels.
pub(crate) fn described_metrics() -> Vec<Description> {
    LabelMetrics::described()
}

/// Returns the name of a watch's source.
fn source_name(role: PodRole) -> &'static str {
    match role {
        PodRole::Dcgm => "dcgm-pods",
        PodRole::Driver => "driver-pods",
        PodRole::Installer => "driver-installer-pods",
    }
}

// === impl Labeler ===

impl Labeler {
    /// Creates the task. Its watches are among `sources`.
    pub fn new(config: LabelerConfig, sources: &Sources, metrics: &Metrics) -> Self {
        let board = Board::new(config.labels.clone());
        let now = (config.clock)();
        let objects = |name: &str, detail: &str| Objects {
            names: Listing::default(),
            failures: 0,
            settled: false,
            source: sources.add_optional(name, detail, now),
            detail: detail.to_owned(),
        };
        let selectors = config.selectors.iter();
        let pods = selectors
            .map(|(role, selector)| (*role, objects(source_name(*role), selector)))
            .collect();
        let slices = (config.labels)
            .reads_slices()
            .then(|| objects("resource-slices", "resourceslices.resource.k8s.io"));
        Self {
            known: config.cluster.known_nodes(),
            config,
            board,
            pods,
            slices,
            changed: BTreeSet::new(),
            due: BTreeSet::new(),
            busy: BTreeSet::new(),
            retries: BTreeMap::new(),
            metrics: LabelMetrics::new(metrics),
            seldom: Seldom::default(),
        }
    }

    /// Writes labels until `cancel`, then waits for the patches in flight. The nodes are those
    /// that the quarantine watches.
    pub async fn run(mut self, cancel: CancellationToken) {
        let cluster = &self.config.cluster;
        let mut slices = self
            .slices
            .as_ref()
            .map(|_| cluster.watch_slices(cancel.clone()));
        let mut pods = self.watch_pods(&cancel);
        let known = self.known.clone();
        let mut patches = JoinSet::new();
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        loop {
            let more = self.work(&mut patches);
            let retry = self.next_retry();
            tokio::select! {
                () = cancel.cancelled() => break,
                () = tokio::task::yield_now(), if more => {}
                names = known.changed() => self.changed.extend(names),
                Some((role, signal)) = pods.recv() => self.take_pod(role, signal),
                Some(signal) = receive(slices.as_mut()) => self.take_slice(signal),
                Some(done) = patches.join_next() => match done {
                    Ok(done) => self.done(done),
                    // A bug. The node is unknown.
                    Err(error) => {
                        tracing::error!(err = %error, "the patch of a node's labels panicked");
                        for node in std::mem::take(&mut self.busy) {
                            self.try_later(node);
                        }
                    }
                },
                _ = heartbeat.tick() => self.beat(),
                () = sleep_until(retry) => {}
            }
        }
        while patches.join_next().await.is_some() {}
    }

    /// Watches the pods of all roles.
    fn watch_pods(
        &self,
        cancel: &CancellationToken,
    ) -> mpsc::Receiver<(PodRole, Signal<PodObject>)> {
        let (all, receiver) = mpsc::channel(MOST_AT_ONCE);
        for (role, selector) in &self.config.selectors {
            let (role, all) = (*role, all.clone());
            let cluster = &self.config.cluster;
            let mut signals = cluster.watch_pods_with(selector, cancel.clone());
            tokio::spawn(async move {
                while let Some(signal) = signals.recv().await {
                    if all.send((role, signal)).await.is_err() {
                        return;
                    }
                }
            });
        }
        receiver
    }

    fn take_pod(&mut self, role: PodRole, signal: Signal<PodObject>) {
        let now = (self.config.clock)();
        let Some(objects) = self.pods.get_mut(&role) else {
            return;
        };
        let changes = objects.take(signal, now, PodObject::title);
        for (title, object) in changes {
            let pod = object.and_then(|object| object.pod());
            self.changed.extend(self.board.set_pod(role, &title, pod));
        }
        if objects.names.is_complete() && self.board.set_known(role) {
            self.due
                .extend(self.known.all().iter().map(|node| node.name.clone()));
        }
    }

    fn take_slice(&mut self, signal: Signal<Value>) {
        let now = (self.config.clock)();
        let Some(objects) = &mut self.slices else {
            return;
        };
        let name = |object: &Value| {
            let name = object["metadata"]["name"].as_str();
            name.unwrap_or_default().to_owned()
        };
        for (name, object) in objects.take(signal, now, name) {
            let nodes = self.board.set_slice(&name, object.as_deref());
            self.changed.extend(nodes);
        }
    }

    /// Learns from nodes that have changed, then starts patches of those that differ. Returns
    /// whether there is more to do at once.
    fn work(&mut self, patches: &mut JoinSet<Done>) -> bool {
        let mut objects = self.pods.values().chain(&self.slices);
        if !self.known.is_complete() || !objects.all(|one| one.settled) {
            return false;
        }
        self.take_retries();
        for _ in 0..MOST_AT_ONCE {
            let Some(name) = self.changed.pop_first() else {
                break;
            };
            self.learn(name);
        }
        if !self.changed.is_empty() {
            return true;
        }
        for _ in 0..MOST_AT_ONCE {
            if patches.len() >= MOST_UNDER_WAY {
                return false;
            }
            // A busy node is looked at once its patch is done.
            let mut due = self.due.iter();
            let Some(name) = due.find(|name| !self.busy.contains(*name)).cloned() else {
                return false;
            };
            self.due.remove(&name);
            self.label(name, patches);
        }
        true
    }

    fn learn(&mut self, name: String) {
        if let Some(node) = self.known.get(&name) {
            let learned = self.board.learn(&node);
            self.metrics.learned(&learned);
            self.due.extend(learned.peers);
            self.due.insert(name);
        } else {
            self.due.extend(self.board.forget(&name));
            self.metrics.gone(&self.board, &name);
            self.retries.remove(&name);
        }
    }

    /// Starts the patch of a node that differs.
    fn label(&mut self, name: String, patches: &mut JoinSet<Done>) {
        let Some(node) = self.known.get(&name) else {
            return;
        };
        let begin = Instant::now();
        self.metrics.counted(&self.board, &node);
        let change = self.board.change(&node);
        if change.is_empty() {
            self.retries.remove(&name);
            self.metrics.handled(true, begin.elapsed());
            return;
        }
        let cluster = Arc::clone(&self.config.cluster);
        self.busy.insert(name);
        patches.spawn(patch(cluster, node, change));
    }

    /// Takes the outcome of a patch. The watch brings the node's new state.
    fn done(&mut self, done: Done) {
        let Done { node, result, took } = done;
        self.busy.remove(&node);
        let error = match result {
            Ok(()) => {
                self.metrics.handled(true, took);
                self.retries.remove(&node);
                return;
            }
            Err(ApiError::NotFound { .. }) => {
                self.retries.remove(&node);
                return;
            }
            Err(error) => error,
        };
        // The node has changed since, which is no failure. Its new state comes by the watch.
        if !matches!(error, ApiError::Conflict { .. }) {
            self.metrics.handled(false, took);
            if let Some(before) = self.seldom.now() {
                tracing::warn!(
                    node,
                    err = %chain(&error),
                    not_logged_before = before,
                    "the labels of a node cannot be written; trying again"
                );
            }
        }
        self.try_later(node);
    }

    fn try_later(&mut self, node: String) {
        let retry = self.retries.entry(node).or_insert_with(|| Retry {
            pauses: Backoff::new(PAUSES.0, PAUSES.1),
            due: None,
        });
        retry.due = Some(Instant::now() + retry.pauses.pause());
    }

    /// Makes the nodes due whose pause is over.
    fn take_retries(&mut self) {
        let now = Instant::now();
        for (name, retry) in &mut self.retries {
            if retry.due.is_some_and(|due| due <= now) {
                retry.due = None;
                self.due.insert(name.clone());
            }
        }
    }

    fn next_retry(&self) -> Option<Instant> {
        self.retries.values().filter_map(|retry| retry.due).min()
    }

    fn beat(&self) {
        let now = (self.config.clock)();
        for objects in self.pods.values().chain(&self.slices) {
            objects.source.beat(now);
        }
    }
}

// === impl Objects ===

impl Objects {
    /// Takes a signal of the watch. Returns the objects that have changed, each by its name;
    /// `None` for one that is gone: deleted, or missing from a new list.
    fn take<T>(
        &mut self,
        signal: Signal<T>,
        now: Timestamp,
        name: impl Fn(&T) -> String,
    ) -> Vec<(String, Option<Arc<T>>)> {
        match &signal {
            Signal::Failing { error, refused } => {
                self.failures += 1;
                self.settled |= *refused || self.failures >= PATIENCE;
                self.source.update(now, |status| {
                    status.state = SourceState::Failing;
                    status.detail = format!("{}: {error}", self.detail);
                });
            }
            Signal::Listed | Signal::Recovered => {
                self.failures = 0;
                self.source.update(now, |status| {
                    status.state = SourceState::Following;
                    status.detail.clone_from(&self.detail);
                });
            }
            Signal::Restarted | Signal::Applied(_) | Signal::Deleted(_) => {}
        }
        let changes = apply_signal(&mut self.names, signal, |object| Some((name(object), ())));
        self.settled |= self.names.is_complete();
        changes
            .into_iter()
            .map(cluster::ObjectChange::into_parts)
            .collect()
    }
}

/// Sends the patch of a node. An answer that the node has changed since is a conflict.
async fn patch(cluster: Arc<Cluster>, node: Arc<NodeView>, change: NodeChange) -> Done {
    let begin = Instant::now();
    let applying = cluster.apply_at(Urgency::Report, &node, &change);
    let why = Reason::of_node(&node.name, None, "labels");
    let result = why.scope(applying).await.map(drop);
    if result.is_ok() {
        tracing::debug!(node = node.name, ?change, "wrote the labels of a node");
    }
    Done {
        node: node.name.clone(),
        result,
        took: begin.elapsed(),
    }
}

async fn receive<T>(signals: Option<&mut mpsc::Receiver<T>>) -> Option<T> {
    match signals {
        Some(signals) => signals.recv().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
