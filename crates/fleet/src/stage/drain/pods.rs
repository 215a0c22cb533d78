//! The pods of a node that is drained, as the watch tells of them, and the removals that were asked for.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use model::listing::Listing;

use super::{ASK_AFTER, DrainOrder, MAX_AT_ONCE};
use crate::drain::{DrainMode, Fate, Gangs, Next, PodView};
use crate::{EventReason, PodNews};

/// The pods of a node that is drained, and what was asked of them.
#[derive(Debug, Default)]
pub(super) struct NodePods {
    /// True while its pods are to be known.
    pub(super) wanted: bool,
    /// True while somebody tells of its pods.
    pub(super) followed: bool,
    /// The pods by `NAMESPACE/NAME`, as far as they were told.
    pub(super) pods: Listing<String, PodView>,
    /// The reason why they cannot be seen.
    pub(super) failing: Option<String>,
    /// Since when they cannot be seen while that is wanted.
    pub(super) unseen_since: Option<Timestamp>,
    /// The time since which they are watched again, without a list of all since.
    pub(super) watched_again: Option<Timestamp>,
    /// The removals that were tried, by uid.
    pub(super) tries: BTreeMap<String, Try>,
    /// Uids of pods that a dry run pretends to have removed.
    pub(super) pretended: BTreeSet<String>,
    /// Uids of pods for which a person was asked.
    pub(super) asked: BTreeSet<String>,
    /// True if one was asked about pods that cannot be seen.
    pub(super) asked_unseen: bool,
    /// The pods that do not leave by themselves, for people; `None` where there are none.
    pub(super) stuck: Option<String>,
    /// What was last told of who is waited for, and when, by reason.
    pub(super) told: BTreeMap<EventReason, (String, Timestamp)>,
    /// The text of who is to leave, for people.
    pub(super) awaits: Option<String>,
    /// The time at which it is to be looked at even if nothing happens.
    pub(super) wake: Option<Timestamp>,
}

/// A removal that was tried.
#[derive(Debug, Default)]
pub(super) struct Try {
    pub(super) in_flight: bool,
    /// Number of attempts in a row that did not succeed.
    pub(super) failures: u32,
    pub(super) not_before: Option<Timestamp>,
    /// Since when it does not succeed, and why.
    pub(super) trouble: Option<(Timestamp, String)>,
    /// True once its story says that it is deleted without time to end.
    told: bool,
}

// === impl NodePods ===

impl NodePods {
    /// Takes news in.
    pub(super) fn take(&mut self, news: PodNews, now: Timestamp) {
        match news {
            PodNews::ListBegun => self.pods.begin(),
            PodNews::Seen(pod) => drop(self.pods.set(pod.title(), *pod)),
            PodNews::Gone(title) => drop(self.pods.remove(&title)),
            PodNews::Listed => {
                self.pods.end();
                (self.failing, self.watched_again) = (None, None);
            }
            PodNews::Failing(why) => self.failing = Some(why),
            PodNews::Recovered => (self.failing, self.watched_again) = (None, Some(now)),
        }
        let uids: BTreeSet<&str> = self.pods.values().map(|pod| pod.uid.as_str()).collect();
        self.tries
            .retain(|uid, one| one.in_flight || uids.contains(uid.as_str()));
    }

    /// Returns whether the pods are known as they are now. What was known before the watch broke off does not
    /// count: a node that somebody has let in meanwhile may have got others.
    pub(super) fn sees_pods(&self) -> bool {
        self.pods.is_complete() && !self.pods.is_coming() && self.failing.is_none()
    }

    /// Takes in whether the pods can be seen. Returns when a person is asked where they cannot be.
    pub(super) fn look_for_pods(&mut self, now: Timestamp) -> Option<Timestamp> {
        if self.sees_pods() {
            self.unseen_since = None;
        } else {
            self.unseen_since.get_or_insert(now);
        }
        self.unseen_since.map(|since| since + ASK_AFTER)
    }

    /// Returns why a person is asked about pods that cannot be seen; `None`: none is.
    pub(super) fn unseen(&self, now: Timestamp) -> Option<String> {
        let since = self.unseen_since?;
        let why = self.failing.as_deref().unwrap_or("no answer yet");
        (now.duration_since(since) >= ASK_AFTER).then(|| format!("its pods cannot be read: {why}"))
    }

    /// Takes in that the clock was put back.
    pub(super) fn clock_moved_back(&mut self, now: Timestamp) {
        self.watched_again = self.watched_again.map(|since| since.min(now));
        self.unseen_since = self.unseen_since.map(|since| since.min(now));
        self.told
            .values_mut()
            .for_each(|(_, at)| *at = (*at).min(now));
        for one in self.tries.values_mut() {
            one.not_before = None;
            if let Some((since, _)) = &mut one.trouble {
                *since = (*since).min(now);
            }
        }
    }

    /// Takes in that what is under way will not be answered.
    pub(super) fn answers_lost(&mut self) {
        for one in self.tries.values_mut() {
            one.in_flight = false;
        }
    }

    /// Returns the pods that a dry run does not pretend to have removed.
    fn there(&self) -> impl Iterator<Item = &PodView> {
        let pods = self.pods.values();
        pods.filter(|pod| !self.pretended.contains(&pod.uid))
    }

    /// Takes in that something is asked of a pod now; `false`: it is not time for that.
    pub(super) fn begins_try(&mut self, pod: &PodView, now: Timestamp) -> bool {
        let tries = &mut self.tries;
        let under_way = tries.values().filter(|one| one.in_flight).count();
        let known = tries.get(&pod.uid);
        let waits =
            known.is_some_and(|one| one.in_flight || one.not_before.is_some_and(|at| now < at));
        // Looked at again when an answer is there.
        if waits || under_way >= MAX_AT_ONCE {
            return false;
        }
        let one = tries.entry(pod.uid.clone()).or_default();
        (one.in_flight, one.not_before) = (true, None);
        true
    }

    /// Returns whether its story is to say now that a pod is deleted without time to end: once.
    pub(super) fn tells_of_deletion(&mut self, uid: &str) -> bool {
        let one = self.tries.get_mut(uid);
        one.is_some_and(|one| !std::mem::replace(&mut one.told, true))
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

    /// Returns the pods that leave, each with what comes next.
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
}
