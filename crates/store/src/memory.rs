//! In-memory backend for tests. A test that passes here and on the embedded backend depends on
//! the interface only.
//!
//! Positions start late and have gaps, like those of a database sequence whose transactions
//! were rolled back. Not for production: the data ends with the process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use contract::{HealthEvent, json, keys};
use jiff::Timestamp;
use model::event::{EventRecord, content_fingerprint, lacks_own_time};
use model::journal::JournalEntry;
use model::status::{ConclusionNote, EventStatus, SessionChange, SessionEvent};
use tokio::sync::watch;

use crate::{
    Appended, Checkpoint, Checkpoints, EventLog, EventQuery, Identity, Journal, MAX_PAGE, NewEvent,
    Position, Prune, Pruned, RETRY_WINDOW, Stats, Statuses, StoreError, Upkeep, limits,
};

/// Position before the first event.
const BEGIN: u64 = 40;
/// Only version of the schema.
const SCHEMA_VERSION: u32 = 1;

/// Contents of a [`MemoryStore`], which outlive it.
#[derive(Clone, Default)]
pub struct MemoryStorage(Arc<Mutex<Stored>>);

/// Open store. At most one may be open for a storage at a time.
pub struct MemoryStore {
    storage: MemoryStorage,
    latest: watch::Sender<Position>,
    closed: AtomicBool,
}

#[derive(Default)]
struct Stored {
    since: Position,
    /// Last position that was assigned.
    last: Position,
    events: BTreeMap<Position, StoredEvent>,
    ids: HashMap<String, Position>,
    /// Last event with each content, among events without a time of their own.
    contents: HashMap<String, Position>,
    /// Last event of each stream.
    streams: HashMap<Stream, Position>,
    checkpoints: BTreeMap<String, (Timestamp, Checkpoint)>,
    journal: Vec<JournalEntry>,
}

/// Node, agent, check and health of a series of events.
type Stream = (String, String, String, bool);

struct StoredEvent {
    received_at: Timestamp,
    event: HealthEvent,
    bytes: u64,
    status: EventStatus,
}

fn whole_micros(time: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time)
}

fn stream(event: &HealthEvent, healthy: bool) -> Stream {
    let name = String::clone;
    let (node, agent, check) = (&event.node_name, &event.agent, &event.check_name);
    (name(node), name(agent), name(check), healthy)
}

fn entry_bytes(entry: &JournalEntry) -> usize {
    let detail = (!entry.detail.is_null()).then(|| entry.detail.to_string().len());
    entry.text.len() + detail.unwrap_or_default()
}

// === impl MemoryStorage ===

impl MemoryStorage {
    /// Opens the store of this storage.
    pub fn open(&self) -> MemoryStore {
        MemoryStore {
            storage: self.clone(),
            latest: watch::Sender::new(self.state().newest()),
            closed: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, Stored> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Stored ===

impl Stored {
    fn newest(&self) -> Position {
        let last = self.events.last_key_value();
        last.map_or(Position::START, |(&position, _)| position)
    }

    /// Assigns the next position, one to three behind the last one.
    fn next_position(&mut self) -> Position {
        let last = self.last.number().max(BEGIN);
        self.last = Position::from(last + 1 + last % 3);
        self.last
    }

    fn append(&mut self, new: NewEvent) -> Appended {
        let id = new.event.id.clone();
        let known = self.ids.get(&id).copied();
        if let Some(seq) = known.filter(|seq| *seq > self.since) {
            return Appended {
                id,
                seq,
                new: false,
            };
        }
        if known.is_none()
            && let Some((seq, id)) = self.repeated(&new)
        {
            return Appended {
                id,
                seq,
                new: false,
            };
        }
        // An event from the history moves to the end, with its time of receipt and its status.
        let before = known.and_then(|seq| self.events.remove(&seq));
        let seq = self.next_position();
        self.ids.insert(id.clone(), seq);
        let (event, received_at) = (new.event, whole_micros(new.received_at));
        if lacks_own_time(&event) {
            self.contents.insert(content_fingerprint(&event), seq);
        }
        self.streams.insert(stream(&event, event.is_healthy), seq);
        let row = StoredEvent {
            received_at: before.as_ref().map_or(received_at, |row| row.received_at),
            status: before.map(|row| row.status).unwrap_or_default(),
            bytes: json::to_string(&event).len() as u64,
            event,
        };
        self.events.insert(seq, row);
        Appended { id, seq, new: true }
    }

    /// Returns the event that `new` repeats as a retry by its sender.
    fn repeated(&self, new: &NewEvent) -> Option<(Position, String)> {
        let event = &new.event;
        if !lacks_own_time(event) {
            return None;
        }
        let seq = *self.contents.get(&content_fingerprint(event))?;
        let row = self.events.get(&seq)?;
        let apart = new.received_at.duration_since(row.received_at).abs();
        let opposite = self.streams.get(&stream(event, !event.is_healthy));
        let changed = opposite.is_some_and(|at| *at > seq && self.events.contains_key(at));
        (seq > self.since && apart <= RETRY_WINDOW && !changed).then(|| (seq, row.event.id.clone()))
    }

    fn record(&self, seq: Position) -> Option<EventRecord> {
        let row = self.events.get(&seq)?;
        Some(EventRecord {
            seq,
            id: row.event.id.clone(),
            created_at: row.received_at,
            event: row.event.clone(),
        })
    }

    fn status(&mut self, id: &str) -> Option<&mut EventStatus> {
        let seq = self.ids.get(id)?;
        self.events.get_mut(seq).map(|row| &mut row.status)
    }

    fn bytes(&self) -> u64 {
        let entries = self.journal.iter().map(|entry| entry_bytes(entry) as u64);
        self.events.values().map(|row| row.bytes).sum::<u64>() + entries.sum::<u64>()
    }

    fn prune(&mut self, prune: &Prune) -> Pruned {
        let is_gone = |saved_at: &Timestamp| *saved_at < prune.gone_before;
        let checkpoints = self.checkpoints.iter();
        let (gone, there): (Vec<_>, Vec<_>) =
            checkpoints.partition(|(_, (saved_at, _))| is_gone(saved_at));
        let slowest = there.iter().map(|(_, (_, checkpoint))| checkpoint.token);
        let finished = slowest
            .min()
            .map_or(prune.finished, |slowest| slowest.min(prune.finished));
        let gone = gone.into_iter().map(|(name, _)| name.clone()).collect();
        let (newest, bytes) = (self.newest(), self.bytes());
        let is_too_much = bytes > prune.max_bytes;
        let mut excess = bytes.saturating_sub(prune.max_bytes);
        let (events, entries) = (self.events.len(), self.journal.len());
        let rows = self.events.values();
        let faulty: BTreeSet<Stream> = rows
            .filter(|row| !row.event.is_healthy)
            .map(|row| stream(&row.event, false))
            .collect();
        let has_closed_nothing = |event: &HealthEvent| {
            event.is_healthy
                && event.agent.starts_with(keys::PREFLIGHT_AGENTS)
                && !faulty.contains(&stream(event, false))
        };
        self.events.retain(|&seq, row| {
            let held = seq > finished || seq == newest || prune.keep.contains(&row.event.id);
            let goes = !held
                && if is_too_much {
                    excess > 0
                } else {
                    row.received_at < prune.before
                        || (row.received_at < prune.passes_before && has_closed_nothing(&row.event))
                };
            if goes {
                excess = excess.saturating_sub(row.bytes);
                self.ids.remove(&row.event.id);
            }
            !goes
        });
        self.journal
            .retain(|entry| (is_too_much && excess == 0) || entry.at >= prune.before);
        Pruned {
            events: (events - self.events.len()) as u64,
            entries: (entries - self.journal.len()) as u64,
            more: false,
            gone_consumers: gone,
            over: self.bytes().saturating_sub(prune.max_bytes),
        }
    }
}

// === impl MemoryStore ===

impl MemoryStore {
    fn state(&self) -> Result<MutexGuard<'_, Stored>, StoreError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(StoreError::Closed);
        }
        Ok(self.storage.state())
    }
}

#[async_trait]
impl EventLog for MemoryStore {
    fn identity(&self) -> Identity {
        Identity {
            id: "memory".to_owned(),
            since: self.storage.state().since,
        }
    }

    async fn begin_anew(&self) -> Result<Identity, StoreError> {
        {
            let mut state = self.state()?;
            state.since = state.last;
            state.checkpoints.clear();
        }
        Ok(self.identity())
    }

    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, StoreError> {
        limits::events(&events)?;
        let mut state = self.state()?;
        let answers = events.into_iter().map(|new| state.append(new)).collect();
        self.latest.send_replace(state.newest());
        Ok(answers)
    }

    async fn feed(&self, after: Position, limit: usize) -> Result<Vec<EventRecord>, StoreError> {
        let state = self.state()?;
        let positions = state.events.keys().filter(|seq| **seq > after);
        let records = positions.filter_map(|&seq| state.record(seq));
        Ok(records.take(limit.min(MAX_PAGE)).collect())
    }

    async fn behind(&self, after: Position) -> Result<u64, StoreError> {
        let state = self.state()?;
        Ok(state.events.keys().filter(|seq| **seq > after).count() as u64)
    }

    fn latest(&self) -> watch::Receiver<Position> {
        self.latest.subscribe()
    }

    async fn events(&self, query: EventQuery) -> Result<Vec<EventRecord>, StoreError> {
        let state = self.state()?;
        let wanted = |record: &EventRecord| {
            query
                .node
                .as_ref()
                .is_none_or(|node| *node == record.event.node_name)
                && query.id.as_ref().is_none_or(|id| *id == record.id)
                && query.before.is_none_or(|before| record.seq < before)
                && query.after.is_none_or(|after| record.seq > after)
        };
        let records = state.events.keys().rev();
        let records = records.filter_map(|&seq| state.record(seq)).filter(wanted);
        Ok(records.take(query.limit.min(MAX_PAGE)).collect())
    }

    async fn event(&self, id: &str) -> Result<Option<EventRecord>, StoreError> {
        let state = self.state()?;
        Ok(state.ids.get(id).and_then(|&seq| state.record(seq)))
    }
}

#[async_trait]
impl Statuses for MemoryStore {
    async fn join_session(&self, event: SessionEvent) -> Result<(), StoreError> {
        if let Some(status) = self.state()?.status(&event.id) {
            let at = whole_micros(event.at);
            status.join(SessionEvent { at, ..event });
        }
        Ok(())
    }

    async fn change_session(
        &self,
        node: &str,
        session: &str,
        change: SessionChange,
    ) -> Result<(), StoreError> {
        let mut state = self.state()?;
        for row in state.events.values_mut() {
            if row.status.session.as_deref() == Some(session) && row.event.node_name == node {
                row.status.change(&change, row.received_at);
            }
        }
        Ok(())
    }

    async fn note_conclusion(
        &self,
        ids: Vec<String>,
        note: ConclusionNote,
    ) -> Result<(), StoreError> {
        let mut state = self.state()?;
        for id in ids {
            if let Some(status) = state.status(&id) {
                status.note(&note);
            }
        }
        Ok(())
    }

    async fn statuses(&self, ids: Vec<String>) -> Result<Vec<Option<EventStatus>>, StoreError> {
        let mut state = self.state()?;
        let rounded = |status: EventStatus| EventStatus {
            drain_finished_at: status.drain_finished_at.map(whole_micros),
            last_remediation_at: status.last_remediation_at.map(whole_micros),
            ..status
        };
        let statuses = ids.iter().map(|id| state.status(id).cloned().map(rounded));
        Ok(statuses.collect())
    }
}

#[async_trait]
impl Checkpoints for MemoryStore {
    async fn checkpoint(&self, consumer: &str) -> Result<Option<Checkpoint>, StoreError> {
        let state = self.state()?;
        let found = state.checkpoints.get(consumer);
        Ok(found.map(|(_, checkpoint)| checkpoint.clone()))
    }

    async fn save_checkpoint(
        &self,
        consumer: &str,
        checkpoint: Checkpoint,
    ) -> Result<(), StoreError> {
        limits::checkpoint(consumer, &checkpoint)?;
        let mut state = self.state()?;
        let stored = state.checkpoints.get(consumer);
        let stored = stored.map_or(Position::START, |(_, checkpoint)| checkpoint.token);
        if checkpoint.token < stored {
            return Err(StoreError::TokenBackwards {
                consumer: consumer.to_owned(),
                stored,
                offered: checkpoint.token,
            });
        }
        let (saved_at, kept) = state.checkpoints.entry(consumer.to_owned()).or_default();
        *saved_at = Timestamp::now();
        (kept.token, kept.state) = (checkpoint.token, checkpoint.state);
        kept.parts.extend(checkpoint.parts);
        kept.parts.retain(|_, part| !part.is_empty());
        Ok(())
    }
}

#[async_trait]
impl Journal for MemoryStore {
    async fn journal(&self, entries: &[JournalEntry]) -> Result<(), StoreError> {
        limits::entries(entries)?;
        entries
            .iter()
            .try_for_each(|entry| limits::entry_size(entry_bytes(entry)))?;
        let kept = entries.iter().map(|entry| JournalEntry {
            at: whole_micros(entry.at),
            ..entry.clone()
        });
        self.state()?.journal.extend(kept);
        Ok(())
    }

    async fn timeline(&self, node: &str, limit: usize) -> Result<Vec<JournalEntry>, StoreError> {
        let state = self.state()?;
        let newest = state
            .journal
            .iter()
            .rev()
            .filter(|entry| entry.node == node);
        let mut found: Vec<_> = newest.take(limit.min(MAX_PAGE)).cloned().collect();
        found.reverse();
        Ok(found)
    }
}

#[async_trait]
impl Upkeep for MemoryStore {
    async fn prune(&self, prune: Prune) -> Result<Pruned, StoreError> {
        Ok(self.state()?.prune(&prune))
    }

    fn trouble(&self) -> watch::Receiver<Option<String>> {
        watch::Sender::new(None).subscribe()
    }

    fn unreadable(&self) -> watch::Receiver<u64> {
        watch::Sender::new(0).subscribe()
    }

    fn damage(&self) -> watch::Receiver<Option<String>> {
        watch::Sender::new(None).subscribe()
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    async fn stats(&self) -> Result<Stats, StoreError> {
        let state = self.state()?;
        let time = |entry: Option<(&Position, &StoredEvent)>| entry.map(|(_, row)| row.received_at);
        Ok(Stats {
            events: state.events.len() as u64,
            oldest: time(state.events.first_key_value()),
            newest: time(state.events.last_key_value()),
            bytes: state.bytes(),
            schema_version: SCHEMA_VERSION,
        })
    }

    async fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}
