//! Limits that every backend enforces, and the functions that check them.

use contract::json;
use jiff::SignedDuration;
use model::journal::JournalEntry;

use crate::{Checkpoint, NewEvent, StoreError};

pub use model::event::MAX_NAME_BYTES;

/// Most events in one [`append`](crate::EventLog::append).
pub const MAX_APPEND: usize = model::event::MAX_EVENTS;
/// Most records or entries that one read returns; a larger `limit` is reduced to this.
pub const MAX_PAGE: usize = 10_000;
/// Most entries in one [`journal`](crate::Journal::journal).
pub const MAX_JOURNAL: usize = 10_000;
/// Largest journal entry: the text and the detail as JSON (bytes).
pub const MAX_ENTRY_BYTES: usize = 1024 * 1024;
/// Largest state of a checkpoint, and largest part (bytes). Only bounds the size of a row: the
/// state of one node has its own limit (`model::fault::MAX_FAULT_BYTES_PER_NODE`, 2 MiB for
/// each of two authorities, which JSON can make twelve times as long), and so does the state
/// that waits to be written.
pub const MAX_CHECKPOINT_BYTES: usize = 64 * 1024 * 1024;
/// Window for retries, in either direction of the clock. An event that has no time of its own
/// and repeats one stored within the window is a retry by its sender; see
/// [`append`](crate::EventLog::append).
pub const RETRY_WINDOW: SignedDuration = SignedDuration::from_mins(5);

pub(crate) fn events(events: &[NewEvent]) -> Result<(), StoreError> {
    count("events", events.len(), MAX_APPEND)?;
    for (index, NewEvent { event, .. }) in events.iter().enumerate() {
        name(&format_args!("event {index}: id"), &event.id)?;
        if let Some(time) = event.generated_timestamp
            && json::timestamp(time).is_none()
        {
            return Err(StoreError::Invalid {
                what: format!(
                    "event {index}: generatedTimestamp {{seconds: {}, nanos: {}}} is not a valid time",
                    time.seconds, time.nanos
                ),
            });
        }
    }
    Ok(())
}

pub(crate) fn entries(entries: &[JournalEntry]) -> Result<(), StoreError> {
    count("journal entries", entries.len(), MAX_JOURNAL)?;
    for (index, entry) in entries.iter().enumerate() {
        name(&format_args!("journal entry {index}: node"), &entry.node)?;
    }
    Ok(())
}

/// Checks the size of an entry whose detail is JSON text.
pub(crate) fn entry_size(bytes: usize) -> Result<(), StoreError> {
    if bytes <= MAX_ENTRY_BYTES {
        return Ok(());
    }
    Err(StoreError::Invalid {
        what: format!(
            "a journal entry of {bytes} bytes, at most {MAX_ENTRY_BYTES} are accepted: shorten its \
             detail"
        ),
    })
}

pub(crate) fn checkpoint(consumer: &str, checkpoint: &Checkpoint) -> Result<(), StoreError> {
    name(&"consumer", consumer)?;
    let size = |what: &str, bytes: usize| {
        if bytes <= MAX_CHECKPOINT_BYTES {
            return Ok(());
        }
        Err(StoreError::Invalid {
            what: format!(
                "consumer {consumer:?}: {what} of {bytes} bytes, at most {MAX_CHECKPOINT_BYTES} \
                 are accepted"
            ),
        })
    };
    size("a state", checkpoint.state.len())?;
    for (part, state) in &checkpoint.parts {
        name(&format_args!("consumer {consumer:?}: part"), part)?;
        size(&format!("the part {part:?}"), state.len())?;
    }
    Ok(())
}

fn count(what: &'static str, found: usize, max: usize) -> Result<(), StoreError> {
    if found <= max {
        Ok(())
    } else {
        Err(StoreError::TooMany { what, found, max })
    }
}

fn name(field: &dyn std::fmt::Display, value: &str) -> Result<(), StoreError> {
    let what = match value.len() {
        0 => format!("{field} is empty; it is required"),
        bytes if bytes > MAX_NAME_BYTES => {
            format!("{field} has {bytes} bytes, at most {MAX_NAME_BYTES} are accepted")
        }
        _ => return Ok(()),
    };
    Err(StoreError::Invalid { what })
}
