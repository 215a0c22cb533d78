//! Journal of decisions and actions: the queue of its entries, and the writer to the store.

use std::sync::Arc;
use std::time::Duration;

use model::journal::{EntryKind, JournalEntry};
use serde_json::Value;
use store::{EventStore, StoreError};
use tokio::sync::mpsc::{self, error::TrySendError};

/// Most journal entries that wait for the store: those of a thousand nodes that are taken out of
/// service at once. Cordons do not wait for the disk: further entries are dropped, and the
/// journal shows the gap.
pub(super) const JOURNAL_QUEUE: usize = 8_192;
/// Pause before a failed write is retried.
const RETRY: Duration = Duration::from_millis(500);
/// Most entries in one transaction. The slower the disk, the more entries wait.
const JOURNAL_BATCH: usize = 2_048;

/// Sender of entries to the [`JournalWriter`].
pub(super) struct Journal {
    queue: mpsc::Sender<JournalEntry>,
    /// Dropped entries that no gap entry reports yet.
    missing: u64,
}

/// Writes journal entries to the store.
pub struct JournalWriter {
    queue: mpsc::Receiver<JournalEntry>,
    store: Arc<dyn EventStore>,
    /// Refused entries that no gap entry reports yet.
    missing: u64,
}

// === impl Journal ===

impl Journal {
    pub(super) fn new(queue: mpsc::Sender<JournalEntry>) -> Self {
        Self { queue, missing: 0 }
    }

    /// Puts an entry into the queue. Returns false if the queue is full. The next entry that
    /// fits is preceded by one with the number of missing entries.
    pub(super) fn put(&mut self, entry: JournalEntry) -> bool {
        let gap = gap(self.missing, &entry, "the store was too slow to take them");
        for entry in gap.into_iter().chain([entry]) {
            match self.queue.try_send(entry) {
                // The writer is gone only at the end of the process.
                Ok(()) | Err(TrySendError::Closed(_)) => self.missing = 0,
                Err(TrySendError::Full(_)) => {
                    if self.missing == 0 {
                        tracing::error!("the store is too slow for the journal: entries are lost");
                    }
                    self.missing += 1;
                    return false;
                }
            }
        }
        true
    }
}

/// Returns an entry with the number of entries missing before `next`; `None` if none is missing.
fn gap(missing: u64, next: &JournalEntry, why: &str) -> Option<JournalEntry> {
    (missing > 0).then(|| JournalEntry {
        kind: EntryKind::Attention,
        text: format!(
            "{missing} entries of the journal are missing before this, of this node and others: \
             {why}"
        ),
        detail: Value::Null,
        at: next.at,
        node: next.node.clone(),
        session: next.session.clone(),
    })
}

// === impl JournalWriter ===

impl JournalWriter {
    pub(super) fn new(queue: mpsc::Receiver<JournalEntry>, store: Arc<dyn EventStore>) -> Self {
        Self {
            queue,
            store,
            missing: 0,
        }
    }

    /// Writes entries until the task has ended and the queue is empty.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        while self.queue.recv_many(&mut batch, JOURNAL_BATCH).await > 0 {
            let batch = std::mem::take(&mut batch);
            match self.write(&batch).await {
                Ok(()) => continue,
                Err(StoreError::Closed) => {
                    tracing::error!(count = batch.len(), "journal entries are lost at the end");
                    continue;
                }
                Err(_) => {}
            }
            // A refused entry must not take others with it.
            for entry in batch {
                if let Err(error) = self.write(std::slice::from_ref(&entry)).await {
                    self.missing += 1;
                    tracing::error!(node = entry.node, err = %error, "a journal entry is lost");
                }
            }
        }
    }

    /// Writes `entries`, after an entry with the number of missing ones.
    async fn write(&mut self, entries: &[JournalEntry]) -> Result<(), StoreError> {
        let Some(first) = entries.first() else {
            return Ok(());
        };
        if let Some(gap) = gap(self.missing, first, "the store did not take them") {
            self.append(&[gap]).await?;
            self.missing = 0;
        }
        self.append(entries).await
    }

    /// Appends `entries` to the journal. Retries temporary failures without a limit, while
    /// further entries wait in the queue.
    async fn append(&self, entries: &[JournalEntry]) -> Result<(), StoreError> {
        let mut logged = false;
        loop {
            match self.store.journal(entries).await {
                Ok(()) => return Ok(()),
                Err(error) if error.is_retryable() => {
                    if !std::mem::replace(&mut logged, true) {
                        tracing::warn!(err = %error, "the journal waits for the store");
                    }
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use store::sqlite::SqliteStore;

    use super::*;

    fn entry(text: &str) -> JournalEntry {
        JournalEntry {
            at: jiff::Timestamp::UNIX_EPOCH,
            node: "n".into(),
            session: None,
            kind: EntryKind::Decision,
            text: text.into(),
            detail: Value::Null,
        }
    }

    #[tokio::test]
    async fn a_store_that_cannot_write_for_a_while_costs_no_entry() {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn EventStore> = Arc::new(SqliteStore::open(directory.path()).unwrap());
        let other = rusqlite::Connection::open(directory.path().join("events.db")).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        let (sender, queue) = mpsc::channel(4);
        let writer = tokio::spawn(JournalWriter::new(queue, Arc::clone(&store)).run());
        sender.send(entry("kept")).await.unwrap();
        let mut trouble = store.trouble();
        trouble.wait_for(Option::is_some).await.unwrap();
        other.execute_batch("COMMIT").unwrap();
        drop(sender);
        writer.await.unwrap();
        assert_eq!(store.timeline("n", 10).await.unwrap(), [entry("kept")]);
        store.close().await;
    }

    #[tokio::test]
    async fn an_entry_that_is_not_taken_costs_itself_only_and_is_told_of() {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn EventStore> = Arc::new(SqliteStore::open(directory.path()).unwrap());
        let (sender, queue) = mpsc::channel(4);
        for text in ["before", &"x".repeat(store::MAX_ENTRY_BYTES + 1), "behind"] {
            sender.send(entry(text)).await.unwrap();
        }
        drop(sender);
        JournalWriter::new(queue, Arc::clone(&store)).run().await;
        let found = store.timeline("n", 10).await.unwrap();
        let texts: Vec<&str> = found.iter().map(|entry| entry.text.as_str()).collect();
        assert!(
            matches!(texts[..], ["before", gap, "behind"] if gap.starts_with("1 entries")),
            "{texts:?}"
        );
        store.close().await;
    }

    #[test]
    fn a_full_queue_is_not_waited_for_and_the_gap_is_told() {
        let (sender, mut queue) = mpsc::channel(2);
        let mut journal = Journal::new(sender);
        let taken = ["a", "b", "c", "d"].map(|text| journal.put(entry(text)));
        assert_eq!(taken, [true, true, false, false]);
        let mut read = |count| {
            let texts = (0..count).map(|_| queue.try_recv().unwrap().text);
            texts.collect::<Vec<_>>()
        };
        assert_eq!(read(1), ["a"]);
        // There is room for the gap entry, but not for the next one, which starts another gap.
        assert!(!journal.put(entry("e")));
        let texts = read(2);
        assert_eq!(texts[0], "b");
        assert!(
            texts[1].starts_with("2 entries of the journal"),
            "{texts:?}"
        );
        assert!(journal.put(entry("f")));
        let texts = read(2);
        assert!(
            texts[0].starts_with("1 entries of the journal"),
            "{texts:?}"
        );
        assert_eq!(texts[1], "f");
        assert!(journal.put(entry("g")));
        assert_eq!(read(1), ["g"]);
    }
}
