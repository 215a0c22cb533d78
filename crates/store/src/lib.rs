//! The event store: what was accepted, what was decided about it, and how far each
//! consumer has come.
//!
//! [`EventStore`] is the contract, the sum of five traits. An event is appended once, however
//! often it is sent, and is on disk when [`EventLog::append`] returns. Consumers read the feed
//! from a token of their own; [`EventLog::latest`] only wakes them. The journal keeps the
//! decisions beside the events.
//!
//! - [`sqlite`]: the embedded backend, one file in a directory.
//! - [`GroupThread`]: how it writes, and the outbox of a node as well.
//! - `conformance` (cargo feature of that name): the tests that every backend passes.
//! - `memory` (the same feature): a backend for tests, whose positions have gaps.
//!
//! What may be acted upon is decided in `domain`; nothing here judges an event.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod error;
mod event_store;
mod group_thread;
mod limits;
#[cfg(any(test, feature = "conformance"))]
pub mod memory;
pub mod sqlite;

pub use error::{BoxError, StoreError};
pub use event_store::{
    Appended, Checkpoint, Checkpoints, EventLog, EventQuery, EventStatus, EventStore, Identity,
    Journal, NewEvent, PodsEviction, Prune, Pruned, Stats, StatusPatch, Statuses, Upkeep,
};
pub use group_thread::GroupThread;
pub use limits::{
    MAX_APPEND, MAX_CHECKPOINT_BYTES, MAX_ENTRY_BYTES, MAX_JOURNAL, MAX_NAME_BYTES, MAX_PAGE,
    MAX_STATUS_MESSAGE_BYTES, RETRY_WINDOW,
};
pub use model::position::Position;
