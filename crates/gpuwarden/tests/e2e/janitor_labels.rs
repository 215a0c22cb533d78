//! Owners of machines without an API: the janitor asks by a label of the node, and the test is the
//! owner's automation, and the kubelet.

use std::path::Path;

use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Version, unique};

use crate::janitor::resources;
use crate::machines::boots;
use crate::remediation::of_node;
use crate::support::{SOON, Scene, install_crds, xid};

const REBOOT: &str = "example.com/reboot";
const REQUEST: &str = "gpuwarden.dev/label-request";
const LABELS: &str = "label: {reboot: example.com/reboot, terminate: example.com/terminate}\n";

/// Waits until the automation sees the node in its list of those that have the label.
async fn asked(scene: &Scene) -> anyhow::Result<()> {
    let own = ListParams::default()
        .labels(&format!("{REBOOT}=gpuwarden"))
        .fields(&format!("metadata.name={}", scene.node));
    let listed = || async {
        let listed = scene.nodes.list(&own).await;
        match listed.map_err(|error| error.to_string())?.items.len() {
            1 => Ok(()),
            other => Err(format!("{other} nodes")),
        }
    };
    let product = &scene.product;
    product.wait_for("the label", SOON, listed).await
}

/// Waits for a condition of the node's only `RebootNode`. Returns its reason.
async fn says(
    scene: &Scene,
    api: &Api<DynamicObject>,
    kind: &str,
    wanted: &str,
) -> anyhow::Result<String> {
    let said = || async {
        let made = of_node(api, &scene.node).await;
        let made = made.map_err(|error| error.to_string())?;
        let [only] = made.as_slice() else {
            return Err(format!("{made:?}"));
        };
        let conditions = only["status"]["conditions"].as_array();
        let mut found = conditions.into_iter().flatten();
        let found = found.find(|one| one["type"] == kind && one["status"] == wanted);
        let reason = found.and_then(|one| one["reason"].as_str());
        reason.map(str::to_owned).ok_or_else(|| only.to_string())
    };
    scene.product.wait_for(kind, SOON, said).await
}

fn janitor(launch: Launch, config: &Path) -> Launch {
    launch.arg("--janitor").option("--janitor-config", config)
}

#[tokio::test]
async fn an_owner_is_asked_by_a_label_and_reboots_the_machine_through_kills() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    install_crds(&client).await?;
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("janitor.yaml");
    std::fs::write(&config, LABELS)?;
    let arrange = |launch: Launch| janitor(launch.arg("--drain").arg("--remediate"), &config);
    let mut scene = Scene::new(&plane, |node| node, arrange).await?;
    boots(&scene.nodes, &scene.node, "boot-1").await?;
    let line = xid(79, "GPU has fallen off the bus.");
    scene.product.append_kernel_log(&line)?;
    asked(&scene).await?;
    scene.product.restart().await?;
    let api = resources(&client, "RebootNode", "rebootnodes");
    says(&scene, &api, "SignalSent", "True").await?;
    // The machine boots while nothing runs, and its owner is not done yet.
    scene.product.kill9()?;
    boots(&scene.nodes, &scene.node, "boot-2").await?;
    scene.product.restart().await?;
    scene.ready().await?;
    says(&scene, &api, "NodeReady", "Unknown").await?;
    asked(&scene).await?;
    let done = json!({"metadata": {"labels": {REBOOT: null}}});
    scene.patch(done).await?;
    let reason = says(&scene, &api, "AttemptComplete", "True").await?;
    assert_eq!(reason, "Succeeded");
    let repaired = |session: &Value| session["phase"] == "remediated";
    scene
        .session("a repair that has succeeded", repaired)
        .await?;
    let recovered = scene.product.client(["inject", "recovery"]).await?;
    recovered.expect(0)?;
    scene.restored().await
}

#[tokio::test]
async fn an_owner_is_asked_by_a_label_that_never_outlives_its_request() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    install_crds(&client).await?;
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("janitor.yaml");
    std::fs::write(&config, LABELS)?;
    let arrange = |launch| janitor(launch, &config);
    let mut scene = Scene::new(&plane, |node| node, arrange).await?;
    boots(&scene.nodes, &scene.node, "boot-1").await?;
    let api = resources(&client, "RebootNode", "rebootnodes");
    let node = scene.node.clone();
    let request = async || {
        let name = unique("label");
        let object = json!({
            "apiVersion": "janitor.dgxc.nvidia.com/v1alpha1", "kind": "RebootNode",
            "metadata": {"name": name}, "spec": {"nodeName": node},
        });
        let object = serde_json::from_value(object)?;
        api.create(&PostParams::default(), &object).await?;
        anyhow::Ok(name)
    };
    let nothing_left = |node: &Value| {
        let metadata = &node["metadata"];
        let left = [
            &metadata["labels"][REBOOT],
            &metadata["annotations"][REQUEST],
        ];
        if left.iter().all(|one| one.is_null()) {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    };
    // Deleted.
    let name = request().await?;
    asked(&scene).await?;
    api.delete(&name, &DeleteParams::default()).await?;
    scene
        .node_until("a node without the label", nothing_left)
        .await?;
    // Deleted while nothing runs.
    let name = request().await?;
    asked(&scene).await?;
    scene.product.kill9()?;
    api.delete(&name, &DeleteParams::default()).await?;
    asked(&scene).await?;
    scene.product.restart().await?;
    scene
        .node_until("a node without the label", nothing_left)
        .await?;
    // Nobody acts in time. The patch that is late belongs to nobody.
    std::fs::write(&config, format!("global: {{timeout: 8s}}\n{LABELS}"))?;
    scene.product.restart().await?;
    request().await?;
    asked(&scene).await?;
    let reason = says(&scene, &api, "AttemptComplete", "True").await?;
    assert_eq!(reason, "AmbiguousFailure");
    scene
        .node_until("a node without the label", nothing_left)
        .await?;
    let late = json!({"operation": "another", "bootId": "boot-1", "key": REBOOT}).to_string();
    let late = json!({"labels": {REBOOT: "gpuwarden"}, "annotations": {REQUEST: late}});
    scene.patch(json!({"metadata": late})).await?;
    scene
        .node_until("a node without the label", nothing_left)
        .await?;
    scene.restored().await
}
