//! Publishing the state of all nodes for the page, the API and the metrics.

use std::sync::Arc;
use std::time::Duration;

use fleet::view::FleetView;
use model::fault::{MAX_FAULTY_NODES, MAX_OPEN_FAULTS_PER_NODE};
use runtime::logging::Seldom;
use tokio::sync::watch;
use tokio::time::Instant;

use super::metrics::QuarantineMetrics;

/// The view is published at most this often ...
const PUBLISH_EVERY: Duration = Duration::from_millis(20);
/// ... and takes no more than one part in so many of the time: while hundreds of nodes are
/// being cordoned, the page is half a second behind rather than the cordons.
const PUBLISH_SHARE: u32 = 30;
/// But it is never further behind than this.
const PUBLISH_LONGEST: Duration = Duration::from_millis(500);

/// Publishes views, not too often.
pub(super) struct Publishing {
    view: watch::Sender<Arc<FleetView>>,
    /// The time at which the next view is due; `None`: nothing has changed.
    due_at: Option<Instant>,
    /// The time of the last view.
    last: Instant,
    /// The pause after the last view.
    pause: Duration,
    /// Faults that found no room in the book and are not logged yet.
    overflow: u64,
    overflow_logged: Seldom,
    metrics: QuarantineMetrics,
}

// === impl Publishing ===

impl Publishing {
    pub(super) fn new(view: watch::Sender<Arc<FleetView>>, metrics: QuarantineMetrics) -> Self {
        Self {
            view,
            due_at: None,
            last: Instant::now(),
            pause: Duration::ZERO,
            overflow: 0,
            overflow_logged: Seldom::default(),
            metrics,
        }
    }

    /// Returns the view that was published last.
    pub(super) fn view(&self) -> watch::Ref<'_, Arc<FleetView>> {
        self.view.borrow()
    }

    /// Makes the next view due: at once, or after the pause that follows the last one.
    pub(super) fn schedule(&mut self) {
        let earliest = self.last + self.pause;
        self.due_at
            .get_or_insert_with(|| earliest.max(Instant::now()));
    }

    /// Returns when the next view is due; `None` where nothing has changed.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.due_at
    }

    /// Returns whether the next view is due.
    pub(super) fn is_due(&self) -> bool {
        self.due_at.is_some_and(|at| at <= Instant::now())
    }

    /// Publishes a view that was begun to be made at `began`.
    pub(super) fn publish(&mut self, view: FleetView, began: Instant) {
        self.due_at = None;
        self.view.send_replace(Arc::new(view));
        self.last = Instant::now();
        let cost = self.last - began;
        self.pause = (cost * PUBLISH_SHARE).clamp(PUBLISH_EVERY, PUBLISH_LONGEST);
    }

    /// Counts the faults that have found no room in the book, and logs them: nothing is done about
    /// them. `total`: all so far.
    pub(super) fn log_overflow(&mut self, total: u64) {
        self.overflow += self.metrics.overflow(total);
        if self.overflow > 0 && self.overflow_logged.now().is_some() {
            tracing::error!(
                faults = std::mem::take(&mut self.overflow),
                "the book of faults is full: reports were not taken in, and nothing is done about \
                 them until there is room; it holds {MAX_OPEN_FAULTS_PER_NODE} faults of a node \
                 from those who administer it and as many from its users, and those of \
                 {MAX_FAULTY_NODES} nodes"
            );
        }
    }
}
