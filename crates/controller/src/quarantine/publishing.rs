//! Publishes the state of all nodes for the page, the API and the metrics, at a limited rate.

use std::sync::Arc;
use std::time::Duration;

use fleet::view::FleetView;
use model::fault::{MAX_FAULTY_NODES, MAX_OPEN_FAULTS_PER_NODE};
use runtime::logging::Seldom;
use tokio::sync::watch;
use tokio::time::Instant;

use super::metrics::QuarantineMetrics;

/// Shortest pause between two views.
const PUBLISH_EVERY: Duration = Duration::from_millis(20);
/// Ratio of the pause to the cost of a view: while hundreds of nodes are being cordoned, the
/// page is late by half a second rather than the cordons.
const PUBLISH_SHARE: u32 = 30;
/// Longest pause between two views.
const PUBLISH_LONGEST: Duration = Duration::from_millis(500);

/// Publisher of views of the fleet.
pub(super) struct Publishing {
    view: watch::Sender<Arc<FleetView>>,
    /// Time when the next view is due; `None` if nothing has changed.
    due_at: Option<Instant>,
    /// Time of the last view.
    last: Instant,
    /// Pause after the last view.
    pause: Duration,
    /// Faults that found no room in the book, since the last log line about them.
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

    /// Returns the last view.
    pub(super) fn view(&self) -> watch::Ref<'_, Arc<FleetView>> {
        self.view.borrow()
    }

    /// Schedules the next view: at once, or after the pause that follows the last one.
    pub(super) fn schedule(&mut self) {
        let earliest = self.last + self.pause;
        self.due_at
            .get_or_insert_with(|| earliest.max(Instant::now()));
    }

    /// Returns when the next view is due; `None` if nothing has changed.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.due_at
    }

    /// Returns true if the next view is due.
    pub(super) fn is_due(&self) -> bool {
        self.due_at.is_some_and(|at| at <= Instant::now())
    }

    /// Publishes a view whose computation started at `began`.
    pub(super) fn publish(&mut self, view: FleetView, began: Instant) {
        self.due_at = None;
        self.view.send_replace(Arc::new(view));
        self.last = Instant::now();
        let cost = self.last - began;
        self.pause = (cost * PUBLISH_SHARE).clamp(PUBLISH_EVERY, PUBLISH_LONGEST);
    }

    /// Counts and logs the faults that found no room in the book, which are not handled. `total`
    /// is their number since the start.
    pub(super) fn log_overflow(&mut self, total: u64) {
        self.overflow += self.metrics.overflow(total);
        if self.overflow > 0 && self.overflow_logged.now().is_some() {
            tracing::error!(
                faults = std::mem::take(&mut self.overflow),
                "the fault book is full: reports were not recorded, and are not handled until there \
                 is room; it holds {MAX_OPEN_FAULTS_PER_NODE} faults of a node from its \
                 administrators and as many from its users, and those of {MAX_FAULTY_NODES} nodes"
            );
        }
    }
}
