//! Taking events in from the store's feed, and keeping the fault book with it.
//!
//! The changed parts of the book are saved every [`SAVE_EVERY`], one for each node, with the
//! feed position that it reflects; events behind the saved one are read again, which changes
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fleet::session::Session;
use fleet::status::SavedReports;
use fleet::{FleetInput, Kept, Unsaved};
use jiff::Timestamp;
use model::fault::{FaultBook, NodeShare};
use runtime::backoff::Backoff;
use runtime::logging::chain;
use serde::{Deserialize, Serialize};
use store::{Checkpoint, Position, StoreError};
use tokio::time::Instant;

use super::Quarantine;

/// Name of the feed token.
const CONSUMER: &str = "fault-quarantine";
/// Events read from the feed at once.
const FEED_PAGE: usize = 1_000;
/// Pause between two saves of the fault book; events behind the saved one are read again.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// The same where nothing has changed: whoever saves nothing for long is taken for
/// gone (`retention.rs`), and no event is kept for it.
const SAVE_UNCHANGED_EVERY: Duration = Duration::from_secs(3600);
/// First pause before the feed is read again after an error; each further one is twice as long.
const FEED_RETRY: Duration = Duration::from_millis(500);
/// Longest of these pauses.
const LONGEST_FEED_RETRY: Duration = Duration::from_secs(30);

/// A failure to read the feed.
pub(super) struct FeedFailure {
    /// The error of the store.
    error: String,
    backoff: Backoff,
    /// The time of the next attempt.
    pub(super) retry_at: Instant,
}

/// A book that could not be saved for so long is a trouble: until then it may be a disk that is
/// busy.
const SAVE_TROUBLE: Duration = Duration::from_secs(60);

/// The part of a checkpoint that stands beside those of the nodes, as it is read.
#[derive(Deserialize)]
struct Saved {
    #[serde(flatten)]
    book: FaultBook,
    /// Absent in a dry run.
    #[serde(default)]
    recently_out: BTreeMap<String, Timestamp>,
    begun: Timestamp,
}

#[derive(Serialize)]
struct Saving<'a> {
    applied: Position,
    overflow: u64,
    /// Not what a dry run pretends.
    #[serde(skip_serializing_if = "Option::is_none")]
    recently_out: Option<&'a BTreeMap<String, Timestamp>>,
    begun: Timestamp,
}

/// The part of a node, as it is read: its share of the book, the statuses of its events, and its
/// sessions, for the node itself does not tell how long a change has failed, or how often it has
/// come back.
#[derive(Deserialize)]
struct SavedPart {
    book: NodeShare<'static>,
    #[serde(default)]
    reports: Option<SavedReports>,
    #[serde(default)]
    sessions: Vec<Session>,
}

#[derive(Serialize)]
struct SavingPart<'a> {
    book: NodeShare<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reports: Option<SavedReports>,
    /// Not what a dry run pretends.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sessions: Vec<&'a Session>,
}

/// The state of saving the book.
pub(super) struct SaveState {
    /// The time of the last attempt.
    at: Instant,
    /// True once this process has saved the book.
    once: bool,
    /// Feed position that what is saved reflects.
    seq: Position,
    /// True while the beginning of this store is still to be saved.
    begun_unsaved: bool,
    failure: Option<SaveFailure>,
}

/// A failure to save the book.
struct SaveFailure {
    since: Instant,
    /// The last error of the store.
    error: String,
}

// === impl SaveState ===

impl Default for SaveState {
    fn default() -> Self {
        Self {
            at: Instant::now(),
            once: false,
            seq: Position::START,
            begun_unsaved: false,
            failure: None,
        }
    }
}

// === impl Quarantine ===

impl Quarantine {
    /// Loads the saved book. One that cannot be read is rebuilt from the feed.
    pub(super) async fn load(&mut self) {
        let saved = self.store.checkpoint(CONSUMER).await;
        match saved {
            Ok(Some(checkpoint)) => match understood(&checkpoint) {
                Ok(kept) => self.fleet.restore(kept, (self.clock)()),
                Err(error) => {
                    tracing::warn!(err = %error, "the saved fault book is not understood; it is rebuilt");
                    self.fleet.still_unsaved(Unsaved {
                        nodes: checkpoint.parts.into_keys().collect(),
                        recently_out: false,
                    });
                }
            },
            Ok(None) => {
                // When this task was made, just behind its store.
                self.fleet.begin();
                self.saving.begun_unsaved = true;
            }
            Err(error) => {
                tracing::error!(err = %error, "the saved fault book cannot be read; it is rebuilt");
            }
        }
        self.saving.seq = self.fleet.book().applied();
    }

    /// Takes in all events that the feed has now.
    pub(super) async fn take_in(&mut self) {
        let until = *self.store.latest().borrow();
        while self.take_page().await && self.fleet.book().applied() < until {}
        if self.feed_failure.is_none() {
            self.take(FleetInput::CaughtUp);
        }
    }

    /// Takes in a page of the feed. Returns whether there may be more: who sends without end
    /// must not keep us from deciding about what is there.
    pub(super) async fn take_page(&mut self) -> bool {
        let page = match self
            .store
            .feed(self.fleet.book().applied(), FEED_PAGE)
            .await
        {
            Ok(page) => page,
            Err(StoreError::Closed) => return false,
            Err(error) => {
                self.feed_failed(chain(&error));
                return false;
            }
        };
        if self.feed_failure.take().is_some() {
            tracing::info!("the event feed is read again");
        }
        let none = page.is_empty();
        for record in page {
            self.metrics.received.inc();
            let node = record.event.node_name.clone();
            let changes = self.fleet.record(&record, (self.clock)());
            tracing::debug!(event.id = record.id, node, ?changes, "event taken in");
            self.metrics.processed.inc();
            let undecided = self.undecided.entry(node);
            let (_, events) = undecided.or_insert_with(|| (Instant::now(), 0));
            *events = events.saturating_add(1);
        }
        let more = !none && self.fleet.book().applied() < *self.store.latest().borrow();
        if !more {
            self.schedule_publish();
        }
        more
    }

    /// Counts what is stored and not taken in yet. What the store cannot count stays as it was
    /// counted last.
    pub(super) async fn count_backlog(&self) {
        let applied = self.fleet.book().applied();
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

    /// Takes in that the feed cannot be read. The task goes on with all else that it does,
    /// and comes back to it.
    fn feed_failed(&mut self, error: String) {
        self.metrics.error("feed_error");
        let before = self.feed_failure.take();
        if before.as_ref().is_none_or(|before| before.error != error) {
            tracing::error!(
                err = error,
                "the event feed cannot be read; it is tried again"
            );
        }
        let mut backoff = before.map_or_else(
            || Backoff::new(FEED_RETRY, LONGEST_FEED_RETRY),
            |before| before.backoff,
        );
        self.feed_failure = Some(FeedFailure {
            error,
            retry_at: Instant::now() + backoff.pause(),
            backoff,
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

    /// Returns what keeps the book from being what it should be, for people.
    pub(super) fn troubles(&self) -> Vec<String> {
        let feed = self.feed_failure.as_ref().map(|failed| {
            format!(
                "the stored events cannot be read, and no new fault is seen: {}",
                failed.error
            )
        });
        let save = self.saving.failure.as_ref();
        let save = save.filter(|failed| failed.since.elapsed() >= SAVE_TROUBLE);
        let save = save.map(|failed| {
            format!(
                "the fault book could not be saved for {} s: {}; no old event is deleted \
                 meanwhile, and after a restart the newer ones are read again",
                failed.since.elapsed().as_secs(),
                failed.error
            )
        });
        feed.into_iter().chain(save).collect()
    }

    /// Returns when what has changed in the book is to be saved; `None`: it is.
    pub(super) fn save_at(&self) -> Option<Instant> {
        // One that is being rebuilt is behind what is saved.
        let changed = self.fleet.book().applied() != self.saving.seq
            || self.fleet.is_unsaved()
            || self.saving.begun_unsaved;
        (changed && self.fleet.is_caught_up()).then_some(self.saving.at + SAVE_EVERY)
    }

    /// Returns when the book is to be saved next, changed or not.
    pub(super) fn save_next(&self) -> Option<Instant> {
        let pause = if self.saving.once {
            SAVE_UNCHANGED_EVERY
        } else {
            SAVE_EVERY
        };
        let unchanged = self.fleet.is_caught_up().then_some(self.saving.at + pause);
        self.save_at().or(unchanged)
    }

    pub(super) async fn save_if_due(&mut self) {
        if self.save_next().is_some_and(|at| at <= Instant::now()) {
            self.save().await;
        }
    }

    pub(super) async fn save(&mut self) {
        self.saving.at = Instant::now();
        let unsaved = self.fleet.take_unsaved();
        let begun_unsaved = std::mem::take(&mut self.saving.begun_unsaved);
        let saved = match self.to_save(&unsaved.nodes) {
            Ok(checkpoint) => self.store.save_checkpoint(CONSUMER, checkpoint).await,
            Err(error) => Err(StoreError::Invalid {
                what: format!("the fault book cannot be written as JSON: {error}"),
            }),
        };
        match saved {
            Ok(()) => {
                self.fleet.saved(&unsaved.nodes);
                self.saving.seq = self.fleet.book().applied();
                self.saving.once = true;
                self.metrics.unsaved(Duration::ZERO);
                if self.saving.failure.take().is_some() {
                    tracing::info!("the fault book is saved again");
                    self.schedule_publish();
                }
            }
            Err(error) => {
                self.fleet.still_unsaved(unsaved);
                self.saving.begun_unsaved |= begun_unsaved;
                if !matches!(error, StoreError::Closed) {
                    self.save_failed(chain(&error));
                }
            }
        }
    }

    /// Returns the checkpoint in which the parts of `nodes` are written anew.
    fn to_save(&self, nodes: &BTreeSet<String>) -> serde_json::Result<Checkpoint> {
        let (fleet, book) = (&self.fleet, self.fleet.book());
        let part = |node: &String| {
            let part = SavingPart {
                book: book.share(node),
                reports: fleet.reports(node),
                sessions: fleet.sessions_to_keep(node),
            };
            let nothing = part.reports.is_none() && part.sessions.is_empty();
            let state = if part.book.is_empty() && nothing {
                Vec::new()
            } else {
                serde_json::to_vec(&part)?
            };
            Ok((node.clone(), state))
        };
        Ok(Checkpoint {
            token: book.applied(),
            state: serde_json::to_vec(&Saving {
                applied: book.applied(),
                overflow: book.overflow(),
                recently_out: fleet.writes().then(|| fleet.recently_out()),
                begun: fleet.begun(),
            })?,
            parts: nodes.iter().map(part).collect::<serde_json::Result<_>>()?,
        })
    }

    /// Takes in that the book cannot be saved. That costs reading the events behind the last
    /// one again, and the room of what cannot be deleted.
    fn save_failed(&mut self, error: String) {
        self.metrics.error("save_error");
        tracing::warn!(err = error, "the fault book could not be saved");
        let now = Instant::now();
        let since = self
            .saving
            .failure
            .take()
            .map_or(now, |failed| failed.since);
        self.metrics.unsaved(now - since);
        self.saving.failure = Some(SaveFailure { since, error });
        self.schedule_publish();
    }
}

/// Reads a checkpoint.
fn understood(checkpoint: &Checkpoint) -> serde_json::Result<Kept> {
    let mut saved: Saved = serde_json::from_slice(&checkpoint.state)?;
    let (mut sessions, mut reports) = (BTreeMap::new(), BTreeMap::new());
    for (node, part) in &checkpoint.parts {
        let part: SavedPart = serde_json::from_slice(part)?;
        saved.book.restore(node, part.book);
        if !part.sessions.is_empty() {
            sessions.insert(node.clone(), part.sessions);
        }
        reports.extend(part.reports.map(|reports| (node.clone(), reports)));
    }
    Ok(Kept {
        book: saved.book,
        reports,
        recently_out: saved.recently_out,
        begun: saved.begun,
        sessions,
        unsaved: BTreeSet::new(),
    })
}

#[cfg(test)]
mod tests;
