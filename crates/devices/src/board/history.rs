//! The last changes, for those who have seen the ones before. Each has one version, and they
//! follow each other without a gap.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::device::{Gpu, WatchEventType};
use prost::Message as _;

/// Bytes of changes that are kept, as they are sent; at least one is. It is the buffer of all
/// watchers together: one that falls further behind begins anew.
pub(super) const MAX_BYTES: usize = 4 * 1024 * 1024;

/// One change of one GPU.
#[derive(Clone, Debug)]
pub struct Change {
    /// Added, modified or deleted.
    pub kind: WatchEventType,
    /// The GPU after it; a deleted one as it was before.
    pub gpu: Arc<Gpu>,
}

/// A change is no longer kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the change is no longer kept")]
pub struct Forgotten;

pub(super) struct History {
    changes: VecDeque<Change>,
    /// Version before the first of them.
    before: u64,
    bytes: usize,
    limit: usize,
}

// === impl History ===

impl History {
    /// Returns one that keeps so many bytes of changes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            changes: VecDeque::new(),
            before: 0,
            bytes: 0,
            limit,
        }
    }

    pub(super) fn push(&mut self, change: Change) {
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

    /// Returns the change after a version; `None`: there is none yet.
    pub(super) fn after(&self, version: u64) -> Result<Option<&Change>, Forgotten> {
        let index = version.checked_sub(self.before).ok_or(Forgotten)?;
        let index = usize::try_from(index).map_err(|_| Forgotten)?;
        Ok(self.changes.get(index))
    }
}
