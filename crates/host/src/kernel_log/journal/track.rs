//! Follows one journal file, and returns its wanted entries in order.

use super::fields::{Fields, WANTED};
use super::file::{Entries, FileError, Head, JournalFile};
use crate::kernel_log::Cursor;

/// Field values that are searched for: those of the kernel's entries and of NVSentinel's reset
/// job.
const KERNEL: &[u8] = b"_TRANSPORT=kernel";
const RESET_JOB: &[u8] = b"SYSLOG_IDENTIFIER=nvsentinel-gpu-reset";

/// A file that is being read.
#[derive(Debug)]
pub(super) struct Track {
    pub(super) file: JournalFile,
    entries: [Entries; 2],
    /// Next entry with each field value, if already found.
    next: [Option<Head>; 2],
    /// Sequence number of the entry that was delivered last.
    last: Option<u64>,
}

impl Track {
    pub(super) fn new(file: JournalFile, position: Option<&Cursor>) -> Self {
        let mut track = Self {
            file,
            entries: [Entries::of(KERNEL), Entries::of(RESET_JOB)],
            next: [None, None],
            last: None,
        };
        if let Some(position) = position
            && u128::from_be_bytes(track.file.seqnum_id()) == position.seqnum_id
        {
            for entries in &mut track.entries {
                // The read that follows reports an error of the file.
                drop(entries.skip(&mut track.file, position.seqnum));
            }
        }
        track
    }

    /// Returns the next entry without consuming it.
    pub(super) fn next(&mut self) -> Result<Option<Head>, FileError> {
        for (entries, next) in self.entries.iter_mut().zip(&mut self.next) {
            if next.is_none()
                && let Some(offset) = with_fresh_look(&mut self.file, |file| entries.next(file))?
            {
                *next = Some(with_fresh_look(&mut self.file, |file| file.head(offset))?);
            }
        }
        let next = self.next.iter().flatten().min_by_key(|head| head.seqnum);
        if let (Some(head), Some(last)) = (next, self.last)
            && head.seqnum < last
        {
            return Err(FileError::Corrupt {
                offset: head.offset,
                what: "the numbers of the entries run backwards",
            });
        }
        Ok(next.copied())
    }

    pub(super) fn take(&mut self, head: &Head) {
        self.last = Some(head.seqnum);
        for next in &mut self.next {
            // One entry may be in both lists.
            next.take_if(|next| next.seqnum == head.seqnum);
        }
    }

    pub(super) fn cursor(&self, head: &Head) -> Cursor {
        Cursor {
            seqnum_id: u128::from_be_bytes(self.file.seqnum_id()),
            seqnum: head.seqnum,
            boot_id: head.boot_id,
            monotonic: head.monotonic,
            realtime: head.realtime,
            xor_hash: head.xor_hash,
        }
    }

    /// Returns true if the file starts at or before the position, so that nothing after it is
    /// missing.
    pub(super) fn goes_back_to(&mut self, position: &Cursor) -> bool {
        let mut first = [Entries::of(KERNEL), Entries::of(RESET_JOB)];
        let same_sequence = u128::from_be_bytes(self.file.seqnum_id()) == position.seqnum_id;
        first.iter_mut().any(|entries| {
            let head = entries
                .next(&mut self.file)
                .ok()
                .flatten()
                .and_then(|offset| self.file.head(offset).ok());
            head.is_some_and(|head| {
                if same_sequence {
                    head.seqnum <= position.seqnum
                } else {
                    head.boot_id == position.boot_id && head.monotonic <= position.monotonic
                }
            })
        })
    }

    pub(super) fn fields(&mut self, head: &Head) -> Result<Fields, FileError> {
        with_fresh_look(&mut self.file, |file| {
            let mut fields = Fields::default();
            file.fields(head.offset, &WANTED, |index, value, cut| {
                if let Some(place @ None) = fields.values.get_mut(index) {
                    *place = Some(value);
                    fields.cut |= cut;
                }
            })?;
            Ok(fields)
        })
    }
}

/// Runs `look`, and after a failure once more with an empty cache: blocks that were read at
/// different times are inconsistent if the file was written in between.
fn with_fresh_look<T>(
    file: &mut JournalFile,
    mut read: impl FnMut(&mut JournalFile) -> Result<T, FileError>,
) -> Result<T, FileError> {
    read(file).or_else(|_| {
        file.refresh();
        read(file)
    })
}
