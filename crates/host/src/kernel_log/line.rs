//! Parses one line of kernel log as text, in any format that people or log daemons keep.
//!
//! The formats are tried from the outside inwards: a raw record; a syslog priority (`<3>`,
//! `dmesg -r`) or its names (`dmesg -x`); a time in brackets (`dmesg`, `-T`, `-d`, `-e`), in
//! ISO 8601 (`dmesg --time-format iso`, `journalctl -o short-iso`, rsyslog), in the format of
//! RFC 3164 (syslog, `journalctl`), of RFC 5424, or of `journalctl -o short-full`; host and
//! tag, also without a time; names before a time in brackets (Talos). An unrecognised prefix
//! stays part of the text, so no line is refused. [`unwrapped`] first removes what other
//! programs add around a line.

mod time;
mod wrapped;

use jiff::{
    SignedDuration, Timestamp,
    civil::DateTime,
    tz::{Offset, TimeZone},
};
use memchr::memchr;

use super::record::{RecordRef, level_of, parse_kmsg};
use time::{
    TimeOfDay, WEEKDAYS, calendar_time, date, hours_offset, is_relative_time, iso_stamp, name_of,
    number, seconds_as_us, time_of_day,
};
pub use wrapped::unwrapped;

/// Longest bracket, name or tag that is parsed, in bytes; a longer one is text.
const TOKEN_MAX: usize = 64;
/// Longest host name and longest field of RFC 5424, in bytes.
const FIELD_MAX: usize = 255;

const FACILITIES: [&[u8]; 24] = [
    b"kern",
    b"user",
    b"mail",
    b"daemon",
    b"auth",
    b"syslog",
    b"lpr",
    b"news",
    b"uucp",
    b"cron",
    b"authpriv",
    b"ftp",
    b"res0",
    b"res1",
    b"res2",
    b"res3",
    b"local0",
    b"local1",
    b"local2",
    b"local3",
    b"local4",
    b"local5",
    b"local6",
    b"local7",
];
const LEVELS: [&[u8]; 8] = [
    b"emerg", b"alert", b"crit", b"err", b"warn", b"notice", b"info", b"debug",
];
/// Parses lines of kernel log, with the time zone and year that local times lack.
#[derive(Clone, Debug)]
pub struct LineParser {
    zone: TimeZone,
    now: Option<Timestamp>,
}

/// Parses one line of kernel log in any format that this module supports.
///
/// Local times are taken as UTC, and a time without its year (syslog) is dropped; use
/// [`LineParser`] to interpret them. A newline at the end is ignored. Never fails: an
/// unrecognised line becomes the text.
pub fn parse_line(line: &[u8]) -> RecordRef<'_> {
    LineParser {
        zone: TimeZone::UTC,
        now: None,
    }
    .parse(line)
}

// === impl LineParser ===

impl LineParser {
    /// Returns a parser for lines with local times in `zone` that were written before `now`.
    ///
    /// A time without a year gets the latest year that does not place it more than a day after
    /// `now`.
    pub fn new(zone: TimeZone, now: Timestamp) -> Self {
        Self {
            zone,
            now: Some(now),
        }
    }

    /// Updates the current time of a long-lived parser.
    pub(super) fn set_now(&mut self, now: Timestamp) {
        self.now = Some(now);
    }

    /// Parses one line; see [`parse_line`].
    pub fn parse<'a>(&self, line: &'a [u8]) -> RecordRef<'a> {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        // A container runtime prefixes every line with a time of its own.
        if let Some((wall, _, rest)) = iso_stamp(line)
            && let Some(line) = wrapped::stream(rest)
        {
            let record = self.of_kernel(line);
            let wall = record.wall.or(Some(wall));
            return RecordRef { wall, ..record };
        }
        self.of_kernel(line)
    }

    /// Parses a line without a container runtime's prefix: a raw record or a log daemon's line.
    fn of_kernel<'a>(&self, line: &'a [u8]) -> RecordRef<'a> {
        if let Ok(record) = parse_kmsg(line) {
            return record;
        }
        let mut record = RecordRef::default();
        let rest = priority(line, &mut record)
            .or_else(|| priority_names(line, &mut record))
            .unwrap_or(line);
        record.raw_text = self
            .bracketed_time(rest, &mut record)
            .or_else(|| self.iso_time(rest, &mut record))
            .or_else(|| self.syslog_time(rest, &mut record))
            .or_else(|| self.full_time(rest, &mut record))
            .or_else(|| self.syslog_protocol(rest, &mut record))
            .or_else(|| self.host_and_kernel(rest, &mut record))
            .or_else(|| self.names_and_time(rest, &mut record))
            .unwrap_or(rest);
        record
    }

    /// Parses `[   12.345678] `, `[Sat Nov 21 11:40:00 2026] `, `[Nov21 11:40] ` or
    /// `[  +0.000012] `, each with an optional time difference (`dmesg -d`) and an optional caller
    /// (`CONFIG_PRINTK_CALLER`). Returns the rest of the line.
    fn bracketed_time<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
        let rest = bytes.strip_prefix(b"[")?;
        let end = memchr(b']', rest.get(..TOKEN_MAX.min(rest.len()))?)?;
        let (stamp, rest) = (rest.get(..end)?, rest.get(end + 1..)?);
        let stamp = match memchr(b'<', stamp) {
            Some(difference) => stamp.get(..difference)?,
            None => stamp,
        };
        let stamp = stamp.trim_ascii();

        if let Some(us) = seconds_as_us(stamp) {
            record.boot_time_us = Some(us);
        } else if let Some(time) = calendar_time(stamp) {
            record.wall = record.wall.or_else(|| self.in_zone(time));
        } else if !is_relative_time(stamp) {
            return None;
        }
        let rest = caller(rest).unwrap_or(rest);
        Some(rest.strip_prefix(b" ").unwrap_or(rest))
    }

    /// Parses `2026-11-21T11:40:00,123456+00:00 ` of dmesg, or the same with a point and
    /// followed by `host tag: `. Returns the rest of the line.
    fn iso_time<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
        let (wall, comma, rest) = iso_stamp(bytes)?;
        record.wall = Some(wall);
        // Only dmesg writes a comma, and neither host nor tag follows.
        if comma {
            let rest = caller(rest).unwrap_or(rest);
            return Some(rest.strip_prefix(b" ").unwrap_or(rest));
        }
        Some(self.host_and_tag(rest, record))
    }

    /// Parses `Nov 21 11:40:00 host tag: ` and returns the rest of the line.
    fn syslog_time<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
        let (month, rest) = wrapped::month(bytes)?;
        let rest = rest.strip_prefix(b" ")?;
        let rest = rest.strip_prefix(b" ").unwrap_or(rest);
        let (day, rest) = number(rest, 1, 2)?;
        let (time, rest) = time_of_day(rest.strip_prefix(b" ")?)?;
        let rest = rest.strip_prefix(b" ")?;
        record.wall = month.and_then(|month| self.latest_year(month, day, time));
        Some(self.host_and_tag(rest, record))
    }

    /// Parses `Sat 2026-11-21 11:40:00 UTC host tag: ` of `journalctl -o short-full` and
    /// returns the rest of the line. An abbreviation is not an offset (`CST` stands for three
    /// zones): any other than UTC's is taken as the parser's own zone.
    fn full_time<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
        let (_, rest) = name_of(bytes, &WEEKDAYS)?;
        let (date, rest) = date(rest.strip_prefix(b" ")?)?;
        let (time, rest) = time_of_day(rest.strip_prefix(b" ")?)?;
        let (zone, rest) = field(rest.strip_prefix(b" ")?)?;
        let time = time.on(date.year(), date.month(), date.day())?;
        record.wall = match zone {
            b"UTC" | b"GMT" => Offset::UTC.to_timestamp(time).ok(),
            [b'+' | b'-', ..] => hours_offset(zone)?.to_timestamp(time).ok(),
            _ if zone.iter().all(u8::is_ascii_alphabetic) => self.in_zone(time),
            _ => return None,
        };
        Some(self.host_and_tag(rest, record))
    }

    /// Parses `1 2026-11-21T11:40:00.123456Z host kernel - - - ` of RFC 5424, after its
    /// priority, and returns the rest of the line. Another program's name stays in the text, as
    /// a tag does.
    fn syslog_protocol<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
        record.facility?;
        let rest = bytes.strip_prefix(b"1 ")?;
        let (wall, rest) = match rest.strip_prefix(b"- ") {
            Some(rest) => (None, rest),
            None => iso_stamp(rest).map(|(wall, _, rest)| (Some(wall), rest))?,
        };
        let (_host, tagged) = field(rest)?;
        let (program, rest) = field(tagged)?;
        let (_process, rest) = field(rest)?;
        let (_kind, rest) = field(rest)?;
        let text = structured_data(rest)?;
        record.wall = wall;
        if program != b"kernel" {
            return Some(tagged);
        }
        Some(self.bracketed_time(text, record).unwrap_or(text))
    }

    /// Parses `host kernel: ` without a time and returns the rest of the line.
    fn host_and_kernel<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
        let (_host, rest) = field(bytes)?;
        rest.starts_with(b"kernel:")
            .then(|| self.host_and_tag(bytes, record))
    }

    /// Parses names before a time in brackets, as Talos writes them, and returns the rest of
    /// the line.
    fn names_and_time<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
        let bracket = wrapped::names_and_bracket(bytes)?;
        record.wall = Some(bracket.wall);
        record.facility = record.facility.or(bracket.facility);
        record.level = record.level.or(bracket.level);
        let rest = bracket.rest;
        let rest = rest.strip_prefix(b"kernel: ").unwrap_or(rest);
        let rest = self.bracketed_time(rest, record).unwrap_or(rest);
        let behind_caller = caller(rest).map(|rest| rest.strip_prefix(b" ").unwrap_or(rest));
        Some(behind_caller.unwrap_or(rest))
    }

    /// Removes `host kernel: ` and a kernel time in brackets after it. The tag of another
    /// program stays in the text, which then does not match as a kernel message.
    fn host_and_tag<'a>(&self, bytes: &'a [u8], record: &mut RecordRef<'_>) -> &'a [u8] {
        let Some((from_kernel, text)) = split_tag(bytes) else {
            return bytes;
        };
        record.facility = record.facility.or(Some(u8::from(!from_kernel)));
        if !from_kernel {
            return text;
        }
        self.bracketed_time(text, record).unwrap_or(text)
    }

    fn in_zone(&self, time: DateTime) -> Option<Timestamp> {
        self.zone.to_timestamp(time).ok()
    }

    fn latest_year(&self, month: i8, day: i8, time: TimeOfDay) -> Option<Timestamp> {
        let latest = self.now?.checked_add(SignedDuration::from_hours(24)).ok()?;
        let newest = latest.to_zoned(self.zone.clone()).year();
        // Four years back, for the 29th of February.
        (newest.saturating_sub(4)..=newest)
            .rev()
            .filter_map(|year| self.in_zone(time.on(year, month, day)?))
            .find(|candidate| *candidate <= latest)
    }
}

/// Parses `<3>` and returns the rest of the line.
fn priority<'a>(bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
    let (priority, rest) = number::<u64>(bytes.strip_prefix(b"<")?, 1, 4)?;
    let rest = rest.strip_prefix(b">")?;
    record.facility = Some(u8::try_from(priority >> 3).ok()?);
    record.level = level_of(priority);
    Some(rest)
}

/// Parses `kern  :err   : ` and returns the rest of the line.
fn priority_names<'a>(bytes: &'a [u8], record: &mut RecordRef<'_>) -> Option<&'a [u8]> {
    let (facility, rest) = padded_name(bytes, &FACILITIES)?;
    let (level, rest) = padded_name(rest, &LEVELS)?;
    let rest = rest.strip_prefix(b" ")?;
    record.facility = Some(facility);
    record.level = Some(level);
    Some(rest)
}

fn padded_name<'a>(bytes: &'a [u8], names: &[&[u8]]) -> Option<(u8, &'a [u8])> {
    // Most lines start differently, and need no search.
    bytes.first().filter(|byte| byte.is_ascii_lowercase())?;
    let end = memchr(b':', bytes.get(..TOKEN_MAX.min(bytes.len()))?)?;
    let name = bytes.get(..end)?.trim_ascii_end();
    let index = names.iter().position(|known| *known == name)?;
    Some((u8::try_from(index).ok()?, bytes.get(end + 1..)?))
}

/// Splits off the bytes up to the next blank; returns them and the rest.
fn field(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memchr(b' ', bytes.get(..(FIELD_MAX + 1).min(bytes.len()))?)?;
    let (field, rest) = bytes.split_at_checked(end)?;
    (end > 0).then_some((field, rest.get(1..)?))
}

/// Skips `- ` or `[id name="value"][...] ` and returns the rest.
fn structured_data(bytes: &[u8]) -> Option<&[u8]> {
    let mut rest = match bytes.strip_prefix(b"-") {
        Some(rest) => rest,
        None => bytes.starts_with(b"[").then_some(bytes)?,
    };
    while rest.starts_with(b"[") {
        let mut from = 0;
        let end = loop {
            let end = from + memchr(b']', rest.get(from..)?)?;
            from = end + 1;
            // An escaped bracket belongs to a value.
            if rest.get(..end)?.last() != Some(&b'\\') {
                break end;
            }
        };
        rest = rest.get(end + 1..)?;
    }
    let text = rest.strip_prefix(b" ")?;
    Some(text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text))
}

/// Parses `[T123]` or `[    C0]`, with or without a space before it, and returns the rest.
fn caller(bytes: &[u8]) -> Option<&[u8]> {
    let rest = bytes
        .strip_prefix(b" ")
        .unwrap_or(bytes)
        .strip_prefix(b"[")?;
    let end = memchr(b']', rest.get(..TOKEN_MAX.min(rest.len()))?)?;
    match rest.get(..end)?.trim_ascii_start() {
        [b'T' | b'C', id @ ..] if !id.is_empty() && id.iter().all(u8::is_ascii_digit) => {
            rest.get(end + 1..)
        }
        _ => None,
    }
}

/// Splits `host kernel: text`; returns `(true, text)` for the kernel, `(false, tag and text)`
/// for any other program.
fn split_tag(bytes: &[u8]) -> Option<(bool, &[u8])> {
    let host_end = memchr(b' ', bytes)?;
    if host_end == 0 {
        return None;
    }
    let tagged = bytes.get(host_end + 1..)?;
    let tag_end = memchr(b':', tagged.get(..TOKEN_MAX.min(tagged.len()))?)?;
    let (tag, rest) = (tagged.get(..tag_end)?, tagged.get(tag_end + 1..)?);
    let separated = rest.is_empty() || rest.starts_with(b" ");
    if tag.is_empty() || tag.contains(&b' ') || !separated {
        return None;
    }
    if tag == b"kernel" {
        Some((true, rest.strip_prefix(b" ").unwrap_or(rest)))
    } else {
        Some((false, tagged))
    }
}

#[cfg(test)]
mod tests;
