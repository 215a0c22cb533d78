//! The journal: noting what was decided and done, and bringing it to the store.

use std::sync::Arc;

use domain::journal::{Entry, EntryKind};
use serde_json::Value;
use store::EventStore;
use tokio::sync::mpsc::{self, error::TrySendError};

use super::Quarantine;

/// Most journal entries that wait for the store: those of a thousand nodes that are taken
/// out at once. Whether a node is cordoned does not wait for the disk to write its story:
/// beyond it entries are left out, and the story says so.
pub(super) const JOURNAL_QUEUE: usize = 8_192;
/// Most entries in one transaction. The longer the disk takes, the more wait for it.
const JOURNAL_BATCH: usize = 2_048;

/// The way of entries to the [`JournalWriter`].
pub(super) struct Journal {
    queue: mpsc::Sender<Entry>,
    /// Entries that found no room, and of which it is not told yet.
    missing: u64,
}

/// Brings journal entries to the store.
pub struct JournalWriter {
    pub(super) queue: mpsc::Receiver<Entry>,
    pub(super) store: Arc<dyn EventStore>,
}

// === impl Quarantine ===

impl Quarantine {
    /// Notes something for the story of a node. Does not wait for the disk.
    pub(super) fn note(
        &mut self,
        node: &str,
        session: Option<&str>,
        kind: EntryKind,
        text: String,
        detail: Value,
    ) {
        let taken = self.journal.put(Entry {
            at: (self.clock)(),
            node: node.to_owned(),
            session: session.map(str::to_owned),
            kind,
            text,
            detail,
        });
        if !taken {
            self.metrics.error("journal_full");
        }
    }
}

// === impl Journal ===

impl Journal {
    pub(super) fn new(queue: mpsc::Sender<Entry>) -> Self {
        Self { queue, missing: 0 }
    }

    /// Puts an entry into the queue; `false` where there is no room for it. The next entry
    /// that finds room is preceded by one that says how many are missing.
    fn put(&mut self, entry: Entry) -> bool {
        let gap = (self.missing > 0).then(|| Entry {
            kind: EntryKind::Attention,
            text: format!(
                "{} entries of the journal are missing before this, of this node and others: the \
                 store was too slow to take them",
                self.missing
            ),
            detail: Value::Null,
            ..entry.clone()
        });
        for entry in gap.into_iter().chain([entry]) {
            match self.queue.try_send(entry) {
                // The writer is gone at the very end only.
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

// === impl JournalWriter ===

impl JournalWriter {
    /// Writes until the task has ended and the queue is empty.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        while self.queue.recv_many(&mut batch, JOURNAL_BATCH).await > 0 {
            if let Err(error) = self.store.journal(std::mem::take(&mut batch)).await {
                tracing::error!(err = %error, "journal entries are lost");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(text: &str) -> Entry {
        Entry {
            at: jiff::Timestamp::UNIX_EPOCH,
            node: "n".into(),
            session: None,
            kind: EntryKind::Decision,
            text: text.into(),
            detail: Value::Null,
        }
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
        // Room for the gap, but not for the entry behind it: that is the next gap.
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
