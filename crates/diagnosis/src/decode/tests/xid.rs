//! Tests of the parts of XID lines.

use super::*;

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
