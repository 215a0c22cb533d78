//! The only thread that writes to the database.
//!
//! The thread executes all queued calls ([`GroupThread`]) in one transaction, and answers them
//! after the commit. If the transaction fails, the calls are run again one by one, so that only
//! those that cannot be stored are refused.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use model::position::Position;
use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::{oneshot, watch};

use super::damaged::{self, Damage};
use super::{failure, newest};
use crate::{DirectoryLock, GroupThread, MAX_APPEND, StoreError};

/// Most rows held by queued calls, which bounds the memory.
const MAX_WAITING_ROWS: usize = 2 * MAX_APPEND;
/// Largest write-ahead log that needs no folding (bytes). Above this size, readers are made to
/// wait until the log is folded into the database. Otherwise, continuous readers would let the
/// log grow without bound.
const MAX_WAL_BYTES: u64 = 64 * 1024 * 1024;
/// Longest time that folding waits for readers before it is postponed.
const FOLD_TIMEOUT: Duration = Duration::from_millis(250);

/// Handle to the writing thread.
#[derive(Debug)]
pub(super) struct Writer {
    thread: GroupThread<Box<dyn Job>>,
    latest: watch::Receiver<Position>,
    trouble: watch::Receiver<Option<String>>,
}

/// Queued call, without its types.
trait Job: Send {
    /// Runs inside a transaction; runs again if the first transaction was rolled back.
    fn run(&mut self, connection: &Connection) -> rusqlite::Result<()>;
    /// Answers the caller, with the result of the commit.
    fn answer(self: Box<Self>, committed: Result<(), Arc<rusqlite::Error>>);
}

struct Call<T, F> {
    action: &'static str,
    run: F,
    outcome: Option<Result<T, StoreError>>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

enum Failed {
    /// The transaction could not begin, since another process holds the file. Running the calls
    /// one by one would not help.
    Begin(rusqlite::Error),
    /// A call or the commit failed.
    Inside(rusqlite::Error),
}

struct Thread {
    connection: Connection,
    wal: PathBuf,
    /// Size of the log that triggers the next attempt to fold it (bytes).
    fold_at: u64,
    /// Value of `total_changes()` at the last commit.
    changes: i64,
    latest: watch::Sender<Position>,
    /// Reason why the last write failed; `None` after a successful one.
    trouble: watch::Sender<Option<String>>,
    damage: Arc<Damage>,
}

// === impl Writer ===

impl Writer {
    /// Starts the thread. The thread owns `connection` and `lock` until it ends.
    pub(super) fn start(
        connection: Connection,
        wal: PathBuf,
        lock: DirectoryLock,
        latest: Position,
        damage: Arc<Damage>,
    ) -> std::io::Result<Self> {
        let (latest_sender, latest) = watch::channel(latest);
        let (trouble_sender, trouble) = watch::channel(None);
        let mut thread = Thread {
            connection,
            wal,
            fold_at: MAX_WAL_BYTES,
            changes: 0,
            latest: latest_sender,
            trouble: trouble_sender,
            damage,
        };
        let work = move |group| {
            thread.commit(group);
            thread.fold();
        };
        Ok(Self {
            thread: GroupThread::start("event-store", MAX_WAITING_ROWS, work, lock)?,
            latest,
            trouble,
        })
    }

    pub(super) fn latest(&self) -> watch::Receiver<Position> {
        self.latest.clone()
    }

    pub(super) fn trouble(&self) -> watch::Receiver<Option<String>> {
        self.trouble.clone()
    }

    /// Runs `run` in the thread and returns its result once the changes are on disk.
    ///
    /// An error of `SQLite` rolls the transaction back; `run` may then run once more. An error
    /// inside `Ok` is passed to the caller; `run` must not have written anything in that case.
    ///
    /// `rows` is the number of rows that `run` holds, at most [`MAX_APPEND`].
    pub(super) async fn call<T, F>(
        &self,
        action: &'static str,
        rows: usize,
        run: F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnMut(&Connection) -> rusqlite::Result<Result<T, StoreError>> + Send + 'static,
    {
        let call = |reply| -> Box<dyn Job> {
            Box::new(Call {
                action,
                run,
                outcome: None,
                reply,
            })
        };
        let answer = self.thread.call(rows, call).await;
        answer.unwrap_or(Err(StoreError::Closed))
    }

    /// Accepts no further call, and waits until all calls in progress are answered and the
    /// thread has released the file and the lock.
    pub(super) async fn close(&self) {
        self.thread.close().await;
    }
}

// === impl Thread ===

impl Thread {
    /// Runs a group in one transaction and answers its calls.
    fn commit(&mut self, mut group: Vec<Box<dyn Job>>) {
        match self.transact(&mut group) {
            Ok(()) => {
                self.publish();
                self.note_success();
                for call in group {
                    call.answer(Ok(()));
                }
            }
            Err(Failed::Inside(error)) if group.len() > 1 => {
                tracing::debug!(calls = group.len(), %error, "group failed, running it one by one");
                for call in group {
                    self.commit(vec![call]);
                }
            }
            Err(Failed::Begin(error) | Failed::Inside(error)) => {
                let error = Arc::new(error);
                self.note_failure(&error);
                for call in group {
                    call.answer(Err(Arc::clone(&error)));
                }
            }
        }
    }

    fn transact(&mut self, group: &mut [Box<dyn Job>]) -> Result<(), Failed> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(Failed::Begin)?;
        for call in group {
            // Dropping the transaction rolls it back.
            call.run(&transaction).map_err(Failed::Inside)?;
        }
        transaction.commit().map_err(Failed::Inside)
    }

    /// Publishes the end of the feed. Runs before the callers are answered, so that a caller
    /// finds its own event announced.
    fn publish(&self) {
        match newest(&self.connection) {
            Ok(newest) => {
                self.latest.send_if_modified(|latest| {
                    let moved = newest > *latest;
                    *latest = newest.max(*latest);
                    moved
                });
            }
            Err(error) => tracing::warn!(%error, "the end of the event feed cannot be read"),
        }
    }

    /// Clears the trouble once rows were really written: a transaction without changes does not
    /// reach the disk.
    fn note_success(&mut self) {
        let changes = self.changes();
        let wrote = changes != self.changes;
        self.changes = changes;
        // Subscribers are woken when the trouble ends, not by every commit.
        if wrote
            && self
                .trouble
                .send_if_modified(|trouble| trouble.take().is_some())
        {
            tracing::info!("the event store writes again");
        }
    }

    fn note_failure(&mut self, error: &Arc<rusqlite::Error>) {
        // Rows that were rolled back count as changes too.
        self.changes = self.changes();
        if damaged::is_damage(error) {
            self.damage.note(error);
        }
        if !failure("write", Arc::clone(error)).is_retryable() {
            return;
        }
        let what = error.to_string();
        if self.trouble.borrow().as_deref() != Some(what.as_str()) {
            tracing::error!(
                err = what,
                "the event store cannot write; nothing is acknowledged until it can"
            );
            self.trouble.send_replace(Some(what));
        }
    }

    /// Returns the number of rows changed since the connection was opened.
    fn changes(&self) -> i64 {
        self.connection
            .prepare_cached("SELECT total_changes()")
            .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
            .unwrap_or(-1)
    }

    /// Folds an overgrown write-ahead log into the database.
    fn fold(&mut self) {
        let size = self.wal.metadata().map_or(0, |metadata| metadata.len());
        if size < self.fold_at {
            return;
        }
        match fold(&self.connection) {
            Ok(true) => self.fold_at = MAX_WAL_BYTES,
            // A long read is in progress. The next attempt comes when the log has doubled, so
            // that not every commit waits for the reader.
            Ok(false) => self.fold_at = size.saturating_mul(2),
            Err(error) => {
                tracing::warn!(%error, size, "the write-ahead log of the event store could not be folded into the database");
                self.fold_at = size.saturating_mul(2);
            }
        }
    }
}

/// Folds the log into the database. Returns false if readers prevented it.
fn fold(connection: &Connection) -> rusqlite::Result<bool> {
    let before: i64 = connection.pragma_query_value(None, "busy_timeout", |row| row.get(0))?;
    connection.busy_timeout(FOLD_TIMEOUT)?;
    let busy = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| {
        row.get::<_, i64>(0)
    });
    connection.busy_timeout(Duration::from_millis(before.unsigned_abs()))?;
    Ok(busy? == 0)
}

// === impl Call ===

impl<T, F> Job for Call<T, F>
where
    T: Send,
    F: FnMut(&Connection) -> rusqlite::Result<Result<T, StoreError>> + Send,
{
    fn run(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        self.outcome = Some((self.run)(connection)?);
        Ok(())
    }

    fn answer(self: Box<Self>, committed: Result<(), Arc<rusqlite::Error>>) {
        let answer = match committed {
            Ok(()) => self.outcome.unwrap_or(Err(StoreError::Closed)),
            Err(error) => Err(failure(self.action, error)),
        };
        // A receiver that is gone has given up; the request is carried out all the same.
        let _ = self.reply.send(answer);
    }
}

#[cfg(test)]
mod tests;
