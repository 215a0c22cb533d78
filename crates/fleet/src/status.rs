//! Status of each event in its record ([`model::status`]).
//!
//! The values are NVSentinel's: `Quarantined` for the event that took its node out,
//! `AlreadyQuarantined` for further events of the same session (a partial recovery, too),
//! `UnQuarantined` for the recovery that gave the node back, `Cancelled` for all events of a
//! session that ended without one. An event that takes no part in a quarantine has no status.
//!
//! The node and the open faults decide: [`Reports::update`] derives the updates from them, and
//! [`SessionEnd::settle`] those of a session's end, for which the statuses so far are read from the
//! store. The record of an event carries the id of its session, so that the later changes of a
//! session need no list of its events. After a restart everything is derived again, and a record
//! keeps the status that it has in the session; so an update that a crash prevented is made up
//! for, and a repeated one does no harm.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use contract::{HealthEvent, keys};
use jiff::Timestamp;
use model::attempt::{RemediationMark, RemediationProgress};
use model::fault::Fault;
use model::ownership::Ownership;
use model::status::eviction::Eviction;
use model::status::{NodeQuarantined, SessionChange, SessionEvent};
use policy::assess::Desired;
use serde::{Deserialize, Serialize};

use crate::session::ObservedNode;

mod update;

pub use update::{SessionEnd, StatusUpdate};

/// Most events of a node that wait for their status; the oldest goes without one then. One page
/// of the feed has as many.
pub const MAX_REPORTS: usize = 1_000;
/// Most faults remembered per waiting event, the gravest: those that ask for a quarantine are
/// among them.
pub const MAX_REPORT_FAULTS: usize = 16;

/// Events of a node that wait for their status, and the state needed to derive it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reports {
    /// Waiting events, in order of arrival.
    waiting: VecDeque<Report>,
    /// Session on the node at the last look. [`Self::restore`] sets it after a restart.
    #[serde(skip)]
    session: Option<Derived>,
    /// Updates since the last save, repeated after a crash, except those of whole sessions, which
    /// are derived again.
    #[serde(default)]
    updates: Vec<StatusUpdate>,
}

/// Session on a node, with the updates derived so far. After a restart they are derived anew.
#[derive(Clone, Debug, Default, PartialEq)]
struct Derived {
    /// Id of the session.
    id: String,
    /// Ids of its events.
    events: BTreeSet<String>,
    /// Progress of the drain.
    drain: Option<Eviction>,
    /// Progress of the remediation.
    progress: Option<RemediationProgress>,
}

/// An event that waits for its status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Id of the event.
    pub id: String,
    /// True if the event is a recovery.
    pub healthy: bool,
    /// Ids of the events that stand for the faults which it reports or closes.
    pub faults: Vec<String>,
}

// === impl Reports ===

impl Reports {
    /// Adds an event that reports `faults`, or closes them if it is healthy.
    pub fn add(&mut self, id: &str, healthy: bool, mut faults: Vec<&Fault>) {
        if faults.is_empty() {
            return;
        }
        if self.waiting.len() >= MAX_REPORTS {
            self.waiting.pop_front();
        }
        faults.sort_by(|a, b| Fault::by_gravity(a, b));
        let ids = faults.into_iter().map(|fault| &fault.event.id);
        let ids: BTreeSet<&String> = ids.take(MAX_REPORT_FAULTS).collect();
        self.waiting.push_back(Report {
            id: id.to_owned(),
            healthy,
            faults: ids.into_iter().cloned().collect(),
        });
    }

    /// Derives the status updates to write, from the node, what is desired for it, and the
    /// progress of its drain.
    pub fn update(
        &mut self,
        observed: &ObservedNode,
        desired: &Desired,
        drain: Option<Eviction>,
        at: Timestamp,
    ) -> Vec<StatusUpdate> {
        // If only devices are out, nothing is written: other programs drain nodes by these
        // statuses.
        let own = (observed.own.as_deref()).filter(|own| own.takes_node_out());
        let node = &observed.view.name;
        let is_over = |session: &mut Derived| own.is_none_or(|own| own.session_id != session.id);
        let ended = self.session.take_if(is_over);
        let mut updates = Vec::new();
        if own.is_none() || ended.is_some() {
            let marks = [keys::UNCORDONED_MANUALLY, keys::UNTAINTED_MANUALLY];
            let by_hand = (marks.iter()).any(|mark| observed.view.annotations.contains_key(*mark));
            updates.extend(self.end(node, ended, by_hand, at));
        }
        match own {
            Some(own) => self.derive(node, own, desired, drain, at, &mut updates),
            // Reports wait for a quarantine that is on its way.
            None if desired.takes_node_out() => self.waiting.retain(|report| !report.healthy),
            None => self.waiting.clear(),
        }
        let is_of_event = |update: &&StatusUpdate| !matches!(update, StatusUpdate::Session { .. });
        self.updates
            .extend(updates.iter().filter(is_of_event).cloned());
        // The oldest is the most likely to be in its record.
        while self.updates.iter().map(StatusUpdate::size).sum::<usize>() > MAX_REPORTS {
            self.updates.remove(0);
        }
        updates
    }

    /// Returns the update for the end of a session, or for recoveries without a session.
    fn end(
        &self,
        node: &str,
        ended: Option<Derived>,
        by_hand: bool,
        at: Timestamp,
    ) -> Option<StatusUpdate> {
        let reports = self.waiting.iter();
        let reports: Vec<Report> = (reports.filter(|report| ended.is_some() || report.healthy))
            .cloned()
            .collect();
        if ended.is_none() && reports.is_empty() {
            return None;
        }
        let drain = ended.as_ref().and_then(|ended| ended.drain.as_ref());
        Some(StatusUpdate::Ended(SessionEnd {
            node: node.to_owned(),
            drained: drain.is_some_and(|drain| drain.status.is_final()),
            session: ended.map(|ended| ended.id),
            by_hand,
            reports,
            at,
        }))
    }

    /// Adds the updates for the session on the node.
    fn derive(
        &mut self,
        node: &str,
        own: &Ownership,
        desired: &Desired,
        drain: Option<Eviction>,
        at: Timestamp,
        updates: &mut Vec<StatusUpdate>,
    ) {
        let session = self.session.get_or_insert_with(|| Derived {
            id: own.session_id.clone(),
            // The events of a new session get it with their own status.
            drain: drain.clone().filter(|_| own.mark.drain.is_none()),
            ..Derived::default()
        });
        let event = |id: &str, status, eviction| {
            StatusUpdate::Event(SessionEvent {
                id: id.to_owned(),
                session: own.session_id.clone(),
                status,
                at,
                eviction,
            })
        };
        let change = |change| StatusUpdate::Session {
            node: node.to_owned(),
            session: own.session_id.clone(),
            change,
        };
        let of_newcomer = |skips| drain.as_ref().map(|drain| drain.of_newcomer(skips));
        let wanted = desired.events.iter().map(|counted| &counted.event);
        let events: BTreeMap<&String, &HealthEvent> = (own.events.iter().chain(wanted))
            .map(|event| (&event.id, event))
            .collect();
        for (id, fault) in &events {
            if session.events.contains(*id) {
                continue;
            }
            let status = if **id == own.session_id {
                NodeQuarantined::Quarantined
            } else {
                NodeQuarantined::AlreadyQuarantined
            };
            let skips = fault.drain_overrides.is_some_and(|one| one.skip);
            updates.push(event(id, status, of_newcomer(skips)));
        }
        session.events = events.into_keys().cloned().collect();
        // Otherwise the release is on its way, and decides what the recoveries were.
        if desired.takes_node_out() {
            let counts = |id: &String| session.events.contains(id);
            for report in std::mem::take(&mut self.waiting) {
                if report.faults.iter().any(counts) && !counts(&report.id) {
                    let status = NodeQuarantined::AlreadyQuarantined;
                    let eviction = if report.healthy {
                        Some(Eviction::of_recovery(status))
                    } else {
                        of_newcomer(false)
                    };
                    updates.push(event(&report.id, status, eviction));
                }
            }
        }
        if let Some(drain) = drain.filter(|drain| session.drain.as_ref() != Some(drain)) {
            session.drain = Some(drain.clone());
            updates.push(change(SessionChange::Drain(drain, at)));
        }
        let progress = (own.mark.remediation.as_ref()).and_then(RemediationMark::progress);
        if let Some(progress) =
            progress.filter(|progress| session.progress.as_ref() != Some(progress))
        {
            session.progress = Some(progress.clone());
            updates.push(change(SessionChange::Remediation(progress)));
        }
    }

    /// Drops the events of a node that is gone or belongs to another gpuwarden. Returns the
    /// update to write: our session on it has ended.
    pub fn forget(&mut self, node: &str, at: Timestamp) -> Option<StatusUpdate> {
        let mut before = std::mem::take(self);
        let session = before.session.take();
        before.end(node, session, false, at)
    }

    /// Returns whether nothing is worth saving.
    pub fn is_blank(&self) -> bool {
        self.waiting.is_empty() && self.updates.is_empty()
    }

    /// Records that the state is saved. Returns whether it is to be saved once more without the
    /// updates, which have gone to the writer by now.
    pub fn saved(&mut self) -> bool {
        !std::mem::take(&mut self.updates).is_empty()
    }

    /// Restores the session on the node, after a restart. Returns the updates to write.
    pub fn restore(&mut self, session: Option<String>) -> Vec<StatusUpdate> {
        self.session = session.map(|id| Derived {
            id,
            ..Derived::default()
        });
        self.updates.clone()
    }
}

#[cfg(test)]
mod tests;
