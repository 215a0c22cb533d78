//! Events that lie in the file and cannot be read: a bit of their text has changed.
//!
//! Reading passes over them (`query.rs`). Here they are counted and told, each once; what
//! they are, `inspect` says. One that is sent again is stored anew (`append.rs`).

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use rusqlite::Row;
use tokio::sync::watch;

/// Most such events that are told apart, and so counted.
const MAX_COUNTED: usize = 10_000;
/// Most of them that are named in the log.
const NAMED: usize = 20;

/// The events that were met since the store was opened.
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

    /// Notes that a row of `seq, id, ...` cannot be read.
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
                "a stored event cannot be read; it is passed over"
            );
        }
        if count == NAMED {
            tracing::error!(
                "further events that cannot be read are only counted; `gpuwarden store inspect` \
                 looks for them"
            );
        }
    }
}

/// Returns a text in a row, as far as it can be read.
pub(super) fn text(row: &Row<'_>, column: usize) -> String {
    let bytes = row.get_ref(column).ok();
    let bytes = bytes.and_then(|value| value.as_bytes().ok());
    String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
}
