//! The drain conditions of a node: `DrainInProgress` and `Drained` of Kubernetes (KEP-5683),
//! set and cleared by the component that drains.
//!
//! The conditions follow from the session on the node. A condition that another component has
//! set to `True` is left alone.

use contract::keys;

use super::{NodeCondition, Observed};
use crate::node::NodeView;
use crate::ownership::{DrainMark, Ownership};

/// Message of a condition that is `False`.
const NONE: &str = "No drain of gpuwarden is under way";

/// Returns the drain recorded in the session on the node.
pub(super) fn of_node(node: &NodeView) -> Option<DrainMark> {
    let annotated = node.annotations.contains_key(keys::SESSION);
    let own = annotated.then(|| Ownership::read(node)).flatten()?;
    own.mark.drain.filter(|_| own.takes_node_out())
}

/// Returns the desired state of both conditions. A condition is set to `False` only if it
/// exists on the node.
pub(super) fn conditions(
    drain: Option<DrainMark>,
    on_node: impl Fn(&str) -> Option<(bool, bool)>,
) -> Vec<NodeCondition> {
    let (in_progress, drained) = match drain {
        Some(DrainMark { since, done: None }) => {
            (Some(format!("Pods leave since {since:.0}")), None)
        }
        Some(DrainMark {
            done: Some(done), ..
        }) => {
            let text = format!("All pods that were to leave had left at {done:.0}");
            (None, Some(text))
        }
        None => (None, None),
    };
    let mut wanted = Vec::new();
    for (kind, message) in [
        (keys::CONDITION_DRAIN_IN_PROGRESS, in_progress),
        (keys::CONDITION_DRAINED, drained),
    ] {
        let found = on_node(kind);
        let ours = found.is_some_and(|(ours, _)| ours);
        let anothers = found.is_some_and(|(ours, status)| !ours && status);
        if anothers || (message.is_none() && !ours) {
            continue;
        }
        wanted.push(NodeCondition {
            kind: kind.to_owned(),
            status: message.is_some(),
            reason: keys::REASON_DRAIN.to_owned(),
            message: message.unwrap_or_else(|| NONE.to_owned()),
        });
    }
    wanted
}

/// Returns whether gpuwarden wrote the condition, and whether its status is `True`.
pub(super) fn stands(found: &Observed<'_>) -> (bool, bool) {
    (found.reason == keys::REASON_DRAIN, found.status == "True")
}
