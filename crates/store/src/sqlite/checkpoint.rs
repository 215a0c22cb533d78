//! Checkpoints of the consumers.

use std::collections::BTreeMap;

use jiff::Timestamp;
use model::position::Position;
use rusqlite::{Connection, OptionalExtension};

use super::position;
use crate::{Checkpoint, StoreError};

pub(super) fn load(
    connection: &Connection,
    consumer: &str,
) -> rusqlite::Result<Option<Checkpoint>> {
    // One snapshot of both tables.
    let connection = connection.unchecked_transaction()?;
    let found = connection
        .prepare_cached("SELECT token, state FROM checkpoint WHERE consumer = ?1")?
        .query_row([consumer], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((token, state)) = found else {
        return Ok(None);
    };
    let parts = connection
        .prepare_cached("SELECT part, state FROM checkpoint_part WHERE consumer = ?1")?
        .query_map([consumer], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<BTreeMap<_, _>>>()?;
    Ok(Some(Checkpoint {
        token: position(token),
        state,
        parts,
    }))
}

/// Saves a checkpoint. Writes nothing if the token would move backwards.
pub(super) fn save(
    connection: &Connection,
    consumer: &str,
    checkpoint: &Checkpoint,
) -> rusqlite::Result<Result<(), StoreError>> {
    let stored: Option<i64> = connection
        .prepare_cached("SELECT token FROM checkpoint WHERE consumer = ?1")?
        .query_row([consumer], |row| row.get(0))
        .optional()?;
    let stored = stored.map_or(Position::START, position);
    if checkpoint.token < stored {
        return Ok(Err(StoreError::TokenBackwards {
            consumer: consumer.to_owned(),
            stored,
            offered: checkpoint.token,
        }));
    }
    connection
        .prepare_cached(
            "INSERT INTO checkpoint (consumer, token, state, saved_at) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (consumer) DO UPDATE
             SET token = excluded.token, state = excluded.state, saved_at = excluded.saved_at",
        )?
        .execute((
            consumer,
            super::number(checkpoint.token),
            &checkpoint.state,
            Timestamp::now().as_microsecond(),
        ))?;
    let mut write = connection.prepare_cached(
        "INSERT INTO checkpoint_part (consumer, part, state) VALUES (?1, ?2, ?3)
         ON CONFLICT (consumer, part) DO UPDATE SET state = excluded.state",
    )?;
    let mut delete = connection
        .prepare_cached("DELETE FROM checkpoint_part WHERE consumer = ?1 AND part = ?2")?;
    for (part, state) in &checkpoint.parts {
        if state.is_empty() {
            delete.execute((consumer, part))?;
        } else {
            write.execute((consumer, part, state))?;
        }
    }
    Ok(Ok(()))
}
