//! The brake at work: the nodes that wait to be taken out of service, and those that may go.
//!
//! A node in service whose faults ask for a quarantine waits here. Whenever an input of the
//! brake has changed, [`crate::brake::plan`] is asked about all waiting nodes: the session of a
//! node that may go is stepped as usual, and the others are shown as held.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use policy::assess::Desired;

use super::entry::NodeEntry;
use super::state::FleetState;
use crate::brake::pause::Pause;
use crate::brake::{self, BrakePlan, Candidate, Hold, LimitUse, Member, PlanInput};
use crate::view::{BrakeView, LimitView};

/// Most limits that are shown; limits counted per group may be many.
const LIMITS_SHOWN: usize = 50;

/// Pause and circuit breaker that people have set in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwitchState {
    /// The pause, if there is one.
    pub pause: Option<Pause>,
    /// Reason why the pause cannot be read; `None` once it is read.
    pub unread: Option<String>,
    /// Hold of the circuit breaker on all nodes, also while its state cannot be read.
    pub breaker: Option<Hold>,
    /// Time when the nodes that the brake had held back were last dropped.
    pub dropped_at: Option<Timestamp>,
    /// Time when a person last closed the circuit breaker.
    pub reset_at: Option<Timestamp>,
}

/// State of the brake.
#[derive(Debug, Default)]
pub(super) struct BrakeState {
    /// Time when the current pause ends by itself.
    pub(super) pause_ends: Option<Timestamp>,
    /// Waiting nodes, each with the assessment of its faults.
    pub(super) waiting: BTreeMap<String, Desired>,
    /// Waiting nodes that were looked at since the brake was last asked.
    pub(super) looked_at: BTreeSet<String>,
    /// Time when each returned node was last taken out of service.
    pub(super) recent: BTreeMap<String, Timestamp>,
    /// True if an input has changed since the brake was last asked.
    pub(super) stale: bool,
    /// Time when the next patch in doubt stops counting.
    pub(super) doubt_ends: Option<Timestamp>,
    /// Last plan of the brake.
    pub(super) plan: BrakePlan,
}

// === impl SwitchState ===

impl SwitchState {
    /// Returns the hold on all new quarantines. The circuit breaker counts only if `brake` is
    /// true.
    pub fn stop(&self, brake: bool, now: Timestamp) -> Option<Hold> {
        if let Some(pause) = self.pause.as_ref().filter(|pause| pause.holds(now)) {
            return Some(Hold::Paused(pause.clone()));
        }
        if let Some(why) = &self.unread {
            return Some(Hold::Unread(why.clone()));
        }
        self.breaker.clone().filter(|_| brake)
    }

    /// Returns when the pause ends by itself.
    pub(super) fn pause_ends(&self, now: Timestamp) -> Option<Timestamp> {
        let until = self.pause.as_ref()?.until?;
        (until > now).then_some(until)
    }
}

// === impl BrakeState ===

impl BrakeState {
    /// Records that an input of the brake has changed.
    pub(super) fn mark_stale(&mut self) {
        self.stale = true;
    }

    /// Records until when a patch with a lost answer counts.
    pub(super) fn add_doubt(&mut self, until: Option<Timestamp>) {
        self.doubt_ends = [self.doubt_ends, until].into_iter().flatten().min();
    }

    /// Adds a waiting node.
    pub(super) fn add_waiting(&mut self, name: &str, desired: Desired) {
        self.waiting.insert(name.to_owned(), desired);
        self.looked_at.insert(name.to_owned());
        self.stale = true;
    }

    /// Removes a waiting node.
    pub(super) fn remove_waiting(&mut self, name: &str) {
        self.stale |= self.waiting.remove(name).is_some();
    }

    /// Records that a node, taken out at `since`, is back in service. Returns whether that is to
    /// be saved.
    pub(super) fn node_returned(&mut self, name: &str, since: Option<Timestamp>) -> bool {
        self.stale = true;
        let Some(since) = since else {
            return false;
        };
        self.recent.insert(name.to_owned(), since);
        true
    }

    /// Limits times to `now` after the clock was put back: a later time would use up room in the
    /// window for that much longer.
    pub(super) fn clock_moved_back(&mut self, now: Timestamp) {
        for since in self.recent.values_mut() {
            *since = (*since).min(now);
        }
    }

    /// Asks the brake for a plan, which is up to date from then on.
    pub(super) fn make_plan(
        &mut self,
        nodes: &BTreeMap<String, NodeEntry>,
        fleet: &FleetState,
    ) -> BrakePlan {
        self.stale = false;
        let now = fleet.now;
        let policy = fleet.policy.as_ref();
        let window = policy.and_then(|policy| policy.brake.window.as_ref());
        self.recent.retain(|_, since| {
            window.is_some_and(|window| now.duration_since(*since) < window.duration)
        });
        let members = nodes
            .iter()
            .filter_map(|(name, entry)| {
                let view = entry.view.as_ref()?;
                Some(Member {
                    name,
                    labels: &view.labels,
                    out: entry.out(now),
                    cordoned: view.unschedulable,
                })
            })
            .collect();
        let candidates = self
            .waiting
            .iter()
            .filter_map(|(name, desired)| {
                let entry = nodes.get(name)?;
                if entry.out(now).is_some() {
                    return None; // The node is on its way out, and counted.
                }
                Candidate::of(name, desired, entry.session.failures > 0)
            })
            .collect();
        brake::plan(PlanInput {
            brake: policy
                .map(|policy| &policy.brake)
                .filter(|_| fleet.settings.brake),
            gpu_label: &fleet.settings.gpu_label,
            members,
            recent: &self.recent,
            reset_at: fleet.switches.reset_at,
            stop: fleet.stop(),
            candidates,
            now,
        })
    }

    /// Returns the view of the brake; `held` is the number of nodes that are held back.
    pub(super) fn show(&self, held: usize, fleet: &FleetState) -> BrakeView {
        let plan = &self.plan;
        let mut notes = Vec::new();
        if plan.unlabelled && fleet.settings.brake && fleet.listed {
            notes.push(format!(
                "no node carries the label {}: all nodes are counted",
                fleet.settings.gpu_label
            ));
        }
        let paused = match fleet.switches.stop(false, fleet.now) {
            Some(Hold::Paused(pause)) => Some(pause.to_string()),
            _ => None,
        };
        let unknown = if !fleet.listed {
            Some("the cluster's nodes could not be read yet".to_owned())
        } else if fleet.policy.is_none() {
            Some("no policy was read yet".to_owned())
        } else {
            None
        };
        let shown = plan.limits.iter().take(LIMITS_SHOWN);
        BrakeView {
            enabled: fleet.settings.brake,
            state: String::new(),
            limits: shown
                .map(|limit| LimitView {
                    limit: limit.limit.clone(),
                    of_which: counted_nodes(plan.unlabelled, limit),
                    used: limit.used,
                    allowed: limit.allowed,
                    of: limit.of,
                    by: limit.by.clone(),
                })
                .collect(),
            unknown,
            held,
            paused,
            notes,
        }
    }
}

/// Returns the nodes that a limit counts, for people.
fn counted_nodes(unlabelled: bool, limit: &LimitUse) -> String {
    let nodes = match (unlabelled, limit.gpu) {
        (true, _) => "nodes",
        (false, true) => "GPU nodes",
        (false, false) => "other nodes",
    };
    match limit.domain.as_deref() {
        None => nodes.to_owned(),
        Some("") => format!("{nodes} without the label"),
        Some(value) => format!("{nodes} in {value}"),
    }
}
