//! The annotation of a node that names its open matches, in NVSentinel's form: the next leader
//! reads there what the one before has reported.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::policies::ObjectPolicy;
use crate::step::{Match, Matches};

/// Name of the annotation: a JSON object of `POLICY/NAMESPACE/NAME` and the node.
pub const ANNOTATION: &str = "nvsentinel.nvidia.com/k8s-object-monitor-policy-matches";

/// Returns the matches of the policies that a node's annotation names, as states whose faults this
/// store may not have.
pub fn adopted(annotation: &str, policies: &[ObjectPolicy], now: Timestamp) -> Matches {
    let named = read(annotation).into_iter();
    let states = named.filter_map(|(key, node)| {
        let policy = policy_of(&key, policies)?;
        let state = Match {
            node,
            kind: policy.watched.kind.to_string(),
            uid: String::new(),
            since: now,
            open: true,
            clearing: None,
            adopted: true,
        };
        Some((key, state))
    });
    states.collect()
}

/// Returns the annotation that a node should have: its open matches, and those of policies that are
/// not ours, such as another monitor's. `None` for none. `ended` are the keys that were ours before.
pub fn wanted(
    annotation: &str,
    node: &str,
    matches: &Matches,
    policies: &[ObjectPolicy],
    ended: &BTreeSet<String>,
) -> Option<String> {
    let mut marks = read(annotation);
    marks.retain(|key, _| policy_of(key, policies).is_none() && !ended.contains(key));
    let open = matches
        .iter()
        .filter(|(_, one)| one.open && one.node == node);
    marks.extend(open.map(|(key, one)| (key.clone(), one.node.clone())));
    (!marks.is_empty()).then(|| serde_json::to_string(&marks).unwrap_or_default())
}

/// Returns the policy that a key begins with.
pub(crate) fn policy_of<'a>(key: &str, policies: &'a [ObjectPolicy]) -> Option<&'a ObjectPolicy> {
    let name = key.split('/').next()?;
    policies.iter().find(|policy| policy.name == name)
}

fn read(annotation: &str) -> BTreeMap<String, String> {
    serde_json::from_str(annotation).unwrap_or_default()
}
