//! The brake at work: which nodes wait to be taken out of service, and who may go.
//!
//! A node whose faults ask for it and that is in service waits here. Whenever something
//! has changed that the brake looks at, it is asked anew about all that wait
//! ([`crate::brake::plan`]); who may go is stepped on as everybody else, who may not is
//! shown as held.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde_json::json;

use super::{Effect, Fleet, Level};
use crate::assess::Desired;
use crate::brake::pause::Pause;
use crate::brake::{self, Candidate, Hold, Member, Plan, Question};
use crate::journal::EntryKind;
use crate::policy::Policy;
use crate::session::Note;

/// The pause and the circuit breaker that people have set in the cluster, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switched {
    /// The pause, if there is one.
    pub pause: Option<Pause>,
    /// The reason why it is not known whether there is a pause; `None` where it is.
    pub unread: Option<String>,
    /// The hold of the circuit breaker on all nodes, or that it is not known.
    pub breaker: Option<Hold>,
    /// The time at which the nodes that the brake had held back were last dropped.
    pub dropped_at: Option<Timestamp>,
    /// The time at which a person last closed the circuit breaker.
    pub reset_at: Option<Timestamp>,
}

/// The state of the brake.
#[derive(Debug, Default)]
pub(super) struct BrakeState {
    /// The time at which the pause that holds ends by itself.
    pub(super) pause_ends: Option<Timestamp>,
    /// The nodes that wait, with what is wanted for them.
    pub(super) waiting: BTreeMap<String, Desired>,
    /// The ones of them that were looked at since the brake was last asked.
    pub(super) looked_at: BTreeSet<String>,
    /// The time at which each node that is back was last taken out of service.
    pub(super) recent: BTreeMap<String, Timestamp>,
    /// True if something has changed since the brake was last asked.
    pub(super) stale: bool,
    /// The time at which the next doubt about a patch ends.
    pub(super) doubt_ends: Option<Timestamp>,
    /// The last plan.
    pub(super) plan: Plan,
}

// === impl Switched ===

impl Switched {
    /// Returns the hold on all new quarantines. `brake`: whether the circuit breaker counts.
    pub fn stop(&self, brake: bool, now: Timestamp) -> Option<Hold> {
        if let Some(pause) = self.pause.as_ref().filter(|pause| pause.holds(now)) {
            return Some(Hold::Paused(pause.clone()));
        }
        if let Some(why) = &self.unread {
            return Some(Hold::Unread(why.clone()));
        }
        self.breaker.clone().filter(|_| brake)
    }

    /// Returns when a pause ends by itself.
    pub(super) fn pause_ends(&self, now: Timestamp) -> Option<Timestamp> {
        let until = self.pause.as_ref()?.until?;
        (until > now).then_some(until)
    }
}

// === impl BrakeState ===

impl BrakeState {
    /// Takes in that something has changed that it looks at.
    pub(super) fn mark_stale(&mut self) {
        self.stale = true;
    }

    /// Takes in until when a patch counts of which nobody knows whether it was made.
    pub(super) fn doubt(&mut self, until: Option<Timestamp>) {
        self.doubt_ends = [self.doubt_ends, until].into_iter().flatten().min();
    }

    /// Takes in that a node waits.
    pub(super) fn wait(&mut self, name: &str, desired: Desired) {
        self.waiting.insert(name.to_owned(), desired);
        self.looked_at.insert(name.to_owned());
        self.stale = true;
    }

    /// Takes in that a node does not wait any more.
    pub(super) fn forget(&mut self, name: &str) {
        self.stale |= self.waiting.remove(name).is_some();
    }

    /// Takes in that a node is back in service, and was taken out then. Returns whether that is to
    /// be saved.
    pub(super) fn back(&mut self, name: &str, since: Option<Timestamp>) -> bool {
        self.stale = true;
        let Some(since) = since else {
            return false;
        };
        self.recent.insert(name.to_owned(), since);
        true
    }

    /// Takes in that the clock was put back to `now`: what was taken out later was just now, or it
    /// would use up room of the window for as much longer.
    pub(super) fn clock_put_back(&mut self, now: Timestamp) {
        for since in self.recent.values_mut() {
            *since = (*since).min(now);
        }
    }
}

// === impl Fleet ===

impl Fleet {
    /// Takes the switches that people have set in.
    pub(super) fn switch(&mut self, switched: Switched) {
        let before = std::mem::replace(&mut self.common.switched, switched);
        if before == self.common.switched {
            return;
        }
        let now = &self.common.switched;
        let repairs = |one: &Switched| one.pause.as_ref().filter(|pause| pause.repairs).cloned();
        if now.dropped_at != before.dropped_at
            || now.unread != before.unread
            || repairs(now) != repairs(&before)
        {
            // What counts of the faults has changed, or what holds repairs back.
            self.look_again_at_all();
        }
        self.brake.pause_ends = self.common.switched.pause_ends(self.common.now);
        self.brake.mark_stale();
        self.agenda.news = true;
    }

    /// Returns the hold on all new quarantines now.
    fn stop(&self) -> Option<Hold> {
        self.common
            .switched
            .stop(self.common.settings.brake, self.common.now)
    }

    /// Asks the brake about all that wait, and steps the sessions of those that may go.
    pub(super) fn step_waiting_nodes(&mut self, policy: &Policy) {
        if !self.brake.stale || self.brake.waiting.is_empty() {
            return;
        }
        let plan = self.ask_the_brake();
        if plan.trip {
            // It holds from now on, be it written down or not.
            self.common.switched.breaker.get_or_insert(Hold::Tripped);
            self.agenda.effects.push(Effect::Trip);
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
            self.step_waiting_node(policy, name, hold, looked_at);
            if self.entry(name).patch.in_flight {
                // On its way, and looked at again when the answer is there.
                self.brake.waiting.remove(name);
            }
        }
        self.brake.plan = plan;
        self.agenda.news = true;
    }

    fn step_waiting_node(
        &mut self,
        policy: &Policy,
        name: &str,
        hold: Option<&Hold>,
        looked_at: bool,
    ) {
        self.agenda.unshown.insert(name.to_owned());
        let Some(mut look) = self.look_at(name) else {
            return;
        };
        if look.entry.patch.in_flight {
            return; // Looked at again when the answer is there.
        }
        let before = std::mem::replace(&mut look.entry.hold, hold.cloned());
        if let (Some(before), Some(hold)) = (&before, hold) {
            if !before.same_cause(hold) {
                let note = Note {
                    kind: EntryKind::Session,
                    text: format!("still held back: {hold}"),
                    detail: json!({"by": hold.name()}),
                };
                look.note(note, Some(Level::Info));
            }
            if !looked_at {
                return; // Nothing else has changed.
            }
        }
        let Some(observed) = look.entry.observed.clone() else {
            return;
        };
        let Some(desired) = look.brake.waiting.remove(name) else {
            return;
        };
        look.step_session(&observed, policy, &desired, hold);
        look.brake.waiting.insert(name.to_owned(), desired);
    }

    /// Returns the plan of the brake, which is up to date from then on.
    pub(super) fn ask_the_brake(&mut self) -> Plan {
        self.brake.stale = false;
        let now = self.common.now;
        let policy = self.common.policy.as_ref();
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
                Candidate::of(name, desired, entry.session.failures > 0)
            })
            .collect();
        brake::plan(Question {
            brake: policy
                .map(|policy| &policy.brake)
                .filter(|_| self.common.settings.brake),
            gpu_label: &self.common.settings.gpu_label,
            members,
            recent: &self.brake.recent,
            reset_at: self.common.switched.reset_at,
            stop: self.stop(),
            candidates,
            now,
        })
    }
}
