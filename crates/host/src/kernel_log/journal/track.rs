//! One file of the journal that is followed: the entries in it that are wanted, in order.

use super::fields::{Fields, WANTED};
use super::file::{Entries, FileError, Head, JournalFile};
use crate::kernel_log::Cursor;

/// The field values that are looked up: those of the kernel's entries, and of NVSentinel's reset
/// job.
const KERNEL: &[u8] = b"_TRANSPORT=kernel";
const RESET_JOB: &[u8] = b"SYSLOG_IDENTIFIER=nvsentinel-gpu-reset";

/// A file that is being read.
#[derive(Debug)]
pub(super) struct Track {
    pub(super) file: JournalFile,
    entries: [Entries; 2],
    /// The next entry of each, as far as looked for.
    next: [Option<Head>; 2],
    /// Number of the entry that was taken last.
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
                // What is wrong with the file is found again when it is read.
                drop(entries.skip(&mut track.file, position.seqnum));
            }
        }
        track
    }

    /// Returns the next entry, which stays the next one until it is taken.
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

    /// Returns true if the file goes back to the position, so that nothing is missing behind it.
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

/// Tries a second time with a fresh look at the file: what was written in between looks like
/// damage where the parts of a look are of different ages.
fn with_fresh_look<T>(
    file: &mut JournalFile,
    mut read: impl FnMut(&mut JournalFile) -> Result<T, FileError>,
) -> Result<T, FileError> {
    read(file).or_else(|_| {
        file.refresh();
        read(file)
    })
}
