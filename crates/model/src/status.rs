//! Status of an event in its record: `nodequarantined`, `userpodsevictionstatus` ([`eviction`])
//! and `faultremediated`, in NVSentinel's `healtheventstatus`.
//!
//! An event that takes no part in a session has no status. One that does carries the session's
//! id beside its status, so that what happens to the session is one change of all its events.

use jiff::Timestamp;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use serde::{Deserialize, Serialize};

use crate::attempt::RemediationProgress;

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
    /// Id of the session that the event takes part in.
    pub session: Option<String>,
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
    /// Conclusions of the analysis that rest on the event, oldest first, at most [`MAX_NOTES`].
    pub analysis: Vec<ConclusionNote>,
}

/// Most conclusions that are noted with an event. Further ones are not.
pub const MAX_NOTES: usize = 16;

/// Conclusion of the analysis, as noted with each event that it rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConclusionNote {
    /// Name of the rule, which is the check of the conclusion's event.
    pub rule: String,
    /// Id of the conclusion, which its event has as `gpuwarden.dev/conclusion`.
    pub conclusion: String,
}

/// Event that takes part in a session from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionEvent {
    /// Id of the event.
    pub id: String,
    /// Id of the session.
    pub session: String,
    /// Part that the event takes.
    pub status: NodeQuarantined,
    /// Time when that was observed on the node.
    pub at: Timestamp,
    /// Progress of the drain at that time, for this event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<Eviction>,
}

/// Change of a session, for its events that are [open](NodeQuarantined::is_open).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionChange {
    /// Progress of the drain at a time. A final eviction status
    /// ([`EvictionStatus::is_final`](eviction::EvictionStatus::is_final)) stays.
    Drain(Eviction, Timestamp),
    /// Progress of the remediation, for the events that it covers
    /// ([`RemediationProgress::up_to`]). An event whose fault was remediated stays so.
    Remediation(RemediationProgress),
    /// The session ended without a recovery.
    Cancelled,
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

    /// Returns whether changes of the session apply to an event with this status.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Quarantined | Self::AlreadyQuarantined)
    }
}

// === impl EventStatus ===

impl EventStatus {
    /// Notes a conclusion that rests on the event, once. Returns whether that changed anything.
    pub fn note(&mut self, note: &ConclusionNote) -> bool {
        let is_new = self.analysis.len() < MAX_NOTES && !self.analysis.contains(note);
        if is_new {
            self.analysis.push(note.clone());
        }
        is_new
    }

    /// Makes the event part of a session. Does nothing if it is part of that session already and
    /// not `Cancelled`, or has been part of any since the same time or later.
    pub fn join(&mut self, event: SessionEvent) {
        let is_cancelled = self.node_quarantined == Some(NodeQuarantined::Cancelled);
        let is_new = is_cancelled || self.session.as_ref() != Some(&event.session);
        if !is_new || self.quarantine_finished_at >= Some(event.at) {
            return;
        }
        self.session = Some(event.session);
        self.node_quarantined = Some(event.status);
        self.quarantine_finished_at = Some(event.at);
        if let Some(eviction) = event.eviction {
            self.update_eviction(eviction, event.at);
        }
    }

    /// Applies a change of the session to the event, which was received at `received_at`.
    pub fn change(&mut self, change: &SessionChange, received_at: Timestamp) {
        if !self.node_quarantined.is_some_and(NodeQuarantined::is_open) {
            return;
        }
        match change {
            SessionChange::Drain(eviction, at) => {
                let before = self.pods_eviction.as_ref();
                if before.is_none_or(|before| !before.status.is_final()) {
                    self.update_eviction(eviction.clone(), *at);
                }
            }
            SessionChange::Remediation(progress) => {
                if received_at <= progress.up_to && self.fault_remediated != Some(true) {
                    self.fault_remediated = progress.remediated.or(self.fault_remediated);
                    self.last_remediation_at = progress.attempted_at.or(self.last_remediation_at);
                }
            }
            SessionChange::Cancelled => self.node_quarantined = Some(NodeQuarantined::Cancelled),
        }
    }

    fn update_eviction(&mut self, eviction: Eviction, at: Timestamp) {
        self.drain_finished_at = eviction.finished_at(at).or(self.drain_finished_at);
        self.pods_eviction = Some(eviction);
    }
}
