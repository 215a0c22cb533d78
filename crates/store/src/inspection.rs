//! Figures about a store that are read from outside, without opening the store.

use std::path::PathBuf;

use jiff::Timestamp;
use model::position::Position;
use serde::Serialize;

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
