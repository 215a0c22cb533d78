//! Tests of the checks, with polls of a machine with healthy H100s that is changed step by
//! step.

use super::*;
use crate::catalog::Catalog;
use crate::gpu::dcgm::ImexUse;
use crate::gpu::{Fabric, FabricState, NvlinkReadings, RecoveryAction, UnreadableGpu};

mod any;
mod counters;
mod dcgm;
mod presence;

/// Interval between two polls.
const EVERY: Duration = Duration::from_secs(15);

/// A machine, and the health of its GPUs.
struct Bench {
    inventory: Inventory,
    readings: Vec<Readings>,
    health: Health,
    now: Duration,
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        index,
        uuid: format!("GPU-{index}"),
        pci: format!("0000:{index:02x}:00.0"),
        slowdown_margin_c: Some(-2),
        pcie_max_generation: Some(5),
        pcie_max_width: Some(16),
        mig_enabled: Some(false),
        ..Gpu::default()
    }
}

/// Returns the readings of a healthy GPU.
fn well(gpu: &Gpu) -> Readings {
    let link = |link| NvlinkReadings {
        link,
        up: Some(true),
        replays: Some(7),
        recoveries: Some(7),
        crc_errors: Some(7),
        effective_errors: Some(7),
    };
    Readings {
        uuid: gpu.uuid.clone(),
        margin_c: Some(40),
        power_mw: Some(700_000),
        thermal_violation_ns: Some(7),
        power_violation_ns: Some(7),
        utilization_percent: Some(100),
        ecc_uncorrected_volatile: Some(0),
        retired_pages_sbe: Some(0),
        retired_pages_dbe: Some(0),
        retired_pages_pending: Some(false),
        remapped_rows_uncorrectable: Some(0),
        remap_pending: Some(false),
        remap_failed: Some(false),
        sram_threshold_exceeded: Some(false),
        pcie_replays: Some(7),
        pcie_generation: Some(5),
        pcie_width: Some(16),
        nvlinks: vec![link(0), link(1)],
        fabric: Some(Fabric {
            state: FabricState::Completed,
            status: "NVML_SUCCESS".to_owned(),
            health_mask: Some(0x1aa),
            ..Fabric::default()
        }),
        recovery_action: Some(RecoveryAction::None),
        ..Readings::default()
    }
}

/// Formats a change in short: `+` or `-`, the GPU, the code, the link.
fn short(change: &ProblemChange) -> String {
    let sign = if change.message.is_some() { '+' } else { '-' };
    let gpu = (change.gpu.as_ref()).map_or("node".to_owned(), |gpu| gpu.index.to_string());
    let link = change.link.map_or(String::new(), |link| format!(" {link}"));
    format!("{sign}{gpu} {}{link}", change.code)
}

impl Bench {
    fn new(gpus: u32) -> Self {
        let inventory = Inventory {
            driver_version: Some("580.65.06".to_owned()),
            gpus: (0..gpus).map(gpu).collect(),
            ..Inventory::default()
        };
        Self {
            readings: inventory.gpus.iter().map(well).collect(),
            inventory,
            health: Health::new(CheckLimits::default(), Remembered::default()),
            now: Duration::ZERO,
        }
    }

    /// Polls once, and returns the changes in short.
    fn poll(&mut self) -> Vec<String> {
        self.now += EVERY;
        let changes = (self.health).take(&self.inventory, &self.readings, self.now);
        changes.iter().map(short).collect()
    }

    /// Polls for `seconds`, and returns all changes.
    fn poll_for(&mut self, seconds: u64) -> Vec<String> {
        let until = self.now + Duration::from_secs(seconds);
        let mut changes = Vec::new();
        while self.now < until {
            changes.extend(self.poll());
        }
        changes
    }

    /// Restarts with the remembered state, as a new process does.
    fn restart(&mut self) {
        let written = serde_json::to_string(self.health.remembered()).unwrap();
        let remembered = serde_json::from_str(&written).unwrap();
        self.health = Health::new(self.health.limits.clone(), remembered);
        self.now = Duration::ZERO;
    }
}

/// A change of a GPU's readings.
type Edit = fn(&mut Gpu, &mut Readings);

/// Problems that last as long as they are reported: check, code, readings with the problem, and
/// readings without the value.
const WHILE_TOLD: [(&str, &str, Edit, Edit); 20] = [
    (
        "GpuMemWatch",
        "DCGM_FR_VOLATILE_DBE_DETECTED",
        |_, readings| readings.ecc_uncorrected_volatile = Some(1),
        |_, readings| readings.ecc_uncorrected_volatile = None,
    ),
    (
        "GpuMemWatch",
        "DCGM_FR_PENDING_PAGE_RETIREMENTS",
        |_, readings| readings.retired_pages_pending = Some(true),
        |_, readings| readings.retired_pages_pending = None,
    ),
    (
        "GpuMemWatch",
        "DCGM_FR_RETIRED_PAGES_LIMIT",
        |_, readings| readings.retired_pages_sbe = Some(63),
        |_, readings| readings.retired_pages_sbe = None,
    ),
    (
        "GpuMemWatch",
        "DCGM_FR_RETIRED_PAGES_DBE_LIMIT",
        |_, readings| readings.retired_pages_dbe = Some(16),
        |_, readings| readings.retired_pages_dbe = None,
    ),
    (
        "GpuMemWatch",
        "DCGM_FR_ROW_REMAP_FAILURE",
        |_, readings| readings.remap_failed = Some(true),
        |_, readings| readings.remap_failed = None,
    ),
    (
        "GpuMemWatch",
        "DCGM_FR_PENDING_ROW_REMAP",
        |_, readings| readings.remap_pending = Some(true),
        |_, readings| readings.remap_pending = None,
    ),
    (
        "GpuMemWatch",
        "DCGM_FR_UNCORRECTABLE_ROW_REMAP_LIMIT",
        |_, readings| readings.remapped_rows_uncorrectable = Some(512),
        |_, readings| readings.remapped_rows_uncorrectable = None,
    ),
    (
        "GpuMemWatch",
        "DCGM_FR_SRAM_THRESHOLD",
        |_, readings| readings.sram_threshold_exceeded = Some(true),
        |_, readings| readings.sram_threshold_exceeded = None,
    ),
    (
        "GpuThermalMarginWatch",
        "GPU_TEMP_HW_SLOWDOWN_VIOLATION",
        |_, readings| readings.margin_c = Some(-3),
        |_, readings| readings.margin_c = None,
    ),
    (
        "GpuThermalMarginWatch",
        "GPU_TEMP_HW_SLOWDOWN_VIOLATION",
        |_, readings| readings.margin_c = Some(-3),
        // An A100, which does not report its slowdown margin; and a value in between.
        |gpu, readings| (gpu.slowdown_margin_c, readings.margin_c) = (None, Some(40)),
    ),
    (
        "GpuThermalMarginWatch",
        "GPU_TEMP_HW_SLOWDOWN_VIOLATION",
        |_, readings| readings.margin_c = Some(-3),
        |_, readings| readings.margin_c = Some(0),
    ),
    (
        "GpuDriverWatch",
        "DCGM_FR_GPU_RECOVERY_RESET",
        |_, readings| readings.recovery_action = Some(RecoveryAction::Reset),
        |_, readings| readings.recovery_action = None,
    ),
    (
        "GpuDriverWatch",
        "DCGM_FR_GPU_RECOVERY_REBOOT",
        |_, readings| readings.recovery_action = Some(RecoveryAction::Reboot),
        |_, readings| readings.recovery_action = None,
    ),
    (
        "GpuDriverWatch",
        "DCGM_FR_GPU_RECOVERY_DRAIN_P2P",
        |_, readings| readings.recovery_action = Some(RecoveryAction::DrainPeers),
        |_, readings| readings.recovery_action = None,
    ),
    (
        "GpuDriverWatch",
        "DCGM_FR_GPU_RECOVERY_DRAIN_RESET",
        |_, readings| readings.recovery_action = Some(RecoveryAction::DrainAndReset),
        |_, readings| readings.recovery_action = None,
    ),
    (
        "GpuDriverWatch",
        "DCGM_FR_GPU_RECOVERY_RESET",
        |_, readings| readings.recovery_action = Some(6.into()),
        |_, readings| readings.recovery_action = None,
    ),
    (
        "GpuDriverWatch",
        "DCGM_FR_GPU_RECOVERY_REBOOT",
        |_, readings| readings.recovery_action = Some(7.into()),
        |_, readings| readings.recovery_action = None,
    ),
    (
        "GpuDriverWatch",
        "DCGM_FR_UNRECOGNIZED",
        |_, readings| readings.recovery_action = Some(RecoveryAction::Other(9)),
        |_, readings| readings.recovery_action = None,
    ),
    // An action for a partition counts for the whole GPU.
    (
        "GpuDriverWatch",
        "DCGM_FR_GPU_RECOVERY_RESET",
        |_, readings| {
            let partition = |name: &str, action| (name.to_owned(), action);
            readings.mig_recovery_actions = vec![
                partition("MIG-1", RecoveryAction::None),
                partition("MIG-2", RecoveryAction::Reset),
            ];
        },
        |_, readings| readings.recovery_action = None,
    ),
    (
        "GpuDriverWatch",
        "GPU_UNMONITORED",
        |gpu, _| gpu.unmonitored = Some("the events are not supported".to_owned()),
        // This value is always reported, so only success closes the problem.
        |gpu, _| gpu.unmonitored = Some("another reason".to_owned()),
    ),
];

/// Problems that open after they have lasted: check, code, time in seconds, readings with the
/// problem, without the value, and with a value that is neither.
const WHEN_IT_LASTS: [(&str, &str, u64, Edit, Edit); 7] = [
    (
        "GpuPcieWatch",
        "GPU_PCIE_LINK_DEGRADED",
        60,
        |_, readings| readings.pcie_width = Some(8),
        // Without load, the values prove nothing.
        |_, readings| (readings.utilization_percent, readings.pcie_generation) = (Some(3), Some(1)),
    ),
    (
        "GpuPcieWatch",
        "GPU_PCIE_LINK_DEGRADED",
        60,
        |_, readings| readings.pcie_generation = Some(3),
        |_, readings| readings.utilization_percent = None,
    ),
    (
        "GpuPowerWatch",
        "DCGM_FR_POWER_UNREADABLE",
        60,
        |_, readings| {
            let failure = ("nvmlDeviceGetPowerUsage", "NVML_ERROR_UNKNOWN");
            readings.failed = vec![(failure.0.to_owned(), failure.1.to_owned())];
        },
        // Not supported is not unreadable.
        |_, readings| readings.power_mw = None,
    ),
    (
        "GpuNvlinkWatch",
        "DCGM_FR_NVLINK_DOWN",
        60,
        |_, readings| readings.nvlinks[1].up = Some(false),
        |_, readings| readings.nvlinks[1].up = None,
    ),
    (
        "GpuNvlinkWatch",
        "DCGM_FR_FABRIC_PROBE_STATE",
        300,
        |_, readings| readings.fabric.as_mut().unwrap().state = FabricState::InProgress,
        |_, readings| readings.fabric = None,
    ),
    (
        "GpuNvlinkWatch",
        "DCGM_FR_FABRIC_PROBE_STATE",
        300,
        |_, readings| readings.fabric.as_mut().unwrap().status = "NVML_ERROR_UNKNOWN".to_owned(),
        |_, readings| readings.fabric.as_mut().unwrap().state = FabricState::NotSupported,
    ),
    (
        "GpuNvlinkWatch",
        "DCGM_FR_FIELD_VIOLATION",
        300,
        |_, readings| readings.fabric.as_mut().unwrap().health_mask = Some(1),
        |_, readings| readings.fabric.as_mut().unwrap().health_mask = Some(0),
    ),
];

impl Bench {
    /// Changes the readings of GPU 1.
    fn edit(&mut self, edit: Edit) {
        self.is_well();
        edit(&mut self.inventory.gpus[1], &mut self.readings[1]);
    }

    fn is_well(&mut self) {
        self.inventory.gpus[1] = gpu(1);
        self.readings[1] = well(&gpu(1));
    }
}

fn link_of(code: &str) -> &'static str {
    if code == "DCGM_FR_NVLINK_DOWN" {
        " 1"
    } else {
        ""
    }
}

#[test]
fn a_first_look_at_a_healthy_machine_says_nothing() {
    let mut bench = Bench::new(8);
    assert_eq!(bench.poll_for(600), [""; 0]);
}

#[test]
fn what_the_driver_tells_is_a_problem_until_it_tells_that_it_is_over() {
    for (check, code, broken, silent) in WHILE_TOLD {
        let mut bench = Bench::new(2);
        bench.poll();
        bench.edit(broken);
        let changes = (bench.health).take(&bench.inventory, &bench.readings, bench.now);
        let opened: Vec<_> = changes.iter().map(|it| (&*it.check, &*it.code)).collect();
        assert_eq!(opened, [(check, code)]);
        assert_eq!(bench.poll_for(300), [""; 0], "{code}: reported once");
        bench.edit(silent);
        assert_eq!(bench.poll_for(300), [""; 0], "{code}: silence ends nothing");
        bench.restart();
        assert_eq!(bench.poll_for(300), [""; 0], "{code}: nor does a restart");
        bench.is_well();
        assert_eq!(bench.poll(), [format!("-1 {code}")]);
        assert_eq!(bench.poll_for(300), [""; 0]);
    }
}

/// A request through NVML counts under the same conditions as DCGM's report about IMEX.
#[test]
fn a_recovery_of_the_imex_domain_is_asked_for_where_pods_rely_on_it() {
    let mut bench = Bench::new(2);
    bench.edit(|_, readings| readings.recovery_action = Some(5.into()));
    assert_eq!(bench.poll_for(300), [""; 0], "nobody knows of a pod");
    bench.health.imex_is(ImexUse::Unused);
    assert_eq!(bench.poll_for(300), [""; 0], "no pod relies on it");
    bench.health.imex_is(ImexUse::Used);
    assert_eq!(bench.poll(), ["+1 DCGM_FR_IMEX_UNHEALTHY"]);
    bench.health.imex_is(ImexUse::Unknown);
    bench.is_well();
    assert_eq!(bench.poll_for(300), [""; 0], "nor is it seen to be over");
    bench.health.imex_is(ImexUse::Unused);
    assert_eq!(bench.poll(), ["-1 DCGM_FR_IMEX_UNHEALTHY"]);
}

#[test]
fn what_has_to_last_is_a_problem_once_it_has() {
    for (check, code, seconds, broken, silent) in WHEN_IT_LASTS {
        let (came, over) = (
            format!("+1 {code}{}", link_of(code)),
            format!("-1 {code}{}", link_of(code)),
        );
        let mut bench = Bench::new(2);
        bench.poll();
        // A missing value in between restarts the delay.
        for _ in 0..3 {
            bench.edit(broken);
            assert_eq!(bench.poll_for(seconds - 15), [""; 0], "{code}");
            bench.edit(silent);
            assert_eq!(bench.poll(), [""; 0], "{code}");
        }
        bench.edit(broken);
        assert_eq!(bench.poll_for(seconds + 15), [came], "{code}");
        let open = bench.health.remembered().open.first().unwrap();
        assert_eq!(open.check, check);
        bench.restart();
        assert_eq!(bench.poll_for(2 * seconds), [""; 0], "{code}");
        bench.edit(silent);
        assert_eq!(bench.poll_for(2 * seconds), [""; 0], "{code}");
        bench.is_well();
        assert_eq!(bench.poll(), [over], "{code}");
    }
}

#[test]
fn what_is_just_below_a_threshold_is_no_problem() {
    let below: [Edit; 6] = [
        |_, readings| readings.retired_pages_sbe = Some(62),
        |_, readings| readings.retired_pages_dbe = Some(15),
        |_, readings| readings.remapped_rows_uncorrectable = Some(511),
        |_, readings| readings.margin_c = Some(-2),
        |_, readings| readings.power_mw = None,
        // In a fabric across machines, a GPU with a clique is healthy.
        |_, readings| {
            let fabric = readings.fabric.as_mut().unwrap();
            (fabric.cluster, fabric.clique) = (Some("a".to_owned()), Some(0));
        },
    ];
    for edit in below {
        let mut bench = Bench::new(2);
        bench.poll();
        bench.edit(edit);
        assert_eq!(bench.poll_for(600), [""; 0], "{:?}", bench.readings[1]);
    }
}

#[test]
fn a_link_counts_from_the_load_on_that_is_set() {
    for (load, is_judged) in [(50, true), (49, false)] {
        let mut bench = Bench::new(2);
        bench.poll();
        bench.edit(|_, readings| readings.pcie_width = Some(8));
        bench.readings[1].utilization_percent = Some(load);
        let came = !bench.poll_for(90).is_empty();
        assert_eq!(came, is_judged, "{load} %");
    }
}

#[test]
fn a_fabric_across_machines_without_a_clique_is_not_whole() {
    let mut bench = Bench::new(2);
    bench.edit(|_, readings| readings.fabric.as_mut().unwrap().cluster = Some("a".to_owned()));
    assert_eq!(bench.poll_for(330), ["+1 DCGM_FR_FABRIC_PROBE_STATE"]);
}

#[test]
fn pages_that_were_retired_before_are_not_becoming_more() {
    let mut bench = Bench::new(2);
    bench.readings[1].retired_pages_dbe = Some(20);
    assert_eq!(bench.poll_for(60), [""; 0]);
    bench.restart();
    bench.readings[1].retired_pages_dbe = Some(21);
    assert_eq!(bench.poll(), ["+1 DCGM_FR_RETIRED_PAGES_DBE_LIMIT"]);
}

#[test]
fn a_link_that_was_never_up_and_those_of_a_divided_gpu_are_not_down() {
    let mut bench = Bench::new(2);
    for readings in &mut bench.readings {
        readings.nvlinks[1].up = Some(false);
    }
    assert_eq!(bench.poll_for(600), [""; 0]);
    bench.inventory.gpus[1].mig_enabled = Some(true);
    bench.readings[1].nvlinks[0].up = Some(false);
    assert_eq!(bench.poll_for(600), [""; 0]);
    bench.readings[0].nvlinks[0].up = Some(false);
    assert_eq!(bench.poll_for(600), ["+0 DCGM_FR_NVLINK_DOWN 0"]);
}

#[test]
fn each_problem_comes_and_goes_by_itself() {
    let mut bench = Bench::new(2);
    bench.edit(|_, readings| {
        (readings.remap_failed, readings.remap_pending) = (Some(true), Some(true));
    });
    let both = [
        "+1 DCGM_FR_PENDING_ROW_REMAP",
        "+1 DCGM_FR_ROW_REMAP_FAILURE",
    ];
    assert_eq!(bench.poll(), both);
    bench.readings[1].remap_pending = Some(false);
    let changes = (bench.health).take(&bench.inventory, &bench.readings, bench.now);
    let shown: Vec<_> = changes
        .iter()
        .map(|it| (&*it.code, it.is_all_well))
        .collect();
    assert_eq!(shown, [("DCGM_FR_PENDING_ROW_REMAP", false)]);
    bench.is_well();
    let changes = (bench.health).take(&bench.inventory, &bench.readings, bench.now);
    let shown: Vec<_> = changes
        .iter()
        .map(|it| (&*it.code, it.is_all_well))
        .collect();
    assert_eq!(shown, [("DCGM_FR_ROW_REMAP_FAILURE", true)]);
}

/// Another request of the driver closes the one before, in that order.
#[test]
fn what_the_driver_asks_for_may_change() {
    let mut bench = Bench::new(2);
    bench.edit(|_, readings| readings.recovery_action = Some(RecoveryAction::Reset));
    bench.poll();
    bench.edit(|_, readings| readings.recovery_action = Some(RecoveryAction::Reboot));
    let changes = [
        "-1 DCGM_FR_GPU_RECOVERY_RESET",
        "+1 DCGM_FR_GPU_RECOVERY_REBOOT",
    ];
    assert_eq!(bench.poll(), changes);
}

#[test]
fn after_a_reboot_what_it_mends_is_told_again_if_it_is_there_and_the_rest_goes_on() {
    let mut bench = Bench::new(2);
    bench.poll();
    bench.edit(|_, readings| {
        (readings.remap_pending, readings.sram_threshold_exceeded) = (Some(true), Some(true));
        readings.nvlinks[0].up = Some(false);
    });
    assert_eq!(bench.poll_for(90).len(), 3);
    bench.restart();
    bench
        .health
        .boot_has_begun(|code| code != "DCGM_FR_SRAM_THRESHOLD");
    // Links train for a while, and may not have been up yet.
    assert_eq!(bench.poll(), ["+1 DCGM_FR_PENDING_ROW_REMAP"]);
    assert_eq!(bench.poll_for(600), [""; 0]);
    bench.is_well();
    let changes = ["-1 DCGM_FR_PENDING_ROW_REMAP", "-1 DCGM_FR_SRAM_THRESHOLD"];
    assert_eq!(bench.poll(), changes);
}

#[test]
fn every_code_has_a_row_in_the_catalogue() {
    let source = concat!(include_str!("rules.rs"), include_str!("presence.rs"));
    let is_code = |text: &&str| text.starts_with("DCGM_FR_") || text.starts_with("GPU_");
    let codes: Vec<&str> = source.split('"').filter(is_code).collect();
    assert!(codes.len() > 20, "{codes:?}");
    for code in codes {
        assert!(Catalog::builtin().dcgm_named(code).is_some(), "{code}");
    }
}
