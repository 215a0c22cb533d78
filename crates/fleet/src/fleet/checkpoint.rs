//! The state that a process saves for its successor.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use model::fault::FaultBook;

use super::{Effect, Fleet};
use crate::session::Session;
use crate::status::Reports;

/// State that an earlier process has saved.
#[derive(Clone, Debug)]
pub struct SavedState {
    /// Fault book with the open faults.
    pub book: FaultBook,
    /// Events that wait for the status of their record, by node.
    pub reports: BTreeMap<String, Reports>,
    /// Time when each returned node was last taken out of service.
    pub recently_out: BTreeMap<String, Timestamp>,
    /// Time when the store was created.
    pub begun: Timestamp,
    /// Sessions by node: at most one for each scope.
    pub sessions: BTreeMap<String, Vec<Session>>,
    /// Nodes whose saved state is incomplete or in an older form.
    pub unsaved: BTreeSet<String>,
}

/// Parts of the state that have changed since the last [`Fleet::take_unsaved`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unsaved {
    /// Names of nodes that have changed.
    pub nodes: BTreeSet<String>,
    /// True if a node has come back to service.
    pub recently_out: bool,
}

// === impl Fleet ===

impl Fleet {
    /// Records that the store was created just now.
    pub fn begin(&mut self) {
        self.state.begun = self.state.now;
    }

    /// Restores the state that an earlier process has saved. A fleet that writes nothing has no
    /// sessions of its own.
    pub fn restore(&mut self, mut saved: SavedState, now: Timestamp) {
        self.set_time(now);
        self.state.book = saved.book;
        self.state.book.index();
        self.state.restored = self.state.book.applied();
        self.state.begun = saved.begun;
        self.agenda.unsaved.nodes.extend(saved.unsaved);
        self.brake.recent = saved.recently_out;
        self.brake.mark_stale();
        if self.writes() {
            for (name, sessions) in saved.sessions {
                let entry = self.look_again_at(&name);
                for session in sessions {
                    entry.session = session.restored(now);
                }
                saved.reports.entry(name).or_default();
            }
            for (name, reports) in saved.reports {
                if !reports.is_blank() {
                    self.agenda.unsaved.nodes.insert(name.clone());
                }
                let entry = self.look_again_at(&name);
                let on_the_node = entry.session.on_the_node().map(str::to_owned);
                entry.reports = reports;
                let updates = entry.reports.restore(on_the_node);
                self.agenda
                    .effects
                    .extend(updates.into_iter().map(Effect::Status));
                self.look_again_at(&name);
            }
        }
        let names: Vec<String> = self.state.book.nodes().map(str::to_owned).collect();
        for name in names {
            self.look_again_at(&name);
        }
    }

    /// Returns the events of a node to save that wait for their status.
    pub fn reports(&self, node: &str) -> Option<&Reports> {
        let reports = &self.nodes.get(node)?.reports;
        (!reports.is_blank()).then_some(reports)
    }

    /// Returns the session of a node, if it is worth saving.
    pub fn sessions_to_keep(&self, node: &str) -> Vec<&Session> {
        let session = self.session(node).filter(|_| self.writes());
        session
            .into_iter()
            .filter(|session| !session.is_blank())
            .collect()
    }

    /// Returns when each returned node was last taken out of service. This is saved because the
    /// nodes no longer say so themselves.
    pub fn recently_out(&self) -> &BTreeMap<String, Timestamp> {
        &self.brake.recent
    }

    /// Returns when the store was created.
    pub fn begun(&self) -> Timestamp {
        self.state.begun
    }

    /// Takes the parts to save; they count as saved from then on.
    pub fn take_unsaved(&mut self) -> Unsaved {
        std::mem::take(&mut self.agenda.unsaved)
    }

    /// Records that these nodes are saved.
    pub fn saved(&mut self, nodes: &BTreeSet<String>) {
        for name in nodes {
            let entry = self.nodes.get_mut(name);
            if entry.is_some_and(|entry| entry.reports.saved()) {
                self.agenda.unsaved.nodes.insert(name.clone());
            }
        }
    }

    /// Puts back parts that could not be saved.
    pub fn still_unsaved(&mut self, unsaved: Unsaved) {
        self.agenda.unsaved.nodes.extend(unsaved.nodes);
        self.agenda.unsaved.recently_out |= unsaved.recently_out;
    }

    /// Returns whether anything is to be saved.
    pub fn is_unsaved(&self) -> bool {
        self.agenda.unsaved != Unsaved::default()
    }
}
