//! A storm in the kernel log: hundreds of thousands of lines of a few faults, as a broken switch
//! or a job in a loop prints them.
//!
//! A `gpuwarden run` follows a file that is written as fast as the disk allows. The baseline is
//! one thread that splits the same lines and matches each against a plain set of regular
//! expressions.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::bail;
use cli::bench::{Figure, Usage};
use regex::bytes::RegexSet;

use crate::decode::PATTERNS;
use crate::mib;
use crate::product::{self, metric, status};

/// Lines of the storm. NVSentinel turned 800,000 lines of 29 faults into 800,000 events.
const LINES: usize = 800_000;
/// Distinct faults in the lines: codes of several GPUs.
const FAULTS: usize = 29;
/// Codes that a faulty node prints by the thousand.
const CODES: [u16; 4] = [13, 31, 74, 94];
/// Longest time that the product may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Name of the counter of lines read.
const READ: &str = "gpuwarden_kernel_log_records_total";

#[allow(clippy::cast_precision_loss)] // Hundreds of thousands.
pub(crate) async fn run() -> anyhow::Result<Vec<Figure>> {
    let lines = lines();
    let product = product::start(product::alone("gpuwarden-bench-storm")?).await?;
    let began = Instant::now();
    product.append_kernel_log(&lines)?;
    let written = began.elapsed();
    product
        .wait_for("all lines to be read", LIMIT, || async {
            match metric(&product, READ).await {
                Ok(read) if read >= LINES as f64 => Ok(()),
                Ok(read) => Err(format!("{read} of {LINES}")),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await?;
    let took = began.elapsed();
    let peak = Usage::read(product.pid())?.peak;
    let events = status(&product).await?.store.events;
    drop(product);
    Ok(figures(&lines, written, took, bare(&lines)?, peak, events))
}

/// Returns the time that one thread takes to split the lines and to match each.
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
) -> Vec<Figure> {
    let rate = |took: Duration| LINES as f64 / took.as_secs_f64();
    vec![
        Figure::new("storm.lines", rate(took), "lines/s")
            .beside("regex::RegexSet", rate(bare))
            .note(format!(
                "{LINES} lines of {FAULTS} faults, {:.0} MiB, written in {:.1} s; the set reads \
                 them from memory",
                mib(lines.len() as u64),
                written.as_secs_f64()
            )),
        Figure::new("storm.events", events as f64, "events")
            .beside("faults", FAULTS as f64)
            .note("repeats are counted on an event"),
        Figure::new("storm.rss", peak, "MiB").note("at most so far"),
    ]
}

/// Returns the lines, with the faults in turn.
fn lines() -> String {
    let mut text = String::new();
    for number in 0..LINES {
        let fault = number % FAULTS;
        let code = CODES.get(fault % CODES.len()).copied().unwrap_or_default();
        let bus = 0x10 + fault;
        // Writing to a string cannot fail.
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
