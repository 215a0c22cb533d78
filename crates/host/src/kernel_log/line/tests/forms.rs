//! Combines every kind of line that the decoder recognises with every prefix that logs have.

use diagnosis::decode::KernelLogDecoder;

use super::*;

/// Kinds of lines, each with the check and code of its finding.
const KINDS: [(&str, &str, &str); 10] = [
    (XID, "SysLogsXIDError", "79"),
    (
        "NVRM: Xid (PCI:0000:b3:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x02010066 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
        "SysLogsXIDError",
        "149.NETIR_LINK_EVT",
    ),
    (
        "NVRM: Xid (PCI:0000:b3:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
        "SysLogsXIDError",
        "154",
    ),
    (
        "nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 20034, Fatal, Link 44 LTSSM Fault Up",
        "SysLogsSXIDError",
        "20034",
    ),
    (
        "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
        "SysLogsGPUFallenOff",
        "GPU_FALLEN_OFF_BUS",
    ),
    (
        "NVRM: GPU 0000:b3:00.0: RmInitAdapter failed! (0x62:0x65:1858)",
        "SysLogsGPUInitFailed",
        "GPU_INIT_FAILED",
    ),
    (
        "mlx5_core 0000:5c:00.0: device's health compromised - reached miss count",
        "SysLogsNICDriverError",
        "health_poll_failed",
    ),
    (
        "NETDEV WATCHDOG: ens1f0 (mlx5_core): transmit queue 5 timed out",
        "SysLogsNICDriverError",
        "netdev_watchdog",
    ),
    (
        "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged",
        "SysLogsNICDriverError",
        "module_unplugged",
    ),
    (
        "GPU reset executed: GPU-99, success: false",
        "SysLogsXIDError",
        "GPU_RESET_FAILURE",
    ),
];

/// Time of the prefixes that have one.
const TOLD: &str = "2026-11-21T11:40:00Z";

/// Prefixes, each with the text after the line, and true if the prefix has a time.
const PREFIXES: [(&str, &str, bool); 31] = [
    ("", "", false),
    ("[   12.345678] ", "", false),
    ("[   12.345678][  T896] ", "", false),
    ("<3>[   12.345678] ", "", false),
    ("4,1227,437812449932,-;", "", false),
    ("4,1227,437812449932,-,caller=T896;", "", false),
    ("[Sat Nov 21 13:40:00 2026] ", "", true),
    ("[Sat Nov 21 13:40:00 2026] [    C12] ", "", true),
    ("kern  :err   : [   12.345678] ", "", false),
    ("kern  :err   : [Sat Nov 21 13:40:00 2026] ", "", true),
    ("kern  :err   : 2026-11-21T11:40:00,000000+00:00 ", "", true),
    ("2026-11-21T11:40:00,000000+00:00 ", "", true),
    // With terminal colours.
    ("\x1b[32m[   12.345678] \x1b[0m", "", false),
    (
        "\x1b[32mkern  :err   : \x1b[0m\x1b[32m[Sat Nov 21 13:40:00 2026] \x1b[0m\x1b[31m",
        "\x1b[0m",
        true,
    ),
    // Talos.
    (
        "10.0.0.1: kern: warning: [2026-11-21T11:40:00.000000000Z]: ",
        "",
        true,
    ),
    (
        "10.0.0.1: kern:     err: [2026-11-21T11:40:00.000000000Z]: ",
        "",
        true,
    ),
    ("kern: err: [2026-11-21T13:40:00+02:00]: ", "", true),
    ("[2026-11-21T11:40:00Z] ", "", true),
    ("[2026-11-21T11:40:00Z] [  T896] ", "", true),
    ("gpu-7 [2026-11-21T11:40:00.000Z] kernel: ", "", true),
    // Log daemons.
    ("Nov 21 13:40:00 gpu-7 kernel: ", "", true),
    ("nov. 21 13:40:00 gpu-7 kernel: ", "", true),
    ("nov 21 13:40:00 gpu-7 kernel: [   12.345678] ", "", true),
    ("11月 21 13:40:00 gpu-7 kernel: ", "", true),
    ("Mär 21 13:40:00 gpu-7 kernel: ", "", false),
    ("нояб. 21 13:40:00 gpu-7 kernel: ", "", false),
    ("2026-11-21T11:40:00.000000+00:00 gpu-7 kernel: ", "", true),
    // Container runtimes.
    ("2026-11-21T11:40:00.000000000Z stdout F ", "", true),
    (
        "2026-11-21T11:40:00.000000000Z stderr F [   12.345678] ",
        "",
        true,
    ),
    (
        "{\"log\":\"[   12.345678] ",
        "\\n\",\"stream\":\"stdout\",\"time\":\"2026-11-21T11:40:00.000000000Z\"}",
        true,
    ),
    ("{\"PRIORITY\":\"3\",\"MESSAGE\":\"", "\"}", false),
];

#[test]
fn each_kind_of_line_is_found_behind_each_prefix_and_at_its_time() {
    for (kind, check, code) in KINDS {
        for (before, after, is_told) in PREFIXES {
            for end in ["", "\n", "\r\n"] {
                let line = format!("{before}{kind}{after}{end}");
                let plain = unwrapped(line.as_bytes());
                let record = parser().parse(&plain);
                let expected = is_told.then(|| time(TOLD));
                assert_eq!(record.wall, expected, "{line:?}");
                let text = record.text();
                let mut decoder = KernelLogDecoder::default();
                let mut found = decoder.record(&text, Timestamp::UNIX_EPOCH);
                // A single failed start of a GPU makes no finding.
                found.extend(decoder.record(&text, Timestamp::UNIX_EPOCH));
                let finding = found.first().unwrap_or_else(|| panic!("{line:?}"));
                assert_eq!(
                    (finding.check(), finding.code().as_deref()),
                    (check, Some(code)),
                    "{line:?}"
                );
                assert_eq!(&*text, kind.as_bytes(), "{line:?}");
            }
        }
    }
}

#[test]
fn colours_are_left_out_in_the_middle_of_a_line_too() {
    for (line, plain) in [
        ("\x1b[33mNVRM: \x1b[0mXid (PCI", "NVRM: Xid (PCI"),
        ("\x1b[01;31m\x1b[KNVRM\x1b[m\x1b[K: x", "NVRM: x"),
        // Other escape sequences are not colours, and stay.
        ("a\x1b[2Jb", "a\x1b[2Jb"),
        ("a\x1b[", "a\x1b["),
        ("a\x1b", "a\x1b"),
        ("{\"log\":\"\\u001b[31mNVRM: x\\u001b[0m\\n\"}", "NVRM: x"),
        // An incomplete object stays.
        ("{\"log\":\"NVRM: x", "{\"log\":\"NVRM: x"),
        ("{\"log\":7}", "{\"log\":7}"),
        ("{\"log\":\"x\",\"time\":\"soon\"}", "x"),
        ("plain", "plain"),
    ] {
        let found = unwrapped(line.as_bytes());
        assert_eq!(String::from_utf8_lossy(&found), plain, "{line:?}");
    }
}

#[test]
fn the_names_before_a_time_in_brackets_are_told() {
    for (line, facility, level) in [
        (
            "10.0.0.1: kern: warning: [2026-11-21T11:40:00Z]: x",
            Some(0),
            Some(4),
        ),
        (
            "10.0.0.1: user: notice: [2026-11-21T11:40:00Z]: x",
            Some(1),
            Some(5),
        ),
        ("gpu-7: [2026-11-21T11:40:00Z]: x", None, None),
    ] {
        let record = parser().parse(line.as_bytes());
        assert_eq!((record.facility, record.level), (facility, level), "{line}");
        assert_eq!(record.text_lossy(), "x");
    }
    // A bracket far from the start of the line belongs to the text.
    let text = format!("{} [2026-11-21T11:40:00Z] x", "y".repeat(200));
    assert_eq!(parser().parse(text.as_bytes()).wall, None);
}
