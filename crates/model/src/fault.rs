//! Faults: what is broken, on which node and device, and since when.
//!
//! An event is a message; a fault is the state that events open, refresh and close.
//! [`FaultBook`] holds that state as a projection of the event log: recording the same events
//! in the same order gives the same book, in production and in replay.

mod book;
mod capacity;
mod causes;
mod closed;
mod incidents;
mod machine;
mod reported_checks;
mod share;

use contract::HealthEvent;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::event::is_notice;
use crate::position::Position;
use crate::reporter::Authority;

pub use diagnosis::subject::{Subject, heals, normalise_pci};

pub use book::{
    FaultBook, FaultChange, Ignored, MAX_FAULT_BYTES_PER_NODE, MAX_FAULTY_NODES,
    MAX_OPEN_FAULTS_PER_NODE, clears_on_reboot,
};
pub use capacity::Rereading;
pub use causes::{Cause, WAIT_FOR_PRIMARY};
pub use closed::may_be_before;
pub use closed::{CLOSED_FOR, MAX_CLOSED_PER_NODE, REQUESTS_APART};
pub use machine::{Machine, Origin};
pub use share::NodeShare;

/// Time from the last report until a notice is no longer displayed.
pub const NOTICE_SHOWN: SignedDuration = SignedDuration::from_hours(24);

/// A fault that is open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// Monitor that reports the fault.
    pub agent: String,
    /// Check that found the fault.
    pub check: String,
    /// Authority of the fault's reporters.
    pub authority: Authority,
    /// Error code, for example `79`. Empty if the check gives none.
    pub code: String,
    /// Broken device or other resource.
    pub subject: Subject,
    /// Event that stands for the fault: the gravest so far.
    pub event: HealthEvent,
    /// Size of `event` in its binary form.
    bytes: usize,
    /// Id of the event that opened the fault. Does not change while the fault is open.
    pub opened_by: String,
    /// Feed position of the event that opened the fault.
    pub seq: Position,
    /// Time of the first observation.
    pub first_seen: Timestamp,
    /// Time of the last observation.
    pub last_seen: Timestamp,
    /// Number of reports since the fault opened. One event may stand for many reports.
    pub count: u64,
    /// Time when the newest report was accepted. A fault with no report since the end of a
    /// session starts no new session.
    pub accepted_at: Timestamp,
    /// Machine that the newest report is about.
    pub origin: Origin,
    /// Primary that explains the fault; see `fault/causes.rs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    /// Id of the incident that the fault belongs to; see `fault/incidents.rs`.
    #[serde(default)]
    pub incident: String,
}

// === impl Fault ===

impl Fault {
    /// Returns a short name for people: `SysLogsXIDError 79 on PCI 0000:b3:00`.
    pub fn title(&self) -> String {
        title(&self.check, &self.code, &self.subject.to_string())
    }

    /// Returns whether a person who released the node at `released_at` has dismissed the fault:
    /// no report was accepted since.
    pub fn dismissed(&self, released_at: Timestamp) -> bool {
        self.accepted_at <= released_at
    }

    /// Returns the time until which the fault is displayed, if it is a notice.
    pub fn notice_until(&self) -> Option<Timestamp> {
        let until = self.accepted_at.checked_add(NOTICE_SHOWN);
        is_notice(&self.event).then(|| until.unwrap_or(Timestamp::MAX))
    }

    /// Orders faults by gravity, gravest first: fatal before non-fatal, then reports of
    /// monitors before those of users, which may be invented, then older before newer.
    pub fn by_gravity(a: &Self, b: &Self) -> std::cmp::Ordering {
        (b.event.is_fatal.cmp(&a.event.is_fatal))
            .then(b.authority.cmp(&a.authority))
            .then(a.first_seen.cmp(&b.first_seen))
            .then_with(|| a.event.id.cmp(&b.event.id))
    }
}

/// Returns a short name of a fault for people: `SysLogsXIDError 79 on PCI 0000:b3:00`.
pub fn title(check: &str, code: &str, subject: &str) -> String {
    let blank = if code.is_empty() { "" } else { " " };
    format!("{check}{blank}{code} on {subject}")
}

/// Returns the message about a node with `missed` reports that exceeded the limit of open
/// faults.
pub fn not_fully_seen(missed: u64) -> String {
    format!(
        "{missed} reports exceeded the limit of open faults, so the list of faults is incomplete; \
         they are read again when there is room"
    )
}
