//! The decoder of the kernel log: it makes findings of lines.
//!
//! Lines of the NVIDIA driver, of the `NVSwitch` driver, of NIC drivers and of a GPU reset
//! are known, in the forms that real drivers print since R450. A line that is no fault
//! costs one pass over its bytes and allocates nothing.
//!
//! [`decode`] takes one line apart; [`KernelLogDecoder`] puts together what several lines
//! and the catalogue say.

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
pub use finding::{Cancelled, Finding, Kind};
pub use gpu::{Fallen, Reset};
pub use machine::{
    Gpu, MAX_GPUS, MAX_LINKS, MAX_MACHINE_BYTES, MAX_MACHINE_NAME_BYTES, Machine, MachineError,
    cut_domain,
};
pub use nic::{MAX_NICS, NicLine};
pub use nvswitch::SxidLine;
pub use rpc::RpcLine;
pub use xid::{Mig, Unit, XidLine};

/// The content of a line that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogLine<'a> {
    /// `NVRM: Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, ...`
    Xid(XidLine<'a>),
    /// `nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 ...`
    Sxid(SxidLine<'a>),
    /// A GPU has fallen off the bus, said without an XID; or a part of that message.
    Fallen(Fallen<'a>),
    /// `NVRM: GPU at PCI:0000:b3:00: GPU-<uuid>`: no fault, but names a GPU.
    GpuName {
        /// PCI address as printed.
        pci: &'a str,
        /// UUID of the GPU.
        uuid: &'a str,
    },
    /// `NVRM: GPU 0000:b3:00.0: RmInitAdapter failed! (0x62:0x40:2393)`: the driver could not start a
    /// GPU, and may try again.
    InitFailed {
        /// PCI address as printed.
        pci: &'a str,
    },
    /// `GPU reset executed: GPU-<uuid>, success: true`, written by whoever reset the GPU.
    Reset(Reset<'a>),
    /// A line of a dump that follows an XID: no fault, but tells of one.
    Rpc(RpcLine<'a>),
    /// A line of a NIC's driver, which may or may not be worth an event.
    Nic(NicLine<'a>),
    /// A line that begins as an XID or an `SXid` line does, and cannot be read as one:
    /// `NVRM: Xid (PCI:zz): 7x`.
    Garbled,
}

/// Returns the content of a line of log, if it is one of [`LogLine`].
pub fn decode(line: &[u8]) -> Option<LogLine<'_>> {
    let message = message(line);
    if let Some(rest) = message.strip_prefix(DRIVER) {
        // The driver does not quote itself.
        return driver(rest);
    }
    at_the_start(message).or_else(|| anywhere(message))
}

/// Returns whether the text of a record may hold a [`LogLine`], be it of one line or more. Cheap, and
/// true for more than is one.
fn may_say_something(text: &[u8]) -> bool {
    let message = message(text);
    match message.strip_prefix(DRIVER) {
        // Ordinary lines of the driver are many, and end here.
        Some(rest) => driver_may_say_something(rest) || memchr(b'\n', rest).is_some(),
        None => is_of_a_start(message) || next_mark(message).is_some(),
    }
}

/// Returns whether a line is one of a NIC's driver.
fn is_of_a_nic(line: &[u8]) -> bool {
    nic::is_of_a_driver(message(line))
}

/// Returns whether a message may be one of those that are looked for at its start only.
fn is_of_a_start(message: &[u8]) -> bool {
    // One look at the first byte ends it for nearly every line.
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

/// Returns the first line of the NVIDIA drivers, wherever in the message it begins: log daemons,
/// container runtimes and `message repeated 2 times: [ ... ]` put something before it.
fn anywhere(message: &[u8]) -> Option<LogLine<'_>> {
    let mut rest = message;
    let mut garbled = None;
    while let Some((mark, after)) = next_mark(rest) {
        let found = match mark {
            Mark::Driver => driver(after),
            Mark::Switch(name) => nvswitch::line(text(name), after),
        };
        match found {
            // A whole one may follow.
            Some(LogLine::Garbled) => garbled = found,
            Some(found) => return Some(found),
            None => {}
        }
        rest = after;
    }
    garbled
}

/// The beginning of all lines of the GPU driver.
const DRIVER: &[u8] = b"NVRM: ";

fn driver_may_say_something(rest: &[u8]) -> bool {
    matches!(rest.first(), Some(b'X' | b'G' | b'T' | b' ')) || gpu::fallen_goes_on(rest).is_some()
}

/// Returns the content of a line of the GPU driver, of which `rest` follows `NVRM: `.
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
        b' ' => rpc::goes_on(rest).map(LogLine::Rpc),
        b'T' => gpu::fallen_begins(text(rest)).map(LogLine::Fallen),
        _ => gpu::fallen_goes_on(rest).map(LogLine::Fallen),
    }
}

enum Mark<'a> {
    /// `NVRM: `
    Driver,
    /// `nvidia-nvswitch3: SXid `, with what stands before ` SXid`.
    Switch(&'a [u8]),
}

/// Returns the next place at which a line of the NVIDIA drivers begins, and the rest behind it.
///
/// Capital V and X are rare in logs: looking for these two bytes passes over an ordinary
/// line at the speed of memory.
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

/// Returns a line without what may stand before the message of a kernel or a reset job, once or
/// several times: blanks, `kernel:`, a time in brackets, the beginning of a line of a log, the
/// job's tag.
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

/// Returns the rest behind a bracket of up to 40 bytes: `[ 1234.567890] `.
fn after_bracket(line: &[u8]) -> Option<&[u8]> {
    const LONGEST: usize = 40;
    let end = memchr(b']', line.get(..LONGEST.min(line.len()))?)?;
    line.get(end + 1..)?.strip_prefix(b" ")
}

/// Returns the rest behind `message repeated 2 times: [`, as rsyslog writes it.
fn after_repeated(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"message repeated ")?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    rest.get(digits..)?.strip_prefix(b" times: [")
}

/// Returns the rest behind `Jan 21 11:18:36 host kernel:` or `2026-01-21T11:18:36.123456+00:00
/// kernel:`.
fn after_time(line: &[u8]) -> Option<&[u8]> {
    let ([_, _, _, b' ', _, _, b' ', rest @ ..]
    | [_, _, _, _, b'-', _, _, b'-', _, _, b'T' | b' ', rest @ ..]) = line
    else {
        return None;
    };
    let [_, _, b':', _, _, b':', rest @ ..] = rest else {
        return None;
    };
    // The rest of the time, and perhaps the host.
    let rest = after_word(rest)?;
    let tagged = rest.strip_prefix(b"kernel:");
    tagged.or_else(|| after_word(rest)?.strip_prefix(b"kernel:"))
}

fn after_word(line: &[u8]) -> Option<&[u8]> {
    line.get(memchr(b' ', line)? + 1..)
}

/// Returns the rest behind the tag of the reset job: `nvsentinel-gpu-reset[4711]: `.
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

/// Returns whether `text` is a PCI address in any of its lengths: `0000:b3:00.0`, `b3:00`.
fn is_pci(text: &str) -> bool {
    let (device, function) = text.split_once('.').unwrap_or((text, "0"));
    let is_hex =
        |part: &str| (1..=8).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
    (2..=3).contains(&device.split(':').count()) && device.split(':').chain([function]).all(is_hex)
}

/// Returns whether `text` is the UUID of a GPU: `GPU-` and hexadecimal digits.
fn is_gpu_uuid(text: &str) -> bool {
    const LONGEST: usize = 64;
    text.len() <= LONGEST
        && text.strip_prefix("GPU-").is_some_and(|rest| {
            rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
                && rest.bytes().any(|b| b.is_ascii_hexdigit())
        })
}

/// Returns the code at the front of `rest`, and what follows. `rest` is the end of what [`text`]
/// makes of `bytes`.
///
/// Drivers print a comma behind it; a blank, a colon or the end of the line are taken as well,
/// and the bracket or quote by which log daemons close a line that they quote. Anything else
/// says that the digits are not all of it, or not its own.
fn code<'a>(rest: &'a str, bytes: &[u8]) -> Option<(u32, &'a str)> {
    let (code, after) = leading_number(rest)?;
    let follows = match after.bytes().next() {
        Some(byte) => Some(byte),
        // The end of the line, or of what is text in it.
        None => bytes.get(text(bytes).len()).copied(),
    };
    let is_end = |byte: u8| b",:]\"'".contains(&byte) || byte.is_ascii_whitespace();
    let ends = follows.is_none_or(is_end);
    ends.then_some((code, after))
}

/// Returns the number at the front, and the rest.
fn leading_number(text: &str) -> Option<(u32, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at_checked(digits)?;
    Some((number.parse().ok()?, rest))
}

#[cfg(test)]
mod tests;
