//! Up to which position everything is delivered, and to which store: in a file of some
//! bytes that is written in place. It needs no room on a full disk, and lies in one sector.
//!
//! ```text
//! position  u64    all up to here is delivered to the store below
//! checksum  u32
//! sent      u64    all up to here was delivered to some store
//! length    u8     of the store's id; 0: none is known
//! store     [u8; 64]
//! checksum  u32
//! ```
//!
//! Numbers are little-endian. The two parts are written one after the other, the position
//! first: whatever is cut short, the position is that of the store that stands there, or
//! lies before it. Losing either delivers again what the segments hold, which the receiver
//! recognises.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::disk;
use crate::addressee::MAX_STORE_BYTES;

/// Bytes of the first part.
const POSITION: usize = 12;
/// Bytes of the second part.
const NOTE: usize = 8 + 1 + MAX_STORE_BYTES + 4;

/// The file, and what stands in it.
#[derive(Debug)]
pub(super) struct Cursor {
    path: PathBuf,
    position: u64,
    note: Note,
    /// True if the note on disk is older than `note`, or missing.
    unsaid: bool,
}

/// The second part of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Note {
    sent: u64,
    store: Option<String>,
}

// === impl Cursor ===

impl Cursor {
    /// Opens the file at `path`, and returns whether what stood there is damaged.
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
            // Of an older program, or damaged: then no store is known.
            unsaid: note.is_none(),
            note: note.unwrap_or_default(),
        };
        if is_damaged || cursor.unsaid {
            // Takes its room on disk now, not when the disk is full.
            cursor.advance(position)?;
        }
        Ok((cursor, is_damaged))
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Returns the position up to which everything was delivered to some store.
    pub(super) fn sent(&self) -> u64 {
        self.note.sent.max(self.position)
    }

    /// Returns the store to which everything up to the position is delivered.
    pub(super) fn store(&self) -> Option<&str> {
        self.note.store.as_deref()
    }

    /// Moves on, durably. Where that fails it stands further on in memory only.
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
        if self.unsaid {
            // Only behind the position: that of another store may lie too far on for it.
            disk::write(&file, &self.note.encode(), POSITION as u64)?;
            disk::sync(&file)?;
            self.unsaid = false;
        }
        Ok(())
    }

    /// Goes back to `position`, for `store`, durably. Where that fails it stands there in
    /// memory only, and another program that finds the file goes back once more.
    pub(super) fn go_back(&mut self, position: u64, store: String) -> io::Result<()> {
        self.note = Note {
            sent: self.sent(),
            store: Some(store),
        };
        self.unsaid = true;
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
        // Longer ones are not taken (`addressee.rs`).
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
