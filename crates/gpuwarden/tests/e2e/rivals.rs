//! Two products for one node name, each with a store: a process left behind, or a service beside
//! a pod.

use serde_json::Value;
use testkit::{ControlPlane, Launch, NodeBuilder, Product, Version};

use crate::support::{SOON, Scene, event, recovery, send_to};

/// Largest number of patches of the node by both in the whole test: each quarantines and returns
/// it once, and may have to retry.
const MOST_PATCHES: usize = 10;

#[tokio::test]
async fn two_that_run_for_one_node_leave_each_others_session_alone() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let rival = rival(&plane, &scene).await?;
    // The rival's store is created before the first session.
    rival
        .wait_for("the second to be ready", SOON, || async {
            let output = rival.client(["status", "-o", "json"]).await;
            let output = output.map_err(|error| error.to_string())?.stdout;
            let status: Value = serde_json::from_str(&output).map_err(|error| error.to_string())?;
            if status["fleet"]["ready"] == true {
                Ok(())
            } else {
                Err(output)
            }
        })
        .await?;
    let fault = |gpu| vec![event(&scene.node, gpu)];
    let well = |gpu| vec![recovery(&scene.node, gpu)];
    send_to(&scene.product, fault("0")).await?;
    scene.cordoned().await?;
    notes(&rival, &scene.node, "session on our node by another store").await?;
    send_to(&rival, fault("1")).await?;
    let out = rival.client(["why-not", &scene.node]).await?.stdout;
    assert!(
        out.contains("session on our node by another store"),
        "{out}"
    );

    // The first product returns the node. Then the second one quarantines it, and the first one
    // does not interfere.
    send_to(&scene.product, well("0")).await?;
    notes(
        &scene.product,
        &scene.node,
        "session on our node by another store",
    )
    .await?;
    scene.cordoned().await?;
    let data = scene.product.data_dir().display().to_string();
    let node = &scene.node;
    let args = [
        "doctor",
        "--node-name",
        node,
        "--data-dir",
        &data,
        "-o",
        "json",
    ];
    let found = scene.product.command(args).await?.stdout;
    assert!(
        found.contains("session on our node by another gpuwarden"),
        "{found}"
    );

    send_to(&rival, well("1")).await?;
    scene.restored().await?;
    few_patches(&scene, &rival).await
}

/// A store that is created later takes the session over, as after the loss of a data directory.
/// It does so once: the first product, which still runs, does not take it back.
#[tokio::test]
async fn one_that_comes_later_takes_the_session_over_once() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let node = &scene.node;
    send_to(&scene.product, vec![event(node, "0")]).await?;
    scene.cordoned().await?;
    let rival = rival(&plane, &scene).await?;
    let another = "session on our node by another store";
    notes(&scene.product, node, another).await?;
    // The rival's recovery counts. Then the first product, whose fault is still open,
    // quarantines the node again.
    send_to(&rival, vec![recovery(node, "0")]).await?;
    notes(&rival, node, another).await?;
    scene.cordoned().await?;
    send_to(&scene.product, vec![recovery(node, "0")]).await?;
    scene.restored().await?;
    few_patches(&scene, &rival).await
}

/// Starts another product for the same node.
async fn rival(plane: &ControlPlane, scene: &Scene) -> anyhow::Result<Product> {
    let launch = Launch::new()?.node_name(&scene.node);
    let launch = launch.kubeconfig(plane.kubeconfig()).quarantine();
    launch.start().await
}

/// Waits until the node's notes in the status contain this text.
async fn notes(product: &Product, node: &str, text: &str) -> anyhow::Result<()> {
    product
        .wait_for(text, SOON, || async {
            let output = product.client(["status", "-o", "json"]).await;
            let output = output.map_err(|error| error.to_string())?.stdout;
            let status: Value = serde_json::from_str(&output).map_err(|error| error.to_string())?;
            let nodes = status["fleet"]["nodes"].as_array().into_iter().flatten();
            let own = nodes.filter(|one| one["name"] == node);
            let notes: String = own.map(|one| one["notes"].to_string()).collect();
            if notes.contains(text) {
                Ok(())
            } else {
                Err(notes)
            }
        })
        .await
}

/// Waits until both have patched the node four times together, and not much more: the journal is
/// written with a delay.
async fn few_patches(scene: &Scene, rival: &Product) -> anyhow::Result<()> {
    let few = || async {
        let first = patches(&scene.product, &scene.node).await?;
        let patches = first + patches(rival, &scene.node).await?;
        anyhow::ensure!((4..=MOST_PATCHES).contains(&patches), "{patches}");
        Ok(())
    };
    let product = &scene.product;
    product.wait_for("the patches of both", SOON, few).await
}

/// Returns the number of patches of the node that the product has tried.
async fn patches(product: &Product, node: &str) -> anyhow::Result<usize> {
    let output = product.client(["explain", node, "-o", "json"]).await?;
    let story: Value = serde_json::from_str(&output.stdout)?;
    let entries = story["entries"].as_array().into_iter().flatten();
    Ok(entries.filter(|entry| entry["kind"] == "call").count())
}
