//! Switching to another store: delivered events that are still kept wait again.

use std::sync::Arc;

use jiff::Timestamp;

use super::{Log, WaitingRecord};
use crate::outbox::{record, refused};

impl Log {
    /// Keeps delivered events accepted at `since` or later, for another store that may lack
    /// them.
    pub(in crate::outbox) fn keep_since(&mut self, since: Timestamp) {
        self.keep_since = Some(since);
        self.remove_delivered();
    }

    /// Returns the store that has all delivered events.
    pub(in crate::outbox) fn store(&self) -> Option<&str> {
        self.cursor.store()
    }

    /// Switches to another store: delivered events that are still kept wait again, before all
    /// others, except those put aside. Returns their number. Does nothing if the store is the
    /// current one.
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
            // No event is lost: after a restart, the log switches to the store again.
            tracing::warn!(err = %error, "the store that has the delivered events cannot be recorded");
        }
        count
    }

    /// Returns the delivered records that are still kept, oldest first.
    fn kept(&mut self) -> Vec<WaitingRecord> {
        let aside = refused::ids(&self.directory);
        let mut kept = Vec::new();
        for segment in &mut self.segments {
            if segment.first > self.cursor.position() {
                break;
            }
            // A copy, since the segment may be the one being written, whose state must not
            // change.
            let mut copy = segment.clone();
            let (bytes, contents) = match copy.read() {
                Ok(read) => read,
                Err(error) => {
                    tracing::error!(
                        err = %error,
                        file = %segment.path.display(),
                        "delivered events cannot be read, and are not sent again"
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
