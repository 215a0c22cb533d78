//! The decoder of the kernel log, which converts lines to findings.
//!
//! Recognises lines of the NVIDIA driver, of the `NVSwitch` driver, of NIC drivers and of GPU
//! resets, in the formats that drivers print since R450. A line without a fault costs one pass
//! over its bytes and allocates nothing.
//!
//! [`decode`] parses one line; [`KernelLogDecoder`] combines several lines with the catalogue.

mod decoder;
mod finding;
mod gpu;
mod machine;
mod nic;
mod nvlink5;
mod nvswitch;
mod rpc;
mod xid;

use memchr::{memchr, memchr2};

pub use decoder::{Garbled, KernelLogDecoder};
pub use finding::{Cancelled, Finding, FindingKind};
pub use gpu::{Fallen, Reset};
pub use machine::{
    Gpu, MAX_GPUS, MAX_LINKS, MAX_MACHINE_BYTES, MAX_MACHINE_NAME_BYTES, MachineError, MachineGpus,
    cut_domain,
};
pub use nic::{MAX_NICS, NicLine};
pub use nvswitch::SxidLine;
pub use rpc::RpcLine;
pub use xid::{Mig, Unit, XidLine};

/// Content of a recognised line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogLine<'a> {
    /// An XID line, `NVRM: Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, ...`
    Xid(XidLine<'a>),
    /// An `SXid` line, `nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 ...`
    Sxid(SxidLine<'a>),
    /// A message that a GPU has fallen off the bus, without an XID; or a part of such a
    /// message.
    Fallen(Fallen<'a>),
    /// A GPU's name, `NVRM: GPU at PCI:0000:b3:00: GPU-<uuid>`, which is no fault.
    GpuName {
        /// PCI address as printed.
        pci: &'a str,
        /// UUID of the GPU.
        uuid: &'a str,
    },
    /// A failed start of a GPU: `NVRM: GPU 0000:b3:00.0: RmInitAdapter failed!
    /// (0x62:0x40:2393)`. The driver may try again.
    InitFailed {
        /// PCI address as printed.
        pci: &'a str,
    },
    /// A reset, `GPU reset executed: GPU-<uuid>, success: true`, logged by the program that
    /// reset the GPU.
    Reset(Reset<'a>),
    /// A line of a dump that follows an XID, which itself is no fault.
    Rpc(RpcLine<'a>),
    /// A line of a NIC driver, which may or may not be worth an event.
    Nic(NicLine<'a>),
    /// A line that starts as an XID or `SXid` line and cannot be parsed, such as
    /// `NVRM: Xid (PCI:zz): 7x`.
    Garbled,
}

/// Returns the content of a log line, if it is a [`LogLine`].
pub fn decode(line: &[u8]) -> Option<LogLine<'_>> {
    let message = message(line);
    if let Some(rest) = message.strip_prefix(DRIVER) {
        // A driver's message does not contain another one.
        return driver(rest);
    }
    at_the_start(message).or_else(|| anywhere(message))
}

/// Returns true if the text of a record, with one line or more, may hold a [`LogLine`]. A cheap
/// check with false positives.
fn may_match(text: &[u8]) -> bool {
    let message = message(text);
    match message.strip_prefix(DRIVER) {
        // Most lines of the driver are ordinary ones, and end here.
        Some(rest) => driver_may_match(rest) || memchr(b'\n', rest).is_some(),
        None => is_of_a_start(message) || next_mark(message).is_some(),
    }
}

/// Returns true if a line is one of a NIC driver.
fn is_of_a_nic(line: &[u8]) -> bool {
    nic::is_of_a_driver(message(line))
}

/// Returns true if a message may be one of those that are recognised only at its start.
fn is_of_a_start(message: &[u8]) -> bool {
    // The first byte rules out nearly every line.
    match message.first() {
        Some(b'G') => message.starts_with(gpu::RESET),
        Some(b'm' | b'N' | b'e' | b'i') => nic::is_of_a_driver(message),
        _ => false,
    }
}

fn at_the_start(message: &[u8]) -> Option<LogLine<'_>> {
    if !is_of_a_start(message) {
        return None;
    }
    if let Some(rest) = message.strip_prefix(gpu::RESET) {
        return gpu::reset(text(rest)).map(LogLine::Reset);
    }
    nic::line(message).map(LogLine::Nic)
}

/// Returns the first line of the NVIDIA drivers, wherever in the message it starts: log
/// daemons, container runtimes and `message repeated 2 times: [ ... ]` add text before it.
fn anywhere(message: &[u8]) -> Option<LogLine<'_>> {
    let mut rest = message;
    let mut garbled = None;
    while let Some((mark, after)) = next_mark(rest) {
        let found = match mark {
            Mark::Driver => driver(after),
            Mark::Switch(name) => nvswitch::line(text(name), after),
        };
        match found {
            // An intact line may follow.
            Some(LogLine::Garbled) => garbled = found,
            Some(found) => return Some(found),
            None => {}
        }
        rest = after;
    }
    garbled
}

/// Prefix of all lines of the GPU driver.
const DRIVER: &[u8] = b"NVRM: ";

fn driver_may_match(rest: &[u8]) -> bool {
    matches!(rest.first(), Some(b'X' | b'G' | b'T' | b' ')) || gpu::fallen_continues(rest).is_some()
}

/// Parses a line of the GPU driver; `rest` follows `NVRM: `.
fn driver(rest: &[u8]) -> Option<LogLine<'_>> {
    match rest.first()? {
        b'X' => match xid::line(rest) {
            Some(xid) => Some(LogLine::Xid(xid)),
            None => xid::begins(rest).then_some(LogLine::Garbled),
        },
        b'G' => match rest.strip_prefix(b"GPU ") {
            Some(rest) => gpu::name(rest)
                .or_else(|| gpu::init_failed(rest))
                .or_else(|| gpu::fallen(rest).map(LogLine::Fallen)),
            None => rpc::begins(rest).map(LogLine::Rpc),
        },
        b' ' => rpc::row(rest).map(LogLine::Rpc),
        b'T' => gpu::fallen_begins(text(rest)).map(LogLine::Fallen),
        _ => gpu::fallen_continues(rest).map(LogLine::Fallen),
    }
}

enum Mark<'a> {
    /// The prefix `NVRM: `.
    Driver,
    /// The prefix `nvidia-nvswitch3: SXid `, with the text before ` SXid`.
    Switch(&'a [u8]),
}

/// Returns the next place where a line of the NVIDIA drivers starts, and the rest after it.
///
/// Capital V and X are rare in logs, so a search for these two bytes skips an ordinary line at
/// the speed of memory.
fn next_mark(bytes: &[u8]) -> Option<(Mark<'_>, &[u8])> {
    let mut from = 0;
    loop {
        let at = from + memchr2(b'V', b'X', bytes.get(from..)?)?;
        from = at + 1;
        let (before, here) = bytes.split_at_checked(at)?;
        if let (true, Some(after)) = (before.ends_with(b"N"), here.strip_prefix(b"VRM: ")) {
            return Some((Mark::Driver, after));
        }
        if let (Some(name), Some(after)) = (before.strip_suffix(b" S"), here.strip_prefix(b"Xid "))
        {
            return Some((Mark::Switch(name), after));
        }
    }
}

/// Returns a line without what may precede the message of a kernel or a reset job, repeatedly
/// if needed: blanks, `kernel:`, a time in brackets, the start of a log line, the job's tag.
fn message(line: &[u8]) -> &[u8] {
    let mut rest = line;
    loop {
        let shorter = match rest.first() {
            Some(b' ' | b'\t') => rest.get(1..),
            Some(b'k') => rest.strip_prefix(b"kernel:"),
            Some(b'[') => after_bracket(rest),
            Some(b'n') => after_tag(rest),
            Some(b'm') => after_repeated(rest),
            Some(b'0'..=b'9' | b'A'..=b'Z') => after_time(rest),
            _ => None,
        };
        match shorter {
            Some(shorter) => rest = shorter,
            None => return rest,
        }
    }
}

/// Skips a bracket of up to 40 bytes, `[ 1234.567890] `, and returns the rest.
fn after_bracket(line: &[u8]) -> Option<&[u8]> {
    const LONGEST: usize = 40;
    let end = memchr(b']', line.get(..LONGEST.min(line.len()))?)?;
    line.get(end + 1..)?.strip_prefix(b" ")
}

/// Skips rsyslog's `message repeated 2 times: [` and returns the rest.
fn after_repeated(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"message repeated ")?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    rest.get(digits..)?.strip_prefix(b" times: [")
}

/// Skips `Jan 21 11:18:36 host kernel:` or `2026-01-21T11:18:36.123456+00:00 kernel:` and
/// returns the rest.
fn after_time(line: &[u8]) -> Option<&[u8]> {
    let ([_, _, _, b' ', _, _, b' ', rest @ ..]
    | [_, _, _, _, b'-', _, _, b'-', _, _, b'T' | b' ', rest @ ..]) = line
    else {
        return None;
    };
    let [_, _, b':', _, _, b':', rest @ ..] = rest else {
        return None;
    };
    // The rest of the time, and an optional host.
    let rest = after_word(rest)?;
    let tagged = rest.strip_prefix(b"kernel:");
    tagged.or_else(|| after_word(rest)?.strip_prefix(b"kernel:"))
}

fn after_word(line: &[u8]) -> Option<&[u8]> {
    line.get(memchr(b' ', line)? + 1..)
}

/// Skips the tag of the reset job, `nvsentinel-gpu-reset[4711]: `, and returns the rest.
fn after_tag(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"nvsentinel-gpu-reset")?;
    let digits = rest
        .strip_prefix(b"[")
        .and_then(|rest| rest.get(memchr(b']', rest)? + 1..));
    digits.unwrap_or(rest).strip_prefix(b":")
}

/// Returns the text up to the first byte that is not UTF-8: the drivers print ASCII.
fn text(bytes: &[u8]) -> &str {
    match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(bytes.get(..error.valid_up_to()).unwrap_or_default())
            .unwrap_or_default(),
    }
}

/// Returns true if `text` is a PCI address of any length: `0000:b3:00.0`, `b3:00`.
fn is_pci(text: &str) -> bool {
    let (device, function) = text.split_once('.').unwrap_or((text, "0"));
    let is_hex =
        |part: &str| (1..=8).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
    (2..=3).contains(&device.split(':').count()) && device.split(':').chain([function]).all(is_hex)
}

/// Returns true if `text` is the UUID of a GPU: `GPU-` and hexadecimal digits.
fn is_gpu_uuid(text: &str) -> bool {
    const LONGEST: usize = 64;
    text.len() <= LONGEST
        && text.strip_prefix("GPU-").is_some_and(|rest| {
            rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
                && rest.bytes().any(|b| b.is_ascii_hexdigit())
        })
}

/// Parses the code at the start of `rest`, and returns the code and what follows. `rest` is the
/// end of [`text`] of `bytes`.
///
/// Drivers print a comma after the code; a blank, a colon and the end of the line are accepted
/// too, and so is the closing bracket or quote around a line that a log daemon quotes. Anything
/// else shows that the digits are incomplete, or belong to something else.
fn code<'a>(rest: &'a str, bytes: &[u8]) -> Option<(u32, &'a str)> {
    let (code, after) = leading_number(rest)?;
    let follows = match after.bytes().next() {
        Some(byte) => Some(byte),
        // The end of the line, or of its valid text.
        None => bytes.get(text(bytes).len()).copied(),
    };
    let is_end = |byte: u8| b",:]\"'".contains(&byte) || byte.is_ascii_whitespace();
    let ends = follows.is_none_or(is_end);
    ends.then_some((code, after))
}

/// Returns the number at the start, and the rest.
fn leading_number(text: &str) -> Option<(u32, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at_checked(digits)?;
    Some((number.parse().ok()?, rest))
}

#[cfg(test)]
mod tests;
