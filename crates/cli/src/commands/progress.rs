//! Progress of a long read, as a temporary line on the terminal.
//!
//! The line is updated by the number of bytes, not of results, since a log of millions of lines
//! without a fault takes as long.

use std::cell::Cell;
use std::io::{self, BufRead, IsTerminal as _, Read, Write};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Shortest time between two updates of the line.
const EVERY: Duration = Duration::from_millis(300);
/// Bytes between two readings of the clock.
const CHECK: u64 = 256 * 1024;
const MIB: u64 = 1024 * 1024;

/// The line, on standard error if that is a terminal.
pub(super) struct Progress {
    to: Option<Box<dyn Write>>,
    every: Duration,
    /// Bytes of all inputs, if known.
    total: Option<u64>,
    /// Bytes read at the last reading of the clock.
    checked: u64,
    /// Time of the last update.
    at: Instant,
    shown: bool,
}

/// Number of bytes read so far, from all inputs together.
#[derive(Clone, Default)]
pub(super) struct BytesRead(Rc<Cell<u64>>);

/// Reader that counts the bytes it delivers.
pub(super) struct Counted<R> {
    reader: R,
    read: BytesRead,
}

// === impl Progress ===

impl Progress {
    /// Creates a line on standard error, if that is a terminal. `total` is the number of bytes of all
    /// inputs.
    pub(super) fn new(total: Option<u64>) -> Self {
        let on = io::stderr().is_terminal();
        let to: Option<Box<dyn Write>> = on.then(|| Box::new(io::stderr()) as _);
        Self::to(to, EVERY, total)
    }

    /// Creates a line on a writer; `None` disables it.
    pub(super) fn to(to: Option<Box<dyn Write>>, every: Duration, total: Option<u64>) -> Self {
        Self {
            to,
            every,
            total,
            checked: 0,
            at: Instant::now(),
            shown: false,
        }
    }

    /// Records the number of bytes and lines read so far. Almost all calls are cheap.
    pub(super) fn step(&mut self, bytes: u64, lines: impl FnOnce() -> u64) {
        if self.to.is_none() || bytes.saturating_sub(self.checked) < CHECK {
            return;
        }
        self.checked = bytes;
        if self.at.elapsed() < self.every {
            return;
        }
        self.at = Instant::now();
        let total = match self.total {
            Some(total) if total > 0 => format!(" of {} MiB", total.div_ceil(MIB)),
            _ => " MiB".to_owned(),
        };
        self.write(&format!("{}{total}, {} lines", bytes / MIB, lines()));
        self.shown = true;
    }

    /// Removes the line, before other output.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            self.write("");
        }
    }

    fn write(&mut self, text: &str) {
        let Some(to) = &mut self.to else { return };
        // A closed standard error is no reason to fail.
        drop(write!(to, "\r\x1b[K{text}").and_then(|()| to.flush()));
    }
}

// === impl BytesRead ===

impl BytesRead {
    pub(super) fn get(&self) -> u64 {
        self.0.get()
    }
}

// === impl Counted ===

impl<R> Counted<R> {
    pub(super) fn new(reader: R, read: BytesRead) -> Self {
        Self { reader, read }
    }
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let used = self.reader.read(buffer)?;
        self.read.0.set(self.read.0.get() + used as u64);
        Ok(used)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, used: usize) {
        self.reader.consume(used);
        self.read.0.set(self.read.0.get() + used as u64);
    }
}

/// Writer that keeps its text, for tests.
#[cfg(test)]
#[derive(Clone, Default)]
pub(super) struct Screen(Rc<std::cell::RefCell<Vec<u8>>>);

#[cfg(test)]
impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
impl Screen {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.borrow()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_steps_by_bytes_and_is_taken_away() {
        let screen = Screen::default();
        let mut progress = Progress::to(
            Some(Box::new(screen.clone())),
            Duration::ZERO,
            Some(3 * MIB),
        );
        progress.step(CHECK - 1, || 1);
        assert_eq!(screen.text(), "");
        progress.step(MIB, || 7);
        assert_eq!(screen.text(), "\r\x1b[K1 of 3 MiB, 7 lines");
        progress.clear();
        progress.clear();
        assert!(
            screen.text().ends_with("lines\r\x1b[K"),
            "{:?}",
            screen.text()
        );

        let screen = Screen::default();
        let hour = Duration::from_secs(3_600);
        let mut progress = Progress::to(Some(Box::new(screen.clone())), hour, None);
        for bytes in (0..100 * MIB).step_by(1_000) {
            progress.step(bytes, || 0);
        }
        assert_eq!(screen.text(), "", "a few times a second at most");
    }
}
