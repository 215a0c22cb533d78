//! Up to which position everything is delivered, in a file of twelve bytes that is
//! written in place: it needs no room on a full disk, and lies in one sector.
//!
//! Losing it delivers again what the segments hold, which the receiver recognises.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

#[derive(Debug)]
pub(super) struct Cursor {
    path: PathBuf,
    position: u64,
}

/// What stands in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing: it is new.
    New,
    /// A position.
    Good,
    /// Something else.
    Damaged,
}

// === impl Cursor ===

impl Cursor {
    pub(super) fn open(path: PathBuf) -> io::Result<(Self, Found)> {
        let mut bytes = [0; 12];
        let (position, found) = match File::open(&path) {
            Ok(file) => match (file.read_exact_at(&mut bytes, 0), decode(bytes)) {
                (Ok(()), Some(position)) => (position, Found::Good),
                (Ok(()), None) => (0, Found::Damaged),
                (Err(error), _) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    (0, Found::Damaged)
                }
                (Err(error), _) => return Err(error),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => (0, Found::New),
            Err(error) => return Err(error),
        };
        let mut cursor = Self { path, position };
        if found != Found::Good {
            // Takes its room on disk now, not when the disk is full.
            cursor.advance(position)?;
        }
        Ok((cursor, found))
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Moves on, durably. Where that fails it stands further on in memory only.
    pub(super) fn advance(&mut self, position: u64) -> io::Result<()> {
        self.position = position;
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&position.to_le_bytes());
        bytes[8..].copy_from_slice(&crc32fast::hash(&position.to_le_bytes()).to_le_bytes());
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.path)?;
        file.write_all_at(&bytes, 0)?;
        file.sync_data()
    }
}

fn decode(bytes: [u8; 12]) -> Option<u64> {
    let (position, checksum) = bytes.split_first_chunk::<8>()?;
    (crc32fast::hash(position).to_le_bytes() == checksum).then(|| u64::from_le_bytes(*position))
}
