//! The world around a fleet, for tests: a controller that decides as in production, its store,
//! and an API server whose nodes accept patches or not. Most tests have one node, `n1`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use contract::{Entity, HealthEvent, keys};
use jiff::{SignedDuration, Timestamp};
use model::attempt::Attempt;
use model::device::test_util::slice;
use model::device::{Rule, RuleChange};
use model::event::{Record, normalise};
use model::journal::Entry;
use model::mode::Mode;
use model::node::{NodeChange, NodeTaint, NodeView, Taint};
use model::position::Position;
use policy::Policy;
use policy::assess::Desired;
use serde_json::{Value, json};

use super::{
    DeviceInput, DeviceWatch, Effect, EventInStore, EventReason, Fleet, FleetInput, Owns,
    PatchAnswer, Planned, PlannedCheckpoint, PlannedRemoval, PlannedResource, PlannedRule,
    PodUpdate, Purpose, ResourceUpdate, SavedState, Settings,
};
use crate::brake::NodeLabel;
use crate::drain::PodView;
use crate::session::{Failure, Intent, Patch, Phase, Session};
use crate::status::StatusUpdate;

/// Outcome of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Made,
    Conflict,
    Refused,
    /// An admission policy drops all of it; the answer says that it was made.
    Dropped,
    /// An admission policy drops cordons and new taints; the answer says that it was made.
    Stripped,
}

/// State that a restarted controller starts from, beside the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restart {
    /// All state that was saved.
    All,
    /// The stored events only.
    Events,
    /// No saved state and no events.
    Nothing,
}

/// Effects of a look at the nodes.
#[derive(Debug, Default)]
pub(crate) struct Looked {
    pub(crate) patches: Vec<Planned>,
    pub(crate) notes: Vec<Entry>,
    /// Changes of rules, which are made at once.
    pub(crate) rules: Vec<RuleChange>,
    /// Pods to be removed; never answered.
    pub(crate) removals: Vec<PlannedRemoval>,
    /// Pods asked to write a checkpoint; never answered.
    pub(crate) checkpoints: Vec<PlannedCheckpoint>,
    pub(crate) waits: Vec<(&'static str, String)>,
    /// Begin of the drain for each of `waits`.
    pub(crate) waits_since: Vec<Timestamp>,
    /// Custom resources to be created; never answered.
    pub(crate) makes: Vec<PlannedResource>,
    /// Attempts whose custom resources are withdrawn.
    pub(crate) withdrawn: Vec<Attempt>,
    pub(crate) statuses: Vec<StatusUpdate>,
    /// Purposes of appended events.
    pub(crate) appended: Vec<Purpose>,
}

pub(crate) struct World {
    pub(crate) fleet: Fleet,
    pub(crate) settings: Settings,
    policy: Arc<Policy>,
    pub(crate) stored: Vec<Record>,
    /// Current rules that taint devices.
    pub(crate) rules: BTreeMap<String, Rule>,
    /// True while changes of rules are lost, as when a process ends.
    pub(crate) loses_rules: bool,
    /// Pods of `n1`, delivered while they are watched.
    pub(crate) pods: BTreeMap<String, PodView>,
    /// Current custom resources, by name.
    pub(crate) resources: BTreeMap<String, Value>,
    /// Names of the custom resources that the controller watches.
    pub(crate) watched: BTreeSet<String>,
    /// True while the controller watches the pods of `n1`.
    pub(crate) watches_pods: bool,
    /// Nodes of the cluster, as they are now.
    pub(crate) nodes: BTreeMap<String, NodeView>,
    pub(crate) now: Timestamp,
}

impl World {
    /// Creates a controller that has listed its cluster, which has the node `n1`.
    pub(crate) fn new(policy: &Policy) -> Self {
        let mut world = Self::with(settings(), policy, [NodeView::unknown("n1")]);
        world.restart(Restart::Nothing);
        world
    }

    /// Creates a controller that has observed nothing yet.
    pub(crate) fn with(
        settings: Settings,
        policy: &Policy,
        nodes: impl IntoIterator<Item = NodeView>,
    ) -> Self {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let policy = Arc::new(policy.clone());
        let nodes = nodes.into_iter().map(|node| (node.name.clone(), node));
        Self {
            fleet: Fleet::new(settings.clone(), Some(Arc::clone(&policy)), now),
            settings,
            policy,
            stored: Vec::new(),
            rules: BTreeMap::new(),
            loses_rules: false,
            pods: BTreeMap::new(),
            resources: BTreeMap::new(),
            watched: BTreeSet::new(),
            watches_pods: false,
            nodes: nodes.collect(),
            now,
        }
    }

    /// Restarts the controller with some of its state.
    pub(crate) fn restart(&mut self, with: Restart) {
        let kept = (with == Restart::All).then(|| self.kept());
        if with == Restart::Nothing {
            self.stored.clear();
        }
        self.restart_from(kept);
    }

    /// Returns what the controller would save of `n1` now, as read back.
    pub(crate) fn kept(&self) -> SavedState {
        let saved = serde_json::to_string(&self.fleet.sessions_to_keep("n1")).unwrap();
        let sessions: Vec<Session> = serde_json::from_str(&saved).unwrap();
        let saved = serde_json::to_string(self.fleet.book()).unwrap();
        SavedState {
            book: serde_json::from_str(&saved).unwrap(),
            reports: (self.fleet.reports("n1"))
                .map(|waiting| ("n1".to_owned(), waiting))
                .into_iter()
                .collect(),
            recently_out: BTreeMap::new(),
            begun: self.fleet.begun(),
            sessions: [("n1".to_owned(), sessions)].into(),
            unsaved: [].into(),
        }
    }

    /// Restarts the controller, from state saved at some time and the events since then.
    pub(crate) fn restart_from(&mut self, kept: Option<SavedState>) {
        let policy = Some(Arc::clone(&self.policy));
        self.watched.clear();
        self.watches_pods = false;
        self.fleet = Fleet::new(self.settings.clone(), policy, self.now);
        match kept {
            Some(kept) => self.fleet.restore(kept, self.now),
            None => self.fleet.begin(),
        }
        let applied = self.fleet.book().applied();
        for record in self.stored.iter().filter(|record| record.seq > applied) {
            self.fleet.record(record, self.now);
        }
        self.handle(FleetInput::CaughtUp);
        self.list();
    }

    pub(crate) fn handle(&mut self, input: FleetInput) {
        self.fleet.handle(input, self.now);
    }

    /// Delivers a list of all nodes.
    pub(crate) fn list(&mut self) {
        self.handle(FleetInput::ListBegun);
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            self.see(&name);
        }
        self.handle(FleetInput::Listed);
    }

    /// Delivers the current state of a node.
    pub(crate) fn see(&mut self, name: &str) {
        let view = self.view(name);
        self.handle(FleetInput::NodeObserved(view));
    }

    /// Returns the node as the API server has it: tests change fields of the node only.
    pub(crate) fn view(&self, name: &str) -> Arc<NodeView> {
        let node = &self[name];
        let mut object = node.object();
        object["metadata"]["labels"] = json!(node.labels);
        object["metadata"]["annotations"] = json!(node.annotations);
        object["spec"]["unschedulable"] = json!(node.unschedulable);
        object["spec"]["taints"] = node.taints.iter().map(|on| on.raw.clone()).collect();
        Arc::new(NodeView::from_object(object).unwrap())
    }

    /// Boots `n1` with a new boot id.
    pub(crate) fn boot(&mut self, id: &str) {
        let mut object = self.view("n1").object();
        object["status"]["nodeInfo"]["bootID"] = json!(id);
        self["n1"] = NodeView::from_object(object).unwrap();
    }

    pub(crate) fn tick(&mut self) {
        self.now += SignedDuration::from_secs(1);
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(crate) fn set_policy(&mut self, policy: &Policy) {
        self.policy = Arc::new(policy.clone());
        self.handle(FleetInput::Policy(Some(Arc::clone(&self.policy))));
    }

    pub(crate) fn session(&self) -> &Session {
        self.fleet.session("n1").unwrap()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.session().phase
    }

    pub(crate) fn desired(&self) -> Desired {
        self.fleet.desired("n1")
    }

    pub(crate) fn faults(&self) -> usize {
        self.fleet.book().faults("n1").len()
    }

    pub(crate) fn fault(&mut self, gpu: u8) {
        self.event("GpuMemWatch", gpu, true, false);
    }

    pub(crate) fn recovery(&mut self, gpu: u8) {
        self.event("GpuMemWatch", gpu, false, true);
    }

    pub(crate) fn event(&mut self, check: &str, gpu: u8, fatal: bool, healthy: bool) -> String {
        self.report(check, &[("GPU", &gpu.to_string())], fatal, healthy)
    }

    pub(crate) fn report(
        &mut self,
        check: &str,
        entities: &[(&str, &str)],
        fatal: bool,
        healthy: bool,
    ) -> String {
        self.tick();
        let event = event(check, entities, fatal, healthy);
        self.store(event, self.now)
    }

    /// Stores a report about a node, or its recovery, with the current time.
    pub(crate) fn report_of(&mut self, node: &str, healthy: bool) -> String {
        let event = HealthEvent {
            node_name: node.to_owned(),
            ..event("Check", &[], true, healthy)
        };
        self.store(event, self.now)
    }

    /// Stores a report now that was accepted some seconds ago.
    pub(crate) fn late(&mut self, gpu: u8, seconds: u8) {
        self.tick();
        let accepted = self.now - SignedDuration::from_secs(i64::from(seconds));
        let mut event = event("GpuMemWatch", &[("GPU", &gpu.to_string())], true, false);
        event.metadata = [(keys::META_COUNT.to_owned(), "2".to_owned())].into();
        self.store(event, accepted);
    }

    /// Stores and records an event. Returns its id.
    pub(crate) fn store(&mut self, mut event: HealthEvent, created_at: Timestamp) -> String {
        let seq = self.stored.len() as u64 + 1;
        if event.message.is_empty() {
            event.message = format!("report {seq}");
        }
        if event.id.is_empty() {
            normalise(&mut event, created_at);
        }
        let record = Record {
            seq: seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        };
        self.fleet.record(&record, self.now);
        let id = record.id.clone();
        self.stored.push(record);
        id
    }

    /// Looks at the node a second later.
    pub(crate) fn look(&mut self, fate: Fate) -> Looked {
        self.tick();
        self.see("n1");
        self.look_unseen(fate)
    }

    /// Decides about the node in its last observed state.
    pub(crate) fn look_unseen(&mut self, fate: Fate) -> Looked {
        let looked = self.decide();
        let wake = self.fleet.wake_at();
        assert!(
            wake.is_none_or(|at| at > self.now),
            "looked at for ever: {wake:?}"
        );
        if let Some(patch) = looked.patch() {
            let answer = match fate {
                Fate::Made => {
                    self["n1"] = self["n1"].after(&patch.change);
                    PatchAnswer::Made(self.view("n1"))
                }
                Fate::Dropped => PatchAnswer::Made(self.view("n1")),
                Fate::Stripped => {
                    self["n1"] = self["n1"].after(&stripped(patch.change));
                    PatchAnswer::Made(self.view("n1"))
                }
                Fate::Conflict => PatchAnswer::Conflict,
                Fate::Refused => PatchAnswer::Refused { retry_after: None },
            };
            let node = "n1".to_owned();
            self.handle(FleetInput::NodePatched { node, answer });
        }
        looked
    }

    /// Decides, and answers questions to the store, until there are none.
    pub(crate) fn decide(&mut self) -> Looked {
        let mut looked = Looked::default();
        for _ in 0..10 {
            let mut asked = false;
            for effect in self.fleet.decide(self.now) {
                match effect {
                    Effect::PatchNode(planned) => looked.patches.push(*planned),
                    Effect::Journal(entry, _) => looked.notes.push(entry),
                    Effect::ChangeRule(planned) => {
                        looked.rules.push(planned.change.clone());
                        if !self.loses_rules {
                            self.change_rule(&planned);
                        }
                    }
                    Effect::RemovePod(planned) => looked.removals.push(*planned),
                    Effect::RequestCheckpoint(planned) => looked.checkpoints.push(*planned),
                    Effect::EmitEvent {
                        since,
                        reason,
                        message,
                        ..
                    } if reason != EventReason::QuarantineUndone => {
                        looked.waits.push((reason.name(), message));
                        looked.waits_since.push(since);
                    }
                    Effect::CreateResource(planned) => looked.makes.push(*planned),
                    Effect::DeleteResource { attempt, .. } => looked.withdrawn.push(*attempt),
                    Effect::WatchResource { name, watch, .. } => {
                        if watch {
                            asked = true;
                            self.watched.insert(name);
                            self.tell_of_resource();
                        } else {
                            self.watched.remove(&name);
                        }
                    }
                    Effect::WatchPods { watch, .. } => {
                        self.watches_pods = watch;
                        if watch {
                            asked = true;
                            self.list_pods();
                        }
                    }
                    Effect::Status(status) => looked.statuses.push(status),
                    Effect::LookUp { node, ids } => {
                        asked = true;
                        let found = ids.into_iter().map(|id| (id.clone(), self.in_store(&id)));
                        let found = Some(found.collect());
                        self.handle(FleetInput::EventsFound { node, found });
                    }
                    Effect::Append {
                        node,
                        events,
                        purpose,
                    } => {
                        asked = true;
                        looked.appended.push(purpose);
                        for (event, created_at) in events {
                            self.store(event, created_at);
                        }
                        let result = Ok(Some(Position::from(self.stored.len() as u64)));
                        self.handle(FleetInput::EventsAppended { node, result });
                    }
                    _ => {}
                }
            }
            if !asked {
                return looked;
            }
        }
        panic!("the store is asked for ever");
    }

    /// Changes a rule as the API server would: a conflict if it differs from the observed
    /// version.
    fn change_rule(&mut self, planned: &PlannedRule) {
        let PlannedRule { node, change, .. } = planned;
        let rule = change.rule_name();
        let seen = match change {
            RuleChange::Create(_) => None,
            RuleChange::Update(rule, _) | RuleChange::Delete(rule) => Some(&rule.resource_version),
        };
        let is = self.rules.get(&rule).map(|rule| &rule.resource_version);
        let result = if is == seen {
            let version = is.map_or(0, |is| is.parse::<u64>().unwrap()) + 1;
            let after = change.after().map(|after| Rule {
                resource_version: version.to_string(),
                ..after
            });
            match after.clone() {
                Some(after) => drop(self.rules.insert(rule.clone(), after)),
                None => drop(self.rules.remove(&rule)),
            }
            Ok(after.map(Box::new))
        } else {
            Err(Failure::Conflict)
        };
        let node = node.clone();
        self.handle(FleetInput::RuleChanged { node, rule, result });
    }

    /// Delivers the current state of the watched custom resources.
    pub(crate) fn tell_of_resource(&mut self) {
        for name in self.watched.clone() {
            let update = match self.resources.get(&name) {
                Some(object) => ResourceUpdate::There(Box::new(object.clone())),
                None => ResourceUpdate::Absent,
            };
            let node = "n1".to_owned();
            self.handle(FleetInput::Resource { node, name, update });
        }
    }

    /// Delivers a list of the pods of `n1`.
    pub(crate) fn list_pods(&mut self) {
        self.tell(PodUpdate::ListBegun);
        for pod in self.pods.clone().into_values() {
            self.tell(PodUpdate::Observed(Box::new(pod)));
        }
        self.tell(PodUpdate::Listed);
    }

    /// Delivers a change of the pods of `n1`.
    pub(crate) fn tell(&mut self, update: PodUpdate) {
        let node = "n1".to_owned();
        self.handle(FleetInput::Pods { node, update });
    }

    /// Delivers all rules, and a slice with the GPUs of `n1`.
    pub(crate) fn see_devices(&mut self, gpus: u8) {
        let slice = slice("n1", gpus);
        self.handle(FleetInput::Devices(DeviceInput::Slice(
            "s".into(),
            Some(slice),
        )));
        for (name, rule) in self.rules.clone() {
            let rule = DeviceInput::Rule(name, Some(Box::new(rule)));
            self.handle(FleetInput::Devices(rule));
        }
        self.handle(FleetInput::Devices(DeviceInput::Watch(DeviceWatch::Known)));
    }

    /// Returns the rules, as `device taint`.
    pub(crate) fn tainted(&self) -> Vec<String> {
        let rules = self.rules.values().map(|rule| &rule.spec);
        let mut tainted: Vec<String> = rules
            .map(|spec| format!("{} {}", spec.device.name, spec.taint))
            .collect();
        tainted.sort();
        tainted
    }

    fn in_store(&self, id: &str) -> EventInStore {
        if self.stored.iter().any(|record| record.id == id) {
            EventInStore::Current
        } else {
            EventInStore::Missing
        }
    }

    /// Looks until nothing is to be done now. Returns the intents of the patches.
    pub(crate) fn settle_now(&mut self) -> Vec<Intent> {
        let mut intents = Vec::new();
        for _ in 0..10 {
            match self.look(Fate::Made).patch() {
                Some(patch) => intents.push(patch.intent),
                None if self.session().not_before.is_none() => return intents,
                None => self.now = self.now.max(self.session().not_before.unwrap()),
            }
        }
        panic!("does not settle: {intents:?} {:?}", self.session());
    }

    /// Looks until nothing is left to do, however long it has to wait. Returns the intents of
    /// the patches.
    pub(crate) fn settle(&mut self) -> Vec<Intent> {
        let mut intents = self.settle_now();
        while let Some(at) = self.session().waits_until() {
            self.now = self.now.max(at);
            intents.extend(self.settle_now());
        }
        intents
    }

    pub(crate) fn foreign_taint(&mut self, key: &str) {
        self.taint(key, "");
    }

    /// Puts a taint on the node by hand, unless it is there.
    pub(crate) fn taint(&mut self, key: &str, value: &str) {
        let taint = Taint {
            key: key.into(),
            value: value.into(),
            effect: "NoSchedule".into(),
        };
        if !self["n1"].has_taint(&taint) {
            let raw = json!(taint);
            self["n1"].taints.push(NodeTaint { taint, raw });
        }
    }

    pub(crate) fn annotate(&mut self, key: &str, text: impl Into<String>) {
        self["n1"].annotations.insert(key.to_owned(), text.into());
    }
}

/// Returns the part of a change that passes an admission policy which removes cordons and new
/// taints.
pub(crate) fn stripped(change: NodeChange) -> NodeChange {
    NodeChange {
        unschedulable: change.unschedulable.filter(|cordon| !cordon),
        add_taints: Vec::new(),
        ..change
    }
}

impl Looked {
    /// Returns the patch of a single node.
    pub(crate) fn patch(&self) -> Option<Patch> {
        let patch = |planned: &Planned| planned.patch.clone();
        self.patches.last().map(patch)
    }
}

/// The node of this name.
impl Index<&str> for World {
    type Output = NodeView;

    fn index(&self, name: &str) -> &NodeView {
        &self.nodes[name]
    }
}

impl IndexMut<&str> for World {
    fn index_mut(&mut self, name: &str) -> &mut NodeView {
        self.nodes.get_mut(name).unwrap()
    }
}

/// Returns the settings of a controller without a brake.
pub(crate) fn settings() -> Settings {
    Settings {
        mode: Mode::Act,
        owns: Owns::All,
        cluster: true,
        store: "ours".to_owned(),
        since: Position::START,
        brake: false,
        gpu_label: NodeLabel::parse("gpu=true").unwrap(),
        retention: SignedDuration::from_hours(24 * 30),
        drain: None,
        remediation: None,
        returns_wait: true,
    }
}

pub(crate) fn event(
    check: &str,
    entities: &[(&str, &str)],
    fatal: bool,
    healthy: bool,
) -> HealthEvent {
    let entities = entities.iter().map(|(kind, value)| Entity {
        entity_type: (*kind).into(),
        entity_value: (*value).into(),
    });
    HealthEvent {
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: check.into(),
        node_name: "n1".into(),
        is_fatal: fatal && !healthy,
        is_healthy: healthy,
        entities_impacted: entities.collect(),
        ..HealthEvent::default()
    }
}
