//! The cluster that exists only here: its nodes, an API server with requests under way, a watch, a
//! store, and a controller that decides as in production.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::{Entity, HealthEvent, keys};
use fleet::brake::NodeLabel;
use fleet::brake::pause::Pause;
use fleet::drain::DrainConfig;
use fleet::remediation::RemediationConfig;
use fleet::session::{Intent, Session};
use fleet::{
    CreateAnswer, Effect, Fleet, FleetInput, InStore, Kept, Owns, PatchAnswer, Planned,
    PlannedRemoval, PlannedResource, PodNews, RemovalAnswer, Settings, Switched,
};
use jiff::{SignedDuration, Timestamp};
use model::attempt::Attempt;
use model::event::{Record, normalise};
use model::mode::Mode;
use model::node::{NodeChange, Taint};
use model::ownership::Ownership;
use model::position::Position;
use policy::Policy;
use serde_json::json;

use super::happening::{Fate, Hand, Machine, Memory, NODES, Symptom};
use super::judge::{self, Broken};
use super::node::{FOREIGN, SimNode, holds, name};
use super::repair::{REMEDIATION, Resources};

mod pods;
mod repairs;

/// Modes of drain by the namespaces of [`NAMESPACES`].
const DRAIN: &str = r#"
deleteAfterTimeoutMinutes = 60
[[userNamespaces]]
name = "now"
mode = "Immediate"
[[userNamespaces]]
name = "later"
mode = "DeleteAfterTimeout"
[[userNamespaces]]
name = "jobs"
mode = "AllowCompletion"
"#;
/// Time after a boot in which a machine uncordons its node.
const LOADS_WITHIN: SignedDuration = SignedDuration::from_mins(5);
/// Begin of the time.
const BEGIN: i64 = 1_800_000_000;

/// A request that is under way.
enum Request {
    Patch(Box<Planned>),
    Remove(Box<PlannedRemoval>),
    LookUp(String, Vec<String>),
    Append(String, Vec<(HealthEvent, Timestamp)>),
    Make(Box<PlannedResource>),
    Withdraw(Box<Attempt>),
}

/// A cluster and its controller.
pub(super) struct World {
    pub(super) fleet: Fleet,
    policy: Arc<Policy>,
    pub(super) drain: Arc<DrainConfig>,
    pub(super) nodes: Vec<SimNode>,
    pub(super) stored: Vec<Record>,
    /// Number of them that the controller has read.
    read: usize,
    saved: Option<Kept>,
    under_way: Vec<Request>,
    /// True if the controller was told something since it last decided.
    news: bool,
    pub(super) now: Timestamp,
    /// The latest time that the clock has shown.
    latest: Timestamp,
    /// True once the clock was put back.
    put_back: bool,
    /// Whether repairs are paused with new quarantines; `None`: nothing is.
    paused: Option<bool>,
    pods_made: u64,
    pub(super) resources: Resources,
    /// The names of the custom resources that are watched, and their nodes.
    watched: BTreeMap<String, String>,
    /// The last position in the store.
    positions: u64,
    /// Number of effects that were asked for, by kind.
    pub(super) effects: BTreeMap<&'static str, u64>,
    /// Number of sessions that began.
    pub(super) sessions: u64,
}

// === impl World ===

impl World {
    pub(super) fn new() -> Result<Self, Broken> {
        let policy = Arc::new(Policy::builtin());
        let drain = DrainConfig::parse(DRAIN, "the simulation").map_err(|why| why.to_string())?;
        let drain = Arc::new(drain);
        let now = Timestamp::from_second(BEGIN).map_err(|why| why.to_string())?;
        let nodes = (0..NODES).map(SimNode::new);
        let mut world = Self {
            fleet: Fleet::new(settings(&drain)?, None, now),
            policy,
            drain,
            nodes: nodes.collect::<Option<_>>().ok_or("no node")?,
            stored: Vec::new(),
            read: 0,
            saved: None,
            under_way: Vec::new(),
            news: false,
            now,
            latest: Timestamp::UNIX_EPOCH,
            put_back: false,
            paused: None,
            pods_made: 0,
            resources: Resources::default(),
            watched: BTreeMap::new(),
            positions: 0,
            effects: BTreeMap::new(),
            sessions: 0,
        };
        world.start(None)?;
        Ok(world)
    }

    /// Starts a controller that goes on from what another kept.
    fn start(&mut self, kept: Option<Kept>) -> Result<(), Broken> {
        self.fleet = Fleet::new(
            settings(&self.drain)?,
            Some(Arc::clone(&self.policy)),
            self.now,
        );
        match kept {
            Some(kept) => self.fleet.restore(kept, self.now),
            None => self.fleet.begin(),
        }
        let applied = self.fleet.book().applied();
        for node in &mut self.nodes {
            // That it has booted stands on it only where it carries a session.
            let session = Ownership::read(&node.view);
            node.booted = node.booted.filter(|_| session.is_some());
        }
        let read = self.stored.partition_point(|record| record.seq <= applied);
        self.read = read;
        self.read_events(usize::MAX);
        self.take(FleetInput::CaughtUp);
        let unread = Some("nobody has answered yet".to_owned());
        self.take(FleetInput::Switched(Box::new(Switched {
            unread,
            ..Switched::default()
        })));
        for node in &mut self.nodes {
            node.followed = false;
        }
        self.watched.clear();
        self.list();
        Ok(())
    }

    pub(super) fn take(&mut self, input: FleetInput) {
        self.news = true;
        self.fleet.take(input, self.now);
    }

    /// Tells the controller what people have switched.
    pub(super) fn read_switches(&mut self) {
        let pause = self.paused.map(|repairs| Pause {
            reason: "a simulation".to_owned(),
            by: "somebody".to_owned(),
            since: self.now,
            until: None,
            repairs,
        });
        let switched = Switched {
            pause,
            ..Switched::default()
        };
        self.take(FleetInput::Switched(Box::new(switched)));
    }

    pub(super) fn pause(&mut self, paused: Option<bool>) {
        self.paused = paused;
        self.read_switches();
    }

    /// Stores an event about a GPU, which was accepted some seconds ago.
    pub(super) fn report(&mut self, symptom: Symptom, is_healthy: bool, is_fatal: bool, late: i64) {
        let mut event = HealthEvent {
            agent: "gpu-health-monitor".to_owned(),
            component_class: "GPU".to_owned(),
            check_name: symptom.check.to_owned(),
            node_name: name(symptom.node),
            is_fatal,
            is_healthy,
            message: format!("report {}", self.stored.len()),
            recommended_action: symptom.action(),
            entities_impacted: vec![Entity {
                entity_type: "GPU".to_owned(),
                entity_value: symptom.gpu.to_string(),
            }],
            ..HealthEvent::default()
        };
        let accepted = self.now - SignedDuration::from_secs(late);
        if late > 0 {
            let count = (keys::META_COUNT.to_owned(), "2".to_owned());
            event.metadata = [count].into_iter().collect();
        }
        normalise(&mut event, accepted);
        self.store(event, accepted);
    }

    /// Stores an event once. Returns its position.
    fn store(&mut self, event: HealthEvent, created_at: Timestamp) -> Position {
        if let Some(there) = self.stored.iter().find(|there| there.id == event.id) {
            return there.seq;
        }
        self.positions += 1;
        let seq = self.positions;
        self.stored.push(Record {
            seq: seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        });
        seq.into()
    }

    /// Has the controller read events.
    pub(super) fn read_events(&mut self, most: usize) {
        for record in self.stored.iter().skip(self.read).take(most) {
            self.fleet.record(record, self.now);
            self.read += 1;
        }
    }

    /// Has the controller decide; what it asks for is under way then.
    pub(super) fn decide(&mut self) -> Result<(), Broken> {
        self.news = false;
        for effect in self.fleet.decide(self.now) {
            *self.effects.entry(kind(&effect)).or_default() += 1;
            match effect {
                Effect::PatchNode(planned) => {
                    judge::quarantine(&self.fleet, &planned, self.put_back)?;
                    if let Some(node) = self.index(&planned.node).and_then(|at| self.nodes.get(at))
                    {
                        let begun = self.resources.is_begun(&node.view);
                        judge::release(node, &planned, begun, self.now)?;
                        judge::drained(node, &planned, &self.drain, self.now)?;
                    }
                    self.under_way.push(Request::Patch(planned));
                }
                Effect::RemovePod(planned) => {
                    judge::removal(&self.fleet, &planned, self.now)?;
                    self.under_way.push(Request::Remove(planned));
                }
                Effect::LookUp { node, ids } => self.under_way.push(Request::LookUp(node, ids)),
                Effect::Append { node, events, .. } => {
                    self.under_way.push(Request::Append(node, events));
                }
                Effect::WatchPods { node, watch } => self.follow(&node, watch),
                Effect::CreateResource(planned) => {
                    judge::repair(&self.fleet, &planned)?;
                    self.under_way.push(Request::Make(planned));
                }
                Effect::DeleteResource { attempt, .. } => {
                    self.under_way.push(Request::Withdraw(attempt));
                }
                Effect::WatchResource {
                    node, name, watch, ..
                } => self.watch_resource(node, &name, watch),
                _ => {}
            }
        }
        match self.fleet.wake_at() {
            Some(at) if at <= self.now => Err(format!("it looks again and again, since {at}")),
            _ => Ok(()),
        }
    }

    /// Has one of the requests that are under way arrive. Returns false where there is none.
    pub(super) fn arrives(&mut self, which: usize, fate: Fate) -> Result<bool, Broken> {
        if self.under_way.is_empty() {
            return Ok(false);
        }
        let request = self.under_way.remove(which % self.under_way.len());
        let done = matches!(fate, Fate::Done | Fate::DoneUnheard);
        let input = match request {
            Request::Patch(planned) => {
                let answer = if done {
                    self.patch(&planned)?
                } else {
                    PatchAnswer::Unknown
                };
                let answer = match fate {
                    Fate::Done => answer,
                    Fate::DoneUnheard | Fate::Lost => PatchAnswer::Unknown,
                    Fate::Refused => PatchAnswer::Refused { retry_after: None },
                };
                let node = planned.node;
                FleetInput::NodePatched { node, answer }
            }
            Request::Remove(planned) => {
                let answer = if done {
                    self.remove(&planned)
                } else {
                    failed()
                };
                let answer = match fate {
                    Fate::Done => answer,
                    Fate::DoneUnheard | Fate::Lost => failed(),
                    Fate::Refused => RemovalAnswer::Held {
                        why: "a disruption budget".to_owned(),
                        retry_after: None,
                    },
                };
                let PlannedRemoval { node, uid, .. } = *planned;
                FleetInput::PodAnswered { node, uid, answer }
            }
            Request::Make(planned) => {
                let answer = if done {
                    self.resources.make(&planned)
                } else {
                    not_made()
                };
                let answer = match fate {
                    Fate::Done => answer,
                    Fate::DoneUnheard | Fate::Lost | Fate::Refused => not_made(),
                };
                let PlannedResource { node, key, .. } = *planned;
                FleetInput::ResourceCreated { node, key, answer }
            }
            Request::Withdraw(attempt) => {
                if done && self.resources.withdraw(&attempt) {
                    self.tell_of_resource(&attempt.name);
                }
                return Ok(true); // Nobody waits for it.
            }
            Request::LookUp(node, ids) => {
                let found = ids.into_iter().map(|id| (id.clone(), self.in_store(&id)));
                let found = (fate == Fate::Done).then(|| found.collect());
                FleetInput::EventsFound { node, found }
            }
            Request::Append(node, events) => {
                let mut last = None;
                for (event, created_at) in events.into_iter().filter(|_| done) {
                    let before = self.stored.len();
                    let at = self.store(event, created_at);
                    last = last.max(Some(at).filter(|_| self.stored.len() > before));
                }
                let result = if fate == Fate::Done {
                    Ok(last)
                } else {
                    Err(())
                };
                FleetInput::EventsAppended { node, result }
            }
        };
        self.take(input);
        Ok(true)
    }

    fn in_store(&self, id: &str) -> InStore {
        if self.stored.iter().any(|record| record.id == id) {
            InStore::Current
        } else {
            InStore::Nothing
        }
    }

    /// Carries a patch out as the API server does: where the node still is what the decision saw.
    fn patch(&mut self, planned: &Planned) -> Result<PatchAnswer, Broken> {
        let Some(index) = self.index(&planned.node) else {
            return Ok(PatchAnswer::NotFound);
        };
        let change = &planned.patch.change;
        let Some(node) = self.nodes.get(index) else {
            return Ok(PatchAnswer::NotFound);
        };
        if !holds(&planned.view, &node.view, change) {
            return Ok(PatchAnswer::Conflict);
        }
        judge::patch(node, planned)?;
        let patch = &planned.patch;
        let untainted = change.annotations.get(keys::UNTAINTED_MANUALLY);
        if let Some(node) = self.nodes.get_mut(index) {
            // From here on the cordon is of the person who took the taints away.
            if untainted.is_some_and(Option::is_some) {
                node.cordoned_by_hand |= node.view.unschedulable;
            }
            // What is put back of a cordon that was there before is theirs again.
            let own = Ownership::read(&node.view);
            let theirs = own.is_some_and(|own| own.cordon_pre_existing);
            node.cordoned_by_hand |= theirs && change.unschedulable == Some(true);
            node.change(&patch.change);
            self.sessions += u64::from(patch.intent == Intent::Quarantine);
            return Ok(PatchAnswer::Made(Arc::clone(&node.view)));
        }
        Ok(PatchAnswer::NotFound)
    }

    /// Removes a pod as the API server does: by its uid. A kubelet ends it later, or now where it has no
    /// time.
    fn remove(&mut self, planned: &PlannedRemoval) -> RemovalAnswer {
        let now = self.now;
        let Some(index) = self.index(&planned.node) else {
            return RemovalAnswer::Gone;
        };
        let title = format!("{}/{}", planned.namespace, planned.name);
        let pods = self.nodes.get_mut(index).map(|node| &mut node.pods);
        let pod = pods.and_then(|pods| pods.get_mut(&title));
        let Some(pod) = pod.filter(|pod| pod.uid == planned.uid) else {
            return RemovalAnswer::Gone;
        };
        match planned.evict {
            Some(grace) => {
                pod.ends_by.get_or_insert(now + grace);
                let pod = pod.clone();
                self.tell_of_pod(index, PodNews::Seen(Box::new(pod)));
            }
            None => self.pod_gone(index, &title),
        }
        RemovalAnswer::Taken
    }

    /// Has the watch tell of a change of a node, the oldest first. Returns false where there is none.
    pub(super) fn tell(&mut self, index: usize) -> bool {
        let told = self
            .nodes
            .get_mut(index)
            .and_then(|node| node.told.pop_front());
        let there = told.is_some();
        if let Some(view) = told {
            self.take(FleetInput::Seen(view));
        }
        there
    }

    /// Has the watch list all nodes anew.
    pub(super) fn list(&mut self) {
        self.take(FleetInput::ListBegun);
        for index in 0..self.nodes.len() {
            if let Some(node) = self.nodes.get_mut(index) {
                node.told.clear();
                let view = Arc::clone(&node.view);
                self.take(FleetInput::Seen(view));
            }
        }
        self.take(FleetInput::Listed);
    }

    /// Saves what the controller keeps, as it is read again.
    pub(super) fn save(&mut self) -> Result<(), Broken> {
        let wrong = |why: serde_json::Error| format!("what is kept cannot be read: {why}");
        let text = serde_json::to_string(self.fleet.book()).map_err(wrong)?;
        let book = serde_json::from_str(&text).map_err(wrong)?;
        let (mut sessions, mut reports) = (BTreeMap::new(), BTreeMap::new());
        for index in 0..self.nodes.len() {
            let node = name(index);
            let text = serde_json::to_string(&self.fleet.sessions_to_keep(&node)).map_err(wrong)?;
            let kept: Vec<Session> = serde_json::from_str(&text).map_err(wrong)?;
            reports.extend(self.fleet.reports(&node).map(|kept| (node.clone(), kept)));
            sessions.insert(node, kept);
        }
        self.saved = Some(Kept {
            book,
            reports,
            recently_out: self.fleet.recently_out().clone(),
            begun: self.fleet.begun(),
            sessions,
            unsaved: BTreeSet::new(),
        });
        Ok(())
    }

    /// Ends the controller, and starts another. Bits of `done` say which requests still arrive.
    pub(super) fn crash(&mut self, memory: Memory, done: u64) -> Result<(), Broken> {
        for bit in 0..64 {
            let fate = if done >> bit & 1 == 1 {
                Fate::DoneUnheard
            } else {
                Fate::Lost
            };
            if !self.arrives(0, fate)? {
                break;
            }
        }
        self.under_way.clear();
        if memory == Memory::Nothing {
            self.stored.clear();
            self.saved = None;
        }
        let kept = self.saved.clone().filter(|_| memory == Memory::Saved);
        self.start(kept)
    }

    /// Lays a hand on a node.
    pub(super) fn lay_hand(&mut self, index: usize, hand: Hand) {
        let now = self.now;
        let Some(node) = self.nodes.get_mut(index) else {
            return;
        };
        let mut change = NodeChange::default();
        match hand {
            Hand::Cordon => {
                // Who cordons what gpuwarden has cordoned changes nothing.
                let own = Ownership::read(&node.view);
                let ours = own.is_some_and(|own| own.cordoned && !own.cordon_pre_existing);
                node.cordoned_by_hand |= !node.view.unschedulable && !ours;
                change.unschedulable = Some(true);
            }
            Hand::Uncordon => {
                node.cordoned_by_hand = false;
                change.unschedulable = Some(false);
            }
            Hand::Untaint => {
                let taints = node.view.taints.iter().map(|on| on.taint.clone());
                let ours = taints.filter(|taint| !taint.key.starts_with(FOREIGN));
                change.remove_taints = ours.collect();
            }
            Hand::AskRelease => {
                let at = now.to_string();
                let asked = json!({"by": "alice", "reason": "a simulation", "at": at});
                let asked = (keys::RELEASE.to_owned(), Some(asked.to_string()));
                change.annotations = [asked].into_iter().collect();
            }
            Hand::Veto(hours) => {
                let until = now + SignedDuration::from_hours(i64::try_from(hours).unwrap_or(0));
                let veto = json!({"by": "alice", "reason": "a simulation", "until": until});
                let veto = (keys::VETO.to_owned(), Some(veto.to_string()));
                change.annotations = [veto].into_iter().collect();
            }
            Hand::Taint(number) => {
                let taint = foreign(number);
                if !node.view.has_taint(&taint) {
                    change.add_taints = vec![taint];
                }
            }
            Hand::TakeTaint(number) => change.remove_taints = vec![foreign(number)],
            Hand::Label(number) => {
                let label = (format!("{FOREIGN}{number}"), Some("x".to_owned()));
                change.labels = [label].into_iter().collect();
            }
        }
        node.change(&change);
    }

    /// Has a machine do something to a node.
    pub(super) fn machine(&mut self, index: usize, machine: Machine) {
        let now = self.now;
        let Some(node) = self.nodes.get_mut(index) else {
            return;
        };
        let begun = self.resources.is_begun(&node.view);
        match machine {
            Machine::Boots => node.boot(now),
            // What a person has cordoned is left out: whether that comes back is another matter.
            Machine::Uncordons if node.view.unschedulable && !node.cordoned_by_hand => {
                let booted = (node.booted).is_some_and(|at| now.duration_since(at) < LOADS_WITHIN);
                if booted || begun {
                    node.change(&NodeChange {
                        unschedulable: Some(false),
                        ..NodeChange::default()
                    });
                    node.uncordoned_by_machine = true;
                }
            }
            Machine::Uncordons => {}
        }
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.view.name == name)
    }

    /// Returns whether nothing is under way, and all is told, read and decided about.
    pub(super) fn is_quiet(&self) -> bool {
        let told = self.nodes.iter().all(|node| node.told.is_empty());
        told && !self.news && self.under_way.is_empty() && self.read == self.stored.len()
    }

    /// Lets time pass; less than none puts the clock back.
    pub(super) fn pass(&mut self, seconds: i64) {
        self.latest = self.latest.max(self.now);
        self.now += SignedDuration::from_secs(seconds);
        self.put_back |= seconds < 0;
        for node in &mut self.nodes {
            node.booted = node.booted.map(|at| at.min(self.now));
        }
    }

    /// Lets the time of one step pass.
    pub(super) fn tick(&mut self) {
        self.now += SignedDuration::from_millis(1);
    }

    /// Lets time pass until the clock shows what it has shown before it was put back: a recovery from before
    /// that is one that comes late.
    pub(super) fn catch_up(&mut self) {
        self.now = self.now.max(self.latest);
    }

    /// Returns until when the controller waits for a time that matters here: notices of faults only are
    /// shown no more then.
    pub(super) fn waits_until(&self) -> Option<Timestamp> {
        self.fleet.wake_at()
    }
}

fn foreign(number: usize) -> Taint {
    Taint {
        key: format!("{FOREIGN}{number}"),
        value: String::new(),
        effect: "NoSchedule".to_owned(),
    }
}

fn failed() -> RemovalAnswer {
    RemovalAnswer::Failed {
        why: "no answer".to_owned(),
        retry_after: None,
    }
}

fn not_made() -> CreateAnswer {
    CreateAnswer::Failed {
        why: "no answer".to_owned(),
        retry_after: None,
    }
}

fn settings(drain: &Arc<DrainConfig>) -> Result<Settings, Broken> {
    let gpu_label = NodeLabel::parse("nvidia.com/gpu.present=true");
    let no_file = |_: &str| Err("there are no files".to_owned());
    let remediation = RemediationConfig::parse(REMEDIATION, "the simulation", no_file);
    let remediation = remediation.map_err(|why| why.to_string())?;
    Ok(Settings {
        mode: Mode::Act,
        owns: Owns::All,
        cluster: true,
        store: "simulated".to_owned(),
        since: Position::START,
        // Its budgets have a simulator of their own.
        brake: false,
        gpu_label: gpu_label?,
        drain: Some(Arc::clone(drain)),
        remediation: Some(Arc::new(remediation)),
        retention: SignedDuration::from_hours(24 * 30),
        returns_wait: true,
    })
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
        Effect::Note(..) => "line of a story",
        Effect::Status(_) => "status of a record",
        Effect::Log { .. } => "line of the log",
        Effect::Evaluated(_) => "evaluation of rules",
        Effect::Decided(_) => "decision",
        Effect::UpdateConditions(_) => "condition of a node",
        Effect::Restored(_) => "node that went back",
        Effect::Trip => "trip of the circuit breaker",
    }
}
