//! Reports which GPUs are in this machine: one event per GPU and boot, and another one if the GPU
//! gets another address. Without it, the controller would know a GPU only from its first fault on,
//! and would not notice that a bad one has moved here.

use std::collections::BTreeMap;

use contract::keys;
use diagnosis::gpu::Gpu;

use super::{GpuMonitor, event};

impl GpuMonitor {
    /// Reports the GPUs that were not reported yet as they are now.
    pub(super) fn report_inventory(&mut self) {
        let gpus = self.inventory.gpus.iter();
        let present: BTreeMap<_, _> = gpus
            .map(|gpu| (gpu.uuid.clone(), (gpu.pci.clone(), gpu.serial.clone())))
            .collect();
        let reported = &self.reporter.memory().inventory;
        if *reported == present {
            return;
        }
        let is_new = |gpu: &&Gpu| reported.get(&gpu.uuid) != present.get(&gpu.uuid);
        let new: Vec<Gpu> = self.inventory.gpus.iter().filter(is_new).cloned().collect();
        for gpu in new {
            let blank = self
                .reporter
                .event(keys::CHECK_GPU_INVENTORY, keys::COMPONENT_GPU);
            let driver_version = self.inventory.driver_version.as_deref();
            self.report(event::inventory(&gpu, driver_version, blank));
        }
        self.reporter.memory_mut().inventory = present;
    }
}
