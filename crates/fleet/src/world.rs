//! The world around a fleet, for tests: a controller that decides as in production, its store,
//! and an API server whose nodes accept patches or not. Most tests have one node, `n1`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use contract::{Entity, HealthEvent, keys};
use jiff::{SignedDuration, Timestamp};
use model::device::DeviceTaintRule;
use model::event::{EventRecord, normalise};
use model::mode::Mode;
use model::node::{NodeTaint, NodeView, Taint};
use model::position::Position;
use policy::Policy;
use policy::assess::Desired;
use serde_json::{Value, json};

use super::{Fleet, FleetInput, Owns, SavedState, Settings};
use crate::brake::NodeLabel;
use crate::drain::PodView;
use crate::session::{Phase, Session};

mod look;

pub(crate) use look::{Fate, LookEffects, stripped};

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

pub(crate) struct World {
    pub(crate) fleet: Fleet,
    pub(crate) settings: Settings,
    policy: Arc<Policy>,
    pub(crate) stored: Vec<EventRecord>,
    /// Current rules that taint devices.
    pub(crate) rules: BTreeMap<String, DeviceTaintRule>,
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
        let saved = (with == Restart::All).then(|| self.saved_state());
        if with == Restart::Nothing {
            self.stored.clear();
        }
        self.restart_from(saved);
    }

    /// Returns what the controller would save of `n1` now, as read back.
    pub(crate) fn saved_state(&self) -> SavedState {
        let saved = serde_json::to_string(&self.fleet.sessions_to_keep("n1")).unwrap();
        let sessions: Vec<Session> = serde_json::from_str(&saved).unwrap();
        let saved = serde_json::to_string(self.fleet.book()).unwrap();
        SavedState {
            book: serde_json::from_str(&saved).unwrap(),
            reports: (self.fleet.reports("n1"))
                .map(|waiting| ("n1".to_owned(), waiting.clone()))
                .into_iter()
                .collect(),
            recently_out: BTreeMap::new(),
            begun: self.fleet.begun(),
            sessions: [("n1".to_owned(), sessions)].into(),
            unsaved: [].into(),
        }
    }

    /// Restarts the controller, from state saved at some time and the events since then.
    pub(crate) fn restart_from(&mut self, saved: Option<SavedState>) {
        let policy = Some(Arc::clone(&self.policy));
        self.watched.clear();
        self.watches_pods = false;
        self.fleet = Fleet::new(self.settings.clone(), policy, self.now);
        match saved {
            Some(saved) => self.fleet.restore(saved, self.now),
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
            self.deliver_node(&name);
        }
        self.handle(FleetInput::Listed);
    }

    /// Delivers the current state of a node.
    pub(crate) fn deliver_node(&mut self, name: &str) {
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
        let record = EventRecord {
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
