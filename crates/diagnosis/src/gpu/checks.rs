//! What readings of GPUs mean: [`Health`] compares what the driver tells with what it told before,
//! and says which problems have come and which are over.
//!
//! - A problem is a code of a check about one GPU or one link of it. Each comes and goes by itself,
//!   and what is less grave ends nothing that is graver.
//! - What is not told changes nothing: it is neither a problem nor the end of one.
//! - A GPU that is missing beside others is lost. Where none answers nothing is seen, and nothing
//!   is said.
//! - DCGM may be asked beside the driver (`dcgm`): what both tell is one problem.
//! - Some problems count when they have lasted, and are over when it has been calm for a while
//!   ([`Limits`]).
//!
//! Only changes are told. What is open, and what else a restart must not make it forget, stands in
//! [`Remembered`].

mod dcgm;
mod presence;
mod rules;
mod trail;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Gpu, Inventory, Readings};
use crate::catalog::Text;
use crate::limits::Limits;
use dcgm::Dcgm;
use rules::Rules;
use trail::Trails;

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
    dcgm: Dcgm,
}

/// The things that have to be remembered over a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// The GPUs that were seen, by key: a UUID, or what else is known of one that was always lost.
    gpus: BTreeMap<String, KnownGpu>,
    /// The problems that the driver tells.
    open: BTreeSet<Problem>,
    /// The problems that DCGM tells.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    dcgm: BTreeSet<Problem>,
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
    /// The number of the switch that it is about, in the place of a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    switch: Option<u32>,
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
    /// The switch that is meant, in the place of a GPU.
    pub switch: Option<u32>,
    /// The trouble, for people; `None`: the problem is over.
    pub message: Option<String>,
    /// True if nothing of the check is open any more about what the change names; where it names
    /// nothing, about anything.
    pub is_all_well: bool,
    /// True if it is over because it is not judged any more, and not because it was seen to be well.
    pub is_unjudged: bool,
    /// The witnesses of the problem.
    pub seen_by: Witnesses,
}

/// The sources that see a problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Witnesses {
    /// True if the driver does, by NVML.
    pub nvml: bool,
    /// True if DCGM does.
    pub dcgm: bool,
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
            dcgm: Dcgm::default(),
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
                    imex: self.dcgm.imex(),
                    known,
                    trails: self.trails.entry(gpu.uuid.clone()).or_default(),
                    now,
                    sights: &mut sights,
                };
                rules.judge();
            }
        }
        (self.trails).retain(|uuid, _| inventory.gpus.iter().any(|gpu| gpu.uuid == *uuid));
        let mut messages = self.settle(sights, now);
        messages.retain(|problem, _| !before.open.contains(problem));
        self.changes(&before, &messages)
    }

    /// Takes note of a reboot: `is_mended` says of a code whether what it reports is closed by one.
    /// Such a problem is told again if it is still there.
    pub fn boot_has_begun(&mut self, is_mended: impl Fn(&str) -> bool) {
        (self.remembered.open).retain(|problem| !is_mended(&problem.code));
        (self.remembered.dcgm).retain(|problem| !is_mended(&problem.code));
        self.dcgm.boot_has_begun();
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

    /// Returns the changes since `before`; `messages` are those of what has come.
    fn changes(&self, before: &Remembered, messages: &BTreeMap<Problem, String>) -> Vec<Change> {
        let now = &self.remembered;
        let names = |problem: &Problem| {
            let known = now.gpus.get(&problem.gpu);
            let known = known.or_else(|| before.gpus.get(&problem.gpu));
            let known = known.map(|known| &known.names);
            known.or_else(|| self.dcgm.names(&problem.gpu)).cloned()
        };
        let change = |problem: &Problem, message: Option<String>| {
            // The end of what names no part would be that of all parts.
            let names_none = problem.gpu.is_empty() && problem.switch.is_none();
            let is_of_check = |open: &Problem| {
                let of_part = (&open.gpu, open.switch) == (&problem.gpu, problem.switch);
                open.check == problem.check && (of_part || names_none)
            };
            Change {
                gpu: names(problem),
                check: problem.check.clone(),
                code: problem.code.clone(),
                link: problem.link,
                switch: problem.switch,
                is_all_well: !now.all().any(is_of_check),
                is_unjudged: false,
                seen_by: Witnesses {
                    nvml: now.open.contains(problem),
                    dcgm: now.dcgm.contains(problem) || self.dcgm.tells(problem),
                },
                message,
            }
        };
        let is_over = |problem: &&Problem| !now.all().any(|open| open == *problem);
        let over: BTreeSet<&Problem> = before.all().filter(is_over).collect();
        let over = over.into_iter().map(|problem| change(problem, None));
        let come = messages.iter();
        let come = come.map(|(problem, message)| change(problem, Some(message.clone())));
        over.chain(come).collect()
    }

    /// Takes note of a GPU that is there.
    fn meet(&mut self, gpu: &Gpu) {
        let known = self.remembered.gpus.entry(gpu.uuid.clone()).or_default();
        known.names = GpuNames::from(gpu);
    }
}

// === impl Remembered ===

impl Remembered {
    /// Returns all problems that are open; one that two see twice.
    fn all(&self) -> impl Iterator<Item = &Problem> {
        self.open.iter().chain(&self.dcgm)
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
            switch: None,
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
    fn new(problem: Problem, message: Option<String>, (opens, closes): (u32, u32)) -> Self {
        let seconds = |wait: u32| Duration::from_secs(wait.into());
        Self {
            problem,
            message,
            wait: (seconds(opens), seconds(closes)),
        }
    }
}

#[cfg(test)]
mod tests;
