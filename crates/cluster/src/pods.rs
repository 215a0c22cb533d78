//! The pods of one node, the annotation that says which GPUs each has, and the devices that the
//! node's driver publishes.

use contract::keys;
use domain::device::{GPU_DRIVER, Inventory, NodeDevices};
use k8s_openapi::api::core::v1::Pod as Object;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::{DynamicObject, PartialObjectMeta};
use serde_json::json;

use crate::connect::Cluster;
use crate::devices::slice;
use crate::error::ApiError;
use crate::pace::Urgency;

/// A pod, as far as it is of use here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid, which no later pod of the same name has.
    pub uid: String,
    /// The value of the annotation that says which devices it has.
    pub devices: Option<String>,
}

// === impl Cluster ===

impl Cluster {
    /// Returns the pods that are bound to a node and have not come to their end. One request, after
    /// all that acts, which the API server answers from its memory.
    pub async fn pods_of_node(&self, node: &str) -> Result<Vec<Pod>, ApiError> {
        let pods: Api<Object> = Api::all(self.client(Urgency::Tell));
        let fields = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
        let params = ListParams::default().fields(&fields).match_any();
        let listed = pods.list_metadata(&params).await?;
        Ok(listed.items.into_iter().map(pod).collect())
    }

    /// Says on a pod which devices it has; `None` takes the annotation off. The error is
    /// [`ApiError::Conflict`] or [`ApiError::NotFound`] where the pod is gone, also where another
    /// has its name now. One request, after all that acts.
    pub async fn set_pod_devices(&self, pod: &Pod, value: Option<&str>) -> Result<(), ApiError> {
        let pods: Api<Object> = Api::namespaced(self.client(Urgency::Tell), &pod.namespace);
        let patch = json!({"metadata": {
            "uid": pod.uid,
            "annotations": {keys::POD_DEVICES: value},
        }});
        let params = PatchParams::default();
        let patch = Patch::Merge(patch);
        let patched = pods.patch_metadata(&pod.name, &params, &patch).await;
        match patched.map(drop).map_err(ApiError::from) {
            // So it says that the uid is another's.
            Err(ApiError::Invalid { status, message }) if message.contains("metadata.uid") => {
                Err(ApiError::Conflict { status })
            }
            answer => answer,
        }
    }

    /// Returns the devices that the driver of a node's GPUs publishes, by its newest slices.
    pub async fn devices_of_node(&self, node: &str) -> Result<NodeDevices, ApiError> {
        let Some(api) = self.slices_api().await? else {
            return Ok(NodeDevices::default());
        };
        let slices: Api<DynamicObject> = Api::all_with(self.client(Urgency::Tell), &api);
        let fields = format!("spec.driver={GPU_DRIVER},spec.nodeName={node}");
        let listed = slices.list(&ListParams::default().fields(&fields)).await?;
        let mut inventory = Inventory::default();
        for object in listed.items {
            let (name, slice) = slice(object)?;
            inventory.take(&name, Some(slice));
        }
        Ok(inventory.of_node(node, std::iter::empty()))
    }
}

fn pod(object: PartialObjectMeta<Object>) -> Pod {
    let metadata = object.metadata;
    let devices = metadata
        .annotations
        .unwrap_or_default()
        .remove(keys::POD_DEVICES);
    Pod {
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
        devices,
    }
}
