//! Assessment: from the open faults of a node to the desired state of the node.
//!
//! Computed from all open faults whenever an input changes (`fleet/desired.rs`): a second fault
//! takes effect at once, and the recovery of one of two faults reverts only what that fault
//! requested.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, RecommendedAction, keys};
use jiff::Timestamp;
use model::attempt::RemediationMark;
use model::device::{DeviceId, DeviceTaint, NodeDevices, TaintEffect};
use model::fault::Fault;
use model::node::{NodeView, Taint, label_value};
use model::ownership::Ownership;
use model::proposal::Proposal;

use crate::{
    EventVariable, NodeVariable, Policy, Route, RouteDrain, Routed, RuleSet, event_variable,
};

mod devices;
mod judge;
mod remaining;
mod ruling;

use devices::DeviceFaults;
use judge::judge;

pub use ruling::{Dismissal, DismissedBy, FaultRuling, Ruling, is_notice};

/// Desired state of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// True if the node is to be cordoned.
    pub cordon: bool,
    /// Taints of the node, sorted, one per key and effect.
    pub taints: Vec<Taint>,
    /// Names of the matching rule sets, in the order of the policy.
    pub rule_sets: Vec<String>,
    /// Taints of single devices of the node, one per device and key.
    pub devices: BTreeMap<DeviceId, Vec<DeviceTaint>>,
    /// Desired progress of the drain. `None` if pods stay.
    pub drain: Option<DrainProgress>,
    /// UUIDs of the GPUs whose pods are drained. Empty for all pods of the node.
    pub drain_gpus: Vec<String>,
    /// Remediation state to record in the session.
    pub remediation: Option<RemediationMark>,
    /// Actions that are due but for a person's approval, whether or not they have it.
    pub needs_approval: BTreeSet<String>,
    /// Proposals to record in the session.
    pub proposals: Vec<Proposal>,
    /// Events of the faults that take the node out of service, gravest first.
    pub events: Vec<CountedEvent>,
    /// Name recorded as the one who cordoned the node, if a sender's override forces the
    /// quarantine.
    pub forced_by: Option<String>,
    /// Decision about each open fault, gravest first.
    pub rulings: Vec<FaultRuling>,
}

/// Progress of a node's drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainProgress {
    /// Pods are being removed.
    Draining,
    /// All pods that had to leave have left.
    Drained,
}

/// An event that takes a node out of service.
#[derive(Clone, Debug, PartialEq)]
pub struct CountedEvent {
    /// Event that stands for the faults.
    pub event: HealthEvent,
    /// Parts of the event that are still open. The event itself if that is all of it.
    pub open: Vec<HealthEvent>,
    /// Time of the acceptance of the faults' newest report.
    pub accepted_at: Timestamp,
    /// Time of the faults' first observation.
    pub first_seen: Timestamp,
    /// Route that the event takes. `None` if it gets all stages.
    pub route: Option<Routed>,
    /// True while the drain that the route asks for waits for a person's approval.
    pub unapproved: bool,
}

/// Returns the desired state of a node according to `policy` and the node's open faults, except
/// the dismissed ones. `devices` are the devices of the node that can be tainted individually.
/// A fault that may follow another one waits for that, so the result changes with the time.
pub fn assess(
    faults: &[Fault],
    policy: &Policy,
    node: &NodeView,
    devices: &NodeDevices,
    dismissed: Option<Dismissal>,
    now: Timestamp,
) -> Desired {
    let mut faults: Vec<&Fault> = faults.iter().collect();
    faults.sort_by(|a, b| Fault::by_gravity(a, b));
    let rule_sets = policy.rule_sets_of(node);
    // Created lazily: most nodes have no faults, and some faults need no rule.
    let variable = LazyCell::new(|| {
        let mut routes = policy.routes.iter().map(|route| &route.rules);
        let whole = rule_sets.iter().any(RuleSet::reads_whole_node)
            || routes.any(RuleSet::reads_whole_node);
        NodeVariable::new(&if whole {
            node.object()
        } else {
            node.labels_and_annotations()
        })
    });
    let handed_over = is_handed_over(node);
    let mut desired = Desired::default();
    let mut counted: Vec<(CountedEvent, Vec<&Fault>)> = Vec::new();
    let unruled: Vec<Option<Ruling>> = (faults.iter())
        .map(|fault| ruling::without_rules(fault, handed_over, dismissed, now))
        .collect();
    let asked = faults
        .iter()
        .zip(&unruled)
        .filter(|(_, ruling)| ruling.is_none());
    let sets: Vec<&RuleSet> = rule_sets.iter().collect();
    let answers = judge(asked.map(|(fault, _)| *fault), &sets, || &variable);
    for (fault, ruling) in faults.iter().zip(unruled) {
        let ruling = ruling.unwrap_or_else(|| Ruling::judged(&answers, fault, rule_sets));
        if ruling == Ruling::Forced {
            desired.cordon = true;
            let by = &mut desired.forced_by;
            by.get_or_insert_with(|| forced_by(&fault.event));
        }
        if ruling.asks() {
            count(&mut counted, fault);
        }
        desired.rulings.push(FaultRuling {
            fault: fault.title(),
            ruling,
            lowered: None,
            route: None,
        });
    }
    if !policy.routes.is_empty() {
        let asks = faults.iter().zip(&desired.rulings);
        let asks = asks.filter(|(_, one)| one.ruling.asks());
        let sets: Vec<&RuleSet> = policy.routes.iter().map(|one| &one.rules).collect();
        let answers = judge(asks.map(|(fault, _)| *fault), &sets, || &variable);
        let route = |id: &str| Route::taken(&policy.routes, answers.get(id)?);
        for (fault, one) in faults.iter().zip(&mut desired.rulings) {
            one.route = route(&fault.event.id);
        }
        for (one, _) in &mut counted {
            one.route = route(&one.event.id);
        }
    }
    // In the order of the policy, to be independent of the order of faults.
    let matched = |index: usize| desired.rulings.iter().any(|one| one.ruling.matched(index));
    let matched: Vec<(usize, &RuleSet)> = (rule_sets.iter().enumerate())
        .filter(|(index, _)| matched(*index))
        .collect();
    let of_devices = (policy.device_taints.as_ref())
        .map(|taints| DeviceFaults::of(&faults, &desired.rulings, taints, rule_sets, devices));
    let of_node = |index: usize| of_devices.as_ref().is_none_or(|one| !one.spare_node(index));
    let of_node: Vec<&RuleSet> = (matched.iter())
        .filter(|(index, _)| of_node(*index))
        .map(|(_, rule_set)| *rule_set)
        .collect();
    let (devices, lowered) = of_devices
        .map(|one| (one.taints(node), one.lowered(node)))
        .unwrap_or_default();
    desired.rule_sets = matched.iter().map(|(_, set)| set.name.clone()).collect();
    desired.cordon |= of_node.iter().any(|set| set.cordon);
    desired.taints = taints(&of_node);
    desired.devices = devices;
    for (ruling, lowered) in desired.rulings.iter_mut().zip(lowered) {
        ruling.lowered = lowered;
    }
    desired.events = counted
        .into_iter()
        .map(|(mut counted, open)| {
            counted.open = remaining::remaining(&counted.event, &open);
            counted
        })
        .collect();
    if policy.unhealthy_taint && desired.takes_node_out() {
        desired.add_unhealthy();
    }
    desired
}

/// Returns whether an operator handed the node over to an external system before gpuwarden took
/// it out of service. Such a node has its own taint and must not be changed.
fn is_handed_over(node: &NodeView) -> bool {
    node.is_handed_over() && Ownership::read(node).is_none()
}

/// Returns the taints requested by the rule sets, one per key and effect, as on a node. For a
/// key and value with several effects, the highest priority wins. After that, for a key and
/// effect with several values, the highest priority wins, then the smallest value.
fn taints(rule_sets: &[&RuleSet]) -> Vec<Taint> {
    let mut of_value: BTreeMap<(&str, &str), (i64, &Taint)> = BTreeMap::new();
    for rule_set in rule_sets {
        let Some(taint) = &rule_set.taint else {
            continue;
        };
        let asked = (rule_set.priority, taint);
        let known = of_value.entry((&taint.key, &taint.value)).or_insert(asked);
        if asked.0 > known.0 {
            *known = asked;
        }
    }
    let mut taints: Vec<(i64, &Taint)> = of_value.into_values().collect();
    taints.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
    let mut kept: BTreeMap<(&str, &str), &Taint> = BTreeMap::new();
    for (_, taint) in taints {
        kept.entry((&taint.key, &taint.effect)).or_insert(taint);
    }
    kept.into_values().cloned().collect()
}

/// Adds a fault to the events that take the node out. One event may stand for several faults
/// (two GPUs, two codes).
fn count<'a>(counted: &mut Vec<(CountedEvent, Vec<&'a Fault>)>, fault: &'a Fault) {
    let mut events = counted.iter_mut();
    if let Some((known, open)) = events.find(|(known, _)| known.event.id == fault.event.id) {
        known.accepted_at = known.accepted_at.max(fault.accepted_at);
        known.first_seen = known.first_seen.min(fault.first_seen);
        open.push(fault);
        return;
    }
    let event = CountedEvent {
        event: fault.event.clone(),
        open: Vec::new(),
        accepted_at: fault.accepted_at,
        first_seen: fault.first_seen,
        route: None,
        unapproved: false,
    };
    counted.push((event, vec![fault]));
}

/// Returns the titles of routes, for people; `None` if there are none.
fn titles<'a>(routes: impl Iterator<Item = &'a Routed>) -> Option<String> {
    let titles: BTreeSet<String> = routes.map(Routed::title).collect();
    let titles: Vec<String> = titles.into_iter().collect();
    (!titles.is_empty()).then(|| titles.join(" and "))
}

/// Returns `<agent>-<creator>`, NVSentinel's name for who forced a quarantine.
fn forced_by(event: &HealthEvent) -> String {
    match event.metadata.get("creator_id") {
        Some(creator) => format!("{}-{creator}", event.agent),
        None => event.agent.clone(),
    }
}

// === impl Desired ===

impl Desired {
    /// Returns the desired drain and remediation of a node out of service for `events`, which
    /// it lists itself. They follow from the overrides of the senders and the routes of
    /// `policy`.
    pub fn of_listed(events: &[HealthEvent], policy: Option<&Policy>, node: &NodeView) -> Self {
        let routes = policy.map_or(&[][..], |policy| &policy.routes);
        let node = LazyCell::new(|| NodeVariable::new(&node.object()));
        let events = events.iter().map(|event| {
            let variable = LazyCell::new(|| EventVariable::new(&event_variable(event)));
            let answers = routes.iter().map(|route| {
                let answer = route.rules.answer(&variable, &node);
                (route.rules.name.clone(), answer)
            });
            CountedEvent {
                event: event.clone(),
                open: Vec::new(),
                accepted_at: Timestamp::UNIX_EPOCH,
                first_seen: Timestamp::UNIX_EPOCH,
                route: Route::taken(routes, &answers.collect::<Vec<_>>()),
                unapproved: false,
            }
        });
        Self {
            events: events.collect(),
            ..Self::default()
        }
    }

    /// Returns whether the node, or a device of it, is to be taken out of service.
    pub fn wanted(&self) -> bool {
        let mut taints = self.devices.values().flatten();
        self.takes_node_out() || taints.any(|taint| taint.effect > TaintEffect::None)
    }

    /// Returns whether the whole node is to be taken out of service.
    pub fn takes_node_out(&self) -> bool {
        self.cordon || !self.taints.is_empty()
    }

    /// Returns whether any event drains the node: `Some(true)` if one requests a forceful
    /// drain, `None` if pods stay for all events.
    pub fn drains(&self) -> Option<bool> {
        let mut asks = self.events.iter().filter_map(CountedEvent::drains);
        let first = asks.next()?;
        Some(first || asks.any(|force| force))
    }

    /// Returns whether any event may be remediated according to the policy's routes.
    pub fn remediates(&self) -> bool {
        let mut events = self.events.iter();
        events.any(|one| one.unrepaired_by().is_none())
    }

    /// Returns the routes that keep pods on the node, for people. `None` if pods stay only
    /// because of senders' overrides.
    pub fn skipped_by(&self) -> Option<String> {
        let events = self.events.iter();
        titles(events.filter_map(CountedEvent::kept_by_route))
    }

    /// Returns the routes whose drains wait for a person's approval, for people; `None` if none does.
    pub fn unapproved_by(&self) -> Option<String> {
        let events = self.events.iter().filter(|one| one.unapproved);
        titles(events.filter_map(|one| one.route.as_ref()))
    }

    /// Returns the UUIDs of the GPUs to reset. `None` unless all draining faults request a
    /// reset and name their GPU.
    pub fn reset_gpus(&self) -> Option<Vec<String>> {
        let mut gpus = BTreeSet::new();
        for one in self.events.iter().filter(|one| one.drains().is_some()) {
            gpus.extend(one.reset_gpus()?);
        }
        (!gpus.is_empty()).then(|| gpus.into_iter().collect())
    }

    /// Adds NVSentinel's unhealthy taint, with the check of the gravest fault as value.
    fn add_unhealthy(&mut self) {
        let Some(gravest) = self.events.first() else {
            return;
        };
        let taint = Taint {
            key: keys::UNHEALTHY_TAINT.to_owned(),
            value: label_value(&gravest.event.check_name),
            effect: "NoSchedule".to_owned(),
        };
        let taken = |on: &Taint| on.key == taint.key && on.effect == taint.effect;
        if !self.taints.iter().any(taken) {
            self.taints.push(taint);
            self.taints.sort();
        }
    }
}

// === impl CountedEvent ===

impl CountedEvent {
    /// Returns whether the event drains the node: `Some(true)` for a forceful drain, `None` if
    /// pods stay. Overrides of the sender take precedence over the policy.
    pub fn drains(&self) -> Option<bool> {
        let overrides = self.event.drain_overrides.unwrap_or_default();
        if overrides.skip {
            return None;
        }
        if overrides.force {
            return Some(true);
        }
        if self.unapproved {
            return None;
        }
        match self.route.as_ref().map(|route| route.drain) {
            Some(RouteDrain::No) => None,
            Some(RouteDrain::Forceful) => Some(true),
            Some(RouteDrain::Graceful) | None => Some(false),
        }
    }

    /// Returns the route that keeps the event's pods on the node.
    fn kept_by_route(&self) -> Option<&Routed> {
        let skips = self.event.drain_overrides.unwrap_or_default().skip;
        let stays = !skips && self.drains().is_none();
        self.route.as_ref().filter(|_| stays)
    }

    /// Returns the UUIDs of the GPUs that the event names.
    pub fn named_gpus(&self) -> Vec<String> {
        let entities = self.event.entities_impacted.iter();
        let named: Vec<String> = entities
            .filter(|one| one.entity_type == keys::ENTITY_GPU_UUID)
            .map(|one| one.entity_value.clone())
            .filter(|uuid| !uuid.is_empty())
            .collect();
        if !named.is_empty() {
            return named;
        }
        let noted = self.event.metadata.get(keys::META_GPU_UUID);
        noted.cloned().into_iter().collect()
    }

    /// Returns the UUIDs of the GPUs to reset for the event. `None` unless it requests a reset and
    /// names its GPU.
    pub fn reset_gpus(&self) -> Option<Vec<String>> {
        let resets = self.event.recommended_action() == RecommendedAction::ComponentReset;
        Some(self.named_gpus()).filter(|named| resets && !named.is_empty())
    }

    /// Returns whether the event's route waits for a person's approval.
    pub fn asks_approval(&self) -> bool {
        self.route.as_ref().is_some_and(|route| route.approve)
    }

    /// Returns the route that rules out a remediation of the event.
    pub fn unrepaired_by(&self) -> Option<&Routed> {
        self.route.as_ref().filter(|route| !route.remediate)
    }
}

#[cfg(test)]
mod tests;
