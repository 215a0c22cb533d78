//! Embedded backend: one `SQLite` database, `events.db`, in a directory that one process owns.
//!
//! Events, checkpoints and journal are tables of one file (`schema.rs`). One thread writes, in
//! groups (`writer.rs`); a few connections read concurrently (`readers.rs`). Other processes
//! may read: `sqlite3 events.db "select body->>'checkName' from event"`.
//!
//! The directory has to be on a local file system: the write-ahead log needs shared memory. A
//! full disk fails writes but not reads, until there is room again; [`Upkeep::trouble`] reports
//! it meanwhile. A damaged database is moved aside and replaced by an empty one (`damaged.rs`).

mod append;
mod checkpoint;
mod damaged;
mod identity;
mod inspect;
mod journal;
mod prune;
mod query;
mod readers;
mod schema;
mod status;
mod unreadable;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use model::event::EventRecord;
use model::journal::JournalEntry;
use model::position::Position;
use model::status::{ConclusionNote, EventStatus, SessionChange, SessionEvent};
use rusqlite::{Connection, ErrorCode};
use tokio::sync::watch;

use self::damaged::{Damage, Opened};
pub use self::inspect::inspect;
use self::readers::Readers;
use self::unreadable::Unreadable;
use self::writer::Writer;
use crate::backend::Backend;
use crate::{
    Appended, BoxError, Checkpoint, Checkpoints, DirectoryError, DirectoryLock, EventLog,
    EventQuery, EventStore, Identity, Journal, MAX_PAGE, NewEvent, Prune, Pruned, Stats, Statuses,
    StoreError, Upkeep, limits,
};

const FILE: &str = "events.db";
/// Entry in the list of backends. The place is the data directory.
pub(crate) const BACKEND: Backend = Backend {
    scheme: "sqlite",
    place: "DIRECTORY",
    open: |dir| {
        Box::pin(async move {
            let store = SqliteStore::open(Path::new(dir)).map_err(BoxError::from)?;
            Ok(Arc::new(store) as Arc<dyn EventStore>)
        })
    },
    inspect: |dir| inspect(Path::new(dir)),
    file: |dir| Some(Path::new(dir).join(FILE)),
};
/// Size of a call that never waits for room in the writer's queue. For the small writes that
/// show whether the store can write and that save the progress of consumers: they must not wait
/// behind the events of a busy sender.
const NO_ROWS: usize = 0;
/// Events converted to rows before other tasks get their turn.
const ROWS_IN_A_TURN: usize = 64;

/// Event store in a directory.
///
/// [`close`](Upkeep::close) it before opening it again: after a mere drop, the writing thread
/// releases the directory only a moment later.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    identity: watch::Sender<Identity>,
    // Before the writer, so that its connection is the last one: that one tidies up.
    readers: Arc<Readers>,
    writer: Writer,
    unreadable: Arc<Unreadable>,
    damage: Arc<Damage>,
    aside: Vec<PathBuf>,
    prune_round: Arc<prune::Round>,
}

/// Reason why a directory's event store cannot be opened. The contents of the directory are
/// unchanged: a damaged database is moved aside only if a usable one can take its place.
#[derive(Debug, thiserror::Error)]
pub enum SqliteOpenError {
    /// The directory cannot be locked.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A file in the directory cannot be opened, created, read or written.
    #[error("{} cannot be opened for reading and writing", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The file is not an `SQLite` database.
    #[error(
        "{} is not an SQLite database: move it away, or use another data directory",
        path.display()
    )]
    NotADatabase {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file is a database of another program.
    #[error(
        "{} is the database of another program: use another data directory",
        path.display()
    )]
    Foreign {
        /// Path of the file.
        path: PathBuf,
    },
    /// A newer version of this program wrote the file.
    #[error(
        "{} has schema version {found}, this program supports up to {known}: run the newer version that \
         wrote it, or use another data directory",
        path.display()
    )]
    Newer {
        /// Path of the file.
        path: PathBuf,
        /// Schema version of the file.
        found: i64,
        /// Newest schema version that this program supports.
        known: usize,
    },
    /// The database is damaged.
    #[error(
        "{} is damaged: keep a copy of it and its -wal file, and move both away to start with an empty store",
        path.display()
    )]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Error reported by `SQLite`.
        #[source]
        source: rusqlite::Error,
    },
    /// The file system does not support a write-ahead log.
    #[error(
        "{} cannot have a write-ahead log (journal mode stays {mode}): use a data directory on a \
         local file system",
        path.display()
    )]
    NoWal {
        /// Path of the file.
        path: PathBuf,
        /// Journal mode that `SQLite` fell back to.
        mode: String,
    },
    /// `SQLite` cannot open the file for another reason: no room, no permission, locked.
    #[error("{} cannot be opened", path.display())]
    Sqlite {
        /// Path of the file.
        path: PathBuf,
        /// Error reported by `SQLite`.
        #[source]
        source: rusqlite::Error,
    },
    /// The writing thread cannot be started.
    #[error("the writing thread of the event store cannot be started")]
    Thread(#[source] io::Error),
}

/// Converts an error of `SQLite` into an error of the store.
fn failure<E>(action: &'static str, error: E) -> StoreError
where
    E: Into<Arc<rusqlite::Error>>,
{
    let error = error.into();
    let code = error.sqlite_error_code();
    let unreadable = matches!(
        *error,
        rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
    );
    let damaged = damaged::is_damage(&error);
    let source: BoxError = Box::new(error);
    if unreadable || damaged {
        let what = format!("it cannot {action}");
        return StoreError::Corrupt { what, source };
    }
    match code {
        Some(
            ErrorCode::DiskFull
            | ErrorCode::SystemIoFailure
            | ErrorCode::DatabaseBusy
            | ErrorCode::DatabaseLocked
            | ErrorCode::CannotOpen
            | ErrorCode::ReadOnly
            | ErrorCode::PermissionDenied
            | ErrorCode::OutOfMemory
            | ErrorCode::FileLockingProtocolFailed
            | ErrorCode::NoLargeFileSupport
            | ErrorCode::OperationInterrupted
            | ErrorCode::OperationAborted
            | ErrorCode::SchemaChanged,
        ) => StoreError::Io { action, source },
        _ => StoreError::Internal { action, source },
    }
}

/// Converts a row id to a position. `AUTOINCREMENT` counts from 1.
fn position(seq: i64) -> Position {
    Position::from(seq.unsigned_abs())
}

/// Returns the position of the newest event.
fn newest(connection: &Connection) -> rusqlite::Result<Position> {
    let newest: Option<i64> = connection
        .prepare_cached("SELECT max(seq) FROM event")?
        .query_row([], |row| row.get(0))?;
    Ok(newest.map_or(Position::START, position))
}

/// Converts a position to a row id; a position beyond the largest row id matches no row.
fn number(position: Position) -> i64 {
    i64::try_from(position.number()).unwrap_or(i64::MAX)
}

/// Converts a number of rows or bytes, which is never negative.
fn count(number: i64) -> u64 {
    number.unsigned_abs()
}

/// Returns the row limit of a read.
fn page(limit: usize) -> i64 {
    i64::try_from(limit.min(MAX_PAGE)).unwrap_or(i64::MAX)
}

fn wal(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

// === impl SqliteStore ===

impl SqliteStore {
    /// Opens the store in `dir`. Creates the directory and the database if missing, accessible
    /// to this user only, takes ownership of the directory, and upgrades an older schema. A
    /// damaged database is moved aside and replaced by an empty one.
    ///
    /// Blocks for a moment; needs no async runtime.
    pub fn open(dir: &Path) -> Result<Self, SqliteOpenError> {
        let lock = DirectoryLock::acquire(dir)?;
        let path = dir.join(FILE);
        let Opened {
            connection,
            newest,
            identity,
        } = damaged::open(&path)?;
        tracing::debug!(path = %path.display(), %newest, store = %identity, "event store opened");
        let damage = Arc::new(Damage::new(path.clone()));
        let writer = Writer::start(connection, wal(&path), lock, newest, Arc::clone(&damage))
            .map_err(SqliteOpenError::Thread)?;
        Ok(Self {
            readers: Arc::new(Readers::new(path.clone())),
            aside: damaged::aside(&path),
            prune_round: Arc::default(),
            path,
            identity: watch::Sender::new(identity),
            writer,
            damage,
            unreadable: Arc::new(Unreadable::new()),
        })
    }
}

// === impl SqliteOpenError ===

impl SqliteOpenError {
    /// Returns true if the file is damaged, or not a database at all.
    fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::NotADatabase { .. })
    }
}

#[async_trait]
impl EventLog for SqliteStore {
    fn identity(&self) -> Identity {
        self.identity.borrow().clone()
    }

    async fn begin_anew(&self) -> Result<Identity, StoreError> {
        let write = |connection: &Connection| identity::begin_anew(connection).map(Ok);
        let identity = self.writer.call("begin anew", 1, write).await?;
        self.identity.send_replace(identity.clone());
        Ok(identity)
    }

    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, StoreError> {
        limits::events(&events)?;
        let count = events.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut rows = Vec::with_capacity(count);
        for event in events {
            rows.push(append::EventRow::of(event));
            if rows.len() % ROWS_IN_A_TURN == 0 {
                tokio::task::yield_now().await;
            }
        }
        let write = move |connection: &Connection| append::append(connection, &rows).map(Ok);
        self.writer.call("store events", count, write).await
    }

    async fn feed(&self, after: Position, limit: usize) -> Result<Vec<EventRecord>, StoreError> {
        let unreadable = Arc::clone(&self.unreadable);
        let feed =
            move |connection: &Connection| query::feed(connection, &unreadable, after, limit);
        let read = self.readers.read(feed).await;
        // Unreadable events are skipped, so this is damage of the file itself.
        if let Err(error @ StoreError::Corrupt { .. }) = &read {
            self.damage.note(error);
        }
        read
    }

    async fn behind(&self, after: Position) -> Result<u64, StoreError> {
        self.readers
            .read(move |connection| query::behind(connection, after))
            .await
    }

    fn latest(&self) -> watch::Receiver<Position> {
        self.writer.latest()
    }

    async fn events(&self, query: EventQuery) -> Result<Vec<EventRecord>, StoreError> {
        let unreadable = Arc::clone(&self.unreadable);
        self.readers
            .read(move |connection| query::events(connection, &unreadable, &query))
            .await
    }

    async fn event(&self, id: &str) -> Result<Option<EventRecord>, StoreError> {
        let id = id.to_owned();
        let unreadable = Arc::clone(&self.unreadable);
        self.readers
            .read(move |connection| query::event(connection, &unreadable, &id))
            .await
    }
}

#[async_trait]
impl Checkpoints for SqliteStore {
    async fn checkpoint(&self, consumer: &str) -> Result<Option<Checkpoint>, StoreError> {
        let consumer = consumer.to_owned();
        let read = move |connection: &Connection| {
            checkpoint::load(connection, &consumer)
                .map_err(|error| failure("read a checkpoint", error))
        };
        self.readers.read(read).await
    }

    async fn save_checkpoint(
        &self,
        consumer: &str,
        checkpoint: Checkpoint,
    ) -> Result<(), StoreError> {
        limits::checkpoint(consumer, &checkpoint)?;
        let consumer = consumer.to_owned();
        let write =
            move |connection: &Connection| checkpoint::save(connection, &consumer, &checkpoint);
        self.writer.call("save a checkpoint", NO_ROWS, write).await
    }
}

#[async_trait]
impl Journal for SqliteStore {
    async fn journal(&self, entries: &[JournalEntry]) -> Result<(), StoreError> {
        limits::entries(entries)?;
        let rows = entries
            .iter()
            .map(journal::EntryRow::of)
            .collect::<Result<Vec<_>, _>>()?;
        let count = rows.len();
        let write = move |connection: &Connection| journal::write(connection, &rows).map(Ok);
        self.writer.call("write the journal", count, write).await
    }

    async fn timeline(&self, node: &str, limit: usize) -> Result<Vec<JournalEntry>, StoreError> {
        let node = node.to_owned();
        self.readers
            .read(move |connection| journal::timeline(connection, &node, limit))
            .await
    }
}

#[async_trait]
impl Statuses for SqliteStore {
    async fn join_session(&self, event: SessionEvent) -> Result<(), StoreError> {
        let write = move |connection: &Connection| status::join(connection, &event).map(Ok);
        let action = "update an event's status";
        self.writer.call(action, NO_ROWS, write).await
    }

    async fn change_session(
        &self,
        node: &str,
        session: &str,
        change: SessionChange,
    ) -> Result<(), StoreError> {
        let (node, session) = (node.to_owned(), session.to_owned());
        let write = move |connection: &Connection| {
            status::change(connection, &node, &session, &change).map(Ok)
        };
        let action = "update the statuses of a session";
        self.writer.call(action, NO_ROWS, write).await
    }

    async fn note_conclusion(
        &self,
        ids: Vec<String>,
        note: ConclusionNote,
    ) -> Result<(), StoreError> {
        let write = move |connection: &Connection| {
            let mut ids = ids.iter();
            ids.try_for_each(|id| status::note(connection, id, &note))
                .map(Ok)
        };
        let action = "note a conclusion with its events";
        self.writer.call(action, NO_ROWS, write).await
    }

    async fn statuses(&self, ids: Vec<String>) -> Result<Vec<Option<EventStatus>>, StoreError> {
        self.readers
            .read(move |connection| ids.iter().map(|id| status::read(connection, id)).collect())
            .await
    }
}

#[async_trait]
impl Upkeep for SqliteStore {
    async fn prune(&self, prune: Prune) -> Result<Pruned, StoreError> {
        let in_trouble = self.writer.trouble().borrow().is_some();
        let (path, round) = (self.path.clone(), Arc::clone(&self.prune_round));
        let write = move |connection: &Connection| {
            if in_trouble && let Err(error) = prune::probe(connection, &path)? {
                return Ok(Err(error));
            }
            prune::prune(connection, &prune, &round).map(Ok)
        };
        self.writer
            .call("delete old events", prune::CHUNK, write)
            .await
    }

    fn trouble(&self) -> watch::Receiver<Option<String>> {
        self.writer.trouble()
    }

    fn unreadable(&self) -> watch::Receiver<u64> {
        self.unreadable.count()
    }

    fn damage(&self) -> watch::Receiver<Option<String>> {
        self.damage.subscribe()
    }

    fn notes(&self) -> Vec<String> {
        let note = |path: &PathBuf| {
            format!(
                "the event store was found damaged and replaced by an empty one; the damaged one is \
                 kept as {}, to be inspected or deleted",
                path.display()
            )
        };
        self.aside
            .iter()
            .filter(|path| path.exists())
            .map(note)
            .collect()
    }

    async fn stats(&self) -> Result<Stats, StoreError> {
        let path = self.path.clone();
        let read = move |connection: &Connection| {
            let mut stats = query::stats(connection)?;
            stats.bytes = [&path, &wal(&path)]
                .into_iter()
                .filter_map(|path| path.metadata().ok())
                .map(|metadata| metadata.len())
                .sum();
            Ok(stats)
        };
        self.readers.read(read).await
    }

    async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_of_the_disk_passes_and_is_never_the_events_fault() {
        use rusqlite::ffi;
        let table = [
            (ffi::SQLITE_FULL, "passes"),
            (ffi::SQLITE_IOERR, "passes"),
            (ffi::SQLITE_IOERR_FSYNC, "passes"),
            (ffi::SQLITE_IOERR_WRITE, "passes"),
            (ffi::SQLITE_BUSY, "passes"),
            (ffi::SQLITE_BUSY_SNAPSHOT, "passes"),
            (ffi::SQLITE_LOCKED, "passes"),
            (ffi::SQLITE_CANTOPEN, "passes"),
            (ffi::SQLITE_READONLY, "passes"),
            (ffi::SQLITE_READONLY_DBMOVED, "passes"),
            (ffi::SQLITE_PERM, "passes"),
            (ffi::SQLITE_NOMEM, "passes"),
            (ffi::SQLITE_PROTOCOL, "passes"),
            (ffi::SQLITE_INTERRUPT, "passes"),
            (ffi::SQLITE_ABORT, "passes"),
            (ffi::SQLITE_NOLFS, "passes"),
            (ffi::SQLITE_SCHEMA, "passes"),
            (ffi::SQLITE_CORRUPT, "damaged"),
            (ffi::SQLITE_NOTADB, "damaged"),
            (ffi::SQLITE_TOOBIG, "events"),
            (ffi::SQLITE_CONSTRAINT, "events"),
            (ffi::SQLITE_RANGE, "events"),
        ];
        for (code, expected) in table {
            let error = rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            let found = match failure("store events", error) {
                error if error.is_retryable() => "passes",
                StoreError::Corrupt { .. } => "damaged",
                StoreError::Internal { .. } => "events",
                _ => "else",
            };
            assert_eq!(found, expected, "{code}");
        }
    }
}
