//! The state of a Kubernetes node that decisions are based on, and changes of a node.

use std::collections::BTreeMap;

use contract::keys;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

mod rest;
mod trimmed;

use crate::fault::Machine;

use rest::Rest;

/// Name, in messages for people, of the party that a handed-over node waits for.
pub const HANDED_OVER: &str = "the external system to which the node is handed over";
/// Value of [`keys::HANDED_OVER_LABEL`] on a handed-over node.
pub const NOT_MANAGED: &str = "false";
/// Field of `spec.unschedulable` in managed fields.
const UNSCHEDULABLE: &str = "f:unschedulable";
/// Longest value of a label or taint that Kubernetes accepts, in bytes.
pub const LABEL_VALUE_BYTES: usize = 63;

/// A node as last received from the API server.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeView {
    /// `metadata.name` of the object.
    pub name: String,
    /// `metadata.uid` of the object.
    pub uid: String,
    /// `metadata.resourceVersion` of this state. Never a precondition of a patch: every
    /// heartbeat changes it.
    pub resource_version: String,
    /// `spec.unschedulable`: true if the node is cordoned.
    pub unschedulable: bool,
    /// Field manager that cordoned the node, such as `kubectl-cordon`, by `metadata.managedFields`. `None` if
    /// the node is not cordoned, or if no manager is recorded.
    pub cordoned_by: Option<Box<str>>,
    /// `spec.taints`, in the server's order.
    pub taints: Vec<NodeTaint>,
    /// `metadata.labels`, without values that are not strings.
    pub labels: BTreeMap<String, String>,
    /// `metadata.annotations`, without values that are not strings.
    pub annotations: BTreeMap<String, String>,
    /// Machine behind the node, from `status.nodeInfo`.
    pub machine: Machine,
    /// `spec.providerID`. Empty if the node has none.
    pub provider_id: Box<str>,
    /// True if the node has a drain condition written by gpuwarden ([`crate::condition`]).
    pub has_drain_condition: bool,
    /// True if its condition `Ready` is true.
    pub is_ready: bool,
    /// AKS' condition about events of the node's virtual machine, if the node has it.
    pub vm_event: Option<Box<VmEvent>>,
    /// Remaining parts of the object, for [`NodeView::object`].
    rest: Rest,
}

/// A taint, without its `timeAdded`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Taint {
    /// Key, in the form of a label's key.
    pub key: String,
    /// Value. May be empty.
    #[serde(default)]
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// A taint as found on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeTaint {
    /// Key, value and effect.
    pub taint: Taint,
    /// The whole element, which may have `timeAdded`, as the `test` operation of a patch must
    /// name it.
    pub raw: Value,
}

/// Condition [`keys::CONDITION_VM_EVENT`] of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmEvent {
    /// Status; `None` for `Unknown` and any other word.
    pub status: Option<bool>,
    /// Message, while the status is true; empty otherwise.
    pub message: Box<str>,
}

/// A change of a node, written as one conditional patch or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeChange {
    /// New value of `spec.unschedulable`. `Some(false)` removes the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unschedulable: Option<bool>,
    /// Taints to add to the node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_taints: Vec<Taint>,
    /// Taints to remove, compared by key, value and effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remove_taints: Vec<Taint>,
    /// Labels to set, or to remove where the value is `None`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Annotations to set, or to remove where the value is `None`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
}

/// Returns whether any of the conditions is a drain condition written by gpuwarden.
fn has_drain_condition(conditions: &Value) -> bool {
    let kinds = [keys::CONDITION_DRAIN_IN_PROGRESS, keys::CONDITION_DRAINED];
    let ours = |one: &Value| {
        one["reason"] == keys::REASON_DRAIN && kinds.iter().any(|kind| one["type"] == *kind)
    };
    conditions.as_array().into_iter().flatten().any(ours)
}

/// Returns the condition of this type.
fn condition<'a>(conditions: &'a Value, kind: &str) -> Option<&'a Value> {
    let mut all = conditions.as_array().into_iter().flatten();
    all.find(|one| one["type"] == kind)
}

/// Returns the status of a condition; `None` if it is neither `True` nor `False`.
fn status(condition: &Value) -> Option<bool> {
    match condition["status"].as_str()? {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

/// Returns the field manager of `spec.unschedulable`.
fn manager_of_cordon(managed_fields: &Value) -> Option<&str> {
    let mut all = managed_fields.as_array().into_iter().flatten();
    let owner = all.find(|one| one["fieldsV1"]["f:spec"].get(UNSCHEDULABLE).is_some())?;
    owner["manager"].as_str()
}

/// Returns AKS' condition about events of the node's virtual machine.
fn vm_event(conditions: &Value) -> Option<Box<VmEvent>> {
    let condition = condition(conditions, keys::CONDITION_VM_EVENT)?;
    let status = status(condition);
    let message = condition["message"].as_str();
    let message = message.filter(|_| status == Some(true));
    Some(Box::new(VmEvent {
        status,
        message: message.unwrap_or_default().into(),
    }))
}

// === impl NodeView ===

impl NodeView {
    /// Returns whether the node is handed over to an external system.
    pub fn is_handed_over(&self) -> bool {
        let label = self.labels.get(keys::HANDED_OVER_LABEL);
        label.is_some_and(|value| value == NOT_MANAGED)
    }

    /// Creates a node with nothing but a name, for rules that are evaluated without a cluster.
    pub fn unknown(name: &str) -> Self {
        let mut object = json!({
            "metadata": {"name": name, "labels": {}, "annotations": {}},
            "spec": {},
            "status": {},
        });
        Self::read(name.to_owned(), &mut object)
    }

    /// Reads a node from its JSON object. `None` if the object has no name.
    pub fn from_object(mut object: Value) -> Option<Self> {
        let name = object["metadata"]["name"].as_str()?.to_owned();
        Some(Self::read(name, &mut object))
    }

    fn read(name: String, object: &mut Value) -> Self {
        let strings = |value: &Value| -> BTreeMap<String, String> {
            let pairs = value.as_object().into_iter().flatten();
            pairs
                .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
                .collect()
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (metadata, spec) = (&object["metadata"], &object["spec"]);
        let info = &object["status"]["nodeInfo"];
        let conditions = &object["status"]["conditions"];
        let taints = spec["taints"].as_array().into_iter().flatten();
        let unschedulable = spec["unschedulable"].as_bool().unwrap_or(false);
        let manager = manager_of_cordon(&metadata["managedFields"]);
        let mut view = Self {
            name,
            uid: text(&metadata["uid"]),
            resource_version: text(&metadata["resourceVersion"]),
            unschedulable,
            cordoned_by: manager.filter(|_| unschedulable).map(Into::into),
            taints: taints
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
            machine: Machine {
                system_uuid: text(&info["systemUUID"]),
                boot_id: text(&info["bootID"]),
                registered_at: metadata["creationTimestamp"]
                    .as_str()
                    .and_then(|time| time.parse().ok()),
            },
            provider_id: text(&spec["providerID"]).into(),
            has_drain_condition: has_drain_condition(conditions),
            is_ready: condition(conditions, "Ready").and_then(status) == Some(true),
            vm_event: vm_event(conditions),
            rest: Rest::default(),
        };
        view.keep(object);
        view
    }

    /// Returns the object behind a policy's `node` variable: metadata, spec and status, without
    /// managed fields and the image list. The object is assembled for each call: most nodes of
    /// a cluster are never evaluated, and a JSON tree takes several times the memory of its
    /// text.
    pub fn object(&self) -> Value {
        let mut object = self.rest.object();
        let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
            return object;
        };
        if !self.resource_version.is_empty() {
            let version = self.resource_version.as_str().into();
            metadata.insert("resourceVersion".to_owned(), version);
        }
        for (field, entries) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            if !metadata.contains_key(field) && !entries.is_empty() {
                metadata.insert(field.to_owned(), json!(entries));
            }
        }
        object
    }

    /// Returns only the labels and annotations of [`Self::object`]. Most rules need nothing
    /// else, and this costs a fraction.
    pub fn labels_and_annotations(&self) -> Value {
        if self.labels.is_empty() || self.annotations.is_empty() {
            return self.object(); // An empty map and a missing one differ only there.
        }
        json!({"metadata": {"labels": self.labels, "annotations": self.annotations}})
    }

    /// Stores the parts of `object` that other fields do not hold.
    fn keep(&mut self, object: &mut Value) {
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
            if !self.resource_version.is_empty() {
                metadata.remove("resourceVersion");
            }
            for (field, entries) in [("labels", &self.labels), ("annotations", &self.annotations)] {
                // Kept if it is empty or has values that are not strings.
                let whole = |value: &Value| Some(entries.len()) == value.as_object().map(Map::len);
                if !entries.is_empty() && metadata.get(field).is_some_and(whole) {
                    metadata.remove(field);
                }
            }
        }
        if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
            status.remove("images");
        }
        self.rest = Rest::of(object);
    }

    /// Returns whether `other` looks the same to rules, except for the fields that every
    /// kubelet heartbeat changes: the object's version, and the heartbeat time of each
    /// condition.
    pub fn same_but_for_heartbeat(&self, other: &Self) -> bool {
        self.labels == other.labels
            && self.annotations == other.annotations
            && self.rest.same_but_for_heartbeat(&other.rest)
    }

    /// Returns whether the node has this taint, including its value.
    pub fn has_taint(&self, taint: &Taint) -> bool {
        self.taints.iter().any(|on_node| on_node.taint == *taint)
    }

    /// Returns the node with `change` applied locally, for dry runs and tests.
    #[must_use]
    pub fn after(&self, change: &NodeChange) -> Self {
        let (mut node, mut object) = (self.clone(), self.object());
        if let Some(unschedulable) = change.unschedulable {
            node.unschedulable = unschedulable;
            // The API server records who did.
            node.cordoned_by = None;
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
        node.show_in_object(change, &mut object);
        node
    }

    /// Updates the object that rules see with the fields that `change` has changed.
    fn show_in_object(&mut self, change: &NodeChange, object: &mut Value) {
        if change.unschedulable.is_some() {
            let value = self.unschedulable.then_some(Value::Bool(true));
            set(object, "spec", "unschedulable", value);
        }
        if !change.add_taints.is_empty() || !change.remove_taints.is_empty() {
            let taints: Vec<&Value> = self.taints.iter().map(|taint| &taint.raw).collect();
            let value = (!taints.is_empty()).then(|| json!(taints));
            set(object, "spec", "taints", value);
        }
        if !change.labels.is_empty() {
            let value = Some(json!(self.labels));
            set(object, "metadata", "labels", value);
        }
        if !change.annotations.is_empty() {
            let value = Some(json!(self.annotations));
            set(object, "metadata", "annotations", value);
        }
        self.keep(object);
    }
}

/// Sets a field in a part of an object, or removes it if `value` is `None`.
fn set(object: &mut Value, part: &str, field: &str, value: Option<Value>) {
    let Some(object) = object.as_object_mut() else {
        return;
    };
    let part = object.entry(part).or_insert_with(|| json!({}));
    match (part.as_object_mut(), value) {
        (Some(part), Some(value)) => drop(part.insert(field.to_owned(), value)),
        (Some(part), None) => drop(part.remove(field)),
        (None, _) => {}
    }
}

// === impl NodeChange ===

impl NodeChange {
    /// Returns whether the change is empty.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the parts of the change that are missing on `node`, for people. `node` is the
    /// state right after a write that was reported as successful. Labels are left out: no
    /// decision depends on those of gpuwarden, so they are not written again.
    pub fn dropped(&self, node: &NodeView) -> Vec<String> {
        let cordon = self
            .unschedulable
            .filter(|cordon| *cordon != node.unschedulable);
        let add = self
            .add_taints
            .iter()
            .filter(|taint| !node.has_taint(taint));
        let remove = self
            .remove_taints
            .iter()
            .filter(|taint| node.has_taint(taint));
        let (add, remove): (Vec<_>, Vec<_>) = (add.cloned().collect(), remove.cloned().collect());
        let mut dropped = scheduling(cordon, &add, &remove);
        for (key, value) in &self.annotations {
            if node.annotations.get(key) != value.as_ref() {
                let verb = if value.is_some() { "set" } else { "remove" };
                dropped.push(format!("{verb} annotation {key}"));
            }
        }
        dropped
    }

    /// Returns a single change with the effect of this one followed by `later`.
    #[must_use]
    pub fn then(mut self, later: Self) -> Self {
        self.unschedulable = later.unschedulable.or(self.unschedulable);
        self.add_taints
            .retain(|taint| !later.remove_taints.contains(taint));
        for (into, from) in [
            (&mut self.add_taints, later.add_taints),
            (&mut self.remove_taints, later.remove_taints),
        ] {
            for taint in from {
                if !into.contains(&taint) {
                    into.push(taint);
                }
            }
        }
        self.labels.extend(later.labels);
        self.annotations.extend(later.annotations);
        self
    }

    /// Returns a summary for people: `cordon, add taint gpu=bad:NoSchedule, set 3 annotations`.
    pub fn summary(&self) -> String {
        let mut parts = scheduling(self.unschedulable, &self.add_taints, &self.remove_taints);
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

/// Returns the parts of a change that affect scheduling, for people: `cordon`, `add taint ...`.
pub fn scheduling(cordon: Option<bool>, add: &[Taint], remove: &[Taint]) -> Vec<String> {
    let cordon = cordon.map(|cordon| if cordon { "cordon" } else { "uncordon" });
    let add = add.iter().map(|taint| format!("add taint {taint}"));
    let remove = remove.iter().map(|taint| format!("remove taint {taint}"));
    cordon
        .map(str::to_owned)
        .into_iter()
        .chain(add)
        .chain(remove)
        .collect()
}

/// Returns a valid value of a label or taint: letters, digits and `-_.`, at most 63 characters,
/// starting and ending with a letter or digit.
pub fn label_value(text: &str) -> String {
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

#[cfg(test)]
mod tests;
