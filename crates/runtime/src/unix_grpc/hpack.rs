//! Parser of the fields of a header block (HPACK, RFC 7541), which rewrites the value of
//! `:authority` into one that `h2` accepts.
//!
//! The value keeps its length, both encoded and decoded: the dynamic tables of the two ends
//! then stay equal, and neither has to be kept here. So `%`, `/` and space become octets whose
//! Huffman codes (appendix B) have as many bits, and every other octet that is invalid in an
//! authority becomes a `-`, unless Huffman-coded. Anything else is refused by `h2` as before:
//! also an empty value, and one whose name is an index of the dynamic table, where clients use
//! the static one.
//!
//! Decoding crates do not report where in a block a value stands, and encoding the block anew
//! would require the tables of both ends.

/// Index of `:authority` in the static table (appendix A).
const AUTHORITY: usize = 1;
/// Name `:authority` as text, plain and in Huffman code.
const NAMES: [&[u8]; 2] = [b":authority", b"\xb8\x3b\x53\x39\xec\x32\x7d\x7f"];
/// Octets of a name that distinguish it from [`NAMES`].
const LONGEST_NAME: usize = 11;

/// Number of Huffman codes of each length in bits. The code is canonical: within one length
/// codes count upwards, and each length continues where the shorter one stopped.
const CODES: [u32; 31] = [
    0, 0, 0, 0, 0, 10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19,
    29, 0, 4,
];

/// Parser state of a header block, fed octet by octet.
#[derive(Default)]
pub(super) struct Fields {
    part: Part,
    /// Unfinished integer, and the shift of its next octet in bits.
    integer: Option<(usize, u32)>,
    /// Remaining octets of a name or value.
    left: usize,
    name: Vec<u8>,
    is_authority: bool,
    is_huffman: bool,
    /// True once an octet of the value has been replaced.
    is_repaired: bool,
    code: HuffmanCode,
}

/// Part of a field that the next octet belongs to.
#[derive(Clone, Copy, Default)]
enum Part {
    /// Integer at the start of a field.
    #[default]
    Begin,
    /// Integer of a field without a value, or the size of the table.
    Index,
    /// Integer that is the index of a field's name.
    NameIndex,
    NameLength,
    Name,
    ValueLength,
    Value,
}

/// Bits of a Huffman code received so far.
#[derive(Default)]
struct HuffmanCode {
    bits: u32,
    length: usize,
    /// Lowest code of this length.
    first: u32,
}

// === impl Fields ===

impl Fields {
    /// Processes the next octet of the block and returns its replacement.
    pub(super) fn repaired(&mut self, octet: u8) -> u8 {
        let mut repaired = octet;
        match self.part {
            Part::Name if self.name.len() < LONGEST_NAME => self.name.push(octet),
            Part::Name => {}
            Part::Value if !self.is_authority => {}
            Part::Value if self.is_huffman => repaired = self.code.repaired(octet),
            Part::Value => repaired = self.plain(octet),
            _ => {
                self.integer(octet);
                return octet;
            }
        }
        self.left -= 1;
        self.end_text();
        repaired
    }

    fn plain(&mut self, octet: u8) -> u8 {
        let stands = octet.is_ascii_alphanumeric()
            || b"-._".contains(&octet)
            // In a path these octets do not separate a port or enclose an address.
            || !self.is_repaired && b":[]".contains(&octet);
        self.is_repaired |= !stands;
        match octet {
            _ if stands => octet,
            b'%' => b'.',
            b'/' => b'3',
            _ => b'-',
        }
    }

    /// Processes an octet of an integer (5.1), and moves on to the part that it announces.
    fn integer(&mut self, octet: u8) {
        let (value, goes_on, shift) = if let Some((value, shift)) = self.integer {
            let value = value.saturating_add(usize::from(octet & 0x7f) << shift);
            // `h2` refuses longer ones.
            (value, octet & 0x80 != 0, (shift + 7).min(28))
        } else {
            let mask = match (self.part, octet.leading_zeros()) {
                // An index; a literal with indexing; the size of the table; another literal
                // (6).
                (Part::Begin, 1) => 0x3f,
                (Part::Begin, 2) => 0x1f,
                (Part::Begin, 3..) => 0x0f,
                _ => 0x7f,
            };
            match (self.part, mask) {
                (Part::Begin, 0x7f | 0x1f) => self.part = Part::Index,
                (Part::Begin, _) => self.part = Part::NameIndex,
                _ => self.is_huffman = octet & 0x80 != 0,
            }
            (usize::from(octet & mask), octet & mask == mask, 0)
        };
        self.integer = goes_on.then_some((value, shift));
        if goes_on {
            return;
        }
        self.left = value;
        self.part = match self.part {
            Part::NameIndex if value == 0 => Part::NameLength,
            Part::NameIndex => {
                self.is_authority = value == AUTHORITY;
                Part::ValueLength
            }
            Part::NameLength => {
                self.name.clear();
                Part::Name
            }
            Part::ValueLength => {
                self.is_repaired = false;
                self.code = HuffmanCode::default();
                Part::Value
            }
            _ => Part::Begin,
        };
        self.end_text();
    }

    /// Moves on after a complete name or value.
    fn end_text(&mut self) {
        match self.part {
            Part::Name if self.left == 0 => {
                self.is_authority = NAMES.contains(&self.name.as_slice());
                self.part = Part::ValueLength;
            }
            Part::Value if self.left == 0 => self.part = Part::Begin,
            _ => {}
        }
    }
}

// === impl HuffmanCode ===

impl HuffmanCode {
    /// Processes the next octet of a Huffman-coded text and returns its replacement.
    fn repaired(&mut self, mut octet: u8) -> u8 {
        for bit in (0..8).rev() {
            self.bits = self.bits << 1 | u32::from(octet >> bit & 1);
            self.length += 1;
            self.first <<= 1;
            // Space (010100) becomes `-`, `%` (010101) `.`, and `/` (011000) `3`.
            if matches!((self.length, self.bits), (5, 0b01010) | (6, 0b01_1000)) {
                octet |= 1 << bit;
                self.bits |= 1;
            }
            let count = CODES.get(self.length).copied().unwrap_or(u32::MAX);
            if self.bits - self.first < count {
                *self = Self::default();
            } else {
                self.first += count;
            }
        }
        octet
    }
}
