//! Conditions of a node: one patch of its status.
//!
//! A strategic merge patch merges conditions by their type on the server, so it names only
//! those that change: it cannot conflict with the kubelet's heartbeats, with other writers of
//! conditions, or with our own patches of the node. Where the object changes under it, the API
//! server applies it again by itself. It names the node's uid: a node that was made anew
//! under the same name is another one, and has other faults.

use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::Request;
use model::condition::{ConditionChange, status_name};
use model::node::NodeView;
use serde_json::{Value, json};

use crate::apply::{NODES, check_node_name};
use crate::connect::Cluster;
use crate::error::ApiError;
use crate::pace::Urgency;
use crate::request::ask;

impl Cluster {
    /// Writes these conditions of the node that `view` shows, and returns the node after it.
    /// Other conditions stay as they are.
    ///
    /// One request, after all that acts; it is not repeated here.
    pub async fn set_conditions(
        &self,
        view: &NodeView,
        changes: &[ConditionChange],
        now: Timestamp,
    ) -> Result<NodeView, ApiError> {
        check_node_name(&view.name)?;
        let patch = Patch::Strategic(body(view, changes, now));
        let params = PatchParams::default();
        let request = Request::new(NODES).patch_subresource("status", &view.name, &params, &patch);
        Ok(ask(&self.client(Urgency::Tell), request).await?)
    }
}

fn body(view: &NodeView, changes: &[ConditionChange], now: Timestamp) -> Value {
    let now = seconds(now);
    let conditions: Vec<Value> = changes
        .iter()
        .map(|change| {
            let one = &change.condition;
            let mut condition = json!({
                "type": one.kind,
                "status": status_name(one.status),
                "reason": one.reason,
                "message": one.message,
                "lastHeartbeatTime": now,
            });
            // What is left out stays as it is on the node.
            if change.transition {
                condition["lastTransitionTime"] = json!(now);
            }
            condition
        })
        .collect();
    json!({"metadata": {"uid": view.uid}, "status": {"conditions": conditions}})
}

/// Returns a time as Kubernetes has it: RFC 3339 in whole seconds.
fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
