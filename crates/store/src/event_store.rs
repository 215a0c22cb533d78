//! The contract of a store, and what goes in and out of it.

use std::collections::BTreeMap;

use async_trait::async_trait;
use contract::HealthEvent;
use jiff::Timestamp;
use model::event::Record;
use model::journal::Entry;
use model::position::Position;
use tokio::sync::watch;

use crate::StoreError;

/// A durable log of health events with named consumers: all that a backend does.
///
/// Every method of the traits that it is made of may be called from any number of tasks at once.
/// A call whose future is dropped may still take effect. Times are kept to the microsecond.
pub trait EventStore: EventLog + Statuses + Checkpoints + Journal + Upkeep {}

impl<T: EventLog + Statuses + Checkpoints + Journal + Upkeep> EventStore for T {}

/// The events, and the feed in which they stand in the order of their acceptance.
#[async_trait]
pub trait EventLog: Send + Sync + 'static {
    /// Returns which store this is, and from where on its events count.
    fn identity(&self) -> Identity;

    /// Makes history of all events that there are, durably: they are shown and retained as
    /// before, but consumers begin behind them, without a checkpoint. For whoever acts on
    /// this store after another store was acted on.
    ///
    /// An event of before that is [appended](Self::append) again counts from then on: it
    /// moves to the end of the feed, and is answered as new.
    async fn begin_anew(&self) -> Result<Identity, StoreError>;

    /// Stores events; they are durable when this returns. The answers are in the order
    /// of `events`. All are stored, or none.
    ///
    /// An event is stored once. It is there already when
    /// - an event with its id is, in the store or earlier in `events`; or
    /// - it lacks a time of its own
    ///   ([`lacks_own_time`](model::event::lacks_own_time)), an event with the same
    ///   content was received within [`RETRY_WINDOW`](crate::RETRY_WINDOW) of it, and
    ///   nothing of the opposite health came from the same node, agent and check since:
    ///   then it is its sender's retry.
    ///
    /// An event that is there by its id and cannot be read is stored anew.
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, StoreError>;

    /// Returns the events behind `after`, oldest first: at most `limit`, and at most
    /// [`MAX_PAGE`](crate::MAX_PAGE). Begin with [`Position::START`] and go on from the last
    /// `seq`.
    ///
    /// Nothing is ever inserted before a record that was returned here, so a consumer
    /// that goes on from its last `seq` misses none. One that cannot be read is passed
    /// over, see [`unreadable`](Upkeep::unreadable): fewer than `limit` may come where
    /// events are large, and none is the end.
    async fn feed(&self, after: Position, limit: usize) -> Result<Vec<Record>, StoreError>;

    /// Returns how many events there are behind `after`. More than
    /// [`MAX_PAGE`](crate::MAX_PAGE) may be told by their positions, which have gaps.
    async fn behind(&self, after: Position) -> Result<u64, StoreError>;

    /// Returns the position of the newest event. A hint to call [`feed`](Self::feed) again; it
    /// may skip values, and is never behind an answer of [`append`](Self::append).
    fn latest(&self) -> watch::Receiver<Position>;

    /// Returns the events that `query` asks for, newest first; without those that cannot be read.
    async fn events(&self, query: EventQuery) -> Result<Vec<Record>, StoreError>;

    /// Returns the event with this id; `None` also where it cannot be read.
    async fn event(&self, id: &str) -> Result<Option<Record>, StoreError>;
}

/// The statuses of the events.
#[async_trait]
pub trait Statuses: Send + Sync + 'static {
    /// Changes what became of an event; `false` where there is no event with this id.
    async fn update_status(&self, id: &str, patch: StatusPatch) -> Result<bool, StoreError>;

    /// Changes what became of several events at once, in this order; ids without an event are
    /// passed over. At most [`MAX_PAGE`](crate::MAX_PAGE).
    async fn update_statuses(&self, patches: Vec<(String, StatusPatch)>) -> Result<(), StoreError>;

    /// Returns what became of events, in the order of `ids`; `None` where there is no event with
    /// this id.
    async fn statuses(&self, ids: Vec<String>) -> Result<Vec<Option<EventStatus>>, StoreError>;
}

/// The position that each consumer of the feed has reached, with its state there.
#[async_trait]
pub trait Checkpoints: Send + Sync + 'static {
    /// Returns how far a consumer has come; `None` before its first checkpoint.
    async fn checkpoint(&self, consumer: &str) -> Result<Option<Checkpoint>, StoreError>;

    /// Notes how far a consumer has come: token, state and parts at once, or nothing. Its token
    /// never goes back:
    /// [`StoreError::TokenBackwards`]. The same token with another state is fine.
    async fn save_checkpoint(
        &self,
        consumer: &str,
        checkpoint: Checkpoint,
    ) -> Result<(), StoreError>;
}

/// The decisions and actions that are written down beside the events.
#[async_trait]
pub trait Journal: Send + Sync + 'static {
    /// Writes journal entries, all or none.
    async fn journal(&self, entries: &[Entry]) -> Result<(), StoreError>;

    /// Returns the newest entries about a node in the order in which they were written: at most
    /// `limit`, and at most [`MAX_PAGE`](crate::MAX_PAGE); fewer where they are large.
    async fn timeline(&self, node: &str, limit: usize) -> Result<Vec<Entry>, StoreError>;
}

/// The storage itself: its room, its health and its end.
#[async_trait]
pub trait Upkeep: Send + Sync + 'static {
    /// Deletes events and journal entries that are old, or the oldest of them where they
    /// take too much room: a part at a time, see [`Pruned::more`]. Passes that have closed nothing go
    /// sooner, see [`Prune::passes_before`].
    ///
    /// Never deleted are events in `keep`, those that a consumer has not finished unless it
    /// is [`gone`](Prune::gone), and the newest one. Positions of what was deleted are not given
    /// out again.
    async fn prune(&self, prune: Prune) -> Result<Pruned, StoreError>;

    /// Returns what keeps the store from writing, such as a full disk; `None` while it writes.
    /// [`prune`](Self::prune) tries again, so that it ends without an event to store.
    fn trouble(&self) -> watch::Receiver<Option<String>>;

    /// Returns how many stored events were met that cannot be read, since the store was opened.
    /// Every read passes over them: what is damaged costs itself only.
    fn unreadable(&self) -> watch::Receiver<u64>;

    /// Returns what of the storage itself was found to be damaged, by a write or by the feed. The
    /// store is of no use any more; opened again, it is sound, if need be without its history.
    fn damage(&self) -> watch::Receiver<Option<String>>;

    /// Returns what a person should know of the store that hinders nothing, in sentences.
    fn notes(&self) -> Vec<String>;

    /// Returns how much there is.
    async fn stats(&self) -> Result<Stats, StoreError>;

    /// Finishes the calls under way and lets go of the storage. Later calls answer
    /// [`StoreError::Closed`]. Closing twice is fine.
    async fn close(&self);
}

/// The identity of a store, and the position from which on its events count. Shown as `id-since`:
/// another one if the store, or its beginning, is another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Made once, at random.
    pub id: String,
    /// Position up to which events are history; [`Position::START`]: all count.
    pub since: Position,
}

/// An event to be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    /// The event, [normalised](model::event::normalise): its id is filled in.
    pub event: HealthEvent,
    /// The time when it was received.
    pub received_at: Timestamp,
}

/// The answer to a [`NewEvent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Id of the event that stands for it: its own, or that of the event which it repeats.
    pub id: String,
    /// Position of that event in the feed.
    pub seq: Position,
    /// True if it was stored now; otherwise it was there already.
    pub new: bool,
}

/// A choice of events. All conditions hold together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventQuery {
    /// The node whose events are wanted.
    pub node: Option<String>,
    /// The id of the one event that is wanted.
    pub id: Option<String>,
    /// The position before which events are wanted; to page back, that of the last record seen.
    pub before: Option<Position>,
    /// The position after which events are wanted.
    pub after: Option<Position>,
    /// The most events to return; never more than [`MAX_PAGE`](crate::MAX_PAGE).
    pub limit: usize,
}

/// The position that a consumer has reached, with its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Position up to which everything is finished.
    pub token: Position,
    /// The consumer's own state at that position; at most
    /// [`MAX_CHECKPOINT_BYTES`](crate::MAX_CHECKPOINT_BYTES).
    pub state: Vec<u8>,
    /// The parts of its state that are saved apart, by name; each at most as large. All are loaded.
    /// A save replaces those that are named here and leaves the others; an empty one is deleted.
    pub parts: BTreeMap<String, Vec<u8>>,
}

/// The status of an event: the `healtheventstatus` of the data-flow document, as far as it is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventStatus {
    /// `nodequarantined`: `Quarantined`, `UnQuarantined`, `AlreadyQuarantined` or
    /// `Cancelled`; `None` until something was decided.
    pub node_quarantined: Option<String>,
    /// `quarantinefinishtimestamp`: when that was decided.
    pub quarantine_finished_at: Option<Timestamp>,
    /// `userpodsevictionstatus`: how far the pods of its node have left; `None` until that was
    /// decided.
    pub pods_eviction: Option<PodsEviction>,
    /// `drainfinishtimestamp`: when they had.
    pub drain_finished_at: Option<Timestamp>,
    /// `faultremediated`: whether its fault was repaired; `None` until that was decided.
    pub fault_remediated: Option<bool>,
    /// `lastremediationtimestamp`: when that was last tried.
    pub last_remediation_at: Option<Timestamp>,
}

/// The `userpodsevictionstatus` of the data-flow document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodsEviction {
    /// `NotStarted`, `InProgress`, `Failed`, `Succeeded`, `AlreadyDrained` or `Cancelled`.
    pub status: String,
    /// The reason, for people; may be empty.
    pub message: String,
}

/// A change of an [`EventStatus`]. `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusPatch {
    /// `nodequarantined`.
    pub node_quarantined: Option<String>,
    /// `quarantinefinishtimestamp`.
    pub quarantine_finished_at: Option<Timestamp>,
    /// `userpodsevictionstatus`.
    pub pods_eviction: Option<PodsEviction>,
    /// `drainfinishtimestamp`.
    pub drain_finished_at: Option<Timestamp>,
    /// `faultremediated`.
    pub fault_remediated: Option<bool>,
    /// `lastremediationtimestamp`.
    pub last_remediation_at: Option<Timestamp>,
}

/// The limits of what may be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prune {
    /// The time before which events were received, or entries written, that may go.
    pub before: Timestamp,
    /// The time before which passes of preflight checks were received that may go although they are younger,
    /// where no fault of their node, agent and check is stored that they can have closed.
    pub passes_before: Timestamp,
    /// The room beyond which the oldest go (bytes, without what is free inside the file).
    pub max_bytes: u64,
    /// The last position in the feed that may be deleted.
    pub finished: Position,
    /// Consumers that saved their checkpoint last before this are gone: what they have not
    /// finished is not kept for them.
    pub gone: Timestamp,
    /// Ids of events that are kept.
    pub keep: Vec<String>,
}

/// The result of a [`Prune`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Events.
    pub events: u64,
    /// Journal entries.
    pub entries: u64,
    /// True if another call would delete more.
    pub more: bool,
    /// Consumers that are gone, by name.
    pub gone: Vec<String>,
    /// Room taken beyond [`Prune::max_bytes`] (bytes). Without [`more`](Self::more) it
    /// is what must not be deleted.
    pub over: u64,
}

/// The contents of a store, in figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Number of events.
    pub events: u64,
    /// The time when the first of them was received.
    pub oldest: Option<Timestamp>,
    /// The time when the last of them was received.
    pub newest: Option<Timestamp>,
    /// Room that the store takes on disk (bytes).
    pub bytes: u64,
    /// Version of the schema that it is kept in.
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
