//! Parses the date and time formats of kernel log lines, without the text around them.

use jiff::{
    Timestamp,
    civil::{Date, DateTime},
    tz::Offset,
};

pub(super) const MONTHS: [&[u8; 3]; 12] = [
    b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec",
];
pub(super) const WEEKDAYS: [&[u8; 3]; 7] = [b"Mon", b"Tue", b"Wed", b"Thu", b"Fri", b"Sat", b"Sun"];

#[derive(Clone, Copy)]
pub(super) struct TimeOfDay {
    hour: i8,
    minute: i8,
    second: i8,
    nanosecond: i32,
    /// True if a comma rather than a point precedes the fraction.
    pub(super) comma: bool,
}

// === impl TimeOfDay ===

impl TimeOfDay {
    pub(super) fn on(self, year: i16, month: i8, day: i8) -> Option<DateTime> {
        // A leap second has no POSIX time; it counts as the second before.
        let second = if self.second == 60 { 59 } else { self.second };
        DateTime::new(
            year,
            month,
            day,
            self.hour,
            self.minute,
            second,
            self.nanosecond,
        )
        .ok()
    }
}

/// Parses `2026-11-21`; returns the date and the rest.
pub(super) fn date(bytes: &[u8]) -> Option<(Date, &[u8])> {
    let (year, rest) = number(bytes, 4, 4)?;
    let (month, rest) = number(rest.strip_prefix(b"-")?, 2, 2)?;
    let (day, rest) = number(rest.strip_prefix(b"-")?, 2, 2)?;
    Some((Date::new(year, month, day).ok()?, rest))
}

/// Parses `2026-11-21T11:40:00,123456+00:00 `; returns the time, true if it has a comma, and
/// the rest.
pub(super) fn iso_stamp(bytes: &[u8]) -> Option<(Timestamp, bool, &[u8])> {
    let (date, rest) = date(bytes)?;
    let (time, rest) = time_of_day(rest.strip_prefix(b"T")?)?;
    let (offset, rest) = utc_offset(rest)?;
    let rest = rest.strip_prefix(b" ")?;
    let time_of_day = time.on(date.year(), date.month(), date.day())?;
    let wall = offset.to_timestamp(time_of_day).ok()?;
    Some((wall, time.comma, rest))
}

/// Parses `2026-11-21T11:40:00.123456Z`, without anything after it.
pub(super) fn iso_time(stamp: &[u8]) -> Option<Timestamp> {
    let (date, rest) = date(stamp)?;
    let (time, rest) = time_of_day(rest.strip_prefix(b"T")?)?;
    let (offset, rest) = utc_offset(rest)?;
    let time = time.on(date.year(), date.month(), date.day())?;
    offset.to_timestamp(time).ok().filter(|_| rest.is_empty())
}

/// Parses `+0530`, or `+05` as in zones without an abbreviation.
pub(super) fn hours_offset(zone: &[u8]) -> Option<Offset> {
    if let Some((offset, rest)) = utc_offset(zone) {
        return rest.is_empty().then_some(offset);
    }
    let (sign, hours) = zone.split_first()?;
    let (hours, rest) = number::<i32>(hours, 2, 2)?;
    let sign = if *sign == b'-' { -1 } else { 1 };
    let offset = Offset::from_seconds(sign * hours * 3600).ok()?;
    rest.is_empty().then_some(offset)
}

fn utc_offset(bytes: &[u8]) -> Option<(Offset, &[u8])> {
    if let Some(rest) = bytes.strip_prefix(b"Z") {
        return Some((Offset::UTC, rest));
    }
    let (sign, rest) = match bytes {
        [b'+', rest @ ..] => (1, rest),
        [b'-', rest @ ..] => (-1, rest),
        _ => return None,
    };
    let (hours, rest) = number::<i32>(rest, 2, 2)?;
    let (minutes, rest) = number::<i32>(rest.strip_prefix(b":").unwrap_or(rest), 2, 2)?;
    let offset = Offset::from_seconds(sign * (hours * 3600 + minutes * 60)).ok()?;
    Some((offset, rest))
}

/// Parses `Sat Nov 21 11:40:00 2026`, the format of `ctime`.
pub(super) fn calendar_time(stamp: &[u8]) -> Option<DateTime> {
    let (_, rest) = name_of(stamp, &WEEKDAYS)?;
    let (month, rest) = name_of(rest.strip_prefix(b" ")?, &MONTHS)?;
    let (day, rest) = number(rest.trim_ascii_start(), 1, 2)?;
    let (time, rest) = time_of_day(rest.strip_prefix(b" ")?)?;
    let (year, rest) = number(rest.strip_prefix(b" ")?, 4, 4)?;
    if rest.is_empty() {
        time.on(year, month, day)
    } else {
        None
    }
}

/// Returns true for `+0.000012` and `Nov21 11:40`: times of `dmesg -e`, which alone are
/// useless.
pub(super) fn is_relative_time(stamp: &[u8]) -> bool {
    if let Some(seconds) = stamp.strip_prefix(b"+") {
        return seconds_as_us(seconds).is_some();
    }
    let minute = || {
        let (_, rest) = name_of(stamp, &MONTHS)?;
        let (_, rest) = number::<i8>(rest.trim_ascii_start(), 1, 2)?;
        let (_, rest) = number::<i8>(rest.strip_prefix(b" ")?, 2, 2)?;
        let (_, rest) = number::<i8>(rest.strip_prefix(b":")?, 2, 2)?;
        rest.is_empty().then_some(())
    };
    minute().is_some()
}

/// Parses `11:40:00`, with an optional fraction after a point or a comma; returns the time and
/// the rest.
pub(super) fn time_of_day(bytes: &[u8]) -> Option<(TimeOfDay, &[u8])> {
    let (hour, rest) = number(bytes, 2, 2)?;
    let (minute, rest) = number(rest.strip_prefix(b":")?, 2, 2)?;
    let (second, rest) = number(rest.strip_prefix(b":")?, 2, 2)?;
    let (comma, nanosecond, rest) = match rest {
        [mark @ (b'.' | b','), digits @ ..] => {
            let (nanosecond, rest) = fraction(digits)?;
            (*mark == b',', nanosecond, rest)
        }
        _ => (false, 0, rest),
    };
    Some((
        TimeOfDay {
            hour,
            minute,
            second,
            nanosecond,
            comma,
        },
        rest,
    ))
}

/// Parses `123.456789` seconds as microseconds.
pub(super) fn seconds_as_us(stamp: &[u8]) -> Option<u64> {
    let (seconds, rest) = number::<u64>(stamp, 1, 12)?;
    let (nanoseconds, rest) = fraction(rest.strip_prefix(b".")?)?;
    if !rest.is_empty() {
        return None;
    }
    seconds
        .checked_mul(1_000_000)?
        .checked_add(u64::try_from(nanoseconds / 1_000).ok()?)
}

/// Parses one to nine digits after the point, as nanoseconds; returns them and the rest.
fn fraction(bytes: &[u8]) -> Option<(i32, &[u8])> {
    let (mut value, rest) = number::<i32>(bytes, 1, 9)?;
    for _ in bytes.len() - rest.len()..9 {
        value = value.checked_mul(10)?;
    }
    Some((value, rest))
}

pub(super) fn name_of<'a>(bytes: &'a [u8], names: &[&[u8; 3]]) -> Option<(i8, &'a [u8])> {
    let (name, rest) = bytes.split_first_chunk::<3>()?;
    let index = names.iter().position(|known| *known == name)?;
    Some((i8::try_from(index + 1).ok()?, rest))
}

/// Parses a decimal number of `least` to `most` digits; the rest may start with a digit too.
pub(super) fn number<N: TryFrom<u64>>(
    bytes: &[u8],
    least: usize,
    most: usize,
) -> Option<(N, &[u8])> {
    let mut value = 0_u64;
    let mut digits = 0;
    let mut rest = bytes;
    while let [digit @ b'0'..=b'9', tail @ ..] = rest
        && digits < most
    {
        value = value
            .checked_mul(10)?
            .checked_add(u64::from(digit - b'0'))?;
        digits += 1;
        rest = tail;
    }
    if digits < least {
        return None;
    }
    Some((N::try_from(value).ok()?, rest))
}
