//! Decision on the next action for a resource.

use jiff::Timestamp;
use model::resource::CompletionReason;

use super::entry::BoardEntry;
use super::io::Effect;
use super::{Board, NodeEntry, WRITE_AGAIN};
use crate::gpu_reset::{self, ResetDecision, ResetGpus, ResetObservation, job_name};
use crate::handover;
use crate::janitor::Action;
use crate::janitor::config::ProviderPlace;
use crate::janitor::order::{Position, position};
use crate::janitor::reset::ResetSignal;
use crate::janitor::sending::{Question, Sending};
use crate::janitor::signal::{ObservedNode, SignalStep, Situation};
use crate::{Act, Maintenance, MaintenanceResource, ResourceKey, Status};

/// Next action for a resource.
pub(super) enum Next {
    Wait(Option<Timestamp>),
    Do(Effect),
}

// === impl Board ===

impl Board {
    /// Decides on the next action for a resource and starts it.
    pub(super) fn evaluate(
        &mut self,
        key: &ResourceKey,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        let Some(entry) = self.entries.get(key) else {
            return;
        };
        if entry.writing.is_some() {
            return;
        }
        if let Some(time) = entry.not_before.filter(|time| *time > now) {
            return self.set_wake(key, Some(time));
        }
        match self.next(entry, now) {
            Next::Wait(wake) => self.set_wake(key, wake.filter(|time| *time > now)),
            // The watch will deliver the newer state.
            Next::Do(Effect::Write { .. } | Effect::Merge(..)) if entry.is_outdated() => {
                self.set_wake(key, now.checked_add(WRITE_AGAIN).ok());
            }
            Next::Do(effect) => {
                let Some(entry) = self.entries.get_mut(key) else {
                    return;
                };
                entry.begins(&effect);
                let asking = entry.asking;
                self.set_wake(key, None);
                effects.push(effect);
                if asking {
                    // Evaluated again for the deadline, which does not wait for the response.
                    self.evaluate(key, now, effects);
                }
            }
        }
    }

    fn next(&self, entry: &BoardEntry, now: Timestamp) -> Next {
        let resource = &entry.resource;
        if !self.carries_out(resource.kind) {
            return Next::Wait(None);
        }
        if !self.is_open(resource) {
            return self.keep(resource, now);
        }
        if !self.is_ready() {
            return Next::Wait(None); // The order is unknown until all resources are.
        }
        match Action::of(resource.kind) {
            Some(Action::Reset) | None => self.request(entry, now),
            Some(action) => self.signal(entry, action, now),
        }
    }

    /// Decides about the deletion of a resource that has ended.
    fn keep(&self, resource: &MaintenanceResource, now: Timestamp) -> Next {
        let Some(due) = resource.due(self.ttl) else {
            return Next::Wait(None);
        };
        match resource.expiry(due, now) {
            Some(expiry) => Next::Do(Effect::Expire(resource.key(), expiry)),
            None => Next::Wait(Some(due)),
        }
    }

    /// Decides about a reboot or a termination.
    fn signal(&self, entry: &BoardEntry, action: Action, now: Timestamp) -> Next {
        let resource = &entry.resource;
        let (Some(rules), Some(node_entry)) =
            (self.config.rules(action), self.nodes.get(&resource.node))
        else {
            return Next::Wait(None);
        };
        let begun = resource.status.start.is_some();
        let is_request = |key: &ResourceKey| key.kind.finalizer().is_some();
        let request = self.working_on(&resource.node, is_request);
        let position = request.filter(|_| !begun).map_or_else(
            || {
                let of_node = node_entry.keys.iter().filter(|key| !is_request(key));
                let of_node = of_node.filter_map(|key| self.entries.get(key));
                let of_node = of_node.map(|one| &one.resource);
                position(resource, of_node.filter(|one| self.carries_out(one.kind)))
            },
            |before| Position::Behind {
                before,
                same: false,
            },
        );
        let situation = Situation {
            resource,
            action,
            node: &node_entry.observed,
            position,
            rules,
            memory: &entry.memory,
            process: &self.process,
            now,
        };
        let (key, node) = (resource.key(), resource.node.clone());
        Next::Do(match situation.step() {
            SignalStep::Wait(until) => return Next::Wait(until),
            SignalStep::Write(status) => write(resource, &status),
            // Only one question at a time. Its response triggers another evaluation; the
            // deadline does not wait for it.
            SignalStep::Ask(_) | SignalStep::DeleteNode(_) if entry.asking => {
                return Next::Wait(situation.last_moment());
            }
            SignalStep::Ask(question) => ask(resource, rules.provider.clone(), question),
            SignalStep::DeleteNode(uid) => Effect::DeleteNode { key, node, uid },
        })
    }

    /// Decides about a GPU reset or a hand-over.
    fn request(&self, entry: &BoardEntry, now: Timestamp) -> Next {
        let request = &entry.resource;
        let node_entry = self.nodes.get(&request.node);
        let Some(node_entry) =
            node_entry.filter(|node_entry| node_entry.observed != ObservedNode::Unknown)
        else {
            return Next::Wait(None);
        };
        let (effect, wake) = if request.kind == Maintenance::Reset {
            self.reset(entry, node_entry, now)
        } else {
            let act = self.hand_over(request, node_entry, now);
            let effect = act.and_then(|act| self.effect(request, node_entry, act));
            (effect, handover::wake_at(request))
        };
        match effect {
            Some(effect) => Next::Do(effect),
            // Changes are undone before the resource is deleted.
            None if request.status.completion.is_some() => self.keep(request, now),
            None => Next::Wait(wake),
        }
    }

    /// Decides about a GPU reset. Returns the effect, or the time of the next decision.
    fn reset(
        &self,
        entry: &BoardEntry,
        node_entry: &NodeEntry,
        now: Timestamp,
    ) -> (Option<Effect>, Option<Timestamp>) {
        let request = &entry.resource;
        let signal = self.reset_signal(entry, now);
        if let Some(status) = signal.as_ref().and_then(ResetSignal::note) {
            return (Some(write(request, &status)), None);
        }
        let observation = match &signal {
            None => self.job(request, entry.refused.as_ref()),
            Some(signal) if signal.is_announced() || self.jobs_listed => signal.observation(),
            // A Job may exist that is not known yet.
            Some(_) => ResetObservation::Unknown,
        };
        let decision = self.decide(request, node_entry, &observation, signal.is_some(), now);
        let ResetDecision { act, wake, .. } = decision.unwrap_or_default();
        let step = match (act, signal) {
            (Some(Act::Make(_)), Some(signal)) => signal.send(),
            (None, Some(signal)) if request.status.completion.is_none() => signal.ask(),
            (act, _) => {
                let effect = act.and_then(|act| self.effect(request, node_entry, act));
                return (effect, wake);
            }
        };
        let place = self.config.reset_provider.clone();
        match step {
            SignalStep::Write(status) => (Some(write(request, &status)), None),
            // Only one question at a time. Its response triggers another evaluation.
            SignalStep::Ask(question) if !entry.asking => {
                (place.map(|place| ask(request, place, question)), wake)
            }
            SignalStep::Wait(until) => (None, until.into_iter().chain(wake).min()),
            SignalStep::Ask(_) | SignalStep::DeleteNode(_) => (None, wake),
        }
    }

    /// Returns the signal of a reset by a provider. `None` if a Job carries out the reset. A
    /// reset that has started continues the same way, even if the configuration has changed.
    fn reset_signal<'a>(
        &'a self,
        entry: &'a BoardEntry,
        now: Timestamp,
    ) -> Option<ResetSignal<'a>> {
        let request = &entry.resource;
        let signal = ResetSignal(Sending {
            resource: request,
            memory: &entry.memory,
            process: &self.process,
            now,
        });
        let has_job =
            request.status.job.is_some() || self.jobs.contains_key(&job_name(&request.name));
        let is_wanted = self.config.reset_provider.is_some() && !has_job;
        (signal.is_announced() || is_wanted).then_some(signal)
    }

    fn decide(
        &self,
        request: &MaintenanceResource,
        node_entry: &NodeEntry,
        reset: &ResetObservation,
        by_provider: bool,
        now: Timestamp,
    ) -> Option<ResetDecision> {
        let key = request.key();
        let node = node_entry.view.as_deref();
        Some(gpu_reset::decide(&gpu_reset::ResetInput {
            request,
            node,
            pods: node_entry.pods.as_deref(),
            reset,
            by_provider,
            before: (self.working_on(&request.node, |other| *other != key)).as_deref(),
            excluded: node.is_some_and(|node| self.config.excludes(&node.labels)),
            settings: self.config.resets.as_ref()?,
            looks_since: self.since.unwrap_or(now),
            now,
        }))
    }

    fn hand_over(
        &self,
        request: &MaintenanceResource,
        node_entry: &NodeEntry,
        now: Timestamp,
    ) -> Option<Act> {
        let key = request.key();
        let node = node_entry.view.as_deref();
        handover::decide(&handover::HandoverInput {
            request,
            node,
            before: (self.working_on(&request.node, |other| *other != key)).as_deref(),
            excluded: node.is_some_and(|node| self.config.excludes(&node.labels)),
            now,
        })
    }

    fn effect(
        &self,
        request: &MaintenanceResource,
        node_entry: &NodeEntry,
        act: Act,
    ) -> Option<Effect> {
        let key = request.key();
        Some(match act {
            Act::Finalizer(on) => Effect::Merge(key, request.finalizer(on)),
            Act::Status(status) => write(request, &status),
            Act::Node(change) => Effect::Change(Some(key), node_entry.view.clone()?, change),
            Act::Make(job) => Effect::Make(key, job),
            Act::Stop => {
                let name = job_name(&request.name);
                let (job, _) = self.jobs.get(&name)?;
                let uid = job["metadata"]["uid"].as_str()?.to_owned();
                Effect::Stop { key, name, uid }
            }
        })
    }

    fn job(&self, request: &MaintenanceResource, refused: Option<&String>) -> ResetObservation {
        match (self.jobs.get(&job_name(&request.name)), refused) {
            (Some((job, why)), _) => ResetObservation::read(job, &request.uid, why.as_deref()),
            (None, Some(why)) => {
                ResetObservation::Refused(CompletionReason::PermanentFailure, why.clone())
            }
            (None, None) if self.jobs_listed => ResetObservation::Absent,
            (None, None) => ResetObservation::Unknown,
        }
    }
}

fn ask(resource: &MaintenanceResource, provider: ProviderPlace, question: Question) -> Effect {
    Effect::Ask {
        key: resource.key(),
        node: resource.node.clone(),
        operation: resource.operation().to_owned(),
        gpus: ResetGpus::of(resource),
        provider,
        question,
    }
}

fn write(resource: &MaintenanceResource, status: &Status) -> Effect {
    Effect::Write {
        key: resource.key(),
        version: resource.version.clone(),
        status: status.patch(),
    }
}
