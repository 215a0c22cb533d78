//! Outbox of a node: accepted events on disk, until the controller has them.
//!
//! ```text
//! Connector -> append --(one fsync for a group)--> segments -> waiting -> deliver.rs
//!                                                  delivered <-------------/
//! ```
//!
//! Delivered events are kept for a while, if there is room: the next leader may be a controller
//! with another store, which lacks them.
//!
//! An acknowledged event survives a kill and a power cut. Events are identified by their id,
//! and each waits once. Damage on disk is logged and counted, and costs only the events in the
//! damaged range. On a full disk, or at its limits, the outbox refuses further events; waiting
//! events are still delivered, which makes room.

mod cursor;
mod disk;
mod log;
mod metrics;
mod record;
mod refused;
mod segment;
mod thread;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use runtime::metrics::{Description, Metrics};
use store::{Appended, DirectoryError, DirectoryLock, NewEvent};
use tokio::sync::watch;

use self::log::Log;
use self::metrics::OutboxMetrics;
use self::thread::Thread;
use crate::{Sink, SinkError};

/// Default size limit of an outbox on disk (bytes): more than 100,000 XID events, which a node
/// in trouble sends in hours.
pub const DEFAULT_BYTES: u64 = 64 * 1024 * 1024;
/// Smallest useful size limit (bytes): it must fit a request of the largest size, and a segment
/// that is not removed yet.
pub const MIN_BYTES: u64 = 16 * 1024 * 1024;
/// Most waiting events, which bounds the in-memory index of about 150 bytes for each.
pub const MAX_EVENTS: usize = 100_000;
/// Most files. The limit of bytes allows sixteen; only a disk that fails repeatedly leads to
/// more.
const MAX_SEGMENTS: usize = 256;
/// Longest time that delivered events are kept, counted from their acceptance. A leader that is
/// gone is replaced within seconds, so an hour would do; a day covers an agent that could not
/// reach the next leader for a night. Older faults are recorded on the nodes.
const KEEP: SignedDuration = SignedDuration::from_hours(24);
/// Name of the directory inside the data directory.
const DIRECTORY: &str = "outbox";

/// Limits of the contents of an outbox.
#[derive(Clone, Copy, Debug)]
pub struct OutboxLimits {
    /// Size on disk (bytes).
    pub bytes: u64,
    /// Number of waiting events.
    pub events: usize,
}

/// Outbox in a data directory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Outbox {
    thread: Arc<Thread>,
    /// Store that had the delivered events when the outbox was opened.
    store: Option<String>,
}

/// Event that waits to be delivered.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitingEvent {
    /// Position of the event; grows by acceptance, with gaps.
    pub position: u64,
    /// Event, with its time of acceptance.
    pub event: NewEvent,
}

/// Figures about the contents of an outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutboxStatus {
    /// Position of the newest event; of the last delivered one if none waits.
    pub newest: u64,
    /// Number of waiting events.
    pub events: usize,
    /// Size on disk (bytes).
    pub bytes: u64,
    /// Time when the oldest waiting event was accepted.
    pub oldest: Option<Timestamp>,
    /// Bytes that were part of no whole event, since the outbox was opened.
    pub damaged: u64,
    /// Number of refused events kept on disk; the oldest are dropped in time.
    pub aside: u64,
    /// Number of delivered events that are still on disk.
    pub kept: usize,
}

/// Reason why an outbox cannot be opened. Its contents are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum OutboxOpenError {
    /// The data directory cannot be locked.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A file of the outbox cannot be opened, created, read or written.
    #[error("the outbox {} cannot be opened", path.display())]
    File {
        /// Path of the outbox's directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A newer version of this program wrote the file.
    #[error(
        "{} has version {found} of the outbox's format, this program supports up to {known}: run the \
         newer version that wrote it until the outbox is empty",
        path.display()
    )]
    Newer {
        /// Path of the file.
        path: PathBuf,
        /// Format version of the file.
        found: u8,
        /// Newest format version that this program supports.
        known: u8,
    },
}

/// Reason why a call to the outbox failed. Nothing of the call was stored.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OutboxError {
    /// [`close`](Outbox::close) was called, or the process is ending.
    #[error("the outbox is closed")]
    Closed,
    /// The outbox is full. Passes when waiting events are delivered, or the disk has room
    /// again.
    #[error("the outbox is full: {what}")]
    Full {
        /// Limit that was reached.
        what: String,
    },
    /// The disk is read-only or fails. May pass.
    #[error("the outbox cannot {action} at the moment")]
    Disk {
        /// Verb phrase that names the attempted action.
        action: &'static str,
        /// Error of the operating system.
        #[source]
        source: Arc<io::Error>,
    },
}

/// Prefix of the metrics of an agent's outbox.
pub(crate) const PREFIX: &str = "gpuwarden_outbox";

/// Returns the descriptions of the metrics of an outbox with this prefix.
pub(crate) fn described_metrics(prefix: &str) -> impl Iterator<Item = Description> {
    let own = OutboxMetrics::described().into_iter();
    own.map(move |metric| metric.with_prefix(prefix))
}

// === impl Outbox ===

impl Outbox {
    /// Opens the outbox in `data_dir`, which is created if missing and belongs to this process
    /// from then on. Waiting events are kept, even beyond `limits`.
    pub fn open(
        data_dir: &Path,
        limits: OutboxLimits,
        metrics: &Metrics,
    ) -> Result<Self, OutboxOpenError> {
        Self::open_as(PREFIX, data_dir, limits, Some(KEEP), metrics)
    }

    /// Opens an outbox with `name` as the prefix of its metrics. `keep` is how long delivered
    /// events are kept.
    pub(crate) fn open_as(
        name: &str,
        data_dir: &Path,
        limits: OutboxLimits,
        keep: Option<SignedDuration>,
        metrics: &Metrics,
    ) -> Result<Self, OutboxOpenError> {
        let lock = DirectoryLock::acquire(data_dir)?;
        let directory = data_dir.join(DIRECTORY);
        let log = Log::open(&directory, limits)?;
        let store = log.store().map(str::to_owned);
        let metrics = OutboxMetrics::registered(&metrics.with_prefix(name));
        let thread = Thread::start(log, keep, metrics, lock);
        let thread = thread.map_err(|source| OutboxOpenError::File {
            path: directory,
            source,
        })?;
        Ok(Self {
            thread: Arc::new(thread),
            store,
        })
    }

    /// Stores events; they are on disk when this returns. Either all are stored or none. An
    /// event that already waits is not stored again, and needs no room.
    pub async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, OutboxError> {
        self.thread.append(events).await
    }

    /// Returns the oldest events behind position `after`: at least one if any waits, at most
    /// `events`, and about `bytes`.
    pub async fn waiting(
        &self,
        after: u64,
        events: usize,
        bytes: u64,
    ) -> Result<Vec<WaitingEvent>, OutboxError> {
        self.thread
            .call(move |log| log.read(after, events, bytes))
            .await
    }

    /// Releases all events up to `position`, durably.
    pub async fn delivered(&self, position: u64) -> Result<(), OutboxError> {
        self.thread
            .call(move |log| {
                log.delivered(position);
                Ok(())
            })
            .await
    }

    /// Returns the store that had the delivered events when the outbox was opened.
    pub(crate) fn opened_for(&self) -> Option<String> {
        self.store.clone()
    }

    /// Switches to another store: delivered events that are still kept wait again, oldest
    /// first, durably. Returns their number.
    pub(crate) async fn turn_to(&self, store: String) -> Result<usize, OutboxError> {
        self.thread.call(move |log| Ok(log.turn_to(store))).await
    }

    /// Keeps events that the receiver refuses, each with the reason, in a size-limited file for
    /// a person to read. Does not remove them from the outbox. On failure none of them is kept.
    pub async fn put_aside(&self, events: Vec<(NewEvent, String)>) -> Result<(), OutboxError> {
        self.thread.call(move |log| log.put_aside(&events)).await
    }

    /// Returns the status of the outbox, as it changes.
    pub fn status(&self) -> watch::Receiver<OutboxStatus> {
        self.thread.status()
    }

    /// Finishes the calls in progress and releases the directory. Later calls return
    /// [`OutboxError::Closed`]. Closing twice is allowed.
    pub async fn close(&self) {
        self.thread.close().await;
    }
}

#[async_trait]
impl Sink for Outbox {
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError> {
        Self::append(self, events)
            .await
            .map_err(|error| match error {
                OutboxError::Full { what } => SinkError::Full { what },
                error @ (OutboxError::Disk { .. } | OutboxError::Closed) => {
                    SinkError::Unavailable(error.into())
                }
            })
    }
}

// === impl OutboxLimits ===

impl OutboxLimits {
    /// Returns the size that closes a segment (bytes). Room is freed in pieces of this size.
    fn segment_bytes(&self) -> u64 {
        self.bytes / 16
    }
}

impl Default for OutboxLimits {
    fn default() -> Self {
        Self {
            bytes: DEFAULT_BYTES,
            events: MAX_EVENTS,
        }
    }
}

// === impl OutboxError ===

impl OutboxError {
    fn disk(action: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Self::Full {
                what: format!("{source}"),
            },
            _ => Self::Disk {
                action,
                source: Arc::new(source),
            },
        }
    }
}

#[cfg(test)]
mod tests;
