//! Parses `SXid` lines of the `NVSwitch` driver.

use super::{LogLine, code, is_pci, leading_number, text};

/// Parts of an `SXid` line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SxidLine<'a> {
    /// Number of the switch, 3 for `nvidia-nvswitch3`.
    pub switch: Option<u32>,
    /// PCI address as printed, without `PCI:`.
    pub pci: &'a str,
    /// `SXid` code, a decimal number.
    pub code: u32,
    /// Severity in the line: true for `Fatal`, false for `Non-fatal` and `Correctable`.
    pub fatal: Option<bool>,
    /// Number of the link, if the line names one.
    pub link: Option<u32>,
    /// Rest of the line.
    pub message: &'a str,
}

/// Parses `nvidia-nvswitch3:` and `(PCI:0000:c1:00.0): 24007, Fatal, Link 44 sourcetrack
/// timeout`.
///
/// Each error has two more lines, with `Severity` and `Data` after the code, which are ignored
/// since they add nothing.
pub(super) fn line<'a>(name: &'a str, bytes: &'a [u8]) -> Option<LogLine<'a>> {
    let (_, switch) = name
        .trim_end()
        .trim_end_matches(':')
        .rsplit_once("nvidia-nvswitch")?;
    if !bytes.starts_with(b"(") {
        return None;
    }
    let Some((pci, code, rest)) = head(bytes) else {
        return Some(LogLine::Garbled);
    };
    let rest = rest.trim_start_matches([',', ':', ' ']).trim_end();
    let (word, after) = rest.split_once(',').unwrap_or((rest, ""));
    let (fatal, message) = match word.trim().to_ascii_lowercase().as_str() {
        "fatal" => (Some(true), after.trim_start()),
        "non-fatal" | "nonfatal" | "correctable" => (Some(false), after.trim_start()),
        _ if rest.starts_with("Severity ") || rest.starts_with("Data {") => return None,
        _ => (None, rest),
    };
    let link = message
        .strip_prefix("Link ")
        .and_then(|rest| leading_number(rest.trim_start()));
    Some(LogLine::Sxid(SxidLine {
        switch: switch.parse().ok(),
        pci,
        code,
        fatal,
        link: link.map(|(link, _)| link),
        message,
    }))
}

/// Returns PCI address and code, which each line has, and the rest.
fn head(bytes: &[u8]) -> Option<(&str, u32, &str)> {
    let (place, rest) = text(bytes).strip_prefix('(')?.split_once(')')?;
    let place = place.trim();
    let pci = place.strip_prefix("PCI:").unwrap_or(place);
    let (code, rest) = code(rest.trim_start().strip_prefix(':')?.trim_start(), bytes)?;
    is_pci(pci).then_some((pci, code, rest))
}
