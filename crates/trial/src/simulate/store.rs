//! The store of the simulated cluster, and how far the controller has read it.

use contract::HealthEvent;
use jiff::Timestamp;
use model::event::EventRecord;
use model::position::Position;

/// Events that were accepted, oldest first.
#[derive(Default)]
pub(super) struct Store {
    events: Vec<EventRecord>,
    /// Number of events that the controller has read.
    read: usize,
    /// Last position; a store that was lost is followed by later ones.
    last: u64,
}

// === impl Store ===

impl Store {
    pub(super) fn events(&self) -> &[EventRecord] {
        &self.events
    }

    /// Returns true if the store has an event with this id.
    pub(super) fn has(&self, id: &str) -> bool {
        self.events.iter().any(|record| record.id == id)
    }

    /// Appends an event. Returns its position; `None` if the store already has it.
    pub(super) fn append(&mut self, event: HealthEvent, created_at: Timestamp) -> Option<Position> {
        if self.has(&event.id) {
            return None;
        }
        self.last += 1;
        let seq = self.last.into();
        self.events.push(EventRecord {
            seq,
            id: event.id.clone(),
            created_at,
            event,
        });
        Some(seq)
    }

    /// Reads up to `most` events that the controller has not read.
    pub(super) fn read(&mut self, most: usize) -> &[EventRecord] {
        let begin = self.read;
        self.read = begin.saturating_add(most).min(self.events.len());
        self.events.get(begin..self.read).unwrap_or_default()
    }

    /// Returns true if the controller has read all events.
    pub(super) fn is_read(&self) -> bool {
        self.read == self.events.len()
    }

    /// Lets a new controller read on after `applied`.
    pub(super) fn read_after(&mut self, applied: Position) {
        self.read = self.events.partition_point(|record| record.seq <= applied);
    }

    /// Loses all events.
    pub(super) fn lose(&mut self) {
        self.events.clear();
    }
}
