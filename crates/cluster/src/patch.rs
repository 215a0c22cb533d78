//! Renders a change to a node as one patch that fails if the node has changed since the
//! decision.
//!
//! The conditions are `test` operations on the fields that the decision has read. The object's
//! `resourceVersion` is not tested, since every heartbeat changes it. In the API server a `test`
//! with `null` holds exactly if the field is absent.
//!
//! Kubernetes never returns an empty map, an empty list or `false` in these fields: they are
//! absent. So emptying a map needs no further operation, and a node returns to its former state
//! to the byte.

use std::collections::{BTreeMap, BTreeSet};

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation, TestOperation};
use model::node::{NodeChange, NodeView};
use model::ownership::SESSION_ANNOTATIONS;
use serde::Serialize;
use serde_json::{Value, json};

/// A patch as a request to the API server.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PatchCall {
    /// HTTP method of the request.
    pub verb: &'static str,
    /// Path of the node on the API server.
    pub path: String,
    /// Body of the request.
    pub patch: Patch,
}

/// Returns the request that [`crate::Cluster::apply`] makes for `change`.
pub fn describe(view: &NodeView, change: &NodeChange) -> PatchCall {
    PatchCall {
        verb: "PATCH",
        path: format!("/api/v1/nodes/{}", view.name),
        patch: render(view, change),
    }
}

/// Returns the patch for `change` to the node that `view` shows; empty if nothing changes.
///
/// The patch fails unless the following is still as in `view`:
/// - the node's UID, since a recreated node of the same name is another node;
/// - every label and annotation that the change sets or removes;
/// - `spec.unschedulable`, if the change sets it;
/// - every taint that the change removes, as a whole and at its index in the list;
/// - for a change of a session (to the cordon, taints or an annotation of the session): all
///   annotations of the session, and `spec.unschedulable`, since each such decision depends on
///   whether the node was cordoned before;
/// - the absence of the list of taints or of a map that the change creates.
///
/// Other changes of the node are kept. Added taints are not tested for: the API server itself
/// refuses two taints of one key and effect.
pub fn render(view: &NodeView, change: &NodeChange) -> Patch {
    let mut draft = Draft::default();
    if change.is_empty() {
        return draft.finish();
    }
    draft.test(&["metadata", "uid"], json!(view.uid));

    let of_session = is_of_session(change);
    if of_session || change.unschedulable.is_some() {
        draft.unschedulable(view, change.unschedulable);
    }
    draft.taints(view, change);
    draft.map("labels", &view.labels, &change.labels, &[]);
    let read: &[&str] = if of_session {
        &SESSION_ANNOTATIONS
    } else {
        &[]
    };
    draft.map("annotations", &view.annotations, &change.annotations, read);
    draft.finish()
}

fn is_of_session(change: &NodeChange) -> bool {
    change.unschedulable.is_some()
        || !change.add_taints.is_empty()
        || !change.remove_taints.is_empty()
        || change
            .annotations
            .keys()
            .any(|key| SESSION_ANNOTATIONS.contains(&key.as_str()))
}

/// A patch under construction. All tests precede all edits, so each test applies to the
/// unchanged node.
#[derive(Default)]
struct Draft {
    tests: Vec<PatchOperation>,
    edits: Vec<PatchOperation>,
}

// === impl Draft ===

impl Draft {
    fn unschedulable(&mut self, view: &NodeView, wanted: Option<bool>) {
        let path = &["spec", "unschedulable"];
        self.test(
            path,
            if view.unschedulable {
                json!(true)
            } else {
                Value::Null
            },
        );
        match wanted {
            Some(true) => self.add(path, json!(true)),
            Some(false) if view.unschedulable => self.remove(path),
            Some(false) | None => {}
        }
    }

    fn taints(&mut self, view: &NodeView, change: &NodeChange) {
        // From the last to the first, so that a removal does not shift the indexes still to
        // come.
        for (index, on_node) in view.taints.iter().enumerate().rev() {
            if change.remove_taints.contains(&on_node.taint) {
                let index = index.to_string();
                self.test(&["spec", "taints", &index], on_node.raw.clone());
                self.remove(&["spec", "taints", &index]);
            }
        }
        if change.add_taints.is_empty() {
            return;
        }
        if view.taints.is_empty() {
            self.test(&["spec", "taints"], Value::Null);
            self.add(&["spec", "taints"], json!(change.add_taints));
        } else {
            for taint in &change.add_taints {
                self.add(&["spec", "taints", "-"], json!(taint));
            }
        }
    }

    /// Changes labels or annotations; tests the keys that the change touches and those in
    /// `read`.
    fn map(
        &mut self,
        map: &str,
        on_node: &BTreeMap<String, String>,
        change: &BTreeMap<String, Option<String>>,
        read: &[&str],
    ) {
        let touched: BTreeSet<&str> = change
            .keys()
            .map(String::as_str)
            .chain(read.iter().copied())
            .collect();
        if touched.is_empty() {
            return;
        }
        // A key cannot be added to an absent map.
        if on_node.is_empty() {
            let whole: BTreeMap<&String, &String> = change
                .iter()
                .filter_map(|(key, value)| Some((key, value.as_ref()?)))
                .collect();
            self.test(&["metadata", map], Value::Null);
            if !whole.is_empty() {
                self.add(&["metadata", map], json!(whole));
            }
            return;
        }
        for key in touched {
            self.test(&["metadata", map, key], json!(on_node.get(key)));
        }
        for (key, value) in change {
            match value {
                Some(value) => self.add(&["metadata", map, key], json!(value)),
                None if on_node.contains_key(key) => self.remove(&["metadata", map, key]),
                None => {}
            }
        }
    }

    fn test(&mut self, path: &[&str], value: Value) {
        self.tests.push(PatchOperation::Test(TestOperation {
            path: pointer(path),
            value,
        }));
    }

    /// Sets a field, present or absent.
    fn add(&mut self, path: &[&str], value: Value) {
        self.edits.push(PatchOperation::Add(AddOperation {
            path: pointer(path),
            value,
        }));
    }

    fn remove(&mut self, path: &[&str]) {
        self.edits.push(PatchOperation::Remove(RemoveOperation {
            path: pointer(path),
        }));
    }

    fn finish(mut self) -> Patch {
        self.tests.append(&mut self.edits);
        Patch(self.tests)
    }
}

/// Returns a JSON pointer, with `~` and `/` in the tokens escaped.
fn pointer(tokens: &[&str]) -> PointerBuf {
    PointerBuf::from_tokens(tokens.iter().copied())
}

#[cfg(test)]
mod tests;
