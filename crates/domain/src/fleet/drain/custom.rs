//! Drains by a custom resource ([`crate::drain::CustomDrain`]): it is made once the node says that it is being
//! drained, under a name that the session fixes, and watched until its condition says that the node is
//! drained. It goes with the drain, and at last with the session.
//!
//! To ask for a drain twice does no harm, so one that is gone before its end is made again.

use std::sync::Arc;

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::DrainState;
use crate::assess::Desired;
use crate::drain::{CustomDrain, Drain, DrainConfig, PodsToDrain};
use crate::fleet::stage::remediation::complete;
use crate::fleet::{Effect, Fleet, MadeAnswer, Mode, PlannedResource, ResourceNews};
use crate::journal::EntryKind;
use crate::ownership::{DrainMark, Ownership};
use crate::remedy::{Attempt, ResourceKind};
use crate::session::{Failure, Note, Observed, retry_after};

/// The action of custom resources that drain, beside those of repairs.
pub const DRAIN_ACTION: &str = "drain";
/// Time for which it cannot be made before a person is asked.
const MADE_WITHIN: SignedDuration = SignedDuration::from_secs(60);

/// The custom resource that drains a node.
#[derive(Debug, Default)]
pub(in crate::fleet) struct CustomState {
    /// What it is made for; `None`: none was, by this process.
    attempt: Option<Attempt>,
    seen: Seen,
    /// True if the last look has wanted it.
    wanted: bool,
    making: bool,
    /// Number of attempts in a row to make it that did not succeed.
    failures: u32,
    not_before: Option<Timestamp>,
    /// Why it could not be made, and whether that is for good.
    trouble: Option<(String, bool)>,
    /// Why it cannot be seen.
    failing: Option<String>,
    withdrawn: bool,
    /// What a person was asked.
    asked: Option<String>,
}

/// It, as it was last seen.
#[derive(Debug, Default, PartialEq)]
enum Seen {
    /// Nobody has looked.
    #[default]
    Unknown,
    /// It is not there any more.
    Gone,
    /// It is there; true: and says that the node is drained.
    There(bool),
}

// === impl CustomState ===

impl CustomState {
    /// Marks that it is not wanted, unless what follows wants it.
    pub(in crate::fleet) fn forget_wish(&mut self) {
        self.wanted = false;
    }

    pub(in crate::fleet) fn clock_put_back(&mut self) {
        self.not_before = None;
    }

    pub(in crate::fleet) fn answers_lost(&mut self) {
        self.making = false;
    }

    /// Returns the resource of which somebody is to tell: it was there.
    pub(in crate::fleet) fn follows(&self) -> Option<(ResourceKind, String)> {
        let was_there = matches!(self.seen, Seen::There(_) | Seen::Gone);
        let attempt = self.attempt.as_ref().filter(|_| self.wanted && was_there)?;
        Some((attempt.resource.clone(), attempt.name.clone()))
    }

    fn is_of(&self, key: &str) -> bool {
        self.attempt.as_ref().is_some_and(|one| one.key() == key)
    }

    fn turn_to(&mut self, attempt: &Attempt) {
        if !self.is_of(&attempt.key()) {
            *self = Self {
                attempt: Some(attempt.clone()),
                ..Self::default()
            };
        }
    }

    /// Takes in how it is. Returns the attempt of an earlier drain of this session, where it was made for
    /// that: it is in the way.
    fn see(
        &mut self,
        object: &Value,
        custom: Option<&CustomDrain>,
        now: Timestamp,
    ) -> Option<Attempt> {
        let says = object.pointer("/metadata/annotations");
        let key = says.and_then(|all| all.get(keys::ATTEMPT)?.as_str());
        if key.is_some_and(|key| self.is_of(key)) {
            self.seen = Seen::There(custom.is_some_and(|custom| custom.is_done(object)));
            (self.failures, self.trouble, self.failing) = (0, None, None);
            return None;
        }
        let failure = Failure::Error { retry_after: None };
        let Some(earlier) = key.and_then(|key| self.earlier(key)) else {
            self.failed("another is there, which is not ours", failure, false, now);
            return None;
        };
        self.failed("that of an earlier drain is there", failure, false, now);
        let goes = object.pointer("/metadata/deletionTimestamp").is_some();
        (!goes).then_some(earlier)
    }

    /// Returns the attempt with this key, if it is of an earlier drain of the same session: the node was let
    /// in while the resource was made, and who made it was ended before its answer.
    fn earlier(&self, key: &str) -> Option<Attempt> {
        let attempt = self.attempt.as_ref()?;
        let since = key.strip_prefix(&attempt.id)?.strip_prefix('/')?;
        let since = since.parse().ok()?;
        (since < attempt.since).then(|| Attempt {
            since,
            ..attempt.clone()
        })
    }

    /// Takes in that it is not made. `for_good`: to try it again alone does not help.
    fn failed(&mut self, why: &str, failure: Failure, for_good: bool, now: Timestamp) {
        self.seen = Seen::Unknown;
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + retry_after(self.failures, failure));
        self.trouble = Some((why.to_owned(), for_good));
    }
}

impl DrainState {
    /// Returns the pods that are to leave, by namespace.
    fn to_drain(&self, drain: Drain, config: &DrainConfig, now: Timestamp) -> PodsToDrain {
        let mut pods = PodsToDrain::new();
        for (pod, ..) in self.leaving(drain, None, config, now) {
            let of_namespace = pods.entry(pod.namespace.clone()).or_default();
            of_namespace.push(pod.name.clone());
        }
        pods
    }
}

// === impl Fleet ===

impl Fleet {
    /// Returns by what a node is drained that is drained by a custom resource.
    pub(super) fn custom_of(&self, name: &str) -> Option<Arc<CustomDrain>> {
        let custom = self.common.settings.drain.as_ref()?.custom.as_ref()?;
        let observed = self.nodes.get(name)?.observed.as_ref()?;
        let applies = custom.applies_to(&observed.view.labels);
        applies.then(|| Arc::clone(custom))
    }

    /// Returns whether the custom resource of a drain says that the node is drained.
    pub(super) fn custom_is_done(&self, name: &str, own: &Ownership, custom: &CustomDrain) -> bool {
        let (Some(mark), Some(entry)) = (own.mark.drain_of(&[]), self.nodes.get(name)) else {
            return false;
        };
        let state = &entry.custom;
        state.is_of(&attempt(name, own, mark, custom).key()) && state.seen == Seen::There(true)
    }

    /// Takes news of a custom resource in, if it is that of a drain. Returns whether it is.
    pub(in crate::fleet) fn take_custom(
        &mut self,
        node: &str,
        resource: &str,
        news: &ResourceNews,
    ) -> bool {
        let (now, custom) = (self.common.now, self.custom_of(node));
        let Some(entry) = self.nodes.get_mut(node) else {
            return false;
        };
        let followed = entry.custom.follows();
        if followed.is_none_or(|(_, name)| name != resource) {
            return false;
        }
        let state = &mut entry.custom;
        let mut earlier = None;
        match news {
            ResourceNews::There(object) => earlier = state.see(object, custom.as_deref(), now),
            ResourceNews::Absent => (state.seen, state.failing) = (Seen::Gone, None),
            ResourceNews::Failing(why) => state.failing = Some(why.clone()),
        }
        self.take_away(node, earlier);
        self.look_again_at(node);
        true
    }

    /// Takes the answer to a custom resource in, if it is that of a drain. Returns whether it is.
    pub(in crate::fleet) fn custom_made(
        &mut self,
        node: &str,
        key: &str,
        answer: &MadeAnswer,
    ) -> bool {
        let (now, custom) = (self.common.now, self.custom_of(node));
        let Some(entry) = self.nodes.get_mut(node) else {
            return false;
        };
        let state = &mut entry.custom;
        if !state.is_of(key) {
            return false;
        }
        let awaited = std::mem::replace(&mut state.making, false);
        let mut earlier = None;
        match answer {
            MadeAnswer::There(object) => {
                earlier = state.see(object, custom.as_deref(), now);
                // It was withdrawn while it was made.
                state.withdrawn = false;
            }
            // Of one that counted as lost.
            _ if !awaited => {}
            MadeAnswer::Refused(why) => {
                let failure = Failure::Error { retry_after: None };
                state.failed(why, failure, true, now);
            }
            MadeAnswer::Failed { why, retry_after } => {
                let failure = Failure::Error {
                    retry_after: *retry_after,
                };
                state.failed(why, failure, false, now);
            }
        }
        self.take_away(node, earlier);
        self.look_again_at(node);
        true
    }

    /// Has the custom resource of an attempt deleted.
    fn take_away(&mut self, node: &str, attempt: Option<Attempt>) {
        self.agenda
            .effects
            .extend(attempt.map(|attempt| Effect::Withdraw {
                node: node.to_owned(),
                attempt: Box::new(attempt),
                begun: true,
            }));
    }

    /// Has the custom resource made that drains a node, where it is not there, and asks a person where it
    /// does not come to its end.
    pub(super) fn look_at_custom(
        &mut self,
        observed: &Observed,
        own: &Ownership,
        desired: &Desired,
        custom: &CustomDrain,
        drain: Drain,
    ) {
        let (now, name) = (self.common.now, observed.view.name.as_str());
        // The node is to say first that it is being drained: who comes after us sees it.
        let Some(mark) = own.mark.drain_of(&[]) else {
            return;
        };
        let attempt = attempt(name, own, mark, custom);
        let state = &mut self.entry(name).custom;
        state.turn_to(&attempt);
        (state.wanted, state.withdrawn) = (true, false);
        self.make_custom(observed, own, desired, custom, &attempt, drain);
        let asks_at = [MADE_WITHIN, custom.timeout].map(|by| mark.since.checked_add(by).ok());
        let [made_by, ends_by] = asks_at.map(|at| at.unwrap_or(Timestamp::MAX));
        let title = attempt.title();
        let veto = self.veto(name).cloned();
        let state = &self.entry(name).custom;
        let stuck = match &state.trouble {
            Some((why, for_good)) if *for_good || now >= made_by => {
                Some(format!("{title} cannot be made: {why}"))
            }
            _ if now >= ends_by => Some(format!("{title} does not come to its end")),
            _ => None,
        };
        let there = matches!(state.seen, Seen::There(_));
        let waits = if there {
            format!("the end of {title}")
        } else {
            format!("{title} to be made")
        };
        let trouble = state.trouble.as_ref().map(|(why, _)| why);
        let trouble = trouble.or(state.failing.as_ref());
        let trouble = trouble.map_or_else(String::new, |why| format!(" ({why})"));
        let held = veto.filter(|_| !there);
        let held = held.map_or_else(String::new, |veto| format!("the end of {veto}; then "));
        let retry = state.not_before.filter(|_| !state.making);
        let times = [Some(made_by), Some(ends_by), retry];
        let wake = times.into_iter().flatten().filter(|at| *at > now).min();
        let state = self.drain_mut(name);
        state.awaits = Some(format!("{held}{waits}{trouble}"));
        state.wake = wake;
        if state.stuck != stuck {
            // The records say it.
            state.stuck.clone_from(&stuck);
            self.agenda.dirty.insert(name.to_owned());
        }
        let news = self.entry(name).custom.asked != stuck;
        self.entry(name).custom.asked.clone_from(&stuck);
        if let Some(stuck) = stuck.filter(|_| news) {
            let text = format!(
                "the drain does not get on: {stuck}; see to it by hand, or release the node"
            );
            self.call_attention(name, text);
        }
    }

    /// Has the custom resource made, where it is time; in a dry run goes on as if it had drained the node.
    fn make_custom(
        &mut self,
        observed: &Observed,
        own: &Ownership,
        desired: &Desired,
        custom: &CustomDrain,
        attempt: &Attempt,
        drain: Drain,
    ) {
        let (now, name) = (self.common.now, observed.view.name.as_str());
        let vetoed = self.veto(name).is_some();
        let (mode, cluster) = (self.common.settings.mode, self.common.settings.cluster);
        let pods = self.nodes.get(name).and_then(|one| one.drain.as_ref());
        let pods = pods.filter(|state| state.sees_pods());
        let (Some(pods), Some(config)) = (pods, &self.common.settings.drain) else {
            return; // It names the pods that are to leave.
        };
        let pods = pods.to_drain(drain, config, now);
        let state = &self.entry(name).custom;
        let waits = state.making || state.not_before.is_some_and(|at| now < at);
        if vetoed || waits || matches!(state.seen, Seen::There(_)) {
            return;
        }
        let mut events = desired.events.iter().map(|one| &one.event);
        let first = events.next();
        let event = first.filter(|event| event.id != own.session_id);
        let event = event.and_then(|_| events.find(|event| event.id == own.session_id));
        let Some(event) = event.or(first) else {
            return;
        };
        let session = self.entry(name).session.id.clone();
        let object = custom.render(name, event, &own.session_id, &pods);
        let state = &mut self.entry(name).custom;
        let mut object = match object {
            Ok(object) => object,
            Err(why) => {
                state.trouble = Some((format!("its template: {why}"), true));
                return;
            }
        };
        complete(&mut object, attempt, &observed.view);
        let title = attempt.title();
        if mode == Mode::DryRun {
            state.seen = Seen::There(true);
            let note = Note {
                kind: EntryKind::DryRun,
                text: format!("dry run: {title} is made, which drains the node"),
                detail: object,
            };
            self.note(name, session.as_deref(), note, None);
            self.agenda.dirty.insert(name.to_owned());
            return;
        }
        if !cluster {
            return;
        }
        (state.making, state.not_before) = (true, None);
        let note = Note::new(
            EntryKind::Session,
            format!("the drain begins: {title} is asked for it"),
        );
        self.note(name, session.as_deref(), note, None);
        self.agenda
            .effects
            .push(Effect::Make(Box::new(PlannedResource {
                node: name.to_owned(),
                session,
                key: attempt.key(),
                action: DRAIN_ACTION.to_owned(),
                kind: attempt.resource.clone(),
                name: attempt.name.clone(),
                object,
            })));
    }

    /// Has the custom resource of a drain deleted once, where neither the drain nor what follows it is
    /// wanted any more.
    pub(in crate::fleet) fn withdraw_custom(
        &mut self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
    ) {
        let custom = self.custom_of(name);
        let own = observed.own.as_deref();
        let is_out = self.session(name).is_some_and(|one| one.phase.is_out());
        let mark = own.and_then(|own| Some((own, own.mark.drain_of(&[])?)));
        // Who drains so may keep the node drained for as long as it is there.
        let drained = mark.is_some_and(|(_, mark)| mark.done.is_some());
        let stays = drained && is_out && desired.takes_node_out() && custom.is_some();
        let acts = self.common.settings.mode == Mode::Quarantine && self.common.settings.cluster;
        let entry = self.entry(name);
        let state = &mut entry.custom;
        if state.wanted || stays || !acts {
            return;
        }
        if let (Some((own, mark)), Some(custom)) = (mark, custom) {
            state.turn_to(&attempt(name, own, mark, &custom));
        }
        let Some(attempt) = state.attempt.clone() else {
            return;
        };
        let withdrawn = std::mem::replace(&mut state.withdrawn, true);
        // Its answer may still be to come.
        if own.is_none() && !state.making {
            *state = CustomState::default();
        }
        self.take_away(name, (!withdrawn).then_some(attempt));
    }
}

/// Returns what the custom resource of a drain is made for.
fn attempt(node: &str, own: &Ownership, mark: DrainMark, custom: &CustomDrain) -> Attempt {
    let event = &own.session_id;
    Attempt {
        id: format!("{DRAIN_ACTION}-{event}"),
        action: DRAIN_ACTION.to_owned(),
        group: String::new(),
        event: event.clone(),
        entity: String::new(),
        resource: custom.resource.clone(),
        name: CustomDrain::name(node, event),
        since: mark.since,
        timeout_minutes: custom.timeout.as_mins(),
        made: None,
        end: None,
    }
}
