//! The latest changes, for consumers that have received the earlier ones. Each change is one
//! version, without gaps.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::device::{Gpu, WatchEventType};
use prost::Message as _;

/// Size limit on the changes, in bytes as they are sent; at least one change is kept. This is
/// the buffer of all watchers together: a watcher that falls further behind restarts with a
/// snapshot.
pub(super) const MAX_BYTES: usize = 4 * 1024 * 1024;

/// A change of one GPU.
#[derive(Clone, Debug)]
pub struct GpuChange {
    /// Kind of the change: added, modified or deleted.
    pub kind: WatchEventType,
    /// GPU after the change; for a deleted GPU, before it.
    pub gpu: Arc<Gpu>,
}

/// Error for a change that was dropped from the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the change is no longer kept")]
pub struct Forgotten;

pub(super) struct History {
    changes: VecDeque<GpuChange>,
    /// Version before the oldest change.
    before: u64,
    bytes: usize,
    limit: usize,
}

// === impl History ===

impl History {
    /// Creates a history of up to `limit` bytes of changes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            changes: VecDeque::new(),
            before: 0,
            bytes: 0,
            limit,
        }
    }

    pub(super) fn push(&mut self, change: GpuChange) {
        self.bytes += change.gpu.encoded_len();
        self.changes.push_back(change);
        while self.bytes > self.limit && self.changes.len() > 1 {
            let Some(oldest) = self.changes.pop_front() else {
                break;
            };
            self.bytes -= oldest.gpu.encoded_len();
            self.before += 1;
        }
    }

    /// Returns the change after a version; `None` if there is none yet.
    pub(super) fn after(&self, version: u64) -> Result<Option<&GpuChange>, Forgotten> {
        let index = version.checked_sub(self.before).ok_or(Forgotten)?;
        let index = usize::try_from(index).map_err(|_| Forgotten)?;
        Ok(self.changes.get(index))
    }
}
