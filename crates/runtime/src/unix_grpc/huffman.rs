//! The Huffman code of HPACK (RFC 7541, appendix B), decoding only.
//!
//! The code is canonical: within one length, codes count upwards in the order of their
//! symbols, and each length goes on where the shorter one stopped. The lengths alone
//! therefore say everything, and the tables below are worked out from them at compile time.

/// Bits in the code of each octet; the last one is the end-of-string symbol (EOS).
#[rustfmt::skip]
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

/// All codes of one length.
#[derive(Clone, Copy)]
struct Row {
    /// Bits in each code.
    length: u32,
    /// The lowest code.
    first: u64,
    /// How many codes there are; the rest of the space belongs to longer ones.
    count: u64,
    /// Where the row's symbols start in [`SYMBOLS`].
    start: usize,
}

const SHORTEST: u32 = 5;
const LONGEST: u32 = 30;
const ROW_COUNT: usize = (LONGEST - SHORTEST + 1) as usize;

/// The symbols, ordered by the length of their code, then by value.
const SYMBOLS: [u16; 257] = CODE.1;
const ROWS: [Row; ROW_COUNT] = CODE.0;
const CODE: ([Row; ROW_COUNT], [u16; 257]) = canonical_code();

const fn canonical_code() -> ([Row; ROW_COUNT], [u16; 257]) {
    let mut rows = [Row {
        length: 0,
        first: 0,
        count: 0,
        start: 0,
    }; ROW_COUNT];
    let mut symbols = [0; 257];
    let mut placed = 0;
    let mut next_code = 0;
    let mut row = 0;
    let mut length = SHORTEST;
    while length <= LONGEST {
        let start = placed;
        let mut count = 0;
        let mut symbol: u16 = 0;
        while symbol < 257 {
            if LENGTHS[symbol as usize] as u32 == length {
                symbols[placed] = symbol;
                placed += 1;
                count += 1;
            }
            symbol += 1;
        }
        rows[row] = Row {
            length,
            first: next_code,
            count,
            start,
        };
        next_code = (next_code + count) << 1;
        row += 1;
        length += 1;
    }
    (rows, symbols)
}

/// Decodes a string; `None` if it is not well formed: an unfinished code that is no
/// padding, padding of eight bits or more, or an EOS inside.
pub(super) fn decode(mut input: &[u8]) -> Option<Vec<u8>> {
    // No code is shorter than five bits.
    let mut output = Vec::with_capacity(input.len() * 8 / 5);
    // The next bits of the input from the top down, ones below them: the padding of a
    // string is the start of EOS, which is all ones.
    let mut window = u64::MAX;
    let mut bits: u32 = 0;
    loop {
        while bits <= 56
            && let Some((&octet, rest)) = input.split_first()
        {
            let shift = 56 - bits;
            window = window & !(0xff << shift) | u64::from(octet) << shift;
            bits += 8;
            input = rest;
        }
        let (symbol, length) = first_symbol(window)?;
        if length > bits {
            // The input is used up: what is left must be padding.
            return (bits < 8 && window == u64::MAX).then_some(output);
        }
        // EOS is the only symbol beyond an octet.
        output.push(u8::try_from(symbol).ok()?);
        window = window << length | ((1 << length) - 1);
        bits -= length;
    }
}

/// Returns the symbol whose code the window starts with, and the code's length.
fn first_symbol(window: u64) -> Option<(u16, u32)> {
    ROWS.iter().find_map(|row| {
        let offset = (window >> (u64::BITS - row.length)).checked_sub(row.first)?;
        if offset >= row.count {
            return None;
        }
        let symbol = SYMBOLS.get(row.start + usize::try_from(offset).ok()?)?;
        Some((*symbol, row.length))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The reference: an encoder written by others.
    fn encode(text: &[u8]) -> Vec<u8> {
        let mut encoded = Vec::new();
        httlib_huffman::encode(text, &mut encoded).unwrap();
        encoded
    }

    #[test]
    fn code_space_is_used_up_exactly() {
        let used: u64 = LENGTHS.iter().map(|length| 1 << (30 - length)).sum();
        assert_eq!(used, 1 << 30);
    }

    #[test]
    fn every_octet_decodes() {
        for octet in 0..=u8::MAX {
            assert_eq!(
                decode(&encode(&[octet])),
                Some(vec![octet]),
                "octet {octet}"
            );
            let repeated = vec![octet; 17];
            assert_eq!(decode(&encode(&repeated)), Some(repeated));
        }
    }

    #[test]
    fn malformed_strings_are_refused() {
        let cases: [(&str, &[u8]); 6] = [
            ("padding of zeros after 'a' (00011)", &[0b0001_1000]),
            ("padding of eight bits", &[0b1111_1111]),
            ("'a' and padding of eleven bits", &[0b0001_1111, 0xff]),
            ("EOS", &[0xff, 0xff, 0xff, 0xff]),
            ("'a', EOS, padding", &[0b0001_1111, 0xff, 0xff, 0xff, 0xff]),
            ("an unfinished code", &[0xff, 0xfe]),
        ];
        for (what, input) in cases {
            assert_eq!(decode(input), None, "{what}");
        }
    }

    #[test]
    fn empty_string_and_seven_bits_of_padding_are_fine() {
        assert_eq!(decode(&[]), Some(vec![]));
        // Two codes of five bits and one of seven leave seven bits.
        assert_eq!(decode(&encode(b"aaB")), Some(b"aaB".to_vec()));
    }

    proptest! {
        #[test]
        fn decoding_inverts_encoding(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(decode(&encode(&text)), Some(text));
        }

        #[test]
        fn what_decodes_encodes_to_the_same_bits(input in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Some(text) = decode(&input) {
                prop_assert_eq!(encode(&text), input);
            }
        }
    }
}
