//! DCGM as a second witness: what its health watches tell are problems as the checks' own are. A
//! problem that both see is one, and is over when neither sees it any more.
//!
//! DCGM names a GPU where the driver names the link, so the links of a GPU that are open stand for
//! what DCGM says of it by the same code.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use contract::keys;

use super::{Change, GpuNames, Health, Problem};
use crate::catalog::{Catalog, Text};
use crate::gpu::dcgm::{DcgmEntity, DcgmGpu, DcgmIncident, DcgmLook, ImexUse};

/// The code of an incident that has no name here, as NVSentinel takes it.
const UNKNOWN: &str = "DCGM_FR_UNKNOWN";
/// The code of a link that is down. DCGM says it also of links that lead nowhere, as on boards
/// without a bridge, and of those that were not up yet.
const LINK_DOWN: &str = "DCGM_FR_NVLINK_DOWN";
/// Bytes of all texts about one problem that are shown: those of eighteen links of a GPU fit.
const MAX_MESSAGE: usize = 4096;

/// The memory of what DCGM has told since it answers.
#[derive(Debug, Default)]
pub(super) struct Dcgm {
    /// The problems that its last look told.
    told: BTreeSet<Problem>,
    /// The open problems that are not told any more, with the time since when.
    absent: BTreeMap<Problem, Duration>,
    /// The names of its GPUs, by key.
    names: BTreeMap<String, GpuNames>,
    /// Whether a word about IMEX counts.
    imex: ImexUse,
}

/// The parts of the machine that one look is about.
struct Scope {
    /// The keys of the GPUs, by DCGM's number.
    gpus: BTreeMap<u32, String>,
    switches: BTreeSet<u32>,
}

impl Health {
    /// Takes in a look at DCGM's watches, and returns what has changed: first what is over, then what
    /// has come. `now` is the time since the start of the process.
    pub fn take_dcgm(&mut self, look: &DcgmLook, now: Duration) -> Vec<Change> {
        let before = self.remembered.clone();
        let scope = self.meet_dcgm(look);
        let mut told = scope.told(look, self.dcgm.imex);
        told.retain(|problem, _| self.believes(problem));
        let mut messages = BTreeMap::new();
        for (problem, message) in &told {
            self.dcgm.absent.remove(problem);
            let links = self.links_of(problem);
            if links.is_empty() {
                if self.remembered.dcgm.insert(problem.clone()) {
                    messages.insert(problem.clone(), message.clone());
                }
            } else if !self.dcgm.told.contains(problem) {
                messages.extend(links.into_iter().map(|link| (link, message.clone())));
            }
        }
        if look.is_whole {
            self.end_absent(&scope, &told, now);
        }
        self.dcgm.told = told.into_keys().collect();
        self.changes(&before, &messages)
    }

    /// Takes in whether pods rely on IMEX. Where none does any more, what DCGM has told of it ends at
    /// once, and the changes say that nobody judges it: it may be as broken as before, or be stopped,
    /// and neither matters to anybody.
    pub fn imex_is(&mut self, imex: ImexUse) -> Vec<Change> {
        self.dcgm.imex = imex;
        if imex != ImexUse::Unused {
            return Vec::new();
        }
        let before = self.remembered.clone();
        (self.remembered.dcgm).retain(|problem| problem.check != keys::CHECK_GPU_IMEX);
        (self.dcgm.told).retain(|problem| problem.check != keys::CHECK_GPU_IMEX);
        let mut changes = self.changes(&before, &BTreeMap::new());
        for change in &mut changes {
            (change.is_all_well, change.is_unjudged) = (false, true);
        }
        changes
    }

    /// Takes note that DCGM does not answer: nothing is over while it does not.
    pub fn dcgm_is_away(&mut self) {
        self.dcgm.told.clear();
        self.dcgm.absent.clear();
    }

    /// Forgets what DCGM has told, because nobody asks it any more. Returns the codes.
    pub fn forget_dcgm(&mut self) -> Vec<Text> {
        let open = std::mem::take(&mut self.remembered.dcgm);
        open.into_iter().map(|problem| problem.code).collect()
    }

    /// Returns the codes of what DCGM sees of a GPU, by its UUID.
    pub fn dcgm_codes(&self, uuid: &str) -> impl Iterator<Item = &Text> {
        let open = self.remembered.dcgm.iter();
        let of_gpu = open.filter(move |problem| problem.gpu == uuid);
        of_gpu.map(|problem| &problem.code)
    }

    /// Closes what has not been told for long enough, of what the look is about.
    fn end_absent(&mut self, scope: &Scope, told: &BTreeMap<Problem, String>, now: Duration) {
        let calm = Duration::from_secs(self.limits.dcgm_calm_seconds.into());
        // Where it is not known whether IMEX counts, nothing is known of its end either.
        let is_judged = |problem: &Problem| {
            problem.check != keys::CHECK_GPU_IMEX || self.dcgm.imex == ImexUse::Used
        };
        let is_absent = |problem: &&Problem| {
            !told.contains_key(*problem) && scope.covers(problem) && is_judged(problem)
        };
        let absent: Vec<Problem> = (self.remembered.dcgm.iter().filter(is_absent))
            .cloned()
            .collect();
        let before = std::mem::take(&mut self.dcgm.absent);
        for problem in absent {
            let since = before.get(&problem).copied().unwrap_or(now);
            // The end of what a GPU has would be that of what its links have, too.
            if now.saturating_sub(since) >= calm && self.links_of(&problem).is_empty() {
                self.remembered.dcgm.remove(&problem);
            } else {
                self.dcgm.absent.insert(problem, since);
            }
        }
    }

    /// Returns whether a problem is one: that a link is down is none where the driver, as far as it
    /// is asked, has seen no link of the GPU up in this boot.
    fn believes(&self, problem: &Problem) -> bool {
        let known = self.remembered.gpus.get(&problem.gpu);
        problem.code != LINK_DOWN || known.is_none_or(|known| !known.links_up.is_empty())
    }

    /// Takes note of the GPUs of a look.
    fn meet_dcgm(&mut self, look: &DcgmLook) -> Scope {
        self.dcgm.names.clear();
        let mut gpus = BTreeMap::new();
        for gpu in &look.gpus {
            let names = self.names_of(gpu);
            let name = names.uuid.clone().or_else(|| names.pci.clone());
            let key = name.unwrap_or_else(|| format!("index {}", names.index));
            gpus.insert(gpu.id, key.clone());
            self.dcgm.names.insert(key, names);
        }
        Scope {
            gpus,
            switches: look.switches.iter().copied().collect(),
        }
    }

    /// Returns the names of a GPU of DCGM; those by which the driver knows it, where it does.
    fn names_of(&self, gpu: &DcgmGpu) -> GpuNames {
        let is_known = |names: &&GpuNames| match (&gpu.uuid, &gpu.pci) {
            (Some(_), _) => names.uuid == gpu.uuid,
            (None, Some(_)) => names.pci == gpu.pci,
            (None, None) => names.index == gpu.index.unwrap_or(gpu.id),
        };
        let mut known = self.remembered.gpus.values().map(|known| &known.names);
        let told = || GpuNames {
            index: gpu.index.unwrap_or(gpu.id),
            uuid: gpu.uuid.clone(),
            pci: gpu.pci.clone(),
            chassis_serial: None,
        };
        known.find(is_known).cloned().unwrap_or_else(told)
    }

    /// Returns the problems of the links of a GPU that the driver tells, where this is the same one
    /// of the GPU.
    fn links_of(&self, problem: &Problem) -> Vec<Problem> {
        let is_link = |open: &&Problem| {
            problem.link.is_none()
                && open.link.is_some()
                && (&open.gpu, &open.check, &open.code)
                    == (&problem.gpu, &problem.check, &problem.code)
        };
        self.remembered
            .open
            .iter()
            .filter(is_link)
            .cloned()
            .collect()
    }
}

// === impl Dcgm ===

impl Dcgm {
    /// Returns whether a word about IMEX counts, whoever says it.
    pub(super) fn imex(&self) -> ImexUse {
        self.imex
    }

    /// Returns the names of a GPU by its key.
    pub(super) fn names(&self, key: &str) -> Option<&GpuNames> {
        self.names.get(key)
    }

    /// Returns whether the last look told of this, or of the same about the GPU whose link it is.
    pub(super) fn tells(&self, problem: &Problem) -> bool {
        let whole = Problem {
            link: None,
            ..problem.clone()
        };
        self.told.contains(problem) || self.told.contains(&whole)
    }

    /// Takes note of a reboot.
    pub(super) fn boot_has_begun(&mut self) {
        self.told.clear();
        self.absent.clear();
    }
}

// === impl Scope ===

impl Scope {
    /// Returns what a look tells, with its texts.
    fn told(&self, look: &DcgmLook, imex: ImexUse) -> BTreeMap<Problem, String> {
        let mut told: BTreeMap<Problem, String> = BTreeMap::new();
        for incident in look.incidents.iter().filter(|it| it.is_judged(imex)) {
            let (problem, message) = self.problem(incident);
            let text = told.entry(problem).or_default();
            if text.contains(&message) || text.len() + message.len() > MAX_MESSAGE {
                continue;
            }
            if !text.is_empty() {
                text.push_str("; ");
            }
            text.push_str(&message);
        }
        told
    }

    /// Returns the problem that an incident is, and its text.
    fn problem(&self, incident: &DcgmIncident) -> (Problem, String) {
        let row = Catalog::builtin().dcgm(incident.code);
        let code = row.map_or(Text::Borrowed(UNKNOWN), |row| row.name.clone());
        let mut message = incident.message.trim().to_owned();
        if message.is_empty() {
            message = row.map_or_else(String::new, |row| row.meaning.to_string());
        }
        if row.is_none() {
            message = format!("code {} of DCGM: {message}", incident.code);
        }
        let DcgmEntity { group, id } = incident.entity;
        let mut problem = Problem {
            code,
            ..Problem::of("", incident.check(), UNKNOWN)
        };
        match (group, self.gpus.get(&id)) {
            (DcgmEntity::GPU, Some(key)) => problem.gpu.clone_from(key),
            (DcgmEntity::SWITCH, _) => problem.switch = Some(id),
            (DcgmEntity::NONE, _) => {}
            _ => message = format!("entity {id} of kind {group} of DCGM: {message}"),
        }
        (problem, message)
    }

    /// Returns whether the look would tell of this problem.
    fn covers(&self, problem: &Problem) -> bool {
        match problem.switch {
            Some(switch) => self.switches.contains(&switch),
            None => problem.gpu.is_empty() || self.gpus.values().any(|key| *key == problem.gpu),
        }
    }
}
