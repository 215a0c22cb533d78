//! The journal: noting what was decided and done, and bringing it to the store.

use std::sync::Arc;

use domain::journal::{Entry, EntryKind};
use serde_json::Value;
use store::EventStore;
use tokio::sync::mpsc;

use super::Quarantine;

/// Most journal entries that wait for the store.
pub(super) const JOURNAL_QUEUE: usize = 4_096;

/// Brings journal entries to the store.
pub struct JournalWriter {
    pub(super) queue: mpsc::Receiver<Entry>,
    pub(super) store: Arc<dyn EventStore>,
}

// === impl Quarantine ===

impl Quarantine {
    pub(super) async fn note(
        &self,
        node: &str,
        session: Option<&str>,
        kind: EntryKind,
        text: String,
        detail: Value,
    ) {
        let entry = Entry {
            at: (self.clock)(),
            node: node.to_owned(),
            session: session.map(str::to_owned),
            kind,
            text,
            detail,
        };
        // It fails only when the writer is gone, at the very end.
        drop(self.journal.send(entry).await);
    }
}

// === impl JournalWriter ===

impl JournalWriter {
    /// Writes until the task has ended and the queue is empty.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        while self.queue.recv_many(&mut batch, 256).await > 0 {
            if let Err(error) = self.store.journal(std::mem::take(&mut batch)).await {
                tracing::error!(err = %error, "journal entries are lost");
            }
        }
    }
}
