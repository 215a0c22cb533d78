//! A kubelet for tests.

use std::path::Path;
use std::sync::{Arc, Mutex};

use contract::pod_resources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use contract::pod_resources::{
    ClaimResource, ContainerDevices, ContainerResources, DynamicResource, ListPodResourcesRequest,
    ListPodResourcesResponse, PodResources,
};
use tokio::net::UnixListener;
use tonic::{Request, Response, Status};

/// A kubelet with these pods.
#[derive(Clone, Default)]
pub(crate) struct Kubelet(pub(crate) Arc<Mutex<Vec<PodResources>>>);

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pod_resources = self.0.lock().unwrap().clone();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }
}

impl Kubelet {
    pub(crate) fn serve(&self, socket: &Path) {
        let listener = UnixListener::bind(socket).unwrap();
        let serving = tonic::transport::Server::builder()
            .add_service(PodResourcesListerServer::new(self.clone()))
            .serve_with_incoming(runtime::unix_grpc::incoming(listener));
        tokio::spawn(serving);
    }
}

/// Returns a pod in the namespace `train` with these resources and claimed devices.
pub(crate) fn pod(
    name: &str,
    devices: &[(&str, &[&str])],
    claimed: &[(&str, &str)],
) -> PodResources {
    let devices = devices.iter().map(|(resource, ids)| ContainerDevices {
        resource_name: (*resource).to_owned(),
        device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
    });
    let claims = claimed.iter().map(|(driver, device)| ClaimResource {
        driver_name: (*driver).to_owned(),
        pool_name: "n1".to_owned(),
        device_name: (*device).to_owned(),
    });
    PodResources {
        name: name.to_owned(),
        namespace: "train".to_owned(),
        containers: vec![ContainerResources {
            name: "main".to_owned(),
            devices: devices.collect(),
            dynamic_resources: vec![DynamicResource {
                claim_name: "c".to_owned(),
                claim_namespace: "train".to_owned(),
                claim_resources: claims.collect(),
            }],
        }],
    }
}
