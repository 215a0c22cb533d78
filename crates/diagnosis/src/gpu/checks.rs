//! Evaluates readings of GPUs: [`Health`] compares each poll with the ones before, and returns
//! which problems have opened and which have closed.
//!
//! - A problem is a code of a check about one GPU or one link of it. Each opens and closes
//!   independently, and a lesser problem never closes a more severe one.
//! - A missing value changes nothing: it neither opens nor closes a problem.
//! - A GPU that is missing beside others is lost. If none answers, the driver is out of sight,
//!   and nothing changes.
//! - DCGM may be a second source (`dcgm`): a problem that both report is one problem.
//! - Some problems open after they have lasted for a while, and close after a calm period
//!   ([`CheckLimits`]).
//!
//! Only changes are returned. [`Remembered`] holds the open problems and the rest of the state
//! that must survive a restart.

mod dcgm;
mod presence;
mod rules;
mod trail;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Gpu, Inventory, Readings};
use crate::catalog::Text;
use crate::limits::CheckLimits;
use dcgm::DcgmReports;
use rules::Rules;
use trail::Trails;

/// Evaluates the health of a machine's GPUs, with the open problems.
#[derive(Debug)]
pub struct Health {
    limits: CheckLimits,
    remembered: Remembered,
    /// Problems whose state differs from their readings, with the time since when.
    pending: BTreeMap<Problem, Duration>,
    /// Counters of the GPUs that are present, by key.
    trails: BTreeMap<String, Trails>,
    driver_version: Option<String>,
    dcgm: DcgmReports,
}

/// State that must survive a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// GPUs that were seen, by key: the UUID, or another name of a GPU that was lost from the
    /// start.
    gpus: BTreeMap<String, KnownGpu>,
    /// Open problems that the driver reports.
    open: BTreeSet<Problem>,
    /// Open problems that DCGM reports.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    dcgm: BTreeSet<Problem>,
}

/// Names of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuNames {
    /// NVML index at the last poll.
    pub index: u32,
    /// UUID of the form `GPU-...`.
    pub uuid: Option<String>,
    /// PCI address in the form `dddd:bb:dd.f`.
    pub pci: Option<String>,
    /// Serial number of the board.
    pub serial: Option<String>,
    /// Serial number of the chassis.
    pub chassis_serial: Option<String>,
}

/// A GPU that was seen in an earlier poll.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KnownGpu {
    names: GpuNames,
    /// Links that were up in this boot.
    links_up: BTreeSet<u32>,
    /// Pages that were retired because of uncorrected errors when the GPU was first seen.
    first_retired_dbe: Option<u32>,
}

/// A problem, whether it is open or not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Problem {
    /// Key of the GPU; empty for the machine.
    gpu: String,
    check: Text,
    code: Text,
    link: Option<u32>,
    /// Number of the switch, for a problem of a switch instead of a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    switch: Option<u32>,
}

/// A problem that has opened or closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProblemChange {
    /// Names of the GPU; `None` for the machine.
    pub gpu: Option<GpuNames>,
    /// Name of the check.
    pub check: Text,
    /// Error code of the problem.
    pub code: Text,
    /// Number of the affected `NVLink`.
    pub link: Option<u32>,
    /// Number of the affected switch, instead of a GPU.
    pub switch: Option<u32>,
    /// Description of the problem; `None` if it has closed.
    pub message: Option<String>,
    /// True if no problem of the check is open for the GPU or switch of the change, or, for a
    /// change of the machine, for anything.
    pub is_all_well: bool,
    /// True if the problem closed because it is not evaluated now, rather than because readings
    /// are good.
    pub is_unjudged: bool,
    /// Sources that report the problem.
    pub seen_by: Witnesses,
}

/// Sources that report a problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Witnesses {
    /// True if the driver reports it, through NVML.
    pub nvml: bool,
    /// True if DCGM reports it.
    pub dcgm: bool,
}

/// A problem's state in one poll.
#[derive(Debug)]
struct Sight {
    problem: Problem,
    /// Description of the problem; `None` if the readings are good.
    message: Option<String>,
    /// Delay before the problem opens, and before it closes.
    wait: (Duration, Duration),
}

// === impl Health ===

impl Health {
    /// Creates the evaluation, with the state of an earlier process.
    pub fn new(limits: CheckLimits, remembered: Remembered) -> Self {
        Self {
            limits,
            remembered,
            pending: BTreeMap::new(),
            trails: BTreeMap::new(),
            driver_version: None,
            dcgm: DcgmReports::default(),
        }
    }

    /// Returns the state that must survive a restart.
    pub fn remembered(&self) -> &Remembered {
        &self.remembered
    }

    /// Returns true if GPUs are known but none answers: the driver is out of sight, and not
    /// every GPU faulty.
    pub fn is_blind(&self, inventory: &Inventory) -> bool {
        let has_known = !self.remembered.gpus.is_empty() || !inventory.unreadable.is_empty();
        inventory.gpus.is_empty() && has_known
    }

    /// Evaluates a poll, and returns the changes, closed problems first. `now` is the time
    /// since the start of the process.
    pub fn take(
        &mut self,
        inventory: &Inventory,
        readings: &[Readings],
        now: Duration,
    ) -> Vec<ProblemChange> {
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
        self.check_presence(inventory, &mut sights);
        for gpu in &inventory.gpus {
            self.record_gpu(gpu);
            let read = readings.iter().find(|read| read.uuid == gpu.uuid);
            if let (Some(readings), Some(known)) = (read, self.remembered.gpus.get_mut(&gpu.uuid)) {
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

    /// Handles a reboot. `is_mended` is true for a code whose fault a reboot closes; such a
    /// problem opens again if it persists.
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

    /// Opens and closes problems by their states, and returns the descriptions of those that
    /// opened.
    fn settle(&mut self, sights: Vec<Sight>, now: Duration) -> BTreeMap<Problem, String> {
        let mut messages = BTreeMap::new();
        // A delay starts over if a poll does not report the problem's state.
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

    /// Returns the changes since `before`; `messages` describes the problems that opened.
    fn changes(
        &self,
        before: &Remembered,
        messages: &BTreeMap<Problem, String>,
    ) -> Vec<ProblemChange> {
        let now = &self.remembered;
        let names = |problem: &Problem| {
            let known = now.gpus.get(&problem.gpu);
            let known = known.or_else(|| before.gpus.get(&problem.gpu));
            let known = known.map(|known| &known.names);
            known.or_else(|| self.dcgm.names(&problem.gpu)).cloned()
        };
        let change = |problem: &Problem, message: Option<String>| {
            // A recovery without a GPU or switch would close the problems of all of them.
            let names_none = problem.gpu.is_empty() && problem.switch.is_none();
            let is_of_check = |open: &Problem| {
                let of_part = (&open.gpu, open.switch) == (&problem.gpu, problem.switch);
                open.check == problem.check && (of_part || names_none)
            };
            ProblemChange {
                gpu: names(problem),
                check: problem.check.clone(),
                code: problem.code.clone(),
                link: problem.link,
                switch: problem.switch,
                is_all_well: !now.all().any(is_of_check),
                is_unjudged: false,
                seen_by: Witnesses {
                    nvml: now.open.contains(problem),
                    dcgm: now.dcgm.contains(problem) || self.dcgm.reports(problem),
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

    /// Records the names of a GPU that is present.
    fn record_gpu(&mut self, gpu: &Gpu) {
        let known = self.remembered.gpus.entry(gpu.uuid.clone()).or_default();
        known.names = GpuNames::from(gpu);
    }
}

// === impl Remembered ===

impl Remembered {
    /// Returns all open problems; one that both sources report comes twice.
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
            serial: gpu.serial.clone(),
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
    /// Creates a state with the delays in seconds before the problem opens and before it
    /// closes.
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
