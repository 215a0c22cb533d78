//! Reads one file of the systemd journal, with only the features that the kernel log needs.
//!
//! The format is documented by systemd (`JOURNAL_FILE_FORMAT`): a header, then objects that
//! refer to each other by offset. A data object holds one `FIELD=value` and, through a chain of
//! arrays, the offsets of all entries that have it, in the order of writing. So the kernel's
//! entries are found without reading the others, and a growing file is followed by checking for
//! one more offset.
//!
//! `sdjournal`, the pure-Rust reader, orders entries by the wall clock, so it misses entries
//! that follow a clock that was set back, and it opens all files for each check. libsystemd
//! would have to be linked, and an old one cannot read newer files.
//!
//! The file is read, not mapped: journald truncates files, and access to a truncated mapping
//! kills the process. Every offset and size is checked; an inconsistent file gives an error,
//! never a panic or a loop.

use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use super::hash;
use crate::{
    boot::BootId,
    kernel_log::{LINE_MAX, follow::open_file},
};

/// Longest field that is read, in bytes; a longer message is truncated.
pub(super) const FIELD_MAX: usize = LINE_MAX;
/// Most fields of an entry; journald itself accepts 1,024.
const FIELDS_MAX: u64 = 1024;
/// Most steps in a chain of objects with the same hash; a sound file has a handful.
const CHAIN_MAX: u32 = 100_000;
/// Bytes per read; related objects are close to each other.
const BLOCK: u64 = 16 << 10;
/// Most blocks that are cached per file.
const BLOCKS: usize = 16;

const HEADER: usize = 208;
const SIGNATURE: &[u8] = b"LPKSHHRH";
const XZ: u32 = 1;
const LZ4: u32 = 2;
const KEYED_HASH: u32 = 4;
const ZSTD: u32 = 8;
const COMPACT: u32 = 16;
const STATE_ARCHIVED: u8 = 2;

/// Flags of a data object that name its compression.
const COMPRESSED: u8 = 0b111;

const DATA: u8 = 1;
const ENTRY: u8 = 3;
const ENTRY_ARRAY: u8 = 6;

/// An open journal file.
#[derive(Debug)]
pub(super) struct JournalFile {
    file: File,
    path: PathBuf,
    file_id: [u8; 16],
    seqnum_id: [u8; 16],
    incompatible: u32,
    hash_table: u64,
    buckets: u64,
    /// Cached blocks by number, the newest last. Cleared at each check, since the file changes.
    blocks: Vec<(u64, Vec<u8>)>,
}

/// Identifiers and times of an entry, the same in this file and in a copy of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) offset: u64,
    pub(super) seqnum: u64,
    /// Microseconds since 1970, by the wall clock at the time of writing.
    pub(super) realtime: u64,
    /// Microseconds since the boot.
    pub(super) monotonic: u64,
    pub(super) boot_id: BootId,
    pub(super) xor_hash: u64,
}

/// Iterator over the entries with one field value, in the order of writing.
#[derive(Debug)]
pub(super) struct Entries {
    value: &'static [u8],
    /// Offset of the data object, once the file has one.
    data: Option<u64>,
    /// Number of entries returned so far.
    taken: u64,
    /// Array that holds the next entry, and its index there.
    array: Option<(u64, u64)>,
}

/// Error in a journal file.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error("it cannot be read")]
    Io(#[from] io::Error),
    #[error("at byte {offset}: {what}")]
    Corrupt { offset: u64, what: &'static str },
    #[error("it uses unsupported features (flags {0:#x})")]
    Unsupported(u32),
    #[error("a field is compressed with {0}, which is not supported")]
    Compression(&'static str),
}

struct Object {
    kind: u8,
    flags: u8,
    size: u64,
}

// === impl JournalFile ===

impl JournalFile {
    /// Opens a file. Returns `None` if it is too short because it is just being created.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, FileError> {
        let file = open_file(path)?;
        let mut header = [0; HEADER];
        match file.read_exact_at(&mut header, 0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        if !header.starts_with(SIGNATURE) {
            // All zeroes: allocated but not written yet.
            if header.iter().all(|byte| *byte == 0) {
                return Ok(None);
            }
            return Err(corrupt(0, "it does not begin as a journal file does"));
        }
        let incompatible = u32_at(&header, 12);
        if incompatible & !(XZ | LZ4 | KEYED_HASH | ZSTD | COMPACT) != 0 {
            return Err(FileError::Unsupported(incompatible));
        }
        let (hash_table, table_size) = (u64_at(&header, 104), u64_at(&header, 112));
        if hash_table == 0 || table_size < 16 {
            return Ok(None);
        }
        Ok(Some(Self {
            file,
            path: path.to_owned(),
            file_id: id_at(&header, 24),
            seqnum_id: id_at(&header, 72),
            incompatible,
            hash_table,
            buckets: table_size / 16,
            blocks: Vec::new(),
        }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn seqnum_id(&self) -> [u8; 16] {
        self.seqnum_id
    }

    pub(super) fn file_id(&self) -> [u8; 16] {
        self.file_id
    }

    /// Returns true if nothing more will be written to the file. Call it before searching for
    /// the last entry.
    pub(super) fn is_finished(&self) -> bool {
        let mut state = [0];
        let archived = self.file.read_exact_at(&mut state, 16).is_ok() && state == [STATE_ARCHIVED];
        let removed = self.file.metadata().is_ok_and(|meta| meta.nlink() == 0);
        let set_aside = self.path.extension().is_some_and(|end| end == "journal~");
        archived || removed || set_aside
    }

    /// Clears the cache, because the file may have changed.
    pub(super) fn refresh(&mut self) {
        self.blocks.clear();
    }

    pub(super) fn head(&mut self, offset: u64) -> Result<Head, FileError> {
        let mut bytes = [0; 64];
        self.object_head(offset, ENTRY, 64)?;
        self.read(offset, &mut bytes)?;
        Ok(Head {
            offset,
            seqnum: u64_at(&bytes, 16),
            realtime: u64_at(&bytes, 24),
            monotonic: u64_at(&bytes, 32),
            boot_id: BootId::from_bytes(id_at(&bytes, 40)),
            xor_hash: u64_at(&bytes, 56),
        })
    }

    /// Passes the value of each wanted field of an entry to `found`, with the index of its name
    /// in `wanted`, and true if the value was truncated.
    pub(super) fn fields(
        &mut self,
        entry: u64,
        wanted: &[&[u8]],
        mut found: impl FnMut(usize, Vec<u8>, bool),
    ) -> Result<(), FileError> {
        let object = self.object_head(entry, ENTRY, 64)?;
        let compact = self.is_compact();
        let item = if compact { 4 } else { 16 };
        let items = (object.size - 64) / item;
        if items > FIELDS_MAX {
            return Err(corrupt(entry, "the entry has too many fields"));
        }
        let longest = wanted.iter().map(|name| name.len()).max().unwrap_or(0);
        for index in 0..items {
            let at = entry + 64 + index * item;
            let offset = self.offset_at(at, compact)?;
            let object = self.object_head(offset, DATA, self.payload_start())?;
            // Compressed fields are long ones; an uncompressed one is recognised by its first
            // bytes.
            if object.flags & COMPRESSED == 0 {
                let length = object.size - self.payload_start();
                let mut start = vec![0; usize::try_from(length).unwrap_or(0).min(longest + 1)];
                self.read(offset + self.payload_start(), &mut start)?;
                if !wanted.iter().any(|name| is_field(&start, name)) {
                    continue;
                }
            }
            let (payload, cut) = self.payload(offset, &object)?;
            if let Some(index) = wanted.iter().position(|name| is_field(&payload, name)) {
                let name = wanted.get(index).map_or(0, |name| name.len());
                found(
                    index,
                    payload.get(name + 1..).unwrap_or_default().to_vec(),
                    cut,
                );
            }
        }
        Ok(())
    }

    /// Returns the offset of the data object that holds exactly `value`.
    fn find(&mut self, value: &[u8]) -> Result<Option<u64>, FileError> {
        let hash = if self.incompatible & KEYED_HASH == 0 {
            hash::jenkins(value)
        } else {
            hash::keyed(value, &self.file_id)
        };
        let bucket = self.hash_table.saturating_add(hash % self.buckets * 16);
        let mut offset = self.u64(bucket)?;
        let mut steps = 0;
        while offset != 0 {
            steps += 1;
            if steps > CHAIN_MAX {
                return Err(corrupt(offset, "a chain of data objects does not end"));
            }
            let object = self.object_head(offset, DATA, self.payload_start())?;
            if self.u64(offset + 16)? == hash && self.payload(offset, &object)?.0 == value {
                return Ok(Some(offset));
            }
            offset = self.u64(offset + 24)?;
        }
        Ok(None)
    }

    /// Returns the payload of a data object, and true if it was truncated.
    fn payload(&mut self, offset: u64, object: &Object) -> Result<(Vec<u8>, bool), FileError> {
        let length = usize::try_from(object.size - self.payload_start()).unwrap_or(usize::MAX);
        let compressed = object.flags & COMPRESSED;
        // The compressed form is not longer than the limit for the payload, except for its
        // frame.
        let limit = FIELD_MAX + 1024;
        let mut stored = vec![0; length.min(limit)];
        self.read(offset + self.payload_start(), &mut stored)?;
        let mut payload = match compressed {
            0 => stored,
            2 => lz4(offset, &stored)?,
            4 => zstd(offset, &stored)?,
            1 => return Err(FileError::Compression("xz")),
            _ => return Err(corrupt(offset, "unknown compression")),
        };
        let cut = payload.len() > FIELD_MAX || (compressed == 0 && length > FIELD_MAX);
        payload.truncate(FIELD_MAX);
        Ok((payload, cut))
    }

    fn object_head(&mut self, offset: u64, kind: u8, least: u64) -> Result<Object, FileError> {
        let mut bytes = [0; 16];
        self.read(offset, &mut bytes)?;
        let object = Object {
            kind: bytes[0],
            flags: bytes[1],
            size: u64_at(&bytes, 8),
        };
        if !offset.is_multiple_of(8) || object.kind != kind {
            return Err(corrupt(offset, "unexpected kind of object"));
        }
        if object.size < least {
            return Err(corrupt(offset, "the object is too short"));
        }
        Ok(object)
    }

    fn is_compact(&self) -> bool {
        self.incompatible & COMPACT != 0
    }

    /// Returns the offset of the payload within a data object.
    fn payload_start(&self) -> u64 {
        if self.is_compact() { 72 } else { 64 }
    }

    fn offset_at(&mut self, at: u64, compact: bool) -> Result<u64, FileError> {
        if !compact {
            return self.u64(at);
        }
        let mut bytes = [0; 4];
        self.read(at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes).into())
    }

    fn u64(&mut self, at: u64) -> Result<u64, FileError> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), FileError> {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let within = usize::try_from(at % BLOCK).unwrap_or(0);
            let block = self.block(at / BLOCK)?;
            let available = block.get(within..).unwrap_or_default();
            if available.is_empty() {
                return Err(corrupt(offset, "it points beyond the end of the file"));
            }
            let length = available.len().min(rest.len());
            let (now, later) = rest.split_at_mut(length);
            now.copy_from_slice(available.get(..length).unwrap_or_default());
            rest = later;
            at = at
                .checked_add(length as u64)
                .ok_or_else(|| corrupt(offset, "it points beyond the end of the file"))?;
        }
        Ok(())
    }

    fn block(&mut self, number: u64) -> Result<&[u8], FileError> {
        let known = self.blocks.iter().position(|(known, _)| *known == number);
        let block = if let Some(index) = known {
            self.blocks.remove(index)
        } else {
            let mut bytes = Vec::new();
            // An overflow lies beyond the end of the file as well.
            if let Some(start) = number
                .checked_mul(BLOCK)
                .filter(|at| i64::try_from(*at).is_ok())
            {
                bytes = vec![0; usize::try_from(BLOCK).unwrap_or(0)];
                let mut length = 0;
                loop {
                    let space = bytes.get_mut(length..).unwrap_or_default();
                    match self.file.read_at(space, start + length as u64) {
                        Ok(0) => break,
                        Ok(read) => length += read,
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                bytes.truncate(length);
            }
            (number, bytes)
        };
        if self.blocks.len() >= BLOCKS {
            self.blocks.remove(0);
        }
        self.blocks.push(block);
        Ok(self.blocks.last().map_or(&[], |(_, bytes)| bytes))
    }
}

// === impl Entries ===

impl Entries {
    /// Returns the iterator over entries with `value`, a complete `FIELD=value`.
    pub(super) fn of(value: &'static [u8]) -> Self {
        Self {
            value,
            data: None,
            taken: 0,
            array: None,
        }
    }

    /// Returns the offset of the next entry, or `None` at the current end of the file.
    pub(super) fn next(&mut self, file: &mut JournalFile) -> Result<Option<u64>, FileError> {
        let data = match self.data {
            Some(data) => data,
            None => match file.find(self.value)? {
                Some(data) => *self.data.insert(data),
                None => return Ok(None),
            },
        };
        if self.taken >= file.u64(data + 56)? {
            return Ok(None);
        }
        let offset = if self.taken == 0 {
            file.u64(data + 40)?
        } else {
            let Some(offset) = self.next_in_arrays(data, file)? else {
                return Ok(None);
            };
            offset
        };
        if offset == 0 {
            return Ok(None);
        }
        self.taken += 1;
        Ok(Some(offset))
    }

    fn next_in_arrays(
        &mut self,
        data: u64,
        file: &mut JournalFile,
    ) -> Result<Option<u64>, FileError> {
        let (mut array, mut index) = match self.array {
            Some(place) => place,
            None => (file.u64(data + 48)?, 0),
        };
        let mut length = file.array_length(array)?;
        if index >= length {
            // The count includes one more entry, which is not in this array.
            (array, index) = (file.next_array(array)?, 0);
            length = file.array_length(array)?;
        }
        if length == 0 {
            return Ok(None);
        }
        let offset = file.array_item(array, index)?;
        if offset != 0 {
            self.array = Some((array, index + 1));
        }
        Ok((offset != 0).then_some(offset))
    }

    /// Skips the arrays whose last entry is at or before `seqnum`.
    pub(super) fn skip(&mut self, file: &mut JournalFile, seqnum: u64) -> Result<(), FileError> {
        let Some(data) = file.find(self.value)? else {
            return Ok(());
        };
        let total = file.u64(data + 56)?;
        let mut array = file.u64(data + 48)?;
        let mut taken = 1;
        while array != 0 {
            let length = file.array_length(array)?;
            if length == 0 || length > total.saturating_sub(taken) {
                break;
            }
            let last = file.array_item(array, length - 1)?;
            if last == 0 || file.head(last)?.seqnum > seqnum {
                break;
            }
            taken += length;
            self.data = Some(data);
            self.taken = taken;
            self.array = Some((array, length));
            array = file.next_array(array)?;
        }
        Ok(())
    }
}

impl JournalFile {
    /// Returns the capacity of an array, in entries; 0 for no array.
    fn array_length(&mut self, array: u64) -> Result<u64, FileError> {
        if array == 0 {
            return Ok(0);
        }
        let item = if self.is_compact() { 4 } else { 8 };
        let object = self.object_head(array, ENTRY_ARRAY, 24 + item)?;
        Ok((object.size - 24) / item)
    }

    /// Returns the array that continues this one; 0 if there is none.
    fn next_array(&mut self, array: u64) -> Result<u64, FileError> {
        if array == 0 {
            return Ok(0);
        }
        let next = self.u64(array + 16)?;
        if next != 0 && next <= array {
            return Err(corrupt(array, "a chain of arrays runs backwards"));
        }
        Ok(next)
    }

    fn array_item(&mut self, array: u64, index: u64) -> Result<u64, FileError> {
        let compact = self.is_compact();
        let item = if compact { 4 } else { 8 };
        self.offset_at(array.saturating_add(24 + index * item), compact)
    }
}

fn is_field(payload: &[u8], name: &[u8]) -> bool {
    payload
        .strip_prefix(name)
        .is_some_and(|rest| rest.first() == Some(&b'='))
}

fn zstd(offset: u64, stored: &[u8]) -> Result<Vec<u8>, FileError> {
    let bad = |_| corrupt(offset, "a field cannot be decompressed");
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(stored).map_err(bad)?;
    let mut payload = Vec::new();
    let limit = FIELD_MAX as u64 + 1;
    decoder
        .by_ref()
        .take(limit)
        .read_to_end(&mut payload)
        .map_err(|_| corrupt(offset, "a field cannot be decompressed"))?;
    Ok(payload)
}

/// Decompresses one block, which follows its decompressed length.
fn lz4(offset: u64, stored: &[u8]) -> Result<Vec<u8>, FileError> {
    let bad = || corrupt(offset, "a field cannot be decompressed");
    let (length, block) = stored.split_first_chunk().ok_or_else(bad)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if length > 16 * FIELD_MAX {
        return Err(corrupt(offset, "a compressed field is too long"));
    }
    lz4_flex::block::decompress(block, length).map_err(|_| bad())
}

fn corrupt(offset: u64, what: &'static str) -> FileError {
    FileError::Corrupt { offset, what }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk());
    part.copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk());
    part.copied().map_or(0, u64::from_le_bytes)
}

fn id_at(bytes: &[u8], at: usize) -> [u8; 16] {
    let part = bytes.get(at..).and_then(|rest| rest.first_chunk());
    part.copied().unwrap_or_default()
}
