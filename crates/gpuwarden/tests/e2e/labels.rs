//! Labels of nodes by their software and devices, in a cluster of their own: every node of a
//! cluster gets labels.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Private, Product, Version, wait_for};

use crate::support::SOON;

/// Nodes with pods of DCGM and of the driver.
const NODES: usize = 40;
/// Prefix of the labels and the annotation.
const OURS: &str = "nvsentinel.dgxc.nvidia.com/";
/// Node whose GPUs are in a slice, without GPU Feature Discovery.
const DRA: &str = "dra";
/// Node that is handed over to an external system.
const FOREIGN: &str = "foreign";
/// Namespace of the pods.
const NAMESPACE: &str = "gpu-operator";
/// Labels of a node with all pods and eight GPUs.
const WHOLE: &str = "dcgm.version=4.x driver.installed=true gpu.count.current=8 \
                     gpu.count.expected=8 kata.enabled=false dcgm-bootstrap-completed=true";

/// A cluster of labelled nodes.
struct Labelled {
    plane: Private,
    client: Client,
    nodes: Api<Node>,
    pods: Api<Pod>,
}

fn node_name(index: usize) -> String {
    format!("n-{index:02}")
}

/// Returns our labels of a node, then our annotations.
fn ours(node: &Node) -> String {
    let of = |entries: &Option<BTreeMap<String, String>>| -> Vec<String> {
        let entries = entries.iter().flatten();
        let ours = entries.filter_map(|(key, value)| Some((key.strip_prefix(OURS)?, value)));
        ours.filter(|(key, _)| *key != "managed")
            .map(|(key, value)| format!("{key}={value}"))
            .collect()
    };
    let (labels, annotations) = (&node.metadata.labels, &node.metadata.annotations);
    [of(labels), of(annotations)].concat().join(" ")
}

// === impl Labelled ===

impl Labelled {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
            return Ok(None);
        };
        let client = plane.client().await?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        for name in ["gpuwarden", NAMESPACE] {
            let namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
            namespaces
                .create(&PostParams::default(), &namespace)
                .await?;
        }
        let cluster = Self {
            plane,
            nodes: Api::all(client.clone()),
            pods: Api::namespaced(client.clone(), NAMESPACE),
            client,
        };
        cluster.fill().await?;
        Ok(Some(cluster))
    }

    async fn fill(&self) -> anyhow::Result<()> {
        let kind = |name: &str, kind: &str| {
            testkit::node(name)
                .label("node.kubernetes.io/instance-type", kind)
                .label("example.com/mine", "1")
        };
        for index in 0..NODES {
            let name = node_name(index);
            let node = kind(&name, "p5").label("nvidia.com/gpu.count", "8");
            node.create(&self.client).await?;
            self.pod(
                &name,
                "nvidia-dcgm",
                "nvcr.io/nvidia/cloud-native/dcgm:4.5.2-1-ubuntu22.04",
            )
            .await?;
            self.pod(&name, "nvidia-driver-daemonset", "driver:580")
                .await?;
        }
        kind(DRA, "g6").create(&self.client).await?;
        let devices: Vec<Value> = (0..4)
            .map(|index| {
                let attributes = json!({"type": {"string": "gpu"}, "uuid": {"string": "GPU-1"}});
                json!({"name": format!("gpu-{index}"), "attributes": attributes})
            })
            .collect();
        let slice = serde_json::from_value(json!({
            "metadata": {"name": "dra-gpus"},
            "spec": {
                "driver": "gpu.nvidia.com",
                "nodeName": DRA,
                "pool": {"name": DRA, "generation": 1, "resourceSliceCount": 1},
                "devices": devices,
            },
        }))?;
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        slices.create(&PostParams::default(), &slice).await?;
        let foreign = kind(FOREIGN, "p5").label("nvsentinel.dgxc.nvidia.com/managed", "false");
        foreign.create(&self.client).await?;
        self.pods_run().await
    }

    /// Waits until kwok has made all pods ready.
    async fn pods_run(&self) -> anyhow::Result<()> {
        wait_for("pods that run", SOON, || async {
            let pods = self.pods.list(&ListParams::default()).await;
            let pods = pods.map_err(|error| error.to_string())?.items;
            let runs = |pod: &&Pod| {
                let conditions = pod
                    .status
                    .iter()
                    .flat_map(|one| one.conditions.iter().flatten());
                let mut ready = conditions.filter(|one| one.type_ == "Ready");
                ready.any(|one| one.status == "True")
            };
            match pods.iter().filter(runs).count() {
                count if count == 2 * NODES => Ok(()),
                count => Err(format!("{count} of {} run", pods.len())),
            }
        })
        .await
    }

    /// Creates a pod, which kwok makes ready.
    async fn pod(&self, node: &str, app: &str, image: &str) -> anyhow::Result<()> {
        let pod = testkit::pod(NAMESPACE, format!("{app}-{node}"));
        let pod = pod.on(node).label("app", app).image(image);
        pod.create(&self.client).await?;
        Ok(())
    }

    async fn delete_pod(&self, node: &str, app: &str) -> anyhow::Result<()> {
        let params = DeleteParams::default().grace_period(0);
        self.pods.delete(&format!("{app}-{node}"), &params).await?;
        Ok(())
    }

    async fn controller(&self) -> anyhow::Result<Product> {
        Launch::controller()?
            .kubeconfig(self.plane.kubeconfig())
            .arg("--label-nodes")
            .option("--leader-elect", "false")
            .arg("--grpc-insecure")
            .option("--grpc-listen", "127.0.0.1:0")
            .start()
            .await
    }

    /// Waits until the labels of these nodes are as expected.
    async fn until(&self, by: &Product, expected: &[(String, &str)]) -> anyhow::Result<()> {
        by.wait_for("the labels", SOON, || async {
            let nodes = self.nodes.list(&ListParams::default()).await;
            let nodes = nodes.map_err(|error| error.to_string())?.items;
            let found: BTreeMap<String, String> = nodes
                .iter()
                .map(|node| (node.metadata.name.clone().unwrap_or_default(), ours(node)))
                .collect();
            match expected
                .iter()
                .find(|(name, labels)| found[name] != *labels)
            {
                None => Ok(()),
                Some((name, labels)) => Err(format!("{name}: {} and not {labels}", found[name])),
            }
        })
        .await
    }

    /// Returns the number of patches of each node by the product that were carried out.
    fn patches(&self) -> anyhow::Result<BTreeMap<String, usize>> {
        let log = std::fs::read_to_string(self.plane.dir().join("log/audit.json"))?;
        let lines = log.lines();
        let entries = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let ours = entries.filter(|entry| {
            let agent = entry["userAgent"].as_str().unwrap_or_default();
            agent.starts_with("gpuwarden/")
                && entry["stage"] == "ResponseComplete"
                && entry["verb"] == "patch"
                && entry["objectRef"]["resource"] == "nodes"
                && entry["responseStatus"]["code"] == 200
        });
        let mut patches = BTreeMap::new();
        for entry in ours {
            let name = entry["objectRef"]["name"].as_str().unwrap_or_default();
            *patches.entry(name.to_owned()).or_default() += 1;
        }
        Ok(patches)
    }

    /// Waits until `count` patches were carried out since `before`: the log of the API server is
    /// written after a node has changed.
    async fn until_patched(
        &self,
        before: &BTreeMap<String, usize>,
        count: usize,
    ) -> anyhow::Result<()> {
        let before: usize = before.values().sum();
        wait_for("the patches in the audit log", SOON, || async {
            let patches = self.patches().map_err(|error| error.to_string())?;
            match patches.values().sum::<usize>() - before {
                found if found == count => Ok(()),
                found => Err(format!("{found} patches: {patches:?}")),
            }
        })
        .await
    }
}

#[tokio::test]
async fn nodes_are_labelled_by_one_patch_each_through_a_kill_and_follow_their_objects()
-> anyhow::Result<()> {
    let Some(cluster) = Labelled::new().await? else {
        return Ok(());
    };
    let mut product = cluster.controller().await?;
    product
        .wait_for("some labels", SOON, || async {
            match cluster.patches() {
                Ok(patches) if patches.len() > NODES / 4 => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
    product.kill9()?;
    let before = cluster.patches()?;
    product.restart().await?;
    let mut expected: Vec<(String, &str)> = (0..NODES)
        .map(|index| (node_name(index), WHOLE))
        .chain([
            (
                DRA.to_owned(),
                "gpu.count.current=4 gpu.count.expected=4 kata.enabled=false",
            ),
            (FOREIGN.to_owned(), ""),
        ])
        .collect();
    cluster.until(&product, &expected).await?;
    // A patch that was under way at the kill may be carried out after the restart has read the
    // node, and is then made once more.
    let patches = cluster.patches()?;
    let again =
        |(name, count): (&String, &usize)| *count > 1 + usize::from(!before.contains_key(name));
    assert!(!patches.iter().any(again), "{patches:?}, before {before:?}");
    assert!(!patches.contains_key(FOREIGN), "{patches:?}");
    let node = cluster.nodes.get(&node_name(0)).await?;
    assert_eq!(node.metadata.labels.unwrap()["example.com/mine"], "1");

    // Nothing is patched once all is as it should be, and the log has the patch of each node.
    wait_for("a patch of each node in the audit log", SOON, || async {
        let patched = cluster.patches().map_err(|error| error.to_string())?;
        let all = patched.len() == NODES + 1;
        all.then_some(()).ok_or(format!("{patched:?}"))
    })
    .await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let settled = cluster.patches()?;

    // A change of allocatable, pods that are gone, and one that is gone while nobody looks.
    let allocatable = json!({"status": {"allocatable": {"nvidia.com/mlnxnics": "6"}}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(allocatable));
    cluster
        .nodes
        .patch_status(&node_name(0), &params, &patch)
        .await?;
    cluster.delete_pod(&node_name(1), "nvidia-dcgm").await?;
    cluster
        .delete_pod(&node_name(2), "nvidia-driver-daemonset")
        .await?;
    expected[0].1 = "dcgm.version=4.x driver.installed=true gpu.count.current=8 \
                     gpu.count.expected=8 kata.enabled=false nic.count.current=6 \
                     nic.count.expected=6 dcgm-bootstrap-completed=true";
    expected[1].1 = "driver.installed=true gpu.count.current=8 gpu.count.expected=8 \
                     kata.enabled=false dcgm-bootstrap-completed=true";
    expected[2].1 = "dcgm.version=4.x gpu.count.current=8 gpu.count.expected=8 \
                     kata.enabled=false dcgm-bootstrap-completed=true";
    cluster.until(&product, &expected).await?;
    product.kill9()?;
    cluster.delete_pod(&node_name(3), "nvidia-dcgm").await?;
    product.restart().await?;
    expected[3].1 = expected[1].1;
    cluster.until(&product, &expected).await?;
    cluster.until_patched(&settled, 4).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.until_patched(&settled, 4).await
}
