//! The pods of nodes that are drained.
//!
//! A drain follows from the node's session: the node says that it is being drained, and then each of its
//! pods gets what [`crate::drain::fate`] says. So a release, an uncordon and a recovery stop it at once, and who starts
//! anew goes on where the node says it is. The pods are looked at only as long as that takes.

use std::collections::BTreeSet;

use jiff::SignedDuration;

use super::stage::remediation::NOT_OUT;
use super::{Effect, Fleet, Level, Mode};
use crate::assess::{Desired, DrainStage};
use crate::device::{DeviceTaint, TaintEffect};
use crate::drain::partial::Gpus;
use crate::drain::{Drain, DrainMode, Next, PodView, wake_at};
use crate::handover::{HANDED_OVER, is_handed_over};
use crate::journal::EntryKind;
use crate::ownership::{DrainMark, Ownership};
use crate::session::{Failure, Note, Observed, retry_after};
use crate::status::eviction::{Eviction, EvictionWord, Skip};

mod checkpoint;
pub(super) mod custom;
mod state;
mod told;

pub use checkpoint::PlannedCheckpoint;
pub(super) use state::DrainState;
use told::awaits;

/// Most pods of one node of which a removal is under way at once.
const MAX_AT_ONCE: usize = 8;
/// Wait for the watch to tell that a pod is ending that was evicted.
const TELLS_WITHIN: SignedDuration = SignedDuration::from_secs(10);
/// First and longest wait before an eviction is tried again that a disruption budget refuses.
const REFUSED: (SignedDuration, SignedDuration) =
    (SignedDuration::from_secs(1), SignedDuration::from_secs(30));
/// Time after the cordon in which a scheduler that has not seen it may still bind a pod to the node.
const SETTLES: SignedDuration = SignedDuration::from_secs(1);
/// Time for which a pod's eviction is refused, or fails, before a person is asked.
const ASK_AFTER: SignedDuration = SignedDuration::from_mins(5);

/// News of the pods of a node.
#[derive(Clone, Debug)]
pub enum PodNews {
    /// A list of them begins.
    ListBegun,
    /// A pod as it is.
    Seen(Box<PodView>),
    /// The pod of this name (`NAMESPACE/NAME`) is gone, or not on the node any more.
    Gone(String),
    /// The list is complete: what was not part of it is not there.
    Listed,
    /// They cannot be watched, for this reason; it is tried again.
    Failing(String),
    /// They are watched again. What was missed follows.
    Recovered,
}

/// A pod to be removed from its node.
#[derive(Clone, Debug)]
pub struct PlannedRemoval {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The mode in which it leaves.
    pub mode: DrainMode,
    /// The time that it has to end; `None`: it is deleted whatever protects it, without any.
    pub evict: Option<SignedDuration>,
}

/// The answer of the API server to the removal of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovalAnswer {
    /// It is ending.
    Taken,
    /// It is gone, or another has its name.
    Gone,
    /// A disruption budget holds it, for this reason.
    Held {
        /// The words of the API server.
        why: String,
        /// The time after which the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
    /// It was not done, for this reason.
    Failed {
        /// The reason.
        why: String,
        /// The time after which the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
}

// === impl Fleet ===

impl Fleet {
    /// Takes news of the pods of a node in.
    pub(super) fn take_pods(&mut self, node: &str, news: PodNews) {
        let now = self.common.now;
        let state = self.nodes.get_mut(node).and_then(|one| one.drain.as_mut());
        let Some(state) = state.filter(|state| state.followed) else {
            return;
        };
        let listing = state.listing.is_some();
        state.take(news, now);
        // What a list brings is looked at as a whole.
        if !listing || state.listing.is_none() {
            self.look_again_at(node);
        }
    }

    /// Takes the answer to the removal of a pod in.
    pub(super) fn removal_answered(&mut self, node: &str, uid: &str, answer: RemovalAnswer) {
        let now = self.common.now;
        let state = self.nodes.get_mut(node).and_then(|one| one.drain.as_mut());
        let Some(one) = state.and_then(|state| state.tries.get_mut(uid)) else {
            return;
        };
        one.in_flight = false;
        let (why, wait, held) = match answer {
            RemovalAnswer::Taken | RemovalAnswer::Gone => {
                (one.failures, one.trouble) = (0, None);
                one.not_before = Some(now + TELLS_WITHIN);
                return self.look_again_at(node);
            }
            RemovalAnswer::Held { why, retry_after } => {
                one.failures = one.failures.saturating_add(1);
                let wait = REFUSED.0 * (1 << one.failures.min(5));
                let wait = wait.max(retry_after.unwrap_or_default()).min(REFUSED.1);
                (why, wait, true)
            }
            RemovalAnswer::Failed {
                why,
                retry_after: wish,
            } => {
                one.failures = one.failures.saturating_add(1);
                let failure = Failure::Error { retry_after: wish };
                (why, retry_after(one.failures, failure), false)
            }
        };
        one.not_before = Some(now + wait);
        let news = one
            .trouble
            .as_ref()
            .is_none_or(|(_, before)| *before != why);
        let since = one.trouble.as_ref().map_or(now, |(since, _)| *since);
        one.trouble = Some((since, why.clone()));
        if news {
            let entry = self.nodes.get(node);
            let state = entry.and_then(|one| one.drain.as_ref());
            let pod = state.and_then(|one| one.pods.values().find(|pod| pod.uid == uid));
            let pod = pod.map_or_else(|| uid.to_owned(), PodView::title);
            let session = entry.and_then(|entry| entry.session.id.clone());
            let what = if held {
                "is not let go"
            } else {
                "could not be removed"
            };
            let text = format!("pod {pod} {what}: {why}; it is tried again");
            let note = Note::new(EntryKind::Answer, text);
            self.note(node, session.as_deref(), note, None);
        }
        self.look_again_at(node);
    }

    /// Returns why the pods of a node that is out of service all stay; `None` where they do not.
    fn skips_drain(&self, name: &str, own: &Ownership, desired: &Desired) -> Option<Skip> {
        if self.common.settings.drain.is_none() {
            return Some(Skip::Off);
        }
        // It has no place to say how far its drain is.
        if own.replaced_labels.is_none() {
            return Some(Skip::Nvsentinel);
        }
        if desired.drains().is_none() {
            let route = desired.skipped_by().map(Skip::Route);
            return Some(route.unwrap_or(Skip::Override));
        }
        // One that was begun stays so.
        let veto = self.veto(name).filter(|_| own.mark.drain.is_none());
        veto.map(|veto| Skip::Veto(veto.to_string()))
    }

    /// Returns how far the drain of a node that is out of service is, for the records of its events.
    pub(super) fn eviction(
        &self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
    ) -> Option<Eviction> {
        let own = observed.own.as_deref().filter(|own| own.takes_node_out())?;
        let state = self.nodes.get(name)?.drain.as_ref();
        let stuck = state.and_then(|state| state.stuck.as_deref());
        let mark = match desired.drain {
            Some(_) => own.mark.drain_of(&desired.drain_gpus),
            None => own.mark.drain,
        };
        Some(match (mark, stuck) {
            (Some(DrainMark { done: Some(_), .. }), _) => {
                let text = "all pods that were to leave have left";
                Eviction::new(EvictionWord::Succeeded, text)
            }
            (Some(_), Some(stuck)) => Eviction::new(EvictionWord::Failed, stuck),
            (Some(_), None) => Eviction::new(EvictionWord::InProgress, ""),
            (None, _) => match self.skips_drain(name, own, desired) {
                Some(skip) if desired.takes_node_out() => Eviction::skipped(&skip),
                _ => Eviction::new(EvictionWord::NotStarted, ""),
            },
        })
    }

    /// Returns the GPUs by UUID whose pods are to leave a node that is out of service, or that single
    /// devices of are; none: all its pods. `None`: no pod is.
    fn drained_gpus(&self, name: &str, own: &Ownership, desired: &Desired) -> Option<Vec<String>> {
        let config = self.common.settings.drain.as_ref()?;
        match (own.takes_node_out(), desired.takes_node_out()) {
            // No further pod is to leave than were to before.
            (was, is) if was == is && own.mark.drain.is_some() && self.veto(name).is_some() => {
                Some(own.mark.drain_gpus.clone())
            }
            // One that was begun with all pods goes on so.
            (true, true) if own.mark.drain.is_some() && own.mark.drain_gpus.is_empty() => {
                Some(Vec::new())
            }
            (true, true) if self.custom_of(name).is_some() => Some(Vec::new()),
            (true, true) if config.partial && !self.repairs_whole_node(name) => {
                Some(desired.reset_gpus().unwrap_or_default())
            }
            (true, true) => Some(Vec::new()),
            (false, false) if config.partial && self.custom_of(name).is_none() => {
                let known = self.common.devices.of_node(name);
                let out = |taints: &[DeviceTaint]| {
                    taints.iter().any(|taint| taint.effect > TaintEffect::None)
                };
                let devices = desired.devices.iter().filter(|(_, taints)| out(taints));
                let gpus: BTreeSet<String> = devices
                    .filter_map(|(device, _)| known.get(device)?.gpu.clone())
                    .collect();
                (!gpus.is_empty()).then(|| gpus.into_iter().collect())
            }
            // The node says soon which of both it is.
            _ => None,
        }
    }

    /// Returns the drain that is wanted of a node that says what of it is out of service: by the switch,
    /// and by the senders of its faults; and the GPUs whose pods leave, none for all pods.
    fn wanted_drain(
        &self,
        name: &str,
        own: &Ownership,
        desired: &Desired,
    ) -> Option<(Drain, Vec<String>)> {
        let gpus = self.drained_gpus(name, own, desired)?;
        if self.skips_drain(name, own, desired).is_some() {
            return None;
        }
        let force = desired.drains()?;
        let mark = own.mark.drain_of(&gpus);
        let since = mark.map_or(self.common.now, |mark| mark.since.min(self.common.now));
        Some((Drain { since, force }, gpus))
    }

    /// Returns what is known of the GPUs of a node with these UUIDs; `None` where none are named.
    fn gpus(&self, name: &str, uuids: &[String]) -> Option<Gpus> {
        (!uuids.is_empty()).then(|| self.common.devices.gpus(name, uuids))
    }

    /// Returns how far the drain of a node should be, by what is known of its pods, and the GPUs whose
    /// pods it is about; none: all pods.
    pub(super) fn drain_stage(
        &self,
        name: &str,
        own: Option<&Ownership>,
        desired: &Desired,
    ) -> Option<(DrainStage, Vec<String>)> {
        let own = own?;
        let wanted = self.drained_gpus(name, own, desired);
        let gpus = wanted.unwrap_or_else(|| own.mark.drain_gpus.clone());
        let stage = self.stage_of(name, own, desired, &gpus)?;
        Some((stage, gpus))
    }

    fn stage_of(
        &self,
        name: &str,
        own: &Ownership,
        desired: &Desired,
        gpus: &[String],
    ) -> Option<DrainStage> {
        let mark = own.mark.drain_of(gpus);
        // What is done is done, whatever the switch says now.
        if mark.is_some_and(|mark| mark.done.is_some()) && desired.drains().is_some() {
            return Some(DrainStage::Drained);
        }
        if self.is_handed_over(name) || self.lacks_a_deed(name, own) {
            return mark.map(|_| DrainStage::Draining);
        }
        let (drain, gpus) = self.wanted_drain(name, own, desired)?;
        if let Some(custom) = self.custom_of(name) {
            let done = self.custom_is_done(name, own, &custom);
            return Some(if done {
                DrainStage::Drained
            } else {
                DrainStage::Draining
            });
        }
        let gpus = self.gpus(name, &gpus);
        let config = self.common.settings.drain.as_ref()?;
        let state = self.nodes.get(name)?.drain.as_ref();
        let Some(state) = state.filter(|state| state.sees_pods()) else {
            return mark.map(|_| DrainStage::Draining);
        };
        let mut leaving = state.leaving(drain, gpus.as_ref(), config, self.common.now);
        if leaving.next().is_some() {
            return Some(DrainStage::Draining);
        }
        // What was missed while they were not watched comes after the word that they are.
        let settled = (own.since.max(state.watched_again))
            .is_none_or(|since| self.common.now.duration_since(since) >= SETTLES);
        let begun = mark.map(|_| DrainStage::Draining);
        if settled {
            Some(DrainStage::Drained)
        } else {
            begun
        }
    }

    /// Returns whether the node is not out of service as its session says: pods that leave could come back.
    fn lacks_a_deed(&self, name: &str, own: &Ownership) -> bool {
        let observed = self.nodes.get(name).and_then(|one| one.observed.as_ref());
        observed.is_some_and(|observed| own.lacks_a_deed(&observed.view))
    }

    /// Returns whether a node is in the hands of an external system.
    fn is_handed_over(&self, name: &str) -> bool {
        let entry = self.nodes.get(name);
        let view = entry.and_then(|entry| entry.view.as_ref());
        view.is_some_and(|view| is_handed_over(&view.labels))
    }

    fn drain_mut(&mut self, name: &str) -> &mut DrainState {
        self.entry(name).drain.get_or_insert_default()
    }

    /// Returns how far the drain of a node is, and adds to its story why all its pods stay, where they
    /// do in spite of the switch.
    pub(super) fn look_at_eviction(
        &mut self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
    ) -> Option<Eviction> {
        let eviction = self.eviction(name, observed, desired);
        let drains = self.common.settings.drain.is_some();
        let entry = self.entry(name);
        if entry.noted.eviction.as_deref() == eviction.as_ref() {
            return eviction;
        }
        entry.noted.eviction = eviction.clone().map(Box::new);
        let session = entry.session.id.clone();
        if let Some(why) = (eviction.as_ref()).filter(|one| drains && one.is_skipped()) {
            let note = Note::new(EntryKind::Session, why.message.clone());
            self.note(name, session.as_deref(), note, None);
        }
        eviction
    }

    /// Marks that the pods and the custom resource of a node need not be known, unless what follows wants
    /// them.
    pub(super) fn forget_wishes(&mut self, name: &str) {
        self.forget_wish_for_pods(name);
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.custom.forget_wish();
            for stage in entry.stages.all_mut() {
                stage.begin();
            }
        }
    }

    fn repairs_whole_node(&self, name: &str) -> bool {
        let entry = self.nodes.get(name);
        let settings = &self.common.settings;
        entry.is_some_and(|entry| entry.stages.remediation.repairs_whole_node(settings))
    }

    /// Marks that the pods of a node need not be known, unless what follows wants them.
    pub(super) fn forget_wish_for_pods(&mut self, name: &str) {
        let entry = self.nodes.get_mut(name);
        if let Some(state) = entry.and_then(|entry| entry.drain.as_mut()) {
            state.wanted = false;
        }
    }

    /// Has the pods of a node told, or not told any more, as is wanted.
    pub(super) fn follow_pods(&mut self, name: &str) {
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        let Some(state) = entry.drain.as_mut() else {
            return;
        };
        let follow = state.wanted;
        let changes = state.followed != follow;
        if changes {
            let mut tries = std::mem::take(&mut state.tries);
            // Their answers are still to come.
            tries.retain(|_, one| one.in_flight);
            **state = DrainState {
                wanted: follow,
                followed: follow,
                tries,
                ..DrainState::default()
            };
        }
        if !follow && !state.tries.values().any(|one| one.in_flight) {
            entry.drain = None;
        }
        if !changes {
            return;
        }
        let node = name.to_owned();
        self.agenda.effects.push(Effect::Pods { node, follow });
    }

    /// Removes the pods of a node that are to leave now. `begins`: at the last look the node did not say
    /// that it is being drained.
    pub(super) fn look_at_pods(
        &mut self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
        begins: bool,
    ) {
        let now = self.common.now;
        let Some(own) = observed.own.as_deref() else {
            return;
        };
        let phase_fits = self.session(name).is_some_and(|one| one.phase.is_out());
        let drain = self.wanted_drain(name, own, desired).filter(|_| phase_fits);
        let (Some((drain, uuids)), Some(config)) = (drain, self.common.settings.drain.clone())
        else {
            return;
        };
        let mark = own.mark.drain_of(&uuids);
        if mark.is_some_and(|mark| mark.done.is_some()) {
            return;
        }
        let gpus = self.gpus(name, &uuids);
        let veto = self.veto(name).cloned();
        let handed_over = is_handed_over(&observed.view.labels);
        let state = self.drain_mut(name);
        state.wanted = true;
        let waits = handed_over.then_some(HANDED_OVER);
        let waits = waits.or_else(|| own.lacks_a_deed(&observed.view).then_some(NOT_OUT));
        if let Some(waits) = waits {
            state.awaits = Some(waits.to_owned());
            return;
        }
        if let Some(custom) = self.custom_of(name) {
            return self.look_at_custom(observed, own, desired, &custom, drain);
        }
        let state = self.drain_mut(name);
        let unseen_at = state.look_for_pods(now);
        if !state.listed {
            state.awaits = Some(match &state.failing {
                Some(why) => format!("its pods to be read: {why}"),
                None => "its pods to be read".to_owned(),
            });
            state.wake = unseen_at.filter(|at| *at > now);
            return self.ask_about_pods(name, &[], drain, &config);
        }
        let gangs = state.gangs(drain, gpus.as_ref(), &config, now);
        let leaving: Vec<(PodView, DrainMode, Next)> =
            (state.leaving(drain, gpus.as_ref(), &config, now))
                .map(|(pod, mode, next)| (pod.clone(), mode, next))
                .collect();
        let wakes = leaving
            .iter()
            .map(|(pod, _, next)| wake_at(pod, *next, &gangs, drain, &config));
        let asks_at = [ASK_AFTER, config.ask_after].map(|by| drain.since.checked_add(by).ok());
        let asks_at = asks_at.into_iter().flatten();
        let retries = state.tries.values().filter_map(|one| one.not_before);
        let settles = own.since.max(state.watched_again);
        let settles = settles.and_then(|since| since.checked_add(SETTLES).ok());
        let times = wakes.flatten().chain(asks_at).chain(retries);
        let times = times.chain(settles).chain(unseen_at);
        state.wake = times.filter(|at| *at > now).min();
        let held = veto.map_or_else(String::new, |veto| format!("the end of {veto}; then "));
        let awaited = match &state.failing {
            Some(why) if leaving.is_empty() => format!("its pods to be read: {why}"),
            _ => awaits(&leaving, &state.tries),
        };
        state.awaits = Some(format!("{held}{awaited}"));
        // The node is to say first that it is being drained: who comes after us sees it.
        if mark.is_none() {
            return self.ask_about_pods(name, &[], drain, &config);
        }
        if begins {
            self.note_drain(name, drain, gpus.as_ref(), &config);
        }
        self.ask_about_pods(name, &leaving, drain, &config);
        self.tell_who_is_waited_for(name, &leaving, drain.since);
        if self.veto(name).is_some() {
            return; // Each eviction is a beginning of its own.
        }
        for (pod, mode, next) in leaving {
            let evict = match next {
                Next::Evict(grace) => Some(grace),
                Next::Delete => None,
                Next::AskCheckpoint => {
                    self.ask_for_checkpoint(name, &pod);
                    continue;
                }
                Next::Wait(_)
                | Next::Ends(_)
                | Next::Stuck
                | Next::Unknown
                | Next::Checkpoint(_) => continue,
            };
            self.remove_pod(name, &pod, mode, evict);
        }
    }

    /// Removes a pod, where it is time; in a dry run goes on as if it had been done.
    fn remove_pod(
        &mut self,
        name: &str,
        pod: &PodView,
        mode: DrainMode,
        evict: Option<SignedDuration>,
    ) {
        let now = self.common.now;
        let session = self.entry(name).session.id.clone();
        if self.common.settings.mode == Mode::DryRun {
            let next = evict.map_or(Next::Delete, Next::Evict);
            let text = format!("dry run: pod {} {next} ({})", pod.title(), mode.name());
            self.log(Level::Info, Some(name), text.clone());
            let note = Note::new(EntryKind::DryRun, text);
            self.note(name, session.as_deref(), note, None);
            self.drain_mut(name).pretended.insert(pod.uid.clone());
            self.agenda.dirty.insert(name.to_owned());
            return;
        }
        if !self.drain_mut(name).begins_try(pod, now) {
            return;
        }
        if evict.is_none() && self.drain_mut(name).tells_of_deletion(&pod.uid) {
            let text = format!("pod {} {} ({})", pod.title(), Next::Delete, mode.name());
            let note = Note::new(EntryKind::Decision, text);
            self.note(name, session.as_deref(), note, Some(Level::Warn));
        }
        self.agenda
            .effects
            .push(Effect::Remove(Box::new(PlannedRemoval {
                node: name.to_owned(),
                session,
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                mode,
                evict,
            })));
    }
}

#[cfg(test)]
mod tests;
