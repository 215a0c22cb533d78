//! Writing what became of the events into their records.
//!
//! The ledger of `domain` says what is due. It is written beside everything else, in
//! batches; a patch never waits for it. What is not confirmed stays due, over a restart too.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use domain::fleet::Input;
use domain::status::{Due, NodeQuarantined};
use futures::FutureExt as _;
use store::{EventQuery, EventStore, StatusPatch, StoreError};
use tokio::task::JoinError;

use super::Quarantine;

/// Statuses that are written at once.
const BATCH: usize = 500;
/// Events that are read at once to find the ones of a quarantine.
const PAGE: usize = 500;
/// Pause after the store has refused a batch.
const RETRY: Duration = Duration::from_millis(500);

/// Panics over the same batch after which it is given up.
const PANICS: u32 = 5;

/// A batch that was tried: how many, and whether they are written.
pub(super) type Written = (usize, Result<(), Failed>);

/// Why a batch is not written.
#[derive(Debug)]
pub(super) enum Failed {
    Store(StoreError),
    /// A fault of ours.
    Panicked,
}

impl Quarantine {
    /// Starts writing what is due, unless a batch is under way.
    pub(super) fn write_statuses(&mut self) {
        if !self.writing.is_empty() {
            return;
        }
        let batch = self.fleet.due_statuses(BATCH);
        if batch.is_empty() {
            return;
        }
        let store = Arc::clone(&self.store);
        self.writing.spawn(async move {
            let written = AssertUnwindSafe(write(store.as_ref(), &batch)).catch_unwind();
            let result = match written.await {
                Ok(written) => written.map_err(Failed::Store),
                Err(_) => Err(Failed::Panicked),
            };
            if result.is_err() {
                tokio::time::sleep(RETRY).await;
            }
            (batch.len(), result)
        });
    }

    pub(super) fn statuses_written(&mut self, done: Result<Written, JoinError>) {
        match done {
            Ok((count, Ok(()))) => {
                self.writing_panics = 0;
                self.take(Input::StatusesWritten(count));
            }
            Ok((_, Err(Failed::Store(StoreError::Closed)))) => {}
            Ok((count, Err(Failed::Store(error @ StoreError::Invalid { .. })))) => {
                // It would not get better.
                tracing::error!(err = %error, "the statuses of events are refused");
                self.metrics.error("update_quarantine_status_error");
                self.take(Input::StatusesWritten(count));
            }
            Ok((_, Err(Failed::Store(error)))) => {
                tracing::warn!(err = %error, "the statuses of events cannot be written; it is tried again");
                self.metrics.error("update_quarantine_status_error");
            }
            Ok((count, Err(Failed::Panicked))) => {
                self.metrics.error("update_quarantine_status_error");
                self.writing_panics += 1;
                if self.writing_panics >= PANICS {
                    tracing::error!(count, "the statuses of these events are given up");
                    self.writing_panics = 0;
                    self.take(Input::StatusesWritten(count));
                }
            }
            Err(error) => {
                tracing::error!(err = %error, "writing the statuses of events ended without an answer");
            }
        }
    }
}

/// Writes `batch`. Writing it again changes nothing.
async fn write(store: &dyn EventStore, batch: &[Due]) -> Result<(), StoreError> {
    let mut ids: Vec<String> = Vec::new();
    for due in batch {
        if let Due::Event { id, if_counted, .. } = due {
            ids.push(id.clone());
            ids.extend(if_counted.iter().cloned());
        }
    }
    ids.sort();
    ids.dedup();
    let found = store.statuses(ids.clone()).await?;
    let words = found
        .into_iter()
        .map(|status| status.and_then(|status| status.node_quarantined));
    let mut known: BTreeMap<String, Option<String>> = ids.into_iter().zip(words).collect();
    let mut patches = Vec::new();
    for due in batch {
        match due {
            Due::Event {
                id,
                status,
                at,
                if_counted,
            } => {
                let word = |id: &String| known.get(id).and_then(Option::as_deref);
                let counted = if_counted.is_empty()
                    || if_counted
                        .iter()
                        .any(|id| word(id).is_some_and(NodeQuarantined::is_counted));
                if word(id).is_some() || !counted {
                    continue;
                }
                known.insert(id.clone(), Some(status.name().to_owned()));
                patches.push((
                    id.clone(),
                    StatusPatch {
                        node_quarantined: Some(status.name().to_owned()),
                        quarantine_finished_at: Some(*at),
                    },
                ));
            }
            Due::Cancel { node } => {
                store.update_statuses(std::mem::take(&mut patches)).await?;
                cancel(store, node).await?;
            }
        }
    }
    store.update_statuses(patches).await
}

/// Marks all events of the newest quarantine of `node` as cancelled, unless a recovery has
/// ended it.
async fn cancel(store: &dyn EventStore, node: &str) -> Result<(), StoreError> {
    let mut of_quarantine = Vec::new();
    let mut before = None;
    loop {
        let query = EventQuery {
            node: Some(node.to_owned()),
            before,
            limit: PAGE,
            ..EventQuery::default()
        };
        let page = store.events(query).await?;
        let ids: Vec<String> = page.iter().map(|record| record.id.clone()).collect();
        let statuses = store.statuses(ids.clone()).await?;
        for (id, status) in ids.into_iter().zip(statuses) {
            let word = status.and_then(|status| status.node_quarantined);
            let word = word.as_deref().unwrap_or_default();
            if word == NodeQuarantined::UnQuarantined.name() {
                return Ok(()); // What is newer belongs to no quarantine.
            }
            if NodeQuarantined::is_counted(word) {
                of_quarantine.push(id);
            }
            if word == NodeQuarantined::Quarantined.name() {
                return cancel_all(store, of_quarantine).await;
            }
        }
        match page.last() {
            Some(last) if page.len() == PAGE => before = Some(last.seq),
            // Its first event is not kept any more.
            _ => return cancel_all(store, of_quarantine).await,
        }
    }
}

async fn cancel_all(store: &dyn EventStore, ids: Vec<String>) -> Result<(), StoreError> {
    let patch = StatusPatch {
        node_quarantined: Some(NodeQuarantined::Cancelled.name().to_owned()),
        quarantine_finished_at: None,
    };
    // In parts, the oldest last: it tells a second try where the quarantine began.
    for part in ids.chunks(BATCH) {
        let patches = part.iter().map(|id| (id.clone(), patch.clone())).collect();
        store.update_statuses(patches).await?;
    }
    Ok(())
}
