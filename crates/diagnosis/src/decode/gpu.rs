//! Lines about a GPU as a whole: its name, its fall off the bus, its reset.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use super::{LogLine, is_gpu_uuid, is_pci, text};

/// Prefix of a reset job's line.
pub(super) const RESET: &[u8] = b"GPU reset executed:";

/// The sentence that follows the GPU's address in the long form of the message, word by word,
/// since drivers and programs that copy a log break it into lines anywhere. The empty word
/// stands for the PCI id.
const SENTENCE: [&str; 12] = [
    "(PCI",
    "ID:",
    "",
    "installed",
    "in",
    "this",
    "system",
    "has",
    "fallen",
    "off",
    "the",
    "bus",
];
/// Index of the first word after the PCI id, which some drivers leave out.
const BEHIND_ID: usize = 3;

/// A message that a GPU has fallen off the bus, or a part of one: the long form has several
/// lines, in one record or more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fallen<'a> {
    /// PCI address as printed, for example `0000:b3:00.0`.
    pub pci: Option<&'a str>,
    /// PCI vendor and device id, for example `10de:2330`.
    pub pci_id: Option<&'a str>,
    /// Words of the sentence in this line, after the address if the line has one.
    pub words: &'a str,
    /// True if this line alone states that the GPU fell off the bus.
    pub fell: bool,
}

/// A message that a GPU was reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset<'a> {
    /// UUID of the GPU as printed.
    pub uuid: &'a str,
    /// True if the reset succeeded.
    pub succeeded: bool,
}

/// Parses `at PCI:0000:b3:00: GPU-d2e7...`, which follows `NVRM: GPU `.
pub(super) fn name(rest: &[u8]) -> Option<LogLine<'_>> {
    let rest = text(rest.strip_prefix(b"at PCI:")?);
    let (pci, rest) = rest.split_once(": ")?;
    let uuid = rest.split_ascii_whitespace().next()?;
    (is_gpu_uuid(uuid) && is_pci(pci)).then_some(LogLine::GpuName { pci, uuid })
}

/// Parses `0000:b3:00.0: RmInitAdapter failed! (0x62:0x40:2393)`, which follows `NVRM: GPU `.
/// The driver prints it once for each failed start of a GPU. The line `rm_init_adapter failed`
/// that follows adds nothing.
pub(super) fn init_failed(rest: &[u8]) -> Option<LogLine<'_>> {
    const FAILED: &[u8] = b": RmInitAdapter failed";
    /// Length of the longest address, `00000000:b3:00.0`.
    const LONGEST: usize = 16;
    let at = memchr::memmem::find(
        rest.get(..(LONGEST + FAILED.len()).min(rest.len()))?,
        FAILED,
    )?;
    let pci = text(rest.get(..at)?);
    is_pci(pci).then_some(LogLine::InitFailed { pci })
}

/// Parses `0000:b3:00.0: GPU has fallen off the bus.`, which follows `NVRM: GPU `, and the
/// forms of older drivers with `at` and `PCI:`.
pub(super) fn fallen(rest: &[u8]) -> Option<Fallen<'_>> {
    // Checked first, since nearly no line that names a GPU has these words.
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
        fell: true,
        ..Fallen::default()
    })
}

/// Parses `The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:2330) installed in this system has fallen
/// off the bus and is not responding to commands.`, or its first line, which may end anywhere.
pub(super) fn fallen_begins(text: &str) -> Option<Fallen<'_>> {
    let rest = text.strip_prefix("The NVIDIA GPU ")?.trim_start();
    let (pci, words) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let pci = pci.trim_end_matches(':');
    let fell = fell(words.as_bytes());
    // The message of a driver that does not support a GPU starts in the same way.
    let is_fall = fell || advance(0, words).is_some();
    (is_pci(pci) && is_fall).then(|| Fallen {
        pci: Some(pci),
        pci_id: pci_id(words),
        words,
        fell,
    })
}

/// Parses a later line, such as `(PCI ID: 10de:2330) installed in this system has` or
/// `fallen off the bus and is not responding to commands.`.
pub(super) fn fallen_continues(rest: &[u8]) -> Option<Fallen<'_>> {
    // The first byte rules out most lines of the driver.
    let is_word = |word: &&str| word.as_bytes().first() == rest.first();
    let may_be = rest.first().is_some_and(u8::is_ascii_hexdigit) || SENTENCE.iter().any(is_word);
    let fell = fell(rest);
    if !fell && !may_be {
        return None;
    }
    let words = text(rest);
    let is_part = || (0..SENTENCE.len()).any(|at| advance(at, words) > Some(at));
    (fell || is_part()).then(|| Fallen {
        pci: None,
        pci_id: pci_id(words),
        words,
        fell,
    })
}

/// Returns how many words of the sentence are complete after `words` follow the first `at` of
/// them; `None` if they do not follow. Text after the sentence is ignored.
pub(super) fn advance(at: usize, words: &str) -> Option<usize> {
    let mut at = at;
    for word in words.split_ascii_whitespace() {
        let Some(expected) = SENTENCE.get(at) else {
            break;
        };
        at = match (*expected == word, expected.is_empty()) {
            (true, _) => at + 1,
            (false, true) if is_pci_id(word.trim_end_matches(')')) => at + 1,
            _ if at == 0 && SENTENCE.get(BEHIND_ID) == Some(&word) => BEHIND_ID + 1,
            _ => return None,
        };
    }
    Some(at)
}

/// Returns true if so many words complete the sentence.
pub(super) fn is_complete(words: usize) -> bool {
    words >= SENTENCE.len()
}

/// Parses ` GPU-d2e7..., success: true`. Old jobs had no result, and wrote the line only after
/// a successful reset.
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

/// Returns the PCI id among words of the sentence, `10de:2330` for `(PCI ID: 10de:2330)`.
fn pci_id(words: &str) -> Option<&str> {
    let words = words.split_ascii_whitespace();
    let mut words = words.map(|word| word.trim_matches(['(', ')']));
    words.find(|word| is_pci_id(word))
}

/// Returns true if a word is a vendor and device id such as `10de:2330`.
fn is_pci_id(word: &str) -> bool {
    let is_hex = |part: &str| part.len() == 4 && part.bytes().all(|b| b.is_ascii_hexdigit());
    word.split_once(':')
        .is_some_and(|(vendor, device)| is_hex(vendor) && is_hex(device))
}
