//! From the open faults of a node to what is wanted for it.
//!
//! Recomputed from all open faults whenever anything has changed from which it follows (`fleet/desired.rs`): a second
//! fault is taken in at once, and the recovery of one of two takes back only what that one asked for.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use contract::{HealthEvent, RecommendedAction, keys};
use jiff::Timestamp;
use model::attempt::RemediationMark;
use model::device::{DeviceId, DeviceTaint, NodeDevices, TaintEffect};
use model::fault::Fault;
use model::node::{NodeView, Taint, label_value};
use model::ownership::Ownership;

use crate::{
    EventVariable, NodeVariable, Policy, Route, RouteDrain, Routed, RuleSet, RuleSetAnswer,
    event_variable,
};

mod devices;
mod judge;
mod remaining;

use devices::DeviceFaults;
use judge::{Answers, judge};

/// The state that is wanted for a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// True if the node is to be cordoned.
    pub cordon: bool,
    /// Taints that it should carry, sorted, one per key and effect.
    pub taints: Vec<Taint>,
    /// Rule sets that ask for it, in the order of the policy.
    pub rule_sets: Vec<String>,
    /// Taints that single devices of it should carry, of each one per key.
    pub devices: BTreeMap<DeviceId, Vec<DeviceTaint>>,
    /// How far its pods should have left; `None`: they stay.
    pub drain: Option<DrainProgress>,
    /// The GPUs whose pods those are, by UUID; empty: all of its pods.
    pub drain_gpus: Vec<String>,
    /// What its session is to say of its remediation.
    pub remediation: Option<RemediationMark>,
    /// The events of the faults for which it is wanted, gravest first.
    pub events: Vec<CountedEvent>,
    /// The name of who counts as having cordoned the node, where a sender's override forces it.
    pub forced_by: Option<String>,
    /// The decision about each open fault, gravest first.
    pub rulings: Vec<FaultRuling>,
}

/// A stage of the drain of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainProgress {
    /// Pods leave it.
    Draining,
    /// All pods that were to leave have left.
    Drained,
}

/// The decision about one open fault. Displayed for people.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultRuling {
    /// [`Fault::title`].
    pub fault: String,
    /// The decision.
    pub ruling: Ruling,
    /// The reason why it deletes no pods of its device, where the policy asks for that.
    pub lowered: Option<&'static str>,
    /// The route of the policy that it takes, where it is one of those for which the node is out.
    pub route: Option<Routed>,
}

/// A decision about an open fault, and who made it, in order of precedence. Displayed for people.
#[derive(Clone, Debug, PartialEq)]
pub enum Ruling {
    /// The node is handed over to an external system (label
    /// [`HANDED_OVER_LABEL`](keys::HANDED_OVER_LABEL)).
    HandedOver,
    /// A person has dismissed it, and it was not reported since.
    Dismissed(Dismissal),
    /// Its sender asks to quarantine.
    Forced,
    /// Its sender asks not to quarantine.
    Skipped,
    /// The policy was asked.
    Judged {
        /// True if a rule set that matches asks for anything.
        wanted: bool,
        /// The answer of each rule set, in the order of the policy.
        answers: Vec<(String, RuleSetAnswer)>,
    },
}

/// An event for which a node is quarantined.
#[derive(Clone, Debug, PartialEq)]
pub struct CountedEvent {
    /// The event that stands for the fault.
    pub event: HealthEvent,
    /// The event itself where all that it reports is open, else the parts that are.
    pub open: Vec<HealthEvent>,
    /// The time at which the newest report of the fault was accepted.
    pub accepted_at: Timestamp,
    /// The time at which the fault was first observed.
    pub first_seen: Timestamp,
    /// The route of the policy that it takes; `None`: it gets all stages.
    pub route: Option<Routed>,
}

/// Faults that do not count, because a person has dismissed them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dismissal {
    /// The faults that were last reported up to then.
    pub up_to: Timestamp,
    /// The way in which they were dismissed.
    pub by: DismissedBy,
}

/// A way in which a person dismisses faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DismissedBy {
    /// The node was released by hand.
    Released,
    /// The nodes that the circuit breaker held back were dropped (`cursor: CREATE`).
    Dropped,
}

/// Returns what `policy` asks for, given the open faults of a node, without those dismissed.
/// `devices` are those of the node that can be tainted each on its own.
pub fn assess(
    faults: &[Fault],
    policy: &Policy,
    node: &NodeView,
    devices: &NodeDevices,
    dismissed: Option<Dismissal>,
) -> Desired {
    let mut faults: Vec<&Fault> = faults.iter().collect();
    faults.sort_by(|a, b| Fault::by_gravity(a, b));
    let rule_sets = policy.rule_sets_of(node);
    // Most nodes have no faults, and a fault may ask no rule.
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
        .map(|fault| unasked(fault, handed_over, dismissed))
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
    // In the order of the policy, whatever order the faults came in: deterministic.
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

/// Returns the decision about a fault for which no rule is asked; `None` where the rules decide.
fn unasked(fault: &Fault, handed_over: bool, dismissed: Option<Dismissal>) -> Option<Ruling> {
    if handed_over {
        return Some(Ruling::HandedOver);
    }
    if let Some(dismissed) = dismissed.filter(|one| fault.dismissed(one.up_to)) {
        return Some(Ruling::Dismissed(dismissed));
    }
    let overrides = fault.event.quarantine_overrides.unwrap_or_default();
    if overrides.force {
        return Some(Ruling::Forced);
    }
    overrides.skip.then_some(Ruling::Skipped)
}

/// Returns whether an operator has handed the node to an external system for its repair, and we
/// have not taken it out before: it has its own taint, and is not ours to touch.
fn is_handed_over(node: &NodeView) -> bool {
    node.is_handed_over() && Ownership::read(node).is_none()
}

/// Returns the taints that rule sets ask for, one for each key and effect, as many as a node can
/// have. Of several effects of one key and value, that of the higher priority stays; then of
/// several values of one key and effect that of the higher priority, or the lesser one.
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

/// Adds a fault to the events that count. One event may stand for several faults (two GPUs, two
/// codes).
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
    };
    counted.push((event, vec![fault]));
}

/// Returns `<agent>-<creator>`, as the reference names who forced a quarantine.
fn forced_by(event: &HealthEvent) -> String {
    match event.metadata.get("creator_id") {
        Some(creator) => format!("{}-{creator}", event.agent),
        None => event.agent.clone(),
    }
}

/// Returns whether nothing waits for the repair of a fault: by its reporter's word, and by the
/// policy.
pub fn is_notice(fault: &Fault, rulings: &[FaultRuling]) -> bool {
    fault.notice_until().is_some() && {
        let title = fault.title();
        let mut rulings = rulings.iter();
        !rulings.any(|one| one.fault == title && one.ruling.asks())
    }
}

// === impl Desired ===

impl Desired {
    /// Returns what is wanted of the pods of a node that says it is out for these events, by the words of their
    /// senders and by the routes of `policy`.
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

    /// Returns whether the node as a whole is to be taken out of service.
    pub fn takes_node_out(&self) -> bool {
        self.cordon || !self.taints.is_empty()
    }

    /// Returns whether any event for which the node is out leaves its pods to the drain: `Some(true)`
    /// where one asks that no pod is waited for, `None` where all ask that they stay.
    pub fn drains(&self) -> Option<bool> {
        let mut asks = self.events.iter().filter_map(CountedEvent::drains);
        let first = asks.next()?;
        Some(first || asks.any(|force| force))
    }

    /// Returns whether any event for which the node is out is repaired, by the routes of the policy.
    pub fn repairs(&self) -> bool {
        let mut events = self.events.iter();
        events.any(|one| one.unrepaired_by().is_none())
    }

    /// Returns for which routes of the policy pods stay where all do; `None`: for the senders' words
    /// alone.
    pub fn skipped_by(&self) -> Option<String> {
        let routes = self.events.iter().filter_map(CountedEvent::kept_by_route);
        let titles: BTreeSet<String> = routes.map(Routed::title).collect();
        let titles: Vec<String> = titles.into_iter().collect();
        (!titles.is_empty()).then(|| titles.join(" and "))
    }

    /// Returns the GPUs by UUID that are to be reset, where that is all that its faults ask for: of each
    /// fault that leaves pods to the drain it is known which GPU it is.
    pub fn reset_gpus(&self) -> Option<Vec<String>> {
        let mut gpus = BTreeSet::new();
        for event in self
            .events
            .iter()
            .filter(|one| one.drains().is_some())
            .map(|one| &one.event)
        {
            if event.recommended_action() != RecommendedAction::ComponentReset {
                return None;
            }
            let mut entities = event.entities_impacted.iter();
            let named: Vec<String> = (entities.by_ref())
                .filter(|one| one.entity_type == keys::ENTITY_GPU_UUID)
                .map(|one| one.entity_value.clone())
                .filter(|uuid| !uuid.is_empty())
                .collect();
            let said = event.metadata.get(keys::META_GPU_UUID);
            let named = if named.is_empty() {
                said.cloned().into_iter().collect()
            } else {
                named
            };
            if named.is_empty() {
                return None;
            }
            gpus.extend(named);
        }
        (!gpus.is_empty()).then(|| gpus.into_iter().collect())
    }

    /// Adds the taint of the data-flow document, with the gravest fault's check as value.
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
    /// Returns whether it leaves pods to the drain: `Some(true)` where none is waited for, `None` where they
    /// stay. Its sender's word goes before the policy's.
    fn drains(&self) -> Option<bool> {
        let overrides = self.event.drain_overrides.unwrap_or_default();
        if overrides.skip {
            return None;
        }
        if overrides.force {
            return Some(true);
        }
        match self.route.as_ref().map(|route| route.drain) {
            Some(RouteDrain::No) => None,
            Some(RouteDrain::Forceful) => Some(true),
            Some(RouteDrain::Graceful) | None => Some(false),
        }
    }

    /// Returns the route for which its pods stay.
    fn kept_by_route(&self) -> Option<&Routed> {
        let skips = self.event.drain_overrides.unwrap_or_default().skip;
        let stays = !skips && self.drains().is_none();
        self.route.as_ref().filter(|_| stays)
    }

    /// Returns the route for which it is not repaired.
    pub fn unrepaired_by(&self) -> Option<&Routed> {
        self.route.as_ref().filter(|route| !route.remediate)
    }
}

// === impl Ruling ===

impl Ruling {
    /// Returns the decision of the rules about a fault, whose event they were asked about.
    fn judged(answers: &BTreeMap<&str, Answers>, fault: &Fault, rule_sets: &[RuleSet]) -> Self {
        let answers = answers.get(fault.event.id.as_str()).cloned();
        let answers = answers.unwrap_or_default();
        let mut both = answers.iter().zip(rule_sets);
        let wanted = both.any(|((_, answer), set)| *answer == RuleSetAnswer::Matched && set.asks());
        Self::Judged { wanted, answers }
    }

    /// Returns whether it asks for anything to be done.
    pub fn asks(&self) -> bool {
        matches!(self, Self::Forced | Self::Judged { wanted: true, .. })
    }

    /// Returns whether the rule set at `index` of the policy matches the fault.
    fn matched(&self, index: usize) -> bool {
        let Self::Judged { answers, .. } = self else {
            return false;
        };
        matches!(answers.get(index), Some((_, RuleSetAnswer::Matched)))
    }

    /// Returns whether the operator's label on the node ([`keys::MANAGED_LABEL`]) is what keeps it
    /// in service.
    pub fn opted_out(&self, node: &NodeView) -> bool {
        let Self::Judged {
            wanted: false,
            answers,
        } = self
        else {
            return false;
        };
        let by_label = |answer: &RuleSetAnswer| matches!(answer, RuleSetAnswer::NotMatched(expression) if expression.contains(keys::MANAGED_LABEL));
        node.labels
            .get(keys::MANAGED_LABEL)
            .is_some_and(|value| value == "false")
            && answers.iter().any(|(_, answer)| by_label(answer))
    }
}

impl fmt::Display for Ruling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HandedOver => write!(
                f,
                "the node is handed over for repair (label {}=false)",
                keys::HANDED_OVER_LABEL
            ),
            Self::Dismissed(Dismissal { by, .. }) => f.write_str(match by {
                DismissedBy::Released => {
                    "dismissed when the node was released by hand; a newer report counts"
                }
                DismissedBy::Dropped => {
                    "dropped when the circuit breaker was reset with cursor CREATE; a newer \
                     report counts"
                }
            }),
            Self::Forced => f.write_str("its sender asks to quarantine (force)"),
            Self::Skipped => f.write_str("its sender asks not to quarantine (skip)"),
            Self::Judged { wanted, answers } => {
                let (for_it, against): (Vec<_>, Vec<_>) = answers
                    .iter()
                    .map(|(name, answer)| {
                        (
                            *answer == RuleSetAnswer::Matched,
                            format!("'{name}' {answer}"),
                        )
                    })
                    .partition(|(matched, _)| *matched);
                let mut parts: Vec<String> = (for_it.into_iter())
                    .map(|(_, said)| format!("rule set {said}"))
                    .collect();
                if !wanted {
                    let against: Vec<String> = against.into_iter().map(|(_, said)| said).collect();
                    let why = match (answers.as_slice(), against.as_slice()) {
                        ([], _) => "the policy has no rule sets".to_owned(),
                        (_, []) => "what matches asks for nothing".to_owned(),
                        _ => against.join(", "),
                    };
                    parts.push(format!("quarantines nothing: {why}"));
                }
                f.write_str(&parts.join("; "))
            }
        }
    }
}

// === impl FaultRuling ===

impl fmt::Display for FaultRuling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.fault, self.ruling)?;
        if let Some(route) = &self.route {
            write!(f, "; {route}")?;
        }
        match self.lowered {
            Some(why) => write!(f, "; NoExecute is asked for and not set: {why}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
