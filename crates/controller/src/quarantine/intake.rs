//! Taking events in from the store's feed, and keeping the fault book with it.
//!
//! The book is saved every [`SAVE_EVERY`], with the feed position that it reflects; events
//! behind the saved one are read again, which changes nothing.

use std::time::Duration;

use domain::event::Record;
use domain::fault::{Change, Fault, FaultBook};
use domain::status::StatusLedger;
use serde::{Deserialize, Serialize};
use store::{Checkpoint, StoreError};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Quarantine;

/// Name of the feed token.
const CONSUMER: &str = "fault-quarantine";
/// Events read from the feed at once.
const FEED_PAGE: usize = 1_000;
/// How often the fault book is saved; events behind the saved one are read again.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// Pause before the store is asked again after an error.
const STORE_RETRY: Duration = Duration::from_millis(500);

/// What is saved: the book, and beside it the statuses that are not written yet.
#[derive(Deserialize)]
struct Saved {
    #[serde(flatten)]
    book: FaultBook,
    #[serde(default)]
    statuses: StatusLedger,
}

#[derive(Serialize)]
struct Saving<'a> {
    #[serde(flatten)]
    book: &'a FaultBook,
    statuses: &'a StatusLedger,
}

impl Quarantine {
    /// Loads the saved book. One that cannot be read is rebuilt from the feed.
    pub(super) async fn load(&mut self) {
        let saved = self.store.checkpoint(CONSUMER).await;
        match saved {
            Ok(Some(checkpoint)) => match serde_json::from_slice::<Saved>(&checkpoint.state) {
                Ok(saved) => (self.book, self.statuses) = (saved.book, saved.statuses),
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
    pub(super) async fn take_in(&mut self, cancel: &CancellationToken) {
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
                let changes = self.record(&record);
                tracing::debug!(event.id = record.id, node, ?changes, "event taken in");
                self.metrics.processed.inc();
                let (_, events) =
                    (self.entry(&node).undecided).get_or_insert_with(|| (Instant::now(), 0));
                *events = events.saturating_add(1);
                self.touch(&node);
            }
            if !more {
                self.caught_up = true;
                self.schedule_publish();
                return;
            }
        }
    }

    /// Records an event; what it reports or closes decides later what became of it.
    fn record(&mut self, record: &Record) -> Vec<Change> {
        let (id, node) = (&record.id, &record.event.node_name);
        let counts = |changes: &[Change]| {
            let ignored = |change: &Change| matches!(change, Change::Ignored(_));
            !changes.iter().all(ignored)
        };
        if !record.event.is_healthy {
            let changes = self.book.record(record);
            if counts(&changes) {
                let faults = self.book.touched_by(&record.event);
                self.statuses.took_in(node, id, false, &faults);
            }
            return changes;
        }
        // Once recorded, what it closes is gone.
        let before = self.book.touched_by(&record.event);
        let closed: Vec<Fault> = before.into_iter().cloned().collect();
        let changes = self.book.record(record);
        if counts(&changes) {
            let closed: Vec<&Fault> = closed.iter().collect();
            self.statuses.took_in(node, id, true, &closed);
        }
        changes
    }

    /// When the book is to be saved next; `None`: it is.
    pub(super) fn save_at(&self) -> Option<Instant> {
        (self.book.applied() != self.saved_seq).then_some(self.saved_at + SAVE_EVERY)
    }

    pub(super) async fn save_if_due(&mut self) {
        let due = self.saved_at.elapsed() >= SAVE_EVERY;
        if due && self.book.applied() != self.saved_seq {
            self.save().await;
        }
    }

    pub(super) async fn save(&mut self) {
        self.saved_at = Instant::now();
        let saving = Saving {
            book: &self.book,
            statuses: &self.statuses,
        };
        let Ok(state) = serde_json::to_vec(&saving) else {
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
