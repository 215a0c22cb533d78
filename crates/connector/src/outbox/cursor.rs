//! Cursor of the outbox: the position that is delivered, and the store that has the events. A
//! file of some bytes that is written in place: it needs no room on a full disk, and lies in
//! one sector.
//!
//! ```text
//! position  u64    all events up to here are delivered to the store below
//! checksum  u32
//! sent      u64    all events up to here were delivered to some store
//! length    u8     of the store's id; 0: no store is known
//! store     [u8; 64]
//! checksum  u32
//! ```
//!
//! Numbers are little-endian. The two parts are written one after the other, the position
//! first: if a write is cut short, the position is valid for the recorded store, or before its
//! position. Losing either part delivers the events in the segments again, which the receiver
//! recognises.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::disk;
use crate::addressee::MAX_STORE_BYTES;

/// Size of the first part (bytes).
const POSITION: usize = 12;
/// Size of the second part (bytes).
const NOTE: usize = 8 + 1 + MAX_STORE_BYTES + 4;

/// Cursor file and its contents.
#[derive(Debug)]
pub(super) struct Cursor {
    path: PathBuf,
    position: u64,
    note: Note,
    /// True if the note on disk is older than `note`, or missing.
    is_note_stale: bool,
}

/// Second part of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Note {
    sent: u64,
    store: Option<String>,
}

// === impl Cursor ===

impl Cursor {
    /// Opens the file at `path`. Also returns true if its contents are damaged.
    pub(super) fn open(path: PathBuf) -> io::Result<(Self, bool)> {
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| {
            let most = (POSITION + NOTE) as u64;
            file.take(most).read_to_end(&mut bytes)
        });
        let (position, is_damaged) = match read {
            Ok(_) => decode(&bytes).map_or((0, true), |position| (position, false)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => (0, false),
            Err(error) => return Err(error),
        };
        let note = bytes.get(POSITION..).and_then(Note::decode);
        let mut cursor = Self {
            path,
            position,
            // Missing in a file of an older program, or damaged: then no store is known.
            is_note_stale: note.is_none(),
            note: note.unwrap_or_default(),
        };
        if is_damaged || cursor.is_note_stale {
            // Allocates the file now, before the disk is full.
            cursor.advance(position)?;
        }
        Ok((cursor, is_damaged))
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Returns the last position that was delivered to any store.
    pub(super) fn sent(&self) -> u64 {
        self.note.sent.max(self.position)
    }

    /// Returns the store that has all events up to the position.
    pub(super) fn store(&self) -> Option<&str> {
        self.note.store.as_deref()
    }

    /// Moves the position forward, durably. On failure it moves in memory only.
    pub(super) fn advance(&mut self, position: u64) -> io::Result<()> {
        self.position = position;
        let mut bytes = [0; POSITION];
        bytes[..8].copy_from_slice(&position.to_le_bytes());
        bytes[8..].copy_from_slice(&crc32fast::hash(&position.to_le_bytes()).to_le_bytes());
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.path)?;
        disk::write(&file, &bytes, 0)?;
        disk::sync(&file)?;
        if self.is_note_stale {
            // Written after the position: a position recorded for another store may be too far
            // ahead.
            disk::write(&file, &self.note.encode(), POSITION as u64)?;
            disk::sync(&file)?;
            self.is_note_stale = false;
        }
        Ok(())
    }

    /// Moves back to `position`, for `store`, durably. On failure it moves in memory only;
    /// after a restart, the file still names the old store, and the cursor moves back again.
    pub(super) fn go_back(&mut self, position: u64, store: String) -> io::Result<()> {
        self.note = Note {
            sent: self.sent(),
            store: Some(store),
        };
        self.is_note_stale = true;
        self.advance(position)
    }
}

fn decode(bytes: &[u8]) -> Option<u64> {
    let (position, checksum) = bytes.get(..POSITION)?.split_first_chunk::<8>()?;
    (crc32fast::hash(position).to_le_bytes() == checksum).then(|| u64::from_le_bytes(*position))
}

// === impl Note ===

impl Note {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.sent.to_le_bytes().to_vec();
        let store = self.store.as_deref().unwrap_or_default().as_bytes();
        // Longer ids are not accepted (`addressee.rs`).
        let store = store.get(..MAX_STORE_BYTES).unwrap_or(store);
        bytes.push(u8::try_from(store.len()).unwrap_or_default());
        bytes.extend_from_slice(store);
        bytes.resize(NOTE - 4, 0);
        let checksum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (content, checksum) = bytes.get(..NOTE)?.split_last_chunk::<4>()?;
        if crc32fast::hash(content).to_le_bytes() != *checksum {
            return None;
        }
        let (sent, rest) = content.split_first_chunk::<8>()?;
        let (length, store) = rest.split_first()?;
        let store = std::str::from_utf8(store.get(..usize::from(*length))?).ok()?;
        Some(Self {
            sent: u64::from_le_bytes(*sent),
            store: (!store.is_empty()).then(|| store.to_owned()),
        })
    }
}
