//! Queue that writes lines of a log without ever making the caller wait.
//!
//! A log must not stop the product: the disk may be full, and the reader may be gone, or alive
//! and not reading, which blocks a write forever. Lines therefore go into a bounded queue, and
//! a thread of its own writes them. Lines that find no room or cannot be written are counted.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;

/// Most bytes of queued lines: several thousand lines, a burst that a working reader catches up
/// with. The writing thread may hold as many again.
const MAX_WAITING_BYTES: usize = 1024 * 1024;

/// Queue of lines between the log and the thread that writes them.
#[derive(Debug, Default)]
pub(crate) struct LineQueue {
    waiting: Mutex<WaitingLines>,
    changed: Condvar,
    lost: Counter,
}

#[derive(Debug, Default)]
struct WaitingLines {
    lines: Vec<u8>,
    /// True while lines from this queue are being written.
    writing: bool,
}

// === impl LineQueue ===

impl LineQueue {
    /// Starts a thread that writes the queue's lines `to`, until the process ends. If no thread
    /// can be started, all lines are lost and counted.
    pub(crate) fn start(name: &str, to: impl Write + Send + 'static) -> Arc<Self> {
        let queue = Arc::new(Self::default());
        let ours = Arc::clone(&queue);
        let thread = std::thread::Builder::new().name(name.to_owned());
        drop(thread.spawn(move || ours.write(to)));
        queue
    }

    /// Returns the counter of lost lines; a line cut in two counts per part.
    pub(crate) fn lost(&self) -> Counter {
        self.lost.clone()
    }

    /// Waits until all lines queued so far are written or lost, but no longer than `limit`.
    pub(crate) fn flush(&self, limit: Duration) {
        let pending = |waiting: &mut WaitingLines| waiting.writing || !waiting.lines.is_empty();
        drop(
            self.changed
                .wait_timeout_while(self.waiting(), limit, pending),
        );
    }

    /// Queues a line. Returns false if there is no room, and the line is lost.
    pub(crate) fn push(&self, line: &[u8]) -> bool {
        let mut waiting = self.waiting();
        if line.len() > MAX_WAITING_BYTES - waiting.lines.len() {
            self.lost.inc();
            return false;
        }
        waiting.lines.extend_from_slice(line);
        drop(waiting);
        self.changed.notify_all();
        true
    }

    fn write(&self, mut to: impl Write) {
        loop {
            let mut waiting = self
                .changed
                .wait_while(self.waiting(), |waiting| waiting.lines.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            let lines = std::mem::take(&mut waiting.lines);
            waiting.writing = true;
            drop(waiting);
            // Written line by line, so that lines stay whole when another process writes to the
            // same pipe.
            for line in lines.split_inclusive(|byte| *byte == b'\n') {
                if to.write_all(line).is_err() {
                    self.lost.inc();
                }
            }
            self.waiting().writing = false;
            self.changed.notify_all();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, WaitingLines> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writer of log lines, which always succeeds. Each call is one line.
impl Write for &LineQueue {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read as _};

    use super::*;

    const ENOUGH: Duration = Duration::from_secs(30);

    #[test]
    fn a_reader_that_reads_gets_every_line() {
        let (mut reader, writer) = io::pipe().unwrap();
        let queue = LineQueue::start("log", writer);
        for line in 0..1000 {
            (&*queue)
                .write_all(format!("line {line}\n").as_bytes())
                .unwrap();
        }
        let mut text = vec![0; 10 * 7 + 90 * 8 + 900 * 9];
        reader.read_exact(&mut text).unwrap();
        queue.flush(ENOUGH);
        let expected: Vec<String> = (0..1000).map(|line| format!("line {line}\n")).collect();
        assert_eq!(String::from_utf8(text).unwrap(), expected.concat());
        assert_eq!(queue.lost().get(), 0);
    }

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_back() {
        let (mut reader, writer) = io::pipe().unwrap();
        let queue = LineQueue::start("log", writer);
        let line = [[b'x'; 1023].as_slice(), b"\n"].concat();
        // Far more than the pipe, the thread and the queue hold together.
        for _ in 0..8 * 1024 {
            (&*queue).write_all(&line).unwrap();
        }
        let lost = queue.lost().get();
        assert!(lost > 4 * 1024 && lost < 8 * 1024, "{lost}");
        assert!(queue.waiting().lines.len() <= MAX_WAITING_BYTES);
        // The queued lines cannot be written; the wait must end all the same.
        queue.flush(Duration::from_millis(10));
        // Once the reader reads again, it receives all lines that are not lost.
        let mut text = vec![0; (8 * 1024 - usize::try_from(lost).unwrap()) * line.len()];
        reader.read_exact(&mut text).unwrap();
        queue.flush(ENOUGH);
        assert_eq!(queue.lost().get(), lost);
    }

    #[test]
    fn what_cannot_be_written_is_counted() {
        let (reader, closed) = io::pipe().unwrap();
        drop(reader);
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        for queue in [
            LineQueue::start("log", closed),
            LineQueue::start("log", full),
        ] {
            (&*queue).write_all(b"one\n").unwrap();
            (&*queue).write_all(b"two\n").unwrap();
            queue.flush(ENOUGH);
            assert_eq!(queue.lost().get(), 2);
        }
    }
}
