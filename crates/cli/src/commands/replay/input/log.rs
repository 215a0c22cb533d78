//! A kernel log of a replay. Its lines become events as in a running monitor, by the clock of the
//! log.

use std::io::{self, BufRead};
use std::sync::Arc;
use std::time::Duration;

use agent::kernel_log::events_of_finding;
use contract::HealthEvent;
use diagnosis::catalog::Catalog;
use diagnosis::decode::KernelLogDecoder;
use diagnosis::fold::Fold;
use host::kernel_log::{KernelLogRecord, LINE_MAX, LineParser, unwrapped};
use jiff::{SignedDuration, Timestamp, tz::TimeZone};
use model::event::normalise;

use super::{Item, Problems};
use crate::commands::garbled::GarbledLines;

/// Kernel log of one node.
pub(super) struct Log {
    reader: Box<dyn BufRead>,
    node: String,
    parser: LineParser,
    decoder: KernelLogDecoder,
    fold: Fold,
    pub(super) garbled: GarbledLines,
    /// Number of the current line.
    pub(super) line: u64,
    /// Time of the first fault.
    begins: Option<Timestamp>,
    buffer: Vec<u8>,
    ended: bool,
}

/// Result of reading a line.
enum LineRead {
    Whole,
    Cut,
    End,
}

impl Log {
    pub(super) fn new(reader: Box<dyn BufRead>, node: String, catalog: &Arc<Catalog>) -> Self {
        Self {
            reader,
            node,
            parser: LineParser::new(TimeZone::system(), Timestamp::now()),
            decoder: KernelLogDecoder::new(Arc::clone(catalog)),
            fold: Fold::default(),
            garbled: GarbledLines::default(),
            line: 0,
            begins: None,
            buffer: Vec::new(),
            ended: false,
        }
    }

    /// Reads the events of the next line; `None` at the end.
    pub(super) fn read(
        &mut self,
        name: &str,
        newest: Option<Timestamp>,
        problems: &mut Problems,
    ) -> io::Result<Option<Vec<Item>>> {
        if self.ended {
            return Ok(None);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let line = read_line(&mut self.reader, &mut buffer)?;
        let mut events = Vec::new();
        let mut at = newest.unwrap_or(Timestamp::UNIX_EPOCH);
        match line {
            LineRead::End => {
                self.ended = true;
                self.fold.end(&mut events);
            }
            LineRead::Whole | LineRead::Cut => {
                self.line += 1;
                if matches!(line, LineRead::Cut) {
                    problems.name(
                        name,
                        self.line,
                        "is longer than 64 KiB; the rest of it is not read",
                    );
                }
                self.take(name, &buffer, &mut at, &mut events);
                self.garbled.count(&mut self.decoder, name, self.line);
            }
        }
        self.buffer = buffer;
        let items = events.into_iter().map(|mut event| {
            normalise(&mut event, at);
            Item { at, event }
        });
        Ok(Some(items.collect()))
    }

    fn take(&mut self, name: &str, line: &[u8], at: &mut Timestamp, events: &mut Vec<HealthEvent>) {
        let plain = unwrapped(line);
        let record = self.parser.parse(&plain);
        let since_boot = || {
            let micros = i64::try_from(record.boot_time_us?).ok()?;
            Timestamp::from_microsecond(micros).ok()
        };
        *at = record.wall.or_else(since_boot).unwrap_or(*at);
        let text = record.text();
        let findings = self.decoder.record(&text, *at);
        if findings.is_empty() {
            return;
        }
        let record = KernelLogRecord {
            seq: record.seq,
            boot_id: None,
            boot_time_us: record.boot_time_us,
            wall: Some(*at),
            facility: record.facility,
            level: record.level,
            place: None,
            line: Some(self.line),
            text: String::from_utf8_lossy(&text).into_owned(),
        };
        // Equal lines are separate reports, with different places.
        let place = format!("{name}:{}", self.line);
        let begins = *self.begins.get_or_insert(*at);
        let elapsed = at
            .duration_since(begins)
            .max(SignedDuration::ZERO)
            .unsigned_abs();
        if self
            .fold
            .next_tick()
            .is_some_and(|due: Duration| due <= elapsed)
        {
            self.fold.tick(elapsed, events);
        }
        for finding in &findings {
            for event in events_of_finding(finding, &record, &self.node, *at, &place) {
                self.fold.take(event, *at, elapsed, events);
            }
        }
    }
}

/// Reads a line into `line`, without the line end; of a long line only the beginning.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<LineRead> {
    line.clear();
    let mut read = LineRead::End;
    loop {
        let available = reader.fill_buf()?;
        if available.is_empty() {
            return Ok(read);
        }
        let end = memchr::memchr(b'\n', available);
        let part = available
            .get(..end.unwrap_or(available.len()))
            .unwrap_or_default();
        let room = LINE_MAX.saturating_sub(line.len());
        if part.len() > room {
            read = LineRead::Cut;
        } else if matches!(read, LineRead::End) {
            read = LineRead::Whole;
        }
        line.extend_from_slice(part.get(..room).unwrap_or(part));
        let used = end.map_or(available.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            return Ok(read);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    #[test]
    fn long_lines_are_cut_and_the_next_one_is_whole() {
        let text = format!("a\n{}\nb", "x".repeat(LINE_MAX + 10));
        for size in [1, 100, 64 * 1024] {
            let mut reader = BufReader::with_capacity(size, text.as_bytes());
            let mut line = Vec::new();
            let mut lengths = Vec::new();
            loop {
                match read_line(&mut reader, &mut line).unwrap() {
                    LineRead::End => break,
                    LineRead::Whole => lengths.push((line.len(), true)),
                    LineRead::Cut => lengths.push((line.len(), false)),
                }
            }
            assert_eq!(lengths, [(1, true), (LINE_MAX, false), (1, true)]);
        }
    }
}
