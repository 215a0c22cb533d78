//! Writing what became of the events into their records, as `domain::status` says it.
//!
//! It goes beside the journal, in batches; a patch never waits for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use domain::status::{NodeQuarantined, Status};
use store::{EventQuery, EventStore, StatusPatch, StoreError};
use tokio::sync::mpsc;

use super::Quarantine;
use super::metrics::QuarantineMetrics;

/// Most statuses that wait for the store: those of a thousand nodes with as many faults each as are
/// listed there. More are left out, and made up for after a restart as far as nodes list them.
pub(super) const STATUS_QUEUE: usize = 20_000;
/// Statuses that are written at once.
const BATCH: usize = 500;
/// Events that are read at once to find the ones of a quarantine.
const PAGE: usize = 500;
/// Pause after the store has refused a batch.
const RETRY: Duration = Duration::from_millis(500);

/// Brings statuses to the store.
pub struct StatusWriter {
    pub(super) queue: mpsc::Receiver<Status>,
    pub(super) store: Arc<dyn EventStore>,
    pub(super) metrics: QuarantineMetrics,
}

impl Quarantine {
    /// Has a status written. Does not wait for the disk.
    pub(super) fn write_status(&mut self, status: Status) {
        if self.statuses.try_send(status).is_err() {
            tracing::error!("the store is too slow for the statuses of events: some are left out");
            self.metrics.error("update_quarantine_status_error");
        }
    }
}

// === impl StatusWriter ===

impl StatusWriter {
    /// Writes until the task has ended and the queue is empty. What the store cannot take now is
    /// tried again for as long as it takes.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        while self.queue.recv_many(&mut batch, BATCH).await > 0 {
            while let Err(error) = write(self.store.as_ref(), &batch).await {
                if matches!(error, StoreError::Closed) {
                    break;
                }
                self.metrics.error("update_quarantine_status_error");
                if !error.is_retryable() {
                    tracing::error!(err = %error, "the statuses of events are refused");
                    break;
                }
                tracing::warn!(err = %error, "the statuses of events cannot be written; it is tried again");
                tokio::time::sleep(RETRY).await;
            }
            batch.clear();
        }
    }
}

/// Writes `batch`. Writing it again changes nothing.
async fn write(store: &dyn EventStore, batch: &[Status]) -> Result<(), StoreError> {
    let mut ids: Vec<String> = Vec::new();
    for status in batch {
        if let Status::Event { id, if_counted, .. } = status {
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
    for status in batch {
        match status {
            Status::Event {
                id,
                word: status,
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
            Status::Cancel { node } => {
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
