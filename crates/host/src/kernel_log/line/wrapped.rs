//! Removes what other programs add around a line of kernel log that they pass on: terminal
//! colours, a container runtime's JSON or its time and stream, the names of Talos, and months
//! in other languages.

use std::borrow::Cow;

use jiff::Timestamp;
use memchr::{memchr, memchr_iter, memmem};
use serde::Deserialize;

use super::time::{MONTHS, iso_time, name_of, number};
use super::{FACILITIES, LEVELS};

/// Length of the start of a line that is searched for a time in brackets: more than any host,
/// facility and level take.
const PREFIX_MAX: usize = 128;
/// Longest name of a month, in bytes.
const MONTH_MAX: usize = 16;
/// Levels with another name in Talos than in dmesg.
const LONG_LEVELS: [(&[u8], u8); 2] = [(b"error", 3), (b"warning", 4)];
/// Stream names of a container runtime, each with the flag of a full or a partial line.
const STREAMS: [&[u8]; 4] = [b"stdout F ", b"stderr F ", b"stdout P ", b"stderr P "];

/// A line as JSON of a container runtime (`log`, `time`), a journal (`MESSAGE`) or a log
/// collector.
#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow, alias = "MESSAGE", alias = "message", alias = "msg")]
    log: Cow<'a, str>,
    #[serde(borrow, default, alias = "timestamp", alias = "@timestamp")]
    time: Option<Cow<'a, str>>,
}

/// Returns a line without terminal colours; for a JSON object, returns the line that it holds.
pub fn unwrapped(line: &[u8]) -> Cow<'_, [u8]> {
    let line = if line.starts_with(b"{") {
        of_object(line).map_or(Cow::Borrowed(line), Cow::Owned)
    } else {
        Cow::Borrowed(line)
    };
    match without_colours(&line) {
        Some(plain) => Cow::Owned(plain),
        None => line,
    }
}

/// Returns the line in a JSON object, prefixed with the object's time in a container runtime's
/// format.
fn of_object(line: &[u8]) -> Option<Vec<u8>> {
    let object: Object<'_> = serde_json::from_slice(line).ok()?;
    let mut text = Vec::with_capacity(line.len());
    if let Some(time) = object
        .time
        .filter(|time| iso_time(time.as_bytes()).is_some())
    {
        text.extend_from_slice(time.as_bytes());
        text.extend_from_slice(b" stdout F ");
    }
    text.extend_from_slice(object.log.trim_end_matches(['\r', '\n']).as_bytes());
    Some(text)
}

/// Returns a line without `ESC [ ... m` and `ESC [ ... K`; `None` if it has none.
fn without_colours(line: &[u8]) -> Option<Vec<u8>> {
    const ESCAPE: &[u8] = b"\x1b[";
    memchr(0x1b, line)?;
    let mut plain = Vec::with_capacity(line.len());
    let mut rest = line;
    while let Some(at) = memmem::find(rest, ESCAPE) {
        let (before, behind) = (rest.get(..at)?, rest.get(at + ESCAPE.len()..)?);
        let is_parameter = |byte: &&u8| byte.is_ascii_digit() || b";:".contains(byte);
        let parameters = behind.iter().take_while(is_parameter).count();
        plain.extend_from_slice(before);
        if let Some(b'm' | b'K') = behind.get(parameters) {
            rest = behind.get(parameters + 1..)?;
        } else {
            plain.extend_from_slice(ESCAPE);
            rest = behind;
        }
    }
    plain.extend_from_slice(rest);
    Some(plain)
}

/// Skips `stdout F ` or the like of a container runtime and returns the rest.
pub(super) fn stream(bytes: &[u8]) -> Option<&[u8]> {
    STREAMS
        .iter()
        .find_map(|stream| bytes.strip_prefix(*stream))
}

/// A time in brackets, with the facility and level that precede it.
pub(super) struct Bracket<'a> {
    pub(super) wall: Timestamp,
    pub(super) facility: Option<u8>,
    pub(super) level: Option<u8>,
    pub(super) rest: &'a [u8],
}

/// Parses `10.0.0.1: kern: warning: [2026-11-21T11:40:00.123456789Z]: ` of Talos, and any other
/// names before a bracket with such a time.
pub(super) fn names_and_bracket(bytes: &[u8]) -> Option<Bracket<'_>> {
    let prefix = bytes.get(..PREFIX_MAX.min(bytes.len()))?;
    let (names, wall, rest) = memchr_iter(b'[', prefix).find_map(|at| {
        let (names, behind) = (prefix.get(..at)?, prefix.get(at + 1..)?);
        let stamp = behind.get(..memchr(b']', behind)?)?;
        let rest = bytes.get(at + stamp.len() + 2..)?;
        Some((names, iso_time(stamp)?, rest))
    })?;
    let rest = rest.strip_prefix(b":").unwrap_or(rest);
    let rest = rest.strip_prefix(b" ").unwrap_or(rest);
    let mut names = names
        .rsplit(|byte| *byte == b':')
        .map(<[u8]>::trim_ascii)
        .filter(|name| !name.is_empty());
    let level = names.next().and_then(level);
    let facility = names.next().and_then(|name| {
        let index = FACILITIES.iter().position(|known| *known == name)?;
        u8::try_from(index).ok()
    });
    Some(Bracket {
        wall,
        facility,
        level: level.filter(|_| facility.is_some()),
        rest,
    })
}

fn level(name: &[u8]) -> Option<u8> {
    let index = LEVELS.iter().position(|known| *known == name);
    let short = index.and_then(|index| u8::try_from(index).ok());
    let mut long = LONG_LEVELS.iter();
    short.or_else(|| Some(long.find(|(known, _)| *known == name)?.1))
}

/// Parses the name of a month, in any language: `Nov`, `nov.`, `11月`. Returns its number, if
/// known, and the rest.
pub(super) fn month(bytes: &[u8]) -> Option<(Option<i8>, &[u8])> {
    if let Some((month, rest @ [b' ', ..])) = name_of(bytes, &MONTHS) {
        return Some((Some(month), rest));
    }
    let end = memchr(b' ', bytes.get(..MONTH_MAX.min(bytes.len()))?)?;
    let (name, rest) = bytes.split_at_checked(end)?;
    if let Some((month, unit)) = number::<i8>(name, 1, 2) {
        let is_month = unit == "月".as_bytes() || unit == "월".as_bytes();
        return (is_month && (1..=12).contains(&month)).then_some((Some(month), rest));
    }
    let name = name.strip_suffix(b".").unwrap_or(name);
    let is_name = name.len() >= 3
        && name
            .iter()
            .all(|byte| byte.is_ascii_alphabetic() || !byte.is_ascii());
    let month = MONTHS
        .iter()
        .position(|known| name.eq_ignore_ascii_case(*known));
    let month = month.and_then(|index| i8::try_from(index + 1).ok());
    is_name.then_some((month, rest))
}
