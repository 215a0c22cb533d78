//! Notices that the agents have read at the metadata service of their machine.
//!
//! Nothing is stored here: an agent tells all its notices again and again, and the book has what was
//! told before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use contract::json::timestamp;
use contract::node::{MaintenanceNotice, ReportMaintenanceRequest};
use notices::{Kind, Notice, Phase, Reading, Record};

/// Name of the source.
pub(super) const SOURCE: &str = "metadata-service";
/// Most notices of a machine.
const MAX_NOTICES: usize = 100;
/// Longest text of a notice (bytes).
const MAX_TEXT: usize = 1024;

/// Notices of all machines. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct MachineNotices(Arc<Mutex<Machines>>);

#[derive(Debug, Default)]
struct Machines {
    /// Notices by node.
    told: BTreeMap<String, Vec<Notice>>,
    /// Ids of the maintenances that may begin, by node.
    may_begin: BTreeMap<String, BTreeSet<String>>,
}

// === impl MachineNotices ===

impl MachineNotices {
    /// Takes the report of a node. Returns the ids of the maintenances that may begin. The error
    /// describes an invalid report.
    pub fn handle(&self, report: &ReportMaintenanceRequest) -> Result<Vec<String>, String> {
        if report.notices.len() > MAX_NOTICES {
            let found = report.notices.len();
            return Err(format!(
                "the report has {found} notices, at most {MAX_NOTICES} are taken"
            ));
        }
        let node = &report.node_name;
        let numbered = report.notices.iter().enumerate();
        let notices = numbered
            .map(|(index, one)| notice(node, one).map_err(|why| format!("notices[{index}].{why}")));
        let notices: Vec<Notice> = notices.collect::<Result<_, _>>()?;
        let mut machines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        machines.told.insert(node.clone(), notices);
        let may_begin = machines.may_begin.get(node).into_iter().flatten();
        Ok(may_begin.cloned().collect())
    }

    /// Returns the notices of the given nodes, and forgets those of others. `records` are those of
    /// the book: a node with a record that has not told anything yet is unseen.
    pub(super) fn reading(&self, is_node: impl Fn(&str) -> bool, records: &[Record]) -> Reading {
        let mut machines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        machines.told.retain(|node, _| is_node(node));
        let ours = records.iter().filter(|record| record.source == SOURCE);
        let untold = ours.filter(|record| !machines.told.contains_key(&record.node));
        Reading {
            unseen: untold.map(|record| record.node.clone()).collect(),
            notices: machines.told.values().flatten().cloned().collect(),
            complete: true,
        }
    }

    /// Sets the maintenances that may begin, by node.
    pub(super) fn set_may_begin(&self, may_begin: BTreeMap<String, BTreeSet<String>>) {
        let mut machines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        machines.may_begin = may_begin;
    }
}

/// Reads a notice of a report. The error names the field.
fn notice(node: &str, told: &MaintenanceNotice) -> Result<Notice, String> {
    for (field, text) in [
        ("event", &told.event),
        ("provider", &told.provider),
        ("resource_type", &told.resource_type),
        ("resource_id", &told.resource_id),
        ("word", &told.word),
    ] {
        if text.len() > MAX_TEXT {
            let length = text.len();
            return Err(format!(
                "{field}: {length} bytes, at most {MAX_TEXT} are taken"
            ));
        }
    }
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == told.kind);
    let kind = kind.ok_or_else(|| format!("kind: {:?} is unknown", told.kind))?;
    let mut phases = Phase::ALL.into_iter();
    let phase = phases.find(|phase| phase.name() == told.phase);
    let phase = phase.ok_or_else(|| format!("phase: {:?} is unknown", told.phase))?;
    // A begin that is lost would take the node out at once.
    let start = told
        .start
        .map(|time| timestamp(time).ok_or("start: no time"));
    let end = told.end.map(|time| timestamp(time).ok_or("end: no time"));
    Ok(Notice {
        node: node.to_owned(),
        event: told.event.clone(),
        provider: told.provider.clone(),
        resource: (told.resource_type.clone(), told.resource_id.clone()),
        kind,
        phase,
        word: told.word.clone(),
        start: start.transpose()?,
        end: end.transpose()?,
        emergency: told.emergency,
        updated: None,
    })
}

#[cfg(test)]
mod tests;
