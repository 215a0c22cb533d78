//! All nodes of a cluster and what is decided about them, as one object without I/O.
//!
//! ```text
//! record, Input --> fault book, node entries --> decide: assess -> brake -> step --> Effect
//! ```
//!
//! What comes in only marks nodes for another look ([`Fleet::record`], [`Fleet::take`]);
//! [`Fleet::decide`] looks at them and returns what is to be done outside. What has to be
//! asked there (the store, the API server) is an effect as well, and its answer an input: until
//! it is there, nothing is decided about the node, and everything about all others. The
//! controller turns I/O into inputs and effects into I/O; a replay and the simulators do the
//! same with nodes that exist only there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::assess::{Desired, Scope, assess};
use crate::brake::{DOUBT, Hold, NodeLabel};
use crate::event::Record;
use crate::fault::{Change, Fault, FaultBook};
use crate::journal::{Entry, EntryKind};
use crate::mode::Mode;
use crate::node::NodeView;
use crate::policy::Policy;
use crate::position::Position;
use crate::session::{Failure, Observed, Session, dismissal};
use crate::status::SavedReports;
use crate::wakes::{CLOCK_SLACK, Wakes};

mod brake;
mod claim;
mod departed;
mod entry;
mod io;
mod look;
mod seen;
mod show;
mod situation;

pub use brake::Switched;
pub use claim::Owns;
pub use io::{Answer, Effect, Found, Input, Level, Planned, Purpose, RuleSetOutcome};
pub use seen::LIST_TAKES;
pub use situation::Situation;

use brake::BrakeState;
use entry::{Awaits, NodeEntry};
use seen::Relisted;
use show::Showing;

/// What does not change while a process runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What it may do.
    pub mode: Mode,
    /// For which nodes nobody else speaks.
    pub owns: Owns,
    /// Whether there is a cluster; without one there is nothing to act on.
    pub cluster: bool,
    /// Id of the store.
    pub store: String,
    /// Feed position up to which the store's events are history.
    pub since: Position,
    /// Whether the brake holds. Without it only a pause does.
    pub brake: bool,
    /// Label of GPU nodes, whose number the brake's percentages are of.
    pub gpu_label: NodeLabel,
    /// How old the newest report of a node has to be, for its faults to be dropped where the
    /// cluster has no such node any more.
    pub retention: SignedDuration,
    /// Whether a node that flaps waits for its return. Not where time goes from event to event:
    /// nothing would come to end a wait.
    pub returns_wait: bool,
}

/// What a process before has kept.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The open faults.
    pub book: FaultBook,
    /// What becomes of the events of each node.
    pub reports: BTreeMap<String, SavedReports>,
    /// When nodes were last taken out of service, of those that are back.
    pub recently_out: BTreeMap<String, Timestamp>,
    /// Since when there is this store.
    pub begun: Timestamp,
    /// Sessions by node, of each one for each scope.
    pub sessions: BTreeMap<String, Vec<Session>>,
    /// Nodes of which not all is kept as it is kept now.
    pub unsaved: BTreeSet<String>,
}

/// What has changed since it was last taken to be saved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unsaved {
    /// Nodes of which something has changed.
    pub nodes: BTreeSet<String>,
    /// Whether a node has come back to service.
    pub recently_out: bool,
}

/// All nodes of a cluster and what is decided about them. See the module.
#[derive(Debug)]
pub struct Fleet {
    settings: Settings,
    policy: Option<Arc<Policy>>,
    book: FaultBook,
    nodes: BTreeMap<String, NodeEntry>,
    brake: BrakeState,
    /// Since when there is this store, see `Ownership::kept_by_another`.
    begun: Timestamp,
    /// Nodes to look at.
    dirty: BTreeSet<String>,
    /// When a session wants to be looked at later.
    wakes: Wakes,
    now: Timestamp,
    /// All events that were stored at the start are in the book.
    caught_up: bool,
    /// The cluster's nodes are known.
    listed: bool,
    /// A list that is not complete yet.
    relisted: Option<Relisted>,
    unsaved: Unsaved,
    showing: Showing,
    effects: Vec<Effect>,
}

// === impl Fleet ===

impl Fleet {
    /// Returns a fleet of which nothing is known.
    pub fn new(settings: Settings, policy: Option<Arc<Policy>>, now: Timestamp) -> Self {
        Self {
            listed: !settings.cluster,
            book: FaultBook::since(settings.since),
            settings,
            policy,
            nodes: BTreeMap::new(),
            brake: BrakeState::default(),
            begun: Timestamp::UNIX_EPOCH,
            dirty: BTreeSet::new(),
            wakes: Wakes::default(),
            now,
            caught_up: false,
            relisted: None,
            unsaved: Unsaved::default(),
            showing: Showing::default(),
            effects: Vec::new(),
        }
    }

    /// Takes in that the store was made just now.
    pub fn begin(&mut self) {
        self.begun = self.now;
    }

    /// Goes on from what a process before has kept. Who writes nothing has no session of its
    /// own.
    pub fn restore(&mut self, kept: Kept, now: Timestamp) {
        self.set_time(now);
        self.book = kept.book;
        self.begun = kept.begun;
        self.unsaved.nodes.extend(kept.unsaved);
        self.brake.restore(kept.recently_out);
        if self.writes() {
            for (name, sessions) in kept.sessions {
                let entry = self.entry(&name);
                for session in sessions {
                    let session = session.restored(now);
                    match session.scope.clone() {
                        Scope::Node => entry.session = session,
                        Scope::Device(device) => drop(entry.devices.insert(device, session)),
                    }
                }
                let on_the_node = entry.session.on_the_node().map(str::to_owned);
                entry.reports.restore(SavedReports::default(), on_the_node);
                self.look_again_at(&name);
            }
            for (name, reports) in kept.reports {
                let entry = self.entry(&name);
                let on_the_node = entry.session.on_the_node().map(str::to_owned);
                let said = entry.reports.restore(reports, on_the_node);
                self.effects.extend(said.into_iter().map(Effect::Status));
                self.unsaved.nodes.insert(name.clone());
                self.look_again_at(&name);
            }
        }
        let names: Vec<String> = self.book.nodes().map(str::to_owned).collect();
        for name in names {
            self.look_again_at(&name);
        }
    }

    /// Records an event. Returns what it has changed in the fault book.
    pub fn record(&mut self, record: &Record, now: Timestamp) -> Vec<Change> {
        self.set_time(now);
        let (id, node) = (&record.id, &record.event.node_name);
        let healthy = record.event.is_healthy;
        let counts = |changes: &[Change]| {
            let ignored = |change: &Change| matches!(change, Change::Ignored(_));
            !changes.iter().all(ignored)
        };
        // Once recorded, what it closes is gone.
        let closed: Vec<Fault> = if healthy && self.keeps_statuses() {
            let touched = self.book.touched_by(&record.event).into_iter();
            touched.cloned().collect()
        } else {
            Vec::new()
        };
        let changes = self.book.record(record);
        if self.keeps_statuses() && counts(&changes) {
            self.entry(node);
            let faults = if healthy {
                closed.iter().collect()
            } else {
                self.book.touched_by(&record.event)
            };
            if let Some(entry) = self.nodes.get_mut(node) {
                entry.reports.took_in(id, healthy, faults);
            }
        }
        self.unsaved.nodes.insert(node.clone());
        self.look_again_at(node);
        changes
    }

    /// Takes an input in. What follows from it, [`Self::decide`] says.
    pub fn take(&mut self, input: Input, now: Timestamp) {
        self.set_time(now);
        match input {
            Input::CaughtUp => (self.caught_up, self.showing.news) = (true, true),
            Input::Reread(reading) => {
                let node = reading.node().to_owned();
                self.book.take_missed(*reading);
                self.unsaved.nodes.insert(node.clone());
                self.look_again_at(&node);
            }
            Input::Policy(policy) => self.policy_changed(policy),
            Input::Switched(switched) => self.switch(*switched),
            Input::ListBegun => self.list_begun(),
            Input::Seen(view) => self.seen(view),
            Input::Gone(name) => self.gone(&name),
            Input::Listed => self.list_complete(),
            Input::Answered { node, answer } => self.answered(&node, answer),
            Input::AnswersLost => self.answers_lost(),
            Input::Found { node, found } => self.found(&node, found),
            Input::Appended { node, result } => self.appended(&node, result),
        }
    }

    /// Looks at all nodes that anything has happened to, or whose time has come. Returns what
    /// is to be done, in order.
    pub fn decide(&mut self, now: Timestamp) -> Vec<Effect> {
        self.set_time(now);
        self.dirty.extend(self.wakes.take_due(now));
        if self.brake.doubt_ends.is_some_and(|at| at <= now) {
            let doubts = self.nodes.values().filter_map(|entry| entry.patch.in_doubt);
            self.brake.doubt_ends = doubts.filter(|until| *until > now).min();
            self.brake.mark_stale();
        }
        if self.brake.pause_ends.is_some_and(|at| at <= now) {
            self.brake.pause_ends = None;
            self.brake.mark_stale();
            self.showing.news = true;
        }
        self.look();
        std::mem::take(&mut self.effects)
    }

    /// Returns when to decide again even if nothing comes in.
    pub fn wake_at(&self) -> Option<Timestamp> {
        let times = [
            self.wakes.next(),
            self.brake.pause_ends,
            self.brake.doubt_ends,
        ];
        times.into_iter().flatten().min()
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the fault book.
    pub fn book(&self) -> &FaultBook {
        &self.book
    }

    /// Returns what is to be saved of what becomes of the events of a node.
    pub fn reports(&self, node: &str) -> Option<SavedReports> {
        self.nodes.get(node)?.reports.to_save()
    }

    /// Returns the node as last seen; `None` where the cluster does not have it.
    pub fn view(&self, node: &str) -> Option<&Arc<NodeView>> {
        self.nodes.get(node)?.view.as_ref()
    }

    /// Returns the session about a node as a whole.
    pub fn session(&self, node: &str) -> Option<&Session> {
        Some(&self.nodes.get(node)?.session)
    }

    /// Returns all sessions of a node that are worth keeping over a restart.
    pub fn sessions_to_keep(&self, node: &str) -> Vec<&Session> {
        let sessions = self
            .nodes
            .get(node)
            .into_iter()
            .flat_map(NodeEntry::sessions);
        let acted_on = sessions.filter(|session| self.writes() && !session.is_blank());
        acted_on.collect()
    }

    /// Returns why a node is held back.
    pub fn hold(&self, node: &str) -> Option<&Hold> {
        self.nodes.get(node)?.hold.as_ref()
    }

    /// Returns whether anything is known of a node.
    pub fn knows(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// Returns when nodes were last taken out of service, of those that are back: to be saved,
    /// for the nodes themselves do not tell any more.
    pub fn recently_out(&self) -> &BTreeMap<String, Timestamp> {
        self.brake.recent()
    }

    /// Returns since when there is this store.
    pub fn begun(&self) -> Timestamp {
        self.begun
    }

    /// Returns whether all events that were stored at the start are recorded.
    pub fn is_caught_up(&self) -> bool {
        self.caught_up
    }

    /// Returns whether the cluster's nodes are known.
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// Returns whether it decides what is then written in the cluster.
    pub fn writes(&self) -> bool {
        self.settings.mode.writes()
    }

    /// Returns what is wanted for a node, as it was last seen or as one of which nothing is
    /// known; nothing where there is no policy.
    pub fn desired(&self, node: &str) -> Desired {
        let Some(policy) = &self.policy else {
            return Desired::default();
        };
        let faults = self.book.faults(node);
        match self.nodes.get(node) {
            Some(NodeEntry {
                observed: Some(observed),
                session,
                ..
            }) => {
                let dismissed = dismissal(observed, self.brake.switched.dropped_at, &session.times);
                assess(faults, policy, &observed.view, dismissed)
            }
            _ => assess(faults, policy, &NodeView::unknown(node), None),
        }
    }

    /// Returns what has changed and is to be saved, as saved.
    pub fn take_unsaved(&mut self) -> Unsaved {
        std::mem::take(&mut self.unsaved)
    }

    /// Takes in that these nodes are saved.
    pub fn saved(&mut self, nodes: &BTreeSet<String>) {
        for name in nodes {
            let entry = self.nodes.get_mut(name);
            if entry.is_some_and(|entry| entry.reports.saved()) {
                self.unsaved.nodes.insert(name.clone());
            }
        }
    }

    /// Takes back what could not be saved.
    pub fn still_unsaved(&mut self, unsaved: Unsaved) {
        self.unsaved.nodes.extend(unsaved.nodes);
        self.unsaved.recently_out |= unsaved.recently_out;
    }

    /// Returns whether anything is to be saved.
    pub fn is_unsaved(&self) -> bool {
        self.unsaved != Unsaved::default()
    }

    /// Returns whether what is shown may have changed since this was last asked.
    pub fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.showing.news)
    }

    /// Takes the time. Where the clock was put back, all waits end.
    fn set_time(&mut self, now: Timestamp) {
        let before = std::mem::replace(&mut self.now, now);
        let by = before.duration_since(now);
        if by <= CLOCK_SLACK {
            return;
        }
        self.log(
            Level::Warn,
            None,
            format!("the clock was put back by {by:#}: what waits is tried now"),
        );
        let mut doubt = None;
        for entry in self.nodes.values_mut() {
            for session in entry.sessions_mut() {
                session.clock_put_back(now);
            }
            entry.patch.in_doubt = entry.patch.in_doubt.map(|_| now + DOUBT);
            entry.patch.answered_at = entry.patch.answered_at.map(|at| at.min(now));
            doubt = doubt.or(entry.patch.in_doubt);
        }
        self.brake.doubt_ends = doubt;
        self.brake.clock_put_back(now);
        self.brake.pause_ends = self.brake.switched.pause_ends(now);
        self.brake.mark_stale();
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            self.set_wake(&name);
        }
        self.look_again_at_all();
    }

    /// Takes the answer to a patch in.
    fn answered(&mut self, name: &str, answer: Answer) {
        let now = self.now;
        let entry = self.entry(name);
        let counted = entry.counted(now);
        entry.patch.in_flight = false;
        // It may have been made all the same; anything else is a clear answer.
        let unknown = matches!(answer, Answer::Unknown);
        let in_doubt = (entry.patch.taking_out && unknown).then(|| now + DOUBT);
        entry.patch.in_doubt = in_doubt;
        self.brake.doubt(in_doubt);
        let failure = match answer {
            Answer::Made(view) => {
                self.entry(name).patch.answered_at = Some(now);
                self.take_view(view);
                None
            }
            Answer::Conflict => Some(Failure::Conflict),
            Answer::NotFound => {
                self.entry(name).gone();
                Some(Failure::Error { retry_after: None })
            }
            Answer::Refused { retry_after } => Some(Failure::Error { retry_after }),
            Answer::Unknown => Some(Failure::Error { retry_after: None }),
        };
        if let Some(failure) = failure {
            self.entry(name).session.failed(failure, now);
            self.session_changed(name);
        }
        let entry = self.entry(name);
        entry.patch.taking_out = false;
        if entry.counted(now) != counted {
            self.brake.mark_stale();
        }
        self.set_wake(name);
        self.look_again_at(name);
    }

    fn answers_lost(&mut self) {
        let until = self.now + DOUBT;
        for entry in self.nodes.values_mut() {
            if entry.patch.taking_out {
                entry.patch.in_doubt = Some(until);
            }
            (entry.patch.in_flight, entry.patch.taking_out) = (false, false);
            if !matches!(entry.claim.awaits, Some(Awaits::Feed(_))) {
                entry.claim.awaits = None;
            }
        }
        self.brake.doubt(Some(until));
        self.look_again_at_all();
    }

    /// Takes in what the store has done about events of a node.
    fn appended(&mut self, name: &str, result: Result<Option<Position>, ()>) {
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        let awaited = entry.claim.awaits.take();
        match (awaited, result) {
            (Some(Awaits::TakenOver { listed }), Ok(up_to)) => {
                // Stored now, or before, if under another id.
                entry.claim.known.extend(listed);
                entry.claim.awaits = up_to.map(Awaits::Feed);
            }
            (Some(Awaits::Closed { text }), Ok(up_to)) => {
                // What follows is decided by what is open then.
                entry.claim.awaits = up_to.map(Awaits::Feed);
                let level = Some(Level::Info);
                self.note(name, None, EntryKind::Attention, text, Value::Null, level);
            }
            (Some(Awaits::Closed { .. }), Err(())) => {
                self.close_again_later(name);
                return;
            }
            (Some(Awaits::TakenOver { .. }), Err(())) => {
                self.claim_later(name);
                return;
            }
            (other, _) => entry.claim.awaits = other,
        }
        self.dirty.insert(name.to_owned());
    }

    /// Returns whether what becomes of events is written: by a gpuwarden that acts. Elsewhere
    /// nothing would ever take away what is noted for it.
    fn keeps_statuses(&self) -> bool {
        self.writes() && self.settings.cluster
    }

    /// Forgets the events of a node that is gone, or another's: nothing becomes of them.
    fn forget_reports(&mut self, name: &str) {
        if self.reports(name).is_some() {
            self.unsaved.nodes.insert(name.to_owned());
        }
        let ended = self.entry(name).reports.forget(name);
        if self.keeps_statuses() {
            self.effects.extend(ended.map(Effect::Status));
        }
    }

    /// Has written what became of the events of a node.
    fn look_at_reports(&mut self, observed: &Observed, desired: &Desired) {
        // Only a gpuwarden that acts makes quarantines.
        if !self.keeps_statuses() {
            return;
        }
        let (name, now) = (&observed.view.name, self.now);
        let before = self.reports(name);
        let statuses = self.entry(name).reports.look(observed, desired, now);
        self.effects
            .extend(statuses.into_iter().map(Effect::Status));
        if self.reports(name) != before {
            self.unsaved.nodes.insert(name.clone());
        }
    }

    fn entry(&mut self, name: &str) -> &mut NodeEntry {
        let now = self.now;
        self.nodes
            .entry(name.to_owned())
            .or_insert_with(|| NodeEntry::new(Session::idle(now)))
    }

    /// Marks a node for another look.
    fn look_again_at(&mut self, name: &str) {
        self.entry(name);
        self.dirty.insert(name.to_owned());
        self.showing.unshown.insert(name.to_owned());
        self.showing.news = true;
    }

    /// Marks all nodes for another look.
    fn look_again_at_all(&mut self) {
        self.dirty.extend(self.nodes.keys().cloned());
        self.showing.unshown.extend(self.nodes.keys().cloned());
    }

    /// Marks the session of a node to be saved.
    fn session_changed(&mut self, name: &str) {
        if self.writes() {
            self.unsaved.nodes.insert(name.to_owned());
        }
    }

    /// Sets when a node is to be looked at even if nothing happens to it.
    fn set_wake(&mut self, name: &str) {
        let now = self.now;
        let sessions = self
            .nodes
            .get(name)
            .into_iter()
            .flat_map(NodeEntry::sessions);
        let sessions = sessions.filter_map(Session::wake_at);
        // Then it is no longer shown.
        let notices = self
            .book
            .faults(name)
            .iter()
            .filter_map(Fault::notice_until);
        // What is due was looked at just now, or waits for an answer that brings another look.
        let at = sessions.chain(notices).filter(|at| *at > now).min();
        self.wakes.set(name, at);
    }

    /// Notes something for the story of a node.
    fn note(
        &mut self,
        node: &str,
        session: Option<&str>,
        kind: EntryKind,
        text: String,
        detail: Value,
        level: Option<Level>,
    ) {
        let entry = Entry {
            at: self.now,
            node: node.to_owned(),
            session: session.map(str::to_owned),
            kind,
            text,
            detail,
        };
        self.effects.push(Effect::Note(entry, level));
    }

    fn log(&mut self, level: Level, node: Option<&str>, text: String) {
        let node = node.map(str::to_owned);
        self.effects.push(Effect::Log { level, node, text });
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod world;
