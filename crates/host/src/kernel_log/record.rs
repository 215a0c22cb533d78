//! Records of the kernel log, and the parser of the format of `/dev/kmsg`.
//!
//! A raw record is `prio,seq,usec,flags[,more];text`, a newline, and then lines that begin with
//! a space and hold `KEY=value` pairs (kernel documentation, ABI/testing/dev-kmsg). Bytes of
//! the text that are control characters, a backslash or outside ASCII arrive as `\xNN`, so a
//! raw text never spans lines. Parsing borrows and allocates nothing; the text is decoded only
//! on request.

use std::borrow::Cow;

use jiff::Timestamp;
use memchr::{memchr, memchr2};

use super::Position;
use crate::boot::BootId;

/// A record of the kernel log that owns its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelLogRecord {
    /// Kernel's sequence number, counted from 0 in each boot; only raw records have one.
    pub seq: Option<u64>,
    /// Boot of the record; known only for the kernel's own log and the journal.
    pub boot_id: Option<BootId>,
    /// Time of the record, in microseconds of the kernel's monotonic clock.
    pub boot_time_us: Option<u64>,
    /// Time of the record, if the source has it or the record is from the running boot.
    pub wall: Option<Timestamp>,
    /// Syslog facility: 0 is the kernel, 1 and above are written by user space.
    pub facility: Option<u8>,
    /// Syslog severity: 0 (emergency) to 7 (debug).
    pub level: Option<u8>,
    /// Place after the record, where a later process can resume; `None` for input that cannot
    /// be resumed.
    pub place: Option<Position>,
    /// Line number in the input, from 1; only for input that is read to its end.
    pub line: Option<u64>,
    /// Decoded text of the record. May hold newlines and control characters. Bytes that are not
    /// UTF-8 appear as `\xNN`.
    pub text: String,
}

/// A record of the kernel log whose text is borrowed from the input buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordRef<'a> {
    /// Sequence number, as in [`KernelLogRecord::seq`].
    pub seq: Option<u64>,
    /// Monotonic time, as in [`KernelLogRecord::boot_time_us`].
    pub boot_time_us: Option<u64>,
    /// Wall-clock time, as in [`KernelLogRecord::wall`].
    pub wall: Option<Timestamp>,
    /// Syslog facility, as in [`KernelLogRecord::facility`].
    pub facility: Option<u8>,
    /// Syslog severity, as in [`KernelLogRecord::level`].
    pub level: Option<u8>,
    /// Undecoded text of the record.
    pub raw_text: &'a [u8],
    /// True if `raw_text` uses the `\xNN` escapes of `/dev/kmsg`.
    pub escaped: bool,
}

/// Error of a raw record of `/dev/kmsg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The first line does not contain the end of the header.
    #[error("no `;` ends the header of the record")]
    HeaderEnd,
    /// A field of the header is missing or not a decimal number.
    #[error("the {0} in the header of the record is not a decimal number")]
    NotANumber(&'static str),
    /// A field of the header is out of range.
    #[error("the {0} in the header of the record is out of range")]
    OutOfRange(&'static str),
}

/// Parses one raw record of `/dev/kmsg`: the result of one `read`, or one line of a file with
/// such records.
///
/// Ignores everything after the text's line (the `KEY=value` lines), flags, and further header
/// fields.
///
/// # Errors
///
/// [`Malformed`] if the header is not three numbers and a `;`.
pub fn parse_kmsg(record: &[u8]) -> Result<RecordRef<'_>, Malformed> {
    let (priority, rest) = header_number(record, "priority")?;
    let (seq, rest) = header_number(next_field(rest, "sequence number")?, "sequence number")?;
    let (boot_time_us, rest) = header_number(next_field(rest, "time stamp")?, "time stamp")?;
    if !matches!(rest.first(), Some(b',' | b';') | None) {
        return Err(Malformed::NotANumber("time stamp"));
    }

    let header_end = memchr2(b';', b'\n', rest).ok_or(Malformed::HeaderEnd)?;
    let text = rest
        .get(header_end..)
        .and_then(|rest| rest.strip_prefix(b";"));
    let text = text.ok_or(Malformed::HeaderEnd)?;
    let raw_text = memchr(b'\n', text)
        .and_then(|end| text.get(..end))
        .unwrap_or(text);

    Ok(RecordRef {
        seq: Some(seq),
        boot_time_us: Some(boot_time_us),
        wall: None,
        facility: Some(u8::try_from(priority >> 3).map_err(|_| Malformed::OutOfRange("priority"))?),
        level: level_of(priority),
        raw_text,
        escaped: true,
    })
}

/// Returns the severity in a syslog priority, its lowest three bits.
pub(super) fn level_of(priority: u64) -> Option<u8> {
    u8::try_from(priority & 7).ok()
}

fn next_field<'a>(rest: &'a [u8], name: &'static str) -> Result<&'a [u8], Malformed> {
    rest.strip_prefix(b",").ok_or(Malformed::NotANumber(name))
}

fn header_number<'a>(bytes: &'a [u8], name: &'static str) -> Result<(u64, &'a [u8]), Malformed> {
    let mut value = 0_u64;
    let mut rest = bytes;
    while let [digit @ b'0'..=b'9', tail @ ..] = rest {
        value = value
            .checked_mul(10)
            .and_then(|value| value.checked_add(u64::from(digit - b'0')))
            .ok_or(Malformed::OutOfRange(name))?;
        rest = tail;
    }
    if rest.len() == bytes.len() {
        Err(Malformed::NotANumber(name))
    } else {
        Ok((value, rest))
    }
}

/// Decodes `\xNN`; leaves a backslash that starts no such escape.
fn unescape(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = memchr(b'\\', text) else {
        return Cow::Borrowed(text);
    };
    let (plain, mut rest) = text.split_at(first);
    let mut decoded = Vec::with_capacity(text.len());
    decoded.extend_from_slice(plain);
    while let [byte, tail @ ..] = rest {
        if let [b'\\', b'x', high, low, tail @ ..] = rest
            && let (Some(high), Some(low)) = (hex_digit(*high), hex_digit(*low))
        {
            decoded.push(high << 4 | low);
            rest = tail;
        } else {
            decoded.push(*byte);
            rest = tail;
        }
    }
    Cow::Owned(decoded)
}

fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

/// Returns the text as UTF-8, with invalid bytes as `\xNN`, so that they stay distinguishable.
pub(super) fn readable(bytes: Cow<'_, [u8]>) -> Cow<'_, str> {
    match bytes {
        Cow::Borrowed(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => Cow::Borrowed(text),
            Err(_) => Cow::Owned(escape_invalid(bytes)),
        },
        Cow::Owned(bytes) => Cow::Owned(match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => escape_invalid(error.as_bytes()),
        }),
    }
}

fn escape_invalid(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() + 16);
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str("\\x");
            for nibble in [byte >> 4, byte & 0xf] {
                text.extend(char::from_digit(u32::from(nibble), 16));
            }
        }
    }
    text
}

// === impl RecordRef ===

impl<'a> RecordRef<'a> {
    /// Returns the decoded text; borrowed unless an escape had to be decoded.
    pub fn text(&self) -> Cow<'a, [u8]> {
        if self.escaped {
            unescape(self.raw_text)
        } else {
            Cow::Borrowed(self.raw_text)
        }
    }

    /// Returns the decoded text as UTF-8, with invalid bytes as `\xNN`; borrowed if nothing had
    /// to be changed.
    pub fn text_lossy(&self) -> Cow<'a, str> {
        readable(self.text())
    }

    /// Copies the record out of the buffer.
    pub fn to_record(&self) -> KernelLogRecord {
        KernelLogRecord {
            seq: self.seq,
            boot_id: None,
            boot_time_us: self.boot_time_us,
            wall: self.wall,
            facility: self.facility,
            level: self.level,
            place: None,
            line: None,
            text: self.text_lossy().into_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(priority: u64, seq: u64, us: u64, raw_text: &[u8]) -> RecordRef<'_> {
        RecordRef {
            seq: Some(seq),
            boot_time_us: Some(us),
            wall: None,
            facility: u8::try_from(priority >> 3).ok(),
            level: u8::try_from(priority & 7).ok(),
            raw_text,
            escaped: true,
        }
    }

    #[test]
    fn raw_records() {
        let cases: &[(&[u8], RecordRef<'_>)] = &[
            (
                b"6,339,5140900,-;NET: Registered\n",
                record(6, 339, 5_140_900, b"NET: Registered"),
            ),
            (b"4,0,0,-;", record(4, 0, 0, b"")),
            (b"4,0,0,-;no newline", record(4, 0, 0, b"no newline")),
            (b"3,7,8,-,caller=T1;text", record(3, 7, 8, b"text")),
            (
                b"6,416,1758426,-,ncfrag=0/33;text",
                record(6, 416, 1_758_426, b"text"),
            ),
            (b"3,7,8,c;start", record(3, 7, 8, b"start")),
            (b"3,7,8,+;rest", record(3, 7, 8, b"rest")),
            // Kernel 3.5 wrote no flags.
            (
                b"7,160,424069;pci_root",
                record(7, 160, 424_069, b"pci_root"),
            ),
            (
                b"7,160,424069,-;pci 0000:00\n SUBSYSTEM=pci\n DEVICE=+pci:0000:00\n",
                record(7, 160, 424_069, b"pci 0000:00"),
            ),
            (b"3,1,2,-;a;b,c", record(3, 1, 2, b"a;b,c")),
            (b"3,1,2,-;raw \xff byte", record(3, 1, 2, b"raw \xff byte")),
            (
                b"2047,18446744073709551615,18446744073709551615,-;x",
                record(2047, u64::MAX, u64::MAX, b"x"),
            ),
        ];
        for (raw, expected) in cases {
            assert_eq!(
                parse_kmsg(raw).as_ref(),
                Ok(expected),
                "{}",
                raw.escape_ascii()
            );
        }
    }

    #[test]
    fn malformed_records_say_why() {
        use Malformed::{HeaderEnd, NotANumber, OutOfRange};

        let cases: &[(&[u8], Malformed)] = &[
            (b"", NotANumber("priority")),
            (b";", NotANumber("priority")),
            (b"x,1,2,-;t", NotANumber("priority")),
            (b"-6,1,2,-;t", NotANumber("priority")),
            (b"2048,1,2,-;t", OutOfRange("priority")),
            (b"6", NotANumber("sequence number")),
            (b"6;t", NotANumber("sequence number")),
            (b"6,,2,-;t", NotANumber("sequence number")),
            (
                b"6,18446744073709551616,2,-;t",
                OutOfRange("sequence number"),
            ),
            (b"6,1", NotANumber("time stamp")),
            (b"6,1,-;t", NotANumber("time stamp")),
            (b"6,1,2x,-;t", NotANumber("time stamp")),
            (b"6,1,2", HeaderEnd),
            (b"6,1,2,-", HeaderEnd),
            (b"6,1,2,-\n;text", HeaderEnd),
            (b" SUBSYSTEM=pci", NotANumber("priority")),
        ];
        for (raw, expected) in cases {
            assert_eq!(parse_kmsg(raw), Err(*expected), "{}", raw.escape_ascii());
        }
        assert_eq!(
            NotANumber("time stamp").to_string(),
            "the time stamp in the header of the record is not a decimal number",
        );
    }

    #[test]
    fn escapes() {
        let cases: &[(&[u8], &[u8], &str)] = &[
            (b"plain", b"plain", "plain"),
            (br"two\x0alines", b"two\nlines", "two\nlines"),
            (br"back\x5cslash", br"back\slash", r"back\slash"),
            (br"\x5cx41", br"\x41", r"\x41"),
            (br"caf\xc3\xa9", "caf\u{e9}".as_bytes(), "caf\u{e9}"),
            (br"CAF\xC3\x89", "CAF\u{c9}".as_bytes(), "CAF\u{c9}"),
            (br"half\xc3", b"half\xc3", r"half\xc3"),
            (b"raw\xff", b"raw\xff", r"raw\xff"),
            (br"\x", br"\x", r"\x"),
            (br"\x4", br"\x4", r"\x4"),
            (br"\xg1", br"\xg1", r"\xg1"),
            (br"\n", br"\n", r"\n"),
            (br"end\", br"end\", r"end\"),
            (b"", b"", ""),
        ];
        for (raw, bytes, text) in cases {
            let record = record(6, 1, 2, raw);
            assert_eq!(record.text().as_ref(), *bytes, "{}", raw.escape_ascii());
            assert_eq!(record.text_lossy(), *text, "{}", raw.escape_ascii());
            assert_eq!(record.to_record().text, *text, "{}", raw.escape_ascii());
        }
    }

    #[test]
    fn text_without_escapes_is_borrowed() {
        let record = record(6, 1, 2, b"NVRM: loading");
        assert!(matches!(record.text(), Cow::Borrowed(_)));
        assert!(matches!(record.text_lossy(), Cow::Borrowed(_)));
    }

    #[test]
    fn only_kmsg_text_is_unescaped() {
        let record = RecordRef {
            raw_text: br"\x41",
            ..RecordRef::default()
        };
        assert_eq!(record.text().as_ref(), br"\x41");
    }

    /// Escapes text as the kernel does for a reader of `/dev/kmsg`.
    fn kernel_escape(text: &[u8]) -> Vec<u8> {
        let mut escaped = Vec::new();
        for &byte in text {
            if !(b' '..127).contains(&byte) || byte == b'\\' {
                escaped.extend_from_slice(format!("\\x{byte:02x}").as_bytes());
            } else {
                escaped.push(byte);
            }
        }
        escaped
    }

    proptest! {
        #[test]
        fn what_the_kernel_escapes_comes_back(
            priority in 0_u64..2048,
            seq: u64,
            us: u64,
            text: Vec<u8>,
            dictionary in prop::option::of("( [A-Z]{1,9}=[a-z+:0-9]{0,9}\n){1,3}"),
        ) {
            let mut raw = format!("{priority},{seq},{us},-;").into_bytes();
            raw.extend(kernel_escape(&text));
            raw.push(b'\n');
            raw.extend_from_slice(dictionary.unwrap_or_default().as_bytes());

            let parsed = parse_kmsg(&raw).unwrap();
            prop_assert_eq!(parsed.seq, Some(seq));
            prop_assert_eq!(parsed.boot_time_us, Some(us));
            prop_assert_eq!(parsed.facility.map(u64::from), Some(priority >> 3));
            prop_assert_eq!(parsed.level.map(u64::from), Some(priority & 7));
            prop_assert_eq!(parsed.text().into_owned(), text);
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(raw: Vec<u8>) {
            if let Ok(record) = parse_kmsg(&raw) {
                let _ = record.to_record();
            }
        }

        #[test]
        fn any_text_after_a_header_is_a_record(text: Vec<u8>) {
            let raw = [b"6,1,2,-;".as_slice(), &text].concat();
            let record = parse_kmsg(&raw).unwrap();
            prop_assert!(record.text_lossy().len() <= 4 * text.len());
        }
    }
}
