//! Tests from the report of an agent to the annotations of pods on a real API server.

use cluster::ConnectOptions;
use contract::node::{ClaimedDevice, ResourceGpus};
use serde_json::Value;
use testkit::{ControlPlane, Version, node, unique};

use super::*;

fn resources(name: &str, gpus: &[&str]) -> PodGpus {
    PodGpus {
        namespace: "train".to_owned(),
        name: name.to_owned(),
        resources: vec![ResourceGpus {
            resource: keys::RESOURCE_GPU.to_owned(),
            gpus: gpus.iter().map(|gpu| (*gpu).to_owned()).collect(),
        }],
        devices: Vec::new(),
    }
}

fn claimed(name: &str, pool: &str, device: &str) -> PodGpus {
    PodGpus {
        resources: Vec::new(),
        devices: vec![ClaimedDevice {
            driver: GPU_DRIVER.to_owned(),
            pool: pool.to_owned(),
            device: device.to_owned(),
        }],
        ..resources(name, &[])
    }
}

fn report(node: &str, pods: Vec<PodGpus>) -> ReportPodsRequest {
    ReportPodsRequest {
        node_name: node.to_owned(),
        pods,
    }
}

/// A cluster with two nodes, and a namespace for their pods.
struct Scene {
    plane: ControlPlane,
    namespace: String,
    nodes: [String; 2],
    pods: PodDevices,
    cluster: Arc<Cluster>,
}

impl Scene {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
            return Ok(None);
        };
        let namespace = unique("pods");
        plane.namespace(&namespace).await?;
        let nodes = [unique("node"), unique("node")];
        for name in &nodes {
            let node = node(name).without_kubelet();
            node.create(&plane.client().await?).await?;
        }
        let options = ConnectOptions {
            kubeconfig: Some(plane.kubeconfig().to_owned()),
            ..ConnectOptions::default()
        };
        let cluster = Arc::new(Cluster::connect(options).await?);
        Ok(Some(Self {
            plane,
            namespace,
            nodes,
            pods: PodDevices::new(Some(Arc::clone(&cluster))),
            cluster,
        }))
    }

    async fn apply(&self, object: Value) -> anyhow::Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), object.to_string())?;
        let file = file.path().display().to_string();
        self.plane.kubectl(["create", "-f", &file]).await?;
        Ok(())
    }

    async fn pod(&self, name: &str, node: &str, devices: Option<&str>) -> anyhow::Result<()> {
        let annotations = devices.map(|devices| json!({keys::POD_DEVICES: devices, "a": "b"}));
        self.apply(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "annotations": annotations},
            "spec": {
                "nodeName": node,
                "containers": [{"name": "main", "image": "none"}],
                "automountServiceAccountToken": false,
            },
        }))
        .await
    }

    /// Returns the annotation of a pod, and the version of the object.
    async fn seen(&self, name: &str) -> anyhow::Result<(Option<String>, String)> {
        let pod = ["-n", &self.namespace, "get", "pod", name, "-o", "json"];
        let pod: Value = serde_json::from_str(&self.plane.kubectl(pod).await?)?;
        let metadata = &pod["metadata"];
        let devices = metadata["annotations"][keys::POD_DEVICES].as_str();
        let version = metadata["resourceVersion"].as_str().unwrap_or_default();
        Ok((devices.map(str::to_owned), version.to_owned()))
    }

    /// Handles a report of the first node, with the pods in the scene's namespace.
    async fn handle(&self, mut pods: Vec<PodGpus>) -> bool {
        for pod in &mut pods {
            pod.namespace.clone_from(&self.namespace);
        }
        let report = report(&self.nodes[0], pods);
        self.pods.handle(&report).await.unwrap()
    }
}

const ONE: &str = r#"{"devices":{"nvidia.com/gpu":["GPU-1"]}}"#;

#[tokio::test]
async fn the_gpus_of_pods_are_written_on_them_and_taken_off() -> anyhow::Result<()> {
    let Some(scene) = Scene::new().await? else {
        return Ok(());
    };
    let [own, other] = &scene.nodes;
    for name in ["two", "same", "claim", "new-claim"] {
        scene
            .pod(name, own, (name == "same").then_some(ONE))
            .await?;
    }
    scene.pod("left", own, Some(ONE)).await?;
    scene.pod("elsewhere", other, None).await?;
    scene.pod("kept-elsewhere", other, Some(ONE)).await?;
    let untouched = scene.seen("same").await?;
    scene
        .apply(json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": format!("{own}-gpus")},
            "spec": {
                "driver": GPU_DRIVER,
                "nodeName": own,
                "pool": {"name": own, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": "GPU-7"}}}],
            },
        }))
        .await?;
    let pods = || {
        vec![
            resources("two", &["GPU-2", "GPU-1", "GPU-2"]),
            resources("same", &["GPU-1"]),
            claimed("claim", own, "gpu-0"),
            claimed("new-claim", own, "gpu-9"),
            // A report about the pods of another node.
            resources("elsewhere", &["GPU-1"]),
            resources("gone", &["GPU-1"]),
        ]
    };
    assert!(scene.handle(pods()).await, "a device is not published yet");
    let two = r#"{"devices":{"nvidia.com/gpu":["GPU-1","GPU-2"]}}"#;
    assert_eq!(scene.seen("two").await?.0.as_deref(), Some(two));
    assert_eq!(
        scene.seen("same").await?,
        untouched,
        "only changes are written"
    );
    let claim = r#"{"devices":{"nvidia.com/gpu":["GPU-7"]}}"#;
    assert_eq!(scene.seen("claim").await?.0.as_deref(), Some(claim));
    for name in ["new-claim", "left", "elsewhere"] {
        assert_eq!(scene.seen(name).await?.0, None, "{name}");
    }
    assert_eq!(scene.seen("kept-elsewhere").await?.0.as_deref(), Some(ONE));
    // A repeated report changes nothing.
    let before = (scene.seen("two").await?, scene.seen("claim").await?);
    scene.handle(pods()).await;
    assert_eq!(
        (scene.seen("two").await?, scene.seen("claim").await?),
        before
    );
    // While the slice is missing, the annotation of the pod stays.
    let slice = format!("{own}-gpus");
    scene
        .plane
        .kubectl(["delete", "resourceslice", &slice])
        .await?;
    assert!(scene.handle(vec![claimed("claim", own, "gpu-0")]).await);
    assert_eq!(scene.seen("claim").await?.0.as_deref(), Some(claim));
    assert_eq!(scene.seen("two").await?.0, None, "it has none any more");
    Ok(())
}

#[tokio::test]
async fn a_pod_that_took_the_name_of_another_is_not_written_on() -> anyhow::Result<()> {
    let Some(scene) = Scene::new().await? else {
        return Ok(());
    };
    scene.pod("one", &scene.nodes[0], None).await?;
    let listed = scene.cluster.pods_of_node(&scene.nodes[0]).await?;
    let pod = NodePod {
        uid: "2b1d5c3e-0000-4000-8000-000000000000".to_owned(),
        ..listed[0].clone()
    };
    let error = scene.cluster.set_pod_devices(&pod, Some(ONE)).await;
    assert!(matches!(error, Err(ApiError::Conflict { .. })), "{error:?}");
    let gone = NodePod {
        name: "gone".to_owned(),
        ..pod
    };
    let error = scene.cluster.set_pod_devices(&gone, Some(ONE)).await;
    assert!(
        matches!(
            error,
            Err(ApiError::NotFound { .. } | ApiError::Conflict { .. })
        ),
        "{error:?}"
    );
    assert_eq!(scene.seen("one").await?.0, None);
    // A finished pod has no GPUs, whatever its annotation.
    let namespace = scene.namespace.as_str();
    let status = r#"{"status":{"phase":"Succeeded"}}"#;
    let patch = [
        "-n",
        namespace,
        "patch",
        "pod",
        "one",
        "--subresource=status",
    ];
    let patch = patch.into_iter().chain(["--type=merge", "-p", status]);
    scene.plane.kubectl(patch).await?;
    assert!(!scene.handle(vec![resources("one", &["GPU-1"])]).await);
    assert_eq!(scene.seen("one").await?.0, None);
    Ok(())
}

#[tokio::test]
async fn bad_reports_are_refused_by_name() {
    let scene = PodDevices::new(None);
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    let ids: Vec<String> = (0..=MAX_DEVICES).map(|id| format!("GPU-{id}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let table = [
        (
            vec![resources("a", &["GPU 1"])],
            "pods[0].resources.gpus is \"GPU 1\"",
        ),
        (
            vec![resources("a", &[]), resources("", &[])],
            "pods[1].name",
        ),
        (vec![resources(&long, &[])], "no name"),
        (vec![claimed("a", "n1", "\n")], "pods[0].devices"),
        (vec![resources("a", &ids)], "at most 256"),
        (vec![resources("a", &[]); MAX_PODS + 1], "at most 1024"),
    ];
    for (pods, text) in table {
        let refused = scene.handle(&report("n1", pods)).await.unwrap_err();
        assert!(refused.contains(text), "{refused}");
    }
}
