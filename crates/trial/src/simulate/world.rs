//! Simulated cluster: nodes, an API server with pending requests, a watch, a store, and a
//! controller with the decisions of production.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::{Entity, HealthEvent, keys};
use fleet::brake::pause::Pause;
use fleet::session::Session;
use fleet::{DeviceInput, DeviceWatch, Effect, Fleet, FleetInput, SavedState, SwitchState};
use jiff::{SignedDuration, Timestamp};
use model::event::normalise;
use model::ownership::Ownership;

use super::happening::Broken;
use super::happening::{Fate, Hand, MachineChange, Memory, NODES, Symptom};
use super::node::{SimNode, name};
use super::resources::Resources;
use super::rules::{Rules, slice, uuid};
use super::setup::{Configuration, Setup};
use super::store::Store;
use cloud::Cloud;
use requests::PendingRequest;

pub(super) mod cloud;
pub(super) mod judge;
mod pods;
mod requests;
mod resources;

/// Start of the simulated time, in Unix seconds.
const BEGIN: i64 = 1_800_000_000;

/// Simulated cluster and its controller.
pub(super) struct World {
    pub(super) fleet: Fleet,
    pub(super) setup: Setup,
    pub(super) configuration: Configuration,
    pub(super) nodes: Vec<SimNode>,
    pub(super) store: Store,
    saved: Option<SavedState>,
    pending: Vec<PendingRequest>,
    /// True if the controller received input since its last decision.
    has_input: bool,
    pub(super) now: Timestamp,
    /// Latest time that the clock has shown.
    latest: Timestamp,
    /// True once the clock was set back.
    pub(super) put_back: bool,
    /// State of the pause switch: whether remediations are paused together with new
    /// quarantines; `None` if nothing is paused.
    paused: Option<bool>,
    /// Ids of the proposals that a person has approved.
    pub(super) approved: BTreeSet<String>,
    pods_made: u64,
    pub(super) resources: Resources,
    pub(super) rules: Rules,
    cloud: Cloud,
    /// Node of each watched custom resource, by the resource's name.
    pub(super) watched: BTreeMap<String, String>,
    /// Number of effects, by kind.
    pub(super) effects: BTreeMap<&'static str, u64>,
    /// Number of sessions started.
    pub(super) sessions: u64,
}

// === impl World ===

impl World {
    pub(super) fn new(setup: &Setup) -> Result<Self, Broken> {
        let configuration = setup.configuration()?;
        let now = Timestamp::from_second(BEGIN).map_err(|why| why.to_string())?;
        let nodes = (0..NODES).map(SimNode::new);
        let mut world = Self {
            fleet: Fleet::new(configuration.settings.clone(), None, now),
            setup: setup.clone(),
            configuration,
            nodes: nodes.collect::<Option<_>>().ok_or("no node")?,
            store: Store::default(),
            saved: None,
            pending: Vec::new(),
            has_input: false,
            now,
            latest: Timestamp::UNIX_EPOCH,
            put_back: false,
            paused: None,
            approved: BTreeSet::new(),
            pods_made: 0,
            resources: Resources::default(),
            rules: Rules::new(),
            cloud: Cloud::default(),
            watched: BTreeMap::new(),
            effects: BTreeMap::new(),
            sessions: 0,
        };
        world.start(None);
        Ok(world)
    }

    /// Starts a controller with the state that a previous one kept.
    fn start(&mut self, kept: Option<SavedState>) {
        let settings = self.configuration.settings.clone();
        let policy = Arc::clone(&self.configuration.policy);
        self.fleet = Fleet::new(settings, Some(policy), self.now);
        match kept {
            Some(kept) => self.fleet.restore(kept, self.now),
            None => self.fleet.begin(),
        }
        let applied = self.fleet.book().applied();
        for node in &mut self.nodes {
            // The session on the node is the controller's only record that a boot matters.
            let session = Ownership::read(&node.view);
            node.booted = node.booted.filter(|_| session.is_some());
        }
        self.store.read_after(applied);
        self.read_events(usize::MAX);
        self.send(FleetInput::CaughtUp);
        let unread = Some("nobody has answered yet".to_owned());
        self.send(FleetInput::Switches(Box::new(SwitchState {
            unread,
            ..SwitchState::default()
        })));
        for node in &mut self.nodes {
            node.followed = false;
        }
        self.watched.clear();
        if self.setup.device_taints {
            self.list_devices();
        }
        self.list();
    }

    pub(super) fn send(&mut self, input: FleetInput) {
        self.has_input = true;
        self.fleet.handle(input, self.now);
    }

    pub(super) fn send_device(&mut self, input: DeviceInput) {
        if self.setup.device_taints {
            self.send(FleetInput::Devices(input));
        }
    }

    /// Starts the watch of devices, rules and claims with a list of them.
    fn list_devices(&mut self) {
        self.send_device(DeviceInput::Watch(DeviceWatch::Pending));
        for node in 0..self.nodes.len() {
            self.send_device(DeviceInput::Slice(name(node), Some(slice(node))));
        }
        for rule in self.rules.list() {
            self.send_device(rule);
        }
        let pods = self.nodes.iter().flat_map(|node| &node.pods);
        let claims = pods.filter_map(|(title, pod)| Some((title.clone(), pod.claim()?)));
        for (title, claim) in claims.collect::<Vec<_>>() {
            self.send_device(DeviceInput::Claim(title, Some(claim)));
        }
        self.send_device(DeviceInput::Watch(DeviceWatch::Known));
    }

    /// Delivers the switches that people have set to the controller.
    pub(super) fn read_switches(&mut self) {
        let pause = self.paused.map(|repairs| Pause {
            reason: "a simulation".to_owned(),
            by: "somebody".to_owned(),
            since: self.now,
            until: None,
            repairs,
        });
        let switched = SwitchState {
            pause,
            ..SwitchState::default()
        };
        self.send(FleetInput::Switches(Box::new(switched)));
    }

    pub(super) fn pause(&mut self, paused: Option<bool>) {
        self.paused = paused;
        self.read_switches();
    }

    /// Stores an event about a GPU that was accepted `late` seconds ago.
    pub(super) fn report(&mut self, symptom: Symptom, is_healthy: bool, is_fatal: bool, late: i64) {
        let mut event = HealthEvent {
            agent: "gpu-health-monitor".to_owned(),
            component_class: "GPU".to_owned(),
            check_name: symptom.check.to_owned(),
            node_name: name(symptom.node),
            is_fatal,
            is_healthy,
            message: format!("report {}", self.store.events().len()),
            recommended_action: symptom.action(),
            entities_impacted: vec![Entity {
                entity_type: keys::ENTITY_GPU_UUID.to_owned(),
                entity_value: uuid(symptom.node, symptom.gpu),
            }],
            ..HealthEvent::default()
        };
        let accepted = self.now - SignedDuration::from_secs(late);
        if late > 0 {
            let count = (keys::META_COUNT.to_owned(), "2".to_owned());
            event.metadata = [count].into_iter().collect();
        }
        normalise(&mut event, accepted);
        self.store.append(event, accepted);
    }

    /// Lets the controller read events.
    pub(super) fn read_events(&mut self, most: usize) {
        for record in self.store.read(most) {
            self.fleet.record(record, self.now);
        }
    }

    /// Lets the controller decide. Its requests are pending afterwards.
    pub(super) fn decide(&mut self) -> Result<(), Broken> {
        self.has_input = false;
        for effect in self.fleet.decide(self.now) {
            *self.effects.entry(kind(&effect)).or_default() += 1;
            match effect {
                Effect::PatchNode(planned) => {
                    judge::quarantine(&self.fleet, &planned, self.put_back)?;
                    if let Some(node) = self.index(&planned.node).and_then(|at| self.nodes.get(at))
                    {
                        let begun = self.resources.is_begun(&node.view);
                        judge::release(node, &planned, begun, self.now)?;
                        judge::drained(self, node, &planned)?;
                        judge::approved(self, &planned)?;
                    }
                    self.pending.push(PendingRequest::Patch(planned));
                }
                Effect::RemovePod(planned) => {
                    judge::removal(self, &planned)?;
                    self.pending.push(PendingRequest::Remove(planned));
                }
                Effect::RequestCheckpoint(planned) => {
                    judge::checkpoint(self, &planned)?;
                    self.pending.push(PendingRequest::Checkpoint(planned));
                }
                Effect::ChangeRule(planned) => {
                    judge::rule(self, &planned)?;
                    self.pending.push(PendingRequest::Rule(planned));
                }
                Effect::LookUp { node, ids } => {
                    self.pending.push(PendingRequest::LookUp(node, ids));
                }
                Effect::Append { node, events, .. } => {
                    self.pending.push(PendingRequest::Append(node, events));
                }
                Effect::WatchPods { node, watch } => self.follow(&node, watch),
                Effect::CreateResource(planned) => {
                    judge::created(self, &planned)?;
                    self.pending.push(PendingRequest::Make(planned));
                }
                Effect::DeleteResource { attempt, begun, .. } => {
                    self.pending.push(PendingRequest::Withdraw(attempt, begun));
                }
                Effect::WatchResource {
                    node, name, watch, ..
                } => self.watch_resource(node, &name, watch),
                _ => {}
            }
        }
        match self.fleet.wake_at() {
            Some(at) if at <= self.now => Err(format!("it decides in a loop, since {at}")),
            _ => Ok(()),
        }
    }

    /// Delivers the oldest pending watch events of a node, and of the rules. Returns false if there
    /// are none.
    pub(super) fn deliver(&mut self, index: usize) -> bool {
        let rule = self.rules.deliver();
        let of_rule = rule.is_some();
        if let Some(rule) = rule {
            self.send_device(rule);
        }
        let told = self
            .nodes
            .get_mut(index)
            .and_then(|node| node.undelivered.pop_front());
        let there = told.is_some();
        if let Some(view) = told {
            self.send(FleetInput::NodeObserved(view));
        }
        there || of_rule
    }

    /// Restarts the watch with a list of all nodes.
    pub(super) fn list(&mut self) {
        self.send(FleetInput::ListBegun);
        for index in 0..self.nodes.len() {
            if let Some(node) = self.nodes.get_mut(index) {
                node.undelivered.clear();
                let view = Arc::clone(&node.view);
                self.send(FleetInput::NodeObserved(view));
            }
        }
        self.send(FleetInput::Listed);
    }

    /// Saves the controller's state, after serializing and parsing it.
    pub(super) fn save(&mut self) -> Result<(), Broken> {
        let wrong = |why: serde_json::Error| format!("the saved state cannot be parsed: {why}");
        let text = serde_json::to_string(self.fleet.book()).map_err(wrong)?;
        let book = serde_json::from_str(&text).map_err(wrong)?;
        let (mut sessions, mut reports) = (BTreeMap::new(), BTreeMap::new());
        for index in 0..self.nodes.len() {
            let node = name(index);
            let text = serde_json::to_string(&self.fleet.sessions_to_keep(&node)).map_err(wrong)?;
            let kept: Vec<Session> = serde_json::from_str(&text).map_err(wrong)?;
            let waiting = self.fleet.reports(&node).cloned();
            reports.extend(waiting.map(|waiting| (node.clone(), waiting)));
            sessions.insert(node, kept);
        }
        self.saved = Some(SavedState {
            book,
            reports,
            recently_out: self.fleet.recently_out().clone(),
            begun: self.fleet.begun(),
            sessions,
            unsaved: BTreeSet::new(),
        });
        Ok(())
    }

    /// Ends the controller and starts another. Bits of `done` choose the pending requests that
    /// still arrive.
    pub(super) fn crash(&mut self, memory: Memory, done: u64) -> Result<(), Broken> {
        for bit in 0..64 {
            let fate = if done >> bit & 1 == 1 {
                Fate::DoneUnanswered
            } else {
                Fate::Lost
            };
            if !self.arrives(0, fate)? {
                break;
            }
        }
        self.pending.clear();
        self.resources.crash(&self.nodes);
        if memory == Memory::Nothing {
            self.store.lose();
            self.saved = None;
        }
        self.restart_monitor(memory == Memory::Saved);
        let kept = self.saved.clone().filter(|_| memory == Memory::Saved);
        self.start(kept);
        Ok(())
    }

    /// Lets a person change a node.
    pub(super) fn change_by_hand(&mut self, index: usize, hand: Hand) {
        let now = self.now;
        if let Some(node) = self.nodes.get_mut(index) {
            node.change_by_hand(hand, now);
        }
    }

    /// Lets a person approve what is proposed for any node.
    pub(super) fn approve(&mut self) {
        let now = self.now;
        let approved = self.nodes.iter_mut().filter_map(|node| node.approve(now));
        self.approved.extend(approved);
    }

    /// Lets a machine change a node.
    pub(super) fn change_by_machine(&mut self, index: usize, machine: MachineChange) {
        let now = self.now;
        if let Some(node) = self.nodes.get_mut(index) {
            let begun = self.resources.is_begun(&node.view);
            node.change_by_machine(machine, begun, now);
        }
    }

    /// Returns a node by its name.
    pub(super) fn node(&self, name: &str) -> Option<&SimNode> {
        self.nodes.iter().find(|node| node.view.name == name)
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.view.name == name)
    }

    /// Returns true if nothing is pending, and everything is delivered, read and decided.
    pub(super) fn is_quiet(&self) -> bool {
        let mut nodes = self.nodes.iter();
        let told = nodes.all(|node| node.undelivered.is_empty()) && self.rules.is_delivered();
        told && !self.has_input && self.pending.is_empty() && self.store.is_read()
    }

    /// Advances the clock; a negative time sets it back.
    pub(super) fn pass(&mut self, seconds: i64) {
        self.latest = self.latest.max(self.now);
        self.now += SignedDuration::from_secs(seconds);
        self.put_back |= seconds < 0;
        for node in &mut self.nodes {
            node.booted = node.booted.map(|at| at.min(self.now));
        }
    }

    /// Advances the clock by one step.
    pub(super) fn tick(&mut self) {
        self.now += SignedDuration::from_millis(1);
    }

    /// Advances the clock to its latest time before it was set back. A recovery with an earlier
    /// time would count as late.
    pub(super) fn catch_up(&mut self) {
        self.now = self.now.max(self.latest);
    }

    /// Returns the next time that the controller waits for. The expiry of a notice is not one.
    pub(super) fn waits_until(&self) -> Option<Timestamp> {
        self.fleet.wake_at()
    }
}

fn kind(effect: &Effect) -> &'static str {
    match effect {
        Effect::PatchNode(_) => "patch of a node",
        Effect::ChangeRule(_) => "change of a device's rule",
        Effect::WatchPods { .. } => "watch of pods",
        Effect::RemovePod(_) => "removal of a pod",
        Effect::CreateResource(_) => "custom resource of a repair",
        Effect::DeleteResource { .. } => "withdrawal of a repair",
        Effect::WatchResource { .. } => "watch of a repair",
        Effect::RequestCheckpoint(_) => "request for a checkpoint",
        Effect::EmitEvent { .. } => "Event of a node",
        Effect::Remediation(_) => "count of repairs",
        Effect::LookUp { .. } => "question to the store",
        Effect::Append { .. } => "events for the store",
        Effect::Journal(..) => "line of a story",
        Effect::Status(_) => "status of a record",
        Effect::Log { .. } => "line of the log",
        Effect::Evaluated(_) => "evaluation of rules",
        Effect::Decided(_) => "decision",
        Effect::UpdateConditions(_) => "condition of a node",
        Effect::Restored(_) => "node that went back",
        Effect::Trip => "trip of the circuit breaker",
    }
}
