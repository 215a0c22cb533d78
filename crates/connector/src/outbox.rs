//! A node's outbox: accepted events on disk, until the controller has them.
//!
//! ```text
//! Connector -> append --(one fsync for a group)--> segments -> waiting -> deliver.rs
//!                                                  delivered <-------------/
//! ```
//!
//! What is delivered is kept for a while, where there is room: a controller with another
//! store may lead next, and lack it.
//!
//! An event that was taken survives a kill and a power cut. An event is known by its id
//! and waits once. What is damaged on disk is said and counted, and costs only the events
//! that lay there. On a full disk, or at its limits, the outbox takes no more and says so;
//! what waits is still delivered, which makes room.

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
use runtime::metrics::Metrics;
use store::{Appended, DirectoryError, DirectoryLock, NewEvent};
use tokio::sync::watch;

use self::log::Log;
use self::metrics::OutboxMetrics;
use self::thread::Thread;
use crate::{Sink, SinkError};

/// Room that an outbox takes on disk unless told otherwise (bytes): more than 100,000 XID
/// events, which a node in trouble sends in hours.
pub const DEFAULT_BYTES: u64 = 64 * 1024 * 1024;
/// Least room that makes sense: a request of the largest size has to fit, and a segment
/// that is not yet removed.
pub const MIN_BYTES: u64 = 16 * 1024 * 1024;
/// Most events that wait: what bounds the index in memory, of about 150 bytes for each.
pub const MAX_EVENTS: usize = 100_000;
/// Most files. There are sixteen at the limit of bytes; more come from a disk that fails
/// again and again.
const MAX_SEGMENTS: usize = 256;
/// The longest time that delivered events are kept, from when they were accepted. A leader that is gone
/// is followed within seconds, so that an hour would do; a day covers an agent that could not
/// reach the next one for a night. What is older stands on the nodes.
const KEEP: SignedDuration = SignedDuration::from_hours(24);
/// Name of the directory inside the data directory.
const DIRECTORY: &str = "outbox";

/// The most that an outbox holds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Room on disk (bytes).
    pub bytes: u64,
    /// Events that wait.
    pub events: usize,
}

/// The outbox of a data directory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Outbox {
    thread: Arc<Thread>,
    /// The store to which events had been delivered when it was opened.
    store: Option<String>,
}

/// An event that waits.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitingEvent {
    /// Its position; grows by acceptance, with gaps.
    pub position: u64,
    /// The event.
    pub event: NewEvent,
}

/// The contents of an outbox, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutboxStatus {
    /// Position of the newest event; of the last delivered one where none waits.
    pub newest: u64,
    /// Events that wait.
    pub events: usize,
    /// Room taken on disk.
    pub bytes: u64,
    /// The time at which the oldest of them was accepted.
    pub oldest: Option<Timestamp>,
    /// Bytes found to be no whole event, since the outbox was opened.
    pub damaged: u64,
    /// Events that are put aside on disk; the oldest are dropped in time.
    pub aside: u64,
    /// Events that are delivered and still on disk.
    pub kept: usize,
}

/// The reason why an outbox cannot be opened. Its contents are as they were.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The data directory is in use, or cannot be made.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A file in it cannot be opened, made, read or written.
    #[error("the outbox {} cannot be opened", path.display())]
    File {
        /// The directory.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// A newer version of this program wrote it.
    #[error(
        "{} has version {found} of the outbox's form, this program knows up to {known}: run the \
         newer one that wrote it until the outbox is empty",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u8,
        /// The newest known one.
        known: u8,
    },
}

/// The reason why a call to the outbox failed. Nothing of the call was taken.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OutboxError {
    /// [`close`](Outbox::close) was called, or the process is ending.
    #[error("the outbox is closed")]
    Closed,
    /// The outbox has no room. Passes when what waits is delivered, or the disk has room again.
    #[error("the outbox is full: {what}")]
    Full {
        /// The limit that is reached.
        what: String,
    },
    /// The disk is read-only or fails. May pass.
    #[error("the outbox cannot {action} at the moment")]
    Disk {
        /// The action that was tried, as a verb phrase.
        action: &'static str,
        /// The error of the system.
        #[source]
        source: Arc<io::Error>,
    },
}

// === impl Outbox ===

impl Outbox {
    /// Opens the outbox in `data_dir`, which is made where it is missing and belongs to
    /// this process from then on. What waits there is kept, also beyond `limits`.
    pub fn open(data_dir: &Path, limits: Limits, metrics: &Metrics) -> Result<Self, OpenError> {
        Self::open_as("gpuwarden_outbox", data_dir, limits, Some(KEEP), metrics)
    }

    /// Opens an outbox with metrics whose names begin with `name`, and with how long what is
    /// delivered is kept.
    pub(crate) fn open_as(
        name: &str,
        data_dir: &Path,
        limits: Limits,
        keep: Option<SignedDuration>,
        metrics: &Metrics,
    ) -> Result<Self, OpenError> {
        let lock = DirectoryLock::acquire(data_dir)?;
        let directory = data_dir.join(DIRECTORY);
        let log = Log::open(&directory, limits)?;
        let store = log.store().map(str::to_owned);
        let metrics = OutboxMetrics::registered(&metrics.with_prefix(name));
        let thread = Thread::start(log, keep, metrics, lock);
        let thread = thread.map_err(|source| OpenError::File {
            path: directory,
            source,
        })?;
        Ok(Self {
            thread: Arc::new(thread),
            store,
        })
    }

    /// Takes events; they are on disk when this returns. All are taken, or none. One that
    /// waits already is not taken again, and needs no room.
    pub async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, OutboxError> {
        self.thread.append(events).await
    }

    /// Returns the oldest events behind position `after`: at least one where one waits, at most
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

    /// Lets go of all events up to `position`, durably.
    pub async fn delivered(&self, position: u64) -> Result<(), OutboxError> {
        self.thread
            .call(move |log| {
                log.delivered(position);
                Ok(())
            })
            .await
    }

    /// Returns the store to which events had been delivered when the outbox was opened.
    pub(crate) fn opened_for(&self) -> Option<String> {
        self.store.clone()
    }

    /// Turns to another store: what is kept of what was delivered waits again, from its
    /// oldest on, durably. Says how many events that are.
    pub(crate) async fn turn_to(&self, store: String) -> Result<usize, OutboxError> {
        self.thread.call(move |log| Ok(log.turn_to(store))).await
    }

    /// Keeps events that the receiver does not take, each with the reason, in a file that is
    /// bounded and that a person may read. Does not take them out of the outbox; where this
    /// fails none is kept there.
    pub async fn put_aside(&self, events: Vec<(NewEvent, String)>) -> Result<(), OutboxError> {
        self.thread.call(move |log| log.put_aside(&events)).await
    }

    /// Returns how much waits, as it changes.
    pub fn status(&self) -> watch::Receiver<OutboxStatus> {
        self.thread.status()
    }

    /// Finishes the calls under way and lets go of the directory. Later calls answer
    /// [`OutboxError::Closed`]. Closing twice is fine.
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

// === impl Limits ===

impl Limits {
    /// Returns how many bytes a segment has that takes no more: room comes back in such pieces.
    fn segment_bytes(&self) -> u64 {
        self.bytes / 16
    }
}

impl Default for Limits {
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
