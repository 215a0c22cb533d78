//! Numbers that the ranks contribute, and their sum. The sum is exact in any order of
//! additions, so it can be compared bit by bit. Corrupted numbers are mostly ordinary ones, so
//! a search for NaN would miss them.

use serde::{Deserialize, Serialize};

/// Most bytes of a message that are compared: all of them pass through this process's memory.
pub(crate) const MOST_COMPARED: u64 = 32 << 20;
/// Limit below which sums of whole numbers are exact in 32-bit floating point.
const EXACT: u32 = 1 << 24;
/// Largest shared part of a number, which does not depend on the rank.
const LARGEST: u32 = 2047;

/// Numbers that differ from the expected ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "wrong numbers: the first of {wrong} of {of} at {at}, where {expected:#010x} was expected and \
     {found:#010x} found"
)]
pub(crate) struct WrongNumbers {
    /// Number of wrong numbers.
    wrong: usize,
    /// Number of compared numbers.
    of: usize,
    /// Index of the first wrong number.
    at: usize,
    /// Expected bits of the first wrong number.
    expected: u32,
    /// Actual bits of the first wrong number.
    found: u32,
}

/// Numbers of a group of ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    ranks: u32,
    /// Largest value of both parts of a number.
    largest: u32,
}

// === impl Numbers ===

impl Numbers {
    pub(crate) fn of(ranks: u32) -> Self {
        let most = EXACT / 2 / ranks.max(1);
        // A power of two less one, so that it serves as a mask.
        let largest = (most.max(1).ilog2()).min(LARGEST.ilog2() + 1);
        Self {
            ranks,
            largest: (1 << largest) - 1,
        }
    }

    /// Returns the bytes of the numbers contributed by a rank.
    pub(crate) fn brought(self, rank: u32, count: usize) -> Vec<u8> {
        let own = rank & self.largest;
        bytes(count, |at| exact(self.shared(at) + own))
    }

    /// Returns the bytes of the sums.
    pub(crate) fn sums(self, count: usize) -> Vec<u8> {
        let own: u32 = (0..self.ranks).map(|rank| rank & self.largest).sum();
        bytes(count, |at| exact(self.shared(at) * self.ranks + own))
    }

    /// Returns the part of a number that is the same for all ranks.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low bits are what is wanted"
    )]
    fn shared(self, at: usize) -> u32 {
        // Knuth's multiplicative hash spreads neighbouring indices.
        ((at as u32).wrapping_mul(2_654_435_761) >> 16) & self.largest
    }
}

/// Compares a GPU's result with the expected one, bit by bit.
pub(crate) fn compare(expected: &[u8], found: &[u8]) -> Result<(), WrongNumbers> {
    if expected == found {
        return Ok(());
    }
    let bits = |chunk: &[u8; 4]| u32::from_ne_bytes(*chunk);
    let expected = expected.as_chunks::<4>().0.iter().map(bits);
    let found = found.as_chunks::<4>().0.iter().map(bits);
    let of = expected.len();
    let mut wrong = expected.zip(found).enumerate();
    let mut wrong = wrong
        .by_ref()
        .filter(|(_, (expected, found))| expected != found);
    let Some((at, (expected, found))) = wrong.next() else {
        return Ok(());
    };
    Err(WrongNumbers {
        wrong: 1 + wrong.count(),
        of,
        at,
        expected,
        found,
    })
}

fn bytes(count: usize, number: impl Fn(usize) -> f32) -> Vec<u8> {
    (0..count).flat_map(|at| number(at).to_ne_bytes()).collect()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "it is below the largest exact one"
)]
fn exact(number: u32) -> f32 {
    number as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(bytes: &[u8]) -> Vec<f32> {
        let chunks = bytes.as_chunks::<4>().0.iter();
        chunks.map(|chunk| f32::from_ne_bytes(*chunk)).collect()
    }

    #[test]
    fn sums_are_exact_in_whatever_order_they_are_made() {
        for ranks in [1, 2, 3, 8, 72, 1024, 16384] {
            let numbers = Numbers::of(ranks);
            let count = 64;
            let mut forth = vec![0.0_f32; count];
            let mut back = forth.clone();
            for rank in 0..ranks {
                for (sum, number) in forth.iter_mut().zip(floats(&numbers.brought(rank, count))) {
                    *sum += number;
                }
                let rank = ranks - 1 - rank;
                for (sum, number) in back.iter_mut().zip(floats(&numbers.brought(rank, count))) {
                    *sum += number;
                }
            }
            let expected = floats(&numbers.sums(count));
            assert_eq!((&forth, &back), (&expected, &expected), "{ranks}");
            if ranks < 1024 {
                let different: std::collections::BTreeSet<u32> =
                    expected.iter().map(|sum| sum.to_bits()).collect();
                assert!(different.len() > count / 2, "{ranks}: {different:?}");
            }
        }
    }

    #[test]
    fn one_wrong_bit_is_found() {
        let expected = Numbers::of(8).sums(1000);
        let mut found = expected.clone();
        compare(&expected, &found).unwrap();
        found[4 * 700] ^= 1;
        let error = compare(&expected, &found).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("wrong numbers: the first of 1 of 1000 at 700,"),
            "{text}"
        );
    }
}
