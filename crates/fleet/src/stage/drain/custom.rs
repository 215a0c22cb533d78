//! Drains by a custom resource ([`crate::drain::CustomDrain`]): created once the node's mark
//! says that it is being drained, under a name derived from the session, and watched until its
//! condition says that the node is drained. It is deleted with the drain, or at last with the
//! session.
//!
//! Requesting a drain twice does no harm, so a resource that disappears early is created again.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use model::attempt::Attempt;
use model::journal::EntryKind;
use model::mode::Mode;
use model::ownership::{DrainMark, Ownership};
use policy::assess::Desired;
use serde_json::Value;

use super::{DrainOrder, DrainState, Facts, NodePods, StageRequests, custom_of};
use crate::drain::{CustomDrain, PodsToDrain};
use crate::session::{JournalNote, ObservedNode, RequestFailure};
use crate::stage::managed_resource::{ManagedResource, complete, delete};
use crate::{CreateAnswer, ResourceUpdate};

/// Action name of custom resources that drain, beside those of remediation.
pub const DRAIN_ACTION: &str = "drain";
/// Time that its creation may fail before a person is asked.
const MADE_WITHIN: SignedDuration = SignedDuration::from_secs(60);

/// State of the custom resource that drains a node.
#[derive(Debug, Default)]
pub(crate) struct CustomState {
    object: ManagedResource<DrainResource>,
    /// True if the last look wanted the resource.
    wanted: bool,
    /// True if the resource was refused for good: a retry alone does not help.
    refused: bool,
    /// Trouble about which a person was asked.
    asked: Option<String>,
}

/// Last observed state of the custom resource.
#[derive(Debug, Default, PartialEq)]
enum DrainResource {
    /// The resource was not observed yet.
    #[default]
    Unknown,
    /// The resource no longer exists.
    Gone,
    /// The resource exists; true if it says that the node is drained.
    There(bool),
}

// === impl CustomState ===

impl CustomState {
    /// Begins a look: the resource is not wanted until the look asks for it.
    pub(super) fn begin(&mut self) {
        (self.wanted, self.object.watch) = (false, false);
    }

    pub(super) fn settle(&mut self, requests: &mut StageRequests<'_>) {
        self.object.settle(requests);
    }

    pub(super) fn clock_moved_back(&mut self) {
        self.object.retry.clear_wait();
    }

    pub(super) fn answers_lost(&mut self) {
        self.object.answers_lost();
    }

    fn set_attempt(&mut self, attempt: &Attempt) {
        if self.object.set_attempt(attempt) {
            (self.refused, self.asked) = (false, None);
        }
    }

    /// Handles the state of the resource. A resource of an earlier drain of this session is in
    /// the way, and is deleted.
    fn set_object(
        &mut self,
        object: &Value,
        custom: Option<&CustomDrain>,
        requests: &mut StageRequests<'_>,
    ) {
        let annotations = object.pointer("/metadata/annotations");
        let key = annotations.and_then(|all| all.get(keys::ATTEMPT)?.as_str());
        if key.is_some_and(|key| self.object.is_for(key)) {
            self.object.state =
                DrainResource::There(custom.is_some_and(|custom| custom.is_done(object)));
            self.object.watch_error = None;
            self.refused = false;
            return self.object.created(true, requests);
        }
        let failure = RequestFailure::Error { retry_after: None };
        let Some(earlier) = key.and_then(|key| self.earlier(key)) else {
            return self.failed("another is there, which is not ours", failure, requests);
        };
        self.failed("that of an earlier drain is there", failure, requests);
        if object.pointer("/metadata/deletionTimestamp").is_none() {
            delete(Box::new(earlier), true, requests);
        }
    }

    /// Returns the attempt with this key, if it belongs to an earlier drain of the same session:
    /// the node was let in while the resource was created, and that process ended before the
    /// answer.
    fn earlier(&self, key: &str) -> Option<Attempt> {
        let attempt = self.object.attempt.as_ref()?;
        let since = key.strip_prefix(&attempt.id)?.strip_prefix('/')?;
        let since = since.parse().ok()?;
        (since < attempt.since).then(|| Attempt {
            since,
            ..Attempt::clone(attempt)
        })
    }

    /// Records that the resource was not created.
    fn failed(&mut self, why: &str, failure: RequestFailure, requests: &StageRequests<'_>) {
        self.object.state = DrainResource::Unknown;
        self.object.retry.failed(why, failure, requests.now());
        self.refused = false;
    }
}

impl NodePods {
    /// Returns the pods that are to leave, by namespace.
    fn pods_to_drain(&self, order: &DrainOrder<'_>, now: Timestamp) -> PodsToDrain {
        let mut pods = PodsToDrain::new();
        for (pod, ..) in self.leaving(order, now) {
            let of_namespace = pods.entry(pod.namespace.clone()).or_default();
            of_namespace.push(pod.name.clone());
        }
        pods
    }
}

impl CustomState {
    /// Returns whether the custom resource says that the node is drained.
    pub(super) fn is_done(&self, node: &str, own: &Ownership, custom: &CustomDrain) -> bool {
        let mark = own.mark.drain_of(&[]);
        mark.is_some_and(|mark| {
            self.object.is_for(&attempt(node, own, mark, custom).key())
                && self.object.state == DrainResource::There(true)
        })
    }

    /// Handles a change of a custom resource, if it is the drain's. Returns whether it is.
    pub(crate) fn resource_updated(
        &mut self,
        facts: &Facts<'_>,
        resource: &str,
        update: &ResourceUpdate,
        requests: &mut StageRequests<'_>,
    ) -> bool {
        if !self.object.is_watched(resource) {
            return false;
        }
        match update {
            ResourceUpdate::There(object) => {
                self.set_object(object, custom_of(facts).as_deref(), requests);
            }
            ResourceUpdate::Absent => {
                (self.object.state, self.object.watch_error) = (DrainResource::Gone, None);
            }
            ResourceUpdate::Failing(why) => self.object.watch_error = Some(why.clone()),
        }
        true
    }

    /// Handles the answer to the creation of a custom resource, if it is the drain's. Returns
    /// whether it is.
    pub(crate) fn create_answered(
        &mut self,
        facts: &Facts<'_>,
        key: &str,
        answer: &CreateAnswer,
        requests: &mut StageRequests<'_>,
    ) -> bool {
        if !self.object.is_for(key) {
            return false;
        }
        let awaited = std::mem::replace(&mut self.object.creating, false);
        match answer {
            CreateAnswer::There(object) => {
                self.set_object(object, custom_of(facts).as_deref(), requests);
            }
            // The request had been given up as lost.
            _ if !awaited => {}
            CreateAnswer::Refused(why) => {
                self.failed(why, RequestFailure::Error { retry_after: None }, requests);
                self.refused = true;
            }
            CreateAnswer::Failed { why, retry_after } => {
                let retry_after = *retry_after;
                self.failed(why, RequestFailure::Error { retry_after }, requests);
                self.object.not_created(true, requests);
            }
        }
        true
    }

    /// Creates the custom resource, if that is due; a dry run pretends that it has drained the
    /// node.
    fn create(
        &mut self,
        facts: &Facts<'_>,
        custom: &CustomDrain,
        attempt: &Attempt,
        pods: &PodsToDrain,
        desired: &Desired,
        requests: &mut StageRequests<'_>,
    ) {
        let Some((observed, own)) = facts.session_on_node() else {
            return;
        };
        let may_create = facts.veto.is_none() && self.object.may_create(requests.now());
        if !may_create || matches!(self.object.state, DrainResource::There(_)) {
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
                self.object.retry.why = Some(format!("its template: {why}"));
                self.refused = true;
                return;
            }
        };
        complete(&mut object, attempt, &observed.view);
        let title = attempt.title();
        let settings = &facts.state.settings;
        if settings.mode == Mode::DryRun {
            self.object.state = DrainResource::There(true);
            let note = JournalNote {
                kind: EntryKind::DryRun,
                text: format!("dry run: {title} is made, which drains the node"),
                detail: object,
            };
            requests.journal(note, None);
            return requests.look_again();
        }
        if !settings.cluster {
            return;
        }
        let text = format!("the drain begins: {title} is asked for it");
        requests.journal(JournalNote::new(EntryKind::Session, text), None);
        self.object.create(DRAIN_ACTION, object, requests);
    }
}

// === impl DrainState ===

impl DrainState {
    /// Creates the custom resource that drains the node, if it does not exist, and asks a person
    /// if it does not finish.
    pub(super) fn drive_custom(
        &mut self,
        facts: &Facts<'_>,
        own: &Ownership,
        desired: &Desired,
        custom: &CustomDrain,
        order: &DrainOrder<'_>,
        requests: &mut StageRequests<'_>,
    ) {
        let now = requests.now();
        // The node's mark comes first, so that a successor sees the drain.
        let Some(mark) = own.mark.drain_of(&[]) else {
            return;
        };
        let attempt = attempt(facts.name, own, mark, custom);
        let state = &mut self.custom;
        state.set_attempt(&attempt);
        state.wanted = true;
        state.object.mark_wanted();
        // The resource names the pods that are to leave.
        let pods = self.pods.as_ref().filter(|pods| pods.has_current_pods());
        if let Some(pods) = pods.map(|pods| pods.pods_to_drain(order, now)) {
            state.create(facts, custom, &attempt, &pods, desired, requests);
        }
        let was_there = state.object.state != DrainResource::Unknown;
        state.object.watch = was_there && facts.state.settings.mode != Mode::DryRun;
        let asks_at = [MADE_WITHIN, custom.timeout].map(|by| mark.since.checked_add(by).ok());
        let [made_by, ends_by] = asks_at.map(|at| at.unwrap_or(Timestamp::MAX));
        let title = attempt.title();
        let retry = &state.object.retry;
        let stuck = match &retry.why {
            Some(why) if state.refused || now >= made_by => {
                Some(format!("{title} cannot be made: {why}"))
            }
            _ if now >= ends_by => Some(format!("{title} does not end")),
            _ => None,
        };
        let there = matches!(state.object.state, DrainResource::There(_));
        let waits = if there {
            format!("the end of {title}")
        } else {
            format!("{title} to be made")
        };
        let trouble = retry.why.as_ref().or(state.object.watch_error.as_ref());
        let trouble = trouble.map_or_else(String::new, |why| format!(" ({why})"));
        let held = facts.veto.filter(|_| !there);
        let held = held.map_or_else(String::new, |veto| format!("the end of {veto}; then "));
        let retry = retry.at().filter(|_| !state.object.creating);
        let is_new = state.asked != stuck;
        state.asked.clone_from(&stuck);
        let times = [Some(made_by), Some(ends_by), retry];
        let pods = self.pods_mut();
        pods.awaits = Some(format!("{held}{waits}{trouble}"));
        pods.wake = times.into_iter().flatten().filter(|at| *at > now).min();
        pods.set_stuck(stuck.as_deref(), requests);
        if let Some(stuck) = stuck.filter(|_| is_new) {
            requests.call_attention(format!(
                "the drain makes no progress: {stuck}; fix it by hand, or release the node"
            ));
        }
    }

    /// Deletes the custom resource of a drain, once, when neither the drain nor its result is
    /// wanted.
    pub(super) fn withdraw_custom(
        &mut self,
        facts: &Facts<'_>,
        desired: &Desired,
        requests: &mut StageRequests<'_>,
    ) {
        let Some(ObservedNode { own, .. }) = facts.observed else {
            return;
        };
        let (own, custom) = (own.as_deref(), custom_of(facts));
        let is_out = facts.session.phase.is_out();
        let mark = own.and_then(|own| Some((own, own.mark.drain_of(&[])?)));
        // The drainer may keep the node drained for as long as the resource exists.
        let drained = mark.is_some_and(|(_, mark)| mark.done.is_some());
        let stays = drained && is_out && desired.takes_node_out() && custom.is_some();
        let state = &mut self.custom;
        if state.wanted || !facts.state.acts() {
            return;
        }
        // The drain may leave the session before its resource is deleted, as where the node is still
        // validated: a process that has not created the resource has to know it by then.
        if let (Some((own, mark)), Some(custom)) = (mark, custom) {
            state.set_attempt(&attempt(facts.name, own, mark, &custom));
        }
        if stays {
            return;
        }
        let Some(attempt) = state.object.attempt.clone() else {
            return;
        };
        state.object.withdraw(&attempt, true, requests);
        // An answer may still be missing.
        if own.is_none() && !state.object.creating {
            state.object.forget();
            (state.refused, state.asked) = (false, None);
        }
    }
}

/// Returns the attempt that the custom resource of a drain belongs to.
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
