//! Replay: what a policy would have decided about past events. It runs the decisions of
//! production ([`fleet`]) on simulated nodes.
//!
//! Time is that of the events. A change is applied to the simulated node at once and observed
//! at once, since there is no API server. Nobody else changes nodes: a person's uncordon in the
//! past is not replayed, and a tripped circuit breaker stays tripped. The brake is optional;
//! without it, a replay shows what a policy asks for each node alone.
//!
//! The size of the cluster and the labels of nodes are known only from a list of nodes. Without
//! one, limits of the brake that need them are not applied; [`Replay::left_out`] names them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::keys;
use fleet::brake::{Candidate, Hold, NodeLabel};
use fleet::session::{Intent, Marks, Phase, without_ours};
use fleet::{Effect, EventInStore, Fleet, FleetInput, Owns, PatchAnswer, Planned, Settings};
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::fault::{Fault, FaultChange};
use model::mode::Mode;
use model::node::{NodeView, Taint, scheduling};
use model::position::Position;
use policy::assess::Desired;
use policy::{Amount, Brake, Limit, Policy};
use serde::{Deserialize, Serialize};

/// Most rounds of decisions and answers after one event. A change and its observation take two.
const MAX_ROUNDS: usize = 8;

/// Policy applied to past events.
#[derive(Debug)]
pub struct Replay {
    policy: Policy,
    fleet: Fleet,
    /// True if only listed nodes exist; otherwise every node that an event names exists.
    listed: bool,
    /// Limits of the brake that cannot be applied.
    left_out: Vec<String>,
    /// Nodes that are out of service, with the time when they were taken out.
    out: BTreeMap<String, Timestamp>,
    /// Looks that are due at a time, each with its node and the reasons: its fault waits until
    /// then for one that explains it.
    delayed: BTreeMap<(Timestamp, String), Vec<String>>,
    /// Nodes that the brake holds back.
    waiting: BTreeMap<String, HeldNode>,
    /// Nodes that the brake has held back at least once.
    held: BTreeSet<String>,
    /// Time when the circuit breaker tripped; nobody resets it in a replay.
    tripped_at: Option<Timestamp>,
    summary: Summary,
    taken_out: BTreeSet<String>,
    unlisted: BTreeSet<String>,
    now: Option<Timestamp>,
}

/// Node that the brake holds back.
#[derive(Debug)]
struct HeldNode {
    candidate: Option<Candidate>,
    because: Vec<String>,
    hold: Hold,
    since: Timestamp,
}

/// Kind of a decision. Serialized names are part of the output of `replay`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decided {
    /// Node is taken out of service.
    Quarantine,
    /// Cordon and taints of a node are adapted to its open faults.
    Update,
    /// Node is returned to service.
    #[serde(rename = "release")]
    Return,
    /// Marks are removed after a person returned the node to service.
    StandDown,
    /// Rules ask for a quarantine, but the brake holds the node back. A `Quarantine` or
    /// `Dropped` may follow.
    Held,
    /// Node was held back until no rule asked for its quarantine.
    Dropped,
}

/// Decision about a node. Serialized names are part of the output of `replay`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Time by the clock of the events.
    pub at: Timestamp,
    /// Name of the node.
    pub node: String,
    /// Kind of the decision.
    pub decision: Decided,
    /// True if the node is cordoned, false if it is uncordoned; absent if neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cordon: Option<bool>,
    /// Taints that the decision adds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub add_taints: Vec<Taint>,
    /// Taints that the decision removes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remove_taints: Vec<Taint>,
    /// Names of the rule sets that ask for the node's new state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rule_sets: Vec<String>,
    /// Reason why the brake holds the node back, for people, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// Changes of the node's faults by the event, for people.
    pub because: Vec<String>,
}

/// Totals of a replay up to now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Number of events processed.
    pub events: u64,
    /// Nodes that were taken out of service at least once.
    pub taken_out: usize,
    /// Number of times that a node was taken out of service.
    pub quarantines: u64,
    /// Number of times that a node was returned.
    pub releases: u64,
    /// Most nodes out of service at one time.
    pub most_at_once: usize,
    /// Nodes out of service at the end.
    pub still_out: usize,
    /// Seconds out of service, summed over all nodes, up to the last event.
    pub seconds_out: i64,
    /// Nodes that events name but the list of nodes lacks; they are ignored.
    pub unlisted: usize,
    /// Nodes that the brake held back at least once.
    pub held: usize,
    /// Nodes that the brake holds back at the end.
    pub still_held: usize,
    /// Time when the circuit breaker tripped, if it did.
    pub tripped_at: Option<Timestamp>,
}

// === impl Replay ===

impl Replay {
    /// Creates a replay of `policy` without a brake. With `nodes`, only these exist, in this
    /// state. Without, every node that an event names exists, with unknown properties.
    pub fn new(policy: Policy, nodes: Option<Vec<NodeView>>) -> Self {
        let begins = Timestamp::UNIX_EPOCH;
        let settings = Settings {
            mode: Mode::Act,
            owns: Owns::All,
            cluster: true,
            store: String::new(),
            since: Position::START,
            brake: true,
            // The text is a constant. Without a label, all nodes count as GPU nodes.
            gpu_label: NodeLabel::parse(keys::GPU_NODE_LABEL).unwrap_or_else(|_| NodeLabel {
                key: String::new(),
                value: String::new(),
            }),
            // A node is never forgotten during a replay.
            retention: SignedDuration::MAX,
            drain: None,
            remediation: None,
            returns_wait: false,
        };
        let nothing = Brake {
            budgets: Vec::new(),
            window: None,
        };
        let mut fleet = Fleet::new(settings, Some(limited(&policy, nothing)), begins);
        fleet.handle(FleetInput::CaughtUp, begins);
        fleet.handle(FleetInput::ListBegun, begins);
        let listed = nodes.is_some();
        for node in nodes.into_iter().flatten() {
            let view = Arc::new(without_ours(&node, &Marks::of(&policy)));
            fleet.handle(FleetInput::NodeObserved(view), begins);
        }
        fleet.handle(FleetInput::Listed, begins);
        Self {
            policy,
            fleet,
            listed,
            left_out: Vec::new(),
            out: BTreeMap::new(),
            delayed: BTreeMap::new(),
            waiting: BTreeMap::new(),
            held: BTreeSet::new(),
            tripped_at: None,
            summary: Summary::default(),
            taken_out: BTreeSet::new(),
            unlisted: BTreeSet::new(),
            now: None,
        }
    }

    /// Applies the policy's brake, even if the cluster has it switched off. GPU nodes are those
    /// with [`keys::GPU_NODE_LABEL`]; if there are none, all nodes count.
    #[must_use]
    pub fn braked(mut self) -> Self {
        let Brake { budgets, window } = self.policy.brake.clone();
        let listed = self.listed;
        let (budgets, left_out): (Vec<_>, Vec<_>) = budgets.into_iter().partition(|budget| {
            listed || budget.per.is_none() && matches!(budget.limit, Limit::Max(Amount::Nodes(_)))
        });
        let left_out = left_out.iter().map(ToString::to_string);
        let no_window = window.iter().filter(|_| !listed).map(ToString::to_string);
        self.left_out = left_out.chain(no_window).collect();
        let window = window.filter(|_| listed);
        let policy = limited(&self.policy, Brake { budgets, window });
        let now = self.now.unwrap_or(Timestamp::UNIX_EPOCH);
        self.fleet.handle(FleetInput::Policy(Some(policy)), now);
        self
    }

    /// Returns the policy of the replay.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the limits of the brake that are not applied because the number or the labels of
    /// the nodes are not known.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Processes an event and returns the decisions. The event is placed at the end of the
    /// feed, and its time of acceptance never goes back.
    pub fn take(&mut self, record: &EventRecord) -> Vec<Decision> {
        self.summary.events += 1;
        let now = self
            .now
            .map_or(record.created_at, |now| now.max(record.created_at));
        let mut decisions = self.advance(now);
        self.now = Some(now);
        let name = record.event.node_name.clone();
        let record = EventRecord {
            seq: Position::from(self.summary.events),
            created_at: now,
            ..record.clone()
        };
        let changes = self.fleet.record(&record, now);
        if self.fleet.view(&name).is_none() {
            if self.listed {
                self.unlisted.insert(name);
                return decisions;
            }
            let view = Arc::new(NodeView::unknown(&name));
            self.fleet.handle(FleetInput::NodeObserved(view), now);
        }
        let because = reasons(&name, &changes);
        for (node, texts) in &because {
            if let Some(waiting) = self.waiting.get_mut(node) {
                let candidate = Candidate::of(node, &self.fleet.desired(node), false);
                if waiting.candidate != candidate {
                    (waiting.candidate, waiting.because) = (candidate, texts.clone());
                }
            }
        }
        let faults = self.fleet.book().faults(&name);
        let awaits = faults.iter().filter_map(Fault::awaits_primary_until);
        for until in awaits.filter(|until| *until > now) {
            let texts = self.delayed.entry((until, name.clone())).or_default();
            texts.extend(because[&name].iter().cloned());
        }
        decisions.extend(self.settle(&name, &because, now));
        decisions
    }

    /// Returns the decisions after the last event: about faults that waited for one that explains
    /// them.
    pub fn finish(&mut self) -> Vec<Decision> {
        let last = self.delayed.keys().map(|(until, _)| *until).max();
        last.map_or_else(Vec::new, |last| self.advance(last))
    }

    /// Returns the decisions up to this time about faults that waited for one that explains them.
    fn advance(&mut self, now: Timestamp) -> Vec<Decision> {
        let mut decisions = Vec::new();
        while let Some(first) = self.delayed.first_entry() {
            if first.key().0 > now {
                break;
            }
            let ((until, name), texts) = first.remove_entry();
            self.now = Some(until);
            let because = BTreeMap::from([(name.clone(), texts)]);
            decisions.extend(self.settle(&name, &because, until));
        }
        decisions
    }

    /// Decides and applies the decisions until nothing changes. `name` is the node that was
    /// looked at, and `because` the reasons by node.
    fn settle(
        &mut self,
        name: &str,
        because: &BTreeMap<String, Vec<String>>,
        now: Timestamp,
    ) -> Vec<Decision> {
        let mut decisions = Vec::new();
        let mut touched = BTreeSet::from([name.to_owned()]);
        for _ in 0..MAX_ROUNDS {
            let mut answers = Vec::new();
            for effect in self.fleet.decide(now) {
                let of = |node: &str| because.get(node).cloned().unwrap_or_default();
                match effect {
                    Effect::PatchNode(planned) => {
                        let because = of(&planned.node);
                        touched.insert(planned.node.clone());
                        answers.push(self.make(*planned, because, now, &mut decisions));
                    }
                    // All events of a replay have been recorded.
                    Effect::LookUp { node, ids } => {
                        let found = ids
                            .into_iter()
                            .map(|id| (id, EventInStore::Current))
                            .collect();
                        let found = Some(found);
                        answers.push(FleetInput::EventsFound { node, found });
                    }
                    Effect::Journal(entry, _) => {
                        let because = of(&entry.node);
                        decisions.extend(self.held_or_dropped(&entry.node, because, now));
                    }
                    Effect::Trip => drop(self.tripped_at.get_or_insert(now)),
                    _ => {}
                }
            }
            if answers.is_empty() {
                break;
            }
            for answer in answers {
                self.fleet.handle(answer, now);
            }
        }
        for node in touched {
            // A node without faults or session is created again when an event names it.
            let is_faulty = !self.fleet.book().faults(&node).is_empty();
            if !self.listed && !is_faulty && !self.out.contains_key(&node) {
                self.fleet.handle(FleetInput::NodeGone(node), now);
                self.fleet.decide(now);
            }
        }
        decisions
    }

    /// Applies a change to its node and returns the answer for the fleet.
    fn make(
        &mut self,
        planned: Planned,
        because: Vec<String>,
        now: Timestamp,
        decisions: &mut Vec<Decision>,
    ) -> FleetInput {
        let (node, intent, change) = (planned.node, planned.patch.intent, planned.patch.change);
        let answer = PatchAnswer::Made(Arc::new(planned.view.after(&change)));
        self.count(&node, intent, now);
        let because = match self.waiting.remove(&node) {
            Some(waiting) => {
                let held = now.duration_since(waiting.since);
                let let_go = format!("let go after {held:#}");
                waiting.because.into_iter().chain([let_go]).collect()
            }
            None => because,
        };
        let visible = change.unschedulable.is_some()
            || !change.add_taints.is_empty()
            || !change.remove_taints.is_empty();
        if visible || intent != Intent::Update {
            decisions.push(Decision {
                cordon: change.unschedulable,
                add_taints: change.add_taints,
                remove_taints: change.remove_taints,
                rule_sets: self.fleet.desired(&node).rule_sets,
                ..Decision::new(now, &node, intent.into(), because)
            });
        }
        FleetInput::NodePatched { node, answer }
    }

    /// Returns the decision that a node is held back, or no longer, if that is new.
    fn held_or_dropped(
        &mut self,
        name: &str,
        because: Vec<String>,
        now: Timestamp,
    ) -> Option<Decision> {
        let Some(hold) = self.fleet.hold(name).cloned() else {
            let phase = self.fleet.session(name)?.phase;
            if phase != Phase::Idle {
                return None; // The brake lets it go.
            }
            self.waiting.remove(name)?;
            return Some(Decision {
                rule_sets: self.fleet.desired(name).rule_sets,
                ..Decision::new(now, name, Decided::Dropped, because)
            });
        };
        let desired = self.fleet.desired(name);
        let waiting = self.waiting.get_mut(name);
        let reported = (waiting.as_ref()).is_some_and(|waiting| waiting.hold.same_cause(&hold));
        let because = waiting.map_or(because, |waiting| {
            waiting.hold = hold.clone();
            waiting.because.clone()
        });
        if reported {
            return None;
        }
        self.held.insert(name.to_owned());
        (self.waiting.entry(name.to_owned())).or_insert_with(|| HeldNode {
            candidate: Candidate::of(name, &desired, false),
            because: because.clone(),
            hold: hold.clone(),
            since: now,
        });
        Some(Decision {
            rule_sets: desired.rule_sets,
            hold: Some(hold.to_string()),
            ..Decision::new(now, name, Decided::Held, because)
        })
    }

    /// Returns the state that the open faults of a node ask for.
    pub fn desired(&self, node: &str) -> Desired {
        self.fleet.desired(node)
    }

    /// Returns the totals up to now.
    pub fn summary(&self) -> Summary {
        let until = self.now.unwrap_or(Timestamp::UNIX_EPOCH);
        let open = self.out.values();
        let seconds: i64 = open
            .map(|since| until.duration_since(*since).as_secs())
            .sum();
        Summary {
            taken_out: self.taken_out.len(),
            unlisted: self.unlisted.len(),
            held: self.held.len(),
            still_held: self.waiting.len(),
            tripped_at: self.tripped_at,
            seconds_out: self.summary.seconds_out + seconds,
            ..self.summary.clone()
        }
    }

    /// Counts a change in the totals.
    fn count(&mut self, name: &str, intent: Intent, now: Timestamp) {
        match intent {
            Intent::Quarantine => {
                self.taken_out.insert(name.to_owned());
                self.summary.quarantines += 1;
                self.out.insert(name.to_owned(), now);
            }
            Intent::Return | Intent::StandDown => {
                self.summary.releases += 1;
                if let Some(since) = self.out.remove(name) {
                    self.summary.seconds_out += now.duration_since(since).as_secs();
                }
            }
            Intent::Update => {}
        }
        self.summary.still_out = self.out.len();
        self.summary.most_at_once = self.summary.most_at_once.max(self.out.len());
    }
}

/// Returns `policy` with another brake.
fn limited(policy: &Policy, brake: Brake) -> Arc<Policy> {
    Arc::new(Policy {
        brake,
        ..policy.clone()
    })
}

// === impl Decided ===

impl From<Intent> for Decided {
    fn from(intent: Intent) -> Self {
        match intent {
            Intent::Quarantine => Self::Quarantine,
            Intent::Update => Self::Update,
            Intent::Return => Self::Return,
            Intent::StandDown => Self::StandDown,
        }
    }
}

impl Decided {
    /// Returns the serialized name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quarantine => Intent::Quarantine.name(),
            Self::Update => Intent::Update.name(),
            Self::Return => Intent::Return.name(),
            Self::StandDown => Intent::StandDown.name(),
            Self::Held => "held",
            Self::Dropped => "dropped",
        }
    }
}

/// Returns what an event did to faults, in words, by the node whose decisions it is a reason
/// for: the node `name` of the event, and those with a fault that is explained now, or no longer.
fn reasons(name: &str, changes: &[FaultChange]) -> BTreeMap<String, Vec<String>> {
    let texts: Vec<String> = changes.iter().filter_map(change_text).collect();
    let elsewhere = changes.iter().filter_map(|change| match change {
        FaultChange::Explained(node) => Some(node.clone()),
        _ => None,
    });
    let told: Vec<String> = texts.iter().map(|text| format!("{name}: {text}")).collect();
    let elsewhere = elsewhere.map(|node| (node, told.clone()));
    let mut reasons: BTreeMap<_, _> = elsewhere.collect();
    reasons.insert(name.to_owned(), texts);
    reasons
}

/// Describes the change of a fault by an event, if there is one.
fn change_text(change: &FaultChange) -> Option<String> {
    match change {
        FaultChange::Opened(title) => Some(title.clone()),
        FaultChange::Escalated(title) => Some(format!("{title} became fatal")),
        FaultChange::Closed(title) => Some(format!("{title} recovered")),
        FaultChange::Refreshed(title) => Some(format!("{title}, again")),
        FaultChange::Explained(_) | FaultChange::Ignored(_) => None,
    }
}

// === impl Decision ===

impl Decision {
    fn new(at: Timestamp, node: &str, decision: Decided, because: Vec<String>) -> Self {
        Self {
            at,
            node: node.to_owned(),
            decision,
            cordon: None,
            add_taints: Vec::new(),
            remove_taints: Vec::new(),
            rule_sets: Vec::new(),
            hold: None,
            because,
        }
    }

    /// Returns true if both have the same effect on the same node at the same time, whatever
    /// their reasons.
    pub fn does_the_same(&self, other: &Self) -> bool {
        // Decisions with the same effect differ only in these fields.
        let done = |of: &Self| Self {
            rule_sets: Vec::new(),
            hold: None,
            because: Vec::new(),
            ..of.clone()
        };
        done(self) == done(other)
    }

    /// Describes the effect for people, such as `cordon, add taint gpu=bad:NoSchedule`.
    pub fn change(&self) -> String {
        match (self.decision, &self.hold) {
            (Decided::Held, hold) => {
                return format!("held back: {}", hold.as_deref().unwrap_or_default());
            }
            (Decided::Dropped, _) => return "no longer held back: nothing asks for it".to_owned(),
            _ => {}
        }
        let mut parts = scheduling(self.cordon, &self.add_taints, &self.remove_taints);
        if parts.is_empty() {
            // The change affects nothing that schedulers use.
            parts.push("nothing that schedulers see".to_owned());
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests;
