//! Publishing the state of all nodes for the page, the API and the metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use domain::fault::{MAX_FAULTY_NODES, MAX_OPEN_FAULTS_PER_NODE};
use domain::session::Phase;
use domain::view::{ClusterView, FleetView, NodeStatus};
use domain::why_not::not_fully_seen;
use runtime::logging::Seldom;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Quarantine;
use super::fleet::Sight;

/// The view is published at most this often ...
const PUBLISH_EVERY: Duration = Duration::from_millis(20);
/// ... and takes no more than one part in so many of the time: while hundreds of nodes are
/// being cordoned, the page is half a second behind rather than the cordons.
const PUBLISH_SHARE: u32 = 30;
/// But it is never further behind than this.
const PUBLISH_LONGEST: Duration = Duration::from_millis(500);

/// As what a node was last counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// The cluster has it.
    in_cluster: bool,
    /// The brake or a pause holds it back.
    held: bool,
}

/// How many nodes were last counted as what.
#[derive(Debug, Default)]
pub(super) struct Counts {
    in_cluster: usize,
    pub(super) held: usize,
}

/// What was published, and what is to be.
pub(super) struct Publishing {
    pub(super) view: watch::Sender<Arc<FleetView>>,
    /// Nodes that may not be any more as they were last published: whatever changes one marks
    /// it, or has it looked at, which does.
    pub(super) unshown: BTreeSet<String>,
    /// What was last published of all nodes.
    pub(super) shown: Counts,
    /// When the next is due; `None`: nothing has changed.
    pub(super) at: Option<Instant>,
    /// When the last was made, and how long to wait after it.
    last: Instant,
    pause: Duration,
    /// Faults that found no room in the book and were not told of yet.
    overflow: u64,
    overflow_said: Seldom,
}

// === impl Publishing ===

impl Publishing {
    pub(super) fn new(view: watch::Sender<Arc<FleetView>>) -> Self {
        Self {
            view,
            unshown: BTreeSet::new(),
            shown: Counts::default(),
            at: None,
            last: Instant::now(),
            pause: Duration::ZERO,
            overflow: 0,
            overflow_said: Seldom::default(),
        }
    }
}

// === impl Counts ===

impl Counts {
    /// Counts a node as something else than before.
    fn replace(&mut self, before: Counted, now: Counted) {
        let one = |count: &mut usize, before: bool, now: bool| {
            *count = (*count + usize::from(now)).saturating_sub(usize::from(before));
        };
        one(&mut self.in_cluster, before.in_cluster, now.in_cluster);
        one(&mut self.held, before.held, now.held);
    }
}

// === impl Quarantine ===

impl Quarantine {
    /// The view is published at once, unless that was done just now.
    pub(super) fn schedule_publish(&mut self) {
        let earliest = self.publishing.last + self.publishing.pause;
        self.publishing
            .at
            .get_or_insert_with(|| earliest.max(Instant::now()));
    }

    /// What can be told of whether the cluster has a node.
    fn sight(&self) -> Sight {
        match (&self.cluster, self.listed) {
            (None, _) => Sight::NoCluster,
            (Some(_), false) => Sight::NotRead,
            (Some(_), true) => Sight::Read,
        }
    }

    /// Says where faults have found no room in the book: nothing is done about them.
    fn tell_overflow(&mut self) {
        self.publishing.overflow += self.metrics.overflow(self.book.overflow());
        if self.publishing.overflow > 0 && self.publishing.overflow_said.now().is_some() {
            tracing::error!(
                faults = std::mem::take(&mut self.publishing.overflow),
                "the book of faults is full: reports were not taken in, and nothing is done about \
                 them until there is room; it holds {MAX_OPEN_FAULTS_PER_NODE} faults of a node \
                 from those who administer it and as many from its users, and those of \
                 {MAX_FAULTY_NODES} nodes"
            );
        }
    }

    /// All nodes as they are shown: as they were, but for those that something has happened
    /// to. A large cluster has thousands, and something happens to a few of them.
    fn nodes_shown(&mut self) -> Vec<NodeStatus> {
        let (sight, dropped_at, now) = (self.sight(), self.dropped_at(), (self.clock)());
        let before = Arc::clone(&self.publishing.view.borrow());
        let before = before.nodes.iter().cloned();
        let mut shown: BTreeMap<String, NodeStatus> =
            before.map(|status| (status.name.clone(), status)).collect();
        for name in std::mem::take(&mut self.publishing.unshown) {
            let Some(entry) = self.nodes.get_mut(&name) else {
                continue; // Forgotten before.
            };
            let faults = self.book.faults(&name);
            let counts = Counted {
                in_cluster: entry.view.is_some(),
                held: entry.hold.is_some(),
            };
            self.publishing.shown.replace(entry.shown, counts);
            entry.shown = counts;
            let missed = self.book.missed(&name);
            let status = entry.status(&name, faults, self.mode, sight, dropped_at, now);
            if let Some(mut status) = status {
                if missed > 0 {
                    status.notes.push(not_fully_seen(missed));
                }
                shown.insert(name, status);
                continue;
            }
            shown.remove(&name);
            // What is neither in the cluster nor faulty is forgotten.
            let idle = !entry.in_flight && entry.session.phase == Phase::Idle;
            if idle && !counts.in_cluster && faults.is_empty() {
                self.publishing.shown.replace(counts, Counted::default());
                self.nodes.remove(&name);
            }
        }
        shown.into_values().collect()
    }

    pub(super) fn publish(&mut self) {
        self.publishing.at = None;
        let began = Instant::now();
        let nodes = self.nodes_shown();
        // The cluster's nodes have to be known: until then all look gone.
        if self.listed && self.caught_up {
            let gone: Vec<String> = (self.statuses.nodes())
                .filter(|name| !self.nodes.contains_key(*name))
                .map(str::to_owned)
                .collect();
            for name in gone {
                self.forget_statuses(&name);
            }
        }
        self.tell_overflow();
        let is_there = |name: &str| self.nodes.contains_key(name);
        self.metrics.forget_gone(is_there);
        let brake = self.brake_view();
        let view = FleetView {
            applied: self.book.applied(),
            missed_from: self.book.missed_from(),
            ready: self.caught_up,
            nodes,
            cluster: self.cluster.as_ref().map(|one| ClusterView {
                server: one.server().to_owned(),
                connected: self.listed && self.cluster_error.is_none(),
                error: self.cluster_error.clone(),
                nodes: self.publishing.shown.in_cluster,
            }),
            brake,
            troubles: self.troubles(),
        };
        self.metrics.current(&view, self.brake_utilization());
        self.publishing.view.send_replace(Arc::new(view));
        self.publishing.last = Instant::now();
        let cost = self.publishing.last - began;
        self.publishing.pause = (cost * PUBLISH_SHARE).clamp(PUBLISH_EVERY, PUBLISH_LONGEST);
    }
}

#[cfg(test)]
mod tests;
