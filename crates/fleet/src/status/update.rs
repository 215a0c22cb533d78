//! Updates of the records of events.

use std::collections::BTreeMap;

use jiff::Timestamp;
use model::status::eviction::Eviction;
use model::status::{EventStatus, NodeQuarantined, SessionChange, SessionEvent};
use serde::{Deserialize, Serialize};

use super::Report;

/// An update of the records of events. A repeated one does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StatusUpdate {
    /// Event that joins a session.
    Event(SessionEvent),
    /// Change of a session, for the records of all its events.
    Session {
        /// Name of the node.
        node: String,
        /// Id of the session.
        session: String,
        /// Change of the session.
        change: SessionChange,
    },
    /// End of a session. [`SessionEnd::settle`] returns the updates that follow.
    Ended(SessionEnd),
}

/// End of a session, with the reports that are not assigned to a session yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionEnd {
    /// Name of the node.
    pub node: String,
    /// Id of the session. `None` if there was none, as far as this process knows: a crash may
    /// have hidden the session that the recoveries among the reports ended.
    pub session: Option<String>,
    /// True if the drain had ended before.
    pub drained: bool,
    /// True if a person ended the session. A recovery that came later ended nothing.
    pub by_hand: bool,
    /// Reports in order of arrival.
    pub reports: Vec<Report>,
    /// Time of the observation.
    pub at: Timestamp,
}

// === impl StatusUpdate ===

impl StatusUpdate {
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Event(_) | Self::Session { .. } => 1,
            Self::Ended(end) => end.reports.len().max(1),
        }
    }
}

// === impl SessionEnd ===

impl SessionEnd {
    /// Returns the ids of the events whose statuses [`Self::settle`] needs.
    pub fn ids(&self) -> Vec<String> {
        let faults = self.reports.iter().flat_map(|report| &report.faults);
        faults.chain(&self.session).cloned().collect()
    }

    /// Returns the updates that follow. A report belongs to the session if one of its faults
    /// does, by its status in `known`. The last such recovery has given the node back; without
    /// one, the session is cancelled.
    pub fn settle(&self, known: &BTreeMap<String, EventStatus>) -> Vec<StatusUpdate> {
        let opener = self.session.as_ref().and_then(|id| known.get(id));
        let begun = opener.and_then(|opener| opener.quarantine_finished_at);
        if begun.is_some_and(|begun| begun > self.at) {
            return Vec::new(); // The same event has begun another session since.
        }
        let session_of = |report: &Report| {
            let mut faults = report.faults.iter().filter_map(|id| known.get(id));
            let open = faults.find(|fault| {
                let is_ours = self.session.is_none() || fault.session == self.session;
                is_ours && fault.node_quarantined.is_some_and(NodeQuarantined::is_open)
            });
            open.and_then(|fault| fault.session.clone())
        };
        let counts = |report: &&Report| !(self.by_hand && report.healthy);
        let ours: Vec<(&Report, String)> = (self.reports.iter().filter(counts))
            .filter_map(|report| Some((report, session_of(report)?)))
            .collect();
        let last = ours.iter().rposition(|(report, _)| report.healthy);
        let change = |change| {
            let session = self.session.clone()?;
            let node = self.node.clone();
            Some(StatusUpdate::Session {
                node,
                session,
                change,
            })
        };
        let mut updates = Vec::new();
        if !self.drained {
            let drain = SessionChange::Drain(Eviction::cancelled(), self.at);
            updates.extend(change(drain));
        }
        for (index, (report, session)) in ours.into_iter().enumerate() {
            let status = if Some(index) == last {
                NodeQuarantined::UnQuarantined
            } else {
                NodeQuarantined::AlreadyQuarantined
            };
            let eviction = if report.healthy {
                Eviction::of_recovery(status)
            } else {
                Eviction::cancelled()
            };
            updates.push(StatusUpdate::Event(SessionEvent {
                id: report.id.clone(),
                session,
                status,
                at: self.at,
                eviction: Some(eviction),
            }));
        }
        if last.is_none() {
            updates.extend(change(SessionChange::Cancelled));
        }
        updates
    }
}
