//! Which GPUs are there: one that is missing beside others is lost, and a machine may have fewer than
//! it ought to.

use std::collections::BTreeSet;

use contract::keys;

use super::{GpuNames, Health, KnownGpu, Problem, Sight};
use crate::gpu::{Inventory, UnreadableGpu};

/// The code of a GPU that is lost.
const LOST: &str = "DCGM_FR_FALLEN_OFF_BUS";
/// The code of a machine with fewer GPUs than it ought to have.
const TOO_FEW: &str = "DCGM_FR_DEVICE_COUNT_MISMATCH";

impl Health {
    /// Forgets the GPUs that are no longer of this machine, and their problems: another one sits in
    /// their place, all are others, or there are as many as the operator expects.
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

    /// Looks which of the known GPUs are missing, and whether there are enough.
    pub(super) fn look_around(&mut self, inventory: &Inventory, sights: &mut Vec<Sight>) {
        let count = inventory.gpus.len();
        let missing_for = self.limits.missing_seconds;
        if let Some(expected) = self.limits.expected_gpus {
            let problem = Problem::of("", keys::CHECK_GPU_COUNT, TOO_FEW);
            let message = format!("{count} GPUs answer, and there ought to be {expected}");
            let message = (count < expected).then_some(message);
            sights.push(Sight::new(problem, message, (missing_for, 0)));
        }
        for lost in inventory.unreadable.iter().filter(|gpu| gpu.is_lost) {
            self.meet_lost(lost);
        }
        for (key, known) in &self.remembered.gpus {
            let problem = Problem::of(key, keys::CHECK_GPU_PCIE, LOST);
            if inventory.gpus.iter().any(|gpu| gpu.uuid == *key) {
                sights.push(Sight::new(problem, None, (0, 0)));
                continue;
            }
            let mut unreadable = inventory.unreadable.iter();
            let (why, wait) = match unreadable.find(|gpu| is_same(&known.names, gpu)) {
                Some(gpu) if gpu.is_lost => (gpu.error.as_str(), 0),
                // It is there, and nothing is seen of it.
                Some(_) => continue,
                None => ("it is not listed any more", missing_for),
            };
            let message = format!("the GPU does not answer, beside {count} that do: {why}");
            sights.push(Sight::new(problem, Some(message), (wait, 0)));
        }
    }

    /// Takes note of a GPU that was lost before it was ever seen.
    fn meet_lost(&mut self, lost: &UnreadableGpu) {
        let known = &mut self.remembered.gpus;
        if known.values().any(|known| is_same(&known.names, lost)) {
            return;
        }
        let names = GpuNames {
            index: lost.index,
            uuid: lost.uuid.clone(),
            pci: lost.pci.clone(),
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

/// Returns whether another GPU is where this one was. What only has an index, or only an address,
/// is this GPU itself, which has come back.
fn is_replaced(names: &GpuNames, inventory: &Inventory) -> bool {
    inventory.gpus.iter().any(|gpu| match &names.pci {
        Some(pci) => *pci == gpu.pci,
        None => names.uuid.is_none() && names.index == gpu.index,
    })
}

/// Returns whether a GPU that does not answer is this one: by the best name that is told of it.
fn is_same(names: &GpuNames, gpu: &UnreadableGpu) -> bool {
    let is = |own: &Option<String>, told: &Option<String>| Some(own.as_ref()? == told.as_ref()?);
    is(&names.uuid, &gpu.uuid)
        .or_else(|| is(&names.pci, &gpu.pci))
        .unwrap_or(names.index == gpu.index)
}
