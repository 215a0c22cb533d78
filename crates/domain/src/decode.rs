//! From a line of kernel log to a finding.
//!
//! A line that is no fault costs one substring search and allocates nothing. What
//! real drivers print since R450 is accepted: parentheses with and without `PCI:`, a
//! comma or none after the code, `pid='<unknown>'`, names with spaces.

mod machine;
mod monitor;

use std::sync::LazyLock;

use memchr::memmem::Finder;

pub use machine::{
    Gpu, MAX_GPUS, MAX_LINKS, MAX_MACHINE_BYTES, MAX_MACHINE_NAME_BYTES, Machine, MachineError,
};
pub use monitor::{Finding, KernelLogDecoder, Kind};

/// What a line of the NVIDIA driver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// `NVRM: Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, ...`
    Xid(XidLine<'a>),
    /// A GPU has fallen off the bus, said without an XID.
    FallenOffBus {
        /// PCI address as printed, for example `0000:b3:00.0`.
        pci: &'a str,
        /// PCI vendor and device, for example `10de:2330`.
        pci_id: Option<&'a str>,
    },
    /// `NVRM: GPU at PCI:0000:b3:00: GPU-<uuid>`: no fault, but names a GPU.
    GpuName {
        /// PCI address as printed.
        pci: &'a str,
        /// UUID of the GPU.
        uuid: &'a str,
    },
}

/// The parts of an XID line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidLine<'a> {
    /// PCI address as printed, without `PCI:`.
    pub pci: &'a str,
    /// The code.
    pub code: u32,
    /// Process id, where the line has a number for it.
    pub pid: Option<u32>,
    /// Process name, where the line has one.
    pub process: Option<&'a str>,
    /// All that follows the code.
    pub detail: &'a str,
}

static NVRM: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("NVRM: "));

/// What a line of log says, if it is one of [`Line`].
pub fn decode(line: &[u8]) -> Option<Line<'_>> {
    let start = NVRM.find(line)?;
    // The driver prints ASCII; whatever else stands in the line, we read up to it.
    let rest = valid_prefix(&line[start + "NVRM: ".len()..]);
    xid(rest)
        .map(Line::Xid)
        .or_else(|| gpu_name(rest))
        .or_else(|| fallen_off_bus(rest))
}

/// `Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, Ch 00000008, ...`
fn xid(text: &str) -> Option<XidLine<'_>> {
    let rest = text.strip_prefix("Xid")?.trim_start();
    let (address, rest) = rest.strip_prefix('(')?.split_once(')')?;
    let pci = address.trim();
    let pci = pci.strip_prefix("PCI:").unwrap_or(pci).trim();
    if pci.is_empty()
        || !pci
            .bytes()
            .all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.')
    {
        return None;
    }
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let code = rest[..digits].parse().ok()?;
    let detail = rest[digits..]
        .trim_start_matches([',', ':', ' '])
        .trim_end();
    // `pid` and `name` are only looked for where the driver puts them: at the front.
    let (pid, after_pid) = pid(detail);
    let process = process(after_pid);
    Some(XidLine {
        pci,
        code,
        pid,
        process,
        detail,
    })
}

/// `pid=1234`, `pid='<unknown>'`: the number, and what follows.
fn pid(detail: &str) -> (Option<u32>, &str) {
    let Some(rest) = detail.strip_prefix("pid=") else {
        return (None, detail);
    };
    let (value, rest) = split_field(rest);
    (value.trim_matches(['\'', '"']).parse().ok(), rest)
}

/// `name=python3`: everything up to the next field of the driver.
fn process(detail: &str) -> Option<&str> {
    let rest = detail.strip_prefix("name=")?;
    let name = split_field(rest).0.trim_matches(['\'', '"']);
    (!name.is_empty() && name != "<unknown>").then_some(name)
}

/// Splits at the comma that ends a field. A process name may contain a comma itself:
/// one that is followed by a space ends it.
fn split_field(text: &str) -> (&str, &str) {
    match text.split_once(", ") {
        Some((field, rest)) => (field, rest.trim_start()),
        None => (text.trim_end_matches(',').trim_end(), ""),
    }
}

/// `GPU at PCI:0000:b3:00: GPU-d2e7...`
fn gpu_name(text: &str) -> Option<Line<'_>> {
    let (pci, rest) = text.strip_prefix("GPU at PCI:")?.split_once(": ")?;
    let uuid = rest.split_whitespace().next()?;
    let plausible = uuid
        .strip_prefix("GPU-")?
        .bytes()
        .all(|b| b.is_ascii_hexdigit() || b == b'-');
    (plausible && is_pci(pci)).then_some(Line::GpuName { pci, uuid })
}

/// `GPU 0000:b3:00.0: GPU has fallen off the bus.` and
/// `The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:2330) installed in this system has fallen
/// off the bus and is not responding to commands.`, the second also over several lines
/// of one record.
fn fallen_off_bus(text: &str) -> Option<Line<'_>> {
    static FALLEN: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("fallen off the bus"));
    FALLEN.find(text.as_bytes())?;
    let rest = text
        .strip_prefix("The NVIDIA GPU ")
        .or_else(|| text.strip_prefix("GPU "))?;
    let pci = rest.split_whitespace().next()?.trim_end_matches(':');
    let pci_id = text
        .split_once("PCI ID: ")
        .and_then(|(_, rest)| rest.split([')', ' ', '\n']).next())
        .filter(|id| id.contains(':'));
    is_pci(pci).then_some(Line::FallenOffBus { pci, pci_id })
}

/// Whether `text` looks like `0000:b3:00.0`, in any of its lengths.
fn is_pci(text: &str) -> bool {
    text.contains(':')
        && text
            .bytes()
            .all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.')
}

fn valid_prefix(bytes: &[u8]) -> &str {
    match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(bytes.get(..error.valid_up_to()).unwrap_or_default())
            .unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
