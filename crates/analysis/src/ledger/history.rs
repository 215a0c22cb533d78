//! Faults and repairs of a GPU or node.

use contract::{HealthEvent, effective_action_name, keys};
use diagnosis::fold::Sightings;
use jiff::{SignedDuration, Timestamp};
use model::event::{EventRecord, MAX_ACCEPTANCE_AGE, counts, floor_char_boundary, is_notice};
use serde::{Deserialize, Serialize};

/// Longest pause between two reports of one fault. After a longer one it is another fault.
pub const SAME_FAULT: SignedDuration = SignedDuration::from_hours(1);
/// Longest time between two events about one repair: a monitor reports a reboot once per check.
pub const SAME_REPAIR: SignedDuration = SignedDuration::from_mins(10);
/// Most faults of a GPU or node that are kept, and most repairs: the latest.
pub const MAX_KEPT_OF_HISTORY: usize = 64;
/// Longest check, code or action of a fault (bytes); the rest is cut off.
const MAX_TEXT_BYTES: usize = 128;

/// Faults and repairs of a GPU or node, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultHistory {
    /// Faults.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<PastFault>,
    /// Repairs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repairs: Vec<Repair>,
    /// True if older faults or repairs are left out, for there are more than
    /// [`MAX_KEPT_OF_HISTORY`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
}

/// Reports of a check and code on one node, no more than [`SAME_FAULT`] apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PastFault {
    /// Time of the last report.
    pub last: Timestamp,
    /// Time of the first report.
    pub first: Timestamp,
    /// Name of the node.
    pub node: String,
    /// Name of the check.
    pub check: String,
    /// Error codes, separated by commas; empty if there are none.
    pub code: String,
    /// True if a report was fatal.
    pub fatal: bool,
    /// Recommended action of the first report.
    pub action: String,
    /// Id of the event of the first report.
    pub event: String,
}

/// Repair of a GPU or node, as its log or monitor reports it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Repair {
    /// Time of the report.
    pub at: Timestamp,
    /// Name of the node.
    pub node: String,
    /// Kind of the repair.
    pub kind: RepairKind,
    /// True if the repair succeeded.
    pub succeeded: bool,
    /// Id of the event.
    pub event: String,
}

/// Kind of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RepairKind {
    /// Reset of the GPU.
    GpuReset,
    /// Reboot of the machine.
    Reboot,
}

// === impl FaultHistory ===

impl FaultHistory {
    /// Records what an event says of faults and repairs.
    pub(super) fn record(&mut self, record: &EventRecord) {
        if let Some(repair) = repair(record) {
            self.add_repair(repair);
        }
        if is_fault(&record.event) {
            self.add_fault(fault(record));
        }
    }

    /// Adds the faults and repairs of another history of the same GPU.
    pub(super) fn merge(&mut self, other: Self) {
        other
            .faults
            .into_iter()
            .for_each(|fault| self.add_fault(fault));
        other
            .repairs
            .into_iter()
            .for_each(|repair| self.add_repair(repair));
        self.is_cut |= other.is_cut;
    }

    fn add_fault(&mut self, mut fault: PastFault) {
        self.faults.retain(|known| {
            let is_same = known.continues(&fault);
            if is_same {
                fault = fault.joined(known);
            }
            !is_same
        });
        self.faults.push(fault);
        self.faults.sort();
        self.is_cut |= cut(&mut self.faults);
    }

    fn add_repair(&mut self, mut repair: Repair) {
        self.repairs.retain(|known| {
            let is_same = (&known.node, known.kind, known.succeeded)
                == (&repair.node, repair.kind, repair.succeeded)
                && known.at.duration_since(repair.at).abs() <= SAME_REPAIR;
            if is_same {
                repair = repair.clone().min(known.clone());
            }
            !is_same
        });
        self.repairs.push(repair);
        self.repairs.sort();
        self.is_cut |= cut(&mut self.repairs);
    }
}

// === impl PastFault ===

impl PastFault {
    /// Returns true if two reports, or spans of reports, are of one fault.
    fn continues(&self, other: &Self) -> bool {
        let gap = self
            .first
            .max(other.first)
            .duration_since(self.last.min(other.last));
        (&self.node, &self.check, &self.code) == (&other.node, &other.check, &other.code)
            && gap <= SAME_FAULT
    }

    fn joined(&self, other: &Self) -> Self {
        let first = if (self.first, &self.event) <= (other.first, &other.event) {
            self
        } else {
            other
        };
        Self {
            last: self.last.max(other.last),
            fatal: self.fatal || other.fatal,
            ..first.clone()
        }
    }
}

// === impl RepairKind ===

impl RepairKind {
    /// Returns the words for people.
    pub fn text(self) -> &'static str {
        match self {
            Self::GpuReset => "GPU reset",
            Self::Reboot => "reboot",
        }
    }
}

/// Returns true if an event reports a fault. A notice is none: it is about a program.
pub(super) fn is_fault(event: &HealthEvent) -> bool {
    !event.is_healthy && counts(event) && !is_notice(event)
}

fn fault(record: &EventRecord) -> PastFault {
    let event = &record.event;
    let seen = Sightings::of(event, record.created_at);
    let last = credible(seen.last, record.created_at);
    let mut code = event.error_code.join(",");
    let (mut check, mut action) = (
        event.check_name.clone(),
        effective_action_name(event).into_owned(),
    );
    for text in [&mut code, &mut check, &mut action] {
        text.truncate(floor_char_boundary(text, MAX_TEXT_BYTES));
    }
    PastFault {
        last,
        first: credible(seen.first, record.created_at).min(last),
        node: event.node_name.clone(),
        check,
        code,
        fatal: event.is_fatal,
        action,
        event: record.id.clone(),
    }
}

/// Returns the repair that an event reports.
pub(super) fn repair(record: &EventRecord) -> Option<Repair> {
    let event = &record.event;
    let has = |key| event.metadata.contains_key(key);
    let of_log = event.agent == keys::SYSLOG_AGENT && event.check_name == keys::CHECK_XID;
    let failed = [keys::CODE_GPU_RESET_FAILURE.to_owned()];
    let (kind, succeeded) = if event.is_healthy && has(keys::META_REBOOT) {
        (RepairKind::Reboot, true)
    } else if of_log && event.is_healthy && event.error_code.is_empty() {
        (RepairKind::GpuReset, true)
    } else if of_log && !event.is_healthy && event.error_code == failed {
        (RepairKind::GpuReset, false)
    } else {
        return None;
    };
    Some(Repair {
        at: credible(
            Sightings::of(event, record.created_at).last,
            record.created_at,
        ),
        node: event.node_name.clone(),
        kind,
        succeeded,
        event: record.id.clone(),
    })
}

/// Returns a time that a sender states, or the time of acceptance if the sender's clock must be
/// wrong.
fn credible(stated: Timestamp, accepted: Timestamp) -> Timestamp {
    let age = accepted.duration_since(stated);
    if age.is_negative() || age > MAX_ACCEPTANCE_AGE {
        accepted
    } else {
        stated
    }
}

/// Removes the first items of a sorted list that has too many. Returns true if it had.
fn cut<T>(list: &mut Vec<T>) -> bool {
    let above = list.len().saturating_sub(MAX_KEPT_OF_HISTORY);
    list.drain(..above);
    above > 0
}
