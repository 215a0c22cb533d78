//! Inspection of a store's file from outside, while the store is in use or not.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use model::position::Position;
use rusqlite::Connection;
use serde::Serialize;

use super::{FILE, count, failure, identity, position, query, schema, unreadable, wal};
use crate::StoreError;

/// Contents of a store's file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the file and of its write-ahead log (bytes).
    pub bytes: u64,
    /// Size of the write-ahead log (bytes).
    pub log_bytes: u64,
    /// Free space inside the file, which is reused (bytes).
    pub free_bytes: u64,
    /// Version of the storage schema.
    pub schema_version: u32,
    /// Id of the store.
    pub id: String,
    /// Last position of the history: another store was in use after these events.
    pub history_up_to: Position,
    /// Findings of `SQLite`'s own check; empty if the file is sound.
    pub damage: Vec<String>,
    /// Number of stored events.
    pub events: u64,
    /// Number of events that cannot be read. Reads of the store skip them.
    pub unreadable: u64,
    /// First unreadable events; at most 20.
    pub unreadable_events: Vec<Damaged>,
    /// Position of the newest event.
    pub newest_position: Position,
    /// Time of receipt of the oldest event.
    pub oldest: Option<Timestamp>,
    /// Time of receipt of the newest event.
    pub newest: Option<Timestamp>,
    /// Number of journal entries.
    pub journal_entries: u64,
    /// Consumers of the feed, and their positions.
    pub consumers: Vec<Consumer>,
    /// Number of events by check, largest first.
    pub checks: Vec<Count>,
    /// Number of events by node, largest first; at most [`NODES`].
    pub nodes: Vec<Count>,
}

/// Consumer of the feed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Consumer {
    /// Name under which the consumer saves its checkpoint.
    pub name: String,
    /// Position of the last event such that the consumer has finished it and all before it.
    pub token: Position,
    /// Number of events behind that position.
    pub behind: u64,
    /// Size of the consumer's saved state (bytes).
    pub state_bytes: u64,
}

/// Event that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Damaged {
    /// Position of the event in the feed.
    pub position: Position,
    /// Id of the event, with invalid bytes replaced.
    pub id: String,
    /// Error met when reading the event.
    pub error: String,
}

/// Number of events of one check or node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Count {
    /// Name of the check or node.
    pub name: String,
    /// Number of events of the check or node.
    pub events: u64,
}

/// Most nodes that an inspection lists.
pub const NODES: usize = 20;
/// Most unreadable events that an inspection lists.
const NAMED: usize = 20;
/// Most findings of `SQLite`'s check that an inspection lists.
const DAMAGES: u32 = 20;

/// Inspects the store in `dir`. Only reads, and takes no lock that blocks the store.
pub fn inspect(dir: &Path) -> Result<Inspection, StoreError> {
    let path = dir.join(FILE);
    if let Err(source) = path.metadata() {
        return Err(StoreError::Io {
            action: "be found in this directory",
            source: Box::new(source),
        });
    }
    schema::open_reader(&path)
        .and_then(|connection| read(&connection, &path))
        .map_err(|error| failure("be read", error))
}

fn read(connection: &Connection, path: &Path) -> rusqlite::Result<Inspection> {
    // One snapshot of the file for all queries below.
    let connection = connection.unchecked_transaction()?;
    let number = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, i64>(0));
    let time = |sql: &str| -> rusqlite::Result<Option<Timestamp>> {
        let micros: Option<i64> = connection.query_row(sql, [], |row| row.get(0))?;
        Ok(micros.and_then(|at| Timestamp::from_microsecond(at).ok()))
    };
    let counts = |sql: &str| -> rusqlite::Result<Vec<Count>> {
        connection
            .prepare(sql)?
            .query_map([], |row| {
                Ok(Count {
                    name: unreadable::text(row, 0),
                    events: count(row.get(1)?),
                })
            })?
            .collect()
    };
    let newest_position = position(number("SELECT coalesce(max(seq), 0) FROM event")?);
    let (unreadable, unreadable_events) = damaged(&connection)?;
    let schema_version = u32::try_from(number("PRAGMA user_version")?).unwrap_or_default();
    let identity = identity::read(&connection)?;
    let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
    let log_bytes = size(&wal(path));
    Ok(Inspection {
        bytes: size(path) + log_bytes,
        log_bytes,
        free_bytes: count(number("PRAGMA freelist_count")? * number("PRAGMA page_size")?),
        schema_version,
        history_up_to: identity.since,
        id: identity.id,
        damage: connection
            .prepare(&format!("PRAGMA quick_check({DAMAGES})"))?
            .query_map([], |row| row.get::<_, String>(0))?
            .filter(|line| line.as_ref().map_or(true, |text| text != "ok"))
            .collect::<rusqlite::Result<_>>()?,
        events: count(number("SELECT count(*) FROM event")?),
        unreadable,
        unreadable_events,
        newest_position,
        oldest: time("SELECT created_at FROM event ORDER BY seq LIMIT 1")
            .or_else(none_without_rows)?,
        newest: time("SELECT created_at FROM event ORDER BY seq DESC LIMIT 1")
            .or_else(none_without_rows)?,
        journal_entries: count(number("SELECT count(*) FROM journal")?),
        consumers: consumers(&connection)?,
        checks: counts(
            "SELECT check_name, count(*) FROM event GROUP BY check_name ORDER BY 2 DESC, 1",
        )?,
        nodes: counts(&format!(
            "SELECT node, count(*) FROM event GROUP BY node ORDER BY 2 DESC, 1 LIMIT {NODES}"
        ))?,
        path: path.to_owned(),
    })
}

fn consumers(connection: &Connection) -> rusqlite::Result<Vec<Consumer>> {
    connection
        .prepare(
            "SELECT consumer, token, length(state) + coalesce((
                 SELECT sum(length(state)) FROM checkpoint_part AS part
                 WHERE part.consumer = checkpoint.consumer), 0),
                 (SELECT count(*) FROM event WHERE seq > token)
             FROM checkpoint ORDER BY consumer",
        )?
        .query_map([], |row| {
            Ok(Consumer {
                name: row.get(0)?,
                token: position(row.get(1)?),
                behind: count(row.get(3)?),
                state_bytes: count(row.get(2)?),
            })
        })?
        .collect()
}

/// Returns the number of unreadable events, and the first of them.
fn damaged(connection: &Connection) -> rusqlite::Result<(u64, Vec<Damaged>)> {
    let mut statement = connection.prepare("SELECT seq, id, created_at, body FROM event")?;
    let mut rows = statement.query([])?;
    let (mut count, mut named) = (0, Vec::new());
    while let Some(row) = rows.next()? {
        let Err(error) = query::record(row) else {
            continue;
        };
        count += 1;
        if named.len() < NAMED {
            named.push(Damaged {
                position: position(row.get(0)?),
                id: unreadable::text(row, 1),
                error: error.to_string(),
            });
        }
    }
    Ok((count, named))
}

fn none_without_rows(error: rusqlite::Error) -> rusqlite::Result<Option<Timestamp>> {
    match error {
        rusqlite::Error::QueryReturnedNoRows => Ok(None),
        error => Err(error),
    }
}
