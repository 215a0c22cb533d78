//! Follows the byte stream of an HTTP/2 client to the header blocks in it, whose octets go
//! through [`Fields`]. No octet is added, taken away or held back.
//!
//! Nothing is checked here but the preface: what is malformed, too large or out of turn is
//! left to `h2`, which sees the same frames. Does no I/O.

#[cfg(test)]
mod tests;

use super::hpack::Fields;

/// The octets that every HTTP/2 connection starts with (RFC 9113, 3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const HEAD_LENGTH: usize = 9;

const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;

const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Octets of the stream dependency and the weight in a HEADERS frame.
const PRIORITY_LENGTH: usize = 5;

/// A connection that does not begin as HTTP/2 does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an HTTP/2 client: the connection preface is missing")]
pub(super) struct NoPreface;

/// The repair of one connection.
#[derive(Default)]
pub(super) struct Repair {
    /// Octets of the preface that have come.
    preface: usize,
    /// The head of the frame that comes.
    head: [u8; HEAD_LENGTH],
    /// Octets of `head` that have come.
    filled: usize,
    /// The frame whose payload comes.
    frame: Option<Frame>,
    fields: Fields,
    called: bool,
}

/// The part of a frame that is to come.
#[derive(Clone, Copy)]
struct Frame {
    /// Octets of its payload.
    left: usize,
    /// True if the frame holds a part of a header block.
    has_fields: bool,
    /// True if that part is the last.
    ends_block: bool,
    /// True if the next octet is the length of the padding.
    tells_padding: bool,
    /// Octets before its part of the block.
    before: usize,
    /// Octets of padding behind it.
    padding: usize,
}

// === impl Repair ===

impl Repair {
    /// Repairs the next octets of the client in place.
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

    /// Returns whether the client has begun a call: a header block has come whole.
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
            tells_padding: begins_block && flags & PADDED != 0,
            before: if begins_block && flags & PRIORITY != 0 {
                PRIORITY_LENGTH
            } else {
                0
            },
            padding: 0,
        }
    }

    /// Takes the next octet of a frame that has fields.
    fn pass(&mut self, octet: &mut u8, fields: &mut Fields) {
        if self.tells_padding {
            self.padding = usize::from(*octet);
            self.tells_padding = false;
        } else if self.before > 0 {
            self.before -= 1;
        } else if self.left > self.padding {
            *octet = fields.repaired(*octet);
        }
    }
}
