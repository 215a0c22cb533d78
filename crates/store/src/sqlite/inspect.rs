//! Inspection of a store's file from outside, while the store is in use or not.

use std::path::Path;

use jiff::Timestamp;
use rusqlite::Connection;

use super::{FILE, count, failure, identity, position, query, schema, unreadable, wal};
use crate::StoreError;
use crate::inspection::{Consumer, Count, Damaged, Inspection, NODES};

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
