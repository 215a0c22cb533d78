//! Rewrites the byte stream of an HTTP/2 client so that `h2` accepts its requests.
//!
//! Every frame passes unchanged, except HEADERS and the CONTINUATION frames after it.
//! Those are collected, decoded, and written again as literals, an `:authority` that is
//! none replaced by `localhost`. All blocks must be rewritten, not only those with a
//! strange authority: the client's later blocks refer to earlier ones through its dynamic
//! table, and literals are what keeps the server's own table out of it.
//!
//! What cannot be understood here ends the connection. The rest (frame sizes, stream
//! states, the meaning of fields) is left to `h2`, which sees it all. Does no I/O.

#[cfg(test)]
mod tests;

use bytes::{BufMut, BytesMut};

use super::hpack::{self, Field, HpackError};

/// What every HTTP/2 connection starts with (RFC 9113, 3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Octets of a header block as sent, frame heads and padding included.
const MAX_HEADER_BLOCK: usize = 64 * 1024;

/// Octets of a decoded header list by the count of RFC 9113, 6.5.2. Small blocks can stand
/// for long lists. Above tonic's own default limit, so that `h2` is the one to refuse: the
/// call, with 431, or, where a field behind that limit is itself long, the connection, with
/// `GOAWAY` and `COMPRESSION_ERROR`. Enough below [`MAX_HEADER_BLOCK`] for a rewritten block to
/// stay within that.
const MAX_HEADER_LIST: usize = 60 * 1024;

/// Octets of payload that every receiver of frames must take (RFC 9113, 4.2).
const MAX_FRAME_PAYLOAD: usize = 16_384;

const HEAD_LENGTH: usize = 9;

const HEADERS: u8 = 0x1;
const PUSH_PROMISE: u8 = 0x5;
const CONTINUATION: u8 = 0x9;

const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Why the client's bytes cannot go on to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RewriteError {
    #[error("not an HTTP/2 client: the connection preface is missing")]
    NoPreface,
    #[error("a client sent PUSH_PROMISE")]
    PushPromise,
    #[error("frame of type {kind:#x} inside a header block")]
    BrokenBlock { kind: u8 },
    #[error("header block of more than {MAX_HEADER_BLOCK} octets")]
    BlockTooLarge,
    #[error("header list of more than {MAX_HEADER_LIST} octets")]
    ListTooLarge,
    #[error("HEADERS frame shorter than its padding and priority")]
    HeadersTooShort,
    #[error("malformed header block: {0}")]
    Hpack(#[from] HpackError),
}

/// The rewriting of one connection.
#[derive(Default)]
pub(super) struct Rewriter {
    state: State,
    failure: Option<RewriteError>,
    /// Whether a header block has come whole: a call has begun.
    called: bool,
    decoder: hpack::Decoder,
    /// The header block that is being collected. While its HEADERS frame is incomplete,
    /// that frame's padding and priority are part of it.
    block: Vec<u8>,
    /// Payload of the frames that replace the block, kept for its capacity.
    encoded: Vec<u8>,
    /// What goes out before any more input is looked at: frame heads and rewritten frames.
    ready: BytesMut,
}

enum State {
    Preface {
        seen: usize,
    },
    /// Between frames or inside a frame head.
    Head {
        octets: [u8; HEAD_LENGTH],
        filled: usize,
        /// The block that waits for its next CONTINUATION.
        open: Option<OpenBlock>,
    },
    /// Inside the payload of a frame that passes unchanged.
    Payload {
        remaining: usize,
    },
    /// Inside the payload of a HEADERS or CONTINUATION frame.
    Fragment {
        remaining: usize,
        kind: u8,
        flags: u8,
        open: OpenBlock,
    },
}

/// What is known of a header block before it is complete.
#[derive(Clone, Copy)]
struct OpenBlock {
    stream: [u8; 4],
    /// Flags of the HEADERS frame.
    flags: u8,
    /// Stream dependency and weight, if the HEADERS frame has them.
    priority: Option<[u8; 5]>,
    /// Octets announced so far. Frame heads count, so that empty CONTINUATION frames
    /// come to an end as well.
    octets: usize,
}

// === impl State ===

impl Default for State {
    fn default() -> Self {
        Self::Preface { seen: 0 }
    }
}

impl State {
    fn between_frames(open: Option<OpenBlock>) -> Self {
        Self::Head {
            octets: [0; HEAD_LENGTH],
            filled: 0,
            open,
        }
    }
}

// === impl Rewriter ===

impl Rewriter {
    /// Takes input off the front and appends what the server is to read, until the input
    /// is used up or the output is full. An error stays: every later call returns it.
    pub(super) fn rewrite(
        &mut self,
        input: &mut &[u8],
        output: &mut impl BufMut,
    ) -> Result<(), RewriteError> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let result = self.advance(input, output);
        self.failure = result.err();
        result
    }

    /// Whether the client has begun a call.
    pub(super) fn has_seen_a_call(&self) -> bool {
        self.called
    }

    fn advance(&mut self, input: &mut &[u8], output: &mut impl BufMut) -> Result<(), RewriteError> {
        loop {
            let count = self.ready.len().min(output.remaining_mut());
            output.put(self.ready.split_to(count));
            if !output.has_remaining_mut() {
                return Ok(());
            }
            match &mut self.state {
                State::Payload { remaining: 0 } => self.state = State::between_frames(None),
                State::Fragment {
                    remaining: 0,
                    kind,
                    flags,
                    open,
                } => {
                    let (kind, flags, open) = (*kind, *flags, *open);
                    self.state = State::between_frames(self.end_fragment(kind, flags, open)?);
                }
                _ if input.is_empty() => return Ok(()),
                State::Preface { seen } => {
                    let octet = take(input, 1);
                    if PREFACE.get(*seen..=*seen) != Some(octet) {
                        return Err(RewriteError::NoPreface);
                    }
                    self.ready.extend_from_slice(octet);
                    *seen += 1;
                    if *seen == PREFACE.len() {
                        self.state = State::between_frames(None);
                    }
                }
                State::Head {
                    octets,
                    filled,
                    open,
                } => {
                    let missing = octets.get_mut(*filled..).unwrap_or_default();
                    let part = take(input, missing.len());
                    missing
                        .iter_mut()
                        .zip(part)
                        .for_each(|(to, from)| *to = *from);
                    *filled += part.len();
                    if *filled == HEAD_LENGTH {
                        let (octets, open) = (*octets, *open);
                        self.state = self.begin_frame(octets, open)?;
                    }
                }
                State::Payload { remaining } => {
                    let part = take(input, (*remaining).min(output.remaining_mut()));
                    *remaining -= part.len();
                    output.put_slice(part);
                }
                State::Fragment { remaining, .. } => {
                    let part = take(input, *remaining);
                    *remaining -= part.len();
                    self.block.extend_from_slice(part);
                }
            }
        }
    }

    /// Decides on a frame by its head, given the header block it comes in the middle of.
    fn begin_frame(
        &mut self,
        octets: [u8; HEAD_LENGTH],
        open: Option<OpenBlock>,
    ) -> Result<State, RewriteError> {
        let [l2, l1, l0, kind, flags, s3, s2, s1, s0] = octets;
        let length = usize::from(l2) << 16 | usize::from(l1) << 8 | usize::from(l0);
        let stream = [s3, s2, s1, s0];
        let mut open = match (kind, open) {
            (CONTINUATION, Some(open)) if open.stream == stream => open,
            (_, Some(_)) => return Err(RewriteError::BrokenBlock { kind }),
            (HEADERS, None) => {
                self.block.clear();
                OpenBlock {
                    stream,
                    flags,
                    priority: None,
                    octets: 0,
                }
            }
            // Would carry a header block past the decoder. No client may send it.
            (PUSH_PROMISE, None) => return Err(RewriteError::PushPromise),
            (_, None) => {
                self.ready.extend_from_slice(&octets);
                return Ok(State::Payload { remaining: length });
            }
        };
        open.octets += HEAD_LENGTH + length;
        if open.octets > MAX_HEADER_BLOCK {
            return Err(RewriteError::BlockTooLarge);
        }
        Ok(State::Fragment {
            remaining: length,
            kind,
            flags,
            open,
        })
    }

    /// Takes in a complete HEADERS or CONTINUATION frame; returns the block if it goes on.
    fn end_fragment(
        &mut self,
        kind: u8,
        flags: u8,
        mut open: OpenBlock,
    ) -> Result<Option<OpenBlock>, RewriteError> {
        if kind == HEADERS {
            open.priority = self.strip_headers(flags)?;
        }
        if flags & END_HEADERS == 0 {
            return Ok(Some(open));
        }
        self.rewrite_block(open)?;
        self.called = true;
        Ok(None)
    }

    /// Reduces the payload of a HEADERS frame to its part of the block; returns the
    /// priority fields.
    fn strip_headers(&mut self, flags: u8) -> Result<Option<[u8; 5]>, RewriteError> {
        let mut payload = self.block.as_slice();
        let mut padding = 0;
        if flags & PADDED != 0 {
            let (length, rest) = payload.split_first().ok_or(RewriteError::HeadersTooShort)?;
            (padding, payload) = (usize::from(*length), rest);
        }
        let mut priority = None;
        if flags & PRIORITY != 0 {
            let (fields, rest) = payload
                .split_first_chunk()
                .ok_or(RewriteError::HeadersTooShort)?;
            (priority, payload) = (Some(*fields), rest);
        }
        let length = payload
            .len()
            .checked_sub(padding)
            .ok_or(RewriteError::HeadersTooShort)?;
        let start = self.block.len() - payload.len();
        self.block.truncate(start + length);
        self.block.drain(..start);
        Ok(priority)
    }

    /// Decodes the collected block and queues the frames that replace it.
    fn rewrite_block(&mut self, open: OpenBlock) -> Result<(), RewriteError> {
        let encoded = &mut self.encoded;
        encoded.clear();
        encoded.extend_from_slice(open.priority.as_ref().map_or(&[], |fields| &fields[..]));
        let mut list_size = 0;
        self.decoder.decode(&self.block, |mut field| {
            if is_malformed_authority(field) {
                tracing::trace!(
                    authority = %field.value.escape_ascii(),
                    "authority replaced by localhost"
                );
                field.value = b"localhost";
            }
            list_size += field.name.len() + field.value.len() + hpack::FIELD_OVERHEAD;
            if list_size > MAX_HEADER_LIST {
                return Err(RewriteError::ListTooLarge);
            }
            hpack::encode_literal(encoded, field);
            Ok(())
        })?;

        let mut kind = HEADERS;
        let mut flags = open.flags & (END_STREAM | PRIORITY);
        let mut parts = self.encoded.chunks(MAX_FRAME_PAYLOAD);
        // A block without fields is still a frame.
        let mut part = parts.next().unwrap_or_default();
        loop {
            let next = parts.next();
            if next.is_none() {
                flags |= END_HEADERS;
            }
            self.ready.put_uint(part.len() as u64, 3);
            self.ready.extend_from_slice(&[kind, flags]);
            self.ready.extend_from_slice(&open.stream);
            self.ready.extend_from_slice(part);
            let Some(following) = next else { return Ok(()) };
            (part, kind, flags) = (following, CONTINUATION, 0);
        }
    }
}

/// Takes at most `count` octets off the front.
fn take<'a>(input: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (part, rest) = input.split_at(count.min(input.len()));
    *input = rest;
    part
}

/// The test by which `h2` resets a stream.
fn is_malformed_authority(field: Field<'_>) -> bool {
    field.name == b":authority" && http::uri::Authority::try_from(field.value).is_err()
}
