//! The needs of a process, as the kernel tells them: memory, processor time, threads.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};

/// Ticks a second in which Linux tells processor time, on all its architectures (`USER_HZ`).
pub(super) const TICKS: f64 = 100.0;

/// `Usage` is what `/proc/PID/status` says (proc(5)). Memory is in MiB.
#[derive(Debug, PartialEq)]
pub struct Usage {
    /// The bytes in memory now.
    pub rss: f64,
    /// The bytes of these that are not shared with a file.
    pub own: f64,
    /// The most so far.
    pub peak: f64,
    /// The number of its threads.
    pub threads: f64,
}

// === impl Usage ===

impl Usage {
    /// Reads it of a process.
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

/// Returns the processor time of a process so far.
pub fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let ticks = u32::try_from(ticks(pid)?).unwrap_or(u32::MAX);
    Ok(Duration::from_secs_f64(f64::from(ticks) / TICKS))
}

/// Returns the same in ticks.
pub(super) fn ticks(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let ticks = parse_ticks(&text);
    ensure!(ticks.is_some(), "{path} lacks a field");
    Ok(ticks.unwrap_or_default())
}

/// Returns user and system time. The name in parentheses may hold anything, so fields are counted
/// behind it.
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
