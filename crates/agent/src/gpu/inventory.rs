//! Reports which GPUs are in this machine: one event per GPU and boot, another one if the GPU gets
//! another address, and one a week. Without it, the controller would know a GPU only from its first
//! fault on, and would not notice that a bad one has moved here, or that one is silent. The weekly one
//! is there when the event of a boot long ago is no longer stored.

use std::collections::BTreeMap;

use contract::keys;
use diagnosis::gpu::Gpu;
use jiff::SignedDuration;

use super::{GpuMonitor, event};

/// Time after which all GPUs are reported again.
const AGAIN: SignedDuration = SignedDuration::from_hours(7 * 24);

impl GpuMonitor {
    /// Reports the GPUs that were not reported yet as they are now.
    pub(super) fn report_inventory(&mut self) {
        let gpus = self.inventory.gpus.iter();
        let present: BTreeMap<_, _> = gpus
            .map(|gpu| (gpu.uuid.clone(), (gpu.pci.clone(), gpu.serial.clone())))
            .collect();
        let now = self.reporter.now();
        let memory = self.reporter.memory();
        let since = memory.inventory_at.map(|at| now.duration_since(at).abs());
        let is_due = !present.is_empty() && since.is_none_or(|since| since >= AGAIN);
        let reported = &memory.inventory;
        if *reported == present && !is_due {
            return;
        }
        let is_new = |gpu: &&Gpu| is_due || reported.get(&gpu.uuid) != present.get(&gpu.uuid);
        let new: Vec<Gpu> = self.inventory.gpus.iter().filter(is_new).cloned().collect();
        for gpu in new {
            let blank = self
                .reporter
                .event(keys::CHECK_GPU_INVENTORY, keys::COMPONENT_GPU);
            let driver_version = self.inventory.driver_version.as_deref();
            self.report(event::inventory(&gpu, driver_version, blank));
        }
        let memory = self.reporter.memory_mut();
        memory.inventory = present;
        if is_due {
            memory.inventory_at = Some(now);
        }
    }
}
