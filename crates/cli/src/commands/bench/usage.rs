//! Memory, processor time and threads of a process, from `/proc`.

use std::fs;

use anyhow::{Context as _, ensure};

/// Ticks per second of processor times in `/proc`, on all architectures of Linux (`USER_HZ`).
pub const TICKS: f64 = 100.0;

/// Fields of `/proc/PID/status` (proc(5)). Memory is in MiB.
#[derive(Debug, PartialEq)]
pub struct Usage {
    /// Resident memory at present.
    pub rss: f64,
    /// Part of the resident memory that is not shared with a file.
    pub own: f64,
    /// Largest resident memory so far.
    pub peak: f64,
    pub threads: f64,
}

// === impl Usage ===

impl Usage {
    /// Reads the fields of a process.
    pub fn read(pid: u32) -> anyhow::Result<Self> {
        let path = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        Self::parse(&text).with_context(|| format!("{path} lacks a field"))
    }

    fn parse(text: &str) -> Option<Self> {
        let number = |name: &str| -> Option<f64> {
            let mut lines = text.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            rss: number("VmRSS")? / 1_024.0,
            own: number("RssAnon")? / 1_024.0,
            peak: number("VmHWM")? / 1_024.0,
            threads: number("Threads")?,
        })
    }
}

/// Returns the processor time of a process so far, in ticks.
pub fn ticks(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let ticks = parse_ticks(&text);
    ensure!(ticks.is_some(), "{path} lacks a field");
    Ok(ticks.unwrap_or_default())
}

/// Returns the sum of user and system time. Fields are counted from the last parenthesis, since the
/// process name in parentheses may contain anything.
fn parse_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11);
    let user: u64 = times.next()?.parse().ok()?;
    let system: u64 = times.next()?.parse().ok()?;
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 100 0 3 0 21 13 0 0 20 0 5 0 100 1000 200";
        assert_eq!(parse_ticks(stat), Some(34));
        assert_eq!(parse_ticks("7 (a) S 1"), None);
        assert!(ticks(std::process::id()).is_ok());
    }

    #[test]
    fn memory_is_told_in_mib() {
        let text = "Name:\tx\nVmHWM:\t    4096 kB\nVmRSS:\t    2048 kB\nRssAnon:\t    1024 kB\nThreads:\t7\n";
        let expected = Usage {
            rss: 2.0,
            own: 1.0,
            peak: 4.0,
            threads: 7.0,
        };
        assert_eq!(Usage::parse(text), Some(expected));
        assert_eq!(Usage::parse("VmRSS:\t1 kB\n"), None);
        assert!(Usage::read(std::process::id()).unwrap().rss > 0.0);
    }
}
