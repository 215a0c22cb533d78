//! The repair of nodes: makes custom resources and watches them.
//!
//! What is done next follows from the node's session ([`decide`]). The node says first which attempt is
//! made; then its custom resource is made, under a name that the session fixes, and watched until it has
//! ended. So who starts anew goes on where the node says it is, and makes none twice.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Effect, Fleet, Mode};
use crate::assess::{CountedEvent, Desired};
use crate::handover::{HANDED_OVER, is_handed_over};
use crate::journal::EntryKind;
use crate::node::NodeView;
use crate::ownership::Ownership;
use crate::policy::Routed;
use crate::remedy::validation::{DIAGNOSTICS_GROUP, VALIDATION_GROUP};
use crate::remedy::{
    Attempt, Case, Hold, OpenFault, Outcome, RemediationMark, ResourceKind, ResourceState, Seen,
    decide,
};
use crate::session::{Failure, Note, Observed, retry_after};
use crate::veto::Veto;
use contract::{RecommendedAction, keys};

/// A custom resource to be made.
#[derive(Clone, Debug)]
pub struct PlannedResource {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// The attempt.
    pub key: String,
    /// Its action.
    pub action: String,
    /// Its kind.
    pub kind: ResourceKind,
    /// Its name.
    pub name: String,
    /// The object.
    pub object: Value,
}

/// News of a custom resource.
#[derive(Clone, Debug)]
pub enum ResourceNews {
    /// It is this.
    There(Box<Value>),
    /// It is not there.
    Absent,
    /// It cannot be seen, for this reason; it is tried again.
    Failing(String),
}

/// The answer of the API server to a custom resource that was to be made.
#[derive(Clone, Debug)]
pub enum MadeAnswer {
    /// It is there, made now or before.
    There(Box<Value>),
    /// It is refused for good, for this reason.
    Refused(String),
    /// It was not made, for this reason, or nobody knows.
    Failed {
        /// The reason.
        why: String,
        /// The time after which the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
}

/// News of repairs, to be counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemediationNews {
    /// An attempt has ended.
    Ended {
        /// The node.
        node: String,
        /// Its action.
        action: String,
        /// How it went.
        outcome: Outcome,
    },
    /// An event recommends this action, and nobody carries it out.
    Unsupported {
        /// The node.
        node: String,
        /// The action.
        action: String,
    },
}

/// The state of the repair of a node.
#[derive(Debug, Default)]
pub(super) struct RemedyState {
    /// The attempt that the rest is about.
    key: String,
    /// The kind and name of its custom resource.
    resource: Option<(ResourceKind, String)>,
    /// The custom resource, as it was last seen.
    seen: Seen,
    /// True while it is to be followed.
    wanted: bool,
    /// True once somebody has told of it who follows it: the answer by which it was made may be old.
    told: bool,
    /// The resource of which somebody tells.
    followed: Option<(ResourceKind, String)>,
    /// The reason why it cannot be seen.
    failing: Option<String>,
    making: bool,
    /// True while it is looked for, for nobody knows whether a process before this one made it.
    sought: bool,
    /// Why it was refused for good; that holds where it is looked for and is not there.
    refused: Option<String>,
    /// Number of attempts in a row to make it that did not succeed.
    failures: u32,
    not_before: Option<Timestamp>,
    /// Why it could not be made.
    trouble: Option<String>,
    /// The attempt that was withdrawn last.
    withdrawn: Option<Attempt>,
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

// === impl RemedyState ===

impl RemedyState {
    /// Returns when it is to be looked at even if nothing happens.
    pub(super) fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let times = [self.wake, self.not_before.filter(|_| !self.making)];
        times.into_iter().flatten().filter(|at| *at > now).min()
    }

    /// Returns what the repair waits for, for people; `None` where none is asked for.
    pub(super) fn awaits(&self) -> Option<&str> {
        self.awaits.as_deref()
    }

    /// Takes in that the clock was put back.
    pub(super) fn clock_put_back(&mut self, _now: Timestamp) {
        self.not_before = None;
    }

    /// Takes in that what is under way will not be answered.
    pub(super) fn answers_lost(&mut self) {
        self.making = false;
    }

    /// Returns whether anybody has begun an attempt; `None` where nobody has told yet.
    pub(super) fn has_begun(&self, attempt: &Attempt) -> Option<bool> {
        let seen = Some(&self.seen).filter(|_| self.key == attempt.key());
        match seen.unwrap_or(&Seen::Unknown) {
            Seen::There(state) => Some(state.begun).filter(|begun| *begun || self.told),
            Seen::Unknown if attempt.made.is_some() || self.sought => None,
            Seen::Unknown | Seen::Absent | Seen::Gone | Seen::Refused(_) => Some(false),
        }
    }

    /// Returns whether nobody knows if the custom resource of an attempt was made: the answer to that was lost, or
    /// is still to come.
    pub(super) fn may_be_made(&self, attempt: &Attempt) -> bool {
        let asked = self.making || self.failures > 0;
        let unseen = self.key == attempt.key() && matches!(self.seen, Seen::Unknown);
        asked && unseen && attempt.made.is_none()
    }

    /// Returns whether the custom resource that is to be followed cannot be seen.
    pub(super) fn is_unseen(&self) -> bool {
        self.failing.is_some()
    }

    /// Marks that its custom resource is to be followed.
    pub(super) fn wish(&mut self) {
        self.wanted = true;
    }

    /// Marks that nothing need be known, unless what follows wants it.
    fn forget_wish(&mut self) {
        (self.wanted, self.awaits, self.wake) = (false, None, None);
    }

    /// Takes in which attempt is under way.
    fn turn_to(&mut self, attempt: &Attempt) {
        let key = attempt.key();
        if self.key == key {
            return;
        }
        self.key = key;
        self.resource = Some((attempt.resource.clone(), attempt.name.clone()));
        (self.seen, self.failing, self.trouble) = (Seen::Unknown, None, None);
        (self.making, self.sought, self.refused) = (false, false, None);
        (self.failures, self.not_before) = (0, None);
    }

    fn is_there(&self) -> bool {
        matches!(self.seen, Seen::There(_))
    }
}

// === impl Fleet ===

impl Fleet {
    /// Marks that the pods and the custom resource of a node need not be known, unless what follows wants
    /// them.
    pub(super) fn forget_wishes(&mut self, name: &str) {
        self.forget_wish_for_pods(name);
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.custom.forget_wish();
            entry.remedy.forget_wish();
        }
    }

    /// Returns whether a node is repaired as a whole where its faults ask for the reset of GPUs: then all of
    /// its pods are to leave.
    pub(super) fn repairs_whole_node(&self, name: &str) -> bool {
        let reset = RecommendedAction::ComponentReset.as_str_name();
        let config = self.common.settings.remedy.as_deref();
        let reset = config.and_then(|config| config.actions.get(reset));
        reset.is_some_and(|action| action.entity_scope.is_none())
            || self.nodes.get(name).is_some_and(|entry| entry.remedy.whole)
    }

    /// Takes news of the custom resource of a node's repair in.
    pub(super) fn take_resource(&mut self, node: &str, resource: &str, news: ResourceNews) {
        if self.take_custom(node, resource, &news) {
            return;
        }
        let Some(entry) = self.nodes.get_mut(node) else {
            return;
        };
        let state = &mut entry.remedy;
        let Some((kind, _)) = (state.followed.clone())
            .filter(|one| one.1 == resource && state.resource.as_ref() == Some(one))
        else {
            return; // Of an earlier one.
        };
        match news {
            ResourceNews::There(object) => {
                let read = ResourceState::read(&object, &kind);
                // Another that was made in its place is not ours: ours is gone, if it was there.
                let ours = read.attempt.as_ref() == Some(&state.key);
                state.seen = if ours || state.sought {
                    Seen::There(Box::new(read))
                } else {
                    Seen::Gone
                };
                (state.failing, state.refused) = (None, None);
            }
            ResourceNews::Absent => {
                state.seen = match state.refused.take() {
                    Some(why) => Seen::Refused(why),
                    None if state.sought => Seen::Absent,
                    None => Seen::Gone,
                };
                state.failing = None;
            }
            ResourceNews::Failing(why) => state.failing = Some(why),
        }
        state.told = state.failing.is_none();
        self.look_again_at(node);
    }

    /// Takes the answer to a custom resource in that was to be made.
    pub(super) fn resource_made(&mut self, node: &str, key: &str, answer: MadeAnswer) {
        let now = self.common.now;
        if self.custom_made(node, key, &answer) {
            return;
        }
        let Some(entry) = self.nodes.get_mut(node).filter(|one| one.remedy.key == key) else {
            return;
        };
        let state = &mut entry.remedy;
        state.making = false;
        match answer {
            MadeAnswer::There(object) => {
                if let Some((kind, _)) = &state.resource {
                    state.seen = Seen::There(Box::new(ResourceState::read(&object, kind)));
                }
                (state.failures, state.trouble) = (0, None);
                // It was withdrawn while it was made.
                let late = state.withdrawn.clone().filter(|one| one.key() == key);
                if let Some(attempt) = late.map(Box::new) {
                    let node = node.to_owned();
                    let begun = false;
                    self.agenda.effects.push(Effect::Withdraw {
                        node,
                        attempt,
                        begun,
                    });
                }
            }
            // An earlier try, also of a process before this one, may have made it, and its answer is lost.
            MadeAnswer::Refused(why) => (state.refused, state.sought) = (Some(why), true),
            MadeAnswer::Failed {
                why,
                retry_after: wish,
            } => {
                state.failures = state.failures.saturating_add(1);
                let failure = Failure::Error { retry_after: wish };
                state.not_before = Some(now + retry_after(state.failures, failure));
                let news = state.trouble.as_ref() != Some(&why);
                state.trouble = Some(why.clone());
                if news {
                    let session = entry.session.id.clone();
                    let text = format!("the repair is not begun: {why}; it is tried again");
                    self.note(
                        node,
                        session.as_deref(),
                        Note::new(EntryKind::Answer, text),
                        None,
                    );
                }
            }
        }
        self.set_wake(node);
        self.look_again_at(node);
    }

    /// Returns what the session of a node is to say of its remediation.
    pub(super) fn remediation(
        &mut self,
        name: &str,
        observed: &Observed,
        desired: &Desired,
    ) -> Option<RemediationMark> {
        let own = observed.own.as_deref()?;
        // A session of NVSentinel has no place to say how far its repair is.
        let applies =
            own.takes_node_out() && own.replaced_labels.is_some() && desired.takes_node_out();
        let config = self.common.settings.remedy.clone();
        let mark = own.mark.remediation.as_ref();
        if !applies || (config.is_none() && mark.is_none()) {
            return None;
        }
        let now = self.common.now;
        let quiet_until = self.waits_for_quiet(name);
        let hold = (self.veto(name).map(vetoed))
            .or_else(|| hold(&observed.view, own, desired))
            .or_else(|| {
                let why = "a while without a new fault";
                quiet_until.map(|until| Hold::Until(until, why.to_owned()))
            });
        let pretends = self.common.settings.mode == Mode::DryRun;
        let entry = self.nodes.get_mut(name)?;
        let earlier = mark.map_or(&entry.session.repairs, |mark| &mark.earlier);
        if let Some(open) = mark.and_then(RemediationMark::under_way) {
            entry.remedy.turn_to(open);
        }
        // A dry run has made nothing that could be looked for.
        if pretends && entry.remedy.seen == Seen::Unknown {
            entry.remedy.seen = Seen::Absent;
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
        let decision = decide(&Case {
            events: &events,
            mark,
            seen: &entry.remedy.seen,
            making: entry.remedy.making,
            sought: entry.remedy.sought,
            config: config.as_deref(),
            hold: hold.as_ref(),
            partial: !own.mark.drain_gpus.is_empty(),
            earlier,
            now,
        });
        if decision.whole && !entry.remedy.whole {
            entry.remedy.whole = true;
            self.agenda.dirty.insert(name.to_owned());
        }
        let entry = self.nodes.get_mut(name)?;
        let state = &mut entry.remedy;
        // While its pods leave, the drain says what is awaited.
        let drains = own.mark.drain.is_some_and(|mark| mark.done.is_none());
        let trouble = state.failing.as_ref().or(state.trouble.as_ref());
        let trouble = trouble.map_or_else(String::new, |why| format!(" ({why})"));
        let awaits = decision.stand.awaits().filter(|_| !drains);
        state.awaits = awaits.map(|awaits| format!("{awaits}{trouble}"));
        state.sought = decision.sought;
        let wakes = [decision.stand.wake(), quiet_until];
        state.wake = wakes.into_iter().flatten().min();
        let news: Vec<String> = (decision.unsupported.iter())
            .filter(|action| !state.unsupported.contains(*action))
            .cloned()
            .collect();
        state.unsupported = decision.unsupported;
        let before = std::mem::replace(&mut state.skipped, decision.skipped);
        let skipped: Vec<String> = state.skipped.difference(&before).cloned().collect();
        let counted = news.into_iter().map(|action| {
            let node = name.to_owned();
            Effect::Remediation(RemediationNews::Unsupported { node, action })
        });
        self.agenda.effects.extend(counted);
        for route in skipped {
            let session = self.entry(name).session.id.clone();
            let text = format!("no repair: skipped by {route}");
            let note = Note::new(EntryKind::Session, text);
            self.note(name, session.as_deref(), note, None);
        }
        decision.mark
    }

    /// Makes the custom resource that is to be made now, and tells what has become of those before.
    pub(super) fn look_at_repair(&mut self, name: &str, observed: &Observed, desired: &Desired) {
        let Some(own) = observed.own.as_deref() else {
            if let Some(entry) = self.nodes.get_mut(name) {
                (entry.remedy.noted, entry.remedy.awaits) = (None, None);
                entry.remedy.whole = false;
                entry.remedy.unsupported.clear();
                entry.remedy.skipped.clear();
            }
            return;
        };
        self.note_repair(name, own);
        let Some(open) = own
            .mark
            .remediation
            .as_ref()
            .and_then(RemediationMark::under_way)
        else {
            return;
        };
        let is_out = self.session(name).is_some_and(|one| one.phase.is_out());
        let same = |one: &&Attempt| one.key() == open.key();
        let wanted = desired.remediation.as_ref().filter(|_| is_out);
        let Some(stays) = wanted.and_then(|mark| mark.attempts.iter().find(same)) else {
            self.withdraw(name, open);
            return;
        };
        let state = &mut self.entry(name).remedy;
        state.turn_to(open);
        // That it is not there says nothing while it is being made.
        state.wanted = open.made.is_some() || state.is_there() || state.sought;
        if stays.end.is_none() && stays.made.is_none() && !state.is_there() && !state.sought {
            self.make(name, observed, desired, open);
        }
    }

    /// Has the custom resource of an attempt made, where it is time; in a dry run goes on as if it had
    /// been made and had succeeded.
    fn make(&mut self, name: &str, observed: &Observed, desired: &Desired, open: &Attempt) {
        let now = self.common.now;
        let config = self.common.settings.remedy.clone();
        let state = &self.entry(name).remedy;
        if state.making || state.not_before.is_some_and(|at| now < at) {
            return; // Looked at again when an answer is there, or then.
        }
        let event = desired.events.iter().map(|one| &one.event);
        let event = event.into_iter().find(|event| event.id == open.event);
        let action = config
            .as_ref()
            .and_then(|config| config.actions.get(&open.action));
        let (Some(event), Some(action)) = (
            event.or(desired.events.first().map(|one| &one.event)),
            action,
        ) else {
            let why = format!("there is no action {}", open.action);
            return self.refuse(name, why);
        };
        let mut object = match action.render(event, &open.id, &open.entity) {
            Ok(object) => object,
            Err(why) => return self.refuse(name, why),
        };
        complete(&mut object, open, &observed.view);
        let session = self.entry(name).session.id.clone();
        if self.common.settings.mode == Mode::DryRun {
            let text = format!("dry run: {} is made ({})", open.title(), open.action);
            let note = Note {
                kind: EntryKind::DryRun,
                text,
                detail: object,
            };
            self.note(name, session.as_deref(), note, None);
            self.entry(name).remedy.seen = Seen::There(Box::new(ResourceState {
                uid: String::new(),
                attempt: Some(open.key()),
                begun: true,
                end: Some((Outcome::Succeeded, "a dry run does nothing".to_owned())),
            }));
            self.agenda.dirty.insert(name.to_owned());
            return;
        }
        if !self.common.settings.cluster {
            return;
        }
        let state = &mut self.entry(name).remedy;
        (state.making, state.not_before) = (true, None);
        // That it was not there says nothing from here on.
        state.seen = Seen::Unknown;
        self.agenda
            .effects
            .push(Effect::Make(Box::new(PlannedResource {
                node: name.to_owned(),
                session,
                key: open.key(),
                action: open.action.clone(),
                kind: open.resource.clone(),
                name: open.name.clone(),
                object,
            })));
    }

    /// Takes in that the custom resource cannot be made at all.
    fn refuse(&mut self, name: &str, why: String) {
        self.entry(name).remedy.seen = Seen::Refused(why);
        self.agenda.dirty.insert(name.to_owned());
    }

    /// Has the custom resource of an attempt deleted that is not wanted any more, once.
    fn withdraw(&mut self, name: &str, open: &Attempt) {
        let acts = self.common.settings.mode == Mode::Quarantine && self.common.settings.cluster;
        let state = &mut self.entry(name).remedy;
        let known = state.withdrawn.as_ref().map(Attempt::key);
        if known == Some(open.key()) || !acts {
            return;
        }
        state.withdrawn = Some(open.clone());
        let (node, attempt) = (name.to_owned(), Box::new(open.clone()));
        let begun = false;
        self.agenda.effects.push(Effect::Withdraw {
            node,
            attempt,
            begun,
        });
    }

    /// Has the custom resource of a node told, or not told any more, as is wanted.
    pub(super) fn follow_resource(&mut self, name: &str) {
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        let of_drain = entry.custom.follows();
        let state = &mut entry.remedy;
        let of_repair = state.resource.clone().filter(|_| state.wanted);
        let follow = of_drain.or(of_repair);
        if state.followed == follow {
            return;
        }
        state.followed.clone_from(&follow);
        (state.failing, state.told) = (None, false);
        if self.common.settings.mode == Mode::DryRun {
            return;
        }
        let node = name.to_owned();
        self.agenda.effects.push(Effect::Follow {
            node,
            resource: follow,
        });
    }

    /// Adds to the story of a node what has become of its repair since it was last looked at.
    fn note_repair(&mut self, name: &str, own: &Ownership) {
        let mark = own.mark.remediation.clone().unwrap_or_default();
        let entry = self.entry(name);
        let before = entry.remedy.noted.replace(mark.clone());
        if before.as_ref() == Some(&mark) {
            return;
        }
        // Who starts anew has nothing new to tell.
        let Some(before) = before else {
            return;
        };
        let session = entry.session.id.clone();
        for (index, one) in mark.attempts.iter().enumerate() {
            let known = before
                .attempts
                .get(index)
                .filter(|known| known.key() == one.key());
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
                let detail = json!({"attempt": one});
                self.note_attempt(name, session.as_deref(), text, detail);
            }
            let Some(end) = &one.end else {
                continue;
            };
            if known.is_none_or(|known| known.end.is_none()) {
                let detail = json!({"attempt": one});
                self.note_attempt(name, session.as_deref(), one.ending(), detail);
                self.agenda
                    .effects
                    .push(Effect::Remediation(RemediationNews::Ended {
                        node: name.to_owned(),
                        action: one.action.clone(),
                        outcome: end.outcome,
                    }));
            }
        }
        let begun = [keys::STATE_REMEDIATING, keys::STATE_REMEDIATION_FAILED];
        let was = before.state();
        if mark.state().is_none() && was.is_some_and(|was| begun.contains(&was)) {
            let awaits = self.entry(name).remedy.awaits.clone();
            let text = match awaits {
                Some(awaits) => format!("no repair goes on now; awaited is {awaits}"),
                None if self.common.settings.remedy.is_none() => {
                    "no repair goes on: repairs are switched off".to_owned()
                }
                None => "no repair goes on: the faults that are open ask for none now".to_owned(),
            };
            let note = Note::new(EntryKind::Session, text);
            self.note(name, session.as_deref(), note, None);
        }
        let asked = before.person.map(|one| one.why);
        if let Some(person) = mark.person.filter(|one| asked.as_ref() != Some(&one.why)) {
            let text = format!(
                "the repair does not get on: {}; repair the node by hand, and release it",
                person.why
            );
            self.call_attention(name, text);
        }
    }

    fn note_attempt(&mut self, name: &str, session: Option<&str>, text: String, detail: Value) {
        let kind = EntryKind::Session;
        self.note(name, session, Note { kind, text, detail }, None);
    }
}

/// Said where nothing begins, for something has undone what the session did.
pub(super) const NOT_OUT: &str = "its cordon and taints, which are not all there";

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
    is_handed_over(&view.labels).then(|| Hold::Others(HANDED_OVER.to_owned()))
}

/// Adds to the object of an attempt what it says for whom it was made. It goes with the node.
pub(super) fn complete(object: &mut Value, open: &Attempt, node: &NodeView) {
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
