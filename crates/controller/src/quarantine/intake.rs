//! Taking events in from the store's feed, and keeping the fault book with it.
//!
//! The book is saved every [`SAVE_EVERY`], with the feed position that it reflects; events
//! behind the saved one are read again, which changes nothing.

use std::time::Duration;

use domain::event::Record;
use domain::fault::{Change, Fault, FaultBook};
use domain::status::StatusLedger;
use runtime::logging::chain;
use serde::{Deserialize, Serialize};
use store::{Checkpoint, StoreError};
use tokio::time::Instant;

use super::Quarantine;

/// Name of the feed token.
const CONSUMER: &str = "fault-quarantine";
/// Events read from the feed at once.
const FEED_PAGE: usize = 1_000;
/// How often the fault book is saved; events behind the saved one are read again.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// Pauses before the feed is read again after an error: the first, each next one twice as
/// long, and the longest.
const FEED_RETRY: Duration = Duration::from_millis(500);
const LONGEST_FEED_RETRY: Duration = Duration::from_secs(30);

/// The feed could not be read.
pub(super) struct FeedFailure {
    /// What the store said.
    error: String,
    pause: Duration,
    /// When it is tried again.
    pub(super) retry_at: Instant,
}

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
    pub(super) async fn take_in(&mut self) {
        loop {
            let page = match self.store.feed(self.book.applied(), FEED_PAGE).await {
                Ok(page) => page,
                Err(StoreError::Closed) => return,
                Err(error) => return self.feed_failed(chain(&error)),
            };
            if self.feed_failure.take().is_some() {
                tracing::info!("the event feed is read again");
            }
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

    /// Takes in that the feed cannot be read. The task goes on with all else that it does,
    /// and comes back to it.
    fn feed_failed(&mut self, error: String) {
        self.metrics.error("feed_error");
        let before = self.feed_failure.take();
        let pause = before.as_ref().map_or(FEED_RETRY, |before| {
            (before.pause * 2).min(LONGEST_FEED_RETRY)
        });
        if before.is_none_or(|before| before.error != error) {
            tracing::error!(
                err = error,
                "the event feed cannot be read; it is tried again"
            );
        }
        self.feed_failure = Some(FeedFailure {
            error,
            pause,
            retry_at: Instant::now() + pause,
        });
        self.schedule_publish();
    }

    /// Reads the feed again where that has failed, once it is time.
    pub(super) async fn take_in_if_due(&mut self) {
        let failed = self.feed_failure.as_ref();
        if failed.is_some_and(|failed| failed.retry_at <= Instant::now()) {
            self.take_in().await;
        }
    }

    /// What keeps the book from being what it should be, for people.
    pub(super) fn troubles(&self) -> Vec<String> {
        let feed = self.feed_failure.as_ref().map(|failed| {
            format!(
                "the stored events cannot be read, and no new fault is seen: {}",
                failed.error
            )
        });
        feed.into_iter().collect()
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

#[cfg(test)]
mod tests;
