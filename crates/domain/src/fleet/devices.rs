//! The rules that taint single devices, and what is known of the devices.
//!
//! The rules of a node follow from its session: the node says that it has one, and then its
//! devices get the taints that its faults ask for; without one they get those that only inform.
//! So the brake, a pause, a release, a dry run and the wait of a node that flaps hold for devices
//! as they do for the node, and a rule that was left behind is deleted by whoever comes next.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::json;

use super::{Effect, Fleet, Level, Mode, Owns};
use crate::assess::Desired;
use crate::device::{
    Claim, DeviceId, DeviceTaint, Inventory, NodeDevices, Rule, RuleChange, RuleSpec, Slice,
    TaintEffect,
};
use crate::drain::partial::Gpus;
use crate::journal::EntryKind;
use crate::ownership::Maker;
use crate::policy::Policy;
use crate::session::{DEADLINE, Failure, Note, retry_after};
use crate::view::DeviceView;

/// Most pods that one line of a story names.
const PODS_NAMED: usize = 10;

/// News of single devices.
#[derive(Debug)]
pub enum DeviceInput {
    /// The state of the watch.
    Watch(DeviceWatch),
    /// A slice of a driver, by its name; `None`: it is gone.
    Slice(String, Option<Slice>),
    /// A rule of a gpuwarden, by its name; `None`: it is gone.
    Rule(String, Option<Box<Rule>>),
    /// A claim, by its name; `None`: it is gone.
    Claim(String, Option<Claim>),
}

/// The state of the watch of single devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceWatch {
    /// Nobody looks at them: only nodes are decided about.
    #[default]
    Off,
    /// They are being listed: what concerns them cannot be decided yet.
    Pending,
    /// They cannot be tainted, for this reason: only nodes are decided about.
    Unserved(String),
    /// They are known.
    Known,
}

/// A change of a rule to be made.
#[derive(Clone, Debug)]
pub struct PlannedRule {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// The change.
    pub change: RuleChange,
}

/// The single devices of all nodes, and the rules that taint them, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Devices {
    pub(super) watch: DeviceWatch,
    inventory: Inventory,
    /// Rules of any gpuwarden, by name.
    rules: BTreeMap<String, Rule>,
    /// The names of the rules for devices of each node.
    rules_of: BTreeMap<String, BTreeSet<String>>,
    claims: BTreeMap<String, Claim>,
    /// The names of the claims that were given a device.
    claims_of: BTreeMap<DeviceId, BTreeSet<String>>,
}

/// The state of the changes of a node's rules.
#[derive(Debug, Default)]
pub(super) struct RuleState {
    /// Names of the rules of which a change is under way.
    in_flight: BTreeSet<String>,
    /// Rules as a dry run pretends to have made them; `None`: deleted.
    pretended: BTreeMap<String, Option<Rule>>,
    /// Number of attempts in a row that failed.
    failures: u32,
    /// Time before which a change is not tried again.
    not_before: Option<Timestamp>,
    /// Since when a change is wanted that is not made.
    pending_since: Option<Timestamp>,
    /// True once a person has been asked about that change.
    asked: bool,
}

// === impl Devices ===

impl Devices {
    /// Takes news in. Returns the nodes that they concern.
    fn take(&mut self, input: DeviceInput) -> BTreeSet<String> {
        match input {
            DeviceInput::Watch(watch) => {
                self.watch = watch;
                BTreeSet::new()
            }
            DeviceInput::Slice(name, slice) => self.inventory.take(&name, slice),
            DeviceInput::Rule(name, rule) => self.take_rule(name, rule.map(|rule| *rule)),
            DeviceInput::Claim(name, claim) => self.take_claim(name, claim),
        }
    }

    fn take_rule(&mut self, name: String, rule: Option<Rule>) -> BTreeSet<String> {
        let before = self.rules.remove(&name);
        let mut nodes = BTreeSet::new();
        if let Some(before) = before {
            if let Some(names) = self.rules_of.get_mut(&before.spec.node) {
                names.remove(&name);
            }
            nodes.insert(before.spec.node);
        }
        if let Some(rule) = rule {
            let names = self.rules_of.entry(rule.spec.node.clone()).or_default();
            names.insert(name.clone());
            nodes.insert(rule.spec.node.clone());
            self.rules.insert(name, rule);
        }
        nodes
    }

    fn take_claim(&mut self, name: String, claim: Option<Claim>) -> BTreeSet<String> {
        let before = self.claims.remove(&name);
        for device in before.iter().flat_map(|claim| &claim.devices) {
            if let Some(names) = self.claims_of.get_mut(device) {
                names.remove(&name);
                if names.is_empty() {
                    self.claims_of.remove(device);
                }
            }
        }
        for device in claim.iter().flat_map(|claim| &claim.devices) {
            let names = self.claims_of.entry(device.clone()).or_default();
            names.insert(name.clone());
        }
        let claims = before.iter().chain(&claim);
        let devices: BTreeSet<&DeviceId> = claims.flat_map(|claim| &claim.devices).collect();
        let rules = self.rules.values().map(|rule| &rule.spec);
        let nodes = rules.filter(|spec| devices.contains(&spec.device));
        let nodes = nodes.map(|spec| spec.node.clone()).collect();
        if let Some(claim) = claim {
            self.claims.insert(name, claim);
        }
        nodes
    }

    fn rules_of(&self, node: &str) -> impl Iterator<Item = &Rule> {
        let names = self.rules_of.get(node).into_iter().flatten();
        names.filter_map(|name| self.rules.get(name))
    }

    /// Returns the devices of a node.
    pub(super) fn of_node(&self, node: &str) -> NodeDevices {
        self.inventory.of_node(node, self.rules_of(node))
    }

    /// Returns what is known of GPUs of a node, which have these UUIDs, and of who holds them.
    pub(super) fn gpus(&self, node: &str, uuids: &[String]) -> Gpus {
        let mut gpus = Gpus {
            uuids: uuids.iter().cloned().collect(),
            ..Gpus::default()
        };
        for (id, device) in self.of_node(node).iter() {
            let pods = self.pods(id);
            let pods = || pods.iter().map(|pod| (*pod).to_owned());
            let gpu = device.gpu.as_deref();
            if gpu.is_some_and(|gpu| uuids.iter().any(|one| one.eq_ignore_ascii_case(gpu))) {
                gpus.uuids.extend(device.mig.clone());
                gpus.holders.extend(pods());
            }
            gpus.claimed.extend(pods());
        }
        gpus
    }

    /// Returns the pods that use a device, by what claims were given.
    pub(super) fn pods(&self, device: &DeviceId) -> BTreeSet<&str> {
        let claims = self.claims_of.get(device).into_iter().flatten();
        let claims = claims.filter_map(|name| self.claims.get(name));
        let pods = claims.flat_map(|claim| &claim.pods);
        pods.map(String::as_str).collect()
    }
}

// === impl RuleState ===

impl RuleState {
    /// Returns whether an answer is awaited.
    pub(super) fn is_under_way(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Takes in that what is under way will not be answered.
    pub(super) fn answers_lost(&mut self) {
        self.in_flight.clear();
    }

    /// Takes in that the clock was put back.
    pub(super) fn clock_put_back(&mut self, now: Timestamp) {
        self.not_before = None;
        self.pending_since = self.pending_since.map(|since| since.min(now));
    }

    /// Returns when the rules are to be looked at again even if nothing happens.
    pub(super) fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let since = self.pending_since.filter(|_| !self.asked);
        let attention = since.map(|since| since.checked_add(DEADLINE).unwrap_or(Timestamp::MAX));
        let times = [self.not_before, attention].into_iter().flatten();
        times.filter(|at| *at > now).min()
    }

    fn settled(&mut self) {
        (self.failures, self.not_before, self.pending_since) = (0, None, None);
        self.asked = false;
    }
}

// === impl Fleet ===

impl Fleet {
    /// Takes news of single devices in.
    pub(super) fn take_devices(&mut self, input: DeviceInput) {
        let watch = self.common.devices.watch.clone();
        for node in self.common.devices.take(input) {
            self.look_again_at(&node);
        }
        if self.common.devices.watch == watch {
            return;
        }
        if let DeviceWatch::Unserved(why) = &self.common.devices.watch {
            let text = format!(
                "single devices cannot be tainted, and where one is faulty its node is taken out: \
                 {why}"
            );
            self.log(Level::Warn, None, text);
        }
        self.look_again_at_all();
    }

    /// Returns whether it is not known yet what devices there are, and the policy asks for it.
    pub(super) fn awaits_devices(&self) -> bool {
        let asks = |policy: &Arc<Policy>| policy.device_taints.is_some();
        self.common.devices.watch == DeviceWatch::Pending
            && self.common.policy.as_ref().is_some_and(asks)
    }

    /// Returns the rules on devices of a node that are ours, as decisions see them.
    pub(super) fn rules(&self, node: &str) -> Vec<Rule> {
        let rules = self.common.devices.rules_of(node);
        let rules = rules.filter(|rule| self.owns_rule(rule)).cloned();
        let mut rules: BTreeMap<String, Rule> =
            rules.map(|rule| (rule.name.clone(), rule)).collect();
        let entry = self.nodes.get(node);
        for (name, rule) in entry.into_iter().flat_map(|entry| &entry.rules.pretended) {
            match rule {
                Some(rule) => drop(rules.insert(name.clone(), rule.clone())),
                None => drop(rules.remove(name)),
            }
        }
        rules.into_values().collect()
    }

    /// Returns whether a rule is ours: of a controller, or of our own store where we run for one
    /// node. One of our node that another store has made before ours began was left behind by a
    /// store that was lost; see `Ownership::kept_by_another`.
    fn owns_rule(&self, rule: &Rule) -> bool {
        match &self.common.settings.owns {
            Owns::All => rule.spec.by == Maker::Controller,
            Owns::Node(own) => {
                let ours = rule.spec.store.as_ref() == Some(&self.common.settings.store);
                let before = rule.created_at.is_some_and(|at| at < self.common.begun);
                rule.spec.by == Maker::Node && (ours || rule.spec.node == *own && before)
            }
        }
    }

    /// Returns the devices of a node that we have tainted, as they are shown.
    pub(super) fn show_devices(&self, node: &str) -> Vec<DeviceView> {
        let mut shown: BTreeMap<DeviceId, DeviceView> = BTreeMap::new();
        for Rule { spec, eviction, .. } in self.rules(node) {
            let device = shown.entry(spec.device.clone()).or_insert_with(|| {
                let pods = self.common.devices.pods(&spec.device).into_iter();
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

    /// Brings the rules of a node in line with what is wanted.
    pub(super) fn look_at_rules(&mut self, name: &str, desired: &Desired) {
        let now = self.common.now;
        let Some(entry) = self.nodes.get(name) else {
            return;
        };
        if entry.patch.in_flight && !entry.patch.updating {
            return; // Looked at again when the node says what it is.
        }
        let in_session = entry.ownership().is_some();
        let seen = self.rules(name);
        let changes = self.rule_changes(name, &seen, desired, in_session);
        let rules = &mut self.entry(name).rules;
        if changes.is_empty() {
            if rules.in_flight.is_empty() {
                rules.settled();
            }
            return;
        }
        let since = *rules.pending_since.get_or_insert(now);
        let failures = rules.failures;
        let asks = !rules.asked && now.duration_since(since) >= DEADLINE;
        rules.asked |= asks;
        let waits = rules.not_before.is_some_and(|at| now < at);
        if asks {
            let text = format!(
                "device taints: not taken by the API server for {} s, {failures} attempts failed; \
                 look at the API server and at gpuwarden's permissions",
                now.duration_since(since).as_secs()
            );
            self.call_attention(name, text);
        }
        if waits {
            return;
        }
        self.entry(name).rules.not_before = None;
        for change in changes {
            self.plan_rule(name, change);
        }
    }

    /// Returns the changes that make the rules of a node what they should be, but for those of
    /// which one is under way.
    fn rule_changes(
        &self,
        name: &str,
        seen: &[Rule],
        desired: &Desired,
        in_session: bool,
    ) -> Vec<RuleChange> {
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
        // A node that waits to be given back keeps what it is out with.
        if in_session && !desired.wanted() {
            let out = seen.iter().map(|rule| &rule.spec);
            for spec in out.filter(|spec| spec.taint.effect > TaintEffect::None) {
                let key = (spec.device.clone(), spec.taint.key.clone());
                wanted.insert(key, spec.taint.clone());
            }
        }
        let mut changes = Vec::new();
        for rule in seen {
            let key = (rule.spec.device.clone(), rule.spec.taint.key.clone());
            match wanted.remove(&key) {
                Some(taint) if taint == rule.spec.taint => {}
                Some(taint) => changes.push(RuleChange::Update(Box::new(rule.clone()), taint)),
                None => changes.push(RuleChange::Delete(Box::new(rule.clone()))),
            }
        }
        let devices = self.common.devices.of_node(name);
        let missing = wanted.into_iter().map(|((device, _), taint)| {
            RuleChange::Create(self.rule_spec(name, &devices, device, taint))
        });
        changes.extend(missing);
        if let Some(entry) = self.nodes.get(name) {
            changes.retain(|change| !entry.rules.in_flight.contains(&change.rule_name()));
        }
        changes
    }

    fn rule_spec(
        &self,
        node: &str,
        devices: &NodeDevices,
        device: DeviceId,
        taint: DeviceTaint,
    ) -> RuleSpec {
        let published = devices.get(&device);
        let gpu = published.and_then(|one| one.gpu.clone().or_else(|| one.pci.clone()));
        let by = self.common.settings.owns.maker();
        RuleSpec {
            device,
            taint,
            node: node.to_owned(),
            gpu: gpu.unwrap_or_default(),
            store: (by == Maker::Node).then(|| self.common.settings.store.clone()),
            by,
        }
    }

    /// Plans the change of a rule; in a dry run goes on as if it had been made.
    fn plan_rule(&mut self, name: &str, change: RuleChange) {
        let session = self.entry(name).session.id.clone();
        let pods = self.common.devices.pods(change.device());
        let text = format!("{change}{}", users(&pods));
        let detail = json!({
            "device": change.device().to_string(),
            "rule": change.rule_name(),
            "pods": pods,
        });
        if self.common.settings.mode == Mode::DryRun {
            self.log(Level::Info, Some(name), format!("dry run: {text}"));
            let kind = EntryKind::DryRun;
            let note = Note { kind, text, detail };
            self.note(name, session.as_deref(), note, None);
            let real = self.common.devices.rules.contains_key(&change.rule_name());
            let pretended = &mut self.entry(name).rules.pretended;
            match change.after() {
                None if !real => drop(pretended.remove(&change.rule_name())),
                after => drop(pretended.insert(change.rule_name(), after)),
            }
            self.agenda.unshown.insert(name.to_owned());
            return;
        }
        if !self.common.settings.cluster {
            return;
        }
        let kind = EntryKind::Decision;
        let note = Note { kind, text, detail };
        self.note(name, session.as_deref(), note, Some(Level::Info));
        let rules = &mut self.entry(name).rules;
        rules.in_flight.insert(change.rule_name());
        self.agenda.effects.push(Effect::Rule(Box::new(PlannedRule {
            node: name.to_owned(),
            session,
            change,
        })));
    }

    /// Takes in the answer to a change of a rule: the rule as it is now, or that it is gone.
    pub(super) fn rule_answered(
        &mut self,
        node: &str,
        rule: String,
        result: Result<Option<Box<Rule>>, Failure>,
    ) {
        let now = self.common.now;
        let rules = &mut self.entry(node).rules;
        rules.in_flight.remove(&rule);
        match result {
            Ok(after) => {
                rules.failures = 0;
                // The watch may have told of a newer state before the answer came.
                let known = self.common.devices.rules.get(&rule);
                let overtaken = (known.zip(after.as_ref()))
                    .is_some_and(|(known, after)| after.is_older_than(known));
                if !overtaken {
                    self.common.devices.take(DeviceInput::Rule(rule, after));
                }
            }
            Err(failure) => {
                rules.failures = rules.failures.saturating_add(1);
                rules.not_before = Some(now + retry_after(rules.failures, failure));
            }
        }
        self.look_again_at(node);
    }
}

/// Returns who uses a device, for people; nothing where nobody does.
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
    // Writing to a string does not fail.
    let _ = write!(text, "; {} {verb} it: {}", pods.len(), named.join(", "));
    if more > 0 {
        let _ = write!(text, " and {more} more");
    }
    text
}

#[cfg(test)]
mod tests;
