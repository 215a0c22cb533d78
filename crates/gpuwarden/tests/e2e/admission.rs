//! Admission of a new node by a validation. Kubernetes runs the Job, on a node that kwok keeps
//! alive.

use jiff::{Timestamp, ToSpan as _};
use k8s_openapi::api::batch::v1::Job;
use kube::api::Api;
use serde_json::Value;
use testkit::{ControlPlane, Launch, Version, unique};

use crate::remediation::{resume, validations, with_validation};
use crate::support::Scene;

const NOT_VALIDATED: &str = "gpuwarden.dev/not-validated";

#[tokio::test]
async fn a_new_node_is_held_until_its_job_has_succeeded_and_is_not_asked_again()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("remediation.toml");
    // The label limits the admission to this test's nodes.
    let label = unique("fresh");
    let since = Timestamp::now() - 1.minute();
    let keys = format!(
        "[validation]\nnewNodesSince = \"{since:.0}\"\nnewNodesSelector = \"{label}=true\"\n"
    );
    std::fs::write(
        &config,
        with_validation(true).replace("[validation]\n", &keys),
    )?;
    let arrange = |launch: Launch| {
        let launch = launch.arg("--drain").arg("--remediate");
        launch.option("--remediate-config", &config)
    };
    let describe = |node: testkit::NodeBuilder| {
        let node = node.label(&label, "true");
        node.taint(NOT_VALIDATED, "", "NoSchedule")
    };
    let mut scene = Scene::new(&plane, describe, arrange).await?;
    scene.cordoned().await?;
    let awaits = |session: &Value| {
        let awaits = session["awaits"].as_str();
        awaits.is_some_and(|it| it.contains("the end of Job validate-"))
    };
    scene.session("the Job", awaits).await?;
    scene.product.restart().await?;
    scene.session("the Job", awaits).await?;
    let jobs: Api<Job> = Api::namespaced(plane.client().await?, "default");
    let made = validations(&jobs, &scene.node).await?;
    assert_eq!(made.len(), 1, "{made:?}");
    resume(&jobs, &made[0]).await?;
    let begins = |node: &Value| {
        let taints = node["spec"]["taints"].to_string();
        let admitted = &node["metadata"]["annotations"]["gpuwarden.dev/admitted"];
        let cordoned = node["spec"]["unschedulable"] == true;
        if !cordoned && !taints.contains(NOT_VALIDATED) && *admitted == node["metadata"]["uid"] {
            Ok(())
        } else {
            Err(node.to_string())
        }
    };
    scene.node_until("the node begins", begins).await?;
    // The admission is recorded on the node, so it survives the loss of the store.
    scene.restart_without_store().await?;
    scene.ready().await?;
    scene.node_until("the node goes on", begins).await?;
    assert_eq!(validations(&jobs, &scene.node).await?.len(), 1);
    Ok(())
}
