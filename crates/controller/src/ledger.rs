//! Keeper of the ledger of GPUs (`analysis/ledger.rs`): reads the store's feed into it, reports
//! marked GPUs that are in use, and saves it.
//!
//! ```text
//! store feed --> Ledger --> watch channel (console, marks in the cluster)
//!      ^            |
//!      |            +-----> checkpoint: a part for each row that has changed
//!      +-- connector <-- events that are due: KnownBadGPU
//! ```
//!
//! The ledger is saved with its position in the feed, and its rows stay when retention deletes the
//! events. So it is never built from what is left of the feed while the saved one cannot be read.
//! An event that is due is sent until the feed has it; the same one is stored once.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use analysis::ledger::{GpuMark, Ledger};
use cluster::Cluster;
use connector::{AcceptError, Caller, Connector};
use contract::{EVENT_VERSION, HealthEvents};
use jiff::Timestamp;
use model::event::mark_accepted;
use model::position::Position;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use runtime::backoff::Backoff;
use runtime::logging::chain;
use runtime::metrics::Metrics;
use serde::{Deserialize, Serialize};
use store::{Checkpoint, EventStore, StoreError};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use marks::MarksKeeper;

mod marks;

/// Name of the feed token.
const CONSUMER: &str = "gpu-ledger";
/// Events per page of the feed.
const PAGE: usize = 1_000;
/// Most events that are sent at once.
const SENT_AT_ONCE: usize = 1_000;
/// Pause between two saves of a changed ledger. Events after the saved position are read again.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// Pause between two saves of an unchanged ledger: a consumer that does not save for long counts
/// as gone (`retention.rs`), and its events are no longer kept.
const SAVE_UNCHANGED_EVERY: Duration = Duration::from_secs(3600);
/// First pause after an error; each further one doubles.
const RETRY: Duration = Duration::from_millis(500);
/// Longest pause after an error.
const LONGEST_RETRY: Duration = Duration::from_secs(30);

runtime::metrics! {
    /// Metrics of the ledger.
    pub(crate) struct LedgerMetrics {
        /// GPUs in the ledger.
        gpus: Gauge = "gpuwarden_ledger_gpus",
        /// Rows of GPUs and nodes that had to make room for others in the ledger.
        left_out: Gauge = "gpuwarden_ledger_rows_left_out",
        /// Failed attempts to read or save the ledger, to read the events for it, or to report a
        /// marked GPU.
        errors: Counter = "gpuwarden_ledger_errors",
    }
}

/// State of a checkpoint beside the rows.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Saved {
    left_out: u64,
}

/// Reason why the ledger is not up to date.
#[derive(Debug, thiserror::Error)]
enum LedgerError {
    #[error("the event store failed")]
    Store(#[from] StoreError),
    #[error("the reports of marked GPUs were not accepted")]
    Send(#[from] AcceptError),
    #[error("the ledger cannot be written as JSON")]
    Json(#[from] serde_json::Error),
}

/// Keeper of the ledger; see the [module](self).
pub struct LedgerKeeper {
    store: Arc<dyn EventStore>,
    connector: Connector,
    ledger: watch::Sender<Ledger>,
    /// Marks in the cluster.
    marks: mpsc::Receiver<Vec<GpuMark>>,
    /// Position of the last event in the ledger.
    applied: Position,
    /// Position of the saved ledger.
    saved: Position,
    /// Time of the last attempt to save.
    saved_at: Instant,
    /// Time of the next attempt after an error; `None` without one.
    retry_at: Option<Instant>,
    backoff: Backoff,
    clock: fn() -> Timestamp,
    metrics: LedgerMetrics,
}

// === impl LedgerKeeper ===

impl LedgerKeeper {
    /// Creates a keeper that sends its reports to `connector`.
    pub fn new(
        store: Arc<dyn EventStore>,
        connector: Connector,
        clock: fn() -> Timestamp,
        metrics: &Metrics,
    ) -> Self {
        Self {
            store,
            connector,
            ledger: watch::Sender::new(Ledger::default()),
            marks: mpsc::channel(1).1,
            applied: Position::START,
            saved: Position::START,
            saved_at: Instant::now(),
            retry_at: None,
            backoff: Backoff::new(RETRY, LONGEST_RETRY),
            clock,
            metrics: LedgerMetrics::registered(metrics),
        }
    }

    /// Keeps the marks of GPUs in a namespace of the cluster too. Returns their keeper, which has to run.
    pub fn keep_marks(
        &mut self,
        cluster: Arc<Cluster>,
        namespace: String,
        may_write: bool,
    ) -> MarksKeeper {
        let (found, marks) = mpsc::channel(1);
        self.marks = marks;
        MarksKeeper::new(cluster, namespace, may_write, self.ledger(), found)
    }

    /// Returns a receiver of the ledger, which is empty until the saved one is loaded.
    pub fn ledger(&self) -> watch::Receiver<Ledger> {
        self.ledger.subscribe()
    }

    /// Keeps the ledger until `cancel`, and saves it then.
    pub async fn run(mut self, cancel: CancellationToken) {
        while let Err(error) = self.load().await {
            if matches!(error, StoreError::Closed) {
                return;
            }
            self.failed(&error.into());
            let pause = tokio::time::sleep_until(self.retry_at.unwrap_or_else(Instant::now));
            if cancel.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
        let mut hints = self.store.latest();
        hints.mark_changed();
        loop {
            let due = self.retry_at.unwrap_or_else(|| self.save_at());
            let worked = tokio::select! {
                () = cancel.cancelled() => break,
                changed = hints.changed(), if self.retry_at.is_none() => match changed {
                    Ok(()) => self.catch_up().await,
                    Err(_) => break, // The store is closed.
                },
                Some(marks) = self.marks.recv() => {
                    self.ledger.send_if_modified(|ledger| ledger.take_marks(marks));
                    self.catch_up().await
                }
                () = tokio::time::sleep_until(due) => match self.catch_up().await {
                    Ok(()) if self.save_at() <= Instant::now() => self.save().await,
                    caught_up => caught_up,
                },
            };
            match worked {
                Ok(()) => self.retry_at = None,
                Err(LedgerError::Store(StoreError::Closed)) => break,
                Err(error) => self.failed(&error),
            }
        }
        if let Err(error) = self.save().await {
            tracing::warn!(
                err = chain(&error),
                "the ledger of GPUs was not saved at the end"
            );
        }
    }

    /// Loads the saved ledger.
    async fn load(&mut self) -> Result<(), StoreError> {
        let Some(checkpoint) = self.store.checkpoint(CONSUMER).await? else {
            return Ok(());
        };
        let saved: Saved = serde_json::from_slice(&checkpoint.state).unwrap_or_default();
        self.ledger.send_modify(|ledger| {
            ledger.restore_left_out(saved.left_out);
            for (name, part) in &checkpoint.parts {
                if let Err(error) = ledger.restore(name, part) {
                    tracing::warn!(row = name, err = %error, "a saved row of the ledger cannot be read");
                }
            }
        });
        (self.applied, self.saved) = (checkpoint.token, checkpoint.token);
        Ok(())
    }

    /// Reads the events that are in the feed, then sends those that are due.
    async fn catch_up(&mut self) -> Result<(), LedgerError> {
        loop {
            let page = self.store.feed(self.applied, PAGE).await?;
            let Some(last) = page.last() else {
                break;
            };
            self.applied = last.seq;
            self.ledger
                .send_modify(|ledger| page.iter().for_each(|record| ledger.record(record)));
        }
        let due = {
            let ledger = self.ledger.borrow();
            let gpus = i64::try_from(ledger.gpus().len()).unwrap_or(i64::MAX);
            self.metrics.gpus.set(gpus);
            let left_out = i64::try_from(ledger.left_out()).unwrap_or(i64::MAX);
            self.metrics.left_out.set(left_out);
            ledger.due()
        };
        for events in due.chunks(SENT_AT_ONCE) {
            let mut events = events.to_vec();
            for event in &mut events {
                tracing::info!(
                    node = event.node_name,
                    healthy = event.is_healthy,
                    "a marked GPU: {}",
                    event.message
                );
                mark_accepted(event, (self.clock)());
            }
            let batch = HealthEvents {
                version: EVENT_VERSION,
                events,
            };
            self.connector.accept(batch, &Caller::Monitor).await?;
        }
        Ok(())
    }

    /// Returns when the ledger is saved next.
    fn save_at(&self) -> Instant {
        let has_changed = self.applied != self.saved || self.ledger.borrow().is_unsaved();
        let pause = if has_changed {
            SAVE_EVERY
        } else {
            SAVE_UNCHANGED_EVERY
        };
        self.saved_at + pause
    }

    /// Saves the rows that have changed.
    async fn save(&mut self) -> Result<(), LedgerError> {
        self.saved_at = Instant::now();
        let mut names = BTreeSet::new();
        self.ledger.send_if_modified(|ledger| {
            names = ledger.take_unsaved();
            false
        });
        let checkpoint = {
            let ledger = self.ledger.borrow();
            let part = |name: &String| Ok((name.clone(), ledger.part(name)?));
            let parts: serde_json::Result<_> = names.iter().map(part).collect();
            let left_out = ledger.left_out();
            parts.and_then(|parts| {
                Ok(Checkpoint {
                    token: self.applied,
                    state: serde_json::to_vec(&Saved { left_out })?,
                    parts,
                })
            })
        };
        let saved = match checkpoint {
            Ok(checkpoint) => {
                let saving = self.store.save_checkpoint(CONSUMER, checkpoint);
                saving.await.map_err(LedgerError::from)
            }
            Err(error) => Err(error.into()),
        };
        if saved.is_ok() {
            self.saved = self.applied;
        } else {
            self.ledger.send_if_modified(|ledger| {
                ledger.still_unsaved(names);
                false
            });
        }
        saved
    }

    /// Records a failure, and when to try again.
    fn failed(&mut self, error: &LedgerError) {
        self.metrics.errors.inc();
        if self.retry_at.is_none() {
            tracing::warn!(
                err = chain(error),
                "the ledger of GPUs is not up to date; trying again"
            );
            self.backoff.reset();
        }
        self.retry_at = Some(Instant::now() + self.backoff.pause());
    }
}

#[cfg(test)]
mod tests;
