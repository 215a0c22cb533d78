//! Saving and loading the fault book.
//!
//! The changed parts of the book are saved every [`SAVE_EVERY`], one for each node, with the
//! feed position that the book reflects. After a restart the events behind that position are read
//! again, which changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fleet::session::Session;
use fleet::status::SavedReports;
use fleet::{Fleet, Kept, Unsaved};
use jiff::Timestamp;
use model::fault::{FaultBook, NodeShare};
use runtime::logging::chain;
use serde::{Deserialize, Serialize};
use store::{Checkpoint, EventStore, Position, StoreError};
use tokio::time::Instant;

use super::metrics::QuarantineMetrics;

/// Name of the feed token.
const CONSUMER: &str = "fault-quarantine";
/// Pause between two saves of the fault book; events behind the saved one are read again.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// The same where nothing has changed: whoever saves nothing for long is taken for
/// gone (`retention.rs`), and no event is kept for it.
const SAVE_UNCHANGED_EVERY: Duration = Duration::from_secs(3600);
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

/// The saved fault book, and when it is saved next.
pub(super) struct Checkpoints {
    store: Arc<dyn EventStore>,
    clock: fn() -> Timestamp,
    metrics: QuarantineMetrics,
    /// The time of the last attempt.
    at: Instant,
    /// True once this process has saved the book.
    once: bool,
    /// Feed position that the saved book reflects.
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

// === impl Checkpoints ===

impl Checkpoints {
    pub(super) fn new(
        store: Arc<dyn EventStore>,
        clock: fn() -> Timestamp,
        metrics: QuarantineMetrics,
    ) -> Self {
        Self {
            store,
            clock,
            metrics,
            at: Instant::now(),
            once: false,
            seq: Position::START,
            begun_unsaved: false,
            failure: None,
        }
    }

    /// Loads the saved book. One that cannot be read is rebuilt from the feed.
    pub(super) async fn load(&mut self, fleet: &mut Fleet) {
        match self.store.checkpoint(CONSUMER).await {
            Ok(Some(checkpoint)) => match parse(&checkpoint) {
                Ok(kept) => fleet.restore(kept, (self.clock)()),
                Err(error) => {
                    tracing::warn!(err = %error, "the saved fault book is not understood; it is rebuilt");
                    fleet.still_unsaved(Unsaved {
                        nodes: checkpoint.parts.into_keys().collect(),
                        recently_out: false,
                    });
                }
            },
            Ok(None) => {
                // The store is new: it was made just before this task.
                fleet.begin();
                self.begun_unsaved = true;
            }
            Err(error) => {
                tracing::error!(err = %error, "the saved fault book cannot be read; it is rebuilt");
            }
        }
        self.seq = fleet.book().applied();
    }

    /// Returns the failure to save the book, for people, once it has lasted.
    pub(super) fn trouble(&self) -> Option<String> {
        let failure = self.failure.as_ref();
        let failure = failure.filter(|failure| failure.since.elapsed() >= SAVE_TROUBLE)?;
        Some(format!(
            "the fault book could not be saved for {} s: {}; no old event is deleted meanwhile, \
             and after a restart the newer ones are read again",
            failure.since.elapsed().as_secs(),
            failure.error
        ))
    }

    /// Returns when the changes of the book are saved; `None` where nothing has changed.
    fn changes_due_at(&self, fleet: &Fleet) -> Option<Instant> {
        // One that is being rebuilt is behind the saved one.
        let changed =
            fleet.book().applied() != self.seq || fleet.is_unsaved() || self.begun_unsaved;
        (changed && fleet.is_caught_up()).then_some(self.at + SAVE_EVERY)
    }

    /// Returns when the book is saved next, changed or not.
    pub(super) fn due_at(&self, fleet: &Fleet) -> Option<Instant> {
        let pause = if self.once {
            SAVE_UNCHANGED_EVERY
        } else {
            SAVE_EVERY
        };
        let unchanged = fleet.is_caught_up().then_some(self.at + pause);
        self.changes_due_at(fleet).or(unchanged)
    }

    /// Saves the book once that is due. Returns whether it has begun to fail, or to work again.
    pub(super) async fn save_if_due(&mut self, fleet: &mut Fleet) -> bool {
        let is_due = self.due_at(fleet).is_some_and(|at| at <= Instant::now());
        is_due && self.save(fleet).await
    }

    /// Saves the book. Returns whether it has failed, or works again.
    pub(super) async fn save(&mut self, fleet: &mut Fleet) -> bool {
        self.at = Instant::now();
        let unsaved = fleet.take_unsaved();
        let begun_unsaved = std::mem::take(&mut self.begun_unsaved);
        let saved = match checkpoint(fleet, &unsaved.nodes) {
            Ok(checkpoint) => self.store.save_checkpoint(CONSUMER, checkpoint).await,
            Err(error) => Err(StoreError::Invalid {
                what: format!("the fault book cannot be written as JSON: {error}"),
            }),
        };
        match saved {
            Ok(()) => {
                fleet.saved(&unsaved.nodes);
                self.seq = fleet.book().applied();
                self.once = true;
                self.metrics.unsaved(Duration::ZERO);
                let recovered = self.failure.take().is_some();
                if recovered {
                    tracing::info!("the fault book is saved again");
                }
                recovered
            }
            Err(error) => {
                fleet.still_unsaved(unsaved);
                self.begun_unsaved |= begun_unsaved;
                if matches!(error, StoreError::Closed) {
                    return false;
                }
                self.failed(chain(&error));
                true
            }
        }
    }

    /// Records that the book could not be saved. After a restart the events behind the saved one
    /// are read again, and none of them can be deleted meanwhile.
    fn failed(&mut self, error: String) {
        self.metrics.error("save_error");
        tracing::warn!(err = error, "the fault book could not be saved");
        let now = Instant::now();
        let since = self.failure.take().map_or(now, |failure| failure.since);
        self.metrics.unsaved(now - since);
        self.failure = Some(SaveFailure { since, error });
    }
}

/// Returns the checkpoint in which the parts of `nodes` are written anew.
fn checkpoint(fleet: &Fleet, nodes: &BTreeSet<String>) -> serde_json::Result<Checkpoint> {
    let book = fleet.book();
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

/// Reads a checkpoint.
fn parse(checkpoint: &Checkpoint) -> serde_json::Result<Kept> {
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
