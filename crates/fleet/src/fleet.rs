//! All nodes of a cluster and the decisions about them, as one object without I/O.
//!
//! ```text
//! record, FleetInput --> fault book, node entries --> decide: assess -> brake -> step --> Effect
//! ```
//!
//! An input only marks nodes for another look ([`Fleet::record`], [`Fleet::handle`]);
//! [`Fleet::decide`] looks at them and returns the effects to carry out. A question to the store
//! or the API server is an effect too, and its answer an input: until the answer arrives nothing
//! is decided about that node, while all others go ahead. The controller turns I/O into inputs
//! and effects into I/O; a replay and the simulators do the same with nodes that exist only
//! there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use model::event::Record;
use model::fault::{Change, Fault, FaultBook};
use model::journal::EntryKind;
use model::mode::Mode;
use model::node::NodeView;
use model::position::Position;
use model::wakes::CLOCK_SLACK;
use policy::Policy;
use policy::assess::Desired;

use crate::agenda::{Agenda, StoreQuestion};
use crate::brake::{DOUBT, Hold, MOST_ALONE, NodeLabel};
use crate::devices::{DeviceInput, DeviceWatch, Devices};
use crate::drain::DrainConfig;
use crate::entry::NodeEntry;
use crate::io::{FleetInput, Level};
use crate::look::Look;
use crate::remediation::RemediationConfig;
use crate::session::{JournalNote, Phase, Session};
use crate::state::FleetState;
use crate::waiting::{BrakeState, SwitchState};
use crate::{Effect, Owns};

mod checkpoint;
mod show;
mod situation;

pub use checkpoint::{SavedState, Unsaved};
pub use situation::Situation;

/// Settings of a fleet, fixed while a process runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Mode: observe, dry run or act.
    pub mode: Mode,
    /// Nodes that no other gpuwarden speaks for.
    pub owns: Owns,
    /// True if there is a cluster; without one no effect changes anything.
    pub cluster: bool,
    /// Id of the store.
    pub store: String,
    /// Feed position of the last event that counts as history.
    pub since: Position,
    /// True if the brake is on. Without it only a pause holds nodes back.
    pub brake: bool,
    /// Label of GPU nodes. The brake's percentages refer to their number.
    pub gpu_label: NodeLabel,
    /// Configuration of drains; `None` leaves the pods of nodes that are out of service alone.
    pub drain: Option<Arc<DrainConfig>>,
    /// Configuration of remediation; `None` leaves drained nodes alone.
    pub remediation: Option<Arc<RemediationConfig>>,
    /// Age limit of a node's newest report: older faults are dropped once the cluster no longer
    /// has the node.
    pub retention: SignedDuration,
    /// True if a node that flaps waits before it comes back. False where time only passes with
    /// events, as in a replay: no event would end the wait.
    pub returns_wait: bool,
}

/// A list of the nodes that is being delivered.
#[derive(Debug)]
struct Relisted {
    /// Names of the nodes listed so far.
    seen: BTreeSet<String>,
    began: Timestamp,
}

/// All nodes of a cluster and the decisions about them; see the module.
#[derive(Debug)]
pub struct Fleet {
    pub(crate) state: FleetState,
    pub(crate) nodes: BTreeMap<String, NodeEntry>,
    pub(crate) brake: BrakeState,
    pub(crate) agenda: Agenda,
    /// A list that is not complete yet.
    relisted: Option<Relisted>,
}

// === impl Fleet ===

impl Fleet {
    /// Creates a fleet without nodes or faults.
    pub fn new(settings: Settings, policy: Option<Arc<Policy>>, now: Timestamp) -> Self {
        Self {
            state: FleetState {
                listed: !settings.cluster,
                caught_up: false,
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
            relisted: None,
        }
    }

    /// Records an event. Returns what it changed in the fault book.
    pub fn record(&mut self, record: &Record, now: Timestamp) -> Vec<Change> {
        self.set_time(now);
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
        let ignored = |change: &Change| matches!(change, Change::Ignored(_));
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
        self.agenda.unsaved.nodes.insert(event.node_name.clone());
        self.look_again_at(&event.node_name);
        changes
    }

    /// Handles an input. [`Self::decide`] returns the effects that follow.
    pub fn handle(&mut self, input: FleetInput, now: Timestamp) {
        self.set_time(now);
        match input {
            FleetInput::CaughtUp => (self.state.caught_up, self.agenda.view_changed) = (true, true),
            FleetInput::Reread(reading) => {
                let node = reading.node().to_owned();
                self.state.book.take_missed(*reading);
                self.agenda.unsaved.nodes.insert(node.clone());
                self.look_again_at(&node);
            }
            FleetInput::Policy(policy) => self.policy_changed(policy),
            FleetInput::Switches(switches) => self.switch(*switches),
            FleetInput::ListBegun => self.list_begun(),
            FleetInput::NodeObserved(view) => self.seen(view),
            FleetInput::NodeGone(name) => self.gone(&name),
            FleetInput::Listed => self.list_complete(),
            FleetInput::AnswersLost => self.answers_lost(),
            FleetInput::Devices(input) => self.update_devices(input),
            FleetInput::NodePatched { node, answer } => {
                self.on(&node, |look| look.patch_answered(answer));
            }
            FleetInput::RuleChanged { node, rule, result } => {
                // The answer updates the rules even if the node is gone.
                let result = result.map(|after| self.state.devices.rule_answered(&rule, after));
                self.on(&node, |look| look.rule_answered(&rule, result));
            }
            FleetInput::Pods { node, update } => {
                self.on(&node, |look| look.pods_updated(update));
            }
            FleetInput::PodAnswered { node, uid, answer } => {
                self.on(&node, |look| look.removal_answered(&uid, answer));
            }
            FleetInput::Resource { node, name, update } => {
                self.on(&node, |look| look.resource_updated(&name, update));
            }
            FleetInput::ResourceCreated { node, key, answer } => {
                self.on(&node, |look| look.resource_created(&key, answer));
            }
            FleetInput::EventsFound { node, found } => {
                self.on(&node, |look| look.events_found(found));
            }
            FleetInput::EventsAppended { node, result } => {
                self.on(&node, |look| look.events_appended(result));
            }
        }
    }

    /// Runs `handle` for a node, if the node is known.
    fn on(&mut self, node: &str, take: impl FnOnce(&mut Look<'_>)) {
        if let Some(mut look) = self.look_at(node) {
            take(&mut look);
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
            self.look_again_at_all();
            self.brake.mark_stale();
            self.agenda.view_changed = true;
        }
        self.look();
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
        self.log(
            Level::Warn,
            None,
            format!("the clock was put back by {by:#}: what waits is tried now"),
        );
        let mut doubt = None;
        for entry in self.nodes.values_mut() {
            entry.session.clock_moved_back(now);
            for stage in entry.stages.all_mut() {
                stage.clock_moved_back(now);
            }
            entry.patch.in_doubt = entry.patch.in_doubt.map(|_| now + DOUBT);
            entry.patch.answered_at = entry.patch.answered_at.map(|at| at.min(now));
            doubt = doubt.or(entry.patch.in_doubt);
        }
        self.brake.doubt_ends = doubt;
        self.brake.clock_moved_back(now);
        self.brake.pause_ends = self.state.switches.pause_ends(now);
        self.brake.mark_stale();
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            self.look_at(&name)
                .into_iter()
                .for_each(|mut look| look.set_wake());
        }
        self.look_again_at_all();
    }

    fn entry(&mut self, name: &str) -> &mut NodeEntry {
        let entry = self.nodes.entry(name.to_owned());
        entry.or_insert_with(|| NodeEntry::new(self.state.now))
    }

    /// Marks a node for another look.
    fn look_again_at(&mut self, name: &str) {
        self.entry(name);
        self.agenda.look_again_at(name);
    }

    /// Handles the begin of a list.
    fn list_begun(&mut self) {
        // Changes that people made during the gap may have happened at any time in it.
        for entry in self.nodes.values_mut() {
            entry.session.watched = false;
        }
        self.relisted = Some(Relisted {
            seen: BTreeSet::new(),
            began: self.state.now,
        });
    }

    /// Handles the observed state of a node.
    fn seen(&mut self, view: Arc<NodeView>) {
        if let Some(list) = &mut self.relisted {
            list.seen.insert(view.name.clone());
        }
        let (name, began) = (
            view.name.clone(),
            self.relisted.as_ref().map(|list| list.began),
        );
        self.entry(&name);
        if let Some(mut look) = self.look_at(&name)
            && look.update_view(view, began)
        {
            look.agenda.look_again_at(look.name);
        }
    }

    /// Handles the end of a list.
    fn list_complete(&mut self) {
        let list = self.relisted.take();
        let seen = list.map(|list| list.seen).unwrap_or_default();
        let gone: Vec<String> = self
            .nodes
            .iter()
            .filter(|(name, entry)| entry.view.is_some() && !seen.contains(*name))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            self.gone(&name);
        }
        self.state.listed = true;
        self.warn_of_nodes();
        self.look_again_at_all();
        self.agenda.view_changed = true;
    }

    /// Warns, after a list, if the own node is missing, or too many nodes act for themselves.
    fn warn_of_nodes(&mut self) {
        let Owns::Node(own) = self.state.settings.owns.clone() else {
            return;
        };
        if !self.writes() {
            return;
        }
        if self.view(&own).is_none() {
            let text = "the cluster has no node of this name: its faults cannot be acted on until \
                        it appears; --node-name sets the name";
            self.log(Level::Warn, Some(&own), text.to_owned());
        }
        let entries = self.nodes.values();
        let nodes = entries.filter(|entry| entry.view.is_some()).count();
        if nodes > MOST_ALONE {
            let text = format!(
                "each node acts for itself, and budgets do not hold what fails at the same \
                 moment: in a cluster of more than {MOST_ALONE} nodes run `gpuwarden agent` on \
                 them, and one `gpuwarden controller`; this one has {nodes}"
            );
            self.log(Level::Warn, None, text);
        }
    }

    /// Handles that the cluster no longer has a node.
    fn gone(&mut self, name: &str) {
        self.entry(name).remove_from_cluster();
        self.brake.mark_stale();
        self.look_again_at(name);
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
            self.log(Level::Warn, None, text);
        }
        self.look_again_at_all();
    }

    /// Gives up all requests about nodes that are still unanswered: the answers were lost.
    fn answers_lost(&mut self) {
        let until = self.state.now + DOUBT;
        for entry in self.nodes.values_mut() {
            if entry.patch.taking_out {
                entry.patch.in_doubt = Some(until);
            }
            (entry.patch.in_flight, entry.patch.taking_out) = (false, false);
            for stage in entry.stages.all_mut() {
                stage.answers_lost();
            }
            if !matches!(entry.claim.question, Some(StoreQuestion::AwaitFeed(_))) {
                entry.claim.question = None;
            }
        }
        self.brake.add_doubt(Some(until));
        self.look_again_at_all();
    }

    /// Sets the switches that people have set in the cluster.
    fn switch(&mut self, switches: SwitchState) {
        let before = std::mem::replace(&mut self.state.switches, switches);
        if before == self.state.switches {
            return;
        }
        let now = &self.state.switches;
        let repairs = |one: &SwitchState| one.pause.as_ref().filter(|pause| pause.repairs).cloned();
        if now.dropped_at != before.dropped_at
            || now.unread != before.unread
            || repairs(now) != repairs(&before)
        {
            // Which faults count has changed, or whether remediation is paused.
            self.look_again_at_all();
        }
        self.brake.pause_ends = self.state.switches.pause_ends(self.state.now);
        self.brake.mark_stale();
        self.agenda.view_changed = true;
    }

    /// Sets the policy, and marks all nodes for another look.
    fn policy_changed(&mut self, policy: Option<Arc<Policy>>) {
        let before = std::mem::replace(&mut self.state.policy, policy.clone());
        self.look_again_at_all();
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

    /// Marks all nodes for another look.
    fn look_again_at_all(&mut self) {
        self.agenda.dirty.extend(self.nodes.keys().cloned());
        self.agenda.unshown.extend(self.nodes.keys().cloned());
    }

    fn log(&mut self, level: Level, node: Option<&str>, text: String) {
        self.agenda.log(level, node, text);
    }

    /// Looks at all marked nodes.
    pub(super) fn look(&mut self) {
        // Decisions need the whole state: a missing fault or node would change them.
        let known = self.state.caught_up && self.state.listed && !self.state.awaits_devices();
        let Some(policy) = self.state.policy.clone().filter(|_| known) else {
            return;
        };
        let mut looked_at = Vec::new();
        while let Some(name) = self.agenda.dirty.pop_first() {
            self.agenda.unshown.insert(name.clone());
            let Some(mut look) = self.look_at(&name) else {
                self.agenda.effects.push(Effect::Decided(name));
                continue;
            };
            if !look.run(&policy) {
                continue;
            }
            if self.state.settings.mode.decides() {
                looked_at.push(name.clone());
            }
            self.forget_if_gone(&name);
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
            if let Some(mut look) = self.look_at(name) {
                look.step_waiting(policy, hold, looked_at);
            }
        }
        self.brake.plan = plan;
        self.agenda.view_changed = true;
    }

    /// Returns the look at a node; `None` for a node without an entry.
    pub(super) fn look_at<'a>(&'a mut self, name: &'a str) -> Option<Look<'a>> {
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
