//! All nodes of a cluster and the decisions about them, as one object without I/O.
//!
//! ```text
//! record, FleetInput --> fault book, node entries --> decide: assess -> brake -> step --> Effect
//! ```
//!
//! An input only marks nodes for a look ([`Fleet::record`], [`Fleet::handle`]);
//! [`Fleet::decide`] looks at them and returns the effects to carry out. A question to the store
//! or the API server is an effect too, and its answer an input: until the answer arrives nothing
//! is decided about that node, while all others go ahead. The controller turns I/O into inputs
//! and effects into I/O; a replay and the simulators do the same with nodes that exist only
//! there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use model::event::EventRecord;
use model::fault::{Fault, FaultBook, FaultChange};
use model::journal::EntryKind;
use model::mode::Mode;
use model::node::NodeView;
use model::position::Position;
use model::topology::missing_labels;
use model::wakes::CLOCK_SLACK;
use policy::Policy;
use policy::assess::Desired;

use crate::Effect;
use crate::agenda::Agenda;
use crate::brake::{DOUBT, Hold};
use crate::devices::{DeviceInput, DeviceWatch, Devices};
use crate::entry::NodeEntry;
use crate::io::{FleetInput, Level};
use crate::look::Look;
use crate::session::{JournalNote, Phase, Session};
use crate::state::FleetState;
use crate::waiting::{BrakeState, SwitchState};

mod checkpoint;
mod list;
mod settings;
mod show;
mod situation;

pub use checkpoint::{SavedState, Unsaved};
use list::NodeList;
pub use settings::Settings;
pub use situation::Situation;

/// All nodes of a cluster and the decisions about them; see the module.
#[derive(Debug)]
pub struct Fleet {
    pub(crate) state: FleetState,
    pub(crate) nodes: BTreeMap<String, NodeEntry>,
    pub(crate) brake: BrakeState,
    pub(crate) agenda: Agenda,
    /// A list that is not complete yet.
    list: Option<NodeList>,
}

// === impl Fleet ===

impl Fleet {
    /// Creates a fleet without nodes or faults.
    pub fn new(settings: Settings, policy: Option<Arc<Policy>>, now: Timestamp) -> Self {
        Self {
            state: FleetState {
                listed: !settings.cluster,
                caught_up: false,
                restored: Position::START,
                analysed: None,
                book: FaultBook::since(settings.since),
                settings,
                policy,
                devices: Devices::default(),
                switches: SwitchState::default(),
                begun: Timestamp::UNIX_EPOCH,
                now,
            },
            nodes: BTreeMap::new(),
            brake: BrakeState {
                stale: true,
                ..BrakeState::default()
            },
            agenda: Agenda::default(),
            list: None,
        }
    }

    /// Records an event. Returns what it changed in the fault book.
    pub fn record(&mut self, record: &EventRecord, now: Timestamp) -> Vec<FaultChange> {
        self.set_time(now);
        let view = self.view(&record.event.node_name);
        let missing = view.map(|view| missing_labels(&record.event, &view.labels));
        let located = missing
            .filter(|missing| !missing.is_empty())
            .map(|missing| {
                let mut located = record.clone();
                located.event.metadata.extend(missing);
                located
            });
        let record = located.as_ref().unwrap_or(record);
        // Only a fleet that acts writes statuses; another would never clear what is kept for
        // them.
        let (event, keeps) = (&record.event, self.state.acts());
        // The faults that a recovery closes are gone once it is recorded.
        let closed: Vec<Fault> = if event.is_healthy && keeps {
            self.state
                .book
                .touched_by(event)
                .into_iter()
                .cloned()
                .collect()
        } else {
            Vec::new()
        };
        let changes = self.state.book.record(record);
        let ignored = |change: &FaultChange| matches!(change, FaultChange::Ignored(_));
        if keeps && !changes.iter().all(ignored) {
            let faults = if event.is_healthy {
                closed.iter().collect()
            } else {
                self.state.book.touched_by(event)
            };
            let entry = self.nodes.entry(event.node_name.clone());
            let entry = entry.or_insert_with(|| NodeEntry::new(now));
            entry.reports.add(&record.id, event.is_healthy, faults);
        }
        let explained = changes.iter().filter_map(|change| match change {
            FaultChange::Explained(node) => Some(node),
            _ => None,
        });
        for node in explained.chain([&event.node_name]) {
            self.agenda.unsaved.nodes.insert(node.clone());
            self.look_again_at(node).reported = record.seq;
        }
        changes
    }

    /// Handles an input. [`Self::decide`] returns the effects that follow.
    pub fn handle(&mut self, input: FleetInput, now: Timestamp) {
        self.set_time(now);
        match input {
            FleetInput::CaughtUp => (self.state.caught_up, self.agenda.view_changed) = (true, true),
            FleetInput::Analysed(upto) => self.state.analysed = Some(upto),
            FleetInput::Reread(reading) => {
                let node = reading.node().to_owned();
                let mut changed = self.state.book.add_missed(*reading);
                if let Some(view) = self.view(&node).cloned() {
                    changed.extend(self.state.book.locate(&node, &view.labels));
                }
                changed.insert(node);
                self.look_again_at_changed(changed);
            }
            FleetInput::Located { node, labels } => {
                let changed = self.state.book.locate(&node, &labels);
                self.look_again_at_changed(changed);
            }
            FleetInput::Policy(policy) => self.set_policy(policy),
            FleetInput::Switches(switches) => self.set_switches(*switches),
            FleetInput::ListBegun => {
                self.list = Some(NodeList::begin(&mut self.nodes, now));
            }
            FleetInput::NodeObserved(view) => self.node_observed(view),
            FleetInput::NodeGone(name) => self.node_gone(&name),
            FleetInput::Listed => self.list_complete(),
            FleetInput::AnswersLost => self.answers_lost(),
            FleetInput::Devices(input) => self.update_devices(input),
            FleetInput::NodePatched { node, answer } => {
                self.with_look(&node, |look| look.patch_answered(answer));
            }
            FleetInput::RuleChanged { node, rule, result } => {
                // The answer updates the rules even if the node is gone.
                let result = result.map(|after| self.state.devices.rule_answered(&rule, after));
                self.with_look(&node, |look| look.rule_answered(&rule, result));
            }
            FleetInput::Pods { node, update } => {
                self.with_look(&node, |look| look.pods_updated(update));
            }
            FleetInput::PodAnswered { node, uid, answer } => {
                self.with_look(&node, |look| look.removal_answered(&uid, answer));
            }
            FleetInput::Resource { node, name, update } => {
                self.with_look(&node, |look| look.resource_updated(&name, update));
            }
            FleetInput::ResourceCreated { node, key, answer } => {
                self.with_look(&node, |look| look.resource_created(&key, answer));
            }
            FleetInput::EventsFound { node, found } => {
                self.with_look(&node, |look| look.events_found(found));
            }
            FleetInput::EventsAppended { node, result } => {
                self.with_look(&node, |look| look.events_appended(result));
            }
        }
    }

    /// Runs `handle` with the look at a node, if the node has an entry.
    fn with_look(&mut self, node: &str, handle: impl FnOnce(&mut Look<'_>)) {
        if let Some(mut look) = self.look(node) {
            handle(&mut look);
        }
    }

    /// Looks at all nodes that inputs have marked, or whose wake-up time has come. Returns the
    /// effects to carry out, in order.
    pub fn decide(&mut self, now: Timestamp) -> Vec<Effect> {
        self.set_time(now);
        self.agenda.dirty.extend(self.agenda.wakes.take_due(now));
        if self.brake.doubt_ends.is_some_and(|at| at <= now) {
            let doubts = self.nodes.values().filter_map(|entry| entry.patch.in_doubt);
            self.brake.doubt_ends = doubts.filter(|until| *until > now).min();
            self.brake.mark_stale();
        }
        if self.brake.pause_ends.is_some_and(|at| at <= now) {
            self.brake.pause_ends = None;
            self.agenda.look_again_at_all(self.nodes.keys());
            self.brake.mark_stale();
            self.agenda.view_changed = true;
        }
        self.look_at_marked();
        std::mem::take(&mut self.agenda.effects)
    }

    /// Returns when to decide again if no input arrives.
    pub fn wake_at(&self) -> Option<Timestamp> {
        let times = [
            self.agenda.wakes.next(),
            self.brake.pause_ends,
            self.brake.doubt_ends,
        ];
        times.into_iter().flatten().min()
    }

    /// Returns the fault book.
    pub fn book(&self) -> &FaultBook {
        &self.state.book
    }

    /// Returns the node as last observed; `None` where the cluster does not have it.
    pub fn view(&self, node: &str) -> Option<&Arc<NodeView>> {
        self.nodes.get(node)?.view.as_ref()
    }

    /// Returns the session of a node.
    pub fn session(&self, node: &str) -> Option<&Session> {
        Some(&self.nodes.get(node)?.session)
    }

    /// Returns why the brake holds a node back.
    pub fn hold(&self, node: &str) -> Option<&Hold> {
        self.nodes.get(node)?.hold.as_ref()
    }

    /// Returns whether there is an entry for a node.
    pub fn knows(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// Returns whether all events that were stored at the start are recorded.
    pub fn is_caught_up(&self) -> bool {
        self.state.caught_up
    }

    /// Returns whether the nodes of the cluster have been listed.
    pub fn is_listed(&self) -> bool {
        self.state.listed
    }

    /// Returns whether decisions are written to the cluster.
    pub fn writes(&self) -> bool {
        self.state.settings.mode.writes()
    }

    /// Returns whether anything is decided: not in the mode that only observes.
    pub fn decides(&self) -> bool {
        self.state.settings.mode != Mode::Observe
    }

    /// Returns what the faults of a node ask for, given its last observed state, or that of an
    /// unknown node; nothing without a policy.
    pub fn desired(&self, node: &str) -> Desired {
        match self.nodes.get(node) {
            Some(entry) => entry.desired(node, &self.state),
            None => self.state.desired_of_unknown(node),
        }
    }

    /// Returns whether anything shown may have changed since the last call.
    pub fn take_view_changed(&mut self) -> bool {
        std::mem::take(&mut self.agenda.view_changed)
    }

    /// Sets the time. If the clock was put back, all waits end.
    fn set_time(&mut self, now: Timestamp) {
        let before = std::mem::replace(&mut self.state.now, now);
        let by = before.duration_since(now);
        if by <= CLOCK_SLACK {
            return;
        }
        self.agenda.log(
            Level::Warn,
            None,
            format!("the clock was put back by {by:#}: all waits end"),
        );
        let mut doubt = None;
        for entry in self.nodes.values_mut() {
            entry.clock_moved_back(now);
            doubt = doubt.or(entry.patch.in_doubt);
        }
        self.brake.doubt_ends = doubt;
        self.brake.clock_moved_back(now);
        self.brake.pause_ends = self.state.switches.pause_ends(now);
        self.brake.mark_stale();
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            self.look(&name)
                .into_iter()
                .for_each(|mut look| look.set_wake());
        }
        self.agenda.look_again_at_all(self.nodes.keys());
    }

    /// Marks a node for another look. Returns its entry, which is created if missing.
    fn look_again_at(&mut self, name: &str) -> &mut NodeEntry {
        self.agenda.look_again_at(name);
        let entry = self.nodes.entry(name.to_owned());
        entry.or_insert_with(|| NodeEntry::new(self.state.now))
    }

    /// Marks nodes whose faults have changed for another look, and to be saved.
    fn look_again_at_changed(&mut self, nodes: impl IntoIterator<Item = String>) {
        for node in nodes {
            self.look_again_at(&node);
            self.agenda.unsaved.nodes.insert(node);
        }
    }

    /// Handles the observed state of a node.
    fn node_observed(&mut self, view: Arc<NodeView>) {
        let name = view.name.clone();
        if let Some(list) = &mut self.list {
            list.listed.insert(name.clone());
        }
        let began = self.list.as_ref().map(|list| list.began);
        let entry = self.nodes.entry(name.clone());
        entry.or_insert_with(|| NodeEntry::new(self.state.now));
        let changed = self.state.book.locate(&name, &view.labels);
        self.look_again_at_changed(changed);
        if let Some(mut look) = self.look(&name)
            && look.update_view(view, began)
        {
            look.agenda.look_again_at(look.name);
        }
    }

    /// Handles the end of a list.
    fn list_complete(&mut self) {
        let listed = self.list.take().map(|list| list.listed).unwrap_or_default();
        let gone: Vec<String> = self
            .nodes
            .iter()
            .filter(|(name, entry)| entry.view.is_some() && !listed.contains(*name))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            self.node_gone(&name);
        }
        self.state.listed = true;
        if self.writes() {
            list::warn(&self.state.settings.owns, &self.nodes, &mut self.agenda);
        }
        self.agenda.look_again_at_all(self.nodes.keys());
        self.agenda.view_changed = true;
    }

    /// Handles that the cluster no longer has a node.
    fn node_gone(&mut self, name: &str) {
        self.look_again_at(name).remove_from_cluster();
        self.brake.mark_stale();
    }

    /// Handles a change of single devices.
    fn update_devices(&mut self, input: DeviceInput) {
        let watch = self.state.devices.watch.clone();
        for node in self.state.devices.update(input) {
            self.look_again_at(&node);
        }
        if self.state.devices.watch == watch {
            return;
        }
        if let DeviceWatch::Unserved(why) = &self.state.devices.watch {
            let text = format!(
                "single devices cannot be tainted, and where one is faulty its node is taken out: \
                 {why}"
            );
            self.agenda.log(Level::Warn, None, text);
        }
        self.agenda.look_again_at_all(self.nodes.keys());
    }

    /// Gives up all requests about nodes that are still unanswered: the answers were lost.
    fn answers_lost(&mut self) {
        let until = self.state.now + DOUBT;
        for entry in self.nodes.values_mut() {
            entry.answers_lost(until);
        }
        self.brake.add_doubt(Some(until));
        self.agenda.look_again_at_all(self.nodes.keys());
    }

    /// Sets the switches that people have set in the cluster.
    fn set_switches(&mut self, switches: SwitchState) {
        let before = std::mem::replace(&mut self.state.switches, switches);
        if before == self.state.switches {
            return;
        }
        let now = &self.state.switches;
        let remediation_pause =
            |one: &SwitchState| one.pause.as_ref().filter(|pause| pause.repairs).cloned();
        if now.dropped_at != before.dropped_at
            || now.unread != before.unread
            || remediation_pause(now) != remediation_pause(&before)
        {
            // Which faults count has changed, or whether remediation is paused.
            self.agenda.look_again_at_all(self.nodes.keys());
        }
        self.brake.pause_ends = self.state.switches.pause_ends(self.state.now);
        self.brake.mark_stale();
        self.agenda.view_changed = true;
    }

    /// Sets the policy, and marks all nodes for another look.
    fn set_policy(&mut self, policy: Option<Arc<Policy>>) {
        let before = std::mem::replace(&mut self.state.policy, policy.clone());
        self.agenda.look_again_at_all(self.nodes.keys());
        self.brake.mark_stale();
        self.agenda.view_changed = true;
        let (Some(policy), Some(_)) = (policy, before) else {
            return; // The first policy changes nothing.
        };
        let names = policy.rule_sets.iter().map(|set| set.name.as_str());
        let names: Vec<&str> = names.collect();
        let text = format!(
            "the policy {} has changed; its rule sets are: {}",
            policy.source,
            names.join(", ")
        );
        let (book, now) = (&self.state.book, self.state.now);
        for (name, entry) in &self.nodes {
            if entry.session.phase != Phase::Idle || !book.faults(name).is_empty() {
                let note = JournalNote::new(EntryKind::Rules, text.clone());
                let session = entry.session.id.as_deref();
                self.agenda.journal(now, name, session, note, None);
            }
        }
    }

    /// Looks at all marked nodes.
    pub(super) fn look_at_marked(&mut self) {
        // Decisions need the whole state: a missing fault or node would change them.
        let is_ready = self.state.caught_up && self.state.listed && !self.state.awaits_devices();
        let Some(policy) = self.state.policy.clone().filter(|_| is_ready) else {
            return;
        };
        let mut looked_at = Vec::new();
        while let Some(name) = self.agenda.dirty.pop_first() {
            self.agenda.unshown.insert(name.clone());
            let Some(mut look) = self.look(&name) else {
                self.agenda.effects.push(Effect::Decided(name));
                continue;
            };
            if !look.run(&policy) {
                continue;
            }
            if self.state.settings.mode.decides() {
                looked_at.push(name.clone());
            }
            let has_faults = !self.state.book.faults(&name).is_empty();
            if !has_faults && self.nodes.get(&name).is_some_and(NodeEntry::is_over) {
                self.nodes.remove(&name);
            }
            self.agenda.effects.push(Effect::Decided(name));
        }
        self.step_waiting_nodes(&policy);
        for name in looked_at {
            // Not while a patch of the node is in flight: the API server serialises writes to
            // one object, and the cordon would wait for the conditions. The answer triggers
            // another look.
            let conditions_changed = match self.nodes.get_mut(&name) {
                Some(entry) => {
                    !entry.patch.in_flight && entry.conditions_changed(&name, &self.state)
                }
                None => true,
            };
            if conditions_changed {
                self.agenda.effects.push(Effect::UpdateConditions(name));
            }
        }
    }

    /// Asks the brake about all waiting nodes, and steps the sessions of those that may go.
    fn step_waiting_nodes(&mut self, policy: &Policy) {
        if !self.brake.stale || self.brake.waiting.is_empty() {
            return;
        }
        let plan = self.brake.make_plan(&self.nodes, &self.state);
        if plan.trip {
            // The breaker holds from now on, even before it is written to the cluster.
            self.state.switches.breaker.get_or_insert(Hold::Tripped);
            self.agenda.effects.push(Effect::Trip);
        }
        let stop = self.state.stop();
        let looked_at = std::mem::take(&mut self.brake.looked_at);
        let started: BTreeSet<&str> = plan.start.iter().map(String::as_str).collect();
        let rest: Vec<String> = (self.brake.waiting.keys())
            .filter(|name| !started.contains(name.as_str()))
            .cloned()
            .collect();
        for name in plan.start.iter().chain(&rest) {
            // A node whose patch is in doubt already counts as out, and only a person's switch
            // stops it.
            let free = started.contains(name.as_str())
                || (self.brake.waiting.get(name)).is_some_and(|one| one.forced_by.is_some());
            let in_doubt = || stop.as_ref().filter(|_| !free);
            let hold = plan.held.get(name).or_else(in_doubt);
            let looked_at = looked_at.contains(name);
            if let Some(mut look) = self.look(name) {
                look.step_waiting(policy, hold, looked_at);
            }
        }
        self.brake.plan = plan;
        self.agenda.view_changed = true;
    }

    /// Returns the look at a node; `None` for a node without an entry.
    pub(super) fn look<'a>(&'a mut self, name: &'a str) -> Option<Look<'a>> {
        Some(Look {
            name,
            entry: self.nodes.get_mut(name)?,
            state: &mut self.state,
            brake: &mut self.brake,
            agenda: &mut self.agenda,
        })
    }
}

#[cfg(test)]
mod tests;
