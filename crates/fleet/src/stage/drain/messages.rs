//! Messages about a drain: the pods it waits for, the fate of each pod, and when a person is
//! asked.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use model::journal::EntryKind;
use serde_json::json;

use super::pods::{NodePods, Try};
use super::{ASK_AFTER, DrainOrder, Leaving, StageRequests};
use crate::drain::{Fate, Next, Stay};
use crate::session::JournalNote;
use crate::{Effect, EventReason};

/// Most pods named in one line of a journal.
const PODS_NAMED: usize = 10;
/// Longest message of an Event that Kubernetes accepts.
const EVENT_CHARS: usize = 1024;
/// Shortest time between two Events about the pods waited for: pods end one after the other.
const EMIT_INTERVAL: SignedDuration = SignedDuration::from_mins(1);

impl NodePods {
    /// Asks a person about pods that do not leave by themselves, once for each, and if the pods
    /// cannot be read.
    pub(super) fn ask_about(
        &mut self,
        leaving: &[Leaving],
        order: &DrainOrder<'_>,
        requests: &mut StageRequests<'_>,
    ) {
        let now = requests.now();
        let since_begin = now.duration_since(order.drain.since);
        let (late, unknown) = (
            since_begin >= order.config.ask_after,
            since_begin >= ASK_AFTER,
        );
        let mut texts = Vec::new();
        let unreadable = self.unreadable(now);
        let mut is_new = unreadable.is_some() && !self.asked_unreadable;
        self.asked_unreadable = unreadable.is_some();
        texts.extend(unreadable);
        for (pod, _, next) in leaving {
            let trouble = (self.tries.get(&pod.uid)).and_then(|one| one.trouble.as_ref());
            let refused = trouble.filter(|(since, _)| now.duration_since(*since) >= ASK_AFTER);
            let why = match (next, refused) {
                (Next::Stuck, _) => "its kubelet does not say that it has ended".to_owned(),
                (Next::Unknown, _) if unknown => {
                    "which GPUs it has is not written on it".to_owned()
                }
                (Next::Wait(None), _) if late => "it has not ended by itself".to_owned(),
                (_, Some((_, why))) => why.clone(),
                _ => continue,
            };
            is_new |= self.asked.insert(pod.uid.clone());
            texts.push(format!("{}: {why}", pod.title()));
        }
        let more = texts.len().saturating_sub(PODS_NAMED);
        texts.truncate(PODS_NAMED);
        let more = if more > 0 {
            format!("; and {more} more")
        } else {
            String::new()
        };
        let stuck = (!texts.is_empty()).then(|| format!("{}{more}", texts.join("; ")));
        self.set_stuck(stuck.as_deref(), requests);
        if let Some(stuck) = stuck.filter(|_| is_new) {
            requests.call_attention(format!(
                "the drain makes no progress: {stuck}; end the pods by hand, or release the node"
            ));
        }
    }

    /// Sets why the drain makes no progress; `None` if it does.
    pub(super) fn set_stuck(&mut self, stuck: Option<&str>, requests: &mut StageRequests<'_>) {
        if self.stuck.as_deref() != stuck {
            self.stuck = stuck.map(str::to_owned);
            requests.look_again(); // The records of the events repeat it.
        }
    }

    /// Emits Events of the node about the pods waited for, in NVSentinel's words.
    pub(super) fn emit_waiting_events(
        &mut self,
        leaving: &[Leaving],
        since: Timestamp,
        requests: &mut StageRequests<'_>,
    ) {
        let now = requests.now();
        let mut ends = Vec::new();
        let mut timed: Option<(Vec<String>, BTreeSet<&str>, Timestamp)> = None;
        for (pod, _, next) in leaving {
            match next {
                Next::Wait(None) => ends.push(pod.title()),
                Next::Wait(Some(until)) => {
                    let (pods, namespaces, last) =
                        timed.get_or_insert((Vec::new(), BTreeSet::new(), *until));
                    pods.push(pod.title());
                    namespaces.insert(&pod.namespace);
                    *last = (*last).max(*until);
                }
                _ => {}
            }
        }
        ends.sort_unstable();
        let ends = (!ends.is_empty())
            .then(|| format!("Waiting for following pods to finish: [{}]", ends.join(" ")));
        let timed = timed.map(|(mut pods, namespaces, last)| {
            pods.sort_unstable();
            let namespaces: Vec<&str> = namespaces.into_iter().collect();
            format!(
                "Waiting for following pods to finish: [{}] in namespaces: [{}] or they will be force \
                 deleted on: {last:.0}",
                pods.join(" "),
                namespaces.join(" ")
            )
        });
        for (reason, message) in [
            (EventReason::AwaitingPodCompletion, ends),
            (EventReason::WaitingBeforeForceDelete, timed),
        ] {
            let Some(message) = message else {
                continue;
            };
            let message: String = message.chars().take(EVENT_CHARS).collect();
            if let Some((text, at)) = self.emitted.get(&reason) {
                let again = *at + EMIT_INTERVAL;
                if *text == message {
                    continue;
                }
                if now < again {
                    self.wake = Some(self.wake.map_or(again, |wake| wake.min(again)));
                    continue;
                }
            }
            self.emitted.insert(reason, (message.clone(), now));
            requests.effect(Effect::EmitEvent {
                node: requests.node().to_owned(),
                since,
                reason,
                message,
            });
        }
    }

    /// Journals the fate of each pod at the begin of a drain.
    pub(super) fn journal_begin(&self, order: &DrainOrder<'_>, requests: &mut StageRequests<'_>) {
        let now = requests.now();
        let mut leave: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        let mut stay: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let gangs = self.gangs(order, now);
        for pod in self.pods.values() {
            match order.fate_of(pod, &gangs, now) {
                Fate::Leaves(mode, _) => leave.entry(mode.name()).or_default().push(pod.title()),
                Fate::Stays(Stay::Finished) => {}
                Fate::Stays(why) => stay.entry(why.to_string()).or_default().push(pod.title()),
            }
        }
        let line = |(what, pods): (&str, &Vec<String>)| format!("{what}: {}", named(pods));
        let parts: Vec<String> = (leave.iter().map(|(mode, pods)| line((mode, pods))))
            .chain(
                stay.iter()
                    .map(|(why, pods)| line((&format!("stays, {why}"), pods))),
            )
            .collect();
        let note = JournalNote {
            kind: EntryKind::Session,
            text: format!("the drain begins: {}", parts.join("; ")),
            detail: json!({"leave": leave, "stay": stay}),
        };
        requests.journal(note, None);
    }
}

/// Returns what a drain waits for, for people.
pub(super) fn awaits(leaving: &[Leaving], tries: &BTreeMap<String, Try>) -> String {
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

/// Returns the names of pods, up to [`PODS_NAMED`].
fn named(pods: &[String]) -> String {
    let shown: Vec<&str> = pods.iter().take(PODS_NAMED).map(String::as_str).collect();
    match pods.len().saturating_sub(PODS_NAMED) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
