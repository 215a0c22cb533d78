//! Turning to another store: what is kept of what was delivered waits again.

use std::sync::Arc;

use jiff::Timestamp;

use super::{Log, WaitingRecord};
use crate::outbox::{record, refused};

impl Log {
    /// Keeps what is delivered from `since` on, for another store that may want it.
    pub(in crate::outbox) fn keep_since(&mut self, since: Timestamp) {
        self.keep_since = Some(since);
        self.remove_delivered();
    }

    /// Returns the store to which all before what waits is delivered.
    pub(in crate::outbox) fn store(&self) -> Option<&str> {
        self.cursor.store()
    }

    /// Turns to another store: what is kept of what was delivered waits again, before all
    /// else, but for what was put aside. Says how many events that are. For the store that
    /// is known already nothing changes.
    pub(in crate::outbox) fn turn_to(&mut self, store: String) -> usize {
        if self.cursor.store() == Some(store.as_str()) {
            return 0;
        }
        let mut again = self.kept();
        let room = self.limits.events.saturating_sub(self.waiting.len());
        let too_many = again.len().saturating_sub(room);
        drop(again.drain(..too_many));
        let count = again.len();
        let first = again.first().map(|entry| entry.position - 1);
        for entry in again.into_iter().rev() {
            let id = Arc::clone(&entry.id);
            self.ids.entry(id).or_insert(entry.position);
            self.waiting.push_front(entry);
        }
        let position = first.unwrap_or(self.cursor.position());
        if let Err(error) = self.cursor.go_back(position, store) {
            // Costs no event: after a restart we turn to it once more.
            tracing::warn!(err = %error, "it cannot be noted to which store events are delivered");
        }
        count
    }

    /// Returns what was delivered and is kept, oldest first.
    fn kept(&mut self) -> Vec<WaitingRecord> {
        let aside = refused::ids(&self.directory);
        let mut kept = Vec::new();
        for segment in &mut self.segments {
            if segment.first > self.cursor.position() {
                break;
            }
            // It may be the one that is written: what is known of it stays as it is.
            let mut copy = segment.clone();
            let (bytes, contents) = match copy.read() {
                Ok(read) => read,
                Err(error) => {
                    tracing::error!(
                        err = %error,
                        file = %segment.path.display(),
                        "what was delivered cannot be read, and is not sent again"
                    );
                    continue;
                }
            };
            for place in contents.records {
                if place.position > self.cursor.position() {
                    break;
                }
                if let Some(event) = place.of(&bytes).and_then(record::decode)
                    && self
                        .keep_since
                        .is_some_and(|since| event.received_at >= since)
                    && !aside.contains(&event.event.id)
                {
                    kept.push(WaitingRecord::new(segment, place, event));
                }
            }
        }
        kept
    }
}
