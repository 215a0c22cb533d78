//! The pods of nodes that are drained.
//!
//! A drain follows from the node's session: the node says that it is being drained, and then each of its
//! pods gets what [`fate`] says. So a release, an uncordon and a recovery stop it at once, and who starts
//! anew goes on where the node says it is. The pods are looked at only as long as that takes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::{Effect, Fleet, Level, Mode};
use crate::assess::{Desired, DrainStage};
use crate::drain::{Drain, DrainConfig, DrainMode, Fate, Next, PodView, Stay, fate, wake_at};
use crate::journal::EntryKind;
use crate::ownership::Ownership;
use crate::session::{Failure, Note, Observed, retry_after};

/// Most pods of one node of which a removal is under way at once.
const MAX_AT_ONCE: usize = 8;
/// Most pods that one line of a story names.
const PODS_NAMED: usize = 10;
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

/// The state of the drain of a node.
#[derive(Debug, Default)]
pub(super) struct DrainState {
    /// True while its pods are to be known.
    wanted: bool,
    /// True while somebody tells of its pods.
    followed: bool,
    /// The pods by `NAMESPACE/NAME`, as far as they were told.
    pods: BTreeMap<String, PodView>,
    /// Those of a list that is not complete.
    listing: Option<BTreeSet<String>>,
    /// True once a list was complete.
    listed: bool,
    /// The reason why they cannot be seen.
    failing: Option<String>,
    /// The removals that were tried, by uid.
    tries: BTreeMap<String, Try>,
    /// Uids of pods that a dry run pretends to have removed.
    pretended: BTreeSet<String>,
    /// Uids of pods for which a person was asked.
    asked: BTreeSet<String>,
    /// The text of who is to leave, for people.
    awaits: Option<String>,
    /// The time at which it is to be looked at even if nothing happens.
    wake: Option<Timestamp>,
}

/// A removal that was tried.
#[derive(Debug, Default)]
struct Try {
    in_flight: bool,
    /// Number of attempts in a row that did not succeed.
    failures: u32,
    not_before: Option<Timestamp>,
    /// Since when it does not succeed, and why.
    trouble: Option<(Timestamp, String)>,
}

// === impl DrainState ===

impl DrainState {
    /// Takes news in.
    fn take(&mut self, news: PodNews) {
        match news {
            PodNews::ListBegun => self.listing = Some(BTreeSet::new()),
            PodNews::Seen(pod) => {
                let title = pod.title();
                if let Some(listing) = &mut self.listing {
                    listing.insert(title.clone());
                }
                self.pods.insert(title, *pod);
            }
            PodNews::Gone(title) => drop(self.pods.remove(&title)),
            PodNews::Listed => {
                if let Some(listing) = self.listing.take() {
                    self.pods.retain(|title, _| listing.contains(title));
                }
                (self.listed, self.failing) = (true, None);
            }
            PodNews::Failing(why) => self.failing = Some(why),
        }
        let uids: BTreeSet<&str> = self.pods.values().map(|pod| pod.uid.as_str()).collect();
        self.tries
            .retain(|uid, one| one.in_flight || uids.contains(uid.as_str()));
    }

    /// Returns when it is to be looked at even if nothing happens.
    pub(super) fn wake_at(&self) -> Option<Timestamp> {
        self.wake
    }

    /// Returns what the drain waits for, for people; `None` where it is not under way.
    pub(super) fn awaits(&self) -> Option<&str> {
        self.awaits.as_deref()
    }

    /// Takes in that the clock was put back.
    pub(super) fn clock_put_back(&mut self, now: Timestamp) {
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

    /// Returns the pods that leave, each with what comes next.
    fn leaving<'a>(
        &'a self,
        drain: Drain,
        config: &'a DrainConfig,
        now: Timestamp,
    ) -> impl Iterator<Item = (&'a PodView, DrainMode, Next)> {
        let pods = self
            .pods
            .values()
            .filter(|pod| !self.pretended.contains(&pod.uid));
        pods.filter_map(move |pod| match fate(pod, drain, config, now) {
            Fate::Leaves(mode, next) => Some((pod, mode, next)),
            Fate::Stays(_) => None,
        })
    }
}

// === impl Fleet ===

impl Fleet {
    /// Takes news of the pods of a node in.
    pub(super) fn take_pods(&mut self, node: &str, news: PodNews) {
        let Some(entry) = self.nodes.get_mut(node).filter(|one| one.drain.followed) else {
            return;
        };
        let listing = entry.drain.listing.is_some();
        entry.drain.take(news);
        // What a list brings is looked at as a whole.
        if !listing
            || self
                .nodes
                .get(node)
                .is_some_and(|one| one.drain.listing.is_none())
        {
            self.look_again_at(node);
        }
    }

    /// Takes the answer to the removal of a pod in.
    pub(super) fn removal_answered(&mut self, node: &str, uid: &str, answer: RemovalAnswer) {
        let now = self.now;
        let Some(one) = (self.nodes.get_mut(node)).and_then(|entry| entry.drain.tries.get_mut(uid))
        else {
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
            let pod = entry.and_then(|one| one.drain.pods.values().find(|pod| pod.uid == uid));
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

    /// Returns the drain that is wanted of a node that is out of service and says so: by the switch, and
    /// by the senders of its faults.
    fn wanted_drain(&self, own: &Ownership, desired: &Desired) -> Option<Drain> {
        // A session of NVSentinel has no place to say how far its drain is.
        let asks = self.settings.drain.is_some()
            && own.takes_node_out()
            && own.replaced_labels.is_some()
            && desired.takes_node_out();
        let force = desired.drains().filter(|_| asks)?;
        let since = own
            .mark
            .drain
            .map_or(self.now, |mark| mark.since.min(self.now));
        Some(Drain { since, force })
    }

    /// Returns how far the drain of a node should be, by what is known of its pods.
    pub(super) fn drain_stage(
        &self,
        name: &str,
        own: Option<&Ownership>,
        desired: &Desired,
    ) -> Option<DrainStage> {
        let own = own?;
        let mark = own.mark.drain;
        // What is done is done, whatever the switch says now.
        if mark.is_some_and(|mark| mark.done.is_some()) && desired.drains().is_some() {
            return Some(DrainStage::Drained);
        }
        let drain = self.wanted_drain(own, desired)?;
        let (state, config) = (&self.nodes.get(name)?.drain, self.settings.drain.as_ref()?);
        if !state.listed {
            return mark.map(|_| DrainStage::Draining);
        }
        let mut leaving = state.leaving(drain, config, self.now);
        if leaving.next().is_some() {
            return Some(DrainStage::Draining);
        }
        let settled = own
            .since
            .is_none_or(|since| self.now.duration_since(since) >= SETTLES);
        let begun = mark.map(|_| DrainStage::Draining);
        if settled {
            Some(DrainStage::Drained)
        } else {
            begun
        }
    }

    /// Marks that the pods of a node need not be known, unless what follows wants them.
    pub(super) fn forget_wish_for_pods(&mut self, name: &str) {
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.drain.wanted = false;
        }
    }

    /// Has the pods of a node told, or not told any more, as is wanted.
    pub(super) fn follow_pods(&mut self, name: &str) {
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        let follow = entry.drain.wanted;
        if entry.drain.followed == follow {
            return;
        }
        let mut tries = std::mem::take(&mut entry.drain).tries;
        // Their answers are still to come.
        tries.retain(|_, one| one.in_flight);
        entry.drain = DrainState {
            wanted: follow,
            followed: follow,
            tries,
            ..DrainState::default()
        };
        let node = name.to_owned();
        self.effects.push(Effect::Pods { node, follow });
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
        let now = self.now;
        let Some(own) = observed.own.as_deref() else {
            return;
        };
        let done = own.mark.drain.is_some_and(|mark| mark.done.is_some());
        let phase_fits = self.session(name).is_some_and(|one| one.phase.is_out());
        let drain = self
            .wanted_drain(own, desired)
            .filter(|_| !done && phase_fits);
        let (Some(drain), Some(config)) = (drain, self.settings.drain.clone()) else {
            return;
        };
        let state = &mut self.entry(name).drain;
        state.wanted = true;
        if !state.listed {
            state.awaits = Some(match &state.failing {
                Some(why) => format!("its pods to be read: {why}"),
                None => "its pods to be read".to_owned(),
            });
            return;
        }
        let leaving: Vec<(PodView, DrainMode, Next)> = (state.leaving(drain, &config, now))
            .map(|(pod, mode, next)| (pod.clone(), mode, next))
            .collect();
        let wakes = leaving
            .iter()
            .map(|(pod, _, next)| wake_at(pod, *next, drain, &config));
        let asks_at = drain.since.checked_add(config.ask_after).ok();
        let retries = state.tries.values().filter_map(|one| one.not_before);
        let settles = own.since.and_then(|since| since.checked_add(SETTLES).ok());
        let times = wakes.flatten().chain(asks_at).chain(retries).chain(settles);
        state.wake = times.filter(|at| *at > now).min();
        state.awaits = Some(awaits(&leaving, &state.tries));
        // The node is to say first that it is being drained: who comes after us sees it.
        if own.mark.drain.is_none() {
            return;
        }
        if begins {
            self.note_drain(name, drain, &config);
        }
        self.ask_about_pods(name, &leaving, drain, &config);
        for (pod, mode, next) in leaving {
            let evict = match next {
                Next::Evict(grace) => Some(grace),
                Next::Delete => None,
                Next::Wait(_) | Next::Ends(_) | Next::Stuck => continue,
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
        let now = self.now;
        let session = self.entry(name).session.id.clone();
        if self.settings.mode == Mode::DryRun {
            let next = evict.map_or(Next::Delete, Next::Evict);
            let text = format!("dry run: pod {} {next} ({})", pod.title(), mode.name());
            self.log(Level::Info, Some(name), text.clone());
            let note = Note::new(EntryKind::DryRun, text);
            self.note(name, session.as_deref(), note, None);
            self.entry(name).drain.pretended.insert(pod.uid.clone());
            self.dirty.insert(name.to_owned());
            return;
        }
        let tries = &mut self.entry(name).drain.tries;
        let under_way = tries.values().filter(|one| one.in_flight).count();
        let known = tries.get(&pod.uid);
        let waits =
            known.is_some_and(|one| one.in_flight || one.not_before.is_some_and(|at| now < at));
        // Looked at again when an answer is there.
        if waits || under_way >= MAX_AT_ONCE {
            return;
        }
        let one = tries.entry(pod.uid.clone()).or_default();
        (one.in_flight, one.not_before) = (true, None);
        self.effects.push(Effect::Remove(Box::new(PlannedRemoval {
            node: name.to_owned(),
            session,
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            mode,
            evict,
        })));
    }

    /// Asks a person about pods that do not leave by themselves, once for each.
    fn ask_about_pods(
        &mut self,
        name: &str,
        leaving: &[(PodView, DrainMode, Next)],
        drain: Drain,
        config: &Arc<DrainConfig>,
    ) {
        let now = self.now;
        let state = &mut self.entry(name).drain;
        let late = now.duration_since(drain.since) >= config.ask_after;
        let mut texts = Vec::new();
        for (pod, _, next) in leaving {
            let trouble = (state.tries.get(&pod.uid)).and_then(|one| one.trouble.as_ref());
            let refused = trouble.filter(|(since, _)| now.duration_since(*since) >= ASK_AFTER);
            let why = match (next, refused) {
                (Next::Stuck, _) => "its kubelet does not say that it has ended".to_owned(),
                (Next::Wait(None), _) if late => "it has not ended by itself".to_owned(),
                (_, Some((_, why))) => why.clone(),
                _ => continue,
            };
            if state.asked.insert(pod.uid.clone()) {
                texts.push(format!("{}: {why}", pod.title()));
            }
        }
        if texts.is_empty() {
            return;
        }
        let more = texts.len().saturating_sub(PODS_NAMED);
        texts.truncate(PODS_NAMED);
        let more = if more > 0 {
            format!("; and {more} more")
        } else {
            String::new()
        };
        let text = format!(
            "the drain does not get on: {}{more}; end the pods by hand, or release the node",
            texts.join("; ")
        );
        self.call_attention(name, text);
    }

    /// Adds to the story of a node what becomes of its pods, as its drain begins.
    fn note_drain(&mut self, name: &str, drain: Drain, config: &DrainConfig) {
        let now = self.now;
        let entry = self.entry(name);
        let mut leave: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        let mut stay: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for pod in entry.drain.pods.values() {
            match fate(pod, drain, config, now) {
                Fate::Leaves(mode, _) => leave.entry(mode.name()).or_default().push(pod.title()),
                Fate::Stays(Stay::Finished) => {}
                Fate::Stays(why) => stay.entry(why.to_string()).or_default().push(pod.title()),
            }
        }
        let said = |(what, pods): (&str, &Vec<String>)| format!("{what}: {}", named(pods));
        let parts: Vec<String> = (leave.iter().map(|(mode, pods)| said((mode, pods))))
            .chain(
                stay.iter()
                    .map(|(why, pods)| said((&format!("stays, {why}"), pods))),
            )
            .collect();
        let session = entry.session.id.clone();
        let note = Note {
            kind: EntryKind::Session,
            text: format!("the drain begins: {}", parts.join("; ")),
            detail: json!({"leave": leave, "stay": stay}),
        };
        self.note(name, session.as_deref(), note, None);
    }
}

/// Returns what a drain waits for, for people.
fn awaits(leaving: &[(PodView, DrainMode, Next)], tries: &BTreeMap<String, Try>) -> String {
    let shown: Vec<String> = (leaving.iter().take(PODS_NAMED))
        .map(|(pod, mode, next)| {
            let trouble = tries.get(&pod.uid).and_then(|one| one.trouble.as_ref());
            let trouble = trouble.map_or_else(String::new, |(_, why)| format!(" ({why})"));
            format!("{} {next}, {}{trouble}", pod.title(), mode.name())
        })
        .collect();
    let more = leaving.len().saturating_sub(PODS_NAMED);
    let more = if more > 0 {
        format!("; and {more} more")
    } else {
        String::new()
    };
    match leaving.len() {
        0 => "the API server's answer to the end of the drain".to_owned(),
        1 => format!("a pod to leave: {}", shown.join("; ")),
        found => format!("{found} pods to leave: {}{more}", shown.join("; ")),
    }
}

/// Returns the names of pods, as many as a line of a story takes.
fn named(pods: &[String]) -> String {
    let shown: Vec<&str> = pods.iter().take(PODS_NAMED).map(String::as_str).collect();
    match pods.len().saturating_sub(PODS_NAMED) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
