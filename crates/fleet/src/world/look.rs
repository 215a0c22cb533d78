//! Looks at the node of a [`World`], with answers to the fleet's effects.

use jiff::Timestamp;
use model::attempt::Attempt;
use model::device::test_util::slice;
use model::device::{DeviceTaintRule, RuleChange};
use model::journal::JournalEntry;
use model::node::NodeChange;
use model::position::Position;

use super::World;
use crate::session::{Intent, Patch, RequestFailure};
use crate::status::StatusUpdate;
use crate::{
    DeviceInput, DeviceWatch, Effect, EventInStore, EventReason, FleetInput, PatchAnswer, Planned,
    PlannedCheckpoint, PlannedRemoval, PlannedResource, PlannedRule, PodUpdate, Purpose,
    ResourceUpdate,
};

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

/// Effects of a look at the nodes.
#[derive(Debug, Default)]
pub(crate) struct LookEffects {
    pub(crate) patches: Vec<Planned>,
    pub(crate) notes: Vec<JournalEntry>,
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
    pub(crate) creations: Vec<PlannedResource>,
    /// Attempts whose custom resources are withdrawn.
    pub(crate) withdrawn: Vec<Attempt>,
    pub(crate) statuses: Vec<StatusUpdate>,
    /// Purposes of appended events.
    pub(crate) appended: Vec<Purpose>,
    /// Nodes about which a person was paged.
    pub(crate) pages: Vec<String>,
}

impl World {
    /// Looks at the node a second later.
    pub(crate) fn look(&mut self, fate: Fate) -> LookEffects {
        self.tick();
        self.deliver_node("n1");
        self.look_without_watch(fate)
    }

    /// Decides about the node in its last observed state.
    pub(crate) fn look_without_watch(&mut self, fate: Fate) -> LookEffects {
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
    pub(crate) fn decide(&mut self) -> LookEffects {
        let mut looked = LookEffects::default();
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
                    Effect::CreateResource(planned) => looked.creations.push(*planned),
                    Effect::DeleteResource { attempt, .. } => looked.withdrawn.push(*attempt),
                    Effect::WatchResource { name, watch, .. } => {
                        if watch {
                            asked = true;
                            self.watched.insert(name);
                            self.deliver_resources();
                        } else {
                            self.watched.remove(&name);
                        }
                    }
                    Effect::WatchPods { watch, .. } => {
                        self.watches_pods = watch;
                        if watch {
                            asked = true;
                            self.deliver_pods();
                        }
                    }
                    Effect::Page(node) => looked.pages.push(node),
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
        let expected = match change {
            RuleChange::Create(_) => None,
            RuleChange::Update(rule, _) | RuleChange::Delete(rule) => Some(&rule.resource_version),
        };
        let is = self.rules.get(&rule).map(|rule| &rule.resource_version);
        let result = if is == expected {
            let version = is.map_or(0, |is| is.parse::<u64>().unwrap()) + 1;
            let after = change.after().map(|after| DeviceTaintRule {
                resource_version: version.to_string(),
                ..after
            });
            match after.clone() {
                Some(after) => drop(self.rules.insert(rule.clone(), after)),
                None => drop(self.rules.remove(&rule)),
            }
            Ok(after.map(Box::new))
        } else {
            Err(RequestFailure::Conflict)
        };
        let node = node.clone();
        self.handle(FleetInput::RuleChanged { node, rule, result });
    }

    /// Delivers the current state of the watched custom resources.
    pub(crate) fn deliver_resources(&mut self) {
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
    pub(crate) fn deliver_pods(&mut self) {
        self.deliver_pod_update(PodUpdate::ListBegun);
        for pod in self.pods.clone().into_values() {
            self.deliver_pod_update(PodUpdate::Observed(Box::new(pod)));
        }
        self.deliver_pod_update(PodUpdate::Listed);
    }

    /// Delivers a change of the pods of `n1`.
    pub(crate) fn deliver_pod_update(&mut self, update: PodUpdate) {
        let node = "n1".to_owned();
        self.handle(FleetInput::Pods { node, update });
    }

    /// Delivers all rules, and a slice with the GPUs of `n1`.
    pub(crate) fn deliver_devices(&mut self, gpus: u8) {
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

impl LookEffects {
    /// Returns the patch of a single node.
    pub(crate) fn patch(&self) -> Option<Patch> {
        let patch = |planned: &Planned| planned.patch.clone();
        self.patches.last().map(patch)
    }
}
