//! Splits the bytes of an input into whole lines, in bounded memory.

use memchr::memchr;

/// Longest line that is delivered whole, in bytes; a longer one is truncated.
pub const LINE_MAX: usize = 64 << 10;
/// Bytes requested in one read.
const CHUNK: usize = 64 << 10;

/// Buffer that collects bytes and yields lines.
#[derive(Debug)]
pub(super) struct LineBuffer {
    /// Always `LINE_MAX + CHUNK` bytes, with `start..end` in use.
    data: Vec<u8>,
    start: usize,
    end: usize,
    /// Offset where the search for a newline continues.
    scanned: usize,
    /// Number of bytes of the line at `start` that exceeded `LINE_MAX` and were dropped.
    dropped: u64,
}

/// A line of input, which may be truncated.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RawLine<'a> {
    /// Line without its newline, at most [`LINE_MAX`] bytes.
    pub(super) bytes: &'a [u8],
    /// Length of the line in the input, with its newline.
    pub(super) length: u64,
    /// True if `bytes` is not the whole line.
    pub(super) cut: bool,
}

// === impl LineBuffer ===

impl LineBuffer {
    pub(super) fn new() -> Self {
        Self {
            data: vec![0; LINE_MAX + CHUNK],
            start: 0,
            end: 0,
            scanned: 0,
            dropped: 0,
        }
    }

    /// Returns the room for the next bytes; pass their number to [`Self::filled`]. Call this
    /// when [`Self::next_line`] returns `None`.
    pub(super) fn space(&mut self) -> &mut [u8] {
        self.data.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.scanned -= self.start;
        self.start = 0;
        self.data.get_mut(self.end..).unwrap_or_default()
    }

    pub(super) fn filled(&mut self, length: usize) {
        self.end = (self.end + length).min(self.data.len());
    }

    /// Returns the next whole line.
    pub(super) fn next_line(&mut self) -> Option<RawLine<'_>> {
        let fresh = self.data.get(self.scanned..self.end)?;
        if let Some(newline) = memchr(b'\n', fresh) {
            return Some(self.take(self.scanned + newline, 1));
        }
        self.drop_excess();
        None
    }

    /// Returns the bytes that are left at the end of the input: a last line without a newline.
    pub(super) fn rest(&mut self) -> Option<RawLine<'_>> {
        (self.end > self.start).then(|| self.take(self.end, 0))
    }

    /// Consumes the line that ends before `end`, and its newline of `newline` bytes.
    fn take(&mut self, end: usize, newline: usize) -> RawLine<'_> {
        let start = self.start;
        let length = (end + newline - start) as u64 + self.dropped;
        let cut = self.dropped > 0 || end - start > LINE_MAX;
        self.start = end + newline;
        self.scanned = self.start;
        self.dropped = 0;
        let bytes = self
            .data
            .get(start..end.min(start + LINE_MAX))
            .unwrap_or_default();
        RawLine { bytes, length, cut }
    }

    /// Drops the bytes beyond `LINE_MAX` of a line without an end.
    fn drop_excess(&mut self) {
        let kept = self.end.min(self.start + LINE_MAX);
        self.dropped += (self.end - kept) as u64;
        self.end = kept;
        self.scanned = kept;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds `input` in pieces of `piece` bytes; returns text, length and truncation of each
    /// line.
    fn lines(input: &[u8], piece: usize) -> Vec<(Vec<u8>, u64, bool)> {
        let mut buffer = LineBuffer::new();
        let mut lines = Vec::new();
        for mut piece in input.chunks(piece) {
            while !piece.is_empty() {
                let space = buffer.space();
                assert!(space.len() >= CHUNK);
                let length = piece.len().min(space.len());
                space[..length].copy_from_slice(&piece[..length]);
                buffer.filled(length);
                piece = &piece[length..];
                while let Some(line) = buffer.next_line() {
                    lines.push((line.bytes.to_vec(), line.length, line.cut));
                }
            }
        }
        if let Some(line) = buffer.rest() {
            lines.push((line.bytes.to_vec(), line.length, line.cut));
        }
        assert_eq!(buffer.rest(), None);
        lines
    }

    #[test]
    fn long_lines_are_cut_wherever_the_reads_end() {
        for (length, cut) in [
            (LINE_MAX - 1, false),
            (LINE_MAX, false),
            (LINE_MAX + 1, true),
            (5 * LINE_MAX, true),
        ] {
            let mut input = vec![b'a'; length];
            input.extend_from_slice(b"\nnext\n");
            for piece in [
                100,
                4096,
                CHUNK - 1,
                CHUNK,
                LINE_MAX + 1,
                LINE_MAX + CHUNK,
                usize::MAX,
            ] {
                let lines = lines(&input, piece);
                let [long, next] = lines.as_slice() else {
                    panic!("{} lines", lines.len())
                };
                assert_eq!(long.0.len(), length.min(LINE_MAX), "{length} in {piece}");
                assert_eq!(
                    (long.1, long.2),
                    (length as u64 + 1, cut),
                    "{length} in {piece}"
                );
                assert_eq!(*next, (b"next".to_vec(), 5, false));
            }
        }
    }

    proptest! {
        #[test]
        fn lines_are_those_of_the_input(input in "[a\\n]{0,200}", piece in 1_usize..20) {
            let expected: Vec<_> = input
                .split_inclusive('\n')
                .map(|line| (line.trim_end_matches('\n').as_bytes().to_vec(), line.len() as u64, false))
                .collect();
            prop_assert_eq!(lines(input.as_bytes(), piece), expected);
        }
    }
}
