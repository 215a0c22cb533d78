mod dump;
mod fall;
mod nic;
mod nvlink5;
mod starts;

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;
use crate::catalog::Overrides;

const T0: Timestamp = Timestamp::UNIX_EPOCH;
const UUID: &str = "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee";

/// A machine with a GPU at 0000:b3:00, linked to link 44 of the switch at 0000:c1:00.
const MACHINE: &str = r#"{"driver_version": "580.65.06", "chassis_serial": "42", "gpus": [
    {"gpu_id": 6, "uuid": "GPU-aa", "pci_address": "0000:b3:00.0", "nvlinks": [
        {"link_id": 0, "remote_pci_address": "0000:c1:00.0", "remote_link_id": 44}]}]}"#;

fn on_a_known_machine() -> KernelLogDecoder {
    let mut decoder = KernelLogDecoder::default();
    decoder.set_machine(Some(MachineGpus::parse(MACHINE).unwrap()));
    decoder
}

fn one(decoder: &mut KernelLogDecoder, line: &str) -> Finding {
    let mut found = decoder.record(line.as_bytes(), T0);
    assert_eq!(found.len(), 1, "{line}: {found:?}");
    found.remove(0)
}

/// Formats the entities as `PCI=0000:b3:00 GPU_UUID=GPU-aa`.
fn entities(finding: &Finding) -> String {
    let mut text = String::new();
    for entity in finding.entities() {
        write!(text, "{}={} ", entity.entity_type, entity.entity_value).unwrap();
    }
    text.trim_end().to_owned()
}

#[test]
fn a_gpu_is_known_by_its_uuid_once_the_kernel_said_it() {
    let mut decoder = KernelLogDecoder::default();
    let xid = "NVRM: Xid (PCI:0000:b3:00): 48, pid=1, name=a, DBE";
    assert_eq!(one(&mut decoder, xid).gpu_uuid, None);
    let map = format!("NVRM: GPU at PCI:0000:B3:00: {UUID}");
    assert_eq!(decoder.record(map.as_bytes(), T0), []);
    let finding = one(&mut decoder, xid);
    assert_eq!(
        entities(&finding),
        format!("PCI=0000:b3:00 GPU_UUID={UUID}")
    );
    assert_eq!(
        (finding.check(), finding.code().as_deref()),
        ("SysLogsXIDError", Some("48"))
    );
    // The GPU is replaced: the newest line counts.
    decoder.record(b"NVRM: GPU at PCI:0000:b3:00: GPU-ff", T0);
    assert_eq!(one(&mut decoder, xid).gpu_uuid.as_deref(), Some("GPU-ff"));
}

#[test]
fn the_newest_gpus_are_known_however_many_there_were() {
    let mut decoder = KernelLogDecoder::default();
    for bus in 0..3 * REMEMBERED {
        let line = format!("NVRM: GPU at PCI:{bus:04x}:b3:00: GPU-{bus:08x}");
        decoder.record(line.as_bytes(), T0);
    }
    let last = 3 * REMEMBERED - 1;
    let line = format!("NVRM: Xid (PCI:{last:04x}:b3:00): 48, DBE");
    let uuid = one(&mut decoder, &line).gpu_uuid;
    assert_eq!(uuid, Some(format!("GPU-{last:08x}")));
    assert!(decoder.uuids.len() <= REMEMBERED);
}

#[test]
fn what_is_known_of_the_machine_names_the_gpu_and_its_lack_loses_nothing() {
    let xid = "NVRM: Xid (PCI:0000:b3:00): 48, pid=1, name=a, DBE";
    let mut decoder = KernelLogDecoder::default();
    decoder.record(b"NVRM: GPU at PCI:0000:b3:00: GPU-bb", T0);
    decoder.set_machine(Some(MachineGpus::parse(MACHINE).unwrap()));
    let finding = one(&mut decoder, xid);
    assert_eq!(finding.gpu_uuid.as_deref(), Some("GPU-aa"));
    assert_eq!(finding.metadata()[0], ("chassis_serial", "42".to_owned()));
    // Without a description of this GPU, the log's UUID counts.
    for machine in [Some(MachineGpus::default()), None] {
        decoder.set_machine(machine);
        let finding = one(&mut decoder, xid);
        assert_eq!(finding.gpu_uuid.as_deref(), Some("GPU-bb"));
        let meaning = ("gpuwarden.dev/meaning", finding.meaning.to_string());
        assert_eq!(finding.metadata(), [meaning]);
    }
}

#[test]
fn a_gpu_of_a_long_domain_is_found_under_its_last_four_digits() {
    let xid = "NVRM: Xid (PCI:10000:b3:00): 48, pid=1, name=a, DBE";
    let mut decoder = on_a_known_machine();
    let finding = one(&mut decoder, xid);
    // The address is the one in the line.
    assert_eq!(entities(&finding), "PCI=10000:b3:00 GPU_UUID=GPU-aa");
    let reset = "GPU reset executed: GPU-aa, success: true";
    assert_eq!(
        entities(&one(&mut decoder, reset)),
        "PCI=0000:b3:00 GPU_UUID=GPU-aa"
    );
    decoder.record(b"NVRM: GPU at PCI:10000:b3:00: GPU-aa", T0);
    assert_eq!(
        entities(&one(&mut decoder, reset)),
        "PCI=10000:b3:00 GPU_UUID=GPU-aa"
    );
    // Two GPUs that match after the domain was cut: neither is named.
    let two = r#"{"gpus": [{"uuid": "GPU-aa", "pci_address": "0000:b3:00.0"},
                           {"uuid": "GPU-bb", "pci_address": "0000:b3:00.0"}]}"#;
    let mut decoder = KernelLogDecoder::default();
    decoder.set_machine(Some(MachineGpus::parse(two).unwrap()));
    assert_eq!(entities(&one(&mut decoder, xid)), "PCI=10000:b3:00");
    for (pci, expected) in [
        ("10000:b3:00", Some("0000:b3:00")),
        ("abcd0001:b3:00", Some("0001:b3:00")),
        ("0000:b3:00", None),
        ("b3", None),
    ] {
        assert_eq!(super::cut_domain(pci).as_deref(), expected, "{pci}");
    }
}

#[test]
fn what_describes_an_xid_becomes_entities() {
    let mut decoder = on_a_known_machine();
    let xid = |code_and_text: &str| format!("NVRM: Xid (PCI:0000:b3:00): {code_and_text}");
    for (text, expected) in [
        (
            "13, pid=1, name=a, Graphics SM Warp Exception on (GPC 3, TPC 1, SM 0): x",
            "PCI=0000:b3:00 GPU_UUID=GPU-aa GPC=3 TPC=1 SM=0",
        ),
        (
            "31, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 0): x",
            "PCI=0000:b3:00 GPU_UUID=GPU-aa",
        ),
        (
            "74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x5)",
            "PCI=0000:b3:00 GPU_UUID=GPU-aa NVLINK=14 \
             REG0=00000000000000000000000000000000 REG1=00000000000000000000000000000000 \
             REG2=00000000000000010000000000000000 REG3=00000000000000000000000000000000 \
             REG4=00000000000000000000000000000000 REG5=00000000000000000000000000000000 \
             REG6=00000000000000000000000000000101",
        ),
        (
            "74, NVLink: fatal error detected on link 6",
            "PCI=0000:b3:00 GPU_UUID=GPU-aa NVLINK=6",
        ),
    ] {
        let finding = one(&mut decoder, &xid(text));
        assert_eq!(entities(&finding), expected, "{text}");
    }
    let mig = one(
        &mut decoder,
        "NVRM: Xid (PCI:0000:b3:00 GPU-I:02 GPU-CI:01): 13, x",
    );
    assert_eq!(entities(&mig), "PCI=0000:b3:00 GPU_UUID=GPU-aa");
    let metadata = mig.metadata();
    assert!(metadata.contains(&("gpuwarden.dev/gpu-instance", "2".to_owned())));
    assert!(metadata.contains(&("gpuwarden.dev/compute-instance", "1".to_owned())));
}

#[test]
fn an_sxid_names_switch_link_and_gpu() {
    let fatal = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 timeout";
    let mut decoder = on_a_known_machine();
    let finding = one(&mut decoder, fatal);
    assert_eq!(
        entities(&finding),
        "NVSWITCH=3 PCI=0000:c1:00.0 NVLINK=44 GPU=6 GPU_UUID=GPU-aa"
    );
    assert_eq!(
        (finding.check(), finding.code().as_deref()),
        ("SysLogsSXIDError", Some("24007"))
    );
    assert!(finding.fatal && finding.action == RecommendedAction::ContactSupport);
    let minor = one(
        &mut decoder,
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Non-fatal, Link 44 timeout",
    );
    assert!(!minor.fatal && minor.action == RecommendedAction::None);
}

/// A line that NVSentinel retries forever, which blocks all later ones.
#[test]
fn an_sxid_whose_link_nobody_knows_is_still_an_event() {
    let unknown_link = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 45 timeout";
    let no_link = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 10003, Fatal, unhandled interrupt";
    for mut decoder in [on_a_known_machine(), KernelLogDecoder::default()] {
        assert_eq!(
            entities(&one(&mut decoder, unknown_link)),
            "NVSWITCH=3 PCI=0000:c1:00.0 NVLINK=45"
        );
        let finding = one(&mut decoder, no_link);
        assert_eq!(entities(&finding), "NVSWITCH=3 PCI=0000:c1:00.0");
        assert!(finding.fatal);
    }
}

#[test]
fn a_reset_is_the_end_of_all_xids_of_its_gpu_or_a_fault() {
    let mut decoder = on_a_known_machine();
    let good = one(&mut decoder, "GPU reset executed: GPU-AA, success: true");
    assert_eq!((good.healthy, good.fatal, good.code()), (true, false, None));
    // The UUID is spelled as in the machine's description, so that it matches the fault's.
    assert_eq!(entities(&good), "PCI=0000:b3:00 GPU_UUID=GPU-aa");
    let bad = one(&mut decoder, "GPU reset executed: GPU-aa, success: false");
    assert_eq!((bad.healthy, bad.fatal), (false, true));
    assert_eq!(
        (bad.check(), bad.code().as_deref(), bad.action),
        (
            "SysLogsXIDError",
            Some("GPU_RESET_FAILURE"),
            RecommendedAction::RestartVm
        )
    );
}

/// The other line that NVSentinel retries forever.
#[test]
fn a_reset_of_a_gpu_that_nobody_knows_is_still_an_event() {
    let mut decoder = KernelLogDecoder::default();
    let good = one(&mut decoder, "GPU reset executed: GPU-99, success: true");
    assert_eq!(
        (entities(&good), good.healthy),
        ("GPU_UUID=GPU-99".to_owned(), true)
    );
    // The log has named the GPU, so its address is known.
    decoder.record(b"NVRM: GPU at PCI:0000:b3:00: GPU-99", T0);
    let bad = one(&mut decoder, "GPU reset executed: GPU-99, success: false");
    assert_eq!(entities(&bad), "PCI=0000:b3:00 GPU_UUID=GPU-99");
}

#[test]
fn a_driver_that_takes_its_advice_back_ends_the_fault() {
    let mut decoder = KernelLogDecoder::default();
    let advice = "NVRM: Xid (PCI:0000:b3:00): 154, GPU recovery action changed from";
    let asked = one(
        &mut decoder,
        &format!("{advice} 0x0 (None) to 0x3 (Drain P2P)"),
    );
    assert!(asked.fatal && asked.action == RecommendedAction::ComponentReset);
    let back = one(
        &mut decoder,
        &format!("{advice} 0x3 (Drain P2P) to 0x0 (None)"),
    );
    assert_eq!(
        (back.healthy, back.fatal, back.code().as_deref()),
        (true, false, Some("154"))
    );
}

#[test]
fn a_record_of_several_lines_tells_all_of_them() {
    let mut decoder = KernelLogDecoder::default();
    let record = "NVRM: GPU at PCI:0000:b3:00: GPU-bb\nnothing\nNVRM: Xid (PCI:0000:b3:00): 48, x\n\
                  NVRM: Xid (PCI:0000:b4:00): 95, y\n";
    let found = decoder.record(record.as_bytes(), T0);
    let lines: Vec<_> = found.iter().filter_map(|it| it.lines.as_deref()).collect();
    assert_eq!(
        lines,
        [
            "NVRM: Xid (PCI:0000:b3:00): 48, x",
            "NVRM: Xid (PCI:0000:b4:00): 95, y"
        ]
    );
    let told: Vec<_> = found
        .iter()
        .map(|it| (it.code(), it.gpu_uuid.clone()))
        .collect();
    assert_eq!(
        told,
        [
            (Some("48".into()), Some("GPU-bb".into())),
            (Some("95".into()), None)
        ]
    );
}

#[test]
fn an_xid_that_ends_others_names_them() {
    let mut decoder = KernelLogDecoder::default();
    let all_clear = one(
        &mut decoder,
        "NVRM: Xid (PCI:0000:b3:00): 162, power smoothing",
    );
    let cancels = |code: &str| Cancelled {
        check: "SysLogsXIDError",
        code: code.to_owned(),
    };
    assert_eq!(all_clear.cancels, [cancels("163")]);
    assert!(!all_clear.fatal, "there: fatal, for its row is not read");
    let other = one(
        &mut decoder,
        "NVRM: Xid (PCI:0000:b3:00): 163, power smoothing",
    );
    assert!(other.cancels.is_empty());
}

proptest! {
    #[test]
    fn never_panics_and_every_event_can_be_sent(
        line in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut decoder = on_a_known_machine();
        for start in [
            &b""[..], b"NVRM: ", b"NVRM: Xid (PCI:", b"NVRM: Xid (PCI:0000:b3:00): 149, ",
            b"nvidia-nvswitch0: SXid (PCI:", b"GPU reset executed: ", b"mlx5_core ", b"NETDEV WATCHDOG: ",
        ] {
            let mut driver = start.to_vec();
            driver.extend_from_slice(&line);
            for finding in decoder.record(&driver, T0) {
                prop_assert!(finding.code().is_none_or(|code| !code.is_empty() && code.len() < 100));
                for entity in finding.entities() {
                    prop_assert!(!entity.entity_value.is_empty() && entity.entity_value.len() < 200);
                }
            }
        }
    }
}

#[test]
fn garbled_lines_are_counted_and_the_first_is_quoted() {
    let mut decoder = KernelLogDecoder::default();
    for ordinary in ["NVRM: loading", "NVRM: Xid (PCI:0000:b3:00): 13, a", "x"] {
        decoder.record(ordinary.as_bytes(), T0);
        assert_eq!(decoder.take_garbled(), None, "{ordinary}");
    }
    let long = "y".repeat(1_000);
    let text = format!("NVRM: Xid (PCI:zz): \x1b[2J79, {long}\nNVRM: Xid (PCI:0000:b3:00): 7x, a");
    assert_eq!(decoder.record(text.as_bytes(), T0), []);
    let Garbled { lines, quoted } = decoder.take_garbled().unwrap();
    assert_eq!(lines, 2);
    assert!(
        quoted.starts_with(r"NVRM: Xid (PCI:zz): \x1b[2J79, yyy"),
        "{quoted}"
    );
    assert!(
        quoted.ends_with("yyy...") && quoted.len() < 2 * MAX_QUOTED_BYTES,
        "{quoted}"
    );
    assert_eq!(decoder.take_garbled(), None);

    let switch = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 2400x, Fatal, Link 44 a";
    assert_eq!(decoder.record(switch.as_bytes(), T0), []);
    let garbled = decoder.take_garbled().unwrap();
    assert_eq!((garbled.lines, garbled.quoted.as_str()), (1, switch));
}
