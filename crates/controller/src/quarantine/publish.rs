//! Publishing the state of all nodes for the page, the API and the metrics.

use std::sync::Arc;
use std::time::Duration;

use fleet::view::{BrakeView, ClusterView, FleetView};
use model::fault::{MAX_FAULTY_NODES, MAX_OPEN_FAULTS_PER_NODE};
use runtime::logging::Seldom;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Quarantine;

/// The view is published at most this often ...
const PUBLISH_EVERY: Duration = Duration::from_millis(20);
/// ... and takes no more than one part in so many of the time: while hundreds of nodes are
/// being cordoned, the page is half a second behind rather than the cordons.
const PUBLISH_SHARE: u32 = 30;
/// But it is never further behind than this.
const PUBLISH_LONGEST: Duration = Duration::from_millis(500);

/// The state of publishing.
pub(super) struct Publishing {
    pub(super) view: watch::Sender<Arc<FleetView>>,
    /// The time at which the next view is due; `None`: nothing has changed.
    pub(super) at: Option<Instant>,
    /// The time of the last view.
    last: Instant,
    /// The wait after it.
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
            at: None,
            last: Instant::now(),
            pause: Duration::ZERO,
            overflow: 0,
            overflow_said: Seldom::default(),
        }
    }
}

// === impl Quarantine ===

impl Quarantine {
    /// Has the view published at once, unless that was done just now.
    pub(super) fn schedule_publish(&mut self) {
        let earliest = self.publishing.last + self.publishing.pause;
        self.publishing
            .at
            .get_or_insert_with(|| earliest.max(Instant::now()));
    }

    /// Says where faults have found no room in the book: nothing is done about them.
    fn tell_overflow(&mut self) {
        self.publishing.overflow += self.metrics.overflow(self.fleet.book().overflow());
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

    /// Returns the brake as it is shown; `None` where there is nothing to hold back.
    fn brake_view(&mut self) -> Option<BrakeView> {
        let mut view = self.fleet.show_brake((self.clock)())?;
        if let Some(switches) = &self.switches {
            switches.state().clone_into(&mut view.state);
            view.notes.splice(0..0, switches.notes());
        }
        Some(view)
    }

    pub(super) fn publish(&mut self) {
        self.publishing.at = None;
        let began = Instant::now();
        let before = Arc::clone(&self.publishing.view.borrow());
        let nodes = self.fleet.show(&before.nodes, (self.clock)());
        self.tell_overflow();
        self.metrics.forget_gone(|name| self.fleet.knows(name));
        let brake = self.brake_view();
        let view = FleetView {
            applied: self.fleet.book().applied(),
            missed_from: self.fleet.book().missed_from(),
            ready: self.fleet.is_caught_up(),
            nodes,
            cluster: self.cluster.as_ref().map(|one| ClusterView {
                server: one.server().to_owned(),
                connected: self.fleet.is_listed() && self.cluster_error.is_none(),
                error: self.cluster_error.clone(),
                nodes: self.fleet.nodes_in_cluster(),
            }),
            brake,
            troubles: self.troubles(),
        };
        self.metrics.current(&view, self.fleet.brake_utilization());
        self.publishing.view.send_replace(Arc::new(view));
        self.publishing.last = Instant::now();
        let cost = self.publishing.last - began;
        self.publishing.pause = (cost * PUBLISH_SHARE).clamp(PUBLISH_EVERY, PUBLISH_LONGEST);
    }
}
