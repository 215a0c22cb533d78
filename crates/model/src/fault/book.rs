//! The fault book: which faults are open, per node.

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, RecommendedAction, json, keys};
use jiff::Timestamp;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::closed::ClosedFaults;
use super::heard::Heard;
use super::room::{self, Missed};
use super::{Fault, Origin, Subject, heals};
use crate::event::{Record, counts};
use crate::position::Position;
use crate::reporter::{Authority, is_own_word};
use diagnosis::fold::Sightings;

/// Most faults of one authority that are kept open for one node. Beyond it a graver report takes
/// the place of a lesser one, and one of a reporter that has few that of one that has many
/// (`room.rs`); what finds no room is read again when there is some.
pub const MAX_OPEN_FAULTS_PER_NODE: usize = 1024;

/// Most bytes of the events that stand for the open faults of one node and authority, in their
/// binary form: any process of a machine may report, and what it says takes no more of the
/// memory, and of what is saved, than this. The largest event that is taken has less than
/// 1.5 MiB. Beyond it the same holds as beyond [`MAX_OPEN_FAULTS_PER_NODE`].
pub const MAX_FAULT_BYTES_PER_NODE: usize = 2 * 1024 * 1024;

/// Most nodes whose faults are kept: above the largest clusters that Kubernetes supports
/// (5,000 nodes). Node names come from senders, and cannot fill the memory.
pub const MAX_FAULTY_NODES: usize = 20_000;

/// The open faults of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultBook {
    /// Feed position up to which events are recorded.
    applied: Position,
    /// Open faults by node name; a node without any is not listed.
    #[serde(default)]
    pub(super) nodes: BTreeMap<String, Vec<Fault>>,
    /// Checks that have spoken of a node, well or not.
    #[serde(default)]
    pub(super) heard: Heard,
    /// Faults that were closed lately.
    #[serde(default)]
    pub(super) closed: ClosedFaults,
    /// Reports that found no room and were not read again yet, by node.
    #[serde(default)]
    pub(super) missed: BTreeMap<String, BTreeMap<Authority, Missed>>,
    /// Number of reports that found no room, since the book was started.
    pub(super) overflow: u64,
}

/// A change that an event made in the book.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The fault of this title is open that was not.
    Opened(String),
    /// The fault of this title was reported again.
    Refreshed(String),
    /// The fault of this title was reported again, and graver.
    Escalated(String),
    /// The fault of this title is closed.
    Closed(String),
    /// The event does not count.
    Ignored(Ignored),
}

/// A reason for which an event does not count for the book.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ignored {
    /// Its strategy asks for storing only.
    Strategy,
    /// It is older than the history that the monitor was told to look at.
    EarlierInBoot,
    /// It is healthy, and no fault that it could close is open.
    NothingToClose,
    /// It is healthy, and what it could close was opened by a higher [`Authority`].
    LacksAuthority,
    /// It is recorded already.
    AlreadyRecorded,
    /// It was accepted before the recovery that has closed its fault, and came after it.
    BeforeRecovery,
    /// The node has as many open faults as are kept, and it is read again when there is room; or
    /// the book has as many faulty nodes as are kept.
    Overflow,
}

// === impl Ignored ===

impl Ignored {
    /// Returns why an event counts for no book, whatever is open in it; `None`: it may.
    pub fn whatever_is_open(event: &HealthEvent) -> Option<Self> {
        if counts(event) {
            return None;
        }
        // Such a line may be stored only as well; this is the reason for it.
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
    /// Returns a book of the events behind `seq`.
    pub fn since(seq: Position) -> Self {
        Self {
            applied: seq,
            ..Self::default()
        }
    }

    /// Records an event. Recording it again (same `seq`, or an older one) changes nothing.
    pub fn record(&mut self, record: &Record) -> Vec<Change> {
        if record.seq <= self.applied {
            return vec![Change::Ignored(Ignored::AlreadyRecorded)];
        }
        self.applied = record.seq;
        let event = &record.event;
        if let Some(ignored) = Ignored::whatever_is_open(event) {
            return vec![Change::Ignored(ignored)];
        }
        let authority = Authority::of(event);
        (self.heard).note(&event.node_name, &event.check_name, authority);
        if event.is_healthy {
            self.close(record)
        } else {
            self.open(record)
        }
    }

    /// Counts the event at `seq` as recorded, for the book has nothing to do with it.
    pub(super) fn pass_over(&mut self, seq: Position) {
        self.applied = self.applied.max(seq);
    }

    /// Drops the notices of a node that are no longer shown, but for those by whose events
    /// `holds` says that something is done about them: a policy that is changed must not take
    /// nodes out for what was seen long ago. Returns whether there were any.
    pub fn forget_notices(
        &mut self,
        node: &str,
        now: Timestamp,
        holds: impl Fn(&str) -> bool,
    ) -> bool {
        let Some(faults) = self.nodes.get_mut(node) else {
            return false;
        };
        let before = faults.len();
        faults.retain(|fault| {
            fault.notice_until().is_none_or(|until| until > now) || holds(&fault.event.id)
        });
        let forgot = faults.len() < before;
        if faults.is_empty() {
            self.nodes.remove(node);
        }
        forgot
    }

    /// Returns the feed position up to which events are recorded.
    pub fn applied(&self) -> Position {
        self.applied
    }

    /// Returns how many reports found no room, since the book was started.
    pub fn overflow(&self) -> u64 {
        self.overflow
    }

    /// Returns the open faults of a node, in the order in which they opened.
    pub fn faults(&self, node: &str) -> &[Fault] {
        self.nodes.get(node).map_or(&[], Vec::as_slice)
    }

    /// Returns the names of the nodes that have open faults.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Returns the open faults that `event` reports, or where it is healthy would close.
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

    /// Returns the checks that have spoken of a node: of one that has no open fault it is known
    /// that it is well, of another one nothing is known.
    pub fn heard(&self, node: &str) -> impl Iterator<Item = &str> {
        self.heard.of(node)
    }

    fn open(&mut self, record: &Record) -> Vec<Change> {
        let event = &record.event;
        if self.nodes.len() >= MAX_FAULTY_NODES && !self.nodes.contains_key(&event.node_name) {
            self.overflow += 1;
            return vec![Change::Ignored(Ignored::Overflow)];
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
            let Some(chosen) = room::choose(faults, event, None, size) else {
                // Nor for what else it reports.
                self.note_missed(node, Authority::of(event), record.seq, size);
                changes.push(Change::Ignored(Ignored::Overflow));
                break;
            };
            let gone = room::take_out(faults, &chosen);
            let fault = Fault::new(record, code, subject.clone());
            changes.push(Change::Opened(fault.title()));
            faults.push(fault);
            self.note_evicted(node, &gone);
        }
        changes
    }

    /// Takes in what an event reports of faults that are open already.
    fn refresh(&mut self, record: &Record, subjects: &[Subject]) -> Vec<Change> {
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
                room::choose(faults, event, Some(index), more)
            };
            let has_room = chosen.is_some();
            let chosen = chosen.unwrap_or_default();
            index -= chosen.range(..index).count();
            evicted.extend(room::take_out(faults, &chosen));
            if let Some(fault) = faults.get_mut(index) {
                changes.push(fault.refresh(record, subject, has_room));
            }
            index += 1;
        }
        self.note_evicted(&event.node_name, &evicted);
        changes
    }

    fn close(&mut self, record: &Record) -> Vec<Change> {
        let event = &record.event;
        let mut changes = Vec::new();
        let mut ignored = Ignored::NothingToClose;
        self.closed.healed_again(record);
        if let Some(faults) = self.nodes.get_mut(&event.node_name) {
            for fault in faults.extract_if(.., |fault| fault.closed_by(event)) {
                changes.push(Change::Closed(fault.title()));
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
            changes.push(Change::Ignored(ignored));
        }
        changes
    }
}

/// Returns whether a reboot mends what asks for this action.
///
/// What asks for a reset or a restart has had it, and what asks for nothing goes with the state of
/// the driver. What asks for a person, a diagnosis or another machine is there until somebody has
/// looked: a machine that comes up again is no proof.
pub fn is_mended_by_reboot(action: i32) -> bool {
    matches!(
        RecommendedAction::try_from(action),
        Ok(RecommendedAction::None
            | RecommendedAction::ComponentReset
            | RecommendedAction::RestartVm
            | RecommendedAction::RestartBm
            | RecommendedAction::Unknown)
    )
}

fn note_once(changes: &mut Vec<Change>, ignored: Ignored) {
    let change = Change::Ignored(ignored);
    if changes.last() != Some(&change) {
        changes.push(change);
    }
}

// === impl Fault ===

impl Fault {
    /// Returns whether an event is of the agent, the check and the authority that report it.
    fn reported_as(&self, event: &HealthEvent) -> bool {
        self.check == event.check_name
            && self.agent == event.agent
            && self.authority == Authority::of(event)
    }

    /// Returns whether it is what an event reports by a code and a subject.
    pub(super) fn is(&self, event: &HealthEvent, code: &str, subject: &Subject) -> bool {
        self.code == code && self.reported_as(event) && self.subject.same(subject)
    }

    /// Returns the one of an event's subjects of which the event reports this fault; `None`: it
    /// reports others.
    fn reported_by<'a>(&self, event: &HealthEvent, subjects: &'a [Subject]) -> Option<&'a Subject> {
        let codes = &event.error_code;
        let of_code = codes.contains(&self.code) || (codes.is_empty() && self.code.is_empty());
        let mut subjects = subjects.iter();
        (of_code && self.reported_as(event))
            .then(|| subjects.find(|subject| self.subject.same(subject)))?
    }

    /// Returns whether a healthy event closes it.
    fn closed_by(&self, event: &HealthEvent) -> bool {
        let may = self.authority <= Authority::of(event);
        may && (!is_own_word(&self.event) || is_own_word(event)) && self.healed_by(event)
    }

    /// Returns whether a healthy event means it, whoever says so.
    fn healed_by(&self, event: &HealthEvent) -> bool {
        heals(event, &self.agent, &self.check, &self.code, &self.subject)
            && (!event.metadata.contains_key(keys::META_REBOOT) || self.healed_by_reboot(event))
            && self.gone_with(event)
            && !self.outlives(event)
    }

    /// Returns whether the fault was taken over from its node and is younger than a recovery that
    /// its agent sends again: what stands on the node is known at once, what was before it comes
    /// behind. Both times are the node's own; what was taken over was there by then, whatever it
    /// says, so that no time in the future keeps a fault open.
    fn outlives(&self, event: &HealthEvent) -> bool {
        let time = |event: &HealthEvent| event.generated_timestamp.and_then(json::timestamp);
        let mark = self.event.metadata.get(keys::META_TAKEN_OVER);
        let taken_over: Option<Timestamp> = mark.and_then(|at| at.parse().ok());
        let own = |at| time(&self.event).map(|own| own.min(at));
        matches!((time(event), taken_over.and_then(own)), (Some(a), Some(b)) if a < b)
    }

    fn new(record: &Record, code: &str, subject: Subject) -> Self {
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
        }
    }

    /// Returns whether a reboot mends the fault; `reboot` is the event that tells of it.
    ///
    /// A fault that was found in the new boot already is not of the old one.
    fn healed_by_reboot(&self, reboot: &HealthEvent) -> bool {
        let boot = |event: &HealthEvent| event.metadata.get(keys::META_BOOT_ID).cloned();
        let of_this_boot = boot(reboot).is_some_and(|id| boot(&self.event) == Some(id));
        let by_restart = is_mended_by_reboot(self.event.recommended_action);
        by_restart && !of_this_boot
    }

    /// Takes another report in. The gravest event goes on standing for the fault: what
    /// was fatal stays fatal until it is closed. Without `room` for the event of the report the
    /// one that is there stays.
    fn refresh(&mut self, record: &Record, subject: &Subject, room: bool) -> Change {
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
            Change::Escalated(self.title())
        } else {
            Change::Refreshed(self.title())
        }
    }

    fn escalated_by(&self, record: &Record) -> bool {
        record.event.is_fatal && !self.event.is_fatal
    }

    /// Returns whether the event of the report is to stand for the fault.
    fn replaced_by(&self, record: &Record) -> bool {
        let as_grave = record.event.is_fatal == self.event.is_fatal;
        self.escalated_by(record)
            || (as_grave && self.changed(record) && !self.outlives(&record.event))
    }

    /// Returns whether the report asks for something else than the one that stands for the fault.
    fn changed(&self, record: &Record) -> bool {
        let (old, new) = (&self.event, &record.event);
        old.recommended_action != new.recommended_action
            || old.custom_recommended_action != new.custom_recommended_action
            || old.quarantine_overrides != new.quarantine_overrides
            || old.drain_overrides != new.drain_overrides
    }
}

#[cfg(test)]
mod tests;
