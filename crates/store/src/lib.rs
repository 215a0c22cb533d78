//! Event store: accepted events, the decisions made about them, and the progress of each
//! consumer.
//!
//! [`EventStore`] is the interface, the sum of five traits. An event is stored once, however
//! often it is sent, and is on disk when [`EventLog::append`] returns. Consumers read the feed
//! from their own token; [`EventLog::latest`] only wakes them. The journal keeps the decisions
//! beside the events.
//!
//! - [`StoreUrl`]: opens a store by its URL; the only place that lists the backends.
//! - [`sqlite`]: the embedded backend, one file in a directory.
//! - [`GroupThread`]: group commit, for this backend and for the outbox of a node.
//! - [`DirectoryLock`]: ownership of a data directory, likewise for both.
//! - `conformance` (cargo feature of that name): tests that every backend passes.
//! - `memory` (same feature): a backend for tests, with gaps between positions.
//!
//! The store judges no event: decisions are made in `model`, `policy`
//! and `fleet`.

mod backend;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod directory_lock;
mod error;
mod event_store;
mod group_thread;
mod inspection;
mod limits;
#[cfg(any(test, feature = "conformance"))]
pub mod memory;
pub mod sqlite;
mod url;

pub use directory_lock::{DirectoryError, DirectoryLock};
pub use error::{BoxError, StoreError, StoreOpenError};
pub use event_store::{
    Appended, Checkpoint, Checkpoints, EventLog, EventQuery, EventStore, Identity, Journal,
    NewEvent, Prune, Pruned, Stats, Statuses, Upkeep,
};
pub use group_thread::GroupThread;
pub use inspection::{Consumer, Count, Damaged, Inspection, NODES};
pub use limits::{
    MAX_APPEND, MAX_CHECKPOINT_BYTES, MAX_ENTRY_BYTES, MAX_JOURNAL, MAX_NAME_BYTES, MAX_PAGE,
    RETRY_WINDOW,
};
pub use model::position::Position;
pub use url::{StoreUrl, UrlError};
