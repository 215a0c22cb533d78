//! Kubernetes object monitor: watches the objects that policies name, and reports those that are
//! faults of a node. `objects` decides; this task does the I/O.
//!
//! ```text
//! watches -> reduced objects -> ObjectMonitor -> events, and states in the monitor's state file
//!                                             -> annotation of the node
//! ```
//!
//! An event and the state that it reports are written to the state file together, so a crash
//! neither loses nor doubles one. The annotation follows: a leader with another disk reads there
//! what was reported, and compares it with the objects.

mod metrics;
mod policies;
mod watches;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, KnownNodes, Reason};
use jiff::Timestamp;
use model::node::NodeChange;
use monitor::{Frame, Monitor, Reporter};
use objects::{Change, Input, Matches, ObjectMonitor, ObjectPolicies, marks};
use runtime::logging::{Seldom, chain};
use runtime::metrics::Group;
use runtime::sources::SourceState;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use metrics::ObjectMetrics;
use watches::Seen;

pub use policies::{ObjectsError, ObjectsFollower, ObjectsSource};

const MONITOR: Monitor = Monitor {
    name: "objects",
    agent: objects::AGENT,
    // An object shows itself whether a reboot has helped.
    checks: &[],
};

/// Pause between two looks at what follows with time.
const TICK: Duration = Duration::from_secs(1);
/// Most annotations that are written at once.
const MAX_AT_ONCE: usize = 8;
/// Pause after an annotation that could not be written.
const RETRY: Duration = Duration::from_secs(5);

/// Receiver of the policies in effect; `None` until there are some.
pub type PoliciesReceiver = watch::Receiver<Option<Arc<ObjectPolicies>>>;

/// Parts of the task.
pub struct ObjectsConfig {
    /// Cluster of the objects.
    pub cluster: Arc<Cluster>,
    /// Frame of the monitor.
    pub frame: Frame,
    /// Receiver of the policies.
    pub policies: PoliciesReceiver,
    /// Identity of the store: of another one's time, no fault is known there.
    pub store: String,
    /// True if nodes are annotated.
    pub writes: bool,
}

/// The task; see the [module](self).
pub struct Objects {
    cluster: Arc<Cluster>,
    nodes: KnownNodes,
    reporter: Reporter<Memory>,
    policies: PoliciesReceiver,
    store: String,
    writes: bool,
    metrics: ObjectMetrics,
    /// True once the states of before are known.
    begun: bool,
    /// Nodes whose annotation may have to be written, with the time of the next try.
    dirty: BTreeMap<String, Instant>,
    marking: JoinSet<(String, Result<(), ApiError>)>,
    /// Keys of removed policies.
    ended: BTreeSet<String>,
    /// Watches that fail, with the reason.
    blind: BTreeMap<usize, String>,
    seldom: Seldom,
}

/// Memory of the monitor.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Memory {
    #[serde(default)]
    matches: Matches,
    /// Identity of the store that has the reports.
    #[serde(default)]
    store: String,
}

/// Returns the descriptions of the metrics of the monitor.
pub(crate) fn described_metrics() -> Group {
    let own = ObjectMetrics::described().into_iter();
    Group::new("objects", own.chain(MONITOR.described_metrics()))
}

// === impl Objects ===

impl Objects {
    /// Creates the task, which [`Self::run`] starts.
    pub fn new(config: ObjectsConfig) -> Self {
        let ObjectsConfig {
            cluster,
            frame,
            policies,
            store,
            writes,
        } = config;
        Self {
            nodes: cluster.known_nodes(),
            cluster,
            metrics: ObjectMetrics::registered(&frame.metrics),
            reporter: Reporter::new(&MONITOR, frame).optional(),
            policies,
            store,
            writes,
            begun: false,
            dirty: BTreeMap::new(),
            marking: JoinSet::new(),
            ended: BTreeSet::new(),
            blind: BTreeMap::new(),
            seldom: Seldom::default(),
        }
    }

    /// Watches and reports until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut policies = self.policies.clone();
        while !cancel.is_cancelled() {
            let current = policies.borrow_and_update().clone();
            if let Some(current) = current {
                self.follow(&current, &mut policies, &cancel).await;
            } else {
                self.reporter.cannot_see("there are no policies yet");
                self.reporter.pause(TICK, &cancel).await;
            }
        }
        self.reporter.finish(&cancel).await;
    }

    /// Follows the objects until the policies change.
    async fn follow(
        &mut self,
        current: &ObjectPolicies,
        policies: &mut PoliciesReceiver,
        cancel: &CancellationToken,
    ) {
        let mut monitor = ObjectMonitor::new(current.policies.clone());
        self.blind.clear();
        self.await_nodes(cancel).await;
        self.begin(&monitor);
        let stop = cancel.child_token();
        let _stopped = stop.clone().drop_guard();
        let mut seen = watches::start(&self.cluster, &monitor, &stop);
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                _ = policies.changed() => return,
                // Without an enabled policy there is no watch, and nothing is ever received.
                Some(next) = seen.recv(), if self.reporter.has_room() => {
                    self.process(next, &mut monitor);
                }
                _ = ticks.tick() => self.tick(&mut monitor),
                Some(done) = self.marking.join_next() => {
                    self.marked(done);
                    self.mark(&monitor);
                }
                () = self.reporter.work() => {}
            }
        }
    }

    /// Waits for the nodes, whose annotations have the states of another leader.
    async fn await_nodes(&mut self, cancel: &CancellationToken) {
        while !self.nodes.is_complete() && self.reporter.pause(TICK, cancel).await {}
    }

    /// Takes over the states of before: from the file, and from the annotations of the nodes.
    fn begin(&mut self, monitor: &ObjectMonitor) {
        let now = self.reporter.now();
        if !self.begun {
            self.begun = true;
            let is_other = self.reporter.memory().store != self.store;
            let mut matches = self.reporter.memory().matches.clone();
            for state in matches.values_mut().filter(|state| state.open) {
                state.adopted |= is_other;
                self.dirty.insert(state.node.clone(), Instant::now());
            }
            for node in self.nodes.all() {
                let Some(text) = node.annotations.get(marks::ANNOTATION) else {
                    continue;
                };
                self.dirty.insert(node.name.clone(), Instant::now());
                for (key, state) in marks::adopted(text, monitor.policies(), now) {
                    matches.entry(key).or_insert(state);
                }
            }
            let memory = self.reporter.memory_mut();
            memory.matches = matches;
            memory.store.clone_from(&self.store);
        }
        let orphans = monitor.orphans(&self.reporter.memory().matches, now);
        self.ended
            .extend(orphans.iter().map(|change| change.key.clone()));
        self.take(orphans);
    }

    fn process(&mut self, seen: Seen, monitor: &mut ObjectMonitor) {
        match &seen.input {
            Input::Failing(sight) => {
                let watched = monitor.watched().nth(*sight);
                let watched = watched.map(|(watched, _)| watched.to_string());
                if self.blind.get(sight) != Some(&seen.why) {
                    tracing::warn!(
                        objects = watched,
                        policies = ?monitor.policies_of(*sight),
                        err = seen.why,
                        "objects of a kind cannot be watched, so their policies find nothing; trying again"
                    );
                }
                self.blind.insert(*sight, seen.why);
            }
            Input::Recovered(sight) | Input::Listed(sight) => {
                self.blind.remove(sight);
            }
            Input::Applied(..) | Input::Deleted(..) => self.reporter.has_read(self.reporter.now()),
            Input::Restarted(_) | Input::Time => {}
        }
        self.decide(seen.input, monitor);
    }

    fn decide(&mut self, input: Input, monitor: &mut ObjectMonitor) {
        let now = self.reporter.now();
        let changes = monitor.handle(input, &self.reporter.memory().matches, now);
        for (policy, why) in monitor.take_errors() {
            self.metrics.error(&policy);
            tracing::debug!(policy, err = why, "an object cannot be judged");
        }
        self.take(changes);
    }

    /// Keeps the new states, and reports the events.
    fn take(&mut self, changes: Vec<Change>) {
        let now = self.reporter.now();
        for change in changes {
            let matches = &mut self.reporter.memory_mut().matches;
            match change.state {
                Some(state) => matches.insert(change.key, state),
                None => matches.remove(&change.key),
            };
            for event in change.events {
                self.metrics.reported(&event);
                self.reporter.report(event, now);
            }
            let nodes = change.nodes.into_iter();
            self.dirty.extend(nodes.map(|node| (node, Instant::now())));
        }
    }

    fn tick(&mut self, monitor: &mut ObjectMonitor) {
        let now: Timestamp = self.reporter.now();
        let next = monitor.next_time(&self.reporter.memory().matches);
        if next.is_some_and(|next| next <= now) {
            self.decide(Input::Time, monitor);
        }
        self.mark(monitor);
        self.show(monitor);
    }

    /// Shows what is watched, and what cannot be.
    fn show(&mut self, monitor: &ObjectMonitor) {
        let (mut count, mut bytes, mut waits) = (0, 0, false);
        let watches = monitor.watched().count();
        for sight in 0..watches {
            let (objects, size) = monitor.size(sight);
            (count, bytes) = (count + objects, bytes + size);
            waits |= !monitor.sees(sight) && !self.blind.contains_key(&sight);
        }
        self.metrics.kept(count, bytes, self.blind.len());
        let mut detail = format!(
            "{} policies, {count} objects in {watches} watches",
            monitor.policies().len()
        );
        for (sight, why) in &self.blind {
            if let Some((watched, _)) = monitor.watched().nth(*sight) {
                let policies = monitor.policies_of(*sight).join(", ");
                detail.push_str(&format!("; cannot see {watched} (for {policies}): {why}"));
            }
        }
        let state = if !self.blind.is_empty() {
            SourceState::Failing
        } else if waits {
            SourceState::CatchingUp
        } else {
            SourceState::Following
        };
        self.reporter.show(state, &detail);
    }

    /// Starts to write the annotations that differ from the states.
    fn mark(&mut self, monitor: &ObjectMonitor) {
        if !self.writes {
            self.dirty.clear();
        }
        let now = Instant::now();
        let room = MAX_AT_ONCE.saturating_sub(self.marking.len());
        let due = self.dirty.iter().filter(|(_, due)| **due <= now);
        let due: Vec<String> = due.map(|(node, _)| node.clone()).take(room).collect();
        for node in due {
            self.dirty.remove(&node);
            let Some(view) = self.nodes.get(&node) else {
                continue;
            };
            let current = view.annotations.get(marks::ANNOTATION);
            let wanted = marks::wanted(
                current.map_or("", String::as_str),
                &node,
                &self.reporter.memory().matches,
                monitor.policies(),
                &self.ended,
            );
            if wanted.as_ref() == current {
                continue;
            }
            let change = NodeChange {
                annotations: [(marks::ANNOTATION.to_owned(), wanted)].into(),
                ..NodeChange::default()
            };
            let cluster = Arc::clone(&self.cluster);
            let writing = async move {
                let written = cluster.apply(&view, &change).await;
                (node, written.map(drop))
            };
            self.marking
                .spawn(Reason::new("object policies").scope(writing));
        }
    }

    fn marked(&mut self, done: Result<(String, Result<(), ApiError>), tokio::task::JoinError>) {
        let Ok((node, Err(error))) = done else {
            return;
        };
        if let Some(before) = self.seldom.now() {
            tracing::warn!(
                node,
                err = %chain(&error),
                not_logged_before = before,
                "the matches of object policies cannot be written on a node; trying again"
            );
        }
        self.dirty.insert(node, Instant::now() + RETRY);
    }
}
