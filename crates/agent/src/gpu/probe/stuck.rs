//! Children that were killed but still exist, because they are blocked within the kernel. Each
//! may hold a lock of the driver, so there are never more than two.

use tokio::process::Child;

/// Most children that may be stuck: the first, and the one that was started after it.
pub(in crate::gpu) const MOST: usize = 2;

/// Children that cannot be killed.
#[derive(Debug, Default)]
pub(super) struct Stuck(Vec<Child>);

// === impl Stuck ===

impl Stuck {
    /// Keeps a child that does not end.
    pub(super) fn keep(&mut self, child: Child) {
        self.0.push(child);
    }

    /// Returns the number of children that still exist.
    pub(super) fn count(&mut self) -> usize {
        self.0
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.0.len()
    }

    /// Returns true if another child may be started.
    pub(super) fn has_room(&mut self) -> bool {
        self.count() < MOST
    }
}
