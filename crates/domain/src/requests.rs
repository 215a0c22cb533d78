//! All requests to reset GPUs and to hand nodes over, as one object: what was seen and answered goes in, effects
//! come out.
//!
//! What is done about one is decided by [`gpu_reset`] and [`handover`]; here it is one thing at a time for
//! each, and one request at a time for each node.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::gpu_reset::{self, JobSeen, ResetSettings, ServicePod, job_name};
use crate::handover;
use crate::node::NodeView;
use crate::selector::LabelSelector;

mod entry;
mod io;

use entry::{Entry, Request, news};
pub use io::{Act, Answer, Effect, Input, RequestNews};

/// Wait before something is tried again that was not done, or not on what it was decided by.
const AGAIN: SignedDuration = SignedDuration::from_secs(2);

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestKind {
    /// GPUs are to be reset: a `GPUReset`.
    Reset,
    /// A node is to be handed over: an `ExternalRemediationRequest`.
    HandOver,
}

/// The name of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey {
    /// The kind.
    pub kind: RequestKind,
    /// `metadata.name`.
    pub name: String,
}

/// All requests, and what is known around them.
#[derive(Clone, Debug)]
pub struct RequestBoard {
    /// How GPUs are reset; `None`: their requests are left alone.
    resets: Option<ResetSettings>,
    /// The nodes that are left alone, by their labels.
    exclusions: Vec<LabelSelector>,
    /// The one node whose requests are carried out; `None`: all.
    node: Option<String>,
    entries: BTreeMap<RequestKey, Entry>,
    nodes: BTreeMap<String, Around>,
    jobs: BTreeMap<String, (Value, Option<String>)>,
    jobs_listed: bool,
    listed: BTreeSet<RequestKind>,
    listing: BTreeMap<RequestKind, BTreeSet<String>>,
}

/// What is known of a node.
#[derive(Clone, Debug, Default)]
struct Around {
    /// True once it was told whether there is one.
    told: bool,
    node: Option<Box<NodeView>>,
    pods: Option<Vec<ServicePod>>,
    held: Option<String>,
    followed: bool,
    /// True if a request has vanished that may have left something behind.
    vanished: bool,
    /// True until it is known whether that was put back.
    busy: bool,
}

// === impl RequestKind ===

impl RequestKind {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Reset, Self::HandOver];

    /// Returns the name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reset => "GPUReset",
            Self::HandOver => "ExternalRemediationRequest",
        }
    }

    /// Returns group, version and plural.
    pub fn resource(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Reset => ("janitor.dgxc.nvidia.com", "v1alpha1", "gpuresets"),
            Self::HandOver => (
                "nvsentinel.dgxc.nvidia.com",
                "v1",
                "externalremediationrequests",
            ),
        }
    }
}

// === impl RequestBoard ===

impl RequestBoard {
    /// Returns a board that knows nothing yet.
    pub fn new(resets: Option<ResetSettings>, exclusions: Vec<LabelSelector>) -> Self {
        Self {
            resets,
            exclusions,
            node: None,
            entries: BTreeMap::new(),
            nodes: BTreeMap::new(),
            jobs: BTreeMap::new(),
            jobs_listed: false,
            listed: BTreeSet::new(),
            listing: BTreeMap::new(),
        }
    }

    /// Returns the same board for one node only: what is asked for of others is left alone.
    #[must_use]
    pub fn for_node(self, node: Option<String>) -> Self {
        Self { node, ..self }
    }

    /// Returns the kinds that are carried out.
    pub fn kinds(&self) -> impl Iterator<Item = RequestKind> + use<> {
        let resets = self.resets.is_some();
        (RequestKind::ALL.into_iter()).filter(move |kind| resets || *kind != RequestKind::Reset)
    }

    /// Returns how GPUs are reset.
    pub fn resets(&self) -> Option<&ResetSettings> {
        self.resets.as_ref()
    }

    /// Returns when the board wants to be told that time has passed.
    pub fn wake_at(&self) -> Option<Timestamp> {
        self.entries.values().filter_map(|entry| entry.wake).min()
    }

    /// Returns the nodes that requests are about for which anything is left to be done.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let followed = self.nodes.iter().filter(|(_, around)| around.followed);
        followed.map(|(name, _)| name.as_str())
    }

    /// Returns which request is at work on a node.
    pub fn holds(&self, node: &str) -> Option<String> {
        let view = self.nodes.get(node).and_then(|one| one.node.as_deref());
        let of_node = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.request.node() == node);
        let mut holds = of_node.filter(|(_, entry)| entry.busy || entry.request.holds(view));
        holds.next().map(|(key, _)| key.title())
    }

    /// Takes an input in, and returns what is to be done.
    pub fn take(&mut self, input: Input, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::ListBegun(kind) => drop(self.listing.insert(kind, BTreeSet::new())),
            Input::Listed(kind) => {
                if let Some(seen) = self.listing.remove(&kind) {
                    let of_kind = self.entries.keys().filter(|key| key.kind == kind);
                    let gone = of_kind.filter(|key| !seen.contains(&key.name));
                    for key in gone.cloned().collect::<Vec<_>>() {
                        self.gone(&key, now, &mut effects);
                    }
                }
                self.listed.insert(kind);
                self.look_at_all(now, &mut effects);
            }
            Input::Seen(kind, object) => self.seen(kind, &object, now, &mut effects),
            Input::Gone(key) => self.gone(&key, now, &mut effects),
            Input::Node(name, view) => {
                let around = self.nodes.entry(name.clone()).or_default();
                let older = |new: &NodeView| {
                    around.node.as_ref().is_some_and(|old| {
                        old.uid == new.uid && is_older(&new.resource_version, &old.resource_version)
                    })
                };
                if !view.as_deref().is_some_and(older) {
                    (around.node, around.told) = (view, true);
                }
                self.look_at_node(&name, now, &mut effects);
            }
            Input::Pods(name, pods) => {
                self.nodes.entry(name.clone()).or_default().pods = Some(pods);
                self.look_at_node(&name, now, &mut effects);
            }
            Input::Jobs { listed } => {
                if !listed {
                    self.jobs.clear();
                }
                self.jobs_listed = listed;
                self.look_at_all(now, &mut effects);
            }
            Input::Job(name, job) => {
                match job {
                    Some(job) => drop(self.jobs.insert(name, *job)),
                    None => drop(self.jobs.remove(&name)),
                }
                self.look_at_all(now, &mut effects);
            }
            Input::Held(name, held) => {
                let around = self.nodes.entry(name.clone()).or_default();
                if around.held != held {
                    around.held = held;
                    self.look_at_node(&name, now, &mut effects);
                }
            }
            Input::Marked(name) if !self.is_mine(&name) => {}
            Input::Marked(name) => {
                self.nodes.entry(name.clone()).or_default().vanished = true;
                self.look_at_node(&name, now, &mut effects);
            }
            Input::IsBack(name, answer) => {
                if let Some(around) = self.nodes.get_mut(&name) {
                    around.busy = false;
                    if let Answer::Node(view) = answer {
                        around.node = Some(view);
                        self.look_at_node(&name, now, &mut effects);
                    }
                }
            }
            Input::Answered(key, answer) => self.answered(&key, answer, now, &mut effects),
            Input::Time => self.look_at_all(now, &mut effects),
        }
        effects
    }

    fn is_mine(&self, node: &str) -> bool {
        self.node.as_ref().is_none_or(|own| own == node)
    }

    fn seen(
        &mut self,
        kind: RequestKind,
        object: &Value,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        // Its schema forbids what cannot be read.
        let entry = Entry::read(kind, object).filter(|one| self.is_mine(one.request.node()));
        let Some(mut entry) = entry else {
            return;
        };
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let key = RequestKey {
            kind,
            name: name.to_owned(),
        };
        if let Some(listing) = self.listing.get_mut(&kind) {
            listing.insert(key.name.clone());
        }
        let node = entry.request.node().to_owned();
        let known = self.entries.get(&key);
        let same = known.filter(|known| known.request.uid() == entry.request.uid());
        if let Some(known) = same {
            if is_older(&entry.version, &known.version) {
                return;
            }
            entry.busy = known.busy;
            entry.refused.clone_from(&known.refused);
            entry.not_before = known.not_before;
        }
        let before = same.map(|known| known.request.clone());
        let after = entry.request.clone();
        self.entries.insert(key.clone(), entry);
        let active = self.active(&node);
        effects.extend(news(&key, before.as_ref(), Some(&after), active, now).map(Effect::Tell));
        self.look_at_node(&node, now, effects);
    }

    fn gone(&mut self, key: &RequestKey, now: Timestamp, effects: &mut Vec<Effect>) {
        let Some(entry) = self.entries.remove(key) else {
            return;
        };
        let node = entry.request.node().to_owned();
        let active = self.active(&node);
        effects.extend(news(key, Some(&entry.request), None, active, now).map(Effect::Tell));
        self.nodes.entry(node.clone()).or_default().vanished = true;
        self.look_at_node(&node, now, effects);
    }

    fn active(&self, node: &str) -> usize {
        let resets = self
            .entries
            .values()
            .filter(|entry| entry.request.node() == node);
        resets
            .filter(|entry| matches!(&entry.request, Request::Reset(one) if one.is_active()))
            .count()
    }

    fn answered(
        &mut self,
        key: &RequestKey,
        answer: Answer,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        (entry.busy, entry.not_before) = (false, None);
        match &answer {
            Answer::Failed => entry.not_before = now.checked_add(AGAIN).ok(),
            Answer::Refused(why) => entry.refused = Some(why.clone()),
            _ => {}
        }
        let node = entry.request.node().to_owned();
        match answer {
            Answer::Request(object) => return self.seen(key.kind, &object, now, effects),
            Answer::Node(view) => {
                if let Some(around) = self.nodes.get_mut(&node) {
                    around.node = Some(view);
                }
            }
            Answer::Job(job) => {
                self.jobs.entry(job_name(&key.name)).or_insert((*job, None));
            }
            Answer::Done | Answer::Refused(_) | Answer::Failed => {}
        }
        self.look_at_node(&node, now, effects);
    }

    fn look_at_all(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        for node in self
            .entries
            .values()
            .map(|one| one.request.node().to_owned())
            .collect::<BTreeSet<_>>()
        {
            self.look_at_node(&node, now, effects);
        }
    }

    fn look_at_node(&mut self, node: &str, now: Timestamp, effects: &mut Vec<Effect>) {
        let of_node = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.request.node() == node);
        let keys: Vec<RequestKey> = of_node.map(|(key, _)| key.clone()).collect();
        let open = keys.iter().any(|key| {
            self.entries
                .get(key)
                .is_some_and(|one| one.request.is_open())
        });
        let around = self.nodes.entry(node.to_owned()).or_default();
        let wanted = open || around.vanished;
        if wanted != around.followed {
            around.followed = wanted;
            let node = node.to_owned();
            effects.push(if wanted {
                Effect::Follow(node)
            } else {
                Effect::Leave(node)
            });
        }
        if !wanted {
            let held = around.held.take();
            if keys.is_empty() && held.is_none() {
                self.nodes.remove(node);
            } else if let Some(around) = self.nodes.get_mut(node) {
                *around = Around {
                    held,
                    ..Around::default()
                };
            }
        }
        if self.kinds().any(|kind| !self.listed.contains(&kind)) {
            return; // Before all are known, nobody knows whose turn it is.
        }
        for key in keys {
            self.look_at(&key, now, effects);
        }
        self.clear_up(node, effects);
    }

    fn look_at(&mut self, key: &RequestKey, now: Timestamp, effects: &mut Vec<Effect>) {
        let Some(entry) = self.entries.get(key) else {
            return;
        };
        let node = entry.request.node().to_owned();
        let around = self.nodes.get(&node);
        let Some(around) = around.filter(|around| around.told) else {
            return;
        };
        let view = around.node.as_ref();
        let mut wake = entry.not_before.filter(|at| *at > now);
        let before = self.before(key, &node);
        let excludes = |one: &LabelSelector| view.is_some_and(|view| one.matches(&view.labels));
        let excluded = self.exclusions.iter().any(excludes);
        let act = if entry.busy || wake.is_some() {
            None
        } else {
            match &entry.request {
                Request::Reset(request) => {
                    let pods = around.pods.as_ref();
                    let (Some(pods), Some(settings)) = (pods, self.resets.as_ref()) else {
                        return;
                    };
                    let job = self.job(&request.name, &request.uid, entry.refused.as_ref());
                    let decision = gpu_reset::decide(&gpu_reset::Case {
                        request,
                        node: view.map(Box::as_ref),
                        pods,
                        job: &job,
                        before: before.as_deref(),
                        excluded,
                        settings,
                        now,
                    });
                    wake = decision.wake;
                    decision.effect.and_then(|effect| {
                        self.act_of_reset(entry, view.map(Box::as_ref), request, effect)
                    })
                }
                Request::HandOver(request) => {
                    let case = handover::Case {
                        request,
                        node: view.map(Box::as_ref),
                        before: before.as_deref(),
                        excluded,
                        now,
                    };
                    handover::decide(&case).and_then(|effect| match effect {
                        handover::Effect::Finalizer(on) => {
                            Some(entry.finalizer(handover::FINALIZER, on))
                        }
                        handover::Effect::Status(status) => Some(entry.status(&status)),
                        handover::Effect::Node(change) => Some(Act::Node(view?.clone(), change)),
                    })
                }
            }
        };
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        entry.wake = wake.filter(|at| *at > now);
        if let Some(act) = act {
            entry.busy = true;
            effects.push(Effect::Act(key.clone(), Box::new(act)));
        }
    }

    /// Returns what is at work on a node before a request.
    fn before(&self, key: &RequestKey, node: &str) -> Option<String> {
        let around = self.nodes.get(node)?;
        let view = around.node.as_deref();
        let others = self
            .entries
            .iter()
            .filter(|(other, entry)| *other != key && entry.request.node() == node);
        let mut others = others.filter(|(_, entry)| entry.busy || entry.request.holds(view));
        around
            .held
            .clone()
            .or_else(|| others.next().map(|(other, _)| other.title()))
    }

    fn job(&self, request: &str, uid: &str, refused: Option<&String>) -> JobSeen {
        match (self.jobs.get(&job_name(request)), refused) {
            (Some((job, why)), _) => JobSeen::read(job, uid, why.as_deref()),
            (None, Some(why)) => JobSeen::Refused(why.clone()),
            (None, None) if self.jobs_listed => JobSeen::Absent,
            (None, None) => JobSeen::Unknown,
        }
    }

    fn act_of_reset(
        &self,
        entry: &Entry,
        view: Option<&NodeView>,
        request: &gpu_reset::Request,
        effect: gpu_reset::Effect,
    ) -> Option<Act> {
        Some(match effect {
            gpu_reset::Effect::Finalizer(on) => entry.finalizer(gpu_reset::FINALIZER, on),
            gpu_reset::Effect::Status(status) => entry.status(&status),
            gpu_reset::Effect::Node(change) => Act::Node(Box::new(view?.clone()), change),
            gpu_reset::Effect::Make(job) => Act::Make(job),
            gpu_reset::Effect::Stop => {
                let name = job_name(&request.name);
                let (job, _) = self.jobs.get(&name)?;
                let uid = job["metadata"]["uid"].as_str()?.to_owned();
                Act::Stop { name, uid }
            }
        })
    }

    /// Puts back what requests have left behind on a node that vanished.
    fn clear_up(&mut self, node: &str, effects: &mut Vec<Effect>) {
        let uids: BTreeSet<String> = self
            .entries
            .values()
            .map(|entry| entry.request.uid().to_owned())
            .collect();
        let Some(around) = self
            .nodes
            .get_mut(node)
            .filter(|around| around.vanished && !around.busy)
        else {
            return;
        };
        if !around.told {
            return; // Looked at again when it is.
        }
        let view = around.node.clone();
        let exists = |uid: &str| uids.contains(uid);
        let change = view.as_ref().and_then(|view| {
            gpu_reset::left_behind(view, exists).or_else(|| handover::left_behind(view, exists))
        });
        let (Some(view), Some(change)) = (view, change) else {
            around.vanished = false;
            let open = self
                .entries
                .values()
                .any(|one| one.request.node() == node && one.request.is_open());
            if !open && std::mem::take(&mut around.followed) {
                effects.push(Effect::Leave(node.to_owned()));
            }
            return;
        };
        around.busy = true;
        effects.push(Effect::PutBack(view, change));
    }
}

/// Returns whether a version is older than another one. They are numbers; of others it is not known.
fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}

// === impl RequestKey ===

impl RequestKey {
    /// Returns it for people.
    pub fn title(&self) -> String {
        format!("{} {}", self.kind.name(), self.name)
    }
}

#[cfg(test)]
mod tests;
