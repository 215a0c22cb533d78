//! Which change brings a node from what it is to what is wanted.

use std::collections::BTreeMap;

use contract::{HealthEvent, json, keys};
use jiff::Timestamp;
use serde_json::Value;

use super::ownership::{AppliedTaint, ByHand, Ownership, SessionAnnotation};
use crate::assess::{Counted, Desired};
use crate::event::floor_char_boundary;
use crate::node::{NodeChange, NodeView, Taint};

/// Longest message that an event keeps in the node annotation, in bytes.
const ANNOTATED_MESSAGE_BYTES: usize = 1024;
/// Most bytes of the events annotation. The API server takes 256 KiB for all annotations
/// of an object; beyond our half the least grave events are left out (they count all the same).
const ANNOTATION_BYTES: usize = 128 * 1024;
/// Longest label value that Kubernetes takes, in bytes.
const LABEL_VALUE_BYTES: usize = 63;

/// Takes the node out of service.
pub(super) fn quarantine(
    node: &NodeView,
    desired: &Desired,
    label_prefix: &str,
    now: Timestamp,
) -> NodeChange {
    let id = desired
        .events
        .first()
        .map(|counted| counted.event.id.clone())
        .unwrap_or_default();
    let own = Ownership {
        session_id: id,
        events: Vec::new(),
        cordoned: false,
        cordon_pre_existing: false,
        taints: Vec::new(),
        replaced_labels: Some(BTreeMap::new()),
    };
    let mut change = update(node, &own, desired, label_prefix, now);
    for mark in [keys::UNCORDONED_MANUALLY, keys::UNTAINTED_MANUALLY] {
        if node.annotations.contains_key(mark) {
            change.annotations.insert(mark.to_owned(), None);
        }
    }
    change
}

/// Brings what is ours on the node in line with what is wanted.
pub(super) fn update(
    node: &NodeView,
    own: &Ownership,
    desired: &Desired,
    label_prefix: &str,
    now: Timestamp,
) -> NodeChange {
    let mut change = NodeChange::default();
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
            let stamp = now.strftime("%Y-%m-%dT%H-%M-%SZ").to_string();
            for (name, value) in [
                (keys::CORDON_BY, label_value(by)),
                (keys::CORDON_REASON, label_value(&reason)),
                (keys::CORDON_TIMESTAMP, stamp),
            ] {
                labels.insert(format!("{label_prefix}{name}"), value);
            }
        }
    }
    if !desired.cordon && own.cordoned {
        uncordon(&mut change, node, own, label_prefix);
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
    write_labels(&mut change, node, own, labels, now);
    change
}

/// Gives the node back as it was.
pub(super) fn release(node: &NodeView, own: &Ownership, label_prefix: &str) -> NodeChange {
    let mut change = NodeChange::default();
    if own.cordoned {
        uncordon(&mut change, node, own, label_prefix);
    }
    applied_taints(&mut change, node, own, &[]);
    forget(&mut change, node);
    restore_labels(&mut change, node, own, label_prefix, |_| true);
    change
}

/// Cleans up after a person has ended the session, and remembers that.
pub(super) fn stand_down(
    node: &NodeView,
    own: &Ownership,
    by_hand: ByHand,
    released_at: Timestamp,
    label_prefix: &str,
) -> NodeChange {
    let mut change = NodeChange::default();
    applied_taints(&mut change, node, own, &[]);
    forget(&mut change, node);
    let mark = match by_hand {
        ByHand::Uncordoned => keys::UNCORDONED_MANUALLY,
        ByHand::Untainted => keys::UNTAINTED_MANUALLY,
    };
    set(&mut change, node, mark, Some(keys::TRUE.to_owned()));
    set(
        &mut change,
        node,
        keys::RELEASED_AT,
        Some(released_at.to_string()),
    );
    // Who removes a taint leaves the cordon, as the reference has it: its labels stay.
    restore_labels(&mut change, node, own, label_prefix, |label| {
        by_hand == ByHand::Uncordoned || label == keys::STATE_LABEL
    });
    change
}

fn uncordon(change: &mut NodeChange, node: &NodeView, own: &Ownership, label_prefix: &str) {
    if !own.cordon_pre_existing && node.unschedulable {
        change.unschedulable = Some(false);
    }
    set(change, node, keys::QUARANTINE_IS_CORDONED, None);
    set(change, node, keys::QUARANTINE_CORDON_PRE_EXISTING, None);
    restore_labels(change, node, own, label_prefix, |label| {
        label != keys::STATE_LABEL
    });
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
        // A node cannot have two taints of one key and effect: what is there stays.
        let occupied = node
            .taints
            .iter()
            .any(|on| on.taint.key == taint.key && on.taint.effect == taint.effect);
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
    ] {
        set(change, node, key, None);
    }
}

/// Sets labels, and keeps in the session annotation what they replace.
fn write_labels(
    change: &mut NodeChange,
    node: &NodeView,
    own: &Ownership,
    labels: BTreeMap<String, String>,
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
    let current: Option<SessionAnnotation> = node
        .annotations
        .get(keys::SESSION)
        .and_then(|text| serde_json::from_str(text).ok());
    let annotation = SessionAnnotation {
        id: own.session_id.clone(),
        since: current.as_ref().map_or(now, |current| current.since),
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
    label_prefix: &str,
    which: impl Fn(&str) -> bool,
) {
    let labels = own.replaced_labels.clone().unwrap_or_else(|| {
        let cordon = [keys::CORDON_BY, keys::CORDON_REASON, keys::CORDON_TIMESTAMP];
        let cordon = cordon
            .iter()
            .map(|name| (format!("{label_prefix}{name}"), None));
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

/// The events annotation: gravest first, bounded.
fn events_text(events: &[Counted]) -> String {
    let mut text = String::from("[");
    for (index, counted) in events.iter().enumerate() {
        let entry = event_value(&counted.event).to_string();
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

fn event_value(event: &HealthEvent) -> Value {
    if event.message.len() <= ANNOTATED_MESSAGE_BYTES {
        return json::annotation::to_value(event);
    }
    let mut short = event.clone();
    short
        .message
        .truncate(floor_char_boundary(&short.message, ANNOTATED_MESSAGE_BYTES));
    json::annotation::to_value(&short)
}

/// A valid label value: letters, digits, `-_.`, at most 63, beginning and ending with a
/// letter or digit.
fn label_value(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "-_.".contains(c) {
                c
            } else {
                '-'
            }
        })
        .take(LABEL_VALUE_BYTES)
        .collect();
    clean
        .trim_matches(|c: char| !c.is_ascii_alphanumeric())
        .to_owned()
}
