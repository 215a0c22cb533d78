//! What is told of a drain: whom it waits for, what becomes of each pod, and when a person is asked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::ASK_AFTER;
use super::state::Try;
use crate::drain::partial::{Gpus, fate_of};
use crate::drain::{Drain, DrainConfig, DrainMode, Fate, Next, PodView, Stay};
use crate::fleet::{Effect, Fleet, Mode};
use crate::journal::EntryKind;
use crate::session::Note;

/// Most pods that one line of a story names.
const PODS_NAMED: usize = 10;
/// Longest message of an Event that Kubernetes takes.
const EVENT_CHARS: usize = 1024;
/// Pods end one after the other: who is still waited for is told no more often than this.
const TOLD_AGAIN: SignedDuration = SignedDuration::from_mins(1);

impl Fleet {
    /// Asks a person about pods that do not leave by themselves, once for each, and where they cannot be seen.
    pub(super) fn ask_about_pods(
        &mut self,
        name: &str,
        leaving: &[(PodView, DrainMode, Next)],
        drain: Drain,
        config: &Arc<DrainConfig>,
    ) {
        let now = self.common.now;
        let state = self.drain_mut(name);
        let late = now.duration_since(drain.since) >= config.ask_after;
        let unknown = now.duration_since(drain.since) >= ASK_AFTER;
        let mut texts = Vec::new();
        let unseen = state.unseen(now);
        let mut news = unseen.is_some() && !state.asked_unseen;
        state.asked_unseen = unseen.is_some();
        texts.extend(unseen);
        for (pod, _, next) in leaving {
            let trouble = (state.tries.get(&pod.uid)).and_then(|one| one.trouble.as_ref());
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
            news |= state.asked.insert(pod.uid.clone());
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
        if state.stuck != stuck {
            // The records say it.
            state.stuck.clone_from(&stuck);
            self.agenda.dirty.insert(name.to_owned());
        }
        if let Some(stuck) = stuck.filter(|_| news) {
            let text = format!(
                "the drain does not get on: {stuck}; end the pods by hand, or release the node"
            );
            self.call_attention(name, text);
        }
    }

    /// Has told by Events of the node who is waited for, in NVSentinel's words.
    pub(super) fn tell_who_is_waited_for(
        &mut self,
        name: &str,
        leaving: &[(PodView, DrainMode, Next)],
        since: Timestamp,
    ) {
        let now = self.common.now;
        if self.common.settings.mode != Mode::Quarantine || !self.common.settings.cluster {
            return;
        }
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
            ("AwaitingPodCompletion", ends),
            ("WaitingBeforeForceDelete", timed),
        ] {
            let Some(message) = message else {
                continue;
            };
            let message: String = message.chars().take(EVENT_CHARS).collect();
            let state = self.drain_mut(name);
            if let Some((text, at)) = state.told.get(reason) {
                let again = *at + TOLD_AGAIN;
                if *text == message {
                    continue;
                }
                if now < again {
                    state.wake = Some(state.wake.map_or(again, |wake| wake.min(again)));
                    continue;
                }
            }
            state.told.insert(reason, (message.clone(), now));
            self.agenda.effects.push(Effect::Waits {
                node: name.to_owned(),
                since,
                reason,
                message,
            });
        }
    }

    /// Adds to the story of a node what becomes of its pods, as its drain begins.
    pub(super) fn note_drain(
        &mut self,
        name: &str,
        drain: Drain,
        gpus: Option<&Gpus>,
        config: &DrainConfig,
    ) {
        let now = self.common.now;
        let entry = self.entry(name);
        let mut leave: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        let mut stay: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let gangs = (entry.drain.as_ref())
            .map(|state| state.gangs(drain, gpus, config, now))
            .unwrap_or_default();
        let pods = entry.drain.as_ref().map(|state| state.pods.values());
        for pod in pods.into_iter().flatten() {
            match fate_of(pod, &gangs, drain, gpus, config, now) {
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
pub(super) fn awaits(
    leaving: &[(PodView, DrainMode, Next)],
    tries: &BTreeMap<String, Try>,
) -> String {
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
