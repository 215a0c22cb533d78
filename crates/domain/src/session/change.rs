//! Which change brings a node from what it is to what is wanted.

use std::collections::BTreeMap;

use contract::{HealthEvent, json, keys};
use jiff::Timestamp;
use serde_json::Value;

use super::Marks;
use crate::assess::{Counted, Desired};
use crate::event::floor_char_boundary;
use crate::node::{LABEL_VALUE_BYTES, NodeChange, NodeView, Taint, label_value};
use crate::ownership::{AppliedTaint, ByHand, CORDON_TIME, Ownership, SessionAnnotation};

/// Longest message that an event keeps in the node annotation, in bytes.
const ANNOTATED_MESSAGE_BYTES: usize = 1024;
/// Most bytes of the events annotation. The API server takes 256 KiB for all annotations
/// of an object; beyond our half the least grave events are left out (they count all the same).
const ANNOTATION_BYTES: usize = 128 * 1024;

/// Takes the node out of service.
pub(super) fn quarantine(
    node: &NodeView,
    desired: &Desired,
    marks: &Marks,
    released_at: Option<Timestamp>,
    returns: &[Timestamp],
    now: Timestamp,
) -> NodeChange {
    let id = desired
        .events
        .first()
        .map(|counted| counted.event.id.clone())
        .unwrap_or_default();
    let own = Ownership {
        session_id: id,
        since: None,
        maker: marks.maker.clone(),
        store: marks.store.clone(),
        taken_over: None,
        phase_since: None,
        back_at: None,
        returns: returns.to_vec(),
        events: Vec::new(),
        cordoned: false,
        cordon_pre_existing: false,
        taints: Vec::new(),
        replaced_labels: Some(BTreeMap::new()),
    };
    let mut change = update(node, &own, desired, marks, released_at, now);
    // A request to release a node means the session that it had then, and no later one.
    for mark in [
        keys::UNCORDONED_MANUALLY,
        keys::UNTAINTED_MANUALLY,
        keys::RELEASE,
    ] {
        if node.annotations.contains_key(mark) {
            change.annotations.insert(mark.to_owned(), None);
        }
    }
    change
}

/// Brings what is ours on the node in line with what is wanted. `released_at`: what is to be
/// written in the place of a time of the future.
pub(super) fn update(
    node: &NodeView,
    own: &Ownership,
    desired: &Desired,
    marks: &Marks,
    released_at: Option<Timestamp>,
    now: Timestamp,
) -> NodeChange {
    let mut change = NodeChange::default();
    if let Some(released_at) = released_at {
        let text = released_at.to_string();
        set(&mut change, node, keys::RELEASED_AT, Some(text));
    }
    let mut labels: BTreeMap<String, String> = BTreeMap::new();
    let starts = own.events.is_empty();
    if starts {
        labels.insert(
            keys::STATE_LABEL.to_owned(),
            keys::STATE_QUARANTINED.to_owned(),
        );
    }

    if desired.cordon && !own.cordoned {
        set(
            &mut change,
            node,
            keys::QUARANTINE_IS_CORDONED,
            Some(keys::TRUE.to_owned()),
        );
        if node.unschedulable {
            set(
                &mut change,
                node,
                keys::QUARANTINE_CORDON_PRE_EXISTING,
                Some(keys::TRUE.to_owned()),
            );
        } else {
            change.unschedulable = Some(true);
            let by = desired
                .forced_by
                .as_deref()
                .unwrap_or(keys::CORDONED_BY_VALUE);
            let reason = match desired.rule_sets.as_slice() {
                [] => desired
                    .events
                    .first()
                    .map_or("", |counted| counted.event.message.as_str())
                    .to_owned(),
                names => names.join("-"),
            };
            for (name, value) in [
                (keys::CORDON_BY, label_value(by)),
                (keys::CORDON_REASON, label_value(&reason)),
                (keys::CORDON_TIMESTAMP, label_time(now)),
            ] {
                labels.insert(marks.label(name), value);
            }
        }
    }
    if !desired.cordon && own.cordoned {
        uncordon(&mut change, node, own, marks, now);
    }

    let applied = applied_taints(&mut change, node, own, &desired.taints);
    let text = (!applied.is_empty()).then(|| serde_json::to_string(&applied).unwrap_or_default());
    set(&mut change, node, keys::QUARANTINE_APPLIED_TAINTS, text);

    set(
        &mut change,
        node,
        keys::QUARANTINE_HEALTH_EVENT,
        Some(events_text(&desired.events)),
    );
    // A session of NVSentinel keeps its own form.
    if own.replaced_labels.is_some() {
        document_annotations(&mut change, node, own, desired, now);
    }
    write_session(&mut change, node, own, labels, marks, now);
    change
}

/// Notes on the node until when it waits to be given back: it is not given back earlier by who
/// has lost what it knew.
pub(super) fn note_wait(
    node: &NodeView,
    own: &Ownership,
    marks: &Marks,
    now: Timestamp,
) -> NodeChange {
    let mut change = NodeChange::default();
    write_session(&mut change, node, own, BTreeMap::new(), marks, now);
    change
}

/// Gives the node back as it was.
pub(super) fn release(
    node: &NodeView,
    own: &Ownership,
    marks: &Marks,
    now: Timestamp,
) -> NodeChange {
    let mut change = NodeChange::default();
    if own.cordoned {
        uncordon(&mut change, node, own, marks, now);
    }
    applied_taints(&mut change, node, own, &[]);
    forget(&mut change, node);
    restore_labels(&mut change, node, own, marks, |_| true);
    change
}

/// Cleans up after a person has ended the session, or does what they asked for, and
/// remembers it.
pub(super) fn stand_down(
    node: &NodeView,
    own: &Ownership,
    by_hand: ByHand,
    released_at: Timestamp,
    marks: &Marks,
) -> NodeChange {
    let mut change = NodeChange::default();
    // Who removes a taint leaves the cordon, as the reference has it.
    if own.cordoned && !own.cordon_pre_existing && by_hand == ByHand::Released {
        change.unschedulable = node.unschedulable.then_some(false);
    }
    applied_taints(&mut change, node, own, &[]);
    forget(&mut change, node);
    let mark = match by_hand {
        ByHand::Uncordoned | ByHand::Released => keys::UNCORDONED_MANUALLY,
        ByHand::Untainted => keys::UNTAINTED_MANUALLY,
    };
    set(&mut change, node, mark, Some(keys::TRUE.to_owned()));
    set(
        &mut change,
        node,
        keys::RELEASED_AT,
        Some(released_at.to_string()),
    );
    restore_labels(&mut change, node, own, marks, |_| true);
    change
}

fn uncordon(
    change: &mut NodeChange,
    node: &NodeView,
    own: &Ownership,
    marks: &Marks,
    now: Timestamp,
) {
    if !own.cordon_pre_existing && node.unschedulable {
        change.unschedulable = Some(false);
        if marks.uncordon_labels {
            uncordon_labels(change, node, marks, now);
        }
    }
    set(change, node, keys::QUARANTINE_IS_CORDONED, None);
    set(change, node, keys::QUARANTINE_CORDON_PRE_EXISTING, None);
    restore_labels(change, node, own, marks, |label| label != keys::STATE_LABEL);
}

/// Writes the labels that the reference leaves on a node that it gives back.
fn uncordon_labels(change: &mut NodeChange, node: &NodeView, marks: &Marks, now: Timestamp) {
    const SUFFIX: &str = "-removed";
    let cordon_reason = node.labels.get(&marks.label(keys::CORDON_REASON));
    let mut reason = cordon_reason.cloned().unwrap_or_default();
    reason.truncate(floor_char_boundary(
        &reason,
        LABEL_VALUE_BYTES - SUFFIX.len(),
    ));
    reason.push_str(SUFFIX);
    for (name, value) in [
        (keys::UNCORDON_BY, keys::CORDONED_BY_VALUE.to_owned()),
        (keys::UNCORDON_REASON, label_value(&reason)),
        (keys::UNCORDON_TIMESTAMP, label_time(now)),
    ] {
        change.labels.insert(marks.label(name), Some(value));
    }
}

/// Writes the annotations of the data-flow document.
fn document_annotations(
    change: &mut NodeChange,
    node: &NodeView,
    own: &Ownership,
    desired: &Desired,
    now: Timestamp,
) {
    let since = own.since.unwrap_or(now);
    let reason = desired.events.first().map(|counted| &counted.event);
    for (key, value) in [
        (keys::SEED_QUARANTINED, "true".to_owned()),
        (
            keys::SEED_QUARANTINE_REASON,
            reason.map_or_else(String::new, |event| event.check_name.clone()),
        ),
        (
            keys::SEED_QUARANTINE_TIMESTAMP,
            since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        ),
    ] {
        set(change, node, key, Some(value));
    }
}

/// Returns a time as a label can hold it.
fn label_time(at: Timestamp) -> String {
    at.strftime(CORDON_TIME).to_string()
}

/// Adds and removes taints; returns those that the session asks for from now on.
fn applied_taints(
    change: &mut NodeChange,
    node: &NodeView,
    own: &Ownership,
    wanted: &[Taint],
) -> Vec<AppliedTaint> {
    let mut applied = Vec::new();
    for taint in wanted {
        let known = own.taints.iter().find(|known| known.taint == *taint);
        // A node cannot have two taints of one key and effect: what is there stays, unless
        // it is ours and goes now.
        let occupied = node.taints.iter().any(|on| {
            let goes = own.added(&on.taint) && !wanted.contains(&on.taint);
            on.taint.key == taint.key && on.taint.effect == taint.effect && !goes
        });
        let pre_existing = known.map_or(occupied, |known| known.pre_existing);
        if known.is_none() && !pre_existing {
            change.add_taints.push(taint.clone());
        }
        applied.push(AppliedTaint {
            taint: taint.clone(),
            pre_existing,
        });
    }
    for old in &own.taints {
        if !wanted.contains(&old.taint) && !old.pre_existing && node.has_taint(&old.taint) {
            change.remove_taints.push(old.taint.clone());
        }
    }
    applied
}

/// Removes our annotations.
fn forget(change: &mut NodeChange, node: &NodeView) {
    for key in [
        keys::QUARANTINE_HEALTH_EVENT,
        keys::QUARANTINE_APPLIED_TAINTS,
        keys::QUARANTINE_IS_CORDONED,
        keys::QUARANTINE_CORDON_PRE_EXISTING,
        keys::SESSION,
        keys::SEED_QUARANTINED,
        keys::SEED_QUARANTINE_REASON,
        keys::SEED_QUARANTINE_TIMESTAMP,
        keys::RELEASE,
    ] {
        set(change, node, key, None);
    }
}

/// Sets labels, and writes the session annotation, which keeps what they replace.
fn write_session(
    change: &mut NodeChange,
    node: &NodeView,
    own: &Ownership,
    labels: BTreeMap<String, String>,
    marks: &Marks,
    now: Timestamp,
) {
    // A session of NVSentinel keeps its own form.
    let Some(mut replaced) = own.replaced_labels.clone() else {
        change.labels.extend(
            labels
                .into_iter()
                .map(|(label, value)| (label, Some(value))),
        );
        return;
    };
    for (label, value) in labels {
        replaced
            .entry(label.clone())
            .or_insert_with(|| node.labels.get(&label).cloned());
        change.labels.insert(label, Some(value));
    }
    // Signed anew by whoever keeps it from here on; see `Ownership::kept_by_another`.
    let takes_over = marks.store.is_some() && own.maker == marks.maker && own.store != marks.store;
    let (store, taken_over) = if takes_over {
        (marks.store.clone(), Some(now))
    } else {
        (own.store.clone(), own.taken_over)
    };
    let annotation = SessionAnnotation {
        id: own.session_id.clone(),
        since: own.since.unwrap_or(now),
        by: own.maker.clone(),
        store,
        taken_over,
        phase_since: own.phase_since,
        back_at: own.back_at,
        returns: own.returns.clone(),
        labels: replaced,
    };
    if let Ok(text) = serde_json::to_string(&annotation) {
        set(change, node, keys::SESSION, Some(text));
    }
}

/// Gives labels of ours the value that they had before.
fn restore_labels(
    change: &mut NodeChange,
    node: &NodeView,
    own: &Ownership,
    marks: &Marks,
    which: impl Fn(&str) -> bool,
) {
    let labels = own.replaced_labels.clone().unwrap_or_else(|| {
        let cordon = [keys::CORDON_BY, keys::CORDON_REASON, keys::CORDON_TIMESTAMP];
        let cordon = cordon.iter().map(|name| (marks.label(name), None));
        let pre_existing = own.cordon_pre_existing || !own.cordoned;
        let state = std::iter::once((keys::STATE_LABEL.to_owned(), None));
        // With a cordon that was there before, the reference writes no cordon labels.
        if pre_existing {
            state.collect()
        } else {
            cordon.chain(state).collect()
        }
    });
    for (label, before) in labels {
        if which(&label) && node.labels.get(&label) != before.as_ref() {
            change.labels.insert(label, before);
        }
    }
}

/// Sets an annotation, or removes it, where that is a change.
fn set(change: &mut NodeChange, node: &NodeView, key: &str, value: Option<String>) {
    if node.annotations.get(key) != value.as_ref() {
        change.annotations.insert(key.to_owned(), value);
    }
}

/// Returns the events annotation: gravest first, bounded.
fn events_text(events: &[Counted]) -> String {
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

/// Returns an event as it is listed: without metadata, and with fewer entities, where it would not
/// fit otherwise. The node is to be taken out also for such an event.
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
