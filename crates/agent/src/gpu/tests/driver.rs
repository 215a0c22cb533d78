//! Tests from a fake driver's readings, through its library, to problems.

use diagnosis::gpu::checks::{Health, Remembered};
use fakes::{Fabric, FakeGpu, FakeLink, FakePartition, Scenario};
use host::library::LibraryPlaces;
use host::nvml::Nvml;

use super::*;

/// A difference between GPU 1 and a healthy one, with the codes of the resulting problems.
type Case = (fn(&mut FakeGpu), &'static [&'static str]);

const CASES: [Case; 15] = [
    (|gpu| gpu.lost = true, &["DCGM_FR_FALLEN_OFF_BUS"]),
    (|gpu| gpu.absent = true, &["DCGM_FR_FALLEN_OFF_BUS"]),
    (|gpu| gpu.pcie_replays = 1_000, &["DCGM_FR_PCI_REPLAY_RATE"]),
    (|gpu| gpu.pcie_width = 8, &["GPU_PCIE_LINK_DEGRADED"]),
    (
        |gpu| gpu.ecc_uncorrected_volatile = 1,
        &["DCGM_FR_VOLATILE_DBE_DETECTED"],
    ),
    (
        |gpu| gpu.sram_threshold_exceeded = true,
        &["DCGM_FR_SRAM_THRESHOLD"],
    ),
    (
        |gpu| (gpu.remap_pending, gpu.remap_failed) = (true, true),
        &["DCGM_FR_PENDING_ROW_REMAP", "DCGM_FR_ROW_REMAP_FAILURE"],
    ),
    (
        |gpu| gpu.remapped_rows_uncorrectable = 512,
        &["DCGM_FR_UNCORRECTABLE_ROW_REMAP_LIMIT"],
    ),
    (
        |gpu| gpu.thermal_violation_ns += 1,
        &["DCGM_FR_CLOCKS_EVENT_THERMAL"],
    ),
    (|gpu| gpu.margin_c = -3, &["GPU_TEMP_HW_SLOWDOWN_VIOLATION"]),
    (
        |gpu| gpu.recovery_action = 2,
        &["DCGM_FR_GPU_RECOVERY_REBOOT"],
    ),
    (|gpu| gpu.recovery_action = 17, &["DCGM_FR_UNRECOGNIZED"]),
    (
        |gpu| {
            gpu.mig_enabled = true;
            gpu.partition = vec![FakePartition {
                uuid: "MIG-1".to_owned(),
                gpu_instance: 1,
                compute_instance: 0,
                memory_bytes: 1,
                recovery_action: 1,
            }];
        },
        &["DCGM_FR_GPU_RECOVERY_RESET"],
    ),
    (
        |gpu| {
            let down = |link| FakeLink {
                link,
                up: false,
                ..FakeLink::default()
            };
            gpu.link = vec![down(2), down(3)];
        },
        &["DCGM_FR_NVLINK_DOWN", "DCGM_FR_NVLINK_DOWN"],
    ),
    (
        |gpu| {
            gpu.fabric = Some(Fabric {
                state: 2,
                ..Fabric::default()
            });
        },
        &["DCGM_FR_FABRIC_PROBE_STATE"],
    ),
];

/// Returns three healthy GPUs, the second of them under load and in a fabric.
fn machine() -> Scenario {
    let mut scenario = Scenario::healthy(3);
    let gpu = scenario.gpu_mut(1);
    gpu.utilization_percent = 90;
    gpu.fabric = Some(Fabric {
        state: 3,
        ..Fabric::default()
    });
    scenario
}

/// Polls for so many seconds, five apart, and returns the codes that opened (`+`) and closed
/// (`-`), each with its GPU.
fn poll(nvml: &Nvml, health: &mut Health, from: u64, seconds: u64) -> Vec<String> {
    let mut changes = Vec::new();
    // The driver is read once, since its readings do not change.
    let mut inventory = nvml.inventory().unwrap();
    let mut readings = Vec::new();
    let answers: Vec<_> = (inventory.gpus.iter().cloned())
        .map(|gpu| (nvml.readings(&gpu), gpu))
        .collect();
    inventory.gpus.clear();
    for (read, gpu) in answers {
        match read {
            Ok(read) => {
                inventory.gpus.push(gpu);
                readings.push(read);
            }
            Err(unreadable) => inventory.unreadable.push(unreadable),
        }
    }
    for second in (0..seconds).step_by(5) {
        let now = Duration::from_secs(from + second);
        changes.extend(health.take(&inventory, &readings, now));
    }
    let short = |change: &ProblemChange| {
        let sign = if change.message.is_some() { '+' } else { '-' };
        let gpu = change.gpu.as_ref().map(|gpu| gpu.index);
        format!("{sign}{} {}", gpu.unwrap_or_default(), change.code)
    };
    changes.iter().map(short).collect()
}

#[test]
fn what_the_driver_tells_becomes_the_problem_that_it_is_and_ends() {
    for (differs, codes) in CASES {
        let directory = tempfile::tempdir().unwrap();
        let places = LibraryPlaces {
            path: Some(fakes::install(directory.path(), &machine()).unwrap()),
            driver_root: None,
        };
        let nvml = Nvml::open(&places, Box::new(|_, _| {})).unwrap();
        let mut health = Health::new(CheckLimits::default(), Remembered::default());
        assert_eq!(poll(&nvml, &mut health, 0, 400), [""; 0], "{codes:?}");

        let mut scenario = machine();
        differs(scenario.gpu_mut(1));
        fakes::write(directory.path(), &scenario).unwrap();
        let came: Vec<String> = codes.iter().map(|code| format!("+1 {code}")).collect();
        assert_eq!(poll(&nvml, &mut health, 400, 305), came);

        fakes::write(directory.path(), &machine()).unwrap();
        let over: Vec<String> = codes.iter().map(|code| format!("-1 {code}")).collect();
        assert_eq!(poll(&nvml, &mut health, 800, 400), over);
    }
}
