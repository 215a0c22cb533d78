//! A Kubernetes node as decisions see it, and a change to one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A node as last seen at the API server.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeView {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`: the state that this is. Never a condition of a patch:
    /// every heartbeat changes it.
    pub resource_version: String,
    /// `spec.unschedulable`.
    pub unschedulable: bool,
    /// `spec.taints`, in the server's order.
    pub taints: Vec<NodeTaint>,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// The object that a policy's `node` variable shows: metadata, spec and status,
    /// without managed fields and the image list.
    pub object: Value,
}

/// A taint, by what identifies and describes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Taint {
    /// Key.
    pub key: String,
    /// Value; may be empty.
    #[serde(default)]
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// A taint as it stands on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeTaint {
    /// Key, value and effect.
    pub taint: Taint,
    /// The whole element (it may carry `timeAdded`), as a patch's `test` must name it.
    pub raw: Value,
}

/// A change to a node: applied as one conditional patch, or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeChange {
    /// New value of `spec.unschedulable`; `Some(false)` removes the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unschedulable: Option<bool>,
    /// Taints to add.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_taints: Vec<Taint>,
    /// Taints to remove.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remove_taints: Vec<Taint>,
    /// Labels to set, or with `None` to remove.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Annotations to set, or with `None` to remove.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
}

// === impl NodeView ===

impl NodeView {
    /// A node of which nothing is known but its name: what rules see where there is no
    /// cluster to ask.
    pub fn unknown(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            uid: String::new(),
            resource_version: String::new(),
            unschedulable: false,
            taints: Vec::new(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            object: json!({
                "metadata": {"name": name, "labels": {}, "annotations": {}},
                "spec": {},
                "status": {},
            }),
        }
    }

    /// Reads a node from its JSON object. `None` where it has no name.
    pub fn from_object(mut object: Value) -> Option<Self> {
        let strings = |value: &Value| -> BTreeMap<String, String> {
            let pairs = value.as_object().into_iter().flatten();
            pairs
                .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
                .collect()
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &object["metadata"];
        let name = metadata["name"].as_str()?.to_owned();
        let view = Self {
            name,
            uid: text(&metadata["uid"]),
            resource_version: text(&metadata["resourceVersion"]),
            unschedulable: object["spec"]["unschedulable"].as_bool().unwrap_or(false),
            taints: object["spec"]["taints"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|raw| NodeTaint {
                    taint: Taint {
                        key: text(&raw["key"]),
                        value: text(&raw["value"]),
                        effect: text(&raw["effect"]),
                    },
                    raw: raw.clone(),
                })
                .collect(),
            labels: strings(&metadata["labels"]),
            annotations: strings(&metadata["annotations"]),
            object: Value::Null,
        };
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
        }
        if let Some(status) = object["status"].as_object_mut() {
            status.remove("images");
        }
        Some(Self { object, ..view })
    }

    /// Whether the node has this taint, value included.
    pub fn has_taint(&self, taint: &Taint) -> bool {
        self.taints.iter().any(|on_node| on_node.taint == *taint)
    }

    /// The node after `change`, without asking the server: for dry runs and tests.
    #[must_use]
    pub fn after(&self, change: &NodeChange) -> Self {
        let mut node = self.clone();
        if let Some(unschedulable) = change.unschedulable {
            node.unschedulable = unschedulable;
        }
        node.taints
            .retain(|on_node| !change.remove_taints.contains(&on_node.taint));
        for taint in &change.add_taints {
            node.taints.push(NodeTaint {
                taint: taint.clone(),
                raw: json!(taint),
            });
        }
        let merge = |into: &mut BTreeMap<String, String>,
                     from: &BTreeMap<String, Option<String>>| {
            for (key, value) in from {
                match value {
                    Some(value) => drop(into.insert(key.clone(), value.clone())),
                    None => drop(into.remove(key)),
                }
            }
        };
        merge(&mut node.labels, &change.labels);
        merge(&mut node.annotations, &change.annotations);
        node
    }
}

// === impl NodeChange ===

impl NodeChange {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What it does, for people: `cordon, add taint gpu=bad:NoSchedule, set 3 annotations`.
    pub fn summary(&self) -> String {
        let mut parts = Vec::new();
        match self.unschedulable {
            Some(true) => parts.push("cordon".to_owned()),
            Some(false) => parts.push("uncordon".to_owned()),
            None => {}
        }
        parts.extend(
            self.add_taints
                .iter()
                .map(|taint| format!("add taint {taint}")),
        );
        parts.extend(
            self.remove_taints
                .iter()
                .map(|taint| format!("remove taint {taint}")),
        );
        for (what, entries) in [("label", &self.labels), ("annotation", &self.annotations)] {
            let set = entries.values().filter(|value| value.is_some()).count();
            for (verb, count) in [("set", set), ("remove", entries.len() - set)] {
                if count > 0 {
                    let plural = if count == 1 { "" } else { "s" };
                    parts.push(format!("{verb} {count} {what}{plural}"));
                }
            }
        }
        parts.join(", ")
    }
}

impl std::fmt::Display for Taint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { key, value, effect } = self;
        if value.is_empty() {
            write!(f, "{key}:{effect}")
        } else {
            write!(f, "{key}={value}:{effect}")
        }
    }
}
