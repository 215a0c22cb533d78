//! As much of HPACK (RFC 7541) as rewriting header blocks takes: a decoder with its
//! dynamic table, and an encoder that uses no table at all.
//!
//! The published HPACK crates do not fit a socket that any local user may write to.
//! `httlib-hpack` 0.1.3 indexes past the end of a truncated block, `loona-hpack` 0.4.3
//! builds its Huffman table anew for every string and cannot be told to stop when the
//! decoded list grows too long, `zerodds-hpack` 1.0.0-rc.7 accepts text only and a table
//! of any size, and the one inside `h2` is private. `httlib-hpack` serves the tests, as a
//! second opinion on well-formed blocks.

use std::borrow::Cow;
use std::collections::VecDeque;

use super::huffman;

/// Octets that the dynamic table may hold. This is the default of
/// `SETTINGS_HEADER_TABLE_SIZE`, and tonic offers no way to announce another.
pub(super) const TABLE_SIZE: usize = 4096;

/// What an entry counts beyond its name and value (RFC 7541, 4.1).
pub(super) const FIELD_OVERHEAD: usize = 32;

/// One header field.
#[derive(Clone, Copy)]
pub(super) struct Field<'a> {
    pub(super) name: &'a [u8],
    pub(super) value: &'a [u8],
    /// The sender asks every hop to keep this value out of tables (a secret, often).
    pub(super) never_indexed: bool,
}

/// Why a header block does not decode. The connection cannot go on after any of them,
/// because the tables of the two ends have parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HpackError {
    #[error("the block ends inside a field")]
    Truncated,
    #[error("an integer has more than five octets")]
    IntegerTooLong,
    #[error("index {0} is in neither the static nor the dynamic table")]
    UnknownIndex(usize),
    #[error("a string is not valid Huffman code")]
    Huffman,
    #[error("a dynamic table of {0} octets is asked for, {TABLE_SIZE} are allowed")]
    TableTooLarge(usize),
    #[error("the table size changes after the first field of a block")]
    LateTableSize,
}

/// Decodes the header blocks of one connection, in order.
#[derive(Default)]
pub(super) struct Decoder {
    table: DynamicTable,
}

/// Fields that the client asked to remember, newest first.
struct DynamicTable {
    entries: VecDeque<(Vec<u8>, Vec<u8>)>,
    /// Octets in use, by the count of RFC 7541, 4.1.
    size: usize,
    /// Octets that the client currently allows itself, at most [`TABLE_SIZE`].
    max_size: usize,
}

// === impl Decoder ===

impl Decoder {
    /// Decodes one complete block and hands each field to `each`, which may end it early.
    pub(super) fn decode<E: From<HpackError>>(
        &mut self,
        block: &[u8],
        mut each: impl FnMut(Field<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = block;
        let mut fields_seen = false;
        while let Some(&first) = rest.first() {
            if first & 0xe0 == 0x20 {
                if fields_seen {
                    return Err(HpackError::LateTableSize.into());
                }
                self.table.resize(integer(&mut rest, 5)?)?;
                continue;
            }
            fields_seen = true;
            if first & 0x80 != 0 {
                let (name, value) = self.table.get(integer(&mut rest, 7)?)?;
                each(Field {
                    name,
                    value,
                    never_indexed: false,
                })?;
                continue;
            }
            let remember = first & 0x40 != 0;
            let name = match integer(&mut rest, if remember { 6 } else { 4 })? {
                0 => string(&mut rest)?,
                index => Cow::Borrowed(self.table.get(index)?.0),
            };
            let value = string(&mut rest)?;
            each(Field {
                name: &name,
                value: &value,
                never_indexed: first & 0xf0 == 0x10,
            })?;
            if remember {
                let (name, value) = (name.into_owned(), value.into_owned());
                self.table.insert(name, value);
            }
        }
        Ok(())
    }
}

// === impl DynamicTable ===

impl Default for DynamicTable {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            max_size: TABLE_SIZE,
        }
    }
}

impl DynamicTable {
    /// Returns the field at an index of the joint address space: static from 1, dynamic after.
    fn get(&self, index: usize) -> Result<(&[u8], &[u8]), HpackError> {
        let unknown = HpackError::UnknownIndex(index);
        let position = index.checked_sub(1).ok_or(unknown)?;
        if let Some((name, value)) = STATIC_TABLE.get(position) {
            return Ok((name.as_bytes(), value.as_bytes()));
        }
        let (name, value) = self
            .entries
            .get(position - STATIC_TABLE.len())
            .ok_or(unknown)?;
        Ok((name, value))
    }

    fn insert(&mut self, name: Vec<u8>, value: Vec<u8>) {
        self.size += name.len() + value.len() + FIELD_OVERHEAD;
        self.entries.push_front((name, value));
        // An entry larger than the table leaves the table empty (RFC 7541, 4.4).
        self.evict();
    }

    fn resize(&mut self, max_size: usize) -> Result<(), HpackError> {
        if max_size > TABLE_SIZE {
            return Err(HpackError::TableTooLarge(max_size));
        }
        self.max_size = max_size;
        self.evict();
        Ok(())
    }

    fn evict(&mut self) {
        while self.size > self.max_size
            && let Some((name, value)) = self.entries.pop_back()
        {
            self.size -= name.len() + value.len() + FIELD_OVERHEAD;
        }
    }
}

/// Appends a field as a literal with a new name, which no table takes part in.
pub(super) fn encode_literal(output: &mut Vec<u8>, field: Field<'_>) {
    output.push(if field.never_indexed { 0x10 } else { 0x00 });
    for text in [field.name, field.value] {
        let mut length = text.len();
        if length < 0x7f {
            output.push(low_octet(length));
        } else {
            output.push(0x7f);
            length -= 0x7f;
            while length >= 0x80 {
                output.push(low_octet(length) | 0x80);
                length >>= 7;
            }
            output.push(low_octet(length));
        }
        output.extend_from_slice(text);
    }
}

fn low_octet(number: usize) -> u8 {
    number.to_le_bytes()[0]
}

/// Takes an integer off the front whose first `prefix` bits are in the first octet (RFC
/// 7541, 5.1). Five octets hold 28 bits, which is more than any limit here.
fn integer(rest: &mut &[u8], prefix: u32) -> Result<usize, HpackError> {
    let mask = (1 << prefix) - 1;
    let mut value = usize::from(octet(rest)? & mask);
    if value < usize::from(mask) {
        return Ok(value);
    }
    for shift in [0, 7, 14, 21] {
        let octet = octet(rest)?;
        value += usize::from(octet & 0x7f) << shift;
        if octet & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(HpackError::IntegerTooLong)
}

fn octet(rest: &mut &[u8]) -> Result<u8, HpackError> {
    let (octet, tail) = rest.split_first().ok_or(HpackError::Truncated)?;
    *rest = tail;
    Ok(*octet)
}

fn string<'a>(rest: &mut &'a [u8]) -> Result<Cow<'a, [u8]>, HpackError> {
    let is_huffman = rest.first().is_some_and(|first| first & 0x80 != 0);
    let length = integer(rest, 7)?;
    let (text, tail) = rest.split_at_checked(length).ok_or(HpackError::Truncated)?;
    *rest = tail;
    if is_huffman {
        huffman::decode(text)
            .map(Cow::Owned)
            .ok_or(HpackError::Huffman)
    } else {
        Ok(Cow::Borrowed(text))
    }
}

/// RFC 7541, appendix A.
const STATIC_TABLE: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<(String, String)>, HpackError> {
        let mut fields = Vec::new();
        decoder.decode(block, |field| {
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            fields.push((text(field.name), text(field.value)));
            Ok::<(), HpackError>(())
        })?;
        Ok(fields)
    }

    fn hex(text: &str) -> Vec<u8> {
        let digits = text.as_bytes().chunks(2);
        digits
            .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    fn pairs(fields: &[(&str, &str)]) -> Vec<(String, String)> {
        fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn requests_of_rfc_7541_appendix_c() {
        // C.3 without and C.4 with Huffman code: the same three requests.
        let connections = [
            [
                "828684410f7777772e6578616d706c652e636f6d",
                "828684be58086e6f2d6361636865",
                "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
            ],
            [
                "828684418cf1e3c2e5f23a6ba0ab90f4ff",
                "828684be5886a8eb10649cbf",
                "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
            ],
        ];
        for [first, second, third] in connections {
            let mut decoder = Decoder::default();
            let host = (":authority", "www.example.com");
            let start = [
                (":method", "GET"),
                (":scheme", "http"),
                (":path", "/"),
                host,
            ];
            assert_eq!(decode(&mut decoder, &hex(first)), Ok(pairs(&start)));
            assert_eq!(decoder.table.size, 57);
            let mut with_cache = start.to_vec();
            with_cache.push(("cache-control", "no-cache"));
            assert_eq!(decode(&mut decoder, &hex(second)), Ok(pairs(&with_cache)));
            assert_eq!(decoder.table.size, 110);
            let last = [
                (":method", "GET"),
                (":scheme", "https"),
                (":path", "/index.html"),
                host,
                ("custom-key", "custom-value"),
            ];
            assert_eq!(decode(&mut decoder, &hex(third)), Ok(pairs(&last)));
            assert_eq!(decoder.table.size, 164);
        }
    }

    #[test]
    fn responses_of_rfc_7541_appendix_c_evict() {
        // C.5: a table of 256 octets, set here by a size update (3f e1 01).
        let mut decoder = Decoder::default();
        let first = hex(
            "3fe1014803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a3231\
             20474d546e1768747470733a2f2f7777772e6578616d706c652e636f6d",
        );
        let mut expected = pairs(&[
            (":status", "302"),
            ("cache-control", "private"),
            ("date", "Mon, 21 Oct 2013 20:13:21 GMT"),
            ("location", "https://www.example.com"),
        ]);
        assert_eq!(decode(&mut decoder, &first), Ok(expected.clone()));
        assert_eq!(decoder.table.size, 222);
        expected[0].1 = "307".to_owned();
        assert_eq!(decode(&mut decoder, &hex("4803333037c1c0bf")), Ok(expected));
        assert_eq!(decoder.table.size, 222);
        // The first status went when the second came: five entries were never held.
        assert_eq!(
            decode(&mut decoder, &[0xc2]),
            Err(HpackError::UnknownIndex(66))
        );
    }

    #[test]
    fn table_size_update() {
        let mut decoder = Decoder::default();
        let remember = [0x40, 1, b'a', 1, b'b'];
        decode(&mut decoder, &remember).unwrap();
        assert_eq!(decode(&mut decoder, &[0xbe]), Ok(pairs(&[("a", "b")])));
        // Down to nothing, up again to 4096: the entry is gone.
        let emptied = [0x20, 0x3f, 0xe1, 0x1f, 0xbe];
        assert_eq!(
            decode(&mut decoder, &emptied),
            Err(HpackError::UnknownIndex(62))
        );
        assert_eq!(decoder.table.max_size, 4096);
        let above = [0x3f, 0xe2, 0x1f];
        assert_eq!(
            decode(&mut decoder, &above),
            Err(HpackError::TableTooLarge(4097))
        );
        assert_eq!(
            decode(&mut decoder, &[0x82, 0x20]),
            Err(HpackError::LateTableSize)
        );
    }

    #[test]
    fn entry_larger_than_the_table_empties_it() {
        let mut decoder = Decoder::default();
        decode(&mut decoder, &[0x40, 1, b'a', 1, b'b']).unwrap();
        let mut large = vec![0x40, 1, b'c', 0x7f, 0x81, 0x1f]; // 127 + 1 + (31 << 7) = 4096
        large.extend([b'x'; 4096]);
        assert_eq!(decode(&mut decoder, &large).unwrap()[0].1.len(), 4096);
        assert_eq!((decoder.table.size, decoder.table.entries.len()), (0, 0));
    }

    #[test]
    fn malformed_blocks() {
        let cases: [(&[u8], HpackError); 10] = [
            (&[0x80], HpackError::UnknownIndex(0)),
            (&[0xbe], HpackError::UnknownIndex(62)),
            (&[0x7e, 0], HpackError::UnknownIndex(62)),
            (&[0xff], HpackError::Truncated),
            (
                &[0xff, 0x80, 0x80, 0x80, 0x7f],
                HpackError::UnknownIndex(127 + (127 << 21)),
            ),
            (
                &[0xff, 0x80, 0x80, 0x80, 0x80, 0],
                HpackError::IntegerTooLong,
            ),
            (&[0x00, 3, b'a'], HpackError::Truncated),
            (&[0x00, 1, b'a'], HpackError::Truncated),
            (&[0x00], HpackError::Truncated),
            (&[0x00, 0x81, 0x00, 0], HpackError::Huffman),
        ];
        for (block, error) in cases {
            assert_eq!(
                decode(&mut Decoder::default(), block),
                Err(error),
                "{block:x?}"
            );
        }
    }

    #[test]
    fn literals_decode_to_themselves_and_touch_no_table() {
        for length in [
            0, 1, 126, 127, 128, 254, 255, 16_383, 16_510, 16_511, 65_535,
        ] {
            for never_indexed in [false, true] {
                let value = vec![b'v'; length];
                let mut block = Vec::new();
                encode_literal(
                    &mut block,
                    Field {
                        name: b"name",
                        value: &value,
                        never_indexed,
                    },
                );
                let mut decoder = Decoder::default();
                let mut seen = 0;
                let decoded = decoder.decode(&block, |field| {
                    seen += 1;
                    assert_eq!((field.name, field.value), (&b"name"[..], &value[..]));
                    assert_eq!(field.never_indexed, never_indexed);
                    Ok::<(), HpackError>(())
                });
                assert_eq!((decoded, seen), (Ok(()), 1), "length {length}");
                assert!(decoder.table.entries.is_empty());
            }
        }
    }
}
