use proptest::prelude::*;

use super::*;
use crate::catalog::{NicDriver, Severity};

mod xid;

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
        // A quoted line with the log daemon's closing bracket.
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
    // Two interleaved writers: the intact line counts.
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
fn sxid_lines_of_real_drivers() {
    // Switch, PCI address, code, severity, link.
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
    let fell = |pci, pci_id, fell| Some((pci, pci_id, fell));
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
        (
            "NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:0fc6) installed in this system is not supported",
            None,
        ),
    ] {
        let found = match decode(line.as_bytes()) {
            Some(LogLine::Fallen(part)) => Some((part.pci, part.pci_id, part.fell)),
            None => None,
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(found, expected, "{line}");
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
            assert!(may_match(line.as_bytes()), "{line}");
            let found = decode(line.as_bytes());
            assert_eq!(found, Some(LogLine::Rpc(RpcLine { gpu, text })), "{line}");
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
            // As jobs wrote it before they had a result.
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
        // The functions of a NIC are separate devices.
        ("mlx5_core 9a:00: text", (NicDriver::Mlx5, None, None)),
    ];
    for (line, expected) in table {
        // Prefixes that log daemons add to a line of the kernel.
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
            assert!(may_match(line.as_bytes()), "{line}");
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
            prop_assert!(decode(line.as_bytes()).is_none() || may_match(line.as_bytes()));
        }
    }
}

#[test]
fn a_fault_behind_an_ordinary_line_of_the_same_record_is_seen() {
    let record = b"NVRM: loading\nNVRM: Xid (PCI:0000:b3:00): 79, x";
    assert!(may_match(record));
    assert!(!may_match(b"NVRM: loading NVIDIA UNIX Open Kernel Module"));
}
