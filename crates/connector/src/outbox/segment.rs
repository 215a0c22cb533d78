//! Segment: a file of records, named by the first position that it may hold. Segments are only
//! appended to, and removed as a whole once all their events are delivered.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::disk;
use super::record::{self, RecordPlace};

/// Version of the format that is written.
pub(super) const VERSION: u8 = 1;
/// First bytes of a file; the last byte is the version.
const MAGIC: [u8; 8] = [b'G', b'P', b'W', b'O', b'U', b'T', b'B', VERSION];
/// Length of a file's head: magic and checksum (bytes).
pub(super) const HEAD: usize = 12;
const EXTENSION: &str = "events";

/// Segment of the log, a file on disk.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    /// Position in the file's name: every record has this position or a later one.
    pub(super) first: u64,
    /// Position of the last record; one before `first` if there is none.
    pub(super) last: u64,
    /// End of the last whole record (offset).
    pub(super) length: u64,
    /// Number of whole records.
    pub(super) records: usize,
    /// Latest acceptance of an event in the file; events need not be in that order.
    pub(super) newest: Option<Timestamp>,
    /// True if nothing more may be written, since the end of the file on disk is unknown.
    pub(super) sealed: bool,
}

/// Contents of a segment that was read.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) records: Vec<RecordPlace>,
    /// Ranges before the last record that belong to no record.
    pub(super) damaged: Vec<Range<usize>>,
    /// Number of bytes behind the last record.
    pub(super) torn: usize,
    /// Format version, if a newer program wrote the file.
    pub(super) newer: Option<u8>,
}

// === impl Segment ===

impl Segment {
    /// Creates an empty segment, and makes its directory entry durable.
    ///
    /// An existing file with this name can only be left over from a failed attempt.
    pub(super) fn create(directory: &Path, first: u64) -> io::Result<(Self, File)> {
        let path = directory.join(format!("{first:020}.{EXTENSION}"));
        let made = || {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&path)?;
            // The sync of the first records makes the head durable, too.
            disk::write(&file, &head(), 0)?;
            disk::sync_directory(directory)?;
            Ok(file)
        };
        match made() {
            Ok(file) => {
                let (last, length) = (first.saturating_sub(1), HEAD as u64);
                let segment = Self {
                    path,
                    first,
                    last,
                    length,
                    records: 0,
                    newest: None,
                    sealed: false,
                };
                Ok((segment, file))
            }
            Err(error) => {
                // On a full disk even the empty file would be in the way.
                let _ = fs::remove_file(&path);
                Err(error)
            }
        }
    }

    /// Returns the segments of a directory, oldest first, according to their names.
    pub(super) fn list(directory: &Path) -> io::Result<Vec<Self>> {
        let mut segments = Vec::new();
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_none_or(|end| end != EXTENSION) {
                continue;
            }
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            if let Some(first) = stem.and_then(|stem| stem.parse::<u64>().ok()) {
                segments.push(Self {
                    path,
                    first,
                    last: first.saturating_sub(1),
                    length: 0,
                    records: 0,
                    newest: None,
                    sealed: false,
                });
            }
        }
        segments.sort_unstable_by_key(|segment| segment.first);
        Ok(segments)
    }

    /// Reads the whole file, and updates `self` with the extent of its whole records.
    pub(super) fn read(&mut self) -> io::Result<(Vec<u8>, Contents)> {
        let mut bytes = Vec::new();
        File::open(&self.path)?.read_to_end(&mut bytes)?;
        let contents = scan(&bytes, self.first.saturating_sub(1));
        let end = contents.records.last();
        self.records = contents.records.len();
        let accepted = |place: &RecordPlace| record::accepted_at(place.of(&bytes)?);
        self.newest = contents.records.iter().filter_map(accepted).max();
        self.last = end.map_or(self.last, |place| place.position);
        self.length = end.map_or((HEAD.min(bytes.len())) as u64, |place| {
            place.offset + u64::from(place.length)
        });
        Ok((bytes, contents))
    }

    /// Opens the file to append behind its last whole record. The rest is cut off, durably with
    /// the next record.
    pub(super) fn reopen(&mut self) -> io::Result<File> {
        let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
        if self.length < HEAD as u64 {
            disk::write(&file, &head(), 0)?;
            self.length = HEAD as u64;
        }
        if file.metadata()?.len() != self.length {
            file.set_len(self.length)?;
        }
        Ok(file)
    }
}

fn head() -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&MAGIC);
    head[8..].copy_from_slice(&crc32fast::hash(&MAGIC).to_le_bytes());
    head
}

/// Finds the whole records. After damage, searches for the next record byte by byte: since a
/// record carries its own position and checksum, no other bytes are mistaken for one.
fn scan(bytes: &[u8], mut after: u64) -> Contents {
    let mut contents = Contents::default();
    let mut offset = 0;
    if let Some((magic, checksum)) = bytes.get(..HEAD).and_then(<[u8]>::split_last_chunk::<4>) {
        let whole = crc32fast::hash(magic).to_le_bytes() == *checksum;
        if whole && *magic == MAGIC {
            offset = HEAD;
        } else if whole && magic.get(..7) == MAGIC.get(..7) {
            contents.newer = magic.last().copied();
            return contents;
        }
    }
    let mut good = offset;
    while let Some(rest) = bytes.get(offset..).filter(|rest| !rest.is_empty()) {
        let Some((position, length)) = record::whole(rest, after) else {
            offset += 1;
            continue;
        };
        if good < offset {
            contents.damaged.push(good..offset);
        }
        contents.records.push(RecordPlace {
            position,
            offset: offset as u64,
            length,
        });
        after = position;
        offset += length as usize;
        good = offset;
    }
    contents.torn = bytes.len() - good;
    contents
}
