//! The newest part of this boot's kernel log, as text that `gpuwarden decode` reads.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::bail;
use host::kernel_log::{Event, KernelLogRecord, KernelLogSpec, Source};

use super::{Collected, Collection};

/// Most bytes of the file. By default a kernel keeps less than a megabyte; a journal may have any
/// size.
const MAX_BYTES: u64 = 16 * 1024 * 1024;
/// Longest time for reading the log. A journal of gigabytes takes seconds.
const TIME: Duration = Duration::from_secs(30);
/// Records that are read at once.
const BATCH: usize = 1_024;

const FILE: &str = "kernel.log";

/// The newest lines of a log, within a bound.
struct Newest {
    lines: VecDeque<String>,
    bytes: usize,
    most: usize,
    /// Number of lines that were removed.
    dropped: u64,
    /// Number of records that could not be read.
    lost: u64,
}

/// Reads the log to its end.
pub(super) async fn collect(collection: &Collection<'_>) -> anyhow::Result<Collected> {
    let bound = collection.bound(MAX_BYTES)?;
    let spec = match collection.args.kernel_log.parse()? {
        KernelLogSpec::File(path) => KernelLogSpec::FileOnce(path),
        KernelLogSpec::Stdin => bail!("the kernel log cannot be read from standard input"),
        spec => spec,
    };
    let mut source = host::kernel_log::open(&spec, None)?;
    let mut newest = Newest {
        lines: VecDeque::new(),
        bytes: 0,
        most: usize::try_from(bound).unwrap_or(usize::MAX),
        dropped: 0,
        lost: 0,
    };
    let problem = match tokio::time::timeout(TIME, read(&mut source, &mut newest)).await {
        Ok(read) => read.err().map(|error| format!("{error:#}")),
        Err(_) => Some(format!("not read to its end within {} s", TIME.as_secs())),
    };
    if newest.lines.is_empty() {
        bail!(problem.unwrap_or_else(|| "the kernel log is empty".to_owned()));
    }
    collection.write(FILE, newest.text().as_bytes())?;
    let Newest { dropped, lost, .. } = newest;
    let mut collected = Collected::whole(FILE);
    collected.problem = problem;
    if (dropped, lost) != (0, 0) {
        let text = format!("{dropped} older lines left out, {lost} records lost before");
        collected.cut = Some(text);
    }
    Ok(collected)
}

async fn read(source: &mut Source, newest: &mut Newest) -> anyhow::Result<()> {
    let mut events = Vec::new();
    loop {
        let read = source.next_batch(&mut events, BATCH).await;
        for event in events.drain(..) {
            match event {
                Event::Record(record) => newest.push(line(&record)),
                // The count may be unknown (0): at least one.
                Event::Lost { count, .. } => newest.lost += count.max(1),
                Event::Malformed { .. } => newest.lost += 1,
                Event::CaughtUp | Event::End => return Ok(()),
            }
        }
        read?;
    }
}

/// Returns a record in the form of `dmesg -r --time-format iso`, with further lines indented.
fn line(record: &KernelLogRecord) -> String {
    let mut line = String::new();
    if let (Some(facility), Some(level)) = (record.facility, record.level) {
        line.push_str(&format!("<{}>", u32::from(facility) * 8 + u32::from(level)));
    }
    match (record.wall, record.boot_time_us) {
        (Some(wall), _) => {
            let time = wall.strftime("%Y-%m-%dT%H:%M:%S,%6f+00:00 ");
            line.push_str(&time.to_string());
        }
        (None, Some(us)) => {
            line.push_str(&format!("[{:>5}.{:06}] ", us / 1_000_000, us % 1_000_000));
        }
        (None, None) => {}
    }
    line.push_str(&record.text.replace('\n', "\n "));
    line.push('\n');
    line
}

// === impl Newest ===

impl Newest {
    fn push(&mut self, line: String) {
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.bytes > self.most
            && let Some(oldest) = self.lines.pop_front()
        {
            self.bytes -= oldest.len();
            self.dropped += 1;
        }
    }

    fn text(&self) -> String {
        self.lines.iter().map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use host::kernel_log::parse_line;

    use super::*;

    #[test]
    fn a_line_is_read_again_as_it_was() {
        let wall = "2026-11-25T14:41:34.123456Z".parse().unwrap();
        let text = "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
        let mut record = KernelLogRecord {
            seq: Some(7),
            boot_id: None,
            boot_time_us: Some(1_500_000),
            wall: Some(wall),
            facility: Some(1),
            level: Some(3),
            place: None,
            line: None,
            text: text.to_owned(),
        };
        for (time, shown) in [
            (Some(wall), "<11>2026-11-25T14:41:34,123456+00:00 NVRM"),
            (None, "<11>[    1.500000] NVRM"),
        ] {
            record.wall = time;
            let line = line(&record);
            assert!(line.starts_with(shown), "{line}");
            let read = parse_line(line.as_bytes());
            assert_eq!(read.raw_text, text.as_bytes(), "{line}");
            assert_eq!((read.facility, read.level), (Some(1), Some(3)));
            assert_eq!(read.wall, time);
        }
    }

    #[test]
    fn the_newest_lines_stay() {
        let mut newest = Newest {
            lines: VecDeque::new(),
            bytes: 0,
            most: 10,
            dropped: 0,
            lost: 0,
        };
        for line in ["one\n", "two\n", "three\n", "4\n"] {
            newest.push(line.to_owned());
        }
        assert_eq!((newest.text().as_str(), newest.dropped), ("three\n4\n", 2));
        newest.push("more than there is room\n".to_owned());
        assert_eq!((newest.text().as_str(), newest.bytes), ("", 0));
    }
}
