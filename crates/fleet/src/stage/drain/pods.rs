//! Pods of a node during its drain, as delivered by the watch, and the removals requested.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use model::journal::EntryKind;
use model::listing::Listing;
use model::mode::Mode;
use model::ownership::Ownership;

use super::{ASK_AFTER, DrainOrder, Facts, Leaving, MAX_AT_ONCE, SCHEDULER_LAG, StageRequests};
use crate::drain::{DrainMode, Fate, Gangs, Next, PodView, wake_at};
use crate::session::JournalNote;
use crate::{Effect, EventReason, Level, PlannedCheckpoint, PlannedRemoval, PodUpdate};

/// Pods of a node during its drain, and the requests about them.
#[derive(Debug, Default)]
pub(super) struct NodePods {
    /// True while the drain needs the pods.
    pub(super) wanted: bool,
    /// True while the pods are watched.
    pub(super) watched: bool,
    /// Pods by `NAMESPACE/NAME`, as far as delivered.
    pub(super) pods: Listing<String, PodView>,
    /// Reason why the watch fails.
    pub(super) failing: Option<String>,
    /// Time since which the pods are needed and cannot be read.
    pub(super) unreadable_since: Option<Timestamp>,
    /// Time when the watch recovered, until the next complete list.
    pub(super) watch_recovered_at: Option<Timestamp>,
    /// Removals that were tried, by uid.
    pub(super) tries: BTreeMap<String, Try>,
    /// Uids of pods that a dry run pretends to have removed.
    pub(super) pretended: BTreeSet<String>,
    /// Uids of pods about which a person was asked.
    pub(super) asked: BTreeSet<String>,
    /// True if a person was asked about pods that cannot be read.
    pub(super) asked_unreadable: bool,
    /// Pods that do not leave by themselves, for people; `None` if there are none.
    pub(super) stuck: Option<String>,
    /// Last message about pods waited for and its time, by reason.
    pub(super) emitted: BTreeMap<EventReason, (String, Timestamp)>,
    /// Text for people about what the drain waits for.
    pub(super) awaits: Option<String>,
    /// Time of the next look if nothing happens.
    pub(super) wake: Option<Timestamp>,
}

/// A removal that was tried.
#[derive(Debug, Default)]
pub(super) struct Try {
    pub(super) in_flight: bool,
    /// Number of failed tries in a row.
    pub(super) failures: u32,
    pub(super) not_before: Option<Timestamp>,
    /// Begin of the failures, and the last reason.
    pub(super) trouble: Option<(Timestamp, String)>,
    /// True once the journal says that the pod is deleted without time to end.
    deletion_journaled: bool,
}

// === impl NodePods ===

impl NodePods {
    /// Handles a change of the pods.
    pub(super) fn update(&mut self, update: PodUpdate, now: Timestamp) {
        match update {
            PodUpdate::ListBegun => self.pods.begin(),
            PodUpdate::Observed(pod) => drop(self.pods.set(pod.title(), *pod)),
            PodUpdate::Gone(title) => drop(self.pods.remove(&title)),
            PodUpdate::Listed => {
                self.pods.end();
                (self.failing, self.watch_recovered_at) = (None, None);
            }
            PodUpdate::Failing(why) => self.failing = Some(why),
            PodUpdate::Recovered => (self.failing, self.watch_recovered_at) = (None, Some(now)),
        }
        let uids: BTreeSet<&str> = self.pods.values().map(|pod| pod.uid.as_str()).collect();
        self.tries
            .retain(|uid, one| one.in_flight || uids.contains(uid.as_str()));
    }

    /// Returns whether the current pods are known. A list from before the watch broke off does
    /// not count: a node that somebody has let in meanwhile may have new pods.
    pub(super) fn has_current_pods(&self) -> bool {
        self.pods.is_complete() && !self.pods.is_arriving() && self.failing.is_none()
    }

    /// Updates since when the pods cannot be read. Returns when a person is asked about that.
    pub(super) fn update_unreadable(&mut self, now: Timestamp) -> Option<Timestamp> {
        if self.has_current_pods() {
            self.unreadable_since = None;
        } else {
            self.unreadable_since.get_or_insert(now);
        }
        self.unreadable_since.map(|since| since + ASK_AFTER)
    }

    /// Returns why a person is asked about pods that cannot be read; `None` if nobody is.
    pub(super) fn unreadable(&self, now: Timestamp) -> Option<String> {
        let since = self.unreadable_since?;
        let why = self.failing.as_deref().unwrap_or("no answer yet");
        (now.duration_since(since) >= ASK_AFTER).then(|| format!("its pods cannot be read: {why}"))
    }

    /// Limits times to `now` after the clock was put back, and ends waits.
    pub(super) fn clock_moved_back(&mut self, now: Timestamp) {
        self.watch_recovered_at = self.watch_recovered_at.map(|since| since.min(now));
        self.unreadable_since = self.unreadable_since.map(|since| since.min(now));
        self.emitted
            .values_mut()
            .for_each(|(_, at)| *at = (*at).min(now));
        for one in self.tries.values_mut() {
            one.not_before = None;
            if let Some((since, _)) = &mut one.trouble {
                *since = (*since).min(now);
            }
        }
    }

    /// Gives up requests whose answers were lost.
    pub(super) fn answers_lost(&mut self) {
        for one in self.tries.values_mut() {
            one.in_flight = false;
        }
    }

    /// Returns the pods without those that a dry run pretends to have removed.
    fn there(&self) -> impl Iterator<Item = &PodView> {
        let pods = self.pods.values();
        pods.filter(|pod| !self.pretended.contains(&pod.uid))
    }

    /// Records that a request about a pod is made now. Returns false if it is not due.
    fn begins_try(&mut self, pod: &PodView, now: Timestamp) -> bool {
        let tries = &mut self.tries;
        let under_way = tries.values().filter(|one| one.in_flight).count();
        let last = tries.get(&pod.uid);
        let waits =
            last.is_some_and(|one| one.in_flight || one.not_before.is_some_and(|at| now < at));
        // An answer triggers another look.
        if waits || under_way >= MAX_AT_ONCE {
            return false;
        }
        let one = tries.entry(pod.uid.clone()).or_default();
        (one.in_flight, one.not_before) = (true, None);
        true
    }

    /// Returns whether to journal now that a pod is deleted without time to end; true once per
    /// pod.
    fn journals_deletion(&mut self, uid: &str) -> bool {
        let one = self.tries.get_mut(uid);
        one.is_some_and(|one| !std::mem::replace(&mut one.deletion_journaled, true))
    }

    /// Returns the gangs of the pods that leave.
    pub(super) fn gangs(&self, order: &DrainOrder<'_>, now: Timestamp) -> Gangs {
        Gangs::of(
            self.there(),
            order.drain,
            order.gpus.as_ref(),
            order.config,
            now,
        )
    }

    /// Returns the pods that leave, each with its next step.
    pub(super) fn leaving<'a>(
        &'a self,
        order: &'a DrainOrder<'_>,
        now: Timestamp,
    ) -> impl Iterator<Item = (&'a PodView, DrainMode, Next)> {
        let gangs = self.gangs(order, now);
        self.there()
            .filter_map(move |pod| match order.fate_of(pod, &gangs, now) {
                Fate::Leaves(mode, next) => Some((pod, mode, next)),
                Fate::Stays(_) => None,
            })
    }

    /// Returns when to look again if nothing happens.
    pub(super) fn next_wake(
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
    pub(super) fn remove(
        &mut self,
        pod: &PodView,
        mode: DrainMode,
        evict: Option<SignedDuration>,
        facts: &Facts<'_>,
        requests: &mut StageRequests<'_>,
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
    pub(super) fn ask_for_checkpoint(
        &mut self,
        pod: &PodView,
        facts: &Facts<'_>,
        requests: &mut StageRequests<'_>,
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
    fn pretend(&mut self, pod: &PodView, text: &str, requests: &mut StageRequests<'_>) {
        let text = format!("dry run: {text}");
        requests.log(Level::Info, text.clone());
        requests.journal(JournalNote::new(EntryKind::DryRun, text), None);
        self.pretended.insert(pod.uid.clone());
        requests.look_again();
    }
}
