//! All resources as one object: what was seen and answered goes in, effects come out.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::config::{JanitorConfig, ProviderPlace};
use super::failure::Class;
use super::resource::Resource;
use super::signal::{ASK_AGAIN, Answer, Found, Memory, Node, NodeSeen, Question, Situation, Step};
use super::status::{ATTEMPT_COMPLETE, Condition, SIGNAL_SENT};
use super::turn::{Turn, turn};
use super::{Action, expiry};

/// Wait before a write is tried again that the API server has not made, or a deletion.
const WRITE_AGAIN: SignedDuration = SignedDuration::from_secs(5);
/// Wait before it is tried again to delete an old resource: nothing depends on it.
const DELETE_AGAIN: SignedDuration = SignedDuration::from_mins(1);

/// The name of a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The action, which says the kind.
    pub action: Action,
    /// `metadata.name`.
    pub name: String,
}

/// What the board is told.
#[derive(Clone, Debug)]
pub enum Input {
    /// A list of the resources of an action begins.
    ListBegun(Action),
    /// All of them were seen.
    Listed(Action),
    /// One is there, new or changed.
    Seen(Box<Resource>),
    /// One is gone.
    Gone(Key),
    /// A node is as it says; `None`: there is none of this name.
    Node(String, Option<NodeSeen>),
    /// Something else is at work on a node, such as a `GPUReset`; `None`: not any more.
    Held(String, Option<String>),
    /// The answer to [`Effect::Write`].
    Written(Key, Written),
    /// The answer to [`Effect::Ask`], with the operation that was asked about.
    Answered(Key, String, Answer),
    /// The answer to [`Effect::Delete`] or [`Effect::Expire`]: it was tried.
    Tried(Key),
    /// The answer to [`Effect::DeleteNode`]: it was tried.
    NodeTried(Key),
    /// Time has passed.
    Time,
}

/// The answer to a write.
#[derive(Clone, Debug)]
pub enum Written {
    /// The resource after it.
    Done(Box<Resource>),
    /// The resource is not any more what was seen, or gone.
    Changed,
    /// It was not made, or nobody knows.
    Failed,
}

/// What the board has done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Tell of a node from now on.
    Follow(String),
    /// Tell of it no more.
    Leave(String),
    /// Write the status of a resource, if it still has this version.
    Write {
        /// The resource.
        key: Key,
        /// Its version.
        version: String,
        /// The field `status` as a merge patch.
        status: Value,
    },
    /// Ask a provider.
    Ask {
        /// The resource.
        key: Key,
        /// Its node.
        node: String,
        /// The operation.
        operation: String,
        /// The provider.
        provider: ProviderPlace,
        /// The question.
        question: Question,
    },
    /// Delete the node object of this uid.
    DeleteNode {
        /// The resource.
        key: Key,
        /// The node.
        node: String,
        /// Its uid.
        uid: String,
    },
    /// Write on a resource that has ended when it is to be deleted.
    Expire {
        /// The resource.
        key: Key,
        /// The name of the annotation, and its value.
        annotation: (&'static str, String),
    },
    /// Delete a resource that is older than it is to be.
    Delete {
        /// The resource.
        key: Key,
        /// Its uid.
        uid: String,
    },
    /// Say what has happened.
    Tell(News),
}

/// What has happened to a resource.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// It was begun.
    Begun {
        /// The resource.
        key: Key,
        /// Its node.
        node: String,
    },
    /// It has ended.
    Ended {
        /// The resource.
        key: Key,
        /// Its node.
        node: String,
        /// How, as the reason of `AttemptComplete` says.
        outcome: String,
        /// Why, for people.
        message: String,
        /// The time from its begin to its end; `None` where nothing was begun.
        took: Option<SignedDuration>,
    },
}

/// All resources, and the nodes that they are about.
#[derive(Clone, Debug)]
pub struct Board {
    config: JanitorConfig,
    /// The time for which a resource is kept after its end; `None`: for ever.
    ttl: Option<SignedDuration>,
    /// The only node whose resources count; `None`: all do.
    only: Option<String>,
    /// The id of this process.
    process: String,
    entries: BTreeMap<Key, Entry>,
    /// Nodes that are told of.
    nodes: BTreeMap<String, Node>,
    by_node: BTreeMap<String, BTreeSet<Key>>,
    /// The nodes on which something else is at work, and what.
    held: BTreeMap<String, String>,
    /// The actions whose resources were all seen.
    listed: BTreeSet<Action>,
    /// Names that were seen since a list began.
    listing: BTreeMap<Action, BTreeSet<String>>,
    wakes: BTreeSet<(Timestamp, Key)>,
}

#[derive(Clone, Debug)]
struct Entry {
    resource: Resource,
    memory: Memory,
    /// The version that is being written, until the answer.
    writing: Option<String>,
    /// True while the answer of a provider is awaited, or of a node that is deleted.
    asking: bool,
    /// The time before which nothing is done about it.
    not_before: Option<Timestamp>,
    /// The version that is not to be written any more: there is a newer one.
    outdated: Option<String>,
    wake: Option<Timestamp>,
}

// === impl Key ===

impl Key {
    fn of(resource: &Resource) -> Self {
        Self {
            action: resource.action,
            name: resource.name.clone(),
        }
    }
}

// === impl Board ===

impl Board {
    /// Returns a board that knows nothing yet. `process` is a name that no other process has, and this one
    /// had never before it was started.
    pub fn new(config: JanitorConfig, ttl: Option<SignedDuration>, process: String) -> Self {
        Self {
            config,
            ttl,
            only: None,
            process,
            entries: BTreeMap::new(),
            nodes: BTreeMap::new(),
            by_node: BTreeMap::new(),
            held: BTreeMap::new(),
            listed: BTreeSet::new(),
            listing: BTreeMap::new(),
            wakes: BTreeSet::new(),
        }
    }

    /// Returns the same board for the resources of one node: on that node runs who has it, beside others of
    /// its kind.
    #[must_use]
    pub fn for_node(self, node: Option<String>) -> Self {
        Self { only: node, ..self }
    }

    /// Returns its configuration.
    pub fn config(&self) -> &JanitorConfig {
        &self.config
    }

    /// Returns when the board wants to be told that time has passed.
    pub fn wake_at(&self) -> Option<Timestamp> {
        self.wakes.first().map(|(time, _)| *time)
    }

    /// Takes an input in, and returns what is to be done. Whoever carries the effects out tells the
    /// answer to each but [`Effect::Follow`], [`Effect::Leave`] and [`Effect::Tell`].
    pub fn take(&mut self, input: Input, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::ListBegun(action) => drop(self.listing.insert(action, BTreeSet::new())),
            Input::Listed(action) => self.listed(action, now, &mut effects),
            Input::Seen(resource) => self.seen(*resource, now, &mut effects),
            Input::Gone(key) => self.gone(&key, now, &mut effects),
            Input::Node(name, seen) => {
                if let Some(node) = self.nodes.get_mut(&name) {
                    *node = seen.map_or(Node::Absent, Node::There);
                    self.look_at_node(&name, now, &mut effects);
                }
            }
            Input::Held(node, what) => {
                let before = match what.clone() {
                    Some(what) => self.held.insert(node.clone(), what),
                    None => self.held.remove(&node),
                };
                if before != what {
                    self.look_at_node(&node, now, &mut effects);
                }
            }
            Input::Written(key, written) => self.written(&key, written, now, &mut effects),
            Input::Answered(key, operation, answer) => {
                let entry = self.entries.get(&key);
                // Another one may have its name by now.
                if entry.is_some_and(|one| one.resource.operation() == operation) {
                    self.answered(&key, answer, now, &mut effects);
                }
            }
            Input::Tried(key) => {
                if let Some(entry) = self.entries.get_mut(&key) {
                    entry.writing = None;
                    entry.not_before = now.checked_add(DELETE_AGAIN).ok();
                }
                self.look_at(&key, now, &mut effects);
            }
            Input::NodeTried(key) => {
                if let Some(entry) = self.entries.get_mut(&key) {
                    entry.asking = false;
                    entry.memory.ask_after = now.checked_add(ASK_AGAIN).ok();
                }
                self.look_at(&key, now, &mut effects);
            }
            Input::Time => self.time(now, &mut effects),
        }
        effects
    }

    /// Returns the nodes that resources are about which have not ended.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Returns which resource is at work on a node.
    pub fn holds(&self, node: &str) -> Option<String> {
        let keys = self.by_node.get(node)?.iter();
        let mut works = keys.filter(|key| {
            self.entries.get(key).is_some_and(|entry| {
                let begun = entry.resource.status.start.is_some() || entry.writing.is_some();
                begun && !entry.resource.is_over() && self.config.rules(key.action).is_some()
            })
        });
        works
            .next()
            .map(|key| format!("{} {}", key.action.kind(), key.name))
    }

    fn listed(&mut self, action: Action, now: Timestamp, effects: &mut Vec<Effect>) {
        if let Some(seen) = self.listing.remove(&action) {
            let of_action = self.entries.keys().filter(|key| key.action == action);
            let gone = of_action.filter(|key| !seen.contains(&key.name));
            for key in gone.cloned().collect::<Vec<_>>() {
                self.gone(&key, now, effects);
            }
        }
        if self.listed.insert(action) && self.is_ready() {
            for node in self.by_node.keys().cloned().collect::<Vec<_>>() {
                self.look_at_node(&node, now, effects);
            }
        }
    }

    /// Returns whether all that may be under way is known.
    fn is_ready(&self) -> bool {
        self.config
            .actions()
            .all(|action| self.listed.contains(&action))
    }

    fn seen(&mut self, resource: Resource, now: Timestamp, effects: &mut Vec<Effect>) {
        if self
            .only
            .as_ref()
            .is_some_and(|node| *node != resource.node)
        {
            return;
        }
        let key = Key::of(&resource);
        if let Some(listing) = self.listing.get_mut(&key.action) {
            listing.insert(key.name.clone());
        }
        let known = self.entries.get_mut(&key);
        if let Some(entry) = known.filter(|entry| entry.resource.uid == resource.uid) {
            if is_older(&resource.version, &entry.resource.version) {
                return;
            }
            if entry.outdated.as_ref() != Some(&resource.version) {
                entry.outdated = None;
            }
            entry.resource = resource;
        } else {
            // Another one of the same name is another one.
            self.forget(&key);
            let node = resource.node.clone();
            let entry = Entry {
                resource,
                memory: Memory::default(),
                writing: None,
                asking: false,
                not_before: None,
                outdated: None,
                wake: None,
            };
            self.entries.insert(key.clone(), entry);
            self.by_node.entry(node).or_default().insert(key.clone());
        }
        self.look_around(&key, now, effects);
    }

    fn gone(&mut self, key: &Key, now: Timestamp, effects: &mut Vec<Effect>) {
        if let Some(node) = self.forget(key) {
            self.look_at_node(&node, now, effects);
        }
    }

    fn forget(&mut self, key: &Key) -> Option<String> {
        self.set_wake(key, None);
        let entry = self.entries.remove(key)?;
        let node = entry.resource.node;
        if let Some(keys) = self.by_node.get_mut(&node) {
            keys.remove(key);
        }
        Some(node)
    }

    fn written(&mut self, key: &Key, written: Written, now: Timestamp, effects: &mut Vec<Effect>) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let version = entry.writing.take();
        match written {
            Written::Done(resource) if resource.uid == entry.resource.uid => {
                entry.not_before = None;
                entry.memory.heard = None;
                let sent = |of: &Resource| {
                    let signal = of.status.condition(SIGNAL_SENT);
                    signal.is_some_and(Condition::is_true)
                };
                let reboots = key.action == Action::Reboot;
                if reboots && sent(&resource) && !sent(&entry.resource) {
                    entry.memory.ask_after = now.checked_add(ASK_AGAIN).ok();
                }
                let before = std::mem::replace(&mut entry.resource, *resource);
                effects.extend(news(key, &before, &entry.resource).map(Effect::Tell));
            }
            Written::Changed | Written::Done(_) => {
                entry.outdated = version;
                entry.not_before = None;
            }
            Written::Failed => entry.not_before = now.checked_add(WRITE_AGAIN).ok(),
        }
        self.look_around(key, now, effects);
    }

    fn answered(&mut self, key: &Key, answer: Answer, now: Timestamp, effects: &mut Vec<Effect>) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        entry.asking = false;
        let memory = &mut entry.memory;
        let wait = match &answer {
            Answer::Found(Err(failure)) | Answer::Ready(Err(failure)) => failure.retry_after,
            _ => None,
        };
        let wait = wait.map_or(ASK_AGAIN, |wait| wait.max(ASK_AGAIN));
        match answer {
            Answer::Sent(_) | Answer::Found(Ok(Found::Sent(_) | Found::NotSent)) => {
                memory.heard = Some(answer);
            }
            Answer::Ready(Err(ref failure)) if failure.class == Class::Permanent => {
                memory.heard = Some(answer);
            }
            Answer::Found(Ok(Found::CannotTell)) => memory.cannot_tell = true,
            Answer::Ready(Ok(ready)) => {
                memory.ready |= ready;
                memory.ask_after = now.checked_add(wait).ok();
            }
            Answer::Found(Err(_)) | Answer::Ready(Err(_)) => {
                memory.ask_after = now.checked_add(wait).ok();
            }
        }
        self.look_at(key, now, effects);
    }

    fn time(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        while let Some((time, key)) = self.wakes.first().cloned() {
            if time > now {
                return;
            }
            self.set_wake(&key, None);
            self.look_at(&key, now, effects);
        }
    }

    fn set_wake(&mut self, key: &Key, wake: Option<Timestamp>) {
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

    /// Looks at all resources of the node of one.
    fn look_around(&mut self, key: &Key, now: Timestamp, effects: &mut Vec<Effect>) {
        let node = self.entries.get(key).map(|one| one.resource.node.clone());
        if let Some(node) = node {
            self.look_at_node(&node, now, effects);
        }
    }

    fn look_at_node(&mut self, node: &str, now: Timestamp, effects: &mut Vec<Effect>) {
        let keys: Vec<Key> = self
            .by_node
            .get(node)
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        let wanted = (keys.iter().filter_map(|key| self.entries.get(key))).any(|entry| {
            let enabled = self.config.rules(entry.resource.action).is_some();
            enabled && !entry.resource.is_over()
        });
        match (wanted, self.nodes.contains_key(node)) {
            (true, false) => {
                self.nodes.insert(node.to_owned(), Node::Unseen);
                effects.push(Effect::Follow(node.to_owned()));
            }
            (false, true) => {
                self.nodes.remove(node);
                effects.push(Effect::Leave(node.to_owned()));
            }
            _ => {}
        }
        if keys.is_empty() {
            self.by_node.remove(node);
        }
        for key in keys {
            self.look_at(&key, now, effects);
        }
    }

    /// Decides what is next for one resource.
    fn look_at(&mut self, key: &Key, now: Timestamp, effects: &mut Vec<Effect>) {
        let Some(entry) = self.entries.get(key) else {
            return;
        };
        if entry.writing.is_some() {
            return;
        }
        if let Some(time) = entry.not_before.filter(|time| *time > now) {
            return self.set_wake(key, Some(time));
        }
        let step = if entry.resource.is_over() {
            self.keep(entry, now)
        } else {
            self.decide(entry, now)
        };
        match step {
            Next::Wait(wake) => self.set_wake(key, wake),
            Next::Do(effect) => {
                let Some(entry) = self.entries.get_mut(key) else {
                    return;
                };
                match &effect {
                    Effect::Ask { .. } | Effect::DeleteNode { .. } => entry.asking = true,
                    _ => entry.writing = Some(entry.resource.version.clone()),
                }
                if matches!(
                    &effect,
                    Effect::Ask {
                        question: Question::Send,
                        ..
                    }
                ) {
                    let record = entry.resource.status.record();
                    entry.memory.sent = record.map(|record| record.attempt);
                }
                let asking = entry.asking;
                self.set_wake(key, None);
                effects.push(effect);
                if asking {
                    // For the deadline, which does not wait for the answer.
                    self.look_at(key, now, effects);
                }
            }
        }
    }

    fn decide(&self, entry: &Entry, now: Timestamp) -> Next {
        let resource = &entry.resource;
        let Some(rules) = self.config.rules(resource.action) else {
            return Next::Wait(None);
        };
        if !self.is_ready() {
            return Next::Wait(None);
        }
        let keys = self.by_node.get(&resource.node).into_iter().flatten();
        let of_node = keys.filter_map(|key| self.entries.get(key));
        let enabled = of_node.filter(|one| self.config.rules(one.resource.action).is_some());
        let begun = resource.status.start.is_some();
        let turn = match self.held.get(&resource.node).filter(|_| !begun) {
            Some(before) => Turn::Behind {
                before: before.clone(),
                same: false,
            },
            None => turn(resource, enabled.map(|one| &one.resource)),
        };
        let situation = Situation {
            resource,
            node: self.nodes.get(&resource.node).unwrap_or(&Node::Unseen),
            turn,
            rules,
            memory: &entry.memory,
            process: &self.process,
            now,
        };
        let key = Key::of(resource);
        let node = resource.node.clone();
        Next::Do(match situation.step() {
            Step::Wait(until) => return Next::Wait(until),
            Step::Write(_) if entry.outdated.as_ref() == Some(&resource.version) => {
                // The watch brings the newer one.
                return Next::Wait(now.checked_add(WRITE_AGAIN).ok());
            }
            Step::Write(status) => Effect::Write {
                key,
                version: resource.version.clone(),
                status: status.patch(),
            },
            // One question at a time. Its answer looks again; the deadline does not wait for it.
            Step::Ask(_) | Step::DeleteNode(_) if entry.asking => {
                return Next::Wait(situation.last_moment());
            }
            Step::Ask(question) => Effect::Ask {
                key,
                node,
                operation: resource.operation().to_owned(),
                provider: rules.provider.clone(),
                question,
            },
            Step::DeleteNode(uid) => Effect::DeleteNode { key, node, uid },
        })
    }

    /// Decides how long a resource is kept that has ended.
    fn keep(&self, entry: &Entry, now: Timestamp) -> Next {
        let resource = &entry.resource;
        let enabled = self.config.rules(resource.action).is_some();
        let Some(due) = expiry::due(resource, self.ttl).filter(|_| enabled) else {
            return Next::Wait(None);
        };
        let key = Key::of(resource);
        if due <= now {
            let uid = resource.uid.clone();
            return Next::Do(Effect::Delete { key, uid });
        }
        let text = due.to_string();
        if resource.keep.expiry.as_ref() == Some(&text) {
            return Next::Wait(Some(due));
        }
        let annotation = (super::resource::EXPIRY, text);
        Next::Do(Effect::Expire { key, annotation })
    }
}

/// What is done about a resource now.
enum Next {
    Wait(Option<Timestamp>),
    Do(Effect),
}

/// Returns what a write has changed.
fn news(key: &Key, before: &Resource, after: &Resource) -> impl Iterator<Item = News> + use<> {
    let node = after.node.clone();
    let begun =
        (before.status.start.is_none() && after.status.start.is_some()).then(|| News::Begun {
            key: key.clone(),
            node: node.clone(),
        });
    let ended = (!before.status.has_ended() && after.status.has_ended()).then(|| {
        let complete = after.status.condition(ATTEMPT_COMPLETE);
        let text = |of: fn(&Condition) -> &String| complete.map(of).cloned().unwrap_or_default();
        News::Ended {
            key: key.clone(),
            node,
            outcome: text(|one| &one.reason),
            message: text(|one| &one.message),
            took: (after.status.start.zip(after.status.completion))
                .map(|(start, end)| end.duration_since(start)),
        }
    });
    begun.into_iter().chain(ended)
}

/// Returns whether a version is older than another one. They are numbers; of others it is not known.
fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
