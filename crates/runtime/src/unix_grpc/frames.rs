//! Parser of an HTTP/2 client's byte stream, which passes the octets of header blocks through
//! [`Fields`]. No octet is added, removed or delayed.
//!
//! Only the preface is checked: frames that are malformed, too large or out of order are left
//! to `h2`, which receives the same frames. Does no I/O.

#[cfg(test)]
mod tests;

use super::hpack::Fields;

/// Octets at the start of every HTTP/2 connection (RFC 9113, 3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const HEAD_LENGTH: usize = 9;

const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;

const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Octets of the stream dependency and the weight in a HEADERS frame.
const PRIORITY_LENGTH: usize = 5;

/// Connection that does not start with the HTTP/2 preface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an HTTP/2 client: the connection preface is missing")]
pub(super) struct NoPreface;

/// Filter state of one connection.
#[derive(Default)]
pub(super) struct Repair {
    /// Octets of the preface received so far.
    preface: usize,
    /// Head of the current frame.
    head: [u8; HEAD_LENGTH],
    /// Octets of `head` received so far.
    filled: usize,
    /// Frame whose payload is being received.
    frame: Option<Frame>,
    fields: Fields,
    called: bool,
}

/// Rest of a frame.
#[derive(Clone, Copy)]
struct Frame {
    /// Remaining octets of the payload.
    left: usize,
    /// True if the frame holds a part of a header block.
    has_fields: bool,
    /// True if that part is the last one.
    ends_block: bool,
    /// True if the next octet is the length of the padding.
    has_pad_length: bool,
    /// Octets before the part of the header block.
    before: usize,
    /// Octets of padding behind it.
    padding: usize,
}

// === impl Repair ===

impl Repair {
    /// Filters the next octets of the client in place.
    pub(super) fn pass(&mut self, mut octets: &mut [u8]) -> Result<(), NoPreface> {
        while let Some(octet) = octets.first_mut() {
            let mut passed = 1;
            if let Some(expected) = PREFACE.get(self.preface) {
                if octet != expected {
                    return Err(NoPreface);
                }
                self.preface += 1;
            } else if let Some(frame) = &mut self.frame {
                if frame.has_fields {
                    frame.pass(octet, &mut self.fields);
                } else {
                    passed = frame.left.min(octets.len());
                }
                frame.left -= passed;
            } else if let Some(place) = self.head.get_mut(self.filled) {
                *place = *octet;
                self.filled += 1;
                if self.filled == HEAD_LENGTH {
                    self.frame = Some(Frame::new(self.head));
                    self.filled = 0;
                }
            }
            if let Some(frame) = self.frame.take_if(|frame| frame.left == 0)
                && frame.ends_block
            {
                self.fields = Fields::default();
                self.called = true;
            }
            let _ = octets.split_off_mut(..passed);
        }
        Ok(())
    }

    /// Returns true if the client has begun a call: a complete header block was received.
    pub(super) fn has_seen_a_call(&self) -> bool {
        self.called
    }
}

// === impl Frame ===

impl Frame {
    fn new(head: [u8; HEAD_LENGTH]) -> Self {
        let [l2, l1, l0, kind, flags, ..] = head;
        let begins_block = kind == HEADERS;
        let has_fields = begins_block || kind == CONTINUATION;
        Self {
            left: usize::from(l2) << 16 | usize::from(l1) << 8 | usize::from(l0),
            has_fields,
            ends_block: has_fields && flags & END_HEADERS != 0,
            has_pad_length: begins_block && flags & PADDED != 0,
            before: if begins_block && flags & PRIORITY != 0 {
                PRIORITY_LENGTH
            } else {
                0
            },
            padding: 0,
        }
    }

    /// Processes the next octet of a frame that has fields.
    fn pass(&mut self, octet: &mut u8, fields: &mut Fields) {
        if self.has_pad_length {
            self.padding = usize::from(*octet);
            self.has_pad_length = false;
        } else if self.before > 0 {
            self.before -= 1;
        } else if self.left > self.padding {
            *octet = fields.repaired(*octet);
        }
    }
}
