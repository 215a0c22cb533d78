//! The brake in a replay: which nodes wait to be taken out of service, and who may go, asked
//! of [`crate::brake::plan`] as the controller asks it.
//!
//! Only a list of nodes says how large the cluster is and which labels its nodes carry.
//! Without one, limits that need either are left out, and [`Replay::left_out`] names them.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use jiff::Timestamp;

use super::{Decided, Decision, Replay};
use crate::assess::Desired;
use crate::brake::{self, Amount, Brake, Candidate, Hold, Member, NodeLabel, Plan, Question};

/// What the brake keeps.
#[derive(Debug)]
pub(super) struct Braking {
    /// What of the policy's brake can be applied.
    brake: Brake,
    /// The limits that cannot.
    left_out: Vec<String>,
    /// Nodes that wait.
    waiting: BTreeMap<String, Waiting>,
    /// When nodes were last taken out of service, of those that are back.
    recent: BTreeMap<String, Timestamp>,
    /// Something has changed since it was last asked.
    stale: bool,
    /// When the circuit breaker tripped: nobody closes it here.
    tripped_at: Option<Timestamp>,
    /// Nodes that were held back at least once.
    held: BTreeSet<String>,
}

/// A node that waits.
#[derive(Debug)]
struct Waiting {
    candidate: Candidate,
    rule_sets: Vec<String>,
    because: Vec<String>,
    /// What holds it back; `None`: the brake was not asked yet.
    hold: Option<Hold>,
    since: Timestamp,
}

// === impl Replay ===

impl Replay {
    /// The same replay with the policy's brake, for a cluster in which it is not switched off.
    /// GPU nodes are those that carry [`keys::GPU_NODE_LABEL`]; where none does, all are.
    #[must_use]
    pub fn braked(mut self) -> Self {
        let Brake { budgets, window } = self.policy.brake.clone();
        let listed = self.listed;
        let (budgets, left_out): (Vec<_>, Vec<_>) = budgets.into_iter().partition(|budget| {
            listed || budget.per.is_none() && matches!(budget.max, Amount::Nodes(_))
        });
        let (window, no_window) = if listed {
            (window, None)
        } else {
            (None, window)
        };
        let left_out = left_out.iter().map(ToString::to_string);
        self.braking = Some(Braking {
            brake: Brake { budgets, window },
            left_out: left_out
                .chain(no_window.iter().map(ToString::to_string))
                .collect(),
            waiting: BTreeMap::new(),
            recent: BTreeMap::new(),
            stale: false,
            tripped_at: None,
            held: BTreeSet::new(),
        });
        self
    }

    /// Limits of the brake that are not applied, because it is not known how many nodes there
    /// are, or which labels they carry.
    pub fn left_out(&self) -> &[String] {
        let left_out = self.braking.as_ref().map(|braking| &braking.left_out);
        left_out.map_or(&[], Vec::as_slice)
    }

    /// Asks the brake about all that wait, and takes out who may go.
    pub(super) fn let_go(&mut self, now: Timestamp, decisions: &mut Vec<Decision>) {
        let Some(plan) = self.ask_the_brake(now) else {
            return;
        };
        for name in plan.start {
            let gone = self
                .braking
                .as_mut()
                .and_then(|it| it.waiting.remove(&name));
            let Some(waiting) = gone else {
                continue;
            };
            let mut because = waiting.because;
            if waiting.hold.is_some() {
                let held = now.duration_since(waiting.since);
                because.push(format!("let go after {held:#}"));
            }
            self.look_at(&name, because, true, now, decisions);
        }
        for (name, hold) in plan.held {
            let Some(waiting) = self.braking.as_mut().and_then(|it| it.hold(&name, &hold)) else {
                continue;
            };
            decisions.push(Decision {
                rule_sets: waiting.rule_sets.clone(),
                hold: Some(hold.to_string()),
                ..Decision::new(now, &name, Decided::Held, waiting.because.clone())
            });
        }
    }

    /// `None`: there is nothing to ask, or nothing has changed since.
    fn ask_the_brake(&mut self, now: Timestamp) -> Option<Plan> {
        let braking = self.braking.as_mut()?;
        if !std::mem::take(&mut braking.stale) || braking.waiting.is_empty() {
            return None;
        }
        let Braking {
            brake,
            waiting,
            recent,
            tripped_at,
            ..
        } = braking;
        let window = brake.window.as_ref();
        recent.retain(|_, since| {
            window.is_some_and(|window| now.duration_since(*since) < window.duration)
        });
        // The text is a constant; without a label all nodes are counted.
        let gpu_label = NodeLabel::parse(keys::GPU_NODE_LABEL).unwrap_or_else(|| NodeLabel {
            key: String::new(),
            value: String::new(),
        });
        let members = self.nodes.iter().map(|(name, node)| Member {
            name,
            labels: &node.view.labels,
            out: node.out,
        });
        let plan = brake::plan(Question {
            brake: Some(brake),
            gpu_label: &gpu_label,
            members: members.collect(),
            recent,
            reset_at: None,
            stop: tripped_at.map(|_| Hold::Tripped),
            candidates: waiting.values().map(|one| one.candidate.clone()).collect(),
            now,
        });
        if plan.trip {
            tripped_at.get_or_insert(now);
        }
        Some(plan)
    }
}

// === impl Braking ===

impl Braking {
    /// Whether there is any limit.
    pub(super) fn limits(&self) -> bool {
        !self.brake.budgets.is_empty() || self.brake.window.is_some()
    }

    /// A node waits.
    pub(super) fn wait(
        &mut self,
        name: &str,
        desired: &Desired,
        because: Vec<String>,
        now: Timestamp,
    ) {
        let Some(candidate) = Candidate::of(name, desired, None) else {
            return;
        };
        let before = self.waiting.remove(name);
        let changed = (before.as_ref()).is_none_or(|before| before.candidate != candidate);
        self.stale |= changed;
        let waiting = Waiting {
            candidate,
            rule_sets: desired.rule_sets.clone(),
            because: match &before {
                Some(before) if !changed => before.because.clone(),
                _ => because,
            },
            since: before.as_ref().map_or(now, |before| before.since),
            hold: before.and_then(|before| before.hold),
        };
        self.waiting.insert(name.to_owned(), waiting);
    }

    /// A node does not wait any more. Whether it was held back.
    pub(super) fn forget(&mut self, name: &str) -> bool {
        let gone = self.waiting.remove(name);
        self.stale |= gone.is_some();
        gone.is_some_and(|gone| gone.hold.is_some())
    }

    /// A node that was taken out then is back in service.
    pub(super) fn back(&mut self, name: &str, since: Option<Timestamp>) {
        if let Some(since) = since {
            self.recent.insert(name.to_owned(), since);
        }
        self.stale = true;
    }

    /// Nodes that were held back at least once.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Nodes that are held back now.
    pub(super) fn still_held(&self) -> usize {
        self.waiting.len()
    }

    /// When the circuit breaker tripped.
    pub(super) fn tripped_at(&self) -> Option<Timestamp> {
        self.tripped_at
    }

    /// Notes what holds a node back; the node, where that is news.
    fn hold(&mut self, name: &str, hold: &Hold) -> Option<&Waiting> {
        let waiting = self.waiting.get_mut(name)?;
        let before = waiting.hold.replace(hold.clone());
        self.held.insert(name.to_owned());
        (!before.is_some_and(|before| before.same_cause(hold))).then_some(waiting)
    }
}
