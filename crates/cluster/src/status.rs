//! Conditions of a node, written by one patch of its status.
//!
//! The API server merges the conditions of a strategic merge patch by type, so the patch names
//! only those that change. It cannot conflict with heartbeats of the kubelet, with other writers
//! of conditions, or with our patches of the node: if the object changes meanwhile, the API
//! server applies the patch again. The patch names the node's UID, since a recreated node of the
//! same name has other faults.

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
    /// Writes conditions of the node that `view` shows, and returns the node afterwards. Other
    /// conditions stay.
    ///
    /// One request, of [`Urgency::Report`], without retries.
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
        Ok(ask(&self.client(Urgency::Report), request).await?)
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
            // Without this field the API server keeps the time on the node.
            if change.transition {
                condition["lastTransitionTime"] = json!(now);
            }
            condition
        })
        .collect();
    json!({"metadata": {"uid": view.uid}, "status": {"conditions": conditions}})
}

/// Returns a time as RFC 3339 in whole seconds, as Kubernetes writes it.
fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
