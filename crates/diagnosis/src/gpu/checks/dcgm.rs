//! DCGM as a second source: findings of its health watches become problems like the checks'
//! own. A problem that both sources report is one, and closes when neither reports it.
//!
//! DCGM reports a problem for the whole GPU where the driver reports it per link, so open
//! problems of links stand for DCGM's report with the same code.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use contract::keys;

use super::{GpuNames, Health, Problem, ProblemChange};
use crate::catalog::{Catalog, Text};
use crate::gpu::dcgm::{DcgmEntity, DcgmGpu, DcgmIncident, DcgmLook, ImexUse};

/// Code of an incident without a name here, the same as NVSentinel's.
const UNKNOWN: &str = "DCGM_FR_UNKNOWN";
/// Code of a link that is down. DCGM also reports it for unconnected links, as on boards
/// without a bridge, and for links that were not up yet.
const LINK_DOWN: &str = "DCGM_FR_NVLINK_DOWN";
/// Longest description of one problem, in bytes: texts for eighteen links of a GPU fit.
const MAX_MESSAGE: usize = 4096;

/// State of DCGM's reports since it last became reachable.
#[derive(Debug, Default)]
pub(super) struct DcgmReports {
    /// Problems in the last poll.
    reported: BTreeSet<Problem>,
    /// Open problems that DCGM does not report at present, with the time since when.
    absent: BTreeMap<Problem, Duration>,
    /// Names of DCGM's GPUs, by key.
    names: BTreeMap<String, GpuNames>,
    /// Decides whether a report about IMEX counts.
    imex: ImexUse,
}

/// Devices that one poll covers.
struct Scope {
    /// Keys of the GPUs, by DCGM's number.
    gpus: BTreeMap<u32, String>,
    switches: BTreeSet<u32>,
}

impl Health {
    /// Evaluates a poll of DCGM's watches, and returns the changes, closed problems first.
    /// `now` is the time since the start of the process.
    pub fn take_dcgm(&mut self, look: &DcgmLook, now: Duration) -> Vec<ProblemChange> {
        let before = self.remembered.clone();
        let scope = self.record_dcgm_gpus(look);
        let mut reported = scope.problems(look, self.dcgm.imex);
        reported.retain(|problem, _| self.is_plausible(problem));
        let mut messages = BTreeMap::new();
        for (problem, message) in &reported {
            self.dcgm.absent.remove(problem);
            let links = self.links_of(problem);
            if links.is_empty() {
                if self.remembered.dcgm.insert(problem.clone()) {
                    messages.insert(problem.clone(), message.clone());
                }
            } else if !self.dcgm.reported.contains(problem) {
                messages.extend(links.into_iter().map(|link| (link, message.clone())));
            }
        }
        if look.is_whole {
            self.end_absent(&scope, &reported, now);
        }
        self.dcgm.reported = reported.into_keys().collect();
        self.changes(&before, &messages)
    }

    /// Sets whether pods rely on IMEX. When none does, DCGM's problems of IMEX close at once,
    /// and the changes are marked as unjudged: IMEX may still be broken or stopped, which then
    /// matters to no pod.
    pub fn imex_is(&mut self, imex: ImexUse) -> Vec<ProblemChange> {
        self.dcgm.imex = imex;
        if imex != ImexUse::Unused {
            return Vec::new();
        }
        let before = self.remembered.clone();
        (self.remembered.dcgm).retain(|problem| problem.check != keys::CHECK_GPU_IMEX);
        (self.dcgm.reported).retain(|problem| problem.check != keys::CHECK_GPU_IMEX);
        let mut changes = self.changes(&before, &BTreeMap::new());
        for change in &mut changes {
            (change.is_all_well, change.is_unjudged) = (false, true);
        }
        changes
    }

    /// Handles that DCGM does not answer: nothing closes meanwhile.
    pub fn dcgm_is_away(&mut self) {
        self.dcgm.reported.clear();
        self.dcgm.absent.clear();
    }

    /// Closes DCGM's problems, because DCGM is not polled now. Returns their codes.
    pub fn forget_dcgm(&mut self) -> Vec<Text> {
        let open = std::mem::take(&mut self.remembered.dcgm);
        open.into_iter().map(|problem| problem.code).collect()
    }

    /// Returns the codes that DCGM reports for a GPU, by its UUID.
    pub fn dcgm_codes(&self, uuid: &str) -> impl Iterator<Item = &Text> {
        let open = self.remembered.dcgm.iter();
        let of_gpu = open.filter(move |problem| problem.gpu == uuid);
        of_gpu.map(|problem| &problem.code)
    }

    /// Closes problems within the poll's scope that DCGM has not reported for long enough.
    fn end_absent(&mut self, scope: &Scope, reported: &BTreeMap<Problem, String>, now: Duration) {
        let calm = Duration::from_secs(self.limits.dcgm_calm_seconds.into());
        // While it is unknown whether IMEX counts, its problems stay open.
        let is_judged = |problem: &Problem| {
            problem.check != keys::CHECK_GPU_IMEX || self.dcgm.imex == ImexUse::Used
        };
        let is_absent = |problem: &&Problem| {
            !reported.contains_key(*problem) && scope.covers(problem) && is_judged(problem)
        };
        let absent: Vec<Problem> = (self.remembered.dcgm.iter().filter(is_absent))
            .cloned()
            .collect();
        let before = std::mem::take(&mut self.dcgm.absent);
        for problem in absent {
            let since = before.get(&problem).copied().unwrap_or(now);
            // Closing the GPU's problem would close those of its links too.
            if now.saturating_sub(since) >= calm && self.links_of(&problem).is_empty() {
                self.remembered.dcgm.remove(&problem);
            } else {
                self.dcgm.absent.insert(problem, since);
            }
        }
    }

    /// Returns true if a problem is plausible. "Link down" is not if the driver has reported no
    /// link of the GPU as up in this boot.
    fn is_plausible(&self, problem: &Problem) -> bool {
        let known = self.remembered.gpus.get(&problem.gpu);
        problem.code != LINK_DOWN || known.is_none_or(|known| !known.links_up.is_empty())
    }

    /// Records the names of DCGM's GPUs, and returns the poll's scope.
    fn record_dcgm_gpus(&mut self, look: &DcgmLook) -> Scope {
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

    /// Returns the names of a GPU of DCGM; the driver's names if it knows the GPU.
    fn names_of(&self, gpu: &DcgmGpu) -> GpuNames {
        let is_known = |names: &&GpuNames| match (&gpu.uuid, &gpu.pci) {
            (Some(_), _) => names.uuid == gpu.uuid,
            (None, Some(_)) => names.pci == gpu.pci,
            (None, None) => names.index == gpu.index.unwrap_or(gpu.id),
        };
        let mut known = self.remembered.gpus.values().map(|known| &known.names);
        let names = || GpuNames {
            index: gpu.index.unwrap_or(gpu.id),
            uuid: gpu.uuid.clone(),
            pci: gpu.pci.clone(),
            serial: None,
            chassis_serial: None,
        };
        known.find(is_known).cloned().unwrap_or_else(names)
    }

    /// Returns the driver's open problems of links that correspond to this problem of their
    /// GPU.
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

// === impl DcgmReports ===

impl DcgmReports {
    /// Returns whether reports about IMEX count, from any source.
    pub(super) fn imex(&self) -> ImexUse {
        self.imex
    }

    /// Returns the names of a GPU by its key.
    pub(super) fn names(&self, key: &str) -> Option<&GpuNames> {
        self.names.get(key)
    }

    /// Returns true if the last poll reported this problem, or the same for the GPU of the
    /// link.
    pub(super) fn reports(&self, problem: &Problem) -> bool {
        let whole = Problem {
            link: None,
            ..problem.clone()
        };
        self.reported.contains(problem) || self.reported.contains(&whole)
    }

    /// Resets the state after a reboot.
    pub(super) fn boot_has_begun(&mut self) {
        self.reported.clear();
        self.absent.clear();
    }
}

// === impl Scope ===

impl Scope {
    /// Returns the problems in a poll, with their descriptions.
    fn problems(&self, look: &DcgmLook, imex: ImexUse) -> BTreeMap<Problem, String> {
        let mut reported: BTreeMap<Problem, String> = BTreeMap::new();
        for incident in look.incidents.iter().filter(|it| it.is_judged(imex)) {
            let (problem, message) = self.problem(incident);
            let text = reported.entry(problem).or_default();
            if text.contains(&message) || text.len() + message.len() > MAX_MESSAGE {
                continue;
            }
            if !text.is_empty() {
                text.push_str("; ");
            }
            text.push_str(&message);
        }
        reported
    }

    /// Converts an incident to a problem and its description.
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

    /// Returns true if the poll covers the problem's device.
    fn covers(&self, problem: &Problem) -> bool {
        match problem.switch {
            Some(switch) => self.switches.contains(&switch),
            None => problem.gpu.is_empty() || self.gpus.values().any(|key| *key == problem.gpu),
        }
    }
}
