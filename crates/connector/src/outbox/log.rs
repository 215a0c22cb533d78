//! Log of an outbox: the segments on disk, and an in-memory index of the waiting records. Has
//! no thread and no clock; `thread.rs` calls it.
//!
//! Delivered segments are kept while there is room, in case the next leader has another store
//! (`log/turn.rs`). They are not indexed, and are removed before any event is refused
//! (`log/room.rs`).

mod room;
mod turn;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use model::reporter::Authority;
use store::{Appended, NewEvent};

use super::cursor::Cursor;
use super::record::RecordPlace;
use super::segment::{self, Segment};
use super::{
    OutboxError, OutboxLimits, OutboxOpenError, OutboxStatus, WaitingEvent, disk, record, refused,
};

/// Name of the cursor's file.
const CURSOR: &str = "delivered";

/// Segments of an outbox, and the index of the waiting records.
#[derive(Debug)]
pub(super) struct Log {
    directory: PathBuf,
    limits: OutboxLimits,
    cursor: Cursor,
    /// Oldest first. The last one is appended to while `file` is open.
    segments: VecDeque<Segment>,
    file: Option<File>,
    /// Records behind the cursor, oldest first.
    waiting: VecDeque<WaitingRecord>,
    /// Positions of the waiting records, by event id.
    ids: HashMap<Arc<str>, u64>,
    /// Position of the next record. No position is used twice, even if its record could not be
    /// written.
    next: u64,
    staged: Staged,
    /// File that was read last, with the first position of its segment.
    reading: Option<(u64, File)>,
    /// Bytes that were part of no whole record, since the start.
    damaged: u64,
    /// True if the last attempt to write the cursor failed.
    failing: bool,
    /// Number of events that are put aside.
    aside: u64,
    /// True if the last attempt to put events aside failed.
    aside_failing: bool,
    /// Earliest acceptance of delivered events that are kept; `None` keeps none.
    keep_since: Option<Timestamp>,
}

/// Index entry of a waiting record.
#[derive(Debug)]
struct WaitingRecord {
    position: u64,
    /// Segment of the record, identified by the first position of the segment.
    segment: u64,
    offset: u64,
    length: u32,
    accepted_at: Timestamp,
    /// Authority of the event's reporter.
    authority: Authority,
    id: Arc<str>,
}

/// Group of events that is not on disk yet.
#[derive(Debug, Default)]
struct Staged {
    bytes: Vec<u8>,
    entries: Vec<WaitingRecord>,
    ids: HashMap<Arc<str>, u64>,
}

// === impl Log ===

impl Log {
    /// Opens `directory`, which is created if missing.
    pub(super) fn open(directory: &Path, limits: OutboxLimits) -> Result<Self, OutboxOpenError> {
        let failed = |source| OutboxOpenError::File {
            path: directory.to_owned(),
            source,
        };
        if !directory.is_dir() {
            let mut builder = DirBuilder::new();
            // Only for this user: events name nodes and workloads.
            let made = builder.recursive(true).mode(0o700).create(directory);
            made.map_err(failed)?;
            let parent = directory.parent().unwrap_or(directory);
            disk::sync_directory(parent).map_err(failed)?;
        }
        let (cursor, is_damaged) = Cursor::open(directory.join(CURSOR)).map_err(failed)?;
        if is_damaged {
            tracing::warn!(
                directory = %directory.display(),
                "the outbox's cursor is damaged; all events in the outbox are delivered again"
            );
        }
        let mut log = Self {
            directory: directory.to_owned(),
            limits,
            next: cursor.position() + 1,
            cursor,
            segments: VecDeque::new(),
            file: None,
            waiting: VecDeque::new(),
            ids: HashMap::new(),
            staged: Staged::default(),
            reading: None,
            damaged: 0,
            failing: false,
            aside: refused::count(directory),
            aside_failing: false,
            keep_since: None,
        };
        let aside = refused::ids(directory);
        for segment in Segment::list(directory).map_err(failed)? {
            log.load(segment, &aside)?;
        }
        // Applies the limit again to resent events, which had been given up before.
        while log.waiting.len() > limits.events && log.give_up_repeat() {}
        Ok(log)
    }

    fn load(
        &mut self,
        mut segment: Segment,
        aside: &HashSet<String>,
    ) -> Result<(), OutboxOpenError> {
        let read = segment.read();
        let (bytes, contents) = read.map_err(|source| OutboxOpenError::File {
            path: segment.path.clone(),
            source,
        })?;
        if let Some(found) = contents.newer {
            return Err(OutboxOpenError::Newer {
                path: segment.path,
                found,
                known: segment::VERSION,
            });
        }
        for range in contents.damaged {
            tracing::error!(
                file = %segment.path.display(),
                at = range.start,
                bytes = range.len(),
                "the outbox is damaged: events in this range are lost, those behind it are not"
            );
            self.damaged += range.len() as u64;
        }
        if contents.torn > 0 {
            tracing::warn!(
                file = %segment.path.display(),
                bytes = contents.torn,
                "the end of a file of the outbox is dropped: a write was cut short"
            );
            self.damaged += contents.torn as u64;
        }
        for place in contents.records {
            self.next = self.next.max(place.position + 1);
            if place.position <= self.cursor.position() {
                continue;
            }
            let Some(event) = place.of(&bytes).and_then(record::decode) else {
                tracing::error!(
                    file = %segment.path.display(),
                    at = place.offset,
                    "a record of the outbox holds no event; it is skipped"
                );
                self.damaged += u64::from(place.length);
                continue;
            };
            if place.position <= self.cursor.sent() && aside.contains(&event.event.id) {
                continue;
            }
            let entry = WaitingRecord::new(&segment, place, event);
            self.ids.insert(Arc::clone(&entry.id), entry.position);
            self.waiting.push_back(entry);
        }
        self.next = self.next.max(segment.first);
        self.segments.push_back(segment);
        Ok(())
    }

    /// Adds the events of one call to the group, all or none. They are stored by
    /// [`commit`](Self::commit).
    pub(super) fn stage(&mut self, events: &[NewEvent]) -> Result<Vec<Appended>, OutboxError> {
        let (bytes_before, entries_before) = (self.staged.bytes.len(), self.staged.entries.len());
        let mut answers = Vec::with_capacity(events.len());
        for event in events {
            let id = event.event.id.as_str();
            let known = self.ids.get(id).or_else(|| self.staged.ids.get(id));
            let (seq, new) = match known {
                // Repeats are recognised before anything is refused: they need no room.
                Some(&position) => (position, false),
                None => (self.push(event), true),
            };
            answers.push(Appended {
                id: id.to_owned(),
                seq: seq.into(),
                new,
            });
        }
        if self.staged.entries.len() > entries_before
            && let Some(full) = self
                .exceeded_by_users(entries_before)
                .or_else(|| self.exceeded())
        {
            self.staged.bytes.truncate(bytes_before);
            for entry in self.staged.entries.drain(entries_before..) {
                self.staged.ids.remove(&entry.id);
            }
            return Err(full);
        }
        Ok(answers)
    }

    fn push(&mut self, event: &NewEvent) -> u64 {
        let position = self.next;
        self.next += 1;
        let offset = self.staged.bytes.len() as u64;
        let length = record::encode(&mut self.staged.bytes, position, event);
        let id: Arc<str> = event.event.id.as_str().into();
        self.staged.ids.insert(Arc::clone(&id), position);
        self.staged.entries.push(WaitingRecord {
            position,
            segment: 0,
            offset,
            length,
            accepted_at: event.received_at,
            authority: Authority::of(&event.event),
            id,
        });
        position
    }

    /// Returns the first position of the group; all before it are on disk.
    pub(super) fn staged_from(&self) -> u64 {
        let first = self.staged.entries.first();
        first.map_or(self.next, |entry| entry.position)
    }

    /// Makes the group durable. On failure nothing of it is stored, and the next group may
    /// succeed.
    pub(super) fn commit(&mut self) -> Result<(), OutboxError> {
        let staged = std::mem::take(&mut self.staged);
        let (Some(first), Some(last)) = (staged.entries.first(), staged.entries.last()) else {
            return Ok(());
        };
        let last = last.position;
        let newest = staged.entries.iter().map(|entry| entry.accepted_at).max();
        let (file, start) = loop {
            match self.write(first.position, &staged.bytes) {
                Ok(written) => break written,
                // Delivered events are the first to go.
                Err(OutboxError::Full { .. }) if self.forget_oldest() => {}
                Err(error) => return Err(error),
            }
        };
        let Some(segment) = self.segments.back_mut() else {
            return Err(OutboxError::Closed);
        };
        segment.length += staged.bytes.len() as u64;
        segment.last = last;
        segment.records += staged.entries.len();
        segment.newest = segment.newest.max(newest);
        let segment = segment.first;
        self.file = Some(file);
        for mut entry in staged.entries {
            entry.segment = segment;
            entry.offset += start;
            self.ids.insert(Arc::clone(&entry.id), entry.position);
            self.waiting.push_back(entry);
        }
        Ok(())
    }

    /// Writes a group whose first record has position `first` to the end of the last segment.
    /// Returns the file and the offset.
    fn write(&mut self, first: u64, bytes: &[u8]) -> Result<(File, u64), OutboxError> {
        let file = self.writable(first);
        let file = file.map_err(|source| OutboxError::disk("open a file", source))?;
        let Some(segment) = self.segments.back_mut() else {
            return Err(OutboxError::Closed);
        };
        let start = segment.length;
        let written = disk::write(&file, bytes, start);
        let durable =
            written.and_then(|()| disk::sync(&file).inspect_err(|_| segment.sealed = true));
        if let Err(source) = durable {
            // A partial write is cut off. If that fails too, nothing more is written into this
            // file.
            if file
                .set_len(start)
                .and_then(|()| disk::sync(&file))
                .is_err()
            {
                segment.sealed = true;
            }
            return Err(OutboxError::disk("write", source));
        }
        Ok((file, start))
    }

    /// Returns the file to append to, which belongs to the last segment. `next` is the position
    /// of the next record.
    fn writable(&mut self, next: u64) -> io::Result<File> {
        let file = self.file.take();
        if let Some(last) = self.segments.back_mut()
            && !last.sealed
            && last.length < self.limits.segment_bytes()
        {
            return file.map_or_else(|| last.reopen(), Ok);
        }
        let (segment, file) = Segment::create(&self.directory, next)?;
        self.segments.push_back(segment);
        // Removes a segment that was sealed while empty.
        self.remove_delivered();
        Ok(file)
    }

    /// Returns the oldest records behind position `after`: at least one if there is any, at
    /// most `events`, and none beyond a total of `bytes`.
    pub(super) fn read(
        &mut self,
        after: u64,
        events: usize,
        bytes: u64,
    ) -> Result<Vec<WaitingEvent>, OutboxError> {
        let mut found = Vec::new();
        let mut size = 0;
        let mut index = self
            .waiting
            .partition_point(|entry| entry.position <= after);
        while found.len() < events
            && let Some(entry) = self.waiting.get(index)
        {
            if !found.is_empty() && size + u64::from(entry.length) > bytes {
                break;
            }
            let record = read_record(&mut self.reading, &self.segments, entry);
            match record.map_err(|source| OutboxError::disk("read", source))? {
                Some(event) => {
                    size += u64::from(entry.length);
                    found.push(WaitingEvent {
                        position: entry.position,
                        event,
                    });
                    index += 1;
                }
                None => self.lost(index),
            }
        }
        Ok(found)
    }

    /// Drops a record that was damaged after it was written.
    fn lost(&mut self, index: usize) {
        if let Some(entry) = self.waiting.remove(index) {
            tracing::error!(
                event = %entry.id,
                at = entry.offset,
                file = entry.segment,
                "an event in the outbox was damaged after it was written: it is lost"
            );
            self.ids.remove(&entry.id);
            self.damaged += u64::from(entry.length);
        }
    }

    /// Records that everything up to `position` is delivered, and makes room.
    pub(super) fn delivered(&mut self, position: u64) {
        let position = position.min(self.next - 1);
        if position <= self.cursor.position() {
            return;
        }
        while self
            .waiting
            .front()
            .is_some_and(|entry| entry.position <= position)
        {
            self.pop_waiting();
        }
        let noted = self.cursor.advance(position);
        if let Err(error) = &noted
            && !self.failing
        {
            // No event is lost: they are delivered again after a restart.
            tracing::warn!(err = %error, "the position of the delivered events cannot be recorded; they may be delivered again");
        }
        self.failing = noted.is_err();
        self.remove_delivered();
    }

    /// Keeps events that the receiver refuses in a file for a person to read.
    pub(super) fn put_aside(&mut self, events: &[(NewEvent, String)]) -> Result<(), OutboxError> {
        let kept = refused::append(&self.directory, events);
        self.aside = refused::count(&self.directory);
        if let Err(error) = kept {
            if !self.aside_failing {
                tracing::error!(
                    err = %error,
                    directory = %self.directory.display(),
                    "refused events cannot be put aside: they stay in the outbox"
                );
            }
            self.aside_failing = true;
            return Err(OutboxError::disk("put events aside", error));
        }
        self.aside_failing = false;
        if let Some((first, reason)) = events.first() {
            tracing::error!(
                count = events.len(),
                event = first.event.id,
                node = first.event.node_name,
                check = first.event.check_name,
                reason,
                file = %self.directory.join(refused::FILE).display(),
                "the receiver refused events, which are put aside; this line names the first"
            );
        }
        Ok(())
    }

    fn pop_waiting(&mut self) {
        if let Some(entry) = self.waiting.pop_front()
            // After damage, an id may occur twice.
            && self.ids.get(&entry.id) == Some(&entry.position)
        {
            self.ids.remove(&entry.id);
        }
    }

    /// Returns the position of the newest record.
    pub(super) fn newest(&self) -> u64 {
        let waiting = self.waiting.back().map(|entry| entry.position);
        waiting.unwrap_or_else(|| self.cursor.sent())
    }

    /// Returns the current status.
    pub(super) fn status(&self) -> OutboxStatus {
        OutboxStatus {
            newest: self.newest(),
            events: self.waiting.len(),
            bytes: self.bytes(),
            oldest: self.waiting.front().map(|entry| entry.accepted_at),
            damaged: self.damaged,
            aside: self.aside,
            kept: {
                let records: usize = self.segments.iter().map(|one| one.records).sum();
                records.saturating_sub(self.waiting.len())
            },
        }
    }

    fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.length).sum()
    }
}

// === impl WaitingRecord ===

impl WaitingRecord {
    fn new(segment: &Segment, place: RecordPlace, event: NewEvent) -> Self {
        Self {
            position: place.position,
            segment: segment.first,
            offset: place.offset,
            length: place.length,
            accepted_at: event.received_at,
            authority: Authority::of(&event.event),
            id: event.event.id.into(),
        }
    }
}

/// Reads a record from its file, which stays open for the next read. Returns `None` if the
/// record is gone or damaged.
fn read_record(
    reading: &mut Option<(u64, File)>,
    segments: &VecDeque<Segment>,
    entry: &WaitingRecord,
) -> io::Result<Option<NewEvent>> {
    if reading
        .as_ref()
        .is_none_or(|(first, _)| *first != entry.segment)
    {
        let segment = segments.iter().find(|one| one.first == entry.segment);
        let Some(segment) = segment else {
            return Ok(None);
        };
        match File::open(&segment.path) {
            Ok(file) => *reading = Some((entry.segment, file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    let Some((_, file)) = reading else {
        return Ok(None);
    };
    let mut bytes = vec![0; entry.length as usize];
    if let Err(error) = file.read_exact_at(&mut bytes, entry.offset) {
        tracing::debug!(err = %error, "a record of the outbox cannot be read");
        return Ok(None);
    }
    let whole = record::whole(&bytes, entry.position - 1);
    Ok(whole
        .filter(|(position, _)| *position == entry.position)
        .and_then(|_| record::decode(&bytes)))
}

#[cfg(test)]
mod tests;
