//! Nodes and pods for tests.

use std::{
    collections::BTreeMap,
    process,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::{
    api::core::v1::{Container, Node, NodeSpec, NodeStatus, Pod, PodSpec, Taint},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::wait::wait_for;

/// Annotation of the nodes that kwok keeps alive.
const KWOK_NODE: &str = "kwok.x-k8s.io/node";

/// Taint that every new node has, and that the controller manager removes.
const NOT_READY: &str = "node.kubernetes.io/not-ready";

/// Returns a unique name with this prefix, across tests, processes and time. It is valid for a
/// namespace, for a node and as a prefix of either.
pub fn unique(prefix: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let nanos = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_nanos();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let micros = nanos / 1000 % 1_000_000_000_000;
    format!("{prefix}-{:x}-{micros:x}-{count:x}", process::id())
}

/// Returns a builder of a node.
pub fn node(name: impl Into<String>) -> NodeBuilder {
    let mut metadata = ObjectMeta {
        name: Some(name.into()),
        ..ObjectMeta::default()
    };
    metadata.annotations = Some(BTreeMap::from([(KWOK_NODE.to_owned(), "fake".to_owned())]));
    let spec = Some(NodeSpec::default());
    NodeBuilder {
        node: Node {
            metadata,
            spec,
            ..Node::default()
        },
    }
}

/// Returns a builder of a pod with one container.
pub fn pod(namespace: impl Into<String>, name: impl Into<String>) -> PodBuilder {
    let metadata = ObjectMeta {
        name: Some(name.into()),
        namespace: Some(namespace.into()),
        ..ObjectMeta::default()
    };
    let container = Container {
        name: "main".to_owned(),
        image: Some("registry.k8s.io/pause:3.10".to_owned()),
        ..Container::default()
    };
    let spec = PodSpec {
        containers: vec![container],
        // The default of 30 seconds would slow down the tests.
        termination_grace_period_seconds: Some(1),
        ..PodSpec::default()
    };
    PodBuilder {
        pod: Pod {
            metadata,
            spec: Some(spec),
            ..Pod::default()
        },
    }
}

/// A node to be created: ready, with 8 GPUs, kept alive by kwok if that runs.
#[derive(Clone, Debug)]
pub struct NodeBuilder {
    node: Node,
}

/// A pod to be created.
#[derive(Clone, Debug)]
pub struct PodBuilder {
    pod: Pod,
}

// === impl NodeBuilder ===

impl NodeBuilder {
    /// Adds a label to the node.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        let labels = self.node.metadata.labels.get_or_insert_default();
        labels.insert(key.into(), value.into());
        self
    }

    /// Adds an annotation to the node.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        let annotations = self.node.metadata.annotations.get_or_insert_default();
        annotations.insert(key.into(), value.into());
        self
    }

    /// Adds a taint to the node.
    #[must_use]
    pub fn taint(
        mut self,
        key: impl Into<String>,
        value: impl Into<String>,
        effect: impl Into<String>,
    ) -> Self {
        let taint = Taint {
            key: key.into(),
            value: Some(value.into()).filter(|value| !value.is_empty()),
            effect: effect.into(),
            ..Taint::default()
        };
        self.node
            .spec
            .get_or_insert_default()
            .taints
            .get_or_insert_default()
            .push(taint);
        self
    }

    /// Creates the node cordoned.
    #[must_use]
    pub fn unschedulable(mut self) -> Self {
        self.node.spec.get_or_insert_default().unschedulable = Some(true);
        self
    }

    /// Excludes the node from kwok: nothing changes its status and its pods by itself.
    #[must_use]
    pub fn without_kubelet(mut self) -> Self {
        if let Some(annotations) = &mut self.node.metadata.annotations {
            annotations.remove(KWOK_NODE);
        }
        self
    }

    /// Creates the node and brings it into service, as its kubelet and the controller manager
    /// would: ready, and with only the given taints. Returns its state after that.
    pub async fn create(self, client: &Client) -> anyhow::Result<Node> {
        let nodes: Api<Node> = Api::all(client.clone());
        let name = self.node.metadata.name.clone().unwrap_or_default();
        // Ready from the start: kwok gives a node that is not ready a status of its own, which would
        // overwrite what the test sets later.
        let mut node = self.node.clone();
        node.status = Some(ready_status()?);
        nodes.create(&PostParams::default(), &node).await?;
        // A new node has a taint. The controller manager would remove it, but may not be
        // running.
        let taints = self
            .node
            .spec
            .as_ref()
            .and_then(|spec| spec.taints.as_ref());
        let patch = Patch::Merge(json!({"spec": {"taints": taints}}));
        nodes.patch(&name, &PatchParams::default(), &patch).await?;
        let what = format!("node {name} in service");
        wait_for(&what, Duration::from_secs(60), || async {
            let node = nodes.get(&name).await.map_err(|error| error.to_string())?;
            let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref());
            match taints
                .unwrap_or_default()
                .iter()
                .find(|taint| taint.key == NOT_READY)
            {
                None => Ok(node),
                Some(taint) => Err(format!("taint {}:{}", taint.key, taint.effect)),
            }
        })
        .await
    }
}

/// Returns the status of a healthy node with 8 GPUs.
fn ready_status() -> anyhow::Result<NodeStatus> {
    let now = k8s_openapi::jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string();
    let resources = json!({"cpu": "128", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": "8"});
    Ok(serde_json::from_value(json!({
        "capacity": resources,
        "allocatable": resources,
        "conditions": [{
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }],
    }))?)
}

// === impl PodBuilder ===

impl PodBuilder {
    /// Assigns the pod to a node, bypassing the scheduler.
    #[must_use]
    pub fn on(mut self, node: impl Into<String>) -> Self {
        self.pod.spec.get_or_insert_default().node_name = Some(node.into());
        self
    }

    /// Lets the scheduler place the pod on a node with this label. The shared control plane also
    /// has nodes of other tests, some of them without a kubelet.
    #[must_use]
    pub fn on_labelled(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        let spec = self.pod.spec.get_or_insert_default();
        let selector = spec.node_selector.get_or_insert_default();
        selector.insert(key.into(), value.into());
        self
    }

    /// Adds a label to the pod.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        let labels = self.pod.metadata.labels.get_or_insert_default();
        labels.insert(key.into(), value.into());
        self
    }

    /// Adds an annotation to the pod.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        let annotations = self.pod.metadata.annotations.get_or_insert_default();
        annotations.insert(key.into(), value.into());
        self
    }

    /// Sets the image of the container.
    #[must_use]
    pub fn image(mut self, image: impl Into<String>) -> Self {
        let image = image.into();
        for container in &mut self.pod.spec.get_or_insert_default().containers {
            container.image = Some(image.clone());
        }
        self
    }

    /// Requests GPUs for the container.
    #[must_use]
    pub fn gpus(mut self, count: u32) -> Self {
        let spec = self.pod.spec.get_or_insert_default();
        for container in &mut spec.containers {
            let limits = container
                .resources
                .get_or_insert_default()
                .limits
                .get_or_insert_default();
            let count = k8s_openapi::apimachinery::pkg::api::resource::Quantity(count.to_string());
            limits.insert("nvidia.com/gpu".to_owned(), count);
        }
        self
    }

    /// Creates the pod in the cluster.
    pub async fn create(self, client: &Client) -> anyhow::Result<Pod> {
        let namespace = self.pod.metadata.namespace.clone().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        Ok(pods.create(&PostParams::default(), &self.pod).await?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn unique_names_are_unique_and_fit_a_label() {
        let names: BTreeSet<String> = (0..1000).map(|_| unique("quarantine")).collect();
        assert_eq!(names.len(), 1000);
        for name in names {
            assert!(
                name.starts_with("quarantine-") && name.len() <= 63,
                "{name}"
            );
            assert!(
                name.bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            );
        }
    }
}
