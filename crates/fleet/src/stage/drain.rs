//! The drain stage: removes the pods of a node by evictions, or by a [custom resource](custom).
//!
//! A drain follows from the node's session: the node's mark says that it is being drained, and
//! then each pod gets its fate ([`crate::drain`]). So a release, an uncordon and a recovery stop
//! the drain at once, and a restarted process resumes it from the mark. The pods are watched
//! only while they are needed.

use std::ops::ControlFlow;

use jiff::{SignedDuration, Timestamp};
use model::journal::EntryKind;
use model::ownership::{DrainMark, Ownership};
use model::status::eviction::{Eviction, EvictionStatus, Skip};
use policy::assess::{Desired, DrainProgress};

use super::{Facts, Stage, StageRequests};
use crate::drain::{DrainMode, Next, PodView};
use crate::session::{JournalNote, Phase, RequestFailure, retry_after};
use crate::{Effect, PodUpdate, RemovalAnswer};

pub(crate) mod custom;
mod messages;
mod order;
mod pods;

use custom::CustomState;
use messages::awaits;
use order::{DrainOrder, skips_drain, waits_for_others};
pub(in crate::stage) use order::{custom_of, drained_gpus};
use pods::NodePods;

/// Most pods of one node with a removal in flight at once.
const MAX_AT_ONCE: usize = 8;
/// Wait for the watch to deliver that an evicted pod is ending.
const WATCH_DELAY: SignedDuration = SignedDuration::from_secs(10);
/// First and longest wait before an eviction is retried that a disruption budget refuses.
const REFUSED_RETRY: (SignedDuration, SignedDuration) =
    (SignedDuration::from_secs(1), SignedDuration::from_secs(30));
/// Delay until every scheduler has observed the cordon; before, one may still bind a pod to the
/// node.
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
    /// True if a veto was the reason at the last look why all pods stay.
    vetoed: bool,
    /// True if the session was draining before the last look.
    begun: bool,
}

/// A pod that leaves, its mode, and what happens to it next.
type Leaving = (PodView, DrainMode, Next);

// === impl DrainState ===

impl DrainState {
    /// Handles a change of the pods. Returns whether to look at the node; during a list, only
    /// once the list is complete.
    pub(crate) fn update_pods(&mut self, update: PodUpdate, now: Timestamp) -> bool {
        let Some(node_pods) = self.pods.as_mut().filter(|pods| pods.watched) else {
            return false;
        };
        let was_arriving = node_pods.pods.is_arriving();
        node_pods.update(update, now);
        !was_arriving || !node_pods.pods.is_arriving()
    }

    /// Handles the answer to the removal of a pod. Returns whether to look at the node.
    pub(crate) fn removal_answered(
        &mut self,
        uid: &str,
        answer: RemovalAnswer,
        requests: &mut StageRequests<'_>,
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
                let failure = RequestFailure::Error {
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
                "is not evicted"
            } else {
                "could not be removed"
            };
            let text = format!("pod {pod} {what}: {why}; it is tried again");
            requests.journal(JournalNote::new(EntryKind::Answer, text), None);
        }
        true
    }

    /// Returns the progress of the drain at the last look, for the records of the node's events.
    pub(crate) fn eviction(&self) -> Option<&Eviction> {
        self.eviction.as_deref()
    }

    /// Returns whether a veto was the reason at the last look why all pods stay.
    pub(crate) fn is_vetoed(&self) -> bool {
        self.vetoed
    }

    fn pods_mut(&mut self) -> &mut NodePods {
        self.pods.get_or_insert_default()
    }

    /// Updates the progress of the drain, and journals why all pods stay although drains are on.
    fn journal_eviction(
        &mut self,
        facts: &Facts<'_>,
        desired: &Desired,
        requests: &mut StageRequests<'_>,
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

    /// Returns the progress of the drain of an out-of-service node, and notes whether a veto holds
    /// it back.
    fn eviction_now(&mut self, facts: &Facts<'_>, desired: &Desired) -> Option<Eviction> {
        self.vetoed = false;
        let (_, own) = facts
            .session_on_node()
            .filter(|(_, own)| own.takes_node_out())?;
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
                Some(skip) if desired.takes_node_out() => {
                    self.vetoed = matches!(skip, Skip::Veto(_));
                    Eviction::skipped(&skip)
                }
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
        requests: &mut StageRequests<'_>,
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
        requests: &mut StageRequests<'_>,
    ) -> ControlFlow<()> {
        self.begun = facts.session.phase == Phase::Draining;
        if let Some((_, own)) = facts.session_on_node() {
            let wanted = drained_gpus(facts, own, desired);
            let gpus = wanted.unwrap_or_else(|| own.mark.drain_gpus.clone());
            if let Some(progress) = self.progress(facts, own, desired, &gpus) {
                (desired.drain, desired.drain_gpus) = (Some(progress), gpus);
            }
        }
        self.journal_eviction(facts, desired, requests);
        ControlFlow::Continue(())
    }

    /// Removes the pods that are to leave now.
    fn act(&mut self, facts: &Facts<'_>, desired: &Desired, requests: &mut StageRequests<'_>) {
        let begins = !self.begun;
        if let Some((_, own)) = facts
            .session_on_node()
            .filter(|_| facts.session.phase.is_out())
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
    fn settle(&mut self, requests: &mut StageRequests<'_>) {
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

    fn awaits(&self) -> Option<&str> {
        self.pods.as_ref()?.awaits.as_deref()
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

#[cfg(test)]
mod tests;
