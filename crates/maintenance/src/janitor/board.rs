//! All resources as one object: observations and responses go in, effects come out.
//!
//! `signal`, [`gpu_reset`] and [`handover`] decide about single resources (`board/next.rs`).
//! The board ensures that each resource has one action at a time, and each node one resource at
//! a time.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use model::listing::Listing;
use model::node::NodeView;
use serde_json::Value;

use super::Action;
use super::config::JanitorConfig;
use super::sending::ASK_AGAIN;
use super::signal::ObservedNode;
use crate::gpu_reset::{self, ServicePod, job_name};
use crate::handover;
use crate::{Maintenance, MaintenanceResource, ResourceKey, is_older};

mod entry;
mod events;
mod io;
mod next;
mod nodes;

use entry::BoardEntry;
use events::events_of;
pub use io::{CreateResult, Effect, Input, NodeUpdate, ResourceEvent, WriteResult};

/// Wait before a failed request to the API server is repeated.
const WRITE_AGAIN: SignedDuration = SignedDuration::from_secs(5);
/// Wait before a failed deletion of an old resource is repeated. Nothing depends on it.
const DELETE_AGAIN: SignedDuration = SignedDuration::from_mins(1);

/// All resources and their nodes.
#[derive(Clone, Debug)]
pub struct Board {
    config: JanitorConfig,
    /// Lifetime of a resource after its end. `None` if resources are kept for ever.
    ttl: Option<SignedDuration>,
    /// Node that this board is restricted to. `None` if it covers all nodes.
    only: Option<String>,
    /// Unique id of this process.
    process: String,
    entries: BTreeMap<ResourceKey, BoardEntry>,
    nodes: BTreeMap<String, NodeEntry>,
    /// Jobs that reset GPUs, by name, with the termination message of their pods.
    jobs: BTreeMap<String, (Value, Option<String>)>,
    jobs_listed: bool,
    /// Time of the first input.
    since: Option<Timestamp>,
    /// Names of the resources, by kind.
    names: BTreeMap<Maintenance, Listing<String, ()>>,
    wakes: BTreeSet<(Timestamp, ResourceKey)>,
}

/// State of a node and its resources.
#[derive(Clone, Debug, Default)]
struct NodeEntry {
    /// Keys of the node's resources.
    keys: BTreeSet<ResourceKey>,
    followed: bool,
    follows_pods: bool,
    observed: ObservedNode,
    view: Option<Box<NodeView>>,
    pods: Option<Vec<ServicePod>>,
    /// True if a resource that may have left changes on the node has disappeared.
    vanished: bool,
    /// True while such a change is being undone.
    busy: bool,
}

// === impl Board ===

impl Board {
    /// Creates an empty board. `process` is a name that no other process has, nor had this one
    /// before a restart.
    pub fn new(config: JanitorConfig, ttl: Option<SignedDuration>, process: String) -> Self {
        Self {
            config,
            ttl,
            only: None,
            process,
            entries: BTreeMap::new(),
            nodes: BTreeMap::new(),
            jobs: BTreeMap::new(),
            jobs_listed: false,
            since: None,
            names: BTreeMap::new(),
            wakes: BTreeSet::new(),
        }
    }

    /// Restricts the board to the resources of one node, for a janitor that runs on that node
    /// beside others.
    #[must_use]
    pub fn for_node(self, node: Option<String>) -> Self {
        Self { only: node, ..self }
    }

    /// Returns the configuration of the janitor.
    pub fn config(&self) -> &JanitorConfig {
        &self.config
    }

    /// Returns the kinds of resources that are carried out.
    pub fn kinds(&self) -> impl Iterator<Item = Maintenance> + '_ {
        let all = Maintenance::ALL.into_iter();
        all.filter(|kind| self.carries_out(*kind))
    }

    /// Returns the time of the next [`Input::Time`].
    pub fn wake_at(&self) -> Option<Timestamp> {
        self.wakes.first().map(|(time, _)| *time)
    }

    /// Handles an input and returns its effects. The caller reports the response to each
    /// effect, except to those that start or stop watches and to [`Effect::Notify`].
    pub fn handle(&mut self, input: Input, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.since.get_or_insert(now);
        match input {
            Input::ListBegun(kind) => self.names.entry(kind).or_default().begin(),
            Input::Listed(kind) => self.listed(kind, now, &mut effects),
            Input::Updated(resource) => self.updated(*resource, now, &mut effects),
            Input::Deleted(key) => {
                self.names.entry(key.kind).or_default().remove(&key.name);
                self.deleted(&key, now, &mut effects);
            }
            Input::Node(name, update) => self.node_updated(&name, update, now, &mut effects),
            Input::Pods(name, pods) => {
                if let Some(node_entry) = self.nodes.get_mut(&name).filter(|one| one.followed) {
                    node_entry.pods = Some(pods);
                    self.evaluate_node(&name, now, &mut effects);
                }
            }
            Input::Jobs { listed } => {
                if !listed {
                    self.jobs.clear();
                }
                self.jobs_listed = listed;
                self.evaluate_resets(now, &mut effects);
            }
            Input::Job(name, job) => {
                match job {
                    Some(job) => drop(self.jobs.insert(name, *job)),
                    None => drop(self.jobs.remove(&name)),
                }
                self.evaluate_resets(now, &mut effects);
            }
            Input::NodeMarked(name) if !self.is_mine(&name) => {}
            Input::NodeMarked(name) => {
                self.nodes.entry(name.clone()).or_default().vanished = true;
                self.evaluate_node(&name, now, &mut effects);
            }
            Input::Written(key, written) => self.written(&key, written, now, &mut effects),
            Input::Answered(key, operation, answer) => {
                let entry = self.entries.get_mut(&key);
                // The name may belong to another resource by now.
                if let Some(entry) = entry.filter(|one| one.resource.operation() == operation) {
                    entry.answered(answer, now);
                    self.evaluate(&key, now, &mut effects);
                }
            }
            Input::Changed(by, node, view) => {
                self.changed(by.as_ref(), &node, view, now, &mut effects);
            }
            Input::Created(key, made) => self.made(&key, made, now, &mut effects),
            Input::Stopped(key) => self.tried(&key, WRITE_AGAIN, now, &mut effects),
            Input::ExpiryTried(key) => self.tried(&key, DELETE_AGAIN, now, &mut effects),
            Input::NodeTried(key) => {
                if let Some(entry) = self.entries.get_mut(&key) {
                    entry.asking = false;
                    entry.memory.ask_after = now.checked_add(ASK_AGAIN).ok();
                }
                self.evaluate(&key, now, &mut effects);
            }
            Input::Time => self.time(now, &mut effects),
        }
        effects
    }

    /// Returns the resource that is working on a node, among the `chosen` ones.
    pub(super) fn working_on(
        &self,
        node: &str,
        chosen: impl Fn(&ResourceKey) -> bool,
    ) -> Option<String> {
        let node_entry = self.nodes.get(node)?;
        let view = node_entry.view.as_deref();
        let works = |entry: &BoardEntry| {
            let resource = &entry.resource;
            let holds = match resource.kind {
                Maintenance::Reboot | Maintenance::Terminate => {
                    resource.status.start.is_some() && !resource.is_over()
                }
                Maintenance::Reset => gpu_reset::holds(resource, view),
                Maintenance::HandOver => handover::holds(resource, view),
            };
            holds || (entry.writing.is_some() && !resource.is_over())
        };
        let keys = node_entry
            .keys
            .iter()
            .filter(|key| self.carries_out(key.kind));
        let mut keys = keys.filter(|key| chosen(key));
        let first = keys.find(|key| self.entries.get(key).is_some_and(works));
        first.map(ResourceKey::title)
    }

    fn carries_out(&self, kind: Maintenance) -> bool {
        match Action::of(kind) {
            Some(Action::Reset) => self.config.resets.is_some(),
            Some(action) => self.config.rules(action).is_some(),
            None => true,
        }
    }

    fn is_open(&self, resource: &MaintenanceResource) -> bool {
        self.carries_out(resource.kind) && resource.is_open()
    }

    fn is_mine(&self, node: &str) -> bool {
        self.only.as_ref().is_none_or(|own| own == node)
    }

    /// Returns whether all resources that may be in progress are known.
    fn is_ready(&self) -> bool {
        let is_listed = |kind| self.names.get(&kind).is_some_and(Listing::is_complete);
        self.kinds().all(is_listed)
    }

    fn listed(&mut self, kind: Maintenance, now: Timestamp, effects: &mut Vec<Effect>) {
        for (name, ()) in self.names.entry(kind).or_default().end() {
            self.deleted(&ResourceKey { kind, name }, now, effects);
        }
        if self.is_ready() {
            for node in self.nodes.keys().cloned().collect::<Vec<_>>() {
                self.evaluate_node(&node, now, effects);
            }
        }
    }

    fn updated(
        &mut self,
        resource: MaintenanceResource,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        if !self.is_mine(&resource.node) {
            return;
        }
        let key = resource.key();
        let names = self.names.entry(key.kind).or_default();
        names.set(key.name.clone(), ());
        if (self.entries.get(&key)).is_some_and(|known| known.resource.uid != resource.uid) {
            // A new resource with the name of a deleted one.
            self.deleted(&key, now, effects);
        }
        if let Some(entry) = self.entries.get_mut(&key) {
            if resource.is_older(&entry.resource) {
                return;
            }
            if entry.outdated.as_ref() != Some(&resource.version) {
                entry.outdated = None;
            }
            let before = std::mem::replace(&mut entry.resource, resource);
            self.notify(&key, Some(&before), now, effects);
        } else {
            let node = resource.node.clone();
            self.entries.insert(key.clone(), BoardEntry::new(resource));
            let node_entry = self.nodes.entry(node).or_default();
            node_entry.keys.insert(key.clone());
            self.notify(&key, None, now, effects);
        }
        self.evaluate_siblings(&key, now, effects);
    }

    /// Reports the events of a change of a resource, given its previous state.
    fn notify(
        &self,
        key: &ResourceKey,
        before: Option<&MaintenanceResource>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        let after = self.entries.get(key).map(|entry| &entry.resource);
        let node = after.or(before).map(|one| one.node.as_str());
        let keys = node.and_then(|node| self.nodes.get(node));
        let of_node = keys.into_iter().flat_map(|node_entry| &node_entry.keys);
        let of_node = of_node.filter_map(|key| self.entries.get(key));
        let resets = of_node.filter(|one| one.resource.kind == Maintenance::Reset);
        let active = resets.filter(|one| gpu_reset::is_active(&one.resource));
        let events = events_of(before, after, active.count(), now);
        effects.extend(events.into_iter().map(Effect::Notify));
    }

    fn deleted(&mut self, key: &ResourceKey, now: Timestamp, effects: &mut Vec<Effect>) {
        self.set_wake(key, None);
        let Some(BoardEntry { resource, .. }) = self.entries.remove(key) else {
            return;
        };
        self.notify(key, Some(&resource), now, effects);
        if let Some(node_entry) = self.nodes.get_mut(&resource.node) {
            node_entry.keys.remove(key);
            node_entry.vanished |= key.kind.finalizer().is_some();
        }
        self.evaluate_node(&resource.node, now, effects);
    }

    fn node_updated(
        &mut self,
        name: &str,
        update: Option<Box<NodeUpdate>>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        let Some(node_entry) = self
            .nodes
            .get_mut(name)
            .filter(|node_entry| node_entry.followed)
        else {
            return;
        };
        let is_old = |new: &NodeUpdate| {
            let old = node_entry
                .view
                .as_ref()
                .filter(|old| old.uid == new.view.uid);
            old.is_some_and(|old| is_older(&new.view.resource_version, &old.resource_version))
        };
        if update.as_deref().is_some_and(is_old) {
            return;
        }
        (node_entry.observed, node_entry.view) = match update {
            Some(update) => (
                ObservedNode::Present(update.observation),
                Some(Box::new(update.view)),
            ),
            None => (ObservedNode::Absent, None),
        };
        self.evaluate_node(name, now, effects);
    }

    fn written(
        &mut self,
        key: &ResourceKey,
        written: WriteResult,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let version = entry.writing.take();
        match written {
            WriteResult::Done(resource) if resource.uid == entry.resource.uid => {
                let before = entry.resource.clone();
                entry.has_written(*resource, now);
                self.notify(key, Some(&before), now, effects);
            }
            WriteResult::Changed | WriteResult::Done(_) => {
                entry.outdated = version;
                entry.not_before = None;
            }
            WriteResult::Failed => entry.not_before = now.checked_add(WRITE_AGAIN).ok(),
        }
        self.evaluate_siblings(key, now, effects);
    }

    fn changed(
        &mut self,
        by: Option<&ResourceKey>,
        node: &str,
        view: Option<Box<NodeView>>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(entry) = by.and_then(|key| self.entries.get_mut(key)) {
            entry.writing = None;
            let again = now.checked_add(WRITE_AGAIN).ok();
            entry.not_before = again.filter(|_| view.is_none());
        }
        let Some(node_entry) = self.nodes.get_mut(node) else {
            return;
        };
        if by.is_none() {
            node_entry.busy = false;
        }
        let failed = view.is_none();
        if node_entry.followed && !failed {
            node_entry.view = view;
        }
        // A retry without a resource has no time of its own and happens with the next tick.
        if by.is_some() || !failed {
            self.evaluate_node(node, now, effects);
        }
    }

    fn made(
        &mut self,
        key: &ResourceKey,
        made: CreateResult,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        (entry.writing, entry.not_before) = (None, None);
        match made {
            CreateResult::Done(job) => {
                self.jobs.entry(job_name(&key.name)).or_insert((*job, None));
            }
            CreateResult::Refused(why) => entry.refused = Some(why),
            CreateResult::Exists | CreateResult::Failed => {
                entry.not_before = now.checked_add(WRITE_AGAIN).ok();
            }
        }
        self.evaluate_siblings(key, now, effects);
    }

    fn tried(
        &mut self,
        key: &ResourceKey,
        again: SignedDuration,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.writing = None;
            entry.not_before = now.checked_add(again).ok();
        }
        self.evaluate_siblings(key, now, effects);
    }

    fn time(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        while let Some((time, key)) = self.wakes.first().cloned() {
            if time > now {
                break;
            }
            self.set_wake(&key, None);
            self.evaluate(&key, now, effects);
        }
        let changed = self
            .nodes
            .iter()
            .filter(|(_, node_entry)| node_entry.may_have_leftovers());
        for node in changed.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.evaluate_node(&node, now, effects);
        }
    }

    fn set_wake(&mut self, key: &ResourceKey, wake: Option<Timestamp>) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        if let Some(before) = entry.wake.take() {
            self.wakes.remove(&(before, key.clone()));
        }
        if let Some(wake) = wake {
            entry.wake = Some(wake);
            self.wakes.insert((wake, key.clone()));
        }
    }

    /// Evaluates all resources of the resource's node.
    fn evaluate_siblings(&mut self, key: &ResourceKey, now: Timestamp, effects: &mut Vec<Effect>) {
        let node = self.entries.get(key).map(|one| one.resource.node.clone());
        if let Some(node) = node {
            self.evaluate_node(&node, now, effects);
        }
    }

    fn evaluate_resets(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        let open = self.entries.values().map(|entry| &entry.resource);
        let open = open.filter(|one| one.kind == Maintenance::Reset && self.is_open(one));
        for node in open.map(|one| one.node.clone()).collect::<BTreeSet<_>>() {
            self.evaluate_node(&node, now, effects);
        }
    }

    fn evaluate_node(&mut self, node: &str, now: Timestamp, effects: &mut Vec<Effect>) {
        self.update_watches(node, effects);
        let keys = self
            .nodes
            .get(node)
            .map(|node_entry| node_entry.keys.clone());
        for key in keys.into_iter().flatten() {
            self.evaluate(&key, now, effects);
        }
        if self.is_ready() {
            self.undo_leftovers(node, effects);
        }
    }
}
