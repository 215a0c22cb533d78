//! Time to decode a line of kernel log, beside a plain set of regular expressions.
//!
//! The set only finds whether a line is a fault, and its kind; the decoder also parses the line and
//! looks up the code. Both read the same lines in turns, after a check that both find the
//! same faults.

mod lines;

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use diagnosis::decode::KernelLogDecoder;
use host::kernel_log::parse_kmsg;
use jiff::Timestamp;
use regex::bytes::RegexSet;

use cli::bench::{Figure, median};

/// Patterns of the faults that the decoder finds, as a first draft would write them.
pub(crate) const PATTERNS: [&str; 6] = [
    r"NVRM: Xid\s*\((?:PCI:)?[0-9a-fA-F:.]+\)\s*:\s*[0-9]+",
    r"NVRM: GPU [0-9a-fA-F:.]+: GPU has fallen off the bus",
    r"NVRM: The NVIDIA GPU [0-9a-fA-F:.]+\s[^\n]*fallen off the bus",
    r"nvidia-nvswitch[0-9]*: SXid \(PCI:[0-9a-fA-F:.]+\): [0-9]+, (?:Fatal|Non-fatal)",
    r"GPU reset executed: GPU-[0-9a-fA-F-]+",
    r"mlx5_core.*(?:timeout\. Will cause a leak|device's health compromised|unrecoverable hardware error|Cable unplugged|High Temperature)",
];
/// Name of the baseline.
const BASELINE: &str = "regex::RegexSet";
/// Rounds of each; odd, so that the median is a measured value.
const ROUNDS: usize = 501;
/// Length of a round: short enough that most rounds are not interrupted, even on a busy machine.
const ROUND: Duration = Duration::from_millis(1);

pub(crate) fn run() -> anyhow::Result<Vec<Figure>> {
    let set = RegexSet::new(PATTERNS)?;
    let mut decoder = KernelLogDecoder::default();
    let at = Timestamp::now();
    agree(&set)?;

    let (other, other_base) = in_turns(
        &bytes(lines::OTHER),
        |line| !decoder.record(line, at).is_empty(),
        |line| set.is_match(line),
    );
    let (xid, xid_base) = in_turns(
        &bytes(lines::FAULTS),
        |line| !decoder.record(line, at).is_empty(),
        |line| set.matches(line).matched_any(),
    );
    let records: Vec<Vec<u8>> = (1_u64..).zip(lines::OTHER).map(record).collect();
    let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
    let (kmsg, kmsg_base) = in_turns(
        &records,
        |raw| parse_kmsg(raw).is_ok_and(|record| !decoder.record(&record.text(), at).is_empty()),
        |raw| parse_kmsg(raw).is_ok_and(|record| set.is_match(&record.text())),
    );
    let unit = "ns/line";
    Ok(vec![
        Figure::new("decode.other", other, unit)
            .beside(BASELINE, other_base)
            .note(format!(
                "lines without a fault: {} different ones, {} bytes on average",
                lines::OTHER.len(),
                average(lines::OTHER)
            )),
        Figure::new("decode.xid", xid, unit)
            .beside(BASELINE, xid_base)
            .note(format!(
                "lines with a fault: {} different ones, {} bytes on average; the set does not parse \
                 them",
                lines::FAULTS.len(),
                average(lines::FAULTS)
            )),
        Figure::new("decode.kmsg", kmsg, unit)
            .beside(BASELINE, kmsg_base)
            .note("the same lines as decode.other, as raw records of /dev/kmsg: both parse the record first"),
    ])
}

/// Checks that decoder and set find the faults and nothing else.
fn agree(set: &RegexSet) -> anyhow::Result<()> {
    let mut decoder = KernelLogDecoder::default();
    let expected = [(lines::OTHER, false), (lines::FAULTS, true)];
    for (lines, fault) in expected {
        for line in lines {
            let found = !decoder
                .record(line.as_bytes(), Timestamp::UNIX_EPOCH)
                .is_empty();
            ensure!(found == fault, "the decoder misreads {line:?}");
            let found = set.is_match(line.as_bytes());
            ensure!(found == fault, "the patterns misread {line:?}");
        }
    }
    let (number, line) = (1, lines::OTHER.first().context("there are no lines")?);
    ensure!(
        parse_kmsg(&record((number, line))).is_ok(),
        "the raw record cannot be parsed"
    );
    Ok(())
}

/// Returns the nanoseconds per line of both, as the median of all rounds.
fn in_turns(
    lines: &[&[u8]],
    mut ours: impl FnMut(&[u8]) -> bool,
    mut theirs: impl FnMut(&[u8]) -> bool,
) -> (f64, f64) {
    let mut passes = 1;
    loop {
        let began = Instant::now();
        pass(lines, passes, &mut ours);
        pass(lines, passes, &mut theirs);
        if began.elapsed() >= 2 * ROUND {
            break;
        }
        passes *= 2;
    }
    let mut times = [const { Vec::<f64>::new() }; 2];
    for _ in 0..ROUNDS {
        let [mine, base] = &mut times;
        mine.push(pass(lines, passes, &mut ours));
        base.push(pass(lines, passes, &mut theirs));
    }
    let [mine, base] = times;
    (median(&mine), median(&base))
}

/// Calls `look` for all lines `passes` times. Returns nanoseconds per line.
fn pass(lines: &[&[u8]], passes: u32, look: &mut impl FnMut(&[u8]) -> bool) -> f64 {
    let began = Instant::now();
    for _ in 0..passes {
        for line in lines {
            black_box(look(black_box(line)));
        }
    }
    let took = began.elapsed().as_secs_f64() * 1e9 / f64::from(passes);
    #[allow(clippy::cast_precision_loss)] // A few dozen.
    let count = lines.len().max(1) as f64;
    took / count
}

fn bytes(lines: &[&'static str]) -> Vec<&'static [u8]> {
    lines.iter().map(|line| line.as_bytes()).collect()
}

/// Returns a line as a raw record of `/dev/kmsg`.
fn record((number, line): (u64, &&str)) -> Vec<u8> {
    let at = 1_000_000 + number * 1_337;
    format!("6,{number},{at},-;{line}\n").into_bytes()
}

fn average(lines: &[&str]) -> usize {
    lines.iter().map(|line| line.len()).sum::<usize>() / lines.len().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoder_and_baseline_find_the_same_faults() {
        agree(&RegexSet::new(PATTERNS).unwrap()).unwrap();
    }

    #[test]
    fn some_lines_are_of_the_driver_and_yet_no_fault() {
        let of_driver = lines::OTHER.iter().filter(|line| line.contains("NVRM: "));
        assert!(of_driver.count() >= 3);
    }

    #[test]
    fn a_pass_looks_at_every_line() {
        let mut looks = 0;
        let time = pass(&[b"a", b"b", b"c"], 5, &mut |_| {
            looks += 1;
            false
        });
        assert_eq!(looks, 15);
        assert!(time >= 0.0);
    }
}
