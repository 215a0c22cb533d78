//! The drain stage: removes the pods of a node by evictions, or by a [custom resource](custom).
//!
//! A drain follows from the node's session: the node's mark says that it is being drained, and
//! then each pod gets its [`crate::drain::fate`]. So a release, an uncordon and a recovery stop
//! the drain at once, and a restarted process resumes it from the mark. The pods are watched
//! only while they are needed.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use model::device::{DeviceTaint, TaintEffect};
use model::journal::EntryKind;
use model::mode::Mode;
use model::node::HANDED_OVER;
use model::ownership::{DrainMark, Ownership};
use policy::assess::{Desired, DrainProgress};

use super::remediation::NOT_OUT;
use super::{Facts, Requests, Stage};
use crate::drain::partial::{Gpus, fate_of};
use crate::drain::{
    CustomDrain, Drain, DrainConfig, DrainMode, Fate, Gangs, Next, PodView, wake_at,
};
use crate::session::{Failure, JournalNote, Phase, retry_after};
use crate::status::eviction::{Eviction, EvictionStatus, Skip};
use crate::{Effect, Level, PlannedCheckpoint, PlannedRemoval, PodUpdate, RemovalAnswer};

pub(crate) mod custom;
mod messages;
mod pods;

use custom::CustomState;
use messages::awaits;
use pods::NodePods;

/// Most pods of one node with a removal in flight at once.
const MAX_AT_ONCE: usize = 8;
/// Wait for the watch to deliver that an evicted pod is ending.
const WATCH_DELAY: SignedDuration = SignedDuration::from_secs(10);
/// First and longest wait before an eviction is retried that a disruption budget refuses.
const REFUSED_RETRY: (SignedDuration, SignedDuration) =
    (SignedDuration::from_secs(1), SignedDuration::from_secs(30));
/// Time after the cordon until no scheduler binds a pod to the node because it has not observed
/// the cordon.
const SCHEDULER_LAG: SignedDuration = SignedDuration::from_secs(1);
/// Time that a pod's eviction may be refused, or fail, before a person is asked.
const ASK_AFTER: SignedDuration = SignedDuration::from_mins(5);

/// State of the drain of one node.
#[derive(Debug, Default)]
pub(crate) struct DrainState {
    /// The pods, while they are needed or an answer about one is missing.
    pods: Option<Box<NodePods>>,
    /// The custom resource that drains the node, if one does.
    pub(crate) custom: CustomState,
    /// Progress of the drain at the last look, for the records of the node's events.
    eviction: Option<Box<Eviction>>,
    /// True if the node's mark said at the last look that it is being drained.
    begun: bool,
}

/// A drain to carry out, and its configuration.
struct DrainOrder<'a> {
    drain: Drain,
    /// UUIDs of the GPUs whose pods leave; empty if all pods leave.
    uuids: Vec<String>,
    /// State of these GPUs, with the pods that hold them; `None` if all pods leave.
    gpus: Option<Gpus>,
    config: &'a DrainConfig,
}

/// A pod that leaves, its mode, and what happens to it next.
type Leaving = (PodView, DrainMode, Next);

// === impl DrainOrder ===

impl<'a> DrainOrder<'a> {
    /// Returns the drain of a node, as the settings and the senders of its faults ask for it;
    /// `own` says what of the node is out of service.
    fn of(facts: &Facts<'a>, own: &Ownership, desired: &Desired) -> Option<Self> {
        let uuids = drained_gpus(facts, own, desired)?;
        if skips_drain(facts, own, desired).is_some() {
            return None;
        }
        let (fleet, now) = (facts.state, facts.state.now);
        let mark = own.mark.drain_of(&uuids);
        Some(Self {
            drain: Drain {
                since: mark.map_or(now, |mark| mark.since.min(now)),
                force: desired.drains()?,
            },
            gpus: (!uuids.is_empty()).then(|| fleet.devices.gpus(facts.name, &uuids)),
            uuids,
            config: fleet.settings.drain.as_deref()?,
        })
    }

    fn fate_of(&self, pod: &PodView, gangs: &Gangs, now: Timestamp) -> Fate {
        fate_of(pod, gangs, self.drain, self.gpus.as_ref(), self.config, now)
    }
}

// === impl DrainState ===

impl DrainState {
    /// Handles a change of the pods. Returns whether to look at the node; during a list, only
    /// once the list is complete.
    pub(crate) fn update_pods(&mut self, update: PodUpdate, now: Timestamp) -> bool {
        let Some(pods) = self.pods.as_mut().filter(|pods| pods.watched) else {
            return false;
        };
        let listing = pods.pods.is_coming();
        pods.update(update, now);
        !listing || !pods.pods.is_coming()
    }

    /// Handles the answer to the removal of a pod. Returns whether to look at the node.
    pub(crate) fn removal_answered(
        &mut self,
        uid: &str,
        answer: RemovalAnswer,
        requests: &mut Requests<'_>,
    ) -> bool {
        let now = requests.now();
        let Some(pods) = self.pods.as_mut() else {
            return false;
        };
        let Some(one) = pods.tries.get_mut(uid) else {
            return false;
        };
        one.in_flight = false;
        let (why, wait, held) = match answer {
            RemovalAnswer::Taken | RemovalAnswer::Gone => {
                (one.failures, one.trouble) = (0, None);
                one.not_before = Some(now + WATCH_DELAY);
                return true;
            }
            RemovalAnswer::Held { why, retry_after } => {
                one.failures = one.failures.saturating_add(1);
                let wait = REFUSED_RETRY.0 * (1 << one.failures.min(5));
                let wait = wait
                    .max(retry_after.unwrap_or_default())
                    .min(REFUSED_RETRY.1);
                (why, wait, true)
            }
            RemovalAnswer::Failed {
                why,
                retry_after: server_wait,
            } => {
                one.failures = one.failures.saturating_add(1);
                let failure = Failure::Error {
                    retry_after: server_wait,
                };
                (why, retry_after(one.failures, failure), false)
            }
        };
        one.not_before = Some(now + wait);
        let before = one.trouble.take();
        let is_new = before.as_ref().is_none_or(|(_, before)| *before != why);
        let since = before.map_or(now, |(since, _)| since);
        one.trouble = Some((since, why.clone()));
        if is_new {
            let pod = pods.pods.values().find(|pod| pod.uid == uid);
            let pod = pod.map_or_else(|| uid.to_owned(), PodView::title);
            let what = if held {
                "is not let go"
            } else {
                "could not be removed"
            };
            let text = format!("pod {pod} {what}: {why}; it is tried again");
            requests.journal(JournalNote::new(EntryKind::Answer, text), None);
        }
        true
    }

    /// Returns what the drain waits for, for people; `None` while no drain is under way.
    pub(crate) fn awaits(&self) -> Option<&str> {
        self.pods.as_ref()?.awaits.as_deref()
    }

    /// Returns the progress of the drain at the last look, for the records of the node's events.
    pub(crate) fn eviction(&self) -> Option<&Eviction> {
        self.eviction.as_deref()
    }

    fn pods_mut(&mut self) -> &mut NodePods {
        self.pods.get_or_insert_default()
    }

    /// Updates the progress of the drain, and journals why all pods stay although drains are on.
    fn journal_eviction(
        &mut self,
        facts: &Facts<'_>,
        desired: &Desired,
        requests: &mut Requests<'_>,
    ) {
        let eviction = self.eviction_now(facts, desired);
        if self.eviction() == eviction.as_ref() {
            return;
        }
        let drains = facts.state.settings.drain.is_some();
        if let Some(why) = (eviction.as_ref()).filter(|one| drains && one.is_skipped()) {
            let note = JournalNote::new(EntryKind::Session, why.message.clone());
            requests.journal(note, None);
        }
        self.eviction = eviction.map(Box::new);
    }

    /// Returns the progress of the drain of an out-of-service node.
    fn eviction_now(&self, facts: &Facts<'_>, desired: &Desired) -> Option<Eviction> {
        let (_, own) = facts.ours().filter(|(_, own)| own.takes_node_out())?;
        let stuck = self.pods.as_ref().and_then(|pods| pods.stuck.as_deref());
        let mark = match desired.drain {
            Some(_) => own.mark.drain_of(&desired.drain_gpus),
            None => own.mark.drain,
        };
        Some(match (mark, stuck) {
            (Some(DrainMark { done: Some(_), .. }), _) => {
                let text = "all pods that were to leave have left";
                Eviction::new(EvictionStatus::Succeeded, text)
            }
            (Some(_), Some(stuck)) => Eviction::new(EvictionStatus::Failed, stuck),
            (Some(_), None) => Eviction::new(EvictionStatus::InProgress, ""),
            (None, _) => match skips_drain(facts, own, desired) {
                Some(skip) if desired.takes_node_out() => Eviction::skipped(&skip),
                _ => Eviction::new(EvictionStatus::NotStarted, ""),
            },
        })
    }

    /// Returns the progress that the mark should record, by the state of the pods. `gpus` are
    /// the GPUs whose pods leave; empty if all pods leave.
    fn progress(
        &self,
        facts: &Facts<'_>,
        own: &Ownership,
        desired: &Desired,
        gpus: &[String],
    ) -> Option<DrainProgress> {
        let mark = own.mark.drain_of(gpus);
        // A completed drain stays completed, whatever the settings say now.
        if mark.is_some_and(|mark| mark.done.is_some()) && desired.drains().is_some() {
            return Some(DrainProgress::Drained);
        }
        let begun = mark.map(|_| DrainProgress::Draining);
        if waits_for_others(facts, own).is_some() {
            return begun;
        }
        let order = DrainOrder::of(facts, own, desired)?;
        if let Some(custom) = custom_of(facts) {
            let done = self.custom.is_done(facts.name, own, &custom);
            return Some(if done {
                DrainProgress::Drained
            } else {
                DrainProgress::Draining
            });
        }
        let now = facts.state.now;
        let Some(pods) = self.pods.as_ref().filter(|pods| pods.has_current_pods()) else {
            return begun;
        };
        if pods.leaving(&order, now).next().is_some() {
            return Some(DrainProgress::Draining);
        }
        // Changes missed while the watch was broken arrive after its recovery is reported.
        let settled = (own.since.max(pods.watch_recovered_at))
            .is_none_or(|since| now.duration_since(since) >= SCHEDULER_LAG);
        if settled {
            Some(DrainProgress::Drained)
        } else {
            begun
        }
    }

    /// Evicts or deletes the pods that are to leave now. `begins` is true if the node's mark did
    /// not say at the last look that it is being drained.
    fn remove_pods(
        &mut self,
        facts: &Facts<'_>,
        own: &Ownership,
        order: &DrainOrder<'_>,
        (mark, begins): (Option<DrainMark>, bool),
        requests: &mut Requests<'_>,
    ) {
        let now = facts.state.now;
        let pods = self.pods_mut();
        let ask_at = pods.update_unreadable(now);
        if !pods.pods.is_complete() {
            pods.awaits = Some(match &pods.failing {
                Some(why) => format!("its pods to be read: {why}"),
                None => "its pods to be read".to_owned(),
            });
            pods.wake = ask_at.filter(|at| *at > now);
            return pods.ask_about(&[], order, requests);
        }
        let leaving: Vec<Leaving> = (pods.leaving(order, now))
            .map(|(pod, mode, next)| (pod.clone(), mode, next))
            .collect();
        pods.wake = pods.next_wake(&leaving, order, own, ask_at, now);
        let held = facts.veto.map(|veto| format!("the end of {veto}; then "));
        let awaited = match &pods.failing {
            Some(why) if leaving.is_empty() => format!("its pods to be read: {why}"),
            _ => awaits(&leaving, &pods.tries),
        };
        pods.awaits = Some(format!("{}{awaited}", held.unwrap_or_default()));
        // The node's mark comes first, so that a successor sees the drain.
        if mark.is_none() {
            return pods.ask_about(&[], order, requests);
        }
        if begins {
            pods.journal_begin(order, requests);
        }
        pods.ask_about(&leaving, order, requests);
        if facts.state.acts() {
            pods.emit_waiting_events(&leaving, order.drain.since, requests);
        }
        if facts.veto.is_some() {
            return; // Each eviction is an act of its own that a veto holds back.
        }
        for (pod, mode, next) in leaving {
            let evict = match next {
                Next::Evict(grace) => Some(grace),
                Next::Delete => None,
                Next::AskCheckpoint => {
                    pods.ask_for_checkpoint(&pod, facts, requests);
                    continue;
                }
                Next::Wait(_)
                | Next::Ends(_)
                | Next::Stuck
                | Next::Unknown
                | Next::Checkpoint(_) => continue,
            };
            pods.remove(&pod, mode, evict, facts, requests);
        }
    }
}

impl Stage for DrainState {
    fn begin(&mut self) {
        if let Some(pods) = &mut self.pods {
            pods.wanted = false;
        }
        self.custom.begin();
    }

    /// Sets the progress of the drain, and the GPUs whose pods leave.
    fn plan(
        &mut self,
        facts: &Facts<'_>,
        desired: &mut Desired,
        requests: &mut Requests<'_>,
    ) -> ControlFlow<()> {
        self.begun = facts.session.phase == Phase::Draining;
        if let Some((_, own)) = facts.ours() {
            let wanted = drained_gpus(facts, own, desired);
            let gpus = wanted.unwrap_or_else(|| own.mark.drain_gpus.clone());
            if let Some(stage) = self.progress(facts, own, desired, &gpus) {
                (desired.drain, desired.drain_gpus) = (Some(stage), gpus);
            }
        }
        self.journal_eviction(facts, desired, requests);
        ControlFlow::Continue(())
    }

    /// Removes the pods that are to leave now.
    fn act(&mut self, facts: &Facts<'_>, desired: &Desired, requests: &mut Requests<'_>) {
        let begins = !self.begun;
        if let Some((_, own)) = facts.ours().filter(|_| facts.session.phase.is_out())
            && let Some(order) = DrainOrder::of(facts, own, desired)
        {
            let mark = own.mark.drain_of(&order.uuids);
            if mark.is_none_or(|mark| mark.done.is_none()) {
                self.pods_mut().wanted = true;
                if let Some(waits) = waits_for_others(facts, own) {
                    self.pods_mut().awaits = Some(waits.to_owned());
                } else if let Some(custom) = custom_of(facts) {
                    self.drive_custom(facts, own, desired, &custom, &order, requests);
                } else {
                    self.remove_pods(facts, own, &order, (mark, begins), requests);
                }
            }
        }
        self.withdraw_custom(facts, desired, requests);
    }

    /// Starts or stops watching the node's pods, to match what the last look asked for.
    fn settle(&mut self, requests: &mut Requests<'_>) {
        self.custom.settle(requests);
        let Some(pods) = &mut self.pods else {
            return;
        };
        let watch = pods.wanted;
        let changes = pods.watched != watch;
        if changes {
            let mut tries = std::mem::take(&mut pods.tries);
            // The answers to these are still to come.
            tries.retain(|_, one| one.in_flight);
            **pods = NodePods {
                wanted: watch,
                watched: watch,
                tries,
                ..NodePods::default()
            };
        }
        if !watch && !pods.tries.values().any(|one| one.in_flight) {
            self.pods = None;
        }
        if changes {
            let node = requests.node().to_owned();
            requests.effect(Effect::WatchPods { node, watch });
        }
    }

    fn wake_at(&self, _now: Timestamp) -> Option<Timestamp> {
        self.pods.as_ref()?.wake
    }

    fn awaits_answer(&self) -> bool {
        false // A later drain of the node repeats the request.
    }

    fn clock_moved_back(&mut self, now: Timestamp) {
        if let Some(pods) = &mut self.pods {
            pods.clock_moved_back(now);
        }
        self.custom.clock_moved_back();
    }

    fn answers_lost(&mut self) {
        if let Some(pods) = &mut self.pods {
            pods.answers_lost();
        }
        self.custom.answers_lost();
    }
}

// === impl NodePods ===

impl NodePods {
    /// Returns when to look again if nothing happens.
    fn next_wake(
        &self,
        leaving: &[Leaving],
        order: &DrainOrder<'_>,
        own: &Ownership,
        ask_at: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let DrainOrder { drain, config, .. } = order;
        let gangs = self.gangs(order, now);
        let wakes = leaving
            .iter()
            .filter_map(|(pod, _, next)| wake_at(pod, *next, &gangs, *drain, config));
        let asks_at = [ASK_AFTER, config.ask_after];
        let asks_at = asks_at.into_iter();
        let asks_at = asks_at.filter_map(|by| drain.since.checked_add(by).ok());
        let retries = self.tries.values().filter_map(|one| one.not_before);
        let settles = own.since.max(self.watch_recovered_at);
        let settles = settles.and_then(|since| since.checked_add(SCHEDULER_LAG).ok());
        let times = wakes.chain(asks_at).chain(retries);
        let times = times.chain(settles).chain(ask_at);
        times.filter(|at| *at > now).min()
    }

    /// Removes a pod, if that is due; a dry run pretends that it has left.
    fn remove(
        &mut self,
        pod: &PodView,
        mode: DrainMode,
        evict: Option<SignedDuration>,
        facts: &Facts<'_>,
        requests: &mut Requests<'_>,
    ) {
        let next = evict.map_or(Next::Delete, Next::Evict);
        let text = format!("pod {} {next} ({})", pod.title(), mode.name());
        if facts.state.settings.mode == Mode::DryRun {
            return self.pretend(pod, &text, requests);
        }
        if !self.begins_try(pod, requests.now()) {
            return;
        }
        if evict.is_none() && self.journals_deletion(&pod.uid) {
            let note = JournalNote::new(EntryKind::Decision, text);
            requests.journal(note, Some(Level::Warn));
        }
        requests.effect(Effect::RemovePod(Box::new(PlannedRemoval {
            node: facts.name.to_owned(),
            session: requests.session(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            mode,
            evict,
        })));
    }

    /// Requests that a pod writes a checkpoint, if that is due; a dry run pretends that the pod
    /// has left. [`crate::drain`] reads the pod's answer, and limits the wait.
    fn ask_for_checkpoint(
        &mut self,
        pod: &PodView,
        facts: &Facts<'_>,
        requests: &mut Requests<'_>,
    ) {
        let text = format!("pod {} {}", pod.title(), Next::AskCheckpoint);
        if facts.state.settings.mode == Mode::DryRun {
            return self.pretend(pod, &text, requests);
        }
        if !self.begins_try(pod, requests.now()) {
            return;
        }
        requests.journal(JournalNote::new(EntryKind::Session, text), None);
        requests.effect(Effect::RequestCheckpoint(Box::new(PlannedCheckpoint {
            node: facts.name.to_owned(),
            session: requests.session(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            at: requests.now(),
        })));
    }

    /// Journals what a dry run does not do to a pod, and pretends that the pod has left.
    fn pretend(&mut self, pod: &PodView, text: &str, requests: &mut Requests<'_>) {
        let text = format!("dry run: {text}");
        requests.log(Level::Info, text.clone());
        requests.journal(JournalNote::new(EntryKind::DryRun, text), None);
        self.pretended.insert(pod.uid.clone());
        requests.look_again();
    }
}

/// Returns the custom drain that applies to the node, if any.
fn custom_of(facts: &Facts<'_>) -> Option<Arc<CustomDrain>> {
    let custom = facts.state.settings.drain.as_ref()?.custom.as_ref()?;
    let applies = custom.applies_to(&facts.observed?.view.labels);
    applies.then(|| Arc::clone(custom))
}

/// Returns why the pods are left alone now, whatever is desired; `None` if they are not.
fn waits_for_others(facts: &Facts<'_>, own: &Ownership) -> Option<&'static str> {
    let view = &facts.observed?.view;
    // Pods that leave a node without its cordon could come back.
    let not_out = || own.lacks_a_deed(view).then_some(NOT_OUT);
    let handed_over = view.is_handed_over().then_some(HANDED_OVER);
    handed_over.or_else(not_out)
}

/// Returns why all pods of an out-of-service node stay; `None` if they do not.
fn skips_drain(facts: &Facts<'_>, own: &Ownership, desired: &Desired) -> Option<Skip> {
    if facts.state.settings.drain.is_none() {
        return Some(Skip::Off);
    }
    // The session has no place to record the progress of a drain.
    if own.replaced_labels.is_none() {
        return Some(Skip::Nvsentinel);
    }
    if desired.drains().is_none() {
        let route = desired.skipped_by().map(Skip::Route);
        return Some(route.unwrap_or(Skip::Override));
    }
    // A veto does not undo a drain that has begun.
    let veto = facts.veto.filter(|_| own.mark.drain.is_none());
    veto.map(|veto| Skip::Veto(veto.to_string()))
}

/// Returns the UUIDs of the GPUs whose pods are to leave; empty if all pods leave, `None` if no
/// pod does. The node is out of service, or has single devices that are.
fn drained_gpus(facts: &Facts<'_>, own: &Ownership, desired: &Desired) -> Option<Vec<String>> {
    let config = facts.state.settings.drain.as_ref()?;
    match (own.takes_node_out(), desired.takes_node_out()) {
        // Under a veto no pod is added to those that were to leave.
        (was, is) if was == is && own.mark.drain.is_some() && facts.veto.is_some() => {
            Some(own.mark.drain_gpus.clone())
        }
        // A drain that began with all pods continues with all pods.
        (true, true) if own.mark.drain.is_some() && own.mark.drain_gpus.is_empty() => {
            Some(Vec::new())
        }
        (true, true) if custom_of(facts).is_some() => Some(Vec::new()),
        (true, true) if config.partial && !facts.remediates_whole_node => {
            Some(desired.reset_gpus().unwrap_or_default())
        }
        (true, true) => Some(Vec::new()),
        (false, false) if config.partial && custom_of(facts).is_none() => {
            let known = facts.state.devices.of_node(facts.name);
            let out = |taints: &[DeviceTaint]| {
                taints.iter().any(|taint| taint.effect > TaintEffect::None)
            };
            let devices = desired.devices.iter().filter(|(_, taints)| out(taints));
            let gpus: BTreeSet<String> = devices
                .filter_map(|(device, _)| known.get(device)?.gpu.clone())
                .collect();
            (!gpus.is_empty()).then(|| gpus.into_iter().collect())
        }
        // The pending patch decides between node and devices.
        _ => None,
    }
}

#[cfg(test)]
mod tests;
