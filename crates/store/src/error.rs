//! The errors of a store, in the terms of its callers.

use model::position::Position;

/// Cause of an error, from any backend.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Reason why a call to the store failed. Nothing of the call was stored, except where a
/// backend on the network cannot tell; sending the same events again is always safe.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// [`close`](crate::Upkeep::close) was called, or the process is ending.
    #[error("the event store is closed")]
    Closed,
    /// More items in one call than the limit allows.
    #[error("{found} {what} in one call, at most {max} are accepted: send them in parts")]
    TooMany {
        /// Kind of the items: events or journal entries.
        what: &'static str,
        /// Number of items in the call.
        found: usize,
        /// Limit that was exceeded.
        max: usize,
    },
    /// An argument that cannot be stored.
    #[error("{what}")]
    Invalid {
        /// Description of the problem: the field, what is wrong with it, and what is expected.
        what: String,
    },
    /// A consumer's token would have moved backwards.
    #[error(
        "consumer {consumer:?} has finished up to {stored}: its token cannot move back to {offered}"
    )]
    TokenBackwards {
        /// Name of the consumer.
        consumer: String,
        /// Position that is stored.
        stored: Position,
        /// Position that was to be stored.
        offered: Position,
    },
    /// The disk is full or read-only, the file is locked, or I/O failed. The same call may
    /// succeed later.
    #[error("the event store cannot {action} at the moment")]
    Io {
        /// Verb phrase that names the attempted action.
        action: &'static str,
        /// Error of the backend.
        #[source]
        source: BoxError,
    },
    /// The stored data is damaged and cannot be read.
    #[error("the event store is damaged: {what}")]
    Corrupt {
        /// Part that could not be read.
        what: String,
        /// Error of the backend.
        #[source]
        source: BoxError,
    },
    /// The backend rejected a valid request: a bug in this program.
    #[error("the event store failed to {action}")]
    Internal {
        /// Verb phrase that names the attempted action.
        action: &'static str,
        /// Error of the backend.
        #[source]
        source: BoxError,
    },
}

/// Reason why a store cannot be opened, in the terms of its backend.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct StoreOpenError(#[from] BoxError);

// === impl StoreError ===

impl StoreError {
    /// Returns true if the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Io { .. })
    }
}
