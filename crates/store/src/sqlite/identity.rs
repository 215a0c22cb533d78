//! The identity of the store, and the position from which on its events count.
//!
//! Where another store was acted on in the meantime, what this one held open may be over
//! since. So its consumers begin anew behind its newest event: what is before is history. An
//! event of before that arrives again moves to the end of the feed (`append.rs`), for it
//! counts now.

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

/// Returns the position up to which events are history.
pub(super) fn since(connection: &Connection) -> rusqlite::Result<i64> {
    connection
        .prepare_cached("SELECT since FROM identity")?
        .query_row([], |row| row.get(0))
}

/// Makes history of all events, and forgets what consumers have made of them.
pub(super) fn begin_anew(connection: &Connection) -> rusqlite::Result<Identity> {
    connection.execute("DELETE FROM checkpoint", [])?;
    connection.execute("DELETE FROM checkpoint_part", [])?;
    // The last position that was given out, be the event deleted since or not.
    connection.execute(
        "UPDATE identity SET since =
             coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event'), 0)",
        [],
    )?;
    read(connection)
}

/// Moves an event to the end of the feed; says where it stands now.
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
