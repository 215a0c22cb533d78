//! Children that were killed and are still there, because they wait within the kernel. Each may hold
//! a lock of the driver, so there are never more than two.

use tokio::process::Child;

/// Most children that may be stuck: the first, and the one that was tried after it. No other follows.
pub(in crate::gpu) const MOST: usize = 2;

/// The stuck children.
#[derive(Debug, Default)]
pub(super) struct Stuck(Vec<Child>);

// === impl Stuck ===

impl Stuck {
    /// Keeps a child that does not end.
    pub(super) fn keep(&mut self, child: Child) {
        self.0.push(child);
    }

    /// Returns how many are still there.
    pub(super) fn count(&mut self) -> usize {
        self.0
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.0.len()
    }

    /// Returns whether another child may be started.
    pub(super) fn has_room(&mut self) -> bool {
        self.count() < MOST
    }
}
