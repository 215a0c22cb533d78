//! Parses XID lines of the NVIDIA driver.

use super::{code, is_pci, leading_number, text};
use crate::catalog::{NvlinkReport, Severity, hex};

/// Longest process name in Linux, in bytes, as the driver prints it.
const MAX_PROCESS_BYTES: usize = 15;
/// Longest name, in bytes, that is skipped to find a message that is unmistakable: drivers of
/// hypervisors print names of guests.
const MAX_GUEST_BYTES: usize = 128;

/// Prefixes of the driver's messages.
const MESSAGES: [&str; 20] = [
    "An uncorrectable",
    "CCMDs",
    "CE Exception",
    "Ch ",
    "Channel ",
    "channel ",
    "Contained",
    "DBE",
    "Double Bit",
    "GPU ",
    "Graphics ",
    "MMU Fault",
    "NVLink",
    "PMU ",
    "RST:",
    "Reset Channel",
    "Row Remapper",
    "SBE",
    "Timeout ",
    "Uncontained",
];

/// Parts of an XID line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidLine<'a> {
    /// PCI address as printed, without `PCI:`.
    pub pci: &'a str,
    /// Affected part of a GPU under MIG.
    pub mig: Option<Mig>,
    /// XID code, a decimal number.
    pub code: u32,
    /// Process id, if the line has a number for it.
    pub pid: Option<u32>,
    /// Process name, if the line has one.
    pub process: Option<&'a str>,
    /// Text after the code.
    pub detail: &'a str,
    /// Text after code and process.
    pub message: &'a str,
}

/// A part of a GPU under MIG.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mig {
    /// Number of the GPU instance.
    pub gpu_instance: u32,
    /// Number of the compute instance within the GPU instance.
    pub compute_instance: Option<u32>,
}

/// A compute unit of a GPU, as in an XID 13 line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of the graphics processing cluster.
    pub gpc: u32,
    /// Number of the texture processing cluster in `gpc`.
    pub tpc: u32,
    /// Number of the streaming multiprocessor in `tpc`.
    pub sm: u32,
}

// === impl XidLine ===

impl<'a> XidLine<'a> {
    /// Returns the compute unit in `... on (GPC 1, TPC 0, SM 0): ...`.
    pub fn unit(&self) -> Option<Unit> {
        let (_, rest) = self.message.split_once("(GPC ")?;
        let (gpc, rest) = leading_number(rest)?;
        let (tpc, rest) =
            leading_number(rest.strip_prefix(',')?.trim_start().strip_prefix("TPC ")?)?;
        let (sm, rest) = leading_number(rest.strip_prefix(',')?.trim_start().strip_prefix("SM ")?)?;
        rest.starts_with(')').then_some(Unit { gpc, tpc, sm })
    }

    /// Returns the link in `... link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)`, and its
    /// registers if the line has all seven.
    pub fn link(&self) -> Option<(u32, Option<[u32; 7]>)> {
        let (_, rest) = self.message.split_once("link ")?;
        let (link, rest) = leading_number(rest.trim_start())?;
        let registers = || {
            let (inside, _) = rest.strip_prefix('(')?.split_once(')')?;
            let mut words = inside.split(',');
            let mut registers = [0; 7];
            for register in &mut registers {
                *register = hex(words.next()?.trim())?;
            }
            words.next().is_none().then_some(registers)
        };
        Some((link, registers()))
    }

    /// Returns the content of an XID 144 to 150 line: unit, severity and register words.
    pub fn nvlink5(&self) -> Option<NvlinkReport<'a>> {
        self.is_nvlink5()
            .then(|| super::nvlink5::report(self.message))?
    }

    /// Returns the severity of an XID 144 to 150 line, also if there is no
    /// [report](Self::nvlink5).
    pub fn nvlink5_severity(&self) -> Option<Severity> {
        self.is_nvlink5()
            .then(|| super::nvlink5::severity(self.message))?
    }

    /// Returns true if the code is one of `NVLink` 5, 144 to 150.
    pub fn is_nvlink5(&self) -> bool {
        (144..=150).contains(&self.code)
    }
}

/// Returns true if the text after `NVRM: ` starts as an XID line does: `Xid (`.
pub(super) fn begins(bytes: &[u8]) -> bool {
    bytes
        .strip_prefix(b"Xid")
        .is_some_and(|rest| rest.trim_ascii_start().starts_with(b"("))
}

/// Parses `Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, Ch 00000008, ...`.
pub(super) fn line(bytes: &[u8]) -> Option<XidLine<'_>> {
    let rest = text(bytes).strip_prefix("Xid")?.trim_start();
    let (place, rest) = rest.strip_prefix('(')?.split_once(')')?;
    let mut place = place.split_ascii_whitespace();
    let pci = place.next()?;
    let pci = pci.strip_prefix("PCI:").unwrap_or(pci);
    if !is_pci(pci) {
        return None;
    }
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    let (code, rest) = code(rest, bytes)?;
    let detail = rest.trim_start_matches([',', ':', ' ']).trim_end();
    // Process id and name are only accepted where drivers print them: before the message, or
    // after it; then the message is all of the detail.
    let (pid, rest) = pid(detail);
    let (process, message) = process(code, rest);
    let (pid, process) = match (pid, process) {
        (None, None) => behind(code, detail),
        at_the_front => at_the_front,
    };
    Some(XidLine {
        pci,
        mig: mig(place),
        code,
        pid: pid.and_then(|pid| pid.parse().ok()),
        process: process.filter(|name| !name.is_empty() && *name != "<unknown>"),
        detail,
        message,
    })
}

/// Returns `pid=1234` and the name in `Ch 00000008, pid=1234, name=python`.
fn behind(code: u32, detail: &str) -> (Option<&str>, Option<&str>) {
    let Some((_, rest)) = detail.split_once(", pid=") else {
        return (None, None);
    };
    let (pid, rest) = ended(rest, rest.find(", "));
    (Some(pid), process(code, rest).0)
}

/// Parses `GPU-I:02 GPU-CI:01`, the part of a GPU under MIG.
fn mig<'a>(words: impl Iterator<Item = &'a str>) -> Option<Mig> {
    let mut mig = None;
    for word in words {
        if let Some(number) = word.strip_prefix("GPU-I:") {
            mig = Some(Mig {
                gpu_instance: number.parse().ok()?,
                compute_instance: None,
            });
        } else if let (Some(number), Some(mig)) = (word.strip_prefix("GPU-CI:"), &mut mig) {
            mig.compute_instance = number.parse().ok();
        }
    }
    mig
}

/// Parses `pid=1234, ...`; returns the value and the rest.
fn pid(text: &str) -> (Option<&str>, &str) {
    let Some(rest) = text.strip_prefix("pid=") else {
        return (None, text);
    };
    let (pid, rest) = ended(rest, rest.find(", "));
    (Some(pid), rest)
}

/// Parses `name='<unknown>', ...`; returns the value and the rest.
///
/// The name ends at a comma and a blank, and may contain such itself: the first of them that a
/// message of the driver follows counts, else the first.
fn process(code: u32, text: &str) -> (Option<&str>, &str) {
    let Some(rest) = text.strip_prefix("name=") else {
        return (None, text);
    };
    let longest = match code {
        144..=150 | 154 => MAX_GUEST_BYTES,
        _ => MAX_PROCESS_BYTES,
    };
    let ends = || rest.match_indices(", ").map(|(at, _)| at);
    let (name, rest) = ended(
        rest,
        ends()
            .take_while(|at| *at <= longest)
            .find(|at| is_message(code, ended(rest, Some(*at)).1))
            .or_else(|| ends().next()),
    );
    (Some(name), rest)
}

/// Returns a value that ends at a comma, or at the end of the text, and what follows.
fn ended(text: &str, at: Option<usize>) -> (&str, &str) {
    let (value, rest) = at.and_then(|at| text.split_at_checked(at)).map_or(
        (text.trim_end_matches(',').trim_end(), ""),
        |(value, rest)| (value, rest.trim_start_matches(',').trim_start()),
    );
    (value.trim_matches(['\'', '"']), rest)
}

/// Returns true if `text` starts as the driver's messages of this code do.
fn is_message(code: u32, text: &str) -> bool {
    match code {
        144..=150 => super::nvlink5::report(text).is_some(),
        154 => text.starts_with("GPU recovery action "),
        _ => MESSAGES.iter().any(|message| text.starts_with(message)),
    }
}

#[cfg(test)]
mod tests;
