use proptest::prelude::*;

use super::*;
use crate::catalog::{NicDriver, Severity};

fn xid_of(line: &str) -> Option<XidLine<'_>> {
    match decode(line.as_bytes()) {
        Some(LogLine::Xid(xid)) => Some(xid),
        _ => None,
    }
}

fn sxid_of(line: &str) -> Option<SxidLine<'_>> {
    match decode(line.as_bytes()) {
        Some(LogLine::Sxid(sxid)) => Some(sxid),
        _ => None,
    }
}

/// PCI address, code, pid, process, message.
type Parts<'a> = (&'a str, u32, Option<u32>, Option<&'a str>, &'a str);

#[test]
fn xid_lines_of_real_drivers() {
    let table: [(&str, Parts<'_>); 24] = [
        (
            "NVRM: Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, GPU has fallen off the bus.",
            (
                "0000:b3:00",
                79,
                Some(1234),
                Some("python3"),
                "GPU has fallen off the bus.",
            ),
        ),
        (
            "NVRM: Xid (0000:03:00): 31, Ch 00000012, engmask 00000111",
            (
                "0000:03:00",
                31,
                None,
                None,
                "Ch 00000012, engmask 00000111",
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:02:00): 8, Channel 00000001",
            ("0000:02:00", 8, None, None, "Channel 00000001"),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception",
            ("0000:3b:00", 13, None, None, "Graphics Exception"),
        ),
        (
            "NVRM: Xid (PCI:0000:5e:00): 48, pid='<unknown>', name=<unknown>, DBE at row 5",
            ("0000:5e:00", 48, None, None, "DBE at row 5"),
        ),
        (
            "NVRM: Xid (PCI:0000:5e:00): 48, pid=<unknown>, name=<unknown>, DBE at row 5",
            ("0000:5e:00", 48, None, None, "DBE at row 5"),
        ),
        (
            "NVRM: Xid (PCI:00000000:b3:00.0): 95 pid=7",
            ("00000000:b3:00.0", 95, Some(7), None, ""),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 63",
            ("0000:b3:00", 63, None, None, ""),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 999, nobody knows",
            ("0000:b3:00", 999, None, None, "nobody knows"),
        ),
        (
            "[1234.5] NVRM: Xid (PCI:0000:b3:00): 43, pid=88, name=my job,v2, Ch 00000008",
            ("0000:b3:00", 43, Some(88), Some("my job,v2"), "Ch 00000008"),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 45, pid=88, name=train",
            ("0000:b3:00", 45, Some(88), Some("train"), ""),
        ),
        (
            "NVRM: Xid (PCI:0000:0d:00): 45, pid=9684, name=python, channel 0x00000015",
            (
                "0000:0d:00",
                45,
                Some(9684),
                Some("python"),
                "channel 0x00000015",
            ),
        ),
        (
            "NVRM: Xid (PCI:0002:00:00): 119, pid=1582259, name=nvc:[driver], Timeout after 6s of waiting for RPC response from GPU1 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x8).",
            (
                "0002:00:00",
                119,
                Some(1_582_259),
                Some("nvc:[driver]"),
                "Timeout after 6s of waiting for RPC response from GPU1 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x8).",
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:00:06): 119, pid='<unknown>', name=<unknown>, Timeout waiting for RPC from GSP! Expected function FREE (0x0 0x0).",
            (
                "0000:00:06",
                119,
                None,
                None,
                "Timeout waiting for RPC from GSP! Expected function FREE (0x0 0x0).",
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:19:00): 62, 32260b5e 000154b0 00000000 2026da96 202b5626 202b5832",
            (
                "0000:19:00",
                62,
                None,
                None,
                "32260b5e 000154b0 00000000 2026da96 202b5626 202b5832",
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:18:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping, reset gpu to activate.",
            (
                "0000:18:00",
                63,
                None,
                None,
                "Row Remapper: New row marked for remapping, reset gpu to activate.",
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:2a:00): 94, pid=7194, name=trainer, Contained: SM (0x1). RST: No, D-RST: No",
            (
                "0000:2a:00",
                94,
                Some(7194),
                Some("trainer"),
                "Contained: SM (0x1). RST: No, D-RST: No",
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:0d:00): 109, pid=5, name=x, Ch 00000001, errorString CTX SWITCH TIMEOUT, Info 0x3c046",
            (
                "0000:0d:00",
                109,
                Some(5),
                Some("x"),
                "Ch 00000001, errorString CTX SWITCH TIMEOUT, Info 0x3c046",
            ),
        ),
        (
            "kernel: [16450076.435595] NVRM: Xid (PCI:0001:00:00): 79, pid=123456, name=test, x",
            ("0001:00:00", 79, Some(123_456), Some("test"), "x"),
        ),
        (
            "message repeated 2 times: [ NVRM: Xid (PCI:0000:b3:00): 45, pid=8, name=a, Ch 1]",
            ("0000:b3:00", 45, Some(8), Some("a"), "Ch 1]"),
        ),
        (
            "time=\"2026-01-01\" level=info msg=\"guest\" console=\"[ 1.2] NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=a, x\"",
            ("0000:01:00", 79, Some(1), Some("a"), "x\""),
        ),
        (
            "VERY LOUD: NVRM: nothing yet. NVRM: Xid (PCI:0000:01:00): 79, x",
            ("0000:01:00", 79, None, None, "x"),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
            (
                "0000:b3:00",
                154,
                None,
                None,
                "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00 GPU-I:02 GPU-CI:01): 13, pid=1, name=a, Graphics Exception",
            ("0000:b3:00", 13, Some(1), Some("a"), "Graphics Exception"),
        ),
    ];
    for (line, expected) in table {
        let xid = xid_of(line).expect(line);
        let found = (xid.pci, xid.code, xid.pid, xid.process, xid.message);
        assert_eq!(found, expected, "{line}");
    }
}

#[test]
fn a_part_of_a_gpu_under_mig_is_told() {
    for (place, expected) in [
        ("PCI:0000:b3:00", None),
        ("PCI:0000:b3:00 GPU-I:02", Some((2, None))),
        ("PCI:0000:b3:00 GPU-I:02 GPU-CI:01", Some((2, Some(1)))),
        ("PCI:0000:b3:00 GPU-CI:01", None),
        ("PCI:0000:b3:00 GPU-I:xx", None),
    ] {
        let line = format!("NVRM: Xid ({place}): 13, x");
        let mig = xid_of(&line).expect(place).mig;
        let found = mig.map(|mig| (mig.gpu_instance, mig.compute_instance));
        assert_eq!(found, expected, "{place}");
    }
}

#[test]
fn lines_that_are_no_fault() {
    for line in [
        "",
        "V",
        "X",
        "NVRM: ",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
        "NVRM: Xid",
        "Xid (PCI:0000:b3:00): 79, somebody quotes the driver",
        "NVRM: GPU has fallen off the bus",
        "NVRM: GPU :.: GPU has fallen off the bus.",
        "NVRM: GPU 0000:b3:00.0 is already bound to nouveau.",
        "NVRM: GPU0 iovaspaceDestruct_IMPL: 1 left-over mappings in IOVAS 0x400",
        "NVRM: GPU RPC history (CPU -> GSP):",
        "NVRM:     Please see the README",
        "NVRM:     12 bytes",
        "NVRM:   0    76   GSP_RM_CONTROL",
        "NVRM: A GPU crash dump has been created. If possible, please run",
        "NVRM: GPU Board Serial Number: 1650522003820",
        "usb 1-1: new high-speed USB device, fallen off the bus",
        "NVRM: GPU at PCI:0000:b3:00: ",
        // A UUID needs digits.
        "NVRM: GPU at PCI:0000:b3:00: GPU-",
        "NVRM: GPU at PCI:0000:b3:00: GPU----",
        "NVRM: GPU at PCI:0000:b3:00: MIG-aa",
        "GPU reset executed: ",
        "GPU reset executed: GPU-",
        "GPU reset executed: GPU-aa, success: maybe",
        "GPU reset executed: GPU-aa, failure",
        "somebody says GPU reset executed: GPU-aa, success: true",
        "nvidia-nvswitch3: using MSI",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Severity 0 Engine instance 46 Sub-engine instance 00",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Data {0x00140004, 0x00100000}",
        "nvidia-nvswitch3: SXid is what its errors are called",
        "other: SXid (PCI:0000:c1:00.0): 28006, Fatal, Link 1",
        "NETDEV WATCHDOG: eth0 (bnxt_en): transmit queue 0 timed out",
        "infiniband bnxt_re0: something",
        "CPU: 5 PID: 4711 Comm: python3 Tainted: P OE 6.8.0 EXT4 XFS VFIO",
    ] {
        assert_eq!(decode(line.as_bytes()), None, "{line}");
    }
}

#[test]
fn what_stands_behind_the_code_says_whether_it_is_one() {
    let line = |behind: &[u8]| [b"NVRM: Xid (PCI:0000:b3:00): 79", behind].concat();
    for behind in [
        &b""[..],
        b", a",
        b",a",
        b" pid=7",
        b"\tpid=7",
        b": a",
        b"\r",
        b" \xff",
        // As a log daemon closes what it quotes.
        b"]",
        b"\"}",
    ] {
        let line = line(behind);
        let found = decode(&line);
        let is_79 = matches!(&found, Some(LogLine::Xid(xid)) if xid.code == 79);
        assert!(is_79, "{}: {found:?}", line.escape_ascii());
    }
    for behind in [
        &b"x, a"[..],
        b"-1, a",
        b".5",
        b"\0, a",
        b"\xff9, a",
        "\u{e9}".as_bytes(),
    ] {
        let line = line(behind);
        let found = decode(&line);
        assert_eq!(found, Some(LogLine::Garbled), "{}", line.escape_ascii());
    }
}

#[test]
fn garbled_lines_are_told_from_lines_that_say_nothing() {
    for line in [
        "NVRM: Xid (",
        "NVRM: Xid (PCI:0000:b3:00)",
        "NVRM: Xid (PCI:0000:b3:00): ",
        "NVRM: Xid (PCI:0000:b3:00): many",
        "NVRM: Xid (PCI:0000:b3:00): 7x, a",
        "NVRM: Xid (PCI:zz): 79, a",
        // An address needs digits.
        "NVRM: Xid (PCI:): 79, x",
        "NVRM: Xid (PCI:::.): 79, x",
        "NVRM: Xid (PCI:.:.): 79, x",
        "NVRM: Xid (PCI:0000::00): 79, x",
        "NVRM: Xid (PCI:0000:b3:00.): 79, x",
        "NVRM: Xid (PCI:0000:b3:00): 4294967296, too large",
        "guest console: NVRM: Xid (PCI:0000:b3:00): 7x, a",
        "nvidia-nvswitch3: SXid (",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0)",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): ",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): , Fatal",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 2400x, Fatal, Link 1",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 4294967296, Fatal, Link 1",
        "nvidia-nvswitch3: SXid (PCI:::.0): 28006, Fatal, Link 1",
        "nvidia-nvswitch3: SXid (PCI:zz): 28006, Severity 0 Engine instance 46",
        "guest console: nvidia-nvswitch3: SXid (PCI:zz): 28006, Fatal, Link 1",
    ] {
        assert_eq!(decode(line.as_bytes()), Some(LogLine::Garbled), "{line}");
    }
    // Two writers in one line: what can be read of it counts.
    let found = xid_of("guest: NVRM: Xid (PCI:0000:b3NVRM: Xid (PCI:0000:b4:00): 79, a");
    assert_eq!(found.map(|xid| xid.pci), Some("0000:b4:00"));
    let found = sxid_of(
        "nvidia-nvswitch0: SXid (PCI:00nvidia-nvswitch1: SXid (PCI:0000:c4:00.0): 10003, Fatal, a",
    );
    assert_eq!(found.map(|sxid| sxid.pci), Some("0000:c4:00.0"));
    let found = xid_of("nvidia-nvswitch0: SXid (PCI:00NVRM: Xid (PCI:0000:b4:00): 79, a");
    assert_eq!(found.map(|xid| xid.pci), Some("0000:b4:00"));
}

#[test]
fn the_unit_of_xid_13_and_the_link_of_xid_74() {
    let unit = |text: &str| {
        let line = format!("NVRM: Xid (PCI:0000:b3:00): 13, pid=1, name=a, {text}");
        let unit = xid_of(&line).unwrap().unit();
        unit.map(|unit| (unit.gpc, unit.tpc, unit.sm))
    };
    let text = "Graphics SM Warp Exception on (GPC 1, TPC 0, SM 12): Misaligned Address";
    assert_eq!(unit(text), Some((1, 0, 12)));
    for text in [
        "Graphics Exception: ESR 0x51d730=0xc0f000e",
        "on (GPC 1, TPC 0): x",
        "on (GPC x, TPC 0, SM 1): x",
        "on (GPC 1, TPC 0, SM 1",
    ] {
        assert_eq!(unit(text), None, "{text}");
    }
    let link = |text: &str| {
        let line = format!("NVRM: Xid (PCI:0000:b3:00): 74, {text}");
        xid_of(&line).unwrap().link()
    };
    assert_eq!(
        link(
            "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0xffffffff)"
        ),
        Some((14, Some([0, 0, 0x10000, 0, 0, 0, u32::MAX])))
    );
    for (text, expected) in [
        ("NVLink: fatal error detected on link 6", Some((6, None))),
        ("on link 6(0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", Some((6, None))),
        (
            "on link 6(0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            Some((6, None)),
        ),
        (
            "on link 6(0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x100000000)",
            Some((6, None)),
        ),
        ("NVLink: something else", None),
    ] {
        assert_eq!(link(text), expected, "{text}");
    }
}

#[test]
fn the_words_of_nvlink5_lines() {
    let table = [
        (
            "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000 0x00000000 0x00000000)",
            Some(("NETIR_LINK_EVT", Some(Severity::Fatal), 0x0255_25c6, 0)),
        ),
        (
            "RLW_REMAP Nonfatal XC1 i2 Link -1 (0x00000004 0x00000001)",
            Some(("RLW_REMAP", Some(Severity::NonFatal), 4, 1)),
        ),
        (
            "MSE Degraded  Fatal   XC0 i0 Link 00 (0x00000000 0xffffffff 0x00000000)",
            Some(("MSE Degraded", Some(Severity::Fatal), 0, u32::MAX)),
        ),
        (
            "NETIR_LINK_DOWN Link Fatal XC0 i0 Link 17 [0x0000000a 0x00000001]",
            Some(("NETIR_LINK_DOWN", Some(Severity::Fatal), 10, 1)),
        ),
        ("TREX (0x1 0x2)", Some(("TREX", None, 1, 2))),
        ("NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025525c6)", None),
        ("NETIR_LINK_EVT Fatal XC0 i0 Link 00", None),
        ("(0x1 0x2)", None),
        ("Fatal XC0 i0 Link 00 (0x1 0x2)", None),
        ("nüll Fatal (0x1 0x2)", None),
        ("X Fatal (0x123456789 0x2)", None),
    ];
    for process in ["", "pid='<unknown>', name=<unknown>, ", "pid=1, name=a b, "] {
        for (text, expected) in table {
            let line = format!("NVRM: Xid (PCI:0018:01:00): 149, {process}{text}");
            let report = xid_of(&line).unwrap().nvlink5();
            let found = report.map(|it| (it.unit, it.severity, it.intr_info, it.error_status));
            assert_eq!(found, expected, "{line}");
        }
    }
    let long = "U".repeat(41);
    let line = format!("NVRM: Xid (PCI:0018:01:00): 149, {long} Fatal (0x1 0x2)");
    assert_eq!(xid_of(&line).unwrap().nvlink5(), None);
    let other = "NVRM: Xid (PCI:0018:01:00): 143, NETIR Fatal (0x1 0x2)";
    assert_eq!(xid_of(other).unwrap().nvlink5(), None);
}

#[test]
fn sxid_lines_of_real_drivers() {
    // Switch, PCI address, code, the line's word, link.
    let table = [
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 sourcetrack timeout error",
            (Some(3), "0000:c1:00.0", 24007, Some(true), Some(44)),
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate",
            (Some(0), "0000:c3:00.0", 20009, Some(false), Some(28)),
        ),
        (
            "[ 12.5] nvidia-nvswitch10: SXid (PCI:0000:c3:00.0): 11012, Correctable, Link 05 ECC (First)",
            (Some(10), "0000:c3:00.0", 11012, Some(false), Some(5)),
        ),
        (
            "nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 10003, Fatal, unhandled interrupt",
            (Some(1), "0000:c3:00.0", 10003, Some(true), None),
        ),
        (
            "nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 10001, Non-fatal, PRI error, instance=3, chiplet=0",
            (Some(1), "0000:c3:00.0", 10001, Some(false), None),
        ),
        (
            "nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 23001",
            (Some(1), "0000:c3:00.0", 23001, None, None),
        ),
        (
            "nvidia-nvswitch: SXid (0000:c3:00.0): 23001, something, Link 3",
            (None, "0000:c3:00.0", 23001, None, None),
        ),
        (
            "nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 20034, Fatal, Link absent",
            (Some(1), "0000:c3:00.0", 20034, Some(true), None),
        ),
    ];
    for (line, expected) in table {
        let sxid = sxid_of(line).expect(line);
        let found = (sxid.switch, sxid.pci, sxid.code, sxid.fatal, sxid.link);
        assert_eq!(found, expected, "{line}");
    }
}

#[test]
fn gpus_that_fell_off_the_bus_without_an_xid() {
    let fell = |pci, pci_id, fell| Some(LogLine::Fallen(Fallen { pci, pci_id, fell }));
    for (line, expected) in [
        (
            "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
            fell(Some("0000:b3:00.0"), None, true),
        ),
        (
            "NVRM: GPU at 0000:0b:00.0 has fallen off the bus.",
            fell(Some("0000:0b:00.0"), None, true),
        ),
        (
            "NVRM: GPU at PCI:0000:17:00.0 has fallen off the bus.",
            fell(Some("0000:17:00.0"), None, true),
        ),
        (
            "NVRM: The NVIDIA GPU 0000:0e:00.0 (PCI ID: 10de:1b06) installed in this system has fallen off the bus and is not responding to commands.",
            fell(Some("0000:0e:00.0"), Some("10de:1b06"), true),
        ),
        (
            "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\nNVRM: fallen off the bus and is not responding to commands.",
            fell(Some("0000:b3:00.0"), Some("10de:2330"), true),
        ),
        (
            "NVRM: The NVIDIA GPU 0000:b3:00.0",
            fell(Some("0000:b3:00.0"), None, false),
        ),
        (
            "               NVRM: (PCI ID: 10de:2330) installed in this system has",
            fell(None, Some("10de:2330"), false),
        ),
        (
            "NVRM: fallen off the bus and is not responding to commands.",
            fell(None, None, true),
        ),
        ("NVRM: The NVIDIA GPU unknown", None),
        ("NVRM: (PCI ID: none) installed in this system has", None),
    ] {
        assert_eq!(decode(line.as_bytes()), expected, "{line}");
    }
}

#[test]
fn lines_of_a_dump() {
    for (gpu, text) in [
        (
            Some(0),
            "GPU0 GSP RPC buffer contains function 76 (GSP_RM_CONTROL) sequence 41 and data 0x0 0x0.",
        ),
        (Some(12), "GPU12 RPC history (CPU -> GSP):"),
        (Some(0), "GPU0 RPC event history (CPU <- GSP):"),
        (
            None,
            "    entry function                   sequence data0              data1",
        ),
        (
            None,
            "     0    76   GSP_RM_CONTROL   0x0 0x490 0x0 0x0          y",
        ),
        (
            None,
            "    -1    103  GSP_RM_ALLOC     0x0 0x4 0x0 0x0    492us  ",
        ),
    ] {
        for before in ["", "[ 2638.641541] ", "kernel: "] {
            let line = format!("{before}NVRM: {text}");
            assert!(may_say_something(line.as_bytes()), "{line}");
            let said = decode(line.as_bytes());
            assert_eq!(said, Some(LogLine::Rpc(RpcLine { gpu, text })), "{line}");
        }
    }
}

#[test]
fn lines_of_reset_jobs() {
    let uuid = "GPU-22222222-2222-2222-2222-222222222222";
    for before in [
        "",
        "kernel: [16450076.435595] ",
        "nvsentinel-gpu-reset: ",
        "nvsentinel-gpu-reset[4711]: ",
    ] {
        for (after, succeeded) in [
            (", success: true", true),
            (", success: false", false),
            // As jobs wrote it before there was a result.
            ("", true),
        ] {
            let line = format!("{before}GPU reset executed: {uuid}{after}");
            let reset = LogLine::Reset(Reset { uuid, succeeded });
            assert_eq!(decode(line.as_bytes()), Some(reset), "{line}");
        }
    }
}

#[test]
fn lines_of_nic_drivers() {
    // Driver, PCI address, device.
    let table = [
        (
            "mlx5_core 0000:9a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
            (NicDriver::Mlx5, Some("0000:9a:00.0"), None),
        ),
        (
            "[ 1.0] mlx5_core 0000:65:00.1 eth0: NETDEV WATCHDOG: CPU: 5: transmit queue 0 timed out",
            (NicDriver::Mlx5, Some("0000:65:00.1"), None),
        ),
        (
            "NETDEV WATCHDOG: ens1f0 (mlx5_core): transmit queue 5 timed out",
            (NicDriver::Mlx5, None, Some("ens1f0")),
        ),
        (
            "infiniband mlx5_0: something",
            (NicDriver::Mlx5, None, Some("mlx5_0")),
        ),
        (
            "infiniband rdmap0s6: Admin queue is closed",
            (NicDriver::Efa, None, Some("rdmap0s6")),
        ),
        (
            "efa 0000:00:06.0: Device isn't ready, abort com init",
            (NicDriver::Efa, Some("0000:00:06.0"), None),
        ),
        ("mlx5_core strange: text", (NicDriver::Mlx5, None, None)),
        // The functions of a NIC are devices of their own.
        ("mlx5_core 9a:00: text", (NicDriver::Mlx5, None, None)),
    ];
    for (line, expected) in table {
        // Behind what log daemons put before a line of the kernel.
        for before in [
            "",
            "kernel: ",
            "kernel: Jan 21 11:18:36 kernel: ",
            "Jan  1 11:18:36 gpu-7 kernel: [16450076.435595] ",
            "Jan 21 11:18:36 gpu-7 kernel: Jan 21 11:18:36 kernel: ",
            "2026-01-21T11:18:36.123456+00:00 gpu-7 kernel: ",
            "2026-01-21 11:18:36 kernel: [ 1.0] ",
            "kernel: message repeated 2 times: [ ",
        ] {
            let line = format!("{before}{line}");
            assert!(may_say_something(line.as_bytes()), "{line}");
            let Some(LogLine::Nic(nic)) = decode(line.as_bytes()) else {
                panic!("{line}");
            };
            assert_eq!((nic.driver, nic.pci, nic.device), expected, "{line}");
        }
        // Another program's line is not the kernel's.
        for before in [
            "Jan 21 11:18:36 gpu-7 python3[8]: ",
            "Jan 21 11:18:36 a b kernel: ",
            "Jan 21 at noon kernel: ",
            "python3 ",
        ] {
            let line = format!("{before}{line}");
            assert_eq!(decode(line.as_bytes()), None, "{line}");
        }
    }
}

proptest! {
    #[test]
    fn what_the_driver_prints_is_read_back(
        bus in 0_u8..=255, code in 0_u32..100_000, pid in proptest::option::of(0_u32..4_194_304),
        name in "[a-zA-Z0-9_. -]{1,15}", prefix in "[ -~]{0,30}", detail in "[ -~]{0,60}",
    ) {
        prop_assume!(!prefix.contains("NVRM: ") && name.trim() == name);
        let pid_text = pid.map_or("'<unknown>'".to_owned(), |pid| pid.to_string());
        let line = format!(
            "{prefix}NVRM: Xid (PCI:0000:{bus:02x}:00): {code}, pid={pid_text}, name={name}, {detail}"
        );
        let xid = xid_of(&line);
        prop_assert!(xid.is_some());
        let xid = xid.unwrap();
        let pci = format!("0000:{bus:02x}:00");
        prop_assert_eq!((xid.pci, xid.code), (pci.as_str(), code));
        prop_assert_eq!((xid.pid, xid.process), (pid, Some(name.as_str())));
    }

    #[test]
    fn a_line_that_says_something_is_never_passed_over(line in "[ -~\n]{0,120}") {
        for line in [line.clone(), format!("NVRM: {line}"), format!("mlx5_core {line}")] {
            prop_assert!(decode(line.as_bytes()).is_none() || may_say_something(line.as_bytes()));
        }
    }
}

#[test]
fn a_fault_behind_an_ordinary_line_of_the_same_record_is_seen() {
    let record = b"NVRM: loading\nNVRM: Xid (PCI:0000:b3:00): 79, x";
    assert!(may_say_something(record));
    assert!(!may_say_something(
        b"NVRM: loading NVIDIA UNIX Open Kernel Module"
    ));
}
