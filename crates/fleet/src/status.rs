//! The `nodequarantined` of the record of each event, which says what became of it, and beside it the
//! `userpodsevictionstatus` ([`eviction`]) and the `faultremediated` ([`Repair`]).
//!
//! The words are NVSentinel's: `Quarantined` for the event that took its node out,
//! `AlreadyQuarantined` for a further one of the same session (a recovery of a part, too),
//! `UnQuarantined` for the recovery that gave the node back, `Cancelled` for all of a
//! session that ended without one. An event that the quarantine has no part in has none.
//!
//! Nothing here is decided: [`Reports::look`] reads off the node and the open faults what has
//! happened. Who starts anew reads it off the node again, and a record that has a word of this
//! quarantine keeps it; so the word of an event that a crash has prevented is made up for, and said
//! twice it does no harm.
//! [`StatusUpdate::Cancel`] is not said again: it means the newest quarantine, which may be another by
//! then. [`StatusUpdate::Drain`] and [`StatusUpdate::Repair`] are read off the node again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use contract::{HealthEvent, keys};
use jiff::Timestamp;
use model::attempt::{RemediationMark, Repair};
use model::fault::Fault;
use model::ownership::Ownership;
use policy::assess::Desired;
use serde::{Deserialize, Serialize};

use crate::session::Observed;

pub mod eviction;

use eviction::{Eviction, EvictionWord};

/// Most events of a node that wait for their word; the oldest goes without one then. As many
/// come in one page of the feed.
pub const MAX_REPORTS: usize = 1_000;
/// Most faults that one of these events is remembered to report or close, the gravest of them:
/// what asks for a quarantine is among them.
pub const MAX_REPORT_FAULTS: usize = 16;

/// A word of `nodequarantined`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeQuarantined {
    /// It took the node out of service.
    Quarantined,
    /// The node was out of service already, or still is.
    AlreadyQuarantined,
    /// It gave the node back.
    UnQuarantined,
    /// The quarantine ended without a recovery: by hand, or because no rule asks for it.
    Cancelled,
}

/// An update of the records of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StatusUpdate {
    /// The word of one event. One that has a word keeps it, but for the `Cancelled` of an earlier
    /// quarantine: the fault may have taken the node out again.
    Event {
        /// Its id.
        id: String,
        /// The word.
        word: NodeQuarantined,
        /// The time at which this was seen on the node.
        at: Timestamp,
        /// How far the drain was when it came; it goes with the word.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        eviction: Option<Eviction>,
    },
    /// The words of recoveries, in their order, of which it is not known whether they were of a
    /// quarantine: those are of which the store counts a fault (`Quarantined` or
    /// `AlreadyQuarantined`), and the last of them has given the node back.
    Recoveries {
        /// The recoveries.
        recoveries: Vec<Report>,
        /// The time at which they were seen.
        at: Timestamp,
    },
    /// How far the drain is, for all events that the newest quarantine of this node counts, but for
    /// those of which that is decided ([`EvictionWord::is_final`]).
    Drain {
        /// The node.
        node: String,
        /// How far it is.
        eviction: Eviction,
        /// The time at which this was seen.
        at: Timestamp,
    },
    /// How far the repair is, for the events that the newest quarantine of this node counts, but for
    /// those that came after it.
    Repair {
        /// The node.
        node: String,
        /// How far it is.
        repair: Repair,
    },
    /// `Cancelled` for all events that the newest quarantine of this node has counted, unless a
    /// recovery has ended it.
    Cancel {
        /// The node.
        node: String,
    },
}

/// The words of events by id, and when each was decided.
pub type Words = BTreeMap<String, (String, Option<Timestamp>)>;

/// A word for the record of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Id of the event.
    pub id: String,
    /// Its word.
    pub word: NodeQuarantined,
    /// The time of that decision.
    pub at: Timestamp,
    /// How far the drain is, for it.
    pub eviction: Option<Eviction>,
}

/// The events of a node that wait for their word, and what it takes to know it.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    /// Those that wait, in the order in which they came.
    waiting: VecDeque<Report>,
    /// Id of the session that was on the node at the last look.
    session: Option<String>,
    /// Events that it counts: they have their word.
    counted: BTreeSet<String>,
    /// How far its drain was when that was last said.
    drain: Option<Eviction>,
    /// How far its repair was when that was last said.
    repair: Option<Repair>,
    /// The newest updates of single events since it was last saved, to be said again after a crash.
    said: Vec<StatusUpdate>,
    /// True until the first look after a restore: what the session counts is not known.
    restored: bool,
}

/// The part of the events of a node that is saved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedReports {
    /// Those that wait for their word.
    waiting: VecDeque<Report>,
    /// The words of the others, which may not be in their records yet.
    said: Vec<StatusUpdate>,
}

/// An event that waits for its word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its id.
    pub id: String,
    /// True if the event is a recovery.
    pub healthy: bool,
    /// The events that stand for the faults which it reports or closes.
    pub faults: Vec<String>,
}

// === impl NodeQuarantined ===

impl NodeQuarantined {
    /// Returns the word in the record.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quarantined => "Quarantined",
            Self::AlreadyQuarantined => "AlreadyQuarantined",
            Self::UnQuarantined => "UnQuarantined",
            Self::Cancelled => "Cancelled",
        }
    }

    /// Returns the word of a report or recovery that came in a session.
    fn of_report(gave_back: bool) -> Self {
        if gave_back {
            Self::UnQuarantined
        } else {
            Self::AlreadyQuarantined
        }
    }

    /// Returns whether a record with this word belongs to a quarantine that has not ended.
    pub fn is_counted(word: &str) -> bool {
        word == Self::Quarantined.name() || word == Self::AlreadyQuarantined.name()
    }
}

// === impl Reports ===

impl Reports {
    /// Takes in that an event reports, or where it is healthy closes, `faults`.
    pub fn took_in(&mut self, id: &str, healthy: bool, mut faults: Vec<&Fault>) {
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

    /// Takes in how a node is seen, what is wanted for it, and how far its drain is. Returns the
    /// updates to write.
    pub fn look(
        &mut self,
        observed: &Observed,
        desired: &Desired,
        drain: Option<Eviction>,
        at: Timestamp,
    ) -> Vec<StatusUpdate> {
        let statuses = self.read_off(observed, desired, drain, at);
        let said = statuses.iter().filter(|one| !one.is_of_session());
        self.said.extend(said.cloned());
        // The oldest is the most likely to be in its record.
        while self.said.iter().map(StatusUpdate::size).sum::<usize>() > MAX_REPORTS {
            self.said.remove(0);
        }
        statuses
    }

    fn read_off(
        &mut self,
        observed: &Observed,
        desired: &Desired,
        drain: Option<Eviction>,
        at: Timestamp,
    ) -> Vec<StatusUpdate> {
        let mut statuses = Vec::new();
        // Of a node that is in service but for devices, nothing is written: others drain by it.
        let own = (observed.own.as_deref()).filter(|own| own.takes_node_out());
        let session = own.map(|own| own.session_id.clone());
        let before = std::mem::replace(&mut self.session, session);
        let restored = std::mem::take(&mut self.restored);
        let marks = [keys::UNCORDONED_MANUALLY, keys::UNTAINTED_MANUALLY];
        let by_hand = (marks.iter()).any(|mark| observed.view.annotations.contains_key(*mark));
        let mut cancel = None;
        if before != self.session {
            let said = self.drain.take();
            self.repair = None;
            // After a restart the newest quarantine may be that of the session on the node.
            if before.is_some() && !(restored && own.is_some()) {
                // The words that end it tell what is the session's.
                statuses.extend(StatusUpdate::end_of_drain(&observed.view.name, said, at));
            }
            if before.is_none() && own.is_some_and(|own| own.mark.drain.is_none()) {
                self.drain.clone_from(&drain); // Its events have it with their word.
            }
        }
        if before.is_some() && before != self.session {
            let unrecovered = self.end(by_hand, at, &mut statuses);
            let node = observed.view.name.clone();
            cancel = unrecovered.then_some(StatusUpdate::Cancel { node });
        }
        let Some(own) = own else {
            // A recovery that waits may belong to a session that ended while nobody looked; after
            // a restart, also to this one: it then ends the quarantine before it is cancelled.
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
        let repair = (own.mark.remediation.as_ref()).and_then(RemediationMark::repair);
        if let Some(repair) = repair.filter(|repair| self.repair.as_ref() != Some(repair)) {
            self.repair = Some(repair.clone());
            let node = observed.view.name.clone();
            statuses.push(StatusUpdate::Repair { node, repair });
        }
        statuses
    }

    /// Takes in that the session on the node counts what it lists, and what is wanted.
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
            let word = if *id == own.session_id {
                NodeQuarantined::Quarantined
            } else {
                NodeQuarantined::AlreadyQuarantined
            };
            statuses.push(StatusUpdate::Event {
                id: id.clone(),
                word,
                at,
                eviction: drain.map(|drain| drain.of_newcomer(skips(id))),
            });
        }
        self.counted = counted;
        // Otherwise the release is on its way: it tells what the recoveries were.
        if desired.takes_node_out() {
            for report in std::mem::take(&mut self.waiting) {
                if self.counts(&report) && !self.counted.contains(&report.id) {
                    let word = NodeQuarantined::AlreadyQuarantined;
                    let eviction = if report.healthy {
                        Some(Eviction::of_recovery(word))
                    } else {
                        drain.map(|drain| drain.of_newcomer(false))
                    };
                    statuses.push(StatusUpdate::Event {
                        id: report.id,
                        word,
                        at,
                        eviction,
                    });
                }
            }
        }
    }

    /// Forgets all of a node that is gone, or another's. Returns the updates to write: a session of
    /// ours on it has ended.
    pub fn forget(&mut self, node: &str, at: Timestamp) -> Vec<StatusUpdate> {
        let mut before = std::mem::take(self);
        let mut statuses = Vec::new();
        if before.restored {
            // One of them may have ended the session before the restart.
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

    /// Returns what is to be saved; `None` where there is nothing.
    pub fn to_save(&self) -> Option<SavedReports> {
        let is_empty = self.waiting.is_empty() && self.said.is_empty();
        (!is_empty).then(|| SavedReports {
            waiting: self.waiting.clone(),
            said: self.said.clone(),
        })
    }

    /// Takes in that it is saved. Returns whether it is to be saved once more, without what was
    /// said: that went to the writer before, which nobody waits for.
    pub fn saved(&mut self) -> bool {
        !std::mem::take(&mut self.said).is_empty()
    }

    /// Goes on from what was saved, and from the session on the node. Returns the updates to write.
    pub fn restore(&mut self, saved: SavedReports, session: Option<String>) -> Vec<StatusUpdate> {
        (self.waiting, self.said) = (saved.waiting, saved.said);
        (self.session, self.restored) = (session, true);
        self.said.clone()
    }

    /// Takes in that the session that was on the node is gone. Returns whether no recovery that is
    /// known to be its own has ended it.
    fn end(&mut self, by_hand: bool, at: Timestamp, statuses: &mut Vec<StatusUpdate>) -> bool {
        let counted = std::mem::take(&mut self.counted);
        let (ours, others) =
            self.take_waiting(|report| report.faults.iter().any(|id| counted.contains(id)));
        self.waiting = others.into();
        let last = ours.iter().rposition(|report| report.healthy);
        for (index, report) in ours.into_iter().enumerate() {
            // A recovery that a person was faster than has given nothing back.
            if !(counted.contains(&report.id) || by_hand && report.healthy) {
                let word = NodeQuarantined::of_report(Some(index) == last && !by_hand);
                let eviction = if report.healthy {
                    Eviction::of_recovery(word)
                } else {
                    Eviction::cancelled()
                };
                statuses.push(StatusUpdate::Event {
                    id: report.id,
                    word,
                    at,
                    eviction: Some(eviction),
                });
            }
        }
        by_hand || last.is_none()
    }

    /// Takes the events that wait out: those that `are`, and the others.
    fn take_waiting(&mut self, are: impl Fn(&Report) -> bool) -> (Vec<Report>, Vec<Report>) {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        waiting.partition(are)
    }

    fn counts(&self, report: &Report) -> bool {
        report.faults.iter().any(|id| self.counted.contains(id))
    }
}

// === impl StatusUpdate ===

impl StatusUpdate {
    fn of_recoveries(recoveries: Vec<Report>, at: Timestamp) -> Option<Self> {
        (!recoveries.is_empty()).then_some(Self::Recoveries { recoveries, at })
    }

    /// Returns what is said of the drain of a session that has ended, which was so far.
    fn end_of_drain(node: &str, drain: Option<Eviction>, at: Timestamp) -> Option<Self> {
        let done = drain.is_some_and(|drain| EvictionWord::is_final(drain.word.name()));
        (!done).then(|| Self::Drain {
            node: node.to_owned(),
            eviction: Eviction::cancelled(),
            at,
        })
    }

    /// Returns whether it means all events of a quarantine, and not single ones.
    pub fn is_of_session(&self) -> bool {
        matches!(
            self,
            Self::Cancel { .. } | Self::Drain { .. } | Self::Repair { .. }
        )
    }

    fn size(&self) -> usize {
        match self {
            Self::Recoveries { recoveries, .. } => recoveries.len(),
            Self::Event { .. } | Self::Drain { .. } | Self::Repair { .. } | Self::Cancel { .. } => {
                1
            }
        }
    }

    /// Returns the ids of the events whose words [`Self::words`] has to know.
    pub fn ids(&self) -> Vec<&String> {
        match self {
            Self::Event { id, .. } => vec![id],
            Self::Recoveries { recoveries, .. } => recoveries
                .iter()
                .flat_map(|one| one.faults.iter().chain([&one.id]))
                .collect(),
            Self::Drain { .. } | Self::Repair { .. } | Self::Cancel { .. } => Vec::new(),
        }
    }

    /// Returns the words that this update of single events adds to those that are `known`.
    pub fn words(&self, known: &Words) -> Vec<Said> {
        match self {
            Self::Event {
                id,
                word,
                at,
                eviction,
            } => {
                // Stored times have microseconds.
                let later = |since: &Timestamp| at.as_microsecond() > since.as_microsecond();
                let keeps = known.get(id).is_some_and(|(word, since)| {
                    let cancelled = word == NodeQuarantined::Cancelled.name();
                    !(cancelled && since.as_ref().is_none_or(later))
                });
                let word = (!keeps).then(|| Said {
                    id: id.clone(),
                    word: *word,
                    at: *at,
                    eviction: eviction.clone(),
                });
                word.into_iter().collect()
            }
            Self::Recoveries { recoveries, at } => {
                let counted = |id: &String| {
                    let word = known.get(id);
                    word.is_some_and(|(word, _)| NodeQuarantined::is_counted(word))
                };
                let mut counted: Vec<&Report> = recoveries
                    .iter()
                    .filter(|one| one.faults.iter().any(counted))
                    .collect();
                let last = counted.last().map(|one| one.id.clone());
                counted.retain(|one| !known.contains_key(&one.id));
                let word =
                    |one: &Report| NodeQuarantined::of_report(last.as_ref() == Some(&one.id));
                let words = counted.into_iter().map(|one| Said {
                    id: one.id.clone(),
                    word: word(one),
                    at: *at,
                    eviction: Some(Eviction::of_recovery(word(one))),
                });
                words.collect()
            }
            Self::Drain { .. } | Self::Repair { .. } | Self::Cancel { .. } => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
