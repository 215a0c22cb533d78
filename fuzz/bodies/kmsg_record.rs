//! A record of the kernel log: raw, as read from `/dev/kmsg`, or as a line of a file.

use host::kernel_log::{LineParser, RecordRef, parse_kmsg, parse_line};
use jiff::{Timestamp, tz::TimeZone};

/// Panics if the parser breaks an invariant on this input.
pub fn run(input: &[u8]) {
    if let Ok(record) = parse_kmsg(input) {
        assert!(!record.raw_text.contains(&b'\n'));
        check(&record, input);
    }
    check(&parse_line(input), input);
    let now = Timestamp::UNIX_EPOCH;
    check(&LineParser::new(TimeZone::UTC, now).parse(input), input);
}

fn check(record: &RecordRef<'_>, input: &[u8]) {
    let text = record.raw_text;
    assert!(text.is_empty() || input.windows(text.len()).any(|part| part == text));
    assert!(record.level.is_none_or(|level| level <= 7));
    let owned = record.to_record();
    assert_eq!(owned.text, record.text_lossy());
    // A byte that is not UTF-8 is escaped as four.
    assert!(owned.text.len() <= 4 * text.len());
}
