//! Identity of the store: its id, and the last position of its history.
//!
//! If another store was in use in the meantime, faults that are open in this one may have been
//! closed since. Consumers therefore start behind the newest event, and all events before are
//! history. An event from the history that arrives again moves to the end of the feed
//! (`append.rs`), so that it counts again.

use rusqlite::{Connection, OptionalExtension};

use super::position;
use crate::Identity;

pub(super) fn read(connection: &Connection) -> rusqlite::Result<Identity> {
    connection
        .prepare_cached("SELECT id, since FROM identity")?
        .query_row([], |row| {
            Ok(Identity {
                id: row.get(0)?,
                since: position(row.get(1)?),
            })
        })
}

/// Returns the last position of the history.
pub(super) fn since(connection: &Connection) -> rusqlite::Result<i64> {
    connection
        .prepare_cached("SELECT since FROM identity")?
        .query_row([], |row| row.get(0))
}

/// Turns all events into history, and deletes all checkpoints.
pub(super) fn begin_anew(connection: &Connection) -> rusqlite::Result<Identity> {
    connection.execute("DELETE FROM checkpoint", [])?;
    connection.execute("DELETE FROM checkpoint_part", [])?;
    // Last position that was assigned, even if that event was deleted since.
    connection.execute(
        "UPDATE identity SET since =
             coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event'), 0)",
        [],
    )?;
    read(connection)
}

/// Moves an event to the end of the feed. Returns the new position.
pub(super) fn move_to_end(connection: &Connection, seq: i64) -> rusqlite::Result<i64> {
    connection
        .prepare_cached("UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'event'")?
        .execute([])?;
    let moved: Option<i64> = connection
        .prepare_cached(
            "UPDATE event SET seq = (SELECT seq FROM sqlite_sequence WHERE name = 'event')
             WHERE seq = ?1 RETURNING seq",
        )?
        .query_row([seq], |row| row.get(0))
        .optional()?;
    Ok(moved.unwrap_or(seq))
}
