use contract::RecommendedAction;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::*;

fn xid_of(line: &str) -> Option<(String, u32, Option<u32>, Option<String>)> {
    match decode(line.as_bytes()) {
        Some(Line::Xid(xid)) => Some((
            xid.pci.to_owned(),
            xid.code,
            xid.pid,
            xid.process.map(str::to_owned),
        )),
        _ => None,
    }
}

/// PCI address, code, pid, process.
type Parts<'a> = (&'a str, u32, Option<u32>, Option<&'a str>);

#[test]
fn xid_lines_of_real_drivers() {
    let table: [(&str, Parts<'_>); 12] = [
        (
            "NVRM: Xid (PCI:0000:b3:00): 79, pid=1234, name=python3, GPU has fallen off the bus.",
            ("0000:b3:00", 79, Some(1234), Some("python3")),
        ),
        (
            "NVRM: Xid (0000:03:00): 31, Ch 00000012, engmask 00000111",
            ("0000:03:00", 31, None, None),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception",
            ("0000:3b:00", 13, None, None),
        ),
        (
            "NVRM: Xid (PCI:0000:5e:00): 48, pid='<unknown>', name=<unknown>, DBE at row 5",
            ("0000:5e:00", 48, None, None),
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6)",
            ("0018:01:00", 149, None, None),
        ),
        (
            "NVRM: Xid (PCI:00000000:b3:00.0): 95 pid=7",
            ("00000000:b3:00.0", 95, Some(7), None),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 63",
            ("0000:b3:00", 63, None, None),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 999, nobody knows",
            ("0000:b3:00", 999, None, None),
        ),
        (
            "[1234.5] NVRM: Xid (PCI:0000:b3:00): 43, pid=88, name=my job,v2, Ch 00000008",
            ("0000:b3:00", 43, Some(88), Some("my job,v2")),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 45, pid=88, name=train",
            ("0000:b3:00", 45, Some(88), Some("train")),
        ),
        (
            "NVRM: Xid (PCI:000a:01:00): 119, pid=1, name=x, Timeout",
            ("000a:01:00", 119, Some(1), Some("x")),
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 154, GPU recovery action changed",
            ("0000:b3:00", 154, None, None),
        ),
    ];
    for (line, (pci, code, pid, process)) in table {
        assert_eq!(
            xid_of(line),
            Some((pci.to_owned(), code, pid, process.map(str::to_owned))),
            "{line}"
        );
    }
}

#[test]
fn lines_that_are_no_fault() {
    for line in [
        "",
        "NVRM: ",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
        "NVRM: Xid",
        "NVRM: Xid (",
        "NVRM: Xid (PCI:0000:b3:00)",
        "NVRM: Xid (PCI:0000:b3:00): ",
        "NVRM: Xid (PCI:0000:b3:00): many",
        "NVRM: Xid (PCI:hello): 79, x",
        "NVRM: Xid (PCI:0000:b3:00): 99999999999999999999, too large",
        "Xid (PCI:0000:b3:00): 79, somebody quotes the driver",
        "NVRM: GPU has fallen off the bus",
        "usb 1-1: new high-speed USB device, fallen off the bus",
        "NVRM: GPU at PCI:0000:b3:00: ",
    ] {
        assert_eq!(decode(line.as_bytes()), None, "{line}");
    }
}

#[test]
fn gpus_that_fell_off_the_bus_without_an_xid() {
    assert_eq!(
        decode(b"NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus."),
        Some(Line::FallenOffBus {
            pci: "0000:b3:00.0",
            pci_id: None
        })
    );
    let record = b"NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\nNVRM: fallen off the bus and is not responding to commands.";
    assert_eq!(
        decode(record),
        Some(Line::FallenOffBus {
            pci: "0000:b3:00.0",
            pci_id: Some("10de:2330")
        })
    );
}

#[test]
fn a_gpu_is_known_by_its_uuid_once_the_kernel_said_it() {
    let mut decoder = KernelLogDecoder::default();
    let now = Timestamp::UNIX_EPOCH;
    let uuid = "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee";
    let xid = b"NVRM: Xid (PCI:0000:b3:00): 48, pid=1, name=a, DBE";
    assert_eq!(decoder.line(xid, now).unwrap().gpu_uuid, None);
    let map = format!("NVRM: GPU at PCI:0000:B3:00: {uuid}");
    assert_eq!(decoder.line(map.as_bytes(), now), None);
    let finding = decoder.line(xid, now).unwrap();
    assert_eq!(finding.gpu_uuid.as_deref(), Some(uuid));
    assert_eq!(finding.entities().len(), 2);
    assert_eq!(
        (finding.check(), finding.code()),
        ("SysLogsXIDError", "48".to_owned())
    );
}

#[test]
fn what_is_known_of_the_machine_names_the_gpu_and_its_lack_loses_nothing() {
    let now = Timestamp::UNIX_EPOCH;
    let xid = b"NVRM: Xid (PCI:0000:b3:00): 48, pid=1, name=a, DBE";
    let machine = r#"{"gpus": [{"pci_address": "00000000:B3:00.0", "uuid": "GPU-aa"}]}"#;
    let mut decoder = KernelLogDecoder::default();
    decoder.line(b"NVRM: GPU at PCI:0000:b3:00: GPU-bb", now);
    decoder.set_machine(Some(Machine::parse(machine).unwrap()));
    let uuid = |decoder: &mut KernelLogDecoder| decoder.line(xid, now).unwrap().gpu_uuid;
    assert_eq!(uuid(&mut decoder).as_deref(), Some("GPU-aa"));
    // A machine that does not know this GPU, or none at all: the log's own word.
    decoder.set_machine(Some(Machine::parse("{}").unwrap()));
    assert_eq!(uuid(&mut decoder).as_deref(), Some("GPU-bb"));
    decoder.set_machine(None);
    assert_eq!(uuid(&mut decoder).as_deref(), Some("GPU-bb"));
}

#[test]
fn one_fall_is_one_fault() {
    let mut decoder = KernelLogDecoder::default();
    let at = |seconds| Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
    let fallen = b"NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.";
    let xid = b"NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
    assert!(decoder.line(xid, at(0)).unwrap().fatal);
    // The addresses differ in ".0", which the reference's comparison misses.
    assert_eq!(decoder.line(fallen, at(1)), None);
    assert_eq!(
        decoder
            .line(
                b"NVRM: GPU 0000:b4:00.0: GPU has fallen off the bus.",
                at(1)
            )
            .unwrap()
            .pci,
        "0000:b4:00"
    );
    let later = decoder.line(fallen, at(301)).unwrap();
    assert_eq!(
        (later.action, later.code().as_str()),
        (RecommendedAction::RestartBm, "GPU_FALLEN_OFF_BUS")
    );
}

proptest! {
    #[test]
    fn never_panics(line in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut decoder = KernelLogDecoder::default();
        decoder.line(&line, Timestamp::UNIX_EPOCH);
        let mut driver = b"NVRM: Xid (PCI:".to_vec();
        driver.extend_from_slice(&line);
        decoder.line(&driver, Timestamp::UNIX_EPOCH);
    }

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
        let found = xid_of(&line);
        prop_assert_eq!(found, Some((format!("0000:{bus:02x}:00"), code, pid, Some(name))));
    }
}
