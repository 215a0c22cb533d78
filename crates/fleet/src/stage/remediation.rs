//! The remediation stage: creates custom resources for a node and watches them.
//!
//! The next step follows from the node's session ([`decide`]). The node's mark names the attempt
//! first; then its custom resource is created, under a name derived from the session, and
//! watched until it has ended. So a restarted process resumes from the mark, and creates no
//! resource twice.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use jiff::{SignedDuration, Timestamp};
use model::attempt::{Attempt, AttemptOutcome, RemediationMark};
use model::journal::EntryKind;
use model::mode::Mode;
use model::node::{HANDED_OVER, NodeView};
use model::ownership::Ownership;
use model::resource::ResourceState;
use model::time::later;
use policy::Routed;
use policy::assess::Desired;

use super::managed_resource::{ManagedResource, complete};
use super::validation::waits_for_quiet;
use super::{Facts, Stage, StageRequests};
use crate::remediation::{
    Blocker, OpenFault, RemediationDecision, RemediationInput, ResourceObservation, decide,
};
use crate::session::{JournalNote, RequestFailure};
use crate::veto::Veto;
use crate::{CreateAnswer, Effect, RemediationResult, ResourceUpdate, Settings};
use contract::RecommendedAction;

mod journal;
mod record;

use record::not_worked;

/// Longest wait for the analysis.
const ANALYSED_WITHIN: SignedDuration = SignedDuration::from_secs(60);
/// Pause between two looks whether the analysis has come that far.
const LOOK_FOR_ANALYSIS: SignedDuration = SignedDuration::from_millis(100);

/// State of the remediation of one node.
#[derive(Debug, Default)]
pub(crate) struct RemediationState {
    /// The custom resource of the attempt under way.
    object: ManagedResource<ResourceObservation>,
    /// True while the resource is looked for, since an earlier process may have created it.
    searching: bool,
    /// Reason why the resource was refused for good; it counts once the resource was looked for
    /// and does not exist.
    refused: Option<String>,
    /// The node's mark at the last look; `None` until this process has looked.
    last_mark: Option<RemediationMark>,
    /// Actions already counted as unsupported.
    unsupported: BTreeSet<String>,
    /// Policy routes already journaled as excluding faults from remediation.
    skipped: BTreeSet<String>,
    /// True once the whole node is to be remediated, and not only its drained GPUs.
    whole_node: bool,
    /// Time since which the analysis has not read all reports about the node.
    unanalysed_since: Option<Timestamp>,
    /// Keys of attempts whose success is recorded as an event.
    recorded: BTreeSet<String>,
    /// Text for people about what the remediation awaits.
    awaits: Option<String>,
    wake: Option<Timestamp>,
}

// === impl RemediationState ===

impl RemediationState {
    /// Returns whether the work of an attempt has begun; `None` if not observed yet.
    pub(crate) fn has_begun(&self, attempt: &Attempt) -> Option<bool> {
        let state = Some(&self.object.state).filter(|_| self.object.is_for(&attempt.key()));
        match state.unwrap_or(&ResourceObservation::Unknown) {
            ResourceObservation::There(state) => {
                Some(state.begun).filter(|begun| *begun || self.object.confirmed)
            }
            ResourceObservation::Unknown if attempt.made.is_some() || self.searching => None,
            ResourceObservation::Unknown
            | ResourceObservation::Absent
            | ResourceObservation::Gone
            | ResourceObservation::Refused(_) => Some(false),
        }
    }

    /// Returns whether the custom resource of an attempt may exist unobserved: the answer to its
    /// creation was lost, or is missing.
    pub(crate) fn may_exist(&self, attempt: &Attempt) -> bool {
        let asked = self.object.creating || self.object.retry.failures > 0;
        let unseen =
            self.object.is_for(&attempt.key()) && self.object.state == ResourceObservation::Unknown;
        asked && unseen && attempt.made.is_none()
    }

    /// Returns whether the whole node is remediated where its faults ask for a reset of GPUs:
    /// then all of its pods are to leave.
    pub(crate) fn remediates_whole_node(&self, settings: &Settings) -> bool {
        let reset = RecommendedAction::ComponentReset.as_str_name();
        let config = settings.remediation.as_deref();
        let reset = config.and_then(|config| config.actions.get(reset));
        reset.is_some_and(|action| action.entity_scope.is_none()) || self.whole_node
    }

    /// Handles a change of a custom resource. Returns whether it belongs to the attempt under
    /// way.
    pub(crate) fn resource_updated(&mut self, resource: &str, update: ResourceUpdate) -> bool {
        let attempt = self.object.attempt.as_ref();
        let attempt = attempt.filter(|_| self.object.is_watched(resource));
        let Some(attempt) = attempt else {
            return false; // The resource belongs to an earlier attempt.
        };
        self.object.watch_error = None;
        match update {
            ResourceUpdate::There(object) => {
                let read = ResourceState::read(&object, &attempt.resource);
                // A resource created in its place by others is not ours: ours, if it existed, is
                // gone.
                let ours = read.attempt == Some(attempt.key());
                self.object.state = if ours || self.searching {
                    ResourceObservation::There(Box::new(read))
                } else {
                    ResourceObservation::Gone
                };
                self.refused = None;
            }
            ResourceUpdate::Absent => {
                self.object.state = match self.refused.take() {
                    Some(why) => ResourceObservation::Refused(why),
                    None if self.searching => ResourceObservation::Absent,
                    None => ResourceObservation::Gone,
                };
            }
            ResourceUpdate::Failing(why) => self.object.watch_error = Some(why),
        }
        self.object.confirmed = self.object.watch_error.is_none();
        true
    }

    /// Handles the answer to the creation of a custom resource. Returns whether it belongs to
    /// the attempt under way.
    pub(crate) fn create_answered(
        &mut self,
        key: &str,
        answer: CreateAnswer,
        requests: &mut StageRequests<'_>,
    ) -> bool {
        let object = &mut self.object;
        let Some(attempt) = object.attempt.as_ref().filter(|one| one.key() == key) else {
            return false;
        };
        object.creating = false;
        match answer {
            CreateAnswer::There(there) => {
                let read = ResourceState::read(&there, &attempt.resource);
                object.state = ResourceObservation::There(Box::new(read));
                object.created(false, requests);
            }
            // An earlier try, also by an earlier process, may have created it, with its answer
            // lost.
            CreateAnswer::Refused(why) => (self.refused, self.searching) = (Some(why), true),
            CreateAnswer::Failed { why, retry_after } => {
                object.not_created(false, requests);
                let failure = RequestFailure::Error { retry_after };
                if object.retry.failed(&why, failure, requests.now()) {
                    let text = format!("the repair is not begun: {why}; it is tried again");
                    requests.journal(JournalNote::new(EntryKind::Answer, text), None);
                }
            }
        }
        true
    }

    /// Sets the attempt under way.
    fn set_attempt(&mut self, attempt: &Attempt) {
        if self.object.set_attempt(attempt) {
            (self.searching, self.refused) = (false, None);
        }
    }

    fn is_there(&self) -> bool {
        matches!(self.object.state, ResourceObservation::There(_))
    }

    /// Returns the wait for the analysis, which may find that repairs do not help.
    fn awaits_analysis(&mut self, facts: &Facts<'_>) -> Option<Blocker> {
        if facts.analysed {
            self.unanalysed_since = None;
            return None;
        }
        let now = facts.state.now;
        let since = *self.unanalysed_since.get_or_insert(now);
        let next = later(now, LOOK_FOR_ANALYSIS);
        let until = Blocker::Until(next, "the analysis of its reports".to_owned());
        (now < later(since, ANALYSED_WITHIN)).then_some(until)
    }

    /// Returns the decision about the remediation of an out-of-service node; `None` where
    /// remediation does not apply.
    fn decide(
        &mut self,
        facts: &Facts<'_>,
        own: &Ownership,
        desired: &Desired,
    ) -> Option<RemediationDecision> {
        // A session of NVSentinel has no place to record a remediation.
        let applies =
            own.takes_node_out() && own.replaced_labels.is_some() && desired.takes_node_out();
        let settings = &facts.state.settings;
        let mark = own.mark.remediation.as_ref();
        let observed = facts.observed.filter(|_| applies)?;
        if settings.remediation.is_none() && mark.is_none() {
            return None;
        }
        let drained = own.mark.drain.is_some_and(|mark| mark.done.is_some());
        // If all events ask that pods stay, there is no drain to wait for.
        let drains = !drained && desired.drains().is_some();
        let blocker = (facts.veto.map(vetoed))
            .or_else(|| blocker(&observed.view, own, drains))
            .or_else(|| self.awaits_analysis(facts))
            .or_else(|| {
                let why = "a while without a new fault";
                let quiet_until = waits_for_quiet(facts.state, facts.name);
                quiet_until.map(|until| Blocker::Until(until, why.to_owned()))
            });
        let earlier = mark.map_or(&facts.session.remediations, |mark| &mark.earlier);
        if let Some(open) = mark.and_then(RemediationMark::under_way) {
            self.set_attempt(open);
        }
        // A dry run has created nothing that could be looked for.
        if settings.mode == Mode::DryRun && self.object.state == ResourceObservation::Unknown {
            self.object.state = ResourceObservation::Absent;
        }
        let routes: Vec<Option<String>> = (desired.events.iter())
            .map(|one| {
                let route = one.unrepaired_by().map(Routed::title);
                route.or_else(|| not_worked(&one.event, &desired.events))
            })
            .collect();
        let events: Vec<OpenFault<'_>> = (desired.events.iter().zip(&routes))
            .map(|(one, route)| OpenFault {
                event: &one.event,
                first_seen: one.first_seen,
                excluded_by: route.as_deref(),
                asks_approval: one.asks_approval(),
                unapproved: one.unapproved,
            })
            .collect();
        Some(decide(&RemediationInput {
            events: &events,
            mark,
            resource: &self.object.state,
            creating: self.object.creating,
            searching: self.searching,
            config: settings.remediation.as_deref(),
            blocker: blocker.as_ref(),
            drains,
            drain_since: own.mark.drain.map(|mark| mark.since),
            partial: !own.mark.drain_gpus.is_empty(),
            proposals: &desired.proposals,
            earlier,
            now: facts.state.now,
        }))
    }

    /// Records a decision, and journals what is new about it.
    fn apply_decision(
        &mut self,
        own: &Ownership,
        decision: &RemediationDecision,
        quiet_until: Option<Timestamp>,
        requests: &mut StageRequests<'_>,
    ) {
        if decision.whole_node && !self.whole_node {
            self.whole_node = true;
            requests.look_again();
        }
        // While its pods leave, the drain says what is awaited.
        let drains = own.mark.drain.is_some_and(|mark| mark.done.is_none());
        let trouble = self
            .object
            .watch_error
            .as_ref()
            .or(self.object.retry.why.as_ref());
        let trouble = trouble.map_or_else(String::new, |why| format!(" ({why})"));
        let awaits = decision.awaiting.awaits().filter(|_| !drains);
        self.awaits = awaits.map(|awaits| format!("{awaits}{trouble}"));
        self.searching = decision.searching;
        let wakes = [decision.awaiting.wake(), quiet_until];
        self.wake = wakes.into_iter().flatten().min();
        for action in decision.unsupported.difference(&self.unsupported) {
            requests.effect(Effect::Remediation(RemediationResult::Unsupported {
                node: requests.node().to_owned(),
                action: action.clone(),
            }));
        }
        for route in decision.skipped.difference(&self.skipped) {
            let text = format!("no repair: skipped by {route}");
            requests.journal(JournalNote::new(EntryKind::Session, text), None);
        }
        self.unsupported.clone_from(&decision.unsupported);
        self.skipped.clone_from(&decision.skipped);
    }

    /// Returns whether a change of the session is gone from the node, and the verdict on it has
    /// to wait until the watch says whether the attempt under way had begun.
    fn awaits_begin(&mut self, facts: &Facts<'_>) -> bool {
        let Some((observed, own)) = facts.session_on_node().filter(|_| facts.state.acts()) else {
            return false;
        };
        let mark = own.mark.remediation.as_ref();
        let mark = mark.filter(|_| own.undone_by_hand(&observed.view).is_some());
        let Some(open) = mark.and_then(RemediationMark::under_way) else {
            return false;
        };
        let awaits = open.remediates()
            && self.has_begun(open).is_none()
            && self.object.watch_error.is_none();
        self.object.watch |= awaits;
        awaits
    }

    /// Creates the custom resource of an attempt, if that is due; a dry run pretends that it has
    /// succeeded.
    fn create_resource(
        &mut self,
        facts: &Facts<'_>,
        view: &NodeView,
        desired: &Desired,
        open: &Attempt,
        requests: &mut StageRequests<'_>,
    ) {
        let settings = &facts.state.settings;
        if !self.object.may_create(facts.state.now) {
            return; // The answer, or the end of the wait, triggers another look.
        }
        let mut events = desired.events.iter().map(|one| &one.event);
        let event = events.find(|event| event.id == open.event);
        let event = event.or(desired.events.first().map(|one| &one.event));
        let config = settings.remediation.as_deref();
        let action = config.and_then(|config| config.actions.get(&open.action));
        let (Some(event), Some(action)) = (event, action) else {
            return self.refuse(format!("there is no action {}", open.action), requests);
        };
        let mut object = match action.render(event, &open.id, &open.entity) {
            Ok(object) => object,
            Err(why) => return self.refuse(why, requests),
        };
        complete(&mut object, open, view);
        if settings.mode == Mode::DryRun {
            let note = JournalNote {
                kind: EntryKind::DryRun,
                text: format!("dry run: {} is made ({})", open.title(), open.action),
                detail: object,
            };
            requests.journal(note, None);
            self.object.state = ResourceObservation::There(Box::new(ResourceState {
                uid: String::new(),
                attempt: Some(open.key()),
                begun: true,
                end: Some((
                    AttemptOutcome::Succeeded,
                    "a dry run does nothing".to_owned(),
                )),
            }));
            return requests.look_again();
        }
        if !settings.cluster {
            return;
        }
        // From here on its former absence says nothing.
        self.object.state = ResourceObservation::Unknown;
        self.object.create(&open.action, object, requests);
    }

    /// Records that the custom resource cannot be created at all.
    fn refuse(&mut self, why: String, requests: &mut StageRequests<'_>) {
        self.object.state = ResourceObservation::Refused(why);
        requests.look_again();
    }
}

impl Stage for RemediationState {
    fn begin(&mut self) {
        (self.object.watch, self.awaits, self.wake) = (false, None, None);
    }

    /// Decides what the session is to record of the remediation.
    fn plan(
        &mut self,
        facts: &Facts<'_>,
        desired: &mut Desired,
        requests: &mut StageRequests<'_>,
    ) -> ControlFlow<()> {
        let Some((_, own)) = facts.session_on_node() else {
            return ControlFlow::Continue(());
        };
        if facts.state.acts() && self.record_repairs(facts.name, own, requests) {
            return ControlFlow::Break(()); // The answer triggers another look.
        }
        let Some(decision) = self.decide(facts, own, desired) else {
            return ControlFlow::Continue(());
        };
        let quiet_until = waits_for_quiet(facts.state, facts.name);
        self.apply_decision(own, &decision, quiet_until, requests);
        desired.remediation = decision.mark;
        desired.needs_approval.extend(decision.needs_approval);
        if desired.remediation.is_some() && self.awaits_begin(facts) {
            return ControlFlow::Break(()); // The watch triggers another look.
        }
        ControlFlow::Continue(())
    }

    /// Creates the custom resource that is due, and journals the changes of earlier attempts.
    fn act(&mut self, facts: &Facts<'_>, desired: &Desired, requests: &mut StageRequests<'_>) {
        let Some((observed, own)) = facts.session_on_node() else {
            if facts.observed.is_some() {
                (self.last_mark, self.awaits, self.whole_node) = (None, None, false);
                self.recorded.clear();
                self.unsupported.clear();
                self.skipped.clear();
            }
            return;
        };
        self.journal_changes(facts, own, requests);
        let mark = own.mark.remediation.as_ref();
        let Some(open) = mark.and_then(RemediationMark::under_way) else {
            return;
        };
        let same = |one: &&Attempt| one.key() == open.key();
        let wanted = desired.remediation.as_ref();
        let wanted = wanted.filter(|_| facts.session.phase.is_out());
        let Some(stays) = wanted.and_then(|mark| mark.attempts.iter().find(same)) else {
            if facts.state.acts() {
                self.object.withdraw(open, false, requests);
            }
            return;
        };
        self.set_attempt(open);
        self.object.mark_wanted();
        // Absence says nothing while the resource is being created.
        let watch = open.made.is_some() || self.is_there() || self.searching;
        self.object.watch = watch && facts.state.settings.mode != Mode::DryRun;
        if stays.end.is_none() && stays.made.is_none() && !self.is_there() && !self.searching {
            self.create_resource(facts, &observed.view, desired, open, requests);
        }
    }

    fn settle(&mut self, requests: &mut StageRequests<'_>) {
        self.object.settle(requests);
    }

    fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let retry = self.object.retry.at().filter(|_| !self.object.creating);
        let times = [self.wake, retry];
        times.into_iter().flatten().filter(|at| *at > now).min()
    }

    fn awaits_answer(&self) -> bool {
        false // A successor resumes the request from the node's mark.
    }

    fn awaits(&self) -> Option<&str> {
        self.awaits.as_deref()
    }

    fn clock_moved_back(&mut self, now: Timestamp) {
        self.unanalysed_since = self.unanalysed_since.map(|since| since.min(now));
        self.object.retry.clear_wait();
    }

    fn answers_lost(&mut self) {
        self.recorded.clear();
        self.object.answers_lost();
    }
}

/// Awaited while something has undone the session's cordon or taints.
pub(crate) const NOT_OUT: &str = "its cordon and taints, which are not all there";

/// Returns the hold that a veto puts on remediation.
fn vetoed(veto: &Veto) -> Blocker {
    let why = format!("the end of {veto}");
    match veto.ends_at() {
        Some(until) => Blocker::Until(until, why),
        None => Blocker::Others(why),
    }
}

/// Returns why no remediation begins now.
fn blocker(view: &NodeView, own: &Ownership, drains: bool) -> Option<Blocker> {
    if drains {
        return Some(Blocker::Drain);
    }
    if own.lacks_a_deed(view) {
        return Some(Blocker::Others(NOT_OUT.to_owned()));
    }
    view.is_handed_over()
        .then(|| Blocker::Others(HANDED_OVER.to_owned()))
}

#[cfg(test)]
mod tests;
