//! Traits that make up a store, and the types of their arguments and results.

use std::collections::BTreeMap;

use async_trait::async_trait;
use contract::HealthEvent;
use jiff::Timestamp;
use model::event::EventRecord;
use model::journal::JournalEntry;
use model::position::Position;
use model::status::{ConclusionNote, EventStatus, SessionChange, SessionEvent};
use tokio::sync::watch;

use crate::StoreError;

/// Durable log of health events with named consumers: everything that a backend implements.
///
/// Every method may be called from any number of tasks at once. A call whose future is dropped
/// may still take effect. Times are stored with microsecond precision.
pub trait EventStore: EventLog + Statuses + Checkpoints + Journal + Upkeep {}

impl<T: EventLog + Statuses + Checkpoints + Journal + Upkeep> EventStore for T {}

/// Stored events, and the feed that returns them in the order of acceptance.
#[async_trait]
pub trait EventLog: Send + Sync + 'static {
    /// Returns the identity of this store.
    fn identity(&self) -> Identity;

    /// Turns all stored events into history, durably: they are still shown and retained, but
    /// consumers start behind them, without a checkpoint. Called before acting on this store
    /// after another store was in use.
    ///
    /// An event from the history that is [appended](Self::append) again counts again: it moves
    /// to the end of the feed, and the answer reports it as new.
    async fn begin_anew(&self) -> Result<Identity, StoreError>;

    /// Stores events; they are durable when this returns. The answers are in the order of
    /// `events`. Either all events are stored or none.
    ///
    /// An event is stored once. It counts as already stored if
    /// - an event with the same id is in the store or earlier in `events`; or
    /// - it has no time of its own ([`lacks_own_time`](model::event::lacks_own_time)), an
    ///   event with the same content was received within [`RETRY_WINDOW`](crate::RETRY_WINDOW)
    ///   of it, and no event of the opposite health came from the same node, agent and check
    ///   since: then it is a retry by its sender.
    ///
    /// An event with the same id that cannot be read is replaced.
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, StoreError>;

    /// Returns the events behind `after`, oldest first: at most `limit`, and at most
    /// [`MAX_PAGE`](crate::MAX_PAGE). Start with [`Position::START`] and continue from the last
    /// `seq`.
    ///
    /// No event is ever inserted before a record that was returned here, so a consumer that
    /// continues from its last `seq` misses none. Events that cannot be read are skipped, see
    /// [`unreadable`](Upkeep::unreadable). Fewer than `limit` may be returned where events are
    /// large; an empty page is the end of the feed.
    async fn feed(&self, after: Position, limit: usize) -> Result<Vec<EventRecord>, StoreError>;

    /// Returns the number of events behind `after`. Numbers above [`MAX_PAGE`](crate::MAX_PAGE)
    /// may be derived from positions, which have gaps, and are then too large.
    async fn behind(&self, after: Position) -> Result<u64, StoreError>;

    /// Returns the position of the newest event, as a hint to call [`feed`](Self::feed) again.
    /// It may skip values, and is never behind a position returned by [`append`](Self::append).
    fn latest(&self) -> watch::Receiver<Position>;

    /// Returns the events that match `query`, newest first, without those that cannot be read.
    async fn events(&self, query: EventQuery) -> Result<Vec<EventRecord>, StoreError>;

    /// Returns the event with this id; `None` also if the event cannot be read.
    async fn event(&self, id: &str) -> Result<Option<EventRecord>, StoreError>;
}

/// Statuses of the events.
#[async_trait]
pub trait Statuses: Send + Sync + 'static {
    /// Makes an event part of a session. Does nothing if there is no event with this id.
    ///
    /// An event that is part of this session already keeps its status, unless that is
    /// `Cancelled`; and so does an event with a status of the same time or a later one.
    async fn join_session(&self, event: SessionEvent) -> Result<(), StoreError>;

    /// Applies a change of a session to its events that are
    /// [open](model::status::NodeQuarantined::is_open), except those that `change` excludes.
    /// Events of other nodes stay as they are: an id that is damaged on several nodes may be the
    /// same. In a backend for production the cost depends on the number of these events only.
    async fn change_session(
        &self,
        node: &str,
        session: &str,
        change: SessionChange,
    ) -> Result<(), StoreError>;

    /// Notes a conclusion with each of the events that it rests on, once. Ids without an event are
    /// left out.
    async fn note_conclusion(
        &self,
        ids: Vec<String>,
        note: ConclusionNote,
    ) -> Result<(), StoreError>;

    /// Returns the statuses of events, in the order of `ids`; `None` for an id without an
    /// event.
    async fn statuses(&self, ids: Vec<String>) -> Result<Vec<Option<EventStatus>>, StoreError>;
}

/// Progress of each consumer of the feed, with the consumer's state at that position.
#[async_trait]
pub trait Checkpoints: Send + Sync + 'static {
    /// Returns the checkpoint of a consumer; `None` before its first one.
    async fn checkpoint(&self, consumer: &str) -> Result<Option<Checkpoint>, StoreError>;

    /// Saves the checkpoint of a consumer: token, state and parts together, or nothing. A token
    /// that is smaller than the stored one is refused with [`StoreError::TokenBackwards`]. The
    /// same token with another state is allowed.
    async fn save_checkpoint(
        &self,
        consumer: &str,
        checkpoint: Checkpoint,
    ) -> Result<(), StoreError>;
}

/// Decisions and actions, recorded beside the events.
#[async_trait]
pub trait Journal: Send + Sync + 'static {
    /// Writes journal entries, all or none.
    async fn journal(&self, entries: &[JournalEntry]) -> Result<(), StoreError>;

    /// Returns the newest entries about a node in the order of writing: at most `limit`, and at
    /// most [`MAX_PAGE`](crate::MAX_PAGE); fewer where entries are large.
    async fn timeline(&self, node: &str, limit: usize) -> Result<Vec<JournalEntry>, StoreError>;
}

/// Maintenance of the storage: retention, health, statistics and closing.
#[async_trait]
pub trait Upkeep: Send + Sync + 'static {
    /// Deletes events and journal entries that are old, or the oldest ones if the store is too
    /// large: one chunk per call, see [`Pruned::more`]. Passes of preflight checks that closed
    /// no fault may go sooner, see [`Prune::passes_before`].
    ///
    /// Never deletes events in `keep`, events that a consumer has not finished unless the
    /// consumer is [`gone`](Prune::gone), or the newest event. Positions of deleted events are
    /// not reused.
    async fn prune(&self, prune: Prune) -> Result<Pruned, StoreError>;

    /// Returns the reason why the store cannot write, such as a full disk; `None` while it can.
    /// [`prune`](Self::prune) retries a write, so that the trouble ends even if no event
    /// arrives.
    fn trouble(&self) -> watch::Receiver<Option<String>>;

    /// Returns the number of stored events found to be unreadable since the store was opened.
    /// Reads skip these events, so damage costs only the damaged events.
    fn unreadable(&self) -> watch::Receiver<u64>;

    /// Returns the damage that a write or the feed found in the storage itself. A damaged store
    /// must be opened again: that makes it usable, without its history if need be.
    fn damage(&self) -> watch::Receiver<Option<String>>;

    /// Returns remarks for the operator that do not hinder operation, in full sentences.
    fn notes(&self) -> Vec<String>;

    /// Returns figures about the contents of the store.
    async fn stats(&self) -> Result<Stats, StoreError>;

    /// Finishes the calls in progress and releases the storage. Later calls return
    /// [`StoreError::Closed`]. Closing twice is allowed.
    async fn close(&self);
}

/// Identity of a store: its id, and the last position of its history. Displayed as `id-since`,
/// which differs whenever either part differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Random id, created with the store.
    pub id: String,
    /// Last position of the history: events behind it count. [`Position::START`] if all events
    /// count.
    pub since: Position,
}

/// Event to be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    /// [Normalised](model::event::normalise) event, with its id filled in.
    pub event: HealthEvent,
    /// Time when the event was received.
    pub received_at: Timestamp,
}

/// Answer to a [`NewEvent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Id of the stored event: the event's own, or that of the event that it repeats.
    pub id: String,
    /// Position of the stored event in the feed.
    pub seq: Position,
    /// True if the event was stored by this call; false if it was stored before.
    pub new: bool,
}

/// Filter for events. All conditions must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventQuery {
    /// Only events of this node.
    pub node: Option<String>,
    /// Only the event with this id.
    pub id: Option<String>,
    /// Only events before this position; to page back, the position of the last record
    /// received.
    pub before: Option<Position>,
    /// Only events after this position.
    pub after: Option<Position>,
    /// Largest number of events to return, capped at [`MAX_PAGE`](crate::MAX_PAGE).
    pub limit: usize,
}

/// Progress of a consumer, with its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Position of the last event such that it and all before it are finished.
    pub token: Position,
    /// State of the consumer at that position; at most
    /// [`MAX_CHECKPOINT_BYTES`](crate::MAX_CHECKPOINT_BYTES).
    pub state: Vec<u8>,
    /// Parts of the state that are saved separately, by name; each at most as large as the
    /// state. Loading returns all parts. Saving replaces the named parts and leaves the others;
    /// an empty part is deleted.
    pub parts: BTreeMap<String, Vec<u8>>,
}

/// Limits that decide which events and entries are deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prune {
    /// Events received, and entries written, before this time may be deleted.
    pub before: Timestamp,
    /// Passes of preflight checks received before this time may be deleted although they are
    /// younger than `before`, unless a fault of the same node, agent and check is stored that
    /// they may have closed.
    pub passes_before: Timestamp,
    /// Size beyond which the oldest events and entries are deleted (bytes, without free space
    /// inside the file).
    pub max_bytes: u64,
    /// Last position in the feed that may be deleted.
    pub finished: Position,
    /// Consumers whose last checkpoint is older than this are gone: events that they have not
    /// finished are not kept for them.
    pub gone_before: Timestamp,
    /// Ids of events to keep.
    pub keep: Vec<String>,
}

/// Result of a [`Prune`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Number of deleted events.
    pub events: u64,
    /// Number of deleted journal entries.
    pub entries: u64,
    /// True if another call would delete more.
    pub more: bool,
    /// Names of the consumers that are gone.
    pub gone_consumers: Vec<String>,
    /// Size beyond [`Prune::max_bytes`] (bytes). If [`more`](Self::more) is false, this is data
    /// that must not be deleted.
    pub over: u64,
}

/// Figures about the contents of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Number of stored events.
    pub events: u64,
    /// Time of receipt of the first event.
    pub oldest: Option<Timestamp>,
    /// Time of receipt of the last event.
    pub newest: Option<Timestamp>,
    /// Size of the store on disk (bytes).
    pub bytes: u64,
    /// Version of the storage schema.
    pub schema_version: u32,
}

// === impl Identity ===

impl std::fmt::Display for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.id, self.since)
    }
}

// === impl EventQuery ===

impl Default for EventQuery {
    /// Returns the query for the newest 100 events.
    fn default() -> Self {
        Self {
            node: None,
            id: None,
            before: None,
            after: None,
            limit: 100,
        }
    }
}
