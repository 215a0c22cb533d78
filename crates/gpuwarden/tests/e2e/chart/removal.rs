//! The way out of docs/uninstall.md: Helm removes what it installed, and gpuwarden what it wrote.

use anyhow::ensure;
use testkit::{binary, wait_for};

use super::NAMESPACE;
use super::release::Release;
use crate::installed;
use crate::snapshot::{restored, settled};
use crate::support::{SOON, event, send_to};
use crate::uninstall::uninstall;
use crate::webhook::Webhook;

/// Objects that stay: the custom resource definitions, by Helm's own rule and because NVSentinel
/// uses them, and the namespace, which Helm never removes, with what each namespace has.
const STAYS: [&str; 14] = [
    "/api/v1/namespaces /gpuwarden is new",
    "/api/v1/configmaps gpuwarden/kube-root-ca.crt is new",
    "/api/v1/serviceaccounts gpuwarden/default is new",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions /externalremediationrequests.nvsentinel.dgxc.nvidia.com is new",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions /gpuresets.janitor.dgxc.nvidia.com is new",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions /maintenancerequests.nvsentinel.dgxc.nvidia.com is new",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions /preflightconfigs.preflight.nvsentinel.nvidia.com is new",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions /rebootnodes.janitor.dgxc.nvidia.com is new",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions /terminatenodes.janitor.dgxc.nvidia.com is new",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions /validationrequests.nvsentinel.nvidia.com is new",
    // Kinds that are served have an APIService each.
    "/apis/apiregistration.k8s.io/v1/apiservices /v1alpha1.janitor.dgxc.nvidia.com is new",
    "/apis/apiregistration.k8s.io/v1/apiservices /v1.nvsentinel.dgxc.nvidia.com is new",
    "/apis/apiregistration.k8s.io/v1/apiservices /v1alpha1.nvsentinel.nvidia.com is new",
    "/apis/apiregistration.k8s.io/v1/apiservices /v1alpha1.preflight.nvsentinel.nvidia.com is new",
];

#[tokio::test]
async fn helm_and_gpuwarden_leave_what_the_page_lists_and_nothing_else() -> anyhow::Result<()> {
    let Some((plane, helm)) = Release::cluster().await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    plane.namespace("train").await?;
    let worker = testkit::pod("train", "worker").on("gpu-1");
    worker.create(&client).await?;
    let before = settled(&client).await?;

    helm.deploy(&["repair", "preflight"], &[]).await?;
    let mut release = Release::of(plane, "127.77.1.7").await?;
    let home = tempfile::tempdir()?;
    let account = installed::kubeconfig(&release.plane, home.path()).await?;
    let config = installed::config(&release.plane).await?;
    // Registered by its Service, which keeps the registration when the webhook ends.
    let webhook = Webhook::start_reached(&account, &config, &["--namespace", NAMESPACE]).await?;
    send_to(&release.agent, vec![event("gpu-1", "0")]).await?;
    release.has_state("draining").await?;

    // As docs/uninstall.md says.
    let kubeconfig = release.plane.kubeconfig().to_owned();
    let paused = tokio::process::Command::new(binary()?)
        .args(["pause", "--for", "2h", "--repairs", "--reason", "uninstall"])
        .arg("--kubeconfig")
        .arg(&kubeconfig)
        .output()
        .await?;
    assert!(paused.status.success(), "{paused:?}");
    // The webhook has its Lease some time after its start.
    wait_for("a plan with all that is to be done first", SOON, || async {
        let (code, said) = uninstall(&kubeconfig, &["--plan"]);
        for first in [
            "holds the Lease gpuwarden/gpuwarden-controller",
            "holds the Lease gpuwarden/gpuwarden-webhook",
            "--nodes return returns",
        ] {
            ensure!(code == Some(1) && said.contains(first), "{first}: {said}");
        }
        Ok(())
    })
    .await?;
    release.ends().await?;
    webhook.end().await?;
    helm.run(&["uninstall", "gpuwarden", "-n", NAMESPACE, "--wait"])
        .await?;
    let (code, said) = uninstall(&kubeconfig, &["--nodes", "return"]);
    assert_eq!(code, Some(0), "{said}");
    restored(&client, &before, &STAYS).await
}
