//! Admission of janitor requests by the webhook, on a real API server.

use serde_json::{Value, json};
use testkit::{Balancer, ControlPlane, Options, Version, unique, wait_for};

use crate::support::{SOON, install_crds};
use crate::webhook::{NAMESPACE, Webhook};

fn request(kind: &str, name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "janitor.dgxc.nvidia.com/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"nodeName": node},
    })
}

/// Creates a request. The error is kubectl's message.
async fn make(plane: &ControlPlane, request: &Value) -> Result<(), String> {
    let file = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    std::fs::write(file.path(), request.to_string()).map_err(|error| error.to_string())?;
    let path = file.path().display().to_string();
    let made = plane.kubectl(["create", "-f", &path]).await;
    made.map(drop).map_err(|error| format!("{error:#}"))
}

#[tokio::test]
async fn a_request_that_cannot_be_carried_out_is_refused_at_once() -> anyhow::Result<()> {
    let version = Version::LATEST;
    let Some(plane) = ControlPlane::private(version, Options::default()).await? else {
        return Ok(());
    };
    plane.namespace(NAMESPACE).await?;
    let client = plane.client().await?;
    install_crds(&client).await?;
    let node = unique("gpu");
    testkit::node(&node).create(&client).await?;

    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let webhook = Webhook::start(&plane, &url, &["--validate-requests"]).await?;
    balancer.send_to(&[webhook.address]);
    // API servers learn of the registration with a delay. Earlier requests do not matter.
    let nowhere = async || {
        let name = unique("nowhere");
        match make(&plane, &request("TerminateNode", &name, "no-such-node")).await {
            Err(why) if why.contains("there is no node no-such-node") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    wait_for("a refusal", SOON, nowhere).await?;

    let first = request("RebootNode", "first", &node);
    let made = make(&plane, &first).await;
    anyhow::ensure!(made.is_ok(), "{made:?}");
    let second = make(&plane, &request("RebootNode", "second", &node)).await;
    let why = second.expect_err("one is there");
    assert!(
        why.contains("the RebootNode first asks for the node"),
        "{why}"
    );
    // A request of another kind does not conflict.
    let made = make(&plane, &request("GPUReset", "reset", &node)).await;
    anyhow::ensure!(made.is_ok(), "{made:?}");

    // Without the webhook, requests are admitted. The registration is removed with the process.
    webhook.end().await?;
    let left = plane
        .kubectl(["get", "validatingwebhookconfigurations", "-o", "name"])
        .await?;
    assert!(!left.contains("gpuwarden"), "{left}");
    let made = make(&plane, &request("RebootNode", "third", "no-such-node")).await;
    anyhow::ensure!(made.is_ok(), "{made:?}");
    Ok(())
}
