//! Status of each event in its record ([`model::status`]).
//!
//! The values are NVSentinel's: `Quarantined` for the event that took its node out,
//! `AlreadyQuarantined` for further events of the same session (a partial recovery, too),
//! `UnQuarantined` for the recovery that gave the node back, `Cancelled` for all events of a
//! session that ended without one. An event that takes no part in a quarantine has no status.
//!
//! Nothing is decided here: [`Reports::update`] derives the statuses from the node and the open
//! faults. After a restart they are derived again, and a record that has a status of this
//! quarantine keeps it; so an update that a crash prevented is made up for, and a repeated one
//! does no harm. [`StatusUpdate::Cancel`] is not repeated: it applies to the newest quarantine,
//! which may be another by then. [`StatusUpdate::Drain`] and [`StatusUpdate::RemediationProgress`] are
//! derived from the node again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use contract::{HealthEvent, keys};
use jiff::Timestamp;
use model::attempt::{RemediationMark, RemediationProgress};
use model::fault::Fault;
use model::ownership::Ownership;
use model::status::NodeQuarantined;
use model::status::eviction::Eviction;
use policy::assess::Desired;
use serde::{Deserialize, Serialize};

use crate::session::ObservedNode;

mod update;

pub use update::{EventStatus, EventStatuses, StatusUpdate};

/// Most events of a node that wait for their status; the oldest goes without one then. One page
/// of the feed has as many.
pub const MAX_REPORTS: usize = 1_000;
/// Most faults remembered per waiting event, the gravest: those that ask for a quarantine are
/// among them.
pub const MAX_REPORT_FAULTS: usize = 16;

/// Events of a node that wait for their status, and the state needed to derive it.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    /// Waiting events, in order of arrival.
    waiting: VecDeque<Report>,
    /// Id of the session on the node at the last look.
    session: Option<String>,
    /// Ids of the session's events, which have their status.
    counted: BTreeSet<String>,
    /// Progress of the drain in the last update.
    drain: Option<Eviction>,
    /// Progress of the remediation in the last update.
    progress: Option<RemediationProgress>,
    /// Updates of single events since the last save, repeated after a crash.
    updates: Vec<StatusUpdate>,
    /// True until the first look after a restore: the session's events are not known yet.
    restored: bool,
}

/// Saved part of the events of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedReports {
    /// Events that wait for their status.
    waiting: VecDeque<Report>,
    /// Updates that may not be in their records yet.
    #[serde(rename = "said")]
    updates: Vec<StatusUpdate>,
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
        let statuses = self.derive(observed, desired, drain, at);
        let new = statuses.iter().filter(|one| !one.is_of_session());
        self.updates.extend(new.cloned());
        // The oldest is the most likely to be in its record.
        while self.updates.iter().map(StatusUpdate::size).sum::<usize>() > MAX_REPORTS {
            self.updates.remove(0);
        }
        statuses
    }

    fn derive(
        &mut self,
        observed: &ObservedNode,
        desired: &Desired,
        drain: Option<Eviction>,
        at: Timestamp,
    ) -> Vec<StatusUpdate> {
        let mut statuses = Vec::new();
        // If only devices are out, nothing is written: other programs drain nodes by these
        // statuses.
        let own = (observed.own.as_deref()).filter(|own| own.takes_node_out());
        let session = own.map(|own| own.session_id.clone());
        let before = std::mem::replace(&mut self.session, session);
        let restored = std::mem::take(&mut self.restored);
        let marks = [keys::UNCORDONED_MANUALLY, keys::UNTAINTED_MANUALLY];
        let by_hand = (marks.iter()).any(|mark| observed.view.annotations.contains_key(*mark));
        let mut cancel = None;
        if before != self.session {
            let last_drain = self.drain.take();
            self.progress = None;
            // After a restart the newest quarantine may be that of the session on the node.
            if before.is_some() && !(restored && own.is_some()) {
                // The updates that end the quarantine come after this one, which needs it to
                // find the events.
                statuses.extend(StatusUpdate::end_of_drain(
                    &observed.view.name,
                    last_drain,
                    at,
                ));
            }
            if before.is_none() && own.is_some_and(|own| own.mark.drain.is_none()) {
                self.drain.clone_from(&drain); // The events get it with their own status.
            }
        }
        if before.is_some() && before != self.session {
            let unrecovered = self.end(by_hand, at, &mut statuses);
            let node = observed.view.name.clone();
            cancel = unrecovered.then_some(StatusUpdate::Cancel { node });
        }
        let Some(own) = own else {
            // A waiting recovery may belong to a session that ended unobserved; after a restart,
            // also to this one: it then ends the quarantine before it is cancelled.
            if by_hand || !restored {
                statuses.extend(cancel.take());
            }
            let (recoveries, reports) = self.take_waiting(|report| report.healthy);
            // Otherwise the quarantine is on its way.
            if desired.takes_node_out() {
                self.waiting = reports.into();
            }
            statuses.extend(StatusUpdate::of_recoveries(recoveries, at));
            statuses.extend(cancel);
            return statuses;
        };
        // After a restart the newest quarantine may be that of the session on the node.
        if !restored {
            statuses.extend(cancel);
        }
        self.count(own, desired, drain.as_ref(), at, &mut statuses);
        if let Some(eviction) = drain.filter(|drain| self.drain.as_ref() != Some(drain)) {
            self.drain = Some(eviction.clone());
            let node = observed.view.name.clone();
            statuses.push(StatusUpdate::Drain { node, eviction, at });
        }
        let progress = (own.mark.remediation.as_ref()).and_then(RemediationMark::progress);
        if let Some(progress) = progress.filter(|progress| self.progress.as_ref() != Some(progress))
        {
            self.progress = Some(progress.clone());
            let node = observed.view.name.clone();
            statuses.push(StatusUpdate::RemediationProgress { node, progress });
        }
        statuses
    }

    /// Adds the statuses of events that the session lists, or that are desired.
    fn count(
        &mut self,
        own: &Ownership,
        desired: &Desired,
        drain: Option<&Eviction>,
        at: Timestamp,
        statuses: &mut Vec<StatusUpdate>,
    ) {
        let wanted = desired.events.iter().map(|counted| &counted.event);
        let events: BTreeMap<&String, &HealthEvent> = (own.events.iter().chain(wanted))
            .map(|event| (&event.id, event))
            .collect();
        let skips = |id: &String| {
            let event = events.get(id).and_then(|event| event.drain_overrides);
            event.is_some_and(|overrides| overrides.skip)
        };
        let counted: BTreeSet<String> = events.keys().copied().cloned().collect();
        for id in counted.difference(&self.counted) {
            let status = if *id == own.session_id {
                NodeQuarantined::Quarantined
            } else {
                NodeQuarantined::AlreadyQuarantined
            };
            statuses.push(StatusUpdate::Event {
                id: id.clone(),
                status,
                at,
                eviction: drain.map(|drain| drain.of_newcomer(skips(id))),
            });
        }
        self.counted = counted;
        // Otherwise the release is on its way, and decides what the recoveries were.
        if desired.takes_node_out() {
            for report in std::mem::take(&mut self.waiting) {
                if self.counts(&report) && !self.counted.contains(&report.id) {
                    let status = NodeQuarantined::AlreadyQuarantined;
                    let eviction = if report.healthy {
                        Some(Eviction::of_recovery(status))
                    } else {
                        drain.map(|drain| drain.of_newcomer(false))
                    };
                    statuses.push(StatusUpdate::Event {
                        id: report.id,
                        status,
                        at,
                        eviction,
                    });
                }
            }
        }
    }

    /// Drops the events of a node that is gone or belongs to another gpuwarden. Returns the
    /// updates to write: our session on it has ended.
    pub fn forget(&mut self, node: &str, at: Timestamp) -> Vec<StatusUpdate> {
        let mut before = std::mem::take(self);
        let mut statuses = Vec::new();
        if before.restored {
            // One of these recoveries may have ended the session before the restart.
            let (recoveries, _) = before.take_waiting(|report| report.healthy);
            statuses.extend(StatusUpdate::of_recoveries(recoveries, at));
        }
        if before.session.is_some() {
            statuses.extend(StatusUpdate::end_of_drain(node, before.drain, at));
            let node = node.to_owned();
            statuses.push(StatusUpdate::Cancel { node });
        }
        statuses
    }

    /// Returns the state to save; `None` if there is nothing.
    pub fn to_save(&self) -> Option<SavedReports> {
        let is_empty = self.waiting.is_empty() && self.updates.is_empty();
        (!is_empty).then(|| SavedReports {
            waiting: self.waiting.clone(),
            updates: self.updates.clone(),
        })
    }

    /// Records that the state is saved. Returns whether it is to be saved once more without the
    /// updates, which have gone to the writer by now.
    pub fn saved(&mut self) -> bool {
        !std::mem::take(&mut self.updates).is_empty()
    }

    /// Restores the saved state, and the session on the node. Returns the updates to write.
    pub fn restore(&mut self, saved: SavedReports, session: Option<String>) -> Vec<StatusUpdate> {
        (self.waiting, self.updates) = (saved.waiting, saved.updates);
        (self.session, self.restored) = (session, true);
        self.updates.clone()
    }

    /// Handles the end of the session. Returns whether no recovery that is known to belong to it
    /// has ended it.
    fn end(&mut self, by_hand: bool, at: Timestamp, statuses: &mut Vec<StatusUpdate>) -> bool {
        let counted = std::mem::take(&mut self.counted);
        let (ours, others) =
            self.take_waiting(|report| report.faults.iter().any(|id| counted.contains(id)));
        self.waiting = others.into();
        let last = ours.iter().rposition(|report| report.healthy);
        for (index, report) in ours.into_iter().enumerate() {
            // A recovery that came after a person's release has given nothing back.
            if !(counted.contains(&report.id) || by_hand && report.healthy) {
                let status = NodeQuarantined::of_report(Some(index) == last && !by_hand);
                let eviction = if report.healthy {
                    Eviction::of_recovery(status)
                } else {
                    Eviction::cancelled()
                };
                statuses.push(StatusUpdate::Event {
                    id: report.id,
                    status,
                    at,
                    eviction: Some(eviction),
                });
            }
        }
        by_hand || last.is_none()
    }

    /// Removes the waiting events; returns those that match, and the others.
    fn take_waiting(&mut self, are: impl Fn(&Report) -> bool) -> (Vec<Report>, Vec<Report>) {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        waiting.partition(are)
    }

    fn counts(&self, report: &Report) -> bool {
        report.faults.iter().any(|id| self.counted.contains(id))
    }
}

#[cfg(test)]
mod tests;
