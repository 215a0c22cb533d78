//! What became of each event: the `nodequarantined` of its record.
//!
//! The words are NVSentinel's: `Quarantined` for the event that took its node out,
//! `AlreadyQuarantined` for a further one of the same session (a recovery of a part, too),
//! `UnQuarantined` for the recovery that gave the node back, `Cancelled` for all of a
//! session that ended without one. An event that the quarantine has no part in has none.
//!
//! Nothing here is decided: [`StatusLedger::look`] reads off the node and the open faults
//! what has happened. It is saved with the fault book, and the rest is read from the node
//! again, so a write that a crash has prevented is made up for; made twice, it does no harm.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use contract::keys;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::assess::Desired;
use crate::fault::Fault;
use crate::node::NodeView;
use crate::ownership::Ownership;

/// Most events of a node whose status is open; the oldest goes without one then. As many
/// come in one page of the feed.
pub const MAX_REPORTS: usize = 1_000;
/// Most faults that one of these events is remembered to report or close, the gravest of them:
/// what asks for a quarantine is among them.
pub const MAX_REPORT_FAULTS: usize = 16;
/// Most events that are known to be counted by the session of a node; beyond it those go that
/// nothing on the node names any more.
pub const MAX_COUNTED: usize = 2_048;
/// Most statuses that wait for the store; more are not noted.
pub const MAX_DUE: usize = 20_000;

/// A `nodequarantined`.
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

/// A status to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Due {
    /// Of one event, unless it has one.
    Event {
        /// Its id.
        id: String,
        /// The status.
        status: NodeQuarantined,
        /// When it was seen.
        at: Timestamp,
        /// Only where one of these events is counted by the store (`Quarantined` or
        /// `AlreadyQuarantined`); empty: in any case.
        if_counted: Vec<String>,
    },
    /// Of all events that the newest quarantine of this node has counted: `Cancelled`.
    Cancel {
        /// The node.
        node: String,
    },
}

/// What is to be written, and what it takes to know it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusLedger {
    #[serde(default)]
    nodes: BTreeMap<String, NodeLedger>,
    due: VecDeque<Due>,
}

/// What of the ledger belongs to no node.
#[derive(Debug, Serialize)]
pub struct Waiting<'a> {
    due: &'a VecDeque<Due>,
}

/// What the ledger has of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeLedger {
    /// The session that was last seen on the node.
    session: Option<String>,
    /// Events that it counts.
    counted: BTreeSet<String>,
    /// Events that were taken in and have no status yet.
    reports: VecDeque<Report>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Report {
    id: String,
    healthy: bool,
    /// The events that stand for the faults which it reports or closes.
    faults: Vec<String>,
}

// === impl NodeQuarantined ===

impl NodeQuarantined {
    /// The word in the record.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quarantined => "Quarantined",
            Self::AlreadyQuarantined => "AlreadyQuarantined",
            Self::UnQuarantined => "UnQuarantined",
            Self::Cancelled => "Cancelled",
        }
    }

    /// Whether a record with this word belongs to a quarantine that has not ended.
    pub fn is_counted(word: &str) -> bool {
        word == Self::Quarantined.name() || word == Self::AlreadyQuarantined.name()
    }
}

// === impl StatusLedger ===

impl StatusLedger {
    /// Takes in that an event reports, or where it is healthy closes, `faults`.
    pub fn took_in(&mut self, node: &str, id: &str, healthy: bool, faults: &[&Fault]) {
        if faults.is_empty() {
            return;
        }
        let ledger = self.nodes.entry(node.to_owned()).or_default();
        if ledger.reports.len() >= MAX_REPORTS {
            ledger.reports.pop_front();
        }
        let mut faults = faults.to_vec();
        faults.sort_by(|a, b| Fault::by_gravity(a, b));
        let ids: BTreeSet<&String> = (faults.iter())
            .map(|fault| &fault.event.id)
            .take(MAX_REPORT_FAULTS)
            .collect();
        ledger.reports.push_back(Report {
            id: id.to_owned(),
            healthy,
            faults: ids.into_iter().cloned().collect(),
        });
    }

    /// Takes in how a node is seen, and what is wanted for it. Whether that has changed
    /// anything here.
    pub fn look(&mut self, node: &NodeView, desired: &Desired, at: Timestamp) -> bool {
        let own = Ownership::read(node);
        let mut ledger = self.nodes.remove(&node.name).unwrap_or_default();
        let before = ledger.extent();
        let seen = own.as_ref().map(|own| &own.session_id);
        if ledger.session.is_some() && ledger.session.as_ref() != seen {
            self.ended(&mut ledger, node, at);
        }
        if let Some(own) = &own {
            self.goes_on(&mut ledger, own, desired, at);
        } else {
            self.without_session(&mut ledger, desired, at);
        }
        let changed = ledger.extent() != before;
        if ledger != NodeLedger::default() {
            self.nodes.insert(node.name.clone(), ledger);
        }
        changed
    }

    /// Forgets a node that is gone, or another's; a session of ours on it has ended. Whether
    /// anything was known of it.
    pub fn forget(&mut self, node: &str) -> bool {
        let ledger = self.nodes.remove(node);
        if (ledger.as_ref()).is_some_and(|ledger| ledger.session.is_some()) {
            let node = node.to_owned();
            self.owe(Due::Cancel { node });
        }
        ledger.is_some()
    }

    /// The nodes of which anything is known.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// What is known of one node, to be saved.
    pub fn share(&self, node: &str) -> Option<&NodeLedger> {
        self.nodes.get(node)
    }

    /// Takes back what was saved of a node.
    pub fn restore(&mut self, node: &str, ledger: NodeLedger) {
        self.nodes.insert(node.to_owned(), ledger);
    }

    /// What belongs to no node, to be saved. Read back, it is a ledger without nodes.
    pub fn waiting(&self) -> Waiting<'_> {
        Waiting { due: &self.due }
    }

    /// What is to be written, oldest first, at most `limit`.
    pub fn due(&self, limit: usize) -> Vec<Due> {
        self.due.iter().take(limit).cloned().collect()
    }

    /// The oldest `count` are written.
    pub fn written(&mut self, count: usize) {
        self.due.drain(..count.min(self.due.len()));
    }

    fn owe(&mut self, due: Due) {
        if self.due.len() < MAX_DUE {
            self.due.push_back(due);
        }
    }

    fn owe_event(&mut self, id: String, status: NodeQuarantined, at: Timestamp) {
        self.owe(Due::Event {
            id,
            status,
            at,
            if_counted: Vec::new(),
        });
    }

    /// The session is on the node.
    fn goes_on(
        &mut self,
        ledger: &mut NodeLedger,
        own: &Ownership,
        desired: &Desired,
        at: Timestamp,
    ) {
        ledger.session = Some(own.session_id.clone());
        let listed = own.events.iter().map(|event| &event.id);
        let wanted = desired.events.iter().map(|counted| &counted.event.id);
        for id in listed.chain(wanted) {
            if ledger.counted.insert(id.clone()) {
                let status = if *id == own.session_id {
                    NodeQuarantined::Quarantined
                } else {
                    NodeQuarantined::AlreadyQuarantined
                };
                self.owe_event(id.clone(), status, at);
            }
        }
        if ledger.counted.len() > MAX_COUNTED {
            let named = |id: &String| {
                own.events.iter().any(|event| event.id == *id)
                    || (desired.events.iter()).any(|counted| counted.event.id == *id)
            };
            ledger.counted.retain(named);
        }
        if !desired.wanted() {
            return; // The release is on its way: it tells what the recoveries were.
        }
        for report in std::mem::take(&mut ledger.reports) {
            if ledger.counts(&report) && !ledger.counted.contains(&report.id) {
                self.owe_event(report.id, NodeQuarantined::AlreadyQuarantined, at);
            }
        }
    }

    /// The session that was on the node is gone.
    fn ended(&mut self, ledger: &mut NodeLedger, node: &NodeView, at: Timestamp) {
        let marks = [keys::UNCORDONED_MANUALLY, keys::UNTAINTED_MANUALLY];
        let by_hand = marks
            .iter()
            .any(|mark| node.annotations.contains_key(*mark));
        let (ours, others): (Vec<Report>, Vec<Report>) = std::mem::take(&mut ledger.reports)
            .into_iter()
            .partition(|report| ledger.counts(report));
        let last = ours.iter().rposition(|report| report.healthy);
        for (index, report) in ours.into_iter().enumerate() {
            let status = if Some(index) == last && !by_hand {
                NodeQuarantined::UnQuarantined
            } else {
                NodeQuarantined::AlreadyQuarantined
            };
            // A recovery that a person was faster than has given nothing back.
            if !(ledger.counted.contains(&report.id) || by_hand && report.healthy) {
                self.owe_event(report.id, status, at);
            }
        }
        if by_hand || last.is_none() {
            self.owe(Due::Cancel {
                node: node.name.clone(),
            });
        }
        *ledger = NodeLedger {
            reports: others.into(),
            ..NodeLedger::default()
        };
    }

    /// Nothing of ours is on the node. A recovery may belong to a session that ended while
    /// nobody looked: then the store still counts the event of its fault.
    fn without_session(&mut self, ledger: &mut NodeLedger, desired: &Desired, at: Timestamp) {
        let last = ledger.reports.iter().rposition(|report| report.healthy);
        let mut left = VecDeque::new();
        for (index, report) in std::mem::take(&mut ledger.reports).into_iter().enumerate() {
            if report.healthy {
                let status = if Some(index) == last {
                    NodeQuarantined::UnQuarantined
                } else {
                    NodeQuarantined::AlreadyQuarantined
                };
                self.owe(Due::Event {
                    id: report.id,
                    status,
                    at,
                    if_counted: report.faults,
                });
            } else if desired.wanted() {
                left.push_back(report); // The quarantine is on its way.
            }
        }
        ledger.reports = left;
    }
}

// === impl NodeLedger ===

impl NodeLedger {
    /// What tells one state from the next: ids are only added to a session's, and reports only
    /// taken away.
    fn extent(&self) -> (Option<String>, usize, usize) {
        (self.session.clone(), self.counted.len(), self.reports.len())
    }

    fn counts(&self, report: &Report) -> bool {
        report.faults.iter().any(|id| self.counted.contains(id))
    }
}

#[cfg(test)]
mod tests;
