//! Limits of the store, the same for every backend, and the checks of them.

use contract::json;
use jiff::SignedDuration;
use model::journal::Entry;

use crate::{Checkpoint, NewEvent, StatusPatch, StoreError};

pub use model::event::MAX_NAME_BYTES;

/// Most events in one [`append`](crate::EventLog::append).
pub const MAX_APPEND: usize = model::event::MAX_EVENTS;
/// Most records or entries that one read returns; more are not asked for, but cut.
pub const MAX_PAGE: usize = 10_000;
/// Most entries in one [`journal`](crate::Journal::journal).
pub const MAX_JOURNAL: usize = 10_000;
/// Largest journal entry: its text and its detail as JSON (bytes).
pub const MAX_ENTRY_BYTES: usize = 1024 * 1024;
/// Largest state of a checkpoint, and largest of its parts (bytes). What a consumer keeps of
/// one node has a limit of its own (`model::fault::MAX_FAULT_BYTES_PER_NODE`, 2 MiB for
/// each of two authorities, which JSON can make twelve times as long), and so has what waits to be written: this only bounds
/// what one row can be.
pub const MAX_CHECKPOINT_BYTES: usize = 64 * 1024 * 1024;
/// Longest message of a `userpodsevictionstatus`, in bytes: each event of a session has one.
pub const MAX_STATUS_MESSAGE_BYTES: usize = 4096;
/// An event without a time of its own that repeats one stored this recently, in either
/// direction of the clock, is its sender's retry; see
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
                    "event {index}: generatedTimestamp {{seconds: {}, nanos: {}}} is no time",
                    time.seconds, time.nanos
                ),
            });
        }
    }
    Ok(())
}

pub(crate) fn entries(entries: &[Entry]) -> Result<(), StoreError> {
    count("journal entries", entries.len(), MAX_JOURNAL)?;
    for (index, entry) in entries.iter().enumerate() {
        name(&format_args!("journal entry {index}: node"), &entry.node)?;
    }
    Ok(())
}

/// Checks an entry's size, once its detail is JSON text.
pub(crate) fn entry_size(bytes: usize) -> Result<(), StoreError> {
    if bytes <= MAX_ENTRY_BYTES {
        return Ok(());
    }
    Err(StoreError::Invalid {
        what: format!(
            "a journal entry of {bytes} bytes, at most {MAX_ENTRY_BYTES} are taken: shorten its \
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
                 are taken"
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

pub(crate) fn status(patch: &StatusPatch) -> Result<(), StoreError> {
    if let Some(value) = &patch.node_quarantined {
        name(&"nodequarantined", value)?;
    }
    let Some(eviction) = &patch.pods_eviction else {
        return Ok(());
    };
    name(&"userpodsevictionstatus.status", &eviction.status)?;
    match eviction.message.len() {
        bytes if bytes > MAX_STATUS_MESSAGE_BYTES => Err(StoreError::Invalid {
            what: format!(
                "userpodsevictionstatus.message has {bytes} bytes, at most \
                 {MAX_STATUS_MESSAGE_BYTES} are taken"
            ),
        }),
        _ => Ok(()),
    }
}

pub(crate) fn statuses(patches: &[(String, StatusPatch)]) -> Result<(), StoreError> {
    count("statuses", patches.len(), MAX_PAGE)?;
    patches.iter().try_for_each(|(_, patch)| status(patch))
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
            format!("{field} has {bytes} bytes, at most {MAX_NAME_BYTES} are taken")
        }
        _ => return Ok(()),
    };
    Err(StoreError::Invalid { what })
}
