//! Requests to the owner of a machine by a label of its node, for owners without an API: their
//! automation acts on nodes with the label, and then removes it.
//!
//! One patch sets the label and an annotation with the [`LabelRequest`]. The annotation stays
//! until the resource ends, so the signal is known again when the owner has removed the label.
//! What a resource leaves behind at its end is removed ([`left_behind`]): a machine must not be
//! rebooted later, when jobs run on it.

use contract::findings::Findings;
use contract::{keys, names};
use model::node::{NodeChange, NodeView};
use serde::{Deserialize, Serialize};

use super::Action;

/// Value of the label: the program that asks.
pub const VALUE: &str = keys::MANAGED_BY;

/// Keys of the labels. An action with an empty key is not requested by a label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LabelConfig {
    /// Key of the label that asks for a reboot.
    pub reboot: String,
    /// Key of the label that asks for a termination.
    pub terminate: String,
}

/// Request for one operation, as JSON in the node's annotation `gpuwarden.dev/label-request`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LabelRequest {
    /// Id of the operation.
    pub operation: String,
    /// Boot id of the node when the label was set.
    pub boot_id: String,
    /// Key of the label.
    pub key: String,
}

/// Answer of a node's owner to a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnerAnswer {
    /// The node has no request.
    #[default]
    NotAsked,
    /// The label is still there.
    Awaited,
    /// The owner has removed the label.
    Done,
}

// === impl LabelConfig ===

impl LabelConfig {
    /// Returns the key of the label that asks for an action.
    pub fn key(&self, action: Action) -> Option<&str> {
        let key = match action {
            Action::Reboot => &self.reboot,
            Action::Terminate => &self.terminate,
            Action::Reset => return None,
        };
        (!key.is_empty()).then_some(key)
    }

    /// Returns all keys of labels.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        [Action::Reboot, Action::Terminate]
            .into_iter()
            .filter_map(|action| self.key(action))
    }

    /// Records everything that is wrong with the keys.
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        for (path, action) in [
            ("label.reboot", Action::Reboot),
            ("label.terminate", Action::Terminate),
        ] {
            if let Some(key) = self.key(action) {
                findings.check(path, names::label_key(key));
            }
        }
        if self.key(Action::Terminate).is_some() && self.reboot == self.terminate {
            findings.refuse("label.terminate", "name another key than label.reboot");
        }
    }
}

// === impl OwnerAnswer ===

impl OwnerAnswer {
    /// Reads the answer on a node.
    pub(super) fn read(node: &NodeView) -> Self {
        match LabelRequest::read(node) {
            None => Self::NotAsked,
            Some(request) if request.is_open(node) => Self::Awaited,
            Some(_) => Self::Done,
        }
    }
}

// === impl LabelRequest ===

impl LabelRequest {
    /// Reads the request on a node. `None` if there is none, or it is malformed.
    pub fn read(node: &NodeView) -> Option<Self> {
        let text = node.annotations.get(keys::LABEL_REQUEST)?;
        let request: Self = serde_json::from_str(text).ok()?;
        names::label_key(&request.key).is_ok().then_some(request)
    }

    /// Returns whether the owner has not removed the label yet.
    pub fn is_open(&self, node: &NodeView) -> bool {
        node.labels.contains_key(&self.key)
    }

    /// Returns the change that asks the owner.
    pub fn ask(&self) -> NodeChange {
        // Serialising a few strings cannot fail.
        let text = serde_json::to_string(self).unwrap_or_default();
        self.change(Some(VALUE.to_owned()), Some(text))
    }

    /// Returns the change that takes the request back. A value that somebody else has written
    /// stays.
    fn take_back(&self, node: &NodeView) -> NodeChange {
        let label = node.labels.get(&self.key);
        // Includes an unchanged label, so that the patch fails if the label has changed since.
        self.change(label.filter(|value| *value != VALUE).cloned(), None)
    }

    fn change(&self, label: Option<String>, annotation: Option<String>) -> NodeChange {
        NodeChange {
            labels: [(self.key.clone(), label)].into(),
            annotations: [(keys::LABEL_REQUEST.to_owned(), annotation)].into(),
            ..NodeChange::default()
        }
    }
}

/// Returns the change that takes back the request of a resource that has ended. `is_open` tells
/// whether the resource of an operation has not.
pub fn left_behind(node: &NodeView, is_open: impl Fn(&str) -> bool) -> Option<NodeChange> {
    let request = LabelRequest::read(node)?;
    (!is_open(&request.operation)).then(|| request.take_back(node))
}
