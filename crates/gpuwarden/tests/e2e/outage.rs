//! Outages of the API server or etcd, and warnings of the API server.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::json;
use testkit::{ControlPlane, Options, Program, Version};

use crate::stages::recovered;
use crate::support::{SOON, Scene, event, recovery, send_to, xid};

#[tokio::test]
async fn an_api_server_that_was_away_gets_the_cordon_and_the_release() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let mut scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    plane.kill(Program::ApiServer)?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    scene
        .product
        .wait_line("cannot be watched; trying again", SOON)
        .await?;
    let unwell = || async {
        let status = scene.product.client(["status"]).await?;
        anyhow::ensure!(status.code == Some(1), "{status:?}");
        Ok(())
    };
    let product = &scene.product;
    product
        .wait_for("a status that says so", SOON, unwell)
        .await?;
    plane.restart(Program::ApiServer)?;
    plane.wait_ready().await?;
    scene.cordoned().await?;
    scene.condition("SysLogsXIDError", "True").await?;

    // A recovery during another outage: the node is returned to service after the outage.
    plane.kill(Program::ApiServer)?;
    recovered(&scene).await?;
    plane.restart(Program::ApiServer)?;
    plane.wait_ready().await?;
    scene.restored().await?;
    scene.condition("SysLogsXIDError", "False").await?;
    scene.condition("GPUHealthy", "True").await.map(drop)
}

#[tokio::test]
async fn an_etcd_that_hangs_for_twenty_seconds_delays_and_loses_nothing() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    scene.ready().await?;
    plane.stop(Program::Etcd)?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    // Each attempt times out after ten seconds.
    scene
        .session("two attempts that fail", |it| {
            it["failures"]
                .as_u64()
                .is_some_and(|failures| failures >= 2)
        })
        .await?;
    plane.cont(Program::Etcd)?;
    plane.wait_ready().await?;
    scene.cordoned().await?;
    recovered(&scene).await?;
    scene.restored().await
}

/// Warnings of the API server, such as of an unknown field, are logged for the operator, and
/// fail the test that causes them.
#[tokio::test]
async fn a_warning_of_the_api_server_is_logged_and_fails_a_test() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("policy.json");
    let rule = json!({
        "apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"],
        "resources": ["nodes", "nodes/status"],
    });
    let policy = json!({"apiVersion": "v1", "kind": "List", "items": [{
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "warns"},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "false", "message": "it is said of every change"}],
        },
    }, {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "warns"},
        "spec": {"policyName": "warns", "validationActions": ["Warn"]},
    }]});
    std::fs::write(&path, policy.to_string())?;
    plane
        .kubectl(["apply", "-f", &path.display().to_string()])
        .await?;
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    // A policy takes effect seconds after its creation.
    let warned = || async {
        for event in [event(&scene.node, "0"), recovery(&scene.node, "0")] {
            let sent = send_to(&scene.product, vec![event]).await;
            sent.map_err(|error| error.to_string())?;
        }
        let log = scene.product.stderr();
        match testkit::warning_in(&log) {
            Some(line) if line.contains("it is said of every change") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    scene.product.wait_for("the warning", SOON, warned).await?;
    let product = scene.product;
    assert!(catch_unwind(AssertUnwindSafe(|| drop(product))).is_err());
    Ok(())
}
