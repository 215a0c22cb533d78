//! The patches that bring a node from the observed state to the desired one.

use std::collections::BTreeMap;

use contract::{HealthEvent, json, keys};
use jiff::Timestamp;
use model::attempt::RemediationMark;
use model::event::floor_char_boundary;
use model::node::{LABEL_VALUE_BYTES, NodeChange, NodeView, Taint, label_value};
use model::ownership::{
    AppliedTaint, ByHand, CORDON_TIME, DrainMark, Ownership, SessionAnnotation, SessionMark,
    state_label,
};
use model::proposal::{ApprovalRequest, Proposal};
use policy::assess::{CountedEvent, Desired, DrainProgress};
use policy::{ProtectFrom, ProtectionMark};
use serde_json::Value;

use super::{Marks, Session};
use crate::remediation::validation::Validation;

/// Longest message of an event in the node annotation, in bytes.
const ANNOTATED_MESSAGE_BYTES: usize = 1024;
/// Most bytes of the events annotation. The API server allows 256 KiB for all annotations of an
/// object; beyond half of that the least grave events are left out of the annotation, though
/// they count all the same.
const ANNOTATION_BYTES: usize = 128 * 1024;

/// A change of a node that carries a session, while it is being built.
pub(super) struct Draft<'a> {
    node: &'a NodeView,
    own: &'a Ownership,
    marks: &'a Marks,
    now: Timestamp,
    /// True to restore what others have undone.
    puts_back: bool,
    change: NodeChange,
}

/// Labels and annotations that a change adds to those of the session, with their values.
#[derive(Default)]
struct NewMarks {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// Returns the change that takes the node out of service.
pub(super) fn quarantine(
    node: &NodeView,
    desired: &Desired,
    marks: &Marks,
    released_at: Option<Timestamp>,
    session: &Session,
    now: Timestamp,
) -> NodeChange {
    let first = desired.events.first();
    let id = first.map(|counted| counted.event.id.clone());
    let own = Ownership {
        session_id: id.unwrap_or_default(),
        mark: SessionMark {
            by: marks.maker.clone(),
            store: marks.store.clone(),
            returns: session.returns.clone(),
            machines: session.machines.clone(),
            ..SessionMark::default()
        },
        replaced_labels: Some(BTreeMap::new()),
        ..Ownership::default()
    };
    let mut draft = Draft::new(node, &own, marks, now);
    draft.bring_in_line(desired, released_at);
    // A release request or an approval applies to the session of its time, and to no later one.
    for mark in [
        keys::UNCORDONED_MANUALLY,
        keys::UNTAINTED_MANUALLY,
        keys::RELEASE,
        keys::APPROVE,
    ] {
        draft.annotate(mark, None);
    }
    draft.change
}

// === impl Draft ===

impl<'a> Draft<'a> {
    /// Creates an empty change.
    pub(super) fn new(
        node: &'a NodeView,
        own: &'a Ownership,
        marks: &'a Marks,
        now: Timestamp,
    ) -> Self {
        Self {
            node,
            own,
            marks,
            now,
            puts_back: false,
            change: NodeChange::default(),
        }
    }

    /// Returns the change that brings the session's marks in line with the desired state.
    /// `released_at` replaces a time in the future; `puts_back` restores what others have
    /// undone.
    pub(super) fn update(
        mut self,
        desired: &Desired,
        released_at: Option<Timestamp>,
        puts_back: bool,
    ) -> NodeChange {
        self.puts_back = puts_back;
        self.bring_in_line(desired, released_at);
        self.change
    }

    /// Returns the change that records on the node until when it waits to be given back, so that
    /// a process that has lost its state does not give it back earlier.
    pub(super) fn note_wait(mut self) -> NodeChange {
        let mark = &self.own.mark;
        let (gpus, remediation) = (mark.drain_gpus.clone(), mark.remediation.clone());
        let proposals = mark.proposals.clone();
        self.write_session(
            NewMarks::default(),
            mark.drain,
            gpus,
            remediation,
            proposals,
        );
        self.change
    }

    /// Returns the change that gives the node back in its former state.
    pub(super) fn give_back(mut self) -> NodeChange {
        if self.own.cordoned {
            self.uncordon();
        }
        self.clean_up();
        self.change
    }

    /// Returns the change that cleans up after a person has ended the session, or carries out
    /// their request, and records it.
    pub(super) fn stand_down(mut self, by_hand: ByHand, released_at: Timestamp) -> NodeChange {
        // Removing a taint by hand leaves the cordon, as in NVSentinel.
        if self.own.cordoned && !self.own.cordon_pre_existing && by_hand == ByHand::Released {
            self.change.unschedulable = self.node.unschedulable.then_some(false);
        }
        let mark = match by_hand {
            ByHand::Uncordoned | ByHand::Released => keys::UNCORDONED_MANUALLY,
            ByHand::Untainted => keys::UNTAINTED_MANUALLY,
        };
        self.annotate(mark, Some(keys::TRUE.to_owned()));
        self.annotate(keys::RELEASED_AT, Some(released_at.to_string()));
        self.clean_up();
        self.change
    }

    /// Sets or removes an annotation, if that is a change.
    fn annotate(&mut self, key: &str, value: Option<String>) {
        if self.node.annotations.get(key) != value.as_ref() {
            self.change.annotations.insert(key.to_owned(), value);
        }
    }

    fn bring_in_line(&mut self, desired: &Desired, released_at: Option<Timestamp>) {
        if let Some(released_at) = released_at {
            self.annotate(keys::RELEASED_AT, Some(released_at.to_string()));
        }
        let mut labels = BTreeMap::new();
        let mut annotations = BTreeMap::new();
        // If only devices are out, the node's labels do not say that it is.
        let (was_out, is_out) = (self.own.takes_node_out(), desired.takes_node_out());
        // If more pods are to leave than before, the drain begins anew.
        let goes_on = self.own.mark.drain_of(&desired.drain_gpus);
        let drain = desired.drain.map(|progress| {
            let mut mark = goes_on.unwrap_or(DrainMark {
                since: self.now,
                done: None,
            });
            if progress == DrainProgress::Drained {
                mark.done.get_or_insert(self.now);
            }
            mark
        });
        let remediation = desired.remediation.clone();
        let state = state_label(drain, remediation.as_ref());
        if is_out && (!was_out || self.own.mark.state() != state) {
            labels.insert(keys::STATE_LABEL.to_owned(), state.to_owned());
        }
        if is_out && !was_out {
            for mark in self.marks.protect_from.iter().map(|program| program.mark()) {
                let (marks, key) = match mark {
                    ProtectionMark::Label(key) => (&mut labels, key),
                    ProtectionMark::Annotation(key) => (&mut annotations, key),
                };
                marks.insert(key.to_owned(), "true".to_owned());
            }
        }
        if was_out && !is_out {
            self.restore_labels(|label| label == keys::STATE_LABEL || is_protection(label));
            self.restore_annotations();
        }
        if desired.cordon && !self.own.cordoned {
            self.cordon(desired, &mut labels);
        } else if desired.cordon && self.puts_back && !self.node.unschedulable {
            self.change.unschedulable = Some(true);
        }
        if !desired.cordon && self.own.cordoned {
            self.uncordon();
        }
        let applied = self.taint(&desired.taints);
        let text =
            (!applied.is_empty()).then(|| serde_json::to_string(&applied).unwrap_or_default());
        self.annotate(keys::QUARANTINE_APPLIED_TAINTS, text);
        let text = events_text(&desired.events);
        self.annotate(keys::QUARANTINE_HEALTH_EVENT, Some(text));
        // A session of NVSentinel keeps its own form.
        if self.own.replaced_labels.is_some() && is_out {
            self.write_document(desired);
        } else if was_out && !is_out {
            self.remove_document();
        }
        let text = remediation
            .as_ref()
            .and_then(RemediationMark::state_annotation);
        self.annotate(keys::REMEDIATION_STATE, text);
        let gpus = match (drain, goes_on) {
            (None, _) => Vec::new(),
            // Pods of GPUs whose faults have ended meanwhile have stayed.
            (Some(now), Some(before)) if now.done.is_some() && before.done.is_none() => {
                desired.drain_gpus.clone()
            }
            (_, Some(_)) => self.own.mark.drain_gpus.clone(),
            (_, None) => desired.drain_gpus.clone(),
        };
        // Taken in, so that it is not mistaken for the approval of another proposal.
        if let Some(Ok(request)) = ApprovalRequest::read(self.node)
            && let id = &self.own.session_id
            && (desired.proposals.iter())
                .any(|one| one.approved.is_some() && one.id(id) == request.proposal)
        {
            self.annotate(keys::APPROVE, None);
        }
        let proposals = desired.proposals.clone();
        let marks = NewMarks {
            labels,
            annotations,
        };
        self.write_session(marks, drain, gpus, remediation, proposals);
    }

    /// Cordons the node, and adds the labels that describe the cordon.
    fn cordon(&mut self, desired: &Desired, labels: &mut BTreeMap<String, String>) {
        let is_true = || Some(keys::TRUE.to_owned());
        self.annotate(keys::QUARANTINE_IS_CORDONED, is_true());
        if self.node.unschedulable {
            self.annotate(keys::QUARANTINE_CORDON_PRE_EXISTING, is_true());
            return;
        }
        self.change.unschedulable = Some(true);
        let by = desired.forced_by.as_deref();
        let first = desired.events.first();
        let reason = match desired.rule_sets.as_slice() {
            [] => first.map_or_else(String::new, |counted| counted.event.message.clone()),
            names => names.join("-"),
        };
        for (name, value) in [
            (
                keys::CORDON_BY,
                label_value(by.unwrap_or(keys::CORDONED_BY_VALUE)),
            ),
            (keys::CORDON_REASON, label_value(&reason)),
            (keys::CORDON_TIMESTAMP, self.label_time()),
        ] {
            labels.insert(self.marks.label(name), value);
        }
    }

    fn uncordon(&mut self) {
        if !self.own.cordon_pre_existing && self.node.unschedulable {
            self.change.unschedulable = Some(false);
            if self.marks.uncordon_labels {
                self.write_uncordon_labels();
            }
        }
        self.annotate(keys::QUARANTINE_IS_CORDONED, None);
        self.annotate(keys::QUARANTINE_CORDON_PRE_EXISTING, None);
        self.restore_labels(|label| label != keys::STATE_LABEL && !is_protection(label));
    }

    /// Writes the labels that NVSentinel leaves on a node that it gives back.
    fn write_uncordon_labels(&mut self) {
        const SUFFIX: &str = "-removed";
        let cordon_reason = self.node.labels.get(&self.marks.label(keys::CORDON_REASON));
        let mut reason = cordon_reason.cloned().unwrap_or_default();
        let room = LABEL_VALUE_BYTES - SUFFIX.len();
        reason.truncate(floor_char_boundary(&reason, room));
        reason.push_str(SUFFIX);
        for (name, value) in [
            (keys::UNCORDON_BY, keys::CORDONED_BY_VALUE.to_owned()),
            (keys::UNCORDON_REASON, label_value(&reason)),
            (keys::UNCORDON_TIMESTAMP, self.label_time()),
        ] {
            let label = self.marks.label(name);
            self.change.labels.insert(label, Some(value));
        }
    }

    /// Writes the annotations of the data-flow document.
    fn write_document(&mut self, desired: &Desired) {
        let since = self.own.since.unwrap_or(self.now);
        let since = since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let first = desired.events.first();
        let reason = first.map_or_else(String::new, |counted| counted.event.check_name.clone());
        self.annotate(keys::SEED_QUARANTINED, Some("true".to_owned()));
        self.annotate(keys::SEED_QUARANTINE_REASON, Some(reason));
        self.annotate(keys::SEED_QUARANTINE_TIMESTAMP, Some(since));
    }

    /// Removes the annotations of the data-flow document.
    fn remove_document(&mut self) {
        for key in [
            keys::SEED_QUARANTINED,
            keys::SEED_QUARANTINE_REASON,
            keys::SEED_QUARANTINE_TIMESTAMP,
        ] {
            self.annotate(key, None);
        }
    }

    /// Formats the time as a label value.
    fn label_time(&self) -> String {
        self.now.strftime(CORDON_TIME).to_string()
    }

    /// Adds and removes taints; returns those that the session asks for from now on.
    fn taint(&mut self, wanted: &[Taint]) -> Vec<AppliedTaint> {
        let (node, own) = (self.node, self.own);
        let mut applied = Vec::new();
        for taint in wanted {
            let earlier = own.taints.iter().find(|earlier| earlier.taint == *taint);
            // A node cannot have two taints of one key and effect: an existing one stays, unless
            // it is ours and is removed now.
            let occupied = node.taints.iter().any(|on| {
                let goes = own.added(&on.taint) && !wanted.contains(&on.taint);
                on.taint.key == taint.key && on.taint.effect == taint.effect && !goes
            });
            let gone = self.puts_back && !node.has_taint(taint);
            let pre_existing = match earlier {
                Some(earlier) if earlier.pre_existing || !gone => earlier.pre_existing,
                _ => occupied,
            };
            if (earlier.is_none() || gone) && !pre_existing {
                self.change.add_taints.push(taint.clone());
            }
            applied.push(AppliedTaint {
                taint: taint.clone(),
                pre_existing,
            });
        }
        for old in &own.taints {
            if !wanted.contains(&old.taint) && !old.pre_existing && node.has_taint(&old.taint) {
                self.change.remove_taints.push(old.taint.clone());
            }
        }
        applied
    }

    /// Marks a new node as admitted, once validated or let in by a person.
    fn admit(&mut self) {
        let new = |event| Validation::of(event) == Some(Validation::Admission);
        if !self.own.events.iter().any(new) {
            return;
        }
        self.annotate(keys::ADMITTED, Some(self.node.uid.clone()));
        let registered = self.node.taints.iter().map(|on| &on.taint);
        let registered = registered.filter(|taint| taint.key == keys::NOT_VALIDATED);
        self.change.remove_taints.extend(registered.cloned());
    }

    /// Removes the taints and annotations of the session, and restores the labels.
    fn clean_up(&mut self) {
        self.taint(&[]);
        self.admit();
        for key in [
            keys::QUARANTINE_HEALTH_EVENT,
            keys::QUARANTINE_APPLIED_TAINTS,
            keys::QUARANTINE_IS_CORDONED,
            keys::QUARANTINE_CORDON_PRE_EXISTING,
            keys::REMEDIATION_STATE,
            keys::SESSION,
            keys::RELEASE,
            keys::APPROVE,
        ] {
            self.annotate(key, None);
        }
        self.remove_document();
        self.restore_labels(|_| true);
        self.restore_annotations();
    }

    /// Sets labels and annotations for other programs, and writes the session annotation, which
    /// records the values that they replace.
    fn write_session(
        &mut self,
        new: NewMarks,
        drain: Option<DrainMark>,
        drain_gpus: Vec<String>,
        remediation: Option<RemediationMark>,
        proposals: Vec<Proposal>,
    ) {
        let (own, marks) = (self.own, self.marks);
        // A session of NVSentinel keeps its own form.
        let mut replaced = own.replaced_labels.clone();
        for (label, value) in new.labels {
            if let Some(replaced) = &mut replaced {
                let before = || self.node.labels.get(&label).cloned();
                replaced.entry(label.clone()).or_insert_with(before);
            }
            self.change.labels.insert(label, Some(value));
        }
        let Some(labels) = replaced else {
            return;
        };
        let mut annotations = own.replaced_annotations.clone();
        for (key, value) in new.annotations {
            let before = || self.node.annotations.get(&key).cloned();
            annotations.entry(key.clone()).or_insert_with(before);
            self.annotate(&key, Some(value));
        }
        let mut mark = own.mark.clone();
        (mark.drain, mark.drain_gpus) = (drain, drain_gpus);
        (mark.remediation, mark.proposals) = (remediation, proposals);
        // The gpuwarden that keeps the session from here on signs it; see
        // `Ownership::kept_by_another`.
        if marks.store.is_some() && mark.by == marks.maker && mark.store != marks.store {
            (mark.store, mark.taken_over) = (marks.store.clone(), Some(self.now));
        }
        let annotation = SessionAnnotation {
            id: own.session_id.clone(),
            since: own.since.unwrap_or(self.now),
            mark,
            labels,
            annotations,
        };
        if let Ok(text) = serde_json::to_string(&annotation) {
            self.annotate(keys::SESSION, Some(text));
        }
    }

    /// Restores our labels to their former values.
    fn restore_labels(&mut self, which: impl Fn(&str) -> bool) {
        let own = self.own;
        let labels = own.replaced_labels.clone().unwrap_or_else(|| {
            let mut labels = BTreeMap::from([(keys::STATE_LABEL.to_owned(), None)]);
            // If the cordon was there before, NVSentinel writes no cordon labels.
            if own.cordoned && !own.cordon_pre_existing {
                let cordon = [keys::CORDON_BY, keys::CORDON_REASON, keys::CORDON_TIMESTAMP];
                labels.extend(cordon.map(|name| (self.marks.label(name), None)));
            }
            labels
        });
        for (label, before) in labels {
            if which(&label) && self.node.labels.get(&label) != before.as_ref() {
                self.change.labels.insert(label, before);
            }
        }
    }

    /// Restores the annotations for other programs to their former values.
    fn restore_annotations(&mut self) {
        let own = self.own;
        for (key, before) in &own.replaced_annotations {
            self.annotate(key, before.clone());
        }
    }
}

/// Returns true if the label tells another program to leave the node alone.
fn is_protection(label: &str) -> bool {
    let mut marks = ProtectFrom::ALL.into_iter().map(ProtectFrom::mark);
    marks.any(|mark| matches!(mark, ProtectionMark::Label(key) if key == label))
}

/// Returns the events annotation: gravest first, bounded.
fn events_text(events: &[CountedEvent]) -> String {
    let mut text = String::from("[");
    let open = events.iter().flat_map(|counted| &counted.open);
    for (index, event) in open.enumerate() {
        let entry = event_value(event).to_string();
        if index > 0 && text.len() + entry.len() + 2 > ANNOTATION_BYTES {
            break;
        }
        if index > 0 {
            text.push(',');
        }
        text.push_str(&entry);
    }
    text.push(']');
    text
}

/// Returns an event as listed: without metadata, and with fewer entities, if it would not fit
/// otherwise. The node must be taken out for such an event too.
fn event_value(event: &HealthEvent) -> Value {
    let mut short = event.clone();
    short
        .message
        .truncate(floor_char_boundary(&short.message, ANNOTATED_MESSAGE_BYTES));
    loop {
        let value = json::annotation::to_value(&short);
        let fits = value.to_string().len() + 2 <= ANNOTATION_BYTES;
        if fits || (short.metadata.is_empty() && short.entities_impacted.is_empty()) {
            return value;
        }
        if short.metadata.is_empty() {
            short
                .entities_impacted
                .truncate(short.entities_impacted.len() / 2);
        }
        short.metadata.clear();
    }
}
