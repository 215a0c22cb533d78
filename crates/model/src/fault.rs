//! Faults: the things that are broken, where, and since when.
//!
//! An event is a message; a fault is the state that it opens, refreshes or closes.
//! [`FaultBook`] is that state, a projection of the event log: recording the same
//! events in the same order gives the same book, in production as in replay.

mod book;
mod closed;
mod heard;
mod machine;
mod room;
mod share;

use contract::HealthEvent;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::event::is_notice;
use crate::position::Position;
use crate::reporter::Authority;

pub use diagnosis::subject::{Subject, heals, normalise_pci};

pub use book::{
    Change, FaultBook, Ignored, MAX_FAULT_BYTES_PER_NODE, MAX_FAULTY_NODES,
    MAX_OPEN_FAULTS_PER_NODE, is_mended_by_reboot,
};
pub use closed::may_be_before;
pub use closed::{CLOSED_FOR, MAX_CLOSED_PER_NODE, REQUESTS_APART};
pub use machine::{Machine, Origin};
pub use room::Rereading;
pub use share::NodeShare;

/// Time for which a notice is shown after its last report.
pub const NOTICE_SHOWN: SignedDuration = SignedDuration::from_hours(24);

/// A fault that is open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// Monitor that reported it.
    pub agent: String,
    /// Check that found it.
    pub check: String,
    /// The authority of those who report it.
    pub authority: Authority,
    /// Its code, for example `79`; empty where the check gives none.
    pub code: String,
    /// The device or other resource that is broken.
    pub subject: Subject,
    /// The event that stands for it: the gravest so far.
    pub event: HealthEvent,
    /// Size of that event in its binary form.
    bytes: usize,
    /// Id of the event that opened it: stays while the fault is open.
    pub opened_by: String,
    /// Feed position of that event.
    pub seq: Position,
    /// The time at which the fault was first observed.
    pub first_seen: Timestamp,
    /// The time at which the fault was last observed.
    pub last_seen: Timestamp,
    /// Number of reports since it opened; one event may stand for many.
    pub count: u64,
    /// The time at which the newest of these events was accepted. Compared with the end of a
    /// session: an older fault never starts another one.
    pub accepted_at: Timestamp,
    /// The machine that the newest of these events is of.
    pub origin: Origin,
}

// === impl Fault ===

impl Fault {
    /// Returns a short name for people: `SysLogsXIDError 79 on PCI 0000:b3:00`.
    pub fn title(&self) -> String {
        title(&self.check, &self.code, &self.subject.to_string())
    }

    /// Returns whether a person who released the node at `released_at` has dismissed it: no newer
    /// report has come since.
    pub fn dismissed(&self, released_at: Timestamp) -> bool {
        self.accepted_at <= released_at
    }

    /// Returns until when it is shown, where it is a notice.
    pub fn notice_until(&self) -> Option<Timestamp> {
        let until = self.accepted_at.checked_add(NOTICE_SHOWN);
        is_notice(&self.event).then(|| until.unwrap_or(Timestamp::MAX))
    }

    /// Orders faults by gravity, gravest first: fatal before non-fatal, then what monitors report
    /// before what users may have made up, then the older one.
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

/// Returns what is said of a node about which reports found no room.
pub fn not_fully_seen(missed: u64) -> String {
    format!(
        "{missed} reports found no room among its open faults, so it is not fully seen; they are \
         read again when there is room"
    )
}
