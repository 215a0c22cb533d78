use std::error::Error as _;

use proptest::prelude::*;

use super::*;

/// Two GPUs on a switch, the second with few details, as the collector writes it.
const FILE: &str = r#"{
  "version": "1.0", "timestamp": "2026-07-01T00:00:00Z", "node_name": "n1",
  "driver_version": "570.86.15", "chassis_serial": "1660022000001",
  "gpus": [
    {"gpu_id": 0, "uuid": "GPU-aaaaaaaa-0000-0000-0000-000000000001",
     "pci_address": "0000:1b:00.0", "serial_number": "1650522003820",
     "device_name": "NVIDIA H100 80GB HBM3", "numa_node": 0, "slowdown_tlimit_c": -2,
     "nvlinks": [{"link_id": 0, "remote_pci_address": "0000:c1:00.0", "remote_link_id": 44},
                 {"link_id": 1, "remote_pci_address": "00000000:C2:00.0", "remote_link_id": 7},
                 {"link_id": 2, "remote_pci_address": "0000:c1:00.0", "remote_link_id": -1},
                 {"link_id": 3}]},
    {"gpu_id": 1, "uuid": "GPU-aaaaaaaa-0000-0000-0000-000000000002",
     "pci_address": "0009:01:00.0", "numa_node": -1, "nvlinks": null}
  ],
  "nvswitches": ["0000:c1:00.0", {"pci_address": "0000:c2:00.0"}],
  "nic_topology": {"mlx5_0": ["PIX", "SYS"]}
}"#;

#[test]
fn gpus_are_found_by_every_name() {
    let machine = MachineGpus::parse(FILE).unwrap();
    assert_eq!(machine.driver_version(), Some("570.86.15"));
    assert_eq!(machine.driver_branch(), Some(570));
    assert_eq!(machine.chassis_serial(), Some("1660022000001"));
    let [first, second] = machine.gpus.as_slice() else {
        panic!("{machine:?}")
    };
    assert_eq!(first.pci.as_deref(), Some("0000:1b:00"));
    for pci in ["0000:1b:00", "00000000:1B:00.0", "1b:00.0"] {
        assert_eq!(machine.gpu_at(pci), Some(first), "{pci}");
    }
    assert_eq!(machine.gpu_at("0009:01:00"), Some(second));
    assert_eq!(machine.gpu_at("0000:01:00"), None);
    assert_eq!(
        machine.gpu_with_uuid("gpu-AAAAAAAA-0000-0000-0000-000000000002"),
        Some(second)
    );
    assert_eq!(machine.gpu_with_uuid("GPU-"), None);
    assert_eq!(machine.gpu_linked_to("0000:c1:00.0", 44), Some(first));
    assert_eq!(machine.gpu_linked_to("0000:c2:00", 7), Some(first));
    assert_eq!(machine.gpu_linked_to("0000:c1:00.0", 45), None);
}

#[test]
fn what_is_missing_is_missing() {
    for text in ["{}", r#"{"gpus": null}"#, r#"{"gpus": []}"#] {
        assert_eq!(
            MachineGpus::parse(text).unwrap(),
            MachineGpus::default(),
            "{text}"
        );
    }
    let machine =
        MachineGpus::parse(r#"{"gpus": [{"pci_address": "0000:1b:00.0", "uuid": " "}]}"#).unwrap();
    assert_eq!(machine.gpu_at("0000:1b:00").unwrap().uuid, None);
    for (version, branch) in [
        ("580.65.06", Some(580)),
        ("575", Some(575)),
        ("", None),
        ("unknown", None),
    ] {
        let text = format!(r#"{{"driver_version": "{version}"}}"#);
        let machine = MachineGpus::parse(&text).unwrap();
        assert_eq!(machine.driver_branch(), branch, "{version}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    let gpus =
        |entry: &str, count: usize| format!("{{\"gpus\": [{}]}}", vec![entry; count].join(","));
    let links = format!(
        r#"{{"nvlinks": [{}]}}"#,
        vec!["{}"; MAX_LINKS + 1].join(",")
    );
    let long = format!(
        r#"{{"uuid": "GPU-{}"}}"#,
        "a".repeat(MAX_MACHINE_NAME_BYTES)
    );
    for (text, expected) in [
        (String::new(), "EOF while parsing"),
        ("gpus: []".to_owned(), "expected value at line 1"),
        ("[]".to_owned(), "line 1"),
        (gpus("7", 1), "invalid type: integer `7`"),
        (gpus(r#"{"gpu_id": "zero"}"#, 1), "invalid type: string"),
        (gpus(r#"{"gpu_id": -1}"#, 1), "invalid value: integer `-1`"),
        (gpus("{}", MAX_GPUS + 1), "gpus has 1025 entries"),
        (gpus(&links, 1), "gpus[0].nvlinks has 257 entries"),
        (gpus(&long, 1), "gpus[0].uuid"),
        (gpus(r#"{"pci_address": "a\nb"}"#, 1), "gpus[0].pci_address"),
        (
            gpus(r#"{"nvlinks": [{}, {"remote_pci_address": "ü"}]}"#, 1),
            "gpus[0].nvlinks[1].remote_pci_address",
        ),
        (
            r#"{"driver_version": "\u0000"}"#.to_owned(),
            "driver_version",
        ),
        (" ".repeat(MAX_MACHINE_BYTES + 1), "4194305 bytes"),
    ] {
        let error = MachineGpus::parse(&text).unwrap_err();
        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        let shown = format!("{error}: {cause}");
        assert!(shown.contains(expected), "{shown}");
    }
}

proptest! {
    #[test]
    fn never_panics(text in "[ -~\n\u{e4}]{0,200}", cut in 0..FILE.len()) {
        drop(MachineGpus::parse(&text));
        prop_assert!(MachineGpus::parse(&FILE[..cut]).is_err());
    }
}
