//! Parses the text of XID 144 to 150 lines:
//! `NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000 ...)`.

use crate::catalog::{NvlinkReport, Severity};

/// Longest accepted name of a unit, in bytes. The name becomes part of the error code.
const MAX_UNIT_BYTES: usize = 40;

/// Returns the content of the text, if it has a unit and at least two register words.
///
/// The name of the unit is everything before the severity: `MSE Degraded` contains a blank.
pub(super) fn report(text: &str) -> Option<NvlinkReport<'_>> {
    let (head, words) = text.split_once("(0x").or_else(|| text.split_once("[0x"))?;
    let mut words = words
        .split([' ', ',', ')', ']'])
        .filter(|word| !word.is_empty());
    let intr_info = u32::from_str_radix(words.next()?, 16).ok()?;
    let error_status = u32::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    let (unit, severity) = unit(head)?;
    let printable = unit
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'/' | b' '));
    (printable && unit.len() <= MAX_UNIT_BYTES).then_some(NvlinkReport {
        unit,
        severity,
        intr_info,
        error_status,
    })
}

/// Returns the driver's severity in a text that may not be a report.
pub(super) fn severity(text: &str) -> Option<Severity> {
    text.split_ascii_whitespace().find_map(severity_of)
}

fn severity_of(word: &str) -> Option<Severity> {
    match word.to_ascii_lowercase().as_str() {
        "fatal" => Some(Severity::Fatal),
        "nonfatal" | "non-fatal" | "correctable" => Some(Severity::NonFatal),
        _ => None,
    }
}

/// Returns the name of the unit, and the driver's severity.
fn unit(head: &str) -> Option<(&str, Option<Severity>)> {
    let mut from = 0;
    while let Some(word) = head.get(from..)?.split_ascii_whitespace().next() {
        let at = from + head.get(from..)?.find(word)?;
        let severity = severity_of(word);
        if severity.is_some() {
            let unit = head.get(..at)?.trim();
            // `Link Fatal` is a severity too.
            let unit = unit.strip_suffix(" Link").unwrap_or(unit).trim_end();
            return (!unit.is_empty()).then_some((unit, severity));
        }
        from = at + word.len();
    }
    let unit = head.split_ascii_whitespace().next()?;
    Some((unit, None))
}
