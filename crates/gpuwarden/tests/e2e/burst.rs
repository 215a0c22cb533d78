//! Many nodes fail at once, and the product is killed in the middle of it.
//!
//! `GPUWARDEN_SOAK_NODES` sets the number of nodes; NVSentinel, killed at 100 of 375, never
//! cordoned 201 of them.

use std::time::Duration;

use contract::HealthEvent;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use testkit::{ControlPlane, Launch, Version, unique};

use crate::support::send_to;

/// Nodes in the test command.
const NODES: usize = 60;
/// On a busy machine, with hundreds of nodes.
const LIMIT: Duration = Duration::from_secs(120);

fn fault(node: &str, healthy: bool) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        is_fatal: !healthy,
        is_healthy: healthy,
        node_name: node.into(),
        message: "the power of a row has failed".into(),
        ..HealthEvent::default()
    }
}

async fn cordoned(nodes: &Api<Node>, label: &str) -> Result<usize, String> {
    let list = nodes
        .list(&ListParams::default().labels(label))
        .await
        .map_err(|error| error.to_string())?;
    let cordoned = |node: &&Node| {
        let spec = node.spec.as_ref();
        spec.is_some_and(|spec| spec.unschedulable == Some(true))
    };
    Ok(list.items.iter().filter(cordoned).count())
}

#[tokio::test]
async fn killed_in_the_middle_of_a_burst_it_leaves_no_node_behind() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let count = std::env::var("GPUWARDEN_SOAK_NODES").map_or(Ok(NODES), |text| text.parse())?;
    let nodes: Api<Node> = Api::all(plane.client().await?);
    let burst = unique("burst");
    let label = format!("burst={burst}");
    let names: Vec<String> = (0..count).map(|index| format!("{burst}-{index}")).collect();
    for name in &names {
        let node = serde_json::from_value(serde_json::json!({
            "metadata": {"name": name, "labels": {"burst": burst}},
        }))?;
        nodes.create(&PostParams::default(), &node).await?;
    }
    let mut product = Launch::new()?
        .node_name(&burst)
        .kubeconfig(plane.kubeconfig())
        .quarantine()
        .option("--accept-nodes", "any")
        .start()
        .await?;
    let reach = async |product: &testkit::Product, least: usize, most: usize| {
        let what = format!("{least} to {most} nodes cordoned");
        product
            .wait_for(&what, LIMIT, || async {
                match cordoned(&nodes, &label).await? {
                    now if (least..=most).contains(&now) => Ok(now),
                    now => Err(now.to_string()),
                }
            })
            .await
    };
    send_to(
        &product,
        names.iter().map(|name| fault(name, false)).collect(),
    )
    .await?;
    reach(&product, 1, count).await?;
    product.kill9()?;
    let at_the_kill = cordoned(&nodes, &label).await.map_err(anyhow::Error::msg)?;
    println!("killed at {at_the_kill} of {count}");
    product.restart().await?;
    reach(&product, count, count).await?;
    // And back again, with the same interruption.
    send_to(
        &product,
        names.iter().map(|name| fault(name, true)).collect(),
    )
    .await?;
    reach(&product, 0, count - 1).await?;
    product.kill9()?;
    product.restart().await?;
    reach(&product, 0, 0).await?;
    let mine = ListParams::default().labels(&label);
    nodes
        .delete_collection(&DeleteParams::default(), &mine)
        .await?;
    Ok(())
}
