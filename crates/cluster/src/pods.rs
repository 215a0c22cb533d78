//! The pods of one node, the annotation that says which GPUs each has, what their kubelet says of these,
//! and the devices that the node's driver publishes.

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

/// A GPU of a pod that the kubelet calls unhealthy, by what the device plugin or the driver of the claim
/// told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnhealthyGpu {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// The resource, such as `nvidia.com/gpu`, or the claim, such as `claim:gpus/gpu`.
    pub resource: String,
    /// The device, as the resource names it.
    pub device: String,
}

/// The kubelet's word for a device of which its plugin or driver says that it is not well.
const UNHEALTHY: &str = "Unhealthy";
/// The beginning of the resources of device plugins whose devices are GPUs.
const GPU_RESOURCES: &str = "nvidia.com/";

// === impl Cluster ===

impl Cluster {
    /// Returns the GPUs of the pods that are bound to a node which its kubelet calls unhealthy. Pods say
    /// so from Kubernetes 1.36 on. One request, after all that acts.
    pub async fn unhealthy_gpus_of_node(&self, node: &str) -> Result<Vec<UnhealthyGpu>, ApiError> {
        let pods: Api<Object> = Api::all(self.client(Urgency::Tell));
        let listed = pods.list(&running(node)).await?;
        Ok(listed.items.iter().flat_map(unhealthy_gpus).collect())
    }

    /// Returns the pods that are bound to a node and have not come to their end. One request, after
    /// all that acts, which the API server answers from its memory.
    pub async fn pods_of_node(&self, node: &str) -> Result<Vec<Pod>, ApiError> {
        let pods: Api<Object> = Api::all(self.client(Urgency::Tell));
        let listed = pods.list_metadata(&running(node)).await?;
        Ok(listed.items.into_iter().map(pod).collect())
    }

    /// Says on a pod which devices it has; `None` takes the annotation off. The error is
    /// [`ApiError::Conflict`] or [`ApiError::NotFound`] where the pod is gone, also where another
    /// has its name now. One request, after all that acts.
    pub async fn set_pod_devices(&self, pod: &Pod, value: Option<&str>) -> Result<(), ApiError> {
        check_name(&pod.name)?;
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

/// Returns what asks for the pods that are bound to a node and have not come to their end.
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
            // Two containers may have it by one claim.
            if is_gpu && device.health.as_deref() == Some(UNHEALTHY) && !found.contains(&gpu) {
                found.push(gpu);
            }
        }
    }
    found
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
