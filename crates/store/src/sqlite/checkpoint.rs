//! How far each consumer has come.

use rusqlite::{Connection, OptionalExtension};

use super::position;
use crate::{Checkpoint, StoreError};

pub(super) fn load(
    connection: &Connection,
    consumer: &str,
) -> rusqlite::Result<Option<Checkpoint>> {
    connection
        .prepare_cached("SELECT token, state FROM checkpoint WHERE consumer = ?1")?
        .query_row([consumer], |row| {
            Ok(Checkpoint {
                token: position(row.get(0)?),
                state: row.get(1)?,
            })
        })
        .optional()
}

/// Writes nothing where the token would go back.
pub(super) fn save(
    connection: &Connection,
    consumer: &str,
    checkpoint: &Checkpoint,
) -> rusqlite::Result<Result<(), StoreError>> {
    let stored: Option<i64> = connection
        .prepare_cached("SELECT token FROM checkpoint WHERE consumer = ?1")?
        .query_row([consumer], |row| row.get(0))
        .optional()?;
    let stored = stored.map_or(0, position);
    if checkpoint.token < stored {
        return Ok(Err(StoreError::TokenBackwards {
            consumer: consumer.to_owned(),
            stored,
            offered: checkpoint.token,
        }));
    }
    connection
        .prepare_cached(
            "INSERT INTO checkpoint (consumer, token, state) VALUES (?1, ?2, ?3)
             ON CONFLICT (consumer) DO UPDATE SET token = excluded.token, state = excluded.state",
        )?
        .execute((consumer, super::number(checkpoint.token), &checkpoint.state))?;
    Ok(Ok(()))
}
