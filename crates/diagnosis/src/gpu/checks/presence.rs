//! Checks which GPUs are present: a GPU that is missing beside others is lost, and a machine
//! may have fewer GPUs than expected.

use std::collections::BTreeSet;

use contract::keys;

use super::{GpuNames, Health, KnownGpu, Problem, Sight};
use crate::gpu::{Inventory, UnreadableGpu};

/// Code of a machine with fewer GPUs than expected.
const TOO_FEW: &str = "DCGM_FR_DEVICE_COUNT_MISMATCH";

impl Health {
    /// Forgets GPUs that do not belong to this machine now, with their problems: another GPU
    /// has their address, all GPUs are others, or there are as many as the operator expects.
    pub(super) fn forget_replaced(&mut self, inventory: &Inventory) {
        let known = &mut self.remembered.gpus;
        let is_there = |key: &str| inventory.gpus.iter().any(|gpu| gpu.uuid == key);
        let others_only = !known.keys().any(|key| is_there(key));
        let expected = self.limits.expected_gpus;
        let is_complete = expected.is_some_and(|expected| inventory.gpus.len() >= expected);
        let before: BTreeSet<String> = known.keys().cloned().collect();
        known.retain(|key, known| {
            is_there(key) || !(others_only || is_complete || is_replaced(&known.names, inventory))
        });
        let is_gone =
            |problem: &Problem| before.contains(&problem.gpu) && !known.contains_key(&problem.gpu);
        let open = &mut self.remembered.open;
        open.retain(|problem| problem.gpu.is_empty() || known.contains_key(&problem.gpu));
        self.remembered.dcgm.retain(|problem| !is_gone(problem));
    }

    /// Checks which of the known GPUs are missing, and whether there are enough.
    pub(super) fn check_presence(&mut self, inventory: &Inventory, sights: &mut Vec<Sight>) {
        let count = inventory.gpus.len();
        let missing_for = self.limits.missing_seconds;
        if let Some(expected) = self.limits.expected_gpus {
            let problem = Problem::of("", keys::CHECK_GPU_COUNT, TOO_FEW);
            let message = format!("{count} GPUs answer, but {expected} are expected");
            let message = (count < expected).then_some(message);
            sights.push(Sight::new(problem, message, (missing_for, 0)));
        }
        for lost in inventory.unreadable.iter().filter(|gpu| gpu.is_lost) {
            self.record_lost(lost);
        }
        for (key, known) in &self.remembered.gpus {
            let problem = Problem::of(key, keys::CHECK_GPU_PCIE, keys::CODE_GPU_LOST);
            if inventory.gpus.iter().any(|gpu| gpu.uuid == *key) {
                sights.push(Sight::new(problem, None, (0, 0)));
                continue;
            }
            let mut unreadable = inventory.unreadable.iter();
            let (why, wait) = match unreadable.find(|gpu| is_same(&known.names, gpu)) {
                Some(gpu) if gpu.is_lost => (gpu.error.as_str(), 0),
                // The GPU is present but unreadable.
                Some(_) => continue,
                None => ("the driver does not list it", missing_for),
            };
            let message = format!("the GPU does not answer, beside {count} that do: {why}");
            sights.push(Sight::new(problem, Some(message), (wait, 0)));
        }
    }

    /// Records a GPU that was lost before it was ever seen.
    fn record_lost(&mut self, lost: &UnreadableGpu) {
        let known = &mut self.remembered.gpus;
        if known.values().any(|known| is_same(&known.names, lost)) {
            return;
        }
        let names = GpuNames {
            index: lost.index,
            uuid: lost.uuid.clone(),
            pci: lost.pci.clone(),
            serial: None,
            chassis_serial: None,
        };
        let name = lost.uuid.clone().or_else(|| lost.pci.clone());
        let key = name.unwrap_or_else(|| format!("index {}", lost.index));
        let gpu = KnownGpu {
            names,
            ..KnownGpu::default()
        };
        known.insert(key, gpu);
    }
}

/// Returns true if another GPU has this one's address. A known GPU with only an index, or only
/// an address, is the present GPU itself, which has come back.
fn is_replaced(names: &GpuNames, inventory: &Inventory) -> bool {
    inventory.gpus.iter().any(|gpu| match &names.pci {
        Some(pci) => *pci == gpu.pci,
        None => names.uuid.is_none() && names.index == gpu.index,
    })
}

/// Returns true if a GPU that does not answer is this one, by the best name that both have.
fn is_same(names: &GpuNames, gpu: &UnreadableGpu) -> bool {
    let is = |own: &Option<String>, other: &Option<String>| Some(own.as_ref()? == other.as_ref()?);
    is(&names.uuid, &gpu.uuid)
        .or_else(|| is(&names.pci, &gpu.pci))
        .unwrap_or(names.index == gpu.index)
}
