//! What readings of GPUs mean: [`Health`] compares what the driver tells with what it told before,
//! and says which problems have come and which are over.
//!
//! - A problem is a code of a check about one GPU or one link of it. Each comes and goes by itself,
//!   and what is less grave ends nothing that is graver.
//! - What is not told changes nothing: it is neither a problem nor the end of one.
//! - A GPU that is missing beside others is lost. Where none answers nothing is seen, and nothing
//!   is said.
//! - Some problems count when they have lasted, and are over when it has been calm for a while
//!   ([`Limits`]).
//!
//! Only changes are told. What is open, and what else a restart must not make it forget, stands in
//! [`Remembered`].

mod limits;
mod presence;
mod rules;
mod trail;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Gpu, Inventory, Readings};
use crate::catalog::Text;
use rules::Rules;
use trail::Trails;

pub use limits::Limits;

/// The problems of a machine's GPUs, as far as they are seen.
#[derive(Debug)]
pub struct Health {
    limits: Limits,
    remembered: Remembered,
    /// Since when a problem is there that is not open yet, or is away that still is.
    pending: BTreeMap<Problem, Duration>,
    /// The counters of the GPUs that are there, by key.
    trails: BTreeMap<String, Trails>,
    driver_version: Option<String>,
}

/// The things that have to be remembered over a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// The GPUs that were seen, by key: a UUID, or what else is known of one that was always lost.
    gpus: BTreeMap<String, KnownGpu>,
    open: BTreeSet<Problem>,
}

/// The names of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuNames {
    /// Index of NVML, as it was seen last.
    pub index: u32,
    /// UUID.
    pub uuid: Option<String>,
    /// PCI address.
    pub pci: Option<String>,
    /// Serial number of the chassis.
    pub chassis_serial: Option<String>,
}

/// A GPU that was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KnownGpu {
    names: GpuNames,
    /// The links that were up in this boot.
    links_up: BTreeSet<u32>,
    /// Pages taken out of use because of errors that were not corrected, when it was first seen.
    first_retired_dbe: Option<u32>,
}

/// One problem, whether it is open or not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Problem {
    /// Key of the GPU; empty for the machine.
    gpu: String,
    check: Text,
    code: Text,
    link: Option<u32>,
}

/// A problem that has come, or is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The GPU; `None`: the machine.
    pub gpu: Option<GpuNames>,
    /// The check.
    pub check: Text,
    /// The code.
    pub code: Text,
    /// The `NVLink` that is meant.
    pub link: Option<u32>,
    /// The trouble, for people; `None`: the problem is over.
    pub message: Option<String>,
    /// True if nothing of the check is open about the GPU any more.
    pub is_all_well: bool,
}

/// A problem as one look shows it.
#[derive(Debug)]
struct Sight {
    problem: Problem,
    /// The trouble, for people; `None`: all is well.
    message: Option<String>,
    /// Time after which it counts if it is wrong, and if it is well.
    wait: (Duration, Duration),
}

// === impl Health ===

impl Health {
    /// Returns the health of GPUs of which an earlier process has remembered this.
    pub fn new(limits: Limits, remembered: Remembered) -> Self {
        Self {
            limits,
            remembered,
            pending: BTreeMap::new(),
            trails: BTreeMap::new(),
            driver_version: None,
        }
    }

    /// Returns what has to be remembered over a restart.
    pub fn remembered(&self) -> &Remembered {
        &self.remembered
    }

    /// Returns whether GPUs are known, and none of them answers: that is no fault of all of them, but
    /// nothing is seen.
    pub fn is_blind(&self, inventory: &Inventory) -> bool {
        let has_known = !self.remembered.gpus.is_empty() || !inventory.unreadable.is_empty();
        inventory.gpus.is_empty() && has_known
    }

    /// Takes in a look at the GPUs, and returns what has changed: first what is over, then what has
    /// come. `now` is the time since the start of the process.
    pub fn take(
        &mut self,
        inventory: &Inventory,
        readings: &[Readings],
        now: Duration,
    ) -> Vec<Change> {
        if self.is_blind(inventory) {
            return Vec::new();
        }
        if self.driver_version != inventory.driver_version {
            self.driver_version.clone_from(&inventory.driver_version);
            self.trails.clear();
        }
        let before = self.remembered.clone();
        let mut sights = Vec::new();
        self.forget_replaced(inventory);
        self.look_around(inventory, &mut sights);
        for gpu in &inventory.gpus {
            self.meet(gpu);
            let told = readings.iter().find(|told| told.uuid == gpu.uuid);
            if let (Some(readings), Some(known)) = (told, self.remembered.gpus.get_mut(&gpu.uuid)) {
                let rules = Rules {
                    key: &gpu.uuid,
                    gpu,
                    readings,
                    limits: &self.limits,
                    known,
                    trails: self.trails.entry(gpu.uuid.clone()).or_default(),
                    now,
                    sights: &mut sights,
                };
                rules.judge();
            }
        }
        (self.trails).retain(|uuid, _| inventory.gpus.iter().any(|gpu| gpu.uuid == *uuid));
        let messages = self.settle(sights, now);
        self.changes(&before, &messages)
    }

    /// Takes note of a reboot: `is_mended` says of a code whether what it reports is closed by one.
    /// Such a problem is told again if it is still there.
    pub fn boot_has_begun(&mut self, is_mended: impl Fn(&str) -> bool) {
        (self.remembered.open).retain(|problem| !is_mended(&problem.code));
        for known in self.remembered.gpus.values_mut() {
            known.links_up.clear();
        }
        self.pending.clear();
        self.trails.clear();
    }

    /// Opens and closes problems by what was seen of them, and returns what is said of those that
    /// have opened.
    fn settle(&mut self, sights: Vec<Sight>, now: Duration) -> BTreeMap<Problem, String> {
        let mut messages = BTreeMap::new();
        // What was not told this time begins anew when it is.
        let pending = std::mem::take(&mut self.pending);
        for sight in sights {
            let (opens, closes) = sight.wait;
            let is_open = self.remembered.open.contains(&sight.problem);
            if sight.message.is_some() == is_open {
                continue;
            }
            let wait = if is_open { closes } else { opens };
            let since = pending.get(&sight.problem).copied().unwrap_or(now);
            if now.saturating_sub(since) < wait {
                self.pending.insert(sight.problem, since);
                continue;
            }
            match sight.message {
                Some(message) => {
                    self.remembered.open.insert(sight.problem.clone());
                    messages.insert(sight.problem, message);
                }
                None => _ = self.remembered.open.remove(&sight.problem),
            }
        }
        messages
    }

    /// Returns the changes since `before`; `messages` are those of what has opened.
    fn changes(&self, before: &Remembered, messages: &BTreeMap<Problem, String>) -> Vec<Change> {
        let names = |problem: &Problem| {
            let known = self.remembered.gpus.get(&problem.gpu);
            let known = known.or_else(|| before.gpus.get(&problem.gpu));
            known.map(|known| known.names.clone())
        };
        let change = |problem: &Problem, message: Option<String>| {
            let is_of_check =
                |open: &Problem| open.gpu == problem.gpu && open.check == problem.check;
            Change {
                gpu: names(problem),
                check: problem.check.clone(),
                code: problem.code.clone(),
                link: problem.link,
                is_all_well: !self.remembered.open.iter().any(is_of_check),
                message,
            }
        };
        let says = |problem: &Problem| messages.get(problem).cloned().unwrap_or_default();
        let over = before.open.difference(&self.remembered.open);
        let over: Vec<Change> = over.map(|problem| change(problem, None)).collect();
        let come = self.remembered.open.difference(&before.open);
        let come = come.map(|problem| change(problem, Some(says(problem))));
        over.into_iter().chain(come).collect()
    }

    /// Takes note of a GPU that is there.
    fn meet(&mut self, gpu: &Gpu) {
        let known = self.remembered.gpus.entry(gpu.uuid.clone()).or_default();
        known.names = GpuNames::from(gpu);
    }
}

// === impl GpuNames ===

impl From<&Gpu> for GpuNames {
    fn from(gpu: &Gpu) -> Self {
        Self {
            index: gpu.index,
            uuid: Some(gpu.uuid.clone()),
            pci: Some(gpu.pci.clone()).filter(|pci| !pci.is_empty()),
            chassis_serial: gpu.chassis_serial.clone(),
        }
    }
}

// === impl Problem ===

impl Problem {
    fn of(gpu: &str, check: &'static str, code: &'static str) -> Self {
        Self {
            gpu: gpu.to_owned(),
            check: check.into(),
            code: code.into(),
            link: None,
        }
    }

    fn on_link(self, link: u32) -> Self {
        Self {
            link: Some(link),
            ..self
        }
    }
}

// === impl Sight ===

impl Sight {
    /// Returns a sight of a problem that counts after so many seconds where it is wrong, and where
    /// it is well.
    fn new(problem: Problem, message: Option<String>, (opens, closes): (u64, u64)) -> Self {
        Self {
            problem,
            message,
            wait: (Duration::from_secs(opens), Duration::from_secs(closes)),
        }
    }
}

#[cfg(test)]
mod tests;
