//! The stage that repairs a node: creates custom resources and watches them.
//!
//! What is done next follows from the node's session ([`decide`]). The node says first which attempt is
//! made; then its custom resource is made, under a name that the session fixes, and watched until it has
//! ended. So who starts anew goes on where the node says it is, and makes none twice.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use jiff::Timestamp;
use model::attempt::{Attempt, Outcome, RemediationMark};
use model::attempt::{DIAGNOSTICS_GROUP, VALIDATION_GROUP};
use model::journal::EntryKind;
use model::mode::Mode;
use model::node::{HANDED_OVER, NodeView};
use model::ownership::Ownership;
use model::resource::ResourceState;
use policy::Routed;
use policy::assess::{CountedEvent, Desired};
use serde_json::{Value, json};

use super::validation::waits_for_quiet;
use super::wanted::Wanted;
use super::{Asks, Facts, Stage};
use crate::remediation::{Case, Decision, Hold, OpenFault, Seen, decide};
use crate::session::{Failure, Note};
use crate::veto::Veto;
use crate::{CreateAnswer, Effect, RemediationNews, ResourceNews, Settings};
use contract::{RecommendedAction, keys};

/// The repair of one node.
#[derive(Debug, Default)]
pub(crate) struct RemediationState {
    /// The custom resource of the attempt under way.
    object: Wanted<Seen>,
    /// True while the resource is looked for, for nobody knows whether a process before this one created it.
    sought: bool,
    /// Why the resource was refused for good; that holds where it is looked for and is not there.
    refused: Option<String>,
    /// What the node said when it was last looked at; `None`: it was not, by this process.
    noted: Option<RemediationMark>,
    /// Actions that were counted as not supported.
    unsupported: BTreeSet<String>,
    /// Routes of the policy of which the story says that nothing is repaired for them.
    skipped: BTreeSet<String>,
    /// True once the node as a whole is to be repaired, and not only its GPUs that were drained.
    whole: bool,
    /// What is awaited, for people.
    awaits: Option<String>,
    wake: Option<Timestamp>,
}

// === impl RemediationState ===

impl RemediationState {
    /// Returns what the repair waits for, for people; `None` where none is asked for.
    pub(crate) fn awaits(&self) -> Option<&str> {
        self.awaits.as_deref()
    }

    /// Returns whether anybody has begun an attempt; `None` where nobody has told yet.
    pub(crate) fn has_begun(&self, attempt: &Attempt) -> Option<bool> {
        let seen = Some(&self.object.seen).filter(|_| self.object.is_of(&attempt.key()));
        match seen.unwrap_or(&Seen::Unknown) {
            Seen::There(state) => Some(state.begun).filter(|begun| *begun || self.object.confirmed),
            Seen::Unknown if attempt.made.is_some() || self.sought => None,
            Seen::Unknown | Seen::Absent | Seen::Gone | Seen::Refused(_) => Some(false),
        }
    }

    /// Returns whether nobody knows if the custom resource of an attempt was made: the answer to that was lost, or
    /// is still to come.
    pub(crate) fn may_be_made(&self, attempt: &Attempt) -> bool {
        let asked = self.object.creating || self.object.retry.failures > 0;
        let unseen = self.object.is_of(&attempt.key()) && self.object.seen == Seen::Unknown;
        asked && unseen && attempt.made.is_none()
    }

    /// Returns whether the node is repaired as a whole where its faults ask for the reset of GPUs: then all of
    /// its pods are to leave.
    pub(crate) fn repairs_whole_node(&self, settings: &Settings) -> bool {
        let reset = RecommendedAction::ComponentReset.as_str_name();
        let config = settings.remediation.as_deref();
        let reset = config.and_then(|config| config.actions.get(reset));
        reset.is_some_and(|action| action.entity_scope.is_none()) || self.whole
    }

    /// Takes news of a custom resource. Returns whether it is the one of the attempt under way.
    pub(crate) fn take(&mut self, resource: &str, news: ResourceNews) -> bool {
        let attempt = self.object.attempt.as_ref();
        let attempt = attempt.filter(|_| self.object.is_watched(resource));
        let Some(attempt) = attempt else {
            return false; // Of an earlier one.
        };
        self.object.unseen = None;
        match news {
            ResourceNews::There(object) => {
                let read = ResourceState::read(&object, &attempt.resource);
                // Another that was made in its place is not ours: ours is gone, if it was there.
                let ours = read.attempt == Some(attempt.key());
                self.object.seen = if ours || self.sought {
                    Seen::There(Box::new(read))
                } else {
                    Seen::Gone
                };
                self.refused = None;
            }
            ResourceNews::Absent => {
                self.object.seen = match self.refused.take() {
                    Some(why) => Seen::Refused(why),
                    None if self.sought => Seen::Absent,
                    None => Seen::Gone,
                };
            }
            ResourceNews::Failing(why) => self.object.unseen = Some(why),
        }
        self.object.confirmed = self.object.unseen.is_none();
        true
    }

    /// Takes the answer to a custom resource that was to be made. Returns whether it is the one of the
    /// attempt under way.
    pub(crate) fn made(&mut self, key: &str, answer: CreateAnswer, asks: &mut Asks<'_>) -> bool {
        let object = &mut self.object;
        let Some(attempt) = object.attempt.as_ref().filter(|one| one.key() == key) else {
            return false;
        };
        object.creating = false;
        match answer {
            CreateAnswer::There(there) => {
                let read = ResourceState::read(&there, &attempt.resource);
                object.seen = Seen::There(Box::new(read));
                object.created(false, asks);
            }
            // An earlier try, also of a process before this one, may have made it, and its answer is lost.
            CreateAnswer::Refused(why) => (self.refused, self.sought) = (Some(why), true),
            CreateAnswer::Failed { why, retry_after } => {
                let failure = Failure::Error { retry_after };
                if object.retry.failed(&why, failure, asks.now()) {
                    let text = format!("the repair is not begun: {why}; it is tried again");
                    asks.note(Note::new(EntryKind::Answer, text), None);
                }
            }
        }
        true
    }

    /// Takes in which attempt is under way.
    fn turn_to(&mut self, attempt: &Attempt) {
        if self.object.turn_to(attempt) {
            (self.sought, self.refused) = (false, None);
        }
    }

    fn is_there(&self) -> bool {
        matches!(self.object.seen, Seen::There(_))
    }

    /// Returns what is decided about the repair of a node that is out of service; `None` where nothing is.
    fn decide(
        &mut self,
        facts: &Facts<'_>,
        own: &Ownership,
        desired: &Desired,
    ) -> Option<Decision> {
        // A session of NVSentinel has no place to say how far its repair is.
        let applies =
            own.takes_node_out() && own.replaced_labels.is_some() && desired.takes_node_out();
        let settings = &facts.state.settings;
        let mark = own.mark.remediation.as_ref();
        let observed = facts.observed.filter(|_| applies)?;
        if settings.remediation.is_none() && mark.is_none() {
            return None;
        }
        let hold = (facts.veto.map(vetoed))
            .or_else(|| hold(&observed.view, own, desired))
            .or_else(|| {
                let why = "a while without a new fault";
                let quiet_until = waits_for_quiet(facts.state, facts.name);
                quiet_until.map(|until| Hold::Until(until, why.to_owned()))
            });
        let earlier = mark.map_or(&facts.session.repairs, |mark| &mark.earlier);
        if let Some(open) = mark.and_then(RemediationMark::under_way) {
            self.turn_to(open);
        }
        // A dry run has made nothing that could be looked for.
        if settings.mode == Mode::DryRun && self.object.seen == Seen::Unknown {
            self.object.seen = Seen::Absent;
        }
        let routes = desired.events.iter().map(CountedEvent::unrepaired_by);
        let routes: Vec<Option<String>> = routes.map(|one| one.map(Routed::title)).collect();
        let events: Vec<OpenFault<'_>> = (desired.events.iter().zip(&routes))
            .map(|(one, route)| OpenFault {
                event: &one.event,
                first_seen: one.first_seen,
                unrepaired_by: route.as_deref(),
            })
            .collect();
        Some(decide(&Case {
            events: &events,
            mark,
            seen: &self.object.seen,
            making: self.object.creating,
            sought: self.sought,
            config: settings.remediation.as_deref(),
            hold: hold.as_ref(),
            partial: !own.mark.drain_gpus.is_empty(),
            earlier,
            now: facts.state.now,
        }))
    }

    /// Takes in what was decided, and says what is new about it.
    fn take_decision(
        &mut self,
        own: &Ownership,
        decision: &Decision,
        quiet_until: Option<Timestamp>,
        asks: &mut Asks<'_>,
    ) {
        if decision.whole && !self.whole {
            self.whole = true;
            asks.look_again();
        }
        // While its pods leave, the drain says what is awaited.
        let drains = own.mark.drain.is_some_and(|mark| mark.done.is_none());
        let trouble = self
            .object
            .unseen
            .as_ref()
            .or(self.object.retry.why.as_ref());
        let trouble = trouble.map_or_else(String::new, |why| format!(" ({why})"));
        let awaits = decision.stand.awaits().filter(|_| !drains);
        self.awaits = awaits.map(|awaits| format!("{awaits}{trouble}"));
        self.sought = decision.sought;
        let wakes = [decision.stand.wake(), quiet_until];
        self.wake = wakes.into_iter().flatten().min();
        for action in decision.unsupported.difference(&self.unsupported) {
            asks.effect(Effect::Remediation(RemediationNews::Unsupported {
                node: asks.node().to_owned(),
                action: action.clone(),
            }));
        }
        for route in decision.skipped.difference(&self.skipped) {
            let text = format!("no repair: skipped by {route}");
            asks.note(Note::new(EntryKind::Session, text), None);
        }
        self.unsupported.clone_from(&decision.unsupported);
        self.skipped.clone_from(&decision.skipped);
    }

    /// Returns whether something is gone from the node, and what tells whether a machine did it is to be heard
    /// first: whether the repair that is under way was begun.
    fn awaits_begin(&mut self, facts: &Facts<'_>) -> bool {
        let Some((observed, own)) = facts.ours().filter(|_| facts.state.acts()) else {
            return false;
        };
        let mark = own.mark.remediation.as_ref();
        let mark = mark.filter(|_| own.undone_by_hand(&observed.view).is_some());
        let Some(open) = mark.and_then(RemediationMark::under_way) else {
            return false;
        };
        let awaits =
            open.repairs() && self.has_begun(open).is_none() && self.object.unseen.is_none();
        self.object.watch |= awaits;
        awaits
    }

    /// Makes the custom resource of an attempt, where it is time; in a dry run goes on as if it had
    /// been made and had succeeded.
    fn make(
        &mut self,
        facts: &Facts<'_>,
        view: &NodeView,
        desired: &Desired,
        open: &Attempt,
        asks: &mut Asks<'_>,
    ) {
        let settings = &facts.state.settings;
        if !self.object.may_create(facts.state.now) {
            return; // Looked at again when an answer is there, or then.
        }
        let mut events = desired.events.iter().map(|one| &one.event);
        let event = events.find(|event| event.id == open.event);
        let event = event.or(desired.events.first().map(|one| &one.event));
        let config = settings.remediation.as_deref();
        let action = config.and_then(|config| config.actions.get(&open.action));
        let (Some(event), Some(action)) = (event, action) else {
            return self.refuse(format!("there is no action {}", open.action), asks);
        };
        let mut object = match action.render(event, &open.id, &open.entity) {
            Ok(object) => object,
            Err(why) => return self.refuse(why, asks),
        };
        complete(&mut object, open, view);
        if settings.mode == Mode::DryRun {
            let note = Note {
                kind: EntryKind::DryRun,
                text: format!("dry run: {} is made ({})", open.title(), open.action),
                detail: object,
            };
            asks.note(note, None);
            self.object.seen = Seen::There(Box::new(ResourceState {
                uid: String::new(),
                attempt: Some(open.key()),
                begun: true,
                end: Some((Outcome::Succeeded, "a dry run does nothing".to_owned())),
            }));
            return asks.look_again();
        }
        if !settings.cluster {
            return;
        }
        // That it was not there says nothing from here on.
        self.object.seen = Seen::Unknown;
        self.object.create(&open.action, object, asks);
    }

    /// Takes in that the custom resource cannot be made at all.
    fn refuse(&mut self, why: String, asks: &mut Asks<'_>) {
        self.object.seen = Seen::Refused(why);
        asks.look_again();
    }

    /// Adds to the story of the node what has become of its repair since it was last looked at.
    fn note_repair(&mut self, facts: &Facts<'_>, own: &Ownership, asks: &mut Asks<'_>) {
        let mark = own.mark.remediation.clone().unwrap_or_default();
        let before = self.noted.replace(mark.clone());
        if before.as_ref() == Some(&mark) {
            return;
        }
        // After a restart the marks on the node are old news.
        let Some(before) = before else {
            return;
        };
        for (index, one) in mark.attempts.iter().enumerate() {
            let known = before.attempts.get(index);
            let known = known.filter(|known| known.key() == one.key());
            if known.is_none() {
                let what = match one.group.as_str() {
                    VALIDATION_GROUP => "validation".to_owned(),
                    DIAGNOSTICS_GROUP => "diagnostics".to_owned(),
                    _ => {
                        let so_far = mark.attempts.iter().take(index + 1);
                        let number = so_far.filter(|one| one.repairs()).count();
                        format!("repair {number}")
                    }
                };
                let text = format!("{what}: {} ({})", one.title(), one.action);
                asks.note(of_attempt(one, text), None);
            }
            let Some(end) = &one.end else {
                continue;
            };
            if known.is_none_or(|known| known.end.is_none()) {
                asks.note(of_attempt(one, one.ending()), None);
                asks.effect(Effect::Remediation(RemediationNews::Ended {
                    node: facts.name.to_owned(),
                    action: one.action.clone(),
                    outcome: end.outcome,
                }));
            }
        }
        let begun = [keys::STATE_REMEDIATING, keys::STATE_REMEDIATION_FAILED];
        let was = before.state();
        if mark.state().is_none() && was.is_some_and(|was| begun.contains(&was)) {
            let text = match &self.awaits {
                Some(awaits) => format!("no repair goes on now; awaited is {awaits}"),
                None if facts.state.settings.remediation.is_none() => {
                    "no repair goes on: repairs are switched off".to_owned()
                }
                None => "no repair goes on: the faults that are open ask for none now".to_owned(),
            };
            asks.note(Note::new(EntryKind::Session, text), None);
        }
        let asked = before.person.map(|one| one.why);
        if let Some(person) = mark.person.filter(|one| asked.as_ref() != Some(&one.why)) {
            asks.call_attention(format!(
                "the repair does not get on: {}; repair the node by hand, and release it",
                person.why
            ));
        }
    }
}

impl Stage for RemediationState {
    fn begin(&mut self) {
        (self.object.watch, self.awaits, self.wake) = (false, None, None);
    }

    /// Decides what the session is to say of the repair.
    fn plan(
        &mut self,
        facts: &Facts<'_>,
        desired: &mut Desired,
        asks: &mut Asks<'_>,
    ) -> ControlFlow<()> {
        let Some((_, own)) = facts.ours() else {
            return ControlFlow::Continue(());
        };
        let Some(decision) = self.decide(facts, own, desired) else {
            return ControlFlow::Continue(());
        };
        let quiet_until = waits_for_quiet(facts.state, facts.name);
        self.take_decision(own, &decision, quiet_until, asks);
        desired.remediation = decision.mark;
        if desired.remediation.is_some() && self.awaits_begin(facts) {
            return ControlFlow::Break(()); // Looked at again when it is told.
        }
        ControlFlow::Continue(())
    }

    /// Makes the custom resource that is to be made now, and tells what has become of those before.
    fn act(&mut self, facts: &Facts<'_>, desired: &Desired, asks: &mut Asks<'_>) {
        let Some((observed, own)) = facts.ours() else {
            if facts.observed.is_some() {
                (self.noted, self.awaits, self.whole) = (None, None, false);
                self.unsupported.clear();
                self.skipped.clear();
            }
            return;
        };
        self.note_repair(facts, own, asks);
        let mark = own.mark.remediation.as_ref();
        let Some(open) = mark.and_then(RemediationMark::under_way) else {
            return;
        };
        let same = |one: &&Attempt| one.key() == open.key();
        let wanted = desired.remediation.as_ref();
        let wanted = wanted.filter(|_| facts.session.phase.is_out());
        let Some(stays) = wanted.and_then(|mark| mark.attempts.iter().find(same)) else {
            if facts.state.acts() {
                self.object.withdraw(open, false, asks);
            }
            return;
        };
        self.turn_to(open);
        self.object.keep();
        // That it is not there says nothing while it is being made.
        let watch = open.made.is_some() || self.is_there() || self.sought;
        self.object.watch = watch && facts.state.settings.mode != Mode::DryRun;
        if stays.end.is_none() && stays.made.is_none() && !self.is_there() && !self.sought {
            self.make(facts, &observed.view, desired, open, asks);
        }
    }

    fn settle(&mut self, asks: &mut Asks<'_>) {
        self.object.settle(asks);
    }

    fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let retry = self.object.retry.at().filter(|_| !self.object.creating);
        let times = [self.wake, retry];
        times.into_iter().flatten().filter(|at| *at > now).min()
    }

    fn awaits_answer(&self) -> bool {
        false // It is asked again by whoever comes next: the node says what is made.
    }

    fn clock_moved_back(&mut self, _now: Timestamp) {
        self.object.retry.clear_wait();
    }

    fn answers_lost(&mut self) {
        self.object.answers_lost();
    }
}

/// Returns the note that says `text` of an attempt.
fn of_attempt(attempt: &Attempt, text: String) -> Note {
    Note {
        kind: EntryKind::Session,
        text,
        detail: json!({"attempt": attempt}),
    }
}

/// Said where nothing begins, for something has undone what the session did.
pub(crate) const NOT_OUT: &str = "its cordon and taints, which are not all there";

/// Returns what a veto is for a repair.
fn vetoed(veto: &Veto) -> Hold {
    let why = format!("the end of {veto}");
    match veto.ends_at() {
        Some(until) => Hold::Until(until, why),
        None => Hold::Others(why),
    }
}

/// Returns why no repair begins now.
fn hold(view: &NodeView, own: &Ownership, desired: &Desired) -> Option<Hold> {
    let drained = own.mark.drain.is_some_and(|mark| mark.done.is_some());
    // Where all events ask that pods stay, they do.
    if !drained && desired.drains().is_some() {
        return Some(Hold::Drain);
    }
    if own.lacks_a_deed(view) {
        return Some(Hold::Others(NOT_OUT.to_owned()));
    }
    view.is_handed_over()
        .then(|| Hold::Others(HANDED_OVER.to_owned()))
}

/// Adds to the object of an attempt what it says for whom it was made. It goes with the node.
pub(crate) fn complete(object: &mut Value, open: &Attempt, node: &NodeView) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return; // Not reached: it has a name.
    };
    metadata.insert("name".to_owned(), json!(open.name));
    if let Some(namespace) = &open.resource.namespace {
        metadata.insert("namespace".to_owned(), json!(namespace));
    }
    let annotations = metadata.entry("annotations").or_insert(Value::Null);
    if annotations.is_null() {
        *annotations = json!({});
    }
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.insert(keys::ATTEMPT.to_owned(), json!(open.key()));
    }
    metadata.insert(
        "ownerReferences".to_owned(),
        json!([{
            "apiVersion": "v1",
            "kind": "Node",
            "name": node.name,
            "uid": node.uid,
            "controller": false,
            "blockOwnerDeletion": false,
        }]),
    );
}

#[cfg(test)]
mod tests;
