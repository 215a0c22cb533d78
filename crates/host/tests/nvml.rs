//! NVML against a fake library, which is found and loaded like the real one.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use diagnosis::gpu::{
    Fabric, FabricState, Gpu, GpuEvent, GpuEventKind, Inventory, MigDevice, Nvlink, NvlinkReadings,
    Readings, RecoveryAction, UnreadableGpu,
};
use fakes::{Behaviour, FakeEvent, FakeLink, FakePartition, Scenario};
use gpuwarden_host::library::LibraryPlaces;
use gpuwarden_host::nvml::{Nvml, NvmlOpenError};
use serde_json::{Value, json};

/// NVML with a scenario, in a directory of its own.
struct Machine {
    nvml: Nvml,
    /// Dropped last, since the library reads it until it is shut down.
    directory: tempfile::TempDir,
}

impl Machine {
    fn new(scenario: &Scenario) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let nvml = open(directory.path(), scenario).unwrap();
        Self { nvml, directory }
    }

    fn becomes(&self, scenario: &Scenario) {
        fakes::write(self.directory.path(), scenario).unwrap();
    }

    fn inventory(&self) -> Inventory {
        self.nvml.inventory().unwrap()
    }

    /// Returns the readings of the first GPU.
    fn readings(&self) -> Readings {
        self.nvml.readings(&self.inventory().gpus[0]).unwrap()
    }
}

fn open(directory: &Path, scenario: &Scenario) -> Result<Nvml, NvmlOpenError> {
    let places = LibraryPlaces {
        path: Some(fakes::install(directory, scenario).unwrap()),
        driver_root: None,
    };
    Nvml::open(&places, Box::new(|_, _| {}))
}

fn code(code: u32) -> Behaviour {
    Behaviour::Code(code)
}

fn named(name: &str) -> Behaviour {
    Behaviour::try_from(name.to_owned()).unwrap()
}

#[test]
fn all_is_told_of_a_gpu() {
    let mut scenario = Scenario::healthy(2);
    let gpu = scenario.gpu_mut(1);
    gpu.chassis_serial = "1821325191344".to_owned();
    gpu.numa_node = 1;
    gpu.links = 2;
    gpu.link = vec![FakeLink {
        link: 1,
        remote_pci: Some("00000000:19:00.0".to_owned()),
        remote_link: Some(7),
        remote_kind: 0,
        ..FakeLink::default()
    }];
    let machine = Machine::new(&scenario);
    let inventory = machine.inventory();
    assert_eq!(inventory.driver_version.as_deref(), Some("580.65.06"));
    assert_eq!(inventory.cuda_version.as_deref(), Some("13.0"));
    assert!(inventory.unreadable.is_empty(), "{inventory:?}");
    assert_eq!(inventory.gpus.len(), 2);
    let link = |link, remote: &str, is_switch| Nvlink {
        link,
        remote_pci: Some(remote.to_owned()),
        remote_is_switch: Some(is_switch),
        remote_link: (!is_switch).then_some(7),
    };
    assert_eq!(
        inventory.gpus[1],
        Gpu {
            index: 1,
            uuid: "GPU-fa4e0000-0000-4000-8000-000000000001".to_owned(),
            pci: "0000:19:00.0".to_owned(),
            product: "NVIDIA H100 80GB HBM3".to_owned(),
            architecture: Some("Hopper".to_owned()),
            memory_bytes: Some(80 << 30),
            serial: Some("1654023000001".to_owned()),
            board_part_number: Some("692-2G520-0200-000".to_owned()),
            chassis_serial: Some("1821325191344".to_owned()),
            numa_node: Some(1),
            slowdown_margin_c: Some(-2),
            pcie_max_generation: Some(5),
            pcie_max_width: Some(16),
            mig_enabled: Some(false),
            mig_devices: Vec::new(),
            nvlinks: vec![
                link(0, "0000:05:00.0", true),
                link(1, "0000:19:00.0", false)
            ],
            unmonitored: None,
        }
    );
}

/// Returns a GPU whose numbers are all different.
fn all_different() -> Scenario {
    let mut scenario = Scenario::healthy(1);
    let gpu = scenario.gpu_mut(0);
    gpu.temperature_c = -5;
    gpu.memory_temperature_c = 88;
    gpu.margin_c = -7;
    (gpu.power_mw, gpu.power_limit_mw) = (650_000, 700_000);
    gpu.clock_reasons = 0x48;
    (gpu.thermal_violation_ns, gpu.power_violation_ns) = (11, 12);
    (gpu.utilization_percent, gpu.memory_used_bytes) = (97, 1 << 33);
    (gpu.ecc_corrected_volatile, gpu.ecc_uncorrected_volatile) = (1, 2);
    (gpu.ecc_corrected_aggregate, gpu.ecc_uncorrected_aggregate) = (3, 4);
    (gpu.retired_pages_sbe, gpu.retired_pages_dbe) = (5, 6);
    gpu.retired_pages_pending = true;
    (
        gpu.remapped_rows_correctable,
        gpu.remapped_rows_uncorrectable,
    ) = (7, 8);
    (gpu.remap_pending, gpu.remap_failed) = (true, true);
    gpu.sram_threshold_exceeded = true;
    (gpu.pcie_replays, gpu.pcie_generation, gpu.pcie_width) = (9, 4, 8);
    gpu.recovery_action = 4;
    gpu.links = 1;
    gpu.link = vec![FakeLink {
        up: false,
        replays: 13,
        recoveries: 14,
        crc_errors: 15,
        effective_errors: 16,
        ..FakeLink::default()
    }];
    scenario
}

#[test]
fn all_is_read_of_a_gpu() {
    let scenario = all_different();
    let machine = Machine::new(&scenario);
    assert_eq!(
        machine.readings(),
        Readings {
            uuid: "GPU-fa4e0000-0000-4000-8000-000000000000".to_owned(),
            temperature_c: Some(-5),
            memory_temperature_c: Some(88),
            margin_c: Some(-7),
            power_mw: Some(650_000),
            power_limit_mw: Some(700_000),
            clock_reasons: Some(0x48),
            thermal_violation_ns: Some(11),
            power_violation_ns: Some(12),
            utilization_percent: Some(97),
            memory_used_bytes: Some(1 << 33),
            ecc_corrected_volatile: Some(1),
            ecc_uncorrected_volatile: Some(2),
            ecc_corrected_aggregate: Some(3),
            ecc_uncorrected_aggregate: Some(4),
            retired_pages_sbe: Some(5),
            retired_pages_dbe: Some(6),
            retired_pages_pending: Some(true),
            remapped_rows_correctable: Some(7),
            remapped_rows_uncorrectable: Some(8),
            remap_pending: Some(true),
            remap_failed: Some(true),
            sram_threshold_exceeded: Some(true),
            pcie_replays: Some(9),
            pcie_generation: Some(4),
            pcie_width: Some(8),
            nvlinks: vec![NvlinkReadings {
                link: 0,
                up: Some(false),
                replays: Some(13),
                recoveries: Some(14),
                crc_errors: Some(15),
                effective_errors: Some(16),
            }],
            fabric: None,
            recovery_action: Some(RecoveryAction::DrainAndReset),
            mig_recovery_actions: Vec::new(),
            failed: Vec::new(),
        }
    );
}

#[test]
fn an_old_driver_is_one_that_tells_less() {
    let mut scenario = Scenario::healthy(1);
    scenario.gpu_mut(0).thermal_violation_ns = 11;
    for missing in [
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetSramEccErrorStatus",
        "nvmlDeviceGetPlatformInfo",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetViolationStatus",
    ] {
        scenario.calls.insert(missing.to_owned(), named("missing"));
    }
    scenario.unknown_fields.extend([82, 194, 230]);
    let machine = Machine::new(&scenario);
    let inventory = machine.inventory();
    assert_eq!(inventory.gpus[0].slowdown_margin_c, None);
    let readings = machine.readings();
    assert_eq!(readings.failed, []);
    assert_eq!(readings.margin_c, None);
    assert_eq!(readings.sram_threshold_exceeded, None);
    assert_eq!(readings.memory_temperature_c, None);
    assert_eq!(readings.recovery_action, None);
    assert_eq!(readings.nvlinks, []);
    // Read by the older functions.
    assert_eq!(readings.temperature_c, Some(34));
    assert_eq!(readings.clock_reasons, Some(1));
    // Read as a field, as with a driver that is too new for the function.
    assert_eq!(readings.thermal_violation_ns, Some(11));
    // A driver without this function cannot report any field.
    let name = "nvmlDeviceGetFieldValues".to_owned();
    scenario.calls.insert(name, named("missing"));
    machine.becomes(&scenario);
    assert_eq!(machine.readings().failed, []);
}

#[test]
fn what_fails_is_named_and_what_is_not_supported_is_not() {
    let mut scenario = Scenario::healthy(1);
    let calls = &mut scenario.gpu_mut(0).calls;
    for (call, behaves) in [
        ("nvmlDeviceGetPowerUsage", named("NVML_ERROR_UNKNOWN")),
        ("nvmlDeviceGetTotalEccErrors", code(4711)),
        (
            "nvmlDeviceGetRemappedRows",
            named("NVML_ERROR_NOT_SUPPORTED"),
        ),
    ] {
        calls.insert(call.to_owned(), behaves);
    }
    let readings = Machine::new(&scenario).readings();
    let failed = [
        ("nvmlDeviceGetPowerUsage", "NVML_ERROR_UNKNOWN"),
        ("nvmlDeviceGetTotalEccErrors", "NVML error 4711"),
    ];
    let failed = failed.map(|(call, error)| (call.to_owned(), error.to_owned()));
    assert_eq!(readings.failed, failed);
    assert_eq!(readings.power_mw, None);
    assert_eq!(readings.remapped_rows_correctable, None);
    assert_eq!(readings.temperature_c, Some(34));
}

#[test]
fn numbers_without_a_name_are_kept() {
    let mut scenario = Scenario::healthy(1);
    let gpu = scenario.gpu_mut(0);
    gpu.architecture = 77;
    gpu.recovery_action = 9;
    gpu.fabric = Some(fakes::Fabric {
        state: 6,
        status: 1234,
        ..fakes::Fabric::default()
    });
    let machine = Machine::new(&scenario);
    let inventory = machine.inventory();
    assert_eq!(inventory.gpus[0].architecture.as_deref(), Some("77"));
    let readings = machine.readings();
    assert_eq!(readings.recovery_action, Some(RecoveryAction::Other(9)));
    let fabric = readings.fabric.unwrap();
    assert_eq!(fabric.state, FabricState::Other(6));
    assert_eq!(fabric.status, "NVML error 1234");
}

#[test]
fn the_fabric_is_read_by_the_newest_structure_that_a_driver_knows() {
    let mut scenario = Scenario::healthy(1);
    scenario.gpu_mut(0).fabric = Some(fakes::Fabric {
        state: 3,
        status: 0,
        clique: 32_766,
        cluster: *b"0123456789abcdef",
        health_mask: 0x155,
    });
    let machine = Machine::new(&scenario);
    for (version, health_mask) in [
        (4, Some(0x155)),
        (3, Some(0x155)),
        (2, Some(0x155)),
        (1, None),
    ] {
        scenario.fabric_version = version;
        machine.becomes(&scenario);
        let expected = Fabric {
            state: FabricState::Completed,
            status: "NVML_SUCCESS".to_owned(),
            clique: Some(32_766),
            cluster: Some("30313233-3435-3637-3839-616263646566".to_owned()),
            health_mask,
        };
        assert_eq!(machine.readings().fabric, Some(expected), "{version}");
    }
    // A machine that is not joined to others registers with its own switches alone.
    let fabric = scenario.gpu_mut(0).fabric.as_mut().unwrap();
    (fabric.clique, fabric.cluster) = (0, [0; 16]);
    machine.becomes(&scenario);
    let alone = machine.readings().fabric.unwrap();
    assert_eq!((alone.clique, alone.cluster), (None, None));
}

#[test]
fn a_lost_gpu_is_told_apart_from_one_that_cannot_be_read() {
    let mut scenario = Scenario::healthy(4);
    let machine = Machine::new(&scenario);
    let before = machine.inventory();
    let roster = machine.nvml.roster().unwrap();
    assert_eq!(machine.nvml.roster().unwrap(), roster);
    scenario.gpu_mut(1).lost = true;
    let irq = named("NVML_ERROR_IRQ_ISSUE");
    let handle = "nvmlDeviceGetHandleByIndex_v2".to_owned();
    scenario.gpu_mut(2).calls.insert(handle, irq);
    machine.becomes(&scenario);
    assert_ne!(machine.nvml.roster().unwrap(), roster);
    let inventory = machine.inventory();
    assert_eq!(
        inventory.gpus,
        [before.gpus[0].clone(), before.gpus[3].clone()]
    );
    let unreadable = |index, error: &str, is_lost| UnreadableGpu {
        index,
        uuid: None,
        pci: None,
        error: error.to_owned(),
        is_lost,
    };
    assert_eq!(
        inventory.unreadable,
        [
            unreadable(1, "NVML_ERROR_GPU_IS_LOST", true),
            unreadable(2, "NVML_ERROR_IRQ_ISSUE", false),
        ]
    );
}

#[test]
fn a_gpu_that_is_lost_while_it_is_read_has_no_readings() {
    let mut scenario = Scenario::healthy(1);
    let machine = Machine::new(&scenario);
    let gpu = machine.inventory().gpus.remove(0);
    // The driver still knows the GPU's handle and name.
    let lost = named("NVML_ERROR_GPU_IS_LOST");
    let call = "nvmlDeviceGetUtilizationRates".to_owned();
    scenario.gpu_mut(0).calls.insert(call, lost);
    machine.becomes(&scenario);
    let unreadable = machine.nvml.readings(&gpu).unwrap_err();
    assert!(unreadable.is_lost, "{unreadable:?}");
    assert_eq!(unreadable.uuid.as_ref(), Some(&gpu.uuid));
    assert_eq!(unreadable.pci.as_ref(), Some(&gpu.pci));
}

#[test]
fn partitions_are_listed_with_what_the_driver_asks_for() {
    let mut scenario = Scenario::healthy(1);
    let machine = Machine::new(&scenario);
    let roster = machine.nvml.roster().unwrap();
    let gpu = scenario.gpu_mut(0);
    gpu.mig_enabled = true;
    for (number, action) in [(1, 0), (2, 1)] {
        gpu.partition.push(FakePartition {
            uuid: format!("MIG-{number}"),
            gpu_instance: number,
            compute_instance: 0,
            memory_bytes: 10 << 30,
            recovery_action: action,
        });
    }
    machine.becomes(&scenario);
    assert_ne!(machine.nvml.roster().unwrap(), roster);
    let inventory = machine.inventory();
    assert_eq!(inventory.gpus[0].mig_enabled, Some(true));
    let partition = |number| MigDevice {
        uuid: format!("MIG-{number}"),
        gpu_instance: number,
        compute_instance: 0,
        memory_bytes: Some(10 << 30),
    };
    assert_eq!(inventory.gpus[0].mig_devices, [partition(1), partition(2)]);
    assert_eq!(
        machine.readings().mig_recovery_actions,
        [
            ("MIG-1".to_owned(), RecoveryAction::None),
            ("MIG-2".to_owned(), RecoveryAction::Reset),
        ]
    );
}

#[test]
fn links_without_another_end_are_read_but_not_expected() {
    let mut scenario = Scenario::healthy(1);
    let gpu = scenario.gpu_mut(0);
    gpu.links = 2;
    gpu.link = vec![FakeLink {
        link: 1,
        up: false,
        remote_pci: Some(String::new()),
        remote_kind: 255,
        ..FakeLink::default()
    }];
    let machine = Machine::new(&scenario);
    let links = &machine.inventory().gpus[0].nvlinks;
    assert_eq!(links.iter().map(|link| link.link).collect::<Vec<_>>(), [0]);
    let links = machine.readings().nvlinks;
    let up: Vec<_> = links.iter().map(|link| link.up).collect();
    assert_eq!(up, [Some(true), Some(false)]);
    // A GPU on PCIe alone: unsupported must not count as down.
    scenario.gpu_mut(0).links = 0;
    scenario.gpu_mut(0).link.clear();
    scenario.unknown_fields.insert(91);
    machine.becomes(&scenario);
    assert_eq!(machine.readings().nvlinks, []);
}

#[test]
fn events_name_their_gpu_even_when_it_is_gone() {
    let mut scenario = Scenario::healthy(3);
    scenario.gpu_mut(0).supported_events = 0x8008;
    scenario.gpu_mut(1).supported_events = 3;
    let machine = Machine::new(&scenario);
    let mut inventory = machine.inventory();
    let mut events = machine.nvml.events(&mut inventory).unwrap();
    let unmonitored: Vec<_> = inventory.gpus.iter().map(|gpu| &gpu.unmonitored).collect();
    let no_xids = Some("its driver does not report XIDs".to_owned());
    assert_eq!(unmonitored, [&None, &no_xids, &None]);
    let soon = Duration::from_millis(20);
    assert_eq!(events.wait(soon), Ok(None));
    scenario.gpu_mut(2).lost = true;
    for event in [
        (2, Some(79), None, None),
        (0, Some(13), None, Some(3)),
        (0, None, Some(0x8000), None),
        (1, None, Some(2), None),
    ] {
        let (gpu, xid, kind, gpu_instance) = event;
        scenario.event.push(FakeEvent {
            gpu,
            xid,
            kind,
            gpu_instance,
            compute_instance: gpu_instance,
        });
    }
    machine.becomes(&scenario);
    let xid = |code, instance| GpuEventKind::Xid {
        code,
        gpu_instance: instance,
        compute_instance: instance,
    };
    for (gpu, kind) in [
        (2, xid(79, None)),
        (0, xid(13, Some(3))),
        (0, GpuEventKind::Other(0x8000)),
        (1, GpuEventKind::DoubleBitEcc),
    ] {
        let uuid: Option<String> = Some(inventory.gpus[gpu].uuid.clone());
        assert_eq!(events.wait(soon), Ok(Some(GpuEvent { uuid, kind })));
    }
    assert_eq!(events.wait(soon), Ok(None));
}

#[test]
fn an_event_is_told_once_also_to_a_program_that_is_started_again() {
    let mut scenario = Scenario::healthy(1);
    scenario.event.push(FakeEvent {
        xid: Some(48),
        ..FakeEvent::default()
    });
    let directory = tempfile::tempdir().unwrap();
    let has_event = |nvml: Nvml| {
        let mut events = nvml.events(&mut nvml.inventory().unwrap()).unwrap();
        events.wait(Duration::from_millis(20)).unwrap().is_some()
    };
    assert!(has_event(open(directory.path(), &scenario).unwrap()));
    let places = LibraryPlaces {
        path: Some(directory.path().join(fakes::LIBRARY)),
        driver_root: None,
    };
    assert!(!has_event(
        Nvml::open(&places, Box::new(|_, _| {})).unwrap()
    ));
    // A reinstalled library starts without memory of old events.
    assert!(has_event(open(directory.path(), &scenario).unwrap()));
}

#[test]
fn a_gpu_whose_events_cannot_be_had_says_why() {
    let mut scenario = Scenario::healthy(2);
    let refused = named("NVML_ERROR_NOT_SUPPORTED");
    let call = "nvmlDeviceRegisterEvents".to_owned();
    scenario.gpu_mut(1).calls.insert(call, refused);
    let machine = Machine::new(&scenario);
    let mut inventory = machine.inventory();
    machine.nvml.events(&mut inventory).unwrap();
    assert_eq!(inventory.gpus[0].unmonitored, None);
    let why = "nvmlDeviceRegisterEvents answered NVML_ERROR_NOT_SUPPORTED";
    assert_eq!(inventory.gpus[1].unmonitored.as_deref(), Some(why));
}

#[test]
fn a_driver_that_is_away_or_was_exchanged_is_no_gpu_that_failed() {
    let directory = tempfile::tempdir().unwrap();
    let mut scenario = Scenario::healthy(1);
    let away = named("NVML_ERROR_DRIVER_NOT_LOADED");
    scenario.calls.insert("nvmlInit_v2".to_owned(), away);
    let error = open(directory.path(), &scenario).err().unwrap();
    let library = directory.path().join(fakes::LIBRARY);
    assert_eq!(
        error.to_string(),
        format!(
            "{} cannot be used: nvmlInit_v2 answered NVML_ERROR_DRIVER_NOT_LOADED",
            library.display()
        )
    );
    let machine = Machine::new(&Scenario::healthy(1));
    let exchanged = named("NVML_ERROR_LIB_RM_VERSION_MISMATCH");
    let call = "nvmlDeviceGetHandleByIndex_v2".to_owned();
    scenario.gpu_mut(0).calls.insert(call, exchanged);
    machine.becomes(&scenario);
    let error = machine.nvml.roster().unwrap_err().to_string();
    assert!(
        error.contains("NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
        "{error}"
    );
}

#[test]
fn a_library_that_is_not_nvml_is_refused_by_what_it_lacks() {
    let places = LibraryPlaces {
        path: Some("libc.so.6".into()),
        driver_root: None,
    };
    let error = Nvml::open(&places, Box::new(|_, _| {})).err().unwrap();
    assert_eq!(
        error.to_string(),
        "libc.so.6 is not NVML: it has no function nvmlInit_v2"
    );
}

#[test]
fn it_is_found_below_the_root_of_a_driver() {
    for below in ["usr/lib64", "usr/lib/x86_64-linux-gnu/nvidia/current"] {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().join(below);
        fakes::install(&at, &Scenario::healthy(1)).unwrap();
        // As Debian links to it: valid on the machine itself, dangling below a root.
        let linked = root.path().join("usr/lib/x86_64-linux-gnu");
        fs::create_dir_all(&linked).unwrap();
        symlink(
            "/etc/alternatives/of-another-root",
            linked.join(fakes::LIBRARY),
        )
        .unwrap();
        let places = LibraryPlaces {
            path: None,
            driver_root: Some(root.path().to_owned()),
        };
        let nvml = Nvml::open(&places, Box::new(|_, _| {})).unwrap();
        assert_eq!(nvml.found_at(), at.join("libnvidia-ml.so.1"));
    }
}

/// The real library of each driver generation, found and loaded as on its machines.
#[test]
fn without_a_driver_its_library_says_that_there_is_none() {
    let Some(drivers) = testkit::require(testkit::Component::DriverLibraries) else {
        return;
    };
    let has_driver = Path::new("/proc/driver/nvidia/version").exists();
    let mut opened = 0;
    for driver in fs::read_dir(drivers).unwrap() {
        let root = tempfile::tempdir().unwrap();
        let below = root.path().join("usr/lib64");
        fs::create_dir_all(&below).unwrap();
        let library = below.join(fakes::LIBRARY);
        symlink(driver.unwrap().path().join(fakes::LIBRARY), &library).unwrap();
        let places = LibraryPlaces {
            path: None,
            driver_root: Some(root.path().to_owned()),
        };
        match Nvml::open(&places, Box::new(|_, _| {})) {
            Ok(nvml) => {
                assert!(has_driver);
                nvml.inventory().unwrap();
            }
            Err(error) => {
                let answer = if has_driver {
                    "NVML_ERROR_LIB_RM_VERSION_MISMATCH"
                } else {
                    "NVML_ERROR_DRIVER_NOT_LOADED"
                };
                let expected = format!(
                    "{} cannot be used: nvmlInit_v2 answered {answer}",
                    library.display()
                );
                assert_eq!(error.to_string(), expected);
            }
        }
        opened += 1;
    }
    assert!(opened > 2, "{opened} libraries");
}

/// Our fake and bindings share their structures and numbers, so NVIDIA's bindings are a second
/// reader.
#[test]
fn nvidias_own_bindings_read_the_same() {
    let Some(python) = testkit::require(testkit::Component::PythonGrpc) else {
        return;
    };
    let mut scenario = all_different();
    let gpu = scenario.gpu_mut(0);
    gpu.chassis_serial = "1821325191344".to_owned();
    gpu.numa_node = 1;
    gpu.fabric = Some(fakes::Fabric {
        state: 3,
        status: 0,
        clique: 32_766,
        cluster: *b"0123456789abcdef",
        health_mask: 0x155,
    });
    scenario.event.push(FakeEvent {
        xid: Some(79),
        gpu_instance: Some(1),
        compute_instance: Some(2),
        ..FakeEvent::default()
    });
    let machine = Machine::new(&scenario);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/witness/nvml.py");
    let output = Command::new(python)
        .arg(script)
        .env("LD_LIBRARY_PATH", machine.directory.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let witness: Value = serde_json::from_slice(&output.stdout).unwrap();
    let same = |ours: Value, theirs: &Value| {
        for (name, value) in theirs.as_object().unwrap() {
            assert_eq!(&ours[name], value, "{name}");
        }
    };
    let gpu = machine.inventory().gpus.remove(0);
    let readings = machine.nvml.readings(&gpu).unwrap();
    same(json!(readings.fabric), &witness["fabric"]);
    same(json!(readings), &witness["readings"]);
    same(json!(gpu), &witness["gpu"]);
    let action = witness["action"].as_u64().unwrap();
    let action = RecoveryAction::from(u32::try_from(action).unwrap());
    assert_eq!(readings.recovery_action, Some(action));
    let xid = json!({"code": 79, "gpu_instance": 1, "compute_instance": 2});
    assert_eq!(witness["xid"], xid);
}
