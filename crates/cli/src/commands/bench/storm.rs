//! A storm in the kernel log: hundreds of thousands of lines of a few faults, as a broken
//! switch or a job in a loop prints them.
//!
//! A `gpuwarden run` of our own follows a file that is written as fast as the disk takes it.
//! Beside it stands one thread that splits the same lines and asks a plain set of regular
//! expressions whether each is a fault, and does nothing about it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use console::api::Status;
use regex::bytes::RegexSet;

use super::decode::PATTERNS;
use super::product::{FaultLog, Product, Role};
use super::usage::Usage;
use super::{Row, mib};
use crate::args::{BenchArgs, BenchLog};

/// Lines of the storm. NVSentinel took 800,000 lines of 29 faults as 800,000 events.
const LINES: usize = 800_000;
/// Faults that the lines are of: codes of several GPUs.
const FAULTS: usize = 29;
/// Codes that a node in trouble prints by the thousand.
const CODES: [u16; 4] = [13, 31, 74, 94];
/// How long it may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Pause before the product is asked again how far it is.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// Counter of the lines that were read.
const READ: &str = "gpuwarden_kernel_log_records_total ";

pub(super) async fn run(args: &BenchArgs) -> anyhow::Result<Vec<Row>> {
    // The running kernel's log does not hold so many.
    let args = BenchArgs {
        via: BenchLog::File,
        ..args.clone()
    };
    let lines = lines();
    let mut product = Product::start(&args, "gpuwarden-bench-storm", Role::Alone).await?;
    let began = Instant::now();
    let FaultLog::File(file) = &mut product.log else {
        bail!("the kernel log is no file");
    };
    file.write_all(lines.as_bytes())?;
    let written = began.elapsed();
    let took = match read(&product, began).await {
        Ok(took) => took,
        Err(error) => return Err(product.blame(&error)),
    };
    let pid = *product.pids()?.first().context("nothing was started")?;
    let peak = Usage::read(pid)?.peak;
    let status: Status = product.client.get("/api/v1/status").await?;
    product.stop().await?;
    let bare = bare(&lines)?;
    Ok(figures(
        &lines,
        written,
        took,
        bare,
        peak,
        status.store.events,
    ))
}

/// Waits until all lines are read; how long it took.
async fn read(product: &Product, began: Instant) -> anyhow::Result<Duration> {
    let mut last = None;
    while began.elapsed() < LIMIT {
        let metrics = product.client.get_bytes("/metrics").await?;
        last = String::from_utf8_lossy(&metrics)
            .lines()
            .find_map(|line| line.strip_prefix(READ)?.trim().parse::<usize>().ok());
        if last == Some(LINES) {
            return Ok(began.elapsed());
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
    bail!(
        "after {} s {last:?} of {LINES} lines are read",
        LIMIT.as_secs()
    )
}

/// How long one thread takes to split the lines and to ask the patterns about each.
fn bare(lines: &str) -> anyhow::Result<Duration> {
    let set = RegexSet::new(PATTERNS)?;
    let began = Instant::now();
    let found = lines.lines().filter(|line| set.is_match(line.as_bytes()));
    let found = found.count();
    if found != LINES {
        bail!("the patterns find {found} of {LINES} faults");
    }
    Ok(began.elapsed())
}

#[allow(clippy::cast_precision_loss)] // Millions at most.
fn figures(
    lines: &str,
    written: Duration,
    took: Duration,
    bare: Duration,
    peak: f64,
    events: u64,
) -> Vec<Row> {
    let rate = |took: Duration| LINES as f64 / took.as_secs_f64();
    vec![
        Row::new("storm.lines", rate(took), "lines/s")
            .beside("regex::RegexSet", rate(bare))
            .note(format!(
                "{LINES} lines of {FAULTS} faults, {:.0} MiB, written in {:.1} s; the set reads \
                 them from memory",
                mib(lines.len() as u64),
                written.as_secs_f64()
            )),
        Row::new("storm.events", events as f64, "events")
            .beside("faults", FAULTS as f64)
            .note("repeats are counted on an event"),
        Row::new("storm.rss", peak, "MiB").note("at most so far"),
    ]
}

/// The lines, each fault in its turn.
fn lines() -> String {
    let mut text = String::new();
    for number in 0..LINES {
        let fault = number % FAULTS;
        let code = CODES.get(fault % CODES.len()).copied().unwrap_or_default();
        let bus = 0x10 + fault;
        // A string takes all that is written.
        let _ = writeln!(
            text,
            "NVRM: Xid (PCI:0000:{bus:02x}:00): {code}, pid={number}, name=python3, Ch {number:08x}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use diagnosis::decode::KernelLogDecoder;
    use jiff::Timestamp;

    use super::*;

    #[test]
    fn every_line_is_one_of_the_faults() {
        let lines = lines();
        assert_eq!(lines.lines().count(), LINES);
        let mut decoder = KernelLogDecoder::default();
        let mut faults = BTreeSet::new();
        for line in lines.lines().take(10 * FAULTS) {
            let found = decoder.record(line.as_bytes(), Timestamp::UNIX_EPOCH);
            assert_eq!(found.len(), 1, "{line}");
            faults.insert(line.split(", pid").next().unwrap().to_owned());
        }
        assert_eq!(faults.len(), FAULTS);
    }
}
