//! Making room: removes delivered segments, and gives up delivered events that wait again for
//! another store. Never removes an undelivered event.

use std::{fs, io};

use model::reporter::Authority;

use super::{Log, WaitingRecord};
use crate::outbox::segment::HEAD;
use crate::outbox::{MAX_SEGMENTS, OutboxError};

/// Divisor of the limits for reports of users: the rest is reserved for monitors, whose faults
/// must not wait behind reports that a user makes up.
const USERS_PART: usize = 2;

impl Log {
    /// Returns the limit that users have reached, if the call staged from index `from` on
    /// contains events of users.
    pub(super) fn exceeded_by_users(&self, from: usize) -> Option<OutboxError> {
        let is_users = |entry: &&WaitingRecord| entry.authority == Authority::User;
        let staged = &self.staged.entries;
        staged.iter().skip(from).find(is_users)?;
        let users = self.waiting.iter().chain(staged).filter(is_users);
        let (events, bytes) = users.fold((0, 0), |(events, bytes), entry| {
            (events + 1, bytes + u64::from(entry.length))
        });
        let part = self.limits.bytes / USERS_PART as u64;
        (events > self.limits.events / USERS_PART || bytes > part).then(|| {
            let what = format!(
                "{events} events of users, {bytes} bytes, would wait; the remaining room is reserved for \
                 monitors"
            );
            OutboxError::Full { what }
        })
    }

    /// Returns the limit that the group has reached, after making room by giving up delivered
    /// events.
    pub(super) fn exceeded(&mut self) -> Option<OutboxError> {
        loop {
            let events = self.waiting.len() + self.staged.entries.len();
            // The group may start a new file.
            let bytes = self.bytes() + (HEAD + self.staged.bytes.len()) as u64;
            let what = if events > self.limits.events {
                if self.give_up_repeat() {
                    continue;
                }
                format!("{} events wait, which is the limit", self.waiting.len())
            } else if bytes > self.limits.bytes {
                format!("{} bytes of {} are in use", self.bytes(), self.limits.bytes)
            } else if self.segments.len() >= MAX_SEGMENTS {
                format!(
                    "{} files are in use, which is the limit",
                    self.segments.len()
                )
            } else {
                return None;
            };
            if events > self.limits.events || !self.forget_oldest() {
                return Some(OutboxError::Full { what });
            }
        }
    }

    /// Removes segments that are delivered and not kept, except the one being written.
    pub(super) fn remove_delivered(&mut self) {
        while let Some(oldest) = self.segments.front() {
            let in_use = self.segments.len() == 1
                && !oldest.sealed
                && oldest.length < self.limits.segment_bytes();
            let keeps = self.keep_since.is_some_and(|since| {
                let records: usize = self.segments.iter().map(|one| one.records).sum();
                // Only as many events are kept as can wait again.
                records <= self.limits.events && oldest.newest.is_some_and(|at| at >= since)
            });
            if in_use || keeps || oldest.last > self.cursor.position() || !self.remove_oldest() {
                return;
            }
        }
    }

    /// Removes the oldest segment to make room, if all its events were delivered to some store.
    pub(super) fn forget_oldest(&mut self) -> bool {
        let oldest = self.segments.front();
        let may = oldest.is_some_and(|one| one.records > 0 && one.last <= self.cursor.sent());
        may && self.remove_oldest()
    }

    /// Gives up the oldest event to make room, if it was delivered before and waits again.
    pub(super) fn give_up_repeat(&mut self) -> bool {
        let front = self.waiting.front();
        let repeat = front.is_some_and(|entry| entry.position <= self.cursor.sent());
        if repeat {
            self.pop_waiting();
        }
        repeat
    }

    fn remove_oldest(&mut self) -> bool {
        let Some(oldest) = self.segments.front() else {
            return false;
        };
        match fs::remove_file(&oldest.path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::debug!(err = %error, file = %oldest.path.display(), "not removed yet");
                return false;
            }
        }
        if self.segments.len() == 1 {
            self.file = None;
        }
        // An open file takes up room even after it is removed.
        let gone = oldest.first;
        self.reading = self.reading.take().filter(|(first, _)| *first != gone);
        self.segments.pop_front();
        while self
            .waiting
            .front()
            .is_some_and(|entry| entry.segment == gone)
        {
            self.pop_waiting();
        }
        true
    }
}
