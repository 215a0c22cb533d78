//! Late reports must not undo a decision: repeats are counted for a minute, and reported at its
//! end.
//!
//! A restart ends the minute: counted repeats are reported as soon as the process is back.

use serde_json::Value;
use testkit::{ControlPlane, Options, Product, Version};

use crate::apart::Apart;
use crate::support::{SOON, Scene, shape, xid};

/// Returns true if the node lists one event, with this code: that of the new fault that has
/// quarantined it.
fn lists_only(node: &Value, code: &str) -> bool {
    let text = node["metadata"]["annotations"]["quarantineHealthEvent"].as_str();
    let events: Value = serde_json::from_str(text.unwrap_or_default()).unwrap_or_default();
    events.as_array().is_some_and(|events| events.len() == 1) && events[0]["errorCode"][0] == code
}

/// Writes two equal lines, and waits until the second is counted.
async fn line_twice(product: &Product) -> anyhow::Result<()> {
    let line = xid(79, "fell off");
    product.append_kernel_log(&format!("{line}{line}"))?;
    let records = || async {
        let metrics = product.get("/metrics").await;
        let metrics = metrics.map_err(|error| error.to_string())?;
        let counted = |line: &str| {
            line.starts_with("gpuwarden_kernel_log_repeats_total") && line.ends_with(" 1")
        };
        if metrics.lines().any(counted) {
            Ok(())
        } else {
            Err(metrics)
        }
    };
    product
        .wait_for("the second line to be counted", SOON, records)
        .await
}

#[tokio::test]
async fn lines_from_before_a_release_that_are_counted_after_it_do_not_undo_it() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let kubeconfig = plane.kubeconfig().display().to_string();
    for by_command in [false, true] {
        let mut scene = Scene::new(&plane, |node| node, |launch| launch).await?;
        line_twice(&scene.product).await?;
        scene.cordoned().await?;
        if by_command {
            let reason = ["--reason", "swapped", "--kubeconfig", &kubeconfig];
            let mut args = vec!["release", &scene.node];
            args.extend(reason);
            scene.product.command(args).await?.expect(0)?;
        } else {
            plane.kubectl(["uncordon", &scene.node]).await?;
        }
        let ended = |node: &Value| {
            let annotations = node["metadata"]["annotations"].as_object();
            let is_there = |key: &str| annotations.is_some_and(|map| map.contains_key(key));
            if is_there("gpuwarden.dev/released-at") && !is_there("quarantineHealthEvent") {
                Ok(())
            } else {
                Err(shape(node).to_string())
            }
        };
        scene.node_until("the session to end", ended).await?;
        scene.product.terminate().await?;
        scene.product.restart().await?;
        scene.taken_in(2).await?;
        // Only the new fault quarantines the node.
        scene.product.append_kernel_log(&xid(95, "new"))?;
        let node = scene.cordoned().await?;
        assert!(lists_only(&node, "95"), "{by_command}: {node}");
    }
    Ok(())
}

#[tokio::test]
async fn lines_from_before_a_recovery_at_the_controller_do_not_undo_it() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let mut apart = Apart::new(&plane).await?;
    line_twice(&apart.agent).await?;
    apart.scene.cordoned().await?;
    apart.recover().await?;
    apart.agent.terminate().await?;
    apart.agent.restart().await?;
    apart.scene.taken_in(3).await?;
    let told = "accepted before the recovery that closed its fault";
    apart.scene.told("event", told).await?;
    apart.agent.append_kernel_log(&xid(95, "new"))?;
    let node = apart.scene.cordoned().await?;
    assert!(lists_only(&node, "95"), "{node}");
    Ok(())
}
