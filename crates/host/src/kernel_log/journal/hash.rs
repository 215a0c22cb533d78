//! The two hash functions that journal files index their data objects with: SipHash-2-4 keyed
//! with the file's id since systemd 246, Bob Jenkins' lookup3 before.

use std::hash::Hasher as _;

use siphasher::sip::SipHasher24;

/// Returns the SipHash-2-4 of `data`, keyed with the id of the file.
pub(super) fn keyed(data: &[u8], file_id: &[u8; 16]) -> u64 {
    let mut hasher = SipHasher24::new_with_key(file_id);
    hasher.write(data);
    hasher.finish()
}

/// Returns the Lookup3 hash (`hashlittle2`, public domain) of `data`, both halves.
pub(super) fn jenkins(data: &[u8]) -> u64 {
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let mut state = [0xdead_beef_u32.wrapping_add(length); 3];
    let mut rest = data;
    while rest.len() > 12 {
        let (block, tail) = rest.split_at(12);
        add(&mut state, block);
        mix(&mut state);
        rest = tail;
    }
    if !rest.is_empty() {
        add(&mut state, rest);
        finish(&mut state);
    }
    let [_, b, c] = state;
    u64::from(c) << 32 | u64::from(b)
}

/// Adds up to twelve bytes as three numbers, padded with zeroes.
fn add(state: &mut [u32; 3], block: &[u8]) {
    for (part, bytes) in state.iter_mut().zip(block.chunks(4)) {
        let mut number = [0; 4];
        for (to, from) in number.iter_mut().zip(bytes) {
            *to = *from;
        }
        *part = part.wrapping_add(u32::from_le_bytes(number));
    }
}

fn mix(state: &mut [u32; 3]) {
    let [mut a, mut b, mut c] = *state;
    for (first, second) in [(4, 6), (16, 19)] {
        a = a.wrapping_sub(c) ^ c.rotate_left(first);
        c = c.wrapping_add(b);
        b = b.wrapping_sub(a) ^ a.rotate_left(second);
        a = a.wrapping_add(c);
        c = c.wrapping_sub(b) ^ b.rotate_left(if first == 4 { 8 } else { 4 });
        b = b.wrapping_add(a);
    }
    *state = [a, b, c];
}

fn finish(state: &mut [u32; 3]) {
    let [mut a, mut b, mut c] = *state;
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    c = (c ^ b).wrapping_sub(b.rotate_left(24));
    *state = [a, b, c];
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors published by the authors of the two functions.
    #[test]
    fn published_vectors() {
        let key: [u8; 16] = std::array::from_fn(|index| u8::try_from(index).unwrap());
        let data: Vec<u8> = (0..15).collect();
        assert_eq!(keyed(&data, &key), 0xa129_ca61_49be_45e5);
        // From lookup3.c, driver5: c then b, both seeds zero.
        assert_eq!(jenkins(b""), 0xdead_beef_dead_beef);
        assert_eq!(
            jenkins(b"Four score and seven years ago"),
            0x1777_0551_ce72_26e6
        );
    }
}
