//! The device-taint stage: taints single devices of a node by `DeviceTaintRule`s.
//!
//! The rules of a node follow from its session: once the node's mark says that it has one, its
//! devices get the taints that its faults ask for; without a session they get only informational
//! ones. So the brake, a pause, a release, a dry run and the wait of a flapping node hold for
//! devices as for nodes, and a rule that was left behind is deleted by the next process.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use jiff::Timestamp;
use model::device::{
    DeviceId, DeviceTaint, DeviceTaintRule, NodeDevices, RuleChange, RuleSpec, TaintEffect,
};
use model::journal::EntryKind;
use model::mode::Mode;
use model::ownership::Maker;
use policy::assess::Desired;
use serde_json::json;

use super::managed_resource::Retry;
use super::{Facts, Stage, StageRequests};
use crate::session::{DEADLINE, JournalNote, RequestFailure};
use crate::state::FleetState;
use crate::view::DeviceView;
use crate::{Effect, Level, PlannedRule};

/// Most pods named in one line of a journal.
const PODS_NAMED: usize = 10;

/// Rules that taint devices of one node.
#[derive(Debug, Default)]
pub(crate) struct DeviceTaints {
    /// Names of the rules with a change in flight.
    in_flight: BTreeSet<String>,
    /// Rules that a dry run pretends to have changed; `None` if deleted.
    pretended: BTreeMap<String, Option<DeviceTaintRule>>,
    retry: Retry,
    /// Time since which a wanted change has not been made.
    pending_since: Option<Timestamp>,
    /// True once a person has been asked about that change.
    asked: bool,
}

// === impl DeviceTaints ===

impl DeviceTaints {
    /// Handles the answer to a change of a rule.
    pub(crate) fn change_answered(
        &mut self,
        rule: &str,
        result: Result<(), RequestFailure>,
        now: Timestamp,
    ) {
        self.in_flight.remove(rule);
        match result {
            Ok(()) => self.retry.failures = 0,
            Err(failure) => drop(self.retry.failed("a rule is not changed", failure, now)),
        }
    }

    /// Returns our rules on devices of the node, as decisions see them.
    pub(crate) fn rules(&self, node: &str, fleet: &FleetState) -> Vec<DeviceTaintRule> {
        let rules = fleet.devices.rules_of(node);
        let rules = rules.filter(|rule| fleet.owns_rule(rule)).cloned();
        let mut rules: BTreeMap<String, DeviceTaintRule> =
            rules.map(|rule| (rule.name.clone(), rule)).collect();
        for (name, rule) in &self.pretended {
            match rule {
                Some(rule) => drop(rules.insert(name.clone(), rule.clone())),
                None => drop(rules.remove(name)),
            }
        }
        rules.into_values().collect()
    }

    /// Returns the views of the devices of the node that we have tainted.
    pub(crate) fn show(&self, node: &str, fleet: &FleetState) -> Vec<DeviceView> {
        let mut shown: BTreeMap<DeviceId, DeviceView> = BTreeMap::new();
        for DeviceTaintRule { spec, eviction, .. } in self.rules(node, fleet) {
            let device = shown.entry(spec.device.clone()).or_insert_with(|| {
                let pods = fleet.devices.pods(&spec.device).into_iter();
                DeviceView {
                    device: spec.device.to_string(),
                    gpu: spec.gpu,
                    taints: Vec::new(),
                    evictions: Vec::new(),
                    pods: pods.map(str::to_owned).collect(),
                }
            });
            device.taints.push(spec.taint.to_string());
            device.evictions.extend(eviction);
        }
        shown.into_values().collect()
    }

    /// Returns the changes that align the rules of the node with `desired`, except rules with a
    /// change in flight.
    fn changes(&self, facts: &Facts<'_>, desired: &Desired) -> Vec<RuleChange> {
        let current = self.rules(facts.name, facts.state);
        let in_session = facts.in_session;
        let mut wanted = BTreeMap::new();
        for (device, taints) in &desired.devices {
            for taint in taints {
                let mut taint = taint.clone();
                if !in_session {
                    taint.effect = TaintEffect::None;
                }
                wanted.insert((device.clone(), taint.key.clone()), taint);
            }
        }
        // A node that waits to be given back keeps the taints that it is out with.
        if in_session && !desired.wanted() {
            let out = current.iter().map(|rule| &rule.spec);
            for spec in out.filter(|spec| spec.taint.effect > TaintEffect::None) {
                let key = (spec.device.clone(), spec.taint.key.clone());
                wanted.insert(key, spec.taint.clone());
            }
        }
        let mut changes = Vec::new();
        for rule in current {
            let key = (rule.spec.device.clone(), rule.spec.taint.key.clone());
            match wanted.remove(&key) {
                Some(taint) if taint == rule.spec.taint => {}
                Some(taint) => changes.push(RuleChange::Update(Box::new(rule), taint)),
                None => changes.push(RuleChange::Delete(Box::new(rule))),
            }
        }
        if !wanted.is_empty() {
            let devices = facts.state.devices.of_node(facts.name);
            let missing = wanted.into_iter().map(|((device, _), taint)| {
                RuleChange::Create(rule_spec(facts, &devices, device, taint))
            });
            changes.extend(missing);
        }
        changes.retain(|change| !self.in_flight.contains(&change.rule_name()));
        changes
    }

    /// Requests the change of a rule; a dry run pretends that it was made.
    fn request_change(
        &mut self,
        facts: &Facts<'_>,
        change: RuleChange,
        requests: &mut StageRequests<'_>,
    ) {
        let fleet = facts.state;
        let pods = fleet.devices.pods(change.device());
        let text = format!("{change}{}", users(&pods));
        let detail = json!({
            "device": change.device().to_string(),
            "rule": change.rule_name(),
            "pods": pods,
        });
        if fleet.settings.mode == Mode::DryRun {
            requests.log(Level::Info, format!("dry run: {text}"));
            let kind = EntryKind::DryRun;
            requests.journal(JournalNote { kind, text, detail }, None);
            let real = fleet.devices.has_rule(&change.rule_name());
            match change.after() {
                None if !real => drop(self.pretended.remove(&change.rule_name())),
                after => drop(self.pretended.insert(change.rule_name(), after)),
            }
            requests.show();
            return;
        }
        if !fleet.settings.cluster {
            return;
        }
        let kind = EntryKind::Decision;
        requests.journal(JournalNote { kind, text, detail }, Some(Level::Info));
        self.in_flight.insert(change.rule_name());
        requests.effect(Effect::ChangeRule(Box::new(PlannedRule {
            node: facts.name.to_owned(),
            session: requests.session(),
            change,
        })));
    }

    fn settled(&mut self) {
        self.retry.succeeded();
        (self.pending_since, self.asked) = (None, false);
    }
}

impl Stage for DeviceTaints {
    /// Aligns the rules of the node with `desired`.
    fn act(&mut self, facts: &Facts<'_>, desired: &Desired, requests: &mut StageRequests<'_>) {
        let now = facts.state.now;
        if facts.unsettled {
            return; // The answer to the patch triggers another look.
        }
        let changes = self.changes(facts, desired);
        if changes.is_empty() {
            if self.in_flight.is_empty() {
                self.settled();
            }
            return;
        }
        let since = *self.pending_since.get_or_insert(now);
        if !self.asked && now.duration_since(since) >= DEADLINE {
            self.asked = true;
            requests.call_attention(format!(
                "device taints: not accepted by the API server for {} s, {} attempts failed; look at the API \
                 server and at gpuwarden's permissions",
                now.duration_since(since).as_secs(),
                self.retry.failures
            ));
        }
        if self.retry.waits(now) {
            return;
        }
        self.retry.clear_wait();
        for change in changes {
            self.request_change(facts, change, requests);
        }
    }

    fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let since = self.pending_since.filter(|_| !self.asked);
        let attention = since.map(|since| since.checked_add(DEADLINE).unwrap_or(Timestamp::MAX));
        let times = [self.retry.at(), attention].into_iter().flatten();
        times.filter(|at| *at > now).min()
    }

    fn awaits_answer(&self) -> bool {
        !self.in_flight.is_empty()
    }

    fn clock_moved_back(&mut self, now: Timestamp) {
        self.retry.clear_wait();
        self.pending_since = self.pending_since.map(|since| since.min(now));
    }

    fn answers_lost(&mut self) {
        self.in_flight.clear();
    }
}

fn rule_spec(
    facts: &Facts<'_>,
    devices: &NodeDevices,
    device: DeviceId,
    taint: DeviceTaint,
) -> RuleSpec {
    let published = devices.get(&device);
    let gpu = published.and_then(|one| one.gpu.clone().or_else(|| one.pci.clone()));
    let settings = &facts.state.settings;
    let by = settings.owns.maker();
    RuleSpec {
        device,
        taint,
        node: facts.name.to_owned(),
        gpu: gpu.unwrap_or_default(),
        store: (by == Maker::Node).then(|| settings.store.clone()),
        by,
    }
}

/// Returns the pods that use a device, for people; empty if there are none.
fn users(pods: &BTreeSet<&str>) -> String {
    let mut text = String::new();
    if pods.is_empty() {
        return text;
    }
    let verb = if pods.len() == 1 {
        "pod uses"
    } else {
        "pods use"
    };
    let named: Vec<&str> = pods.iter().copied().take(PODS_NAMED).collect();
    let more = pods.len() - named.len();
    // Writing to a string cannot fail.
    let _ = write!(text, "; {} {verb} it: {}", pods.len(), named.join(", "));
    if more > 0 {
        let _ = write!(text, " and {more} more");
    }
    text
}

#[cfg(test)]
mod tests;
