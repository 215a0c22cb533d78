//! Reads the store's feed into the fault book, page by page.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use analysis::NodePlaces;
use fleet::{Fleet, FleetInput};
use jiff::Timestamp;
use model::position::Position;
use runtime::backoff::Backoff;
use runtime::logging::chain;
use store::{EventStore, StoreError};
use tokio::sync::watch;
use tokio::time::Instant;

use super::metrics::QuarantineMetrics;

mod missed;

use missed::Missed;

/// Events per page of the feed.
const FEED_PAGE: usize = 1_000;
/// First pause after an error of the feed; each further one doubles.
const FEED_RETRY: Duration = Duration::from_millis(500);
/// Longest pause after an error of the feed.
const LONGEST_FEED_RETRY: Duration = Duration::from_secs(30);

/// Reader of the feed.
pub(super) struct Feed {
    store: Arc<dyn EventStore>,
    clock: fn() -> Timestamp,
    metrics: QuarantineMetrics,
    /// Nodes with events since their last decision: when the first event was read, and the
    /// number of events.
    undecided: BTreeMap<String, (Instant, u32)>,
    failure: Option<Failure>,
    missed: Missed,
    /// Places of nodes that the rules of the analysis name.
    places: NodePlaces,
    /// Position up to which the analysis has read the feed; `None` where nothing depends on it.
    analysed: Option<watch::Receiver<Position>>,
}

/// A failure to read the feed, until a read succeeds.
struct Failure {
    /// Error of the store.
    error: String,
    backoff: Backoff,
    /// Time of the next attempt.
    retry_at: Instant,
}

// === impl Feed ===

impl Feed {
    pub(super) fn new(
        store: Arc<dyn EventStore>,
        clock: fn() -> Timestamp,
        metrics: QuarantineMetrics,
        analysed: Option<watch::Receiver<Position>>,
    ) -> Self {
        Self {
            store,
            clock,
            metrics,
            undecided: BTreeMap::new(),
            failure: None,
            missed: Missed::default(),
            places: NodePlaces::default(),
            analysed,
        }
    }

    /// Takes over places of nodes. Open faults that have none get them at once.
    pub(super) fn set_places(&mut self, places: NodePlaces, fleet: &mut Fleet) {
        self.places = places;
        let nodes: Vec<String> = fleet.book().nodes().map(str::to_owned).collect();
        for node in nodes {
            let labels = self.places.labels_of(&node);
            fleet.handle(FleetInput::Located { node, labels }, (self.clock)());
        }
    }

    /// Reads all events that are in the feed now: among them are all conclusions of the analysis
    /// from what it has read.
    pub(super) async fn catch_up(&mut self, fleet: &mut Fleet) {
        let analysed = self.analysed.as_mut();
        let analysed = analysed.map(|upto| *upto.borrow_and_update());
        let until = *self.store.latest().borrow();
        while self.read_page(fleet).await && fleet.book().applied() < until {}
        if self.failure.is_none() {
            fleet.handle(FleetInput::CaughtUp, (self.clock)());
            if let Some(upto) = analysed {
                fleet.handle(FleetInput::Analysed(upto), (self.clock)());
            }
        }
    }

    /// Waits until the analysis has read more; for ever where nothing depends on it.
    pub(super) async fn analysed(&mut self) {
        let changed = match &mut self.analysed {
            Some(upto) => upto.changed().await.is_ok(),
            None => false,
        };
        if !changed {
            std::future::pending::<()>().await;
        }
    }

    /// Reads one page of the feed, so that a sender that never pauses does not delay decisions
    /// about earlier events. Returns true if there may be more.
    pub(super) async fn read_page(&mut self, fleet: &mut Fleet) -> bool {
        let page = match self.store.feed(fleet.book().applied(), FEED_PAGE).await {
            Ok(page) => page,
            Err(StoreError::Closed) => return false,
            Err(error) => {
                self.failed(chain(&error));
                return false;
            }
        };
        if self.failure.take().is_some() {
            tracing::info!("the event feed is read again");
        }
        let none = page.is_empty();
        for mut record in page {
            self.metrics.received.inc();
            self.places.locate(&mut record.event);
            let node = record.event.node_name.clone();
            let changes = fleet.record(&record, (self.clock)());
            tracing::debug!(event.id = record.id, node, ?changes, "event recorded");
            self.metrics.processed.inc();
            let undecided = self.undecided.entry(node);
            let (_, events) = undecided.or_insert_with(|| (Instant::now(), 0));
            *events = events.saturating_add(1);
        }
        !none && fleet.book().applied() < *self.store.latest().borrow()
    }

    /// Counts the events that a decision about a node covers.
    pub(super) fn decided(&mut self, node: &str) {
        if let Some((since, events)) = self.undecided.remove(node) {
            self.metrics.handled(events, since.elapsed());
        }
    }

    /// Updates the metric of stored events that are not read yet. If the store cannot count
    /// them, the metric keeps its value.
    pub(super) async fn count_backlog(&self, fleet: &Fleet) {
        let applied = fleet.book().applied();
        let is_behind = *self.store.latest().borrow() > applied;
        let backlog = if is_behind {
            self.store.behind(applied).await
        } else {
            Ok(0)
        };
        if let Ok(events) = backlog {
            self.metrics.backlog(events);
        }
    }

    fn failed(&mut self, error: String) {
        self.metrics.error("feed_error");
        let before = self.failure.take();
        if before.as_ref().is_none_or(|before| before.error != error) {
            tracing::error!(err = error, "the event feed cannot be read; trying again");
        }
        let mut backoff = before.map_or_else(
            || Backoff::new(FEED_RETRY, LONGEST_FEED_RETRY),
            |before| before.backoff,
        );
        self.failure = Some(Failure {
            error,
            retry_at: Instant::now() + backoff.pause(),
            backoff,
        });
    }

    /// Returns when the feed is read again after a failure; `None` without one.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.failure.as_ref().map(|failure| failure.retry_at)
    }

    /// Returns a note for people on a failure to read the feed.
    pub(super) fn trouble(&self) -> Option<String> {
        self.failure.as_ref().map(|failure| {
            format!(
                "the stored events cannot be read, so new faults are not detected: {}",
                failure.error
            )
        })
    }
}

#[cfg(test)]
mod tests;
