//! Bytes on their way from an input to whole lines, in bounded memory.

use memchr::memchr;

/// Longest line that is delivered whole, in bytes; a longer one is cut.
pub const LINE_MAX: usize = 64 << 10;
/// Bytes asked for in one read.
const CHUNK: usize = 64 << 10;

/// Collects bytes and hands out lines.
#[derive(Debug)]
pub(super) struct LineBuffer {
    /// Always `LINE_MAX + CHUNK` bytes, of which `start..end` are in use.
    data: Vec<u8>,
    start: usize,
    end: usize,
    /// Offset at which the search for a newline goes on.
    scanned: usize,
    /// Bytes of the line at `start` that were beyond `LINE_MAX` and are no longer here.
    dropped: u64,
}

/// One line of input.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RawLine<'a> {
    /// The line without its newline, at most [`LINE_MAX`] bytes.
    pub(super) bytes: &'a [u8],
    /// Bytes that the line had in the input, its newline included.
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

    /// Returns the room for the next bytes; [`Self::filled`] tells how many came. To be used when
    /// [`Self::next_line`] has no more.
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

    /// Returns the bytes that are left once no more will come: a last line without a newline.
    pub(super) fn rest(&mut self) -> Option<RawLine<'_>> {
        (self.end > self.start).then(|| self.take(self.end, 0))
    }

    /// Takes the line that ends before `end`, and as many bytes as its newline has.
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

    /// Keeps no more than `LINE_MAX` bytes of a line whose end has not come yet.
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

    /// Feeds `input` in pieces of `piece` bytes; line, length and cut of each.
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
