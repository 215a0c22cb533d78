//! A look into a store's file from outside, while it is in use or not.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use model::position::Position;
use rusqlite::Connection;
use serde::Serialize;

use super::{FILE, count, failure, identity, position, query, schema, unreadable, wal};
use crate::StoreError;

/// The contents of a store's file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// The file.
    pub path: PathBuf,
    /// Its size, and that of its write-ahead log (bytes).
    pub bytes: u64,
    /// Size of the write-ahead log (bytes).
    pub log_bytes: u64,
    /// Room inside the file that is free for what comes (bytes).
    pub free_bytes: u64,
    /// Version of the schema.
    pub schema_version: u32,
    /// The id of the store.
    pub id: String,
    /// Position up to which events are history, for another store was acted on after them.
    pub history_up_to: Position,
    /// The findings of `SQLite`'s own check; empty if the file is sound.
    pub damage: Vec<String>,
    /// Number of events.
    pub events: u64,
    /// Number of events that cannot be read: they are passed over.
    pub unreadable: u64,
    /// The first of these; at most 20.
    pub unreadable_events: Vec<Damaged>,
    /// Position of the newest event.
    pub newest_position: Position,
    /// The time when the oldest event was received.
    pub oldest: Option<Timestamp>,
    /// The time when the newest event was received.
    pub newest: Option<Timestamp>,
    /// Number of journal entries.
    pub journal_entries: u64,
    /// The readers of the feed, and their positions.
    pub consumers: Vec<Consumer>,
    /// Events by check, the most first.
    pub checks: Vec<Count>,
    /// Events by node, the most first; the first [`NODES`] of them.
    pub nodes: Vec<Count>,
}

/// A reader of the feed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Consumer {
    /// Name.
    pub name: String,
    /// Position up to which it is done.
    pub token: Position,
    /// Events behind that position.
    pub behind: u64,
    /// Size of what it keeps (bytes).
    pub state_bytes: u64,
}

/// An event that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Damaged {
    /// Its position.
    pub position: Position,
    /// Its id, as far as it can be read.
    pub id: String,
    /// The error with it.
    pub error: String,
}

/// The number of events of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Count {
    /// The name of the kind.
    pub name: String,
    /// Number of events.
    pub events: u64,
}

/// Most nodes that an inspection lists.
pub const NODES: usize = 20;
/// Most events that cannot be read that are named.
const NAMED: usize = 20;
/// Most faults of the file that are listed.
const DAMAGES: u32 = 20;

/// Looks into the store in `dir`. Only reads, and takes no lock that others wait for.
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
    // One view of the file for all that follows.
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

/// Returns how many events cannot be read, and the first of them.
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
