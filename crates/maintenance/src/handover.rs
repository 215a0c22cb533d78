//! Hand-over of nodes to an external system: the steps of an `ExternalRemediationRequest`.
//!
//! A label and a taint mark a handed-over node. One patch sets both, and another removes them.
//! The first patch also records the label's previous value on the node. While a node is handed
//! over, gpuwarden starts nothing new on it: no quarantine, drain or remediation
//! ([`NodeView::is_handed_over`]). The node still returns to service as usual.

use contract::keys;
use jiff::Timestamp;
use model::node::{NOT_MANAGED, NodeChange, NodeView, Taint, label_value};
use model::resource::EXTERNAL_COMPLETE;
use model::time::later;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    Act, MaintenanceResource, SESSION_ENDED, SESSION_ENDED_MESSAGE, SESSION_OBSERVED_WITHIN, Status,
};

/// Condition that is true once the node is handed over.
pub const RELEASED: &str = "NVSentinelOwnershipReleased";
/// Reason of a condition without a result yet.
const INITIALIZING: &str = "Initializing";

/// Progress of a request, for metrics and Events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HandoverPhase {
    /// The request is new.
    Created,
    /// The node is handed over, or does not exist.
    Released,
    /// The external system has put the request aside.
    Parked,
    /// The external system is done, and the node is taken back.
    Closed,
}

/// Record of the hand-over in an annotation of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    request: String,
    uid: String,
    /// Previous value of the label. `None` if the node had no such label.
    managed: Option<String>,
}

/// Input of a decision about a request.
#[derive(Clone, Copy, Debug)]
pub struct HandoverInput<'a> {
    /// Request to decide about.
    pub request: &'a MaintenanceResource,
    /// Node of the request. `None` if the cluster has no node of this name.
    pub node: Option<&'a NodeView>,
    /// Other work on the node that comes first. `None` if the request may proceed.
    pub before: Option<&'a str>,
    /// True if the configuration excludes the node.
    pub excluded: bool,
    /// Time of the decision.
    pub now: Timestamp,
}

/// Returns the time of the next decision if nothing happens before.
pub(crate) fn wake_at(request: &MaintenanceResource) -> Option<Timestamp> {
    // Until then the node may still show the session that permits the request.
    (request.attempt.is_some()).then(|| later(request.created, SESSION_OBSERVED_WITHIN))
}

/// Decides on the next action for a request, at most one.
pub fn decide(input: &HandoverInput<'_>) -> Option<Act> {
    let HandoverInput { request, now, .. } = *input;
    let status = &request.status;
    if request.deleted_at.is_some() {
        let last = || request.has_finalizer().then_some(Act::Finalizer(false));
        return input.take_back().or_else(last);
    }
    if status.completion.is_some() {
        return input.take_back();
    }
    if !request.has_finalizer() {
        return Some(Act::Finalizer(true));
    }
    if status.condition(RELEASED).is_none() {
        return input.status(|next| {
            next.set(RELEASED, "Unknown", INITIALIZING, "", now);
            if next.condition(EXTERNAL_COMPLETE).is_none() {
                next.set(EXTERNAL_COMPLETE, "Unknown", INITIALIZING, "", now);
            }
        });
    }
    if status.is_true(EXTERNAL_COMPLETE) {
        return (input.take_back()).or_else(|| input.status(|next| next.completion = Some(now)));
    }
    if status.is_true(RELEASED) {
        return None; // The external system has the node, even if it has put the request aside.
    }
    let ends = |reason: &str, text: &str| {
        input.status(|next| {
            next.set(RELEASED, "False", reason, text, now);
            next.completion = Some(now);
        })
    };
    let Some(node) = input.node else {
        let text = format!("the cluster has no node {}", request.node);
        return ends("NodeNotFound", &text);
    };
    if input.excluded {
        return ends("NodeExcluded", "the configuration excludes the node");
    }
    if has(request, node) {
        return input.status(|next| next.set(RELEASED, "True", "ReleaseTaintApplied", "", now));
    }
    if let Some(before) = input
        .before
        .map(str::to_owned)
        .or_else(|| others(request, node))
    {
        let text = format!("{before} is working on the node");
        return input.status(|next| {
            next.set(RELEASED, "Unknown", "ResourceContention", &text, now);
        });
    }
    if !request.is_permitted(node) {
        let waits = wake_at(request).is_some_and(|until| now < until);
        return if waits {
            None
        } else {
            ends(SESSION_ENDED, SESSION_ENDED_MESSAGE)
        };
    }
    if request.waits_for_session(node) {
        return None;
    }
    Some(Act::Node(hand_over(request, node)))
}

/// Returns the change that takes back a node whose request no longer exists. `exists` returns
/// whether there is a request with a uid.
pub fn left_behind(node: &NodeView, exists: impl Fn(&str) -> bool) -> Option<NodeChange> {
    let mark = Mark::read(node)?;
    (!exists(&mark.uid)).then(|| take_back(node, &mark.request, Some(&mark)))
}

/// Returns the change that removes the label and the taint of a request, except where another
/// party has changed them.
fn take_back(node: &NodeView, request: &str, mark: Option<&Mark>) -> NodeChange {
    let mut change = NodeChange::default();
    let taint = taint(request);
    if node.has_taint(&taint) {
        change.remove_taints.push(taint);
    }
    let label = node.labels.get(keys::HANDED_OVER_LABEL);
    let ours = label.is_some_and(|value| value == NOT_MANAGED);
    // Includes an unchanged label, so that the patch fails if the label has changed since.
    let value = if ours {
        mark.and_then(|mark| mark.managed.clone())
    } else {
        label.cloned()
    };
    (change.labels).insert(keys::HANDED_OVER_LABEL.to_owned(), value);
    if mark.is_some() {
        let key = keys::HANDED_OVER.to_owned();
        change.annotations.insert(key, None);
    }
    change
}

fn taint(request: &str) -> Taint {
    Taint {
        key: keys::HANDED_OVER_TAINT.to_owned(),
        value: label_value(request),
        effect: "NoSchedule".to_owned(),
    }
}

/// Returns the progress of a request.
pub(crate) fn phase(request: &MaintenanceResource) -> HandoverPhase {
    let status = &request.status;
    if status.completion.is_some() {
        return HandoverPhase::Closed;
    }
    if status.is_false(EXTERNAL_COMPLETE) {
        return HandoverPhase::Parked;
    }
    if status.is_true(RELEASED) {
        return HandoverPhase::Released;
    }
    HandoverPhase::Created
}

/// Returns the action recommended by the request's event, as written there.
pub(crate) fn action(request: &MaintenanceResource) -> String {
    match request.spec.pointer("/healthEvent/recommendedAction") {
        Some(Value::String(name)) => name.clone(),
        Some(number) => number.to_string(),
        None => String::new(),
    }
}

/// Returns whether the external system has the node of a request.
pub(crate) fn holds(request: &MaintenanceResource, node: Option<&NodeView>) -> bool {
    node.is_some_and(|node| has(request, node)) && request.status.completion.is_none()
}

/// Returns whether a node is handed over for a request, possibly by NVSentinel's janitor, which
/// sets no annotation.
fn has(request: &MaintenanceResource, node: &NodeView) -> bool {
    node.has_taint(&taint(&request.name)) && node.is_handed_over()
}

/// Returns the other request that has the node.
fn others(request: &MaintenanceResource, node: &NodeView) -> Option<String> {
    let mark = Mark::read(node).filter(|mark| mark.uid != request.uid);
    let of = |name: &str| format!("ExternalRemediationRequest {name}");
    let taints = node.taints.iter().map(|on| &on.taint);
    let mut taints = taints.filter(|taint| {
        taint.key == keys::HANDED_OVER_TAINT && taint.value != label_value(&request.name)
    });
    let taint = || taints.next().map(|taint| of(&taint.value));
    mark.map(|mark| of(&mark.request)).or_else(taint)
}

fn hand_over(request: &MaintenanceResource, node: &NodeView) -> NodeChange {
    let mut change = NodeChange::default();
    let taint = taint(&request.name);
    if !node.has_taint(&taint) {
        change.add_taints.push(taint);
    }
    let label = node.labels.get(keys::HANDED_OVER_LABEL);
    let off = Some(NOT_MANAGED.to_owned());
    (change.labels).insert(keys::HANDED_OVER_LABEL.to_owned(), off);
    let mark = Mark {
        request: request.name.clone(),
        uid: request.uid.clone(),
        managed: label.cloned(),
    };
    // Serialising a few strings cannot fail.
    let text = serde_json::to_string(&mark).unwrap_or_default();
    (change.annotations).insert(keys::HANDED_OVER.to_owned(), Some(text));
    change
}

// === impl HandoverInput ===

impl HandoverInput<'_> {
    fn status(&self, change: impl FnOnce(&mut Status)) -> Option<Act> {
        let mut next = self.request.status.clone();
        change(&mut next);
        (next != self.request.status).then(|| Act::Status(Box::new(next)))
    }

    /// Takes the node back if it is handed over for this request.
    fn take_back(&self) -> Option<Act> {
        let node = self.node?;
        let mark = Mark::read(node).filter(|mark| mark.uid == self.request.uid);
        let has = mark.is_some() || has(self.request, node);
        has.then(|| Act::Node(take_back(node, &self.request.name, mark.as_ref())))
    }
}

// === impl Mark ===

impl Mark {
    fn read(node: &NodeView) -> Option<Self> {
        serde_json::from_str(node.annotations.get(keys::HANDED_OVER)?).ok()
    }
}

#[cfg(test)]
mod tests;
