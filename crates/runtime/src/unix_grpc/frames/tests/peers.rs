//! Both ends of a connection in the tests: a client that encodes what it means, and a server
//! that reports what it read.

use bytes::BufMut as _;
use httlib_hpack::{Decoder, Encoder};

use super::super::*;
use super::{C_CORE_AUTHORITY, END_STREAM, REPAIRED_AUTHORITY};

type TextField = (String, String);

/// HEADERS frame with its CONTINUATION frames, before encoding.
#[derive(Clone, Debug, Default)]
pub(super) struct Block {
    pub(super) stream: u32,
    pub(super) end_stream: bool,
    /// Name, value and encoding (flags of [`Encoder`]).
    pub(super) fields: Vec<(String, String, u8)>,
    pub(super) padding: Option<u8>,
    pub(super) priority: Option<[u8; 5]>,
    /// Table size to announce first.
    pub(super) table_size: Option<u32>,
    /// Most octets of the block in each frame; 0 puts the whole block into one.
    pub(super) fragment: usize,
}

/// Header block, or another frame, as the server reads it.
#[derive(Debug, PartialEq)]
pub(super) enum Read {
    Block {
        stream: u32,
        end_stream: bool,
        priority: Option<[u8; 5]>,
        fields: Vec<TextField>,
    },
    Frame {
        kind: u8,
        flags: u8,
        stream: u32,
        payload: Vec<u8>,
    },
}

pub(super) struct Client {
    encoder: Encoder<'static>,
    pub(super) sent: Vec<u8>,
}

impl Client {
    pub(super) fn new() -> Self {
        Self {
            encoder: Encoder::with_dynamic_size(4096),
            sent: PREFACE.to_vec(),
        }
    }

    pub(super) fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.sent.put_uint(payload.len() as u64, 3);
        self.sent.extend([kind, flags]);
        self.sent.extend(stream.to_be_bytes());
        self.sent.extend(payload);
    }

    pub(super) fn block(&mut self, block: &Block) {
        let mut encoded = Vec::new();
        if let Some(size) = block.table_size {
            self.encoder
                .update_max_dynamic_size(size, &mut encoded)
                .unwrap();
        }
        for (name, value, flags) in &block.fields {
            let field = (
                name.clone().into_bytes(),
                value.clone().into_bytes(),
                *flags,
            );
            self.encoder.encode(field, &mut encoded).unwrap();
        }
        let size = if block.fragment == 0 {
            usize::MAX
        } else {
            block.fragment
        };
        let (first, mut rest) = encoded.split_at(encoded.len().min(size));

        let mut flags = if rest.is_empty() { END_HEADERS } else { 0 };
        let mut payload = Vec::new();
        if let Some(padding) = block.padding {
            flags |= PADDED;
            payload.push(padding);
        }
        if let Some(priority) = block.priority {
            flags |= PRIORITY;
            payload.extend(priority);
        }
        if block.end_stream {
            flags |= END_STREAM;
        }
        payload.extend(first);
        payload.resize(payload.len() + usize::from(block.padding.unwrap_or(0)), 0);
        self.frame(HEADERS, flags, block.stream, &payload);
        while !rest.is_empty() {
            let (part, following) = rest.split_at(rest.len().min(size));
            let flags = if following.is_empty() { END_HEADERS } else { 0 };
            self.frame(CONTINUATION, flags, block.stream, part);
            rest = following;
        }
    }
}

/// Reads a stream that went through the filter.
pub(super) fn serve(stream: &[u8]) -> Vec<Read> {
    let mut decoder = Decoder::with_dynamic_size(4096);
    let mut rest = stream.strip_prefix(PREFACE).expect("preface");
    let mut reads = Vec::new();
    let mut open: Option<(Read, Vec<u8>)> = None;
    while !rest.is_empty() {
        let head = rest.split_off(..HEAD_LENGTH).expect("frame head");
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let (kind, flags) = (head[3], head[4]);
        let stream = u32::from_be_bytes(head[5..].try_into().unwrap());
        let mut payload = rest.split_off(..length).expect("payload");
        match kind {
            HEADERS => {
                assert!(open.is_none());
                if flags & PADDED != 0 {
                    let padding = payload.split_off(..1).unwrap()[0];
                    payload = &payload[..payload.len() - usize::from(padding)];
                }
                let priority = (flags & PRIORITY != 0)
                    .then(|| payload.split_off(..5).unwrap().try_into().unwrap());
                let end_stream = flags & END_STREAM != 0;
                let read = Read::Block {
                    stream,
                    end_stream,
                    priority,
                    fields: vec![],
                };
                open = Some((read, payload.to_vec()));
            }
            CONTINUATION => open.as_mut().expect("a block").1.extend(payload),
            _ => {
                assert!(open.is_none());
                reads.push(Read::Frame {
                    kind,
                    flags,
                    stream,
                    payload: payload.to_vec(),
                });
                continue;
            }
        }
        if flags & END_HEADERS != 0 {
            let (mut read, mut block) = open.take().unwrap();
            let mut decoded = Vec::new();
            decoder.decode(&mut block, &mut decoded).unwrap();
            let Read::Block { fields, .. } = &mut read else {
                unreachable!()
            };
            let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
            fields.extend(
                decoded
                    .into_iter()
                    .map(|(name, value, _)| (text(name), text(value))),
            );
            reads.push(read);
        }
    }
    assert!(open.is_none());
    reads
}

/// Returns the block as [`serve`] must read it.
pub(super) fn expected(block: &Block) -> Read {
    let meant = |(name, value, _): &(String, String, u8)| {
        let value = match value.as_str() {
            C_CORE_AUTHORITY if name == ":authority" => REPAIRED_AUTHORITY,
            _ => value,
        };
        (name.clone(), value.to_owned())
    };
    Read::Block {
        stream: block.stream,
        end_stream: block.end_stream,
        priority: block.priority,
        fields: block.fields.iter().map(meant).collect(),
    }
}
