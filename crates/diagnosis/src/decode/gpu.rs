//! Lines about a GPU as a whole: its name, that it has fallen off the bus, its reset.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use super::{LogLine, is_gpu_uuid, is_pci, text};

/// The beginning of the line of a reset job.
pub(super) const RESET: &[u8] = b"GPU reset executed:";

/// A message that a GPU has fallen off the bus, or a part of one: the longer form has three lines,
/// which are one record or three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fallen<'a> {
    /// PCI address as printed, for example `0000:b3:00.0`.
    pub pci: Option<&'a str>,
    /// PCI vendor and device, for example `10de:2330`.
    pub pci_id: Option<&'a str>,
    /// True if this line says that the GPU fell.
    pub fell: bool,
}

/// A message that somebody reset a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset<'a> {
    /// UUID of the GPU.
    pub uuid: &'a str,
    /// True if the reset succeeded.
    pub succeeded: bool,
}

/// Reads `at PCI:0000:b3:00: GPU-d2e7...` behind `NVRM: GPU `.
pub(super) fn name(rest: &[u8]) -> Option<LogLine<'_>> {
    let rest = text(rest.strip_prefix(b"at PCI:")?);
    let (pci, rest) = rest.split_once(": ")?;
    let uuid = rest.split_ascii_whitespace().next()?;
    (is_gpu_uuid(uuid) && is_pci(pci)).then_some(LogLine::GpuName { pci, uuid })
}

/// Reads `0000:b3:00.0: GPU has fallen off the bus.` behind `NVRM: GPU `, and the forms with `at`
/// and `PCI:` of older drivers.
pub(super) fn fallen(rest: &[u8]) -> Option<Fallen<'_>> {
    // These words first: of the lines that name a GPU nearly none has them.
    if !fell(rest) {
        return None;
    }
    let rest = rest.strip_prefix(b"at ").unwrap_or(rest);
    let rest = rest.strip_prefix(b"PCI:").unwrap_or(rest);
    let length = rest
        .iter()
        .take_while(|b| b.is_ascii_hexdigit() || matches!(b, b':' | b'.'))
        .count();
    let pci = text(rest.get(..length)?).trim_end_matches([':', '.']);
    is_pci(pci).then_some(Fallen {
        pci: Some(pci),
        pci_id: None,
        fell: true,
    })
}

/// Reads `The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:2330) installed in this system has fallen off
/// the bus and is not responding to commands.`, or the first line of it.
pub(super) fn fallen_begins(text: &str) -> Option<Fallen<'_>> {
    let rest = text.strip_prefix("The NVIDIA GPU ")?;
    let pci = rest.split_ascii_whitespace().next()?.trim_end_matches(':');
    is_pci(pci).then(|| Fallen {
        pci: Some(pci),
        pci_id: pci_id(rest),
        fell: fell(rest.as_bytes()),
    })
}

/// Reads the second line: `(PCI ID: 10de:2330) installed in this system has`.
pub(super) fn fallen_goes_on(text: &str) -> Option<Fallen<'_>> {
    Some(Fallen {
        pci: None,
        pci_id: Some(pci_id(text)?),
        fell: fell(text.as_bytes()),
    })
}

/// Reads the third line: `fallen off the bus and is not responding to commands.`.
pub(super) fn fallen_ends(rest: &[u8]) -> Option<Fallen<'_>> {
    rest.starts_with(FELL).then_some(Fallen {
        pci: None,
        pci_id: None,
        fell: true,
    })
}

/// Reads ` GPU-d2e7..., success: true`. Jobs of before there was a result wrote the line only when
/// the reset had succeeded.
pub(super) fn reset(rest: &str) -> Option<Reset<'_>> {
    let rest = rest.trim();
    let (uuid, result) = rest.split_once(',').unwrap_or((rest, "success: true"));
    let succeeded = match result.trim().strip_prefix("success:")?.trim() {
        "true" => true,
        "false" => false,
        _ => return None,
    };
    let uuid = uuid.trim();
    is_gpu_uuid(uuid).then_some(Reset { uuid, succeeded })
}

const FELL: &[u8] = b"fallen off the bus";

fn fell(rest: &[u8]) -> bool {
    static FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(FELL));
    FINDER.find(rest).is_some()
}

/// Returns `10de:2330` of `PCI ID: 10de:2330`.
fn pci_id(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("PCI ID: ")?;
    let id = rest.split([')', ' ', '\n']).next()?;
    let (vendor, device) = id.split_once(':')?;
    let is_hex = |part: &str| part.len() == 4 && part.bytes().all(|b| b.is_ascii_hexdigit());
    (is_hex(vendor) && is_hex(device)).then_some(id)
}
