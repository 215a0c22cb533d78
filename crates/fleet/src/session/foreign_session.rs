//! The session of another gpuwarden, for people: its owner, and what ends it.
//!
//! It is left alone ([`super::step()`] is not called), and the node counts as out of service. Its
//! owner ends it; where the owner is gone for good, a person does, with the commands named here.

use jiff::Timestamp;
use model::node::{NodeChange, NodeView};
use model::ownership::{Maker, Ownership};

use super::Marks;
use super::change::Draft;

/// Warning about a foreign session on the node that this process runs on.
pub const ON_OUR_NODE: &str =
    "session on our node by another store: two gpuwardens run for one node name, or did; stop one";

/// Longest id of a store that is shown, in characters: the id is untrusted, since anyone who may
/// annotate the node may have written it.
const STORE_CHARS: usize = 64;

/// Returns who made the session on the node `name`, for people.
pub fn owner(own: &Ownership, name: &str) -> String {
    match &own.mark.by {
        Some(Maker::Node) => match &own.mark.store {
            Some(store) => {
                let store: String = store.chars().take(STORE_CHARS).collect();
                format!("the gpuwarden on {name} itself, with the store {store}")
            }
            None => format!("the gpuwarden on {name} itself"),
        },
        Some(Maker::Controller) => "a gpuwarden controller".to_owned(),
        Some(Maker::Other(kind)) => format!("a gpuwarden of the kind {kind:?}"),
        None => "NVSentinel, or a gpuwarden that did not sign it".to_owned(),
    }
}

/// Returns since when the session exists: ` since 2027-01-15T08:00:00Z`; empty if unknown.
pub fn since(own: &Ownership) -> String {
    (own.since).map_or_else(String::new, |at| format!(" since {at:.0}"))
}

/// Returns the command that removes the changes of the session from the node.
pub fn end_command(own: &Ownership, node: &NodeView) -> String {
    let marks = Marks::default();
    let change = Draft::new(node, own, &marks, Timestamp::UNIX_EPOCH).give_back();
    kubectl(&change, &node.name).join(" && ")
}

/// Returns the command that undoes the cordon and the taints of a change that is left out: what
/// returns the node to service once nothing else of the session is on it.
pub fn return_command(change: &NodeChange, node: &str) -> String {
    let rest = NodeChange {
        unschedulable: change.unschedulable,
        remove_taints: change.remove_taints.clone(),
        ..NodeChange::default()
    };
    kubectl(&rest, node).join(" && ")
}

/// Returns the commands that make a change on a node. The former values come from an annotation,
/// which anyone who may annotate the node may have written, and a person pastes these commands
/// into a shell: values that no API server would accept are left out.
fn kubectl(change: &NodeChange, node: &str) -> Vec<String> {
    let edit = |(key, value): (&String, &Option<String>)| match value {
        Some(value) => format!("{key}={value}"),
        None => format!("{key}-"),
    };
    let accepted = |(key, value): &(&String, &Option<String>)| {
        is_plain(key)
            && value
                .as_ref()
                .is_none_or(|value| value.is_empty() || is_plain(value))
    };
    let mut commands = Vec::new();
    if change.unschedulable == Some(false) {
        commands.push(format!("kubectl uncordon {node}"));
    }
    let taints = change.remove_taints.iter();
    let taints: Vec<String> = taints
        .filter(|taint| is_plain(&taint.key) && is_plain(&taint.effect))
        .map(|taint| format!("{}:{}-", taint.key, taint.effect))
        .collect();
    let labels: Vec<String> = change.labels.iter().filter(accepted).map(edit).collect();
    let annotations: Vec<String> = change
        .annotations
        .iter()
        .filter(accepted)
        .map(edit)
        .collect();
    for (verb, edits) in [
        ("taint node", taints),
        ("label --overwrite node", labels),
        ("annotate node", annotations),
    ] {
        if !edits.is_empty() {
            commands.push(format!("kubectl {verb} {node} {}", edits.join(" ")));
        }
    }
    commands
}

/// Returns whether a text can be the key or the value of a label, or a time: such a text needs
/// no quotes in a shell, and is no flag.
fn is_plain(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes
        .next()
        .is_some_and(|first| first.is_ascii_alphanumeric())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-._/:".contains(&byte))
}

#[cfg(test)]
mod tests {
    use contract::keys;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_command_takes_off_what_the_session_did_and_no_more_than_a_server_would_take() {
        let session = json!({
            "id": "s", "since": "2027-01-15T08:00:00Z", "by": "node",
            "labels": {
                "cordon-by": null, "state": "before", "team": "x; rm -rf /", "$(reboot)": null,
                "--server": "http://example.com",
            },
        });
        let taints = json!([
            {"key": "bad", "value": "v", "effect": "NoSchedule"},
            {"key": "old", "value": "v", "effect": "NoExecute", "preExisting": true},
            {"key": "x; reboot", "value": "v", "effect": "NoSchedule"},
            {"key": "y", "value": "v", "effect": "$(reboot)"},
        ]);
        let node = NodeView::from_object(json!({
            "metadata": {
                "name": "n1",
                "labels": {
                    "cordon-by": "x", "state": "quarantined", "zone": "a", "team": "NVSentinel",
                },
                "annotations": {
                    keys::SESSION: session.to_string(),
                    keys::QUARANTINE_HEALTH_EVENT: "[]",
                    keys::QUARANTINE_IS_CORDONED: "True",
                    keys::QUARANTINE_APPLIED_TAINTS: taints.to_string(),
                    "other": "stays",
                },
            },
            "spec": {
                "unschedulable": true,
                "taints": [
                    {"key": "bad", "value": "v", "effect": "NoSchedule"},
                    {"key": "old", "value": "v", "effect": "NoExecute"},
                    {"key": "x; reboot", "value": "v", "effect": "NoSchedule"},
                    {"key": "y", "value": "v", "effect": "$(reboot)"},
                ],
            },
        }))
        .unwrap();
        let own = Ownership::read(&node).unwrap();
        assert_eq!(owner(&own, "n1"), "the gpuwarden on n1 itself");
        assert_eq!(since(&own), " since 2027-01-15T08:00:00Z");
        let command = end_command(&own, &node);
        let commands: Vec<&str> = command.split(" && ").collect();
        assert_eq!(
            commands[..3],
            [
                "kubectl uncordon n1",
                "kubectl taint node n1 bad:NoSchedule-",
                "kubectl label --overwrite node n1 cordon-by- state=before",
            ]
        );
        let mut annotations: Vec<&str> = commands[3].split(' ').skip(4).collect();
        annotations.sort_unstable();
        let mut ours = [
            keys::SESSION,
            keys::QUARANTINE_HEALTH_EVENT,
            keys::QUARANTINE_IS_CORDONED,
            keys::QUARANTINE_APPLIED_TAINTS,
        ]
        .map(|key| format!("{key}-"));
        ours.sort_unstable();
        assert_eq!(annotations, ours);
        assert_eq!(commands.len(), 4);
    }
}
