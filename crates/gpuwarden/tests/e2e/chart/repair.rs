//! Least privilege of a repair: a story that uses all that the chart's values for repairs permit.

use std::path::Path;

use anyhow::Context as _;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use serde_json::Value;
use testkit::wait_for;
use tokio::net::TcpListener;

use super::least::{check, policy, requested};
use super::release::{Release, in_namespace};
use crate::gangs::apply;
use crate::machines::boots;
use crate::requests::external;
use crate::story::begun_earlier;
use crate::support::{SOON, event, recovery, send_to, shape};

/// How pods leave: those of the namespace `late` at the end of a time.
const MODES: &str = r#"
evictionTimeoutInSeconds = "1"
deleteAfterTimeoutMinutes = 10

[[userNamespaces]]
name = "late"
mode = "DeleteAfterTimeout"

[[userNamespaces]]
name = "*"
mode = "Immediate"
"#;
/// Time after which such a pod is deleted: that above, and a minute after its grace period.
const LAST_RESORT: SignedDuration = SignedDuration::from_mins(12);
/// A hand-over that a person asks for.
const HAND_OVER: &str = "
apiVersion: nvsentinel.dgxc.nvidia.com/v1
kind: ExternalRemediationRequest
metadata: {name: by-hand}
spec: {healthEvent: {nodeName: gpu-2, checkName: x, recommendedAction: 24}}
";

/// Makes the API server wait for an answer about each Job in the release's namespace.
fn asks(port: u16) -> String {
    format!(
        "
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {{name: silent}}
webhooks:
  - name: silent.example.com
    clientConfig: {{url: 'https://127.0.0.1:{port}/'}}
    rules: [{{apiGroups: [batch], apiVersions: [v1], operations: [CREATE], resources: [jobs]}}]
    failurePolicy: Fail
    sideEffects: None
    timeoutSeconds: 30
    admissionReviewVersions: [v1]
"
    )
}

/// Returns the values of the chart for repairs, with files in `directory`.
fn values(directory: &Path) -> anyhow::Result<Vec<String>> {
    let write = |key: &str, text: &str| {
        let path = directory.join(key);
        std::fs::write(&path, text)?;
        anyhow::Ok(format!("{key}={}", path.display()))
    };
    let values = std::fs::read_to_string(super::values_file("repair"))?;
    let values: Value = serde_saphyr::from_str(&values)?;
    // Without the validation, which takes five minutes.
    let remediation = values["remediation"]["config"].as_str().context("a file")?;
    let (remediation, _) = remediation
        .split_once("[validation]")
        .context("a validation")?;
    Ok(vec![
        write("policy.config", &policy())?,
        write("drain.config", MODES)?,
        write("remediation.config", remediation)?,
    ])
}

impl Release {
    /// Waits until kubectl prints this.
    async fn prints(&self, printed: &str, args: &[&str]) -> anyhow::Result<()> {
        self.controller
            .wait_for(&format!("{printed:?} of {args:?}"), SOON, || async {
                match self.plane.kubectl(args).await {
                    Ok(found) if found == printed => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await
    }

    /// Waits until the controller has made a request.
    async fn has_asked(&self, written: &str) -> anyhow::Result<()> {
        wait_for(written, SOON, || async {
            match requested(&self.plane, "gpuwarden-controller", written) {
                Ok(0) => Err("no such request".to_owned()),
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        })
        .await
    }

    /// Hands the other node over, and takes it back.
    async fn hands_over(&self) -> anyhow::Result<()> {
        apply(&self.plane, HAND_OVER).await?;
        let managed = "jsonpath={.metadata.labels.nvsentinel\\.dgxc\\.nvidia\\.com/managed}";
        let label = ["get", "node", "gpu-2", "-o", managed];
        self.prints("false", &label).await?;
        let released =
            "jsonpath={.status.conditions[?(@.type=='NVSentinelOwnershipReleased')].status}";
        let request = [
            "get",
            "externalremediationrequest",
            "by-hand",
            "-o",
            released,
        ];
        self.prints("True", &request).await?;
        let done = external("True").to_string();
        let patch = [
            "patch",
            "externalremediationrequest",
            "by-hand",
            "--type",
            "merge",
        ];
        let patch = [&patch[..], &["--subresource", "status", "-p", &done]].concat();
        self.plane.kubectl(patch).await?;
        self.prints("", &label).await
    }

    /// Kills the controller between its record of a reboot and the answer to its request for the
    /// Job, and starts it again.
    async fn dies_before_the_answer(&mut self) -> anyhow::Result<()> {
        let silent = TcpListener::bind("127.0.0.1:0").await?;
        apply(&self.plane, &asks(silent.local_addr()?.port())).await?;
        send_to(&self.agent, vec![event("gpu-1", "0")]).await?;
        self.has_state("draining").await?;
        let nodes: Api<Node> = Api::all(self.plane.client().await?);
        begun_earlier(&nodes, "gpu-1", LAST_RESORT).await?;
        let sending = "jsonpath={.items[*].status.conditions[?(@.type=='SignalSent')].reason}";
        let get = ["get", "rebootnodes", "-o", sending];
        self.prints("Sending", &get).await?;
        // The API server asks while it makes the Job.
        let (_asked, _) = tokio::time::timeout(SOON, silent.accept()).await??;
        self.controller.kill9()?;
        let delete = ["delete", "validatingwebhookconfiguration", "silent"];
        self.plane.kubectl(delete).await?;
        self.controller.restart().await
    }

    /// Reboots the node as soon as the janitor waits for that.
    async fn reboots(&self, boot: &str) -> anyhow::Result<()> {
        self.has_asked("list pods in gpuwarden").await?;
        let nodes: Api<Node> = Api::all(self.plane.client().await?);
        boots(&nodes, "gpu-1", boot).await
    }

    /// Ends the fault of the node, and waits until it is as before.
    async fn is_back(&self, before: &Value) -> anyhow::Result<()> {
        send_to(&self.agent, vec![recovery("gpu-1", "0")]).await?;
        self.node_is("as before", |node| {
            let now = shape(node);
            now["spec"] == before["spec"] && now["annotations"] == before["annotations"]
        })
        .await
    }

    /// Trips the circuit breaker, and closes it as a person does.
    async fn breaker_trips_and_is_closed(&self) -> anyhow::Result<()> {
        self.breaker_trips().await?;
        send_to(&self.controller, vec![recovery("gpu-2", "0")]).await?;
        let closed = r#"{"data": {"status": "CLOSED"}}"#;
        let patch = ["patch", "configmap", "circuit-breaker", "-p", closed];
        self.plane.kubectl(in_namespace(patch)).await.map(drop)
    }
}

#[tokio::test]
async fn repair_takes_and_uses_its_permissions() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let files = values(directory.path())?;
    let extra = "janitor.ttl=20s,controller.extraArgs={--certificate-lifetime=10s}";
    let mut more = vec!["--set", extra];
    for file in &files {
        more.extend(["--set-file", file]);
    }
    let Some(mut release) = Release::start("127.77.1.3", &["repair"], &more).await? else {
        return Ok(());
    };
    let client = release.plane.client().await?;
    let nodes = Api::all(client.clone());
    for node in ["gpu-1", "gpu-2"] {
        boots(&nodes, node, "boot-1").await?;
    }
    let before = shape(&release.node().await?);
    release.pod_with_a_gpu().await?;
    for second in 0..2 {
        release.mild(second).await?;
    }
    release.rotated().await?;
    release.authority_returns().await?;
    release.hands_over().await?;
    release.plane.namespace("late").await?;
    let late = testkit::pod("late", "late").on("gpu-1");
    late.create(&client).await?;

    release.dies_before_the_answer().await?;
    release.reboots("boot-2").await?;
    release.has_state("remediation-succeeded").await?;
    release.breaker_trips_and_is_closed().await?;
    release.gpu_is_marked().await?;
    release.is_back(&before).await?;

    // A fault that is over while the reboot is under way: gpuwarden looks whether it has begun.
    send_to(&release.agent, vec![event("gpu-1", "0")]).await?;
    release.has_state("remediating").await?;
    release.is_back(&before).await?;
    // What has ended is deleted after its time.
    for written in [
        "get rebootnodes janitor.dgxc.nvidia.com",
        "delete rebootnodes janitor.dgxc.nvidia.com",
        "delete externalremediationrequests nvsentinel.dgxc.nvidia.com",
    ] {
        release.has_asked(written).await?;
    }
    check(&release.plane, "gpuwarden-controller", &[]).await
}
