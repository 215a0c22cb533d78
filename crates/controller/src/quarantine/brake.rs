//! The brake at work: which nodes wait to be taken out of service, and who may go.
//!
//! A node whose faults ask for it and that is in service waits here. Whenever something
//! has changed that the brake looks at, it is asked anew about all that wait
//! ([`domain::brake::plan`]); who may go is stepped on as everybody else, who may not is
//! shown as held.

use std::collections::{BTreeMap, BTreeSet};

use domain::assess::Desired;
use domain::brake::{self, Candidate, Hold, Member, NodeLabel, Plan, Question, Use};
use domain::journal::EntryKind;
use domain::policy::Policy;
use domain::view::{BrakeView, LimitView};
use jiff::Timestamp;
use serde_json::json;

use super::Quarantine;
use super::switches::Switches;

/// Most limits that are shown; those that count apart may be many.
const LIMITS_SHOWN: usize = 50;

/// What the brake keeps.
pub(super) struct BrakeState {
    /// Whether there is one.
    pub(super) enabled: bool,
    /// Which nodes are GPU nodes.
    pub(super) gpu_label: NodeLabel,
    /// Nodes that wait, with what is wanted for them.
    waiting: BTreeMap<String, Desired>,
    /// Those of them that were looked at since it was last asked.
    looked_at: BTreeSet<String>,
    /// When nodes were last taken out of service, of those that are back.
    recent: BTreeMap<String, Timestamp>,
    /// One of them is not saved yet.
    pub(super) unsaved: bool,
    /// Something has changed since it was last asked.
    pub(super) stale: bool,
    /// When the next doubt about a patch ends.
    pub(super) doubt_ends: Option<Timestamp>,
    /// What it said last.
    plan: Plan,
}

// === impl BrakeState ===

impl BrakeState {
    pub(super) fn new(enabled: bool, gpu_label: NodeLabel) -> Self {
        Self {
            enabled,
            gpu_label,
            waiting: BTreeMap::new(),
            looked_at: BTreeSet::new(),
            recent: BTreeMap::new(),
            unsaved: false,
            stale: true,
            doubt_ends: None,
            plan: Plan::default(),
        }
    }

    /// Something has changed that it looks at.
    pub(super) fn changed(&mut self) {
        self.stale = true;
    }

    /// Nobody knows whether a patch was made; until when that counts.
    pub(super) fn doubt(&mut self, until: Option<Timestamp>) {
        self.doubt_ends = [self.doubt_ends, until].into_iter().flatten().min();
    }

    /// A node waits.
    pub(super) fn wait(&mut self, name: &str, desired: Desired) {
        self.waiting.insert(name.to_owned(), desired);
        self.looked_at.insert(name.to_owned());
        self.stale = true;
    }

    /// A node does not wait any more.
    pub(super) fn forget(&mut self, name: &str) {
        self.stale |= self.waiting.remove(name).is_some();
    }

    /// When nodes were last taken out of service, of those that are back: to be saved, for the
    /// nodes themselves do not tell any more.
    pub(super) fn recent(&self) -> &BTreeMap<String, Timestamp> {
        &self.recent
    }

    /// Takes back what was saved.
    pub(super) fn restore(&mut self, recent: BTreeMap<String, Timestamp>) {
        self.recent = recent;
        self.stale = true;
    }

    /// A node is back in service, and was taken out then.
    pub(super) fn back(&mut self, name: &str, since: Option<Timestamp>) {
        if let Some(since) = since {
            self.recent.insert(name.to_owned(), since);
            self.unsaved = true;
        }
        self.stale = true;
    }
}

// === impl Quarantine ===

impl Quarantine {
    /// What holds back all new quarantines now.
    pub(super) fn stop(&self) -> Option<Hold> {
        let switches = self.switches.as_ref()?;
        switches.stop(self.brake.enabled, (self.clock)())
    }

    /// Asks the brake about all that wait, and steps on who may go.
    pub(super) fn let_go(&mut self, policy: &Policy) {
        if !self.brake.stale || self.brake.waiting.is_empty() {
            return;
        }
        let plan = self.ask_the_brake();
        if plan.trip {
            let (write, now) = (self.writes(), (self.clock)());
            if let Some(switches) = &mut self.switches {
                switches.trip(write, now);
            }
        }
        let stop = self.stop();
        let looked_at = std::mem::take(&mut self.brake.looked_at);
        let started: BTreeSet<&str> = plan.start.iter().map(String::as_str).collect();
        let rest: Vec<String> = (self.brake.waiting.keys())
            .filter(|name| !started.contains(name.as_str()))
            .cloned()
            .collect();
        for name in plan.start.iter().chain(&rest) {
            // What may be out already counts as out, and only a person stops it.
            let free = started.contains(name.as_str())
                || (self.brake.waiting.get(name)).is_some_and(|one| one.forced_by.is_some());
            let in_doubt = || stop.as_ref().filter(|_| !free);
            let hold = plan.held.get(name).or_else(in_doubt);
            let looked_at = looked_at.contains(name);
            self.step_waiting(policy, name, hold, looked_at);
            if self.entry(name).in_flight {
                // On its way, and looked at again when the answer is there.
                self.brake.waiting.remove(name);
            }
        }
        self.brake.plan = plan;
        self.schedule_publish();
    }

    fn step_waiting(&mut self, policy: &Policy, name: &str, hold: Option<&Hold>, looked_at: bool) {
        self.publishing.unshown.insert(name.to_owned());
        let entry = self.entry(name);
        if entry.in_flight {
            return; // Looked at again when the answer is there.
        }
        let before = std::mem::replace(&mut entry.hold, hold.cloned());
        if let (Some(before), Some(hold)) = (&before, hold) {
            if !before.same_cause(hold) {
                let text = format!("still held back: {hold}");
                tracing::info!(node = name, "{text}");
                let detail = json!({"by": hold.name()});
                let session = entry.session.id.clone();
                self.note(name, session.as_deref(), EntryKind::Session, text, detail);
            }
            if !looked_at {
                return; // Nothing else has changed.
            }
        }
        let Some(desired) = self.brake.waiting.get(name).cloned() else {
            return;
        };
        let Some(view) = self.entry(name).effective_view() else {
            return;
        };
        self.drive(name, &view, policy, &desired, hold);
    }

    /// Asks the brake; what it says is up to date from then on.
    fn ask_the_brake(&mut self) -> Plan {
        self.brake.stale = false;
        let now = (self.clock)();
        let policy = self.policy.as_ref();
        let window = policy.and_then(|policy| policy.brake.window.as_ref());
        self.brake.recent.retain(|_, since| {
            window.is_some_and(|window| now.duration_since(*since) < window.duration)
        });
        let members = self
            .nodes
            .iter()
            .filter_map(|(name, entry)| {
                let view = entry.view.as_ref()?;
                Some(Member {
                    name,
                    labels: &view.labels,
                    out: entry.out(now),
                })
            })
            .collect();
        let candidates = self
            .brake
            .waiting
            .iter()
            .filter_map(|(name, desired)| {
                let entry = self.nodes.get(name)?;
                if entry.out(now).is_some() {
                    return None; // On its way, and counted.
                }
                Candidate::of(name, desired, Some(&entry.session))
            })
            .collect();
        brake::plan(Question {
            brake: policy
                .map(|policy| &policy.brake)
                .filter(|_| self.brake.enabled),
            gpu_label: &self.brake.gpu_label,
            members,
            recent: &self.brake.recent,
            reset_at: self.switches.as_ref().and_then(Switches::reset_at),
            stop: self.stop(),
            candidates,
            now,
        })
    }

    /// The brake as it is shown; `None`: there is nothing to hold back.
    pub(super) fn brake_view(&mut self) -> Option<BrakeView> {
        let now = (self.clock)();
        self.cluster.as_ref()?;
        if self.brake.stale && self.brake.waiting.is_empty() {
            self.brake.plan = self.ask_the_brake();
        }
        let switches = self.switches.as_ref();
        let plan = &self.brake.plan;
        let mut notes = switches.map(Switches::notes).unwrap_or_default();
        if plan.unlabelled && self.brake.enabled && self.listed {
            notes.push(format!(
                "no node carries the label {}: all nodes are counted",
                self.brake.gpu_label
            ));
        }
        let paused = match switches.and_then(|one| one.stop(false, now)) {
            Some(Hold::Paused(pause)) => Some(pause.to_string()),
            _ => None,
        };
        let unknown = if !self.listed {
            Some("the cluster's nodes could not be read yet".to_owned())
        } else if self.policy.is_none() {
            Some("no policy was read yet".to_owned())
        } else {
            None
        };
        let shown = plan.limits.iter().take(LIMITS_SHOWN);
        Some(BrakeView {
            enabled: self.brake.enabled,
            state: switches.map_or_else(String::new, |one| one.state().to_owned()),
            limits: shown
                .map(|limit| LimitView {
                    limit: limit.limit.clone(),
                    of_which: self.of_which(limit),
                    used: limit.used,
                    allowed: limit.allowed,
                    of: limit.of,
                    by: limit.by.clone(),
                })
                .collect(),
            unknown,
            held: self.publishing.shown.held,
            paused,
            notes,
        })
    }

    /// How far the fullest limit is used up.
    pub(super) fn brake_utilization(&self) -> f64 {
        self.brake.plan.limits.first().map_or(0.0, Use::utilization)
    }

    /// Which nodes a limit counts, for people.
    fn of_which(&self, limit: &Use) -> String {
        let nodes = match (self.brake.plan.unlabelled, limit.gpu) {
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
}
