//! The errors of a store, in the terms of its callers.

use model::position::Position;

/// A cause of any backend.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The reason why a call to the store failed. Nothing of the call was stored, but where a backend
/// on the network cannot know; sending the same events again is always safe.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// [`close`](crate::Upkeep::close) was called, or the process is ending.
    #[error("the event store is closed")]
    Closed,
    /// More in one call than is taken.
    #[error("{found} {what} in one call, at most {max} are taken: send them in parts")]
    TooMany {
        /// Events, or journal entries.
        what: &'static str,
        /// Number of events in the batch.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// An argument that cannot be stored.
    #[error("{what}")]
    Invalid {
        /// The problem, where it is, and what is expected.
        what: String,
    },
    /// A consumer's token was to go back.
    #[error(
        "consumer {consumer:?} has finished up to {stored}: its token cannot go back to {offered}"
    )]
    TokenBackwards {
        /// The consumer's name.
        consumer: String,
        /// The position that is stored.
        stored: Position,
        /// The position that was to be stored.
        offered: Position,
    },
    /// The disk is full or read-only, the file is locked, the input or output failed.
    /// May pass: the same call can be made again.
    #[error("the event store cannot {action} at the moment")]
    Io {
        /// The action that was tried, as a verb phrase.
        action: &'static str,
        /// The backend's reason.
        #[source]
        source: BoxError,
    },
    /// The store does not hold what was written.
    #[error("the event store is damaged: {what}")]
    Corrupt {
        /// The part that could not be read.
        what: String,
        /// The backend's reason.
        #[source]
        source: BoxError,
    },
    /// The backend refused what it should have taken: a fault of ours.
    #[error("the event store failed to {action}")]
    Internal {
        /// The action that was tried, as a verb phrase.
        action: &'static str,
        /// The backend's reason.
        #[source]
        source: BoxError,
    },
}

// === impl StoreError ===

impl StoreError {
    /// Returns true if the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Io { .. })
    }
}
