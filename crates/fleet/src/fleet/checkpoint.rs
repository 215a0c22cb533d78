//! What a process keeps for the one after it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use model::fault::FaultBook;

use super::{Effect, Fleet};
use crate::session::Session;
use crate::status::SavedReports;

/// The state that an earlier process has kept.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The open faults.
    pub book: FaultBook,
    /// The events of each node that wait for the status of their record.
    pub reports: BTreeMap<String, SavedReports>,
    /// The time at which each node that is back was last taken out of service.
    pub recently_out: BTreeMap<String, Timestamp>,
    /// The time at which the store was made.
    pub begun: Timestamp,
    /// Sessions by node, of each one for each scope.
    pub sessions: BTreeMap<String, Vec<Session>>,
    /// Nodes of which not all is kept as it is kept now.
    pub unsaved: BTreeSet<String>,
}

/// The parts of the state that have changed since they were last taken to be saved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unsaved {
    /// Nodes of which something has changed.
    pub nodes: BTreeSet<String>,
    /// True if a node has come back to service.
    pub recently_out: bool,
}

// === impl Fleet ===

impl Fleet {
    /// Takes in that the store was made just now.
    pub fn begin(&mut self) {
        self.state.begun = self.state.now;
    }

    /// Goes on from what an earlier process has kept. A fleet that writes nothing has no session
    /// of its own.
    pub fn restore(&mut self, mut kept: Kept, now: Timestamp) {
        self.set_time(now);
        self.state.book = kept.book;
        self.state.begun = kept.begun;
        self.agenda.unsaved.nodes.extend(kept.unsaved);
        self.brake.recent = kept.recently_out;
        self.brake.mark_stale();
        if self.writes() {
            for (name, sessions) in kept.sessions {
                let entry = self.entry(&name);
                for session in sessions {
                    entry.session = session.restored(now);
                }
                kept.reports.entry(name).or_default();
            }
            for (name, reports) in kept.reports {
                if reports != SavedReports::default() {
                    self.agenda.unsaved.nodes.insert(name.clone());
                }
                let entry = self.entry(&name);
                let on_the_node = entry.session.on_the_node().map(str::to_owned);
                let said = entry.reports.restore(reports, on_the_node);
                self.agenda
                    .effects
                    .extend(said.into_iter().map(Effect::Status));
                self.look_again_at(&name);
            }
        }
        let names: Vec<String> = self.state.book.nodes().map(str::to_owned).collect();
        for name in names {
            self.look_again_at(&name);
        }
    }

    /// Returns what is to be saved of the events of a node that wait for their status.
    pub fn reports(&self, node: &str) -> Option<SavedReports> {
        self.nodes.get(node)?.reports.to_save()
    }

    /// Returns the session of a node, if it is worth keeping over a restart.
    pub fn sessions_to_keep(&self, node: &str) -> Vec<&Session> {
        let session = self.session(node).filter(|_| self.writes());
        session
            .into_iter()
            .filter(|session| !session.is_blank())
            .collect()
    }

    /// Returns when nodes were last taken out of service, of those that are back: to be saved,
    /// for the nodes themselves do not tell any more.
    pub fn recently_out(&self) -> &BTreeMap<String, Timestamp> {
        &self.brake.recent
    }

    /// Returns when the store was made.
    pub fn begun(&self) -> Timestamp {
        self.state.begun
    }

    /// Takes out what is to be saved, which counts as saved from then on.
    pub fn take_unsaved(&mut self) -> Unsaved {
        std::mem::take(&mut self.agenda.unsaved)
    }

    /// Takes in that these nodes are saved.
    pub fn saved(&mut self, nodes: &BTreeSet<String>) {
        for name in nodes {
            let entry = self.nodes.get_mut(name);
            if entry.is_some_and(|entry| entry.reports.saved()) {
                self.agenda.unsaved.nodes.insert(name.clone());
            }
        }
    }

    /// Takes back what could not be saved.
    pub fn still_unsaved(&mut self, unsaved: Unsaved) {
        self.agenda.unsaved.nodes.extend(unsaved.nodes);
        self.agenda.unsaved.recently_out |= unsaved.recently_out;
    }

    /// Returns whether anything is to be saved.
    pub fn is_unsaved(&self) -> bool {
        self.agenda.unsaved != Unsaved::default()
    }
}
