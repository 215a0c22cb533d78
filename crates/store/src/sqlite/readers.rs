//! Pool of connections for reading.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::{failure, schema};
use crate::StoreError;

/// Most connections, and so concurrent reads; further reads wait.
const CONNECTIONS: u32 = 4;

/// Pool of connections, opened on demand.
#[derive(Debug)]
pub(super) struct Readers {
    path: PathBuf,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

// === impl Readers ===

impl Readers {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            permits: Arc::new(Semaphore::new(CONNECTIONS as usize)),
            idle: Mutex::default(),
        }
    }

    /// Runs `read` with a connection, on a thread that may block.
    pub(super) async fn read<T, F>(self: &Arc<Self>, read: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|_| StoreError::Closed)?;
        let readers = Arc::clone(self);
        let blocking = tokio::task::spawn_blocking(move || {
            let idle = readers
                .idle
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop();
            let connection = match idle {
                Some(connection) => connection,
                None => schema::open_reader(&readers.path)
                    .map_err(|error| failure("open its file for reading", error))?,
            };
            let answer = read(&connection);
            readers
                .idle
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(connection);
            // Released after the push, so that the next read finds the idle connection and
            // `close` finds no connection in use.
            drop(permit);
            answer
        });
        // The task is cancelled only while the runtime shuts down.
        blocking.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Waits for the reads in progress, refuses further ones and closes the connections.
    pub(super) async fn close(&self) {
        // An error means that the pool is closed already.
        if let Ok(_all) = self.permits.acquire_many(CONNECTIONS).await {
            self.permits.close();
            self.idle
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
        }
    }
}
