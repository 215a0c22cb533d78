//! Tests of GPUs that are lost, that come back, and that are replaced.

use super::*;
use crate::gpu::MigDevice;

const LOST: &str = "+1 DCGM_FR_FALLEN_OFF_BUS";
const BACK: &str = "-1 DCGM_FR_FALLEN_OFF_BUS";

impl Bench {
    /// Removes GPU 1 from the driver's list.
    fn loses(&mut self) {
        self.inventory.gpus.remove(1);
        self.readings.remove(1);
    }

    fn finds(&mut self) {
        self.inventory.unreadable.clear();
        self.inventory.gpus.insert(1, gpu(1));
        self.readings.insert(1, well(&gpu(1)));
    }
}

fn unreadable(uuid: Option<&str>, pci: Option<&str>, is_lost: bool) -> UnreadableGpu {
    UnreadableGpu {
        index: 1,
        uuid: uuid.map(str::to_owned),
        pci: pci.map(str::to_owned),
        error: "NVML_ERROR_GPU_IS_LOST".to_owned(),
        is_lost,
    }
}

#[test]
fn a_gpu_that_is_missing_for_a_while_beside_others_is_lost_until_it_is_back() {
    let mut bench = Bench::new(3);
    bench.poll();
    for _ in 0..3 {
        bench.loses();
        assert_eq!(bench.poll_for(30), [""; 0], "the driver may list them anew");
        bench.finds();
        assert_eq!(bench.poll(), [""; 0]);
    }
    bench.loses();
    assert_eq!(bench.poll_for(60), [LOST]);
    bench.restart();
    assert_eq!(bench.poll_for(600), [""; 0]);
    bench.finds();
    assert_eq!(bench.poll(), [BACK]);
}

#[test]
fn a_gpu_that_the_driver_calls_lost_is_lost_at_once_by_whatever_name() {
    let names = [
        (Some("GPU-1"), None),
        (None, Some("0000:01:00.0")),
        (None, None),
    ];
    for (uuid, pci) in names {
        let mut bench = Bench::new(3);
        bench.poll();
        bench.loses();
        bench.inventory.unreadable = vec![unreadable(uuid, pci, true)];
        assert_eq!(bench.poll(), [LOST], "{uuid:?} {pci:?}");
        assert_eq!(bench.poll_for(600), [""; 0]);
        bench.finds();
        assert_eq!(bench.poll(), [BACK]);
        // A GPU that was lost before it was ever seen.
        let mut bench = Bench::new(3);
        bench.loses();
        bench.inventory.unreadable = vec![unreadable(uuid, pci, true)];
        assert_eq!(bench.poll(), [LOST], "{uuid:?} {pci:?}");
        bench.finds();
        assert_eq!(bench.poll(), [BACK], "{uuid:?} {pci:?}");
    }
}

#[test]
fn a_gpu_that_cannot_be_read_is_neither_lost_nor_well() {
    let mut bench = Bench::new(3);
    bench.edit(|_, readings| readings.remap_pending = Some(true));
    bench.poll();
    bench.loses();
    bench.inventory.unreadable = vec![unreadable(Some("GPU-1"), None, false)];
    assert_eq!(bench.poll_for(600), [""; 0]);
    bench.finds();
    assert_eq!(bench.poll(), ["-1 DCGM_FR_PENDING_ROW_REMAP"]);
}

#[test]
fn where_no_gpu_answers_nothing_is_seen_and_nothing_is_said() {
    let mut bench = Bench::new(1);
    bench.health.limits.expected_gpus = Some(1);
    bench.edit_first(|readings| readings.remap_pending = Some(true));
    bench.poll();
    let there = std::mem::take(&mut bench.inventory.gpus);
    bench.inventory.unreadable = vec![unreadable(Some("GPU-0"), None, true)];
    assert!(bench.health.is_blind(&bench.inventory));
    assert_eq!(bench.poll_for(600), [""; 0]);
    bench.inventory.unreadable.clear();
    bench.restart();
    assert!(bench.health.is_blind(&bench.inventory));
    assert_eq!(bench.poll_for(600), [""; 0]);
    bench.inventory.gpus = there;
    bench.edit_first(|readings| readings.remap_pending = Some(false));
    assert_eq!(bench.poll(), ["-0 DCGM_FR_PENDING_ROW_REMAP"]);
    // A machine that never had a GPU is not blind.
    let none = Inventory::default();
    assert!(!Health::new(CheckLimits::default(), Remembered::default()).is_blind(&none));
}

#[test]
fn what_was_open_of_a_gpu_is_over_with_another_one_in_its_place() {
    let mut bench = Bench::new(3);
    bench.edit(|_, readings| readings.sram_threshold_exceeded = Some(true));
    assert_eq!(bench.poll(), ["+1 DCGM_FR_SRAM_THRESHOLD"]);
    bench.loses();
    assert_eq!(bench.poll_for(60), [LOST]);
    let another = Gpu {
        uuid: "GPU-new".to_owned(),
        ..gpu(1)
    };
    bench.readings.insert(1, well(&another));
    bench.inventory.gpus.insert(1, another);
    let mut over = bench.poll();
    over.sort();
    assert_eq!(over, [BACK, "-1 DCGM_FR_SRAM_THRESHOLD"]);
    assert_eq!(bench.poll_for(600), [""; 0]);
}

#[test]
fn other_gpus_altogether_are_another_machine() {
    let mut bench = Bench::new(2);
    bench.edit(|_, readings| readings.sram_threshold_exceeded = Some(true));
    bench.poll();
    for (gpu, readings) in bench.inventory.gpus.iter_mut().zip(&mut bench.readings) {
        (gpu.uuid, gpu.pci) = (format!("{}-new", gpu.uuid), format!("1{}", gpu.pci));
        readings.uuid.clone_from(&gpu.uuid);
        readings.sram_threshold_exceeded = Some(false);
    }
    assert_eq!(bench.poll(), ["-1 DCGM_FR_SRAM_THRESHOLD"]);
    assert_eq!(bench.poll_for(600), [""; 0]);
}

#[test]
fn a_machine_that_comes_up_with_fewer_gpus_than_before_misses_them() {
    let mut bench = Bench::new(8);
    bench.poll();
    bench.restart();
    bench.health.boot_has_begun(|_| true);
    bench.loses();
    assert_eq!(bench.poll_for(60), [LOST]);
    // Reported again in each boot.
    bench.health.boot_has_begun(|_| true);
    assert_eq!(bench.poll_for(60), [LOST]);
}

/// A new machine, or a driver that is being installed: no GPU is known that could be missing.
#[test]
fn gpus_that_appear_one_after_the_other_are_not_missed_before() {
    let mut bench = Bench::new(0);
    for index in 0..8 {
        assert_eq!(bench.poll_for(120), [""; 0], "{index}");
        bench.inventory.gpus.push(gpu(index));
        bench.readings.push(well(&gpu(index)));
    }
    // The driver is removed for an upgrade, and comes back.
    let whole = (bench.inventory.clone(), bench.readings.clone());
    bench.inventory.gpus.clear();
    bench.readings.clear();
    assert_eq!(bench.poll_for(600), [""; 0]);
    (bench.inventory, bench.readings) = whole;
    bench.inventory.driver_version = Some("590.44.01".to_owned());
    assert_eq!(bench.poll_for(600), [""; 0]);
}

#[test]
fn a_gpu_that_is_divided_or_no_longer_divided_is_the_same_one() {
    let mut bench = Bench::new(2);
    bench.health.limits.expected_gpus = Some(2);
    bench.poll();
    let partition = |number: u32| MigDevice {
        uuid: format!("MIG-{number}"),
        gpu_instance: number,
        ..MigDevice::default()
    };
    for partitions in [7, 1, 0] {
        let gpu = &mut bench.inventory.gpus[1];
        gpu.mig_enabled = Some(partitions > 0);
        gpu.mig_devices = (0..partitions).map(partition).collect();
        bench.health.boot_has_begun(|_| true);
        assert_eq!(bench.poll_for(600), [""; 0], "{partitions}");
    }
}

#[test]
fn fewer_gpus_than_expected_are_a_fault_of_the_machine() {
    let mut bench = Bench::new(2);
    bench.health.limits.expected_gpus = Some(3);
    let few = "node DCGM_FR_DEVICE_COUNT_MISMATCH";
    assert_eq!(bench.poll_for(60), [format!("+{few}")]);
    bench.inventory.gpus.push(gpu(2));
    assert_eq!(bench.poll(), [format!("-{few}")]);
    // As many as expected: the missing GPU was removed on purpose.
    bench.health.limits.expected_gpus = Some(2);
    bench.loses();
    assert_eq!(bench.poll_for(600), [""; 0]);
}

impl Bench {
    fn edit_first(&mut self, edit: impl FnOnce(&mut Readings)) {
        edit(&mut self.readings[0]);
    }
}
