//! Pods of one node: their GPUs by annotation, the health that their kubelet reports, and the
//! devices that the node's GPU driver publishes.

use contract::keys;
use k8s_openapi::api::core::v1::Pod as Object;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::{DynamicObject, PartialObjectMeta};
use model::device::{GPU_DRIVER, Inventory, NodeDevices};
use serde_json::json;

use crate::connect::Cluster;
use crate::devices::slice;
use crate::error::ApiError;
use crate::kind::check_name;
use crate::pace::Urgency;

/// The parts of a pod that this module uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID, which differs from that of a later pod with the same name.
    pub uid: String,
    /// Value of the annotation [`keys::POD_DEVICES`]; `None` if the pod has none.
    pub devices: Option<String>,
}

/// A GPU of a pod that the kubelet reports as unhealthy, from the device plugin or the driver of
/// the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnhealthyGpu {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// Name of the resource, such as `nvidia.com/gpu`, or of the claim, such as
    /// `claim:gpus/gpu`.
    pub resource: String,
    /// Id of the device within the resource.
    pub device: String,
}

/// Health that a kubelet reports for a device whose plugin or driver calls it unhealthy.
const UNHEALTHY: &str = "Unhealthy";
/// Prefix of the resources of device plugins whose devices are GPUs.
const GPU_RESOURCES: &str = "nvidia.com/";

// === impl Cluster ===

impl Cluster {
    /// Returns the GPUs that the kubelet of a node reports as unhealthy, from the status of the
    /// pods that are bound to it. Kubernetes fills the status from 1.36 on. One request, of
    /// [`Urgency::Report`].
    pub async fn unhealthy_gpus_of_node(&self, node: &str) -> Result<Vec<UnhealthyGpu>, ApiError> {
        let pods: Api<Object> = Api::all(self.client(Urgency::Report));
        let listed = pods.list(&running(node)).await?;
        Ok(listed.items.iter().flat_map(unhealthy_gpus).collect())
    }

    /// Lists the pods that are bound to a node and have not finished. One request, of
    /// [`Urgency::Report`], which the API server answers from its cache.
    pub async fn pods_of_node(&self, node: &str) -> Result<Vec<NodePod>, ApiError> {
        let pods: Api<Object> = Api::all(self.client(Urgency::Report));
        let listed = pods.list_metadata(&running(node)).await?;
        Ok(listed.items.into_iter().map(pod).collect())
    }

    /// Sets the annotation with the devices of a pod; `None` removes the annotation. The error
    /// is [`ApiError::Conflict`] or [`ApiError::NotFound`] if the pod is gone, also if another
    /// pod has its name now. One request, of [`Urgency::Report`].
    pub async fn set_pod_devices(
        &self,
        pod: &NodePod,
        value: Option<&str>,
    ) -> Result<(), ApiError> {
        check_name(&pod.name)?;
        let pods: Api<Object> = Api::namespaced(self.client(Urgency::Report), &pod.namespace);
        let patch = json!({"metadata": {
            "uid": pod.uid,
            "annotations": {keys::POD_DEVICES: value},
        }});
        let params = PatchParams::default();
        let patch = Patch::Merge(patch);
        let patched = pods.patch_metadata(&pod.name, &params, &patch).await;
        match patched.map(drop).map_err(ApiError::from) {
            // The API server reports a UID of another pod as a change of the UID.
            Err(ApiError::Invalid { status, message }) if message.contains("metadata.uid") => {
                Err(ApiError::Conflict { status })
            }
            answer => answer,
        }
    }

    /// Returns the devices that the GPU driver of a node publishes, from its newest slices.
    pub async fn devices_of_node(&self, node: &str) -> Result<NodeDevices, ApiError> {
        let Some(api) = self.slices_api().await? else {
            return Ok(NodeDevices::default());
        };
        let slices: Api<DynamicObject> = Api::all_with(self.client(Urgency::Report), &api);
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

/// Selects the pods that are bound to a node and have not finished.
fn running(node: &str) -> ListParams {
    let fields = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
    ListParams::default().fields(&fields).match_any()
}

fn unhealthy_gpus(pod: &Object) -> Vec<UnhealthyGpu> {
    let metadata = &pod.metadata;
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let name = format!("{}/{}", of(&metadata.namespace), of(&metadata.name));
    let of_driver = format!("{GPU_DRIVER}/");
    let status = pod.status.iter();
    let containers = status.flat_map(|status| {
        let init = status.init_container_statuses.iter().flatten();
        init.chain(status.container_statuses.iter().flatten())
    });
    let resources = containers.flat_map(|one| one.allocated_resources_status.iter().flatten());
    let mut found = Vec::new();
    for resource in resources {
        for device in resource.resources.iter().flatten() {
            let is_gpu = resource.name.starts_with(GPU_RESOURCES)
                || device.resource_id.starts_with(&of_driver);
            let gpu = UnhealthyGpu {
                pod: name.clone(),
                resource: resource.name.clone(),
                device: device.resource_id.clone(),
            };
            // Two containers may share a device by one claim.
            if is_gpu && device.health.as_deref() == Some(UNHEALTHY) && !found.contains(&gpu) {
                found.push(gpu);
            }
        }
    }
    found
}

fn pod(object: PartialObjectMeta<Object>) -> NodePod {
    let metadata = object.metadata;
    let devices = metadata
        .annotations
        .unwrap_or_default()
        .remove(keys::POD_DEVICES);
    NodePod {
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
        devices,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_that_the_kubelet_calls_unhealthy_are_found_and_nothing_else() {
        let resource = |name: &str, devices: &[(&str, &str)]| {
            let device = |(id, health): &(&str, &str)| json!({"resourceID": id, "health": health});
            let devices: Vec<_> = devices.iter().map(device).collect();
            json!({"name": name, "resources": devices})
        };
        let container = |resources: &[serde_json::Value]| {
            json!({
                "name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                "allocatedResourcesStatus": resources,
            })
        };
        let plugin = [
            ("GPU-1", "Unhealthy"),
            ("GPU-2", "Healthy"),
            ("GPU-3", "Unknown"),
        ];
        let claimed = resource(
            "claim:gpus/gpu",
            &[("gpu.nvidia.com/n1/gpu-0", "Unhealthy")],
        );
        let pod = json!({
            "metadata": {"namespace": "ml", "name": "train"},
            "status": {
                "initContainerStatuses": [container(&[resource("nvidia.com/gpu", &plugin)])],
                "containerStatuses": [
                    container(&[
                        claimed.clone(),
                        resource("claim:nics/nic", &[("nic.example.com/n1/nic-0", "Unhealthy")]),
                        resource("example.com/fpga", &[("F1", "Unhealthy")]),
                    ]),
                    container(&[claimed]),
                ],
            },
        });
        let gpu = |resource: &str, device: &str| UnhealthyGpu {
            pod: "ml/train".to_owned(),
            resource: resource.to_owned(),
            device: device.to_owned(),
        };
        let expected = [
            gpu("nvidia.com/gpu", "GPU-1"),
            gpu("claim:gpus/gpu", "gpu.nvidia.com/n1/gpu-0"),
        ];
        assert_eq!(
            unhealthy_gpus(&serde_json::from_value(pod).unwrap()),
            expected
        );
        assert_eq!(unhealthy_gpus(&Object::default()), []);
    }
}
