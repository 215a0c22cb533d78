//! Drains by a custom resource ([`crate::drain::CustomDrain`]): it is made once the node says that it is being
//! drained, under a name that the session fixes, and watched until its condition says that the node is
//! drained. It goes with the drain, and at last with the session.
//!
//! To ask for a drain twice does no harm, so one that is gone before its end is made again.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::{Asks, DrainOrder, DrainState, Facts, NodePods, custom_of};
use crate::assess::Desired;
use crate::drain::{CustomDrain, PodsToDrain};
use crate::fleet::stage::remediation::complete;
use crate::fleet::{Effect, MadeAnswer, Mode, PlannedResource, ResourceNews};
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

/// The custom resource as last seen.
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
    pub(super) fn forget_wish(&mut self) {
        self.wanted = false;
    }

    pub(super) fn clock_moved_back(&mut self) {
        self.not_before = None;
    }

    pub(super) fn answers_lost(&mut self) {
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

impl NodePods {
    /// Returns the pods that are to leave, by namespace.
    fn to_drain(&self, order: &DrainOrder<'_>, now: Timestamp) -> PodsToDrain {
        let mut pods = PodsToDrain::new();
        for (pod, ..) in self.leaving(order, now) {
            let of_namespace = pods.entry(pod.namespace.clone()).or_default();
            of_namespace.push(pod.name.clone());
        }
        pods
    }
}

impl CustomState {
    /// Returns whether the custom resource of the drain says that the node is drained.
    pub(super) fn is_done(&self, node: &str, own: &Ownership, custom: &CustomDrain) -> bool {
        let mark = own.mark.drain_of(&[]);
        mark.is_some_and(|mark| {
            self.is_of(&attempt(node, own, mark, custom).key()) && self.seen == Seen::There(true)
        })
    }

    /// Takes news of a custom resource, if it is that of the drain. Returns whether it is.
    pub(in crate::fleet) fn take(
        &mut self,
        facts: &Facts<'_>,
        resource: &str,
        news: &ResourceNews,
        asks: &mut Asks<'_>,
    ) -> bool {
        if self.follows().is_none_or(|(_, name)| name != resource) {
            return false;
        }
        match news {
            ResourceNews::There(object) => {
                let earlier = self.see(object, custom_of(facts).as_deref(), asks.now());
                withdraw(earlier, asks);
            }
            ResourceNews::Absent => (self.seen, self.failing) = (Seen::Gone, None),
            ResourceNews::Failing(why) => self.failing = Some(why.clone()),
        }
        true
    }

    /// Takes the answer to a custom resource, if it is that of the drain. Returns whether it is.
    pub(in crate::fleet) fn made(
        &mut self,
        facts: &Facts<'_>,
        key: &str,
        answer: &MadeAnswer,
        asks: &mut Asks<'_>,
    ) -> bool {
        if !self.is_of(key) {
            return false;
        }
        let now = asks.now();
        let awaited = std::mem::replace(&mut self.making, false);
        match answer {
            MadeAnswer::There(object) => {
                let earlier = self.see(object, custom_of(facts).as_deref(), now);
                withdraw(earlier, asks);
                // It was withdrawn while it was made.
                self.withdrawn = false;
            }
            // Of one that counted as lost.
            _ if !awaited => {}
            MadeAnswer::Refused(why) => {
                let failure = Failure::Error { retry_after: None };
                self.failed(why, failure, true, now);
            }
            MadeAnswer::Failed { why, retry_after } => {
                let failure = Failure::Error {
                    retry_after: *retry_after,
                };
                self.failed(why, failure, false, now);
            }
        }
        true
    }

    /// Makes the custom resource, where it is time; in a dry run goes on as if it had drained the node.
    fn make(
        &mut self,
        facts: &Facts<'_>,
        custom: &CustomDrain,
        attempt: &Attempt,
        pods: &PodsToDrain,
        desired: &Desired,
        asks: &mut Asks<'_>,
    ) {
        let Some((observed, own)) = facts.ours() else {
            return;
        };
        let waits = self.making || self.not_before.is_some_and(|at| asks.now() < at);
        if facts.veto.is_some() || waits || matches!(self.seen, Seen::There(_)) {
            return;
        }
        let events = || desired.events.iter().map(|one| &one.event);
        let opener = events().find(|event| event.id == own.session_id);
        let Some(event) = opener.or(events().next()) else {
            return;
        };
        let mut object = match custom.render(facts.name, event, &own.session_id, pods) {
            Ok(object) => object,
            Err(why) => {
                self.trouble = Some((format!("its template: {why}"), true));
                return;
            }
        };
        complete(&mut object, attempt, &observed.view);
        let title = attempt.title();
        let settings = &facts.common.settings;
        if settings.mode == Mode::DryRun {
            self.seen = Seen::There(true);
            let note = Note {
                kind: EntryKind::DryRun,
                text: format!("dry run: {title} is made, which drains the node"),
                detail: object,
            };
            asks.note(note, None);
            return asks.look_again();
        }
        if !settings.cluster {
            return;
        }
        (self.making, self.not_before) = (true, None);
        let text = format!("the drain begins: {title} is asked for it");
        asks.note(Note::new(EntryKind::Session, text), None);
        asks.effect(Effect::Make(Box::new(PlannedResource {
            node: facts.name.to_owned(),
            session: asks.session(),
            key: attempt.key(),
            action: DRAIN_ACTION.to_owned(),
            kind: attempt.resource.clone(),
            name: attempt.name.clone(),
            object,
        })));
    }
}

// === impl DrainState ===

impl DrainState {
    /// Makes the custom resource that drains the node, where it is not there, and asks a person where it
    /// does not come to its end.
    pub(super) fn ask_for_custom(
        &mut self,
        facts: &Facts<'_>,
        own: &Ownership,
        desired: &Desired,
        custom: &CustomDrain,
        order: &DrainOrder<'_>,
        asks: &mut Asks<'_>,
    ) {
        let now = asks.now();
        // The node is to say first that it is being drained: who comes after us sees it.
        let Some(mark) = own.mark.drain_of(&[]) else {
            return;
        };
        let attempt = attempt(facts.name, own, mark, custom);
        let state = &mut self.custom;
        state.turn_to(&attempt);
        (state.wanted, state.withdrawn) = (true, false);
        // It names the pods that are to leave.
        let pods = self.pods.as_ref().filter(|pods| pods.sees_pods());
        if let Some(pods) = pods.map(|pods| pods.to_drain(order, now)) {
            state.make(facts, custom, &attempt, &pods, desired, asks);
        }
        let asks_at = [MADE_WITHIN, custom.timeout].map(|by| mark.since.checked_add(by).ok());
        let [made_by, ends_by] = asks_at.map(|at| at.unwrap_or(Timestamp::MAX));
        let title = attempt.title();
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
        let held = facts.veto.filter(|_| !there);
        let held = held.map_or_else(String::new, |veto| format!("the end of {veto}; then "));
        let retry = state.not_before.filter(|_| !state.making);
        let news = state.asked != stuck;
        state.asked.clone_from(&stuck);
        let times = [Some(made_by), Some(ends_by), retry];
        let pods = self.pods_mut();
        pods.awaits = Some(format!("{held}{waits}{trouble}"));
        pods.wake = times.into_iter().flatten().filter(|at| *at > now).min();
        pods.set_stuck(stuck.as_deref(), asks);
        if let Some(stuck) = stuck.filter(|_| news) {
            asks.call_attention(format!(
                "the drain does not get on: {stuck}; see to it by hand, or release the node"
            ));
        }
    }

    /// Deletes the custom resource of a drain once, where neither the drain nor what follows it is
    /// wanted any more.
    pub(super) fn withdraw_custom(
        &mut self,
        facts: &Facts<'_>,
        desired: &Desired,
        asks: &mut Asks<'_>,
    ) {
        let Some(Observed { own, .. }) = facts.observed else {
            return;
        };
        let (own, custom) = (own.as_deref(), custom_of(facts));
        let is_out = facts.session.phase.is_out();
        let mark = own.and_then(|own| Some((own, own.mark.drain_of(&[])?)));
        // Who drains so may keep the node drained for as long as it is there.
        let drained = mark.is_some_and(|(_, mark)| mark.done.is_some());
        let stays = drained && is_out && desired.takes_node_out() && custom.is_some();
        let state = &mut self.custom;
        if state.wanted || stays || !facts.common.acts() {
            return;
        }
        if let (Some((own, mark)), Some(custom)) = (mark, custom) {
            state.turn_to(&attempt(facts.name, own, mark, &custom));
        }
        let Some(attempt) = state.attempt.clone() else {
            return;
        };
        let withdrawn = std::mem::replace(&mut state.withdrawn, true);
        // Its answer may still be to come.
        if own.is_none() && !state.making {
            *state = CustomState::default();
        }
        withdraw((!withdrawn).then_some(attempt), asks);
    }
}

/// Deletes the custom resource of an attempt, also where something has begun.
fn withdraw(attempt: Option<Attempt>, asks: &mut Asks<'_>) {
    if let Some(attempt) = attempt {
        asks.effect(Effect::Withdraw {
            node: asks.node().to_owned(),
            attempt: Box::new(attempt),
            begun: true,
        });
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
