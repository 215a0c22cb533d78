//! Encoding of an event as a record in a segment.
//!
//! ```text
//! length    u32  of the whole record
//! checksum  u32  CRC-32 of all that follows, and of the length
//! position  u64
//! accepted  i64  microseconds since 1970
//! event     protobuf HealthEvent
//! ```
//!
//! Numbers are little-endian. A record contains its own position and checksum, so reading can
//! continue behind damage.

use contract::HealthEvent;
use jiff::Timestamp;
use prost::Message as _;
use store::NewEvent;

/// Length of the fields before the event (bytes).
const HEAD: usize = 24;
/// Largest record that is read (bytes). The limits of `model::event` keep events below 2 MiB.
const MAX_RECORD: usize = 4 * 1024 * 1024;
/// Largest gap between positions, which failed writes and damage may cause; a record that
/// claims to be further ahead is invalid.
const MAX_SKIP: u64 = 1 << 32;

/// Place of a whole record in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordPlace {
    pub(super) position: u64,
    /// Offset of the first byte.
    pub(super) offset: u64,
    /// Length of the record (bytes).
    pub(super) length: u32,
}

// === impl RecordPlace ===

impl RecordPlace {
    /// Returns the record from the bytes of its segment.
    pub(super) fn of(self, bytes: &[u8]) -> Option<&[u8]> {
        let start = usize::try_from(self.offset).ok()?;
        bytes.get(start..start.checked_add(self.length as usize)?)
    }
}

/// Appends `event` to `buffer`, and returns the length of the record.
pub(super) fn encode(buffer: &mut Vec<u8>, position: u64, event: &NewEvent) -> u32 {
    let start = buffer.len();
    buffer.extend_from_slice(&[0; 8]);
    buffer.extend_from_slice(&position.to_le_bytes());
    buffer.extend_from_slice(&event.received_at.as_microsecond().to_le_bytes());
    // A Vec has room for any length.
    let _ = event.event.encode(buffer);
    let length = u32::try_from(buffer.len() - start).unwrap_or(u32::MAX);
    let checksum = checksum(length, buffer.get(start + 8..).unwrap_or_default());
    if let Some(head) = buffer.get_mut(start..start + 8) {
        head[..4].copy_from_slice(&length.to_le_bytes());
        head[4..].copy_from_slice(&checksum.to_le_bytes());
    }
    length
}

/// Returns position and length of the record at the start of `bytes`, if it is whole and its
/// position is behind `after`.
pub(super) fn whole(bytes: &[u8], after: u64) -> Option<(u64, u32)> {
    let length = u32::from_le_bytes(array(bytes, 0)?);
    let size = usize::try_from(length).ok()?;
    if !(HEAD..=MAX_RECORD).contains(&size) {
        return None;
    }
    let position = u64::from_le_bytes(array(bytes, 8)?);
    if position <= after || position - after > MAX_SKIP {
        return None;
    }
    let expected = u32::from_le_bytes(array(bytes, 4)?);
    (checksum(length, bytes.get(8..size)?) == expected).then_some((position, length))
}

/// Returns the event of a whole record.
pub(super) fn decode(record: &[u8]) -> Option<NewEvent> {
    Some(NewEvent {
        event: HealthEvent::decode(record.get(HEAD..)?).ok()?,
        received_at: accepted_at(record)?,
    })
}

/// Returns the time when the event of a whole record was accepted.
pub(super) fn accepted_at(record: &[u8]) -> Option<Timestamp> {
    let accepted = i64::from_le_bytes(array(record, 16)?);
    Timestamp::from_microsecond(accepted).ok()
}

fn checksum(length: u32, rest: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length.to_le_bytes());
    hasher.update(rest);
    hasher.finalize()
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}
