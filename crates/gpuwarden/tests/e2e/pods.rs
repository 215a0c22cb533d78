//! GPUs of pods: from a fake kubelet on a socket to the pod on a real API server.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use contract::pod_resources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use contract::pod_resources::{
    ContainerDevices, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use testkit::{ControlPlane, Launch, NodeBuilder, Options, Version, unique};
use tokio::net::UnixListener;
use tonic::{Request, Response, Status};

use crate::support::{SOON, Scene, own_port};

const DEVICES: &str = "dgxc.nvidia.com/devices";
const ONE: &str = r#"{"devices":{"nvidia.com/gpu":["GPU-1"]}}"#;

/// A kubelet that has allocated `GPU-1` to the pod `default/NAME`.
struct Kubelet {
    pod: String,
    directory: tempfile::TempDir,
}

/// Pods of a fake kubelet, and the number of requests.
#[derive(Clone, Default)]
pub(crate) struct Pods(Arc<Mutex<(Vec<PodResources>, u32)>>);

impl Pods {
    /// Sets the pods, each with one container.
    pub(crate) fn are(&self, containers: impl IntoIterator<Item = (String, ContainerResources)>) {
        let pod = |(name, container)| PodResources {
            name,
            namespace: "default".to_owned(),
            containers: vec![container],
        };
        let pods = containers.into_iter().map(pod).collect();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0 = pods;
    }

    /// Returns the number of requests so far.
    pub(crate) fn asked(&self) -> u32 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Serves requests on a socket.
    pub(crate) fn serve(&self, socket: &Path) -> anyhow::Result<()> {
        let listener = UnixListener::bind(socket)?;
        let serving = tonic::transport::Server::builder()
            .add_service(PodResourcesListerServer::new(self.clone()))
            .serve_with_incoming(runtime::unix_grpc::incoming(listener));
        tokio::spawn(serving);
        Ok(())
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Pods {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let mut pods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pods.1 += 1;
        let pod_resources = pods.0.clone();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }
}

impl Kubelet {
    /// Creates the pod on a node, and a kubelet that lists it.
    async fn new(plane: &ControlPlane, node: &str) -> anyhow::Result<Self> {
        let pod = format!("on-{node}");
        let client = plane.client().await?;
        let made = testkit::pod("default", &pod).on(node);
        made.create(&client).await?;
        Ok(Self {
            pod,
            directory: tempfile::tempdir()?,
        })
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("kubelet.sock")
    }

    fn start(&self) -> anyhow::Result<()> {
        let devices = ContainerDevices {
            resource_name: "nvidia.com/gpu".to_owned(),
            device_ids: vec!["GPU-1".to_owned()],
        };
        let container = ContainerResources {
            devices: vec![devices],
            ..ContainerResources::default()
        };
        let pods = Pods::default();
        pods.are([(self.pod.clone(), container)]);
        pods.serve(&self.socket())
    }

    async fn annotation(&self, plane: &ControlPlane) -> anyhow::Result<Option<String>> {
        let pods: Api<Pod> = Api::namespaced(plane.client().await?, "default");
        let pod = pods.get(&self.pod).await?;
        Ok(pod.metadata.annotations.unwrap_or_default().remove(DEVICES))
    }
}

#[tokio::test]
async fn a_pod_says_which_gpus_it_has_by_the_node_itself() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let kubelet = Kubelet::new(&plane, &scene.node).await?;
    kubelet.start()?;
    // Another product, because the socket of the node's kubelet exists only now.
    let product = Launch::new()?
        .node_name(&scene.node)
        .kubeconfig(plane.kubeconfig())
        .option("--pod-resources", kubelet.socket())
        .quarantine()
        .start()
        .await?;
    let look = || async {
        match kubelet.annotation(&plane).await {
            Ok(Some(devices)) if devices == ONE => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    product.wait_for("the GPUs of the pod", SOON, look).await
}

/// The dry run starts first, followed by a product that acts and whose writes are observed.
#[tokio::test]
async fn a_dry_run_writes_nothing_on_pods() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let kubelet = Kubelet::new(&plane, &scene.node).await?;
    kubelet.start()?;
    let _dry_run = Launch::new()?
        .node_name(&scene.node)
        .kubeconfig(plane.kubeconfig())
        .option("--pod-resources", kubelet.socket())
        .quarantine()
        .arg("--dry-run")
        .start()
        .await?;
    // A pod of another node, whose product writes after its first request to the kubelet.
    let other = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let told = Kubelet::new(&plane, &other.node).await?;
    told.start()?;
    let acts = Launch::new()?
        .node_name(&other.node)
        .kubeconfig(plane.kubeconfig())
        .option("--pod-resources", told.socket())
        .quarantine()
        .start()
        .await?;
    let written = || async {
        match told.annotation(&plane).await {
            Ok(Some(devices)) if devices == ONE => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    acts.wait_for("the GPUs of the other pod", SOON, written)
        .await?;
    assert_eq!(kubelet.annotation(&plane).await?, None);
    Ok(())
}

#[tokio::test]
async fn a_pod_says_which_gpus_it_has_by_agent_and_controller() -> anyhow::Result<()> {
    // A controller acts on all nodes of its cluster.
    let options = Options::default();
    let Some(plane) = ControlPlane::private(Version::V1_37, options).await? else {
        return Ok(());
    };
    let place = own_port()?;
    let port = place.local_addr()?.to_string();
    let scene = Scene::with(&plane, NodeBuilder::without_kubelet, |_| {
        let launch = Launch::controller()?.kubeconfig(plane.kubeconfig());
        Ok(launch
            .quarantine()
            .option("--leader-elect", "false")
            .option("--grpc-insecure", "true")
            .option("--grpc-listen", &port))
    })
    .await?;
    let kubelet = Kubelet::new(&plane, &scene.node).await?;
    kubelet.start()?;
    let agent = Launch::agent()?
        .node_name(&scene.node)
        .option("--controller", format!("http://{port}"))
        .option("--pod-resources", kubelet.socket())
        .start()
        .await?;
    let look = || async {
        match kubelet.annotation(&plane).await {
            Ok(Some(devices)) if devices == ONE => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    agent.wait_for("the GPUs of the pod", SOON, look).await
}

#[tokio::test]
async fn a_gpu_of_a_pod_that_the_kubelet_calls_unhealthy_is_named() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let name = unique("gpu");
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "nodeName": scene.node,
            "containers": [{
                "name": "main",
                "image": "registry.k8s.io/pause:3.10",
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }],
        },
    }))?;
    let pods: Api<Pod> = Api::namespaced(plane.client().await?, "default");
    pods.create(&PostParams::default(), &pod).await?;
    let status = json!({"status": {"containerStatuses": [{
        "name": "main", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
        "allocatedResourcesStatus": [{
            "name": "nvidia.com/gpu",
            "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}],
        }],
    }]}});
    let patch = Patch::Strategic(status);
    pods.patch_status(&name, &PatchParams::default(), &patch)
        .await?;
    let story = scene.product.client(["explain", &scene.node]).await?;
    let expected = format!(
        "pod       default/{name}: the kubelet reports its nvidia.com/gpu GPU-1 as unhealthy"
    );
    assert!(story.stdout.contains(&expected), "{}", story.stdout);
    Ok(())
}
