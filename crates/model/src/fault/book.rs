//! The fault book: the open faults of each node.

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, RecommendedAction, json, keys};
use jiff::Timestamp;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::capacity::{self, Missed};
use super::closed::ClosedFaults;
use super::incidents::Incidents;
use super::reported_checks::ReportedChecks;
use super::{Fault, Origin, Subject, heals};
use crate::event::{EventRecord, counts};
use crate::position::Position;
use crate::reporter::{Authority, is_own_word};
use diagnosis::fold::Sightings;
use diagnosis::sympathy;

/// Most open faults of one node and authority. Beyond the limit, a graver report evicts a
/// lesser fault, and a report of a reporter with few faults evicts one of a reporter with many
/// (`capacity.rs`). Reports without room are read again once there is some.
pub const MAX_OPEN_FAULTS_PER_NODE: usize = 1024;

/// Most bytes of the events that stand for the open faults of one node and authority, in their
/// binary form. Any process of a machine may report, and this bounds its share of the memory
/// and of the saved state. The largest accepted event has less than 1.5 MiB. Beyond the limit,
/// eviction works as for [`MAX_OPEN_FAULTS_PER_NODE`].
pub const MAX_FAULT_BYTES_PER_NODE: usize = 2 * 1024 * 1024;

/// Most nodes with open faults: more than the largest clusters that Kubernetes supports (5,000
/// nodes). Senders choose the names of nodes, and must not be able to fill the memory.
pub const MAX_FAULTY_NODES: usize = 20_000;

/// Open faults of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultBook {
    /// Position of the last recorded event.
    applied: Position,
    /// Open faults by node. Nodes without any are not listed.
    #[serde(default)]
    pub(super) nodes: BTreeMap<String, Vec<Fault>>,
    /// Checks that have reported about each node, healthy or not.
    #[serde(rename = "heard", default)]
    pub(super) reported: ReportedChecks,
    /// Faults that were closed recently.
    #[serde(default)]
    pub(super) closed: ClosedFaults,
    /// Reports without room that were not read again yet, by node.
    #[serde(default)]
    pub(super) missed: BTreeMap<String, BTreeMap<Authority, Missed>>,
    /// Number of reports without room since the book was created.
    pub(super) overflow: u64,
    /// Index of the open faults.
    #[serde(skip)]
    pub(super) incidents: Incidents,
}

/// Effect of an event on the book.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultChange {
    /// A fault with this title was opened.
    Opened(String),
    /// The fault with this title was reported again.
    Refreshed(String),
    /// The fault with this title was reported again, and is graver now.
    Escalated(String),
    /// The fault with this title was closed.
    Closed(String),
    /// A fault of this other node got or lost its cause.
    Explained(String),
    /// The event had no effect.
    Ignored(Ignored),
}

/// Reason why an event has no effect on the book.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ignored {
    /// The event's strategy asks for storing only.
    Strategy,
    /// The event is older than the history that its monitor was configured to read.
    EarlierInBoot,
    /// The event is healthy, and no fault that it could close is open.
    NothingToClose,
    /// The event is healthy, and the faults that it matches were opened by a higher
    /// [`Authority`].
    LacksAuthority,
    /// The event was recorded before.
    AlreadyRecorded,
    /// The event arrived after the recovery that closed its fault, but was accepted before it.
    BeforeRecovery,
    /// The node has the maximum of open faults, and the event is read again once there is room;
    /// or the book has the maximum of faulty nodes.
    Overflow,
}

// === impl Ignored ===

impl Ignored {
    /// Returns why an event has no effect on any book. `None` if its effect depends on the
    /// book.
    pub fn by_event(event: &HealthEvent) -> Option<Self> {
        if counts(event) {
            return None;
        }
        // Such an event may be marked as stored only as well. Its age is the actual reason.
        let is_earlier = event.metadata.contains_key(keys::META_EARLIER_IN_BOOT);
        Some(if is_earlier {
            Self::EarlierInBoot
        } else {
            Self::Strategy
        })
    }
}

// === impl FaultBook ===

impl FaultBook {
    /// Creates a book that ignores events up to `seq`.
    pub fn since(seq: Position) -> Self {
        Self {
            applied: seq,
            ..Self::default()
        }
    }

    /// Records an event. Events at or before the last recorded position change nothing.
    pub fn record(&mut self, record: &EventRecord) -> Vec<FaultChange> {
        if record.seq <= self.applied {
            return vec![FaultChange::Ignored(Ignored::AlreadyRecorded)];
        }
        self.applied = record.seq;
        let event = &record.event;
        if let Some(ignored) = Ignored::by_event(event) {
            return vec![FaultChange::Ignored(ignored)];
        }
        let authority = Authority::of(event);
        self.reported
            .record(&event.node_name, &event.check_name, authority);
        let domains = self.domains_of_primaries(&event.node_name);
        let overflow = self.overflow;
        let mut changes = if event.is_healthy {
            self.close(record)
        } else {
            self.open(record)
        };
        let closed = |change: &FaultChange| matches!(change, FaultChange::Closed(_));
        // A primary may have been evicted that explained faults of its domain, or of its own node.
        let explains = || {
            let mut faults = self.faults(&event.node_name).iter();
            !domains.is_empty() || faults.any(|fault| fault.cause.is_some())
        };
        let may_have_evicted = self.overflow > overflow && explains();
        if sympathy::concerns(&event.check_name) || changes.iter().any(closed) || may_have_evicted {
            let recovered = event.is_healthy.then_some(record.created_at);
            let explained = self.settle_causes(&event.node_name, recovered, domains);
            changes.extend(explained.into_iter().map(FaultChange::Explained));
        }
        changes
    }

    /// Counts the event at `seq` as recorded, without an effect on the book.
    pub(super) fn pass_over(&mut self, seq: Position) {
        self.applied = self.applied.max(seq);
    }

    /// Removes expired notices of a node, except those whose event id `holds` returns true for,
    /// since a session acts on them: a change of the policy must not take nodes out of service
    /// for old notices. Returns whether any notice was removed.
    pub fn forget_notices(
        &mut self,
        node: &str,
        now: Timestamp,
        holds: impl Fn(&str) -> bool,
    ) -> bool {
        let Some(faults) = self.nodes.get_mut(node) else {
            return false;
        };
        let is_over = |fault: &mut Fault| {
            let is_old = fault.notice_until().is_some_and(|until| until <= now);
            is_old && !holds(&fault.event.id)
        };
        let forgotten: Vec<Fault> = faults.extract_if(.., is_over).collect();
        let forgot = !forgotten.is_empty();
        for fault in &forgotten {
            self.incidents.leave(fault);
        }
        if faults.is_empty() {
            self.nodes.remove(node);
        }
        forgot
    }

    /// Returns the position of the last recorded event.
    pub fn applied(&self) -> Position {
        self.applied
    }

    /// Returns the number of reports without room since the book was created.
    pub fn overflow(&self) -> u64 {
        self.overflow
    }

    /// Returns the open faults of a node, in the order of their opening.
    pub fn faults(&self, node: &str) -> &[Fault] {
        self.nodes.get(node).map_or(&[], Vec::as_slice)
    }

    /// Returns the names of the nodes with open faults.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Returns the names of the nodes with an open fault of an incident.
    pub fn nodes_of_incident(&self, id: &str) -> impl Iterator<Item = &str> {
        self.incidents.nodes_of(id)
    }

    /// Returns the open faults that `event` reports, or would close if it is healthy.
    pub fn touched_by(&self, event: &HealthEvent) -> Vec<&Fault> {
        let faults = self.faults(&event.node_name).iter();
        if event.is_healthy {
            return faults.filter(|fault| fault.closed_by(event)).collect();
        }
        let subjects = Subject::of_entities(&event.entities_impacted);
        faults
            .filter(|fault| fault.reported_by(event, &subjects).is_some())
            .collect()
    }

    /// Returns the checks that have reported about a node. A reported check without an open
    /// fault is healthy; about all other checks nothing is known.
    pub fn reported_checks(&self, node: &str) -> impl Iterator<Item = &str> {
        self.reported.of(node)
    }

    fn open(&mut self, record: &EventRecord) -> Vec<FaultChange> {
        let event = &record.event;
        if self.nodes.len() >= MAX_FAULTY_NODES && !self.nodes.contains_key(&event.node_name) {
            self.overflow += 1;
            return vec![FaultChange::Ignored(Ignored::Overflow)];
        }
        let subjects = Subject::of_entities(&event.entities_impacted);
        let mut changes = self.refresh(record, &subjects);
        let codes: &[String] = if event.error_code.is_empty() {
            &[String::new()]
        } else {
            &event.error_code
        };
        let (node, size) = (event.node_name.as_str(), event.encoded_len());
        for (subject, code) in subjects
            .iter()
            .flat_map(|subject| codes.iter().map(move |code| (subject, code)))
        {
            let mut faults = self.faults(node).iter();
            if faults.any(|fault| fault.is(event, code, subject)) {
                continue;
            }
            if self.closed.after(record, code, subject) {
                note_once(&mut changes, Ignored::BeforeRecovery);
                continue;
            }
            let faults = self.nodes.entry(node.to_owned()).or_default();
            let Some(chosen) = capacity::choose(faults, event, None, size) else {
                // The other faults of the event have no room either.
                self.note_missed(node, Authority::of(event), record.seq, size);
                changes.push(FaultChange::Ignored(Ignored::Overflow));
                break;
            };
            let gone = capacity::remove(faults, &chosen);
            let mut fault = Fault::new(record, code, subject.clone());
            changes.push(FaultChange::Opened(fault.title()));
            self.incidents.enter(&mut fault);
            faults.push(fault);
            self.note_evicted(node, &gone);
        }
        changes
    }

    /// Refreshes the open faults that an event reports.
    fn refresh(&mut self, record: &EventRecord, subjects: &[Subject]) -> Vec<FaultChange> {
        let event = &record.event;
        let mut changes = Vec::new();
        let Some(faults) = self.nodes.get_mut(&event.node_name) else {
            return changes;
        };
        let (mut index, mut evicted) = (0, Vec::new());
        while let Some(fault) = faults.get(index) {
            let Some(subject) = fault.reported_by(event, subjects) else {
                index += 1;
                continue;
            };
            if self.closed.after(record, &fault.code, subject) {
                note_once(&mut changes, Ignored::BeforeRecovery);
                index += 1;
                continue;
            }
            let more = if fault.replaced_by(record) {
                let size = event.encoded_len();
                size.saturating_sub(fault.bytes)
            } else {
                0
            };
            let chosen = if more == 0 {
                Some(BTreeSet::new())
            } else {
                capacity::choose(faults, event, Some(index), more)
            };
            let has_room = chosen.is_some();
            let chosen = chosen.unwrap_or_default();
            index -= chosen.range(..index).count();
            evicted.extend(capacity::remove(faults, &chosen));
            if let Some(fault) = faults.get_mut(index) {
                self.incidents.leave(fault);
                changes.push(fault.refresh(record, subject, has_room));
                self.incidents.enter(fault);
            }
            index += 1;
        }
        self.note_evicted(&event.node_name, &evicted);
        changes
    }

    fn close(&mut self, record: &EventRecord) -> Vec<FaultChange> {
        let event = &record.event;
        let mut changes = Vec::new();
        let mut ignored = Ignored::NothingToClose;
        self.closed.healed_again(record);
        if let Some(faults) = self.nodes.get_mut(&event.node_name) {
            for fault in faults.extract_if(.., |fault| fault.closed_by(event)) {
                changes.push(FaultChange::Closed(fault.title()));
                self.incidents.leave(&fault);
                self.closed.note(fault, record);
            }
            if faults.iter().any(|fault| fault.healed_by(event)) {
                ignored = Ignored::LacksAuthority;
            }
            if faults.is_empty() {
                self.nodes.remove(&event.node_name);
            }
        }
        if changes.is_empty() {
            changes.push(FaultChange::Ignored(ignored));
        }
        changes
    }
}

/// Returns whether a reboot clears faults that ask for this action.
///
/// A fault that asks for a reset or a restart got one, and a fault that asks for nothing
/// disappears with the driver's state. A fault that asks for a person, a diagnosis or another
/// machine stays until somebody has looked: that the machine came up again proves nothing.
pub fn clears_on_reboot(action: i32) -> bool {
    matches!(
        RecommendedAction::try_from(action),
        Ok(RecommendedAction::None
            | RecommendedAction::ComponentReset
            | RecommendedAction::RestartVm
            | RecommendedAction::RestartBm
            | RecommendedAction::Unknown)
    )
}

fn note_once(changes: &mut Vec<FaultChange>, ignored: Ignored) {
    let change = FaultChange::Ignored(ignored);
    if changes.last() != Some(&change) {
        changes.push(change);
    }
}

// === impl Fault ===

impl Fault {
    /// Returns whether an event has the agent, the check and the authority of the fault's
    /// reports.
    fn reported_as(&self, event: &HealthEvent) -> bool {
        self.check == event.check_name
            && self.agent == event.agent
            && self.authority == Authority::of(event)
    }

    /// Returns whether the event reports this fault under the given code and subject.
    pub(super) fn is(&self, event: &HealthEvent, code: &str, subject: &Subject) -> bool {
        self.code == code && self.reported_as(event) && self.subject.same(subject)
    }

    /// Returns the event's subject that names this fault. `None` if the event does not report
    /// the fault.
    fn reported_by<'a>(&self, event: &HealthEvent, subjects: &'a [Subject]) -> Option<&'a Subject> {
        let codes = &event.error_code;
        let of_code = codes.contains(&self.code) || (codes.is_empty() && self.code.is_empty());
        let mut subjects = subjects.iter();
        (of_code && self.reported_as(event))
            .then(|| subjects.find(|subject| self.subject.same(subject)))?
    }

    /// Returns whether a healthy event closes the fault.
    fn closed_by(&self, event: &HealthEvent) -> bool {
        let may = self.authority <= Authority::of(event);
        may && (!is_own_word(&self.event) || is_own_word(event)) && self.healed_by(event)
    }

    /// Returns whether a healthy event matches the fault, regardless of authority.
    fn healed_by(&self, event: &HealthEvent) -> bool {
        heals(event, &self.agent, &self.check, &self.code, &self.subject)
            && (!event.metadata.contains_key(keys::META_REBOOT) || self.healed_by_reboot(event))
            && self.gone_with(event)
            && !self.outlives(event)
    }

    /// Returns whether the fault was taken over from its node and is younger than a recovery
    /// that its agent sends again: the annotations of the node are read at once, while older
    /// events arrive later. Both times are the node's own. The event's time is capped at the
    /// time of the takeover, so a time in the future cannot keep a fault open.
    fn outlives(&self, event: &HealthEvent) -> bool {
        let time = |event: &HealthEvent| event.generated_timestamp.and_then(json::timestamp);
        let mark = self.event.metadata.get(keys::META_TAKEN_OVER);
        let taken_over: Option<Timestamp> = mark.and_then(|at| at.parse().ok());
        let own = |at| time(&self.event).map(|own| own.min(at));
        matches!((time(event), taken_over.and_then(own)), (Some(a), Some(b)) if a < b)
    }

    fn new(record: &EventRecord, code: &str, subject: Subject) -> Self {
        let seen = Sightings::of(&record.event, record.created_at).by(record.created_at);
        Self {
            agent: record.event.agent.clone(),
            check: record.event.check_name.clone(),
            authority: Authority::of(&record.event),
            code: code.to_owned(),
            subject,
            event: record.event.clone(),
            bytes: record.event.encoded_len(),
            opened_by: record.event.id.clone(),
            seq: record.seq,
            first_seen: seen.first,
            last_seen: seen.last,
            count: seen.count,
            accepted_at: record.created_at,
            origin: Origin::of(&record.event),
            cause: None,
            incident: String::new(),
        }
    }

    /// Returns whether a reboot clears the fault, where `reboot` is the event that reports the
    /// reboot.
    ///
    /// A fault that was already found in the new boot does not belong to the old one.
    fn healed_by_reboot(&self, reboot: &HealthEvent) -> bool {
        let boot = |event: &HealthEvent| event.metadata.get(keys::META_BOOT_ID).cloned();
        let of_this_boot = boot(reboot).is_some_and(|id| boot(&self.event) == Some(id));
        let by_restart = clears_on_reboot(self.event.recommended_action);
        by_restart && !of_this_boot
    }

    /// Refreshes the fault with another report. The gravest event keeps standing for the fault:
    /// a fatal fault stays fatal until it is closed. Without `room` for the event of the
    /// report, the current event stays.
    fn refresh(&mut self, record: &EventRecord, subject: &Subject, room: bool) -> FaultChange {
        let seen = Sightings::of(&record.event, record.created_at).by(record.created_at);
        self.first_seen = self.first_seen.min(seen.first);
        self.last_seen = self.last_seen.max(seen.last);
        self.accepted_at = self.accepted_at.max(record.created_at);
        self.count = self.count.saturating_add(seen.count);
        self.subject.learn(subject);
        self.origin = Origin::of(&record.event);
        let escalated = room && self.escalated_by(record);
        if room && self.replaced_by(record) {
            self.event = record.event.clone();
            self.bytes = self.event.encoded_len();
        }
        if escalated {
            FaultChange::Escalated(self.title())
        } else {
            FaultChange::Refreshed(self.title())
        }
    }

    fn escalated_by(&self, record: &EventRecord) -> bool {
        record.event.is_fatal && !self.event.is_fatal
    }

    /// Returns whether the event of the report replaces the one that stands for the fault.
    fn replaced_by(&self, record: &EventRecord) -> bool {
        let as_grave = record.event.is_fatal == self.event.is_fatal;
        self.escalated_by(record)
            || (as_grave && self.changed(record) && !self.outlives(&record.event))
    }

    /// Returns whether the report requests something else than the event that stands for the
    /// fault.
    fn changed(&self, record: &EventRecord) -> bool {
        let (old, new) = (&self.event, &record.event);
        old.recommended_action != new.recommended_action
            || old.custom_recommended_action != new.custom_recommended_action
            || old.quarantine_overrides != new.quarantine_overrides
            || old.drain_overrides != new.drain_overrides
    }
}

#[cfg(test)]
mod tests;
