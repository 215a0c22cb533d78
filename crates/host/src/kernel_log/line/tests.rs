use proptest::prelude::*;

use super::*;

mod forms;

const XID: &str =
    "NVRM: Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, GPU has fallen off the bus.";

/// Returns a parser with the current time 2026-11-21, a Saturday; the machine that wrote the
/// lines is two hours ahead of UTC.
fn parser() -> LineParser {
    let zone = TimeZone::fixed(Offset::constant(2));
    LineParser::new(zone, time("2026-11-21T12:00:00Z"))
}

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

#[derive(Default)]
struct Expected {
    seq: Option<u64>,
    us: Option<u64>,
    wall: Option<&'static str>,
    facility: Option<u8>,
    level: Option<u8>,
    text: Option<&'static str>,
}

fn check(prefix: &str, expected: &Expected) {
    let line = format!("{prefix}{XID}");
    for line in [line.clone(), format!("{line}\n"), format!("{line}\r\n")] {
        let record = parser().parse(line.as_bytes());
        assert_eq!(
            record.text_lossy(),
            expected.text.unwrap_or(XID),
            "{line:?}"
        );
        assert_eq!(record.seq, expected.seq, "{line:?}");
        assert_eq!(record.boot_time_us, expected.us, "{line:?}");
        assert_eq!(record.wall, expected.wall.map(time), "{line:?}");
        assert_eq!(record.facility, expected.facility, "{line:?}");
        assert_eq!(record.level, expected.level, "{line:?}");
    }
}

#[test]
fn forms_of_dmesg() {
    let none = Expected::default;
    let at = |us| Expected {
        us: Some(us),
        ..none()
    };
    let wall = |wall| Expected {
        wall: Some(wall),
        ..none()
    };
    let cases = [
        ("", none()),
        ("[  123.456789] ", at(123_456_789)),
        ("[12345678.000001] ", at(12_345_678_000_001)),
        ("[    0.000000] ", at(0)),
        ("[   12.3] ", at(12_300_000)),
        ("[  123.456789 <    0.000012>] ", at(123_456_789)),
        ("[  123.456789][  T123] ", at(123_456_789)),
        ("[  123.456789] [     C0] ", at(123_456_789)),
        ("[Sat Nov 21 11:40:00 2026] ", wall("2026-11-21T09:40:00Z")),
        ("[Sun Nov  1 01:02:03 2026] ", wall("2026-10-31T23:02:03Z")),
        (
            "[Sat Nov 21 11:40:00 2026 <    0.000012>] ",
            wall("2026-11-21T09:40:00Z"),
        ),
        ("[Nov21 11:40] ", none()),
        ("[  +0.000012] ", none()),
        (
            "2026-11-21T11:40:00,123456+00:00 ",
            wall("2026-11-21T11:40:00.123456Z"),
        ),
        (
            "2026-11-21T11:40:00,123456-05:30 ",
            wall("2026-11-21T17:10:00.123456Z"),
        ),
        (
            "2026-11-21T11:40:00,123456+00:00 [   T12] ",
            wall("2026-11-21T11:40:00.123456Z"),
        ),
        (
            "<3>",
            Expected {
                facility: Some(0),
                level: Some(3),
                ..none()
            },
        ),
        (
            "<3>[   12.300000] ",
            Expected {
                facility: Some(0),
                level: Some(3),
                ..at(12_300_000)
            },
        ),
        (
            "<12>[   12.300000] ",
            Expected {
                facility: Some(1),
                level: Some(4),
                ..at(12_300_000)
            },
        ),
        (
            "kern  :err   : ",
            Expected {
                facility: Some(0),
                level: Some(3),
                ..none()
            },
        ),
        (
            "kern  :err   : [  123.456789] ",
            Expected {
                facility: Some(0),
                level: Some(3),
                ..at(123_456_789)
            },
        ),
        (
            "user  :notice: [Sat Nov 21 11:40:00 2026] ",
            Expected {
                facility: Some(1),
                level: Some(5),
                ..wall("2026-11-21T09:40:00Z")
            },
        ),
        (
            "authpriv:debug : 2026-11-21T11:40:00,5+00:00 ",
            Expected {
                facility: Some(10),
                level: Some(7),
                ..wall("2026-11-21T11:40:00.5Z")
            },
        ),
        (
            "6,339,5140900,-,caller=T1;",
            Expected {
                seq: Some(339),
                facility: Some(0),
                level: Some(6),
                ..at(5_140_900)
            },
        ),
    ];
    for (prefix, expected) in cases {
        check(prefix, &expected);
    }
}

#[test]
fn forms_of_syslog_and_the_journal() {
    let kernel = |wall| Expected {
        wall: Some(wall),
        facility: Some(0),
        ..Expected::default()
    };
    let cases = [
        (
            "Nov 21 11:40:00 gpu-7 kernel: ",
            kernel("2026-11-21T09:40:00Z"),
        ),
        (
            "Nov  1 11:40:00 gpu-7 kernel: ",
            kernel("2026-11-01T09:40:00Z"),
        ),
        (
            "Nov 21 11:40:00.123456 gpu-7 kernel: ",
            kernel("2026-11-21T09:40:00.123456Z"),
        ),
        (
            "Nov 21 11:40:00 gpu-7 kernel: [   12.345678] ",
            Expected {
                us: Some(12_345_678),
                ..kernel("2026-11-21T09:40:00Z")
            },
        ),
        (
            "<3>Nov 21 11:40:00 gpu-7 kernel: ",
            Expected {
                level: Some(3),
                ..kernel("2026-11-21T09:40:00Z")
            },
        ),
        // Up to a day ahead counts as this year, later as last year.
        (
            "Nov 22 13:00:00 gpu-7 kernel: ",
            kernel("2026-11-22T11:00:00Z"),
        ),
        (
            "Nov 23 13:00:00 gpu-7 kernel: ",
            kernel("2025-11-23T11:00:00Z"),
        ),
        (
            "Dec 31 23:59:60 gpu-7 kernel: ",
            kernel("2025-12-31T21:59:59Z"),
        ),
        (
            "Feb 29 12:00:00 gpu-7 kernel: ",
            kernel("2024-02-29T10:00:00Z"),
        ),
        (
            "2026-11-21T11:40:00+0000 gpu-7 kernel: ",
            kernel("2026-11-21T11:40:00Z"),
        ),
        (
            "2026-11-21T11:40:00-08:00 gpu-7 kernel: ",
            kernel("2026-11-21T19:40:00Z"),
        ),
        (
            "2026-11-21T11:40:00Z gpu-7 kernel: ",
            kernel("2026-11-21T11:40:00Z"),
        ),
        (
            "2026-11-21T11:40:00.123456+01:00 gpu-7 kernel: [   12.345678] ",
            Expected {
                us: Some(12_345_678),
                ..kernel("2026-11-21T10:40:00.123456Z")
            },
        ),
        // journalctl -o short-full
        (
            "Sat 2026-11-21 11:40:00 UTC gpu-7 kernel: ",
            kernel("2026-11-21T11:40:00Z"),
        ),
        (
            "Sat 2026-11-21 11:40:00.123456 -03 gpu-7 kernel: ",
            kernel("2026-11-21T14:40:00.123456Z"),
        ),
        (
            "Sat 2026-11-21 11:40:00 +0530 gpu-7 kernel: [   12.345678] ",
            Expected {
                us: Some(12_345_678),
                ..kernel("2026-11-21T06:10:00Z")
            },
        ),
        // An abbreviation is no offset, so the parser's zone counts.
        (
            "Sat 2026-11-21 11:40:00 EET gpu-7 kernel: ",
            kernel("2026-11-21T09:40:00Z"),
        ),
        // RFC 5424
        (
            "<3>1 2026-11-21T11:40:00.123456Z gpu-7 kernel - - - ",
            Expected {
                level: Some(3),
                ..kernel("2026-11-21T11:40:00.123456Z")
            },
        ),
        (
            "<3>1 2026-11-21T11:40:00+01:00 gpu-7 kernel 1 ID [a b=\"c\\]d\"][e] \u{feff}[   12.345678] ",
            Expected {
                level: Some(3),
                us: Some(12_345_678),
                ..kernel("2026-11-21T10:40:00Z")
            },
        ),
        (
            "<3>1 - gpu-7 kernel - - - ",
            Expected {
                level: Some(3),
                facility: Some(0),
                ..Expected::default()
            },
        ),
        (
            "gpu-7 kernel: ",
            Expected {
                facility: Some(0),
                ..Expected::default()
            },
        ),
        (
            "gpu-7 kernel: [   12.345678] ",
            Expected {
                facility: Some(0),
                us: Some(12_345_678),
                ..Expected::default()
            },
        ),
    ];
    for (prefix, expected) in cases {
        check(prefix, &expected);
    }
}

#[test]
fn the_tag_of_another_program_stays_and_is_no_kernel_text() {
    for tag in ["gpu-reset[812]: ", "python3: "] {
        let line = format!("Nov 21 11:40:00 gpu-7 {tag}{XID}");
        let record = parser().parse(line.as_bytes());
        assert_eq!(record.text_lossy(), format!("{tag}{XID}"));
        assert_eq!(record.facility, Some(1));
        assert_eq!(record.wall, Some(time("2026-11-21T09:40:00Z")));
    }
}

#[test]
fn in_rfc_5424_too_another_program_keeps_its_name() {
    let line = "<13>1 2026-11-21T11:40:00Z gpu-7 python3 812 - - mlx5_core 0000:c1:00.0: x";
    let record = parser().parse(line.as_bytes());
    let text = "python3 812 - - mlx5_core 0000:c1:00.0: x";
    assert_eq!(
        (record.text_lossy().as_ref(), record.facility),
        (text, Some(1))
    );
    assert_eq!(record.wall, Some(time("2026-11-21T11:40:00Z")));
    for broken in [
        "1 2026-11-21T11:40:00Z gpu-7 kernel - - text",
        "1 2026-11-21T11:40:00Z gpu-7 kernel - - [a text",
        "2 2026-11-21T11:40:00Z gpu-7 kernel - - - text",
    ] {
        let line = format!("<3>{broken}");
        assert_eq!(parser().parse(line.as_bytes()).text_lossy(), broken);
    }
}

#[test]
fn what_is_no_form_is_text() {
    let lines = [
        "",
        " ",
        "[",
        "[]",
        "[drm] Initialized nouveau",
        "[Hardware Error]: CPU 0",
        "[  12] text",
        "[ 12.] text",
        "[.5] text",
        "[1234567890123.5] text",
        "[ 12.1234567890] text",
        "[Sat Nov 31 11:40:00 2026] text",
        "[Sat Nov 21 25:40:00 2026] text",
        "[Sat Nov 21 11:40:00 2026 UTC] text",
        "[+] text",
        "<> text",
        "<99999> text",
        "<3 text",
        "kern : [ 12.3] text",
        "kern  :fatal : text",
        "kern  :err   :text",
        "2026-11-21 11:40:00 text",
        "2026-13-21T11:40:00+00:00 text",
        "2026-11-21T11:40:00 text",
        "2026-11-21T11:40:00+99:00 text",
        "Nov 21 11:40 text",
        "Nov 99 11:40:00",
        "mlx5_core 0000:c1:00.0: Port module event: module 0, Cable unplugged",
        "Sat 2026-11-21 11:40:00 gpu-7",
        "Sat 2026-11-31 11:40:00 UTC gpu-7 kernel: text",
        "Sat 2026-11-21 11:40:00 +5 gpu-7 kernel: text",
        "1 2026-11-21T11:40:00Z gpu-7 kernel - - - text",
        "gpu-7 kernel text",
        " kernel: text",
        "6,1,2",
    ];
    for line in lines {
        let record = parser().parse(line.as_bytes());
        let text = RecordRef {
            raw_text: line.as_bytes(),
            ..RecordRef::default()
        };
        assert_eq!(record, text, "{line:?}");
    }
}

#[test]
fn a_line_with_a_time_but_no_tag_keeps_its_text() {
    let record = parser().parse(b"Nov 21 11:40:00 something happened");
    assert_eq!(record.text_lossy(), "something happened");
    assert_eq!(record.facility, None);
}

#[test]
fn without_zone_and_year_only_certain_times_are_told() {
    assert_eq!(parse_line(b"Nov 21 11:40:00 gpu-7 kernel: x").wall, None);
    assert_eq!(
        parse_line(b"[Sat Nov 21 11:40:00 2026] x").wall,
        Some(time("2026-11-21T11:40:00Z")),
    );
    assert_eq!(
        parse_line(b"2026-11-21T11:40:00+02:00 gpu-7 kernel: x").wall,
        Some(time("2026-11-21T09:40:00Z")),
    );
}

#[test]
fn a_new_year_has_begun_on_the_writer_first() {
    let parser = LineParser::new(TimeZone::UTC, time("2026-12-31T23:59:59Z"));
    let record = parser.parse(b"Jan  1 00:00:01 gpu-7 kernel: x");
    assert_eq!(record.wall, Some(time("2027-01-01T00:00:01Z")));
}

proptest! {
    #[test]
    fn any_bytes_are_a_line(line: Vec<u8>) {
        let _ = parser().parse(&unwrapped(&line)).to_record();
        let _ = parse_line(&line).to_record();
    }

    /// Bytes that match long parts of a format.
    #[test]
    fn any_near_miss_is_a_line(
        line in "(<[0-9]{0,5}>)?([a-z]{3,6} {0,2}:[a-z]{3,6} {0,2}: )?(\\[? ?[A-Z]?[a-z]{0,2} ?[0-9.,+:TZ -]{0,30}\\]?)? ?([a-z]{1,6} (kernel)?:)?.{0,20}",
    ) {
        let record = parse_line(line.as_bytes()).to_record();
        prop_assert!(record.text.len() <= line.len());
    }

    #[test]
    fn dmesg_lines_come_back(us in 0_u64..1_000_000_000_000_000, text in "[!-~]([ -~]{0,60}[!-~])?") {
        prop_assume!(caller(text.as_bytes()).is_none());
        let line = format!("[{:5}.{:06}] {text}", us / 1_000_000, us % 1_000_000);
        let record = parse_line(line.as_bytes());
        prop_assert_eq!(record.boot_time_us, Some(us));
        prop_assert_eq!(record.raw_text, text.as_bytes());
    }

    #[test]
    fn iso_times_come_back(seconds in 0_i64..4_000_000_000, text in "[!-~]([ -~]{0,60}[!-~])?") {
        prop_assume!(caller(text.as_bytes()).is_none());
        let wall = Timestamp::from_second(seconds).unwrap();
        let line = format!("{},000000+00:00 {text}", wall.strftime("%Y-%m-%dT%H:%M:%S"));
        let record = parse_line(line.as_bytes());
        prop_assert_eq!(record.wall, Some(wall));
        prop_assert_eq!(record.raw_text, text.as_bytes());
    }
}
