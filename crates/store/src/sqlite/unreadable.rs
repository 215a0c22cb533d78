//! Events in the file that cannot be read, such as after a flipped bit.
//!
//! Reads skip them (`query.rs`). This module counts and logs each of them once; `inspect` shows
//! what they are. An unreadable event that is sent again is stored anew (`append.rs`).

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use rusqlite::Row;
use tokio::sync::watch;

/// Most unreadable events that are counted.
const MAX_COUNTED: usize = 10_000;
/// Most unreadable events that are logged by name.
const NAMED: usize = 20;

/// Unreadable events found since the store was opened.
#[derive(Debug)]
pub(super) struct Unreadable {
    met: Mutex<BTreeSet<i64>>,
    count: watch::Sender<u64>,
}

// === impl Unreadable ===

impl Unreadable {
    pub(super) fn new() -> Self {
        Self {
            met: Mutex::default(),
            count: watch::Sender::new(0),
        }
    }

    /// Returns the number of unreadable events so far.
    pub(super) fn count(&self) -> watch::Receiver<u64> {
        self.count.subscribe()
    }

    /// Records that a row of `seq, id, ...` cannot be read.
    pub(super) fn note(&self, row: &Row<'_>, error: &dyn std::error::Error) {
        let seq = row.get(0).unwrap_or_default();
        let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        if met.len() >= MAX_COUNTED || !met.insert(seq) {
            return;
        }
        let count = met.len();
        self.count.send_replace(count as u64);
        if count <= NAMED {
            tracing::error!(
                seq,
                event.id = text(row, 1),
                err = %error,
                "a stored event cannot be read; it is skipped"
            );
        }
        if count == NAMED {
            tracing::error!(
                "further events that cannot be read are only counted; `gpuwarden store inspect` \
                 lists them"
            );
        }
    }
}

/// Returns the text in a column, with invalid bytes replaced.
pub(super) fn text(row: &Row<'_>, column: usize) -> String {
    let bytes = row.get_ref(column).ok();
    let bytes = bytes.and_then(|value| value.as_bytes().ok());
    String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
}
