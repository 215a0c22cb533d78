//! The monitor of Kubernetes objects, on a cluster whose objects change while it is killed.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Private, Version, unique};

use crate::support::{SOON, Scene};

/// Annotation of a node with its open matches.
const MATCHES: &str = "nvsentinel.nvidia.com/k8s-object-monitor-policy-matches";

/// Policies over `ConfigMap`s that name a node, and over a kind that the cluster does not have.
const MAPS: &str = r#"
[[policies]]
name = "marked"
enabled = true
[policies.resource]
version = "v1"
kind = "ConfigMap"
namespace = "default"
[policies.predicate]
expression = 'resource.data.fault == "true"'
[policies.nodeAssociation]
expression = 'resource.data.node'
[policies.healthEvent]
componentClass = "Node"
isFatal = true
message = "a ConfigMap says so"
recommendedAction = "CONTACT_SUPPORT"
errorCode = ["MARKED"]

[[policies]]
name = "absent"
enabled = true
[policies.resource]
group = "example.com"
version = "v1"
kind = "Nothing"
[policies.predicate]
expression = 'resource.spec.fault == true'
[policies.healthEvent]
componentClass = "Node"
recommendedAction = "NONE"
"#;

/// A node, a controller with policies, and the cluster.
struct Watched {
    scene: Scene,
    client: Client,
    _plane: Private,
    _dir: tempfile::TempDir,
}

impl Watched {
    async fn new(policies: &str) -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
            return Ok(None);
        };
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("policies.toml");
        std::fs::write(&path, policies)?;
        let describe = |node: testkit::NodeBuilder| node.without_kubelet();
        let scene = Scene::with(&plane, describe, |_| {
            Ok(Launch::controller()?
                .kubeconfig(plane.kubeconfig())
                .quarantine()
                .arg("--grpc-insecure")
                .option("--leader-elect", "false")
                .option("--grpc-listen", "127.0.0.1:0")
                .option("--objects", &path))
        });
        Ok(Some(Self {
            scene: scene.await?,
            client: plane.client().await?,
            _plane: plane,
            _dir: dir,
        }))
    }

    async fn ready(&self, status: &str) -> anyhow::Result<()> {
        let condition = json!([{"type": "Ready", "status": status, "reason": "Test"}]);
        let patch = Patch::Strategic(json!({"status": {"conditions": condition}}));
        let nodes = &self.scene.nodes;
        let params = PatchParams::default();
        nodes
            .patch_status(&self.scene.node, &params, &patch)
            .await?;
        Ok(())
    }

    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn mark(&self, name: &str, node: &str) -> anyhow::Result<()> {
        let map = json!({"metadata": {"name": name}, "data": {"fault": "true", "node": node}});
        let map = serde_json::from_value(map)?;
        self.maps().create(&PostParams::default(), &map).await?;
        Ok(())
    }

    async fn unmark(&self, name: &str) -> anyhow::Result<()> {
        self.maps().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits until the node's annotation names these matches, or is not there.
    async fn matches(&self, expected: Option<Value>) -> anyhow::Result<()> {
        let found = |node: &Value| {
            let text = node["metadata"]["annotations"][MATCHES].as_str();
            let found: Option<Value> = text.map(|text| serde_json::from_str(text).unwrap());
            if found == expected {
                Ok(())
            } else {
                Err(format!("{found:?}"))
            }
        };
        self.scene
            .node_until("the matches on the node", found)
            .await
    }

    /// Returns the health of each stored event of a policy, oldest first.
    async fn events(&self, policy: &str) -> anyhow::Result<Vec<bool>> {
        let args = ["events", "--node", &self.scene.node, "-o", "json"];
        let events = self.scene.product.client(args).await?.json(0)?;
        let events = events.as_array().unwrap().iter();
        let of = events.filter(|event| event["event"]["checkName"] == policy);
        let mut of: Vec<_> = of
            .map(|event| (event["seq"].as_u64(), event["event"]["isHealthy"] == true))
            .collect();
        of.sort_unstable();
        Ok(of.into_iter().map(|(_, healthy)| healthy).collect())
    }
}

#[tokio::test]
async fn a_node_that_is_not_ready_leaves_and_returns_whatever_is_killed() -> anyhow::Result<()> {
    let preset = objects::presets::find("node-not-ready").unwrap().text;
    let quick = preset
        .replace("\"5m\"", "\"4s\"")
        .replace("\"1m\"", "\"2s\"");
    assert_ne!(quick, preset);
    let Some(mut watched) = Watched::new(&quick).await? else {
        return Ok(());
    };
    watched.ready("False").await?;
    watched.scene.product.restart().await?;
    watched.scene.cordoned().await?;
    let node = watched.scene.node.clone();
    let matches = json!({ format!("node-not-ready/{node}"): node });
    watched.matches(Some(matches.clone())).await?;
    // A silent kubelet is no recovery, and a restart is none.
    watched.ready("Unknown").await?;
    watched.scene.product.restart().await?;
    watched.scene.ready().await?;
    watched.ready("False").await?;
    watched.matches(Some(matches)).await?;
    let events = watched.events("node-not-ready").await?;
    assert!(!events.contains(&true), "{events:?}");

    watched.scene.product.kill9()?;
    watched.ready("True").await?;
    watched.scene.product.restart().await?;
    watched.scene.restored().await?;
    let events = watched.events("node-not-ready").await?;
    let ends = events.iter().filter(|is_end| **is_end).count();
    assert_eq!((ends, events.last()), (1, Some(&true)), "{events:?}");
    Ok(())
}

#[tokio::test]
async fn what_is_deleted_or_moved_while_nobody_looks_clears() -> anyhow::Result<()> {
    let Some(mut watched) = Watched::new(MAPS).await? else {
        return Ok(());
    };
    let node = watched.scene.node.clone();
    let other = unique("e2e");
    testkit::node(&other).create(&watched.client).await?;
    watched.mark("one", &node).await?;
    watched.mark("two", &node).await?;
    watched.scene.cordoned().await?;
    let both = json!({"marked/default/one": node, "marked/default/two": node});
    watched.matches(Some(both)).await?;

    // The absent kind blinds its policy alone, and the status says so.
    let blind = || async {
        let status = watched
            .scene
            .status()
            .await
            .map_err(|error| error.to_string())?;
        let sources = status["sources"].to_string();
        let said = sources.contains("cannot see example.com/v1/Nothing (for absent)");
        if said { Ok(()) } else { Err(sources) }
    };
    let product = &watched.scene.product;
    product.wait_for("the blindness", SOON, blind).await?;

    // One is deleted, the other one moves: the store knows, and then only the annotation does.
    watched.scene.product.kill9()?;
    watched.unmark("one").await?;
    watched.scene.product.restart().await?;
    watched
        .matches(Some(json!({"marked/default/two": node})))
        .await?;
    watched.scene.product.kill9()?;
    watched.unmark("two").await?;
    watched.mark("two", &other).await?;
    let data = watched.scene.product.data_dir();
    std::fs::remove_dir_all(&data)?;
    std::fs::create_dir(&data)?;
    watched.scene.product.restart().await?;
    watched.matches(None).await?;
    let returned = |node: &Value| {
        if node["spec"]["unschedulable"] == true {
            return Err(node["metadata"]["annotations"].to_string());
        }
        Ok(())
    };
    watched.scene.node_until("the return", returned).await?;
    watched.scene.node = other;
    watched.scene.cordoned().await?;
    Ok(())
}
