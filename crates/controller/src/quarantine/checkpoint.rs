//! Saves and loads the fault book.
//!
//! The book is saved every [`SAVE_EVERY`]: the parts of nodes that have changed, with the feed
//! position that the book reflects. After a restart the later events are read again, which
//! changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fleet::session::Session;
use fleet::status::Reports;
use fleet::{Fleet, SavedState, Unsaved};
use jiff::Timestamp;
use model::fault::{FaultBook, NodeShare};
use runtime::logging::chain;
use serde::{Deserialize, Serialize};
use store::{Checkpoint, EventStore, Position, StoreError};
use tokio::time::Instant;

use super::metrics::QuarantineMetrics;

/// Name of the feed token.
const CONSUMER: &str = "fault-quarantine";
/// Pause between two saves of a changed book. Events after the saved position are read again.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// Pause between two saves of an unchanged book. A consumer that does not save for long counts
/// as gone (`retention.rs`), and its events are no longer kept.
const SAVE_UNCHANGED_EVERY: Duration = Duration::from_secs(3600);
/// Time after which a failure to save is reported to people. A busy disk may cause a shorter
/// one.
const SAVE_TROUBLE: Duration = Duration::from_secs(60);

/// State of a checkpoint beside the parts of the nodes.
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
    /// Absent in a dry run, which only pretends its changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    recently_out: Option<&'a BTreeMap<String, Timestamp>>,
    begun: Timestamp,
}

/// Part of a node: its share of the book, the statuses of its events, and its sessions. The node
/// itself does not show how long a change has failed, or how often a session has returned.
#[derive(Deserialize)]
struct SavedPart {
    book: NodeShare<'static>,
    #[serde(default)]
    reports: Option<Reports>,
    #[serde(default)]
    sessions: Vec<Session>,
}

#[derive(Serialize)]
struct SavingPart<'a> {
    book: NodeShare<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reports: Option<&'a Reports>,
    /// Absent in a dry run, which only pretends its changes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sessions: Vec<&'a Session>,
}

/// Saver of the fault book.
pub(super) struct Checkpoints {
    store: Arc<dyn EventStore>,
    clock: fn() -> Timestamp,
    metrics: QuarantineMetrics,
    /// Time of the last attempt.
    at: Instant,
    /// True once this process has saved the book.
    once: bool,
    /// Feed position of the saved book.
    seq: Position,
    /// True until the start of a new store is saved.
    begun_unsaved: bool,
    failure: Option<SaveFailure>,
}

/// A failure to save the book, until a save succeeds.
struct SaveFailure {
    since: Instant,
    /// Last error of the store.
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

    /// Loads the saved book. A book that cannot be read is rebuilt from the feed.
    pub(super) async fn load(&mut self, fleet: &mut Fleet) {
        match self.store.checkpoint(CONSUMER).await {
            Ok(Some(checkpoint)) => match parse(&checkpoint) {
                Ok(kept) => fleet.restore(kept, (self.clock)()),
                Err(error) => {
                    tracing::warn!(err = %error, "the saved fault book cannot be parsed; rebuilding it");
                    fleet.still_unsaved(Unsaved {
                        nodes: checkpoint.parts.into_keys().collect(),
                        recently_out: false,
                    });
                }
            },
            Ok(None) => {
                // The store is new: it was created just before this task.
                fleet.begin();
                self.begun_unsaved = true;
            }
            Err(error) => {
                tracing::error!(err = %error, "the saved fault book cannot be read; rebuilding it");
            }
        }
        self.seq = fleet.book().applied();
    }

    /// Returns a note for people on a failure to save that has lasted for [`SAVE_TROUBLE`].
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

    /// Returns when the changes of the book are saved; `None` if nothing has changed.
    fn changes_due_at(&self, fleet: &Fleet) -> Option<Instant> {
        // A book that is being rebuilt is behind the saved one.
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

    /// Saves the book if due. Returns true if this failed, or succeeded after a failure.
    pub(super) async fn save_if_due(&mut self, fleet: &mut Fleet) -> bool {
        let is_due = self.due_at(fleet).is_some_and(|at| at <= Instant::now());
        is_due && self.save(fleet).await
    }

    /// Saves the book. Returns true if this failed, or succeeded after a failure.
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

    /// Records a failed save. After a restart the events after the saved position are read
    /// again, and none of them can be deleted meanwhile.
    fn failed(&mut self, error: String) {
        self.metrics.error("save_error");
        tracing::warn!(err = error, "the fault book could not be saved");
        let now = Instant::now();
        let since = self.failure.take().map_or(now, |failure| failure.since);
        self.metrics.unsaved(now - since);
        self.failure = Some(SaveFailure { since, error });
    }
}

/// Returns a checkpoint of the book with the parts of `nodes`.
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

/// Reads the state and all parts of a checkpoint.
fn parse(checkpoint: &Checkpoint) -> serde_json::Result<SavedState> {
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
    Ok(SavedState {
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
