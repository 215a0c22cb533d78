//! Status of an event in its record: `nodequarantined`, `userpodsevictionstatus` ([`eviction`])
//! and `faultremediated`, in NVSentinel's `healtheventstatus`.

use jiff::Timestamp;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use serde::{Deserialize, Serialize};

pub mod eviction;

use eviction::Eviction;

/// A value of `nodequarantined`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeQuarantined {
    /// The event took the node out of service.
    Quarantined,
    /// The node was out of service already, or still is.
    AlreadyQuarantined,
    /// The event gave the node back.
    UnQuarantined,
    /// The quarantine ended without a recovery: by hand, or because no rule asks for it.
    Cancelled,
}

/// Status of an event, as stored with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventStatus {
    /// `nodequarantined`; `None` before the first decision.
    pub node_quarantined: Option<NodeQuarantined>,
    /// `quarantinefinishtimestamp`: time of that decision.
    pub quarantine_finished_at: Option<Timestamp>,
    /// `userpodsevictionstatus`: progress of the eviction of pods from the event's node; `None`
    /// before the first decision about it.
    pub pods_eviction: Option<Eviction>,
    /// `drainfinishtimestamp`: end of the drain.
    pub drain_finished_at: Option<Timestamp>,
    /// `faultremediated`: true if the fault was remediated; `None` before that was decided.
    pub fault_remediated: Option<bool>,
    /// `lastremediationtimestamp`: time of the last attempt.
    pub last_remediation_at: Option<Timestamp>,
}

/// Parses the name of a status: the inverse of its `name`. Returns `None` for an unknown name.
pub fn parse<T: for<'a> Deserialize<'a>>(name: &str) -> Option<T> {
    let name = IntoDeserializer::<Error>::into_deserializer(name);
    T::deserialize(name).ok()
}

// === impl NodeQuarantined ===

impl NodeQuarantined {
    /// Returns the value in the record.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quarantined => "Quarantined",
            Self::AlreadyQuarantined => "AlreadyQuarantined",
            Self::UnQuarantined => "UnQuarantined",
            Self::Cancelled => "Cancelled",
        }
    }

    /// Returns the status of a report or recovery that came in a session.
    pub fn of_report(gave_back: bool) -> Self {
        if gave_back {
            Self::UnQuarantined
        } else {
            Self::AlreadyQuarantined
        }
    }

    /// Returns whether an event with this status belongs to a quarantine that has not ended.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Quarantined | Self::AlreadyQuarantined)
    }
}
