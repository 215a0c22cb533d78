//! What a policy would have done: the decisions of production (fault book, assessment,
//! brake, session) on events of the past, with nodes that exist only here.
//!
//! Time is that of the events. A change that is decided is made on the simulated node at
//! once, and seen there at once: no API server is in the way, and nobody lends a hand, so
//! what a person did to a node in truth (an uncordon) is not in it, and a circuit breaker
//! that has tripped stays so. The brake is asked in [`braking`], and only where it is wanted:
//! without it a replay says what a policy asks for of each node alone.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::assess::{Desired, Verdict, assess};
use crate::brake::Out;
use crate::event::Record;
use crate::fault::{Change, FaultBook};
use crate::future::FutureTimes;
use crate::node::{NodeView, Taint, scheduling};
use crate::policy::Policy;
use crate::position::Position;
use crate::session::ownership::{Ownership, dismissal};
use crate::session::{Intent, Session, step, without_ours};
use braking::Braking;

mod braking;

/// Most looks at a node after one event: a change and its being seen are two.
const MAX_LOOKS: usize = 4;

/// A policy at work on events of the past.
#[derive(Debug)]
pub struct Replay {
    policy: Policy,
    book: FaultBook,
    /// With a list of nodes all of them; without, those of which there is anything to tell.
    nodes: BTreeMap<String, Simulated>,
    /// Whether only listed nodes exist; else every node that an event names does.
    listed: bool,
    /// `None`: nothing holds a node back.
    braking: Option<Braking>,
    summary: Summary,
    taken_out: BTreeSet<String>,
    unlisted: BTreeSet<String>,
    now: Option<Timestamp>,
}

/// A node that exists only here.
#[derive(Debug)]
struct Simulated {
    view: NodeView,
    session: Session,
    out_since: Option<Timestamp>,
    /// Whether it is out of service, as the brake counts it.
    out: Option<Out>,
}

/// What a decision is. Serialised names are part of the output of `replay`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decided {
    /// The node is taken out of service.
    Quarantine,
    /// What is on the node is kept in line with the faults that are open.
    Update,
    /// The node is given back.
    Release,
    /// What is left is cleaned up after a person gave the node back.
    StandDown,
    /// Faults ask for the node, and the brake holds it back. It goes later, and then is a
    /// `Quarantine`, or not at all.
    Held,
    /// The node was held back, and no fault asks for it any more.
    Dropped,
}

/// Something that would have been done to a node. Serialised names are part of the output
/// of `replay`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// When, by the clock of the events.
    pub at: Timestamp,
    /// To which node.
    pub node: String,
    /// What.
    pub decision: Decided,
    /// The cordon that it sets (true) or takes back (false); absent where it does neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cordon: Option<bool>,
    /// Taints that it adds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub add_taints: Vec<Taint>,
    /// Taints that it removes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remove_taints: Vec<Taint>,
    /// Rule sets that ask for what the node then is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rule_sets: Vec<String>,
    /// For people: what holds the node back, where something does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// For people: what the event did to the node's faults.
    pub because: Vec<String>,
}

/// How much was done, up to now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Events.
    pub events: u64,
    /// Nodes that were taken out of service at least once.
    pub taken_out: usize,
    /// How often a node was taken out of service.
    pub quarantines: u64,
    /// How often one was given back.
    pub releases: u64,
    /// Most nodes out of service at one time.
    pub most_at_once: usize,
    /// Nodes out of service at the end.
    pub still_out: usize,
    /// Seconds out of service, of all nodes together, up to the last event.
    pub seconds_out: i64,
    /// Nodes that events name and the list of nodes does not have: nothing is done to them.
    pub unlisted: usize,
    /// Nodes that the brake held back at least once.
    pub held: usize,
    /// Nodes that it holds back at the end.
    pub still_held: usize,
    /// When the circuit breaker tripped.
    pub tripped_at: Option<Timestamp>,
}

// === impl Replay ===

impl Replay {
    /// A replay of `policy` before the first event. With `nodes`, only these exist, as they
    /// are there; without, every node that an event names does, and nothing else is known
    /// of it. Nothing is held back, see [`Replay::braked`].
    pub fn new(policy: Policy, nodes: Option<Vec<NodeView>>) -> Self {
        let listed = nodes.is_some();
        let bare = |node: NodeView| {
            let view = without_ours(&node, &policy.marks());
            (node.name, Simulated::new(view, Timestamp::UNIX_EPOCH))
        };
        let nodes = nodes.into_iter().flatten().map(bare).collect();
        Self {
            policy,
            book: FaultBook::default(),
            nodes,
            listed,
            braking: None,
            summary: Summary::default(),
            taken_out: BTreeSet::new(),
            unlisted: BTreeSet::new(),
            now: None,
        }
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Takes in an event, and says what would have been done. Its place in the feed is
    /// where it comes here; its time of acceptance never goes back.
    pub fn take(&mut self, record: &Record) -> Vec<Decision> {
        self.summary.events += 1;
        let now = self
            .now
            .map_or(record.created_at, |now| now.max(record.created_at));
        self.now = Some(now);
        let name = record.event.node_name.clone();
        let record = Record {
            seq: Position::from(self.summary.events),
            created_at: now,
            ..record.clone()
        };
        let changes = self.book.record(&record);
        if self.listed && !self.nodes.contains_key(&name) {
            self.unlisted.insert(name);
            return Vec::new();
        }
        let because: Vec<String> = changes.iter().filter_map(change_text).collect();
        let mut decisions = Vec::new();
        self.look_at(&name, because, false, now, &mut decisions);
        self.let_go(now, &mut decisions);
        decisions
    }

    /// Looks at a node until nothing is to be changed any more. `free`: the brake has let it
    /// go.
    fn look_at(
        &mut self,
        name: &str,
        because: Vec<String>,
        free: bool,
        now: Timestamp,
        decisions: &mut Vec<Decision>,
    ) {
        let mut node = self.nodes.remove(name).unwrap_or_else(|| {
            let view = NodeView::unknown(name);
            Simulated::new(view, now)
        });
        for look in 0..MAX_LOOKS {
            let dismissed = dismissal(&node.view, None, &node.session.times);
            let desired = assess(self.book.faults(name), &self.policy, &node.view, dismissed);
            if let Some(braking) = self.braking.as_mut().filter(|braking| braking.limits()) {
                if desired.wanted() && node.out.is_none() && !(free && look == 0) {
                    // To be taken out: the brake has a say.
                    braking.wait(name, &desired, because, now);
                    break;
                }
                if braking.forget(name) {
                    decisions.push(Decision {
                        rule_sets: desired.rule_sets.clone(),
                        ..Decision::new(now, name, Decided::Dropped, because.clone())
                    });
                }
            }
            let marks = self.policy.marks();
            let step = step(&node.session, &desired, Some(&node.view), &marks, None, now);
            node.session = step.session;
            // Time goes from event to event here: nothing would come to give it back later.
            node.session.returns.clear();
            let Some(patch) = step.patch else {
                break;
            };
            let before = node.out;
            node.see(node.view.after(&patch.change));
            self.count(name, &mut node, before, patch.intent, now);
            let change = patch.change;
            let visible = change.unschedulable.is_some()
                || !change.add_taints.is_empty()
                || !change.remove_taints.is_empty();
            if visible || patch.intent != Intent::Update {
                decisions.push(Decision {
                    cordon: change.unschedulable,
                    add_taints: change.add_taints,
                    remove_taints: change.remove_taints,
                    rule_sets: desired.rule_sets,
                    ..Decision::new(now, name, patch.intent.into(), because.clone())
                });
            }
        }
        // A node of which nothing is left is made anew when it is named again.
        if node.out_since.is_some() || !self.book.faults(name).is_empty() || self.listed {
            self.nodes.insert(name.to_owned(), node);
        }
    }

    /// What the rules say of the open faults of a node, gravest first.
    pub fn verdicts(&self, node: &str) -> Vec<Verdict> {
        self.desired(node).verdicts
    }

    /// What is wanted for a node now.
    pub fn desired(&self, node: &str) -> Desired {
        let unknown = NodeView::unknown(node);
        let view = self.nodes.get(node).map_or(&unknown, |node| &node.view);
        assess(
            self.book.faults(node),
            &self.policy,
            view,
            dismissal(view, None, &FutureTimes::default()),
        )
    }

    /// How much was done up to now.
    pub fn summary(&self) -> Summary {
        let open = self.nodes.values().filter_map(|node| node.out_since);
        let until = self.now.unwrap_or(Timestamp::UNIX_EPOCH);
        let seconds: i64 = open
            .map(|since| until.duration_since(since).as_secs())
            .sum();
        Summary {
            taken_out: self.taken_out.len(),
            unlisted: self.unlisted.len(),
            held: self.braking.as_ref().map_or(0, Braking::held),
            still_held: self.braking.as_ref().map_or(0, Braking::still_held),
            tripped_at: self.braking.as_ref().and_then(Braking::tripped_at),
            seconds_out: self.summary.seconds_out + seconds,
            ..self.summary.clone()
        }
    }

    /// Counts a change; `before`: whether the node was out of service before it.
    fn count(
        &mut self,
        name: &str,
        node: &mut Simulated,
        before: Option<Out>,
        intent: Intent,
        now: Timestamp,
    ) {
        match intent {
            Intent::Quarantine => {
                self.taken_out.insert(name.to_owned());
                self.summary.quarantines += 1;
                self.summary.still_out += 1;
                self.summary.most_at_once = (self.summary.most_at_once).max(self.summary.still_out);
                node.out_since = Some(now);
            }
            Intent::Release | Intent::StandDown => {
                let since = node.out_since.take();
                if let Some(braking) = &mut self.braking {
                    let counted = before.filter(|out| !out.forced);
                    braking.back(name, counted.and_then(|out| out.since));
                }
                let out = since.map_or(SignedDuration::ZERO, |since| now.duration_since(since));
                self.summary.releases += 1;
                self.summary.still_out -= usize::from(since.is_some());
                self.summary.seconds_out += out.as_secs();
            }
            Intent::Update => {}
        }
    }
}

// === impl Simulated ===

impl Simulated {
    fn new(view: NodeView, now: Timestamp) -> Self {
        let mut node = Self {
            view: NodeView::unknown(&view.name),
            session: Session::idle(now),
            out_since: None,
            out: None,
        };
        node.see(view);
        node
    }

    /// Takes in what the node is now.
    fn see(&mut self, view: NodeView) {
        self.out = Ownership::read(&view).map(|own| Out {
            since: own.since,
            forced: own.forced(),
        });
        self.view = view;
    }
}

// === impl Decided ===

impl From<Intent> for Decided {
    fn from(intent: Intent) -> Self {
        match intent {
            Intent::Quarantine => Self::Quarantine,
            Intent::Update => Self::Update,
            Intent::Release => Self::Release,
            Intent::StandDown => Self::StandDown,
        }
    }
}

impl Decided {
    /// Its name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quarantine => Intent::Quarantine.name(),
            Self::Update => Intent::Update.name(),
            Self::Release => Intent::Release.name(),
            Self::StandDown => Intent::StandDown.name(),
            Self::Held => "held",
            Self::Dropped => "dropped",
        }
    }
}

/// What an event did to a fault, where it did something.
fn change_text(change: &Change) -> Option<String> {
    match change {
        Change::Opened(title) => Some(title.clone()),
        Change::Escalated(title) => Some(format!("{title} became fatal")),
        Change::Closed(title) => Some(format!("{title} recovered")),
        Change::Refreshed(title) => Some(format!("{title}, again")),
        Change::Ignored(_) => None,
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

    /// Whether both do the same to the same node at the same time, whatever for.
    pub fn does_the_same(&self, other: &Self) -> bool {
        let does = |of: &Self| {
            let Self {
                decision,
                cordon,
                add_taints,
                remove_taints,
                ..
            } = of.clone();
            (
                of.at,
                of.node.clone(),
                decision,
                cordon,
                add_taints,
                remove_taints,
            )
        };
        does(self) == does(other)
    }

    /// What it does, for people: `cordon, add taint gpu=bad:NoSchedule`.
    pub fn change(&self) -> String {
        match (self.decision, &self.hold) {
            (Decided::Held, hold) => {
                return format!("held back: {}", hold.as_deref().unwrap_or_default());
            }
            (Decided::Dropped, _) => return "held back no more: nothing asks for it".to_owned(),
            _ => {}
        }
        let mut parts = scheduling(self.cordon, &self.add_taints, &self.remove_taints);
        if parts.is_empty() {
            // It was so before, and stays so.
            parts.push("nothing that schedulers see".to_owned());
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests;
